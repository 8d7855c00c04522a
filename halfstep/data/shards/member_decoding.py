"""Members of a sample as values, by the last suffix of their names; nothing is unpickled."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halfstep.data.readers.image_folder import MAX_PIXELS, decode_image
from halfstep.data.readers.resize_crop import Size
from halfstep.data.shards.tar_samples import read_members
from halfstep.errors import closest_name
from halfstep.utils.text import list_some, printable

Decode = Callable[[bytes], Any]

KEY_COLUMN = "__key__"
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff")
NUMBER_SUFFIXES = ("cls", "cls2", "index", "inx", "id")
TEXT_SUFFIXES = ("txt", "text", "transcript")
PICKLE_SUFFIXES = ("pyd", "pkl", "pickle", "pt", "pth", "ten", "tb", "joblib", "dill")
MAX_NAMED = 8


@dataclass(frozen=True)
class SampleDecoder:
    """Makes a sample of its bytes: a value for each column.

    `columns` names the part of each column, or several of which one is there; None takes all parts.
    `decode` has functions of the user's, by the part or by its last suffix.
    """

    columns: Mapping[str, tuple[str, ...]] | None = None
    decode: Mapping[str, Decode] = field(default_factory=dict)
    mode: str = "RGB"
    size: Size | None = None
    max_pixels: int = MAX_PIXELS

    def __call__(self, content: bytes, place: object) -> dict[str, Any]:
        """The columns of a sample. ValueError for what cannot be decoded."""
        key, members = read_members(content, place)
        if self.columns is None:
            return {
                part: self._value(part, body, f"{place}: {key}.{part}")
                for part, body in members.items()
            }
        values: dict[str, Any] = {}
        for name, parts in self.columns.items():
            if parts == (KEY_COLUMN,):
                values[name] = key
                continue
            part = next((part for part in parts if part in members), None)
            if part is None:
                raise _no_such_part(place, key, parts, members)
            values[name] = self._value(part, members[part], f"{place}: {key}.{part}")
        return values

    def _value(self, part: str, body: bytes, place: str) -> Any:
        suffix = part.rpartition(".")[2]
        function = self.decode.get(part) or self.decode.get(suffix)
        if function is not None:
            return function(body)
        if suffix in PICKLE_SUFFIXES:
            raise _would_unpickle(place, f"a .{suffix} file")
        if suffix in IMAGE_SUFFIXES:
            return decode_image(io.BytesIO(body), place, self.mode, self.max_pixels, self.size)
        try:
            if suffix in NUMBER_SUFFIXES:
                return int(body)
            if suffix in TEXT_SUFFIXES:
                return body.decode()
            if suffix in ("json", "jsn"):
                return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{printable(place)}: expected {_expected(suffix)}, found {printable(error)}"
            ) from error
        if suffix == "npy":
            return _read_npy(body, place)
        return body


def parse_columns(
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None,
) -> dict[str, tuple[str, ...]] | None:
    """Names of columns, and the parts that each is read from, in small letters."""
    if columns is None:
        return None
    if isinstance(columns, str):
        raise TypeError(f'columns: expected a list such as ["jpg", "cls"], got {columns!r}')
    pairs = columns.items() if isinstance(columns, Mapping) else [(part, part) for part in columns]
    parsed = {}
    for name, parts in pairs:
        alternatives = (parts,) if isinstance(parts, str) else tuple(parts)
        if not alternatives or not all(isinstance(part, str) and part for part in alternatives):
            raise TypeError(f"columns: expected names of parts for {name!r}, got {parts!r}")
        parsed[str(name)] = tuple(part.lower().removeprefix(".") for part in alternatives)
    if not parsed or len(parsed) < len(pairs):
        raise ValueError(f"columns: expected different names, got {list(columns)}")
    return parsed


def _read_npy(body: bytes, place: str) -> Any:
    """The array; its header is checked against the bytes that are there before any memory."""
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read_header = np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)
        has_objects = dtype.hasobject
        array = None
        if not has_objects:
            array = np.frombuffer(body, dtype, offset=file.tell())
            array = array.reshape(shape, order="F" if is_fortran else "C")
    except Exception as error:  # numpy parses the header as Python: SyntaxError, TokenError, …
        raise ValueError(
            f"{printable(place)}: expected an array of numpy, found {printable(error)}"
        ) from error
    if has_objects:
        raise _would_unpickle(place, "an array of Python objects")
    return array


def _expected(suffix: str) -> str:
    if suffix in NUMBER_SUFFIXES:
        return "a whole number as text"
    return "text in UTF-8" if suffix in TEXT_SUFFIXES else "JSON"


def _would_unpickle(place: str, kind: str) -> ValueError:
    return ValueError(
        f"{printable(place)} is refused: {kind} is read by unpickling, which may run any program. "
        "Write .npy, .json or .cls instead, leave the part out by columns=, or pass a function "
        "of your own in decode="
    )


def _no_such_part(
    place: object, key: str, parts: tuple[str, ...], members: Mapping[str, bytes]
) -> ValueError:
    close = closest_name(parts[0], members)
    hint = f"; did you mean {close!r}?" if close else ""
    names = printable(list_some(list(members), MAX_NAMED))
    return ValueError(
        f"{printable(place)}: the sample {printable(key)!r} has no {' or '.join(parts)}, but "
        f"{names}{hint}. Name the parts by columns="
    )
