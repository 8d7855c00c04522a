"""An update in few kernels equals Update.on_device.

Without a GPU, Triton interprets the kernels on the CPU.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.captured.record_buffer import write_row
from halfstep.step.gradients import clip_norm_
from halfstep.step.state import UpdateResult
from tests.support.triton_interpreter import (
    INTERPRETED,
    only_interpreted,
    run_interpreted,
    starts_interpreter,
)

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
# The interpreter computes with numpy, which warns about inf and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LR_TABLE = [0.1, 0.07, 0.03]
SCALE = hs.DynamicScale(init=2.0**10, growth=2.1, backoff=0.3, interval=2, floor=200.0, cap=2100.0)
MIXED = hs.Precision("O1", scale=SCALE)
FIXED = hs.Precision("O1", scale=64.0)

# Bound of a norm's relative error: 12 halvings in a block, 7 among blocks, 3 among gradients and
# 4 roundings of squares and roots; the root halves them; half an ulp of float32 each.
NORM_ERROR = (12 + 7 + 3 + 4) / 2 * 2.0**-24

# By name: options, and the order of events (":n" is the cycle's weight).
# Every option of an update is in one of them.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "raise": (
        {"nonfinite": "raise", "masked": True},
        "good zero none none-inf none-good huge none good inf",
    ),
    "skip": (
        {"nonfinite": "skip", "ema": 0.9, "lr": LR_TABLE, "clip_norm": 0.1},
        "good inf nan good tiny huge good",
    ),
    "scaled": ({"precision": MIXED, "lr": LR_TABLE}, "good good good inf inf inf good"),
    "ignore": ({"precision": FIXED, "nonfinite": "ignore", "clip_norm": 4.0}, "good inf nan good"),
    "weighted": (
        {"nonfinite": "skip", "lr": [LR_TABLE, [0.2] * 3]},
        "good:4 good:0 nan:0 inf:2 good:1",
    ),
    "cycle": (
        {"precision": MIXED, "accumulate": 2, "ema": 0.5},
        "good:2 inf:1 good:0 inf:0 good:4",
    ),
    "groups": ({"nonfinite": "skip", "second_lr": 0.02}, "good inf good"),
}
# Half parameters: gradients as backward returned them, and widened because something edits them.
HALF_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": (
        {"precision": "fp16", "nonfinite": "skip", "lr": LR_TABLE},
        "good inf nan good tiny zero",
    ),
    "bf16": (
        {"precision": "bf16", "nonfinite": "raise", "ema": 0.9, "masked": True},
        "good none good inf good",
    ),
    "clipped": ({"precision": "bf16", "nonfinite": "skip", "clip_norm": 0.1}, "good inf good tiny"),
    "half cycle": (
        {"precision": "fp16", "nonfinite": "skip", "accumulate": 2},
        "good:2 inf:1 good:0 good:4",
    ),
}

# The size of a gradient's elements and the loss by kind of event; any other event has the default.
GRAD_SIZES = {
    "good": 2.0**-6,
    "tiny": 2.0**-20,
    "huge": 2.0**100,
    "zero": 0.0,
    "none": 0.0,
    "none-inf": 0.0,
}
LOSSES = {"none": math.nan, "none-good": math.nan, "none-inf": -math.inf}


class ParameterNet(nn.Module):
    """Parameters whose sizes are powers of 4, so that gradients of ±2^k have exact norms.

    The last parameter gets no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = [(4, 4), (4,), (64, 64), (128, 128), (1, 1), (2, 2)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)
        # Dense, in another order of elements.
        self.weights[2].data = self.weights[2].data.t()
        self.register_buffer("mean", torch.zeros(3))


