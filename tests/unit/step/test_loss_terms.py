"""The denominator of every loss of torch.nn: full-batch loss = Σ nᵢ·lossᵢ / Σ nᵢ, and what happens when Σ nᵢ is 0."""

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
MEAN_OF_KL = pytest.mark.filterwarnings(
    "ignore:reduction. 'mean' divides:UserWarning"
)  # torch's remark on KLDivLoss


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
UNKNOWN = {
    "NLLLoss2d",
    "LinearCrossEntropyLoss",
    "TripletMarginWithDistanceLoss",
}  # count= is needed for these
FUNCTIONS = {  # the functional form of each
    "CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll_loss", "MSELoss": "mse_loss", "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss", "HuberLoss": "huber_loss", "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits", "PoissonNLLLoss": "poisson_nll_loss",
    "GaussianNLLLoss": "gaussian_nll_loss", "SoftMarginLoss": "soft_margin_loss", "KLDivLoss": "kl_div",
    "HingeEmbeddingLoss": "hinge_embedding_loss", "MarginRankingLoss": "margin_ranking_loss",
    "MultiMarginLoss": "multi_margin_loss", "MultiLabelMarginLoss": "multilabel_margin_loss",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss", "CosineEmbeddingLoss": "cosine_embedding_loss",
    "TripletMarginLoss": "triplet_margin_loss", "CTCLoss": "ctc_loss",
}  # fmt: skip
UNKNOWN_FUNCTIONS = {"linear_cross_entropy", "triplet_margin_with_distance_loss"}


def forms(name: str) -> list[tuple[str, Any]]:
    return [
        ("module", getattr(nn, name)),
        ("function", partial(partial, getattr(F, FUNCTIONS[name]))),
    ]


EVERY = [
    pytest.param(name, make, settings, sample, id=f"{name}-{i}-{form}")
    for name, cases in CASES.items()
    for i, (settings, sample) in enumerate(cases)
    for form, make in forms(name)
]


def pieces(sample: Sample, name: str) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """A full batch, and the same cut into 1 + 4 + 2 + 5 rows."""
    full, sizes = sample(12), (1, 4, 2, 5)
    parts = [
        t.split(sizes, dim=1 if name == "CTCLoss" and i == 0 else 0) for i, t in enumerate(full)
    ]
    return full, list(zip(*parts, strict=True))


def test_every_loss_of_torch_is_counted_or_listed_as_unknown() -> None:
    classes = [
        c for c in vars(nn.modules.loss).values() if inspect.isclass(c) and issubclass(c, nn.Module)
    ]
    modules = {
        c.__name__
        for c in classes
        if c.__module__ == nn.modules.loss.__name__ and c.__name__[0] != "_"
    }
    assert modules - UNKNOWN == set(CASES)
    public = {n: f for n, f in vars(F).items() if n[0] != "_"}
    named = {n for n, f in public.items() if inspect.isroutine(f) and "reduction" in parameters(f)}
    assert named - UNKNOWN_FUNCTIONS == set(FUNCTIONS.values())
    assert set(FUNCTIONS) == set(CASES)
    assert not any(
        loss_terms(getattr(F, name)).is_known for name in UNKNOWN_FUNCTIONS if hasattr(F, name)
    )
    assert not loss_terms(nn.TripletMarginWithDistanceLoss()).is_known
    assert not loss_terms(type("Mine", (nn.MSELoss,), {})()).is_known, (
        "a subclass may average otherwise"
    )


def parameters(function: Any) -> Any:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


