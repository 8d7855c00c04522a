"""The two functions that docs/reference/step.md documents under this name."""

from halfstep.step.fast.compiled_forward import compiling_pays as pays
from halfstep.step.fast.compiled_forward import count_leaf_modules as leaves

__all__ = ["leaves", "pays"]
