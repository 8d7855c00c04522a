"""`halfstep compare`: one network in several precisions, with progress, a table and a report."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.options import (
    BatchOption,
    ClassWeightsOption,
    DataOption,
    DropOption,
    ExactOption,
    LogicalOption,
    LrOption,
    PlainOption,
    RanksOption,
    SamplesOption,
    SizeOption,
    SkipDamagedOption,
    SplitSeedOption,
    TargetOption,
    TaskOption,
    TestSamplesOption,
    TestShareOption,
    parse_names,
)
from halfstep.cli.output import command_line, echo, exit_code, print_json
from halfstep.cli.output_links import refuse_links_out_of
from halfstep.cli.rank_options import RankOptions
from halfstep.experiment.training_run import silence_signal_message
from halfstep.utils.rank_environment import rank_of_environment

if TYPE_CHECKING:
    from halfstep.compare import Settings
    from halfstep.compare.progress import Progress

USUAL_SEEDS = (0, 1, 2)

HELP = """Train one network in several precisions and say which to use.

Same weights, same batches, same seeds in each. Ends with a table (time, memory, loss, accuracy, the
difference from the first precision and whether it is proved) and OUT/report.html. Interrupted, the
same command goes on. More precisions or seeds for the same OUT: only what is missing is trained.

\b
halfstep compare                                  the sample, about a minute
halfstep compare --seeds 5 --margin 0.3           surer, and stricter
halfstep compare --net resnet18 --data cifar10 --precisions fp32,O2,O2+bf16 --epochs 10 --batch 128
halfstep compare --net mine:build --data photos/  your own network and images

