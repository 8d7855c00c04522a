"""What metrics receive in an evaluation: the outputs and the labels, or an error that says why.

Everything here holds for eager evaluations and for captured ones, which are emulated on a CPU.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError

import halfstep as hs
from halfstep.engine import Feed
from halfstep.engine.captured.eval_runner import EvalRunner
from halfstep.engine.evaluate import evaluate
from halfstep.metrics import Accuracy, Loss, Metrics
from halfstep.model import Model
from tests.support.emulated_graphs import CPU, EmulatedGraphs

BATCH_SIZES = (8, 8, 8, 8, 3)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator))
        for n in BATCH_SIZES
    ]


def network() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def mean_absolute_error(net: nn.Module) -> float:
    with torch.no_grad():
        errors = torch.cat([(net(x) - y).abs() for x, y in batches()])
    return errors.double().mean().item()


def absolute_error(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).abs()


class OwnMetric:
    """A mean absolute error with the three methods that a metric needs."""

    def __init__(self) -> None:
        self.reset()

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.errors.append((outputs - labels).abs())

    def compute(self) -> Tensor:
        return torch.cat(self.errors).double().mean()

    def reset(self) -> None:
        self.errors: list[Tensor] = []


METRICS: dict[str, Callable[[], Any]] = {
    "function": lambda: absolute_error,
    "function of one number": lambda: lambda o, y: float((o - y).abs().mean()),
    "own object": OwnMetric,
    "torchmetrics": MeanAbsoluteError,
}


@pytest.fixture(params=["eager", "captured"])
def scores(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Evaluates by one of the two engines."""

    def run(eval_step: Any, data: Any, metrics: Any, labels: Any = None) -> dict[str, float] | None:
        group = Metrics(metrics)
        if request.param == "eager":
            return evaluate(eval_step, Feed(data), group, labels)
        runner = EvalRunner(eval_step, group, labels)
        runner.forward.graphs = EmulatedGraphs(CPU)
        result = runner(Feed(data), lambda: False)
        assert runner.forward.graphs.captures > 0
        return result

    return run


# --- Outputs ---


def with_loss(wrap: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """A forward that wraps (loss, outputs) in its own way."""

    def forward(net: nn.Module, x: Tensor, y: Tensor) -> Any:
        outputs = net(x)
        return wrap(F.mse_loss(outputs, y), outputs)

    return forward


WITH_OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "(loss, outputs)": lambda loss, outputs: (loss, outputs),
    "(loss, outputs, more)": lambda loss, outputs: (loss, outputs, outputs + 1),
    "[loss, outputs]": lambda loss, outputs: [loss, outputs],
    "dict with outputs": lambda loss, outputs: {"loss": loss, "outputs": outputs},
    "dict with logits": lambda loss, outputs: {"logits": outputs, "loss": loss},
    "object": lambda loss, outputs: SimpleNamespace(loss=loss, logits=outputs),
}
WITHOUT_OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "loss": lambda loss, outputs: loss,
    "(loss,)": lambda loss, outputs: (loss,),
    "dict": lambda loss, outputs: {"loss": loss},
    "dict with None": lambda loss, outputs: {"loss": loss, "logits": None},
    "object": lambda loss, outputs: SimpleNamespace(loss=loss),
    "object with None": lambda loss, outputs: SimpleNamespace(loss=loss, logits=None),
    "(loss, None)": lambda loss, outputs: (loss, None),
}


@pytest.mark.parametrize("form", WITH_OUTPUTS)
@pytest.mark.parametrize("metric", METRICS)
def test_metrics_get_the_outputs_that_come_with_a_loss(
    metric: str, form: str, scores: Callable[..., Any]
) -> None:
    net = network()
    eval_step = hs.EvalStep(net, forward=with_loss(WITH_OUTPUTS[form]))
    result = scores(eval_step, batches(), {"mae": METRICS[metric]()})
    # torchmetrics sums in float32: half a unit in the last place for each of five batches
    assert result["mae"] == pytest.approx(mean_absolute_error(net), rel=5 * 2.0**-24)
    loss_only = hs.EvalStep(net, forward=with_loss(WITHOUT_OUTPUTS["loss"]))
    assert result["loss"] == scores(loss_only, batches(), {})["loss"]


