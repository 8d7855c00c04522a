"""The tour: halfstep from top to bottom in a dozen short tests. Read this first; every line runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep import amp


@pytest.fixture
def net(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).to(device)


@pytest.fixture
def data(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Seven batches: the class is where the largest of the first three features is."""
    x = torch.randn(7, 32, 8, device=device)
    return [(batch, batch[:, :3].argmax(1)) for batch in x]


# --- Semi-automatic: one step as a value; you own the loop -----------------------------------------------------------


def test_one_step_is_one_call(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    """Hand over network, loss and optimizer; every batch is one call, and every call returns a record."""
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters(), lr=0.01))
    first = step(*data[0])
    for _ in range(10):
        for batch in data:
            last = step(*batch)
    assert (
        last.loss < 0.5 * first.loss
    )  # tensors on the device: looking at one is your decision, not the step's
    assert last.updated
    assert not last.skipped
    assert last.lr.item() == pytest.approx(0.01)


def test_the_precision_is_one_word(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    """O2: the whole network computes in float16, norms in float32, and the loss is scaled. Your network stays fp32."""
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), precision="O2"
    )
    record = step(*data[0])
    assert record.loss.dtype == torch.float32  # a loss is never taken in half: exp overflows at 11
    assert record.scale == 2.0**16  # where torch's GradScaler starts too
    assert {p.dtype for p in net.parameters()} == {
        torch.float32
    }  # the masters that the optimizer holds
    print(step.report())  # what really ran in which dtype, module by module
    assert step.report().modules["0"].weight == "float16"
    assert step.report().modules["1"].weight == "float32"


def test_a_precision_is_a_value_with_choices() -> None:
    """Beyond the word: the low dtype, modules to keep high, the loss scale, how low weights are rounded."""
    p = hs.Precision("O2", dtype="bfloat16", keep={"head*": "fp32"})
    assert (p.compute, p.scale) == (
        torch.bfloat16,
        hs.NoScale(),
    )  # bfloat16 has fp32's range: nothing to scale
    assert hs.Precision("O0") == hs.Precision("fp32")
    with pytest.raises(ValueError, match="expected one of"):  # honoured or refused, never replaced
        hs.Precision("fp8")


def test_small_batches_add_up_to_a_big_one(device: torch.device) -> None:
    """accumulate=3: three batches make one update, exactly that of all their samples at once, even when uneven."""
    x, y = torch.randn(10, 4, device=device).double(), torch.randn(10, 2, device=device).double()
    big, small = (nn.Linear(4, 2).to(device).double() for _ in range(2))
    small.load_state_dict(big.state_dict())
    hs.TrainStep(big, nn.MSELoss(), torch.optim.SGD(big.parameters(), lr=0.1), precision="fp64")(
        x, y
    )
    step = hs.TrainStep(
        small,
        nn.MSELoss(),
        torch.optim.SGD(small.parameters(), lr=0.1),
        precision="fp64",
        accumulate=3,
    )
    records = [step(x[i:j], y[i:j]) for i, j in ((0, 5), (5, 9), (9, 10))]
    assert [bool(r.updated) for r in records] == [False, False, True]
    assert torch.allclose(
        big.weight, small.weight, rtol=0, atol=1e-15
    )  # float64 sums in another order


def test_the_tail_of_a_pass_is_an_update_of_its_own(
    net: nn.Module, data: list[tuple[Tensor, Tensor]]
) -> None:
    """Seven batches in cycles of three: two full updates, and flush() makes the third of the one that is left."""
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), accumulate=3
    )
    updates = sum(int(step(*batch).updated) for batch in data)
    assert updates == 2
    tail = step.flush()
    assert tail is not None
    assert tail.updated
    assert step.flush() is None  # nothing is left over for the next pass


def test_a_skipped_step_is_no_step(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    """An overflow in a half-precision gradient: nothing moves but the loss scale, which is halved."""
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters()), precision="O2"
    )
    x, y = data[0]
    before = [p.detach().clone() for p in net.parameters()]
    record = step(x * torch.inf, y)
    assert record.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert step(x, y).scale == 2.0**15


def test_without_a_scale_a_non_finite_gradient_is_an_error(
    net: nn.Module, data: list[tuple[Tensor, Tensor]]
) -> None:
    """In fp32 an inf is not the scale's doing but a bug of the model or the data, so it is named, not skipped."""
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    x, y = data[0]
    with pytest.raises(hs.NonFiniteError, match=r"non-finite gradient in 0\.weight"):
        step(x * torch.inf, y)