def build(
    *,
    fused_kernels: bool,
    masked: bool = False,
    second_lr: float | None = None,
    make_optimizer: Callable[..., Any] = torch.optim.SGD,
    **options: Any,
) -> Any:
    """Returns a step after one update, so that its optimizer has state.

    `second_lr` is the learning rate of a second parameter group.
    """
    torch.manual_seed(0)
    net = ParameterNet().to(DEVICE)

    # Two groups where a second rate or a table of two rows needs them.
    lr_table = options.get("lr")
    has_two_rows = isinstance(lr_table, list) and isinstance(lr_table[0], list)
    params: Any = net.parameters()
    if second_lr is not None or has_two_rows:
        first_group = {"params": list(net.weights[:3])}
        second_group = {"params": list(net.weights[3:]), "lr": second_lr or 0.05}
        params = [first_group, second_group]

    if make_optimizer is torch.optim.SGD:
        settings = {"momentum": 0.9}
    else:
        settings = {"eps": 1e-3}  # the default, 1e-8, is 0 in float16
    optimizer = make_optimizer(params, lr=0.05, fused=True, **settings)

    loss = nn.CrossEntropyLoss() if masked else nn.MSELoss()
    step = hs.TrainStep(net, loss, optimizer, decide="device", **options)
    assert step.update.ignores_targets is masked

    for param in step.params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    step.update.use_fused_kernels = fused_kernels
    step.update.commit.step_in_pieces = fused_kernels
    return step


def run_event(
    step: Any, event: str, index: int, record_target: "RecordTable | None" = None
) -> UpdateResult:
    """Ends one cycle by hand.

    Gradients are ±2^k · scale; an event "inf" or "nan" puts such a value into one of them. "huge"
    does so too, beside finite gradients whose norms are infinite.
    """
    state = step.state
    cycle = state.cycle
    kind, _, weight = event.partition(":")
    accumulates = step.options.accumulate > 1

    # Gradients with random signs, in the dtype in which a cycle adds them up.
    generator = torch.Generator().manual_seed(index)
    signs = [torch.randint(0, 2, p.shape, generator=generator) * 2 - 1 for p in step.params]
    if accumulates:
        dtypes = step.update.wide_dtypes
    else:
        dtypes = [p.dtype for p in step.params]
    size = GRAD_SIZES.get(kind, 1.0)
    factor = float(state.scale) * (float(weight or 1) or 1)
    grads = []
    for param, sign, dtype in zip(step.params, signs, dtypes, strict=True):
        values = (sign * size * factor).to(DEVICE, dtype)
        grads.append(torch.empty_like(param, dtype=dtype).copy_(values))
    if kind in ("inf", "nan", "huge"):
        grads[3][100, 7] = math.nan if kind == "nan" else math.inf

    cycle.buffers = step.buffers.copy([])
    step.net.mean += 1
    cycle.grads = [*grads[:-1], None]

    loss_dtype = torch.float64 if accumulates else torch.float32
    loss = LOSSES.get(kind, 1.1 * (index + 1))
    cycle.loss = torch.tensor(loss, dtype=loss_dtype, device=DEVICE)
    cycle.weight = None
    if weight:
        cycle.weight = torch.tensor(float(weight), dtype=torch.float64, device=DEVICE)

    result = step.update.on_device(state, list(range(len(grads) - 1)), record_target)
    cycle.close()
    return result


def named_tensors(step: Any) -> Iterator[tuple[str, Tensor]]:
    """Everything that an update may change, by name."""
    yield from step.net.state_dict().items()
    for i, param in enumerate(step.params):
        for key, value in step.optimizer.state[param].items():
            yield f"{key} of {i}", value
        yield f"gradient of {i}", torch.tensor(param.grad is None)
    for i, group in enumerate(step.optimizer.param_groups):
        yield f"rate of {i}", torch.as_tensor(group["lr"])
    for name in ("updates", "skips", "streak", "scale", "growth", "halted", "bad"):
        yield name, getattr(step.state, name)
    for i, average in enumerate(step.state.ema):
        yield f"average {i}", average
    yield "cycles ended", step.update.cycles_ended


def assert_same(name: str, actual: Tensor, expected: Tensor) -> None:
    """Asserts equal dtype, shape, device and values; NaN equals NaN."""
    assert actual.dtype == expected.dtype, name
    assert actual.shape == expected.shape, name
    assert actual.device == expected.device, name
    is_equal = torch.equal(actual.nan_to_num(1e9), expected.nan_to_num(1e9))
    assert is_equal, (name, actual, expected)


