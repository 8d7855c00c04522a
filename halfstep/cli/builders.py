"""The user's own builder: called, and named when it fails."""

import traceback
from collections.abc import Callable
from typing import Any


def builder_of(spec: str) -> Callable[[], Any]:
    """The function that `spec` names, which may return (model, data, valid) too; what it raises says where."""
    from halfstep.again import builder

    function = builder(spec)

    def build() -> Any:
        try:
            result = function()
        except Exception as error:
            error.add_note(f"raised by the builder {spec}{_place(error)}")
            raise
        if isinstance(result, tuple) and len(result) == 3:
            return dict(zip(("model", "data", "valid"), result, strict=True))
        return result

    return build


def _place(error: Exception) -> str:
    """File and line of the builder's own that the error came through last; the first frame is the one above."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    if not frames:
        return ""
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f", {own[-1].filename}, line {own[-1].lineno}"
