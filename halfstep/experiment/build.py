"""From settings to a model: the network by name, its options from the data, optimizer, schedule; checked beforehand."""

import inspect
import os
import random
import sys
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from halfstep import nets, schedules
from halfstep.errors import Notice
from halfstep.experiment.builders__build import builder
from halfstep.experiment.datasets import Material
from halfstep.experiment.settings import Settings
from halfstep.metrics import Accuracy
from halfstep.model import Model

_MAKERS: dict[str, Any] = {
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "adam": Adam,
    "adamw": AdamW,
}


def seeded(seed: int) -> None:
    """Python's generator, numpy's and torch's: two runs that draw from any of them are equal to their last state."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - the users' one, which takes 32 bits
    torch.manual_seed(seed)


def network(settings: Settings, material: Material, seed: int) -> nn.Module:
    """Drawn on the host, so that a seed means the same weights on every device."""
    seeded(seed)
    return nets.load(settings.net, **_options(settings.net, material)).to(settings.place)


def model(settings: Settings, material: Material, name: str, seed: int) -> Model:
    """The same weights for a seed in every precision."""
    net = network(settings, material, seed)
    optimizer: Optimizer = _MAKERS[settings.optimizer](net.parameters(), lr=settings.lr)
    steps = settings.epochs * material.batches(seed, settings.batch).size
    return Model(
        net, nn.CrossEntropyLoss(), optimizer, name, metrics={"acc": Accuracy()},
        schedule=_schedule(settings, steps),
    )  # fmt: skip


def check(settings: Settings, material: Material) -> None:
    """One batch through a new network in the reference precision: what does not fit is told before training."""
    with warnings.catch_warnings(action="ignore"):  # the run itself gives the notices
        made = model(settings, material, settings.precisions[0], settings.seeds[0])
        batches = material.train.take(min(4, material.train.size)).batch(4)
        try:
            next(iter(batches))
        except (ValueError, OSError) as error:  # images of several sizes, a damaged file
            raise ValueError(f"data: {settings.data}: {error}") from error
        batches.seek(0)
        try:
            scores = made.evaluate(batches)
        except Exception as error:
            shape = " × ".join(map(str, material.shape))
            fits = f"{settings.net} does not take inputs of {shape} with labels of {settings.data}"
            raise ValueError(
                f"net: {fits}: {type(error).__name__}: {error}{_advice(settings, material)}"
            ) from error
    assert "acc" in scores


def _advice(settings: Settings, material: Material) -> str:
    """The line to write where images of the user's own have no channels, which only an MLP does without."""
    if len(material.shape) != 2 or ":" not in settings.data:
        return ""
    shape = ", ".join(map(str, material.shape))
    return f" Give the images of {settings.data} their channel: x[:, None] is [N, 1, {shape}]."


def note(settings: Settings, material: Material) -> None:
    """A batch that no epoch can fill."""
    size = material.train.size
    if settings.batch > size:
        text = f"batch: {settings.batch} is more than the {size} training samples: an epoch is one batch of {size}"
        warnings.warn(text, Notice, stacklevel=2)


def _options(name: str, material: Material) -> dict[str, Any]:
    """Those of inputs, channels, classes and outputs that the builder names and the data knows."""
    size = 1
    for side in material.shape:
        size *= side
    known = {"inputs": size, "classes": material.classes, "outputs": material.classes}
    known["channels"] = material.shape[0] if len(material.shape) == 3 else None
    taken = _parameters(name)
    return {
        option: value for option, value in known.items() if option in taken and value is not None
    }


def _parameters(name: str) -> set[str]:
    if ":" in name:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # a builder beside the user's command
        found: Any = builder(name, "net")
    else:
        found = getattr(nets, name, None) if name in nets.names() else None
    try:
        return set(inspect.signature(found).parameters) if found is not None else set()
    except ValueError:  # some classes written in C do not tell
        return set()


def _schedule(settings: Settings, updates: int) -> Any:
    assert settings.lr is not None
    if settings.schedule == "constant":
        return None
    return getattr(schedules, settings.schedule)(settings.lr, updates)
