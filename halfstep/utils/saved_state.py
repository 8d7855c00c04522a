"""Checks of a saved tree, before anything is loaded from it.

Whoever loads a part of a checkpoint describes with `SavedValue` what it expects there. A value that
does not fit is a ValueError that names its path in the tree, what was expected and what was there.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

MAX_WHOLE_NUMBER = (1 << 53) - 1  # counts of steps, samples and passes; exact as a float too
MAX_REPR_LENGTH = 60  # characters of a value in a message


@dataclass(frozen=True)
class SavedValue:
    """A value of a saved tree, its path, and who reads it."""

    value: Any
    owner: str
    """How the message begins, such as "resume: runs/mlp/step-000000010"."""
    path: tuple[str | int, ...] = ()
    advice: str = "Nothing was loaded"

    # Going down.

    def child(self, key: str | int) -> "SavedValue":
        """The entry `key` of a dict, list or tuple."""
        return replace(self, value=self.value[key], path=(*self.path, key))

    def field(self, name: str) -> "SavedValue":
        """The entry `name` of a dict that must have it."""
        if not isinstance(self.value, dict):
            self.refuse(f"a dict with {name!r}")
        if name not in self.value:
            missing = replace(self, path=(*self.path, name))
            missing._raise("a value", "nothing there")
        return self.child(name)

    def optional_field(self, name: str) -> "SavedValue | None":
        """The entry `name` of a dict; None where it has none."""
        if not isinstance(self.value, dict):
            self.refuse("a dict")
        return self.child(name) if name in self.value else None

    def entries(self) -> dict[Any, "SavedValue"]:
        """All entries of a dict."""
        if not isinstance(self.value, dict):
            self.refuse("a dict")
        return {key: self.child(key) for key in self.value}

    def items(self, length: int | None = None) -> list["SavedValue"]:
        """All items of a list or tuple."""
        expected = "a list" if length is None else f"a list of {length}"
        if not isinstance(self.value, list | tuple):
            self.refuse(expected)
        if length is not None and len(self.value) != length:
            self.refuse(expected)
        return [self.child(index) for index in range(len(self.value))]

    # Looking.

    def whole_number(self, *, minimum: int = 0, maximum: int = MAX_WHOLE_NUMBER) -> int:
        """An int; a bool is none."""
        is_int = isinstance(self.value, int) and not isinstance(self.value, bool)
        if not is_int or not minimum <= self.value <= maximum:
            limit = f"{minimum} or more"
            if maximum != MAX_WHOLE_NUMBER or (is_int and self.value > maximum):
                limit = f"{minimum} to {maximum}"
            self.refuse(f"a whole number, {limit}")
        number: int = self.value
        return number

    def number(
        self, *, finite: bool = False, minimum: float = -math.inf, not_nan: bool = False
    ) -> float:
        """An int or a float; a bool is none."""
        expected = "a number"
        if finite:
            expected = "a finite number"
        if minimum > -math.inf:
            expected = f"{expected}, {minimum:g} or more"
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if is_number and isinstance(self.value, int):
            is_number = abs(self.value) < 1 << 63  # what torch takes
        if not is_number:
            self.refuse(expected)
        number = float(self.value)
        is_refused_nan = math.isnan(number) and (not_nan or finite or minimum > -math.inf)
        if is_refused_nan or (finite and math.isinf(number)) or number < minimum:
            self.refuse(expected)
        return number

    def flag(self) -> bool:
        """True or False."""
        if not isinstance(self.value, bool):
            self.refuse("True or False")
        value: bool = self.value
        return value

    def text(self) -> str:
        """A str."""
        if not isinstance(self.value, str):
            self.refuse("a text")
        value: str = self.value
        return value

    def texts(self) -> list[str]:
        """A list of str."""
        return [item.text() for item in self.items()]

    def plain(self) -> None:
        """Values without tensors: None, bool, int, float, str, and lists, tuples, dicts of them."""
        if isinstance(self.value, dict):
            for entry in self.entries().values():
                entry.plain()
        elif isinstance(self.value, list | tuple):
            for item in self.items():
                item.plain()
        elif not isinstance(self.value, bool | int | float | str | None):
            self.refuse("a plain value")

    def tensor(self, dtype: torch.dtype | None = None, shape: Any = None) -> Tensor:
        """A tensor, of that dtype and shape where they are given."""
        value = self.value
        fits = isinstance(value, Tensor)
        fits = fits and (dtype is None or value.dtype == dtype)
        fits = fits and (shape is None or tuple(value.shape) == tuple(shape))
        if not fits:
            dtype_text = "a tensor" if dtype is None else str(dtype).removeprefix("torch.")
            self.refuse(dtype_text if shape is None else f"{dtype_text} {list(shape)}")
        tensor: Tensor = value
        return tensor

    def tensor_like(self, present: Tensor, *, same_dtype: bool = True) -> Tensor:
        """A tensor of the shape of `present`, and of its dtype.

        `same_dtype=False`: of its kind, float, complex, integer or bool.
        """
        if same_dtype:
            return self.tensor(present.dtype, present.shape)
        tensor = self.tensor(shape=present.shape)
        if dtype_kind(tensor.dtype) != dtype_kind(present.dtype):
            self.refuse(f"a {dtype_kind(present.dtype)} tensor {list(present.shape)}")
        return tensor

    def count_tensor(self, present: Tensor) -> int:
        """A tensor like `present` with one whole number, 0 or more."""
        tensor = self.tensor_like(present)
        number = int(tensor)
        if not 0 <= number <= MAX_WHOLE_NUMBER:
            self.refuse("a count, 0 or more")
        return number

    # Refusing.

    def refuse(self, expected: str) -> NoReturn:
        """Raises the ValueError for this value."""
        self._raise(expected, describe_value(self.value))

    def _raise(self, expected: str, received: str) -> NoReturn:
        raise ValueError(f"{self.where}: expected {expected}, received {received}. {self.advice}")

    @property
    def where(self) -> str:
        """The owner and the path."""
        path = ".".join(str(key) for key in self.path)
        return f"{self.owner}: {path}" if path else self.owner


def same_kind(saved: SavedValue, present: Any) -> None:
    """Refuses a value of another kind than `present`, which the same code would save now.

    For states of the user's own classes, of which no more is known. Only what both have is
    compared; None, False, and a text, dict or list that is empty now may have become anything.
    """
    if saved.value is None or _says_nothing(present):
        return
    if isinstance(present, dict):
        entries = saved.entries()
        for key, value in present.items():
            if key in entries:
                same_kind(entries[key], value)
        return
    kinds: list[tuple[Any, str]] = [
        (Tensor, "a tensor"),
        ((bool, int, float), "a number"),
        (str, "a text"),
        (bytes, "bytes"),
        ((list, tuple), "a list"),
    ]
    for types, expected in kinds:
        if isinstance(present, types):
            # A number may be saved as a tensor of one element, and the other way round.
            if types == kinds[0][0] and isinstance(saved.value, bool | int | float):
                return
            if types == kinds[1][0] and isinstance(saved.value, Tensor):
                return
            if not isinstance(saved.value, types):
                saved.refuse(expected)
            return


def _says_nothing(present: Any) -> bool:
    """Whether a value is what many classes begin with, before they know the real one."""
    if isinstance(present, str | bytes | dict | list | tuple):
        return len(present) == 0
    return present is None or present is False


def dtype_kind(dtype: torch.dtype) -> str:
    """One of float, complex, bool, integer."""
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    return "bool" if dtype == torch.bool else "integer"


def describe_value(value: Any) -> str:
    """What a value is, for a message."""
    if isinstance(value, Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if value.numel() == 1 and not value.is_meta:
            text = f"{text} with {value.item()}"
        return text
    if isinstance(value, list | tuple | dict) and len(value) > 4:
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "an int beyond 64 bits"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    if len(text) > MAX_REPR_LENGTH:
        text = f"{text[:MAX_REPR_LENGTH]}…"
    return text
