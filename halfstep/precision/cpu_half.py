"""Half arithmetic at fp32 speed on CPUs without half units: round(fp32 product of low operands).

Tensor cores compute the same: low operands, fp32 accumulation, one rounding. Autograd
differentiates the casts, so that the products of the backward pass are formed in the same way and
each gradient is rounded once. Switched off by `kernels="torch"`.

Under autocast, torch's op list for the CPU decides what is low, not this module: see `is_lowered`.
"""

from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_CONVOLUTIONS: list[Any] = [
    *(F.conv1d, F.conv2d, F.conv3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
]
_MATRIX_PRODUCTS: list[Any] = [
    *(torch.matmul, torch.mm, torch.bmm, torch.mv),
    *(torch.addmm, torch.addmv, torch.addbmm, torch.baddbmm),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.mv),
    *(Tensor.addmm, Tensor.addmv, Tensor.addbmm, Tensor.baddbmm),
]
_LAYERS: list[Any] = [
    *(F.linear, F.bilinear, F.scaled_dot_product_attention, torch.einsum, torch.lstm),
]
PRODUCTS: frozenset[Any] = frozenset([*_CONVOLUTIONS, *_MATRIX_PRODUCTS, *_LAYERS])
"""The functions whose products are formed in fp32; every other function runs torch's own kernel."""


def _list_lowered() -> frozenset[Any]:
    """The products that torch's autocast rounds on a CPU: those that it registers a kernel for."""
    listed = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    ops = {name.removeprefix("aten::").partition(".")[0] for name in listed}
    products = [*_CONVOLUTIONS, *_MATRIX_PRODUCTS, F.linear, F.scaled_dot_product_attention]
    # Tensor.__matmul__ and __rmatmul__ are matmul.
    return frozenset(
        func for func in products if func.__name__.strip("_").replace("rmatmul", "matmul") in ops
    )


LOWERED: frozenset[Any] = _list_lowered()
"""Products whose operands torch's autocast rounds, whatever their shapes (mv and addmv are not)."""
COMPOSITES: frozenset[Any] = frozenset([F.multi_head_attention_forward, torch.autograd.backward])
"""Python functions that call products; the mode has to see each of these calls.

backward is among them because activation checkpointing repeats forward passes in it.
"""


