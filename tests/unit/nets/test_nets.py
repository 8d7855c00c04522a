"""The networks: parameter counts, forward passes against functional torch, initial weights."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep import nets
from halfstep.nets.padding import SameConv2d, SameMaxPool2d, pad_same, same_padding
from halfstep.nets.resnet import VARIANTS, Bottleneck

State = dict[str, Tensor]
ZERO = {"zero_init_residual": True}
BUILT_IN = {
    # name: an input's shape, outputs without options, parameters
    "mlp": ((28, 28), 10, 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10),
    "ffnn": ((3,), 1, 3 * 5 + 5 + 5 * 5 + 5 + 5 + 1),
    "lenet5": (
        (1, 32, 32),
        10,
        6 * 25 + 16 * 6 * 25 + 400 * 120 + 120 + 120 * 84 + 84 + 84 * 10 + 10,
    ),
    "resnet18": ((3, 64, 64), 1000, 11_689_512),  # torchvision's documented figures
    "resnet34": ((3, 64, 64), 1000, 21_797_672),
    "resnet50": ((3, 64, 64), 1000, 25_557_032),
    "resnet101": ((3, 64, 64), 1000, 44_549_160),
    "resnet152": ((3, 64, 64), 1000, 60_192_808),
}
DEPTHS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}


def parameter_count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("name", BUILT_IN)
def test_counts_without_memory(name: str) -> None:
    with torch.device("meta"):
        net = nets.load(name)
    assert parameter_count(net) == BUILT_IN[name][2]
    assert {t.device.type for t in net.state_dict().values()} == {"meta"}


@pytest.mark.parametrize(("name", "depths"), DEPTHS.items())
def test_resnet_stages_strides_classes_and_channels(name: str, depths: tuple[int, ...]) -> None:
    with torch.device("meta"):
        net = nets.load(name, classes=10, channels=1, variant="seed")
    # 990 classes and two channels of the first 7×7 less, and no other biases either
    fewer = 990 * (net.fc.in_features + 1) + 2 * 64 * 49
    assert parameter_count(net) == BUILT_IN[name][2] - fewer
    stages = [net.layer1, net.layer2, net.layer3, net.layer4]
    assert tuple(map(len, stages)) == depths
    # The strides of each block's convolutions; the stride of a bottleneck is in its 3×3.
    is_bottleneck = net.fc.in_features != 512
    unchanged = (1, 1, 1) if is_bottleneck else (1, 1)
    halving = (1, 2, 1) if is_bottleneck else (2, 1)
    first_blocks = [conv_strides(stage[0]) for stage in stages]
    other_blocks = [conv_strides(block) for stage in stages for block in stage[1:]]
    assert first_blocks == [unchanged, halving, halving, halving]
    assert set(other_blocks) == {unchanged}


def conv_strides(block: nn.Module) -> tuple[int, ...]:
    return tuple(layer.stride[0] for name, layer in block.named_children() if "conv" in name)


@pytest.mark.parametrize("name", ["mlp", "ffnn", "lenet5", "resnet18"])
def test_output_shapes(name: str) -> None:
    shape, outputs, _ = BUILT_IN[name]
    with torch.no_grad():
        assert nets.load(name)(torch.randn(2, *shape)).shape == (2, outputs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_resnet_takes_other_images(variant: str) -> None:
    net = nets.load("resnet18", classes=7, channels=1, variant=variant).eval()
    with torch.no_grad():
        for sides in ((1, 1), (28, 28), (33, 64)):
            assert net(torch.randn(2, 1, *sides)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "options"), [("mlp", {}), ("lenet5", {}), ("resnet18", {"variant": "seed"})]
)
def test_the_seed_decides_the_weights(name: str, options: dict[str, str]) -> None:
    def initial_weights(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(nets.load(name, **options).parameters())

    first = initial_weights(3)
    same_seed = initial_weights(3)
    other = initial_weights(4)
    assert all(map(torch.equal, first, same_seed))
    assert not any(torch.equal(p, q) for p, q in zip(first, other, strict=True) if p.dim() > 1)


def test_mlp_is_the_sequence_it_says() -> None:
    net = nets.mlp(inputs=12, hidden=(8, 6), classes=3)
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)
    )
    x = torch.randn(5, 3, 4)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert torch.equal(net(x), plain(x))


def test_ffnn_layers_and_forward() -> None:
    net = nets.ffnn(inputs=4, hidden=[6, 5], outputs=2, dropout=0.25, activation="tanh")
    kinds = [nn.Linear, nn.Tanh, nn.Dropout, nn.Linear, nn.Tanh, nn.Dropout, nn.Linear]
    assert [type(layer) for layer in net] == kinds
    assert net[2].p == net[5].p == 0.25
    x = torch.randn(3, 7, 4)  # the last dimension alone
    w = list(net.parameters())
    expected = F.linear(F.linear(F.linear(x, w[0], w[1]).tanh(), w[2], w[3]).tanh(), w[4], w[5])
    assert torch.equal(net.eval()(x), expected)


def test_ffnn_edges() -> None:
    assert [type(layer) for layer in nets.ffnn(inputs=4, hidden=())] == [nn.Linear]
    assert [type(layer) for layer in nets.ffnn(dropout=0.0)][:3] == [nn.Linear, nn.ReLU, nn.Dropout]
    first, second = (
        layer for layer in nets.ffnn(activation=nn.PReLU) if isinstance(layer, nn.PReLU)
    )
    assert first is not second


@pytest.mark.parametrize("shape", [(4, 2, 32, 32), (2, 32, 32)], ids=["batch", "single"])
def test_lenet5_forward(shape: tuple[int, ...]) -> None:
    net = nets.lenet5(classes=7, channels=2)
    params = dict(net.named_parameters())
    x = torch.randn(shape)
    h = F.max_pool2d(F.conv2d(x, params["conv1.weight"]).relu(), 2)
    h = F.max_pool2d(F.conv2d(h, params["conv2.weight"]).relu(), 2)
    h = h.reshape(*shape[:-3], 400)
    h = F.linear(h, params["fc1.weight"], params["fc1.bias"]).relu()
    h = F.linear(h, params["fc2.weight"], params["fc2.bias"]).relu()
    assert torch.equal(net(x), F.linear(h, params["fc3.weight"], params["fc3.bias"]))


def test_lenet5_says_which_images_it_takes() -> None:
    net = nets.lenet5()
    mnist = torch.rand(2, 1, 28, 28)
    with pytest.raises(
        ValueError,
        match=r"expected images of 32×32, received 28×28\. Resize them, or pad .* by 2\.",
    ):
        net(mnist)
    assert net(F.pad(mnist, (2, 2, 2, 2))).shape == (2, 10)


# ---- padding "same"


@pytest.mark.parametrize(
    ("side", "kernel", "stride", "expected"),
    [
        (224, 7, 2, (2, 3)),
        (112, 3, 2, (0, 1)),
        (7, 3, 2, (1, 1)),
        (7, 7, 2, (3, 3)),
        (8, 3, 1, (1, 1)),
        (8, 1, 2, (0, 0)),
        (7, 1, 2, (0, 0)),
        (1, 3, 2, (1, 1)),
        (2, 3, 2, (0, 1)),
        (9, 4, 3, (0, 1)),
        (9, 2, 3, (0, 0)),
    ],
)
def test_same_padding_by_hand(
    side: int, kernel: int, stride: int, expected: tuple[int, int]
) -> None:
    assert same_padding(side, kernel, stride) == expected


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_same_padding_is_torchs_where_torch_has_it(kernel: int) -> None:
    x = torch.randn(1, 1, 8, 5).double()
    weight = torch.randn(1, 1, kernel, kernel).double()
    ours = F.conv2d(pad_same(x, kernel, 1), weight)
    theirs = F.conv2d(x, weight, padding="same")
    # 1e-14: sums of at most 49 float64 products, in another order
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def kernel_part(size: int, kernel: int, stride: int, i: int) -> tuple[int, slice]:
    """Where window number i of one axis begins, and the part of the kernel inside the image."""
    padding = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    start = i * stride - padding // 2
    return start, slice(max(0, -start), min(kernel, size - start))


def slide(
    x: np.ndarray, kernel: int, stride: int, reduce: Callable[[np.ndarray, slice, slice], float]
) -> np.ndarray:
    """Same-mode windows of one image by definition: clipped to it, with the kernel's parts."""
    height, width = x.shape
    out = np.empty((math.ceil(height / stride), math.ceil(width / stride)))
    for i, j in np.ndindex(*out.shape):
        top, rows = kernel_part(height, kernel, stride, i)
        left, columns = kernel_part(width, kernel, stride, j)
        window = x[top + rows.start : top + rows.stop, left + columns.start : left + columns.stop]
        out[i, j] = reduce(window, rows, columns)
    return out


