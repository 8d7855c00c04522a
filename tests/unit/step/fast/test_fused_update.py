"""An update in few kernels equals Update.on_device. Without a GPU, Triton interprets the kernels on the CPU."""

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
from tests.support.triton_interpreter import INTERPRETED, inside, interpret, outside

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # the interpreter's numpy, on inf and NaN
TABLE = [0.1, 0.07, 0.03]
SCALE = hs.DynamicScale(init=2.0**10, growth=2.1, backoff=0.3, interval=2, floor=200.0, cap=2100.0)
MIXED, FIXED = hs.Precision("O1", scale=SCALE), hs.Precision("O1", scale=64.0)

# By name: options, and the order of events (":n" is the cycle's weight). Every option of an update is in one of them.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "raise": (
        {"nonfinite": "raise", "masked": True},
        "good zero none none-inf none-good inf none good inf",
    ),
    "skip": (
        {"nonfinite": "skip", "ema": 0.9, "lr": TABLE, "clip_norm": 0.1},
        "good inf nan good tiny good",
    ),
    "scaled": ({"precision": MIXED, "lr": TABLE}, "good good good inf inf inf good"),
    "ignore": ({"precision": FIXED, "nonfinite": "ignore", "clip_norm": 4.0}, "good inf nan good"),
    "weighted": (
        {"nonfinite": "skip", "lr": [TABLE, [0.2] * 3]},
        "good:4 good:0 nan:0 inf:2 good:1",
    ),
    "cycle": (
        {"precision": MIXED, "accumulate": 2, "ema": 0.5},
        "good:2 inf:1 good:0 inf:0 good:4",
    ),
    "groups": ({"nonfinite": "skip", "second": 0.02}, "good inf good"),
}
# Half parameters: gradients as backward left them, and widened because something edits them.
HALVES: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": (
        {"precision": "fp16", "nonfinite": "skip", "lr": TABLE},
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


