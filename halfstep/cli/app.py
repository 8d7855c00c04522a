"""The sub-commands and their help."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="halfstep", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Train PyTorch models in any numeric precision, and know what it cost.",
)  # fmt: skip

Build = Annotated[
    str | None,
    typer.Option("--build", help="package.module:function that returns (model, data) as the run was built"),
]


@app.callback()
def _root() -> None:
    """Sub-commands look at runs: folders of checkpoints, with log.jsonl beside them where a JSONLLog wrote one."""


@app.command()
def diff(
    run_a: Annotated[Path, typer.Argument(help="folder of a run")],
    run_b: Annotated[Path, typer.Argument(help="folder of the other run")],
    build: Build = None,
    build_b: Annotated[str | None, typer.Option("--build-b", help="the other run's builder, if it is another")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Name the first step and the tensors in which two runs differ.

    By their logs (fingerprints see every bit: TrainStep's fingerprint_every), by their checkpoints, and with --build by
    running both again from the last checkpoint that is equal.

    halfstep diff runs/a runs/b --build train:build
    """
    from halfstep.again import builder
    from halfstep.again import diff as compare

    if build_b and not build:
        raise ValueError("--build-b: expected --build too, the builder of the first run, got none")
    builders = (builder(build), builder(build_b or build)) if build else None
    found = compare(run_a, run_b, build=builders)
    if as_json:
        names = ("by", "step", "names", "equal_until", "note")
        typer.echo(json.dumps([{name: getattr(each, name) for name in names} for each in found]))
    else:
        for each in found:
            typer.echo(str(each))
    raise typer.Exit(1 if any(each.step is not None for each in found) else 0)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    step: Annotated[int, typer.Option("--step", help="global step to repeat, from 1")],
    build: Build = None,
    save: Annotated[Path | None, typer.Option("--save", help="write all tensors to this safetensors file")] = None,
) -> None:
    """Run one step of a run again, bit for bit, and show what every module computed.

    halfstep replay runs/a --step 1234 --build train:build --save step.safetensors
    """
    from halfstep.again import builder
    from halfstep.again import replay as again

    if build is None:
        raise ValueError("replay: say how the run was built: --build package.module:function")
    result = again(builder(build), run, step)
    row = result.row
    assert row is not None
    typer.echo(f"step {step}, from {result.origin}")
    typer.echo(f"loss {row.loss!r}  lr {row.lr}  scale {row.scale:g}  skipped {row.skipped}  norm {row.grad_norm!r}")
    for line in _table(result):
        typer.echo(line)
    if save is not None:
        _save(result, save)
        typer.echo(f"written: {save}")


def _table(result: Any) -> list[str]:
    rows = [("tensor", "dtype", "shape", "absmax", "non-finite")]
    tensors = {f"out {name or '(network)'}": t for name, t in _flat(result.outputs).items()}
    tensors |= {f"grad {name}": t for name, t in result.gradients.items()}
    for name, t in tensors.items():
        floating = t.is_floating_point() and t.numel()
        largest = f"{t.abs().max().item():.4g}" if floating else "-"
        bad = str(int((~t.isfinite()).sum())) if floating else "-"
        rows.append((name, str(t.dtype).removeprefix("torch."), str(list(t.shape)), largest, bad))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


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

    parts = {"input": _flat(result.inputs), "output": _flat(result.outputs), "gradient": result.gradients}
    tensors = {
        f"{kind}.{name}": t.contiguous().cpu().clone() for kind, each in parts.items() for name, t in each.items()
    }
    save_file(tensors, str(path))
