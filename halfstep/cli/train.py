"""`halfstep train`: one run, by options or by the user's builder, in a folder of its own."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from halfstep.cli.options import (
    AccumulateOption,
    BatchOption,
    BuildOption,
    ClassWeightsOption,
    ClipNormOption,
    DataOption,
    DataPathOption,
    DeviceOption,
    DropOption,
    EmaOption,
    EpochsOption,
    ExactOption,
    JsonOption,
    LimitBatchesOption,
    LogicalOption,
    LrOption,
    MaxTimeOption,
    NetOption,
    OptimizerOption,
    PlainOption,
    PrecisionOption,
    RanksOption,
    SamplesOption,
    ScheduleOption,
    SeedOption,
    SinkOption,
    SizeOption,
    SkipDamagedOption,
    SplitSeedOption,
    TargetOption,
    TaskOption,
    TestSamplesOption,
    TestShareOption,
    is_typed,
    option_flag,
)
from halfstep.cli.output import command_line, echo, exit_code, note_usual_net, print_json
from halfstep.cli.output_links import refuse_links_out_of
from halfstep.cli.rank_options import RankOptions
from halfstep.cli.rank_process import note_new_attempt
from halfstep.experiment import training_run
from halfstep.experiment.rank_agreement import refused_together
from halfstep.experiment.run_progress import (
    FinishedRun,
    finished_run,
    record_weights,
    refuse_fewer_epochs,
)
from halfstep.experiment.training_run import WeightRescue, silence_signal_message
from halfstep.storage.url import is_store_url, parse_store_url
from halfstep.utils.durations import duration_s
from halfstep.utils.rank_environment import (
    attempt_of_environment,
    rank_count_of_environment,
    rank_of_environment,
)
from halfstep.utils.text import plural, printable

if TYPE_CHECKING:
    from halfstep.callbacks import Checkpoint
    from halfstep.distributed import Ranks
    from halfstep.engine import Callback, Run
    from halfstep.experiment.builders import RunParts

# Settings that may be given beside --build; a builder decides all others.
SETTINGS_BESIDE_BUILD = {"build", "epochs", "seed", "limit_batches", "ranks"}

EXIT_TERMINATED = 143  # 128 + SIGTERM
EXIT_TIME_OVER = 124  # as timeout(1) has it

MAX_SEED = (1 << 63) - 1  # torch's generators take signed 64-bit seeds

HELP = """Train a network by name, or a model of your own.

Stopped at any moment, it goes on exactly there with --resume auto. OUT gets a checkpoint per epoch
and at a signal, log.jsonl, and at the end weights.safetensors.

\b
halfstep train  an MLP on the shipped sample, \
into runs/train
halfstep train --net resnet18 --data cifar10 --precision O2 --batch 128 --epochs 10 --out runs/r18
halfstep train --net resnet18 --data photos/ --size 224 --class-weights balanced --out runs/photos
halfstep train --data csv:houses.csv --target price --out runs/houses
halfstep train --net mine:net --data photos/ --accumulate 4 --clip-norm 1 --ema 0.999 \
--out runs/mine
halfstep train --build train:build --epochs 20 --out runs/own --resume auto
halfstep train --ranks 4 --out runs/four  four processes, one training

