"""hs.sink: visits, records, functions of one's own, and what it refuses."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.engine.captured.verify import VerifyError
from tests.support.captured_runs import Net, data, same_state, step

pytestmark = pytest.mark.filterwarnings("ignore:.*batch-coupled")


def test_visits_hold_every_record_in_order(device: torch.device) -> None:
    s, by_hand = step(device, "fp32"), step(device, "fp32")
    torch.manual_seed(7)
    losses = [by_hand(*batch).loss.item() for batch in data(device)]
    torch.manual_seed(7)
    visits = list(hs.sink(s, data(device), every=5))
    assert [len(v) for v in visits] == [5, 5, 3]
    assert [x for v in visits for x in v.loss.tolist()] == losses
    assert [n for v in visits for n in v.samples] == [8] * 12 + [4]
    assert visits[0].updated.all()
    assert not visits[0].skipped.any()
    assert visits[0].lr.tolist() == [0.05] * 5
    assert same_state(s, by_hand) == []
    with pytest.raises(AttributeError, match=r"records: expected one of loss, .*got 'los'"):
        _ = visits[0].los


def test_each_for_is_the_next_pass(device: torch.device) -> None:
    """Shuffled anew; a pass that was left early counts, and its open cycle stays open, as in a loop by hand."""
    s, by_hand = step(device, "fp32", accumulate=3), step(device, "fp32", accumulate=3)
    sink, plain = hs.sink(s, data(device), every=4), data(device)
    torch.manual_seed(7)
    records = next(iter(sink))
    list(sink)
    torch.manual_seed(7)
    for i, batch in enumerate(plain):
        if i == 4:
            break
        by_hand(*batch)
    for batch in plain:
        by_hand(*batch)
    by_hand.flush()
    assert len(records) == 4
    assert same_state(s, by_hand) == []


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def cell(net: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    def one(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        out = net(x)
        loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "acc": (out.argmax(1) == y).float().mean()}

    return one


def test_a_function_of_ones_own(device: torch.device) -> None:
    net, optimizer = make()
    one = cell(net, optimizer)
    torch.manual_seed(7)
    expected = [one(*batch) for batch in data(torch.device("cpu"))]
    net, optimizer = make()
    torch.manual_seed(7)
    visits = list(hs.sink(cell(net, optimizer), data(torch.device("cpu")), every=6))
    for name in ("loss", "acc"):
        got = torch.cat([getattr(v, name) for v in visits])
        assert got.tolist() == [e[name].item() for e in expected]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "got NoneType"),
        (torch.ones(3), r"got shape \(3,\)"),
        ((torch.ones(()), "x"), "got str for 'value1'"),
    ],
)
def test_what_a_function_may_not_return(result: object, said: str) -> None:
    with pytest.raises(TypeError, match=f"tensors of one number each.*{said}"):
        list(hs.sink(lambda x, y: result, data(torch.device("cpu"))))


def test_a_function_must_return_the_same_every_time() -> None:
    results = iter([{"loss": torch.ones(())}, {"lost": torch.ones(())}])
    with pytest.raises(
        ValueError, match=r"expected the step to return \['loss'\] every time, got \['lost'\]"
    ):
        list(hs.sink(lambda x, y: next(results), data(torch.device("cpu"))))


def test_a_data_loader_and_a_network_with_its_own_loss() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    x, y = next(iter(data(torch.device("cpu"), samples=40, batch=40)))
    losses = []
    for sunk in (False, True):
        torch.manual_seed(0)
        net = Own()
        s = hs.TrainStep(net, None, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        torch.manual_seed(7)
        if sunk:
            losses.append([v for r in hs.sink(s, loader, every=2) for v in r.loss.tolist()])
        else:
            losses.append([s(*batch).loss.item() for batch in loader])
    assert losses[0] == losses[1]


def test_a_refused_update_raises_at_the_visit(device: torch.device) -> None:
    s = step(device, "fp32", nonfinite="raise")
    with pytest.raises(hs.NonFiniteError, match=r"step \d+: non-finite gradient"):
        list(hs.sink(s, data(device, poison=(5,)), every=100))


def test_verify_puts_everything_back(device: torch.device) -> None:
    a, b = step(device, "O1", deterministic=True), step(device, "O1", deterministic=True)
    torch.manual_seed(7)
    [first] = [r.loss for r in hs.sink(a, data(device), every=100)]
    torch.manual_seed(7)
    [other] = [r.loss for r in hs.sink(b, data(device), every=100, verify=2)]
    assert torch.equal(first, other)
    assert same_state(a, b) == []


def test_verify_names_what_does_not_repeat() -> None:
    """A step that draws from a generator nobody saves."""
    net, optimizer = make()
    rest = torch.Generator().manual_seed(3)

    def noisy(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x + torch.rand(x.shape, generator=rest)), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(VerifyError, match=r"step 1 differs in .*first in aten.rand.*test_sink"):
        hs.sink(noisy, data(torch.device("cpu")), verify=2, state=(net, optimizer))
    assert all(torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every": 0}, "every: expected a whole number of steps, 1 or more, received 0"),
        ({"every": True}, "every: expected"),
        ({"verify": -1}, "verify: expected a number of replays"),
        (
            {"on_uncapturable": "ignore"},
            "on_uncapturable: expected one of 'raise', 'eager', received 'ignore'",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        hs.sink(step(torch.device("cpu"), "fp32"), data(torch.device("cpu")), **arguments)  # type: ignore[arg-type]


def test_what_cannot_be_a_step() -> None:
    with pytest.raises(TypeError, match="expected a TrainStep or a function of a batch, got int"):
        hs.sink(3, data(torch.device("cpu")))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"verify: expected state=\(net, optimizer, …\).*received none"
    ):
        hs.sink(lambda x, y: x.sum(), data(torch.device("cpu")), verify=1)
    with pytest.raises(ValueError, match="object without load_state_dict"):
        hs.sink(lambda x, y: x.sum(), data(torch.device("cpu")), verify=1, state=(object(),))


@pytest.mark.parametrize("every", [1, 2, 3, 6])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_sparse_gradients_add_up_over_a_cycle(accumulate: int, every: int) -> None:
    """Their indices are the batch's own memory, which the next batch is copied into."""
    g = torch.Generator().manual_seed(1)
    batches = [
        (torch.randint(0, 20, (5, 3), generator=g), torch.randn(5, 2, generator=g))
        for _ in range(6)
    ]

    def build(*, sparse: bool) -> hs.TrainStep:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(20, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 2))
        return hs.TrainStep(
            net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1), accumulate=accumulate
        )

    by_hand, sunk, dense = build(sparse=True), build(sparse=True), build(sparse=False)
    for batch in batches:
        by_hand(*batch)
        dense(*batch)
    assert sum(len(records) for records in hs.sink(sunk, batches, every=every)) == 6
    assert same_state(sunk, by_hand) == []
    for a, b in zip(by_hand.params, dense.params, strict=True):
        # the sums are formed in another order: some roundings (6e-8 of 1) of weights around 1, over six updates
        torch.testing.assert_close(a, b, rtol=0, atol=3e-7)
