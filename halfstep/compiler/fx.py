"""Nodes that a rewriting adds to a graph of torch's compiler."""

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node with the shape, strides and dtype of its result, which later passes read."""
    node = graph.call_function(target, args, kwargs)
    known: Any = map_arg(args, lambda arg: arg.meta["val"])
    first: Any = tree_leaves(known)[0]
    with torch.no_grad(), first.fake_mode:
        node.meta["val"] = target(*known, **kwargs)
    return node
