"""Sunk against eager, bit for bit. Without CUDA a replay calls the body again: all but the capture is real."""

import pytest
import torch

import halfstep as hs
from halfstep.engine.captured.sink import Sink
from tests.support.captured_runs import OPTIMIZERS, by_hand, data, same_state, step, sunk

pytestmark = pytest.mark.filterwarnings("ignore:.*batch-coupled")
PASSES = 3
PRECISIONS = ("fp64", "fp32", "O1", "O2", "O3", "fp16", "bf16")


def compare(
    device: torch.device, precision: str, optimizer: str = "sgd", *, every: int = 7, batch: int = 8,
    poison: tuple[int, ...] = (), samples: int = 100, polished: bool = False, **options: object,
) -> tuple[hs.TrainStep, Sink]:  # fmt: skip
    """Records and the whole state after three passes with an odd last batch, both ways."""
    options = {"deterministic": device.type == "cuda", "fingerprint_every": 3, **options}
    a = step(device, precision, optimizer, **options)
    torch.manual_seed(7)
    batches = data(device, samples=samples, batch=batch, poison=poison)
    expected = by_hand(a, batches.fresh(), PASSES)
    b = step(device, precision, optimizer, **options)
    torch.manual_seed(7)
    got, sink = sunk(
        b, batches, PASSES, every=every, direct=device.type == "cpu", polished=polished
    )
    assert sink.captures > 0
    for name, column in expected.items():
        assert torch.equal(
            torch.tensor(got[name]).nan_to_num(7), torch.tensor(column).nan_to_num(7)
        ), name
    assert same_state(a, b) == []
    return b, sink


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_and_cycle(precision: str, accumulate: int, device: torch.device) -> None:
    low_on_cpu = (
        precision in ("fp16", "bf16") and device.type == "cpu"
    )  # torch's fused SGD does nothing there
    compare(device, precision, "sgd-foreach" if low_on_cpu else "sgd", accumulate=accumulate)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_every_sinkable_optimizer(precision: str, optimizer: str, device: torch.device) -> None:
    if device.type == "cpu" and optimizer not in ("sgd", "adam", "adamw"):
        pytest.skip("on a CPU only fused optimizers take rates and flags as tensors")
    table = (
        {} if optimizer == "sgd-foreach" else {"lr": [0.05, 0.04, 0.03, 0.02, 0.01]}
    )  # it reads a rate's tensor
    compare(device, precision, optimizer, accumulate=2, **table)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_roundings(rounding: str, device: torch.device) -> None:
    a = hs.Precision("bf16", rounding=rounding)
    compare(device, a, "sgd-foreach")  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [1, 7, 100])
@pytest.mark.parametrize("batch", [8, 10, 100])
def test_the_length_of_a_sink_and_the_tail_change_nothing(
    every: int, batch: int, device: torch.device
) -> None:
    compare(device, "O1", every=every, batch=batch, accumulate=4, clip_norm=0.5, ema=0.9)


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_skipped_updates(precision: str, accumulate: int, device: torch.device) -> None:
    b, _ = compare(
        device, precision, accumulate=accumulate, poison=(5, 40, 77), ema=0.9, clip_norm=1.0
    )
    assert b.state.skips.item() >= 3


def test_a_visit_inside_a_cycle_finds_it_open(device: torch.device) -> None:
    """The state at a visit is that of eager steps, in the middle of a cycle too."""
    options = {"deterministic": device.type == "cuda", "accumulate": 4}
    batches = list(data(device, samples=96))
    a, b = step(device, "O2", **options), step(device, "O2", **options)
    torch.manual_seed(7)
    for batch in batches * 4:
        a(*batch)
    torch.manual_seed(7)
    sink = hs.sink(b, batches * 4, every=5)
    if device.type == "cpu":
        from halfstep.engine.captured.runner import CapturedRunner
        from halfstep.engine.feed import Feed

        sink.runner = CapturedRunner.for_step(b, Feed(batches * 4), direct=True)
    seen = 0
    for records in sink:
        seen += len(records)
        assert b.state.cycle.micro == seen % 4
    assert seen == 48
    assert same_state(a, b) == []


@pytest.mark.parametrize("every", [11, 30, 1000])
@pytest.mark.parametrize("accumulate", [1, 2, 4, 5])
def test_graphs_of_many_steps(accumulate: int, every: int, device: torch.device) -> None:
    """As in a long run: whole cycles in one graph, single ones where a visit, a size or a cycle cuts them off."""
    options = {"accumulate": accumulate, "fingerprint_every": 0, "poison": (5, 300)}
    _, sink = compare(device, "O2", every=every, samples=420, polished=True, **options)
    bursts = [
        key for key in sink.runner.program.graphs._held if isinstance(key, tuple) and len(key) == 2
    ]
    assert bursts
