"""Leaves that are not tensors, as JSON and back, to the bit.

What JSON holds exactly stands for itself; the rest is an object of one key: an int beyond 64 bits as hex digits, a
float that is not finite as its 64 bits, bytes as hex.
"""

import math
import struct
from collections.abc import Callable
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Scalar: TypeAlias = bool | int | float | str | bytes | None
KINDS = (type(None), bool, int, float, str, bytes)
_WIDE = (
    1 << 63
)  # int to decimal stops at 4,300 digits in Python, and other JSON readers stop at 64 bits


def encode(value: Scalar) -> Json:
    """The value as JSON; a str must be text that UTF-8 can hold."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}  # a NaN's sign and payload are bits too
    if isinstance(value, int) and not isinstance(value, bool) and not -_WIDE <= value < _WIDE:
        return {"int": hex(value)}
    return value


def decode(tag: str, text: str) -> Scalar:
    """The value of a tagged leaf; a ValueError unless it is exactly what `encode` writes."""
    value = _DECODERS[tag](text)
    if encode(value) != {tag: text}:
        raise ValueError("a value that is never written so")
    return value


_DECODERS: dict[str, Callable[[str], Scalar]] = {
    "bytes": bytes.fromhex,
    "float": lambda text: float(struct.unpack(">d", bytes.fromhex(text))[0]),
    "int": lambda text: int(text, 16),  # base 16 has no limit of digits
}
TAGS = tuple(_DECODERS)
