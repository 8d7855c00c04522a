"""Half arithmetic at fp32 speed on CPUs without half units: round(fp32 product of the low operands).

That is what tensor cores compute: low operands, fp32 accumulation, one rounding. Autograd differentiates the casts, so
the backward products are formed the same way and each gradient is rounded once.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FUNCTIONS: list[Any] = [
    *(F.linear, F.bilinear, F.scaled_dot_product_attention, torch.einsum),
    *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    *(torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.addmv, torch.addbmm, torch.baddbmm),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.mv),
    *(Tensor.addmm, Tensor.addmv, Tensor.addbmm, Tensor.baddbmm),
]
PRODUCTS: frozenset[Any] = frozenset(_FUNCTIONS)
"""The functions whose products are formed in fp32; every other function runs torch's own kernel."""


def has_native(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies `dtype` in hardware, by the instruction sets torch reports."""
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_amx_fp16_supported()


class FastHalf(TorchFunctionMode):
    """While active, products of low CPU tensors are round(fp32 product). With `cast`, operands are rounded first."""

    def __init__(self, low: torch.dtype, *, cast: bool = False) -> None:
        super().__init__()
        self.low, self.cast = low, cast

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS:
            return func(*args, **kwargs)
        if self.cast:
            mine = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == self.low
            return self._autocast(func, args, kwargs) if mine else func(*args, **kwargs)
        if not any(_is(a, self.low) for a in args):
            return func(*args, **kwargs)
        return _in_fp32(func, args, kwargs, self.low)

    def _autocast(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """autocast's rule for its low list, done here so that the product does not reach torch's half kernel."""
        low = [self._round(a) for a in args]
        torch.set_autocast_enabled("cpu", False)  # the fp32 product must not be cast again
        try:
            return _in_fp32(func, tuple(low), {k: self._round(v) for k, v in kwargs.items()}, self.low)
        finally:
            torch.set_autocast_enabled("cpu", True)

    def _round(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._round(v) for v in value)
        return value.to(self.low) if _is(value, torch.float32) else value  # fp64 is left alone, as autocast does


def _in_fp32(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], low: torch.dtype) -> Any:
    wide = [_widen(a, low) for a in args]
    out = func(*wide, **{k: _widen(v, low) for k, v in kwargs.items()})
    return out.to(low) if _is(out, torch.float32) else out


def _widen(value: Any, low: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_widen(v, low) for v in value)
    return value.float() if _is(value, low) else value


def _is(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype and value.device.type == "cpu"
