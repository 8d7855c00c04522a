"""Runs tests with Triton's interpreter, in a process of their own: Triton decides at its import.

A test marked `inside` runs only where kernels are interpreted. A test marked `outside` starts such
a process by `interpret`.
"""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
only_interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="run by test_the_interpreted_kernel in a process of its own"
)
starts_interpreter = pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is None,
    reason="needs Triton, and not to be the interpreted run",
)

# Below pytest's own limit for a test (300 s), so that this failure says what happened.
TIMEOUT_S = 240


def run_interpreted(file: str, count: int, which: str = "test_the_kernel") -> None:
    """Runs the tests of `file` whose names match `which`; exactly `count` must pass, none fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which, file]
    run = subprocess.run(
        command,
        env=_child_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(rf"\b{count} passed", run.stdout), run.stdout


def _child_environment() -> dict[str, str]:
    """The environment without what this test run, or tests before this one, put into it.

    PYTEST_ADDOPTS="-n 8" would start eight processes more from each of eight; torch's compiler
    leaves its cache folders in TRITON_* and TORCHINDUCTOR_* once it has compiled for a GPU.
    """
    left_out = ("PYTEST_", "TRITON_", "TORCHINDUCTOR_")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(left_out)
    }
    environment["TRITON_INTERPRET"] = "1"
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_NUM_THREADS"] = "1"
    return environment