def test_stop_and_go_on_as_if_nothing_had_happened(
    net: nn.Module, data: list[tuple[Tensor, Tensor]]
) -> None:
    """state_dict() is everything that decides the next step, inside an update cycle too."""

    def fresh() -> hs.TrainStep:
        same = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).to(
            data[0][0].device
        )
        return hs.TrainStep(
            same,
            nn.CrossEntropyLoss(),
            torch.optim.Adam(same.parameters()),
            precision="O2",
            accumulate=2,
        )

    one, other = fresh(), fresh()
    for batch in data[:3]:
        one(*batch)
    other.load_state_dict(one.state_dict())
    for batch in data[3:]:
        assert torch.equal(one(*batch).loss, other(*batch).loss)
    for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_evaluate_in_the_same_precision(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    """evaluator(): eval mode and no gradients while it runs; Σ loss·count / Σ count is the mean over the data set."""
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.1),
        precision="O1",
        ema=0.9,
    )
    step(*data[0])
    evaluate = step.evaluator()
    records = [evaluate(*batch) for batch in data]
    hits = sum((r.outputs.argmax(1) == y).sum() for r, (_, y) in zip(records, data, strict=True))
    assert 0 <= hits <= sum(r.count for r in records) == 7 * 32
    with step.averaged():  # the moving average of the weights, for as long as this block lasts
        assert evaluate(*data[0]).loss.isfinite()
    assert net.training


def test_pure_half_without_losing_small_updates(device: torch.device) -> None:
    """A float16 weight of 1 cannot take a step of 6e-5: nearest rounding loses it. A Kahan residue keeps it."""
    weights = {}
    for rounding in ("nearest", "kahan"):
        net = nn.Linear(1, 1, bias=False).to(device)
        nn.init.ones_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=6e-5)
        step = hs.TrainStep(
            net,
            None,
            optimizer,
            precision=hs.Precision("fp16", rounding=rounding),
            forward=lambda n, x: n(x).sum(),
        )
        for _ in range(100):
            step(torch.ones(1, 1, device=device))
        weights[rounding] = net.weight.item()
    assert weights["nearest"] == 1.0
    assert weights["kahan"] == pytest.approx(
        1 - 100 * 6e-5, abs=2.0**-12
    )  # half a unit of float16 below 1


# --- Manual: the pieces, in any PyTorch code -------------------------------------------------------------------------


def test_autocast_is_a_context_a_decorator_and_a_switch(device: torch.device) -> None:
    a = torch.randn(4, 4, device=device)

    @amp.autocast()
    def product(a: Tensor) -> Tensor:
        return a @ a

    with amp.autocast():
        assert (a @ a).dtype == torch.float16
    assert product(a).dtype == torch.float16
    amp.enabled = True
    try:
        assert (a @ a).dtype == torch.float16
    finally:
        amp.enabled = False
    assert (a @ a).dtype == torch.float32


def test_the_scaler_speaks_torchs_protocol(
    net: nn.Module, data: list[tuple[Tensor, Tensor]]
) -> None:
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), amp.GradScaler()
    before = F.cross_entropy(net(data[0][0]), data[0][1])
    for x, y in data:
        optimizer.zero_grad()
        with amp.autocast():
            loss = F.cross_entropy(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # unscales, and skips when something is not finite
        scaler.update()
    assert F.cross_entropy(net(data[0][0]), data[0][1]) < before


def test_the_scaler_speaks_megengines_protocol(
    net: nn.Module, data: list[tuple[Tensor, Tensor]]
) -> None:
    """Automatic: scaler.backward does it all. By hand: seed the gradient, unscale, edit gradients, update."""
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), amp.GradScaler()
    gm = hs.GradManager().attach(net.parameters())
    grads = []
    for by_hand in (False, True):
        optimizer.zero_grad()
        with gm:
            with amp.autocast():
                loss = F.cross_entropy(net(data[0][0]).float(), data[0][1])
            if by_hand:
                gm.backward(loss, dy=scaler.scale_factor)
                scaler.unscale(gm.attached_tensors())
                scaler.update()
            else:
                scaler.backward(gm, loss)
        grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert len(grads[0]) == len(list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    optimizer.step()
