"""Weights in a safetensors file, and an account of what a file had and the network wanted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn


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

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        lines = [f"{len(self.matched)} tensors loaded"]
        lines += [f"  {n}: not in the file, left as it was" for n in self.missing]
        lines += [f"  {n}: not in the network, ignored" for n in self.unexpected]
        lines += [
            f"  {n}: {list(a)} in the file, {list(b)} here, left as it was" for n, (a, b) in self.reshaped.items()
        ]
        return "\n".join(lines)


def save(net: nn.Module, path: str | Path) -> None:
    """Every tensor of the state_dict; tied ones are written once per name, contiguous."""
    from safetensors.torch import save_file

    tensors = {n: t.detach().contiguous().clone().cpu() for n, t in net.state_dict().items() if isinstance(t, Tensor)}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata={"format": "pt", "written_by": "halfstep"})


def load(net: nn.Module, source: str | Path | Mapping[str, Tensor], *, strict: bool) -> Account:
    """Copies what fits by name and shape; with `strict`, anything else is a ValueError before a weight is touched."""
    given = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    mine = {n: t for n, t in net.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    both = [n for n in mine if n in given]
    reshaped = {n: (tuple(given[n].shape), tuple(mine[n].shape)) for n in both if given[n].shape != mine[n].shape}
    account = Account(
        tuple(n for n in both if n not in reshaped),
        tuple(n for n in mine if n not in given),
        tuple(n for n in given if n not in mine),
        reshaped,
    )
    if strict and not account.complete:
        raise ValueError(f"the weights do not fit the network; load(..., strict=False) takes what fits:\n{account}")
    if not account.matched:
        raise ValueError(f"none of the file's {len(given)} tensors has a name and shape of the network's:\n{account}")
    with torch.no_grad():
        for name in account.matched:
            mine[name].copy_(given[name])
    return account


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise FileNotFoundError(f"expected a safetensors file, found nothing at {path}")
    try:
        return load_file(str(path))
    except SafetensorError as error:
        raise ValueError(
            f"{path}: expected a safetensors file, found something else ({error}). A torch.save file is a pickle, "
            "which is not loaded here: read it where you trust it and hand over its state_dict."
        ) from error
