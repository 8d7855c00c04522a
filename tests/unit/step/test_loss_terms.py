"""The denominator of every loss of torch.nn: full-batch loss = Σ nᵢ·lossᵢ / Σ nᵢ.

And what happens when Σ nᵢ is 0.
"""

import copy
import inspect
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.step.loss_terms import hugging_face_count, loss_terms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = 1e-12  # float64, at most 60 terms summed in another order
C = 4
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0], dtype=torch.float64)
Sample = Callable[[int], tuple[Any, ...]]
# torch warns about the mean of KLDivLoss.
MEAN_OF_KL = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def classes(*shape: int, ignored: int = -100) -> Tensor:
    return torch.where(torch.rand(shape) < 0.3, ignored, torch.randint(C, shape))


def probabilities(*shape: int) -> Tensor:
    return real(*shape).softmax(1)


def sign(*shape: int) -> Tensor:
    return torch.randint(2, shape) * 2.0 - 1.0


def sequences(n: int) -> tuple[Any, ...]:
    return (
        real(7, n, C).log_softmax(-1),
        torch.randint(1, C, (n, 3)),
        torch.full((n,), 7),
        torch.randint(1, 4, (n,)),
    )


CLASS_LOSS: list[tuple[dict[str, Any], Sample]] = [
    ({}, lambda n: (real(n, C), classes(n))),
    ({}, lambda n: (real(n, C, 5), classes(n, 5))),
    ({"weight": WEIGHT}, lambda n: (real(n, C, 3), classes(n, 3))),
    ({"weight": WEIGHT, "ignore_index": 2}, lambda n: (real(n, C), classes(n, ignored=2))),
]
SMOOTH: list[tuple[dict[str, Any], Sample]] = [
    ({"label_smoothing": 0.2}, CLASS_LOSS[1][1]),
    ({"label_smoothing": 0.2, "weight": WEIGHT}, CLASS_LOSS[2][1]),
    ({"label_smoothing": 0.2, "weight": WEIGHT}, lambda n: (real(n, C, 2), probabilities(n, C, 2))),
]
PAIR: list[tuple[dict[str, Any], Sample]] = [
    ({}, lambda n: (real(n, 3), real(n, 3))),
    ({}, lambda n: (real(n), real(n))),
]
CASES: dict[str, list[tuple[dict[str, Any], Sample]]] = {
    "CrossEntropyLoss": CLASS_LOSS + SMOOTH,
    "NLLLoss": CLASS_LOSS,
    "MSELoss": PAIR,
    "L1Loss": PAIR,
    "SmoothL1Loss": [*PAIR, ({"beta": 0.3}, PAIR[0][1])],
    "HuberLoss": [*PAIR, ({"delta": 0.3}, PAIR[0][1])],
    "BCELoss": [({"weight": WEIGHT}, lambda n: (real(n, C).sigmoid(), torch.rand(n, C).double()))],
    "BCEWithLogitsLoss": [
        ({"pos_weight": WEIGHT}, lambda n: (real(n, C), torch.rand(n, C).double()))
    ],
    "PoissonNLLLoss": [({"full": True}, lambda n: (real(n, 3), torch.randint(9, (n, 3)).double()))],
    "GaussianNLLLoss": [
        ({"full": True}, lambda n: (real(n, 3), real(n, 3), torch.rand(n, 1).double() + 0.1))
    ],
    "SoftMarginLoss": [({}, lambda n: (real(n, 3), sign(n, 3)))],
    "HingeEmbeddingLoss": [({"margin": 0.7}, lambda n: (real(n, 3), sign(n, 3)))],
    "KLDivLoss": [
        ({"log_target": True}, lambda n: (real(n, C).log_softmax(1), real(n, C).log_softmax(1)))
    ],
    "MarginRankingLoss": [({"margin": 0.1}, lambda n: (real(n), real(n), sign(n)))],
    "MultiMarginLoss": [
        ({"weight": WEIGHT, "p": 2}, lambda n: (real(n, C), torch.randint(C, (n,))))
    ],
    "MultiLabelMarginLoss": [
        ({}, lambda n: (real(n, C), torch.tensor([[3, 0, -1, 1]]).repeat(n, 1)))
    ],
    "MultiLabelSoftMarginLoss": [
        ({"weight": WEIGHT}, lambda n: (real(n, C), torch.randint(2, (n, C)).double()))
    ],
    "CosineEmbeddingLoss": [({"margin": 0.1}, lambda n: (real(n, 3), real(n, 3), sign(n)))],
    "TripletMarginLoss": [({"swap": True}, lambda n: (real(n, 3), real(n, 3), real(n, 3)))],
    "CTCLoss": [({}, sequences)],
}
# These need count=.
UNKNOWN = {"NLLLoss2d", "LinearCrossEntropyLoss", "TripletMarginWithDistanceLoss"}
# The functional form of each loss.
FUNCTIONS = {
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "PoissonNLLLoss": "poisson_nll_loss",
    "GaussianNLLLoss": "gaussian_nll_loss",
    "SoftMarginLoss": "soft_margin_loss",
    "KLDivLoss": "kl_div",
    "HingeEmbeddingLoss": "hinge_embedding_loss",
    "MarginRankingLoss": "margin_ranking_loss",
    "MultiMarginLoss": "multi_margin_loss",
    "MultiLabelMarginLoss": "multilabel_margin_loss",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss",
    "CosineEmbeddingLoss": "cosine_embedding_loss",
    "TripletMarginLoss": "triplet_margin_loss",
    "CTCLoss": "ctc_loss",
}
UNKNOWN_FUNCTIONS = {"linear_cross_entropy", "triplet_margin_with_distance_loss"}