@pytest.mark.parametrize("shape", [(8, 7), (9, 6), (1, 2)])
@pytest.mark.parametrize("kernel", [3, 7])
def test_same_layers_against_windows_by_hand(shape: tuple[int, int], kernel: int) -> None:
    image = -np.random.default_rng(0).random(shape)  # below 0: padding with 0 would win the maximum
    x = torch.from_numpy(image)[None, None]
    conv = SameConv2d(1, 1, kernel, 2, bias=False).double()
    weight = conv.weight.detach()[0, 0].numpy()
    sums = slide(image, kernel, 2, lambda window, r, c: float((window * weight[r, c]).sum()))
    # 1e-14: 49 products in another order
    np.testing.assert_allclose(conv(x).detach()[0, 0], sums, rtol=0, atol=1e-14)
    largest = slide(image, kernel, 2, lambda window, r, c: float(window.max()))
    assert np.array_equal(SameMaxPool2d(kernel, 2)(x)[0, 0], largest)


def test_padding_keeps_channels_last() -> None:
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    assert pad_same(x, 3, 2).is_contiguous(memory_format=torch.channels_last)


# ---- ResNet forwards against functional torch


class FunctionalResNet:
    """A ResNet's forward from its state dict alone."""

    def __init__(self, state: State, *, seed: bool, train: bool) -> None:
        self.state = {name: tensor.clone() for name, tensor in state.items()}
        self.seed = seed
        self.train = train

    def pad(self, x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
        padding = [(0, 0), (0, 0)]
        for size in x.shape[2:]:
            before = kernel // 2
            # In the seed variant an even side has one pixel less before; an odd one is as usual.
            if self.seed and stride == 2 and size % 2 == 0 and kernel > 1:
                before -= 1
            padding.append((before, kernel // 2))
        return torch.from_numpy(np.pad(x.numpy(), padding, constant_values=value))

    def conv_norm(self, conv: str, norm: str, x: Tensor, stride: int) -> Tensor:
        weight = self.state[f"{conv}.weight"]
        x = F.conv2d(self.pad(x, weight.shape[-1], stride), weight, stride=stride)
        return F.batch_norm(
            x,
            self.state[f"{norm}.running_mean"],
            self.state[f"{norm}.running_var"],
            self.state[f"{norm}.weight"],
            self.state[f"{norm}.bias"],
            training=self.train,
            momentum=0.1,
            eps=1e-4 if self.seed else 1e-5,
        )

    def block(self, name: str, x: Tensor, stride: int) -> Tensor:
        conv_count = 3 if f"{name}.conv3.weight" in self.state else 2
        out = x
        for i in range(1, conv_count + 1):
            conv_stride = stride if i == conv_count - 1 else 1
            out = self.conv_norm(f"{name}.conv{i}", f"{name}.bn{i}", out, conv_stride)
            if i < conv_count:
                out = out.relu()
        if f"{name}.downsample.0.weight" in self.state:
            x = self.conv_norm(f"{name}.downsample.0", f"{name}.downsample.1", x, stride)
        return (out + x).relu()

    def net(self, x: Tensor, depths: tuple[int, ...]) -> Tensor:
        x = self.conv_norm("conv1", "bn1", x, 2).relu()
        x = F.max_pool2d(self.pad(x, 3, 2, -math.inf), 3, 2)
        for layer, depth in enumerate(depths, 1):
            for i in range(depth):
                stride = 2 if layer > 1 and i == 0 else 1
                x = self.block(f"layer{layer}.{i}", x, stride)
        return F.linear(x.mean((2, 3)), self.state["fc.weight"], self.state["fc.bias"])


def randomize_norms(net: nn.Module) -> nn.Module:
    """The network in float64, without weights and statistics of 0 and 1, which hide mistakes."""
    net.double()
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if tensor.dim() != 1 or not tensor.is_floating_point():
                continue
            if "var" in name:
                tensor.uniform_(0.5, 1.5)
            else:
                tensor.normal_()
    return net


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_resnet18_forward_and_statistics(variant: str, train: bool) -> None:
    net = randomize_norms(nets.load("resnet18", classes=10, variant=variant)).train(train)
    plain = FunctionalResNet(net.state_dict(), seed=variant == "seed", train=train)
    x = torch.randn(2, 3, 32, 41, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(net(x), plain.net(x, (2, 2, 2, 2)))
    for name, tensor in net.state_dict().items():
        if "num_batches" not in name:
            assert torch.equal(tensor, plain.state[name]), name


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("in_channels", [8, 16], ids=["shortcut", "identity"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bottleneck_forward(variant: str, in_channels: int, stride: int) -> None:
    net = nn.ModuleDict(
        {"b": randomize_norms(Bottleneck(in_channels, 4, stride, VARIANTS[variant]))}
    )
    x = torch.randn(2, in_channels, 6, 7, dtype=torch.float64)
    assert ("b.downsample.0.weight" in net.state_dict()) == (in_channels != 16 or stride == 2)
    with torch.no_grad():
        plain = FunctionalResNet(net.state_dict(), seed=variant == "seed", train=True)
        expected = plain.block("b", x, stride)
        assert torch.equal(net["b"](x.clone()), expected)


# ---- the weights they start with


def is_normal(values: Tensor, std: float) -> bool:
    """Whether mean and deviation are 0 and `std`, within 5 standard errors: σ/√n and σ/√(2n)."""
    n = values.numel()
    has_mean = abs(values.mean()) < 5 * std / n**0.5
    has_std = abs(values.std() - std) < 5 * std / (2 * n) ** 0.5
    return bool(has_mean and has_std)


def test_seed_variant_starts_as_mindspores() -> None:
    net = nets.load("resnet18", classes=10, variant="seed")
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            assert is_normal(module.weight, 0.01)
            assert module.bias is None or not module.bias.any()
        if isinstance(module, nn.BatchNorm2d):
            assert (module.eps, module.momentum) == (1e-4, 0.1)
            assert not module.bias.any()
    # Neither cut off nor uniform: the share beyond 2σ is P(|z| > 2).
    share_beyond = (net.layer4[1].conv2.weight.abs() > 0.02).double().mean()
    assert abs(share_beyond - 0.0455) < 5 * (0.0455 / 2_359_296) ** 0.5

    # The weights of the norms are 1, but 0 in the last norm of each block.
    last_norm_count = 0
    for name, p in net.named_parameters():
        if p.dim() != 1 or not name.endswith("weight"):
            continue
        is_last = name.startswith("layer") and ".bn2." in name
        last_norm_count += is_last
        assert torch.equal(p, torch.zeros_like(p) if is_last else torch.ones_like(p))
    assert last_norm_count == 8


def test_common_variant_starts_as_kaiming() -> None:
    net = nets.load("resnet18", classes=10)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            assert is_normal(module.weight, (2 / fan_out) ** 0.5)
        if isinstance(module, nn.BatchNorm2d):
            assert (module.eps, module.momentum) == (1e-5, 0.1)
            assert torch.equal(module.weight, torch.ones_like(module.weight))
    bound = 512**-0.5  # nn.Linear's own: uniform within 1/√inputs
    assert 0.99 * bound < net.fc.weight.abs().max() <= bound


def test_lenet5_starts_truncated() -> None:
    net = nets.lenet5()
    for p in net.parameters():
        assert p.abs().max() <= 0.04
        assert p.count_nonzero() == p.numel()  # biases are drawn too
    inside = math.erf(2**0.5)  # P(|z| < 2); a normal cut there has variance 1 − 4φ(2)/P
    density = math.exp(-2) / (2 * math.pi) ** 0.5
    assert is_normal(net.fc1.weight, 0.02 * (1 - 4 * density / inside) ** 0.5)


@pytest.mark.parametrize(
    ("name", "options"), [("resnet50", {"variant": "seed"}), ("resnet18", ZERO)]
)
def test_zero_last_gamma_starts_a_block_as_its_shortcut(name: str, options: dict[str, Any]) -> None:
    net = nets.load(name, classes=3, **options)
    x = torch.randn(2, 3, 32, 32)
    assert net(x).shape == (2, 3)
    x = net.maxpool(net.bn1(net.conv1(x)).relu())
    for block in (*net.layer1, *net.layer2):
        shortcut = x if block.downsample is None else block.downsample(x)
        out = block(x)
        assert torch.equal(out, shortcut.relu())
        x = out


def test_zero_init_residual_is_honoured_both_ways() -> None:
    net = nets.load("resnet18", variant="seed", zero_init_residual=False)
    for block in net.layer3:
        assert torch.equal(block.bn2.weight, torch.ones(block.bn2.num_features))
    block = nets.load("resnet18").layer1[0]
    x = torch.randn(1, 64, 3, 3)
    assert not torch.equal(block(x), x.relu())


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_reach_every_parameter(variant: str) -> None:
    net = nets.load("resnet18", classes=3, variant=variant)
    F.cross_entropy(net(torch.randn(2, 3, 32, 32)), torch.tensor([0, 2])).backward()
    assert all(p.grad is not None for p in net.parameters())
    for block in (*net.layer1, *net.layer4):
        assert block.bn2.weight.grad.any()  # a block can leave its shortcut


def test_same_layers_train_in_half_precision() -> None:
    net = nn.Sequential(
        SameMaxPool2d(3, 2), SameConv2d(3, 8, 7, 2), Bottleneck(8, 4, 2, VARIANTS["seed"])
    )
    x = torch.rand(4, 3, 32, 32)
    y = torch.rand(4, 16, 4, 4)
    dtypes: list[torch.dtype] = []
    net[1].register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.MSELoss(), optimizer, precision="O2")
    records = [step(x, y) for _ in range(5)]
    assert all(record.updated for record in records)
    assert all(after.loss < before.loss for before, after in pairwise(records))
    assert dtypes == 5 * [torch.float16]