@pytest.mark.parametrize("form", WITHOUT_OUTPUTS)
@pytest.mark.parametrize("metric", [*METRICS, "accuracy"])
def test_metrics_of_outputs_that_are_not_known_are_refused(
    metric: str, form: str, scores: Callable[..., Any]
) -> None:
    make_metric = {**METRICS, "accuracy": Accuracy}[metric]
    eval_step = hs.EvalStep(network(), forward=with_loss(WITHOUT_OUTPUTS[form]))
    assert eval_step(*batches()[0]).outputs is None
    match = r"metrics: 'mae': expected outputs .*forward=.*\(loss, outputs\), .*'logits'.*metrics="
    with pytest.raises(ValueError, match=match):
        scores(eval_step, batches(), {"mae": make_metric(), "mean": Loss()})


@pytest.mark.parametrize(
    "form",
    [
        lambda loss, out: (loss, loss.detach()),
        lambda loss, out: (loss, loss.detach(), out),
        lambda loss, out: {"loss": loss, "outputs": loss.detach()},
    ],
    ids=["loss, number", "loss, number, outputs", "outputs are a number"],
)
@pytest.mark.parametrize("metric", METRICS)
def test_one_number_is_not_compared_with_every_label(
    metric: str, form: Callable[[Tensor, Tensor], Any], scores: Callable[..., Any]
) -> None:
    """It broadcasts, so the mean of |loss - label| would look like a score."""
    eval_step = hs.EvalStep(network(), forward=with_loss(form))
    with pytest.raises(ValueError, match=r"metrics: 'mae': .* labels \[.*received one number"):
        scores(eval_step, batches(), {"mae": METRICS[metric]()})


def test_one_number_is_the_output_for_one_label(scores: Callable[..., Any]) -> None:
    """As of a network that squeezes its outputs, with a last batch of one sample."""
    form = with_loss(lambda loss, out: (loss, out.squeeze()))
    x, y = batches()[0]
    data = [(x[:1], y[:1].reshape(1, 1))] * len(batches())
    result = scores(hs.EvalStep(network(), forward=form), data, {"mae": absolute_error})
    assert result["mae"] == pytest.approx(result["loss"] ** 0.5, rel=1e-6)  # one squared error


