"""The commands in the order of the help, and what holds for all of them."""

from typing import Annotated

import typer

from halfstep.cli.bench import bench
from halfstep.cli.compare import HELP, compare
from halfstep.cli.data import data
from halfstep.cli.evaluate import evaluate
from halfstep.cli.info import info
from halfstep.cli.options import Command
from halfstep.cli.predict import predict
from halfstep.cli.report import report
from halfstep.cli.runs import diff, replay
from halfstep.cli.train import train

app = typer.Typer(
    name="halfstep", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"max_content_width": 120},
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        import halfstep

        typer.echo(f"halfstep {halfstep.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="errors with a traceback; anywhere on the line")
    ] = False,
) -> None:
    """Train PyTorch models in any numeric precision, and know what it cost.

    \b
    halfstep compare                        which precision should I use? about a minute, no data needed
    halfstep info                           what this machine does best
    halfstep train --precision O2 --out runs/first
    halfstep eval runs/first
    halfstep COMMAND --help                 more, with examples

    Exit codes: 0 done, 1 a difference or a failed check, 2 a mistake or an error, 130 and 143 when stopped.
    """


app.command(help=HELP, cls=Command)(compare)
app.command(cls=Command)(report)
app.command(cls=Command)(train)
app.command("eval", cls=Command)(evaluate)
app.command(cls=Command)(predict)
app.command(cls=Command)(info)
app.command(cls=Command)(bench)
app.add_typer(data, name="data")
app.command(cls=Command)(diff)
app.command(cls=Command)(replay)
