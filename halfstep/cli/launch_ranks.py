"""`--ranks N`: starts the same command N times on this machine, by torchrun's own engine.

The processes share the terminal. torchrun's engine watches them, passes signals on, and starts all
of them again where one has ended and --max-restarts allows it. Whatever they end with, one message
is shown.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep.cli.output import echo
from halfstep.cli.rank_process import (
    ENDINGS_VARIABLE,
    describe_failure,
    read_endings,
)

EXIT_FAILED = 2

# A rank that was told to stop ends its step and saves; after that it is killed.
SHUTDOWN_TIMEOUT_S = 600
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

# Signals that are passed on to the ranks. One that the shell ignores (nohup) stays ignored.
PASSED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def launch_ranks(count: int, *, max_restarts: int, threads: int) -> int:
    """Runs this very command in `count` processes. Returns the exit code of rank 0.

    `threads`: of torch in each, unless OMP_NUM_THREADS is set.
    """
    with tempfile.TemporaryDirectory(prefix="halfstep-ranks-") as folder:
        endings_folder = Path(folder)
        with _environment_of_ranks(endings_folder, threads):
            failed, stopped_by = _run_to_end(count, max_restarts, folder)
        attempts = [int(path.name.split("-")[1]) for path in endings_folder.glob("attempt-*.json")]
        endings = read_endings(endings_folder, max(attempts, default=0))

    if failed:
        echo(f"halfstep: {describe_failure(endings, count)}", err=True)
        return EXIT_FAILED
    if 0 in endings:
        return endings[0].exit_code
    if stopped_by is not None:
        echo("halfstep: stopped", err=True)
        return 128 + stopped_by
    return 0


def usable_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run_to_end(count: int, max_restarts: int, folder: str) -> tuple[bool, int | None]:
    """Starts the ranks and waits. Whether one has failed, and the signal that stopped them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    signals = [name for name in PASSED_SIGNALS if _is_handled(getattr(signal, name))]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="localhost",
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=os.path.join(folder, "torchrun")),
        signals_to_handle=",".join(signals),
    )
    logging.disable(logging.CRITICAL)  # torchrun's own account of the end
    try:
        elastic_launch(config, sys.executable)(*_own_command())
    except ChildFailedError:
        return True, None
    except SignalException as stop:
        return False, int(stop.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return False, None


def _own_command() -> list[str]:
    """What Python was started with: the options of the interpreter, the program, its words."""
    typed = sys.argv[1:]
    words = [word for word in sys.orig_argv[1:] if word != "--debug"]  # main() takes it out
    if words[len(words) - len(typed) :] == typed:
        return sys.orig_argv[1:]
    return ["-m", "halfstep", *typed]  # called by another program


def _is_handled(number: signal.Signals) -> bool:
    return signal.getsignal(number) is not signal.SIG_IGN


@contextmanager
def _environment_of_ranks(endings_folder: Path, threads: int) -> Iterator[None]:
    """Inside, new processes have the variables of ranks; those that the user has set stay."""
    usual = {
        "OMP_NUM_THREADS": str(threads),
        SHUTDOWN_VARIABLE: str(SHUTDOWN_TIMEOUT_S),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch's warnings that a connection has ended
    }
    before = dict(os.environ)
    os.environ.update({name: text for name, text in usual.items() if name not in before})
    os.environ[ENDINGS_VARIABLE] = str(endings_folder)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
