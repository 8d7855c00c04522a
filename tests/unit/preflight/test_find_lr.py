"""hs.find_lr: the curve against a loop of plain torch, and everything as it was afterwards."""

import copy
import math
import random
import re
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import halfstep as hs
from halfstep.engine.captured.cache import ModelCaptures
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.step_program import StepProgram
from halfstep.preflight.lr_curve import (
    LRCurve,
    descends,
    smooth,
    smoothing_width,
    steepest_descent,
    suggest_rate,
)
from tests.support.emulated_graphs import CPU, EmulatedGraphs

pytestmark = pytest.mark.filterwarnings("ignore:batch-coupled layers:halfstep.errors.Notice")

GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(96, 6, generator=GENERATOR)
Y = (X @ torch.randn(6, 3, generator=GENERATOR)).argmax(1)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


class Net(nn.Module):
    """Dropout, statistics, a buffer, a counter in Python, one frozen parameter."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU()
        )
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(16, 3)
        self.head.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.python_calls = 0
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.calls, Tensor):
            raise AssertionError
        self.calls.add_(1)
        if self.body[1].__class__ is not nn.Identity:
            self.python_calls += 1  # a capture refuses networks that count in Python
            self.shapes.append(tuple(x.shape))
        out: Tensor = self.head(self.dropout(self.body(x)))
        return out


def make_model(
    precision: str = "fp32",
    optimizer: str = "momentum",
    *,
    norm: bool = True,
    groups: bool = False,
    **options: Any,
) -> hs.Model:
    hs.seed_everything(0)
    net = Net(norm=norm)
    if precision == "fp64":
        net.double()
    params: Any = [p for p in net.parameters() if p.requires_grad]
    if groups:
        params = [{"params": params[:-1], "lr": 0.01}, {"params": params[-1:]}]
    return hs.Model(net, nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](params), precision, **options)


def dataset(precision: str = "fp32") -> hs.data.Dataset:
    x = X.double() if precision == "fp64" else X
    return hs.data.Dataset((x, Y), seed=3).shuffle().batch(8)


def everything(model: hs.Model) -> dict[str, Any]:
    """Every tensor and value of a model, of the process's generators, by name; tensors copied."""
    net = model.net
    assert isinstance(net, Net)
    state = model.step.state
    found: dict[str, Any] = {}
    for name, p in net.named_parameters():
        found[f"param {name}"] = p
        found[f"grad {name}"] = p.grad
    found.update({f"buffer {name}": b for name, b in net.named_buffers()})
    for i, group in enumerate(model.optimizer.param_groups):  # type: ignore[union-attr]
        for name, value in group.items():
            if name != "params":
                found[f"group {i} {name}"] = value
    optimizer_state = model.optimizer.state  # type: ignore[union-attr]
    found["optimizer has state of"] = len(optimizer_state)
    for i, values in enumerate(optimizer_state.values()):
        found.update({f"state {i} {name}": value for name, value in values.items()})
    for name, value in vars(state).items():
        if name != "cycle":
            found[f"step {name}"] = value
    found.update({f"cycle {name}": value for name, value in vars(state.cycle).items()})
    found["modes"] = [module.training for module in net.modules()]
    found["python"] = (net.python_calls, list(net.shapes))
    found["schedule"] = model.step.options.lr
    found["table"] = model.step.learning_rates.table
    found["reads"] = model.step.host_reads.reads
    found["random"] = random.getstate()
    found["numpy"] = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    found["torch"] = torch.get_rng_state()
    return {name: copy.deepcopy(value) for name, value in found.items()}


def assert_same(now: Any, before: Any, where: str = "") -> None:
    assert type(now) is type(before), where
    if isinstance(now, Tensor):
        assert now.dtype == before.dtype, where
        assert torch.equal(now, before), where
    elif isinstance(now, dict):
        assert now.keys() == before.keys(), where
        for name in now:
            assert_same(now[name], before[name], f"{where} {name}")
    elif isinstance(now, (list, tuple)):
        assert len(now) == len(before), where
        for i, (a, b) in enumerate(zip(now, before, strict=True)):
            assert_same(a, b, f"{where} {i}")
    else:
        assert now == before, where


