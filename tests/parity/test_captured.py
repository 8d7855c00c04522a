"""Captured steps against eager ones, bit for bit.

Without CUDA a replay calls the step again: all but the capture is real.
"""

import pytest
import torch

import halfstep as hs
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.sink import Sink
from halfstep.engine.captured.step_program import BurstKind
from halfstep.engine.feed import Feed
from tests.support.captured_runs import (
    OPTIMIZERS,
    differing_tensors,
    make_data,
    make_step,
    run_by_hand,
    run_captured,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*batch-coupled")
PASSES = 3
PRECISIONS = ("fp64", "fp32", "O1", "O2", "O3", "fp16", "bf16")


def compare(
    device: torch.device,
    precision: str,
    optimizer: str = "sgd",
    *,
    every: int = 7,
    batch: int = 8,
    poison: tuple[int, ...] = (),
    samples: int = 100,
    polished: bool = False,
    **options: object,
) -> tuple[hs.TrainStep, Sink]:
    """Records and the whole state after three passes with an odd last batch, both ways."""
    options = {"deterministic": device.type == "cuda", "fingerprint_every": 3, **options}
    batches = make_data(device, samples=samples, batch=batch, poison=poison)
    eager = make_step(device, precision, optimizer, **options)
    torch.manual_seed(7)
    expected = run_by_hand(eager, batches.fresh(), PASSES)
    captured = make_step(device, precision, optimizer, **options)
    torch.manual_seed(7)
    columns, sink = run_captured(
        captured, batches, PASSES, every=every, direct=device.type == "cpu", polished=polished
    )
    assert sink.captures > 0
    for name, expected_column in expected.items():
        column = torch.tensor(columns[name])
        assert torch.equal(column.nan_to_num(7), torch.tensor(expected_column).nan_to_num(7)), name
    assert differing_tensors(eager, captured) == []
    return captured, sink


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_and_cycle(precision: str, accumulate: int, device: torch.device) -> None:
    optimizer = "sgd"
    if precision in ("fp16", "bf16") and device.type == "cpu":
        optimizer = "sgd-foreach"  # torch's fused SGD does nothing there
    compare(device, precision, optimizer, accumulate=accumulate)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_every_capturable_optimizer(precision: str, optimizer: str, device: torch.device) -> None:
    if device.type == "cpu" and optimizer not in ("sgd", "adam", "adamw"):
        pytest.skip("on a CPU only fused optimizers take rates and flags as tensors")
    options = {}
    if optimizer != "sgd-foreach":  # it reads a rate's tensor on the host
        options = {"lr": [0.05, 0.04, 0.03, 0.02, 0.01]}
    compare(device, precision, optimizer, accumulate=2, **options)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_roundings(rounding: str, device: torch.device) -> None:
    precision = hs.Precision("bf16", rounding=rounding)
    compare(device, precision, "sgd-foreach")  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [1, 7, 100])
@pytest.mark.parametrize("batch", [8, 10, 100])
def test_the_length_of_a_visit_and_the_tail_change_nothing(
    every: int, batch: int, device: torch.device
) -> None:
    compare(device, "O1", every=every, batch=batch, accumulate=4, clip_norm=0.5, ema=0.9)


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_skipped_updates(precision: str, accumulate: int, device: torch.device) -> None:
    captured, _ = compare(
        device, precision, accumulate=accumulate, poison=(5, 40, 77), ema=0.9, clip_norm=1.0
    )
    assert captured.state.skips.item() >= 3


def test_a_visit_inside_a_cycle_finds_it_open(device: torch.device) -> None:
    """The state at a visit is that of eager steps, in the middle of a cycle too."""
    options = {"deterministic": device.type == "cuda", "accumulate": 4}
    batches = list(make_data(device, samples=96)) * 4
    eager = make_step(device, "O2", **options)
    captured = make_step(device, "O2", **options)
    torch.manual_seed(7)
    for batch in batches:
        eager(*batch)

    torch.manual_seed(7)
    sink = hs.sink(captured, batches, every=5)
    if device.type == "cpu":
        sink.runner = CapturedRunner.for_step(captured, Feed(batches), direct=True)
    steps = 0
    for records in sink:
        steps += len(records)
        assert captured.state.cycle.micro == steps % 4
    assert steps == 48
    assert differing_tensors(eager, captured) == []


@pytest.mark.parametrize("every", [11, 30, 1000])
@pytest.mark.parametrize("accumulate", [1, 2, 4, 5])
def test_graphs_of_many_steps(accumulate: int, every: int, device: torch.device) -> None:
    """As in a long run: whole cycles in one graph.

    Single steps where a visit, a batch size or a cycle cuts them off.
    """
    options = {"accumulate": accumulate, "fingerprint_every": 0, "poison": (5, 300)}
    _, sink = compare(device, "O2", every=every, samples=420, polished=True, **options)
    assert any(isinstance(kind, BurstKind) for kind in sink.runner.program.graphs._graphs)
