"""Weights in a file, and an account of what a file had and the network wanted.

The suffix of a file says how it is written: .safetensors, or .pt and .pth as torch.save does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import checkpoint
from halfstep.checkpoint.safetensors_file import write_safetensors
from halfstep.model.torch_file import is_torch_file, read_torch_file, write_torch_file
from halfstep.utils.saved_state import SavedValue, describe_value, dtype_kind
from halfstep.utils.text import list_some

MAX_NAMES = 4  # tensors of each kind that a message names
EXTRA_STATE = "_extra_state"  # what torch calls values that a module adds to its state_dict

SAFETENSORS_SUFFIXES = (".safetensors", "")
TORCH_SUFFIXES = (".pt", ".pth")

# Files of programs, which weights alone do not make, and how one writes them.
EXPORT_ADVICE = {
    ".onnx": "torch.onnx.export(model.net.eval(), (example,), {name!r})",
    ".pt2": "torch.export.save(torch.export.export(model.net.eval(), (example,)), {name!r})",
}


@dataclass(frozen=True)
class Account:
    """What became of each tensor of a file of weights; print it."""

    matched: tuple[str, ...]
    missing: tuple[str, ...] = ()
    """The network has them, the file does not: they kept their values."""
    unexpected: tuple[str, ...] = ()
    """The file has them, the network does not."""
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Same name, other shape (the file's, the network's): they kept their values."""
    averaged: tuple[str, ...] = ()
    """Of a run with ema=: these came as their averages, which is what it evaluated."""

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        averaged = f", {len(self.averaged)} of them averages (ema=)" if self.averaged else ""
        lines = [f"{len(self.matched)} tensors loaded{averaged}"]
        lines += [f"  {name}: not in the file, left as it was" for name in self.missing]
        lines += [f"  {name}: not in the network, ignored" for name in self.unexpected]
        for name, (file_shape, net_shape) in self.reshaped.items():
            shapes = f"{list(file_shape)} in the file, {list(net_shape)} here"
            lines.append(f"  {name}: {shapes}, left as it was")
        return "\n".join(lines)

    def differences(self) -> str:
        """What does not fit, in one line: of each kind the first few, and how many more."""
        shapes = []
        for name, (file_shape, net_shape) in self.reshaped.items():
            shapes.append(f"{name} ({list(file_shape)} there, {list(net_shape)} here)")
        kinds = {
            "missing there": list(self.missing),
            "unknown to this network": list(self.unexpected),
            "of another shape": shapes,
        }
        parts = [f"{kind}: {list_some(names, MAX_NAMES)}" for kind, names in kinds.items() if names]
        return "; ".join(parts)


def compare_tensors(in_net: Mapping[str, Tensor], in_file: Mapping[str, Tensor]) -> Account:
    """The account of two sets of tensors, by name and shape."""
    in_both = [name for name in in_net if name in in_file]
    reshaped = {}
    for name in in_both:
        if in_file[name].shape != in_net[name].shape:
            reshaped[name] = (tuple(in_file[name].shape), tuple(in_net[name].shape))
    return Account(
        matched=tuple(name for name in in_both if name not in reshaped),
        missing=tuple(name for name in in_net if name not in in_file),
        unexpected=tuple(name for name in in_file if name not in in_net),
        reshaped=reshaped,
    )


def only_tensors(tree: Mapping[str, object]) -> dict[str, Tensor]:
    """A state_dict without the values that are no tensors."""
    return {name: value for name, value in tree.items() if isinstance(value, Tensor)}


def save_weights(net: nn.Module, path: str | Path) -> None:
    """Writes the state_dict in the format of the file's suffix, whole or not at all.

    A .safetensors file has every tensor, tied ones once for each name.
    """
    suffix = Path(path).suffix.lower()
    if suffix in SAFETENSORS_SUFFIXES:
        write_safetensors(path, only_tensors(net.state_dict()), {"format": "pt"})
    elif suffix in TORCH_SUFFIXES:
        write_torch_file(path, net)
    else:
        raise ValueError(f"save: {_unknown_suffix(Path(path), suffix)}")


def _unknown_suffix(path: Path, suffix: str) -> str:
    """What a file of this suffix would need, in words."""
    known = "a file that ends in .safetensors, or in .pt or .pth (a state_dict, as torch.save)"
    if suffix in EXPORT_ADVICE:
        advice = EXPORT_ADVICE[suffix].format(name=path.name)
        return (
            f"expected {known}, got {str(path)!r}: {suffix} holds a program, not weights alone. "
            f"Export it, with a batch of inputs as example: {advice}"
        )
    if suffix == ".ckpt":
        return (
            f"expected {known}, got {str(path)!r}. Everything that a run needs to go on is written "
            "by fit(callbacks=hs.Checkpoint(folder)), as a folder"
        )
    return f"expected {known}, got {str(path)!r}"