def addresses(model: hs.Model) -> list[int]:
    tensors = [*model.net.parameters(), *model.net.buffers(), *model.step.state.tensors()]
    return [tensor.data_ptr() for tensor in tensors]


def find_lr_quickly(model: hs.Model, data: Any, **options: Any) -> Any:
    return hs.find_lr(model, data, **{"low": 1e-4, "high": 30.0, "updates": 40, **options})


# --- The model afterwards ---

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp64": {"precision": "fp64"},
    "O1": {"precision": "O1"},
    "O2": {"precision": "O2"},
    "O3": {"precision": "O3"},
    "fp16": {"precision": "fp16"},
    "bf16+kahan": {"precision": "bf16+kahan"},
    "bf16+stochastic": {"precision": "bf16+stochastic"},
    "sgd": {"optimizer": "sgd"},
    "adam": {"optimizer": "adam"},
    "adamw-fused": {"optimizer": "adamw-fused"},
    "rmsprop": {"optimizer": "rmsprop", "precision": "O2"},
    "accumulate": {"accumulate": 3, "precision": "O2"},
    "ema": {"ema": 0.9, "clip_norm": 1.0},
    "schedule": {"schedule": lambda update: 0.1 / (1 + update)},
    "groups": {"groups": True, "precision": "O2"},
    "device decides": {"optimizer": "adamw-fused", "precision": "O2", "decide": "device"},
    "own forward": {"forward": lambda net, x, y: (net(x), y)},
}


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize("case", CASES)
def test_everything_is_as_it_was_and_training_goes_on_equally(case: str, trained: bool) -> None:
    options = CASES[case]
    precision = options.get("precision", "fp32")
    models = [make_model(**options) for _ in range(2)]
    data = dataset(precision)
    histories = []
    for model in models:
        hs.seed_everything(5)
        if trained:
            model.fit(1, data)
        model.net.dropout.eval()  # type: ignore[union-attr]
        model.net.head.weight.grad = torch.ones_like(model.net.head.weight)  # type: ignore[union-attr]
        random.random()
        if model is models[0]:
            before = everything(model)
            places = addresses(model)
            with suppress(ValueError) if trained else nullcontext():  # nothing left to fall
                assert len(find_lr_quickly(model, data).losses) >= 10
            assert_same(everything(model), before)
            assert addresses(model) == places
        history = model.fit(2, data).history
        histories.append(history)
    assert_same(everything(models[0]), everything(models[1]))
    assert histories[0] == histories[1]


def test_the_middle_of_an_update_cycle_stays() -> None:
    models = [make_model("O2", accumulate=4) for _ in range(2)]
    for model in models:
        hs.seed_everything(5)
        for start in range(0, 48, 8):
            model.step(X[start : start + 8], Y[start : start + 8])
    assert models[0].step.state.cycle.micro == 2
    before = everything(models[0])
    find_lr_quickly(models[0], dataset())
    assert_same(everything(models[0]), before)
    for model in models:
        hs.seed_everything(6)
        for start in range(0, 48, 8):
            model.step(X[start : start + 8], Y[start : start + 8])
    assert_same(everything(models[0]), everything(models[1]))


def captured_by_emulation(monkeypatch: pytest.MonkeyPatch) -> list[StepProgram]:
    """Models on the CPU replay emulated CUDA graphs. Returns the programs that were made."""
    programs: list[StepProgram] = []

    def runner(captures: ModelCaptures, step: Any, feed: Any, steps: int | None) -> CapturedRunner:
        if captures._runner is None or not captures._runner.switch_feed(feed):
            program = StepProgram(step, RecordBuffer(8192, CPU), EmulatedGraphs(CPU), "raise")
            programs.append(program)
            captures._runner = CapturedRunner(program, feed)
        return captures._runner

    monkeypatch.setattr(ModelCaptures, "training_runner", runner)
    return programs


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_captured_steps_are_tested_by_graphs_of_their_own(
    precision: str, accumulate: int, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"optimizer": "adamw-fused", "decide": "device", "norm": False}
    eager = make_model(precision, accumulate=accumulate, **options)
    hs.seed_everything(0)
    expected = find_lr_quickly(eager, dataset(), updates=30)

    programs = captured_by_emulation(monkeypatch)
    models = [make_model(precision, accumulate=accumulate, **options) for _ in range(2)]
    for model in models:
        hs.seed_everything(0)
        if trained:
            model.fit(2, dataset())
            hs.seed_everything(0)
        if model is models[0]:
            before = everything(model)
            places = addresses(model)
            count = len(programs)
            with suppress(ValueError) if trained else nullcontext():
                curve = find_lr_quickly(model, dataset(), updates=30)
            assert len(programs) == count + 1
            assert programs[-1].replays > 10
            assert_same(everything(model), before)
            assert addresses(model) == places
            assert programs[-1] is not getattr(model.captures._runner, "program", None)
            if not trained:
                # The rates go to the device as tensors, so that only rounding may differ.
                assert curve.losses == expected.losses[: len(curve.losses)]
                assert curve.suggestion == expected.suggestion
        model.fit(3, dataset())
    assert_same(everything(models[0]), everything(models[1]))


