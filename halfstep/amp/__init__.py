"""Mixed precision by hand: autocast as context, decorator or switch, and a GradScaler.

`amp.enabled` switches autocast for this thread. `amp.low_prec_dtype` and `amp.high_prec_dtype` are
the dtypes that autocast() takes by default: one value for the process, read at each entry. Inside a
block they show the dtypes of the block.
"""

import sys
from types import ModuleType

from halfstep.amp.autocast import (
    Dtype,
    autocast,
    default_dtypes,
    is_enabled,
    low_dtype,
    parse_high_dtype,
    parse_low_dtype,
    set_default_low_dtype,
    set_enabled,
)
from halfstep.amp.grad_scaler import GradScaler
from halfstep.amp.overflow_streak import OverflowStreak
from halfstep.utils.text import dtype_name

__all__ = ["GradScaler", "OverflowStreak", "autocast"]

# The settings of this module: properties of the class below.
enabled: bool
low_prec_dtype: Dtype
high_prec_dtype: Dtype


class AmpModule(ModuleType):
    """A module with settable properties: Python looks them up in the module's class."""

    @property
    def enabled(self) -> bool:
        """Whether autocast is on in this thread, by the switch or a block. Setting it switches."""
        return is_enabled()

    @enabled.setter
    def enabled(self, on: bool) -> None:
        set_enabled(on)

    @property
    def low_prec_dtype(self) -> str:
        """What products are rounded to in the innermost block; outside, what autocast() takes.

        "float16", "bfloat16", or "float32" for no casting. Setting it is for entries to come: open
        blocks stay as they are.
        """
        return dtype_name(low_dtype())

    @low_prec_dtype.setter
    def low_prec_dtype(self, value: Dtype) -> None:
        set_default_low_dtype(parse_low_dtype(value))

    @property
    def high_prec_dtype(self) -> str:
        """What autocast() widens delicate ops to: "float32", the only one of torch's op lists."""
        return dtype_name(default_dtypes.high)

    @high_prec_dtype.setter
    def high_prec_dtype(self, value: Dtype) -> None:
        default_dtypes.high = parse_high_dtype(value)


sys.modules[__name__].__class__ = AmpModule
