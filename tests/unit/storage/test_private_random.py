"""A library that draws from Python's random generators does not move those of the run."""

import importlib
import random
import sys
from pathlib import Path

import pytest

from halfstep.storage.private_random import PrivateRandom
from halfstep.storage.store_access import Store
from halfstep.storage.url import StoreURL

LIBRARY = """
import random
import random as dice
from random import uniform

def draw():
    return [random.random(), dice.choice([1, 2, 3]), uniform(0, 1), random.Random(3).random()]
"""


def test_the_generators_of_the_process_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    private = PrivateRandom({"store_library"})
    private.apply()
    (tmp_path / "store_library").mkdir()
    (tmp_path / "store_library" / "__init__.py").write_text(LIBRARY)
    (tmp_path / "user_library.py").write_text(LIBRARY)
    library = importlib.import_module("store_library")
    user_library = importlib.import_module("user_library")
    try:
        private.apply()
        before = random.getstate()
        draws = [library.draw() for _ in range(5)]
        assert random.getstate() == before
        assert len({draw[0] for draw in draws}) == 5
        assert draws[0][3] == random.Random(3).random()
        user_library.draw()
        assert random.getstate() != before
    finally:
        del sys.modules["store_library"], sys.modules["user_library"]


def test_a_call_before_its_library_is_known_moves_nothing() -> None:
    store = Store(StoreURL("memory", "x"), "out")
    before = random.getstate()
    store._call(random.random)
    assert random.getstate() == before
