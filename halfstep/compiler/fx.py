"""What the passes over graphs of torch's compiler share: their base class, and new nodes.

Imported when a program is compiled, not before: torch's compiler is a heavy import.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from halfstep import kernels

# A compiled program depends on every file in these folders.
SOURCE_FOLDERS = (Path(__file__).parent, Path(kernels.__path__[0]))


class GraphPass(CustomGraphPass):
    """A pass over the graphs of programs on one type of device. Subclasses define `__call__`."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    def uuid(self) -> bytes:
        """The key of this pass in torch's cache of compiled programs.

        It follows from the pass, the device and the text of all files of compiler/ and kernels/:
        with a key that did not change with them, torch would go on using old programs.
        """
        return get_hash_for_files(_source_files(), f"{type(self).__name__} {self.device}")


@cache
def _source_files() -> tuple[str, ...]:
    files = [path for folder in SOURCE_FOLDERS for path in folder.rglob("*.py")]
    return tuple(str(path) for path in sorted(files))


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Adds a call to the graph, with the shape, strides and dtype of its result as metadata.

    Later passes read these from `node.meta["val"]`, a tensor without memory.
    """
    node = graph.call_function(target, args, kwargs)
    fake_args: Any = map_arg(args, lambda arg: arg.meta["val"])
    first_arg: Any = tree_leaves(fake_args)[0]
    with torch.no_grad(), first_arg.fake_mode:
        node.meta["val"] = target(*fake_args, **kwargs)
    return node