def load_weights(
    net: nn.Module, source: str | Path | Mapping[str, Tensor], *, strict: bool
) -> Account:
    """Copies what fits by name and shape.

    With `strict`, anything else is a ValueError before a weight is touched.
    """
    averages: dict[str, Tensor] = {}
    if isinstance(source, Mapping):
        in_file = _tensors_of(source, "load")
    else:
        in_file, averages = _read_weights(Path(source))
    in_net = only_tensors(net.state_dict(keep_vars=True))
    account = compare_tensors(in_net, in_file)
    if strict and not account.complete:
        where = "load" if isinstance(source, Mapping) else str(source)
        raise ValueError(
            f"{where}: the weights do not fit the network: {account.differences()}. "
            "Nothing was loaded; load(..., strict=False) takes what fits."
        )
    if not account.matched:
        raise ValueError(
            f"none of the file's {len(in_file)} tensors has a name and shape of the network's:\n"
            f"{account}"
        )
    averaged = tuple(name for name in account.matched if name in averages)
    for name in account.matched:
        for values in (in_file, averages):
            if name in values:
                _check_can_copy(name, values[name], in_net[name])
    with torch.no_grad():
        for name in account.matched:
            in_net[name].copy_(in_file[name])
        # Last: another name of a tied weight holds its value before averaging.
        for name in averaged:
            in_net[name].copy_(averages[name])
    return replace(account, averaged=averaged)


def _tensors_of(source: Mapping[Any, Any], where: str) -> dict[str, Tensor]:
    """The tensors of a state_dict. What a module adds to them beside tensors is left out."""
    tensors = {}
    for name, value in source.items():
        if isinstance(value, Tensor) and isinstance(name, str):
            tensors[name] = value
        elif not str(name).endswith(EXTRA_STATE):
            advice = ""
            if isinstance(value, Mapping):
                advice = f". If these are the weights, load them: load(state[{name!r}])"
            raise ValueError(
                f"{where}: expected a state_dict, tensors by name, "
                f"received {describe_value(value)} as {name!r}{advice}. Nothing was loaded"
            )
    return tensors


def _check_can_copy(name: str, value: Tensor, target: Tensor) -> None:
    """Refuses values that the network's tensor cannot hold: another shape or kind, no values."""
    is_same_kind = value.is_complex() == target.is_complex()
    is_rounded_to_int = value.is_floating_point() and not target.is_floating_point()
    if value.is_meta or value.shape != target.shape or not is_same_kind or is_rounded_to_int:
        what = "a meta tensor, without values" if value.is_meta else describe_value(value)
        raise ValueError(
            f"load: {name}: expected {dtype_kind(target.dtype)} values of shape "
            f"{list(target.shape)}, received {what}. Nothing was loaded"
        )


def _read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights, and the averages of those that a run has averaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.is_dir():
        return _read_checkpoint(path)
    if not path.is_file():
        raise FileNotFoundError(
            "expected a file of weights (.safetensors, .pt, .pth) or a checkpoint, "
            f"found nothing at {path}"
        )
    if is_torch_file(path):
        return _tensors_of(read_torch_file(path), str(path)), {}
    try:
        return load_file(str(path)), {}
    except SafetensorError as error:
        raise ValueError(
            f"{path}: expected a safetensors file or one of torch.save, "
            f"found something else ({error})."
        ) from error


def _read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights in a checkpoint, or in the newest one of a run."""
    path = checkpoint.choose(folder)
    if path is None:
        raise FileNotFoundError(
            f"expected a checkpoint or a folder of them, found none in {folder}"
        )
    saved = SavedValue(checkpoint.load(path).tree, str(path))
    step = saved.field("step")
    if "net" not in step.entries():
        raise ValueError(
            f"{path}: expected the weights of a built-in step, found the state of a step of its own"
        )
    net = step.field("net").entries()
    names = saved.field("config").optional_field("names")
    averages = [average.tensor() for average in step.field("state").field("ema").items()]
    names_of_averages = [] if names is None else names.texts()
    if averages and len(names_of_averages) != len(averages):
        saved.field("config").field("names").refuse(f"the names of {len(averages)} averages")
    return (
        only_tensors({str(name): value.value for name, value in net.items()}),
        dict(zip(names_of_averages, averages, strict=False)),
    )