def assert_same_steps(label: str, step: Any, expected_step: Any) -> None:
    """Asserts that two steps hold equal tensors in everything an update may change."""
    pairs = zip(named_tensors(step), named_tensors(expected_step), strict=True)
    for (name, actual), (_, expected) in pairs:
        assert_same(f"{label}: {name}", actual, expected)


class RecordTable:
    """A table of two rows whose next row is the second: a third record must be left out."""

    def __init__(self, groups: int) -> None:
        self.table = torch.full((2, 6 + groups), -1.0, dtype=torch.float64, device=DEVICE)
        self.next_row = torch.ones(1, dtype=torch.int64, device=DEVICE)


def run_event_with_record(step: Any, event: str, index: int) -> UpdateResult:
    """Runs the event twice and asserts that the kernels write the record as `write_row` does.

    They do so for a cycle of one batch. The second record has no row and must change nothing.
    """
    groups = len(step.optimizer.param_groups)
    written = RecordTable(groups)
    expected = RecordTable(groups)
    label = f"{event} {index}"

    result = run_event(step, event, index, written)
    assert result.record_written is (step.options.accumulate == 1)
    if result.record_written:
        record = hs.Record(
            loss=result.cycle_loss,
            cycle_loss=result.cycle_loss,
            lr=result.lr,
            scale=result.scale,
            skipped=result.skipped,
            grad_norm=result.grad_norm,
            updated=result.updated,
            fingerprint=expected.next_row,
        )
        write_row(
            expected.table,
            expected.next_row,
            record,
            keep_loss=False,
            advance=True,
            use_kernel=False,
        )
    assert_same(f"{label}: row", written.table, expected.table)
    assert_same(f"{label}: next row", written.next_row, expected.next_row)

    run_event(step, event, index, written)
    assert_same(f"{label}: a row beyond the table", written.table, expected.table)
    assert written.next_row.item() == (3 if result.record_written else 1)
    return result


def assert_fused_equals_plain(
    case: str, make_optimizer: Callable[..., Any] = torch.optim.SGD
) -> None:
    """Asserts equal results and equal steps after each event of the case."""
    options, events = (CASES | HALF_CASES)[case]
    fused = build(fused_kernels=True, make_optimizer=make_optimizer, **options)
    plain = build(fused_kernels=False, make_optimizer=make_optimizer, **options)
    for index, event in enumerate(events.split()):
        label = f"{event} {index}"
        actual = run_event_with_record(fused, event, index)
        expected = run_event(plain, event, index)
        run_event(plain, event, index)
        fields = actual._fields[:6]
        for field, a, b in zip(fields, actual.tensors(), expected.tensors(), strict=True):
            assert_same(f"{label}: {field}", a, b)
        assert_same_steps(label, fused, plain)
    assert len(fused.update.fused_update._plans) == 1, "the kernels did not run"
    assert None not in fused.update.fused_update._plans.values()


@only_interpreted
@pytest.mark.parametrize("case", CASES)
def test_fused_update_equals_plain_update_in_everything(case: str) -> None:
    assert_fused_equals_plain(case)


@only_interpreted
@pytest.mark.parametrize("case", HALF_CASES)
def test_fused_update_of_half_parameters_equals_plain_update(case: str) -> None:
    """With AdamW: torch's fused SGD does not move half parameters on a CPU."""
    assert_fused_equals_plain(case, torch.optim.AdamW)


def make_grad(param: Tensor, values: Tensor) -> Tensor:
    """Values as a gradient of `param`: its dtype and its strides, which fused kernels require."""
    return torch.empty_like(param, requires_grad=False).copy_(values)


