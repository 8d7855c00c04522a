"""What decides the next step is saved, and a run continues bit for bit from any step."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACCUMULATE = 4
BATCHES = 13
# The batch at this index overflows in the second of three full cycles.
OVERFLOW_INDEX = 6
SCALE = hs.DynamicScale(init=64.0, interval=1)
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-4)
CONFIGS: dict[str, tuple[hs.Precision, Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "O1": (hs.Precision("O1", scale=SCALE), ADAM, {"ema": 0.9}),
    "O2": (
        hs.Precision("O2", scale=SCALE),
        partial(ADAM, fused=True),
        {"ema": 0.9, "lr": [0.1, 0.02, 0.03, 0.04]},
    ),
    "O2-device": (
        hs.Precision("O2", scale=SCALE),
        partial(ADAM, fused=True),
        {"decide": "device", "lr": [0.1, 0.02, 0.03, 0.04], "ema": 0.9},
    ),
    "fp16-kahan": (hs.Precision("fp16", scale=SCALE, rounding="kahan"), ADAM, {"clip_norm": 0.1}),
    "fp16-stochastic": (
        hs.Precision("fp16", scale=SCALE, rounding="stochastic"),
        ADAM,
        {"ema": 0.9},
    ),
    "fp64": (
        hs.Precision("fp64"),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
        {"nonfinite": "skip", "fingerprint_every": 2},
    ),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 2)
    ).to(DEVICE)


def build(config: str, *, seed: int = 0, accumulate: int = ACCUMULATE) -> hs.TrainStep:
    torch.manual_seed(seed)
    net = network()
    precision, make, options = CONFIGS[config]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hs.Notice)  # BatchNorm in a cycle
        optimizer = make(net.parameters())
        return hs.TrainStep(
            net,
            nn.CrossEntropyLoss(),
            optimizer,
            precision=precision,
            accumulate=accumulate,
            **options,
        )


def feed(step: hs.TrainStep, i: int) -> hs.Record:
    torch.manual_seed(1000 + i)  # dropout's random numbers belong to the batch
    x = torch.randn(5, 3)
    if i == OVERFLOW_INDEX:
        x *= float("inf")
    y = torch.randint(2, (5,))
    return step(x.to(DEVICE), y.to(DEVICE))


def save_and_load(value: Any) -> Any:
    """Writes and reads again as plain values: weights_only refuses any other kind of object."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf of nested dataclasses, dicts, lists and tuples, by path."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if not isinstance(value, (dict, list, tuple)):
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield from leaves(inner, f"{path}.{key}")


def copy_state(step: hs.TrainStep) -> dict[str, Any]:
    """Returns copies of all leaves of the step's state, the network and the optimizer."""
    state = [step.state, dict(step.net.state_dict()), step.optimizer.state_dict()]
    return {path: copy.deepcopy(value) for path, value in leaves(state)}


def is_same(actual: Any, expected: Any) -> bool:
    """Whether type and values are equal; tensors bit for bit."""
    if not (isinstance(actual, Tensor) and isinstance(expected, Tensor)):
        return type(actual) is type(expected) and actual == expected
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.equal(bytes_of(actual), bytes_of(expected))


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    assert [path for path in expected if not is_same(actual[path], expected[path])] == []


def scramble(tensor: Tensor) -> Tensor:
    """Returns other bits in the same dtype and shape; every number is finite."""
    if tensor.dtype == torch.bool:
        return ~tensor
    return torch.randint(1, 100, tensor.shape).to(tensor.device, tensor.dtype)


