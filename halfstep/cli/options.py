"""Options that several commands share, and the names a shell completes them with.

No torch is imported here: help and shell completion stay fast.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from halfstep.utils.text import printable

# The tables that define these names live behind torch's import, so the names are written out.
# A test compares them with the tables.
NETS = ("mlp", "ffnn", "lenet5", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
DATASETS = ("sample", "mnist", "fashion-mnist", "cifar10", "cifar100")
PRECISIONS = ("fp64", "fp32", "tf32", "O1", "O2", "O3", "fp16", "bf16")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
SCHEDULES = ("constant", "linear", "cosine", "poly", "steps", "one_cycle")

# What a value must be, by the error types of typer's own checks.
EXPECTED_VALUES = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
}


class Command(TyperCommand):
    """A command whose parse errors say what was expected and which value came."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _parse_error_message(error)
            raise


class Group(TyperGroup):
    """The commands together. What was typed is quoted in errors without acting on the terminal."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _printable_usage_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _printable_usage_errors():
            return super().invoke(ctx)


@contextmanager
def _printable_usage_errors() -> Iterator[None]:
    """A name of a file may be taken for an option: `halfstep data check *`."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own errors, whichever click it brings
            error.message = printable(error.message)  # type: ignore[attr-defined]
        raise


def _parse_error_message(error: typer.BadParameter) -> str:
    """The message of a value that does not parse.

    It stays typer's own where that names the value already: for choices, and before typer 0.21.
    """
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if not details:
        return error.message
    error_type = details[0].get("type")
    value = details[0].get("input")
    if error_type in EXPECTED_VALUES:
        return f"expected {EXPECTED_VALUES[error_type]}, got {value!r}"
    return error.message.removeprefix("Value error, ")


def complete_one(*names: str) -> Callable[[str], list[str]]:
    """A completion for a shell: the names that begin with what is typed."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def complete_list(*names: str) -> Callable[[str], list[str]]:
    """A completion for names with commas between: those that are not in the list yet."""

    def complete(incomplete: str) -> list[str]:
        typed, comma, last_name = incomplete.rpartition(",")
        typed_names = typed.split(",")
        return [
            f"{typed}{comma}{name}"
            for name in names
            if name.startswith(last_name) and name not in typed_names
        ]

    return complete


def parse_names(text: str) -> tuple[str, ...]:
    """The names of a list with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def option_flag(parameter: str) -> str:
    """How a parameter is written on the command line: clip_norm is --clip-norm."""
    return f"--{parameter.replace('_', '-')}"


def is_typed(ctx: Any, parameter: str) -> bool:
    """Whether the option stands on the command line, so that its value is not the default."""
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


# What is trained, and on what data.
NetOption = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(NETS)}; module:function, or file.py:function",
        autocompletion=complete_one(*NETS),
    ),
]
DataOption = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(DATASETS)}, module:function, file.py:function, csv:FILE, or a folder: "
        "one folder of images per class, as they are or below train/ and test/ (or val/), or "
        "MNIST's or CIFAR-10's own files; or the URL of one of these, as s3://bucket/photos",
        autocompletion=complete_one(*DATASETS),
    ),
]
DataPathOption = Annotated[
    str | None,
    typer.Option("--path", help="where a data set of that name lies: folder, archive or URL"),
]
SamplesOption = Annotated[int | None, typer.Option(help="only so many training samples")]
TestSamplesOption = Annotated[int | None, typer.Option(help="only so many test samples")]
SizeOption = Annotated[
    str | None,
    typer.Option(
        "--size",
        help="photos: 224, or 224x160 (height x width): shorter side resized, centre cropped",
    ),
]
TestShareOption = Annotated[
    float | None,
    typer.Option("--test-share", help="data without a test part: the share to test on, else 0.2"),
]
SplitSeedOption = Annotated[
    int | None, typer.Option("--split-seed", help="another choice of these samples")
]
SkipDamagedOption = Annotated[
    bool | None,
    typer.Option("--skip-damaged", help="photos: leave out files that cannot be decoded"),
]
ClassWeightsOption = Annotated[
    str | None,
    typer.Option(
        "--class-weights",
        help="balanced: in the loss, rare classes count as much as frequent ones",
        autocompletion=complete_one("balanced"),
    ),
]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="csv:FILE: the column to predict")
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="csv:FILE: classification or regression; else by the target",
        autocompletion=complete_one("classification", "regression"),
    ),
]
DropOption = Annotated[
    str | None, typer.Option("--drop", help="csv:FILE: columns to leave out, commas between")
]
BuildOption = Annotated[
    str | None,
    typer.Option(
        help="package.module:function or path/to/file.py:function that returns (model, data), "
        "(model, data, valid) or a dict for fit"
    ),
]

