"""`halfstep compare`: flags to settings, the progress that fits the terminal, the table, the report."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from halfstep.cli import options__words as words
from halfstep.cli import output as said
from halfstep.experiment.training_run import quiet

HELP = """Train one network in several precisions and say which to use.

Same weights, same batches, same seeds in each. Ends with a table (time, memory, loss, accuracy, the difference from
the first precision and whether it is proved) and OUT/report.html. Interrupted, the same command goes on.

\b
halfstep compare                                        an MLP on the shipped sample: about a minute
halfstep compare --seeds 5 --margin 0.3                 surer, and stricter
halfstep compare --net resnet18 --data cifar10 --precisions fp32,O2,O2+bf16 --epochs 10 --batch 128
halfstep compare --net mine:build --data photos/        a network and images of your own

Exit code: 0 done, 1 when the reference failed, 2 a mistake in what was asked, 130 and 143 when stopped.
"""


def compare(
    net: Annotated[
        str, typer.Option(help="a network by name (mlp, lenet5, resnet18 …) or module:function")
    ] = "mlp",
    data: words.Data = "sample",
    path: Annotated[
        str | None, typer.Option(help="where the named data set lies: folder, archive or URL")
    ] = None,
    precisions: Annotated[
        str, typer.Option(help="names; the first is the reference")
    ] = "fp32,fp16,O1,O2",
    seeds: Annotated[str, typer.Option(help="how many (5), or which (0,7,42)")] = "3",
    epochs: Annotated[int, typer.Option(help="passes over the data")] = 4,
    batch: Annotated[int, typer.Option(help="samples in a batch")] = 64,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw")] = "momentum",
    lr: Annotated[
        float | None, typer.Option(help="learning rate; else the optimizer's usual one")
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="constant, linear, cosine, poly, steps or one_cycle")
    ] = "linear",
    sink: Annotated[int | None, typer.Option(help="steps between two looks of the host")] = None,
    margin: Annotated[float, typer.Option(help="points of accuracy that count as the same")] = 0.5,
    samples: Annotated[int | None, typer.Option(help="only so many training samples")] = None,
    test_samples: Annotated[int | None, typer.Option(help="only so many test samples")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1")] = "auto",
    out: Annotated[Path, typer.Option(help="folder of the comparison")] = Path("runs/compare"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="throw away what OUT holds of a comparison")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="run again what failed")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="lines instead of bars, no colour")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """HELP, for the command line."""
    from halfstep.compare import Settings

    settings = Settings(
        net=net, data=data, path=path, precisions=_names(precisions), seeds=_seeds(seeds), epochs=epochs, batch=batch,
        optimizer=optimizer, lr=lr, schedule=schedule, sink=sink, margin=margin, samples=samples,
        test_samples=test_samples, device=device,
    )  # fmt: skip
    summary = _run(settings, out, plain=plain, as_json=as_json, fresh=fresh, retry=retry)
    _show(summary, out, plain=plain, as_json=as_json)
    raise typer.Exit(1 if summary["rows"][0]["verdict_kind"] == "failed" else 0)


def _run(
    settings: Any, out: Path, *, plain: bool, as_json: bool, fresh: bool, retry: bool
) -> dict[str, Any]:
    from halfstep.compare import compare as go
    from halfstep.compare.progress import Bars, Lines, Progress

    file = sys.stderr if as_json else sys.stdout
    bars = sys.stderr.isatty() and not plain
    progress: Progress = Bars() if bars else Lines(steps=plain, file=file)
    try:
        with quiet():
            return go(
                settings, out, progress=progress, fresh=fresh, retry=retry, command=said.command()
            )
    except (KeyboardInterrupt, SystemExit) as end:  # the latter is SIGTERM, after its checkpoint
        typer.echo(_stopped(settings, out), err=True)
        raise typer.Exit(said.code(end)) from None


def _stopped(settings: Any, out: Path) -> str:
    """What is kept, and the command that goes on; --fresh would throw it away."""
    from halfstep import checkpoint
    from halfstep.experiment.output_folder import run_folder

    places = [run_folder(out, *pair) for pair in settings.pairs]
    done = [place for place in places if (place / "result.json").is_file()]
    begun = any(checkpoint.listing(place) for place in places if place not in done)
    if not done and not begun:
        return "halfstep: stopped before the first step; nothing is lost, and nothing kept"
    kept = f"{len(done)} of {len(places)} runs{' and a checkpoint of the next' if begun else ''}"
    less = ", less --fresh" if "--fresh" in sys.argv else ""
    again = said.command(without=("--fresh",))
    return (
        f"halfstep: stopped; {out} keeps {kept}. The same command goes on from here{less}: {again}"
    )


def _show(summary: dict[str, Any], out: Path, *, plain: bool, as_json: bool) -> None:
    from halfstep.compare import table
    from halfstep.report import write

    written = write(out)
    if as_json:
        return typer.echo(json.dumps(summary, indent=1, allow_nan=False))
    if sys.stdout.isatty() and not plain:
        table.show(summary)
    else:
        typer.echo("\n" + table.text(summary))
    typer.echo(f"written: {', '.join(map(str, written))}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _seeds(text: str) -> tuple[int, ...]:
    """ "3" is three of them, 0, 1 and 2; "4,7" are those two, and "4," is that one."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts if part) or not any(parts):
        raise ValueError(
            f"--seeds: expected how many (--seeds 5) or which (--seeds 0,7,42), got {text!r}"
        )
    if len(parts) == 1 and int(text) == 0:
        raise ValueError(
            "--seeds: one number is how many, and 0 are too few: --seeds 3. Seed 0 alone: --seeds 0,"
        )
    return tuple(int(part) for part in parts if part) if len(parts) > 1 else tuple(range(int(text)))
