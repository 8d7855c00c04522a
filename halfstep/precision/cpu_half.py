"""Half arithmetic at fp32 speed on CPUs without half units: round(fp32 product of low operands).

Tensor cores compute the same: low operands, fp32 accumulation, one rounding. Autograd
differentiates the casts, so that the products of the backward pass are formed in the same way and
each gradient is rounded once. Switched off by `kernels="torch"`.
"""

from collections.abc import Callable
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

    With `cast`, it does autocast's work too: operands are rounded to the low dtype first.
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
            if not self._is_autocasting():
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
