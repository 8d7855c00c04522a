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

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0])
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def network() -> nn.Module:
    """No bias before BatchNorm: its gradient is rounding alone, which Adam divides by itself."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 5, 2),
        nn.Conv2d(5, 6, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def build(
    channels_last: Any, optimizer: str = "SGD", precision: Any = "fp64", **options: Any
) -> hs.TrainStep:
    net = network()
    return hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        OPTIMIZERS[optimizer](net.parameters()),
        precision=precision,
        channels_last=channels_last,
        **options,
    )


def is_channels_last(tensor: Tensor) -> bool:
    is_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return is_last and not tensor.is_contiguous()


def assert_near_weights(step: hs.TrainStep, expected_step: hs.TrainStep) -> None:
    """Asserts weights within 1e-10.

    float64 sums of at most 4·8·8·4 terms in another order, through a few updates, differ by far
    less.
    """
    for actual, expected in zip(step.params, expected_step.params, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def assert_state_strides_follow(step: hs.TrainStep) -> None:
    """Asserts that the optimizer state of a parameter's shape has the parameter's strides."""
    for param in step.params:
        for value in step.optimizer.state[param].values():
            if value.shape == param.shape:
                assert value.stride() == param.stride()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_gives_the_same_weights(optimizer: str) -> None:
    step = build(True, optimizer, clip_norm=1.0)
    contiguous_step = build(False, optimizer, clip_norm=1.0)
    for _ in range(4):
        loss = step(X.double(), Y).loss
        expected_loss = contiguous_step(X.double(), Y).loss
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert_near_weights(step, contiguous_step)
    assert is_channels_last(step.net[0].weight)
    assert is_channels_last(step.net[3].weight)
    assert not is_channels_last(contiguous_step.net[0].weight)
    assert_state_strides_follow(step)


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "O3", "fp16"])
def test_only_strides_change_under_every_precision(precision: str) -> None:
    step = build(True, precision=precision)
    contiguous_step = build(False, precision=precision)
    for param, expected_param in zip(step.params, contiguous_step.params, strict=True):
        assert torch.equal(param, expected_param)
    actual = step.fingerprints()
    expected = contiguous_step.fingerprints()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)

    # Low copies follow their masters.
    with step.applied:
        assert is_channels_last(step.net[0].weight)
    step(X, Y)
    assert is_channels_last(step.net[0].weight)


def test_images_are_channels_last_when_the_network_sees_them() -> None:
    formats: list[bool] = []
    step = build(True)
    step.net.register_forward_pre_hook(
        lambda module, inputs: formats.append(is_channels_last(inputs[0]))
    )
    step(X.double(), Y)
    step(X.double().contiguous(memory_format=torch.channels_last), Y)
    assert formats == [True, True]

    batch = {"x": X, "n": 3, "bytes": X.to(torch.uint8)}
    (converted,) = step.channels_last.convert_batch((batch,))
    assert is_channels_last(converted["x"])
    assert torch.equal(converted["x"], X)
    assert converted["n"] == 3
    assert converted["bytes"] is batch["bytes"]  # uint8 travels as it is
    assert build(False).channels_last.convert_batch((X, Y))[0] is X


def test_existing_optimizer_state_follows() -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    nn.functional.cross_entropy(net(X), Y).backward()
    optimizer.step()

    def state_tensors() -> list[Tensor]:
        return [value for p in net.parameters() for value in optimizer.state[p].values()]

    # Converting changes no value.
    before = [tensor.clone() for tensor in state_tensors()]
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, channels_last=True)
    assert all(torch.equal(a, b) for a, b in zip(before, state_tensors(), strict=True))

    step(X, Y)
    weight = net[0].weight
    for value in optimizer.state[weight].values():
        if value.shape == weight.shape:
            assert is_channels_last(value)


SAVED = {
    "fp64": ("fp64", "AdamW fused"),
    "half with a residue": (hs.Precision("bf16", rounding="kahan"), "AdamW"),
    "O2": ("O2", "SGD"),
}


@pytest.mark.filterwarnings("ignore:.*batch-coupled")
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_the_other_memory_format_goes_on(
    name: str, channels_last: bool, tmp_path: Path
) -> None:
    precision, optimizer = SAVED[name]
    options: dict[str, Any] = {"accumulate": 2, "ema": 0.9, "precision": precision}
    saved_step = build(channels_last, optimizer, **options)
    loaded_step = build(not channels_last, optimizer, **options)
    # Three batches stop inside a cycle.
    for _ in range(3):
        saved_step(X, Y)
    checkpoint.save(tmp_path / "c", saved_step.state_dict())
    loaded_step.load_state_dict(checkpoint.load(tmp_path / "c").tree)
    saved = saved_step.fingerprints()
    loaded = loaded_step.fingerprints()
    assert [key for key in saved if not torch.equal(saved[key], loaded[key])] == []

    # Averages, gradients and optimizer state have the strides of their parameters.
    grads = [grad for grad in loaded_step.state.cycle.grads if grad is not None]
    for average, param in zip(loaded_step.state.ema, loaded_step.params, strict=True):
        assert average.stride() == param.stride()
    for grad, param in zip(grads, loaded_step.params, strict=True):
        assert grad.stride() == param.stride()
    assert_state_strides_follow(loaded_step)

    saved_step(X, Y)
    loaded_step(X, Y)
    if name == "fp64":
        assert_near_weights(saved_step, loaded_step)


def test_an_optimizer_loaded_alone_follows_too() -> None:
    saved_step = build(False, "AdamW fused")
    loaded_step = build(True, "AdamW fused")
    saved_step(X, Y)
    loaded_step.load_optimizer_state(saved_step.optimizer.state_dict())
    saved = saved_step.optimizer.state[saved_step.net[0].weight]["exp_avg"]
    loaded = loaded_step.optimizer.state[loaded_step.net[0].weight]["exp_avg"]
    assert is_channels_last(loaded)
    assert torch.equal(loaded, saved)


def test_a_weights_file_is_the_same(tmp_path: Path) -> None:
    contents = []
    for channels_last in (True, False):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, channels_last=channels_last)
        path = tmp_path / f"{channels_last}.safetensors"
        model.save(path)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    model.load(tmp_path / "True.safetensors")


def test_auto_chooses_channels_last_for_convolutions_on_tensor_cores() -> None:
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
    optimizer = torch.optim.SGD(network().parameters())
    for value in (1, None, "yes"):
        message = f"{name}: expected True, False or 'auto', received {value!r}"
        with pytest.raises(ValueError, match=message):
            hs.TrainStep(network(), nn.CrossEntropyLoss(), optimizer, **{name: value})


def test_measured_algorithms_are_refused_beside_deterministic() -> None:
    message = "cudnn_benchmark: expected 'auto' or False beside deterministic=True"
    with pytest.raises(ValueError, match=message):
        build(False, cudnn_benchmark=True, deterministic=True)
    assert build(False, deterministic=True).options.measures_algorithms is False
    assert build(False).options.measures_algorithms is True
    assert build(False, cudnn_benchmark=False).options.measures_algorithms is False