class Holder(nn.Module):
    """Parameters whose sizes are powers of 4, so that gradients of ±2^k have exact norms; one more in no gradient."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(4, 4), (4,), (64, 64), (128, 128), (1, 1), (2, 2)]
        self.held = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)
        self.held[2].data = self.held[2].data.t()  # dense, in another order
        self.register_buffer("mean", torch.zeros(3))


def build(
    *,
    quick: bool,
    masked: bool = False,
    second: float | None = None,
    make: Callable[..., Any] = torch.optim.SGD,
    **options: Any,
) -> Any:
    """A step, one update old, so that its optimizer has state; `second`: the rate of a second group."""
    torch.manual_seed(0)
    net = Holder().to(DEVICE)
    groups = [{"params": list(net.held[:3])}, {"params": list(net.held[3:]), "lr": second or 0.05}]
    momentum = (
        {"momentum": 0.9} if make is torch.optim.SGD else {"eps": 1e-3}
    )  # 1e-8 is 0 in float16
    several = second is not None or (
        isinstance(options.get("lr"), list) and isinstance(options["lr"][0], list)
    )
    opt = make(groups if several else net.parameters(), lr=0.05, fused=True, **momentum)
    loss = nn.CrossEntropyLoss() if masked else nn.MSELoss()
    step = hs.TrainStep(net, loss, opt, decide="device", **options)
    assert step.update.ignores_targets is masked
    for p in step.params:
        p.grad = torch.zeros_like(p)
    opt.step()
    opt.zero_grad()
    step.update.use_fused_kernels = step.update.commit.step_in_pieces = quick
    return step


def run(step: Any, event: str, at: int, record_target: "Journal | None" = None) -> UpdateResult:
    """One end of a cycle by hand: gradients of ±2^k · scale, one of them spoilt by the event."""
    state, (kind, _, weight) = step.state, event.partition(":")
    g = torch.Generator().manual_seed(at)
    size = {"good": 2.0**-6, "tiny": 2.0**-20, "zero": 0.0, "none": 0.0, "none-inf": 0.0}.get(
        kind, 1.0
    )
    signs = [torch.randint(0, 2, p.shape, generator=g) * 2 - 1 for p in step.params]
    factor = float(state.scale) * (float(weight or 1) or 1)
    many = step.options.accumulate > 1
    dtypes = step.update.wide_dtypes if many else [p.dtype for p in step.params]
    grads = [(s * size * factor).to(DEVICE, d) for s, d in zip(signs, dtypes, strict=True)]
    grads = [
        torch.empty_like(p, dtype=g.dtype).copy_(g) for p, g in zip(step.params, grads, strict=True)
    ]
    if kind in ("inf", "nan"):
        grads[3][100, 7] = math.inf if kind == "inf" else math.nan
    cycle = state.cycle
    cycle.buffers = step.buffers.copy([])
    step.net.mean += 1
    cycle.grads = [*grads[:-1], None]
    loss = {"none": math.nan, "none-good": math.nan, "none-inf": -math.inf}.get(
        kind, 1.1 * (at + 1)
    )
    cycle.loss = torch.tensor(loss, dtype=torch.float64 if many else torch.float32, device=DEVICE)
    cycle.weight = (
        torch.tensor(float(weight), dtype=torch.float64, device=DEVICE) if weight else None
    )
    outcome = step.update.on_device(state, list(range(len(grads) - 1)), record_target)
    cycle.close()
    return outcome


def contents(step: Any) -> Iterator[tuple[str, Tensor]]:
    """Everything that an update may touch."""
    yield from step.net.state_dict().items()
    for i, p in enumerate(step.params):
        yield from ((f"{k} of {i}", v) for k, v in step.optimizer.state[p].items())
        yield f"gradient of {i}", torch.tensor(p.grad is None)
    for i, group in enumerate(step.optimizer.param_groups):
        yield f"rate of {i}", torch.as_tensor(group["lr"])
    state = step.state
    names = ("updates", "skips", "streak", "scale", "growth", "halted", "bad")
    yield from ((name, getattr(state, name)) for name in names)
    yield from ((f"average {i}", a) for i, a in enumerate(state.ema))
    yield "tries", step.update.cycles_ended


def same(name: str, a: Tensor, b: Tensor) -> None:
    assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), name
    assert torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)), (name, a, b)


class Journal:
    """Two rows, from the second on: what comes beyond is left out."""

    def __init__(self, groups: int) -> None:
        self.table = torch.full((2, 6 + groups), -1.0, dtype=torch.float64, device=DEVICE)
        self.next_row = torch.ones(1, dtype=torch.int64, device=DEVICE)


def journalled(step: Any, event: str, at: int) -> UpdateResult:
    """As `run`; the record of a cycle of one batch is then in the journal, as `write_row` would have put it there."""
    journal, before = (
        Journal(len(step.optimizer.param_groups)),
        Journal(len(step.optimizer.param_groups)),
    )
    outcome = run(step, event, at, journal)
    assert outcome.record_written is (step.options.accumulate == 1)
    told = outcome.lr, outcome.scale, outcome.skipped, outcome.norm, outcome.updated
    if outcome.record_written:
        record = hs.Record(outcome.loss, outcome.loss, *told, fingerprint=before.next_row)
        write_row(
            before.table,
            before.next_row,
            record,
            keep_loss=False,
            advance=True,
            use_kernel=False,
        )
    same(f"{event} {at}: row", journal.table, before.table)
    same(f"{event} {at}: place", journal.next_row, before.next_row)
    run(step, event, at, journal)
    same(f"{event} {at}: a row that is not there", journal.table, before.table)
    assert journal.next_row.item() == (3 if outcome.record_written else 1)
    return outcome


def equal_in_everything(case: str, make: Callable[..., Any] = torch.optim.SGD) -> None:
    options, events = (CASES | HALVES)[case]
    quick, plain = (build(quick=q, make=make, **options) for q in (True, False))
    for at, event in enumerate(events.split()):
        one, two = journalled(quick, event, at), run(plain, event, at)
        run(plain, event, at)
        for field, a, b in zip(one._fields[:6], one.tensors(), two.tensors(), strict=True):
            same(f"{event} {at}: {field}", a, b)
        for (name, a), (_, b) in zip(contents(quick), contents(plain), strict=True):
            same(f"{event} {at}: {name}", a, b)
    assert len(quick.update.fused_update._plans) == 1, "the kernels did not run"
    assert None not in quick.update.fused_update._plans.values()


@inside
@pytest.mark.parametrize("case", CASES)
def test_equal_in_everything(case: str) -> None:
    equal_in_everything(case)


@inside
@pytest.mark.parametrize("case", HALVES)
def test_half_parameters(case: str) -> None:
    """With AdamW: torch's fused SGD leaves half parameters on a CPU where they were."""
    equal_in_everything(case, torch.optim.AdamW)


