"""What a network or a loss raised on a batch, explained in the batch's own words.

The message says where, which column, and the line to write. Nothing here runs unless a step has
failed, so that it costs nothing until then. What the step had in hand comes from
step/batch_context.py.
"""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import NonFiniteError, UncapturableError
from halfstep.step.batch_context import BatchContext, batch_context
from halfstep.step.loss_shapes import find_shape_problem, loss_name
from halfstep.step.loss_terms import loss_terms
from halfstep.step.objective import inputs_and_target
from halfstep.utils.text import dtype_name, plural

DEVICE_ASSERT_ADVICE = (
    "the usual cause is a label or an index out of range: "
    "with the network on a CPU, fit names the batch and the label"
)
INDEX_LAYERS = (nn.Embedding, nn.EmbeddingBag)  # layers that take whole numbers
DEFAULT_IGNORE_INDEX = -100  # of torch's losses


class Column(NamedTuple):
    """One part of a batch."""

    name: str
    value: Any
    can_map: bool  # it has a name in a data set of ours, so that map() can change it

    def __str__(self) -> str:
        return f"{self.name} ({describe_value(self.value)})"


class Fix(NamedTuple):
    """A change to a column: as a transform of hs.data, and as code on a tensor."""

    transform: str
    code: str


class LayoutProblem(NamedTuple):
    """What a layer expects that its input is not, and what helps."""

    expected: list[str]
    flatten_helps: bool
    fixes: list[Fix]


def explain_batch_error(
    error: Exception,
    where: str,
    args: Sequence[Any] | None,
    names: Sequence[str],
    net: nn.Module | None,
) -> None:
    """Raises a ValueError that says what is wrong with the batch, or adds a note to the error.

    Without `args`, the batch is the one that the step had in hand.
    """
    if isinstance(error, NonFiniteError) and args is not None:
        cause = _find_nonfinite(_as_columns(args, names))
        error.args = (f"{error}{cause}", *error.args[1:])
    if isinstance(error, NonFiniteError | UncapturableError):  # they name their place themselves
        return
    if "device-side assert" in str(error):  # it comes late, and nothing can be read any more
        error.add_note(DEVICE_ASSERT_ADVICE)
        return

    context = batch_context(error)
    columns = _as_columns(context.batch if args is None else args, names)
    explanation = None
    with suppress(Exception):  # a look at an error may not hide it behind another one
        explanation = _explain_call(error, context, net)
        if explanation is None:
            explanation = _explain_two_losses(context) or _explain_labels(context, columns)
        if explanation is None:
            explanation = _explain_target_shape(context, columns)
        if explanation is None and net is not None:
            explanation = _explain_input(error, columns, net)
    if explanation is not None:
        raise ValueError(f"{where}: {explanation}") from error

    note = f"at {where}"
    if columns:
        note = f"{note}, on a batch of {', '.join(map(str, columns))}"
    error.add_note(note)


def describe_value(value: Any) -> str:
    """dtype and shape, as one says them: "float32 [64, 784]"."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    name = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{name} {list(shape)}"
    if isinstance(value, list | tuple):
        return f"{name} of {len(value)}"
    return name


def _as_columns(args: Sequence[Any], names: Sequence[str]) -> list[Column]:
    if len(args) == 1 and isinstance(args[0], dict):
        return [Column(repr(name), value, name in names) for name, value in args[0].items()]
    if len(names) == len(args):
        return [Column(repr(name), value, True) for name, value in zip(names, args, strict=True)]
    return [Column(f"item {i}", value, False) for i, value in enumerate(args)]


def _find_nonfinite(columns: list[Column]) -> str:
    """Where a batch itself holds nan or inf, which spoils its gradients; "" when it does not."""
    for column in columns:
        x = column.value
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim():
            continue
        is_finite = torch.isfinite(x)
        if not bool(is_finite.all()):
            row = int((~is_finite).reshape(len(x), -1).any(1).nonzero()[0])
            return f" The batch itself is the cause: {column} holds nan or inf, first in row {row}."
    return ""


# Functions that do not fit the batch.


def _explain_call(error: Exception, context: BatchContext, net: nn.Module | None) -> str | None:
    """What is wrong where forward= or the network cannot take the items of the batch."""
    batch = context.batch
    forward = context.forward
    if not isinstance(error, TypeError) or not batch or forward is None:
        return None
    names = "*batch" if len(batch) > 3 else ", ".join("xyz"[: len(batch)])
    signature = inspect.signature(forward)
    if not _accepts(signature, (net, *batch)):
        name = getattr(forward, "__name__", type(forward).__name__)
        return (
            f"forward: expected a function of the network and the {plural(len(batch), 'item')} of "
            f"a batch, got {name}{signature}; write it as forward=lambda net, {names}: …"
        )

    # By convention the network is called with all of the batch but the target.
    if net is None or forward is not inputs_and_target:
        return None
    signature = inspect.signature(net.forward)
    if _accepts(signature, batch[:-1]):
        return None
    return (
        f"{type(net).__name__}: forward{signature} cannot take {plural(len(batch) - 1, 'input')}; "
        f"say how to use a batch: forward=lambda net, {names}: …"
    )


def _accepts(signature: inspect.Signature, args: Sequence[Any]) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _explain_two_losses(context: BatchContext) -> str | None:
    """Whether forward= returned the loss itself, and one of torch's losses was called with it."""
    loss = context.loss
    kind = loss if inspect.isfunction(loss) else type(loss)
    if not context.loss_arguments or not kind.__module__.startswith("torch.nn"):
        return None
    first = context.loss_arguments[0]
    if not isinstance(first, Tensor) or first.dim() != 0:
        return None
    return (
        f"forward: expected (outputs, target) for the loss {kind.__name__}, received a single "
        "number first, as if it were the loss itself; return (outputs, target), or give loss=None "
        "where forward= returns the loss"
    )


