"""The user's own builder: called, and named when it fails."""

from collections.abc import Callable
from typing import Any


def builder_of(spec: str) -> Callable[[], Any]:
    """The function that `spec` names, which may return (model, data, valid) too; what it raises says where."""
    from halfstep.reproduce import builder
    from halfstep.utils.user_code import call

    function = builder(spec)

    def build() -> Any:
        result = call(function, "the builder", spec)
        if isinstance(result, tuple) and len(result) == 3:
            return dict(zip(("model", "data", "valid"), result, strict=True))
        return result

    return build