Exit code: 0 done, 2 a mistake or an error; 124 when --max-time was over, 130 and 143 when stopped
by a signal, each with a checkpoint.
"""


# Beside checkpoints, which never follow links.
WRITTEN_FILES = (training_run.RUN_FILE, training_run.LOG_FILE, training_run.WEIGHTS_FILE)


def train(
    ctx: typer.Context,
    net: NetOption = "mlp",
    data: DataOption = "sample",
    path: DataPathOption = None,
    precision: PrecisionOption = "fp32",
    epochs: EpochsOption = 4,
    batch: BatchOption = 64,
    optimizer: OptimizerOption = "momentum",
    lr: LrOption = None,
    schedule: ScheduleOption = "linear",
    accumulate: AccumulateOption = 1,
    clip_norm: ClipNormOption = None,
    ema: EmaOption = None,
    seed: SeedOption = 0,
    samples: SamplesOption = None,
    test_samples: TestSamplesOption = None,
    size: SizeOption = None,
    test_share: TestShareOption = None,
    split_seed: SplitSeedOption = None,
    skip_damaged: SkipDamagedOption = None,
    class_weights: ClassWeightsOption = None,
    target: TargetOption = None,
    task: TaskOption = None,
    drop: DropOption = None,
    device: DeviceOption = "auto",
    build: BuildOption = None,
    sink: SinkOption = None,
    max_time: MaxTimeOption = None,
    limit_batches: LimitBatchesOption = None,
    ranks: RanksOption = None,
    exact: ExactOption = None,
    logical: LogicalOption = None,
    max_restarts: Annotated[
        int,
        typer.Option(help="with --ranks: how often all are started again when one has ended"),
    ] = 0,
    out: Annotated[
        str,
        typer.Option(
            metavar="<path>", help="folder of the run, or the URL of a store: s3://bucket/run"
        ),
    ] = "runs/train",
    resume: Annotated[
        str | None,
        typer.Option(
            help="auto: go on from OUT's newest checkpoint, or begin; or a checkpoint's path"
        ),
    ] = None,
    discard_later: Annotated[
        bool,
        typer.Option(
            "--discard-later",
            help="with --resume CHECKPOINT: throw away the later checkpoints of OUT",
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="throw away what OUT holds of a run")
    ] = False,
    plain: PlainOption = False,
    as_json: JsonOption = False,
) -> None:
    """The command; its help is HELP. Most options are read from `ctx.params`."""
    from halfstep import checkpoint
    from halfstep.callbacks import Checkpoint
    from halfstep.experiment.output_folder import lock_output_folder

    if is_store_url(out):
        parse_store_url(out, "--out")
    # Settings, model and data come before the folder is touched: most mistakes show here.
    time_limit_s = None if max_time is None else duration_s("--max-time", max_time)
    options = RankOptions(ranks, exact, logical, max_restarts)
    options.check(device)
    settings = _read_settings(ctx, options)
    if options.must_launch:
        raise typer.Exit(options.launch(device))

    built = training_run.build_run(settings, training=True)
    note_usual_net(ctx)
    # What the data decides is written down too, so that every command uses the same.
    settings = replace(_with_epochs(settings, built), **built.chosen)
    _warn_useless_verify(built)

    saver = Checkpoint(out)
    folder = saver.folder

    # Ranks that were started again go on where they were, whatever began the run.
    job = _join(built)
    if attempt_of_environment() > 0:
        note_new_attempt()
        fresh = False
        has_checkpoint = job.broadcast_object(bool(checkpoint.listing(folder)), "the checkpoints")
        resume = "auto" if has_checkpoint else resume
        discard_later = discard_later and not has_checkpoint

    # Standard output is left to the JSON.
    log_file = sys.stderr if as_json else sys.stdout
    with ExitStack() as folder_lock:
        # Rank 0 alone prepares the folder, and all know whether there is something to train.
        finished = None
        with refused_together(job, "the output folder"):
            if job.index == 0:
                folder_lock.enter_context(lock_output_folder(folder))
                finished = _prepare_folder(
                    saver, settings, built.facts, resume, fresh=fresh, discard_later=discard_later
                )
        is_finished = finished is not None and finished.missing is None
        is_finished = job.broadcast_object(is_finished, "whether the run is finished")
        if finished is not None and is_finished:
            if finished.lost_lines is not None:
                echo(f"note: {out}: {finished.lost_lines}", err=True)
            echo(_nothing_to_do_message(folder, settings.epochs, finished), file=log_file)
            if saver.store is not None:  # it may have been stopped before all was uploaded
                saver.store.begin(finished.steps)
                saver.finish_uploads()
            summary = finished.summary(folder)
        elif not is_finished:
            summary = _fit(
                built,
                settings,
                saver,
                resume,
                sink,
                time_limit_s,
                discard_later=discard_later,
                plain=plain,
                log_file=log_file,
            )
    if as_json and job.index == 0:
        print_json(summary)


def _join(built: "RunParts") -> "Ranks":
    """The ranks that train this model together; this process, where it was started alone."""
    from halfstep.distributed import Ranks

    ranks: Ranks | None = getattr(built.model.step, "ranks", None)
    if ranks is None and rank_count_of_environment() > 1:
        raise ValueError(
            "build: expected a model that all ranks train together, received one that each rank "
            "trains by itself, into the same folder; leave strategy='none' out, and let "
            "hs.Model make the step"
        )
    return ranks or Ranks()


def _prepare_folder(
    saver: "Checkpoint",
    settings: training_run.TrainSettings,
    facts: dict[str, Any],
    resume: str | None,
    *,
    fresh: bool,
    discard_later: bool,
) -> FinishedRun | None:
    """Checks the locked folder, and empties it with --fresh. The run in it, if it is finished."""
    out = saver.folder
    if fresh:
        training_run.remove_run(out)
    refuse_links_out_of(out, WRITTEN_FILES)
    _open_store(saver, resume, fresh=fresh)
    _check_folder(out, settings, facts, resume)
    _check_going_back(out, resume, discard_later=discard_later)
    if resume not in (None, "auto"):
        refuse_fewer_epochs(Path(resume), settings.epochs)

    finished = finished_run(out, settings.epochs) if resume == "auto" else None
    if finished is not None and finished.missing is not None:
        echo(
            f"note: {out}: {finished.missing}. Training is done, and what is missing is "
            f"written again from {finished.checkpoint.name}",
            err=True,
        )
    return finished


def _read_settings(ctx: typer.Context, rank_options: RankOptions) -> training_run.TrainSettings:
    """The settings that the options say; with --build, the builder and the few beside it."""
    options = ctx.params
    if not 0 <= options["seed"] <= MAX_SEED:
        raise ValueError(f"--seed: expected a whole number of 0 or more, got {options['seed']}")

    options = {
        **options,
        **rank_options.settings(),
        "limit_batches": _read_limit(options["limit_batches"]),
    }
    names = {field.name for field in fields(training_run.TrainSettings)}
    if options["build"] is None:
        values = {name: value for name, value in options.items() if name in names}
        settings = training_run.TrainSettings(**values)
        # The learning rate is written down as the number that None stands for.
        return replace(settings, lr=settings.comparison_settings().lr)

    typed = {name for name in options if is_typed(ctx, name)}
    refused = sorted(option_flag(name) for name in typed & names - SETTINGS_BESIDE_BUILD)
    if refused:
        raise ValueError(
            f"{', '.join(refused)}: expected no such option beside --build, whose model and data "
            "are already made. Say it in the builder."
        )
    epochs = options["epochs"] if "epochs" in typed else 0
    return training_run.TrainSettings(
        build=options["build"],
        epochs=epochs,
        seed=options["seed"],
        limit_batches=options["limit_batches"],
        ranks=options["ranks"],
    )


def _read_limit(text: str | None) -> float | None:
    """A number of batches, or a fraction of all: "20", "0.1", "10%"."""
    from halfstep.engine.limits import LIMIT_EXPECTED, BatchLimit

    if text is None:
        return None
    limit: float
    try:
        if text.endswith("%"):
            limit = float(text[:-1]) / 100
        else:
            limit = int(text) if text.strip("+-").isdigit() else float(text)
        return BatchLimit.of(limit).value
    except ValueError:
        raise ValueError(f"--limit-batches: expected {LIMIT_EXPECTED}, got {text!r}") from None


def _with_epochs(
    settings: training_run.TrainSettings, built: "RunParts"
) -> training_run.TrainSettings:
    """The settings with a number of epochs: the command's, else the builder's."""
    epochs = settings.epochs or built.fit_arguments.get("epochs")
    if not epochs:
        raise ValueError(
            f"epochs: the builder {settings.build} says none, and neither does the command. "
            "Add --epochs 10"
        )
    return replace(settings, epochs=epochs)


def _warn_useless_verify(built: "RunParts") -> None:
    graphs = built.model.captures
    if graphs.verify and graphs.device.type != "cuda":
        echo(
            f"note: verify={graphs.verify}: there is nothing to verify on {graphs.device.type}, "
            "where no step is replayed from a graph",
            err=True,
        )


def _open_store(saver: "Checkpoint", resume: str | None, *, fresh: bool) -> None:
    """Where OUT is the URL of a store: brings what the run goes on from, or begins anew there."""
    if saver.store is None:
        return
    if fresh:
        files = (training_run.RUN_FILE, training_run.LOG_FILE, training_run.WEIGHTS_FILE)
        saver.store.start_over([*files, *training_run.REPORT_FILES])
    if resume == "auto" and not fresh:
        saver.fetch()
    elif resume is None:
        saver.store.check_no_other_run(None)


def _check_folder(
    out: Path, settings: training_run.TrainSettings, facts: dict[str, Any], resume: str | None
) -> None:
    """Raises an error where the folder and --resume do not fit each other."""
    from halfstep import checkpoint

    checkpoints = checkpoint.listing(out)
    if resume == "auto":
        training_run.check_same_run(out, settings)
        training_run.check_same_data(out, facts)
        if not checkpoints:
            echo(f"note: no checkpoint in {out} yet: the run begins at its beginning", err=True)
    elif resume is None and checkpoints:
        raise ValueError(
            f"out: {out} holds a run already, up to {checkpoints[-1].name}. Go on with "
            "--resume auto, name another folder (--out), or start over (--fresh)."
        )
    elif resume is not None and not Path(resume).exists():
        raise FileNotFoundError(
            "resume: expected auto, a checkpoint or the folder of a run, found nothing at "
            f"{resume}. --resume auto goes on where OUT has a checkpoint and begins where it has "
            "none."
        )


def _check_going_back(out: Path, resume: str | None, *, discard_later: bool) -> None:
    """Refuses a checkpoint with later ones in OUT, unless the user says to throw them away."""
    if resume in (None, "auto"):
        if discard_later:
            raise ValueError(
                "--discard-later: expected it beside --resume and the path of a checkpoint in OUT, "
                "whose later checkpoints it throws away"
            )
        return
    later = _later_checkpoints(out, Path(resume))
    if later and not discard_later:
        raise ValueError(
            f"--resume: {out} holds checkpoints of later steps than {resume}, up to "
            f"{later[-1].name}. To go back to that one and throw {plural(len(later), 'later one')} "
            "away, add --discard-later; to keep them, go on in another folder: --out. "
            "--resume auto goes on from the newest."
        )


def _later_checkpoints(out: Path, resume: Path) -> list[Path]:
    """The checkpoints in OUT of later steps than the one to go on from."""
    from halfstep import checkpoint

    path = checkpoint.choose(resume)
    if path is None:
        return []
    loop = checkpoint.load(path, verify=False).tree
    position = loop.get("loop", {}).get("global_step") if isinstance(loop, dict) else None
    if not isinstance(position, int):
        return []  # fit refuses it
    return [path for path in checkpoint.listing(out) if checkpoint.step_of(path) > position]


def _nothing_to_do_message(out: Path, epochs: int, finished: FinishedRun) -> str:
    epochs_done = plural(finished.epochs, "epoch")
    return (
        f"{out} has {epochs_done} already, up to step {finished.steps}, and --epochs is {epochs}: "
        f"nothing was done. To train further: --epochs {finished.epochs + 1}, or more"
    )


def _fit(
    built: "RunParts",
    settings: training_run.TrainSettings,
    own_saver: "Checkpoint",
    resume: str | None,
    sink: int | None,
    time_limit_s: float | None,
    *,
    discard_later: bool,
    plain: bool,
    log_file: TextIO,
) -> dict[str, Any]:
    """Trains, writes the log and the weights into the folder, and returns the summary."""
    from halfstep import checkpoint
    from halfstep.callbacks import Checkpoint, JSONLLog
    from halfstep.engine.limits import TIME_IS_OVER
    from halfstep.engine.signals import OTHER_RANK
    from halfstep.model.fit_arguments import check_callbacks

    out = own_saver.folder
    arguments = dict(built.fit_arguments)
    arguments["epochs"] = settings.epochs
    arguments["resume"] = resume or built.fit_arguments.get("resume")
    if sink is not None:
        arguments["sink"] = sink
    if time_limit_s is not None:
        arguments["max_time"] = time_limit_s

    # The builder's callbacks come first; its own Checkpoint in this folder replaces ours.
    # At `begin`, all that can refuse the run has been asked; run.json is written after all of them.
    def remove_later(run: "Run") -> None:
        if discard_later and run.resumed is not None:
            training_run.remove_later(out, run.position)

    def write_run_file(run: "Run") -> None:
        training_run.write_run_file(out, settings, command_line(), built.facts)

    log = JSONLLog(out / training_run.LOG_FILE, overwrite=True)
    if resume is not None and resume != "auto":
        checkpoint_path = checkpoint.choose(resume)
        if checkpoint_path is not None:
            log.copy_from = checkpoint_path.parent / training_run.LOG_FILE
    rescue = WeightRescue()
    callbacks = check_callbacks(arguments.get("callbacks", ()))
    savers = [c for c in callbacks if isinstance(c, Checkpoint) and c.folder == out]
    for saver in (own_saver, *savers):
        saver.allows_later = discard_later  # remove_later removes them
    shown: list[Callback] = []
    if arguments.pop("progress", True) or plain:
        shown = _progress_callbacks(callbacks, plain, log_file)
    callbacks = [
        *callbacks,
        log,
        *shown,
        _print_callback(on_begin=rescue.begin),
        _print_callback(on_begin=remove_later),
    ]
    if not savers:
        callbacks.append(own_saver)
    last = _print_callback(on_begin=write_run_file)
    last.last = True
    callbacks.append(last)
    arguments["callbacks"] = callbacks

    weights_path = out / training_run.WEIGHTS_FILE
    try:
        with silence_signal_message():
            run = built.model.fit(data=built.data, progress=False, **arguments)
    except (KeyboardInterrupt, SystemExit) as stop:  # SIGTERM raises the latter, with a checkpoint
        echo(_stop_message(out), err=True)
        raise typer.Exit(exit_code(stop)) from None
    except (OSError, ValueError) as error:  # a disk that is full takes the last checkpoint with it
        rescue.rescue(built.model, weights_path, error)
        raise
    if run.stopped == OTHER_RANK:
        echo(_stop_message(out), err=True)
        raise typer.Exit(EXIT_TERMINATED)
    if run.stopped is not None and run.stopped.startswith(TIME_IS_OVER):
        echo(f"{run.stopped}\n{_stop_message(out)}", err=True)
        raise typer.Exit(EXIT_TIME_OVER)
    built.model.save(weights_path)
    if rank_of_environment() == 0:
        record_weights(out)
        for saver in savers or [own_saver]:
            saver.finish_uploads()

    files = f"{{{training_run.LOG_FILE}, {training_run.WEIGHTS_FILE}}}"
    shown_out = out if own_saver.store is None else own_saver.store.url
    echo(f"written: {printable(shown_out)}/{files} and checkpoints", file=log_file)
    return {
        "out": str(shown_out),
        "resumed": run.resumed,
        "steps": run.global_step,
        "history": run.history,
    }


def _stop_message(out: Path) -> str:
    """What a stopped run has saved, and the command that continues it.

    That command is without --fresh, which would throw it away.
    """
    from halfstep import checkpoint

    newest = checkpoint.latest(out)
    if newest is None:
        return "halfstep: stopped before the first checkpoint; nothing is kept"
    step = checkpoint.step_of(newest)
    command = command_line(without=("--fresh", "--resume"), add="--resume auto")
    return f"halfstep: stopped after step {step}, kept in {newest}. Go on: {command}"


def _progress_callbacks(
    callbacks: "list[Callback]", plain: bool, log_file: TextIO
) -> "list[Callback]":
    """The display that `fit` has, its lines on `log_file`; with --plain, lines within epochs too.

    Beside lines of the builder's own, the line of an epoch, which has the scores.
    """
    from halfstep.callbacks import ProgressBar, ProgressLines

    if plain:
        return [ProgressBar("lines", file=log_file), ProgressLines(file=log_file)]
    if any(isinstance(callback, ProgressBar) for callback in callbacks):
        return []
    if any(callback.shows_progress for callback in callbacks):
        return [ProgressBar("lines", file=log_file)]
    return [ProgressBar(file=log_file)]


def _print_callback(on_begin: "Callable[[Run], None]") -> "Callback":
    """A callback that only reports: a resumed run without it gives no notice."""
    from halfstep.callbacks import Lambda

    callback = Lambda(begin=on_begin)
    callback.writes = True
    return callback
