"""Networks with batch norms in fewer bytes and shorter kernels: what is rewritten in forward and backward together.

Imported when a program is compiled, not before: torch's compiler is a heavy import.
"""

from typing import Any

import torch
import torch._inductor.config as config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule

from halfstep.compiler import fx as nodes
from halfstep.compiler.passes import joint_graph__masks as masks
from halfstep.compiler.passes import joint_graph__pool as pool

# How many reads a value may need before torch's compiler writes it: its own number, which a user may have changed, and
# ours: values used twice are made twice, from a gradient, a norm's input and four small ones.
TORCHS_READS, READS = 4, 6


class Joint(CustomGraphPass):
    """Rewrites the graph of forward and backward together, before torch decides what is saved between them."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    def __call__(self, graph: Graph) -> None:
        for room in (masks, pool):
            room.rewrite(graph, self.device)

    def uuid(self) -> bytes:
        """What torch's cache of compiled programs knows this pass by: its text and its device."""
        return get_hash_for_files(
            (__file__, masks.__file__, pool.__file__, nodes.__file__), self.device
        )


def normalizes(graph: GraphModule) -> bool:
    """Whether a network's graph has batch norms; where it has none, torch's own settings stay."""
    return any(getattr(node.target, "__name__", "") == "batch_norm" for node in graph.graph.nodes)


def settings() -> dict[str, Any]:
    """Ours, where the user has left torch's."""
    return (
        {"realize_reads_threshold": READS} if config.realize_reads_threshold == TORCHS_READS else {}
    )


def decompositions() -> dict[Any, Any]:
    """torch's, but for a max pool's backward pass: from 2.13 on it would be sums in another order every time."""
    pooled = torch.ops.aten.max_pool2d_with_indices_backward.default
    return {
        operation: made
        for operation, made in select_decomp_table().items()
        if operation is not pooled
    }
