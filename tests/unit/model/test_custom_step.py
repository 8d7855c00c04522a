"""A user's own cells: what they return is kept, weighed by samples, and an evaluation moves nothing."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine import Feed
from halfstep.engine.evaluate import evaluate, find_labels, to_eval_record, to_host, without_target
from halfstep.metrics import Metrics
from halfstep.model.custom_step import CustomStep
from halfstep.step.eval_step import EvalRecord

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (4, 4, 2)  # a short last batch: a mean of means would weigh it like the others
MEANS = (1.0, 2.0, 8.0)
WEIGHTED = (4 * 1.0 + 4 * 2.0 + 2 * 8.0) / 10


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


BATCHES: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x, x[:, 0]),
    "dict": lambda x: {"name": "a", "x": x},
    "named tuple": lambda x: Pair(x, x[:, 0]),
    "nested": lambda x: ((x, x), [x]),
    "tensor": lambda x: x,
}
OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x),
    "dict": lambda x: {"scores": x},
    "none": lambda x: None,
    "one number": lambda x: x.sum(),
    "rows of their own": lambda x: (
        x.flatten()
    ),  # a loss that averages over samples does not weigh by these
}


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("kind", BATCHES)
def test_an_evaluation_cell_weighs_by_the_samples_of_its_batch(kind: str, outputs: str) -> None:
    batches = [
        BATCHES[kind](torch.full((n, 3), mean)) for n, mean in zip(SIZES, MEANS, strict=True)
    ]
    means = iter(MEANS)

    def check(*batch: Any) -> tuple[Tensor, Any]:
        return torch.tensor(next(means), device=DEVICE), OUTPUTS[outputs](torch.ones(4, 3))

    assert evaluate(check, Feed(batches), Metrics(None), find_labels) == {"loss": WEIGHTED}


def test_an_empty_batch_weighs_nothing() -> None:
    def check(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x.mean(), {"x": x}  # 0/0 of no rows

    scores = evaluate(
        check, Feed([torch.full((2, 1), 3.0), torch.ones(0, 1)]), Metrics(None), find_labels
    )
    assert scores == {"loss": 3.0}


def test_a_record_keeps_its_own_count() -> None:
    record = EvalRecord(torch.tensor(2.0), torch.tensor(7), None)
    assert to_eval_record(record, (torch.ones(3),)) is record


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2)).to(
        DEVICE
    )


def test_an_evaluation_cell_moves_no_statistics_and_keeps_no_graph() -> None:
    net, x = network(), torch.randn(6, 3, device=DEVICE)
    net[1].train(False)  # a frozen layer stays frozen afterwards
    modes, before = (
        [m.training for m in net.modules()],
        {k: v.clone() for k, v in net.state_dict().items()},
    )
    seen: list[Tensor] = []

    def check(part: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(net(part))
        net.train()  # as loops written by hand end an evaluation; the next batch is in eval mode all the same
        return seen[-1].square().mean(), seen[-1]

    scores = evaluate(check, Feed(list(x.split(2))), Metrics(None), find_labels, net=net)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert [m.training for m in net.modules()] == modes
    assert not any(out.requires_grad for out in seen)
    net.eval()
    with torch.no_grad():
        parts = [net(part) for part in x.split(2)]
    assert all(torch.equal(a, b) for a, b in zip(seen, parts, strict=True))
    mean = torch.stack([p.square().mean() for p in parts]).double().mean()
    assert scores == {
        "loss": pytest.approx(mean.item(), rel=1e-15)
    }  # float64: 3 terms, weighted by 2 each


def test_flags_and_gradients_come_back_after_an_error() -> None:
    net = network()

    def check(x: Tensor) -> Any:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        evaluate(check, Feed([torch.ones(2, 3)]), Metrics(None), find_labels, net=net)
    assert net.training
    assert net[1].training
    assert torch.is_grad_enabled()


def test_metrics_of_a_cell_see_its_logits() -> None:
    metrics = Metrics({"a": lambda out, y: out.argmax(1) == y})
    feed = Feed([(torch.eye(3), torch.tensor([0, 1, 1]))])
    scores = evaluate(lambda x, y: (x.mean(), {"logits": x}), feed, metrics, find_labels)
    assert scores is not None
    assert scores["a"] == 2 / 3


def static(kind: str) -> Callable[[Tensor], Any]:
    """A cell that writes every loss into the same memory, as a replayed CUDA graph does."""
    memory = torch.zeros((1,) if kind == "rows" else (), device=DEVICE)
    record = hs.Record(*[memory] * 4, memory.bool(), memory, memory.bool(), memory.long())

    def step(x: Tensor) -> Any:
        memory.copy_(x.mean())
        return {"loss": memory, "rows": memory, "tuple": (memory, x), "record": record}[kind]

    return step


@pytest.mark.parametrize("kind", ["loss", "rows", "tuple", "record"])
def test_a_loss_in_static_memory_is_kept_as_it_was(kind: str) -> None:
    step = CustomStep(static(kind))
    records = [step(torch.full((2,), value, device=DEVICE)) for value in (1.0, 2.0, 3.0)]
    assert [float(r.loss) for r in records] == [1.0, 2.0, 3.0]
    assert [float(r.cycle_loss) for r in records] == [1.0, 2.0, 3.0]
    if kind == "record":
        assert [float(r.grad_norm) for r in records] == [1.0, 2.0, 3.0]
    assert all(a.dtype == b.dtype for a, b in zip(records[0], records[2], strict=True))


def test_a_flushed_record_in_static_memory_is_kept_as_it_was() -> None:
    class Cell:
        step = staticmethod(static("record"))

        def __call__(self, x: Tensor) -> Any:
            return self.step(x)

        def flush(self) -> Any:
            return self.step(torch.full((2,), 5.0, device=DEVICE))

    step = CustomStep(Cell())
    tail = step.flush()
    step(torch.zeros(2, device=DEVICE))
    assert tail is not None
    assert float(tail.cycle_loss) == 5.0


def test_a_kept_loss_holds_no_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    zero = torch.zeros(())
    whole = hs.Record(
        weight * 2, weight * 2, *[zero] * 2, zero.bool(), zero, zero.bool(), zero.long()
    )
    for result in (weight * 2, whole):
        record = CustomStep(lambda x, result=result: result)(torch.ones(1))
        assert float(record.loss) == 2.0
        assert not any(field.requires_grad for field in record)


def test_outputs_of_any_structure_come_to_the_host() -> None:
    x = torch.randn(3, device=DEVICE)
    found = to_host({"a": (x, [x, "text"]), "b": OrderedDict(c=x), "d": None, "e": Pair(x, x)})
    assert type(found["b"]) is OrderedDict
    assert found["a"][1][1] == "text"
    assert found["d"] is None
    tensors = [found["a"][0], found["a"][1][0], found["b"]["c"], *found["e"]]
    assert all(t.device.type == "cpu" and torch.equal(t, x.cpu()) for t in tensors)
    assert torch.equal(to_host(x), x.cpu())


@pytest.mark.parametrize("nest", [lambda t: t, lambda t: (t,), lambda t: {"a": [t]}])
def test_every_tensor_is_asked_to_come(nest: Callable[[Tensor], Any]) -> None:
    with pytest.raises(
        NotImplementedError, match="meta"
    ):  # a device with nothing to copy, on every machine
        to_host(nest(torch.ones(2, device="meta")))


@pytest.mark.parametrize("name", ["labels", "label", "target", "y"])
def test_a_name_that_gives_labels_is_no_input(name: str) -> None:
    batch = {"x": torch.ones(2), name: torch.zeros(2)}
    assert find_labels(batch) is batch[name]
    assert without_target((batch,), targets=True)[0].keys() == {"x"}
