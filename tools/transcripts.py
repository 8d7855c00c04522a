"""Writes tests/golden/transcripts.md: the help of every command, and what a new user's mistakes are told.

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
from pathlib import Path
from unittest import mock

import typer

PAGE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "transcripts.md"
COMMANDS = ("", "compare", "report", "train", "eval", "predict", "info", "bench", "data", "data get", "data show",
            "data check", "diff", "replay")  # fmt: skip
NOBODY = 65534
HEAD = f"""# What the command says

Written by `python tools/transcripts.py` with typer {typer.__version__}; a test compares it with what the
command says now. Both streams are shown together, as on a terminal. `[exit 2]` is the exit code; 0 is not shown. What
follows each mistake is a command that works, which the test runs.
"""
FIRST = "train --samples 128 --test-samples 50 --epochs 1"
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

# title, command, what is done before it, what then works
Mistake = tuple[str, str, Callable[[], contextlib.AbstractContextManager[None]] | None, str]


def mistakes() -> list[Mistake]:
    return [
        ("A command that is misspelt", "trian", None, "train --samples 128 --epochs 1 --out runs/spelt"),
        ("An option that is misspelt", f"{FIRST} --precison O2", None, f"{FIRST} --precision O2 --out runs/o2"),
        ("A precision that is none", f"{FIRST} --precision half", None, f"{FIRST} --precision fp16 --out runs/fp16"),
        ("A precision that is misspelt", f"{FIRST} --precision 02", None, f"{FIRST} --precision O2 --out runs/o2s"),
        ("A value that is no number", "train --batch abc", None, f"{FIRST} --batch 32 --out runs/batch"),
        ("A path that is wrong", "train --data photoes/", None, "data check photos/"),
        ("A folder that is not split", "train --data photos/", None, "data check photos/"),
        ("Data that is not there", "train --data mnist", None, f"{FIRST} --data mnist --path mnist/ --out runs/mnist"),
        ("Another shape", "predict runs/first flat.npy", None, "predict runs/first images.npy --out scores.csv"),
        ("A folder that may not be written", f"{FIRST} --out locked/run", denied, f"{FIRST} --out runs/mine"),
        ("A builder that raises", "train --build mine:raises --epochs 1", None,
         "train --build mine:build --epochs 1 --out runs/own"),
        ("A builder that does not say how long", "train --build mine:build", None,
         "train --build mine:build --epochs 2 --out runs/own2"),
        ("A run folder in use", f"{FIRST} --out runs/busy", busy, f"{FIRST} --out runs/free"),
        ("A folder that holds a run", f"{FIRST} --out runs/first", None, f"{FIRST} --out runs/first --resume auto"),
        ("Going on where all is done", f"{FIRST} --out runs/first --resume auto", None,
         "train --samples 128 --test-samples 50 --epochs 2 --out runs/first --resume auto"),
        ("Going on with something else", f"{FIRST} --out runs/first --lr 1 --resume auto", None,
         f"{FIRST} --out runs/first --lr 1 --fresh"),
        ("Going on from nothing", f"{FIRST} --out runs/new --resume runs/nothing", None,
         f"{FIRST} --out runs/new --resume auto"),
        ("A checkpoint that is damaged", "eval runs/broken/step-000000002", None,
         "eval runs/broken/weights.safetensors"),
        ("Weights from torch.save", "eval model.pt --net mlp", None, "eval runs/broken/weights.safetensors --net mlp"),
        ("A run that does not say how it was built", "eval runs/plain", None,
         "eval runs/plain --net mlp --data sample"),
        ("No seeds", "compare --seeds 0", None,
         "compare --seeds 1 --precisions fp32,O2 --samples 128 --test-samples 50 --epochs 1 --out runs/two"),
        ("An image among the data that is damaged", "data check photos/", damaged, "data check photos/"),
    ]  # fmt: skip


@contextlib.contextmanager
def denied() -> Iterator[None]:
    """As a user who may not write there: root may write everywhere."""
    locked, root = Path("locked"), os.geteuid() == 0
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IROTH | stat.S_IXOTH)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        locked.chmod(stat.S_IRWXU)
        locked.rmdir()


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Held by another process, as it would be."""
    code = "from halfstep.experiment.output_folder import *\nwith held(Path('runs/busy')): print(flush=True), input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield
        holder.terminate()


@contextlib.contextmanager
def damaged() -> Iterator[None]:
    bad = Path("photos/dress/3.png")
    bad.write_bytes(b"<html>404")
    yield
    bad.unlink()


def prepare() -> None:
    """A user's folder: photos, arrays, a builder, MNIST in files, and runs, one with a checkpoint cut short."""
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
    torch.save({"weight": torch.zeros(3)}, "model.pt")
    _idx("mnist")
    for name in ("first", "broken", "plain"):
        code, said = run(f"{FIRST} --out runs/{name}")
        assert code == 0, said
    cut = Path("runs/broken/step-000000002/tensors.safetensors")
    cut.write_bytes(cut.read_bytes()[:1000])
    Path("runs/plain/run.json").unlink()


def _idx(folder: str) -> None:
    """MNIST's files with a few images in them."""
    import numpy as np

    Path(folder).mkdir()
    for part, count in (("train", 200), ("t10k", 60)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            values = np.random.default_rng(0).integers(0, 10, shape, dtype=np.uint8)
            header = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
            Path(folder, f"{part}-{kind}-ubyte").write_bytes(header + values.tobytes())


def run(line: str) -> tuple[int, str]:
    """Exit code and output of one command, in this process; the folder it runs in is called /home/you."""
    from halfstep.cli import main

    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["halfstep", *shlex.split(line)]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        warnings.catch_warnings(action="default"),
    ):
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    text = said.getvalue().replace(str(Path("debian").resolve()), "/usr/share/datasets")
    text = re.sub(r"process \d+ on \S+ ", "process 4711 on yours ", text)
    text = re.sub(
        r"expected \d{7} bytes", "expected 5374398 bytes", text
    )  # another size with every new field
    return code, text.replace(str(Path.cwd()), "/home/you")


def block(line: str) -> str:
    code, said = run(line)
    end = f"\n[exit {code}]" if code else ""
    return f"```text\n$ halfstep {line}\n{said.rstrip()}{end}\n```\n"


def page(folder: Path, *, ways_out: bool = False) -> str:
    """The whole page; with `ways_out`, the command that each mistake is answered with is run too, and must succeed."""
    from halfstep.data.download import find

    surroundings = {"COLUMNS": "110", "HALFSTEP_CACHE": str(folder / "cache"), "NO_COLOR": "1"}
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, surroundings),
        mock.patch.object(find, "DEBIAN", folder / "debian"),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
    ):
        os.environ.pop("HALFSTEP_DATA", None)
        sys.modules.pop("mine", None)
        prepare()
        parts = [HEAD, "## Mistakes, and the way out\n"]
        for title, line, before, after in mistakes():
            with before() if before else contextlib.nullcontext():
                parts.append(f"### {title}\n\n{block(line)}\nThen: `halfstep {after}`\n")
            if ways_out:
                code, said = run(after)
                assert code == 0, f"{title}: halfstep {after}\n{said}"
        parts += [
            "## Help\n",
            *(f"### halfstep {name}\n\n{block(f'{name} --help'.strip())}" for name in COMMANDS),
        ]
    return "\n".join(parts).replace("### halfstep \n", "### halfstep\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        PAGE.write_text(page(Path(folder).resolve(), ways_out=True))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
