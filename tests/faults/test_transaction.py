"""A skipped step is no step: after a planted overflow all but scale and skip counters is as it was, bit for bit."""

import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = hs.DynamicScale(init=256.0)
ALLOWED = {
    "steps",
    "skips",
    "streak",
    "scale",
    "growth",
    "bad",
    "cycle",
}  # fields a skipped step may move
PRECISIONS = {
    "fp32": hs.Precision("fp32", scale=SCALE),
    "fp64": hs.Precision("fp64", scale=SCALE),
    "O1": hs.Precision("O1", scale=SCALE),
    "O2": hs.Precision("O2", scale=SCALE),
    "O2-low-norms": hs.Precision("O2", scale=SCALE, keep_batchnorm_fp32=False),
    "O3": hs.Precision("O3", scale=SCALE),
    "O2-bf16": hs.Precision("O2", dtype="bfloat16", scale=SCALE),
    "fp16": hs.Precision("fp16", scale=SCALE),
    "fp16-kahan": hs.Precision("fp16", scale=SCALE, rounding="kahan"),
    "fp16-stochastic": hs.Precision("fp16", scale=SCALE, rounding="stochastic"),
    "bf16-kahan": hs.Precision("bf16", scale=hs.FixedScale(value=256.0), rounding="kahan"),
}
EPS = 1e-4  # Adam's 1e-8 is 0 in float16
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01)
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "sgd-host": (SGD, "host"),
    "sgd-device": (partial(SGD, foreach=True), "device"),
    "sgd-fused": (partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True), "device"),
    "adam-host": (partial(torch.optim.Adam, lr=0.05, amsgrad=True, eps=EPS), "host"),
    "adam-fused-host": (partial(torch.optim.AdamW, lr=0.05, fused=True, eps=EPS), "host"),
    "adam-fused-device": (partial(torch.optim.AdamW, lr=0.05, fused=True, eps=EPS), "device"),
}
FAULTS = ("forward", "backward", "one parameter")
Batch = tuple[Tensor, ...]


class Fragile(nn.Module):
    """√(z·(1 + h²)) is finite at z = 0, but its gradient there is 0/0: through all layers, or for `gain` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, z: Tensor, z_gain: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        h = h + torch.sqrt(z * (1 + h.square()))
        return self.last(h) + torch.sqrt(z_gain * self.gain)


def good(i: int) -> Batch:
    torch.manual_seed(100 + i)
    one = torch.ones((), device=DEVICE)
    return torch.randn(5, 3).to(DEVICE), one, one, torch.randint(2, (5,)).to(DEVICE)


def bad(fault: str) -> Batch:
    x, one, _, y = good(99)
    zero = torch.zeros_like(one)
    if fault == "forward":
        return x.index_fill(0, torch.tensor([2], device=DEVICE), float("inf")), one, one, y
    return (x, zero, one, y) if fault == "backward" else (x, one, zero, y)


def build(precision: str, optimizer: str, accumulate: int = 1, **options: Any) -> hs.TrainStep:
    torch.manual_seed(1)
    net = Fragile().to(DEVICE)
    make, decide = OPTIMIZERS[optimizer]
    settings = {
        "precision": PRECISIONS[precision],
        "accumulate": accumulate,
        "decide": decide,
        **options,
    }
    build = partial(hs.TrainStep, net, nn.CrossEntropyLoss(), make(net.parameters()), **settings)
    if accumulate == 1:
        return build()
    with pytest.warns(hs.Notice, match="batch-coupled"):
        return build()


def tensors(value: Any, name: str = "") -> dict[str, Any]:
    """Every leaf inside nested dicts and lists, by path; tensors cloned."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, inner in items for k, v in tensors(inner, f"{name}.{key}").items()}
    return {name: value.detach().clone() if isinstance(value, Tensor) else value}


def everything(step: hs.TrainStep) -> dict[str, Any]:
    """What a skipped step must leave alone: weights, buffers, optimizer state, and the fields of StepState."""
    kept = {
        f.name: getattr(step.state, f.name) for f in fields(step.state) if f.name not in ALLOWED
    }
    return tensors(
        {"net": step.net.state_dict(), "optimizer": step.optimizer.state_dict()["state"], **kept}
    )


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b


def assert_untouched(step: hs.TrainStep, before: dict[str, Any]) -> None:
    after = everything(step)
    assert after.keys() == before.keys()
    assert [name for name in before if not same(before[name], after[name])] == []


