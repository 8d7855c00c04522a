"""`halfstep data get | show | check`: fetch a data set, look at it, read all of it.

The reading stands in data_check.py, which needs torch; help and completion do not.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from halfstep.cli.options import (
    DATASETS,
    Command,
    DataPathOption,
    DropOption,
    JsonOption,
    TargetOption,
    complete_one,
)
from halfstep.cli.output import BAR_WIDTH, draw_bar, echo, print_json
from halfstep.storage.url import is_store_url, parse_store_url
from halfstep.utils.text import format_bytes, list_some, plural, printable

MAX_CATEGORIES_SHOWN = 6
MAX_CLASSES_SHOWN = 40  # with more classes, one line sums them up

DOWNLOADABLE = DATASETS[1:]  # all but the sample, which ships with the package

# The lines of `halfstep data --help`. They fit a terminal of 80 columns, which would cut the first
# sentences of the commands' own pages.
GET_SUMMARY = "Find a data set, or download it into the cache."
SHOW_SUMMARY = "Draw a sheet of the first samples with their labels."
CHECK_SUMMARY = "Read every sample; report sizes, classes and damage."

GET_HELP = """Find a data set, or download it into the cache; every file is checked against its \
published checksum.

Looked for in --path, $HALFSTEP_DATA, the cache ($HALFSTEP_CACHE, else ~/.cache/halfstep) and
Debian's packages before the network is asked.

\b
halfstep data get cifar10
halfstep data get cifar10 --path https://mirror.example/cifar-10-binary.tar.gz\
#sha256=c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd
HALFSTEP_DATA=/data halfstep data get mnist --json
halfstep data get s3://bucket/photos

The URL of a store is copied into the cache, where train, compare and the others use it; every file
of the copy is read and checked.
"""

DownloadableArgument = Annotated[
    str,
    typer.Argument(
        help="mnist, fashion-mnist, cifar10 or cifar100, or the URL of a store",
        autocompletion=complete_one(*DOWNLOADABLE),
    ),
]
DatasetArgument = Annotated[
    str,
    typer.Argument(
        help=f"{', '.join(DATASETS)}, a folder, or a URL",
        autocompletion=complete_one(*DATASETS),
    ),
]
DatasetOrTableArgument = Annotated[
    str,
    typer.Argument(
        help=f"{', '.join(DATASETS)}, a folder, a URL, or csv:FILE",
        autocompletion=complete_one(*DATASETS),
    ),
]

data_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Get a data set, look at its samples, check every one of them.",
)


@data_app.command(help=GET_HELP, short_help=GET_SUMMARY, cls=Command)
def get(
    name: DownloadableArgument, path: DataPathOption = None, as_json: JsonOption = False
) -> None:
    """The command; its help is GET_HELP."""
    if is_store_url(name):
        if path is not None:
            raise ValueError(f"--path: expected with a data set by name, got the URL {name}")
        _get_from_store(name, as_json=as_json)
        return
    from halfstep.data.download.find import find

    if name == "sample":
        raise ValueError(
            "data get: sample ships with the package, there is nothing to get; "
            "halfstep data show sample"
        )
    location = find(name, path, download=True)
    if not as_json:
        echo(printable(f"{name}: {location.folder} ({location.origin})"))
        return
    print_json(
        {
            "name": name,
            "folder": str(location.folder),
            "origin": location.origin,
            "sample": location.sample,
        }
    )


def _get_from_store(url: str, *, as_json: bool) -> None:
    """Copies what is at a URL into the cache, and checks every file of the copy."""
    from halfstep.data.download.find import require_cache
    from halfstep.data.download.store_copy import checked_copy

    copy = checked_copy(parse_store_url(url, "data get"), require_cache(), what="data get")
    size = sum(item.size for item in copy.objects)
    if as_json:
        print_json(
            {
                "name": url,
                "folder": str(copy.path),
                "origin": url,
                "files": len(copy.objects),
                "bytes": size,
            }
        )
        return
    files = f"{plural(len(copy.objects), 'file')}, {format_bytes(size)}"
    echo(printable(f"{url}: {copy.path} ({files})"))


@data_app.command(short_help=SHOW_SUMMARY, cls=Command)
def show(
    name: DatasetArgument,
    path: DataPathOption = None,
    split: Annotated[Literal["train", "test"], typer.Option()] = "train",
    samples: Annotated[int, typer.Option(help="images in the sheet")] = 8,
    out: Annotated[Path, typer.Option(help="the sheet")] = Path("sheet.png"),
    view: Annotated[bool, typer.Option("--open", help="show it in the browser")] = False,
) -> None:
    """Draw a contact sheet of the first samples with their labels, as a PNG.

    \b
    halfstep data show sample
    halfstep data show photos/ --samples 12 --out photos.png --open
    """
    import webbrowser

    from halfstep.cli.data_check import read_dataset
    from halfstep.data import sheet

    sheet(read_dataset(name, path, split), out, samples=samples, epochs=0)
    echo(f"written: {out}")
    if view and not webbrowser.open(out.resolve().as_uri()):
        echo(f"no browser could be started; open {out} yourself", err=True)


@data_app.command(short_help=CHECK_SUMMARY, cls=Command)
def check(
    name: DatasetOrTableArgument,
    path: DataPathOption = None,
    target: TargetOption = None,
    drop: DropOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every sample and report sizes, classes, pixel statistics and damage.

    The mean and deviation per channel, in 0..1, are what hs.data.Normalize takes.

    A folder is read as by halfstep train and compare: one folder of images per class, as they are
    or below train/ and test/ (or val/), or MNIST's or CIFAR-10's own files. Of a table, csv:FILE,
    the columns are shown, with --target its classes too.

    \b
    halfstep data check sample
    halfstep data check cifar10 --path /data/cifar-10-binary.tar.gz
    halfstep data check photos/ --json
    halfstep data check csv:houses.csv --target price

    Exit code: 0 nothing is damaged, 1 damaged or incomplete, 2 not found or a mistake.
    """
    from halfstep.cli.data_check import check_dataset, check_table

    if name.startswith("csv:"):
        table = check_table(name, target, drop)
        if as_json:
            print_json(table)
        else:
            _print_table(table)
        return
    if target is not None:
        raise ValueError(f"--target: expected it with a table, csv:FILE, got {name!r}")
    if drop is not None:
        raise ValueError(f"--drop: expected it with a table, csv:FILE, got {name!r}")
    result = check_dataset(name, path)
    if as_json:
        print_json(result)
    else:
        _print_check(result)
    is_damaged = any(part["damage"] for part in result["parts"])
    raise typer.Exit(1 if is_damaged else 0)