def scramble_leaves(value: Any) -> Any:
    """Returns the same structure with every leaf changed, in place where it is a dataclass."""
    if is_dataclass(value):
        for field in fields(value):
            setattr(value, field.name, scramble_leaves(getattr(value, field.name)))
        return value
    if isinstance(value, list):
        return [scramble_leaves(item) for item in value]
    if isinstance(value, Tensor):
        return scramble(value)
    return value + 1 if isinstance(value, int) else value


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("steps", [1, 6])
def test_every_field_and_every_tensor_survives_the_round_trip(config: str, steps: int) -> None:
    step = build(config)
    for i in range(steps):
        feed(step, i)
    before = copy_state(step)

    # Change every leaf, so that nothing is equal by chance.
    scramble_leaves(step.state)
    with torch.no_grad():
        state = [
            dict(step.net.state_dict()),
            dict(step.optimizer.state),
            step.optimizer.param_groups,
        ]
        for _, tensor in leaves(state):
            if isinstance(tensor, Tensor):
                tensor.copy_(scramble(tensor))
    changed = copy_state(step)
    unchanged_paths = []
    for path, value in before.items():
        if isinstance(value, Tensor) and value.numel() and is_same(value, changed[path]):
            unchanged_paths.append(path)
    assert unchanged_paths == []

    other = build(config, seed=1)
    other.load_state_dict(save_and_load(step.state_dict()))
    assert_same(copy_state(other), changed)
    actual = other.fingerprints().values()
    expected = step.fingerprints().values()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_no_field_of_the_state_is_empty_in_every_configuration() -> None:
    """So that the round trip above really carried every field.

    A new field must appear in one of the configurations.
    """
    filled: set[str] = set()
    for config in CONFIGS:
        step = build(config)
        for i in range(6):
            feed(step, i)
        for path, value in leaves(step.state):
            if value is not None:
                filled.add(path.split(".")[1])
        for path, value in leaves(step.state.cycle):
            if value is not None:
                filled.add("cycle." + path.split(".")[1])
    names = {field.name for field in fields(step.state)}
    names |= {f"cycle.{field.name}" for field in fields(step.state.cycle)}
    assert names - filled == set()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_run_stopped_after_any_step_continues_bit_for_bit(config: str) -> None:
    """Inside cycles, at their ends, and right after the skipped one; records included."""

    def flush_and_copy(step: hs.TrainStep) -> dict[str, Any]:
        return {**dict(leaves([step.flush()])), **copy_state(step)}

    uninterrupted = build(config)
    records = []
    saved_states = []
    for i in range(BATCHES):
        saved_states.append(save_and_load(uninterrupted.state_dict()))
        records.append(feed(uninterrupted, i))
    expected = flush_and_copy(uninterrupted)
    skipped_steps = [i for i, record in enumerate(records) if record.skipped]
    assert skipped_steps == [7], "the cycle of the overflow ends here"

    for start, saved_state in enumerate(saved_states):
        resumed = build(config, seed=start + 1)
        resumed.load_state_dict(saved_state)
        for i in range(start, BATCHES):
            assert_same(dict(leaves(feed(resumed, i))), dict(leaves(records[i])))
        assert_same(flush_and_copy(resumed), expected)


def test_a_saved_state_stands_still_while_training_goes_on() -> None:
    step = build("O1")
    for i in range(5):
        feed(step, i)
    saved = step.state_dict()
    copy_of_saved = copy.deepcopy(saved)
    other = build("O1", seed=1)
    other.load_state_dict(saved)
    for i in range(5, 9):
        feed(other, i)
    assert_same(dict(leaves(saved)), dict(leaves(copy_of_saved)))
    before = copy_state(other)
    for i in range(5, 12):
        feed(step, i)
    assert_same(dict(leaves(saved)), dict(leaves(copy_of_saved)))
    assert_same(copy_state(other), before)


