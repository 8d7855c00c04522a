"""Metrics against numpy, torchmetrics and counts by hand; their counters stay in place and never wait."""

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

C = 6


def batch(*shape: int, ignored: float = 0.2) -> tuple[Tensor, Tensor]:
    """Scores with many ties: six values for six classes."""
    scores = torch.randint(C, (shape[0], C, *shape[1:])).float()
    return scores, torch.where(torch.rand(shape) < ignored, -100, torch.randint(C, shape))


def counted(scores: Tensor, labels: Tensor, top: int) -> tuple[int, int]:
    """Sorts every row by (score, class) and looks the label up, one by one."""
    rows, hits, count = np.moveaxis(scores.numpy(), 1, -1).reshape(-1, scores.shape[1]), 0, 0
    for row, label in zip(rows, labels.numpy().ravel(), strict=True):
        order = sorted(range(len(row)), key=lambda c: (-row[c], c))
        hits += label != -100 and label in order[:top]
        count += label != -100
    return int(hits), int(count)


@pytest.mark.parametrize("top", [1, 2, 5, 6])
@pytest.mark.parametrize("shape", [(40,), (8, 5), (3, 4, 5)], ids=str)
def test_accuracy_counts_what_a_sort_finds_ties_included(shape: tuple[int, ...], top: int) -> None:
    metric, hits, count = Accuracy(top), 0, 0
    for _ in range(3):
        scores, labels = batch(*shape)
        metric.update(scores, labels)
        more = counted(scores, labels, top)
        hits, count = hits + more[0], count + more[1]
    assert (int(metric.total), int(metric.count)) == (hits, count)
    assert metric.compute().item() == hits / count
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
    theirs = tm.MulticlassAccuracy(C, top_k=top, average="micro", ignore_index=-100)
    metric = Accuracy(top)
    for n in (30, 7):
        scores, labels = torch.randn(n, C), batch(n)[1]
        metric.update(scores, labels)
        theirs.update(scores, labels)
    assert metric.compute().float() == theirs.compute()  # torchmetrics computes in float32


