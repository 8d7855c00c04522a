"""Channels-last: other strides, the same values, in training, saving and resuming."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.step.fast.channels_last import choose_channels_last

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
X, Y = (
    torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)),
    torch.tensor([0, 1, 2, 0]),
)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def network() -> nn.Module:
    """No bias before BatchNorm: its gradient is rounding alone, which Adam divides by itself."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 5, 2),
        nn.Conv2d(5, 6, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


def build(
    last: Any, optimizer: str = "SGD", precision: Any = "fp64", **options: Any
) -> hs.TrainStep:
    net = network()
    made = OPTIMIZERS[optimizer](net.parameters())
    return hs.TrainStep(
        net, nn.CrossEntropyLoss(), made, precision=precision, channels_last=last, **options
    )


def is_last(t: Tensor) -> bool:
    return t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def alike(one: hs.TrainStep, other: hs.TrainStep) -> None:
    """float64 sums of at most 4·8·8·4 terms in another order, through a few updates: far below 1e-10."""
    for a, b in zip(one.params, other.params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_gives_the_same_weights(optimizer: str) -> None:
    one, other = build(True, optimizer, clip_norm=1.0), build(False, optimizer, clip_norm=1.0)
    for _ in range(4):
        a, b = one(X.double(), Y), other(X.double(), Y)
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-12, atol=0)
    alike(one, other)
    assert is_last(one.net[0].weight)
    assert is_last(one.net[3].weight)
    assert not is_last(other.net[0].weight)
    for p in one.params:
        assert all(
            v.stride() == p.stride() for v in one.optimizer.state[p].values() if v.shape == p.shape
        )


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "O3", "fp16"])
def test_only_strides_change_under_every_precision(precision: str) -> None:
    one, other = build(True, precision=precision), build(False, precision=precision)
    assert all(torch.equal(a, b) for a, b in zip(one.params, other.params, strict=True))
    assert one.fingerprints().keys() == other.fingerprints().keys()
    assert all(torch.equal(v, other.fingerprints()[k]) for k, v in one.fingerprints().items())
    with one.applied:
        low = one.net[0].weight
        assert is_last(low)  # the low copies follow their masters
    one(X, Y)
    assert is_last(one.net[0].weight)


def test_images_are_channels_last_when_the_network_sees_them() -> None:
    seen: list[bool] = []
    step = build(True)
    step.net.register_forward_pre_hook(lambda m, args: seen.append(is_last(args[0])))
    step(X.double(), Y)
    step(X.double().contiguous(memory_format=torch.channels_last), Y)
    assert seen == [True, True]
    one = {"x": X, "n": 3, "bytes": X.to(torch.uint8)}
    (moved,) = step.channels_last.convert_batch((one,))
    assert is_last(moved["x"])
    assert torch.equal(moved["x"], X)
    assert moved["n"] == 3
    assert moved["bytes"] is one["bytes"]  # uint8 travels as it is
    assert build(False).channels_last.convert_batch((X, Y))[0] is X


def test_state_that_is_there_already_follows() -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    nn.functional.cross_entropy(net(X), Y).backward()
    optimizer.step()
    before = [v.clone() for p in net.parameters() for v in optimizer.state[p].values()]
    hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, channels_last=True)(X, Y)
    p = net[0].weight
    assert all(is_last(v) for v in optimizer.state[p].values() if v.shape == p.shape)
    net = network()
    again = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    nn.functional.cross_entropy(net(X), Y).backward()
    again.step()
    hs.TrainStep(net, nn.CrossEntropyLoss(), again, channels_last=True)
    after = [v for p in net.parameters() for v in again.state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


SAVED = {
    "fp64": ("fp64", "AdamW fused"),
    "half with a residue": (hs.Precision("bf16", rounding="kahan"), "AdamW"),
    "O2": ("O2", "SGD"),
}


@pytest.mark.filterwarnings("ignore:.*batch-coupled")
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_the_other_order_goes_on(name: str, last: bool, tmp_path: Path) -> None:
    precision, optimizer = SAVED[name]
    options: dict[str, Any] = {"accumulate": 2, "ema": 0.9, "precision": precision}
    one, other = build(last, optimizer, **options), build(not last, optimizer, **options)
    for _ in range(3):  # stops inside a cycle
        one(X, Y)
    checkpoint.save(tmp_path / "c", one.state_dict())
    other.load_state_dict(checkpoint.load(tmp_path / "c").tree)
    a, b = one.fingerprints(), other.fingerprints()
    assert [k for k in a if not torch.equal(a[k], b[k])] == []
    held = [*other.state.ema, *[g for g in other.state.cycle.grads if g is not None]]
    assert all(
        t.stride() == p.stride() for t, p in zip(held, [*other.params, *other.params], strict=True)
    )
    for p in other.params:
        assert all(
            v.stride() == p.stride()
            for v in other.optimizer.state[p].values()
            if v.shape == p.shape
        )
    one(X, Y)
    other(X, Y)
    if name == "fp64":
        alike(one, other)


def test_an_optimizer_loaded_alone_follows_too() -> None:
    one, other = build(False, "AdamW fused"), build(True, "AdamW fused")
    one(X, Y)
    other.load_optimizer_state(one.optimizer.state_dict())
    p, q = one.net[0].weight, other.net[0].weight
    assert is_last(other.optimizer.state[q]["exp_avg"])
    assert torch.equal(other.optimizer.state[q]["exp_avg"], one.optimizer.state[p]["exp_avg"])


def test_a_weights_file_is_the_same(tmp_path: Path) -> None:
    files = []
    for last in (True, False):
        net = network()
        model = hs.Model(
            net,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(net.parameters(), lr=0.1),
            channels_last=last,
        )
        model.save(tmp_path / f"{last}.safetensors")
        files.append((tmp_path / f"{last}.safetensors").read_bytes())
    assert files[0] == files[1]
    model.load(tmp_path / "True.safetensors")


def test_what_auto_chooses() -> None:
    net = network()
    assert choose_channels_last(net, "auto", torch.float16, CUDA)[0]
    assert choose_channels_last(net, "auto", torch.float32, CUDA)[0]
    assert choose_channels_last(net, "auto", torch.float64, CUDA) == (
        False,
        "float64 runs on no tensor core",
    )
    assert choose_channels_last(nn.Linear(2, 2), "auto", torch.float32, CUDA) == (
        False,
        "the network has no Conv2d",
    )
    assert not choose_channels_last(net, "auto", torch.float32, CPU)[0]
    assert choose_channels_last(net, False, torch.float32, CUDA) == (False, "channels_last=False")
    assert build(True).report().choices["memory format"] == "channels-last: channels_last=True"
    assert build("auto").report().choices["memory format"].startswith("as given: ")


@pytest.mark.parametrize("name", ["compile", "channels_last", "cudnn_benchmark"])
def test_a_switch_is_true_false_or_auto(name: str) -> None:
    for bad in (1, None, "yes"):
        with pytest.raises(
            ValueError, match=f"{name}: expected True, False or 'auto', received {bad!r}"
        ):
            hs.TrainStep(
                network(),
                nn.CrossEntropyLoss(),
                torch.optim.SGD(network().parameters()),
                **{name: bad},
            )


def test_measured_algorithms_do_not_repeat() -> None:
    with pytest.raises(
        ValueError, match="cudnn_benchmark: expected 'auto' or False beside deterministic=True"
    ):
        build(False, cudnn_benchmark=True, deterministic=True)
    assert build(False, deterministic=True).options.measures_algorithms is False
    assert build(False).options.measures_algorithms is True
    assert build(False, cudnn_benchmark=False).options.measures_algorithms is False
