"""The weight gradients of several linear layers in one kernel.

With a small batch, a weight gradient A·B has a short K (the batch) and takes a few microseconds on
a part of the chip, one after the other; nothing waits for them but the update. Together they are
one kernel, which also makes the bias gradients (the row sums of A), casts the results, and applies
the ReLU's mask of a first layer, whose gradient goes no further.

The benchmark MLP, 5 epochs on an H200: 0.286 s in fp32 in place of 0.342, 0.239 in fp16 in place of
0.247, 0.249 mixed in place of 0.291 (docs/internals/speed.md). To switch it off: a pass of your own
in torch's `post_grad_custom_pre_pass`.

Imported when a program is compiled, not before. Importing it registers torch.ops.halfstep.leaves.
"""

from collections.abc import Callable
from math import ceil
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.library import Library

from halfstep.compiler.fx import call
from halfstep.kernels.launch import MORE_COMPILED_KERNELS, SUMS_MAY_DIFFER, launch, run_or_fall_back

# The longest K: beyond, a tile takes our kernel longer than the product takes torch's.
MAX_K = 256

# Tiles in all: beyond, each product fills the chip by itself.
MAX_TILES = 1024

# Products of one kernel.
MAX_PRODUCTS = 16

# Rows and columns of the output that one program computes, and elements of K that it takes at a
# time: fewer in float32, which would not fit into registers.
TILE_ROWS = 32
TILE_COLUMNS = 64
TILE_K = 64
TILE_K_FP32 = 16
WARPS = 4

# Offsets in memory are 32-bit numbers in the kernel.
MAX_OFFSET = 2**31

_aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default
_VIEWS = (_aten.reshape.default, _aten.view.default)
_TRANSPOSES = (_aten.permute.default, _aten.t.default)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Whether the kernel could be compiled, by all that it is compiled for.
_WORKS: dict[Any, bool] = {}

_library = Library("halfstep", "FRAGMENT")
_library.define(
    "leaves(Tensor[] lefts, Tensor[] rights, Tensor?[] masks, bool[] summed, ScalarType dtype)"
    " -> Tensor[]"
)


# --- The graph


class OutputGradient(NamedTuple):
    """A gradient that the graph returns.

    `source` computes it, a product or a sum; `result` is what is returned: `source` itself, a view
    of it or a cast.
    """

    source: Node
    result: Node


def rewrite(
    graph: Graph, device: str, is_split: Callable[[Node], bool] = lambda product: False
) -> None:
    """Joins the products on `device` that are only returned, themselves or through one cast.

    `is_split` says of a product that another pass will split it along K. The kernel that adds up
    its parts can apply a ReLU's mask at no cost, so we leave the mask there.
    """
    by_kind: dict[Any, list[OutputGradient]] = {}
    for product in graph.find_nodes(op="call_function", target=_aten.mm.default):
        result = _returned_node(product)
        if result is not None and _fits(product, device):
            value = product.meta["val"]
            kind = (value.device, value.dtype, result.meta["val"].dtype)
            by_kind.setdefault(kind, []).append(OutputGradient(product, result))

    for products in by_kind.values():
        tiles = sum(_count_tiles(*product.source.meta["val"].shape) for product in products)
        if 1 < len(products) <= MAX_PRODUCTS and tiles <= MAX_TILES:
            _replace(graph, products, is_split)


def _returned_node(source: Node) -> Node | None:
    """The node, or the cast that alone uses it, if it is only returned; else None."""
    users = list(source.users)
    result = source
    if len(users) == 1 and users[0].target is _cast:
        result = users[0]
    is_returned = bool(result.users) and all(user.op == "output" for user in result.users)
    return result if is_returned and result.meta["val"].dtype in _FLOATS else None


def _fits(product: Node, device: str) -> bool:
    """Whether the kernel takes this product: its device, dtype, K, and offsets in memory."""
    left: Tensor = product.args[0].meta["val"]  # type: ignore[union-attr]
    right: Tensor = product.args[1].meta["val"]  # type: ignore[union-attr]
    if not _has_32_bit_offsets(left) or not _has_32_bit_offsets(right):
        return False
    if left.device.type != device or left.dtype not in _FLOATS:
        return False
    return 0 < left.shape[1] <= MAX_K and right.shape[1] > 0


def _has_32_bit_offsets(t: Tensor) -> bool:
    """Whether its shape is known and its last tile ends below MAX_OFFSET."""
    if not all(isinstance(n, int) for n in (*t.shape, *t.stride())):
        return False
    # A tile may reach beyond the end by up to TILE_COLUMNS in each dimension.
    sizes_and_strides = zip(t.shape, t.stride(), strict=True)
    last_offset = sum((size + TILE_COLUMNS) * stride for size, stride in sizes_and_strides)
    return last_offset < MAX_OFFSET