def has_native(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies `dtype` in hardware, by the instruction sets torch reports."""
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_amx_fp16_supported()


class FastHalf(TorchFunctionMode):
    """While active, products of low CPU tensors are round(fp32 product).

    With `cast`, for use inside torch's autocast, it also rounds operands where autocast does.
    """

    def __init__(self, low: torch.dtype, *, cast: bool = False) -> None:
        super().__init__()
        self.low = low
        self.cast = cast

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in COMPOSITES:
            with self:
                return without_dispatch(func)(*args, **kwargs)
        if func not in PRODUCTS:
            return func(*args, **kwargs)

        if self.cast:
            if not self._is_autocasting() or not self._is_low_product(func, args, kwargs):
                return func(*args, **kwargs)
            # autocast must not cast the operands of the fp32 product again.
            with torch.autocast("cpu", enabled=False):
                return self._rounded_product(func, args, kwargs)

        if any(_is_cpu_tensor_of(arg, self.low) for arg in (*args, *kwargs.values())):
            return self._rounded_product(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_autocasting(self) -> bool:
        """Whether autocast is on for the CPU, with this low dtype."""
        return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == self.low

    def _is_low_product(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether torch's autocast would run this product low: it lowers it, or it came in low."""
        if is_lowered(func, args, kwargs):
            return True
        dtypes = {tensor.dtype for tensor in _cpu_floats((args, kwargs))}
        return dtypes == {self.low}

    def _rounded_product(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """round(fp32 product of the low operands)."""
        out = kwargs.pop("out", None)
        fp32_args = [self._to_fp32(arg) for arg in args]
        if kwargs:
            result = func(*fp32_args, **{key: self._to_fp32(arg) for key, arg in kwargs.items()})
        else:
            result = func(*fp32_args)

        # Most functions return a tensor, an LSTM (out, h, c).
        if not isinstance(result, Tensor):
            return tree_map(self._round_leaf, result)
        if result.dtype == torch.float32:
            result = result.to(self.low)
        return result if out is None else out.copy_(result)

    def _round_leaf(self, value: Any) -> Any:
        is_fp32 = _is_cpu_tensor_of(value, torch.float32)
        return value.to(self.low) if is_fp32 else value

    def _to_fp32(self, value: Any) -> Any:
        """A low operand as fp32; with `cast`, rounded to low first where autocast would do that.

        autocast rounds every floating dtype but float64.
        """
        if isinstance(value, (list, tuple)):
            return type(value)(self._to_fp32(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        is_cpu_float = value.device.type == "cpu" and value.is_floating_point()
        if not is_cpu_float or value.dtype == torch.float64:
            return value
        operand = value.to(self.low) if self.cast else value
        return operand.float() if operand.dtype == self.low else operand


# What torch's autocast lowers


def is_lowered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch's CPU autocast rounds the operands of this product.

    That is so for the products of its list, for an einsum that is nothing else than one such
    product, and for an LSTM that runs in one kernel. A product that writes into `out` is in no
    list.
    """
    if "out" in kwargs:
        return False
    if func is torch.einsum:
        return not kwargs and _is_one_product(*args)
    if func is torch.lstm:
        return not kwargs and _runs_in_one_kernel(*args)
    return func in LOWERED


def _is_one_product(equation: Any, *operands: Any) -> bool:
    """Whether an einsum is one batched product of two tensors, which torch gives to bmm.

    Others take sums, diagonals or elementwise products too, which torch leaves in float32.
    """
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    is_two_floats = len(operands) == 2 and len(list(_cpu_floats(operands))) == 2
    if not isinstance(equation, str) or not is_two_floats:
        return False
    if any(tensor.dtype == torch.float64 for tensor in operands):
        return False

    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    labels = [term.replace("...", "") for term in terms]
    if len(terms) != 2 or any(len(set(term)) != len(term) for term in labels):
        return False
    if not arrow:
        # Labels that appear once are the output, with the ellipsis in front.
        output = "..." + "".join(set(labels[0]) ^ set(labels[1]))
    if "..." in inputs and "..." not in output:
        return False

    summed = set(labels[0] + labels[1]) - set(output)
    sizes = [_label_sizes(*pair) for pair in zip(terms, operands, strict=True)]
    return bool(summed) and all(size.get(label, 1) != 1 for label in summed for size in sizes)


def _label_sizes(term: str, operand: Tensor) -> dict[str, int]:
    """Label → size of its dimension in this operand, for the labels outside of an ellipsis."""
    before, _, after = term.partition("...")
    shape = operand.shape
    sizes = dict(zip(before, shape, strict=False))
    sizes.update(zip(after, shape[operand.ndim - len(after) :], strict=False))
    return sizes


def _runs_in_one_kernel(*args: Any) -> bool:
    """Whether these arguments of torch.lstm go to oneDNN, whose kernel torch's autocast lowers.

    It takes no packed sequence, no projections and no float16. Others are made of products of
    their own.
    """
    is_packed = isinstance(args[1], Tensor)  # the sizes of its batches
    if is_packed or len(args) != 9:
        return False
    _, _, weights, has_biases, layers, _, _, bidirectional, _ = args
    if any(tensor.dtype == torch.float16 for tensor in _cpu_floats(args)):
        return False
    weights_per_layer = 4 if has_biases else 2
    layers_in_all = 2 * layers if bidirectional else layers
    has_projections = len(weights) != weights_per_layer * layers_in_all
    return not has_projections


# Operands


def _cpu_floats(values: Any) -> Iterator[Tensor]:
    """The floating CPU tensors in the arguments of a product, which nest lists at most."""
    if isinstance(values, Tensor):
        if values.device.type == "cpu" and values.is_floating_point():
            yield values
    elif isinstance(values, dict):
        yield from _cpu_floats(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _cpu_floats(value)


def _is_cpu_tensor_of(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype and value.device.type == "cpu"


@cache
def without_dispatch(func: FunctionType) -> Callable[..., Any]:
    """A copy of a Python function that runs its body, without handing itself to the mode again."""
    checks = [name for name in func.__code__.co_names if name.startswith("has_torch_function")]
    never = {name: lambda *args: False for name in checks}
    copy = FunctionType(
        func.__code__,
        {**func.__globals__, **never},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