def assert_skipped(step: hs.TrainStep, record: hs.Record, scale: Tensor, streak: int) -> None:
    fixed = isinstance(step.precision.scale, hs.FixedScale)
    assert record.skipped
    assert not record.updated
    assert torch.equal(record.scale, scale), "the scale this step used"
    assert torch.equal(step.state.scale, scale if fixed else scale / 2)
    assert int(step.state.streak) == streak


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_skipped_step_leaves_everything_bit_identical(precision: str, optimizer: str) -> None:
    """Every fault as the very first step, and again after each of two updates."""
    if (precision, optimizer) == ("fp16", "sgd-fused") and not torch.cuda.is_available():
        pytest.skip(
            "torch's fused SGD does not update half parameters on a CPU (pytorch#191763): the step refuses it"
        )
    rates = (
        {} if optimizer == "sgd-device" else {"lr": [0.05, 0.04, 0.03]}
    )  # unfused SGD reads a tensor rate
    step = build(precision, optimizer, ema=0.9, **rates)
    for i in range(3):
        for streak, fault in enumerate(FAULTS, 1):
            before, scale = everything(step), step.state.scale.clone()
            assert_skipped(step, step(*bad(fault)), scale, streak)
            assert_untouched(step, before)
        record = step(*good(i))
        assert record.updated
        assert (int(step.state.skips), int(step.state.streak), int(step.state.updates)) == (
            3 * i + 3,
            0,
            i + 1,
        )
        rate = rates.get("lr", [0.05] * 3)[i]
        assert math.isclose(record.lr.item(), rate, rel_tol=1e-7), (
            "the schedule stood still"
        )  # float32 on CUDA
    assert all(
        torch.isfinite(value).all()
        for value in everything(step).values()
        if isinstance(value, Tensor)
    )


@pytest.mark.parametrize("warm", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("optimizer", ["sgd-device", "adam-host", "adam-fused-device"])
@pytest.mark.parametrize("precision", ["O1", "O2-low-norms", "fp16-kahan"])
def test_one_bad_micro_batch_takes_its_whole_cycle_back(
    precision: str, optimizer: str, warm: int
) -> None:
    step = build(precision, optimizer, accumulate=3, ema=0.9)
    for i in range(3 * warm):
        step(*good(i))
    for position, fault in enumerate(FAULTS):
        before, scale = everything(step), step.state.scale.clone()
        cycle = [good(5), good(6), good(7)]
        cycle[position] = bad(fault)
        records = [step(*batch) for batch in cycle]
        assert_skipped(step, records[-1], scale, position + 1)
        assert_untouched(step, before)


def test_a_skipped_tail_is_taken_back_too() -> None:
    step = build("O2", "adam-fused-device", accumulate=3)
    for i in range(3):
        step(*good(i))
    for streak, fault in enumerate(FAULTS, 1):
        before, scale = everything(step), step.state.scale.clone()
        step(*bad(fault))
        record = step.flush()
        assert record is not None
        assert_skipped(step, record, scale, streak)
        assert_untouched(step, before)


@pytest.mark.parametrize("when", [(0,), (0, 1), (2,), (0, 3)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_around_skips_equals_plain_torch_without_them(
    optimizer: str, when: tuple[int, ...]
) -> None:
    """Scales are powers of two, so that fp32 gradients are scaled exactly; dampening sees the true first step."""
    step = build("fp32", optimizer)
    torch.manual_seed(1)
    plain = Fragile().to(DEVICE)
    reference = OPTIMIZERS[optimizer][0](plain.parameters())
    for i in range(5):
        if i in when:
            step(*bad(FAULTS[i % 3]))
        step(*good(i))
        *inputs, target = good(i)
        reference.zero_grad()
        nn.functional.cross_entropy(plain(*inputs), target).backward()
        reference.step()
    assert int(step.state.skips) == len(when)
    expected = tensors([plain.state_dict(), reference.state_dict()["state"]])
    got = tensors([step.net.state_dict(), step.optimizer.state_dict()["state"]])
    assert [name for name in expected if not same(expected[name], got[name])] == []


def test_buffers_of_a_loss_are_taken_back_too() -> None:
    class Centred(nn.Module):
        """A loss that keeps a running centre."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(2))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            self.centre.lerp_(out.detach().mean(0), 0.1)
            return (out - self.centre - target).square().mean()

    net, loss = nn.Linear(3, 2).to(DEVICE), Centred().to(DEVICE)
    step = hs.TrainStep(
        net, loss, torch.optim.SGD(net.parameters(), lr=0.1), precision=PRECISIONS["fp32"]
    )
    x, y = torch.randn(4, 3, device=DEVICE), torch.randn(4, 2, device=DEVICE)
    step(x, y)
    before = loss.centre.clone()
    assert step(x * float("inf"), y).skipped
    assert torch.equal(loss.centre, before)
