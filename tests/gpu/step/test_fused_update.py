"""An update in few kernels on a GPU: equal to Update.on_device, captured or not, and few."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.captured.record_buffer import write_row
from halfstep.step.fast.fused_update import GRADS_PER_LAUNCH, LARGE_ELEMENTS
from halfstep.step.fast.update_graph import capturable_optimizer
from halfstep.step.state import UpdateResult
from tests.unit.step.fast.test_fused_update import (
    CASES,
    HALVES,
    RESTS,
    build,
    contents,
    equal_in_everything,
    run,
    same,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("case", CASES | HALVES)
def test_equal_in_everything(case: str, make: Callable[..., Any]) -> None:
    equal_in_everything(case, make)


@pytest.mark.parametrize("check", RESTS)
def test_the_rest(check: Callable[[], None]) -> None:
    check()


class Held(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)


def hold(shapes: list[tuple[int, ...]], *, quick: bool, adamw: bool = False, **options: Any) -> Any:
    """A step over these parameters, and gradients that stay where they are."""
    torch.manual_seed(0)
    net = Held(shapes).cuda()
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
    opt = torch.optim.AdamW(net.parameters(), lr=0.05, eps=1e-3, fused=True) if adamw else sgd
    step = hs.TrainStep(net, nn.MSELoss(), opt, decide="device", **options)
    for p in step.params:
        p.grad = torch.zeros_like(p)
    opt.step()
    step.state.cycle.grads = [torch.empty_like(p) for p in step.params]
    step.state.cycle.loss = torch.ones((), device="cuda")
    step.update.use_fused_kernels = step.update.commit.step_in_pieces = quick
    return step


def capture(step: Any, live: list[int]) -> tuple[torch.cuda.CUDAGraph, UpdateResult]:
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with (
        capturable_optimizer(step.update),
        torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
    ):
        outcome = step.update.on_device(step.state, live)
    return graph, outcome


def fill(step: Any, seed: int, bad: int | None = None) -> None:
    g = torch.Generator("cuda").manual_seed(seed)
    for t in step.state.cycle.grads:
        t.normal_(generator=g).mul_(step.state.scale)
    if bad is not None:
        step.state.cycle.grads[bad].view(-1)[-1] = torch.nan


MLP = [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)]
MANY = (
    [(64, 64)] * 20 + [(7,)] * (GRADS_PER_LAUNCH[-1] + 13) + [(1025, 2049), (0,), (3, 5)]
)  # two launches' worth, and large


@pytest.mark.parametrize("shapes", [MLP, MANY])
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "O1", "lr": [0.1, 0.05]},
        {"nonfinite": "skip"},
        {"precision": "fp16", "nonfinite": "skip", "adamw": True},
        {"precision": "bf16", "nonfinite": "skip"},
    ],
)
def test_a_replayed_capture_equals_the_eager_update(
    shapes: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    """Nothing ran through these kernels before the capture: setting `quick` has loaded them."""
    plain, quick = (hold(shapes, quick=False, **options) for _ in range(2))
    live = list(range(len(shapes)))
    for step in (plain, quick):
        fill(step, 0)
        step.update.on_device(step.state, live)
    quick.update.use_fused_kernels = quick.update.commit.step_in_pieces = True
    graph, outcome = capture(quick, live)
    assert list(quick.update.fused_update._plans.values()) != [None]
    for at in range(1, 6):
        for step in (plain, quick):
            fill(step, at, bad=len(shapes) - 3 if at in (2, 3) else None)
        expected = plain.update.on_device(plain.state, live)
        graph.replay()
        for field, a, b in zip(outcome._fields, outcome, expected, strict=True):
            if (
                field == "norm"
            ):  # 4 + 12 + 10 + 8 additions in a row; the root halves their roundings
                exact = torch.cat([t.double().flatten() for t in plain.state.cycle.grads]).norm()
                assert torch.allclose(
                    a.double(), exact, rtol=17 * 2.0**-24, atol=0, equal_nan=True
                ), (at, a, exact)
            else:
                same(f"{at}: {field}", a, b)
        for (name, a), (_, b) in zip(contents(quick), contents(plain), strict=True):
            same(f"{at}: {name}", a, b)
    assert int(quick.state.skips) == 2


@pytest.mark.parametrize(
    "options", [{"precision": "O1", "lr": [0.1, 0.05]}, {"precision": "fp16", "adamw": True}]
)
def test_an_update_is_captured_again(options: dict[str, Any]) -> None:
    """Two graphs by turns, then the second when the first is gone: none needs what another's capture left."""
    plain, quick = (hold(MLP, quick=q, nonfinite="skip", **options) for q in (False, True))
    live = list(range(len(MLP)))
    for step in (plain, quick):  # rates become tensors by an update outside any graph
        fill(step, 0)
        step.update.on_device(step.state, live)
    graphs = [capture(quick, live)[0] for _ in range(2)]
    for at in range(1, 8):
        if at == 4:
            graphs = graphs[1:]
            torch.cuda.empty_cache()
        for step in (plain, quick):
            fill(step, at, bad=1 if at == 5 else None)
        plain.update.on_device(plain.state, live)
        graphs[at % len(graphs)].replay()
        for (name, a), (_, b) in zip(contents(quick), contents(plain), strict=True):
            same(f"{at}: {name}", a, b)


