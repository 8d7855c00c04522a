"""Weights in a safetensors file, and an account of what a file had and the network wanted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from halfstep import checkpoint


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
        lines += [f"  {n}: not in the file, left as it was" for n in self.missing]
        lines += [f"  {n}: not in the network, ignored" for n in self.unexpected]
        lines += [
            f"  {n}: {list(a)} in the file, {list(b)} here, left as it was"
            for n, (a, b) in self.reshaped.items()
        ]
        return "\n".join(lines)

    def differences(self, most: int = 4) -> str:
        """What does not fit, in one line: of each kind the first few, and how many more there are."""
        shapes = [f"{n} ({list(a)} there, {list(b)} here)" for n, (a, b) in self.reshaped.items()]
        kinds = (
            ("missing there", self.missing),
            ("unknown to this network", self.unexpected),
            ("of another shape", shapes),
        )
        return "; ".join(f"{kind}: {_few(names, most)}" for kind, names in kinds if names)


def _few(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def compare(mine: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Account:
    """By name and shape."""
    both = [n for n in mine if n in given]
    reshaped = {
        n: (tuple(given[n].shape), tuple(mine[n].shape))
        for n in both
        if given[n].shape != mine[n].shape
    }
    return Account(
        tuple(n for n in both if n not in reshaped),
        tuple(n for n in mine if n not in given),
        tuple(n for n in given if n not in mine),
        reshaped,
    )


def tensors_of(tree: Mapping[str, object]) -> dict[str, Tensor]:
    """A state_dict without what is no tensor."""
    return {name: value for name, value in tree.items() if isinstance(value, Tensor)}


def save(net: nn.Module, path: str | Path) -> None:
    """Every tensor of the state_dict; tied ones are written once per name, contiguous."""
    from safetensors import torch as st

    tensors = {
        n: t.detach().contiguous().clone().cpu() for n, t in tensors_of(net.state_dict()).items()
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(st.save(tensors, metadata={"format": "pt"}))


def load(net: nn.Module, source: str | Path | Mapping[str, Tensor], *, strict: bool) -> Account:
    """Copies what fits by name and shape; with `strict`, anything else is a ValueError before a weight is touched."""
    given, averages = (dict(source), {}) if isinstance(source, Mapping) else _read(Path(source))
    mine = tensors_of(net.state_dict(keep_vars=True))
    account = compare(mine, given)
    if strict and not account.complete:
        where = "load" if isinstance(source, Mapping) else str(source)
        raise ValueError(
            f"{where}: the weights do not fit the network: {account.differences()}. Nothing was loaded; "
            "load(..., strict=False) takes what fits."
        )
    if not account.matched:
        raise ValueError(
            f"none of the file's {len(given)} tensors has a name and shape of the network's:\n{account}"
        )
    averaged = tuple(name for name in account.matched if name in averages)
    with torch.no_grad():
        for name in account.matched:
            mine[name].copy_(given[name])
        for (
            name
        ) in averaged:  # after all others: another name of a tied weight holds its last value
            mine[name].copy_(averages[name])
    return replace(account, averaged=averaged)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights, and those of them that a run has averaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.is_dir():
        return _of_checkpoint(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a safetensors file or a checkpoint, found nothing at {path}"
        )
    try:
        return load_file(str(path)), {}
    except SafetensorError as error:
        raise ValueError(
            f"{path}: expected a safetensors file, found something else ({error}). A torch.save file is a pickle, "
            "which is not loaded here: read it where you trust it and hand over its state_dict."
        ) from error


def _of_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights in a checkpoint, or in the newest one of a run."""
    found = folder if (folder / "manifest.json").is_file() else checkpoint.latest(folder)
    if found is None:
        raise FileNotFoundError(
            f"expected a checkpoint or a folder of them, found none in {folder}"
        )
    tree = checkpoint.load(found).tree
    step = tree.get("step", {})
    if "net" not in step:
        raise ValueError(
            f"{found}: expected the weights of a built-in step, found the state of a cell of its own"
        )
    names = tree["config"].get("names", ())
    return tensors_of(step["net"]), dict(zip(names, step["state"]["ema"], strict=False))
