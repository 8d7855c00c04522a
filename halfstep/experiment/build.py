"""From settings to a model: network, optimizer and schedule by name; checked with one batch."""

import inspect
import math
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from halfstep import nets, schedules
from halfstep.engine.limits import BatchLimit
from halfstep.errors import Notice
from halfstep.experiment.builders import import_function
from halfstep.experiment.datasets import TrainTestData
from halfstep.experiment.settings import Settings
from halfstep.metrics import Accuracy, MeanAbsoluteError, R2Score
from halfstep.model import Model
from halfstep.nets import registry
from halfstep.precision import Precision
from halfstep.utils.rng import seed_everything

# Names as in settings.OPTIMIZERS.
OPTIMIZER_CLASSES: dict[str, Any] = {
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "adam": Adam,
    "adamw": AdamW,
}

LOGICAL_MICRO_BATCHES = 12  # of a batch, as Model has it: 1, 2, 3, 4, 6 and 12 ranks share evenly

CHECKED_SAMPLES = 4  # samples that check_one_batch sends through the network


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


def build_loss(settings: Settings, data: TrainTestData) -> nn.Module:
    """Cross entropy of classes, weighted if the settings say so; the squared error of numbers."""
    if data.is_regression:
        return nn.MSELoss()
    weights = data.class_weights
    if weights is not None:
        weights = weights.to(settings.torch_device)
    return nn.CrossEntropyLoss(weight=weights)


def build_metrics(data: TrainTestData) -> dict[str, Any]:
    """Accuracy of classes; of numbers the absolute error in their unit, and R²."""
    if not data.is_regression:
        return {"acc": Accuracy()}
    assert data.encoding is not None
    return {"mae": MeanAbsoluteError(data.encoding.target_deviation), "r2": R2Score()}


def build_model(
    settings: Settings,
    data: TrainTestData,
    precision: str,
    seed: int,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    ema: float | None = None,
    limit: BatchLimit | None = None,
) -> Model:
    """A model that trains by the settings; for a seed, every precision has the same weights."""
    net = build_network(settings, data, seed)
    batches_per_epoch = data.train_batches(seed, settings.batch).size
    if limit is not None:
        batches_per_epoch = limit.apply(batches_per_epoch) or batches_per_epoch
    return Model(
        net,
        build_loss(settings, data),
        build_optimizer(settings, net.parameters()),
        Precision.parse(precision),
        metrics=build_metrics(data),
        train_metrics=False,  # times are compared: a step does nothing but train
        schedule=build_schedule(settings, batches_per_epoch, accumulate),
        accumulate=accumulate,
        clip_norm=clip_norm,
        ema=ema,
        device=settings.torch_device,
        **exactness(settings),
    )


def exactness(settings: Settings) -> dict[str, Any]:
    """The options of a model that trains to the same bits on any number of ranks."""
    if settings.exact is None:
        return {}
    return {"exact": settings.exact, "logical": settings.logical or LOGICAL_MICRO_BATCHES}


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
            model.evaluate(batches)
        except Exception as error:
            shape = " × ".join(map(str, data.shape))
            raise ValueError(
                f"net: {settings.net} does not take inputs of {shape} "
                f"with labels of {settings.data}: "
                f"{type(error).__name__}: {error}{_channel_advice(settings, data)}"
            ) from error


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
        "classes": 1 if data.is_regression else data.classes,
        "outputs": 1 if data.is_regression else data.classes,
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
