"""The kernel of `unpool`, in a module of its own: only torch's builds for CUDA bring Triton."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def spread(
    grad, offsets, out, height, width, pooled_h, pooled_w, blocks,
    CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of one row of pixels: the sum, in float32, over the windows that cover a pixel and took it."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    image, h = row // height, row % height
    w, c = at // CHANNELS, at % CHANNELS
    inside = at < width * CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(WH):
        oh = (h + PH) // SH - (WH - 1 - i)  # the windows that may cover it, first to last
        kh = h + PH - oh * SH
        if (oh >= 0) & (oh < pooled_h) & (kh < KH):
            for j in tl.static_range(WW):
                ow = (w + PW) // SW - (WW - 1 - j)
                kw = w + PW - ow * SW
                there = inside & (ow >= 0) & (ow < pooled_w) & (kw < KW)
                place = (image * pooled_h + oh) * pooled_w * CHANNELS + ow * CHANNELS + c
                taken = tl.load(offsets + place, there, other=-1) == kh * KW + kw
                total += tl.where(
                    taken, tl.load(grad + place, there, other=0.0).to(tl.float32), 0.0
                )
    tl.store(out + row * width * CHANNELS + at, total.to(out.dtype.element_ty), inside)
