"""ResNet-18 to -152 under torchvision's parameter names, in two variants.

The variants differ in padding, normalisation and initial weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from halfstep.nets.padding import SameConv2d, SameMaxPool2d
from halfstep.utils.checks import expect, whole_number


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs between the common ResNet and that of MindSpore 1.0.

    In both, the stride of a bottleneck is in its 3×3 convolution.
    """

    same_padding: bool
    """pad_mode="same", uneven where the stride is 2, instead of kernel // 2 on every side."""
    norm_eps: float
    """Of the batch norms. Their momentum is 0.1 in both variants (MindSpore writes 0.9)."""
    zero_init_residual: bool
    """The last norm of each block starts with weight 0: the block starts as its shortcut."""
    init_std: float | None
    """Of all initial weights. None: Kaiming over fan-out for convolutions, torch's own for fc."""


VARIANTS = {
    # as in torchvision
    "common": Variant(same_padding=False, norm_eps=1e-5, zero_init_residual=False, init_std=None),
    # as MindSpore 1.0's ResNet-50 and -101 start; 18, 34 and 152 follow them
    "seed": Variant(same_padding=True, norm_eps=1e-4, zero_init_residual=True, init_std=0.01),
}


def _conv(
    in_channels: int, out_channels: int, kernel: int, stride: int, variant: Variant
) -> nn.Conv2d:
    """A convolution without bias: a norm follows."""
    # For stride 1 and for 1×1 kernels, "same" is kernel // 2 on every side, which costs no copy.
    if variant.same_padding and stride > 1 and kernel > 1:
        return SameConv2d(in_channels, out_channels, kernel, stride, bias=False)
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


def _norm(channels: int, variant: Variant) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=variant.norm_eps, momentum=0.1)


def _shortcut(
    in_channels: int, out_channels: int, stride: int, variant: Variant
) -> nn.Sequential | None:
    """A 1×1 convolution where a block changes size or channels; None where it changes neither."""
    if stride == 1 and in_channels == out_channels:
        return None
    conv = _conv(in_channels, out_channels, 1, stride, variant)
    return nn.Sequential(conv, _norm(out_channels, variant))


class BasicBlock(nn.Module):
    """relu(norm(3×3 · relu(norm(3×3 · x))) + shortcut(x))."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, variant: Variant) -> None:
        super().__init__()
        # Its weights are drawn first and its name comes last, as in torchvision.
        shortcut = _shortcut(in_channels, width, stride, variant)
        self.conv1 = _conv(in_channels, width, 3, stride, variant)
        self.bn1 = _norm(width, variant)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3, 1, variant)
        self.bn2 = _norm(width, variant)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        out = self.relu(out)
        return out

    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn2


class Bottleneck(nn.Module):
    """1×1 down to `width`, 3×3 with the stride, 1×1 up to 4 · width, added to the shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, variant: Variant) -> None:
        super().__init__()
        out_channels = width * self.expansion
        # Its weights are drawn first and its name comes last, as in torchvision.
        shortcut = _shortcut(in_channels, out_channels, stride, variant)
        self.conv1 = _conv(in_channels, width, 1, 1, variant)
        self.bn1 = _norm(width, variant)
        self.conv2 = _conv(width, width, 3, stride, variant)
        self.bn2 = _norm(width, variant)
        self.conv3 = _conv(width, out_channels, 1, 1, variant)
        self.bn3 = _norm(out_channels, variant)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        out = self.relu(out)
        return out

    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn3


Block: TypeAlias = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """A 7×7 convolution, max pooling, four stages of blocks, the mean, a classifier.

    With the same seed, the common variant has torchvision's initial weights.
    """

    def __init__(
        self, block: Block, depths: Sequence[int], variant: Variant, *, classes: int, channels: int
    ) -> None:
        super().__init__()
        self.conv1 = _conv(channels, 64, 7, 2, variant)
        self.bn1 = _norm(64, variant)
        self.relu = nn.ReLU(inplace=True)
        if variant.same_padding:
            self.maxpool: nn.MaxPool2d = SameMaxPool2d(3, 2)
        else:
            self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        expansion = block.expansion
        self.layer1 = _stage(block, 64, 64, depths[0], 1, variant)
        self.layer2 = _stage(block, 64 * expansion, 128, depths[1], 2, variant)
        self.layer3 = _stage(block, 128 * expansion, 256, depths[2], 2, variant)
        self.layer4 = _stage(block, 256 * expansion, 512, depths[3], 2, variant)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * expansion, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(self.avgpool(x).flatten(1))
        return out


def _stage(
    block: Block, in_channels: int, width: int, depth: int, stride: int, variant: Variant
) -> nn.Sequential:
    """`depth` blocks; the first has the stride, and changes the channels."""
    blocks = [block(in_channels, width, stride, variant)]
    for _ in range(depth - 1):
        blocks.append(block(width * block.expansion, width, 1, variant))
    return nn.Sequential(*blocks)


def _init_weights(net: ResNet, std: float | None) -> None:
    """Replaces the weights that the layers drew when they were made.

    The norms need nothing: their weights are 1 and their biases 0 already.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d) and std is None:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, (nn.Conv2d, nn.Linear)) and std is not None:
            nn.init.normal_(module.weight, std=std)
    if std is not None:
        nn.init.zeros_(net.fc.bias)


def resnet(
    block: Block,
    depths: Sequence[int],
    *,
    classes: int = 1000,
    channels: int = 3,
    variant: str = "common",
    zero_init_residual: bool | None = None,
) -> ResNet:
    """A ResNet of `depths` blocks per stage for images of `channels` channels.

    `zero_init_residual=None` follows the variant: False in "common", True in "seed".
    """
    whole_number("classes", classes, minimum=1)
    whole_number("channels", channels, minimum=1)
    is_known = isinstance(variant, str) and variant in VARIANTS
    expect(is_known, "variant", " or ".join(map(repr, VARIANTS)), variant, VARIANTS)
    is_choice = zero_init_residual in (None, True, False)
    expect(is_choice, "zero_init_residual", "True, False or None", zero_init_residual)

    settings = VARIANTS[variant]
    if zero_init_residual is None:
        zero_init_residual = settings.zero_init_residual
    net = ResNet(block, depths, settings, classes=classes, channels=channels)
    _init_weights(net, settings.init_std)
    if zero_init_residual:
        for module in net.modules():
            if isinstance(module, (BasicBlock, Bottleneck)):
                nn.init.zeros_(module.last_norm().weight)
    return net


resnet18 = partial(resnet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(resnet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(resnet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(resnet, Bottleneck, (3, 4, 23, 3))
resnet152 = partial(resnet, Bottleneck, (3, 8, 36, 3))