def alike(p: Tensor, values: Tensor) -> Tensor:
    """Values as a gradient of `p`: its dtype and its strides, which fused kernels insist on."""
    return torch.empty_like(p, requires_grad=False).copy_(values)


def half_norms_are_float32() -> None:
    """Squares beyond float16's range, and below it; gradients stay as they were."""
    for precision, size in (("fp16", 3e4), ("fp16", 1e-6), ("bf16", 1e15), ("bf16", 1e-15)):
        step = build(quick=True, make=torch.optim.AdamW, precision=precision, nonfinite="skip")
        state, g = step.state, torch.Generator().manual_seed(1)
        given = [
            alike(p, torch.randn(p.shape, generator=g).clamp(-2, 2) * size) for p in step.params
        ]
        state.cycle.grads, state.cycle.buffers = [t.clone() for t in given], step.buffers.copy([])
        state.cycle.loss = torch.ones((), device=DEVICE)
        outcome = step.update.on_device(state, list(range(len(given))))
        exact = torch.cat([t.double().flatten() for t in given]).norm()
        assert (
            abs(outcome.norm.double() / exact - 1) <= (12 + 7 + 3 + 4) / 2 * 2.0**-24
        )  # as for float32, below
        assert all(torch.equal(a, b) for a, b in zip(given, state.cycle.grads, strict=True))
        assert step.update.fused_update._plans


def gradients_round_as_torch_does() -> None:
    """Reciprocal, product, quotient and clip to the last bit; the norm as near as its sums allow."""
    step = build(
        quick=True, precision=hs.Precision("O1", scale=1000.0), accumulate=2, clip_norm=0.1
    )
    state, g = step.state, torch.Generator().manual_seed(1)
    given = [alike(p, torch.randn(p.shape, generator=g) * 50) for p in step.params]
    state.cycle.grads, state.cycle.buffers = [t.clone() for t in given], step.buffers.copy([])
    state.cycle.weight, state.cycle.loss = (
        torch.full((), n, dtype=torch.float64, device=DEVICE) for n in (3.0, 7.0)
    )
    outcome = step.update.on_device(state, list(range(len(given))))
    inverse = torch.tensor(1 / 1000.0, dtype=torch.float64).float().to(DEVICE)
    expected = [t * inverse / torch.tensor(3.0, device=DEVICE) for t in given]
    exact = torch.cat([t.double().flatten() for t in expected]).norm()
    # 12 halvings in a block, 7 among blocks, 3 among gradients, 4 roundings of squares and roots; a root halves them
    assert abs(outcome.norm.double() / exact - 1) <= (12 + 7 + 3 + 4) / 2 * 2.0**-24
    assert torch.equal(
        outcome.loss, torch.tensor(7 / 3, dtype=torch.float64, device=DEVICE).float()
    )
    clip_norm_(expected, outcome.norm, 0.1)
    for k, (got, wanted) in enumerate(zip(state.cycle.grads, expected, strict=True)):
        same(str(k), got, wanted)
    assert step.update.fused_update._plans


def scales_round_once() -> None:
    """Factors of many bits: the product of a float32 scale and a float64 factor, rounded to float32."""
    scale = hs.DynamicScale(init=1000.1, growth=1.7, backoff=0.55, interval=1, floor=1.0)
    step = build(quick=True, precision=hs.Precision("O1", scale=scale))
    now = torch.tensor(1000.1)
    for at, event in enumerate(["good", "good", "inf", "good", "inf", "inf", "good"]):
        same("used", run(step, event, at).scale, now.to(DEVICE))
        now = torch.tensor(
            now.item() * (1.7 if event == "good" else 0.55), dtype=torch.float64
        ).float()
    assert step.update.fused_update._plans


