"""An update in few kernels on a GPU: equal to Update.on_device, captured or not, and few."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.captured.record_buffer import write_row
from halfstep.step.fast.launch_plan import GRADS_PER_LAUNCH, LARGE_ELEMENTS
from halfstep.step.optimizer import capturable_optimizer
from halfstep.step.state import UpdateResult
from tests.unit.step.fast.test_fused_update import (
    CASES,
    HALF_CASES,
    KERNEL_CHECKS,
    assert_fused_equals_plain,
    assert_same,
    assert_same_steps,
    build,
    run_event,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

Shapes = list[tuple[int, ...]]
MLP_SHAPES: Shapes = [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)]
# So many parameters that two launches are needed, and enough elements to count as large.
MANY_SHAPES: Shapes = [
    *[(64, 64)] * 20,
    *[(7,)] * (GRADS_PER_LAUNCH[-1] + 13),
    (1025, 2049),
    (0,),
    (3, 5),
]


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("case", CASES | HALF_CASES)
def test_fused_update_equals_plain_update_in_everything(
    case: str, make_optimizer: Callable[..., Any]
) -> None:
    assert_fused_equals_plain(case, make_optimizer)


@pytest.mark.parametrize("check", KERNEL_CHECKS)
def test_kernels_hold(check: Callable[[], None]) -> None:
    check()


class ParametersOfShapes(nn.Module):
    """A network that only has parameters of these shapes."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)


def build_with_static_grads(
    shapes: Shapes, *, fused_kernels: bool, adamw: bool = False, **options: Any
) -> Any:
    """Returns a step over parameters of these shapes; its gradients keep their memory."""
    torch.manual_seed(0)
    net = ParametersOfShapes(shapes).cuda()
    optimizer: torch.optim.Optimizer
    if adamw:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, eps=1e-3, fused=True)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
    step = hs.TrainStep(net, nn.MSELoss(), optimizer, decide="device", **options)

    for param in step.params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    step.state.cycle.grads = [torch.empty_like(param) for param in step.params]
    step.state.cycle.loss = torch.ones((), device="cuda")
    step.update.use_fused_kernels = fused_kernels
    step.update.commit.step_in_pieces = fused_kernels
    return step


def capture_update(step: Any, grad_indices: list[int]) -> tuple[torch.cuda.CUDAGraph, UpdateResult]:
    """Captures one update and returns the graph and the result that its replays overwrite."""
    graph = torch.cuda.CUDAGraph()
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with (
        capturable_optimizer(step.optimizer, step.optimizer_kind),
        torch.cuda.graph(graph, stream=side_stream, capture_error_mode="thread_local"),
    ):
        result = step.update.on_device(step.state, grad_indices)
    return graph, result


def fill_grads(step: Any, seed: int, nan_index: int | None = None) -> None:
    """Fills the gradients with random numbers; `nan_index` names the one that ends with a NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for grad in step.state.cycle.grads:
        grad.normal_(generator=generator).mul_(step.state.scale)
    if nan_index is not None:
        step.state.cycle.grads[nan_index].view(-1)[-1] = torch.nan


@pytest.mark.parametrize("shapes", [MLP_SHAPES, MANY_SHAPES])
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
    shapes: Shapes, options: dict[str, Any]
) -> None:
    """Nothing ran through these kernels before the capture: switching them on has loaded them."""
    plain = build_with_static_grads(shapes, fused_kernels=False, **options)
    fused = build_with_static_grads(shapes, fused_kernels=False, **options)
    grad_indices = list(range(len(shapes)))
    for step in (plain, fused):
        fill_grads(step, 0)
        step.update.on_device(step.state, grad_indices)

    fused.update.use_fused_kernels = True
    fused.update.commit.step_in_pieces = True
    graph, result = capture_update(fused, grad_indices)
    assert list(fused.update.fused_update._plans.values()) != [None]

    for index in range(1, 6):
        nan_index = len(shapes) - 3 if index in (2, 3) else None
        for step in (plain, fused):
            fill_grads(step, index, nan_index)
        expected_result = plain.update.on_device(plain.state, grad_indices)
        graph.replay()
        tensors = zip(result.tensors(), expected_result.tensors(), strict=True)
        for field, (actual, expected) in zip(result._fields, tensors, strict=False):
            if field != "grad_norm":
                assert_same(f"{index}: {field}", actual, expected)
                continue
            # 4 + 12 + 10 + 8 additions in a row; the root halves their roundings.
            exact = torch.cat([g.double().flatten() for g in plain.state.cycle.grads]).norm()
            rtol = 17 * 2.0**-24
            is_close = torch.allclose(actual.double(), exact, rtol=rtol, atol=0, equal_nan=True)
            assert is_close, (index, actual, exact)
        assert_same_steps(str(index), fused, plain)
    assert int(fused.state.skips) == 2


@pytest.mark.parametrize(
    "options", [{"precision": "O1", "lr": [0.1, 0.05]}, {"precision": "fp16", "adamw": True}]
)
def test_an_update_is_captured_again(options: dict[str, Any]) -> None:
    """Two graphs by turns, then the second alone: neither needs what the other's capture left."""
    plain = build_with_static_grads(MLP_SHAPES, fused_kernels=False, nonfinite="skip", **options)
    fused = build_with_static_grads(MLP_SHAPES, fused_kernels=True, nonfinite="skip", **options)
    grad_indices = list(range(len(MLP_SHAPES)))

    # Learning rates become tensors by an update outside any graph.
    for step in (plain, fused):
        fill_grads(step, 0)
        step.update.on_device(step.state, grad_indices)

    graphs = [capture_update(fused, grad_indices)[0] for _ in range(2)]
    for index in range(1, 8):
        if index == 4:
            graphs = graphs[1:]
            torch.cuda.empty_cache()
        nan_index = 1 if index == 5 else None
        for step in (plain, fused):
            fill_grads(step, index, nan_index)
        plain.update.on_device(plain.state, grad_indices)
        graphs[index % len(graphs)].replay()
        assert_same_steps(str(index), fused, plain)


