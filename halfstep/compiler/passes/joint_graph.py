"""Compiled networks with batch norms: fewer bytes moved, and a shorter kernel for max pools.

ResNet-50 in O2 at batch 256 on an H200: 34.5 ms a step in place of 36.7. Masks of ReLUs and sums of
branches (relu_masks.py) make 35.2 ms out of 36.7, the max pool's backward pass (max_pool.py) 34.5
out of 35.3; docs/internals/speed.md. To switch it off: a pass of your own in torch's
`joint_custom_post_pass`.

Imported when a program is compiled, not before: torch's compiler is a heavy import.
"""

from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule

from halfstep.compiler.fx import GraphPass
from halfstep.compiler.passes import max_pool, relu_masks

# How many tensors torch's compiler reads to compute a value again before it stores that value.
# Ours is higher: a value used twice is computed twice, from a gradient, a norm's input and four
# small tensors.
TORCH_MAX_READS = 4
MAX_READS = 6


class JointGraphPass(GraphPass):
    """Rewrites forward and backward together, before torch decides what is saved between them."""

    def __call__(self, graph: Graph) -> None:
        relu_masks.rewrite(graph, self.device)
        max_pool.rewrite(graph, self.device)


def has_batch_norm(graph: GraphModule) -> bool:
    """Whether a network's graph has batch norms. Where it has none, torch's settings stay."""
    return any(getattr(node.target, "__name__", "") == "batch_norm" for node in graph.graph.nodes)


def inductor_settings() -> dict[str, Any]:
    """Settings of torch's compiler that suit such networks, except where the user has set them."""
    if inductor_config.realize_reads_threshold != TORCH_MAX_READS:
        return {}
    return {"realize_reads_threshold": MAX_READS}


def decompositions() -> dict[Any, Any]:
    """torch's table without a max pool's backward pass, which max_pool.py replaces.

    From torch 2.13 on, that entry compiles to sums whose order differs from run to run.
    """
    table = dict(select_decomp_table())
    table.pop(torch.ops.aten.max_pool2d_with_indices_backward.default, None)
    return table