# Labels that a loss cannot take.


def _explain_labels(context: BatchContext, columns: list[Column]) -> str | None:
    """What is wrong with the class numbers that a loss was called with."""
    if len(context.loss_arguments) != 2:
        return None
    out, target = context.loss_arguments
    ignore_index = _ignore_index(context.loss)
    if ignore_index is None or not isinstance(out, Tensor) or not isinstance(target, Tensor):
        return None
    if out.dim() == 0:
        return None
    column = _find_target(target, columns)
    explanation = _check_labels(out, target, ignore_index, column)
    if explanation is None:
        return None
    name = "cross_entropy"
    if isinstance(context.loss, nn.Module):
        name = type(context.loss).__name__
    return f"{name}: {explanation}"


def _explain_target_shape(context: BatchContext, columns: list[Column]) -> str | None:
    """What is wrong with the shape of the target of an elementwise loss."""
    if not loss_terms(context.loss).is_elementwise:
        return None
    problem = find_shape_problem(context.loss_arguments)
    if problem is None:
        return None
    column = _find_target(context.loss_arguments[1], columns)
    sentences = [
        f"{loss_name(context.loss)}: expected {problem.expected}, got {column}, {problem.effect}."
    ]
    if problem.fix:
        fix = Fix(f"lambda y: {problem.fix}", problem.fix)
        if column.can_map:
            sentences.append(f"Write {problem.fix} for y.")
        sentences.append(f"{_advice([fix], column, 'y').strip()}.")
    if problem.advice:
        sentences.append(f"{problem.advice}.")
    return " ".join(sentences)


def _find_target(target: Tensor, columns: list[Column]) -> Column:
    """The column that is the target; the last one where none is."""
    target_columns = [column for column in columns if _is_same_tensor(column.value, target)]
    return (target_columns or columns[-1:])[0]


def _is_same_tensor(value: Any, target: Tensor) -> bool:
    """Whether a column is the target: the same memory, since the target was detached."""
    if not isinstance(value, Tensor) or value.shape != target.shape:
        return False
    return value.dtype == target.dtype and value.data_ptr() == target.data_ptr()


def _ignore_index(loss: Any) -> int | None:
    """The ignore_index of a loss that takes class numbers; None for any other loss."""
    if isinstance(loss, nn.Module):
        value = getattr(loss, "ignore_index", None)
        return value if isinstance(value, int) else None
    function = loss
    keywords: dict[str, Any] = {}
    if isinstance(loss, partial):
        function = loss.func
        keywords = loss.keywords
    if function not in (F.cross_entropy, F.nll_loss):
        return None
    index: int = keywords.get("ignore_index", DEFAULT_IGNORE_INDEX)
    return index


def _check_labels(out: Tensor, target: Tensor, ignore_index: int, column: Column) -> str | None:
    """Shape, dtype and range of labels, in this order."""
    class_count = out.shape[1 if out.dim() > 1 else 0]
    expected_shape: list[int] = []
    if out.dim() > 1:
        expected_shape = [*out.shape[:1], *out.shape[2:]]
    is_integer = not target.is_floating_point() and not target.is_complex()

    if list(target.shape) != expected_shape:
        if not is_integer and target.shape == out.shape:  # probabilities
            return None
        fixes = []
        if target.numel() == out.shape[0] and expected_shape:
            fixes = [Fix("lambda y: y.flatten()", "y.flatten()")]
        advice = _advice(fixes, column, "y")
        return f"expected labels of shape {expected_shape}, got {column}.{advice}"

    if not is_integer or target.dtype not in (torch.int64, torch.uint8):
        fix = Fix("hs.data.Cast(torch.int64)", "y.long()")
        return f"expected class numbers as int64, got {column}.{_advice([fix], column, 'y')}"
    if target.device.type == "cpu":
        return _check_label_range(target, class_count, ignore_index, column)
    return None


