"""Metrics against numpy, torchmetrics and counts by hand; counters stay in place, never wait."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.metrics import Accuracy, Average, Loss, Metrics, as_metric
from halfstep.metrics.counters import logits_of

CLASSES = 6


def random_batch(*shape: int, ignored: float = 0.2) -> tuple[Tensor, Tensor]:
    """Scores with many ties: six values for six classes."""
    scores = torch.randint(CLASSES, (shape[0], CLASSES, *shape[1:])).float()
    is_ignored = torch.rand(shape) < ignored
    return scores, torch.where(is_ignored, -100, torch.randint(CLASSES, shape))


def count_by_sorting(scores: Tensor, labels: Tensor, top: int) -> tuple[int, int]:
    """Correct labels and all labels: every row is sorted by (score, class), one by one."""
    rows = np.moveaxis(scores.numpy(), 1, -1).reshape(-1, scores.shape[1])
    correct = 0
    count = 0
    for row, label in zip(rows, labels.numpy().ravel(), strict=True):
        if label == -100:
            continue
        order = sorted(range(len(row)), key=lambda c: (-row[c], c))
        correct += label in order[:top]
        count += 1
    return correct, count


@pytest.mark.parametrize("top", [1, 2, 5, 6])
@pytest.mark.parametrize("shape", [(40,), (8, 5), (3, 4, 5)], ids=str)
def test_accuracy_counts_what_a_sort_finds_ties_included(shape: tuple[int, ...], top: int) -> None:
    metric = Accuracy(top)
    correct = 0
    count = 0
    for _ in range(3):
        scores, labels = random_batch(*shape)
        metric.update(scores, labels)
        batch_correct, batch_count = count_by_sorting(scores, labels, top)
        correct += batch_correct
        count += batch_count
    assert (int(metric.total), int(metric.count)) == (correct, count)
    assert metric.compute().item() == correct / count
    assert metric.compute().dtype == torch.float64
    assert metric.total.dtype == metric.count.dtype == torch.int64


def test_a_short_last_batch_weighs_by_its_rows() -> None:
    metric = Accuracy()
    metric.update(torch.eye(4), torch.arange(4))
    metric.update(torch.eye(4)[:1], torch.tensor([3]))
    assert metric.compute().item() == 4 / 5


@pytest.mark.parametrize("top", [1, 3])
def test_accuracy_is_torchmetrics_accuracy(top: int) -> None:
    tm = pytest.importorskip("torchmetrics.classification")
    theirs = tm.MulticlassAccuracy(CLASSES, top_k=top, average="micro", ignore_index=-100)
    metric = Accuracy(top)
    for n in (30, 7):
        scores = torch.randn(n, CLASSES)
        _, labels = random_batch(n)
        metric.update(scores, labels)
        theirs.update(scores, labels)
    assert metric.compute().float() == theirs.compute()  # torchmetrics computes in float32


@pytest.mark.parametrize("shape", [(30,), (30, 1), (4, 1, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_one_score_a_label_is_judged_by_a_threshold(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tm = pytest.importorskip("torchmetrics.classification")
    scores = torch.randn(shape) * 3
    labels = torch.randint(2, shape).to(dtype)
    metric = Accuracy()
    theirs = tm.BinaryAccuracy()
    metric.update(scores, labels)
    theirs.update(scores, labels.long())
    assert metric.compute().float() == theirs.compute()
    flat = Accuracy(threshold=1.0)
    flat.update(scores, labels.reshape(labels.shape[:1] + labels.shape[2:]))
    assert int(flat.total) == int(((scores > 1.0) == labels.bool()).sum())


def test_ignored_labels_of_one_score_do_not_count() -> None:
    metric = Accuracy(ignore_index=-1)
    metric.update(torch.tensor([[2.0], [-2.0], [2.0]]), torch.tensor([1, -1, 0]))
    assert (int(metric.total), int(metric.count)) == (1, 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool, torch.float16])
def test_labels_from_0_to_1_are_taken_for_one_score(dtype: torch.dtype) -> None:
    metric = Accuracy()
    metric.update(torch.tensor([[2.0], [-2.0], [2.0]]), torch.tensor([1, 1, 0]).to(dtype))
    metric.update(torch.ones(0, 1), torch.ones(0, dtype=dtype))
    assert (int(metric.total), int(metric.count)) == (1, 3)


def test_an_ignored_class_may_be_a_real_one() -> None:
    metric = Accuracy(ignore_index=0)
    metric.update(torch.eye(3), torch.tensor([0, 1, 0]))
    assert (int(metric.total), int(metric.count)) == (1, 1)


@pytest.mark.parametrize("top", [1, 2])
def test_class_156_in_uint8_is_no_ignored_label(top: int) -> None:
    labels = torch.tensor([156, 3, 156], dtype=torch.uint8)  # 156 is -100 modulo 256
    metric = Accuracy(top)
    metric.update(F.one_hot(torch.tensor([156, 3, 4]), 200).float(), labels)
    assert (int(metric.total), int(metric.count)) == (2, 3)
    ignoring = Accuracy(top, ignore_index=156)
    ignoring.update(F.one_hot(torch.tensor([156, 3, 4]), 200).float(), labels)
    assert (int(ignoring.total), int(ignoring.count)) == (1, 1)


@pytest.mark.parametrize("top", [1, 2])
def test_soft_labels_name_their_largest_class(top: int) -> None:
    scores = torch.randn(4, CLASSES, 5)
    labels = torch.randint(CLASSES, (4, 5))
    one_hot_labels = F.one_hot(labels, CLASSES).movedim(-1, 1)
    soft_labels = one_hot_labels * 0.5 + torch.rand(4, CLASSES, 5) * 0.4
    hard = Accuracy(top)
    one_hot = Accuracy(top)
    soft = Accuracy(top)
    hard.update(scores, labels)
    one_hot.update(scores, one_hot_labels)
    soft.update(scores, soft_labels)
    assert hard.state_dict() == soft.state_dict() == one_hot.state_dict()


@pytest.mark.parametrize("top", [1, 2])
def test_nan_is_never_right(top: int) -> None:
    scores = torch.eye(3)
    scores[0] = math.nan  # plain argmax would find class 0, here and in the next row
    scores[1, 0] = math.nan
    metric = Accuracy(top)
    metric.update(scores, torch.tensor([0, 0, 2]))
    assert (int(metric.total), int(metric.count)) == (1, 3)
    binary = Accuracy()
    binary.update(torch.tensor([math.nan, 1.0, math.nan]), torch.tensor([0, 1, 1]))
    assert int(binary.total) == 1


def test_infinite_scores_have_their_place() -> None:
    metric = Accuracy(2)
    metric.update(
        torch.tensor([[-math.inf, 1.0, math.inf], [0.0, -math.inf, -math.inf]]),
        torch.tensor([1, 2]),
    )
    assert (int(metric.total), int(metric.count)) == (1, 2)


@pytest.mark.parametrize("outputs", [lambda t: {"logits": t}, lambda t: SimpleNamespace(logits=t)])
def test_logits_are_found_in_a_models_output(outputs: Callable[[Tensor], Any]) -> None:
    metric = Accuracy()
    metric.update(outputs(torch.eye(3, requires_grad=True)), torch.arange(3))
    assert metric.compute() == 1
    assert not metric.total.requires_grad


@pytest.mark.parametrize(
    "outputs", [{"logits": None}, SimpleNamespace(logits=None), {"scores": 1}, (1, 2)], ids=str
)
def test_outputs_without_logits_stay_as_they_are(outputs: Any) -> None:
    assert logits_of(outputs) is outputs


LABELS_TO_9 = (
    r"for one score per sample, \(3, 1\), expected labels 0 or 1, received 0 to 9; "
    r"give scores of every class, \[N, c"
)
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: Accuracy(0),
        ValueError,
        "Accuracy: top: expected a whole number of classes, 1 or more, received 0",
    ),
    (
        lambda: Accuracy(4).update(torch.ones(2, 3), torch.ones(2).long()),
        ValueError,
        r"4 or more classes.*\(2, 3\)",
    ),
    (
        lambda: Accuracy(2).update(torch.ones(2), torch.ones(2).long()),
        ValueError,
        "2 or more classes",
    ),
    (
        lambda: Accuracy().update(torch.ones(2, 3), torch.ones(3).long()),
        ValueError,
        r"\(2,\).*received.*\(3,\)",
    ),
    (
        lambda: Accuracy().update(torch.ones(2, 3), torch.ones(2)),
        ValueError,
        "expected integer labels",
    ),
    (
        lambda: Accuracy().update(torch.ones(3), torch.tensor(1)),
        ValueError,
        "expected integer labels of shape",
    ),
    (
        lambda: Accuracy().update(torch.ones(2).long(), torch.ones(2)),
        TypeError,
        "floating tensor.*torch.int64",
    ),
    (
        lambda: Accuracy().update([1.0], torch.ones(1)),
        TypeError,
        "floating tensor, or .logits, received list",
    ),
    (lambda: Accuracy().update(torch.ones(3, 1), torch.tensor([0, 9, 3])), ValueError, LABELS_TO_9),
    (
        lambda: Accuracy().update(torch.ones(3), torch.tensor([-1, 1, 1])),
        ValueError,
        r"0 or 1, received -1 to 1; give",
    ),
    (
        lambda: Accuracy().update(torch.ones(2, 1), torch.tensor([[0.5], [2.5]])),
        ValueError,
        r"received 0.5 to 2.5",
    ),
    (
        lambda: Loss().update(torch.ones(3)),
        ValueError,
        r"one number, received shape \(3,\); give its mean",
    ),
    (
        lambda: Accuracy().merge(Accuracy(5)),
        ValueError,
        r"another Accuracy\(top=1.*received Accuracy\(top=5",
    ),
    (
        lambda: Loss().merge(Average(len)),  # type: ignore[arg-type]
        ValueError,
        r"another Loss\(\), received Average",
    ),
    (
        lambda: Loss().load_state_dict({"total": torch.zeros(())}),
        ValueError,
        "counters total, count, received total",
    ),
    (
        lambda: Accuracy().load_state_dict(Loss().state_dict()),
        ValueError,
        "torch.int64 number, received torch.float64",
    ),
    (lambda: as_metric(Accuracy), TypeError, r"received the class Accuracy; write Accuracy\(\)"),
    (
        lambda: as_metric("acc"),
        TypeError,
        "received str 'acc'. Accepted: a metric of halfstep.metrics, one of torchm",
    ),
    (lambda: as_metric(SimpleNamespace(update=print)), TypeError, "Accepted"),
    (
        lambda: as_metric(SimpleNamespace(update=print, compute=print, reset=print)).state_dict(),
        TypeError,
        "saved",
    ),
    (
        lambda: as_metric(MinimalMetric()).merge(MinimalMetric()),
        TypeError,
        r"MinimalMetric has neither merge_state\(other\) nor merge",
    ),
    (
        lambda: as_metric(MinimalMetric()).merge(Accuracy()),
        ValueError,
        r"expected another MinimalMetric, received Accuracy",
    ),
    (
        lambda: Average(lambda a, b: 1.0).update(None, None),
        TypeError,
        "needs labels or outputs with rows",
    ),
    (
        lambda: Metrics([Accuracy()]),
        TypeError,
        r"a dict by name, such as \{\"acc\": Accuracy\(\)\}, received list",
    ),
    (lambda: Metrics({"top/5": Accuracy()}), ValueError, "no spaces or slashes.*received 'top/5'"),
    (lambda: Metrics({"top 5": Accuracy()}), ValueError, "received 'top 5'"),
    (lambda: Metrics({"": Accuracy()}), ValueError, "received ''"),
    (lambda: Metrics({1: Accuracy()}), ValueError, "received 1"),
    (lambda: Metrics({"loss": Accuracy()}), ValueError, "'loss' is the name of the loss itself"),
    (
        lambda: Metrics({"mean": Loss()}).update(1, 2),
        ValueError,
        "'mean' follows the loss; give update.*loss=",
    ),
    (
        lambda: Metrics({"a": Loss()}).load_state_dict({"b": {}}),
        ValueError,
        r"expected \['a'\], received \['b'\]",
    ),
    (
        lambda: Metrics({"a": Loss()}).merge(Metrics()),
        ValueError,
        r"merge: expected \['a'\], received \[\]",
    ),
]


@pytest.mark.parametrize(("make", "error", "match"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_one_object_under_two_names_is_refused() -> None:
    metric = Accuracy()
    with pytest.raises(ValueError, match="'b' and 'a' are one object"):
        Metrics({"a": metric, "b": metric})
    foreign = SimpleNamespace(update=print, compute=print, reset=print)
    with pytest.raises(ValueError, match="'b' and 'a' are one object"):
        Metrics({"a": as_metric(foreign), "b": foreign})


def test_loss_is_the_mean_over_all_terms() -> None:
    tm = pytest.importorskip("torchmetrics")
    metric = Loss()
    theirs = tm.MeanMetric().set_dtype(torch.float64)
    parts = [torch.randn(n, CLASSES) for n in (30, 7, 1)]
    for part in parts:
        metric.update(part.square().mean(), part.numel())
        theirs.update(part.square().mean(), part.numel())
    assert metric.compute() == theirs.compute()
    mean = torch.cat(parts).double().square().mean().item()
    # 1e-6: each batch's mean is rounded to float32
    assert metric.compute().item() == pytest.approx(mean, rel=1e-6)


def test_loss_takes_device_counts_and_ignores_a_mean_over_nothing() -> None:
    metric = Loss()
    metric.update(torch.tensor([2.0], requires_grad=True), torch.tensor(0.5))  # Σ of class weights
    metric.update(torch.tensor(math.nan), torch.tensor(0))
    metric.update(torch.tensor(math.nan), 0)
    metric.update(torch.tensor(4.0, dtype=torch.float16))
    assert metric.compute().item() == 5 / 1.5
    metric.update(torch.tensor(math.nan), 3)
    assert metric.compute().isnan(), "a NaN that counts is shown"


def test_many_small_terms_keep_their_digits() -> None:
    metric = Loss()
    metric.update(torch.tensor(2.0**24), 1)
    for _ in range(1000):
        metric.update(torch.tensor(1.0), 1)  # float32 would stay at 2^24
    assert metric.total.item() == 2**24 + 1000


def square_error(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square()


def test_a_function_is_averaged_by_count() -> None:
    metrics = [
        as_metric(square_error),  # a tensor of terms
        as_metric(lambda o, y: square_error(o, y).mean()),  # a tensor of one number
        as_metric(lambda o, y: float(square_error(o, y).mean())),  # a number
    ]
    parts = [(torch.randn(n).double().requires_grad_(), torch.randn(n).double()) for n in (9, 2, 0)]
    for part in parts:
        for metric in metrics:
            metric.update(*part)
    mean = torch.cat([square_error(*part) for part in parts]).mean().item()
    for metric in metrics:
        assert metric.compute().item() == pytest.approx(mean, rel=1e-14)
        assert metric.compute().requires_grad is False
    hits = as_metric(lambda o, y: o.argmax(1) == y)
    hits.update(torch.eye(4), torch.tensor([0, 1, 2, 0]))
    assert hits.compute() == 0.75


def test_a_module_that_is_a_function_is_averaged_too() -> None:
    metric = as_metric(nn.L1Loss())
    metric.update(torch.ones(4), torch.zeros(4))
    metric.update(torch.zeros(12), torch.zeros(12))
    assert metric.compute() == 0.25


METRICS: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "accuracy": (Accuracy, lambda: random_batch(20)),
    "top": (lambda: Accuracy(3), lambda: random_batch(5, 4)),
    "loss": (Loss, lambda: (torch.rand(()), torch.randint(1, 9, ()))),
    "average": (lambda: as_metric(square_error), lambda: (torch.randn(7), torch.randn(7))),
}


def torchmetric(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        tm = pytest.importorskip("torchmetrics")
        return as_metric(getattr(tm, name)(**options))

    return make


TORCHMETRICS: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "tm accuracy": (
        torchmetric("Accuracy", task="multiclass", num_classes=CLASSES),
        lambda: random_batch(20, ignored=0.0),
    ),
    "tm error": (torchmetric("MeanSquaredError"), lambda: (torch.randn(7), torch.randn(7))),
    "tm lists": (torchmetric("AUROC", task="binary"), lambda: (torch.rand(9), torch.arange(9) % 2)),
}


@pytest.mark.parametrize("kind", [*METRICS, *TORCHMETRICS])
def test_saved_state_continues_exactly(kind: str) -> None:
    make, sample = {**METRICS, **TORCHMETRICS}[kind]
    uninterrupted = make()
    first = make()
    second = make()
    for i in range(4):
        arguments = sample()
        uninterrupted.update(*arguments)
        (first if i < 2 else second).update(*arguments)
        if i == 1:
            saved = first.state_dict()
            first.update(*sample())  # what was saved is a copy
            second.update(*sample())
            second.compute()  # torchmetrics remembers it
            second.load_state_dict(saved)
            second.compute()
    assert torch.equal(second.compute(), uninterrupted.compute())


@pytest.mark.parametrize("kind", [*METRICS, "tm accuracy", "tm error"])
def test_merging_is_having_seen_both(kind: str) -> None:
    make, sample = {**METRICS, **TORCHMETRICS}[kind]
    together = make()
    first = make()
    second = make()
    for i in range(4):
        arguments = sample()
        together.update(*arguments)
        (first if i % 2 else second).update(*arguments)
    first.compute()  # torchmetrics remembers what it computed
    second.compute()
    first.merge(second)
    # 1e-6: float32 in torchmetrics
    assert torch.allclose(first.compute(), together.compute(), rtol=1e-6, atol=0)
    fresh = make()
    fresh.merge(first)
    assert torch.equal(fresh.compute(), first.compute())


@pytest.mark.parametrize("kind", [*METRICS, *TORCHMETRICS])
def test_reset_is_a_new_beginning(kind: str) -> None:
    make, sample = {**METRICS, **TORCHMETRICS}[kind]
    used = make()
    fresh = make()
    used.update(*sample())
    used.reset()
    arguments = sample()
    used.update(*arguments)
    fresh.update(*arguments)
    assert torch.equal(used.compute(), fresh.compute())


@pytest.mark.parametrize("kind", METRICS)
def test_counters_stay_in_place(kind: str) -> None:
    """A captured graph holds their addresses."""
    make, sample = METRICS[kind]
    metric = make()
    metric.update(*sample())
    addresses = (metric.total.data_ptr(), metric.count.data_ptr())
    metric.update(*sample())
    metric.load_state_dict(metric.state_dict())
    metric.merge(metric)
    metric.reset()
    assert (metric.total.data_ptr(), metric.count.data_ptr()) == addresses
    assert metric.compute().isnan(), "nothing seen is 0/0, not 0"


class MinimalMetric:
    """The least a metric of the user's own can be."""

    def __init__(self) -> None:
        self.seen = 0

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.seen += len(labels)

    def compute(self) -> int:
        return self.seen

    def reset(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.seen = saved["seen"]


class StoringMetric(MinimalMetric):
    """Stores its inputs, as metrics over whole data sets do."""

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.outputs = outputs


def test_a_wrapped_metric_keeps_no_graph() -> None:
    metric = StoringMetric()
    as_metric(metric).update({"logits": torch.ones(3, requires_grad=True) * 2}, torch.ones(3))
    assert metric.outputs.grad_fn is None
    assert not metric.outputs.requires_grad


def test_a_wrapper_of_torchmetrics_measures_but_is_not_saved() -> None:
    """Its minimum and maximum are no states of torchmetrics: a load would lose them silently."""
    tm = pytest.importorskip("torchmetrics")
    metric, other = (as_metric(tm.MinMaxMetric(tm.MeanSquaredError())) for _ in range(2))
    metric.update(torch.ones(2), torch.zeros(2))
    assert float(metric.compute()["max"]) == 1
    for call, action in ((metric.state_dict, "saved"), (lambda: metric.merge(other), "merged")):
        message = f"MinMaxMetric cannot be {action}: it wraps other metrics; give the metric"
        with pytest.raises(TypeError, match=message):
            call()


def test_torchmetrics_collection_is_given_by_name() -> None:
    tm = pytest.importorskip("torchmetrics")
    collection = tm.MetricCollection({"mse": tm.MeanSquaredError(), "mae": tm.MeanAbsoluteError()})
    with pytest.raises(
        TypeError,
        match=r"MetricCollection holds several metrics; give them by name: \{\*\*collection",
    ):
        as_metric(collection)
    metrics = Metrics({**collection})
    metrics.update(torch.tensor([1.0, 3.0]), torch.zeros(2))
    values = {name: float(value) for name, value in metrics.compute().items()}
    assert values == {"mse": 5.0, "mae": 2.0}


def test_a_state_of_another_metric_is_refused() -> None:
    tm = pytest.importorskip("torchmetrics")
    metric = as_metric(tm.MeanSquaredError())
    with pytest.raises(ValueError, match="MeanSquaredError: expected the states"):
        metric.load_state_dict(as_metric(tm.MeanAbsoluteError()).state_dict())


def five_metrics() -> Metrics:
    return Metrics(
        {
            "acc": Accuracy(),
            "top@2": Accuracy(2),
            "loss": Loss(),
            "seen": MinimalMetric(),
            "mse": lambda o, y: o[0],
        }
    )


def test_a_group_is_its_metrics() -> None:
    metrics = five_metrics()
    other = five_metrics()
    outputs = torch.eye(4)[[0, 1, 1, 3]]
    labels = torch.arange(4)
    metrics.update(outputs, labels, loss=torch.tensor(2.0), count=4)
    expected = {"acc": 0.75, "top@2": 0.75, "loss": 2.0, "seen": 4, "mse": 0.25}
    assert {name: float(value) for name, value in metrics.compute().items()} == expected
    assert (list(metrics), len(metrics)) == (list(expected), 5)
    other.load_state_dict(metrics.state_dict())
    assert other.compute() == metrics.compute()
    metrics.reset()
    assert metrics.by_name["seen"].compute() == 0
    assert metrics.compute()["loss"].isnan()
    assert len(Metrics()) == 0


class UserError(KeyError):
    pass


def failing_metric(outputs: Any, labels: Any) -> Tensor:
    raise UserError("mine")


def test_an_error_in_a_metric_names_it_and_what_it_was_given() -> None:
    tm = pytest.importorskip("torchmetrics")
    scores = torch.zeros(5, 3)
    labels = torch.zeros(4, dtype=torch.int64)
    both = "float32 [5, 3] and int64 [4]"
    nested = "{'a': float32 [5, 3], 'b': (int64 [4], int)} and NoneType"
    cases: list[tuple[Any, type[Exception], Any, str]] = [
        (failing_metric, UserError, (scores, labels), both),
        (lambda o, y: o - y, RuntimeError, (scores, labels), both),
        (Accuracy(), ValueError, (scores, labels), both),
        (tm.MeanSquaredError(), RuntimeError, (scores, labels), both),
        (failing_metric, UserError, ({"a": scores, "b": [labels, 1]}, None), nested),
        (failing_metric, UserError, (scores, ["cat"] * 500), "float32 [5, 3] and list of 500"),
    ]
    for metric, error, arguments, description in cases:
        with pytest.raises(error) as caught:
            Metrics({"fine": lambda o, y: 1.0, "mine": metric}).update(*arguments)
        assert type(caught.value) is error
        assert caught.value.__notes__ == [f"in the metric 'mine', which was given {description}"]
    with pytest.raises(ValueError, match="expected one number") as caught:
        Metrics({"mean": Loss()}).update(scores, labels, loss=torch.ones(3), count=2)
    assert caught.value.__notes__ == ["in the metric 'mean', which was given float32 [3] and int"]


class FailingCompute(MinimalMetric):
    def compute(self) -> int:
        raise UserError("late")


def test_an_error_in_compute_names_the_metric_and_fit_keeps_the_note() -> None:
    with pytest.raises(UserError) as caught:
        Metrics({"late": FailingCompute()}).compute()
    assert caught.value.__notes__ == ["in the metric 'late', when it was computed"]
    net = nn.Linear(4, 3)
    data = hs.data.Dataset((torch.randn(6, 4), torch.arange(6) % 3)).batch(3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    metrics = {"mine": failing_metric}
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, metrics=metrics)
    with (
        pytest.warns(hs.Notice, match="'mine' cannot be counted on training data"),
        pytest.raises(UserError) as caught,
    ):
        model.fit(1, data, valid=data)
    note = "in the metric 'mine', which was given float32 [3, 3] and int64 [3]"
    assert note in caught.value.__notes__


def test_groups_merge_and_split() -> None:
    metrics, other = (
        Metrics({"acc": Accuracy(), "loss": Loss(), "f": square_error}) for _ in range(2)
    )
    for group, label in ((metrics, 0), (other, 1)):
        labels = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        loss = torch.tensor(float(label))
        group.update(labels * (1 + label), labels, loss=loss, count=1 + label)
    metrics.merge(other)
    values = {name: float(value) for name, value in metrics.compute().items()}
    assert values == {"acc": 1.0, "loss": 2 / 3, "f": 0.25}
    inside, outside = metrics.split()
    assert (list(inside), list(outside)) == (["acc", "loss"], ["f"])
    assert inside.by_name["acc"] is metrics.by_name["acc"]


@pytest.mark.gpu
def test_updates_are_captured_and_never_wait() -> None:
    scores, labels = (t.cuda() for t in random_batch(64))
    loss = torch.rand((), device="cuda")
    terms = torch.full((), 3, device="cuda")
    metrics = Metrics({"acc": Accuracy(), "top@3": Accuracy(3), "loss": Loss()}).to("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        metrics.update(scores, labels, loss=loss, count=terms)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metrics.update(scores, labels, loss=loss, count=terms)
    metrics.reset()
    top_1 = 0
    top_3 = 0
    count = 0
    for i in range(3):
        new_scores, new_labels = random_batch(64)
        scores.copy_(new_scores)
        labels.copy_(new_labels)
        loss.fill_(i)
        graph.replay()
        top_1 += count_by_sorting(new_scores, new_labels, 1)[0]
        top_3 += count_by_sorting(new_scores, new_labels, 3)[0]
        count += count_by_sorting(new_scores, new_labels, 1)[1]
    values = {name: value.item() for name, value in metrics.compute().items()}
    assert values == {"acc": top_1 / count, "top@3": top_3 / count, "loss": (0 + 1 + 2) / 3}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_updates_do_not_wait_for_the_device() -> None:
    scores, labels = (t.cuda() for t in random_batch(64))
    metrics = Metrics(
        {"acc": Accuracy(), "top@3": Accuracy(3), "loss": Loss(), "f": lambda o, y: o.sum()}
    ).to("cuda")
    soft_labels = torch.rand(64, CLASSES, device="cuda")
    terms = torch.full((), 3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics.update(scores, labels, loss=scores.sum(), count=64)
        metrics.update(scores, soft_labels, loss=scores.sum(), count=terms)
        metrics.compute()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_capture_cannot_move_the_counters() -> None:
    scores, labels = (t.cuda() for t in random_batch(64))
    metric = Accuracy()
    with (
        pytest.raises(RuntimeError, match=r"call to\('cuda:0'\) before it"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        metric.update(scores, labels)


# Functions that compare every row with every other one.

MIXING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "difference": lambda o, y: (o - y).abs(),
    "one number": lambda o, y: float((o - y).square().mean()),
    "in place": lambda o, y: y.clone().sub_(o),
    "equality": lambda o, y: (o > 0) == (y > 0),
    "intersection over union": lambda o, y: (
        ((o > 0) & (y > 0)).sum() / ((o > 0) | (y > 0)).sum().clamp(min=1)
    ),
    "where": lambda o, y: torch.where(y > 0, o, -o),
    "lerp": lambda o, y: torch.lerp(o, y, 0.5),
}
NOT_MIXING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "same shape": lambda o, y: (o.reshape(len(y), -1) - y.reshape(len(y), -1)).abs(),
    "flat": lambda o, y: o.flatten() - y.flatten(),
    "pairs on purpose": lambda o, y: (o.reshape(-1, 1) - y.reshape(1, -1)).abs(),
    "thresholds": lambda o, y: o.reshape(-1, 1) > torch.linspace(-1, 1, 7),
    "one weight for each column": lambda o, y: o * torch.ones(1),
}
SHAPES = [((5, 1), (5,)), ((5,), (5, 1)), ((5, 1, 3), (5, 3)), ((5, 1, 4, 4), (5, 4, 4))]


class KeepsDifferences:
    """An object with the three methods, whose update is a function of both."""

    def __init__(self, fn: Callable[[Tensor, Tensor], Any]) -> None:
        self.update = fn

    def compute(self) -> float:
        return 0.0

    def reset(self) -> None: ...


@pytest.mark.parametrize("make", [lambda fn: fn, KeepsDifferences], ids=["function", "object"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", MIXING)
def test_rows_broadcast_against_rows_are_refused(name: str, shapes: Any, make: Any) -> None:
    outputs, labels = (torch.randn(shape) for shape in shapes)
    metric = as_metric(make(MIXING[name]))
    match = r"outputs \[5.* and labels \[5.* broadcast to \[5, 5.*labels.view_as\(outputs\)"
    with pytest.raises(ValueError, match=match):
        metric.update(outputs, labels)
    metric.update(outputs, labels.view_as(outputs))  # the advice of the message works


@pytest.mark.parametrize("shapes", [*SHAPES, ((5,), (5,)), ((1, 1), (1,))], ids=str)
@pytest.mark.parametrize("name", NOT_MIXING)
def test_functions_that_mind_the_shapes_are_left_alone(name: str, shapes: Any) -> None:
    outputs, labels = (torch.randn(shape) for shape in shapes)
    metric = as_metric(NOT_MIXING[name])
    for _ in range(2):
        metric.update(outputs, labels)
    expected = NOT_MIXING[name](outputs, labels).double().mean()
    assert metric.compute().item() == pytest.approx(expected.item(), rel=1e-12)


def test_complex_terms_are_refused() -> None:
    with pytest.raises(TypeError, match=r"real numbers, received torch.complex64; return its .abs"):
        as_metric(lambda o, y: torch.complex(o, y)).update(torch.ones(3), torch.ones(3))


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([[1, 1, 0], [0, 1, 0]]),
        torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        torch.tensor([[True, False, True], [False, True, False]]),
    ],
    ids=["two classes", "no class", "bool"],
)
@pytest.mark.parametrize("top", [1, 2])
def test_labels_of_several_classes_at_once_are_refused(labels: Tensor, top: int) -> None:
    with pytest.raises(ValueError, match=r"one class for each sample, .* several classes or none"):
        Accuracy(top).update(torch.randn(2, 3), labels)


def test_probabilities_that_are_taken_for_logits_are_announced_once() -> None:
    labels = torch.tensor([0, 1] * 4)
    probabilities = torch.sigmoid(torch.tensor([-2.0, 2.0] * 4))
    metric = Accuracy()
    with pytest.warns(hs.Notice, match=r"ends with a sigmoid, write Accuracy\(threshold=0.5\)"):
        metric.update(probabilities, labels)
    metric.update(probabilities, labels)
    assert metric.compute() == 0.5, "every score above 0 is class 1"
    by_advice = Accuracy(threshold=0.5)
    by_advice.update(probabilities, labels)
    assert by_advice.compute() == 1


@pytest.mark.parametrize(
    ("scores", "labels"),
    [
        (torch.tensor([-2.0, 0.5] * 4), torch.tensor([0, 1] * 4)),
        (torch.rand(8), torch.ones(8)),
        (torch.rand(4), torch.tensor([0, 1, 0, 1])),
    ],
    ids=["a logit below 0", "only class 1", "few scores"],
)
def test_logits_are_not_taken_for_probabilities(scores: Tensor, labels: Tensor) -> None:
    Accuracy().update(scores, labels)


@pytest.mark.parametrize("label", [-1, 6, 255])
@pytest.mark.parametrize("top", [1, 2])
def test_labels_that_no_score_stands_for_are_refused(label: int, top: int) -> None:
    """Padding that the loss ignores by another number would count as wrong answers."""
    scores, labels = random_batch(8, 5, ignored=0.0)
    labels[2, 3] = label
    with pytest.raises(ValueError, match=rf"labels from 0 to 5.*Accuracy\(ignore_index={label}\)"):
        Accuracy(top).update(scores, labels)
    by_advice = Accuracy(top, ignore_index=label)
    by_advice.update(scores, labels)
    assert int(by_advice.count) == 39


def test_a_loss_that_ignores_another_label_is_announced() -> None:
    loss = nn.CrossEntropyLoss(ignore_index=255)
    with pytest.warns(hs.Notice, match=r"ignores the label 255, and 'acc' counts it.*index=255\)"):
        hs.Model(nn.Linear(3, 2), loss, metrics={"acc": Accuracy()})
    hs.Model(nn.Linear(3, 2), loss, metrics={"acc": Accuracy(ignore_index=255)})
    hs.Model(nn.Linear(3, 2), nn.CrossEntropyLoss(), metrics={"acc": Accuracy(ignore_index=0)})


def test_a_mean_with_a_dimension_counts_once_and_is_announced() -> None:
    metric = as_metric(lambda o, y: (o - y).abs().mean(0, keepdim=True))
    with pytest.warns(hs.Notice, match=r"one term of shape \[1\] for a batch of 4 rows.*squeeze"):
        metric.update(torch.ones(4), torch.zeros(4))
    metric.update(torch.zeros(2), torch.zeros(2))
    assert metric.compute() == 0.5
    one_row = as_metric(lambda o, y: (o - y).abs())
    one_row.update(torch.ones(1), torch.zeros(1))


@pytest.mark.parametrize("name", ["MeanMetric", "SumMetric", "MaxMetric", "CatMetric"])
def test_metrics_that_take_no_labels_are_refused(name: str) -> None:
    """Labels would be the weights of the outputs."""
    torchmetrics = pytest.importorskip("torchmetrics")
    with pytest.raises(TypeError, match=rf"{name}.update\(value.*aggregates values.*hs.metrics.Lo"):
        as_metric(getattr(torchmetrics, name)())


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("top_k", "did you mean 'top'"),
        ("topk", "did you mean 'top'"),
        ("ignore_indx", "did you mean 'ignore_index'"),
        ("task", r"write Accuracy\(\)"),
        ("num_classes", r"write Accuracy\(\)"),
    ],
)
def test_options_of_other_accuracies_are_answered_with_those_here(option: str, answer: str) -> None:
    options: dict[str, Any] = {option: 5}
    with pytest.raises(TypeError, match=f"Accuracy: unknown option '{option}'; {answer}"):
        Accuracy(**options)
