"""Checks of the files of a comparison, before it goes on from them.

They may come from elsewhere, or may have been edited. A value that does not fit is a ValueError
that names it: nothing was trained then, and nothing was overwritten.

torch is imported inside functions only: the command line imports this package for its help.
"""

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.utils.files import read_json

if TYPE_CHECKING:
    from halfstep.utils.saved_state import SavedValue

BITS_PER_BYTE = 8

# Numbers of a result that are there if the run was finished, and None before a first step.
SCORES = ("loss", "acc")
TIMES = ("ms_per_step", "s_per_epoch", "samples_per_s", "final_scale", "peak_memory")
COUNTS = ("skipped", "steps", "updates", "samples")


def check_summary(path: Path, content: dict[str, Any]) -> None:
    """Refuses a compare.json whose settings or environment are not what a comparison writes."""
    saved = _saved_value(path, content)
    spec = saved.field("spec")
    if not spec.field("precisions").texts():
        spec.field("precisions").refuse("a list of precisions")
    for seed in spec.field("seeds").items():
        seed.whole_number()
    saved.field("environment").entries()


def read_result(path: Path, image_count: int) -> dict[str, Any] | None:
    """The result of one run; None where it has none. Refuses what no run has written.

    `image_count`: of the test images, for each of which a finished run has saved one bit.
    """
    content = read_json(path)
    if content is None:
        return None
    saved = _saved_value(path, content)
    saved.field("precision").text()
    saved.field("seed").whole_number()
    for name in COUNTS:
        saved.field(name).whole_number()
    for name in TIMES:
        if saved.field(name).value is not None:
            saved.field(name).number(finite=True, minimum=0)
    saved.field("memory_kind").text()
    saved.field("epochs").items()
    saved.field("curve").entries()

    status = saved.field("status")
    if status.value == "failed":
        saved.field("error").text()
    elif status.value == "done":
        for name in SCORES:
            saved.field(name).number(finite=True)
        _check_bits(saved.field("correct"), image_count)
        # Runs of earlier versions lack it, and some networks have no such level.
        chance_correct = saved.optional_field("chance_correct")
        if chance_correct is not None and chance_correct.value is not None:
            _check_bits(chance_correct, image_count)
    else:
        status.refuse("'done' or 'failed'")
    result: dict[str, Any] = content
    return result


def _check_bits(saved: "SavedValue", image_count: int) -> None:
    """Refuses bits that are not as many: missing ones would count as wrong answers."""
    byte_count = -(-image_count // BITS_PER_BYTE)
    try:
        packed = base64.b64decode(saved.text(), validate=True)
    except (binascii.Error, ValueError):
        packed = b""
    if len(packed) != byte_count:
        saved.refuse(f"one bit for each of {image_count} test images, in base64")


def _saved_value(path: Path, content: object) -> "SavedValue":
    from halfstep.utils.saved_state import SavedValue

    advice = "Remove that file, or name another folder: --out"
    return SavedValue(content, str(path), advice=advice)
