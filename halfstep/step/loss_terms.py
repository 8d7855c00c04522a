"""How many terms a mean loss averages.

With that number micro-batches of different sizes add up to the full batch: each is weighted by its
terms. It is known for the losses of torch.nn and torch.nn.functional, for halfstep's cross entropy
and for the usual losses inside Hugging Face models.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.losses import CrossEntropy

Count: TypeAlias = int | float | Tensor
CountFn: TypeAlias = Callable[..., Count]

HF_IGNORED_LABEL = -100


# Each function counts the terms of some losses: (settings of the loss, *its arguments) → n.


def _count_elements(settings: Any, x: Tensor, target: Tensor, *others: Any) -> int:
    return math.prod(torch.broadcast_shapes(x.shape, target.shape))


def _count_rows(settings: Any, x: Tensor, *others: Any) -> int:
    return x.numel() // x.shape[-1]


def _count_ranked_pairs(settings: Any, x: Tensor, *others: Any) -> int:
    return x.numel()


def _count_kl_terms(settings: Any, x: Tensor, target: Tensor) -> int:
    return x.shape[0] if settings["reduction"] == "batchmean" else x.numel()


def _count_sequences(settings: Any, log_probs: Tensor, *others: Any) -> int:
    return log_probs.shape[1] if log_probs.dim() == 3 else 1


def _count_class_targets(
    settings: Any, x: Tensor, target: Tensor, weight: Tensor | None = None
) -> Count:
    """The sum of class weights over targets that are not ignored, as a device value.

    Targets that are probabilities count every position.
    """
    if target.is_floating_point():
        return x.numel() // x.shape[1 if x.dim() > 1 else 0]
    target = target.long()  # in uint8, -100 would be class 156
    counted = target != settings["ignore_index"]
    weight = settings["weight"] if weight is None else weight
    if weight is None:
        return torch.sum(counted)
    target_weights = weight.index_select(0, torch.where(counted, target, 0).flatten())
    return torch.sum(target_weights.double() * counted.flatten())


_MODULE_COUNTS: dict[type[nn.Module], CountFn] = {
    CrossEntropy: _count_class_targets,
    nn.BCELoss: _count_elements,
    nn.BCEWithLogitsLoss: _count_elements,
    nn.CTCLoss: _count_sequences,
    nn.CosineEmbeddingLoss: _count_rows,
    nn.CrossEntropyLoss: _count_class_targets,
    nn.GaussianNLLLoss: _count_elements,
    nn.HingeEmbeddingLoss: _count_elements,
    nn.HuberLoss: _count_elements,
    nn.KLDivLoss: _count_kl_terms,
    nn.L1Loss: _count_elements,
    nn.MSELoss: _count_elements,
    nn.MarginRankingLoss: _count_ranked_pairs,
    nn.MultiLabelMarginLoss: _count_rows,
    nn.MultiLabelSoftMarginLoss: _count_rows,
    nn.MultiMarginLoss: _count_rows,
    nn.NLLLoss: _count_class_targets,
    nn.PoissonNLLLoss: _count_elements,
    nn.SmoothL1Loss: _count_elements,
    nn.SoftMarginLoss: _count_elements,
    nn.TripletMarginLoss: _count_rows,
}
_FUNCTION_COUNTS: dict[Callable[..., Any], CountFn] = {
    F.binary_cross_entropy: _count_elements,
    F.binary_cross_entropy_with_logits: _count_elements,
    F.cosine_embedding_loss: _count_rows,
    F.cross_entropy: _count_class_targets,
    F.ctc_loss: _count_sequences,
    F.gaussian_nll_loss: _count_elements,
    F.hinge_embedding_loss: _count_elements,
    F.huber_loss: _count_elements,
    F.kl_div: _count_kl_terms,
    F.l1_loss: _count_elements,
    F.margin_ranking_loss: _count_ranked_pairs,
    F.mse_loss: _count_elements,
    F.multi_margin_loss: _count_rows,
    F.multilabel_margin_loss: _count_rows,
    F.multilabel_soft_margin_loss: _count_rows,
    F.nll_loss: _count_class_targets,
    F.poisson_nll_loss: _count_elements,
    F.smooth_l1_loss: _count_elements,
    F.soft_margin_loss: _count_elements,
    F.triplet_margin_loss: _count_rows,
}

# Losses that pair each output with the target at its place.
_ELEMENTWISE_COUNTS = (_count_elements, _count_kl_terms)
ELEMENTWISE_FUNCTIONS = frozenset(
    function for function, count in _FUNCTION_COUNTS.items() if count in _ELEMENTWISE_COUNTS
)


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What is known of the terms of a loss."""

    is_known: bool
    is_elementwise: bool = False  # each output is compared with the target at its place
    has_class_weights: bool = False  # which may be 0
    count: CountFn | None = None  # the loss's arguments → n; None: the loss is a sum
    sum_loss: Callable[..., Tensor] | None = None
    """The same loss as a sum: where all targets are ignored, the mean is 0/0."""