def test_a_compiled_model_goes_on_equally() -> None:
    models = [make_model(compile=True, capture=False) for _ in range(2)]
    for model in models:
        hs.seed_everything(5)
        if model is models[0]:
            before = everything(model)
            find_lr_quickly(model, dataset(), updates=15, high=1.0)
            assert_same(everything(model), before)
            assert model.step.compiled.compiled_shapes() == {}
        model.fit(1, dataset())
    assert_same(everything(models[0]), everything(models[1]))


# --- The data afterwards ---


def loader_with_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(9)
    return DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, generator=generator)


def loader_with_sampler() -> DataLoader[Any]:
    data = TensorDataset(X, Y)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(4))
    return DataLoader(data, batch_size=8, sampler=sampler)


def loader_with_epochs() -> DataLoader[Any]:
    data = TensorDataset(X, Y)
    sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, seed=2)
    sampler.set_epoch(7)
    return DataLoader(data, batch_size=8, sampler=sampler)


def loader_with_workers() -> DataLoader[Any]:
    data = TensorDataset(X, Y)
    return DataLoader(data, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)


DATA: dict[str, Callable[[], Any]] = {
    "Dataset": dataset,
    "Loader": lambda: hs.data.Loader(loader_with_generator()),
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
    "generator": loader_with_generator,
    "sampler": loader_with_sampler,
    "set_epoch": loader_with_epochs,
    "persistent workers": loader_with_workers,
    "list": lambda: [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 96, 8)],
}


@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
@pytest.mark.parametrize("kind", DATA)
def test_the_next_passes_over_the_data_are_the_same(kind: str, begun: bool) -> None:
    passes = []
    for tests_rates in (False, True):
        hs.seed_everything(11)
        data = DATA[kind]()
        model = make_model()
        hs.seed_everything(12)
        if begun:
            next(iter(data)) if kind != "persistent workers" else list(data)
        if tests_rates:
            sampler = getattr(data, "sampler", None)
            epoch = getattr(sampler, "epoch", None)
            find_lr_quickly(model, data)
            assert getattr(sampler, "epoch", None) == epoch
        passes.append([[batch[0].clone() for batch in data] for _ in range(2)])
    assert_same(passes[1], passes[0])


# --- The curve ---


def test_the_losses_are_those_of_a_loop_of_plain_torch() -> None:
    model = make_model(groups=True)
    net = copy.deepcopy(model.net)
    params = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(
        [{"params": params[:-1], "lr": 0.01}, {"params": params[-1:]}], lr=0.1, momentum=0.9
    )
    hs.seed_everything(6)
    curve = hs.find_lr(model, dataset(), low=1e-3, high=10, updates=50)

    hs.seed_everything(6)
    losses = []
    data = dataset()
    batches = [batch for _ in range(5) for batch in data]
    for i in range(len(curve.rates)):
        rate = 1e-3 * (10 / 1e-3) ** (i / 49)
        assert curve.rates[i] == pytest.approx(rate, rel=1e-12)
        optimizer.param_groups[0]["lr"] = curve.rates[i] * 0.1
        optimizer.param_groups[1]["lr"] = curve.rates[i]
        optimizer.zero_grad()
        x, y = batches[i]
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert list(curve.losses) == losses
    assert curve.group_suggestions == pytest.approx((0.1 * curve.suggestion, curve.suggestion))
    assert curve.suggestion in curve.rates


