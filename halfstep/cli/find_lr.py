"""`halfstep find-lr`: a learning rate to begin with, by a range test of a run."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

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
    JsonOption,
    NetOption,
    OptimizerOption,
    PrecisionOption,
    SamplesOption,
    SeedOption,
    SizeOption,
    SkipDamagedOption,
    SplitSeedOption,
    TargetOption,
    TaskOption,
    TestShareOption,
    is_typed,
    option_flag,
)
from halfstep.cli.output import echo, note_usual_net, print_json

# What a builder does not decide.
BESIDE_BUILD = {"build", "seed", "device"}

HELP = """Propose a learning rate, by a range test.

Trains for some updates while the rate grows from LOW to HIGH, stops where the loss diverges, and
names the rate at which the smoothed loss falls fastest; where few samples make that far too low,
a tenth of the rate of the lowest loss. Nothing is kept of this training.

\b
halfstep find-lr  the MLP of halfstep train
halfstep find-lr --net resnet18 --data cifar10 --precision O2 --optimizer adamw --plot lr.svg
halfstep find-lr --net resnet18 --data photos/ --size 224
halfstep find-lr --data csv:houses.csv --target price
halfstep find-lr --build train:build --json
"""


def find_lr(
    ctx: typer.Context,
    net: NetOption = "mlp",
    data: DataOption = "sample",
    path: DataPathOption = None,
    precision: PrecisionOption = "fp32",
    batch: BatchOption = 64,
    optimizer: OptimizerOption = "momentum",
    accumulate: AccumulateOption = 1,
    clip_norm: ClipNormOption = None,
    seed: SeedOption = 0,
    samples: SamplesOption = None,
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
    low: Annotated[float, typer.Option(help="the lowest rate")] = 1e-7,
    high: Annotated[float, typer.Option(help="the highest rate, if the loss holds out")] = 10.0,
    updates: Annotated[int, typer.Option(help="updates from the lowest to the highest")] = 100,
    plot: Annotated[Path | None, typer.Option(help="draw the curve into this .svg file")] = None,
    as_json: JsonOption = False,
) -> None:
    """The command; its help is HELP. The settings of the run are read from `ctx.params`."""
    from halfstep.experiment import training_run
    from halfstep.experiment.reading_progress import count_progress
    from halfstep.preflight.lr_curve import check_picture_name
    from halfstep.preflight.lr_range_test import find_lr as run_range_test

    if plot is not None:
        check_picture_name(plot, "--plot")
    settings = _run_settings(ctx)
    # The samples are decoded once, and what is chosen for the user is said, as for `train`.
    built = training_run.build_run(training_run.TrainSettings(**settings), training=True)
    note_usual_net(ctx)
    with count_progress("range test, updates", updates, visible=True) as add_updates:
        curve = run_range_test(
            built.model,
            built.data,
            low=low,
            high=high,
            updates=updates,
            on_update=lambda: add_updates(1),
        )
    if plot is not None:
        curve.plot(plot)
    if as_json:
        print_json(asdict(curve))
        return
    echo(str(curve))
    if plot is not None:
        echo(f"\nwritten: {plot}")


def _run_settings(ctx: typer.Context) -> dict[str, Any]:
    """The settings of a training run among the options, as `train` has them."""
    own = {"low", "high", "updates", "plot", "as_json"}
    settings = {name: value for name, value in ctx.params.items() if name not in own}
    if settings["build"] is None:
        return settings
    refused = [
        option_flag(name) for name in settings if name not in BESIDE_BUILD and is_typed(ctx, name)
    ]
    if refused:
        raise ValueError(
            f"find-lr: {', '.join(sorted(refused))} beside --build, whose builder makes the model "
            "and its data. Say it there."
        )
    return {name: settings[name] for name in BESIDE_BUILD}
