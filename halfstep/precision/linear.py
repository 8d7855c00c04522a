"""A linear layer in half precision at fp32 speed: low operands, fp32 accumulation, one rounding, few passes.

On a CPU the products are cheap and the casts are not: each new buffer is page-faulted in. So the fp32 image of the
rounded weight lives in a buffer that is written again at each forward, and the weight's gradient is rounded in place.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

CHUNK = 1 << 16  # elements rounded at a time: the low copy stays in the cache


def round_(values: Tensor, low: torch.dtype) -> Tensor:
    """float32 values rounded to `low` in place, still stored as float32."""
    flat = values.view(-1)
    scratch = torch.empty(min(CHUNK, flat.numel()), dtype=low)
    for part in flat.split(CHUNK):
        part.copy_(scratch[: part.numel()].copy_(part))
    return values


class Images:
    """fp32 images of rounded weights, one buffer per weight, gone with it. Written anew at each use: never stale."""

    def __init__(self) -> None:
        self._buffers: Any = WeakIdKeyDictionary()

    def of(self, weight: Tensor, low: torch.dtype) -> Tensor:
        """`weight`, rounded to `low` if it is not yet, as float32."""
        master = getattr(weight, "_master", weight)
        with torch.inference_mode(False), torch.no_grad():  # the buffer outlives an inference block
            image: Tensor | None = self._buffers.get(master)
            if image is None or image.shape != weight.shape:
                image = self._buffers[master] = torch.empty(weight.shape)
            image.copy_(weight)
            return image if weight.dtype == low else round_(image, low)


class _Linear(torch.autograd.Function):
    """y = round(x · imageᵀ + bias). A float32 weight's gradient is rounded to the low dtype and kept as float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, image: Tensor, offset: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # autograd refuses a weight modified in between
        ctx.image, ctx.low = image, x.dtype  # not saved by autograd: it may be written again, alike, before backward
        ctx.bias = None if bias is None else bias.dtype
        return F.linear(x.float(), image, offset).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        wide, rows = dy.float(), dy.shape[-1]
        dx = dw = db = None
        if ctx.needs_input_grad[0]:  # create_graph=True: the weight itself, so that it can be differentiated again
            dx = (wide @ (weight.to(ctx.low).float() if torch.is_grad_enabled() else ctx.image)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = _rounded(wide.reshape(-1, rows).t() @ x.float().reshape(-1, x.shape[-1]), weight.dtype, ctx.low)
        if ctx.bias is not None and ctx.needs_input_grad[2]:
            db = _rounded(wide.reshape(-1, rows).sum(0), ctx.bias, ctx.low)
        return dx, dw, db, None, None


def _rounded(grad: Tensor, dtype: torch.dtype, low: torch.dtype) -> Tensor:
    if dtype == low or torch.is_grad_enabled():
        return grad.to(low).to(dtype)
    return round_(grad, low).to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, low: torch.dtype, images: Images) -> Tensor:
    """F.linear on low operands. A weight or bias that is a low copy sends its gradient straight to its fp32 master."""
    offset = None if bias is None else bias.detach().to(low).float()
    target = getattr(weight, "_master", weight)
    out: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x, target, getattr(bias, "_master", bias), images.of(weight, low), offset
    )
    return out