@pytest.mark.parametrize("shape", [(30,), (30, 1), (4, 1, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_one_score_a_label_is_judged_by_a_threshold(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tm = pytest.importorskip("torchmetrics.classification")
    scores, labels = torch.randn(shape) * 3, torch.randint(2, shape).to(dtype)
    metric, theirs = Accuracy(), tm.BinaryAccuracy()
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
    scores, labels = torch.randn(4, C, 5), torch.randint(C, (4, 5))
    hard, soft, onehot = Accuracy(top), Accuracy(top), Accuracy(top)
    hard.update(scores, labels)
    hot = F.one_hot(labels, C).movedim(-1, 1)
    onehot.update(scores, hot)
    soft.update(scores, hot * 0.5 + torch.rand(4, C, 5) * 0.4)
    assert hard.state_dict() == soft.state_dict() == onehot.state_dict()


@pytest.mark.parametrize("top", [1, 2])
def test_nan_is_never_right(top: int) -> None:
    scores = torch.eye(3)
    scores[0], scores[1, 0] = math.nan, math.nan  # plain argmax would find class 0 twice
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


NINE = r"for one score per sample, \(3, 1\), expected labels 0 or 1, received 0 to 9; give scores of every class, \[N, c"
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Accuracy(0), ValueError, "Accuracy: top: expected a whole number of classes, 1 or more, received 0"),
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
    (lambda: Accuracy().update(torch.ones(3, 1), torch.tensor([0, 9, 3])), ValueError, NINE),
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
    (lambda: Loss().merge(Average(len)), ValueError, r"another Loss\(\), received Average"),  # type: ignore[arg-type]
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
        lambda: as_metric(Plain()).merge(Plain()),
        TypeError,
        r"Plain has neither merge_state\(other\) nor merge",
    ),
    (
        lambda: as_metric(Plain()).merge(Accuracy()),
        ValueError,
        r"expected another Plain, received Accuracy",
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


@pytest.mark.parametrize(("make", "error", "match"), BAD, ids=range(len(BAD)))
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
    metric, theirs = Loss(), tm.MeanMetric().set_dtype(torch.float64)
    parts = [torch.randn(n, C) for n in (30, 7, 1)]
    for part in parts:
        metric.update(part.square().mean(), part.numel())
        theirs.update(part.square().mean(), part.numel())
    assert metric.compute() == theirs.compute()
    whole = torch.cat(parts).double().square().mean().item()
    assert metric.compute().item() == pytest.approx(
        whole, rel=1e-6
    )  # each batch's mean is rounded to float32


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
    each, mean, number = (
        as_metric(f)
        for f in (
            square_error,
            lambda o, y: square_error(o, y).mean(),
            lambda o, y: float(square_error(o, y).mean()),
        )
    )
    parts = [(torch.randn(n).double().requires_grad_(), torch.randn(n).double()) for n in (9, 2, 0)]
    for part in parts:
        for metric in (each, mean, number):
            metric.update(*part)
    whole = torch.cat([square_error(*p) for p in parts]).mean().item()
    for metric in (each, mean, number):
        assert metric.compute().item() == pytest.approx(whole, rel=1e-14)
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
    "accuracy": (Accuracy, lambda: batch(20)),
    "top": (lambda: Accuracy(3), lambda: batch(5, 4)),
    "loss": (Loss, lambda: (torch.rand(()), torch.randint(1, 9, ()))),
    "average": (lambda: as_metric(square_error), lambda: (torch.randn(7), torch.randn(7))),
}


def theirs(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        tm = pytest.importorskip("torchmetrics")
        return as_metric(getattr(tm, name)(**options))

    return make


TORCHMETRICS: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "tm accuracy": (
        theirs("Accuracy", task="multiclass", num_classes=C),
        lambda: batch(20, ignored=0.0),
    ),
    "tm error": (theirs("MeanSquaredError"), lambda: (torch.randn(7), torch.randn(7))),
    "tm lists": (theirs("AUROC", task="binary"), lambda: (torch.rand(9), torch.arange(9) % 2)),
}


@pytest.mark.parametrize("kind", [*METRICS, *TORCHMETRICS])
def test_saved_state_continues_exactly(kind: str) -> None:
    make, sample = {**METRICS, **TORCHMETRICS}[kind]
    whole, first, second = make(), make(), make()
    for i in range(4):
        arguments = sample()
        whole.update(*arguments)
        (first if i < 2 else second).update(*arguments)
        if i == 1:
            saved = first.state_dict()
            first.update(*sample())  # what was saved is a copy
            second.update(*sample())
            second.compute()  # torchmetrics remembers it
            second.load_state_dict(saved)
            second.compute()
    assert torch.equal(second.compute(), whole.compute())


@pytest.mark.parametrize("kind", [*METRICS, "tm accuracy", "tm error"])
def test_merging_is_having_seen_both(kind: str) -> None:
    make, sample = {**METRICS, **TORCHMETRICS}[kind]
    whole, first, second = make(), make(), make()
    for i in range(4):
        arguments = sample()
        whole.update(*arguments)
        (first if i % 2 else second).update(*arguments)
    first.compute(), second.compute()  # torchmetrics remembers what it computed
    first.merge(second)
    assert torch.allclose(
        first.compute(), whole.compute(), rtol=1e-6, atol=0
    )  # float32 in torchmetrics
    fresh = make()
    fresh.merge(first)
    assert torch.equal(fresh.compute(), first.compute())


@pytest.mark.parametrize("kind", [*METRICS, *TORCHMETRICS])
def test_reset_is_a_new_beginning(kind: str) -> None:
    make, sample = {**METRICS, **TORCHMETRICS}[kind]
    used, fresh = make(), make()
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
    where = metric.total.data_ptr(), metric.count.data_ptr()
    metric.update(*sample())
    metric.load_state_dict(metric.state_dict())
    metric.merge(metric)
    metric.reset()
    assert (metric.total.data_ptr(), metric.count.data_ptr()) == where
    assert metric.compute().isnan(), "nothing seen is 0/0, not 0"


class Plain:
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


class Keeper(Plain):
    """Keeps what it is given, as metrics over whole data sets do."""

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.kept = outputs


def test_a_wrapped_metric_keeps_no_graph() -> None:
    keeper = Keeper()
    as_metric(keeper).update({"logits": torch.ones(3, requires_grad=True) * 2}, torch.ones(3))
    assert keeper.kept.grad_fn is None
    assert not keeper.kept.requires_grad


def test_a_wrapper_of_torchmetrics_measures_but_is_not_saved() -> None:
    """Its minimum and maximum are no states of torchmetrics: a load would lose them without a word."""
    tm = pytest.importorskip("torchmetrics")
    metric, other = (as_metric(tm.MinMaxMetric(tm.MeanSquaredError())) for _ in range(2))
    metric.update(torch.ones(2), torch.zeros(2))
    assert float(metric.compute()["max"]) == 1
    for ask, what in ((metric.state_dict, "saved"), (lambda: metric.merge(other), "merged")):
        with pytest.raises(
            TypeError,
            match=f"MinMaxMetric cannot be {what}: it wraps other metrics; give the metric",
        ):
            ask()


def test_torchmetrics_collection_is_given_by_name() -> None:
    tm = pytest.importorskip("torchmetrics")
    collection = tm.MetricCollection({"mse": tm.MeanSquaredError(), "mae": tm.MeanAbsoluteError()})
    with pytest.raises(
        TypeError,
        match=r"MetricCollection holds several metrics; give them by name: \{\*\*collection",
    ):
        as_metric(collection)
    group = Metrics({**collection})
    group.update(torch.tensor([1.0, 3.0]), torch.zeros(2))
    assert {name: float(value) for name, value in group.compute().items()} == {
        "mse": 5.0,
        "mae": 2.0,
    }


def test_a_state_of_another_metric_is_refused() -> None:
    tm = pytest.importorskip("torchmetrics")
    metric = as_metric(tm.MeanSquaredError())
    with pytest.raises(ValueError, match="MeanSquaredError: expected the states"):
        metric.load_state_dict(as_metric(tm.MeanAbsoluteError()).state_dict())


def group() -> Metrics:
    return Metrics(
        {
            "acc": Accuracy(),
            "top@2": Accuracy(2),
            "loss": Loss(),
            "seen": Plain(),
            "mse": lambda o, y: o[0],
        }
    )


def test_a_group_is_its_metrics() -> None:
    metrics, other = group(), group()
    outputs, labels = torch.eye(4)[[0, 1, 1, 3]], torch.arange(4)
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


class Wrong(KeyError):
    pass


def fails(outputs: Any, labels: Any) -> Tensor:
    raise Wrong("mine")


def test_an_error_in_a_metric_names_it_and_what_it_was_given() -> None:
    tm = pytest.importorskip("torchmetrics")
    scores, labels = torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)
    both, nested = (
        "float32 [5, 3] and int64 [4]",
        "{'a': float32 [5, 3], 'b': (int64 [4], int)} and NoneType",
    )
    cases: list[tuple[Any, type[Exception], Any, str]] = [
        (fails, Wrong, (scores, labels), both),
        (lambda o, y: o - y, RuntimeError, (scores, labels), both),
        (Accuracy(), ValueError, (scores, labels), both),
        (tm.MeanSquaredError(), RuntimeError, (scores, labels), both),
        (fails, Wrong, ({"a": scores, "b": [labels, 1]}, None), nested),
        (fails, Wrong, (scores, ["cat"] * 500), "float32 [5, 3] and list of 500"),
    ]
    for metric, error, given, said in cases:
        with pytest.raises(error) as caught:
            Metrics({"fine": lambda o, y: 1.0, "mine": metric}).update(*given)
        assert type(caught.value) is error
        assert caught.value.__notes__ == [f"in the metric 'mine', which was given {said}"]
    with pytest.raises(ValueError, match="expected one number") as caught:
        Metrics({"mean": Loss()}).update(scores, labels, loss=torch.ones(3), count=2)
    assert caught.value.__notes__ == ["in the metric 'mean', which was given float32 [3] and int"]


class Late(Plain):
    def compute(self) -> int:
        raise Wrong("late")


def test_an_error_in_compute_names_the_metric_and_fit_keeps_the_note() -> None:
    with pytest.raises(Wrong) as caught:
        Metrics({"late": Late()}).compute()
    assert caught.value.__notes__ == ["in the metric 'late', when it was computed"]
    net, rows = nn.Linear(4, 3), hs.data.Dataset((torch.randn(6, 4), torch.arange(6) % 3)).batch(3)
    model = hs.Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.1),
        metrics={"mine": fails},
    )
    with pytest.raises(Wrong) as caught:
        model.fit(1, rows, valid=rows)
    assert (
        "in the metric 'mine', which was given float32 [3, 3] and int64 [3]"
        in caught.value.__notes__
    )


