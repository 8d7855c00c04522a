"""A tour of halfstep in short tests. Read this file first; every line of it runs.

Part 1 shows `TrainStep`: one object does forward, backward and update; the loop is yours.
Part 2 shows the pieces alone, `autocast` and `GradScaler`, for any PyTorch loop.

(`Model`, which also owns the loop, is shown in the README and in tests/unit/model/test_model.py.)
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep import amp

Batch = tuple[Tensor, Tensor]


def make_net(device: torch.device) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.LayerNorm(16),
        nn.ReLU(),
        nn.Linear(16, 3),
    ).to(device)


@pytest.fixture
def net(device: torch.device) -> nn.Module:
    return make_net(device)


@pytest.fixture
def batches(device: torch.device) -> list[Batch]:
    """Seven batches of 32 samples. The label is the index of the largest of three features."""
    features = torch.randn(7, 32, 8, device=device)
    return [(x, x[:, :3].argmax(dim=1)) for x in features]


# ------------------------------------------------------------------------------------------------
# Part 1: TrainStep
# ------------------------------------------------------------------------------------------------


def test_one_call_trains_on_one_batch(net: nn.Module, batches: list[Batch]) -> None:
    """Every call returns a record of tensors on the device. Reading one is your decision."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer)

    first = step(*batches[0])
    for _ in range(10):
        for x, y in batches:
            last = step(x, y)

    assert last.loss < 0.5 * first.loss
    assert last.updated
    assert not last.skipped
    assert last.lr.item() == pytest.approx(0.01)


def test_a_precision_is_chosen_with_one_word(net: nn.Module, batches: list[Batch]) -> None:
    """O2 computes in float16, but norms in float32, and scales the loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision="O2")
    record = step(*batches[0])

    # The loss itself is computed in float32: in float16, exp(12) overflows.
    assert record.loss.dtype == torch.float32
    # The loss scale begins where torch's GradScaler begins.
    assert record.scale == 2.0**16
    # Your network keeps its float32 weights, and the optimizer updates those.
    assert {p.dtype for p in net.parameters()} == {torch.float32}

    # The report says what really ran in which dtype, module by module.
    report = step.report()
    print(report)
    assert report.modules["0"].weight == "float16"  # nn.Linear
    assert report.modules["1"].weight == "float32"  # nn.LayerNorm


def test_a_precision_can_be_adjusted() -> None:
    """You can set the low dtype, modules to keep in float32, the loss scale and the rounding."""
    precision = hs.Precision("O2", dtype="bfloat16", keep={"head*": "fp32"})
    assert precision.compute == torch.bfloat16
    # bfloat16 has the range of float32, so there is nothing to scale.
    assert precision.scale == hs.NoScale()

    assert hs.Precision("O0") == hs.Precision("fp32")

    # A precision that halfstep does not have is refused, never replaced by another.
    with pytest.raises(ValueError, match="expected one of"):
        hs.Precision("fp8")


def test_accumulated_batches_give_the_update_of_one_large_batch(device: torch.device) -> None:
    """With accumulate=3, three batches make one update, weighted by samples: sizes may differ."""
    x = torch.randn(10, 4, device=device).double()
    y = torch.randn(10, 2, device=device).double()
    large_net = nn.Linear(4, 2).to(device).double()
    small_net = nn.Linear(4, 2).to(device).double()
    small_net.load_state_dict(large_net.state_dict())

    optimizer = torch.optim.SGD(large_net.parameters(), lr=0.1)
    large_step = hs.TrainStep(large_net, nn.MSELoss(), optimizer, precision="fp64")
    large_step(x, y)

    optimizer = torch.optim.SGD(small_net.parameters(), lr=0.1)
    small_step = hs.TrainStep(small_net, nn.MSELoss(), optimizer, precision="fp64", accumulate=3)
    assert not small_step(x[0:5], y[0:5]).updated
    assert not small_step(x[5:9], y[5:9]).updated
    assert small_step(x[9:10], y[9:10]).updated

    # The tolerance is float64's rounding: the sums are taken in another order.
    assert torch.allclose(large_net.weight, small_net.weight, rtol=0, atol=1e-15)


def test_flush_updates_with_the_batches_that_remain(net: nn.Module, batches: list[Batch]) -> None:
    """Seven batches in groups of three are two updates; flush() makes one of the last batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, accumulate=3)

    records = [step(x, y) for x, y in batches]
    assert sum(int(record.updated) for record in records) == 2

    last = step.flush()
    assert last is not None
    assert last.updated
    # Now nothing is waiting for an update.
    assert step.flush() is None


def test_an_overflow_skips_the_update_and_halves_the_loss_scale(
    net: nn.Module, batches: list[Batch]
) -> None:
    """A float16 gradient overflows now and then. Such a step changes no weight."""
    optimizer = torch.optim.Adam(net.parameters())
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision="O2")
    x, y = batches[0]
    weights_before = [p.detach().clone() for p in net.parameters()]

    assert step(x * torch.inf, y).skipped
    for before, p in zip(weights_before, net.parameters(), strict=True):
        assert torch.equal(before, p)
    assert step(x, y).scale == 2.0**15


