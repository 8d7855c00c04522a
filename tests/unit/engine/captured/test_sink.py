"""hs.sink: visits, records, functions of one's own, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.cuda_graphs.capture import GraphCache
from halfstep.engine import Feed
from halfstep.engine.captured.function_program import FunctionProgram
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.verify import VerifyError
from tests.support.captured_runs import Net, differing_tensors, make_data, make_step

pytestmark = pytest.mark.filterwarnings("ignore:.*batch-coupled")
CPU = torch.device("cpu")


def test_visits_hold_every_record_in_order(device: torch.device) -> None:
    eager = make_step(device, "fp32")
    captured = make_step(device, "fp32")
    torch.manual_seed(7)
    losses = [eager(*batch).loss.item() for batch in make_data(device)]
    torch.manual_seed(7)
    visits = list(hs.sink(captured, make_data(device), every=5))
    assert [len(records) for records in visits] == [5, 5, 3]
    assert torch.cat([records.loss for records in visits]).tolist() == losses
    samples = [count for records in visits for count in records.samples]
    assert samples == [8] * 12 + [4]
    assert visits[0].updated.all()
    assert not visits[0].skipped.any()
    assert visits[0].lr.tolist() == [0.05] * 5
    assert differing_tensors(captured, eager) == []
    with pytest.raises(AttributeError, match=r"records: expected one of loss, .*got 'los'"):
        _ = visits[0].los


def test_each_for_is_the_next_pass(device: torch.device) -> None:
    """Shuffled anew, as in a loop by hand.

    A pass that was left early counts, and its open cycle stays open.
    """
    eager = make_step(device, "fp32", accumulate=3)
    captured = make_step(device, "fp32", accumulate=3)
    sink = hs.sink(captured, make_data(device), every=4)
    torch.manual_seed(7)
    records = next(iter(sink))
    list(sink)

    batches = make_data(device)
    torch.manual_seed(7)
    for i, batch in enumerate(batches):
        if i == 4:
            break
        eager(*batch)
    for batch in batches:
        eager(*batch)
    eager.flush()
    assert len(records) == 4
    assert differing_tensors(captured, eager) == []


def make_net_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def make_step_function(
    net: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    def train_batch(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        out = net(x)
        loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "acc": (out.argmax(1) == y).float().mean()}

    return train_batch


def test_a_function_of_ones_own(device: torch.device) -> None:
    eager = make_step_function(*make_net_and_optimizer())
    torch.manual_seed(7)
    expected = [eager(*batch) for batch in make_data(CPU)]
    captured = make_step_function(*make_net_and_optimizer())
    torch.manual_seed(7)
    visits = list(hs.sink(captured, make_data(CPU), every=6))
    for name in ("loss", "acc"):
        column = torch.cat([getattr(records, name) for records in visits])
        assert column.tolist() == [result[name].item() for result in expected]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "got NoneType"),
        (torch.ones(3), r"got shape \(3,\)"),
        ((torch.ones(()), "x"), "got str for 'value1'"),
    ],
)
def test_what_a_function_may_not_return(result: object, message: str) -> None:
    with pytest.raises(TypeError, match=f"tensors of one number each.*{message}"):
        list(hs.sink(lambda x, y: result, make_data(CPU)))


def test_a_function_must_return_the_same_every_time() -> None:
    results = iter([{"loss": torch.ones(())}, {"lost": torch.ones(())}])
    with pytest.raises(
        ValueError, match=r"expected the step to return \['loss'\] every time, got \['lost'\]"
    ):
        list(hs.sink(lambda x, y: next(results), make_data(CPU)))


def test_a_data_loader_and_a_network_with_its_own_loss() -> None:
    class NetWithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    x, y = next(iter(make_data(CPU, samples=40, batch=40)))
    losses = []
    for captured in (False, True):
        torch.manual_seed(0)
        net = NetWithLoss()
        train_step = hs.TrainStep(net, None, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        torch.manual_seed(7)
        if captured:
            visits = list(hs.sink(train_step, loader, every=2))
            losses.append(torch.cat([records.loss for records in visits]).tolist())
        else:
            losses.append([train_step(*batch).loss.item() for batch in loader])
    assert losses[0] == losses[1]


def test_a_refused_update_raises_at_the_visit(device: torch.device) -> None:
    train_step = make_step(device, "fp32", nonfinite="raise")
    with pytest.raises(hs.NonFiniteError, match=r"step \d+: non-finite gradient"):
        list(hs.sink(train_step, make_data(device, poison=(5,)), every=100))


def test_verify_puts_everything_back(device: torch.device) -> None:
    plain = make_step(device, "O1", deterministic=True)
    verified = make_step(device, "O1", deterministic=True)
    torch.manual_seed(7)
    [expected] = list(hs.sink(plain, make_data(device), every=100))
    torch.manual_seed(7)
    [records] = list(hs.sink(verified, make_data(device), every=100, verify=2))
    assert torch.equal(records.loss, expected.loss)
    assert differing_tensors(plain, verified) == []


def test_verify_names_what_does_not_repeat() -> None:
    """A step that draws from a generator nobody saves."""
    net, optimizer = make_net_and_optimizer()
    unsaved_generator = torch.Generator().manual_seed(3)

    def noisy(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        noise = torch.rand(x.shape, generator=unsaved_generator)
        loss = nn.functional.cross_entropy(net(x + noise), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(VerifyError, match=r"step 1 differs in .*first in aten.rand.*test_sink"):
        hs.sink(noisy, make_data(CPU), verify=2, state=(net, optimizer))
    assert all(torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hs.sink(make_step(CPU, "fp32"), make_data(CPU), **arguments)


def test_what_cannot_be_a_step() -> None:
    with pytest.raises(TypeError, match="expected a TrainStep or a function of a batch, got int"):
        hs.sink(3, make_data(CPU))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"verify: expected state=\(net, optimizer, …\).*received none"
    ):
        hs.sink(lambda x, y: x.sum(), make_data(CPU), verify=1)
    with pytest.raises(ValueError, match="object without load_state_dict"):
        hs.sink(lambda x, y: x.sum(), make_data(CPU), verify=1, state=(object(),))


@pytest.mark.parametrize("every", [1, 2, 3, 6])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_sparse_gradients_add_up_over_a_cycle(accumulate: int, every: int) -> None:
    """Their indices are the batch's own memory, which the next batch is copied into."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(6):
        words = torch.randint(0, 20, (5, 3), generator=generator)
        targets = torch.randn(5, 2, generator=generator)
        batches.append((words, targets))

    def build(*, sparse: bool) -> hs.TrainStep:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(20, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 2))
        return hs.TrainStep(
            net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1), accumulate=accumulate
        )

    eager = build(sparse=True)
    captured = build(sparse=True)
    dense = build(sparse=False)
    for batch in batches:
        eager(*batch)
        dense(*batch)
    assert sum(len(records) for records in hs.sink(captured, batches, every=every)) == 6
    assert differing_tensors(captured, eager) == []
    for a, b in zip(eager.params, dense.params, strict=True):
        # The sums are formed in another order: some roundings (6e-8 of 1) of weights around 1,
        # over six updates.
        torch.testing.assert_close(a, b, rtol=0, atol=3e-7)


def test_state_that_cannot_be_guarded_is_a_refusal(device: torch.device) -> None:
    """A sparse buffer has no address: the function runs eagerly, and a notice says so."""
    net = nn.Linear(4, 2).to(device)
    net.register_buffer("adjacency", torch.eye(3).to_sparse().to(device))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    calls = []

    def train(x: Tensor) -> Tensor:
        calls.append(len(x))
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphs = GraphCache(device, direct=True)
    records = RecordBuffer(64, device)
    program = FunctionProgram(train, records, graphs, "eager", (net, optimizer))
    runner = CapturedRunner(program, Feed([(torch.randn(5, 4, device=device),)] * 8))
    with pytest.warns(hs.Notice, match="cannot be captured"):
        runner.run(8, lambda: False)
    assert len(calls) == 8
    assert len(graphs) == 0
    assert "data pointer" in program.refusal_reason
