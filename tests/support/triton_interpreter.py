"""Triton's kernels, interpreted, in a process of their own: it decides at its import whether it interprets."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(
    not INTERPRETED, reason="run by test_the_interpreted_kernel in a process of its own"
)
outside = pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is None,
    reason="needs Triton, and not to be the interpreted run",
)


def interpret(file: str, count: int, which: str = "test_the_kernel") -> None:
    """That many tests of `file`, named so, must pass there."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which, file]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout
    assert re.search(rf"\b{count} passed", done.stdout), done.stdout
