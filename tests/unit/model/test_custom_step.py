"""A user's own train and eval steps.

What they return is copied and weighted by samples, and an evaluation changes no state.
"""

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
from tests.support.equal_tensors import assert_equal_tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# A short last batch: a mean of the batches' means would give it the weight of a full one.
BATCH_SIZES = (4, 4, 2)
BATCH_LOSSES = (1.0, 2.0, 8.0)
MEAN_LOSS = (4 * 1.0 + 4 * 2.0 + 2 * 8.0) / 10

NO_METRICS = Metrics(None)


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
    # Not one row per sample: a loss that averages over samples is not weighted by these.
    "rows of their own": lambda x: x.flatten(),
}


# --- Evaluation ---


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("kind", BATCHES)
def test_losses_of_a_custom_eval_step_are_weighted_by_samples(kind: str, outputs: str) -> None:
    batches = []
    for size, value in zip(BATCH_SIZES, BATCH_LOSSES, strict=True):
        batches.append(BATCHES[kind](torch.full((size, 3), value)))
    remaining_losses = iter(BATCH_LOSSES)

    def eval_step(*batch: Any) -> tuple[Tensor, Any]:
        loss = torch.tensor(next(remaining_losses), device=DEVICE)
        return loss, OUTPUTS[outputs](torch.ones(4, 3))

    scores = evaluate(eval_step, Feed(batches), NO_METRICS, find_labels)
    assert scores == {"loss": MEAN_LOSS}


def test_an_empty_batch_has_no_weight() -> None:
    def eval_step(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x.mean(), {"x": x}  # NaN without rows

    batches = [torch.full((2, 1), 3.0), torch.ones(0, 1)]
    scores = evaluate(eval_step, Feed(batches), NO_METRICS, find_labels)
    assert scores == {"loss": 3.0}


def test_an_eval_record_keeps_its_own_count() -> None:
    record = EvalRecord(torch.tensor(2.0), torch.tensor(7), None)
    assert to_eval_record(record, (torch.ones(3),)) is record


def test_evaluation_refuses_a_forward_that_returns_no_arguments_of_the_loss() -> None:
    net = nn.Linear(3, 2).to(DEVICE)
    eval_step = hs.EvalStep(net, nn.MSELoss(), forward=lambda net, x: net(x))
    with pytest.raises(TypeError, match="tuple of the loss's arguments"):
        eval_step(torch.ones(4, 3, device=DEVICE))


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2)).to(
        DEVICE
    )


def training_modes(net: nn.Module) -> list[bool]:
    return [module.training for module in net.modules()]


def test_a_custom_evaluation_changes_no_statistics_and_keeps_no_autograd_graph() -> None:
    net = make_net()
    x = torch.randn(6, 3, device=DEVICE)
    net[1].train(False)  # a frozen layer stays frozen afterwards
    modes_before = training_modes(net)
    state_before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    outputs: list[Tensor] = []

    def eval_step(part: Tensor) -> tuple[Tensor, Tensor]:
        out = net(part)
        outputs.append(out)
        # Loops written by hand end an evaluation like this. The next batch is in eval mode anyway.
        net.train()
        return out.square().mean(), out

    scores = evaluate(eval_step, Feed(list(x.split(2))), NO_METRICS, find_labels, net=net)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, state_before[name])
    assert training_modes(net) == modes_before
    assert not any(out.requires_grad for out in outputs)

    net.eval()
    with torch.no_grad():
        expected = [net(part) for part in x.split(2)]
    assert_equal_tensors(outputs, expected)
    # The mean is taken in float64, of 3 terms with the same weight.
    batch_losses = torch.stack([out.square().mean() for out in expected])
    mean_loss = batch_losses.double().mean().item()
    assert scores == {"loss": pytest.approx(mean_loss, rel=1e-15)}


def test_modes_and_gradients_are_restored_after_an_error() -> None:
    net = make_net()

    def eval_step(x: Tensor) -> Any:
        raise RuntimeError("error of the user")

    with pytest.raises(RuntimeError, match="error of the user"):
        evaluate(eval_step, Feed([torch.ones(2, 3)]), NO_METRICS, find_labels, net=net)
    assert net.training
    assert net[1].training
    assert torch.is_grad_enabled()


