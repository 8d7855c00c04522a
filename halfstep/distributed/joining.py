"""How a process joins the group of its job, in an attempt of its own.

torchrun starts a group again after a loss, and all attempts share one store. Addresses that ranks
of an earlier attempt left there would be taken for those of this one (torch 2.13: "Connection
refused" after each restart). torchrun's restart count does not tell attempts apart: it is counted
on each host, and stays as it is when hosts come or go. So the ranks that are here now agree on a
name for their attempt first, and keep what is theirs in the store under that name.
"""

import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from halfstep.errors import RankLostError
from halfstep.utils.text import list_some

_PrefixStore: Any = getattr(dist, "PrefixStore", None)  # torch may be built without

LOOK_EVERY_S = 0.02  # how often rank 0 looks for ranks that came
MAX_RANKS_SHOWN = 8


def store_of_attempt(store: Any, rank: int, count: int, timeout: timedelta) -> Any:
    """The part of the job's store that only the ranks of this attempt use.

    Rank k writes a random word; rank 0 answers each word with the name of the attempt. A rank of an
    earlier attempt is gone and answers nothing, and what it wrote is answered in vain.
    """
    if rank == 0:
        name = secrets.token_hex(8)
        _answer_ranks(store, name, count, timeout)
    else:
        name = _ask_for_name(store, rank, timeout)
    return _PrefixStore(f"halfstep/attempt/{name}", store)


def _ask_for_name(store: Any, rank: int, timeout: timedelta) -> str:
    word = secrets.token_hex(8)
    store.set(_word_key(rank), word)
    try:
        store.wait([_name_key(word)], timeout)
    except RuntimeError as error:
        raise RankLostError(
            f"rank {rank}: the start of the job: rank 0 did not come within "
            f"{timeout.total_seconds():g} s; look for its message. torch says: {error}"
        ) from error
    name: str = store.get(_name_key(word)).decode()
    store.set(_here_key(name, rank), "here")
    return name


def _answer_ranks(store: Any, name: str, count: int, timeout: timedelta) -> None:
    """Tells every rank the name, until all of them say that they have it."""
    missing = set(range(1, count))
    answered: dict[int, bytes] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([_here_key(name, rank)]):
                missing.remove(rank)
            elif store.check([_word_key(rank)]):
                word = store.get(_word_key(rank))
                if answered.get(rank) != word:
                    store.set(_name_key(word.decode()), name)
                    answered[rank] = word
        if missing and time.monotonic() > deadline:
            ranks = list_some([str(rank) for rank in sorted(missing)], MAX_RANKS_SHOWN)
            raise RankLostError(
                f"rank 0 of {count}: the start of the job: rank {ranks} did not come within "
                f"{timeout.total_seconds():g} s; look for the messages of these ranks, and whether "
                "their hosts reach this one"
            )
        if missing:
            time.sleep(LOOK_EVERY_S)


def _word_key(rank: int) -> str:
    return f"halfstep/word/{rank}"


def _name_key(word: str) -> str:
    return f"halfstep/name/{word}"


def _here_key(name: str, rank: int) -> str:
    return f"halfstep/here/{name}/{rank}"
