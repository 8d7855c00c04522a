"""What a step reports: device tensors with one meaning on every kind of step.

Steps update, wait inside a cycle, are skipped, are empty or are flushed.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {
    "skipped": torch.bool,
    "updated": torch.bool,
    "fingerprint": torch.int64,
    "lr": torch.float64,
}
ON_HOST_AND_DEVICE = pytest.mark.parametrize("decide", ["host", "device"])


def make_batch(i: int, rows: int = 4, *, overflow: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(i)
    x = torch.randn(rows, 3)
    if overflow:
        x *= float("nan")
    y = torch.randn(rows, 2)
    return x.to(DEVICE), y.to(DEVICE)


def build(*, groups: int = 1, precision: Any = None, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = nn.Linear(3, 2).to(DEVICE)
    params: Any = net.parameters()
    if groups > 1:
        params = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(params)]
    optimizer = torch.optim.SGD(params, lr=0.1, fused=precision != "bf16")
    precision = precision or hs.Precision("fp32", scale=hs.DynamicScale(init=8.0, interval=1))
    return hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision, **options)


def gradients(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Of the mean over all rows of `batches`, by plain torch."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return list(torch.autograd.grad(nn.functional.mse_loss(net(x), y), [*net.parameters()]))


def norm(grads: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in grads]).double().norm().float()


def assert_shape(record: hs.Record, groups: int = 1) -> None:
    for name, value in record._asdict().items():
        assert isinstance(value, Tensor), name
        assert value.device.type == DEVICE, name
        assert not value.requires_grad, name
        assert value.shape == ((groups,) if name == "lr" and groups > 1 else ()), name
        assert value.dtype == DTYPES.get(name, value.dtype), name


def flags(record: hs.Record) -> tuple[bool, bool]:
    return bool(record.updated), bool(record.skipped)


@ON_HOST_AND_DEVICE
def test_an_updating_step_reports_its_loss_rate_scale_and_norm(decide: str) -> None:
    step = build(decide=decide, clip_norm=0.01)
    for i in range(3):
        x, y = make_batch(i)
        grads = gradients(step.net, [(x, y)])
        loss = nn.functional.mse_loss(step.net(x), y)
        record = step(x, y)
        assert_shape(record)
        assert flags(record) == (True, False)
        assert torch.equal(record.loss, loss.detach())
        assert torch.equal(record.cycle_loss, loss.detach())
        assert float(record.scale) == 8 * 2**i, "the scale this step used, not the next one"
        # The norm is unscaled and from before clipping; its sums are float32.
        assert torch.isclose(record.grad_norm, norm(grads), rtol=1e-6)
        assert float(record.lr) == 0.1
        assert record.fingerprint == 0


@ON_HOST_AND_DEVICE
def test_the_steps_of_a_cycle_report_the_loss_so_far_and_the_last_one_the_update(
    decide: str,
) -> None:
    step = build(decide=decide, accumulate=3)
    for cycle in range(2):
        batches = [make_batch(10 * cycle + i, rows=i + 1) for i in range(3)]
        rows = [
            nn.functional.mse_loss(step.net(x), y, reduction="none").detach().double().mean(1)
            for x, y in batches
        ]
        grads = gradients(step.net, batches)
        records = [step(*b) for b in batches]
        for i, record in enumerate(records):
            assert_shape(record)
            assert flags(record) == (i == 2, False)
            assert torch.isclose(record.loss.double(), rows[i].mean(), rtol=1e-6)  # float32
            assert torch.isclose(
                record.cycle_loss.double(), torch.cat(rows[: i + 1]).mean(), rtol=1e-6
            )
            assert float(record.scale) == 8 * 2**cycle
            assert (record.grad_norm == 0) == (i < 2)
        assert torch.isclose(records[2].grad_norm, norm(grads), rtol=1e-6)


@ON_HOST_AND_DEVICE
@pytest.mark.parametrize("updates_before", [0, 2])
def test_a_skipped_step_reports_the_scale_it_failed_at(decide: str, updates_before: int) -> None:
    step = build(decide=decide)
    for i in range(updates_before):
        step(*make_batch(i))
    record = step(*make_batch(5, overflow=True))
    assert_shape(record)
    assert flags(record) == (False, True)
    assert not record.loss.isfinite()
    assert not record.grad_norm.isfinite()
    assert float(record.scale) == 8 * 2**updates_before
    assert float(step(*make_batch(6)).scale) == 4 * 2**updates_before


@ON_HOST_AND_DEVICE
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_empty_step_reports_zeros(decide: str, accumulate: int) -> None:
    step = build(decide=decide, accumulate=accumulate)
    for _ in range(2):
        for _ in range(accumulate):
            record = step(*make_batch(0, rows=0))
            assert_shape(record)
            assert flags(record) == (False, False)
            assert record.loss == record.cycle_loss == record.grad_norm == 0
            assert float(record.scale) == 8
        for i in range(accumulate):
            step(*make_batch(i))
        step.state.scale.fill_(8.0)


def test_flush_reports_the_cycle_it_ended_and_no_loss_of_its_own() -> None:
    step = build(accumulate=4)
    assert step.flush() is None
    grads = gradients(step.net, [make_batch(0), make_batch(1, rows=2)])
    step(*make_batch(0))
    waiting = step(*make_batch(1, rows=2))
    record = step.flush()
    assert record is not None
    assert_shape(record)
    assert flags(record) == (True, False)
    assert record.loss == 0
    assert torch.equal(record.cycle_loss, waiting.cycle_loss)
    assert torch.isclose(record.grad_norm, norm(grads), rtol=1e-6)  # float32 sums


@ON_HOST_AND_DEVICE
def test_a_table_of_rates_is_reported_as_used(decide: str) -> None:
    """One row for all groups, or one per group; the last rate stays; a skip does not advance it."""
    rates = [0.5, 0.25, 0.125]
    step = build(decide=decide, lr=rates)
    records = [step(*make_batch(i, overflow=i == 1)) for i in range(5)]
    assert [r.lr.item() for r in records if r.updated] == [0.5, 0.25, 0.125, 0.125]
    assert_shape(records[0])

    step = build(decide=decide, lr=[rates, [1.0, 0.0, 2.0]], groups=2)
    records = [step(*make_batch(i)) for i in range(4)]
    for record in records:
        assert_shape(record, groups=2)
    rates_used = [record.lr.tolist() for record in records]
    assert rates_used == [[0.5, 1.0], [0.25, 0.0], [0.125, 2.0], [0.125, 2.0]]


def test_without_a_table_the_optimizers_own_rates_are_reported_and_followed() -> None:
    step = build(groups=2)
    assert step(*make_batch(0)).lr.tolist() == [0.1, 0.2]
    first = step(*make_batch(1))
    step.optimizer.param_groups[1]["lr"] = 0.7
    assert step(*make_batch(2)).lr.tolist() == [0.1, 0.7]
    assert first.lr.tolist() == [0.1, 0.2], "a record is not changed by later steps"


@ON_HOST_AND_DEVICE
@pytest.mark.parametrize("accumulate", [1, 2])
def test_records_do_not_change_while_training_goes_on(decide: str, accumulate: int) -> None:
    step = build(decide=decide, accumulate=accumulate, lr=[0.4, 0.3, 0.2, 0.1], fingerprint_every=1)
    records = []
    copies = []
    for i in range(8):
        records.append(step(*make_batch(i, overflow=i == 5)))
        copies.append([value.clone() for value in records[-1]])
    for record, copy in zip(records, copies, strict=True):
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(record, copy, strict=True)
        )


def test_a_loss_in_half_precision_is_reported_in_float32_and_fp64_in_float64() -> None:
    for name, dtype in (
        ("O1", torch.float32),
        ("O2", torch.float32),
        ("bf16", torch.float32),
        ("fp64", torch.float64),
    ):
        for accumulate in (1, 2):
            step = build(precision=name, accumulate=accumulate, nonfinite="skip")
            x, y = make_batch(0)
            empty = step(x[:0], y[:0])
            full = step(x.double() if name == "fp64" else x, y.double() if name == "fp64" else y)
            step(x, y)
            tail = step.flush() or full
            assert {r.loss.dtype for r in (empty, full, tail)} == {dtype}, name
            assert {r.cycle_loss.dtype for r in (empty, full, tail)} == {dtype}, name