def test_accumulated_batches_are_one_update() -> None:
    """Four batches of 8 with accumulate=4 are one batch of 32."""
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 96, 8)]
    large = [(X[i : i + 32], Y[i : i + 32]) for i in range(0, 96, 32)]
    curves = []
    for data, accumulate in ((batches, 4), (large, 1)):
        model = make_model(norm=False, accumulate=accumulate)
        model.net.dropout.p = 0.0  # type: ignore[union-attr]
        curves.append(find_lr_quickly(model, data))
    assert len(curves[0].losses) == len(curves[1].losses)
    # Sums of four means against one mean: float32, of losses that grow to some hundreds.
    torch.testing.assert_close(
        torch.tensor(curves[0].losses), torch.tensor(curves[1].losses), rtol=2e-3, atol=1e-5
    )


def test_skipped_steps_of_a_loss_scale_have_no_point_and_keep_their_rate() -> None:
    hs.seed_everything(0)
    net = nn.Linear(6, 3)
    precision = hs.Precision("O1", dtype="float16", scale=hs.DynamicScale(init=2.0**40))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, precision, capture=False)
    skips: list[bool] = []
    original = model.step.record_update

    def record(loss: Tensor, result: Any) -> Any:
        skips.append(bool(result.skipped))
        return original(loss, result)

    model.step.record_update = record
    curve = hs.find_lr(model, dataset(), low=1e-3, high=3.0, updates=30)
    assert sum(skips[:20]) > 5  # the scale came down from 2^40 first
    assert len(curve.losses) == skips.count(False) == 30
    assert float(model.step.state.scale) == 2.0**40
    assert int(model.step.state.skips) == 0


def test_the_test_ends_where_the_loss_diverges() -> None:
    curve = hs.find_lr(make_model(), dataset(), low=1e-3, high=1e6, updates=60)
    assert len(curve.losses) < 60
    assert "diverges" in curve.stop_reason or "not finite" in curve.stop_reason
    assert all(math.isfinite(loss) for loss in (*curve.losses, *curve.smoothed))

    # fp16 overflows: the gradients of "fp16" have no scale, and raise.
    curve = hs.find_lr(make_model("fp16"), dataset(), low=1e-3, high=1e7, updates=60)
    assert len(curve.losses) < 60

    curve = hs.find_lr(make_model(), dataset(), low=1e-3, high=0.1, updates=20)
    assert curve.stop_reason == "the highest rate was reached"
    assert len(curve.losses) == 20


def test_the_suggestion_is_the_steepest_point_of_a_known_curve() -> None:
    """A logistic descent is steepest at its middle; behind the minimum nothing counts."""
    descent = [2.0 - 1.5 / (1 + math.exp(-(i - 40) / 4)) for i in range(70)]
    rise = [descent[-1] + 0.5 * i for i in range(10)]
    fall_after_divergence = [9.0, 3.0]
    assert steepest_descent([*descent, *rise]) == 40
    assert steepest_descent([*descent, *rise, *fall_after_divergence]) == 40


def test_a_fall_far_below_the_lowest_loss_is_not_suggested() -> None:
    """A steep fall at 1e-5, then a long slow one to 1e-1; and a curve whose minimum is near."""
    rates = [10 ** (-7 + i / 10) for i in range(61)]
    early = [2 - 1 / (1 + math.exp(-(i - 20) / 2)) - 0.01 * i for i in range(61)]
    suggestion, rule = suggest_rate(rates, early)
    assert steepest_descent(early) == 20
    assert suggestion == rates[50]  # a tenth of the last one
    assert "a tenth of the rate of the lowest loss, 0.1;" in rule
    assert "at 1e-05" in rule

    usual = [2 - 1 / (1 + math.exp(-(i - 20) / 2)) + max(i - 30, 0) for i in range(61)]
    assert suggest_rate(rates, usual) == (rates[20], "the smoothed loss falls fastest")


