"""`halfstep diff` and `halfstep replay`: where two runs part, and one step again."""

from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep.cli import options__words as words
from halfstep.cli import output as text
from halfstep.experiment.builders import builder_of


def diff(
    run_a: Annotated[Path, typer.Argument(help="folder of a run")],
    run_b: Annotated[Path, typer.Argument(help="folder of the other run")],
    build: words.Build = None,
    build_b: Annotated[
        str | None, typer.Option("--build-b", help="the other run's builder, if it is another")
    ] = None,
    as_json: words.Json = False,
) -> None:
    """Name the first step and the tensors in which two runs differ.

    By their logs (fingerprints see every bit: TrainStep's fingerprint_every), by their checkpoints, and with --build by
    running both again from the last checkpoint that is equal.

    \b
    halfstep diff runs/a runs/b
    halfstep diff runs/a runs/b --build train:build
    halfstep diff runs/a runs/b --json && echo equal

    Exit code: 0 equal, 1 a difference, 2 a mistake or an error.
    """
    from halfstep.reproduce import diff as compare

    if build_b and not build:
        raise ValueError("--build-b: expected --build too, the builder of the first run, got none")
    builders = (builder_of(build), builder_of(build_b or build)) if build else None
    found = compare(run_a, run_b, build=builders)
    if as_json:
        names = ("by", "step", "names", "equal_until", "note")
        text.dump([{name: getattr(each, name) for name in names} for each in found])
    else:
        for each in found:
            typer.echo(str(each))
    raise typer.Exit(1 if any(each.step is not None for each in found) else 0)


def replay(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    step: Annotated[int, typer.Option("--step", help="global step to repeat, from 1")],
    build: words.Build = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="write all tensors to this safetensors file")
    ] = None,
    as_json: words.Json = False,
) -> None:
    """Run one step of a run again, bit for bit.

    Shows what every module computed and every gradient. Gradients are shown as the backward pass made them: they carry
    the loss scale.

    \b
    halfstep replay runs/first --step 120                        a run of halfstep train
    halfstep replay runs/a --step 1234 --build train:build --save step.safetensors
    """
    from halfstep.experiment.training_run import built_by
    from halfstep.reproduce import replay as again

    result = again(built_by(run, build, "replay"), run, step)
    row = result.row
    assert row is not None
    if as_json:
        numbers = {
            name: getattr(row, name) for name in ("loss", "lr", "scale", "skipped", "grad_norm")
        }
        titles = ("tensor", "dtype", "shape", "absmax", "nonfinite")
        tensors = [dict(zip(titles, each, strict=True)) for each in _rows(result)]
        text.dump({"step": step, "from": result.origin, **numbers, "tensors": tensors})
    else:
        typer.echo(f"step {step}, from {result.origin}")
        shown = f"lr {row.lr}  scale {row.scale:g}  skipped {row.skipped}  norm {row.grad_norm!r}"
        typer.echo(f"loss {row.loss!r}  {shown}")
        _table(_rows(result), row.scale)
    if save is not None:
        _save(result, save)
        typer.echo(f"written: {save}", err=as_json)


def _table(rows: list[tuple[str, str, list[int], float | None, int | None]], scale: float) -> None:
    cells = [("tensor", "dtype", "shape", "absmax", "non-finite")]
    for name, dtype, shape, largest, bad in rows:
        most = "-" if largest is None else f"{largest:.4g}"
        cells.append((name, dtype, str(shape), most, "-" if bad is None else str(bad)))
    for line in text.columns(cells, left=5):
        typer.echo(line)
    if scale != 1:
        typer.echo(
            f"grad …: times the loss scale, {scale:g}; divide by it for the gradient. norm is without it."
        )


def _rows(result: Any) -> list[tuple[str, str, list[int], float | None, int | None]]:
    """Name, dtype, shape, the largest absolute value and how many are inf or NaN, of every tensor."""
    tensors = {f"out {name or '(network)'}": t for name, t in _flat(result.outputs).items()}
    tensors |= {f"grad {name}": t for name, t in result.gradients.items()}
    found: list[tuple[str, str, list[int], float | None, int | None]] = []
    for name, t in tensors.items():
        floating = bool(t.is_floating_point() and t.numel())
        largest = t.abs().max().item() if floating else None
        bad = int((~t.isfinite()).sum()) if floating else None
        found.append((name, str(t.dtype).removeprefix("torch."), list(t.shape), largest, bad))
    return found


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    found = {}
    for name, value in values.items():
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for i, leaf in enumerate(leaves):
            found[name if len(leaves) == 1 else f"{name}[{i}]"] = leaf
    return found


def _save(result: Any, path: Path) -> None:
    from safetensors.torch import save_file

    parts = {
        "input": _flat(result.inputs),
        "output": _flat(result.outputs),
        "gradient": result.gradients,
    }
    tensors = {
        f"{kind}.{name}": t.contiguous().cpu().clone()
        for kind, each in parts.items()
        for name, t in each.items()
    }
    metadata = {"gradient": "times the loss scale", "scale": repr(result.row.scale)}
    save_file(tensors, str(path), metadata=metadata)
