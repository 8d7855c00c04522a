"""What a non-finite gradient does, by choice; what is not one; and where the loss scale stops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALED = hs.Precision("fp32", scale=hs.FixedScale(value=2.0**16))
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
FUSED_ADAM = partial(torch.optim.Adam, lr=0.1, fused=True)
Batch = tuple[Tensor, ...]
MakeOptimizer = Callable[..., torch.optim.Optimizer]

EVERY_DECISION = pytest.mark.parametrize(
    ("make_optimizer", "decide"),
    [(SGD, "host"), (SGD, "device"), (FUSED_ADAM, "host"), (FUSED_ADAM, "device")],
)


class LinearWithGain(nn.Module):
    """√(z·gain) is finite at z = 0, but the gradient of `gain` is not; all other gradients are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.linear(x) + torch.sqrt(z * self.gain)


def make_batch(seed: int, *, nonfinite_grad: bool = False) -> Batch:
    torch.manual_seed(seed)
    z = torch.zeros(()) if nonfinite_grad else torch.ones(())
    x = torch.randn(4, 3)
    y = torch.randn(4, 2)
    return x.to(DEVICE), z.to(DEVICE), y.to(DEVICE)


def build(make_optimizer: MakeOptimizer = SGD, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = LinearWithGain().to(DEVICE)
    return hs.TrainStep(net, nn.MSELoss(), make_optimizer(net.parameters()), **options)


def train_plain_torch(batches: list[Batch], make_optimizer: MakeOptimizer = SGD) -> nn.Module:
    """Returns the network after one update per batch, in plain torch."""
    torch.manual_seed(0)
    net = LinearWithGain().to(DEVICE)
    optimizer = make_optimizer(net.parameters())
    for x, z, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x, z), y).backward()
        optimizer.step()
    return net