def test_without_a_loss_scale_a_non_finite_gradient_is_an_error(
    net: nn.Module, batches: list[Batch]
) -> None:
    """In float32 the cause is the model or the data, so the error names the parameter."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer)
    x, y = batches[0]
    with pytest.raises(hs.NonFiniteError, match=r"non-finite gradient in 0\.weight"):
        step(x * torch.inf, y)


def test_a_saved_step_continues_bit_for_bit(device: torch.device, batches: list[Batch]) -> None:
    """state_dict() is everything that decides the next step, also between two updates."""

    def make_step() -> hs.TrainStep:
        net = make_net(device)
        optimizer = torch.optim.Adam(net.parameters())
        return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision="O2", accumulate=2)

    original = make_step()
    restored = make_step()
    for x, y in batches[:3]:
        original(x, y)

    restored.load_state_dict(original.state_dict())
    for x, y in batches[3:]:
        assert torch.equal(original(x, y).loss, restored(x, y).loss)
    for p, q in zip(original.net.parameters(), restored.net.parameters(), strict=True):
        assert torch.equal(p, q)


def test_evaluation_uses_the_precision_of_training(net: nn.Module, batches: list[Batch]) -> None:
    """An evaluator runs in eval mode without gradients, then restores the modes."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision="O1", ema=0.9)
    step(*batches[0])

    # sum(loss · count) / sum(count) would be the mean loss of the data set.
    evaluate = step.evaluator()
    correct = 0
    samples = 0
    for x, y in batches:
        record = evaluate(x, y)
        correct += int((record.outputs.argmax(dim=1) == y).sum())
        samples += int(record.count)
    assert samples == 7 * 32
    assert 0 <= correct <= samples

    # Inside this block the network has the moving average of its weights (ema=0.9).
    with step.averaged():
        assert evaluate(*batches[0]).loss.isfinite()
    assert net.training


def test_kahan_rounding_keeps_updates_too_small_for_float16(device: torch.device) -> None:
    """Pure float16: a weight of 1 minus 6e-5 rounds to 1 again, so that nothing is ever learned.

    Kahan rounding stores what rounding has cut off, and adds it to the next update.
    """
    updates = 100
    lr = 6e-5
    weights = {}
    for rounding in ("nearest", "kahan"):
        net = nn.Linear(1, 1, bias=False).to(device)
        nn.init.ones_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        precision = hs.Precision("fp16", rounding=rounding)
        # Without a loss function, `forward` returns the loss. Its gradient is 1 here.
        step = hs.TrainStep(
            net,
            None,
            optimizer,
            precision=precision,
            forward=lambda net, x: net(x).sum(),
        )
        for _ in range(updates):
            step(torch.ones(1, 1, device=device))
        weights[rounding] = net.weight.item()

    assert weights["nearest"] == 1.0
    # The tolerance is half the distance between two float16 numbers just below 1.
    assert weights["kahan"] == pytest.approx(1 - updates * lr, abs=2.0**-12)


# ------------------------------------------------------------------------------------------------
# Part 2: autocast and GradScaler, in a loop written by hand
# ------------------------------------------------------------------------------------------------


def test_autocast_is_a_context_a_decorator_and_a_switch(device: torch.device) -> None:
    a = torch.randn(4, 4, device=device)

    # A context.
    with amp.autocast():
        assert (a @ a).dtype == torch.float16

    # A decorator.
    @amp.autocast()
    def square(matrix: Tensor) -> Tensor:
        return matrix @ matrix

    assert square(a).dtype == torch.float16

    # A switch for the whole program.
    amp.enabled = True
    try:
        assert (a @ a).dtype == torch.float16
    finally:
        amp.enabled = False
    assert (a @ a).dtype == torch.float32


def test_the_scaler_is_used_like_torchs(net: nn.Module, batches: list[Batch]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = amp.GradScaler()
    first_x, first_y = batches[0]
    loss_before = F.cross_entropy(net(first_x), first_y)

    for x, y in batches:
        optimizer.zero_grad()
        with amp.autocast():
            loss = F.cross_entropy(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # unscales, and skips the update if a gradient is not finite
        scaler.update()

    assert F.cross_entropy(net(first_x), first_y) < loss_before


def test_the_scaler_is_used_like_megengines(net: nn.Module, batches: list[Batch]) -> None:
    """scaler.backward() does in one call what the three calls by hand do."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = amp.GradScaler()
    manager = hs.GradManager().attach(net.parameters())
    x, y = batches[0]

    def copy_grads() -> list[Tensor]:
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    # In one call.
    optimizer.zero_grad()
    with manager:
        with amp.autocast():
            loss = F.cross_entropy(net(x).float(), y)
        scaler.backward(manager, loss)
    grads_in_one_call = copy_grads()

    # By hand: between unscale() and update() you may edit the gradients.
    optimizer.zero_grad()
    with manager:
        with amp.autocast():
            loss = F.cross_entropy(net(x).float(), y)
        manager.backward(loss, dy=scaler.scale_factor)
        scaler.unscale(manager.attached_tensors())
        scaler.update()
    grads_by_hand = copy_grads()

    assert len(grads_in_one_call) == len(list(net.parameters()))
    for grad, expected in zip(grads_in_one_call, grads_by_hand, strict=True):
        assert torch.equal(grad, expected)
    optimizer.step()
