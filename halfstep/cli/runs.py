"""`halfstep diff` and `halfstep replay`: where two runs part, and one step of a run again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from halfstep.cli.options import BuildOption, JsonOption, TrustOption
from halfstep.cli.output import align_columns, echo, print_json
from halfstep.experiment.builders import import_builder
from halfstep.utils.text import dtype_name, list_some, printable

if TYPE_CHECKING:
    from torch import Tensor

    from halfstep.reproduce import Difference, Replayed

DIFFERENCE_FIELDS = ("by", "step", "names", "equal_until", "note")
MAX_NAMES_SHOWN = 8  # of what a replay does not give
RECORD_FIELDS = ("loss", "lr", "scale", "skipped", "grad_norm")


class TensorRow(NamedTuple):
    """What the table says about one tensor. The names of the fields are keys of the JSON."""

    tensor: str
    dtype: str
    shape: list[int]
    absmax: float | None  # None where the tensor is empty or holds no floats
    nonfinite: int | None


def diff(
    run_a: Annotated[Path, typer.Argument(help="folder of a run")],
    run_b: Annotated[Path, typer.Argument(help="folder of the other run")],
    build: BuildOption = None,
    build_b: Annotated[
        str | None, typer.Option("--build-b", help="the other run's builder, if it is another")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Name the first step and the tensors in which two runs differ.

    By their logs (fingerprints see every bit: TrainStep's fingerprint_every), by their checkpoints,
    and with --build by running both again from the last checkpoint that is equal.

    \b
    halfstep diff runs/a runs/b
    halfstep diff runs/a runs/b --build train:build
    halfstep diff runs/a runs/b --json && echo equal

    Exit code: 0 equal, 1 a difference, 2 a mistake or an error.
    """
    from halfstep.reproduce import diff as diff_runs

    if build_b and not build:
        raise ValueError("--build-b: expected --build too, the builder of the first run, got none")
    builders = None
    if build:
        builders = (import_builder(build), import_builder(build_b or build))

    differences = diff_runs(run_a, run_b, build=builders)
    if as_json:
        print_json([_difference_as_dict(difference) for difference in differences])
    else:
        for difference in differences:
            echo(printable(difference))
    runs_differ = any(difference.step is not None for difference in differences)
    raise typer.Exit(1 if runs_differ else 0)


def _difference_as_dict(difference: "Difference") -> dict[str, Any]:
    return {name: getattr(difference, name) for name in DIFFERENCE_FIELDS}


def replay(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    step: Annotated[int, typer.Option("--step", help="global step to repeat, from 1")],
    build: BuildOption = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="write all tensors to this safetensors file")
    ] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run one step of a run again, bit for bit.

    Shows what every module computed and every gradient. Gradients are shown as the backward pass
    made them: they carry the loss scale.

    \b
    halfstep replay runs/first --step 120  a run of halfstep train
    halfstep replay runs/a --step 1234 --build train:build --save step.safetensors
    """
    from halfstep.experiment.training_run import read_run_file, run_builder
    from halfstep.reproduce import replay as replay_step

    result = replay_step(run_builder(run, build, "replay", trust=trust), run, step)
    record = result.row
    assert record is not None
    tensor_rows = _tensor_rows(result)
    if as_json:
        summary: dict[str, Any] = {"step": step, "from": result.origin}
        for name in RECORD_FIELDS:
            summary[name] = getattr(record, name)
        summary["unreproduced"] = result.unreproduced
        summary["tensors"] = [row._asdict() for row in tensor_rows]
        print_json(summary)
    else:
        echo(f"step {step}, from {printable(result.origin)}")
        echo(
            f"loss {record.loss!r}  lr {record.lr}  scale {record.scale:g}  "
            f"skipped {record.skipped}  norm {record.grad_norm!r}"
        )
        _print_tensors(tensor_rows, record.scale)
        if result.unreproduced:
            names = list_some(result.unreproduced, MAX_NAMES_SHOWN)
            echo(
                f"not the step that the run made: it has recorded other values of {names}. The "
                "builder, the data, the versions or the device are others than in the run, or a "
                "checkpoint was changed."
            )
            settings = read_run_file(run)
            if settings is not None and settings.ranks > 1 and settings.exact is None:
                echo(
                    f"note: the run had {settings.ranks} ranks, whose sums are rounded otherwise "
                    "than those of this one process; runs with --exact bits can be replayed"
                )
    if save is not None:
        _save_tensors(result, save)
        echo(f"written: {save}", err=as_json)


def _tensor_rows(result: "Replayed") -> list[TensorRow]:
    """A row for the output of every module and for every gradient."""
    tensors = {}
    for name, tensor in _flatten(result.outputs).items():
        tensors[f"out {name or '(network)'}"] = tensor
    for name, tensor in result.gradients.items():
        tensors[f"grad {name}"] = tensor

    rows = []
    for name, tensor in tensors.items():
        absmax = None
        nonfinite = None
        if tensor.is_floating_point() and tensor.numel():
            absmax = tensor.abs().max().item()
            nonfinite = int((~tensor.isfinite()).sum())
        dtype = dtype_name(tensor.dtype)
        rows.append(TensorRow(name, dtype, list(tensor.shape), absmax, nonfinite))
    return rows


def _print_tensors(rows: list[TensorRow], loss_scale: float) -> None:
    cells = [("tensor", "dtype", "shape", "absmax", "non-finite")]
    for row in rows:
        absmax = "-" if row.absmax is None else f"{row.absmax:.4g}"
        nonfinite = "-" if row.nonfinite is None else str(row.nonfinite)
        cells.append((row.tensor, row.dtype, str(row.shape), absmax, nonfinite))
    for line in align_columns(cells, left=5):
        echo(line)
    if loss_scale != 1:
        echo(
            f"grad …: times the loss scale, {loss_scale:g}; divide by it for the gradient. "
            "norm is without it."
        )


def _flatten(values: dict[str, Any]) -> "dict[str, Tensor]":
    """The tensors inside the values; where a value holds several, with their number: name[0]."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    tensors = {}
    for name, value in values.items():
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        if len(leaves) == 1:
            tensors[name] = leaves[0]
        else:
            for i, leaf in enumerate(leaves):
                tensors[f"{name}[{i}]"] = leaf
    return tensors


def _save_tensors(result: "Replayed", path: Path) -> None:
    """Writes inputs, outputs and gradients as safetensors: input.NAME, output.NAME, …"""
    from halfstep.checkpoint.safetensors_file import write_safetensors

    groups = {
        "input": _flatten(result.inputs),
        "output": _flatten(result.outputs),
        "gradient": result.gradients,
    }
    tensors = {}
    for kind, group in groups.items():
        for name, tensor in group.items():
            tensors[f"{kind}.{name}"] = tensor
    assert result.row is not None
    metadata = {"gradient": "times the loss scale", "scale": repr(result.row.scale)}
    write_safetensors(path, tensors, metadata)
