"""`halfstep train`: one run by flags or by the user's builder, with checkpoints, a log and weights in a folder."""

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli import options__words as words
from halfstep.cli import output as text
from halfstep.experiment import training_run as runs
from halfstep.experiment import training_run__going as going

if TYPE_CHECKING:
    from halfstep.experiment.builders__build import Built

_WITH_BUILD = ("build", "epochs", "seed")


def train(
    ctx: typer.Context, net: words.Net = "mlp", data: words.Data = "sample", path: words.Where = None,
    precision: words.Name = "fp32", epochs: words.Epochs = 4, batch: words.Batch = 64,
    optimizer: words.Maker = "momentum", lr: words.Rate = None, schedule: words.Plan = "linear",
    accumulate: words.Accumulate = 1, clip_norm: words.Clip = None, ema: words.Average = None, seed: words.Seed = 0,
    samples: words.Samples = None, test_samples: words.TestSamples = None, device: words.Device = "auto",
    build: words.Build = None, sink: words.Sink = None,
    out: Annotated[Path, typer.Option(help="folder of the run")] = Path("runs/train"),
    resume: Annotated[
        str | None, typer.Option(help="auto: go on from OUT's newest checkpoint, or begin; or a checkpoint's path")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="throw away what OUT holds of a run")] = False,
    plain: words.Plain = False, as_json: words.Json = False,
) -> None:  # fmt: skip
    """Train a network by name, or a model of your own.

    Stopped at any moment, it goes on exactly there with --resume auto. OUT gets a checkpoint per epoch and at a
    signal, log.jsonl, and at the end weights.safetensors.

    \b
    halfstep train                                            an MLP on the shipped sample, into runs/train
    halfstep train --net resnet18 --data cifar10 --precision O2 --batch 128 --epochs 10 --out runs/r18
    halfstep train --net mine:net --data photos/ --accumulate 4 --clip-norm 1 --ema 0.999 --out runs/photos
    halfstep train --build train:build --epochs 20 --out runs/own --resume auto

    Exit code: 0 done, 2 a mistake or an error, 130 and 143 when stopped, with a checkpoint.
    """
    asked = _asked(ctx, build)
    summary = _held(asked, out, resume, sink, fresh=fresh, plain=plain, as_json=as_json)
    if as_json:
        text.dump(summary)


def _asked(ctx: typer.Context, build: str | None) -> runs.Asked:
    if not 0 <= ctx.params["seed"] < 1 << 63:
        raise ValueError(f"--seed: expected a whole number of 0 or more, got {ctx.params['seed']}")
    given = {
        n
        for n in ctx.params
        if (source := ctx.get_parameter_source(n)) and source.name == "COMMANDLINE"
    }
    names = {f.name for f in fields(runs.Asked)}
    if build is None:
        asked = runs.Asked(**{name: value for name, value in ctx.params.items() if name in names})
        return replace(asked, lr=asked.settings().lr)
    unused = sorted(f"--{name.replace('_', '-')}" for name in given & names - set(_WITH_BUILD))
    if unused:
        raise ValueError(
            f"{', '.join(unused)}: expected no such option beside --build, whose model and data are already made. "
            "Say it in the builder."
        )
    epochs = ctx.params["epochs"] if "epochs" in given else 0
    return runs.Asked(build=build, epochs=epochs, seed=ctx.params["seed"])


def _held(
    asked: runs.Asked,
    out: Path,
    resume: str | None,
    sink: int | None,
    *,
    fresh: bool,
    plain: bool,
    as_json: bool,
) -> dict[str, Any]:
    from halfstep.experiment.output_folder import held

    made = runs.make(asked, training=True)  # before the folder is touched: most mistakes show here
    asked = _with_epochs(asked, made)
    _note_verify(made.model.captures)
    with held(out):
        if fresh:
            runs.clear(out)
        _check_folder(out, asked, resume)
        file = sys.stderr if as_json else sys.stdout
        if resume not in (None, "auto"):
            going.refuse_fewer(Path(resume), asked.epochs)
        over = going.over(out, asked.epochs) if resume == "auto" else None
        if over is not None:
            print(_nothing(out, asked.epochs, over), file=file)
            return over.summary(out)
        runs.write(out, asked, text.command())
        return _fit(made, asked, out, resume, sink, plain=plain, file=file)


def _nothing(out: Path, epochs: int, over: going.Over) -> str:
    has = f"{out} has {text.plural(over.epochs, 'epoch')} already, up to step {over.steps}, and --epochs is {epochs}"
    return f"{has}: nothing was done. To train further: --epochs {over.epochs + 1}, or more"


def _note_verify(graphs: Any) -> None:
    if graphs.verify and graphs.device.type != "cuda":
        where = f"on {graphs.device.type}, where no step is replayed from a graph"
        typer.echo(f"note: verify={graphs.verify}: there is nothing to verify {where}", err=True)


