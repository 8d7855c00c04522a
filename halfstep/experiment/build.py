"""From settings to a model: network, optimizer and schedule by name; checked with one batch."""

import inspect
import math
import random
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from halfstep import nets, schedules
from halfstep.errors import Notice
from halfstep.experiment.builders import import_function
from halfstep.experiment.datasets import TrainTestData
from halfstep.experiment.settings import Settings
from halfstep.metrics import Accuracy
from halfstep.model import Model
from halfstep.nets import registry

# Names as in settings.OPTIMIZERS.
OPTIMIZER_CLASSES: dict[str, Any] = {
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "adam": Adam,
    "adamw": AdamW,
}

CHECKED_SAMPLES = 4  # samples that check_one_batch sends through the network


def seed_everything(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators: a run may draw from any of them."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - the global one, which takes 32 bits
    torch.manual_seed(seed)


def build_network(settings: Settings, data: TrainTestData, seed: int) -> nn.Module:
    """A new network. Its weights are drawn on the host: equal on every device for a seed."""
    seed_everything(seed)
    net = load_network(settings.net, data)
    return net.to(settings.torch_device)


def load_network(name: str, data: TrainTestData | None = None) -> nn.Module:
    """A new network by name or by a function of the user's; without data, of its usual size."""
    builder = _find_builder(name)
    options = {} if data is None or builder is None else _network_options(builder, data)
    if builder is not None and ":" in name:
        return registry.build(name, builder, options)
    return nets.load(name, **options)


def build_optimizer(settings: Settings, params: Iterable[Tensor]) -> Optimizer:
    optimizer: Optimizer = OPTIMIZER_CLASSES[settings.optimizer](params, lr=settings.lr)
    return optimizer


def build_schedule(settings: Settings, batches_per_epoch: int, accumulate: int) -> Any:
    """Learning rates by update number; None for a constant rate."""
    if settings.schedule == "constant":
        return None
    # The micro-batches at the end of an epoch that do not fill a cycle end in an update too.
    updates_per_epoch = -(-batches_per_epoch // max(accumulate, 1))
    formula = getattr(schedules, settings.schedule)
    return formula(settings.lr, settings.epochs * updates_per_epoch)


def build_model(
    settings: Settings,
    data: TrainTestData,
    precision: str,
    seed: int,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    ema: float | None = None,
) -> Model:
    """A model that trains by the settings; for a seed, every precision has the same weights."""
    net = build_network(settings, data, seed)
    batches_per_epoch = data.train_batches(seed, settings.batch).size
    return Model(
        net,
        nn.CrossEntropyLoss(),
        build_optimizer(settings, net.parameters()),
        precision,
        metrics={"acc": Accuracy()},
        train_metrics=False,  # times are compared: a step does nothing but train
        schedule=build_schedule(settings, batches_per_epoch, accumulate),
        accumulate=accumulate,
        clip_norm=clip_norm,
        ema=ema,
    )


def check_one_batch(settings: Settings, data: TrainTestData) -> None:
    """Sends a few samples through a new network, so that what does not fit fails before training.

    In the reference precision, with the first seed.
    """
    with warnings.catch_warnings(action="ignore"):  # the run itself gives the notices
        model = build_model(settings, data, settings.precisions[0], settings.seeds[0])
        sample_count = min(CHECKED_SAMPLES, data.train.size)
        batches = data.train.take(sample_count).batch(CHECKED_SAMPLES)

        # Reading. It fails for images of several sizes, or a damaged file.
        try:
            next(iter(batches))
        except (ValueError, OSError) as error:
            raise ValueError(f"data: {settings.data}: {error}") from error

        # Forward and loss.
        batches.seek(0)
        try:
            scores = model.evaluate(batches)
        except Exception as error:
            shape = " × ".join(map(str, data.shape))
            raise ValueError(
                f"net: {settings.net} does not take inputs of {shape} "
                f"with labels of {settings.data}: "
                f"{type(error).__name__}: {error}{_channel_advice(settings, data)}"
            ) from error
    assert "acc" in scores


def _channel_advice(settings: Settings, data: TrainTestData) -> str:
    """What to write where a user's images have no channels; only an MLP does without them."""
    if len(data.shape) != 2 or ":" not in settings.data:
        return ""
    shape = ", ".join(map(str, data.shape))
    return f" Give the images of {settings.data} their channel: x[:, None] is [N, 1, {shape}]."


def warn_about_large_batch(settings: Settings, data: TrainTestData) -> None:
    """Gives a notice if a batch is larger than the training data."""
    sample_count = data.train.size
    if settings.batch > sample_count:
        message = (
            f"batch: {settings.batch} is more than the {sample_count} training samples: "
            f"an epoch is one batch of {sample_count}"
        )
        warnings.warn(message, Notice, stacklevel=2)


def _network_options(builder: Any, data: TrainTestData) -> dict[str, Any]:
    """inputs, channels, classes, outputs: those that the network's builder names as parameters.

    What the data does not know is left to the builder's default.
    """
    channels = data.shape[0] if len(data.shape) == 3 else None
    known = {
        "inputs": math.prod(data.shape),
        "classes": data.classes,
        "outputs": data.classes,
        "channels": channels,
    }
    try:
        parameters = set(inspect.signature(builder).parameters)
    except ValueError:  # some classes written in C have no signature
        return {}
    return {
        option: value
        for option, value in known.items()
        if option in parameters and value is not None
    }


def _find_builder(name: str) -> Any:
    """The function that makes a network; None where it cannot be known."""
    if ":" in name:
        return import_function(name, "net")
    if name in nets.names():
        return getattr(nets, name, None)
    return None