def test_a_metric_of_the_loss_needs_no_outputs_and_no_labels(scores: Callable[..., Any]) -> None:
    def forward(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(net(batch["x"]), batch["answer"])

    data = [{"x": x, "answer": y} for x, y in batches()]
    result = scores(hs.EvalStep(network(), forward=forward), data, {"mean": Loss()})
    assert result["mean"] == result["loss"]


def make_model(form: Callable[[Tensor, Tensor], Any], **options: Any) -> Model:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return Model(net, None, optimizer, forward=with_loss(form), **options)


def test_fit_stops_at_the_first_evaluation_and_follows_no_wrong_score(tmp_path: Path) -> None:
    model = make_model(WITHOUT_OUTPUTS["loss"], metrics={"mae": absolute_error})
    callbacks = [hs.EarlyStopping("mae"), hs.Checkpoint(tmp_path / "run", best="mae")]
    with (
        pytest.warns(
            hs.Notice, match=r"'mae' cannot be counted on training data, .* only the loss"
        ),
        pytest.raises(ValueError, match="only the loss was returned"),
    ):
        model.fit(3, batches(), valid=batches(), callbacks=callbacks)
    assert callbacks[1].best_path is None
    with pytest.raises(ValueError, match="only the loss was returned"):
        model.evaluate(batches())


def test_the_forms_that_the_error_names_train_evaluate_and_predict() -> None:
    losses = set()
    for wrap in WITH_OUTPUTS.values():
        model = make_model(wrap, metrics={"mae": absolute_error})
        run = model.fit(2, batches(), valid=batches())
        losses.add((run.history[-1]["loss"], run.history[-1]["valid_mae"]))
        with torch.no_grad():
            expected = torch.cat([model.net(x) for x, _ in batches()])
        assert torch.equal(model.predict(batches()), expected)
    assert len(losses) == 1


def test_predictions_are_not_the_losses_of_batches() -> None:
    model = make_model(WITHOUT_OUTPUTS["loss"])
    with pytest.raises(ValueError, match=r"predict: forward= returned the loss and no outputs"):
        model.predict(batches())
    assert model.predict([(x,) for x, _ in batches()]).shape == (sum(BATCH_SIZES), 1)


def test_an_eval_step_of_ones_own_without_outputs() -> None:
    net = network()
    metrics = {"mae": absolute_error}
    model = Model(net, eval_step=lambda x, y: (F.mse_loss(net(x), y), None), metrics=metrics)
    with pytest.raises(ValueError, match=r"'mae': expected outputs .*eval_step="):
        model.evaluate(batches())
    model = Model(net, eval_step=lambda x, y: (F.mse_loss(net(x), y), None))
    assert model.evaluate(batches()).keys() == {"loss"}


# --- Labels ---


def weighted_error(outputs: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return (weight * (outputs - target).square()).mean()


def test_labels_are_the_target_of_the_loss(scores: Callable[..., Any]) -> None:
    """The last item of these batches is a weight, of the same shape as the target."""
    net = network()
    eval_step = hs.EvalStep(net, weighted_error, forward=lambda net, x, y, w: (net(x), y, w))
    data = [(x, y, torch.rand(len(x), 1)) for x, y in batches()]
    result = scores(eval_step, data, {"mae": absolute_error})
    assert result["mae"] == pytest.approx(mean_absolute_error(net), rel=1e-6)  # float32 terms
    of_weights = scores(eval_step, data, {"mae": absolute_error}, lambda batch: batch[2])
    assert of_weights["mae"] != result["mae"], "labels= decides where it is given"


def test_labels_are_the_target_of_the_loss_by_any_name(scores: Callable[..., Any]) -> None:
    net = network()
    eval_step = hs.EvalStep(
        net, nn.MSELoss(), forward=lambda net, batch: (net(batch["x"]), batch["answer"])
    )
    data = [{"x": x, "y": torch.rand(len(x), 1), "answer": y} for x, y in batches()]
    result = scores(eval_step, data, {"mae": absolute_error})
    assert result["mae"] == pytest.approx(mean_absolute_error(net), rel=1e-6)  # float32 terms


def test_a_batch_with_two_columns_of_labels_is_refused_where_nothing_says_which(
    scores: Callable[..., Any],
) -> None:
    def forward(net: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = net(batch["x"])
        return F.mse_loss(outputs, batch["y"]), outputs

    net = network()
    eval_step = hs.EvalStep(net, forward=forward)
    data = [{"x": x, "label": torch.rand(len(x), 1), "y": y} for x, y in batches()]
    match = r"may be any of 'label', 'y'. Say which: Model\(labels=lambda batch: batch\['label'\]"
    with pytest.raises(ValueError, match=match):
        scores(eval_step, data, {"mae": absolute_error})
    result = scores(eval_step, data, {"mae": absolute_error}, lambda batch: batch["y"])
    assert result["mae"] == pytest.approx(mean_absolute_error(net), rel=1e-6)  # float32 terms


class TwoInputs(nn.Module):
    """Two embeddings of its two inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(a), self.linear(b)


def by_position(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a - b).square().mean() + c.float().mean()


def signs_of_pairs() -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(n, 4, generator=generator),
            torch.randn(n, 4, generator=generator),
            torch.randint(0, 2, (n,), generator=generator) * 2 - 1,
        )
        for n in BATCH_SIZES
    ]


def share_of_ones(outputs: Tensor, labels: Tensor) -> Tensor:
    assert labels.shape == outputs.shape[:1], "the signs, not an embedding"
    return labels == 1


@pytest.mark.parametrize(
    "loss", [nn.CosineEmbeddingLoss(), F.cosine_embedding_loss], ids=["module", "function"]
)
def test_the_target_of_a_loss_of_three_arguments_is_the_one_of_that_name(
    loss: Any, scores: Callable[..., Any]
) -> None:
    data = signs_of_pairs()
    eval_step = hs.EvalStep(TwoInputs(), loss, forward=lambda net, a, b, sign: (*net(a, b), sign))
    result = scores(eval_step, data, {"ones": share_of_ones})
    assert result["ones"] == torch.cat([sign == 1 for *_, sign in data]).double().mean().item()


def test_a_target_that_no_name_tells_is_refused(scores: Callable[..., Any]) -> None:
    data = signs_of_pairs()
    eval_step = hs.EvalStep(
        TwoInputs(), by_position, forward=lambda net, a, b, sign: (*net(a, b), sign)
    )
    with pytest.raises(ValueError, match=r"more than two arguments.*Model\(labels=lambda batch"):
        scores(eval_step, data, {"ones": share_of_ones})
    assert scores(eval_step, data, {"mean": Loss()})["mean"] > 0, "nothing asks for labels"
    result = scores(eval_step, data, {"ones": share_of_ones}, lambda batch: batch[2])
    assert 0 < result["ones"] < 1


class TakesTarget(nn.Module):
    """An input of the name of a label, as a decoder has."""

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        return x if target is None else x + target


def test_inputs_with_the_name_of_a_label_are_kept_where_there_are_no_targets() -> None:
    data = [{"x": torch.ones(3, 2), "target": torch.ones(3, 2)}]
    model = Model(TakesTarget(), None)
    assert torch.equal(model.predict(data, targets=False), torch.full((3, 2), 2.0))
    assert torch.equal(model.predict(data), torch.ones(3, 2)), "labels are left out by default"


# --- Nothing to evaluate ---


class NoBatches:
    """An iterable without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from ()


EMPTY: dict[str, Callable[[], Any]] = {
    "list": list,
    "loader": lambda: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.zeros(3, 4), torch.zeros(3, 1)),
        batch_size=8,
        drop_last=True,
    ),
    "iterable": NoBatches,
}


@pytest.mark.parametrize("empty", EMPTY)
def test_an_evaluation_of_no_batches_is_an_error(empty: str) -> None:
    model = make_model(WITH_OUTPUTS["(loss, outputs)"], metrics={"mae": absolute_error})
    match = "expected at least one batch, got none; is the data empty, .*drop_remainder"
    with pytest.raises(ValueError, match=match):
        model.evaluate(EMPTY[empty]())
    with pytest.raises(ValueError, match=match):
        model.fit(1, batches(), valid=EMPTY[empty]())
    with pytest.raises(ValueError, match=match):
        model.predict(EMPTY[empty]())
    with pytest.raises(ValueError, match=match):
        list(model.predict(EMPTY[empty](), stream=True))
    if empty != "iterable":  # of one without a length nobody knows before the end of the pass
        updates = int(model.step.state.updates)
        with pytest.raises(ValueError, match=f"valid: {match}"):
            model.fit(1, batches(), valid=EMPTY[empty]())
        assert int(model.step.state.updates) == updates, "refused before the first step"


def test_a_captured_evaluation_of_no_batches_is_an_error() -> None:
    runner = EvalRunner(hs.EvalStep(network(), nn.MSELoss()), Metrics({}), None)
    with pytest.raises(ValueError, match="expected at least one batch, got none"):
        runner(Feed([]), lambda: False)


def test_batches_without_a_single_term_are_an_error(scores: Callable[..., Any]) -> None:
    net = nn.Linear(4, 3)
    eval_step = hs.EvalStep(net, nn.CrossEntropyLoss())
    ignored = [(x, torch.full((len(x),), -100)) for x, _ in batches()]
    with pytest.raises(ValueError, match=r"one term of the loss, got none in all batches \(5\)"):
        scores(eval_step, ignored, {})
    rowless = [(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))] * 3
    with pytest.raises(ValueError, match="no samples, or only labels that are ignored"):
        scores(eval_step, rowless, {})
    one_term = [(x, y.clone()) for x, y in ignored]
    one_term[2][1][3] = 0
    assert scores(eval_step, one_term, {})["loss"] > 0


