"""A skipped update leaves everything as it was, decided on the host or on the device.

Buffers of every kind, counters that an optimizer has in Python, momentum that begins later.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.utils.device_values import AsyncHostRead
from tests.support.equal_tensors import assert_equal_tensors, copy_tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
X = torch.ones(4, 3, device=DEVICE)
Y = torch.zeros(4, dtype=torch.int64, device=DEVICE)
INFINITE_X = torch.full_like(X, torch.inf)

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(DEVICE)


def make_step(make_optimizer: MakeOptimizer | None = None, **options: Any) -> hs.TrainStep:
    net = make_net()
    if make_optimizer is None:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = make_optimizer(net.parameters())
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, **options)


def test_a_skip_after_loading_a_state_from_before_the_first_update_leaves_all_finite() -> None:
    step = make_step(decide="device", nonfinite="skip")
    initial_state = step.state_dict()
    step(X, Y)
    step(X, Y)
    step.load_state_dict(initial_state)
    assert step(INFINITE_X, Y).skipped
    for _ in range(2):
        assert step(X, Y).loss.isfinite()
    assert all(p.isfinite().all() for p in step.params)


class CountingSGD(torch.optim.SGD):
    """Counts its updates in a parameter group, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["k"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["k"] += 1


def test_an_optimizer_that_counts_in_python_does_not_count_skipped_updates() -> None:
    step = make_step(CountingSGD, nonfinite="skip")
    assert step.optimizer_kind == "host"
    step(X, Y)
    step(INFINITE_X, Y)
    assert step.optimizer.param_groups[0]["k"] == int(step.state.updates) == 1


def test_a_halted_device_changes_no_weight() -> None:
    step = make_step(decide="device")
    step(X, Y)
    weights_before = copy_tensors(step.params)
    step.state.halted.fill_(1)
    step.accumulator(step.state, (X, Y))  # a cycle with gradients in it, not yet ended
    step._update_on_device(step.state, list(range(len(step.params))))
    assert_equal_tensors(step.params, weights_before)


class SlowHost(AsyncHostRead):
    """As on a GPU, where the counters arrive some updates late; here they never do."""

    def poll(self, value: Callable[[], Tensor], device: torch.device) -> list[int] | None:
        return None


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(3))
        self.rare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, with_rare: bool) -> Tensor:
        total = (x * self.used).sum()
        return total + (x * self.rare).sum() if with_rare else total


@pytest.mark.parametrize("loss_scale", ["none", 8.0])
def test_a_first_gradient_after_a_halt_is_not_committed(loss_scale: Any) -> None:
    """The host decides a parameter's first update: it, too, heeds that the device has stopped."""
    net = TwoBranches()
    step = hs.TrainStep(
        net,
        None,
        torch.optim.Adam(net.parameters(), lr=0.1, fused=True),
        precision=hs.Precision("fp32", scale=loss_scale),
        decide="device",
        nonfinite="raise",
    )
    step.device_watch = SlowHost()
    ones = torch.ones(3)
    assert step(ones, False).updated
    assert step(ones * math.nan, False).skipped
    before = copy_tensors(step.params)
    record = step(ones, True)
    assert not record.updated
    assert not record.skipped
    assert_equal_tensors(step.params, before)
    with pytest.raises(hs.NonFiniteError, match="step 2: non-finite gradient in used"):
        step.check()
    assert step(ones, True).updated


class ForeachCopyDtypes(TorchDispatchMode):
    """Records the dtypes of the targets and of the sources of every foreach copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: list[tuple[set[torch.dtype], set[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            targets, sources = args[:2]
            target_dtypes = {tensor.dtype for tensor in targets}
            source_dtypes = {tensor.dtype for tensor in sources}
            self.dtypes.append((target_dtypes, source_dtypes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("skip", [False, True])
def test_buffers_are_copied_back_dtype_by_dtype(skip: bool) -> None:
    """torch copies lists of mixed dtypes one tensor at a time."""
    torch.manual_seed(0)
    # Six norms: 12 buffers of floats, 6 of integers.
    norms = [nn.BatchNorm1d(3) for _ in range(6)]
    net = nn.Sequential(*norms, nn.Linear(3, 2)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, decide="device", nonfinite="skip")
    step(X, Y)
    step(X, Y)
    buffers_before = copy_tensors(net.buffers())

    with ForeachCopyDtypes() as copies:
        record = step(INFINITE_X if skip else X, Y)
    assert bool(record.skipped) is skip
    assert copies.dtypes
    for target_dtypes, source_dtypes in copies.dtypes:
        assert len(target_dtypes) == 1
        assert len(source_dtypes) == 1

    unchanged = [
        torch.equal(before, buffer)
        for before, buffer in zip(buffers_before, net.buffers(), strict=True)
    ]
    assert all(unchanged) is skip


class ReplacesBuffer(nn.Module):
    """Assigns another tensor to its buffer, as networks over streams do, not into it."""

    def __init__(self, change: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 2)
        self.change = change
        initial = {"replaced": torch.zeros(4, 3), "grown": torch.zeros(1, 3), "filled": None}
        self.register_buffer("last", initial[change])

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "grown":
            self.last = torch.cat([self.last, x.detach()])
        else:
            self.last = x.detach()
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("change", ["replaced", "grown", "filled"])
def test_a_buffer_that_forward_replaced_is_restored_and_the_batch_is_unchanged(
    change: str, decide: Any
) -> None:
    net = ReplacesBuffer(change).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, decide=decide, nonfinite="skip")
    step(X.clone(), Y)
    buffer = net.last
    buffer_values = net.last.clone()

    infinite_x = INFINITE_X.clone()
    assert step(infinite_x, Y).skipped
    assert net.last is buffer
    assert torch.equal(net.last, buffer_values)
    assert torch.equal(infinite_x, INFINITE_X)

    next_x = X * 2
    assert step(next_x, Y).updated
    assert torch.equal(net.last[-4:], next_x)


def train_plain_torch_with_late_momentum(fused: bool) -> list[Tensor]:
    """Three updates without momentum, then three with it."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    for momentum in (0.0, 0.0, 0.0, 0.9, 0.9, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        optimizer.zero_grad()
        F.cross_entropy(net(X), Y).backward()
        optimizer.step()
    return copy_tensors(net.parameters())


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("fused", [True, False])
def test_momentum_that_is_switched_on_later_begins_at_zero_also_after_a_skip(
    fused: bool, decide: Any
) -> None:
    def make_optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, fused=fused)

    step = make_step(make_optimizer, decide=decide, nonfinite="skip")
    for _ in range(3):
        step(X, Y)
    step.optimizer.param_groups[0]["momentum"] = 0.9
    assert step(INFINITE_X, Y).skipped
    for _ in range(3):
        assert step(X, Y).updated
    assert_equal_tensors(step.params, train_plain_torch_with_late_momentum(fused))
