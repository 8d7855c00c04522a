"""What torchrun says of this process in its environment: its rank, and how many there are.

torch is not imported: the command line reads this before it knows that it needs torch.
"""

import os

# Set by torchrun for each process that it starts.
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_by_torchrun() -> bool:
    """Whether torchrun, or whatever sets its variables, has started this process."""
    return all(os.environ.get(name) for name in TORCHRUN_VARIABLES)


def is_one_of_several() -> bool:
    """Whether torchrun has started more ranks than this one. One alone needs no process group."""
    return rank_count_of_environment() > 1


def rank_of_environment() -> int:
    """This process's rank, before it has joined a group; 0 in a process started alone."""
    return _number("RANK", 0)


def rank_count_of_environment() -> int:
    """How many ranks torchrun has started; 1 in a process started alone."""
    return _number("WORLD_SIZE", 1)


def local_rank_of_environment() -> int:
    """The number of this process among those of its machine; 0 in a process started alone."""
    return _number("LOCAL_RANK", 0)


def attempt_of_environment() -> int:
    """How often torchrun has started the ranks again, after one of them had ended."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def _number(name: str, alone: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and started_by_torchrun() else alone