def test_the_large_case_is_large() -> None:
    assert sum(torch.Size(shape).numel() for shape in MANY_SHAPES) >= LARGE_ELEMENTS
    assert len(MANY_SHAPES) > GRADS_PER_LAUNCH[-1]


def test_the_norm_repeats_bit_for_bit() -> None:
    step = build_with_static_grads(MANY_SHAPES, fused_kernels=True, nonfinite="skip")
    grad_indices = list(range(len(MANY_SHAPES)))
    norms = []
    for _ in range(20):
        fill_grads(step, 3)
        norms.append(step.update.on_device(step.state, grad_indices).grad_norm)
    assert len({norm.item() for norm in norms}) == 1


@pytest.mark.parametrize(
    ("options", "max_kernels"),
    [
        ({"nonfinite": "skip"}, 3),
        ({"precision": "O1", "lr": [0.1, 0.05]}, 3),
        ({"precision": "O1", "clip_norm": 1.0}, 4),
        ({"precision": "O2", "adamw": True}, 5),
        ({"precision": "fp16", "nonfinite": "skip"}, 3),
        ({"precision": "bf16", "nonfinite": "skip", "adamw": True}, 5),
    ],
)
def test_an_update_runs_few_kernels(options: dict[str, Any], max_kernels: int) -> None:
    """Measure, decide, clip where it is switched on, and the fused optimizer's own.

    Adam's counters go up, and back after a skip, in kernels of their own.
    """
    step = build_with_static_grads(MLP_SHAPES, fused_kernels=True, **options)
    grad_indices = list(range(len(MLP_SHAPES)))
    fill_grads(step, 0)
    for _ in range(2):
        step.update.on_device(step.state, grad_indices)

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step.update.on_device(step.state, grad_indices)
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() if event.device_type == on_device]
    kernels = {name for name in names if "Memcpy" not in name and "Memset" not in name}
    assert kernels >= {"measure", "decide"}, names
    assert len(names) <= max_kernels, names


def test_each_replay_writes_the_next_row() -> None:
    table = torch.zeros(5, 7, dtype=torch.float64, device="cuda")
    next_row = torch.zeros(1, dtype=torch.int64, device="cuda")
    value = torch.zeros((), device="cuda")
    false = torch.tensor(False).cuda()

    def write_record() -> None:
        record = hs.Record(
            loss=value,
            cycle_loss=value,
            lr=value.double(),
            scale=value,
            skipped=false,
            grad_norm=value,
            updated=false,
            fingerprint=next_row,
        )
        write_row(table, next_row, record, keep_loss=False, advance=True)

    write_record()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_record()
    for i in range(1, 4):
        value.fill_(i)
        graph.replay()
    assert table[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 0.0]
    assert next_row.item() == 4


def build_network_step(
    make_optimizer: Callable[..., Any], precision: str, *, fused_kernels: bool
) -> Any:
    """Returns a step of a small network whose update is not captured."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).cuda()
    settings = {}
    if make_optimizer is torch.optim.AdamW:
        settings = {"eps": 1e-3}  # the default, 1e-8, is 0 in float16
    optimizer = make_optimizer(net.parameters(), lr=0.01, fused=True, **settings)
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        precision=precision,
        nonfinite="skip",
        ema=0.9,
        lr=[0.02, 0.01],
    )
    step._update_on_device._is_usable = False
    step.update.use_fused_kernels = fused_kernels
    step.update.commit.step_in_pieces = fused_kernels
    return step


def make_batch(index: int) -> tuple[Tensor, Tensor]:
    """Returns a batch; 5 and 6 overflow, and in 9 every target is ignored, so it has no terms."""
    generator = torch.Generator("cuda").manual_seed(index)
    x = torch.randn(8, 16, device="cuda", generator=generator)
    y = torch.randint(0, 10, (8,), device="cuda", generator=generator)
    if index in (5, 6):
        x[0, 0] = torch.inf
    if index == 9:
        y.fill_(-100)
    return x, y


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "fp16", "bf16"])
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_equals_the_plain_update(
    precision: str, make_optimizer: Callable[..., Any]
) -> None:
    fused = build_network_step(make_optimizer, precision, fused_kernels=True)
    plain = build_network_step(make_optimizer, precision, fused_kernels=False)
    for i in range(12):
        fused(*make_batch(i))
        plain(*make_batch(i))
    actual = fused.fingerprints()
    expected = plain.fingerprints()
    assert [name for name in actual if actual[name].item() != expected[name].item()] == []
    assert fused.update.fused_update._plans


def test_a_capture_that_nothing_prepared_takes_torchs_kernels() -> None:
    step = build(fused_kernels=False, nonfinite="skip")
    step.update._use_fused_kernels = True
    graph = torch.cuda.CUDAGraph()
    step.state.cycle.grads = [torch.zeros_like(param) for param in step.params]
    step.state.cycle.loss = torch.ones((), device="cuda")
    step.state.cycle.buffers = step.buffers.copy([])
    with torch.cuda.graph(graph):
        step.update.on_device(step.state, list(range(len(step.params))))
    assert step.update.fused_update._plans == {}

    # The capture has shown which update is needed, so that switching the kernels on prepares it.
    step.update.use_fused_kernels = True
    assert len(step.update.fused_update._plans) == 1
    run_event(step, "good", 1)
