"""Mixed precision by hand: autocast as context, decorator or switch, and one GradScaler for two protocols.

`amp.enabled` switches autocast for this thread. `amp.low_prec_dtype` and `amp.high_prec_dtype` are what autocast()
takes where it is not told: one value for the process, read at each entry.
"""

import sys

from halfstep.amp.autocast import Dtype, autocast
from halfstep.amp.grad_scaler import GradScaler
from halfstep.amp.overflow_streak import OverflowStreak
from halfstep.amp.room import Room

__all__ = ["GradScaler", "OverflowStreak", "autocast"]

enabled: bool
low_prec_dtype: Dtype
high_prec_dtype: Dtype

sys.modules[__name__].__class__ = Room  # the three names above are its properties