def _print_table(result: dict[str, Any]) -> None:
    """Prints the columns of a table on standard output, the notes on standard error."""
    echo(printable(f"{result['name']}: {plural(result['rows'], 'row')}"))
    echo("")
    target = result["target"]
    described = [(column, "") for column in result["columns"]]
    if target is not None:
        described.append((target, f"  ← {target['task']}"))
    width = max(len(printable(column["name"])) for column, _ in described)
    for column, mark in described:
        missing = f", {column['missing']:,} missing" if column["missing"] else ""
        if column["kind"] == "number":
            values = (
                f"{column['mean']:.5g} ± {column['deviation']:.5g}, "
                f"{column['min']:g} to {column['max']:g}"
            )
        else:
            names = [printable(name) for name in column["categories"]]
            values = f"{plural(len(names), 'category').replace('ys', 'ies')}: "
            values += list_some(names, MAX_CATEGORIES_SHOWN)
        echo(
            f"  {printable(column['name']):<{width}}  {column['kind']:<8}  {values}{missing}{mark}"
        )
    if target is not None and "classes" in target:
        echo("")
        for line in _class_lines(target["classes"], target["class_weights"]):
            echo(line)
    for note in result["notes"]:
        echo(f"note: {printable(note)}", err=True)


def _print_check(result: dict[str, Any]) -> None:
    """Prints the parts and their damage on standard output, the notes on standard error."""
    echo(printable(f"{result['name']}: {result['origin']}"))
    for part in result["parts"]:
        samples = plural(part["samples"], "sample")
        sizes = _format_sizes(part["sizes"], part["samples"])
        headline = f"\n{part['name']}: {samples}"
        if sizes:
            headline += f" of {sizes}"
        echo(headline)
        if part["mean"]:
            channels = zip(part["mean"], part["deviation"], strict=True)
            statistics = ", ".join(f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in channels)
            echo(f"mean ± deviation: {statistics}")
        for line in _class_lines(part["classes"], part["class_weights"]):
            echo(line)
        for message in part["damage"]:
            echo(f"damaged: {printable(message)}")

    damage_count = sum(len(part["damage"]) for part in result["parts"])
    echo(f"\n{damage_count} damaged" if damage_count else "\nnothing is damaged")
    for note in result["notes"]:
        echo(f"note: {printable(note)}", err=True)


def _format_sizes(sizes: list[tuple[tuple[int, int, int], int]], samples: int) -> str:
    """Width × height × channels of the images; how many there are of each, if sizes differ."""
    if sizes and all(count == 1 for _, count in sizes) and len(sizes) < samples:
        return "many sizes"
    texts = []
    for (height, width, channels), count in sizes:
        text = f"{width} × {height} × {channels}"
        if len(sizes) > 1:
            text += f" ({count:,})"
        texts.append(text)
    others = samples - sum(count for _, count in sizes)
    if others:
        texts.append(f"others ({others:,})")
    return ", ".join(texts)


def _class_lines(counts: dict[str, int], weights: dict[str, float]) -> list[str]:
    """A line with a bar for each class, or one line for all of them where they are many.

    Where classes differ in size, with their weights, and a last line that says what these are.
    """
    if not counts:
        return []
    fewest = min(counts.values())
    most = max(counts.values())
    if len(counts) > MAX_CLASSES_SHOWN:
        return [f"{len(counts)} classes of {fewest} to {most}"]

    names = [printable(name) for name in counts]
    name_width = max(map(len, names))
    count_width = max(len(f"{count:,}") for count in counts.values())
    lines = []
    for name, count, weight in zip(names, counts.values(), weights.values(), strict=True):
        bar = draw_bar(count / most) if count else ""
        line = f"  {name:<{name_width}}  {count:>{count_width},}  {bar}"
        if fewest < most:
            line = f"{line:<{name_width + count_width + BAR_WIDTH + 6}}  weight {weight:.4g}"
        lines.append(line.rstrip())
    if fewest < most:
        lines.append("weight: of a sample of the class in the loss, with --class-weights balanced")
    return lines
