"""pad_mode="same" of MindSpore and TensorFlow, which torch does not have for strides above 1.

The output has ⌈size / stride⌉ pixels. If the padding is odd, the extra pixel comes last.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Padding before and after one axis; the larger half comes after.

    Together it is (⌈size / stride⌉ − 1) · stride + kernel − size.
    """
    output_size = -(-size // stride)  # rounded up
    total = max((output_size - 1) * stride + kernel - size, 0)
    before = total // 2
    return before, total - before


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """The last two dimensions, padded for a window of `kernel` that moves by `stride`."""
    top, bottom = same_padding(x.shape[-2], kernel, stride)
    left, right = same_padding(x.shape[-1], kernel, stride)
    return F.pad(x, (left, right, top, bottom), value=value)


class SameConv2d(nn.Conv2d):
    """A convolution with "same" padding, for a square kernel and stride.

    The padding depends on the image: where its side is even, there is one pixel more at the end.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_same(x, self.kernel_size[0], self.stride[0]))


class SameMaxPool2d(nn.MaxPool2d):
    """Max pooling with "same" padding. The padding is −inf, so that it is never the maximum."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.kernel_size, int)
        assert isinstance(self.stride, int)
        padded = pad_same(x, self.kernel_size, self.stride, value=float("-inf"))
        out: Tensor = super().forward(padded)
        return out
