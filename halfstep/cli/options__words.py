"""Options that several commands share, and the words a shell completes them with; no torch is needed for either."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

# Written out, since the tables they come from live behind torch's import; a test compares them.
NETS = ("mlp", "ffnn", "lenet5", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
DATA = ("sample", "mnist", "fashion-mnist", "cifar10", "cifar100")
PRECISIONS = ("fp64", "fp32", "tf32", "O1", "O2", "O3", "fp16", "bf16")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
SCHEDULES = ("constant", "linear", "cosine", "poly", "steps", "one_cycle")


def among(*names: str) -> Callable[[str], list[str]]:
    """What a shell offers for the beginning of a word."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def several(*names: str) -> Callable[[str], list[str]]:
    """The same for words with commas between them."""

    def offer(incomplete: str) -> list[str]:
        done, comma, last = incomplete.rpartition(",")
        return [
            f"{done}{comma}{name}"
            for name in names
            if name.startswith(last) and name not in done.split(",")
        ]

    return offer


Net = Annotated[
    str, typer.Option(help=f"{', '.join(NETS)}; or module:function", autocompletion=among(*NETS))
]
Data = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(DATA)}, module:function, or a folder: train/ and test/ with one folder of images per class, "
        "or MNIST's or CIFAR-10's own files",
        autocompletion=among(*DATA),
    ),
]
Where = Annotated[
    str | None,
    typer.Option("--path", help="where a data set of that name lies: folder, archive or URL"),
]
Name = Annotated[
    str,
    typer.Option(
        "--precision", help="fp32, O1, O2, O2+bf16, fp16+kahan …", autocompletion=among(*PRECISIONS)
    ),
]
Epochs = Annotated[int, typer.Option(help="number of the last epoch; a builder may say its own")]
Batch = Annotated[int, typer.Option(help="samples in a batch")]
Maker = Annotated[
    str, typer.Option("--optimizer", help=", ".join(OPTIMIZERS), autocompletion=among(*OPTIMIZERS))
]
Rate = Annotated[
    float | None, typer.Option("--lr", help="learning rate; else the optimizer's usual one")
]
Plan = Annotated[
    str, typer.Option("--schedule", help=", ".join(SCHEDULES), autocompletion=among(*SCHEDULES))
]
Accumulate = Annotated[int, typer.Option(help="batches to an update")]
Clip = Annotated[
    float | None, typer.Option("--clip-norm", help="largest norm of all gradients together")
]
Average = Annotated[
    float | None, typer.Option("--ema", help="decay of an average of the weights, as 0.999")
]
Seed = Annotated[int, typer.Option(help="of the weights and the order")]
Sink = Annotated[
    int | None, typer.Option(help="steps between two looks of the host; never changes results")
]
Samples = Annotated[int | None, typer.Option(help="only so many training samples")]
TestSamples = Annotated[int | None, typer.Option(help="only so many test samples")]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda or cuda:1", autocompletion=among("auto", "cpu", "cuda"))
]
Build = Annotated[
    str | None,
    typer.Option(
        help="package.module:function that returns (model, data), (model, data, valid) or a dict for fit"
    ),
]
Run = Annotated[
    Path, typer.Argument(help="folder of a run, one checkpoint of it, or a safetensors file")
]
Plain = Annotated[bool, typer.Option("--plain", help="lines instead of bars, no colour")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
