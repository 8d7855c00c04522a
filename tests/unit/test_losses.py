"""Cross entropy with torch's smoothing and MindSpore's, against torch and sums in numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.losses import CrossEntropy
from halfstep.step.loss_terms import loss_terms

C = 5
TOLERANCE = 1e-13  # float64: at most 60 terms summed in another order
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0, 1.5], dtype=torch.float64)
SHAPES = {"rows": (12,), "sequences": (4, 3), "images": (2, 3, 2)}


def make_logits_and_target(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    logits = torch.randn(shape[0], C, *shape[1:], dtype=dtype) * 3
    return logits, torch.where(torch.rand(shape) < 0.25, -100, torch.randint(C, shape))


def loss_by_definition(
    logits: Tensor,
    target: Tensor,
    on: float,
    off: float,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Any:
    """-Σ_c w_c·t_c·log p_c with t = on at the target, off elsewhere; mean over Σ w[target]."""
    z = np.moveaxis(logits.double().numpy(), 1, -1).reshape(-1, C)
    y = target.numpy().ravel()
    w = np.ones(C) if weight is None else weight.double().numpy()
    z = z - z.max(1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    has_target = y != -100
    t = np.where(np.arange(C) == y[:, None], on, off)
    losses = np.where(has_target, -(t * w * log_p).sum(1), 0.0)
    if reduction == "none":
        return losses.reshape(target.shape)
    if reduction == "sum":
        return losses.sum()
    target_weights = w[np.where(has_target, y, 0)] * has_target
    return losses.sum() / target_weights.sum()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_over_the_others_is_mindspores(
    smoothing: float, shape: str, weight: Tensor | None, reduction: Any
) -> None:
    logits, target = make_logits_and_target(SHAPES[shape])
    options = {"smoothing_over": "others", "classes": C, "weight": weight, "reduction": reduction}
    loss = CrossEntropy(smoothing, **options)(logits, target)
    expected = loss_by_definition(
        logits, target, 1 - smoothing, smoothing / (C - 1), weight, reduction
    )
    np.testing.assert_allclose(loss.numpy(), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_over_all_is_torchs(
    smoothing: float, shape: str, weight: Tensor | None, reduction: Any
) -> None:
    logits, target = make_logits_and_target(SHAPES[shape])
    loss = CrossEntropy(smoothing, weight=weight, reduction=reduction)(logits, target)
    theirs = F.cross_entropy(logits, target, weight, label_smoothing=smoothing, reduction=reduction)
    assert torch.equal(loss, theirs)
    expected = loss_by_definition(
        logits, target, 1 - smoothing + smoothing / C, smoothing / C, weight, reduction
    )
    np.testing.assert_allclose(loss.numpy(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_an_off_value_of_its_own() -> None:
    """MindSpore's program divides by 1001 classes less 1, whatever the network has.

    Its targets sum to less than 1.
    """
    logits, target = make_logits_and_target((12,))
    loss = CrossEntropy(0.1, smoothing_over="others", off_value=0.1 / 1000)(logits, target)
    assert loss.item() == pytest.approx(
        loss_by_definition(logits, target, 0.9, 0.1 / 1000), rel=TOLERANCE
    )


def test_the_two_forms_differ_and_meet_at_0() -> None:
    logits, target = make_logits_and_target((12,))
    over_all = CrossEntropy(0.2, smoothing_over="all")(logits, target)
    over_others = CrossEntropy(0.2, smoothing_over="others")(logits, target)
    assert (over_all - over_others).abs() > 1e-3
    over_all = CrossEntropy(0.0, smoothing_over="all")(logits, target)
    over_others = CrossEntropy(0.0, smoothing_over="others")(logits, target)
    assert torch.equal(over_all, over_others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothing_over", ["all", "others"])
def test_half_logits_are_computed_in_float32(dtype: torch.dtype, smoothing_over: Any) -> None:
    logits, target = make_logits_and_target((12,), dtype)
    # a loss of about 60, beyond what half resolves below 1/32
    logits[0, 1] = -60.0
    target[0] = 1
    loss = CrossEntropy(0.1, smoothing_over=smoothing_over)
    value = loss(logits, target)
    assert value.dtype == torch.float32
    assert torch.equal(value, loss(logits.float(), target))
    assert not torch.equal(value.double(), value.to(dtype).double())


def test_the_gradient_is_softmax_minus_target() -> None:
    logits, target = make_logits_and_target((12,))
    target = target.clamp(min=0)
    logits.requires_grad_()
    CrossEntropy(0.3, smoothing_over="others")(logits, target).backward()
    targets = torch.full((12, C), 0.3 / (C - 1), dtype=torch.float64).scatter(
        1, target[:, None], 0.7
    )
    assert logits.grad is not None
    # a few ulp of numbers below 1/12
    assert (logits.grad - (logits.softmax(1) - targets) / 12).abs().max() < 1e-15


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
def test_labels_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    logits, target = make_logits_and_target((12,))
    target = target.clamp(min=0)
    assert torch.equal(CrossEntropy()(logits, target.to(dtype)), F.cross_entropy(logits, target))


def test_probabilities_are_smoothed_as_class_numbers_are() -> None:
    logits, target = make_logits_and_target((12,))
    target = target.clamp(min=0)
    for smoothing_over in ("all", "others"):
        loss = CrossEntropy(0.2, smoothing_over=smoothing_over)  # type: ignore[arg-type]
        soft = loss(logits, F.one_hot(target, C).float())
        assert soft.item() == pytest.approx(loss(logits, target).item(), rel=TOLERANCE)


def test_one_sample_without_a_batch_dimension() -> None:
    logits = torch.randn(C)
    target = torch.tensor(2)
    assert torch.equal(
        CrossEntropy(0.1)(logits, target), F.cross_entropy(logits, target, label_smoothing=0.1)
    )


def test_class_weights_follow_the_logits_dtype_and_the_module() -> None:
    loss = CrossEntropy(weight=WEIGHT.float(), ignore_index=2)
    assert loss.state_dict().keys() == {"weight"}
    logits, target = make_logits_and_target((12,))
    target = target.clamp(min=0)
    assert torch.equal(
        loss(logits, target), F.cross_entropy(logits, target, WEIGHT, ignore_index=2)
    )


BAD_SETTINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: CrossEntropy(1.0), "smoothing from 0 to below 1, received 1.0"),
    (lambda: CrossEntropy(-0.1), "received -0.1"),
    (
        lambda: CrossEntropy(0.1, smoothing_over="rest"),  # type: ignore[arg-type]
        "'all' or 'others', received 'rest'",
    ),
    (lambda: CrossEntropy(0.1, off_value=0.1), "smoothing_over='others', received 0.1 and 'all'"),
    (
        lambda: CrossEntropy(0.1, off_value=-1.0, smoothing_over="others"),
        "off_value from 0 to below 1",
    ),
    (lambda: CrossEntropy(classes=0), "1 or more classes"),
    (
        lambda: CrossEntropy(reduction="batch"),  # type: ignore[arg-type]
        "'mean', 'sum' or 'none', received 'batch'",
    ),
    (
        lambda: CrossEntropy(weight=torch.ones(2, 2)),
        r"a 1-D tensor of weights, one per class, received shape \(2, 2\)",
    ),
    (
        lambda: CrossEntropy(weight=torch.ones(3), classes=4),
        r"4 weights, one per class, received shape \(3,\)",
    ),
    (
        lambda: CrossEntropy(0.6, smoothing_over="others", classes=2),
        "leaves 0.4 on the target and 0.6 on each other",
    ),
    (lambda: CrossEntropy(0.1, smoothing_over="others", classes=1), "needs 2 or more, received 1"),
    (
        lambda: CrossEntropy(classes=3)(torch.ones(2, 4), torch.tensor([0, 1])),
        "logits of 3 classes, received 4",
    ),
]


@pytest.mark.parametrize(("make", "match"), BAD_SETTINGS, ids=range(len(BAD_SETTINGS)))
def test_bad_settings_are_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_it_trains_like_its_torch_twin_bit_for_bit() -> None:
    def train(loss: Any) -> Tensor:
        torch.manual_seed(3)
        net = nn.Linear(3, C)
        step = hs.TrainStep(net, loss, torch.optim.SGD(net.parameters(), lr=0.5))
        x = torch.randn(8, 3)
        y = torch.randint(C, (8,))
        for _ in range(5):
            step(x, y)
        return net.weight.detach()

    assert torch.equal(train(CrossEntropy(0.1)), train(nn.CrossEntropyLoss(label_smoothing=0.1)))
    assert not torch.equal(
        train(CrossEntropy(0.1, smoothing_over="others")), train(CrossEntropy(0.1))
    )


@pytest.mark.parametrize("smoothing_over", ["all", "others"])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
def test_micro_batches_of_any_size_give_the_full_batch(
    weight: Tensor | None, smoothing_over: Any
) -> None:
    x = torch.randn(12, 3, dtype=torch.float64)
    _, y = make_logits_and_target((12,))
    y[:3] = -100  # the first micro-batch holds no terms at all

    def train(sizes: list[int]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        net = nn.Linear(3, C).double()
        loss = CrossEntropy(0.2, smoothing_over=smoothing_over, weight=weight)
        step = hs.TrainStep(
            net,
            loss,
            torch.optim.SGD(net.parameters(), lr=0.5),
            precision="fp64",
            accumulate=len(sizes),
        )
        records = [step(*part) for part in zip(x.split(sizes), y.split(sizes), strict=True)]
        assert loss.reduction == "mean"
        return net.weight.detach(), records[-1].cycle_loss

    for full, accumulated in zip(train([12]), train([3, 1, 6, 2]), strict=True):
        assert (full - accumulated).abs().max() <= TOLERANCE


def test_the_step_knows_what_it_averages() -> None:
    assert loss_terms(CrossEntropy(weight=WEIGHT)).has_class_weights
    for reduction in ("sum", "none"):
        terms = loss_terms(CrossEntropy(reduction=reduction))  # type: ignore[arg-type]
        assert (terms.is_known, terms.count) == (True, None)
