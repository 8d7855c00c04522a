"""MindSpore's and TensorFlow's pad_mode="same" where torch has none: output n/stride rounded up, the odd pixel last."""

import torch.nn.functional as F
from torch import Tensor, nn


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Padding before and after one axis: (⌈size/stride⌉ − 1)·stride + kernel − size in all, the larger half after."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """The last two dimensions, padded for a window of `kernel` that moves by `stride`."""
    height, width = (same_padding(size, kernel, stride) for size in x.shape[-2:])
    return F.pad(x, (*width, *height), value=value)  # F.pad counts from the last dimension


class SameConv2d(nn.Conv2d):
    """Square kernel and stride. The padding depends on the image: one pixel more at the end where its side is even."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_same(x, self.kernel_size[0], self.stride[0]))


class SameMaxPool2d(nn.MaxPool2d):
    """The maximum over the pixels that are there: padding is −inf."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.kernel_size, int)
        assert isinstance(self.stride, int)
        out: Tensor = super().forward(
            pad_same(x, self.kernel_size, self.stride, value=float("-inf"))
        )
        return out