@MEAN_OF_KL
@pytest.mark.parametrize(("name", "make", "settings", "sample"), EVERY)
def test_the_full_mean_is_the_counted_mean_of_its_parts(
    name: str, make: Any, settings: Any, sample: Sample
) -> None:
    for reduction in ("mean", "batchmean") if name == "KLDivLoss" else ("mean",):
        loss = make(**settings, reduction=reduction)
        terms = loss_terms(loss)
        assert terms.is_known
        assert terms.count is not None
        full, parts = pieces(sample, name)
        counts = [float(terms.count(*part)) for part in parts]
        sums = [n * loss(*part).item() for n, part in zip(counts, parts, strict=True) if n]
        assert math.isclose(sum(sums) / sum(counts), loss(*full).item(), rel_tol=EXACT)
        assert math.isclose(sum(counts), float(terms.count(*full)), rel_tol=EXACT)
        if terms.sum_loss is not None:
            assert math.isclose(
                terms.sum_loss(*full).item() / sum(counts), loss(*full).item(), rel_tol=EXACT
            )
            assert getattr(loss, "reduction", reduction) == reduction, (
                "the user's loss is left as it was"
            )


@pytest.mark.parametrize(("name", "make", "settings", "sample"), EVERY)
def test_a_sum_and_an_unreduced_loss_add_up_as_they_are(
    name: str, make: Any, settings: Any, sample: Sample
) -> None:
    for reduction in ("sum", "none"):
        loss = make(**settings, reduction=reduction)
        terms = loss_terms(loss)
        assert (terms.is_known, terms.count) == (True, None)
        full, parts = pieces(sample, name)
        assert math.isclose(
            sum(loss(*p).sum().item() for p in parts), loss(*full).sum().item(), rel_tol=EXACT
        )


@pytest.mark.parametrize("weight", [None, torch.rand(200).double() + 0.5], ids=["plain", "weights"])
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss, nn.NLLLoss, partial(partial, F.cross_entropy)]
)
def test_class_156_in_uint8_is_no_ignored_label(loss: Any, weight: Tensor | None) -> None:
    labels = torch.tensor([156, 3, 156, 199], dtype=torch.uint8)  # 156 is -100 modulo 256
    count = loss_terms(loss(weight=weight)).count
    assert count is not None
    expected = 4.0 if weight is None else sum(float(weight[k]) for k in (156, 3, 156, 199))
    assert math.isclose(float(count(real(4, 200), labels)), expected, rel_tol=EXACT)
    assert float(count(real(4, 200), torch.tensor([156, -100, -100, -100]))) == (
        1 if weight is None else weight[156]
    )


@pytest.mark.parametrize(("kind", "expected"), [("ForCausalLM", 2), ("ForMaskedLM", 3)])
def test_token_156_in_uint8_is_no_ignored_token(kind: str, expected: int) -> None:
    net = nn.Linear(1, 1)
    net.loss_type = kind  # type: ignore[assignment]
    count = hugging_face_count(net)
    assert count is not None
    assert count({"labels": torch.tensor([[156, 7, 156]], dtype=torch.uint8)}) == expected


def test_uint8_labels_of_class_156_train_as_int64_does() -> None:
    x, labels, weights = torch.randn(8, 3), torch.full((8,), 156), []
    start = nn.Linear(3, 200)
    for dtype in (torch.int64, torch.uint8):
        net = copy.deepcopy(start)
        step = hs.TrainStep(
            net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), accumulate=2
        )
        records = [step(a, b) for a, b in zip(x.split(4), labels.to(dtype).split(4), strict=True)]
        assert records[-1].updated
        weights.append(net.weight.detach())
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], start.weight)


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
    """Sequences of another length in each micro-batch: the mean over all terms, read off the unreduced loss."""
    parts = [RAGGED[name](n, t) for n, t in ((2, 3), (3, 1), (1, 7))]
    mean, each = (getattr(nn, name)(reduction=reduction) for reduction in ("mean", "none"))
    count = loss_terms(mean).count
    assert count is not None
    weighted = sum(float(count(*p)) * mean(*p).item() for p in parts) / sum(
        float(count(*p)) for p in parts
    )
    assert math.isclose(
        weighted, torch.cat([each(*p).flatten() for p in parts]).mean().item(), rel_tol=EXACT
    )


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
    """forward= may hand more than outputs and target to the loss: F.cross_entropy's third argument is its weight."""
    net = nn.Linear(3, C).to(DEVICE, torch.float64)
    start = net.weight.detach().clone()
    batches = [(real(n, 3).to(DEVICE), classes(n).to(DEVICE), WEIGHT.to(DEVICE)) for n in (5, 3)]
    options = {"precision": "fp64", "accumulate": 2, "forward": lambda net, x, y, w: (net(x), y, w)}
    step = hs.TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters(), lr=1.0), **options)
    x, y, w = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]), batches[0][2]
    F.cross_entropy(net(x), y, w).backward()
    expected = start - net.weight.grad
    for batch in batches:
        step(*batch)
    assert (net.weight - expected).abs().max() <= EXACT