# --- Scores ---


class ErrorsOfOutputs:
    """One number for each output, in memory that the metric goes on to use."""

    def __init__(self, size: int) -> None:
        self.total = torch.zeros(size)

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.total += (outputs - labels).abs().sum(0)

    def compute(self) -> Tensor:
        return self.total

    def reset(self) -> None:
        self.total.zero_()


def test_a_score_of_several_numbers_is_a_copy_and_logged_as_a_list(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    data = [(x, y.expand(-1, 2)) for x, y in batches()]
    model = Model(
        net,
        nn.MSELoss(),
        torch.optim.SGD(net.parameters(), lr=0.1),
        metrics={"errors": ErrorsOfOutputs(2)},
        train_metrics=False,
    )
    log = hs.JSONLLog(tmp_path / "log.jsonl")
    run = model.fit(2, data, valid=data, callbacks=[log, hs.CSVLog(tmp_path / "log.csv")])
    first, last = (entry["valid_errors"] for entry in run.history)
    assert not torch.equal(first, last)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    logged = [line["valid_errors"] for line in lines if line["kind"] == "evaluation"]
    assert logged == [first.tolist(), last.tolist()]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.5),
        torch.tensor([[0.5]]),
        torch.tensor(0.5, dtype=torch.float64).numpy()[()],
        torch.tensor(0.5).numpy()[()],
        0.5,
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_number_of_any_kind_is_a_score(value: Any) -> None:
    metric = SimpleNamespace(update=lambda o, y: None, compute=lambda: value, reset=lambda: None)
    net = network()
    model = Model(
        net,
        nn.MSELoss(),
        torch.optim.SGD(net.parameters(), lr=0.01),
        metrics={"acc": metric},
        train_metrics=False,
    )
    stopping = hs.EarlyStopping("acc")
    run = model.fit(1, batches(), valid=batches(), callbacks=[stopping])
    assert run.history[-1]["valid_acc"] == stopping.best.value == 0.5
    assert isinstance(run.history[-1]["valid_acc"], float)
