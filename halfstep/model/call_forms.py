"""Other ways to call fit, evaluate and predict, as programs for other libraries write them.

Where such a call has one meaning it becomes ours. Where it has none, or several, it is an error
that says what to write. Everything here happens before the call: fit itself knows one form only.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from halfstep.engine import Callback
from halfstep.engine.feed import columns_dataset
from halfstep.errors import closest_name
from halfstep.utils.text import write_line

Array: TypeAlias = Tensor | np.ndarray[Any, Any]
Columns: TypeAlias = Array | Sequence[Array]
R = TypeVar("R")

EVAL_BATCH_SIZE = 256  # no result depends on it

_SMALL_INTEGERS = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32),
    *(np.uint8, np.int8, np.int16, np.int32),
)

# Keywords of other libraries → ours, where they mean the same.
FIT_NAMES = {
    "x": "data",
    "X": "data",
    "train_data": "data",
    "train_dataloader": "data",
    "train_dataloaders": "data",
    "train_dataset": "data",
    "train_loader": "data",
    "dataloader": "data",
    "loader": "data",
    "max_epochs": "epochs",
    "n_epochs": "epochs",
    "nb_epoch": "epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "eval_dataset": "valid",
    "val_data": "valid",
    "val_dataloader": "valid",
    "val_dataloaders": "valid",
    "val_loader": "valid",
    "valid_loader": "valid",
    "validation_data": "valid",
    "check_val_every_n_epoch": "valid_every",
    "validation_freq": "valid_every",
}

# Keywords that belong elsewhere → what is wrong, and what to write.
FIT_ANSWERS = {
    "class_weight": (
        "weights of the classes belong to the loss",
        "hs.Model(net, nn.CrossEntropyLoss(weight=torch.ones(classes)), optimizer)",
    ),
    "sample_weight": (
        "weights of samples belong into the loss, which then takes them from the batch",
        "hs.Model(net, None, optimizer, forward=lambda net, x, y, w: "
        "(nn.functional.cross_entropy(net(x), y, reduction='none') * w).mean())",
    ),
    "initial_epoch": (
        "a run goes on where its checkpoint was written",
        "model.fit(2, data, callbacks=[hs.Checkpoint('runs/mine')], resume='auto')",
    ),
    "validation_steps": (
        "validation is one pass over its data",
        "model.fit(2, data, valid=hs.data.Dataset((xv, yv)).take(64).batch(32))",
    ),
    "datamodule": (
        "data is an argument of its own",
        "model.fit(2, datamodule.train_dataloader(), valid=datamodule.val_dataloader())",
    ),
    **dict.fromkeys(
        ("workers", "num_workers", "use_multiprocessing", "max_queue_size"),
        (
            "processes that read belong to the data",
            "model.fit(2, DataLoader(train_ds, batch_size=32, shuffle=True, num_workers=2))",
        ),
    ),
    **dict.fromkeys(
        ("lr", "learning_rate", "max_lr"),
        (
            "the learning rate belongs to the optimizer",
            "hs.Model(net, loss, torch.optim.SGD(net.parameters(), lr=0.1))",
        ),
    ),
    **dict.fromkeys(
        ("optimizer", "loss", "loss_fn", "criterion", "metrics", "precision", "device"),
        (
            "it belongs to the Model",
            "hs.Model(net, loss, optimizer, 'O1', metrics={'acc': hs.metrics.Accuracy()}, "
            "device='auto')",
        ),
    ),
}


class FitOptions(TypedDict, total=False):
    """The options of fit beside epochs and data, for the other forms of the call."""

    valid: Any
    valid_every: int | Iterable[int]
    valid_every_steps: int
    callbacks: Callback | Iterable[Callback] | None
    progress: bool | Literal["lines"]
    sink: int | None
    steps_per_epoch: int | None
    max_time: float | str | timedelta | None
    limit_batches: float | None
    resume: str | Path | None


def accept_fit_forms(fit: Callable[..., R]) -> Callable[..., R]:
    """A decorator of `fit(self, epochs, data, …)`: takes the other forms too."""
    known = [name for name in inspect.signature(fit).parameters if name != "self"]

    @wraps(fit)
    def fit_in_any_form(self: Any, *args: Any, **options: Any) -> R:
        epochs, data, options = read_fit_call(self.net, args, options, known)
        try:
            return fit(self, epochs, data, **options)
        except TypeError as error:
            if self._takes_dicts and re.search(r"forward\(\) (takes|got)", str(error)):
                problem = f"fit: without a loss the network gets the whole batch, and {error}"
                line = "hs.Model(net, nn.CrossEntropyLoss(), optimizer)"
                raise TypeError(write_line(problem, line)) from error
            raise

    return fit_in_any_form


def read_fit_call(
    net: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any], known: Sequence[str]
) -> tuple[Any, Any, dict[str, Any]]:
    """Epochs, data and options of a call in any form."""
    options = _rename("fit", options, FIT_NAMES)
    columns = _take(options, "y", "batch_size", "shuffle", "seed", "validation_split")
    valid_batch_size = options.pop("validation_batch_size", None)
    _translate_options(options)
    for name in options:
        _check_known("fit", name, known)

    # Which is which: a number first is ours, data first is the order of other libraries.
    data_and_y, options = _place_positions(args, options)
    if data_and_y is not None:
        columns["y"] = data_and_y
    if "epochs" not in options or "data" not in options:
        raise TypeError(_missing_message(options, columns))
    epochs = options.pop("epochs")
    data = options.pop("data")
    if isinstance(epochs, np.integer):
        epochs = int(epochs)
    if isinstance(epochs, float | str) and _is_whole(epochs):
        problem = f"epochs: expected a whole number of 1 or more, got {epochs!r}"
        raise TypeError(write_line(problem, f"model.fit({int(float(epochs))}, data)"))

    batch_size = columns.get("batch_size")
    data, split = _training_batches(net, data, columns)
    if split is not None:
        if options.get("valid") is not None:
            line = "model.fit(x, y, epochs=2, batch_size=32, validation_data=(xv, yv))"
            problem = "fit: got validation_data and validation_split, expected one of them"
            raise TypeError(write_line(problem, line))
        options["valid"] = split
    if "valid" in options:
        size = valid_batch_size or batch_size or EVAL_BATCH_SIZE
        options["valid"] = _validation_batches(net, options["valid"], size)
    return epochs, data, options


def _rename(owner: str, options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The options with the names of other libraries replaced by ours."""
    renamed: dict[str, Any] = {}
    for name, value in options.items():
        own_name = names.get(name, name)
        if own_name in renamed:
            raise TypeError(f"{owner}: {own_name!r} was given twice, once as {name!r}")
        renamed[own_name] = value
    return renamed


