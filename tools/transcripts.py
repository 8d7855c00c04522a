"""Writes tests/golden/transcripts.md: the help of every command, and the answers to mistakes.

python tools/transcripts.py
"""

import contextlib
import io
import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import typer

PAGE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "transcripts.md"
COMMANDS = (
    "",
    "compare",
    "report",
    "train",
    "eval",
    "predict",
    "find-lr",
    "info",
    "bench",
    "data",
    "data get",
    "data show",
    "data check",
    "diff",
    "replay",
)
NOBODY = 65534  # the user id of a process without rights
HELP_COLUMNS = "110"
HEAD = f"""# What the command says

Written by `python tools/transcripts.py` with typer {typer.__version__}; a test compares it
with what the command says now. Both streams are shown together, as on a terminal. `[exit 2]` is the
exit code; 0 is not shown. What follows each mistake is a command that works, which the test runs.
"""
BUILDER = """
import torch
from torch import nn

import halfstep as hs


def build():
    net = nn.Linear(4, 2)
    x = torch.randn(16, 4)
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    return model, hs.data.Dataset((x, (x.sum(1) > 0).long())).batch(8)


def raises():
    return {}["lr"]
"""


class Mistake(NamedTuple):
    """A mistake, and a command that does it right."""

    title: str
    command: str
    correction: str
    surroundings: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def list_mistakes() -> list[Mistake]:
    """In the order of the page; later ones use the runs of earlier corrections."""
    train = "train --samples 128 --test-samples 50 --epochs 1"
    return [
        Mistake(
            "A command that is misspelt",
            "trian",
            "train --samples 128 --epochs 1 --out runs/spelt",
        ),
        Mistake(
            "An option that is misspelt",
            f"{train} --precison O2",
            f"{train} --precision O2 --out runs/o2",
        ),
        Mistake(
            "A precision that is none",
            f"{train} --precision half",
            f"{train} --precision fp16 --out runs/fp16",
        ),
        Mistake(
            "A precision that is misspelt",
            f"{train} --precision 02",
            f"{train} --precision O2 --out runs/o2s",
        ),
        Mistake(
            "A value that is no number",
            "train --batch abc",
            f"{train} --batch 32 --out runs/batch",
        ),
        Mistake(
            "Fewer ranks than one",
            f"{train} --ranks 0",
            f"{train} --ranks 1 --out runs/ranks",
        ),
        Mistake("A path that is wrong", "train --data photoes/", "data check photos/"),
        Mistake("A folder without classes", "train --data photos/bag", "data check photos/"),
        Mistake(
            "A table without a target",
            "train --data csv:houses.csv",
            "train --data csv:houses.csv --target price --epochs 1 --out runs/houses",
        ),
        Mistake(
            "A table with dates",
            "train --data csv:sales.csv --target amount",
            "train --data csv:sales.csv --target amount --drop day --epochs 1 --out runs/sales",
        ),
        Mistake(
            "Data that is not there",
            "train --data mnist",
            f"{train} --data mnist --path mnist/ --out runs/mnist",
        ),
        Mistake(
            "Another shape",
            "predict runs/first flat.npy",
            "predict runs/first images.npy --out scores.csv",
        ),
        Mistake(
            "A folder that may not be written",
            f"{train} --out locked/run",
            f"{train} --out runs/mine",
            without_write_access,
        ),
        Mistake(
            "A builder that raises",
            "train --build mine:raises --epochs 1",
            "train --build mine:build --epochs 1 --out runs/own",
        ),
        Mistake(
            "A builder that does not say how long",
            "train --build mine:build",
            "train --build mine:build --epochs 2 --out runs/own2",
        ),
        Mistake(
            "A run folder in use",
            f"{train} --out runs/busy",
            f"{train} --out runs/free",
            folder_in_use,
        ),
        Mistake(
            "A folder that holds a run",
            f"{train} --out runs/first",
            f"{train} --out runs/first --resume auto",
        ),
        Mistake(
            "Going on where all is done",
            f"{train} --out runs/first --resume auto",
            "train --samples 128 --test-samples 50 --epochs 2 --out runs/first --resume auto",
        ),
        Mistake(
            "Going on with something else",
            f"{train} --out runs/first --lr 1 --resume auto",
            f"{train} --out runs/first --lr 1 --fresh",
        ),
        Mistake(
            "Going on from nothing",
            f"{train} --out runs/new --resume runs/nothing",
            f"{train} --out runs/new --resume auto",
        ),
        Mistake(
            "A checkpoint that is damaged",
            "eval runs/broken/step-000000002",
            "eval runs/broken/weights.safetensors",
        ),
        Mistake(
            "Weights from torch.save",
            "eval model.pt --net mlp",
            "eval runs/broken/weights.safetensors --net mlp",
        ),
        Mistake(
            "A run that does not say how it was built",
            "eval runs/plain",
            "eval runs/plain --net mlp --data sample",
        ),
        Mistake(
            "A run from elsewhere",
            "eval runs/theirs",
            "eval runs/theirs --build mine:build --split train",
        ),
        Mistake(
            "No seeds",
            "compare --seeds 0",
            "compare --seeds 1 --precisions fp32,O2 --samples 128 --test-samples 50 --epochs 1 "
            "--out runs/two",
        ),
        Mistake(
            "A folder of another comparison",
            "compare --seeds 1 --precisions fp32,O2 --samples 128 --test-samples 50 --epochs 2 "
            "--out runs/two",
            "compare --seeds 1 --precisions fp32,O2 --samples 128 --test-samples 50 --epochs 2 "
            "--out runs/two-2",
        ),
        Mistake(
            "An image among the data that is damaged",
            "data check photos/",
            "data check photos/",
            damaged_image,
        ),
    ]