def test_the_large_case_is_large() -> None:
    assert sum(torch.Size(s).numel() for s in MANY) >= LARGE_ELEMENTS
    assert len(MANY) > GRADS_PER_LAUNCH[-1]


def test_the_norm_repeats_bit_for_bit() -> None:
    step = hold(MANY, quick=True, nonfinite="skip")
    norms = []
    for _ in range(20):
        fill(step, 3)
        norms.append(step.update.on_device(step.state, list(range(len(MANY)))).norm)
    assert len({n.item() for n in norms}) == 1


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"nonfinite": "skip"}, 3),
        ({"precision": "O1", "lr": [0.1, 0.05]}, 3),
        ({"precision": "O1", "clip_norm": 1.0}, 4),
        ({"precision": "O2", "adamw": True}, 5),
        ({"precision": "fp16", "nonfinite": "skip"}, 3),
        ({"precision": "bf16", "nonfinite": "skip", "adamw": True}, 5),
    ],
)
def test_few_kernels(options: dict[str, Any], most: int) -> None:
    """Measure, decide, clip where asked, and the fused optimizer's own: Adam's counters go up and back beside it."""
    step = hold(MLP, quick=True, **options)
    live = list(range(len(MLP)))
    fill(step, 0)
    for _ in range(2):
        step.update.on_device(step.state, live)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        step.update.on_device(step.state, live)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [n for n in names if "Memcpy" not in n and "Memset" not in n]
    assert {"measure", "decide"} <= set(kernels), names
    assert len(names) <= most, names


def test_a_captured_row_finds_its_place() -> None:
    table = torch.zeros(5, 7, dtype=torch.float64, device="cuda")
    at, x, no = (
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        torch.zeros((), device="cuda"),
        torch.tensor(False).cuda(),
    )

    def write() -> None:
        record = hs.Record(x, x, x.double(), x, no, x, no, fingerprint=at)
        write_row(table, at, record, keep_loss=False, advance=True)

    write()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write()
    for i in range(1, 4):
        x.fill_(i)
        graph.replay()
    assert (table[:, 0].tolist(), at.item()) == ([0.0, 1.0, 2.0, 3.0, 0.0], 4)


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "fp16", "bf16"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_training_equals_the_plain_update(precision: str, make: Callable[..., Any]) -> None:
    steps = [network(make, precision, quick=quick) for quick in (True, False)]
    for i in range(12):
        for step in steps:
            step(*batch(i))
    one, two = (step.fingerprints() for step in steps)
    assert [k for k in one if one[k].item() != two[k].item()] == []
    assert steps[0].update.fused_update._plans


def network(make: Callable[..., Any], precision: str, *, quick: bool) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).cuda()
    eps = {"eps": 1e-3} if make is torch.optim.AdamW else {}  # 1e-8 is 0 in float16
    opt = make(net.parameters(), lr=0.01, fused=True, **eps)
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        opt,
        precision=precision,
        nonfinite="skip",
        ema=0.9,
        lr=[0.02, 0.01],
    )
    step._update_on_device._is_usable = False
    step.update.use_fused_kernels = step.update.commit.step_in_pieces = quick
    return step


def batch(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(i)
    x = torch.randn(8, 16, device="cuda", generator=g)
    y = torch.randint(0, 10, (8,), device="cuda", generator=g)
    if i in (5, 6):
        x[0, 0] = torch.inf
    if i == 9:
        y.fill_(-100)  # every target ignored: no terms
    return x, y


def test_a_capture_that_nothing_prepared_takes_torchs_kernels() -> None:
    step = build(quick=False, nonfinite="skip")
    step.update._use_fused_kernels = True
    graph = torch.cuda.CUDAGraph()
    step.state.cycle.grads = [torch.zeros_like(p) for p in step.params]
    step.state.cycle.loss = torch.ones((), device="cuda")
    step.state.cycle.buffers = step.buffers.copy([])
    with torch.cuda.graph(graph):
        step.update.on_device(step.state, list(range(len(step.params))))
    assert step.update.fused_update._plans == {}
    step.update.use_fused_kernels = True  # now what the capture saw is known
    assert len(step.update.fused_update._plans) == 1
    run(step, "good", 1)
