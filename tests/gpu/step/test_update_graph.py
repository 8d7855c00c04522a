"""The captured update equals the eager one bit for bit, and notices everything that a graph would bake in."""

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


def build(name: str, *, replayed: bool, **options: object) -> hs.TrainStep:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).cuda()
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), OPTIMIZERS[name](net.parameters()), **options)  # type: ignore[arg-type]
    if not replayed:
        step._update_on_device._is_usable = False
    return step


def batch(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(i)
    x = torch.randn(8, 16, device="cuda", generator=g)
    y = torch.randint(0, 10, (8,), device="cuda", generator=g)
    if i in (5, 6, 20):
        x[0, 0] = torch.inf
    if i == 9:
        y.fill_(-100)  # every target ignored: no terms
    return x, y


def same(a: hs.TrainStep, b: hs.TrainStep) -> None:
    first, second = a.fingerprints(), b.fingerprints()
    assert [k for k in first if first[k].item() != second[k].item()] == []


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
    steps = [build(name, replayed=replayed, **options) for replayed in (True, False)]
    for i in range(30):
        one, two = (step(*batch(i)) for step in steps)
        for field, a, b in zip(one._fields, one, two, strict=True):
            assert a.dtype == b.dtype, field
            assert torch.equal(a, b) or (a.isnan().all() and b.isnan().all()), (i, field, a, b)
    assert steps[0]._update_on_device.captures >= 1
    assert steps[1]._update_on_device.captures == 0
    same(*steps)


@pytest.mark.parametrize("name", ["SGD fused", "AdamW fused", "SGD foreach"])
def test_a_changed_setting_acts_on_the_next_update(name: str) -> None:
    """Learning rate, weight decay, loaded optimizer state: never the captured values."""
    steps = [build(name, replayed=replayed, precision="O2") for replayed in (True, False)]
    for i in range(30):
        for step in steps:
            group = step.optimizer.param_groups[0]
            group["lr"] = 0.05 if i < 10 else 0.01
            group["weight_decay"] = 0.1 if i >= 20 else 0.0
            if i == 15:
                step.optimizer.load_state_dict(step.optimizer.state_dict())
            if i == 25:
                step.load_state_dict(step.state_dict())
            step(*batch(i))
    same(*steps)
    assert steps[0]._update_on_device.captures >= 2


def test_a_rate_that_moves_every_step_is_not_captured_every_step() -> None:
    step = build("SGD foreach", replayed=True)
    for i in range(30):
        step.optimizer.param_groups[0]["lr"] = 0.05 / (i + 1)
        x, y = batch(100 + i)
        step(x, y)
    assert step._update_on_device.captures == 0


def test_a_table_of_rates_costs_no_capture() -> None:
    step = build("AdamW fused", replayed=True, lr=[0.01 / (k + 1) for k in range(40)])
    rates = [step(*batch(100 + i)).lr for i in range(30)]
    assert (
        1 <= step._update_on_device.captures <= 2
    )  # the allocator may take two turns to repeat itself
    assert torch.equal(
        torch.stack(rates).cpu(), torch.tensor([0.01 / (k + 1) for k in range(30)]).double()
    )