@contextlib.contextmanager
def without_write_access() -> Iterator[None]:
    """Inside, a user who may not write into the folder locked/. Root may write everywhere."""
    folder = Path("locked")
    is_root = os.geteuid() == 0
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IROTH | stat.S_IXOTH)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(stat.S_IRWXU)
        folder.rmdir()


@contextlib.contextmanager
def folder_in_use() -> Iterator[None]:
    """Inside, another process holds the lock of runs/busy."""
    code = (
        "from pathlib import Path\n"
        "from halfstep.experiment.output_folder import lock_output_folder\n"
        "with lock_output_folder(Path('runs/busy')):\n"
        "    print(flush=True)\n"
        "    input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield
        holder.terminate()


@contextlib.contextmanager
def damaged_image() -> Iterator[None]:
    """Inside, one of the photos is no image."""
    file = Path("photos/dress/3.png")
    file.write_bytes(b"<html>404")
    yield
    file.unlink()


@contextlib.contextmanager
def without_user_modules() -> Iterator[None]:
    """Inside, nobody has imported a mine.py or put its folder on the path; afterwards neither."""
    path = [entry for entry in sys.path if not Path(entry, "mine.py").exists()]
    sys.modules.pop("mine", None)
    with mock.patch.object(sys, "path", path):
        yield
    sys.modules.pop("mine", None)


def prepare_folder() -> None:
    """A user's folder: photos, arrays, a builder, MNIST's files, and four runs.

    One run has a damaged checkpoint, one has lost its run.json, one is somebody else's.
    """
    import numpy as np
    import torch
    from PIL import Image

    import halfstep as hs

    images, _ = hs.data.sample(train=False)
    np.save("images.npy", images[:3].numpy())
    np.save("flat.npy", images[:3].flatten(1).numpy())
    for i, name in enumerate(("bag", "dress")):
        Path("photos", name).mkdir(parents=True)
        Image.fromarray(images[i].numpy()).save(f"photos/{name}/{i}.png")
    Path("mine.py").write_text(BUILDER)
    write_tables()
    torch.save({"weight": torch.zeros(3)}, "model.pt")
    write_small_mnist(Path("mnist"))

    for name in ("first", "broken", "plain"):
        code, output = run_command(
            f"train --samples 128 --test-samples 50 --epochs 1 --out runs/{name}"
        )
        assert code == 0, output
    tensors = Path("runs/broken/step-000000002/tensors.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:1000])
    Path("runs/plain/run.json").unlink()
    write_foreign_run(Path("runs/theirs"))


def write_tables() -> None:
    """A table of houses, and one with dates."""
    houses = [f"{30 + i},{1 + i % 5},{'Bern' if i % 2 else 'Genf'},{1000 * i}" for i in range(60)]
    Path("houses.csv").write_text("\n".join(["area,rooms,city,price", *houses]) + "\n")
    sales = [f"2024-01-{1 + i % 28:02d},{i % 7},{1.5 * i}" for i in range(60)]
    Path("sales.csv").write_text("\n".join(["day,shop,amount", *sales]) + "\n")


def write_foreign_run(folder: Path) -> None:
    """A run of a builder, without the seal of this user."""
    import json

    code, output = run_command(f"train --build mine:build --epochs 1 --out {folder}")
    assert code == 0, output
    content = json.loads((folder / "run.json").read_text())
    content["seal"] = None
    (folder / "run.json").write_text(json.dumps(content))


def write_small_mnist(folder: Path) -> None:
    """MNIST's files with a few random images in them."""
    import numpy as np

    folder.mkdir()
    for part, count in (("train", 200), ("t10k", 60)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            values = np.random.default_rng(0).integers(0, 10, shape, dtype=np.uint8)
            sizes = b"".join(size.to_bytes(4, "big") for size in shape)
            header = bytes([0, 0, 8, len(shape)]) + sizes
            (folder / f"{part}-{kind}-ubyte").write_bytes(header + values.tobytes())


def run_command(line: str) -> tuple[int, str]:
    """Exit code and output of one command, in this process.

    What differs between machines is replaced: the folder is called /home/you.
    """
    from halfstep.cli import main

    output = io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["halfstep", *shlex.split(line)]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        warnings.catch_warnings(action="default"),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)

    text = output.getvalue().replace(str(Path("debian").resolve()), "/usr/share/datasets")
    text = re.sub(r"process \d+ on \S+ ", "process 4711 on yours ", text)
    # A checkpoint has another size with every new field.
    text = re.sub(r"expected \d{7} bytes", "expected 5374398 bytes", text)
    return code, text.replace(str(Path.cwd()), "/home/you")


def transcript(line: str) -> str:
    """One command and what it prints, as a block of Markdown."""
    code, output = run_command(line)
    exit_line = f"\n[exit {code}]" if code else ""
    return f"```text\n$ halfstep {line}\n{output.rstrip()}{exit_line}\n```\n"


def write_page(folder: Path, *, run_corrections: bool = False) -> str:
    """The text of the page, from commands that run in `folder`.

    `run_corrections`: the command that each mistake is answered with is run too and must succeed.
    """
    from halfstep.data.download import find

    environment = {
        "COLUMNS": HELP_COLUMNS,
        "HALFSTEP_CACHE": str(folder / "cache"),
        "NO_COLOR": "1",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    sections = [HEAD, "## Mistakes, and the way out\n"]
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(find, "DEBIAN", folder / "debian"),
        without_user_modules(),
    ):
        os.environ.pop("HALFSTEP_DATA", None)
        prepare_folder()
        for mistake in list_mistakes():
            with mistake.surroundings():
                block = transcript(mistake.command)
            sections.append(
                f"### {mistake.title}\n\n{block}\nThen: `halfstep {mistake.correction}`\n"
            )
            if run_corrections:
                code, output = run_command(mistake.correction)
                assert code == 0, f"{mistake.title}: halfstep {mistake.correction}\n{output}"

        sections.append("## Help\n")
        for name in COMMANDS:
            title = f"halfstep {name}".rstrip()
            sections.append(f"### {title}\n\n{transcript(f'{name} --help'.strip())}")
    return "\n".join(sections)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        PAGE.write_text(write_page(Path(folder).resolve(), run_corrections=True))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
