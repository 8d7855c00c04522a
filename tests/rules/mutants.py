"""Plants faults in a copy of the source, one at a time; each must make the tests fail. Prints the score.

    python tests/rules/mutants.py [--only WORD] [--list]

A mutant (tests/rules/mutants.toml) is a file, a piece of its text that stands there once, what it becomes, and the tests that
should notice.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """One planted fault."""

    fault: str
    file: str
    old: str
    new: str
    tests: str


def load() -> list[Mutant]:
    """The faults, from the table beside this file."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Mutant(**row) for row in table["mutant"]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="run the mutants whose description contains this"
    )
    parser.add_argument("--list", action="store_true", help="list them and stop")
    args = parser.parse_args()
    chosen = [m for m in load() if args.only in m.fault]
    if args.list:
        print("\n".join(f"{m.file:24} {m.fault}" for m in chosen))
        return 0
    survivors = [m for m in chosen if not killed(m)]
    print(f"mutants: {len(chosen) - len(survivors)} of {len(chosen)} killed")
    for m in survivors:
        print(f"  survived: {m.fault} ({m.file})")
    return 1 if survivors else 0


def killed(mutant: Mutant) -> bool:
    """Whether the tests notice this fault, in a copy of the tree that holds it."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        for part in ("halfstep", "tests", "docs", "benchmarks"):
            if (ROOT / part).exists():
                shutil.copytree(
                    ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "sample")
                )
        shutil.copy(ROOT / "pyproject.toml", tree)
        plant(tree, mutant)
        tests = [t for t in mutant.tests.split() if (tree / t).exists()]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--no-header",
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, check=False
        )
    if done.returncode not in (0, 1):
        raise SystemExit(
            f"{mutant.fault}: pytest could not run\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    by = next(
        (line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith("FAILED")),
        "nothing",
    )
    print(
        f"{'killed' if done.returncode else 'SURVIVED':9} {time.perf_counter() - start:5.0f} s  {mutant.fault}: {by}",
        flush=True,
    )
    return done.returncode == 1


def plant(tree: Path, mutant: Mutant) -> None:
    path = tree / "halfstep" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.fault}: expected its text once in {mutant.file}, found it {text.count(mutant.old)} times"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    sys.exit(main())