class TemperatureLoss(nn.Module):
    """A loss with a trained temperature and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("running", torch.zeros(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(out * self.temperature, target)
        self.running.lerp_(loss.detach(), 0.5)
        return loss + self.running * self.temperature


class CountingNet(nn.Module):
    """A network with a buffer that its state_dict does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("batches", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.batches.add_(1)
        return self.linear(x) * (1 + 1 / self.batches)


@pytest.mark.parametrize(
    "kind", ["loss with parameters", "loss with buffers", "unsaved buffer", "free parameter"]
)
def test_whatever_decides_the_next_step_is_saved(kind: str) -> None:
    """Trained tensors outside the network decide the next step too.

    So do buffers outside its state_dict.
    """

    def build_kind(seed: int) -> tuple[hs.TrainStep, list[Tensor]]:
        """Returns the step, and its trained tensors and buffers."""
        torch.manual_seed(seed)
        net = (CountingNet() if kind == "unsaved buffer" else nn.Linear(3, 2)).to(DEVICE)
        loss: nn.Module = nn.CrossEntropyLoss()
        if kind.startswith("loss"):
            loss = TemperatureLoss().to(DEVICE)
        free = nn.Parameter(torch.rand((), device=DEVICE))

        trained: list[Tensor] = list(net.parameters())
        options: dict[str, Any] = {}
        if kind == "loss with parameters":
            trained += loss.parameters()
        if kind == "free parameter":
            trained.append(free)
            options["forward"] = lambda net, x, y: (net(x) * free, y)
        step = hs.TrainStep(net, loss, torch.optim.Adam(trained, lr=0.1), **options)
        return step, [*trained, *net.buffers(), *loss.buffers()]

    def run_step(step: hs.TrainStep, seed: int) -> Tensor:
        torch.manual_seed(seed)
        x = torch.randn(4, 3).to(DEVICE)
        y = torch.randint(2, (4,)).to(DEVICE)
        return step(x, y).loss

    step, tensors = build_kind(0)
    for i in range(3):
        run_step(step, i)
    saved = save_and_load(step.state_dict())
    resumed, resumed_tensors = build_kind(1)
    resumed.load_state_dict(saved)
    for i in range(3, 6):
        assert torch.equal(run_step(step, i), run_step(resumed, i))
    assert all(torch.equal(a, b) for a, b in zip(tensors, resumed_tensors, strict=True))


def test_loading_into_another_precision_says_so_and_keeps_this_ones_scale() -> None:
    step = build("O2", accumulate=1)
    other = build("O1", accumulate=1)
    for i in range(3):
        feed(step, i)
    assert float(step.state.scale) == 512
    saved = save_and_load(step.state_dict())
    saved["precision"]["scale"]["init"] = 8.0
    with pytest.warns(hs.Notice, match="'O2'.*'O1'"):
        other.load_state_dict(saved)
    assert float(other.state.scale) == 64, "the scale belongs to the precision"
    assert_same(dict(leaves(other.net.state_dict())), dict(leaves(step.net.state_dict())))
    assert feed(other, 3).updated


def load_or_refuse(step: hs.TrainStep, saved: dict[str, Any]) -> str | None:
    """Loads the state; returns the message of the error where that is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hs.Notice)
            step.load_state_dict(saved)
    except ValueError as error:
        return str(error)
    return None


def test_an_open_cycle_keeps_its_meaning_under_another_loss_scale() -> None:
    """Its gradients have the scale of their computation: convert them, or refuse to load."""

    def build_scaled(scale: float) -> hs.TrainStep:
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(DEVICE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        precision = hs.Precision("fp32", scale=scale)
        return hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision, accumulate=2)

    batches = [
        (torch.randn(4, 3, device=DEVICE), torch.randn(4, 2, device=DEVICE)) for _ in range(2)
    ]
    step = build_scaled(1024.0)
    other = build_scaled(2.0)
    step(*batches[0])
    message = load_or_refuse(other, step.state_dict())
    if message is not None:
        assert "cycle" in message
        return
    step(*batches[1])
    other(*batches[1])
    assert torch.equal(other.net.weight, step.net.weight)


@pytest.mark.parametrize("missing", ["ema", "kahan"])
def test_a_state_without_a_field_of_this_step_is_refused_or_completed_when_it_is_loaded(
    missing: str,
) -> None:
    def build_option(*, enabled: bool) -> hs.TrainStep:
        net = nn.Linear(3, 2).to(DEVICE)
        rounding = "kahan" if enabled and missing == "kahan" else "nearest"
        precision = hs.Precision("fp16", rounding=rounding)
        options = {"ema": 0.9} if enabled and missing == "ema" else {}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision, **options)

    saved = build_option(enabled=False).state_dict()
    step = build_option(enabled=True)
    message = load_or_refuse(step, saved)
    if message is not None:
        assert {"ema": "ema", "kahan": "residue"}[missing] in message
        return
    assert step(torch.randn(4, 3, device=DEVICE), torch.randn(4, 2, device=DEVICE)).updated


def test_a_run_that_fell_back_goes_on_in_what_it_fell_back_to(device: torch.device) -> None:
    """After too many skips the step went on in fp32: a resumed one must not try fp16 again."""

    def build() -> hs.TrainStep:
        torch.manual_seed(0)
        net = nn.Linear(4, 3).to(device)
        scale = hs.DynamicScale(max_skips=2, on_skips="fp32", floor=2.0**16)
        precision = hs.Precision("O2", scale=scale)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision)

    x = torch.randn(8, 4, device=device) * 1e5
    y = torch.randint(0, 3, (8,), device=device)
    first = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # On a device the host learns of it some updates late.
        for _ in range(40):
            first(x, y)
    assert any("going on in fp32" in str(warning.message) for warning in caught)
    second = build()
    second.load_state_dict(first.state_dict())
    assert second.precision.name == "fp32"
    first(x, y)
    second(x, y)
    assert torch.equal(first.net.weight, second.net.weight)
