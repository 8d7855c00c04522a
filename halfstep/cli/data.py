"""`halfstep data get | show | check`: fetch a data set, look at it, read all of it."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from halfstep.cli import options__words as words
from halfstep.cli import output as text
from halfstep.cli.options import Command

data = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Get a data set, look at its samples, check every one of them.",
)

Known = Annotated[
    str,
    typer.Argument(
        help="mnist, fashion-mnist, cifar10 or cifar100",
        autocompletion=words.among(*words.DATA[1:]),
    ),
]
Any_ = Annotated[
    str,
    typer.Argument(
        help=f"{', '.join(words.DATA)}, or a folder", autocompletion=words.among(*words.DATA)
    ),
]


@data.command(cls=Command)
def get(name: Known, path: words.Where = None, as_json: words.Json = False) -> None:
    """Find a data set, or download it into the cache; every file is checked against its published checksum.

    Looked for in --path, $HALFSTEP_DATA, the cache ($HALFSTEP_CACHE, else ~/.cache/halfstep) and Debian's packages
    before the network is asked.

    \b
    halfstep data get cifar10
    halfstep data get cifar10 --path https://mirror.example/cifar-10-binary.tar.gz#md5=c32a1d4ab5d03f1284b67883e8d87530
    HALFSTEP_DATA=/data halfstep data get mnist --json
    """
    from halfstep.data.download.find import find

    if name == "sample":
        raise ValueError(
            "data get: sample ships with the package, there is nothing to get; halfstep data show sample"
        )
    found = find(name, path, download=True)
    if as_json:
        return text.dump(
            {
                "name": name,
                "folder": str(found.folder),
                "origin": found.origin,
                "sample": found.sample,
            }
        )
    return typer.echo(f"{name}: {found.folder} ({found.origin})")


@data.command(cls=Command)
def show(
    name: Any_, path: words.Where = None, split: Annotated[Literal["train", "test"], typer.Option()] = "train",
    samples: Annotated[int, typer.Option(help="images in the sheet")] = 8,
    out: Annotated[Path, typer.Option(help="the sheet")] = Path("sheet.png"),
    view: Annotated[bool, typer.Option("--open", help="show it in the browser")] = False,
) -> None:  # fmt: skip
    """Draw a contact sheet of the first samples with their labels, as a PNG.

    \b
    halfstep data show sample
    halfstep data show photos/ --samples 12 --out photos.png --open
    """
    import webbrowser

    from halfstep.cli.data__reading import dataset
    from halfstep.data import sheet

    sheet(dataset(name, path, split), out, samples=samples, epochs=0)
    typer.echo(f"written: {out}")
    if view and not webbrowser.open(out.resolve().as_uri()):
        typer.echo(f"no browser could be started; open {out} yourself", err=True)


@data.command(cls=Command)
def check(name: Any_, path: words.Where = None, as_json: words.Json = False) -> None:
    """Read every sample and report sizes, classes, pixel statistics and damage.

    The mean and deviation per channel, in 0..1, are what hs.data.Normalize takes.

    A folder is read as by halfstep train and compare: train/ and test/ (or val/) with one folder of images per class,
    or MNIST's or CIFAR-10's own files. Folders of classes alone are checked too; a note says how to split them.

    \b
    halfstep data check sample
    halfstep data check cifar10 --path /data/cifar-10-binary.tar.gz
    halfstep data check photos/ --json

    Exit code: 0 whole, 1 damaged or incomplete, 2 not found or a mistake.
    """
    from halfstep.cli.data__reading import examine

    found = examine(name, path)
    if as_json:
        text.dump(found)
    else:
        _tell(found)
    raise typer.Exit(1 if any(part["damage"] for part in found["parts"]) else 0)


def _tell(found: dict[str, Any]) -> None:
    typer.echo(f"{found['name']}: {found['origin']}")
    for part in found["parts"]:
        alone = len(part["sizes"]) == 1
        sizes = ", ".join(
            f"{w} × {h} × {c}{'' if alone else f' ({n:,})'}" for (h, w, c), n in part["sizes"]
        )
        typer.echo(
            f"\n{part['name']}: {text.plural(part['samples'], 'sample')}{f' of {sizes}' if sizes else ''}"
        )
        if part["mean"]:
            pairs = zip(part["mean"], part["deviation"], strict=True)
            typer.echo(
                "mean ± deviation: "
                + ", ".join(f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in pairs)
            )
        for line in _classes(part["classes"]):
            typer.echo(line)
        for each in part["damage"]:
            typer.echo(f"damaged: {each}")
    damaged = sum(len(part["damage"]) for part in found["parts"])
    typer.echo(f"\n{damaged} damaged" if damaged else "\nwhole")
    for each in found["notes"]:
        typer.echo(f"note: {each}", err=True)


def _classes(counts: dict[str, int]) -> list[str]:
    if not counts or len(counts) > 40:
        return (
            [f"{len(counts)} classes of {min(counts.values())} to {max(counts.values())}"]
            if counts
            else []
        )
    most = max(counts.values())
    width, wide = max(map(len, counts)), max(len(f"{count:,}") for count in counts.values())
    return [
        f"  {name:<{width}}  {count:>{wide},}  {text.bar(count / most) if count else ''}".rstrip()
        for name, count in counts.items()
    ]