def test_groups_merge_and_split() -> None:
    metrics, other = (
        Metrics({"acc": Accuracy(), "loss": Loss(), "f": square_error}) for _ in range(2)
    )
    for m, label in ((metrics, 0), (other, 1)):
        m.update(
            torch.zeros(2, 2),
            torch.full((2, 2), label).float(),
            loss=torch.tensor(float(label)),
            count=1 + label,
        )
    metrics.merge(other)
    assert {name: float(v) for name, v in metrics.compute().items()} == {
        "acc": 1.0,
        "loss": 2 / 3,
        "f": 0.5,
    }
    inside, outside = metrics.split()
    assert (list(inside), list(outside)) == (["acc", "loss"], ["f"])
    assert inside.by_name["acc"] is metrics.by_name["acc"]


@pytest.mark.gpu
def test_updates_are_captured_and_never_wait() -> None:
    scores, labels = (t.cuda() for t in batch(64))
    value, n = torch.rand((), device="cuda"), torch.full((), 3, device="cuda")
    metrics = Metrics({"acc": Accuracy(), "top@3": Accuracy(3), "loss": Loss()}).to("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        metrics.update(scores, labels, loss=value, count=n)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metrics.update(scores, labels, loss=value, count=n)
    metrics.reset()
    hits, count, losses = [0, 0], 0, 0.0
    for i in range(3):
        new = batch(64)
        scores.copy_(new[0])
        labels.copy_(new[1])
        value.fill_(i)
        graph.replay()
        hits = [h + counted(*new, top)[0] for h, top in zip(hits, (1, 3), strict=True)]
        count, losses = count + counted(*new, 1)[1], losses + i
    found = {name: v.item() for name, v in metrics.compute().items()}
    assert found == {"acc": hits[0] / count, "top@3": hits[1] / count, "loss": losses / 3}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_updates_do_not_wait_for_the_device() -> None:
    scores, labels = (t.cuda() for t in batch(64))
    metrics = Metrics(
        {"acc": Accuracy(), "top@3": Accuracy(3), "loss": Loss(), "f": lambda o, y: o.sum()}
    ).to("cuda")
    soft, n = torch.rand(64, C, device="cuda"), torch.full((), 3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics.update(scores, labels, loss=scores.sum(), count=64)
        metrics.update(scores, soft, loss=scores.sum(), count=n)
        metrics.compute()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_capture_cannot_move_the_counters() -> None:
    scores, labels = (t.cuda() for t in batch(64))
    metric = Accuracy()
    with (
        pytest.raises(RuntimeError, match=r"call to\('cuda:0'\) before it"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        metric.update(scores, labels)