def copy_weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same_bits(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all float32 tensors are equal bit for bit, NaN included."""
    actual_bits = [tensor.view(torch.int32) for tensor in actual]
    expected_bits = [tensor.view(torch.int32) for tensor in expected]
    return all(torch.equal(a, b) for a, b in zip(actual_bits, expected_bits, strict=True))


def run_until_host_reacts(step: hs.TrainStep, batches: int = 40) -> None:
    """Runs batches with a non-finite gradient until the step raises or changes its precision.

    It does so at once, or some updates late when a CUDA device decides.
    """
    precision_before = step.precision
    for _ in range(batches):
        step(*make_batch(0, nonfinite_grad=True))
        if step.precision is not precision_before:
            return
    step.check()


@EVERY_DECISION
@pytest.mark.parametrize("precision", ["fp32", SCALED], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("bad_step", [1, 3])
def test_raise_names_the_step_and_the_parameter_and_training_can_continue(
    make_optimizer: MakeOptimizer, decide: str, precision: Any, bad_step: int
) -> None:
    step = build(make_optimizer, precision=precision, decide=decide, nonfinite="raise")
    batches_before = [make_batch(i) for i in range(1, bad_step)]
    for batch in batches_before:
        assert step(*batch).updated

    with pytest.raises(hs.NonFiniteError, match=rf"\bstep {bad_step}\b.*\bgain\b") as error:
        run_until_host_reacts(step)
    assert "linear" not in str(error.value), "only the parameter at fault is named"
    expected = train_plain_torch(batches_before, make_optimizer)
    assert same_bits(copy_weights(step.net), copy_weights(expected)), "nothing was committed"

    batches_after = [make_batch(i) for i in range(10, 13)]
    for batch in batches_after:
        assert step(*batch).updated
    expected = train_plain_torch(batches_before + batches_after, make_optimizer)
    assert same_bits(copy_weights(step.net), copy_weights(expected))


def test_the_default_raises_without_loss_scaling_and_skips_with_it() -> None:
    with pytest.raises(hs.NonFiniteError):
        build()(*make_batch(0, nonfinite_grad=True))
    assert build(precision=SCALED)(*make_batch(0, nonfinite_grad=True)).skipped


@EVERY_DECISION
@pytest.mark.parametrize("precision", ["fp32", SCALED], ids=["unscaled", "scaled"])
def test_skip_drops_the_update_and_ignore_applies_it_as_plain_torch(
    make_optimizer: MakeOptimizer, decide: str, precision: Any
) -> None:
    batches = [make_batch(1), make_batch(2, nonfinite_grad=True), make_batch(3)]

    skip = build(make_optimizer, precision=precision, decide=decide, nonfinite="skip")
    assert [bool(skip(*batch).skipped) for batch in batches] == [False, True, False]
    expected = train_plain_torch([batches[0], batches[2]], make_optimizer)
    assert same_bits(copy_weights(skip.net), copy_weights(expected))

    ignore = build(make_optimizer, precision=precision, decide=decide, nonfinite="ignore")
    records = [ignore(*batch) for batch in batches]
    assert not any(record.skipped for record in records)
    assert all(record.updated for record in records)
    assert ignore.net.gain.isnan().all()
    expected = train_plain_torch(batches, make_optimizer)
    assert same_bits(copy_weights(ignore.net), copy_weights(expected))


def test_an_empty_batch_under_ignore_changes_no_buffer() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(DEVICE)
    step = hs.TrainStep(net, nn.MSELoss(), SGD(net.parameters()), nonfinite="ignore")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.zeros(0, 3, device=DEVICE)
    y = torch.zeros(0, 2, device=DEVICE)
    assert not step(x, y).updated
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def build_with_skip_limit(
    on_skips: str, precision_name: str = "O2", decide: str = "host"
) -> hs.TrainStep:
    """Returns a step that does what `on_skips` says after three skipped updates in a row."""
    scale = hs.DynamicScale(init=8.0, max_skips=3, on_skips=on_skips)
    return build(precision=hs.Precision(precision_name, scale=scale), decide=decide)


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("updates_before", [0, 2])
def test_a_streak_of_skips_raises_with_scale_and_parameter(
    decide: str, updates_before: int
) -> None:
    step = build_with_skip_limit("raise", decide=decide)
    for i in range(updates_before):
        step(*make_batch(i))
    weights_before = copy_weights(step.net)
    for _ in range(2):
        assert step(*make_batch(0, nonfinite_grad=True)).skipped
    assert step(*make_batch(0)).updated, "an update in between ends the streak"
    weights_after = copy_weights(step.net)
    assert not same_bits(weights_before, weights_after)

    message = r"\d+ updates in a row overflowed.*\bgain\b.*bfloat16"
    with pytest.raises(hs.NonFiniteError, match=message) as error:
        run_until_host_reacts(step)
    assert "linear" not in str(error.value)
    assert f"scale {float(step.state.scale):g}" in str(error.value)
    if DEVICE == "cpu" or decide == "host":
        assert int(step.state.streak) == 3
    else:
        assert int(step.state.streak) >= 3
    assert same_bits(copy_weights(step.net), weights_after)


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize(("on_skips", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("name", ["O1", "O2"])
def test_a_streak_of_skips_can_go_on_in_another_precision(
    name: str, on_skips: str, dtype: torch.dtype, decide: str
) -> None:
    step = build_with_skip_limit(on_skips, name, decide)
    step(*make_batch(1))
    weights_before = copy_weights(step.net)
    momentum_before = step.optimizer.state_dict()["state"][0]["momentum_buffer"].clone()

    with pytest.warns(hs.Notice, match=r"updates in a row overflowed.*\bgain\b.*going on in"):
        run_until_host_reacts(step)
    assert step.precision.compute == dtype
    assert same_bits(copy_weights(step.net), weights_before)
    momentum = step.optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(momentum, momentum_before)

    record = step(*make_batch(2))
    assert record.updated
    assert record.scale == 1, "neither fallback scales the loss"
    assert not same_bits(copy_weights(step.net), weights_before)


@pytest.mark.parametrize(
    ("name", "on_skips"), [("fp16", "bf16"), ("fp16", "fp32"), ("fp64", "fp32"), ("fp32", "bf16")]
)
def test_a_fallback_that_cannot_be_taken_is_refused_at_construction(
    name: str, on_skips: str
) -> None:
    """fp16 stores its weights in float16, so that bf16 or fp32 would need another network.

    fp32 has no bf16 form.
    """
    with pytest.raises(ValueError, match="on_skips"):
        build_with_skip_limit(on_skips, name)


def test_the_scale_stops_at_its_floor_and_at_its_cap() -> None:
    with_floor = hs.DynamicScale(init=4.0, floor=1.0)
    step = build(precision=hs.Precision("fp32", scale=with_floor))
    scales = [float(step(*make_batch(0, nonfinite_grad=True)).scale) for _ in range(5)]
    assert scales == [4, 2, 1, 1, 1]

    with_cap = hs.DynamicScale(init=4.0, interval=1, cap=16.0)
    step = build(precision=hs.Precision("fp32", scale=with_cap))
    scales = [float(step(*make_batch(i)).scale) for i in range(5)]
    assert scales == [4, 8, 16, 16, 16]

    step = build(precision=SCALED)
    batches = [make_batch(i, nonfinite_grad=i % 2 == 0) for i in range(5)]
    assert {float(step(*batch).scale) for batch in batches} == {2.0**16}


@EVERY_DECISION
@pytest.mark.parametrize(
    "limit", [{"clip_norm": 0.01}, {"clip_value": 0.003}], ids=["norm", "value"]
)
def test_the_clipped_update_is_the_same_at_every_scale_and_plain_torchs(
    make_optimizer: MakeOptimizer, decide: str, limit: dict[str, float]
) -> None:
    """Clipping acts on unscaled gradients; scales are powers of two, so that unscaling is exact."""
    torch.manual_seed(0)
    net = LinearWithGain().to(DEVICE)
    optimizer = make_optimizer(net.parameters())
    for i in range(3):
        x, z, y = make_batch(i)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x, z), y).backward()
        if "clip_norm" in limit:
            nn.utils.clip_grad_norm_(net.parameters(), limit["clip_norm"])
        else:
            nn.utils.clip_grad_value_(net.parameters(), limit["clip_value"])
        optimizer.step()
    expected = copy_weights(net)

    unscaled = hs.Precision("fp32")
    scaled_by_one = hs.Precision("fp32", scale=1.0)
    scaled = hs.Precision("fp32", scale=2.0**16)
    for precision in (unscaled, scaled_by_one, scaled):
        step = build(make_optimizer, precision=precision, decide=decide, **limit)
        norms = [step(*make_batch(i)).grad_norm for i in range(3)]
        assert all(norm > 0.1 for norm in norms), "the norm before clipping"
        assert same_bits(copy_weights(step.net), expected)


class PartlyTrained(nn.Module):
    """A network with a layer that is trained, one that is frozen and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.frozen = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)
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
    net = PartlyTrained().to(DEVICE)
    plain_net = PartlyTrained().to(DEVICE)
    plain_net.load_state_dict(net.state_dict())
    make_optimizer = partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.1)
    step = hs.TrainStep(
        net,
        nn.MSELoss(),
        make_optimizer(net.parameters()),
        precision=precision,
        accumulate=accumulate,
        decide=decide,
    )
    plain_optimizer = make_optimizer(plain_net.parameters())

    # The target equals the output: all gradients are exactly 0, and momentum and weight decay
    # still act.
    micro_batch_size = 4 // accumulate
    x = torch.randn(4, 3, device=DEVICE)
    for _ in range(3):
        with torch.no_grad(), step.applied:
            y = net(x)
        for micro_batch in zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True):
            record = step(*micro_batch)
        assert record.updated
        assert record.grad_norm == 0
        for param in plain_net.used.parameters():
            param.grad = torch.zeros_like(param)
        plain_optimizer.step()
    assert same_bits(copy_weights(net), copy_weights(plain_net))


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize(
    "precision", ["fp32", hs.Precision("fp32", scale=4.0)], ids=["unscaled", "scaled"]
)
def test_a_huge_but_finite_gradient_is_applied(precision: Any, decide: str) -> None:
    """Elements of 1e30 are finite; their squares, and so the norm in float32, are not."""
    make_optimizer = partial(torch.optim.SGD, lr=1e-32)
    step = build(make_optimizer, precision=precision, decide=decide, sens=1e30, nonfinite="raise")
    plain_net = train_plain_torch([], make_optimizer)
    plain_params = list(plain_net.parameters())
    for i in range(3):
        x, z, y = make_batch(i)
        assert step(x, z, y).updated
        loss = nn.functional.mse_loss(plain_net(x, z), y)
        grads = torch.autograd.grad(loss * 1e30, plain_params)
        for param, grad in zip(plain_params, grads, strict=True):
            assert grad.abs().max() > 1e25
            param.data.add_(grad, alpha=-1e-32)
    assert same_bits(copy_weights(step.net), copy_weights(plain_net))


def test_a_huge_finite_gradient_is_not_named_for_the_nan_of_another() -> None:
    step = build(sens=1e30)
    with pytest.raises(hs.NonFiniteError, match=r"non-finite gradient in gain\."):
        step(*make_batch(0, nonfinite_grad=True))