def _with_epochs(asked: runs.Asked, made: "Built") -> runs.Asked:
    epochs = asked.epochs or made.arguments.get("epochs")
    if not epochs:
        raise ValueError(
            f"epochs: the builder {asked.build} says none, and neither does the command. Add --epochs 10"
        )
    return replace(asked, epochs=epochs)


def _check_folder(out: Path, asked: runs.Asked, resume: str | None) -> None:
    from halfstep import checkpoint

    there = checkpoint.listing(out)
    if resume == "auto":
        runs.check(out, asked)
        if not there:
            typer.echo(
                f"note: no checkpoint in {out} yet: the run begins at its beginning", err=True
            )
    elif resume is None and there:
        raise ValueError(
            f"out: {out} holds a run already, up to {there[-1].name}. Go on with --resume auto, name another folder "
            "(--out), or start over (--fresh)."
        )
    elif resume is not None and not Path(resume).exists():
        raise FileNotFoundError(
            f"resume: expected auto, a checkpoint or the folder of a run, found nothing at {resume}. "
            "--resume auto goes on where OUT has a checkpoint and begins where it has none."
        )


def _fit(
    made: "Built",
    asked: runs.Asked,
    out: Path,
    resume: str | None,
    sink: int | None,
    *,
    plain: bool,
    file: Any,
) -> dict[str, Any]:
    from halfstep.callbacks import Checkpoint, JSONLLog
    from halfstep.model.fit_arguments import check_callbacks

    arguments: dict[str, Any] = {
        **made.arguments,
        "epochs": asked.epochs,
        "resume": resume or made.arguments.get("resume"),
    }
    if sink is not None:
        arguments["sink"] = sink
    mine = check_callbacks(arguments.pop("callbacks", ()))
    saver = (
        []
        if any(isinstance(each, Checkpoint) and each.folder == out for each in mine)
        else [Checkpoint(out)]
    )
    shown, kept = _progress(plain, file), going.Kept()
    arguments["callbacks"] = [
        *mine,
        JSONLLog(out / runs.LOG, overwrite=True),
        *shown,
        _watch(kept.begin),
        *saver,
    ]
    try:
        with going.quiet():
            run = made.model.fit(data=made.data, **arguments)
    except (KeyboardInterrupt, SystemExit) as end:  # the latter is SIGTERM, after its checkpoint
        typer.echo(_stopped(out), err=True)
        raise typer.Exit(text.code(end)) from None
    except (OSError, ValueError) as error:  # a full disk at the end takes the last checkpoint
        kept.rescue(made.model, out / runs.WEIGHTS, error)
        raise
    made.model.save(out / runs.WEIGHTS)
    print(f"written: {out}/{{{runs.LOG}, {runs.WEIGHTS}}} and checkpoints", file=file)
    return {
        "out": str(out),
        "resumed": run.resumed,
        "steps": run.global_step,
        "history": run.history,
    }


def _stopped(out: Path) -> str:
    """What is kept, and the command that goes on; --fresh would throw it away."""
    from halfstep import checkpoint

    kept = checkpoint.latest(out)
    if kept is None:
        return "halfstep: stopped before the first checkpoint; nothing is kept"
    again = text.command(without=("--fresh", "--resume"), add="--resume auto")
    return (
        f"halfstep: stopped after step {checkpoint.step_of(kept)}, kept in {kept}. Go on: {again}"
    )


def _progress(plain: bool, file: Any) -> list[Any]:
    """A bar on a terminal; a line per epoch elsewhere; --plain: the lines of seed 000 too."""
    from halfstep.callbacks import ProgressBar, ProgressLines

    said = _watch(lambda run: run.resumed and print(_from(run), file=file, flush=True))
    epochs = _watch(epoch_end=lambda run: print(_line(run), file=file, flush=True))
    if sys.stderr.isatty() and not plain:
        return [said, ProgressBar()]
    return [said, *([ProgressLines(file=file)] if plain else []), epochs]


def _watch(begin: Any = None, epoch_end: Any = None) -> Any:
    from halfstep.callbacks import Lambda

    made = Lambda(begin=begin, epoch_end=epoch_end)
    made.writes = True  # nothing of it decides a run: no notice when a resumed one has it not
    return made


def _from(run: Any) -> str:
    epoch = min(run.epoch + run.epoch_over, run.epochs)
    return (
        f"goes on after step {run.position}, in epoch {epoch} of {run.epochs}, from {run.resumed}"
    )


def _line(run: Any) -> str:
    entry = {name: value for name, value in run.history[-1].items() if isinstance(value, float)}
    return f"epoch {run.epoch}/{run.epochs}  {text.scores(entry)}  {run.seconds:.1f} s"