def test_metrics_of_a_custom_evaluation_see_its_logits() -> None:
    metrics = Metrics({"a": lambda out, y: out.argmax(1) == y})
    feed = Feed([(torch.eye(3), torch.tensor([0, 1, 1]))])
    scores = evaluate(lambda x, y: (x.mean(), {"logits": x}), feed, metrics, find_labels)
    assert scores is not None
    assert scores["a"] == 2 / 3


# --- Training ---


def make_static_step(kind: str) -> Callable[[Tensor], Any]:
    """A step that writes every loss into the same memory, as a replayed CUDA graph does."""
    shape = (1,) if kind == "rows" else ()
    loss = torch.zeros(shape, device=DEVICE)
    record = hs.Record(*[loss] * 4, loss.bool(), loss, loss.bool(), loss.long())

    def step(x: Tensor) -> Any:
        loss.copy_(x.mean())
        results = {"loss": loss, "rows": loss, "tuple": (loss, x), "record": record}
        return results[kind]

    return step


@pytest.mark.parametrize("kind", ["loss", "rows", "tuple", "record"])
def test_a_loss_in_static_memory_is_copied(kind: str) -> None:
    step = CustomStep(make_static_step(kind))
    values = [1.0, 2.0, 3.0]
    records = [step(torch.full((2,), value, device=DEVICE)) for value in values]
    assert [float(record.loss) for record in records] == values
    assert [float(record.cycle_loss) for record in records] == values
    if kind == "record":
        assert [float(record.grad_norm) for record in records] == values
    for first, last in zip(records[0], records[2], strict=True):
        assert first.dtype == last.dtype


def test_a_flushed_record_in_static_memory_is_copied() -> None:
    class StepWithFlush:
        step = staticmethod(make_static_step("record"))

        def __call__(self, x: Tensor) -> Any:
            return self.step(x)

        def flush(self) -> Any:
            return self.step(torch.full((2,), 5.0, device=DEVICE))

    step = CustomStep(StepWithFlush())
    flushed = step.flush()
    step(torch.zeros(2, device=DEVICE))
    assert flushed is not None
    assert float(flushed.cycle_loss) == 5.0


def test_a_record_keeps_no_autograd_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    loss = weight * 2
    zero = torch.zeros(())
    record = hs.Record(loss, loss, zero, zero, zero.bool(), zero, zero.bool(), zero.long())
    for result in (loss, record):
        step = CustomStep(lambda x, result=result: result)
        copied = step(torch.ones(1))
        assert float(copied.loss) == 2.0
        assert not any(field.requires_grad for field in copied)


# --- Outputs and labels ---


def test_outputs_of_any_structure_are_moved_to_the_host() -> None:
    x = torch.randn(3, device=DEVICE)
    outputs = {"a": (x, [x, "text"]), "b": OrderedDict(c=x), "d": None, "e": Pair(x, x)}
    on_host = to_host(outputs)
    assert type(on_host["b"]) is OrderedDict
    assert on_host["a"][1][1] == "text"
    assert on_host["d"] is None
    tensors = [on_host["a"][0], on_host["a"][1][0], on_host["b"]["c"], *on_host["e"]]
    for tensor in tensors:
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, x.cpu())
    assert torch.equal(to_host(x), x.cpu())


@pytest.mark.parametrize(
    "nest", [lambda tensor: tensor, lambda tensor: (tensor,), lambda tensor: {"a": [tensor]}]
)
def test_every_tensor_is_copied_to_the_host(nest: Callable[[Tensor], Any]) -> None:
    # The meta device exists on every machine, and has nothing to copy.
    with pytest.raises(NotImplementedError, match="meta"):
        to_host(nest(torch.ones(2, device="meta")))


@pytest.mark.parametrize("name", ["labels", "label", "target", "y"])
def test_a_column_of_labels_is_no_input(name: str) -> None:
    batch = {"x": torch.ones(2), name: torch.zeros(2)}
    assert find_labels(batch) is batch[name]
    assert without_target((batch,), targets=True)[0].keys() == {"x"}