Exit code: 0 done, 1 when the reference failed, 2 a mistake in what was asked, 130 and 143 when
stopped.
"""


def compare(
    net: Annotated[
        str,
        typer.Option(
            help="a network by name (mlp, lenet5, resnet18 …), module:function or file.py:function"
        ),
    ] = "mlp",
    data: DataOption = "sample",
    path: Annotated[
        str | None, typer.Option(help="where the named data set lies: folder, archive or URL")
    ] = None,
    precisions: Annotated[
        str | None,
        typer.Option(
            help="names; the first is the reference. Else those of the comparison in OUT, or fp32 "
            "and what the device has units for: bf16, O1+bf16 …"
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="how many (5), or which (0,7,42). Else those in OUT, or 3"),
    ] = None,
    epochs: Annotated[int, typer.Option(help="passes over the data")] = 4,
    batch: BatchOption = 64,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw")] = "momentum",
    lr: LrOption = None,
    schedule: Annotated[
        str, typer.Option(help="constant, linear, cosine, poly, steps or one_cycle")
    ] = "linear",
    sink: Annotated[
        int | None, typer.Option(help="steps between two reads of results by the host")
    ] = None,
    margin: Annotated[float, typer.Option(help="points of accuracy that count as the same")] = 0.5,
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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1")] = "auto",
    ranks: RanksOption = None,
    exact: ExactOption = None,
    logical: LogicalOption = None,
    out: Annotated[Path, typer.Option(help="folder of the comparison")] = Path("runs/compare"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="throw away what OUT holds of a comparison")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="run again what failed")] = False,
    plain: PlainOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """The command; its help is HELP."""
    from halfstep.compare import Settings, table
    from halfstep.compare import compare as run_comparison
    from halfstep.experiment import output_folder
    from halfstep.experiment.settings import BY_DEVICE
    from halfstep.report import write as write_report

    rank_options = RankOptions(ranks, exact, logical)
    rank_options.check(device)

    # What to train: as typed, or as before in this folder, or the usual.
    what_is_there = None if fresh else output_folder.precisions_and_seeds(out)
    usual_precisions, usual_seeds = what_is_there or (BY_DEVICE, USUAL_SEEDS)
    settings = Settings(
        net=net,
        data=data,
        path=path,
        precisions=usual_precisions if precisions is None else parse_names(precisions),
        seeds=usual_seeds if seeds is None else _parse_seeds(seeds),
        epochs=epochs,
        batch=batch,
        optimizer=optimizer,
        lr=lr,
        schedule=schedule,
        sink=sink,
        margin=margin,
        samples=samples,
        test_samples=test_samples,
        size=size,
        test_share=test_share,
        split_seed=split_seed,
        skip_damaged=skip_damaged,
        class_weights=class_weights,
        target=target,
        task=task,
        drop=drop,
        device=device,
        **rank_options.settings(),
    )
    if rank_options.must_launch:
        raise typer.Exit(rank_options.launch(device))

    refuse_links_out_of(out, _written_files(settings))

    # Run. A signal ends it with SystemExit, after a checkpoint.
    try:
        with silence_signal_message():
            summary = run_comparison(
                settings,
                out,
                progress=_choose_progress(plain=plain, as_json=as_json),
                fresh=fresh,
                retry=retry,
                command=command_line(),
            )
    except output_folder.OtherComparisonError as error:
        from halfstep.cli.other_comparison import ask_how_to_go_on

        ask_how_to_go_on(error, out)
    except (KeyboardInterrupt, SystemExit) as stop:
        echo(_stop_message(settings, out), err=True)
        raise typer.Exit(exit_code(stop)) from None

    reference_failed = summary["rows"][0]["verdict_kind"] == "failed"
    end = typer.Exit(1 if reference_failed else 0)
    if rank_of_environment() > 0:
        raise end

    # Show the summary: as JSON, as a coloured table on a terminal, or as plain text.
    written = write_report(out)
    if as_json:
        print_json(summary)
    else:
        if sys.stdout.isatty() and not plain:
            table.print_table(summary)
        else:
            echo("\n" + table.text(summary))
        echo(f"written: {', '.join(map(str, written))}")

    raise end


def _written_files(settings: "Settings") -> list[str]:
    """The files of a comparison, and the folders of its runs."""
    from halfstep.experiment import output_folder

    names = [output_folder.SUMMARY_FILE, *output_folder.REPORT_FILES]
    for precision in settings.precisions:
        for seed in settings.seeds:
            run = output_folder.run_folder(Path(), precision, seed)
            names.append(str(run / output_folder.RESULT_FILE))
    return names


def _choose_progress(*, plain: bool, as_json: bool) -> "Progress":
    """Bars on a terminal, lines elsewhere. With --json, standard output is left to the JSON."""
    from halfstep.compare.progress import BarProgress, LineProgress

    if sys.stderr.isatty() and not plain:
        return BarProgress()
    return LineProgress(steps=plain, file=sys.stderr if as_json else sys.stdout)


def _stop_message(settings: "Settings", out: Path) -> str:
    """What a stopped comparison has saved, and the command that continues it.

    That command is without --fresh, which would throw it away.
    """
    from halfstep import checkpoint
    from halfstep.experiment.output_folder import run_folder

    folders = [
        run_folder(out, precision, seed) for precision, seed in settings.precision_seed_pairs
    ]
    finished = [folder for folder in folders if (folder / "result.json").is_file()]
    unfinished = [folder for folder in folders if folder not in finished]
    has_checkpoint = any(checkpoint.listing(folder) for folder in unfinished)
    if not finished and not has_checkpoint:
        return "halfstep: stopped before the first step; nothing is lost, and nothing kept"

    saved = f"{len(finished)} of {len(folders)} runs"
    if has_checkpoint:
        saved += " and a checkpoint of the next"
    less = ", less --fresh" if "--fresh" in sys.argv else ""
    command = command_line(without=("--fresh",))
    return (
        f"halfstep: stopped; {out} keeps {saved}. "
        f"The same command goes on from here{less}: {command}"
    )


def _parse_seeds(text: str) -> tuple[int, ...]:
    """The seeds: "3" is three of them, 0, 1 and 2; "4,7" are those two, and "4," is that one."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [part for part in parts if part]
    if not numbers or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f"--seeds: expected how many (--seeds 5) or which (--seeds 0,7,42), got {text!r}"
        )
    if len(parts) > 1:
        return tuple(int(number) for number in numbers)

    count = int(text)
    if count == 0:
        raise ValueError(
            "--seeds: one number is how many, and 0 are too few: --seeds 3. "
            "Seed 0 alone: --seeds 0,"
        )
    return tuple(range(count))
