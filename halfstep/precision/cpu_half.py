"""Half arithmetic at fp32 speed on CPUs without half units: round(fp32 product of the low operands).

That is what tensor cores compute: low operands, fp32 accumulation, one rounding. Autograd differentiates the casts, so
the backward products are formed the same way and each gradient is rounded once.
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

_FUNCTIONS: list[Any] = [
    *(F.linear, F.bilinear, F.scaled_dot_product_attention, torch.einsum, torch.lstm),
    *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
    ),
    *(
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.mv,
        torch.addmm,
        torch.addmv,
        torch.addbmm,
        torch.baddbmm,
    ),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.mv),
    *(Tensor.addmm, Tensor.addmv, Tensor.addbmm, Tensor.baddbmm),
]
PRODUCTS: frozenset[Any] = frozenset(_FUNCTIONS)
"""The functions whose products are formed in fp32; every other function runs torch's own kernel."""
COMPOSITES: frozenset[Any] = frozenset([F.multi_head_attention_forward, torch.autograd.backward])
"""Python functions with products inside, which are to be seen one by one; in backward, those of forwards run again."""


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
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS:
            if func in COMPOSITES:
                with self:
                    return _opened(func)(*args, **kwargs)
            return func(*args, **kwargs)
        if self.cast:
            mine = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == self.low
            return self._autocast(func, args, kwargs) if mine else func(*args, **kwargs)
        if any(_is(a, self.low) for a in (*args, *kwargs.values())):
            return self._product(func, args, kwargs)
        return func(*args, **kwargs)

    def _autocast(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """autocast's rule for its low list, done here so that the product does not reach torch's half kernel."""
        with torch.autocast("cpu", enabled=False):  # the fp32 product must not be cast again
            return self._product(func, args, kwargs)

    def _product(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """round(fp32 product of the low operands)."""
        out = kwargs.pop("out", None)
        wide = [self._widen(a) for a in args]
        result = (
            func(*wide, **{k: self._widen(v) for k, v in kwargs.items()}) if kwargs else func(*wide)
        )
        if isinstance(result, Tensor):
            result = result.to(self.low) if result.dtype == torch.float32 else result
            return result if out is None else out.copy_(result)
        return tree_map(
            lambda r: r.to(self.low) if _is(r, torch.float32) else r, result
        )  # an LSTM's (out, h, c)

    def _widen(self, value: Any) -> Any:
        """An operand, rounded to low where autocast would (every floating dtype but fp64), as fp32."""
        if not isinstance(value, Tensor):
            return (
                type(value)(self._widen(v) for v in value)
                if isinstance(value, (list, tuple))
                else value
            )
        if (
            value.device.type != "cpu"
            or not value.is_floating_point()
            or value.dtype == torch.float64
        ):
            return value
        low = value.to(self.low) if self.cast else value
        return low.float() if low.dtype == self.low else low


def _is(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype and value.device.type == "cpu"


@cache
def _opened(func: FunctionType) -> Callable[..., Any]:
    """A copy of a Python function that does its work instead of handing itself to the mode once more."""
    names = [n for n in func.__code__.co_names if n.startswith("has_torch_function")]
    scope = {**func.__globals__, **{n: lambda *args: False for n in names}}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
