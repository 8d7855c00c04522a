"""One state, one list: what decides the next step is saved, and a run continues bit for bit from any step."""

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
ACCUMULATE, BATCHES, OVERFLOW = (
    4,
    13,
    6,
)  # the batch at index 6 spoils the second of three full cycles
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
    x = torch.randn(5, 3) * (float("inf") if i == OVERFLOW else 1)
    return step(x.to(DEVICE), torch.randint(2, (5,)).to(DEVICE))


def through_a_file(value: Any) -> Any:
    """Written and read again as plain values: weights_only refuses any other kind of object."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nest of dataclasses, dicts, lists and tuples, by path."""
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{path}.{key}")
    else:
        yield path, value


def everything(step: hs.TrainStep) -> dict[str, Any]:
    whole = [step.state, dict(step.net.state_dict()), step.optimizer.state_dict()]
    return {path: copy.deepcopy(value) for path, value in leaves(whole)}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        bits = [t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    return type(a) is type(b) and a == b


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    assert [path for path in expected if not same(got[path], expected[path])] == []


def scramble(tensor: Tensor) -> Tensor:
    """Other bits in the same dtype and shape; every number finite."""
    if tensor.dtype == torch.bool:
        return ~tensor
    return torch.randint(1, 100, tensor.shape).to(tensor.device, tensor.dtype)


def scrambled(value: Any) -> Any:
    """The same structure with every leaf changed, in place where it is a dataclass."""
    if is_dataclass(value):
        for f in fields(value):
            setattr(value, f.name, scrambled(getattr(value, f.name)))
        return value
    if isinstance(value, list):
        return [scrambled(v) for v in value]
    if isinstance(value, Tensor):
        return scramble(value)
    return value + 1 if isinstance(value, int) else value


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("steps", [1, 6])
def test_every_field_and_every_tensor_survives_the_round_trip(config: str, steps: int) -> None:
    step = build(config)
    for i in range(steps):
        feed(step, i)
    before = everything(step)
    scrambled(step.state)
    with torch.no_grad():
        whole = [
            dict(step.net.state_dict()),
            dict(step.optimizer.state),
            step.optimizer.param_groups,
        ]
        for _, tensor in leaves(whole):
            if isinstance(tensor, Tensor):
                tensor.copy_(scramble(tensor))
    changed = everything(step)
    assert [
        p for p, v in before.items() if isinstance(v, Tensor) and v.numel() and same(v, changed[p])
    ] == []
    other = build(config, seed=1)
    other.load_state_dict(through_a_file(step.state_dict()))
    assert_same(everything(other), changed)
    assert all(
        torch.equal(a, b)
        for a, b in zip(other.fingerprints().values(), step.fingerprints().values(), strict=True)
    )


def test_no_field_of_the_state_is_empty_in_every_configuration() -> None:
    """So that the round trip above really carried each field; a new field must appear in one of the configurations."""
    filled: set[str] = set()
    for config in CONFIGS:
        step = build(config)
        for i in range(6):
            feed(step, i)
        filled |= {path.split(".")[1] for path, value in leaves(step.state) if value is not None}
        filled |= {
            "cycle." + path.split(".")[1]
            for path, value in leaves(step.state.cycle)
            if value is not None
        }
    names = {f.name for f in fields(step.state)} | {
        f"cycle.{f.name}" for f in fields(step.state.cycle)
    }
    assert names - filled == set()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_run_stopped_after_any_step_continues_bit_for_bit(config: str) -> None:
    """Inside cycles, at their ends, and right after the skipped one; records included."""

    def end(step: hs.TrainStep) -> dict[str, Any]:
        return {**dict(leaves([step.flush()])), **everything(step)}

    whole, records, saved = build(config), [], []
    for i in range(BATCHES):
        saved.append(through_a_file(whole.state_dict()))
        records.append(feed(whole, i))
    expected = end(whole)
    assert [i for i, r in enumerate(records) if r.skipped] == [7], "the planted overflow"
    for k in range(BATCHES):
        step = build(config, seed=k + 1)
        step.load_state_dict(saved[k])
        for i in range(k, BATCHES):
            assert_same(dict(leaves(feed(step, i))), dict(leaves(records[i])))
        assert_same(end(step), expected)


def test_a_saved_state_stands_still_while_training_goes_on() -> None:
    step = build("O1")
    for i in range(5):
        feed(step, i)
    saved = step.state_dict()
    kept = copy.deepcopy(saved)
    other = build("O1", seed=1)
    other.load_state_dict(saved)
    for i in range(5, 9):
        feed(other, i)
    assert_same(dict(leaves(saved)), dict(leaves(kept)))
    before = everything(other)
    for i in range(5, 12):
        feed(step, i)
    assert_same(dict(leaves(saved)), dict(leaves(kept)))
    assert_same(everything(other), before)


class Scaled(nn.Module):
    """A loss with a trained temperature and a running mean, and a network beside it with a buffer it does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("running", torch.zeros(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(out * self.temperature, target)
        self.running.lerp_(loss.detach(), 0.5)
        return loss + self.running * self.temperature


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return self.linear(x) * (1 + 1 / self.seen)


@pytest.mark.parametrize(
    "kind", ["loss with parameters", "loss with buffers", "unsaved buffer", "free parameter"]
)
def test_whatever_decides_the_next_step_is_saved(kind: str) -> None:
    """Trained tensors outside the network and buffers outside its state_dict decide the next step too."""

    def make(seed: int) -> tuple[hs.TrainStep, list[Tensor]]:
        torch.manual_seed(seed)
        net = (Counting() if kind == "unsaved buffer" else nn.Linear(3, 2)).to(DEVICE)
        loss: Any = Scaled().to(DEVICE) if kind.startswith("loss") else nn.CrossEntropyLoss()
        free = nn.Parameter(torch.rand((), device=DEVICE))
        extra = {"loss with parameters": [loss], "free parameter": [free]}.get(kind, [])
        trained = [
            *net.parameters(),
            *(p for e in extra for p in ([e] if isinstance(e, Tensor) else e.parameters())),
        ]
        options = {"forward": lambda n, x, y: (n(x) * free, y)} if kind == "free parameter" else {}
        step = hs.TrainStep(net, loss, torch.optim.Adam(trained, lr=0.1), **options)
        return step, [
            *trained,
            *net.buffers(),
            *(loss.buffers() if isinstance(loss, Scaled) else []),
        ]

    def go(step: hs.TrainStep, i: int) -> Tensor:
        torch.manual_seed(i)
        return step(torch.randn(4, 3).to(DEVICE), torch.randint(2, (4,)).to(DEVICE)).loss

    step, mine = make(0)
    for i in range(3):
        go(step, i)
    saved = through_a_file(step.state_dict())
    other, theirs = make(1)
    other.load_state_dict(saved)
    assert [torch.equal(go(step, i), go(other, i)) for i in range(3, 6)] == [True] * 3
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_loading_into_another_precision_says_so_and_keeps_this_ones_scale() -> None:
    step, other = build("O2", accumulate=1), build("O1", accumulate=1)
    for i in range(3):
        feed(step, i)
    assert float(step.state.scale) == 512
    saved = through_a_file(step.state_dict())
    saved["precision"]["scale"]["init"] = 8.0
    with pytest.warns(hs.Notice, match="'O2'.*'O1'"):
        other.load_state_dict(saved)
    assert float(other.state.scale) == 64, "the scale belongs to the precision"
    assert_same(dict(leaves(other.net.state_dict())), dict(leaves(step.net.state_dict())))
    assert feed(other, 3).updated


def refusal(step: hs.TrainStep, saved: dict[str, Any]) -> str | None:
    """Loads, and says why not where that is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hs.Notice)
            step.load_state_dict(saved)
    except ValueError as error:
        return str(error)
    return None