def _count_tiles(m: int, n: int) -> int:
    return ceil(m / TILE_ROWS) * ceil(n / TILE_COLUMNS)


def _layer_gradient(product: Node) -> Any:
    """The gradient [batch, M] whose transpose is the product's left operand, or None."""
    left: Any = product.args[0]
    is_transpose = left.target in _TRANSPOSES and left.args[1:] in ((), ([1, 0],))
    return left.args[0] if is_transpose else None


def _bias_gradient(product: Node, dtype: torch.dtype) -> OutputGradient | None:
    """The sum of a product's gradient over the batch, if the graph returns it in `dtype`."""
    gradient = _layer_gradient(product)
    if gradient is None:
        return None
    for source in gradient.users:
        if source.target is not _aten.sum.dim_IntList or source.kwargs or source.args[1] != [0]:
            continue
        # torch's compiler keeps the summed dimension, and removes it by a view.
        users = list(source.users)
        summed = source
        if len(users) == 1 and users[0].target in _VIEWS:
            summed = users[0]
        result = _returned_node(summed)
        if result is None:
            continue
        value = result.meta["val"]
        if value.dtype == dtype and value.dim() == 1:
            return OutputGradient(source, result)
    return None


def _relu_mask(
    product: Node, joined: set[Node], is_split: Callable[[Node], bool]
) -> tuple[Node, Node] | None:
    """g and h, where the product's gradient is where(h <= 0, 0, g) and our kernel can apply it.

    That is so if only `joined` nodes use it, and g and h are in memory anyway. h may also be the
    comparison itself, a bool.
    """
    masked = _layer_gradient(product)
    if masked is None or masked.target is not _aten.where.self:
        return None
    if not all(_is_joined(user, joined) for user in masked.users):
        return None

    condition, zero, g = masked.args
    if condition.target is _aten.le.Scalar and condition.args[1] == 0:
        h = condition.args[0]
        mask_dtypes: tuple[torch.dtype, ...] = _FLOATS
    else:
        h = condition
        mask_dtypes = (torch.bool,)
    if zero.target is not _aten.full.default or zero.args[1] != 0:
        return None

    g_is_product = g.target is _aten.mm.default and not is_split(g)
    if h.op != "placeholder" or not (g.op == "placeholder" or g_is_product):
        return None

    masked_value, g_value, h_value = (node.meta["val"] for node in (masked, g, h))
    if h_value.dtype not in mask_dtypes or g_value.dtype != masked_value.dtype:
        return None
    if not masked_value.shape == g_value.shape == h_value.shape:
        return None
    if not _has_32_bit_offsets(g_value) or not _has_32_bit_offsets(h_value):
        return None
    return g, h


def _is_joined(user: Node, joined: set[Node]) -> bool:
    """Whether it is a sum that we join, or a transpose that is only our products' left operand."""
    if user.target is _aten.sum.dim_IntList:
        return user in joined
    if user.target not in _TRANSPOSES:
        return False
    return all(product in joined and product.args[1] is not user for product in user.users)