def norms_of_half_gradients_are_float32() -> None:
    """Squares beyond float16's range, and below it; gradients stay as they were."""
    for precision, size in (("fp16", 3e4), ("fp16", 1e-6), ("bf16", 1e15), ("bf16", 1e-15)):
        step = build(
            fused_kernels=True,
            make_optimizer=torch.optim.AdamW,
            precision=precision,
            nonfinite="skip",
        )
        generator = torch.Generator().manual_seed(1)
        grads = []
        for param in step.params:
            values = torch.randn(param.shape, generator=generator).clamp(-2, 2) * size
            grads.append(make_grad(param, values))

        state = step.state
        state.cycle.grads = [grad.clone() for grad in grads]
        state.cycle.buffers = step.buffers.copy([])
        state.cycle.loss = torch.ones((), device=DEVICE)
        result = step.update.on_device(state, list(range(len(grads))))

        exact_norm = torch.cat([grad.double().flatten() for grad in grads]).norm()
        assert abs(result.grad_norm.double() / exact_norm - 1) <= NORM_ERROR
        assert all(torch.equal(a, b) for a, b in zip(grads, state.cycle.grads, strict=True))
        assert step.update.fused_update._plans


def gradients_round_as_torch_does() -> None:
    """Reciprocal, product, quotient and clip are exact; the norm is as near as its sums allow."""
    precision = hs.Precision("O1", scale=1000.0)
    step = build(fused_kernels=True, precision=precision, accumulate=2, clip_norm=0.1)
    generator = torch.Generator().manual_seed(1)
    grads = []
    for param in step.params:
        values = torch.randn(param.shape, generator=generator) * 50
        grads.append(make_grad(param, values))

    state = step.state
    state.cycle.grads = [grad.clone() for grad in grads]
    state.cycle.buffers = step.buffers.copy([])
    state.cycle.weight = torch.full((), 3.0, dtype=torch.float64, device=DEVICE)
    state.cycle.loss = torch.full((), 7.0, dtype=torch.float64, device=DEVICE)
    result = step.update.on_device(state, list(range(len(grads))))

    inverse_scale = torch.tensor(1 / 1000.0, dtype=torch.float64).float().to(DEVICE)
    weight = torch.tensor(3.0, device=DEVICE)
    expected_grads = [grad * inverse_scale / weight for grad in grads]
    exact_norm = torch.cat([grad.double().flatten() for grad in expected_grads]).norm()
    assert abs(result.grad_norm.double() / exact_norm - 1) <= NORM_ERROR

    expected_loss = torch.tensor(7 / 3, dtype=torch.float64, device=DEVICE).float()
    assert torch.equal(result.cycle_loss, expected_loss)

    clip_norm_(expected_grads, result.grad_norm, 0.1)
    for i, (grad, expected) in enumerate(zip(state.cycle.grads, expected_grads, strict=True)):
        assert_same(str(i), grad, expected)
    assert step.update.fused_update._plans


def scales_round_once() -> None:
    """A float32 scale times a float64 factor of many bits is rounded to float32 once."""
    scale = hs.DynamicScale(init=1000.1, growth=1.7, backoff=0.55, interval=1, floor=1.0)
    step = build(fused_kernels=True, precision=hs.Precision("O1", scale=scale))
    expected = torch.tensor(1000.1)
    for index, event in enumerate(["good", "good", "inf", "good", "inf", "inf", "good"]):
        assert_same("scale", run_event(step, event, index).scale, expected.to(DEVICE))
        factor = 1.7 if event == "good" else 0.55
        expected = torch.tensor(expected.item() * factor, dtype=torch.float64).float()
    assert step.update.fused_update._plans


def records_are_packed() -> None:
    """Every dtype becomes float64 exactly, for one learning rate or several.

    With keep_loss=True the row before is written again, except for its loss.
    """
    loss = torch.tensor(1.25, device=DEVICE)
    cycle_loss = torch.tensor(0.1, device=DEVICE)
    scale = torch.tensor(65536.0, device=DEVICE)
    true = torch.tensor(True, device=DEVICE)
    false = torch.tensor(False, device=DEVICE)
    half = torch.tensor(2.5, dtype=torch.float16, device=DEVICE)
    one_rate = torch.tensor(0.1, device=DEVICE)
    two_rates = torch.tensor([0.3, 0.1], dtype=torch.float64, device=DEVICE)[:2]
    for lr in (one_rate, two_rates):
        rates = lr.reshape(-1).tolist()
        table = torch.full((4, 6 + lr.numel()), -1.0, dtype=torch.float64, device=DEVICE)
        next_row = torch.tensor([1], device=DEVICE)
        record = hs.Record(loss, cycle_loss, lr, scale, true, half, false, fingerprint=next_row)
        blank = [-1.0] * (6 + lr.numel())

        write_row(table, next_row, record, keep_loss=False, advance=True)
        row = [1.25, cycle_loss.item(), 65536.0, 2.5, 1.0, 0.0, *rates]
        assert table.tolist() == [blank, row, blank, blank]
        assert next_row.tolist() == [2]

        half_record = hs.Record(half, half, lr, half, false, half, true, fingerprint=next_row)
        write_row(table, next_row, half_record, keep_loss=True, advance=False)
        amended_row = [1.25, 2.5, 2.5, 2.5, 0.0, 1.0, *rates]
        assert table.tolist() == [blank, amended_row, blank, blank]
        assert next_row.tolist() == [2]

        write_row(table, next_row, record, keep_loss=False, advance=False)
        assert table.tolist() == [blank, amended_row, row, blank]
        assert next_row.tolist() == [2]


