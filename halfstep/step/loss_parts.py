"""What a loss or a network returns beside its loss: parts, one number each, and outputs.

Parts are recorded with every step and averaged as the loss is. Outputs go to metrics and `predict`.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfstep.utils.text import dtype_name

# Entries of a dict with the outputs for metrics and predict.
OUTPUT_NAMES = ("outputs", "logits")

_VALID_NAME = re.compile(r"\w[\w.@-]*")


def split_loss(result: Any) -> tuple[Any, dict[str, Tensor], Any]:
    """What a loss function returned, as the loss, its parts and outputs (None: the network's).

    A dict with "loss", where "outputs" or "logits" replace the network's outputs for metrics; or a
    tuple that begins with the loss: then come parts in a dict, or numbers without names.
    """
    if isinstance(result, dict):
        if "loss" not in result:
            raise TypeError(
                "loss: expected a dict with 'loss', the number to minimize, received one of "
                f"{', '.join(map(repr, result)) or 'nothing'}; add it: {{'loss': …, …}}"
            )
        entries = dict(result)
        loss = entries.pop("loss")
        outputs = entries.pop("logits", None)
        outputs = entries.pop("outputs", outputs)
        return loss, _checked_parts(entries), outputs
    if isinstance(result, (tuple, list)) and result:
        entries = {}
        for position, item in enumerate(result[1:], 1):
            if isinstance(item, dict):
                entries.update(item)
            else:
                entries[f"part_{position}"] = item
        return result[0], _checked_parts(entries), None
    return result, {}, None


def beside_loss(out: Any) -> tuple[dict[str, Tensor], Any]:
    """What a network or forward that returns its loss returned beside it: parts, and outputs.

    Outputs are None where there are none. Of a dict they are its "outputs", or the dict as it is
    where it has anything but numbers; of a tuple (loss, outputs, …) the second item, or the third
    behind a dict of parts; an object as it is where it has `.logits`.
    """
    if isinstance(out, dict):
        return _beside_loss_in_dict(out)
    if isinstance(getattr(out, "loss", None), Tensor):
        return {}, None if getattr(out, "logits", None) is None else out
    if not isinstance(out, (tuple, list)) or len(out) < 2:
        return {}, None
    second = out[1]
    has_only_numbers = isinstance(second, dict) and len(second) > 0
    if has_only_numbers and all(_is_number(value) for value in second.values()):
        return _checked_parts(second), out[2] if len(out) > 2 else None
    return {}, second


def _beside_loss_in_dict(out: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    entries = {name: value for name, value in out.items() if name != "loss" and value is not None}
    part_entries = {}
    for name, value in entries.items():
        # A float would stay the number that it was when the step was captured: it is refused. So is
        # a loss for each sample, which somebody takes for a part.
        is_named_loss = type(out) is dict and "loss" in str(name) and isinstance(value, Tensor)
        is_part = _is_number(value) or isinstance(value, float) or is_named_loss
        if is_part and name not in OUTPUT_NAMES:
            part_entries[name] = value
    parts = _checked_parts(part_entries)
    if "outputs" in entries:
        return parts, entries["outputs"]
    return parts, out if len(entries) > len(parts) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _checked_parts(entries: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Tensors of one number each, by name. None is left out."""
    parts = {}
    for name, value in entries.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"loss: the part {name!r}: expected a tensor of one number, received "
                f"{type(value).__name__}; return the tensor (it is detached), not .item()"
            )
        if value.numel() != 1 or value.is_complex():
            raise ValueError(
                f"loss: the part {name!r}: expected one real number, received "
                f"{dtype_name(value.dtype)} of shape {list(value.shape)}; return for instance its "
                "mean. Outputs for metrics are returned by forward=, as 'outputs' or 'logits'"
            )
        parts[name] = value.reshape(())
    return parts


def check_part_names(names: tuple[Any, ...]) -> None:
    """Refuses names that cannot be columns of a log."""
    for name in names:
        if not isinstance(name, str) or not _VALID_NAME.fullmatch(name):
            raise ValueError(
                "loss: expected names of parts of letters, digits and _ . @ - (they name columns), "
                f"received {name!r}"
            )
