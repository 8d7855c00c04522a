"""Norms, ReLUs and sums of branches whose backward pass reads fewer bytes: same masks, same sums.

A norm's backward pass reads the norm's input twice, to sum over it and to use the sums. The mask of
a ReLU behind the norm follows from that input, too; torch reads it from the ReLU's output, one more
tensor each time. And a gradient that is the sum of two branches would be added again, from both,
wherever it is used.

ResNet-50 in O2 at batch 256 moves 59.2 GB a step in generated kernels in place of 66.8, and takes
35.2 ms in place of 36.7 (an H200, docs/internals/speed.md). To switch it off: a pass of your own in
torch's `joint_custom_post_pass`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

_aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default
_AFFINE_OPS = {_aten.mul.Tensor, _aten.add.Tensor, _aten.sub.Tensor, _cast}


def rewrite(graph: Graph, device: str) -> None:
    """Rewrites the graph of forward and backward together, for tensors on this type of device."""
    # Masks: relu(x) <= 0 exactly where x <= 0, also for NaN, so the mask can be taken from x.
    for mask in graph.find_nodes(op="call_function", target=_aten.le.Scalar):
        relu, limit = mask.args
        if _is_on(relu, device) and _is_mask_behind_norm(relu, limit):
            mask.replace_input_with(relu, relu.args[0])

    # Sums of two branches that are used more than once: stored, not computed again.
    for masked in graph.find_nodes(op="call_function", target=_aten.where.self):
        is_shared = len(_users_through_casts(masked)) > 1
        if is_shared and _is_on(masked, device) and _is_sum_of_two(masked.args[2]):
            masked.meta["inductor_realize_to_strides"] = True  # torch's mark for "store this"


def _is_on(node: Any, device: str) -> bool:
    """Whether a node's result is a tensor on this type of device, and not a single number."""
    if not _shape(node):
        return False
    return bool(node.meta["val"].device.type == device)


def _shape(node: Any) -> torch.Size | None:
    """The shape of a node's result, or None where that is no tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.shape if isinstance(value, Tensor) else None


def _full_size_inputs(node: Node) -> set[Node]:
    """The inputs that have the shape of the node's own result."""
    shape = _shape(node)
    return {source for source in node.all_input_nodes if _shape(source) == shape}


def _users_through_casts(node: Node) -> set[Node]:
    """The nodes that use this one, or a cast of it."""
    users: set[Node] = set()
    for user in node.users:
        if user.target is _cast:
            users.update(user.users)
        else:
            users.add(user)
    return users


def _is_mask_behind_norm(relu: Node, limit: float) -> bool:
    """Whether `relu <= limit` is the mask of a ReLU of a norm's output."""
    is_relu_mask = limit == 0 and relu.target is _aten.relu.default
    return is_relu_mask and _is_norm_output(relu.all_input_nodes[0])


def _is_norm_output(node: Node) -> bool:
    """Whether it is a tensor whose variance is taken, times and plus smaller tensors."""
    while not _has_variance_taken(node):
        inputs = _full_size_inputs(node)
        if node.target not in _AFFINE_OPS or len(inputs) != 1:
            return False
        node = inputs.pop()
    return True


def _has_variance_taken(node: Node) -> bool:
    users = _users_through_casts(node)
    return any(user.target is _aten.var_mean.correction for user in users)


def _is_sum_of_two(node: Any) -> bool:
    """Whether it adds two tensors of its own shape."""
    if not isinstance(node, Node) or node.target is not _aten.add.Tensor:
        return False
    return len(_full_size_inputs(node)) == 2