def unsupported_updates_are_refused() -> None:
    """What the kernels cannot do stays with torch."""
    step = build(fused_kernels=True, nonfinite="skip")
    grad_indices = [0, 2]
    cycle = step.state.cycle
    cycle.loss = torch.zeros((), device=DEVICE)

    def fits(first_grad: Tensor, second_grad: Tensor) -> bool:
        cycle.grads = [first_grad, None, second_grad, None, None, None]
        return bool(step.update.fused_update.fits(step.state, grad_indices))

    small = torch.zeros(4, 4, device=DEVICE)
    large = torch.zeros(64, 64, device=DEVICE)
    assert fits(small, large)
    assert fits(small.t(), large.t())
    assert not fits(small, large.half())
    assert not fits(small.half(), large.half())
    not_dense = torch.zeros(64, 128, device=DEVICE)[:, ::2]
    assert not fits(small, not_dense)
    expanded = torch.zeros((), device=DEVICE).expand(64, 64)
    assert not fits(small, expanded)
    not_at_16_bytes = torch.zeros(4097, device=DEVICE)[1:].view(64, 64)
    assert not fits(small, not_at_16_bytes)
    shared_memory = large[0, :16].view(4, 4)
    assert not fits(shared_memory, large)
    assert not fits(small, large.to_sparse())

    # A hook of the optimizer may look at anything.
    hook = step.optimizer.register_step_pre_hook(lambda *_: None)
    assert not fits(small, large)
    hook.remove()
    assert fits(small, large)

    clipped_by_value = build(fused_kernels=True, clip_value=1.0)
    clipped_by_value.state.cycle.grads = cycle.grads
    clipped_by_value.state.cycle.loss = cycle.loss
    assert not clipped_by_value.update.fused_update.fits(clipped_by_value.state, grad_indices)

    # Parameters of two dtypes; those of one dtype alone do fit.
    precision = hs.Precision("fp16", keep={"1": "fp32"})
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), eps=1e-3, fused=True)
    mixed = hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision)
    mixed.state.cycle.grads = [torch.zeros_like(param) for param in mixed.params]
    mixed.state.cycle.loss = cycle.loss
    assert len({param.dtype for param in mixed.params}) == 2
    assert not mixed.update.fused_update.fits(mixed.state, [0, 1, 2, 3])
    assert mixed.update.fused_update.fits(mixed.state, [0, 1])


KERNEL_CHECKS = [
    norms_of_half_gradients_are_float32,
    gradients_round_as_torch_does,
    scales_round_once,
    records_are_packed,
    unsupported_updates_are_refused,
]


@only_interpreted
@pytest.mark.parametrize("check", KERNEL_CHECKS)
def test_kernels_hold(check: Callable[[], None]) -> None:
    check()


@pytest.mark.skipif(
    INTERPRETED or DEVICE == "cuda", reason="the path without kernels is a plain CPU's"
)
def test_records_are_packed_without_triton() -> None:
    records_are_packed()


@starts_interpreter
def test_the_interpreted_kernels_pass_every_case() -> None:
    run_interpreted(__file__, len(CASES) + len(HALF_CASES) + len(KERNEL_CHECKS), "")