# How it is trained.
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        help="fp32, O1, O2, O2+bf16, fp16+kahan …",
        autocompletion=complete_one(*PRECISIONS),
    ),
]
EpochsOption = Annotated[
    int, typer.Option(help="number of the last epoch; a builder may say its own")
]
BatchOption = Annotated[int, typer.Option(help="samples in a batch")]
OptimizerOption = Annotated[
    str,
    typer.Option(
        "--optimizer",
        help=", ".join(OPTIMIZERS),
        autocompletion=complete_one(*OPTIMIZERS),
    ),
]
LrOption = Annotated[
    float | None, typer.Option("--lr", help="learning rate; else the optimizer's usual one")
]
ScheduleOption = Annotated[
    str,
    typer.Option(
        "--schedule",
        help=", ".join(SCHEDULES),
        autocompletion=complete_one(*SCHEDULES),
    ),
]
AccumulateOption = Annotated[int, typer.Option(help="batches to an update")]
ClipNormOption = Annotated[
    float | None, typer.Option("--clip-norm", help="largest norm of all gradients together")
]
EmaOption = Annotated[
    float | None, typer.Option("--ema", help="decay of an average of the weights, as 0.999")
]
SeedOption = Annotated[int, typer.Option(help="of the weights and the order")]
SinkOption = Annotated[
    int | None,
    typer.Option(help="steps between two reads of results by the host; never changes results"),
]
MaxTimeOption = Annotated[
    str | None,
    typer.Option(
        "--max-time", help="this call stops after so long, with a checkpoint: 1h30m, 45m, 90s"
    ),
]
LimitBatchesOption = Annotated[
    str | None,
    typer.Option(
        "--limit-batches",
        help="only so many batches of an epoch and of an evaluation, or a fraction: 20, 0.1",
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda or cuda:1",
        autocompletion=complete_one("auto", "cpu", "cuda"),
    ),
]

# On several processes.
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        help="start so many processes on this machine, which divide each batch among them",
    ),
]
ExactOption = Annotated[
    str | None,
    typer.Option(
        "--exact",
        help="bits: the same bits for any number of ranks",
        autocompletion=complete_one("bits"),
    ),
]
LogicalOption = Annotated[
    int | None,
    typer.Option(
        "--logical",
        help="with --exact bits: the micro-batches of each batch, at least one a rank; else 12",
    ),
]

# A run that exists already, and the settings that a command may replace in it.
RunArgument = Annotated[
    Path, typer.Argument(help="folder of a run, one checkpoint of it, or a file of weights")
]
RunNetOption = Annotated[
    str | None,
    typer.Option("--net", help="the network, for weights without a run.json beside them"),
]
RunPrecisionOption = Annotated[
    str | None, typer.Option("--precision", help="another precision than the run's")
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="import, open and fetch what a run.json from elsewhere names (docs/security.md)",
    ),
]
RunDeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:1")]

# What is printed.
PlainOption = Annotated[bool, typer.Option("--plain", help="lines instead of bars, no colour")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
