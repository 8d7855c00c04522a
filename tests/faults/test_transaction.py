"""A skipped step changes nothing except the loss scale and the skip counters, bit for bit."""

import contextlib
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
# Fields of StepState that a skipped step may change.
FIELDS_OF_A_SKIP = {"steps", "skips", "streak", "scale", "growth", "bad", "cycle"}
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
    """√(z·(1 + h²)) is finite at z = 0, but its gradient there is 0/0.

    With z = 0 that happens through all layers, with z_gain = 0 for `gain` alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, z: Tensor, z_gain: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        h = h + torch.sqrt(z * (1 + h.square()))
        return self.last(h) + torch.sqrt(z_gain * self.gain)


def finite_batch(index: int) -> Batch:
    torch.manual_seed(100 + index)
    x = torch.randn(5, 3).to(DEVICE)
    y = torch.randint(2, (5,)).to(DEVICE)
    one = torch.ones((), device=DEVICE)
    return x, one, one, y


def overflowing_batch(fault: str) -> Batch:
    """Returns a batch that gives non-finite numbers in the way that `fault` says."""
    x, one, _, y = finite_batch(99)
    zero = torch.zeros_like(one)
    if fault == "forward":
        row = torch.tensor([2], device=DEVICE)
        return x.index_fill(0, row, float("inf")), one, one, y
    if fault == "backward":
        return x, zero, one, y
    return x, one, zero, y


def build(precision: str, optimizer: str, accumulate: int = 1, **options: Any) -> hs.TrainStep:
    torch.manual_seed(1)
    net = Fragile().to(DEVICE)
    make_optimizer, decide = OPTIMIZERS[optimizer]
    # BatchNorm in a cycle gives a notice.
    check = contextlib.nullcontext()
    if accumulate > 1:
        check = pytest.warns(hs.Notice, match="batch-coupled")
    with check:
        return hs.TrainStep(
            net,
            nn.CrossEntropyLoss(),
            make_optimizer(net.parameters()),
            precision=PRECISIONS[precision],
            accumulate=accumulate,
            decide=decide,
            **options,
        )


def copy_leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Returns every leaf inside nested dicts and lists, by path; tensors are cloned."""
    if isinstance(value, Tensor):
        return {path: value.detach().clone()}
    if not isinstance(value, (dict, list)):
        return {path: value}
    leaves: dict[str, Any] = {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        leaves.update(copy_leaves(inner, f"{path}.{key}"))
    return leaves


def copy_protected_state(step: hs.TrainStep) -> dict[str, Any]:
    """Returns what a skipped step must not change.

    These are weights, buffers, optimizer state, and the other fields of StepState.
    """
    protected: dict[str, Any] = {
        "net": step.net.state_dict(),
        "optimizer": step.optimizer.state_dict()["state"],
    }
    for field in fields(step.state):
        if field.name not in FIELDS_OF_A_SKIP:
            protected[field.name] = getattr(step.state, field.name)
    return copy_leaves(protected)


def is_same(actual: Any, expected: Any) -> bool:
    if isinstance(actual, Tensor):
        return torch.equal(actual, expected) and actual.dtype == expected.dtype
    return bool(actual == expected)


def assert_unchanged(step: hs.TrainStep, before: dict[str, Any]) -> None:
    after = copy_protected_state(step)
    assert after.keys() == before.keys()
    assert [name for name in before if not is_same(before[name], after[name])] == []


def assert_skipped(step: hs.TrainStep, record: hs.Record, scale: Tensor, streak: int) -> None:
    """Asserts that the record says so, and what became of the scale that this step used."""
    assert record.skipped
    assert not record.updated
    assert torch.equal(record.scale, scale), "the scale this step used"
    is_fixed = isinstance(step.precision.scale, hs.FixedScale)
    assert torch.equal(step.state.scale, scale if is_fixed else scale / 2)
    assert int(step.state.streak) == streak


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_skipped_step_leaves_everything_bit_identical(precision: str, optimizer: str) -> None:
    """Every fault as the very first step, and again after each of two updates."""
    if (precision, optimizer) == ("fp16", "sgd-fused") and not torch.cuda.is_available():
        pytest.skip(
            "torch's fused SGD does not update half parameters on a CPU (pytorch#191763): "
            "the step refuses it"
        )
    if optimizer == "sgd-device":
        # Unfused SGD would read a rate that is a tensor: it gets no table.
        rates = [0.05, 0.05, 0.05]
        step = build(precision, optimizer, ema=0.9)
    else:
        rates = [0.05, 0.04, 0.03]
        step = build(precision, optimizer, ema=0.9, lr=rates)

    for i in range(3):
        for streak, fault in enumerate(FAULTS, 1):
            before = copy_protected_state(step)
            scale = step.state.scale.clone()
            record = step(*overflowing_batch(fault))
            assert_skipped(step, record, scale, streak)
            assert_unchanged(step, before)
        record = step(*finite_batch(i))
        assert record.updated
        assert int(step.state.skips) == 3 * i + 3
        assert int(step.state.streak) == 0
        assert int(step.state.updates) == i + 1
        # On CUDA rates are float32.
        rate = record.lr.item()
        assert math.isclose(rate, rates[i], rel_tol=1e-7), "skips do not move the schedule"
    for value in copy_protected_state(step).values():
        if isinstance(value, Tensor):
            assert torch.isfinite(value).all()


@pytest.mark.parametrize("updates_before", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("optimizer", ["sgd-device", "adam-host", "adam-fused-device"])
@pytest.mark.parametrize("precision", ["O1", "O2-low-norms", "fp16-kahan"])
def test_one_overflowing_micro_batch_undoes_its_full_cycle(
    precision: str, optimizer: str, updates_before: int
) -> None:
    step = build(precision, optimizer, accumulate=3, ema=0.9)
    for i in range(3 * updates_before):
        step(*finite_batch(i))
    for position, fault in enumerate(FAULTS):
        before = copy_protected_state(step)
        scale = step.state.scale.clone()
        cycle = [finite_batch(5), finite_batch(6), finite_batch(7)]
        cycle[position] = overflowing_batch(fault)
        records = [step(*batch) for batch in cycle]
        assert_skipped(step, records[-1], scale, position + 1)
        assert_unchanged(step, before)


def test_a_skipped_tail_is_undone_too() -> None:
    step = build("O2", "adam-fused-device", accumulate=3)
    for i in range(3):
        step(*finite_batch(i))
    for streak, fault in enumerate(FAULTS, 1):
        before = copy_protected_state(step)
        scale = step.state.scale.clone()
        step(*overflowing_batch(fault))
        record = step.flush()
        assert record is not None
        assert_skipped(step, record, scale, streak)
        assert_unchanged(step, before)


@pytest.mark.parametrize("overflow_steps", [(0,), (0, 1), (2,), (0, 3)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_around_skips_equals_plain_torch_without_them(
    optimizer: str, overflow_steps: tuple[int, ...]
) -> None:
    """Scales are powers of two, so that fp32 gradients are scaled exactly.

    SGD's dampening must see the true first step.
    """
    step = build("fp32", optimizer)
    torch.manual_seed(1)
    plain_net = Fragile().to(DEVICE)
    make_optimizer, _ = OPTIMIZERS[optimizer]
    plain_optimizer = make_optimizer(plain_net.parameters())
    for i in range(5):
        if i in overflow_steps:
            step(*overflowing_batch(FAULTS[i % 3]))
        step(*finite_batch(i))

        *inputs, target = finite_batch(i)
        plain_optimizer.zero_grad()
        nn.functional.cross_entropy(plain_net(*inputs), target).backward()
        plain_optimizer.step()
    assert int(step.state.skips) == len(overflow_steps)
    expected = copy_leaves([plain_net.state_dict(), plain_optimizer.state_dict()["state"]])
    actual = copy_leaves([step.net.state_dict(), step.optimizer.state_dict()["state"]])
    assert [name for name in expected if not is_same(expected[name], actual[name])] == []


def test_buffers_of_a_loss_are_restored_too() -> None:
    class CentredLoss(nn.Module):
        """A loss that keeps a running centre."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(2))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            self.centre.lerp_(out.detach().mean(0), 0.1)
            return (out - self.centre - target).square().mean()

    net = nn.Linear(3, 2).to(DEVICE)
    loss = CentredLoss().to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, loss, optimizer, precision=PRECISIONS["fp32"])
    x = torch.randn(4, 3, device=DEVICE)
    y = torch.randn(4, 2, device=DEVICE)
    step(x, y)
    before = loss.centre.clone()
    assert step(x * float("inf"), y).skipped
    assert torch.equal(loss.centre, before)
