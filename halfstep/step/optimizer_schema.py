"""What an optimizer would save: checked before its state is loaded, since torch checks very little.

The settings of a saved group are compared with those of the group here. For torch's own optimizers
a twin with the saved settings makes one step on tiny parameters, which shows the ranges that torch
allows and the state that it keeps for each parameter.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.utils.saved_state import SavedValue, dtype_kind

# Sizes of a twin's parameter: all different, so that a state's shape shows where it comes from.
TWIN_SIZES = (2, 3, 5, 7, 11, 13)

# How a step is computed, not what: left out of the twin, whose parameters are on the CPU.
IMPLEMENTATION_SETTINGS = ("foreach", "fused", "capturable", "differentiable")

# Settings that torch's schedulers leave in the groups of an optimizer.
SCHEDULER_PREFIXES = ("initial_", "max_", "min_", "base_")


def check_optimizer_state(
    saved: SavedValue, optimizer: Optimizer, *, state_dtypes: dict[int, torch.dtype], exact: bool
) -> None:
    """ValueError unless `saved` is the state of such an optimizer over such parameters.

    `state_dtypes`: by a parameter's position, the dtype that its state has; `exact=False` takes any
    dtype of its kind, for a state that another precision has saved.
    """
    saved_groups = saved.field("param_groups").items()
    state = saved.field("state")
    _check_groups(saved_groups, optimizer)
    numbers = _parameter_numbers(saved_groups)

    # A parameter that has had no gradient yet has no state.
    entries = state.entries()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    is_torchs = _is_torchs(optimizer)
    for key, value in entries.items():
        if key not in numbers and (is_torchs or not isinstance(key, str)):
            value.refuse(f"the number of one of the {len(numbers)} parameters")

    position = 0
    for index, group in enumerate(optimizer.param_groups):
        twins = _TwinStates(optimizer, saved_groups[index])
        for p in group["params"]:
            if numbers[position] in entries:
                entry = entries[numbers[position]]
                present = optimizer.state.get(p, {})
                dtype = state_dtypes.get(position, p.dtype)
                _check_entry(entry, present, p, twins.of(p, dtype), exact=exact)
            position += 1
    assert position == len(params)


def _check_groups(saved_groups: list[SavedValue], optimizer: Optimizer) -> None:
    """The same numbers of parameters, settings of the same kind of optimizer, in range."""
    owner = saved_groups[0].owner if saved_groups else "optimizer"
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group.field("params").items()) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"{owner}: expected an optimizer with {sizes} parameters in its "
            f"groups, received {saved_sizes}; build the optimizer as it was when it was saved. "
            "Nothing was loaded"
        )

    # Another kind of optimizer has settings that this one lacks, and lacks some of this one's.
    # Another version of the same kind differs in one direction only.
    for group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
        names = saved_group.entries()
        missing = [name for name in optimizer.defaults if name not in names]
        foreign = [str(name) for name in names if name not in group]
        foreign = [name for name in foreign if not name.startswith(SCHEDULER_PREFIXES)]
        if missing and foreign:
            raise ValueError(
                f"{owner}: expected the state of "
                f"{type(optimizer).__name__}, received one without {', '.join(missing)} and with "
                f"{', '.join(foreign)}; build the optimizer that it was saved with. "
                "Nothing was loaded"
            )
        for name in missing:
            saved_group.field(name)  # raises, with the path
        for name, value in group.items():
            if name != "params" and name in names:
                _check_setting(names[name], value)


def _check_setting(saved: SavedValue, present: Any) -> None:
    """Refuses a setting of another kind than the one here."""
    if isinstance(present, bool):
        if saved.value is not None:
            saved.flag()
    elif isinstance(present, int | float) or (isinstance(present, Tensor) and present.numel() == 1):
        if isinstance(saved.value, Tensor):
            if saved.value.numel() != 1 or saved.value.is_complex():
                saved.refuse("one number")
            if bool(saved.value.isnan()):
                saved.refuse("one number that is not NaN")
        elif saved.value is not None:
            saved.number(not_nan=True)
        else:
            saved.refuse("a number")
    elif isinstance(present, tuple | list):
        for item, present_item in zip(saved.items(len(present)), present, strict=True):
            _check_setting(item, present_item)
    elif isinstance(present, str):
        saved.text()
    elif present is None and isinstance(saved.value, dict | list | bytes | Tensor):
        saved.refuse("None or a plain value")


def _parameter_numbers(saved_groups: list[SavedValue]) -> list[int]:
    """The numbers that stand for the parameters, each once."""
    numbers: list[int] = []
    for group in saved_groups:
        for item in group.field("params").items():
            number = item.whole_number()
            if number in numbers[-1:] or number in set(numbers):
                item.refuse("each parameter once")
            numbers.append(number)
    return numbers


def _check_entry(
    entry: SavedValue,
    present: dict[str, Any],
    p: Tensor,
    twin_state: dict[str, Any] | None,
    *,
    exact: bool,
) -> None:
    """The state of one parameter against that of its twin, else against the present one."""
    values = entry.entries()
    if not values:
        return
    if twin_state is None:
        # An optimizer of the user's: what it has here is all that is known of it.
        for name, value in present.items():
            if name in values and isinstance(value, Tensor) and value.dim():
                values[name].tensor_like(value, same_dtype=exact)
        return

    for name, value in twin_state.items():
        saved = entry.field(name)
        if not isinstance(value, Tensor) or value.dim() == 0:
            _check_scalar(saved, name, value)
            continue
        shape = _shape_like(value, p)
        if shape is None:
            saved.tensor()
        else:
            expected = torch.empty(shape, dtype=value.dtype, device="meta")
            saved.tensor_like(expected, same_dtype=exact)


def _check_scalar(saved: SavedValue, name: str, twin_value: Any) -> None:
    """One number, which earlier versions of torch had as a float or an int."""
    if twin_value is None:
        return
    if isinstance(saved.value, Tensor):
        if saved.value.numel() != 1 or dtype_kind(saved.value.dtype) in ("complex", "bool"):
            saved.refuse("one number")
        number = float(saved.value)
    else:
        number = saved.number()
    if number != number or (name == "step" and not 0 <= number < 1 << 53):
        saved.refuse("a count, 0 or more" if name == "step" else "a number that is not NaN")


def _shape_like(twin_value: Tensor, p: Tensor) -> list[int] | None:
    """The shape of a parameter's state, by that of its twin's; None where it is not clear."""
    if twin_value.dim() != p.dim():
        return None
    shape = []
    for axis, size in enumerate(twin_value.shape):
        if size == TWIN_SIZES[axis]:
            shape.append(p.shape[axis])
        elif size == 1:
            shape.append(1)
        else:
            return None
    return shape


class _TwinStates:
    """The state that a twin of the optimizer keeps for a tiny parameter, by dimensions, dtype."""

    def __init__(self, optimizer: Optimizer, saved_group: SavedValue) -> None:
        self._states: dict[tuple[int, torch.dtype], dict[str, Any] | None] = {}
        self._optimizer = optimizer
        self._saved_group = saved_group
        self._is_known = _is_torchs(optimizer)

    def of(self, p: Tensor, dtype: torch.dtype) -> dict[str, Any] | None:
        """None where nothing is known: of optimizers that are not torch's."""
        if not self._is_known or p.dim() > len(TWIN_SIZES) or not _can_have_gradient(dtype):
            return None
        key = (p.dim(), dtype)
        if key not in self._states:
            self._states[key] = self._step_once(*key)
        return self._states[key]

    def _step_once(self, dimensions: int, dtype: torch.dtype) -> dict[str, Any] | None:
        p = torch.nn.Parameter(torch.ones(TWIN_SIZES[:dimensions], dtype=dtype))
        build: Callable[..., Optimizer] = type(self._optimizer)
        accepted = inspect.signature(build).parameters
        settings = {}
        for name, value in self._saved_group.value.items():
            if name in accepted and name not in ("params", *IMPLEMENTATION_SETTINGS):
                settings[name] = value.item() if isinstance(value, Tensor) else value
        try:
            twin = build([p], **settings)
        except ValueError as error:  # torch names the setting and its value
            self._saved_group.refuse(f"settings that {build.__name__} takes ({error})")
        except Exception:
            return None
        p.grad = torch.ones_like(p)
        try:
            twin.step()
        except Exception:  # no half kernel on this CPU, say
            return None
        return dict(twin.state.get(p, {}))


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def _can_have_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