def loss_terms(loss: Any) -> LossTerms:
    """What is known of a loss: a module of torch.nn, a function of torch.nn.functional, or a
    partial of one."""
    settings, count_fn = _find_count_fn(loss)
    if count_fn is None:
        return LossTerms(is_known=False)
    is_elementwise = count_fn in _ELEMENTWISE_COUNTS
    if settings["reduction"] in ("sum", "none"):
        return LossTerms(is_known=True, is_elementwise=is_elementwise)

    def count(*arguments: Any) -> Count:
        # A module's settings may change. A function's are read once: no tracer follows `inspect`.
        current = _loss_settings(loss) if isinstance(loss, nn.Module) else settings
        return count_fn(current, *arguments)

    return LossTerms(
        is_known=True,
        is_elementwise=is_elementwise,
        has_class_weights=settings.get("weight") is not None,
        count=count,
        sum_loss=_as_sum(loss) if count_fn is _count_class_targets else None,
    )


def _find_count_fn(loss: Any) -> tuple[dict[str, Any], CountFn | None]:
    if isinstance(loss, nn.Module):
        # Exact types only: a subclass may average otherwise.
        return _loss_settings(loss), _MODULE_COUNTS.get(type(loss))
    function = loss.func if isinstance(loss, partial) and not loss.args else loss
    if function not in _FUNCTION_COUNTS:
        return {}, None
    settings = _loss_settings(loss)
    has_legacy_setting = any(settings.get(name) is not None for name in ("size_average", "reduce"))
    return settings, None if has_legacy_setting else _FUNCTION_COUNTS[function]


def _loss_settings(loss: Any) -> dict[str, Any]:
    if isinstance(loss, nn.Module):
        return {name: getattr(loss, name, None) for name in ("reduction", "ignore_index", "weight")}
    function = loss
    keywords: dict[str, Any] = {}
    if isinstance(loss, partial):
        function = loss.func
        keywords = loss.keywords
    parameters = inspect.signature(function).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return {**defaults, **keywords}


def _as_sum(loss: Any) -> Callable[..., Tensor]:
    """The same loss with reduction="sum"."""
    if not isinstance(loss, nn.Module):
        return partial(loss, reduction="sum")

    def sum_loss(*arguments: Any) -> Tensor:
        reduction = loss.reduction
        loss.reduction = "sum"  # type: ignore[assignment]
        try:
            out: Tensor = loss(*arguments)
            return out
        finally:
            loss.reduction = reduction

    return sum_loss


def hugging_face_count(net: nn.Module) -> Callable[[Any], Count] | None:
    """The count for a Hugging Face model's own loss, from the labels of the batch.

    The model's declared loss type says which labels count; None for a type that is not known.
    """
    loss_type = getattr(net, "loss_type", None)
    has_decoder = getattr(getattr(net, "config", None), "is_encoder_decoder", False)

    # Position t predicts label t + 1. Of conditional generation, image-text models shift so;
    # T5 and Whisper, with a decoder of their own, do not.
    shifts_labels = (
        loss_type == "ForCausalLM"
        or (loss_type == "ForConditionalGeneration" and not has_decoder)
        or type(net).__name__ in ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel")
    )
    if shifts_labels:
        return lambda batch: (batch["labels"][..., 1:].long() != HF_IGNORED_LABEL).sum()
    if loss_type in ("ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration"):
        return lambda batch: (batch["labels"].long() != HF_IGNORED_LABEL).sum()
    if loss_type == "ForSequenceClassification":
        return lambda batch: batch["labels"].numel()
    return None
