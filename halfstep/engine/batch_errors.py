"""What a network or a loss raised on a batch, in the batch's own words: where, which column, and the line to write.

Nothing here runs unless a step has failed, so that it costs nothing until then.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import NonFiniteError, UncapturableError
from halfstep.step import EvalStep
from halfstep.step.accumulate import Accumulate
from halfstep.step.objective import Objective

_LOSSES = {
    Objective.loss_and_count.__code__,
    EvalStep._evaluate.__code__,
}  # where `taken` holds the arguments of the loss
_ASSERTED = "the usual cause is a label or an index out of range: with the network on a CPU, fit names the batch and the label"
_BY_NUMBER = (nn.Embedding, nn.EmbeddingBag)  # layers that take whole numbers


class Column(NamedTuple):
    """One part of a batch. `named`: it has a name in a data set of ours, so that map() can change it."""

    name: str
    value: Any
    named: bool

    def __str__(self) -> str:
        return f"{self.name} ({kind(self.value)})"


class Fix(NamedTuple):
    """A change to a column: as a transform of hs.data, and as what to do to a tensor x."""

    transform: str
    plain: str


def explain_batch_error(
    error: Exception,
    where: str,
    args: Sequence[Any] | None,
    names: Sequence[str],
    net: nn.Module | None,
) -> None:
    """Raises what is known to be wrong with the batch as a ValueError, `error` its cause; else adds a note to it.

    Without `args`, the batch is the one that the step had in hand.
    """
    if isinstance(error, NonFiniteError) and args is not None:
        error.args = (f"{error}{_not_finite(_columns(args, names))}", *error.args[1:])
    if isinstance(error, NonFiniteError | UncapturableError):  # they name their place themselves
        return
    if "device-side assert" in str(
        error
    ):  # it comes late, and nothing can be read from the device any more
        return error.add_note(_ASSERTED)
    frames, said = list(_frames(error.__traceback__)), None
    columns = _columns(_in_hand(frames) if args is None else args, names)
    with suppress(Exception):  # what looks at an error may not hide it behind one of its own
        said = _of_loss(frames, columns) or (
            _of_input(frames, columns, net) if net is not None else None
        )
    if said is not None:
        raise ValueError(f"{where}: {said}") from error
    error.add_note(
        f"at {where}" + (f", on a batch of {', '.join(map(str, columns))}" if columns else "")
    )


def kind(value: Any) -> str:
    """dtype and shape, as one says them."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    shape = getattr(value, "shape", None)
    size = (
        f" {list(shape)}"
        if shape is not None
        else f" of {len(value)}"
        if isinstance(value, list | tuple)
        else ""
    )
    return type(value).__name__ + size


def _columns(args: Sequence[Any], names: Sequence[str]) -> list[Column]:
    if len(args) == 1 and isinstance(args[0], dict):
        return [Column(repr(name), value, name in names) for name, value in args[0].items()]
    if len(names) == len(args):
        return [Column(repr(name), value, True) for name, value in zip(names, args, strict=True)]
    return [Column(f"item {i}", value, False) for i, value in enumerate(args)]


def _in_hand(frames: list[FrameType]) -> Sequence[Any]:
    found = (f.f_locals.get("batch") for f in frames if f.f_code is Accumulate.__call__.__code__)
    return next((batch for batch in found if isinstance(batch, tuple)), ())


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _not_finite(columns: list[Column]) -> str:
    """Where a batch itself holds what spoils its gradients; "" when it does not."""
    for column in columns:
        x = column.value
        if (
            isinstance(x, Tensor)
            and x.is_floating_point()
            and x.dim()
            and not bool((good := torch.isfinite(x)).all())
        ):
            row = int((~good).reshape(len(x), -1).any(1).nonzero()[0])
            return f" The batch itself is the cause: {column} holds nan or inf, first in row {row}."
    return ""


# labels


def _of_loss(frames: list[FrameType], columns: list[Column]) -> str | None:
    """What is wrong with the class numbers that a loss was given."""
    frame = next(
        (f for f in frames if f.f_code in _LOSSES and len(f.f_locals.get("taken", ())) == 2), None
    )
    if frame is None:
        return None
    out, target = frame.f_locals["taken"]
    owner = frame.f_locals["self"]
    loss = owner.loss if isinstance(owner, Objective) else owner.objective.loss
    ignored = _ignored(loss)
    if (
        ignored is None
        or not isinstance(out, Tensor)
        or not isinstance(target, Tensor)
        or out.dim() == 0
    ):
        return None
    found = [c for c in columns if c.value is target] or columns[-1:]
    name = type(loss).__name__ if isinstance(loss, nn.Module) else "cross_entropy"
    said = _of_labels(out, target, ignored, found[0])
    return said and f"{name}: {said}"


def _ignored(loss: Any) -> int | None:
    """The ignore_index of a loss that takes class numbers; None for any other loss."""
    if isinstance(loss, nn.Module):
        value = getattr(loss, "ignore_index", None)
        return value if isinstance(value, int) else None
    base, given = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    return given.get("ignore_index", -100) if base in (F.cross_entropy, F.nll_loss) else None


