"""A loss that gives no parameter of the optimizer a gradient: never a silent 0.0."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import Notice
from tests.support.emulated_graphs import sink_with_emulated_graphs

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3
PRECISIONS = ("fp32", "O1+bf16", "O2", "bf16", "fp64")


class TwoLayers(nn.Module):
    """Uses its layers `used`; the optimizer holds layer a."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 3)
        self.b = nn.Linear(6, 3)
        self.used = "ab"

    def forward(self, x: Tensor) -> Tensor:
        return sum((getattr(self, name)(x) for name in self.used), torch.zeros((), dtype=x.dtype))


def make_step(net: TwoLayers, precision: str, **options: Any) -> hs.TrainStep:
    optimizer = torch.optim.SGD(net.a.parameters(), lr=0.1)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision, **options)


def true_loss(step: hs.TrainStep) -> float:
    return step.evaluator()(X, Y).loss.item()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_first_update_is_refused_with_the_names(precision: str, accumulate: int) -> None:
    net = TwoLayers()
    net.used = "b"
    step = make_step(net, precision, accumulate=accumulate)
    before = step.fingerprints()
    for _ in range(accumulate - 1):
        step(X, Y)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape("(a.weight, a.bias)")):
            step(X, Y)
        for _ in range(accumulate - 1):
            step(X, Y)
    names = [name for name in before if name.startswith(("net.", "optimizer"))]
    assert all(step.fingerprints()[name] == before[name] for name in names)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_frozen_parameters_give_the_true_loss_and_one_notice(
    precision: str, accumulate: int
) -> None:
    net = TwoLayers()
    net.a.requires_grad_(False)
    step = make_step(net, precision, accumulate=accumulate)
    with pytest.warns(Notice, match="all of them are frozen"):
        records = [step(X, Y) for _ in range(accumulate)]
    expected = true_loss(step)
    assert records[-1].cycle_loss.item() == pytest.approx(expected, rel=1e-6)
    with warnings.catch_warnings(action="error"):
        records += [step(X, Y) for _ in range(2 * accumulate)]
    assert all(record.loss.item() == pytest.approx(expected, rel=1e-6) for record in records)
    assert not any(record.updated or record.skipped for record in records)
    assert int(step.state.updates) == 0

    # The warm-up is over.
    net.a.requires_grad_(True)
    for _ in range(accumulate):
        record = step(X, Y)
    assert record.updated


def use(net: Any, i: int) -> None:
    """From the fifth step to the eighth the optimizer's layer is left out."""
    net.used = "b" if 4 <= i < 8 else "ab"


def run(step: hs.TrainStep, batches: list[tuple[Tensor, Tensor]], way: str) -> list[float]:
    losses: list[float] = []
    if way == "eager":
        for i, batch in enumerate(batches):
            use(step.net, i)
            losses.append(step(*batch).loss.item())
        return losses
    for i, records in enumerate(sink_with_emulated_graphs(step, batches, every=4), 1):
        losses += records.loss.tolist()
        use(step.net, i * 4)
    return losses


@pytest.mark.parametrize("way", ["eager", "captured"])
@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_parameters_that_are_reached_sometimes_train_as_in_torch(precision: str, way: str) -> None:
    batches = [(X + i / 10, Y) for i in range(12)]
    net = TwoLayers()
    options = {"decide": "device"} if way == "captured" else {}
    step = make_step(net, precision, **options)
    with pytest.warns(Notice, match=r"step [45]: the loss depends on none"):
        losses = run(step, batches, way)
    assert int(step.state.updates) == 8

    if precision == "fp32":
        plain = TwoLayers()
        optimizer = torch.optim.SGD(plain.a.parameters(), lr=0.1)
        expected = []
        for i, (x, y) in enumerate(batches):
            use(plain, i)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(plain(x), y)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        assert losses == expected


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_batches_without_terms_stay_losses_of_zero(precision: str, accumulate: int) -> None:
    step = make_step(TwoLayers(), precision, accumulate=accumulate)
    for batch in ((X, torch.full_like(Y, -100)), (X[:0], Y[:0])):
        for _ in range(accumulate):
            record = step(*batch)
        assert record.cycle_loss.item() == 0
        assert not record.updated
        assert not record.skipped


def test_the_optimizers_of_a_gan_each_reach_their_own_network() -> None:
    torch.manual_seed(0)
    gan = nn.ModuleDict({"g": nn.Linear(6, 6), "d": nn.Linear(6, 1)})

    def loss_of_g(net: Any, x: Tensor) -> Tensor:
        return -net["d"](net["g"](x)).mean()

    def loss_of_d(net: Any, x: Tensor) -> Tensor:
        fake = net["g"](x).detach()
        out: Tensor = net["d"](fake).mean() - net["d"](x).mean()
        return out

    steps = [
        hs.TrainStep(gan, None, torch.optim.SGD(gan[name].parameters(), lr=0.1), forward=forward)
        for name, forward in (("g", loss_of_g), ("d", loss_of_d))
    ]
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            assert all(step(X).updated for step in steps)

    swapped = hs.TrainStep(
        gan, None, torch.optim.SGD(gan["g"].parameters(), lr=0.1), forward=loss_of_d
    )
    with pytest.raises(ValueError, match="optimizer of another network"):
        swapped(X)


def plain_complex_loss(out: Tensor, y: Tensor) -> Tensor:
    return torch.fft.fft(out.float()).sum()


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "count": len}])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_complex_loss_is_refused(precision: str, options: dict[str, Any]) -> None:
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, plain_complex_loss, optimizer, precision=precision, **options)
    own = hs.TrainStep(
        net,
        None,
        optimizer,
        precision=step.precision,
        forward=lambda net, x, y: plain_complex_loss(net(x), y),
        **options,
    )
    for use in (step, own, step.evaluator(), own.evaluator()):
        with pytest.raises(TypeError, match=r"real numbers, received complex64.*loss\.abs\(\)"):
            use(X, Y)
