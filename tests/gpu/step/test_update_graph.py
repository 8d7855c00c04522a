"""The captured update equals the eager one bit for bit.

It follows every setting that a graph would otherwise fix at its capture.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

pytestmark = pytest.mark.gpu

OPTIMIZERS = {
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam capturable": lambda p: torch.optim.Adam(p, lr=1e-2, capturable=True),
    "RMSprop capturable": lambda p: torch.optim.RMSprop(p, lr=1e-3, capturable=True),
}


def build(name: str, *, replayed: bool, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).cuda()
    optimizer = OPTIMIZERS[name](net.parameters())
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, **options)
    if not replayed:
        step._update_on_device._is_usable = False
    return step


def make_batch(index: int) -> tuple[Tensor, Tensor]:
    """Returns a batch; 5, 6 and 20 overflow, and 9 has only ignored targets, so no terms."""
    generator = torch.Generator("cuda").manual_seed(index)
    x = torch.randn(8, 16, device="cuda", generator=generator)
    y = torch.randint(0, 10, (8,), device="cuda", generator=generator)
    if index in (5, 6, 20):
        x[0, 0] = torch.inf
    if index == 9:
        y.fill_(-100)
    return x, y


def assert_same_fingerprints(step: hs.TrainStep, expected_step: hs.TrainStep) -> None:
    actual = step.fingerprints()
    expected = expected_step.fingerprints()
    assert [name for name in actual if actual[name].item() != expected[name].item()] == []


@pytest.mark.filterwarnings("ignore::halfstep.Notice")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "precision", ["fp32", "O1", "O2", "fp16", hs.Precision("fp16", rounding="kahan")]
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_replayed_equals_eager(name: str, precision: str | hs.Precision, accumulate: int) -> None:
    options = {
        "precision": precision,
        "accumulate": accumulate,
        "ema": 0.9,
        "clip_norm": 1.0,
        "nonfinite": "skip",
    }
    replayed = build(name, replayed=True, **options)
    eager = build(name, replayed=False, **options)
    for i in range(30):
        record = replayed(*make_batch(i))
        expected_record = eager(*make_batch(i))
        for field in hs.Record._fields:
            actual = getattr(record, field)
            expected = getattr(expected_record, field)
            both_nan = actual.isnan().all() and expected.isnan().all()
            assert actual.dtype == expected.dtype, field
            assert torch.equal(actual, expected) or both_nan, (i, field, actual, expected)
    assert replayed._update_on_device.captures >= 1
    assert eager._update_on_device.captures == 0
    assert_same_fingerprints(replayed, eager)


@pytest.mark.parametrize("name", ["SGD fused", "AdamW fused", "SGD foreach"])
def test_a_changed_setting_acts_on_the_next_update(name: str) -> None:
    """Learning rate, weight decay, loaded optimizer state: never the captured values."""
    replayed = build(name, replayed=True, precision="O2")
    eager = build(name, replayed=False, precision="O2")
    for i in range(30):
        for step in (replayed, eager):
            group = step.optimizer.param_groups[0]
            group["lr"] = 0.05 if i < 10 else 0.01
            group["weight_decay"] = 0.1 if i >= 20 else 0.0
            if i == 15:
                step.optimizer.load_state_dict(step.optimizer.state_dict())
            if i == 25:
                step.load_state_dict(step.state_dict())
            step(*make_batch(i))
    assert_same_fingerprints(replayed, eager)
    assert replayed._update_on_device.captures >= 2


def test_a_rate_that_moves_every_step_is_not_captured_every_step() -> None:
    step = build("SGD foreach", replayed=True)
    for i in range(30):
        step.optimizer.param_groups[0]["lr"] = 0.05 / (i + 1)
        step(*make_batch(100 + i))
    assert step._update_on_device.captures == 0


def test_a_table_of_rates_costs_no_capture() -> None:
    table = [0.01 / (k + 1) for k in range(40)]
    step = build("AdamW fused", replayed=True, lr=table)
    rates = [step(*make_batch(100 + i)).lr for i in range(30)]
    # The allocator may take two turns to repeat itself.
    assert 1 <= step._update_on_device.captures <= 2
    assert torch.equal(torch.stack(rates).cpu(), torch.tensor(table[:30]).double())