def _check_label_range(
    target: Tensor, class_count: int, ignore_index: int, column: Column
) -> str | None:
    labels = target.long()  # in uint8, -100 would be class 156
    is_counted = labels != ignore_index
    is_outside = is_counted & ((labels < 0) | (labels >= class_count))
    if not bool(is_outside.any()):
        return None
    first = int(is_outside.flatten().nonzero()[0])
    lowest = int(labels[is_counted].min())
    highest = int(labels[is_counted].max())
    message = (
        f"expected labels from 0 to {class_count - 1}, "
        f"as the network has {class_count} outputs (or {ignore_index}, which is ignored), "
        f"got {int(labels.flatten()[first])} in {column}, at place {first}."
    )
    if lowest < 0:
        return (
            f"{message} Mend the labels, or give those to be left out "
            f"the number ignore_index={ignore_index}."
        )
    message = f"{message} Give the last layer {highest + 1} outputs or more, or mend the labels."
    if lowest > 0 and highest == class_count:
        fix = Fix("lambda y: y - 1", "y - 1")
        message = f"{message} They may count from 1.{_advice([fix], column, 'y')}"
    return message


# Inputs that a layer cannot take.


def _explain_input(error: Exception, columns: list[Column], net: nn.Module) -> str | None:
    """What is wrong with the dtype or the layout of the input of the layer that raised."""
    names = {id(module): name for name, module in net.named_modules()}
    frame = _layer_frame(error, names)
    if frame is None or frame.f_code.co_argcount < 2:
        return None
    # The frame is that of a layer's own forward(self, x, …): its first two arguments.
    layer = frame.f_locals["self"]
    x = frame.f_locals.get(frame.f_code.co_varnames[1])
    weights = [p for p in layer.parameters(recurse=False) if p.is_floating_point()]
    if not isinstance(x, Tensor) or not weights or isinstance(layer, INDEX_LAYERS):
        return None
    column = _find_column(columns, x)
    if column is None:
        return None

    problem = _check_layout(layer, x, column.value)
    expected = problem.expected
    fixes = problem.fixes
    weight_dtype = weights[0].dtype
    # A low network casts its inputs: there another dtype is no mistake of the batch.
    is_full = weight_dtype in (torch.float32, torch.float64)
    is_other_float = is_full and x.dtype != weight_dtype
    if not x.is_floating_point() or is_other_float:
        dtype = dtype_name(torch.promote_types(weight_dtype, torch.float32))
        expected = [dtype, *expected]
        fixes = [*fixes, _cast_fix(x, dtype)]
    if not expected:
        return None

    layer_name = type(layer).__name__
    if names[id(layer)]:
        layer_name = f"{layer_name} {names[id(layer)]!r}"
    flatten_advice = " Begin the network with nn.Flatten()." if problem.flatten_helps else ""
    return (
        f"{layer_name}: expected {', '.join(expected)}, got {column}."
        f"{flatten_advice}{_advice(fixes, column, 'x')}"
    )


def _layer_frame(error: Exception, names: dict[int, str]) -> FrameType | None:
    """The innermost frame of the traceback that runs in a module of the network."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    # From the inside, and no further than needed: `f_locals` of the frame that handles the error
    # would hold the error, and the batch with it, until Python's garbage collector runs.
    for frame in reversed(frames):
        if id(frame.f_locals.get("self")) in names:
            return frame
    return None


def _find_column(columns: list[Column], x: Tensor) -> Column | None:
    """The column that a layer's input may be, perhaps in another shape."""
    for column in columns:
        value = column.value
        if isinstance(value, Tensor) and value.dtype == x.dtype and value.numel() == x.numel():
            return column
    return None


def _cast_fix(x: Tensor, dtype: str) -> Fix:
    if x.dtype == torch.uint8:
        return Fix("hs.data.Rescale(1 / 255)", "x.float() / 255")
    return Fix(f"hs.data.Cast(torch.{dtype})", f"x.to(torch.{dtype})")


def _check_layout(layer: nn.Module, x: Tensor, column_value: Tensor) -> LayoutProblem:
    if isinstance(layer, nn.Linear) and x.shape[-1:] != (layer.in_features,):
        return LayoutProblem(
            expected=[f"{layer.in_features} features in the last place"],
            flatten_helps=column_value.shape[1:].numel() == layer.in_features,
            fixes=[],
        )
    if not isinstance(layer, nn.Conv2d) or (x.dim() == 4 and x.shape[1] == layer.in_channels):
        return LayoutProblem(expected=[], flatten_helps=False, fixes=[])
    fixes = []
    if x.dim() == 3 and layer.in_channels == 1:
        fixes = [Fix("hs.data.ToCHW()", "x.unsqueeze(1)")]
    elif x.dim() == 4 and x.shape[-1] == layer.in_channels:
        fixes = [Fix('hs.data.ToCHW(layout="HWC")', "x.permute(0, 3, 1, 2)")]
    expected = [f"a batch [N, {layer.in_channels}, H, W]"]
    return LayoutProblem(expected=expected, flatten_helps=False, fixes=fixes)


def _advice(fixes: list[Fix], column: Column, variable: str) -> str:
    """How to change the column: in the data where it has a name, else where the batch is made."""
    if not fixes:
        return ""
    if not column.can_map:
        code = ", then ".join(fix.code for fix in fixes)
        return f" Where the batch is made, {variable} being {column.name}: {code}"
    transforms = ", ".join(fix.transform for fix in fixes)
    if len(fixes) > 1:
        transforms = f"[{transforms}]"
    return f" In the data, behind .batch(…): .map({transforms}, {column.name})"