def every_case() -> list[Any]:
    """Returns each case of each loss, as a module and as a function."""
    params = []
    for name, cases in CASES.items():
        make_module = getattr(nn, name)
        make_function = partial(partial, getattr(F, FUNCTIONS[name]))
        for i, (settings, sample) in enumerate(cases):
            for form, make_loss in (("module", make_module), ("function", make_function)):
                case_id = f"{name}-{i}-{form}"
                params.append(pytest.param(name, make_loss, settings, sample, id=case_id))
    return params


EVERY_CASE = pytest.mark.parametrize(("name", "make_loss", "settings", "sample"), every_case())


def split_sample(sample: Sample, name: str) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Returns a full batch, and the same cut into 1 + 4 + 2 + 5 rows."""
    full = sample(12)
    parts = []
    for i, tensor in enumerate(full):
        # CTCLoss takes log-probabilities of shape [T, B, C].
        batch_dim = 1 if name == "CTCLoss" and i == 0 else 0
        parts.append(tensor.split((1, 4, 2, 5), dim=batch_dim))
    return full, list(zip(*parts, strict=True))


def test_every_loss_of_torch_is_counted_or_listed_as_unknown() -> None:
    module_names = set()
    for name, value in vars(nn.modules.loss).items():
        is_module = inspect.isclass(value) and issubclass(value, nn.Module)
        if is_module and value.__module__ == nn.modules.loss.__name__ and name[0] != "_":
            module_names.add(value.__name__)
    assert module_names - UNKNOWN == set(CASES)

    function_names = set()
    for name, value in vars(F).items():
        is_public_function = name[0] != "_" and inspect.isroutine(value)
        if is_public_function and "reduction" in signature_parameters(value):
            function_names.add(name)
    assert function_names - UNKNOWN_FUNCTIONS == set(FUNCTIONS.values())
    assert set(FUNCTIONS) == set(CASES)

    for name in UNKNOWN_FUNCTIONS:
        if hasattr(F, name):
            assert not loss_terms(getattr(F, name)).is_known
    assert not loss_terms(nn.TripletMarginWithDistanceLoss()).is_known
    subclass = type("OwnMSELoss", (nn.MSELoss,), {})
    assert not loss_terms(subclass()).is_known, "a subclass may average otherwise"


def signature_parameters(function: Any) -> Any:
    """Returns the parameters, or () for a builtin without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


@MEAN_OF_KL
@EVERY_CASE
def test_the_full_mean_is_the_counted_mean_of_its_parts(
    name: str, make_loss: Any, settings: Any, sample: Sample
) -> None:
    reductions = ("mean", "batchmean") if name == "KLDivLoss" else ("mean",)
    for reduction in reductions:
        loss = make_loss(**settings, reduction=reduction)
        terms = loss_terms(loss)
        assert terms.is_known
        assert terms.count is not None

        full, parts = split_sample(sample, name)
        full_loss = loss(*full).item()
        total_count = 0.0
        total_loss = 0.0
        for part in parts:
            count = float(terms.count(*part))
            total_count += count
            if count:
                total_loss += count * loss(*part).item()
        assert math.isclose(total_loss / total_count, full_loss, rel_tol=EXACT)
        assert math.isclose(total_count, float(terms.count(*full)), rel_tol=EXACT)

        if terms.sum_loss is not None:
            mean_of_sum = terms.sum_loss(*full).item() / total_count
            assert math.isclose(mean_of_sum, full_loss, rel_tol=EXACT)
            unchanged = getattr(loss, "reduction", reduction) == reduction
            assert unchanged, "the user's loss must not change"


