"""ResNet-18 to -152 under torchvision's parameter names, in two variants that differ in padding, norms and start."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from halfstep.nets.small__same import SameConv2d, SameMaxPool2d
from halfstep.utils.checks import expect, whole_number


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs between the common ResNet and MindSpore 1.0's; in both a bottleneck's stride sits in its 3×3."""

    same: bool
    """pad_mode="same", lopsided where the stride is 2, instead of kernel // 2 on every side."""
    eps: float
    """Of the norms; their momentum is 0.1 (MindSpore writes 0.9)."""
    zero_last: bool
    """The last gamma of each block starts at 0, so that the block starts as its shortcut."""
    std: float | None
    """Of every weight at the start; None: Kaiming over fan-out for convolutions, torch's own for the classifier."""


VARIANTS = {
    # as in torchvision
    "common": Variant(same=False, eps=1e-5, zero_last=False, std=None),
    # as MindSpore 1.0's ResNet-50 and -101 start; 18, 34 and 152 follow them
    "seed": Variant(same=True, eps=1e-4, zero_last=True, std=0.01),
}


def _conv(before: int, after: int, kernel: int, stride: int, variant: Variant) -> nn.Conv2d:
    """No bias: a norm follows. For stride 1 and for 1×1, "same" is kernel // 2 on every side, which costs no copy."""
    if variant.same and stride > 1 and kernel > 1:
        return SameConv2d(before, after, kernel, stride, bias=False)
    return nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)


def _norm(channels: int, variant: Variant) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=variant.eps, momentum=0.1)


def _shortcut(before: int, after: int, stride: int, variant: Variant) -> nn.Sequential | None:
    if stride == 1 and before == after:
        return None
    return nn.Sequential(_conv(before, after, 1, stride, variant), _norm(after, variant))


class BasicBlock(nn.Module):
    """relu(norm(3×3 · relu(norm(3×3 · x))) + shortcut(x))."""

    expansion = 1

    def __init__(self, before: int, width: int, stride: int, variant: Variant) -> None:
        super().__init__()
        down = _shortcut(
            before, width, stride, variant
        )  # drawn first and named last, as in torchvision
        self.conv1 = _conv(before, width, 3, stride, variant)
        self.bn1 = _norm(width, variant)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3, 1, variant)
        self.bn2 = _norm(width, variant)
        self.downsample = down

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        out = self.relu(out)
        return out

    def last(self) -> nn.BatchNorm2d:
        return self.bn2


class Bottleneck(nn.Module):
    """1×1 down to `width`, 3×3 with the stride, 1×1 up to 4 · width, added to the shortcut."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int, variant: Variant) -> None:
        super().__init__()
        after = width * self.expansion
        down = _shortcut(before, after, stride, variant)
        self.conv1 = _conv(before, width, 1, 1, variant)
        self.bn1 = _norm(width, variant)
        self.conv2 = _conv(width, width, 3, stride, variant)
        self.bn2 = _norm(width, variant)
        self.conv3 = _conv(width, after, 1, 1, variant)
        self.bn3 = _norm(after, variant)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = down

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        out = self.relu(out)
        return out

    def last(self) -> nn.BatchNorm2d:
        return self.bn3


Block: TypeAlias = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """7×7, pool, four stages, mean, classifier. The same seed gives the common variant torchvision's weights."""

    def __init__(
        self, block: Block, depths: Sequence[int], variant: Variant, *, classes: int, channels: int
    ) -> None:
        super().__init__()
        self.conv1 = _conv(channels, 64, 7, 2, variant)
        self.bn1 = _norm(64, variant)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = SameMaxPool2d(3, 2) if variant.same else nn.MaxPool2d(3, 2, padding=1)
        wide = block.expansion
        self.layer1 = _stage(block, 64, 64, depths[0], 1, variant)
        self.layer2 = _stage(block, 64 * wide, 128, depths[1], 2, variant)
        self.layer3 = _stage(block, 128 * wide, 256, depths[2], 2, variant)
        self.layer4 = _stage(block, 256 * wide, 512, depths[3], 2, variant)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(self.avgpool(x).flatten(1))
        return out


def _stage(
    block: Block, before: int, width: int, depth: int, stride: int, variant: Variant
) -> nn.Sequential:
    first = block(before, width, stride, variant)
    rest = (block(width * block.expansion, width, 1, variant) for _ in range(depth - 1))
    return nn.Sequential(first, *rest)


def _draw(net: ResNet, std: float | None) -> None:
    """The weights of the start, over what the layers drew when they were made; gammas are 1 and betas 0 already."""
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
    """`channels` is the input's. `zero_init_residual=None` follows the variant: False in "common", True in "seed"."""
    whole_number("classes", classes, minimum=1)
    whole_number("channels", channels, minimum=1)
    known = isinstance(variant, str) and variant in VARIANTS
    expect(known, "variant", " or ".join(map(repr, VARIANTS)), variant, VARIANTS)
    expect(
        zero_init_residual in (None, True, False),
        "zero_init_residual",
        "True, False or None",
        zero_init_residual,
    )
    form = VARIANTS[variant]
    net = ResNet(block, depths, form, classes=classes, channels=channels)
    _draw(net, form.std)
    if form.zero_last if zero_init_residual is None else zero_init_residual:
        for module in net.modules():
            if isinstance(module, (BasicBlock, Bottleneck)):
                nn.init.zeros_(module.last().weight)
    return net


resnet18 = partial(resnet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(resnet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(resnet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(resnet, Bottleneck, (3, 4, 23, 3))
resnet152 = partial(resnet, Bottleneck, (3, 8, 36, 3))
