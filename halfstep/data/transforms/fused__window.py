"""PadCrop, Flip and Cutout with their random numbers as one kernel on CUDA: torch takes some thirty small ones."""

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.data.transforms.axes import axes, borders, pair, to_chw
from halfstep.data.transforms.images import Cutout, Flip, PadCrop
from halfstep.data.transforms.words import Words
from halfstep.kernels.launch import WORDS, attempt, may_read

KINDS = (PadCrop, Flip, Cutout)  # each at most once, in this order
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    *FLOATS,
)  # torch rounds an int64's fill to a float64
INSTEAD = "PadCrop, Flip and Cutout take more kernels", "Images are the same."

_WORKS: dict[
    tuple[Any, ...], bool
] = {}  # whether the kernel could be compiled, by what it is compiled for


class Plan(NamedTuple):
    """What the kernel does with batches of one shape; for a part that is not there, numbers that change nothing."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    reads: tuple[int, ...]  # the source's strides: sample, channel, row, column
    writes: tuple[int, ...]
    given: tuple[int, ...]  # height and width of the source
    made: tuple[int, ...]  # channels as planes, rows, columns, channels side by side
    crop: tuple[int, int, int, int]  # padding above and to the left, places down and across
    flip: int  # words below it turn an image
    hole: tuple[int, int]  # rows and columns


def window(
    rest: Sequence[Any], batch: Tensor, words: Words, place: int
) -> tuple[Tensor, int] | None:
    """The batch after the first few of `rest`, and how many; None: torch's kernels must do it. The bits are the same.

    `rest` is the chain from `place` on.
    """
    parts = () if torch.compiler.is_compiling() else tuple(rest[: _reach(rest)])
    told = words.epochs, words.samples
    if (
        not parts
        or batch.dtype not in DTYPES
        or not all(t.is_contiguous() for t in told)
        or not may_read(batch)
    ):
        return None
    plan = _plan(parts, tuple(batch.shape), batch.stride(), batch.dtype)
    if plan is None:
        return None
    out = torch.empty_strided(plan.shape, plan.strides, dtype=batch.dtype, device=batch.device)
    word, keys = WORDS[batch.element_size()], _keys(parts, words, place)
    fills = [_bits(repr(part.fill), batch.dtype) for part in parts if type(part) is not Flip] or [0]

    def start() -> None:
        from halfstep.data.transforms.triton_kernels__window_kernel import launch

        launch(batch.view(word), out.view(word), told, keys, (fills[0], fills[-1]), plan)

    pointers = batch.device, word, batch.data_ptr() % 16 == 0  # Triton tells these apart
    return (out, len(parts)) if attempt(_WORKS, pointers, start, *INSTEAD) else None


def _reach(rest: Sequence[Any]) -> int:
    """How many are of KINDS, each at most once and in that order."""
    count, kinds = 0, iter(KINDS)
    while (
        count < len(rest) and type(rest[count]) in kinds
    ):  # `in` goes on behind the last that was found
        count += 1
    return count


def _keys(parts: Sequence[Any], words: Words, place: int) -> list[int]:
    """Of the seed, then of each draw of each kind: any number for a part that is not there."""
    given = {type(part): words.keys[place + i] for i, part in enumerate(parts)}
    draws = [key for kind in KINDS for key in given.get(kind, (0,) * kind.draws)]
    return [hashing.signed(hashing.key(words.seed)), *draws]


@lru_cache(256)
def _bits(fill: str, dtype: torch.dtype) -> int:
    """A fill as it lies in memory; by its text, which tells −0.0 from 0.0."""
    return int(
        torch.full((), ast.literal_eval(fill), dtype=dtype, device="cpu").view(
            WORDS[dtype.itemsize]
        )
    )


@lru_cache(4096)
def _plan(
    parts: tuple[Any, ...], shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Plan | None:
    """By the parts themselves on tensors without memory: their checks, their shapes and strides."""
    batch = out = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    at = axes(type(parts[0]).__name__, batch, parts[0].layout)
    for part in parts:
        if axes(type(part).__name__, out, part.layout) != at:
            return None  # another dimension is to be taken for the channels
        out = part(out, torch.empty((part.draws, len(out)), dtype=torch.int64, device="meta"))
    source, made = (to_chw(t, at.channel) for t in (batch, out))
    given, (count, rows, columns), beside = source.shape[2:], made.shape[1:], at.channel == 3
    size = (1, rows, columns, count) if beside else (count, rows, columns, 1)
    numbers = tuple(given), size, _crop(parts, given, made.shape[2:]), _flip(parts), _hole(parts)
    plan = Plan(tuple(out.shape), out.stride(), source.stride(), made.stride(), *numbers)
    return plan if _near(plan) else None


def _near(plan: Plan) -> bool:
    """Whether all numbers and places within an image are of 32 bits, padding included."""
    (height, width), (planes, rows, columns, beside) = plan.given, plan.made
    top, left, tops, lefts = plan.crop
    channels = planes * beside
    ends = (
        channels * plan.reads[1] + height * plan.reads[2] + width * plan.reads[3],
        channels * plan.writes[1] + rows * plan.writes[2] + columns * plan.writes[3],
        channels * rows * columns, rows + tops + top + plan.hole[0], columns + lefts + left + plan.hole[1],
    )  # fmt: skip
    return max(ends) < 2**31


def _crop(
    parts: Sequence[Any], given: Sequence[int], made: Sequence[int]
) -> tuple[int, int, int, int]:
    if type(parts[0]) is not PadCrop:
        return 0, 0, 1, 1
    left, top, right, bottom = borders("PadCrop", parts[0].padding)
    return top, left, given[0] + top + bottom - made[0] + 1, given[1] + left + right - made[1] + 1


def _flip(parts: Sequence[Any]) -> int:
    return next((part.below for part in parts if type(part) is Flip), 0)


def _hole(parts: Sequence[Any]) -> tuple[int, int]:
    return pair("Cutout", parts[-1].size) if type(parts[-1]) is Cutout else (0, 0)