def test_an_open_cycle_keeps_its_meaning_under_another_loss_scale() -> None:
    """Its gradients carry the scale they were computed with: they are converted, or loading is refused."""

    def half_done(scale: float) -> hs.TrainStep:
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(DEVICE)
        optimizer, precision = (
            torch.optim.SGD(net.parameters(), lr=0.1),
            hs.Precision("fp32", scale=scale),
        )
        return hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision, accumulate=2)

    batches = [
        (torch.randn(4, 3, device=DEVICE), torch.randn(4, 2, device=DEVICE)) for _ in range(2)
    ]
    step, other = half_done(1024.0), half_done(2.0)
    step(*batches[0])
    refused = refusal(other, step.state_dict())
    if refused is not None:
        assert "cycle" in refused
        return
    step(*batches[1])
    other(*batches[1])
    assert torch.equal(other.net.weight, step.net.weight)


@pytest.mark.parametrize("missing", ["ema", "kahan"])
def test_a_state_without_what_this_step_keeps_is_refused_or_completed_when_it_is_loaded(
    missing: str,
) -> None:
    def make(*, keeps: bool) -> hs.TrainStep:
        net = nn.Linear(3, 2).to(DEVICE)
        rounding = "kahan" if keeps and missing == "kahan" else "nearest"
        precision = hs.Precision("fp16", rounding=rounding)
        options = {"ema": 0.9} if keeps and missing == "ema" else {}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision, **options)

    saved = make(keeps=False).state_dict()
    step = make(keeps=True)
    refused = refusal(step, saved)
    if refused is not None:
        assert {"ema": "ema", "kahan": "residue"}[missing] in refused
        return
    assert step(torch.randn(4, 3, device=DEVICE), torch.randn(4, 2, device=DEVICE)).updated


def test_a_run_that_fell_back_goes_on_in_what_it_fell_back_to(device: torch.device) -> None:
    """Skips had gone on too long and the step went on in fp32: a resumed one must not try fp16 again."""

    def build() -> hs.TrainStep:
        torch.manual_seed(0)
        net = nn.Linear(4, 3).to(device)
        scale = hs.DynamicScale(max_skips=2, on_skips="fp32", floor=2.0**16)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return hs.TrainStep(
            net, nn.CrossEntropyLoss(), optimizer, precision=hs.Precision("O2", scale=scale)
        )

    x, y = torch.randn(8, 4, device=device) * 1e5, torch.randint(0, 3, (8,), device=device)
    first = build()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(40):  # on a device the news comes some updates late
            first(x, y)
    assert any("going on in fp32" in str(each.message) for each in said)
    second = build()
    second.load_state_dict(first.state_dict())
    assert second.precision.name == "fp32"
    first(x, y)
    second(x, y)
    assert torch.equal(first.net.weight, second.net.weight)