class OwnMean(nn.Module):
    """A network that returns its own mean loss: NaN, 0/0, when every label is -100."""

    loss_type = "ForTokenClassification"

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, C)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten()))


def kept(batch: Any) -> Tensor:
    return (batch[1] != -100).sum()


def safe_mean(out: Tensor, target: Tensor) -> Tensor:
    """The usual guard against 0/0: finite, and 0, for a batch without labels."""
    return F.cross_entropy(out, target, reduction="sum") / (target != -100).sum().clamp(min=1)


def mean(out: Tensor, target: Tensor) -> Tensor:
    """0/0 in the loss and in every gradient for a batch without labels."""
    mask = target != -100
    each = out.log_softmax(-1).gather(-1, torch.where(mask, target, 0).unsqueeze(-1)).squeeze(-1)
    return -(each * mask).sum() / mask.sum()


WINDOWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cross entropy": (nn.CrossEntropyLoss(), {}),
    "function": (partial(F.cross_entropy, label_smoothing=0.1), {}),
    "count tensor": (mean, {"count": kept}),
    "count number": (mean, {"count": lambda batch: int(kept(batch))}),
    "count, finite loss": (safe_mean, {"count": kept}),
    "own loss": (None, {}),
    "class of weight 0": (nn.CrossEntropyLoss(weight=WEIGHT.float()), {}),
}


@pytest.mark.parametrize("empty", [False, True], ids=["ignored", "no rows"])
@pytest.mark.parametrize("warm", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_without_terms_moves_nothing(
    window: str, accumulate: int, decide: str, warm: int, empty: bool
) -> None:
    loss, options = copy.deepcopy(WINDOWS[window])
    loss = loss.to(DEVICE) if isinstance(loss, nn.Module) else loss
    net = (OwnMean() if loss is None else nn.Linear(3, C)).to(DEVICE)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=True)
    scale = hs.DynamicScale(init=8.0, interval=1)  # any update would double it, any skip halve it
    step = hs.TrainStep(net, loss, optimizer, precision=hs.Precision("fp32", scale=scale), accumulate=accumulate,
                        decide=decide, **options)  # fmt: skip

    def cycle(rows: int, target: int) -> hs.Record:
        batch = (torch.randn(rows, 3, device=DEVICE), torch.full((rows,), target, device=DEVICE))
        arguments = ({"x": batch[0], "labels": batch[1]},) if loss is None else batch
        return [step(*arguments) for _ in range(accumulate)][-1]

    for _ in range(warm):
        assert cycle(4, 1).updated
    before = step.fingerprints()
    record = cycle(0 if empty else 4, 3 if window == "class of weight 0" else -100)
    after = step.fingerprints()
    kept = [
        name for name in after if not name.startswith("state.cycle.")
    ]  # copies of buffers as the cycle began
    assert [n for n in kept if n not in before or not torch.equal(after[n], before[n])] == [
        "state.steps"
    ]
    assert not record.updated
    assert not record.skipped
    assert record.loss == record.cycle_loss == 0
    assert all(torch.isfinite(value).all() for value in record)
    assert cycle(4, 2).updated, "training goes on"