def rows_are_packed() -> None:
    """Every dtype becomes float64 exactly; one rate or several; the row before, but for its loss."""
    scalars = [torch.tensor(v, device=DEVICE) for v in (1.25, 0.1, 65536.0)]
    flags = [torch.tensor(v, device=DEVICE) for v in (True, False)]
    low = torch.tensor(2.5, dtype=torch.float16, device=DEVICE)
    for lr in (
        torch.tensor(0.1, device=DEVICE),
        torch.tensor([0.3, 0.1], dtype=torch.float64, device=DEVICE)[:2],
    ):
        table = torch.full((4, 6 + lr.numel()), -1.0, dtype=torch.float64, device=DEVICE)
        at = torch.tensor([1], device=DEVICE)
        record = hs.Record(
            scalars[0], scalars[1], lr, scalars[2], flags[0], low, flags[1], fingerprint=at
        )
        write_row(table, at, record, keep_loss=False, advance=True)
        row = [1.25, scalars[1].item(), 65536.0, 2.5, 1.0, 0.0, *lr.reshape(-1).tolist()]
        blank = [-1.0] * len(row)
        assert (table.tolist(), at.tolist()) == ([blank, row, blank, blank], [2])
        flushed = hs.Record(low, low, lr, low, flags[1], low, flags[0], fingerprint=at)
        write_row(table, at, flushed, keep_loss=True, advance=False)
        amended = [1.25, 2.5, 2.5, 2.5, 0.0, 1.0, *lr.reshape(-1).tolist()]
        assert (table.tolist(), at.tolist()) == ([blank, amended, blank, blank], [2])
        write_row(table, at, record, keep_loss=False, advance=False)
        assert (table.tolist(), at.tolist()) == ([blank, amended, row, blank], [2])


def refused() -> None:
    """What the kernels cannot do is left to torch."""
    step = build(quick=True, nonfinite="skip")
    live, cycle, quick = [0, 2], step.state.cycle, step.update.fused_update
    cycle.loss = torch.zeros((), device=DEVICE)

    def fits(*grads: Tensor) -> bool:
        cycle.grads = [grads[0], None, grads[1], None, None, None]
        return bool(quick.fits(step.state, live))

    small, large = torch.zeros(4, 4, device=DEVICE), torch.zeros(64, 64, device=DEVICE)
    spread = torch.zeros(64, 128, device=DEVICE)
    assert fits(small, large)
    assert fits(small.t(), large.t())
    assert not fits(small, large.half())
    assert not fits(small.half(), large.half())
    assert not fits(small, spread[:, ::2])
    assert not fits(small, torch.zeros((), device=DEVICE).expand(64, 64))
    assert not fits(
        small, torch.zeros(4097, device=DEVICE)[1:].view(64, 64)
    )  # not at a multiple of 16 bytes
    assert not fits(large[0, :16].view(4, 4), large)
    assert not fits(small, large.to_sparse())
    hook = step.optimizer.register_step_pre_hook(lambda *_: None)
    assert not fits(small, large)
    hook.remove()
    assert fits(small, large)
    by_value = build(quick=True, clip_value=1.0)
    by_value.state.cycle.grads, by_value.state.cycle.loss = cycle.grads, cycle.loss
    assert not by_value.update.fused_update.fits(by_value.state, live)
    kept = hs.Precision("fp16", keep={"1": "fp32"})
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE)
    mixed = hs.TrainStep(
        net, nn.MSELoss(), torch.optim.AdamW(net.parameters(), eps=1e-3, fused=True), precision=kept
    )
    mixed.state.cycle.grads, mixed.state.cycle.loss = (
        [torch.zeros_like(p) for p in mixed.params],
        cycle.loss,
    )
    assert len({p.dtype for p in mixed.params}) == 2
    assert not mixed.update.fused_update.fits(mixed.state, [0, 1, 2, 3])  # of two dtypes
    assert mixed.update.fused_update.fits(mixed.state, [0, 1])


RESTS = [
    half_norms_are_float32,
    gradients_round_as_torch_does,
    scales_round_once,
    rows_are_packed,
    refused,
]


@inside
@pytest.mark.parametrize("check", RESTS)
def test_the_rest(check: Callable[[], None]) -> None:
    check()


@pytest.mark.skipif(
    INTERPRETED or DEVICE == "cuda", reason="the path without kernels is a plain CPU's"
)
def test_rows_are_packed_without_triton() -> None:
    rows_are_packed()


@outside
def test_the_interpreted_kernels() -> None:
    interpret(__file__, len(CASES) + len(HALVES) + len(RESTS), "")