def _take(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Removes these options; returns those that were there and not None."""
    taken = {name: options.pop(name) for name in names if name in options}
    return {name: value for name, value in taken.items() if value is not None}


def _translate_options(options: dict[str, Any]) -> None:
    """Options whose values have other words elsewhere: verbose and ckpt_path."""
    if "verbose" in options:
        verbose = options.pop("verbose")
        options["progress"] = "lines" if verbose == 2 else bool(verbose)
    if "ckpt_path" in options:
        path = options.pop("ckpt_path")
        options["resume"] = "auto" if path == "last" else path


def _check_known(owner: str, name: str, known: Sequence[str]) -> None:
    if name in known:
        return
    if name in FIT_ANSWERS:
        problem, line = FIT_ANSWERS[name]
        raise TypeError(write_line(f"{owner}: {name}: {problem}", line))
    close = closest_name(name, known)
    suggestion = f"did you mean {close!r}? " if close else ""
    raise TypeError(
        f"{owner}: unknown option {name!r}; {suggestion}options are: {', '.join(known)}"
    )


def _place_positions(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The positional arguments by their names: the target where one came, and all options."""
    if args and isinstance(args[0], nn.Module):
        problem = f"fit: the Model holds its network already, got {type(args[0]).__name__} first"
        raise TypeError(write_line(problem, "model.fit(2, data)"))
    if len(args) > 2:
        third = type(args[2]).__name__
        problem = f"fit: expected two arguments without a name, got {len(args)}, the third {third}"
        raise TypeError(write_line(problem, _named_line(args)))

    options = dict(options)
    names = ("epochs", "data")
    if args and "data" not in options and not _is_plain(args[0]):
        names = ("data", "epochs")
        if len(args) == 2 and _are_columns(args[0]) and _are_columns(args[1]):
            options["data"] = args[0]
            return args[1], options
        if len(args) == 2 and not _is_plain(args[1]):
            _refuse_frame(args[0])
            problem = f"fit: expected epochs and data, got two of data ({_kinds(args)})"
            raise TypeError(write_line(problem, "model.fit(2, data, valid=valid)"))
    for name, value in zip(names, args, strict=False):
        if name in options:
            raise TypeError(f"fit: {name!r} was given twice, once without its name")
        options[name] = value
    return None, options


def _named_line(args: tuple[Any, ...]) -> str:
    if _are_columns(args[0]) and _are_columns(args[1]):
        return "model.fit(x, y, epochs=2, batch_size=32)"
    return "model.fit(2, data, valid=valid)"


def _missing_message(options: Mapping[str, Any], columns: Mapping[str, Any]) -> str:
    """Epochs or data are not there: the line as the user began it."""
    if "data" not in options:
        return write_line("fit: expected data, got none", "model.fit(2, data)")
    problem = "fit: expected the number of epochs too"
    if columns:
        return write_line(problem, "model.fit(x, y, epochs=2, batch_size=32)")
    return write_line(problem, "model.fit(2, data)")


def _training_batches(net: nn.Module, data: Any, columns: dict[str, Any]) -> tuple[Any, Any]:
    """Batches of whole tensors, shuffled in each epoch, and the part that was split off.

    `columns` holds y, batch_size, shuffle, seed and validation_split, where they were given.
    """
    if not columns:
        return data, None
    is_dataset = _is_map_style(data)
    if not _are_columns(data) and not isinstance(data, Mapping) and not is_dataset:
        names = ", ".join(columns)
        kind = type(data).__name__
        _refuse_frame(data)
        problem = f"fit: {names}: for whole tensors or arrays, and {kind} says it itself"
        raise TypeError(write_line(problem, "model.fit(2, data)"))
    if "batch_size" not in columns:
        problem = "fit: whole tensors need the size of a batch too"
        raise TypeError(write_line(problem, "model.fit(x, y, epochs=2, batch_size=32)"))
    if "y" in columns:
        data = _join_columns(data, columns["y"])

    split = None
    if "validation_split" in columns:
        data, split = _split_columns(data, columns["validation_split"])
    dataset = columns_dataset(_convert_columns(net, data), seed=columns.get("seed", 0))
    if columns.get("shuffle", True):
        dataset = dataset.shuffle()
    return dataset.batch(columns["batch_size"]), split


def _join_columns(x: Any, y: Any) -> tuple[Any, ...]:
    """Inputs and target as the columns of a data set."""
    _refuse_frame(y)
    inputs = tuple(x) if isinstance(x, tuple | list) else (x,)
    if isinstance(x, Mapping) or not _are_columns(x) or not _are_columns(y):
        problem = f"fit: expected x and y as tensors or arrays, got {_kinds((x, y))}"
        raise TypeError(write_line(problem, "model.fit(x, y, epochs=2, batch_size=32)"))
    targets = tuple(y) if isinstance(y, tuple | list) else (y,)
    return (*inputs, *targets)


def _split_columns(data: Any, share: Any) -> tuple[Any, Any]:
    """The first samples to train on and the last ones to validate with, as Keras splits them."""
    is_share = isinstance(share, float | int) and 0 <= share < 1
    if not is_share:
        line = "model.fit(x, y, epochs=2, batch_size=32, validation_split=0.2)"
        problem = f"fit: validation_split: expected a share from 0 to below 1, got {share!r}"
        raise ValueError(write_line(problem, line))
    if share == 0:
        return data, None
    if not isinstance(data, tuple) or not _are_columns(data):
        line = "model.fit(x, y, epochs=2, batch_size=32, validation_split=0.2)"
        problem = "fit: validation_split is for whole tensors or arrays x and y"
        raise TypeError(write_line(problem, line))
    count = len(data[0])
    train_count = math.floor(count * (1 - share))
    if not 0 < train_count < count:
        line = "model.fit(x, y, epochs=2, batch_size=32, validation_split=0.2)"
        problem = f"fit: validation_split={share:g} of {count} samples leaves one side empty"
        raise ValueError(write_line(problem, line))
    train = tuple(column[:train_count] for column in data)
    return train, tuple(column[train_count:] for column in data)


def _validation_batches(net: nn.Module, valid: Any, batch_size: int) -> Any:
    """Validation data given as (xv, yv) in batches; anything else as it is."""
    columns = _as_columns(valid)
    if columns is not None:
        return columns_dataset(_convert_columns(net, columns)).batch(batch_size)
    if isinstance(valid, Mapping) and any(isinstance(part, tuple) for part in valid.values()):
        return {name: _validation_batches(net, part, batch_size) for name, part in valid.items()}
    return valid


def accept_evaluate_forms(evaluate: Callable[..., R]) -> Callable[..., R]:
    """A decorator of `evaluate(self, data)`: takes x, y and a batch size too."""
    known = [name for name in inspect.signature(evaluate).parameters if name != "self"]

    @wraps(evaluate)
    def evaluate_in_any_form(self: Any, *args: Any, **options: Any) -> R:
        options = _rename("evaluate", options, FIT_NAMES)
        _drop_quiet_options("evaluate", options)
        columns = _take(options, "y", "batch_size")
        positions = list(args)
        if len(positions) > 1 and _are_columns(positions[0]) and _are_columns(positions[1]):
            columns["y"] = positions.pop(1)
        if len(positions) > 1:
            problem = f"evaluate: expected one argument without a name, got {_kinds(args)}"
            raise TypeError(write_line(problem, "model.evaluate(data)"))
        if positions:
            options["data"] = positions[0]
        for name in options:
            _check_known("evaluate", name, known)
        if "data" not in options:
            raise TypeError(write_line("evaluate: expected data", "model.evaluate(data)"))
        options["data"] = _evaluation_batches(self.net, options["data"], columns)
        return evaluate(self, **options)

    return evaluate_in_any_form


def _evaluation_batches(net: nn.Module, data: Any, columns: dict[str, Any]) -> Any:
    """Whole tensors or arrays in batches; anything else as it is."""
    batch_size = columns.get("batch_size", EVAL_BATCH_SIZE)
    whole = _as_columns(data)
    if "y" in columns:
        whole = _join_columns(data, columns["y"])
    if whole is not None:
        return columns_dataset(_convert_columns(net, whole)).batch(batch_size)
    if "batch_size" in columns:
        if not _are_columns(data) and not _is_map_style(data):
            problem = f"evaluate: batch_size: {type(data).__name__} comes in batches"
            raise TypeError(write_line(problem, "model.evaluate(data)"))
        return columns_dataset(data).batch(batch_size)
    return data


def accept_predict_forms(predict: Callable[..., R]) -> Callable[..., R]:
    """A decorator of `predict(self, data, *, batch=…)`: takes `batch_size=` for `batch=` too."""
    known = [name for name in inspect.signature(predict).parameters if name != "self"]
    names = {**FIT_NAMES, "batch_size": "batch", "inputs": "data"}

    @wraps(predict)
    def predict_in_any_form(self: Any, *args: Any, **options: Any) -> R:
        options = _rename("predict", options, names)
        _drop_quiet_options("predict", options)
        if len(args) > 1:
            problem = f"predict: expected one argument without a name, got {_kinds(args)}"
            line = "model.predict(x, batch=32)"
            raise TypeError(write_line(problem, line))
        if args and "data" in options:
            raise TypeError("predict: 'data' was given twice, once without its name")
        for name in options:
            _check_known("predict", name, known)
        data = args[0] if args else options.pop("data", None)
        if isinstance(data, np.ndarray):
            (data,) = _convert_columns(self.net, (data,))
        elif isinstance(data, Mapping) and all(map(_is_array, data.values())):
            data = {name: _convert_columns(self.net, (x,))[0] for name, x in data.items()}
        return predict(self, data, **options)

    return predict_in_any_form


def _drop_quiet_options(owner: str, options: dict[str, Any]) -> None:
    """Leaves out verbose=0 and return_dict=True, which say what happens here anyway."""
    for name, usual in (("verbose", 0), ("return_dict", True)):
        value = options.pop(name, usual)
        if value not in (usual, "auto"):
            happens = "it prints nothing" if name == "verbose" else "it returns a dict by name"
            line = f"model.{owner}(x)" if owner == "predict" else f"model.{owner}(data)"
            raise TypeError(write_line(f"{owner}: {name}={value!r}: {happens}", line))


def _convert_columns(net: nn.Module, columns: Any) -> Any:
    """Whole tensors and arrays in dtypes that a network and a loss take; the last is the target.

    numpy's float64, which nobody chose, becomes float32 unless the network is float64 itself; class
    numbers become int64.
    """
    if not isinstance(columns, tuple) or not _are_columns(columns):
        return columns
    is_wide = any(p.dtype == torch.float64 for p in net.parameters())
    converted = []
    for number, column in enumerate(columns):
        is_target = number > 0 and number == len(columns) - 1
        if not is_wide and column.dtype == np.float64:
            column = column.astype(np.float32)
        if not is_wide and column.dtype == torch.float64 and not is_target:
            problem = "x: it is a float64 tensor, and the network is not float64"
            raise TypeError(write_line(problem, "x = x.float()"))
        if is_target and column.ndim == 1 and column.dtype in _SMALL_INTEGERS:
            column = torch.as_tensor(column).long()
        converted.append(column)
    return tuple(converted)


# What a value is.


def _is_plain(value: Any) -> bool:
    """Whether this can only be meant as a number of epochs, right or wrong."""
    return value is None or isinstance(value, int | float | str | np.number)


def _is_whole(value: float | str) -> bool:
    try:
        return float(value).is_integer() and float(value) >= 1
    except ValueError:
        return False


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _are_columns(value: Any) -> bool:
    """Whether this is whole data: a tensor or array, or a tuple or list of them."""
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_array, value))
    return _is_array(value)


def _as_columns(data: Any) -> tuple[Any, ...] | None:
    """The columns of (x, y) or ((a, b), y) in one row; None for anything else."""
    if not isinstance(data, tuple) or not data or not _is_array(data[-1]):
        return None
    if not all(map(_are_columns, data)):
        return None
    flat: list[Any] = []
    for column in data:
        flat += [column] if _is_array(column) else column
    return tuple(flat)


def _is_map_style(data: Any) -> bool:
    """Whether this is a torch Dataset of single samples, with a length."""
    is_from_torch = isinstance(data, torch.utils.data.Dataset) and hasattr(data, "__len__")
    return is_from_torch and not isinstance(data, IterableDataset | DataLoader)


def _refuse_frame(value: Any) -> None:
    """A table of pandas or polars is answered with its arrays."""
    if hasattr(value, "to_numpy"):
        problem = f"fit: expected tensors or arrays, got {type(value).__name__}"
        line = "model.fit(x.to_numpy(), y.to_numpy(), epochs=2, batch_size=32)"
        raise TypeError(write_line(problem, line))


def _kinds(values: Iterable[Any]) -> str:
    return " and ".join(type(value).__name__ for value in values)