def test_few_samples_that_come_again_and_again_get_a_rate_that_trains() -> None:
    """60 drawn images, of which one batch of 47 is repeated 40 times."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(47) % 3
    images = torch.rand(47, 3, 32, 32, generator=generator) * 0.3
    for i, label in enumerate(labels.tolist()):
        left, top = torch.randint(4, 16, (2,), generator=generator).tolist()
        width, height = ((12, 12), (12, 3), (3, 12))[label]
        colour = 0.5 + 0.5 * torch.rand(3, 1, 1, generator=generator)
        images[i, :, top : top + height, left : left + width] = colour
    data = [(images, labels)]

    def train(rate: float | None) -> tuple[float, LRCurve | None]:
        hs.seed_everything(0)
        net = hs.nets.resnet18(classes=3)
        optimizer = torch.optim.SGD(net.parameters(), lr=rate or 1.0, momentum=0.9)
        model = hs.Model(net, nn.CrossEntropyLoss(), optimizer)
        if rate is None:
            return 0.0, hs.find_lr(model, data, updates=40)
        return float(model.fit(10, data).history[-1]["loss"]), None

    _, curve = train(None)
    assert curve is not None
    assert curve.rule.startswith("a tenth of the rate of the lowest loss")
    assert max(map(len, str(curve).splitlines())) < 100
    steepest = curve.rates[steepest_descent(curve.smoothed)]
    assert curve.suggestion > 5 * steepest
    assert train(curve.suggestion)[0] < 0.5 * train(steepest)[0]


def test_the_suggested_rate_trains_better_than_a_tenth_and_than_a_hundred_times() -> None:
    """On real images: what the suggestion is for."""
    images, labels = hs.data.sample()
    data = hs.data.Dataset({"image": images, "label": labels}, seed=1)
    data = data.map(hs.data.Rescale(1 / 255), "image").take(4096).shuffle().batch(64)

    def train(rate: float | None, find: bool = False) -> float:
        hs.seed_everything(0)
        net = hs.nets.mlp()
        optimizer = torch.optim.Adam(net.parameters(), lr=rate or 1.0)
        model = hs.Model(net, nn.CrossEntropyLoss(), optimizer)
        if find:
            return float(hs.find_lr(model, data).suggestion)
        return float(model.fit(1, data).history[-1]["loss"])

    suggestion = train(None, find=True)
    assert train(suggestion) < min(train(suggestion / 10), train(suggestion * 100))


def test_it_prints_a_table_and_a_sketch() -> None:
    curve = find_lr_quickly(make_model(groups=True), dataset())
    text = str(curve)
    assert text.startswith(f"suggested learning rate: {curve.suggestion:.3g}")
    assert "by parameter group: " in text
    assert f"{curve.suggestion:>10.3g}" in text
    assert text.count("<- suggested") == 1
    sketch = [line for line in text.splitlines() if "|" in line]
    assert len(sketch) == 12
    assert sum(line.count("*") for line in sketch) > 20
    assert max(map(len, text.splitlines())) < 100
    row = next(line for line in text.splitlines() if "<- suggested" in line)
    i = curve.rates.index(curve.suggestion)
    numbers = [float(number) for number in row.split()[:3]]
    assert numbers == [
        float(f"{curve.rates[i]:.3g}"),
        float(f"{curve.losses[i]:.4g}"),
        float(f"{curve.smoothed[i]:.4g}"),
    ]


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    curve = find_lr_quickly(make_model(), dataset())
    path = curve.plot(tmp_path / "lr.svg")
    assert path == tmp_path / "lr.svg"
    root = ElementTree.fromstring(path.read_text("utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    points = root.findall(f"{space}polyline")[0].attrib["points"].split()
    assert len(points) == len(curve.rates)
    marks = [c for c in root.iter(f"{space}circle") if c.attrib["class"] == "mark"]
    at = points[curve.rates.index(curve.suggestion)].split(",")
    assert [(c.attrib["cx"], c.attrib["cy"]) for c in marks] == [(at[0], at[1])]
    assert f"{curve.suggestion:.3g}" in "".join(root.itertext())
    assert curve._repr_svg_() == path.read_text("utf-8")
    with pytest.raises(ValueError, match=r"plot: expected a file that ends in \.svg"):
        curve.plot(tmp_path / "lr.png")


# --- Refusals ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 0}, "low: expected a finite number above 0"),
        ({"low": 1.0, "high": 1.0}, "high: expected a finite number above 1"),
        ({"high": math.inf}, "high: expected"),
        ({"updates": 9}, "updates: expected a whole number, 10 or more, received 9"),
        ({"updates": 20.0}, "updates: expected a whole number"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hs.find_lr(make_model(), dataset(), **options)


def test_other_things_than_a_model_with_an_optimizer_are_refused() -> None:
    with pytest.raises(TypeError, match=r"got Linear: hs\.find_lr\(hs\.Model"):
        hs.find_lr(nn.Linear(2, 2), dataset())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a model with an optimizer and the built-in step"):
        hs.find_lr(hs.Model(nn.Linear(2, 2)), dataset())
    net = nn.Linear(6, 3)
    own = hs.Model(net, step=lambda x, y: net(x).sum())
    with pytest.raises(ValueError, match="the built-in step"):
        hs.find_lr(own, dataset())


def test_a_loss_that_does_not_fall_is_an_error_and_changes_nothing() -> None:
    model = make_model()
    before = everything(model)
    with pytest.raises(ValueError, match=r"does not fall: from .* at a rate of 1e-12"):
        hs.find_lr(model, dataset(), low=1e-12, high=1e-11)
    assert_same(everything(model), before)

    # Labels that say nothing about new inputs: one pass of noise.
    random_labels = torch.randint(0, 3, (96,), generator=torch.Generator().manual_seed(8))
    data = hs.data.Dataset((X, random_labels)).batch(8)
    with pytest.raises(ValueError, match="does not fall"):
        hs.find_lr(make_model(), data, low=1e-4, high=10, updates=12)


def test_losses_that_only_scatter_are_rarely_taken_for_a_descent() -> None:
    """Simulated: normal noise around a constant, and the same on a descent of three times it."""
    generator = torch.Generator().manual_seed(0)
    noise = 2.0 + 0.1 * torch.randn(1000, 100, generator=generator, dtype=torch.float64)
    fall = 0.3 / (1 + torch.exp(-(torch.arange(100) - 60) / 5))
    width = smoothing_width(100)
    false_descents = sum(descends(row, smooth(row, width)) for row in noise.tolist())
    descents = sum(descends(row, smooth(row, width)) for row in (noise - fall).tolist())
    assert false_descents <= 20
    assert descents >= 980


def test_a_loss_that_is_not_finite_from_the_start_is_an_error() -> None:
    data = hs.data.Dataset((torch.full_like(X, math.nan), Y)).batch(8)
    model = make_model()
    before = everything(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"not finite from there on, after 0 of 100 updates"):
            hs.find_lr(model, data)
        assert_same(everything(model), before)


def test_a_batch_that_does_not_fit_is_explained_and_changes_nothing() -> None:
    model = make_model()
    before = everything(model)
    data = hs.data.Dataset((X, Y + 5)).batch(8)
    with pytest.raises((ValueError, IndexError), match=r"labels|target"):
        hs.find_lr(model, data)
    assert_same(everything(model), before)


def test_it_is_refused_inside_fit() -> None:
    model = make_model()

    class Finder(hs.Callback):
        def epoch_end(self, run: hs.Run) -> None:
            hs.find_lr(model, dataset())

    with pytest.raises(RuntimeError, match="this model is being fitted"):
        model.fit(1, dataset(), callbacks=Finder())


def test_an_interrupt_leaves_the_model_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    before = everything(model)
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 96, 8)]

    class Interrupting:
        def __iter__(self) -> Any:
            for i, batch in enumerate(batches):
                if i == 5:
                    signal.raise_signal(signal.SIGINT)
                yield batch

    with pytest.raises(KeyboardInterrupt):
        hs.find_lr(model, Interrupting())
    assert_same(everything(model), before)
    assert capfd.readouterr() == ("", "")


def test_it_says_nothing_while_it_works(capfd: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    model.net.eval()  # fit would announce that it trains in train mode
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hs.find_lr(model, dataset(), low=1e-3, high=1e6)
    assert capfd.readouterr() == ("", "")
    assert not model.net.training
    assert re.match(r"suggested", str(find_lr_quickly(make_model(), dataset())))
