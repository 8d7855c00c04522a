"""The denominator of a mean loss: what makes micro-batches of different sizes add up to the full batch."""

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


def _elements(s: Any, x: Tensor, target: Tensor, *rest: Any) -> int:
    return math.prod(torch.broadcast_shapes(x.shape, target.shape))


def _rows(s: Any, x: Tensor, *rest: Any) -> int:
    return x.numel() // x.shape[-1]


def _ranked(s: Any, x: Tensor, *rest: Any) -> int:
    return x.numel()


def _kl(s: Any, x: Tensor, target: Tensor) -> int:
    return x.shape[0] if s["reduction"] == "batchmean" else x.numel()


def _sequences(s: Any, log_probs: Tensor, *rest: Any) -> int:
    return log_probs.shape[1] if log_probs.dim() == 3 else 1


def _classes(s: Any, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Count:
    """Σ class weight over targets that are not ignored: a device value. Probability targets count every position."""
    if target.is_floating_point():
        return x.numel() // x.shape[1 if x.dim() > 1 else 0]
    target = target.long()  # in uint8, -100 would be class 156
    kept = target != s["ignore_index"]
    weight = s["weight"] if weight is None else weight
    if weight is None:
        return torch.sum(kept)
    each = weight.index_select(0, torch.where(kept, target, 0).flatten())
    return torch.sum(each.double() * kept.flatten())


_MODULES: dict[type[nn.Module], CountFn] = {
    nn.CrossEntropyLoss: _classes, nn.NLLLoss: _classes, nn.MSELoss: _elements, nn.L1Loss: _elements,
    nn.SmoothL1Loss: _elements, nn.HuberLoss: _elements, nn.BCELoss: _elements, nn.BCEWithLogitsLoss: _elements,
    nn.PoissonNLLLoss: _elements, nn.GaussianNLLLoss: _elements, nn.SoftMarginLoss: _elements,
    nn.HingeEmbeddingLoss: _elements, nn.KLDivLoss: _kl, nn.MarginRankingLoss: _ranked, nn.MultiMarginLoss: _rows,
    nn.MultiLabelMarginLoss: _rows, nn.MultiLabelSoftMarginLoss: _rows, nn.CosineEmbeddingLoss: _rows,
    nn.TripletMarginLoss: _rows, nn.CTCLoss: _sequences, CrossEntropy: _classes,
}  # fmt: skip
_FUNCTIONS: dict[Callable[..., Any], CountFn] = {
    F.cross_entropy: _classes, F.nll_loss: _classes, F.mse_loss: _elements, F.l1_loss: _elements,
    F.smooth_l1_loss: _elements, F.huber_loss: _elements, F.binary_cross_entropy: _elements,
    F.binary_cross_entropy_with_logits: _elements, F.poisson_nll_loss: _elements, F.gaussian_nll_loss: _elements,
    F.soft_margin_loss: _elements, F.hinge_embedding_loss: _elements, F.kl_div: _kl, F.margin_ranking_loss: _ranked,
    F.multi_margin_loss: _rows, F.multilabel_margin_loss: _rows, F.multilabel_soft_margin_loss: _rows,
    F.cosine_embedding_loss: _rows, F.triplet_margin_loss: _rows, F.ctc_loss: _sequences,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """How many terms a loss averages over, and whether classes have weights (which may be 0).

    `count` gives n from the loss's arguments (None: the loss is a sum). `summed` is the same loss as a sum, for
    micro-batches whose targets are all ignored, where the mean would be 0/0.
    """

    is_known: bool
    has_class_weights: bool = False
    count: CountFn | None = None
    sum_loss: Callable[..., Tensor] | None = None


def loss_terms(loss: Any) -> LossTerms:
    """What is known of `loss`, a module of torch.nn, a function of torch.nn.functional, or a partial of one."""
    settings, counter = _look_up(loss)
    if counter is None:
        return LossTerms(is_known=False)
    if settings["reduction"] in ("sum", "none"):
        return LossTerms(is_known=True)
    masked = _with_sum(loss) if counter is _classes else None
    live = isinstance(
        loss, nn.Module
    )  # a module's settings may change; a function's are read once: no tracer follows
    return LossTerms(
        is_known=True,
        has_class_weights=settings.get("weight") is not None,
        count=lambda *args: counter(_settings(loss) if live else settings, *args),
        sum_loss=masked,
    )


def _look_up(loss: Any) -> tuple[dict[str, Any], CountFn | None]:
    if isinstance(loss, nn.Module):
        return _settings(loss), _MODULES.get(
            type(loss)
        )  # a subclass may average otherwise: exact types only
    base = loss.func if isinstance(loss, partial) and not loss.args else loss
    settings = _settings(loss) if base in _FUNCTIONS else {}
    legacy = any(settings.get(k) is not None for k in ("size_average", "reduce"))
    return settings, None if legacy else _FUNCTIONS.get(base)


def _settings(loss: Any) -> dict[str, Any]:
    if isinstance(loss, nn.Module):
        return {name: getattr(loss, name, None) for name in ("reduction", "ignore_index", "weight")}
    base, given = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    defaults = {k: p.default for k, p in inspect.signature(base).parameters.items()}
    return {**defaults, **given}


def _with_sum(loss: Any) -> Callable[..., Tensor]:
    if not isinstance(loss, nn.Module):
        return partial(loss, reduction="sum")

    def summed(*args: Any) -> Tensor:
        before = loss.reduction
        loss.reduction = "sum"  # type: ignore[assignment]
        try:
            out: Tensor = loss(*args)
            return out
        finally:
            loss.reduction = before

    return summed


def hugging_face_count(net: nn.Module) -> Callable[[Any], Count] | None:
    """The count of a Hugging Face model's own loss from the batch's labels, by the model's declared loss type."""
    kind, name = getattr(net, "loss_type", None), type(net).__name__
    whole = getattr(getattr(net, "config", None), "is_encoder_decoder", False)
    shifts = (
        kind == "ForConditionalGeneration" and not whole
    )  # image-text models; T5 and Whisper do not shift
    if kind == "ForCausalLM" or shifts or name in ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel"):
        return lambda batch: (
            batch["labels"][..., 1:].long() != -100
        ).sum()  # position t predicts label t+1
    if kind in ("ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration"):
        return lambda batch: (batch["labels"].long() != -100).sum()
    if kind == "ForSequenceClassification":
        return lambda batch: batch["labels"].numel()
    return None
