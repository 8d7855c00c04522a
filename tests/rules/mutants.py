"""Plants faults in a copy of the source, one at a time; each must make tests fail. Prints a score.

    python tests/rules/mutants.py [--only WORDS] [--list]

A mutant (tests/rules/mutants.toml) is a file, a piece of its text that occurs there once, what it
becomes, and the tests that should fail then.
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
COPIED_FOLDERS = ("halfstep", "tests", "docs", "benchmarks", "tools")


class Mutant(NamedTuple):
    """One planted fault."""

    fault: str
    file: str
    old: str
    new: str
    tests: str


def load_mutants() -> list[Mutant]:
    """The faults, from the table beside this file."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Mutant(**row) for row in table["mutant"]]


def copy_tree(tree: Path) -> None:
    """Copies what the tests need."""
    ignore = shutil.ignore_patterns("__pycache__", "sample")
    for folder in COPIED_FOLDERS:
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    sample = Path("halfstep", "data", "sample")
    (tree / sample).symlink_to(ROOT / sample)  # 6 MB that no fault changes
    shutil.copy(ROOT / "pyproject.toml", tree)


def plant(tree: Path, mutant: Mutant) -> None:
    """Writes the fault into the copy."""
    path = tree / "halfstep" / mutant.file
    text = path.read_text()
    count = text.count(mutant.old)
    if count != 1:
        raise SystemExit(
            f"{mutant.fault}: expected its text once in {mutant.file}, found it {count} times"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


def run_tests(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header"]
    return subprocess.run(
        [*pytest_command, "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def first_failed_test(output: str) -> str:
    for line in output.splitlines():
        if line.startswith("FAILED"):
            return line.split(" ")[1]
    return "nothing"


def is_killed(mutant: Mutant) -> bool:
    """Whether tests fail in a copy of the tree with this fault. Prints a line about it."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        plant(tree, mutant)
        tests = [path for path in mutant.tests.split() if (tree / path).exists()]
        process = run_tests(tree, tests)
    seconds = time.perf_counter() - start

    # pytest ends with 0 when all tests passed, with 1 when some failed.
    if process.returncode not in (0, 1):
        output = process.stdout[-2000:] + process.stderr[-2000:]
        raise SystemExit(f"{mutant.fault}: pytest could not run\n{output}")
    killed = process.returncode == 1
    verdict = "killed" if killed else "SURVIVED"
    failed_test = first_failed_test(process.stdout)
    print(f"{verdict:9} {seconds:5.0f} s  {mutant.fault}: {failed_test}", flush=True)
    return killed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="run the mutants whose description contains this"
    )
    parser.add_argument("--list", action="store_true", help="list them and stop")
    args = parser.parse_args()

    mutants = [mutant for mutant in load_mutants() if args.only in mutant.fault]
    if args.list:
        for mutant in mutants:
            print(f"{mutant.file:24} {mutant.fault}")
        return 0

    survivors = [mutant for mutant in mutants if not is_killed(mutant)]
    print(f"mutants: {len(mutants) - len(survivors)} of {len(mutants)} killed")
    for mutant in survivors:
        print(f"  survived: {mutant.fault} ({mutant.file})")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