@EVERY_CASE
def test_a_sum_and_an_unreduced_loss_add_up_as_they_are(
    name: str, make_loss: Any, settings: Any, sample: Sample
) -> None:
    for reduction in ("sum", "none"):
        loss = make_loss(**settings, reduction=reduction)
        terms = loss_terms(loss)
        assert terms.is_known
        assert terms.count is None
        full, parts = split_sample(sample, name)
        sum_of_parts = sum(loss(*part).sum().item() for part in parts)
        assert math.isclose(sum_of_parts, loss(*full).sum().item(), rel_tol=EXACT)


@pytest.mark.parametrize("weight", [None, torch.rand(200).double() + 0.5], ids=["plain", "weights"])
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss, nn.NLLLoss, partial(partial, F.cross_entropy)]
)
def test_class_156_in_uint8_is_no_ignored_label(loss: Any, weight: Tensor | None) -> None:
    labels = torch.tensor([156, 3, 156, 199], dtype=torch.uint8)  # 156 is -100 modulo 256
    count = loss_terms(loss(weight=weight)).count
    assert count is not None
    class_weights = torch.ones(200).double() if weight is None else weight
    expected = sum(float(class_weights[k]) for k in (156, 3, 156, 199))
    assert math.isclose(float(count(real(4, 200), labels)), expected, rel_tol=EXACT)
    one_label = torch.tensor([156, -100, -100, -100])
    assert float(count(real(4, 200), one_label)) == class_weights[156]


@pytest.mark.parametrize(("kind", "expected"), [("ForCausalLM", 2), ("ForMaskedLM", 3)])
def test_token_156_in_uint8_is_no_ignored_token(kind: str, expected: int) -> None:
    net = nn.Linear(1, 1)
    net.loss_type = kind  # type: ignore[assignment]
    count = hugging_face_count(net)
    assert count is not None
    assert count({"labels": torch.tensor([[156, 7, 156]], dtype=torch.uint8)}) == expected


def test_uint8_labels_of_class_156_train_as_int64_does() -> None:
    x = torch.randn(8, 3)
    start = nn.Linear(3, 200)
    weights = {}
    for dtype in (torch.int64, torch.uint8):
        net = copy.deepcopy(start)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, accumulate=2)
        labels = torch.full((8,), 156, dtype=dtype)
        step(x[:4], labels[:4])
        assert step(x[4:], labels[4:]).updated
        weights[dtype] = net.weight.detach()
    assert torch.equal(weights[torch.int64], weights[torch.uint8])
    assert not torch.equal(weights[torch.int64], start.weight)


RAGGED: dict[str, Callable[[int, int], tuple[Any, ...]]] = {
    "CrossEntropyLoss": lambda n, t: (real(n, C, t), torch.randint(C, (n, t))),
    "NLLLoss": lambda n, t: (real(n, C, t), torch.randint(C, (n, t))),
    "MSELoss": lambda n, t: (real(n, t, 2), real(n, t, 2)),
    "KLDivLoss": lambda n, t: (real(n, t).log_softmax(1), real(n, t).softmax(1)),
    "MarginRankingLoss": lambda n, t: (real(n, t), real(n, t), sign(n, t)),
    "TripletMarginLoss": lambda n, t: (real(n, t, 3), real(n, t, 3), real(n, t, 3)),
    "MultiLabelSoftMarginLoss": lambda n, t: (real(n, t, C), torch.randint(2, (n, t, C)).double()),
    "MultiMarginLoss": lambda n, t: (real(n, C + t), torch.randint(C, (n,))),
}


@pytest.mark.parametrize("name", RAGGED)
@MEAN_OF_KL
def test_micro_batches_of_different_lengths_weigh_by_their_terms(name: str) -> None:
    """Each micro-batch has sequences of another length.

    The weighted mean must be the mean over all terms of the unreduced loss.
    """
    parts = [RAGGED[name](size, length) for size, length in ((2, 3), (3, 1), (1, 7))]
    mean_loss = getattr(nn, name)(reduction="mean")
    unreduced_loss = getattr(nn, name)(reduction="none")
    count_terms = loss_terms(mean_loss).count
    assert count_terms is not None
    total_count = 0.0
    total_loss = 0.0
    terms = []
    for part in parts:
        count = float(count_terms(*part))
        total_count += count
        total_loss += count * mean_loss(*part).item()
        terms.append(unreduced_loss(*part).flatten())
    expected = torch.cat(terms).mean().item()
    assert math.isclose(total_loss / total_count, expected, rel_tol=EXACT)


