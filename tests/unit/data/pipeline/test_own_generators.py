"""Generators that users' objects keep are found, saved and set, whatever library they are of."""

import random
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from halfstep import checkpoint
from halfstep.data.pipeline.own_generators import (
    find_generators,
    generator_state,
    set_generator_state,
)

MODULES_RNG = np.random.default_rng(1)

MAKERS: dict[str, Any] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "python": lambda: random.Random(1),
    "numpy": lambda: np.random.default_rng(1),
    "RandomState": lambda: np.random.RandomState(1),
    **{
        kind.__name__: partial(lambda kind: np.random.Generator(kind(1)), kind)
        for kind in (np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM)
    },
}


def draw(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)]
    return list(generator.standard_normal(3))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_goes_through_a_checkpoint(kind: str, tmp_path: Any) -> None:
    first = MAKERS[kind]()
    draw(first)
    checkpoint.save(tmp_path / "step-000000001", {"state": generator_state(first)})
    expected = draw(first)
    second = MAKERS[kind]()
    set_generator_state(second, checkpoint.load(tmp_path / "step-000000001").tree["state"])
    assert draw(second) == expected
    assert draw(second) == draw(first)


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("empty", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class MoreSlots(Slotted):
    __slots__ = ("more",)


def of_module(x: Any) -> Any:
    return x + MODULES_RNG.normal()


def of_process(x: Any) -> Any:
    return x + random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002


def test_places() -> None:
    rng = random.Random(0)
    places = {
        "attribute": Holder(rng),
        "deep": Holder([Holder({"a": (rng,)})]),
        "slot": Slotted(rng),
        "slot of a base": MoreSlots(rng),
        "enclosing": lambda x: x + rng.random(),
        "module": of_module,
        "partial": partial(of_process, rng),
        "method": Holder(rng).__init__,
        "default": lambda x, draw_from=rng: x,
    }
    paths = {name: list(find_generators({name: place})) for name, place in places.items()}
    assert all(len(found) == 1 for found in paths.values()), paths
    assert paths["attribute"] == ["attribute.value"]
    assert paths["slot of a base"] == ["slot of a base.value"]
    assert paths["deep"] == ["deep.value.0.value.a.0"]


def test_generators_of_the_process_and_what_is_no_generator_are_left_out() -> None:
    places = {
        "process": of_process,
        "modules": Holder([random, np.random, torch]),
        "default generator": Holder(torch.default_generator),
        "system": Holder(random.SystemRandom()),
        "lock": Holder(threading.Lock()),
        "long list": Holder([random.Random(0)] * 1000),
    }
    assert find_generators(places) == {}


def test_a_circle_ends() -> None:
    holder = Holder(None)
    holder.value = [holder, random.Random(0)]
    assert list(find_generators({"a": holder})) == ["a.value.1"]