def _of_labels(out: Tensor, target: Tensor, ignored: int, column: Column) -> str | None:
    classes = out.shape[1 if out.dim() > 1 else 0]
    shape = [*out.shape[:1], *out.shape[2:]] if out.dim() > 1 else []
    whole = not target.is_floating_point() and not target.is_complex()
    if list(target.shape) != shape:
        if not whole and target.shape == out.shape:  # probabilities
            return None
        fix = (
            Fix("lambda y: y.flatten()", "y.flatten()")
            if target.numel() == out.shape[0] and shape
            else None
        )
        return f"expected labels of shape {shape}, got {column}.{_advice([fix] if fix else [], column, 'y')}"
    if not whole or target.dtype not in (torch.int64, torch.uint8):
        fix = Fix("hs.data.Cast(torch.int64)", "y.long()")
        return f"expected class numbers as int64, got {column}.{_advice([fix], column, 'y')}"
    return _of_range(target, classes, ignored, column) if target.device.type == "cpu" else None


def _of_range(target: Tensor, classes: int, ignored: int, column: Column) -> str | None:
    counted = target.long()  # in uint8, -100 would be class 156
    kept = counted != ignored
    outside = kept & ((counted < 0) | (counted >= classes))
    if not bool(outside.any()):
        return None
    first = int(outside.flatten().nonzero()[0])
    low, high = int(counted[kept].min()), int(counted[kept].max())
    said = (
        f"expected labels from 0 to {classes - 1}, as the network has {classes} outputs (or {ignored}, which is "
        f"ignored), got {int(counted.flatten()[first])} in {column}, at place {first}."
    )
    if low >= 0:
        said = f"{said} Give the last layer {high + 1} outputs or more, or mend the labels."
        one = low > 0 and high == classes
        return (
            said
            + " They may count from 1." * one
            + _advice([Fix("lambda y: y - 1", "y - 1")] * one, column, "y")
        )
    return (
        f"{said} Mend the labels, or give those to be left out the number ignore_index={ignored}."
    )


# inputs


def _of_input(frames: list[FrameType], columns: list[Column], net: nn.Module) -> str | None:
    """What is wrong with the dtype or the layout of what came to the layer that raised."""
    modules = {id(module): name for name, module in net.named_modules()}
    frame = next((f for f in reversed(frames) if id(f.f_locals.get("self")) in modules), None)
    if frame is None or frame.f_code.co_argcount < 2:
        return None
    layer, x = frame.f_locals["self"], frame.f_locals.get(frame.f_code.co_varnames[1])
    weight = next((p for p in layer.parameters(recurse=False) if p.is_floating_point()), None)
    if not isinstance(x, Tensor) or weight is None or isinstance(layer, _BY_NUMBER):
        return None
    column = next((c for c in columns if isinstance(c.value, Tensor) and _may_be(c.value, x)), None)
    if column is None:
        return None
    name = (
        f"{type(layer).__name__} {modules[id(layer)]!r}"
        if modules[id(layer)]
        else type(layer).__name__
    )
    wanted, flat, fixes = _layout(layer, x, column.value)
    as_number = not x.is_floating_point() or (
        x.dtype == torch.float64 and weight.dtype == torch.float32
    )
    if as_number:
        dtype = str(torch.promote_types(weight.dtype, torch.float32)).removeprefix("torch.")
        wanted, fixes = [dtype, *wanted], [*fixes, _as_float(x, dtype)]
    if not wanted:
        return None
    start = " Begin the network with nn.Flatten()." if flat else ""
    return (
        f"{name}: expected {', '.join(wanted)}, got {column}.{start}{_advice(fixes, column, 'x')}"
    )


def _may_be(value: Tensor, x: Tensor) -> bool:
    """Whether a layer's input may be this column, perhaps in another shape."""
    return value.dtype == x.dtype and value.numel() == x.numel()


def _as_float(x: Tensor, dtype: str) -> Fix:
    if x.dtype == torch.uint8:
        return Fix("hs.data.Rescale(1 / 255)", "x.float() / 255")
    return Fix(f"hs.data.Cast(torch.{dtype})", f"x.to(torch.{dtype})")


def _layout(layer: nn.Module, x: Tensor, given: Tensor) -> tuple[list[str], bool, list[Fix]]:
    """What a layer wants that its input is not, whether flattening helps, and what else does."""
    if isinstance(layer, nn.Linear) and x.shape[-1:] != (layer.in_features,):
        return (
            [f"{layer.in_features} features in the last place"],
            given.shape[1:].numel() == layer.in_features,
            [],
        )
    if not isinstance(layer, nn.Conv2d) or (x.dim() == 4 and x.shape[1] == layer.in_channels):
        return [], False, []
    wanted, channels = [f"a batch [N, {layer.in_channels}, H, W]"], layer.in_channels
    if x.dim() == 3 and channels == 1:
        return wanted, False, [Fix("hs.data.ToCHW()", "x.unsqueeze(1)")]
    if x.dim() == 4 and x.shape[-1] == channels:
        return wanted, False, [Fix('hs.data.ToCHW(layout="HWC")', "x.permute(0, 3, 1, 2)")]
    return wanted, False, []


def _advice(fixes: list[Fix], column: Column, x: str) -> str:
    if not fixes:
        return ""
    if not column.named:
        return f" Where the batch is made, {x} being {column.name}: {', then '.join(fix.plain for fix in fixes)}"
    listed = ", ".join(fix.transform for fix in fixes)
    return f" In the data, behind .batch(…): .map({f'[{listed}]' if len(fixes) > 1 else listed}, {column.name})"
