"""What a non-finite gradient does, by choice; what is not one; and where the loss scale stops."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALED = hs.Precision("fp32", scale=hs.FixedScale(value=2.0**16))
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
FUSED = partial(torch.optim.Adam, lr=0.1, fused=True)
Batch = tuple[Tensor, ...]


class Gained(nn.Module):
    """√(z·gain) is finite at z = 0, the gradient of `gain` there is not; every other gradient is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.linear(x) + torch.sqrt(z * self.gain)


def batch(i: int, *, bad: bool = False) -> Batch:
    torch.manual_seed(i)
    z = torch.zeros(()) if bad else torch.ones(())
    return torch.randn(4, 3).to(DEVICE), z.to(DEVICE), torch.randn(4, 2).to(DEVICE)


def build(make: Any = SGD, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = Gained().to(DEVICE)
    return hs.TrainStep(net, nn.MSELoss(), make(net.parameters()), **options)


def plain(batches: list[Batch], make: Any = SGD) -> nn.Module:
    torch.manual_seed(0)
    net = Gained().to(DEVICE)
    optimizer = make(net.parameters())
    for x, z, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x, z), y).backward()
        optimizer.step()
    return net


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit for bit, NaN where NaN is."""
    return all(
        torch.equal(p.view(torch.int32), q.view(torch.int32)) for p, q in zip(a, b, strict=True)
    )


def run_into_it(step: hs.TrainStep, batches: int = 40) -> None:
    """Bad batches until the host hears of it: at once, or some updates late when a CUDA device decides."""
    was = step.precision
    for _ in range(batches):
        step(*batch(0, bad=True))
        if step.precision is not was:
            return
    step.check()


PLACES = pytest.mark.parametrize(
    ("make", "decide"), [(SGD, "host"), (SGD, "device"), (FUSED, "host"), (FUSED, "device")]
)


@PLACES
@pytest.mark.parametrize("precision", ["fp32", SCALED], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("bad_step", [1, 3])
def test_raise_names_the_step_and_the_parameter_and_training_can_continue(
    make: Any, decide: str, precision: Any, bad_step: int
) -> None:
    step = build(make, precision=precision, decide=decide, nonfinite="raise")
    done = [batch(i) for i in range(1, bad_step)]
    for each in done:
        assert step(*each).updated
    with pytest.raises(hs.NonFiniteError, match=rf"\bstep {bad_step}\b.*\bgain\b") as error:
        run_into_it(step)
    assert "linear" not in str(error.value), "only the culprit is named"
    assert same(weights(step.net), weights(plain(done, make))), "nothing was committed"
    more = [batch(i) for i in range(10, 13)]
    for each in more:
        assert step(*each).updated
    assert same(weights(step.net), weights(plain(done + more, make)))


def test_the_default_raises_without_loss_scaling_and_skips_with_it() -> None:
    with pytest.raises(hs.NonFiniteError):
        build()(*batch(0, bad=True))
    assert build(precision=SCALED)(*batch(0, bad=True)).skipped


@PLACES
@pytest.mark.parametrize("precision", ["fp32", SCALED], ids=["unscaled", "scaled"])
def test_skip_drops_the_update_and_ignore_applies_it_as_plain_torch(
    make: Any, decide: str, precision: Any
) -> None:
    batches = [batch(1), batch(2, bad=True), batch(3)]
    skip, ignore = (
        build(make, precision=precision, decide=decide, nonfinite=n) for n in ("skip", "ignore")
    )
    assert [bool(skip(*each).skipped) for each in batches] == [False, True, False]
    assert same(weights(skip.net), weights(plain([batches[0], batches[2]], make)))
    records = [ignore(*each) for each in batches]
    assert not any(r.skipped for r in records)
    assert all(r.updated for r in records)
    assert ignore.net.gain.isnan().all()
    assert same(weights(ignore.net), weights(plain(batches, make)))


def test_an_empty_batch_under_ignore_changes_no_buffer() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(DEVICE)
    step = hs.TrainStep(net, nn.MSELoss(), SGD(net.parameters()), nonfinite="ignore")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    assert not step(torch.zeros(0, 3, device=DEVICE), torch.zeros(0, 2, device=DEVICE)).updated
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def streaky(on_skips: str, name: str = "O2", decide: str = "host") -> hs.TrainStep:
    scale = hs.DynamicScale(init=8.0, max_skips=3, on_skips=on_skips)
    return build(precision=hs.Precision(name, scale=scale), decide=decide)


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("warm", [0, 2])
def test_a_streak_of_skips_raises_with_scale_and_culprit(decide: str, warm: int) -> None:
    step = streaky("raise", decide=decide)
    for i in range(warm):
        step(*batch(i))
    before = weights(step.net)
    for _ in range(2):
        assert step(*batch(0, bad=True)).skipped
    assert step(*batch(0)).updated, "an update in between ends the streak"
    after = weights(step.net)
    assert not same(before, after)
    with pytest.raises(
        hs.NonFiniteError, match=r"\d+ updates in a row overflowed.*\bgain\b.*bfloat16"
    ) as error:
        run_into_it(step)
    assert "linear" not in str(error.value)
    assert f"scale {float(step.state.scale):g}" in str(error.value)
    assert (
        int(step.state.streak) == 3
        if DEVICE == "cpu" or decide == "host"
        else int(step.state.streak) >= 3
    )
    assert same(weights(step.net), after)


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize(("on_skips", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("name", ["O1", "O2"])
def test_a_streak_of_skips_can_go_on_in_another_precision(
    name: str, on_skips: str, dtype: torch.dtype, decide: str
) -> None:
    step = streaky(on_skips, name, decide)
    step(*batch(1))
    before, momentum = (
        weights(step.net),
        step.optimizer.state_dict()["state"][0]["momentum_buffer"].clone(),
    )
    with pytest.warns(hs.Notice, match=r"updates in a row overflowed.*\bgain\b.*going on in"):
        run_into_it(step)
    assert step.precision.compute == dtype
    assert same(weights(step.net), before)
    assert torch.equal(step.optimizer.state_dict()["state"][0]["momentum_buffer"], momentum)
    record = step(*batch(2))
    assert record.updated
    assert record.scale == 1, "neither fallback scales the loss"
    assert not same(weights(step.net), before)


@pytest.mark.parametrize(
    ("name", "on_skips"), [("fp16", "bf16"), ("fp16", "fp32"), ("fp64", "fp32"), ("fp32", "bf16")]
)
def test_a_fallback_that_cannot_be_taken_is_refused_at_construction(
    name: str, on_skips: str
) -> None:
    """fp16 stores its weights in float16, so that bf16 or fp32 would need another network; fp32 has no bf16 form."""
    with pytest.raises(ValueError, match="on_skips"):
        streaky(on_skips, name)


def test_the_scale_stops_at_its_floor_and_at_its_cap() -> None:
    low = build(precision=hs.Precision("fp32", scale=hs.DynamicScale(init=4.0, floor=1.0)))
    assert [float(low(*batch(0, bad=True)).scale) for _ in range(5)] == [4, 2, 1, 1, 1]
    high = build(
        precision=hs.Precision("fp32", scale=hs.DynamicScale(init=4.0, interval=1, cap=16.0))
    )
    assert [float(high(*batch(i)).scale) for i in range(5)] == [4, 8, 16, 16, 16]
    fixed = build(precision=SCALED)
    assert {float(fixed(*batch(i, bad=i % 2 == 0)).scale) for i in range(5)} == {2.0**16}


@PLACES
@pytest.mark.parametrize(
    "limit", [{"clip_norm": 0.01}, {"clip_value": 0.003}], ids=["norm", "value"]
)
def test_the_clipped_update_is_the_same_at_every_scale_and_plain_torchs(
    make: Any, decide: str, limit: Any
) -> None:
    """Clipping acts on unscaled gradients; scales are powers of two, so that unscaling is exact."""
    ends = []
    for precision in ("fp32", *(hs.Precision("fp32", scale=s) for s in (1.0, 2.0**16))):
        step = build(make, precision=precision, decide=decide, **limit)
        norms = [step(*batch(i)).grad_norm for i in range(3)]
        assert all(n > 0.1 for n in norms), "the norm before clipping"
        ends.append(weights(step.net))
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])
    torch.manual_seed(0)
    net = Gained().to(DEVICE)
    optimizer = make(net.parameters())
    for i in range(3):
        x, z, y = batch(i)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x, z), y).backward()
        if "clip_norm" in limit:
            nn.utils.clip_grad_norm_(net.parameters(), limit["clip_norm"])
        else:
            nn.utils.clip_grad_value_(net.parameters(), limit["clip_value"])
        optimizer.step()
    assert same(ends[0], weights(net))


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen, self.unused = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.used(x))


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("precision", ["fp32", SCALED, "O2"], ids=["unscaled", "scaled", "O2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_frozen_and_unused_parameters_and_zero_gradients_train_as_in_plain_torch(
    precision: Any, accumulate: int, decide: str
) -> None:
    torch.manual_seed(0)
    net, other = Partly().to(DEVICE), Partly().to(DEVICE)
    other.load_state_dict(net.state_dict())
    make = partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.1)
    settings = {"precision": precision, "accumulate": accumulate, "decide": decide}
    step = hs.TrainStep(net, nn.MSELoss(), make(net.parameters()), **settings)
    optimizer = make(other.parameters())
    x = torch.randn(4, 3, device=DEVICE)
    for _ in range(
        3
    ):  # a target equal to the output: all gradients are exactly 0, and momentum and decay still act
        with torch.no_grad(), step.applied:
            y = net(x)
        for part in zip(x.split(4 // accumulate), y.split(4 // accumulate), strict=True):
            record = step(*part)
        assert record.updated
        assert record.grad_norm == 0
        for p in other.used.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert same(weights(net), weights(other))


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize(
    "precision", ["fp32", hs.Precision("fp32", scale=4.0)], ids=["unscaled", "scaled"]
)
def test_a_huge_but_finite_gradient_is_applied(precision: Any, decide: str) -> None:
    """Elements of 1e30 are finite; their squares, and so the norm in float32, are not."""
    make = partial(torch.optim.SGD, lr=1e-32)
    step, net = (
        build(make, precision=precision, decide=decide, sens=1e30, nonfinite="raise"),
        plain([], make),
    )
    for i in range(3):
        x, z, y = batch(i)
        assert step(x, z, y).updated
        loss = nn.functional.mse_loss(net(x, z), y)
        for p, g in zip(
            net.parameters(), torch.autograd.grad(loss * 1e30, [*net.parameters()]), strict=True
        ):
            assert g.abs().max() > 1e25
            p.data.add_(g, alpha=-1e-32)
    assert same(weights(step.net), weights(net))


def test_a_huge_finite_gradient_is_not_blamed_for_another_ones_nan() -> None:
    step = build(sens=1e30)
    with pytest.raises(hs.NonFiniteError, match=r"non-finite gradient in gain\."):
        step(*batch(0, bad=True))