@pytest.mark.parametrize(
    ("loss", "arguments"),
    [
        (nn.CrossEntropyLoss(), (real(C), torch.tensor(2))),
        (nn.MultiMarginLoss(), (real(C), torch.tensor(2))),
        (nn.TripletMarginLoss(), (real(3), real(3), real(3))),
        (nn.CTCLoss(), (real(7, C), torch.tensor([1, 2]), torch.tensor(7), torch.tensor(2))),
    ],
)
def test_a_sample_without_a_batch_dimension_is_one_term(
    loss: nn.Module, arguments: tuple[Any, ...]
) -> None:
    count = loss_terms(loss).count
    assert count is not None
    assert float(count(*arguments)) == 1


def test_class_weights_that_come_with_the_batch_are_counted() -> None:
    """forward= may pass more than outputs and target: cross_entropy takes weight as its third."""
    net = nn.Linear(3, C).to(DEVICE, torch.float64)
    start = net.weight.detach().clone()
    step = hs.TrainStep(
        net,
        F.cross_entropy,
        torch.optim.SGD(net.parameters(), lr=1.0),
        precision="fp64",
        accumulate=2,
        forward=lambda net, x, y, weight: (net(x), y, weight),
    )
    x = real(8, 3).to(DEVICE)
    y = classes(8).to(DEVICE)
    weight = WEIGHT.to(DEVICE)
    F.cross_entropy(net(x), y, weight).backward()
    expected = start - net.weight.grad
    step(x[:5], y[:5], weight)
    step(x[5:], y[5:], weight)
    assert (net.weight - expected).abs().max() <= EXACT


class OwnMeanLoss(nn.Module):
    """A network that returns its own mean loss: NaN, 0/0, when every label is -100."""

    loss_type = "ForTokenClassification"

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, C)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten()))


def count_labels(batch: Any) -> Tensor:
    return (batch[1] != -100).sum()


def safe_mean(out: Tensor, target: Tensor) -> Tensor:
    """The usual guard against 0/0: finite, and 0, for a batch without labels."""
    return F.cross_entropy(out, target, reduction="sum") / (target != -100).sum().clamp(min=1)


def unsafe_mean(out: Tensor, target: Tensor) -> Tensor:
    """0/0 in the loss and in every gradient for a batch without labels."""
    mask = target != -100
    class_index = torch.where(mask, target, 0).unsqueeze(-1)
    log_likelihood = out.log_softmax(-1).gather(-1, class_index).squeeze(-1)
    return -(log_likelihood * mask).sum() / mask.sum()


WINDOWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cross entropy": (nn.CrossEntropyLoss(), {}),
    "function": (partial(F.cross_entropy, label_smoothing=0.1), {}),
    "count tensor": (unsafe_mean, {"count": count_labels}),
    "count number": (unsafe_mean, {"count": lambda batch: int(count_labels(batch))}),
    "count, finite loss": (safe_mean, {"count": count_labels}),
    "own loss": (None, {}),
    "class of weight 0": (nn.CrossEntropyLoss(weight=WEIGHT.float()), {}),
}


@pytest.mark.parametrize("empty", [False, True], ids=["ignored", "no rows"])
@pytest.mark.parametrize("updates_before", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_without_terms_moves_nothing(
    window: str, accumulate: int, decide: str, updates_before: int, empty: bool
) -> None:
    loss, options = copy.deepcopy(WINDOWS[window])
    if isinstance(loss, nn.Module):
        loss = loss.to(DEVICE)
    net = (OwnMeanLoss() if loss is None else nn.Linear(3, C)).to(DEVICE)
    # Any update would double this scale, any skip halve it.
    scale = hs.DynamicScale(init=8.0, interval=1)
    step = hs.TrainStep(
        net,
        loss,
        torch.optim.Adam(net.parameters(), lr=0.1, fused=True),
        precision=hs.Precision("fp32", scale=scale),
        accumulate=accumulate,
        decide=decide,
        **options,
    )

    def run_cycle(rows: int, label: int) -> hs.Record:
        x = torch.randn(rows, 3, device=DEVICE)
        labels = torch.full((rows,), label, device=DEVICE)
        for _ in range(accumulate):
            record = step({"x": x, "labels": labels}) if loss is None else step(x, labels)
        return record

    for _ in range(updates_before):
        assert run_cycle(4, 1).updated

    before = step.fingerprints()
    label_without_terms = 3 if window == "class of weight 0" else -100
    record = run_cycle(0 if empty else 4, label_without_terms)
    after = step.fingerprints()
    changed = []
    for name in after:
        # The cycle's own fields are copies of the buffers as the cycle began.
        if name.startswith("state.cycle."):
            continue
        if name not in before or not torch.equal(after[name], before[name]):
            changed.append(name)
    assert changed == ["state.steps"]
    assert not record.updated
    assert not record.skipped
    assert record.loss == record.cycle_loss == 0
    assert all(torch.isfinite(value).all() for value in record)
    assert run_cycle(4, 2).updated, "training goes on"