def _replace(
    graph: Graph, products: list[OutputGradient], is_split: Callable[[Node], bool]
) -> None:
    """Replaces products, their bias gradients and masks by one call of halfstep.leaves."""
    dtype = products[0].result.meta["val"].dtype

    # Bias gradients: each once, where several products share a gradient.
    product_of_bias: dict[OutputGradient, OutputGradient] = {}
    for product in products:
        bias = _bias_gradient(product.source, dtype)
        if bias is not None:
            product_of_bias.setdefault(bias, product)
    has_bias = [product in product_of_bias.values() for product in products]
    gradients = [*products, *product_of_bias]
    joined = {gradient.source for gradient in gradients}
    masks = [_relu_mask(product.source, joined, is_split) for product in products]

    # The call stands right behind the last node that it replaces. Later on, torch may overwrite
    # inputs of the graph.
    last = next(node for node in reversed(graph.nodes) if node in joined)
    with graph.inserting_before(last.next):
        lefts: list[Any] = []
        mask_args: list[Node | None] = []
        for product, mask in zip(products, masks, strict=True):
            if mask is None:
                lefts.append(product.source.args[0])
                mask_args.append(None)
            else:
                g, h = mask
                lefts.append(call(graph, _aten.permute.default, g, [1, 0]))
                mask_args.append(call(graph, _aten.permute.default, h, [1, 0]))
        rights = [product.source.args[1] for product in products]
        arguments = (lefts, rights, mask_args, has_bias, dtype)
        joint_call = graph.call_function(torch.ops.halfstep.leaves.default, arguments)
        joint_call.meta["val"] = [gradient.result.meta["val"] for gradient in gradients]
        results = [call(graph, getitem, joint_call, i) for i in range(len(gradients))]

    for gradient, result in zip(gradients, results, strict=True):
        gradient.result.replace_all_uses_with(result)
        _erase_unused(graph, gradient.result)


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erases a node that nothing uses, and the inputs that were there for it alone."""
    if node.op != "call_function" or node.users:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for source in inputs:
        _erase_unused(graph, source)


# --- The operation torch.ops.halfstep.leaves


def compute_weight_grads(
    lefts: list[Tensor],
    rights: list[Tensor],
    masks: list[Tensor | None],
    summed: list[bool],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Each A·B, then the row sums of each A that is `summed`; on CUDA, by the kernel.

    A is 0 where its mask, a ReLU's output, is ≤ 0. Sums are float32, rounded to the dtype of A and
    then to `dtype`. torch's own operations do it where Triton fails.
    """
    products = [
        a.new_empty(a.shape[0], b.shape[1], dtype=dtype) for a, b in zip(lefts, rights, strict=True)
    ]
    row_sums: list[Tensor] = []
    # The kernel takes a pointer for each product; it does not use these where there is no mask or
    # no sum.
    mask_pointers: list[Tensor] = []
    sum_pointers: list[Tensor] = []
    sizes: list[int] = []
    for a, b, mask, product, is_summed in zip(lefts, rights, masks, products, summed, strict=True):
        mask_pointer = a if mask is None else mask
        mask_pointers.append(mask_pointer)
        if is_summed:
            row_sums.append(a.new_empty(a.shape[0], dtype=dtype))
            sum_pointers.append(row_sums[-1])
        else:
            sum_pointers.append(product)
        # In the order in which the kernel reads them: M, N, K, strides, two flags.
        sizes += [a.shape[0], b.shape[1], a.shape[1]]
        sizes += [*a.stride(), *b.stride(), *mask_pointer.stride()]
        sizes += [int(mask is not None), int(is_summed)]
    device = lefts[0].device

    def run_kernel() -> None:
        from halfstep.kernels.backward_triton import weight_grad_tiles

        arguments = {
            "lefts": tuple(lefts),
            "rights": tuple(rights),
            "masks": tuple(mask_pointers),
            "outs": tuple(products),
            "row_sums": tuple(sum_pointers),
            "SIZES": tuple(sizes),
            "PRODUCT_COUNT": len(products),
            "TILE_ROWS": TILE_ROWS,
            "TILE_COLUMNS": TILE_COLUMNS,
            "TILE_K": TILE_K_FP32 if lefts[0].dtype == torch.float32 else TILE_K,
        }
        programs = sum(_count_tiles(*product.shape) for product in products)
        launch(device, [(weight_grad_tiles, programs, arguments, WARPS)])

    # Triton compiles anew for other dtypes, sizes, and pointers that are not aligned to 16 bytes.
    tensors = (*lefts, *rights, *mask_pointers)
    pointers = tuple((t.dtype, t.data_ptr() % 16 == 0) for t in tensors)
    key = (device, dtype, pointers, tuple(sizes))
    if run_or_fall_back(_WORKS, key, run_kernel, MORE_COMPILED_KERNELS, SUMS_MAY_DIFFER):
        return [*products, *row_sums]
    return _weight_grads_by_torch(lefts, rights, masks, summed, dtype)


def _weight_grads_by_torch(
    lefts: list[Tensor],
    rights: list[Tensor],
    masks: list[Tensor | None],
    summed: list[bool],
    dtype: torch.dtype,
) -> list[Tensor]:
    """As compute_weight_grads, by torch's own operations."""
    masked = [_apply_mask(a, mask) for a, mask in zip(lefts, masks, strict=True)]
    products = [torch.mm(a, b) for a, b in zip(masked, rights, strict=True)]
    row_sums = [
        a.sum(1, dtype=torch.float32).to(a.dtype)
        for a, is_summed in zip(masked, summed, strict=True)
        if is_summed
    ]
    return [t.to(dtype) for t in (*products, *row_sums)]


def _apply_mask(a: Tensor, mask: Tensor | None) -> Tensor:
    """A gradient, 0 where its ReLU passed nothing: the mask is True or its output is ≤ 0.

    Behind an output of NaN the gradient passes, as in torch.
    """
    if mask is None:
        return a
    is_blocked = mask if mask.dtype == torch.bool else mask <= 0
    return torch.where(is_blocked, 0, a)


_library.impl("leaves", _weight_grads_by_torch, "CompositeExplicitAutograd")
_library.impl("leaves", compute_weight_grads, "CUDA")
