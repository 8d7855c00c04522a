"""The settings of the room as attributes of the module `halfstep.amp`."""

from types import ModuleType

from halfstep.amp.autocast import (
    Dtype,
    defaults,
    is_on,
    name,
    parse_high,
    parse_low,
    set_low,
    switch,
)


class Room(ModuleType):
    """A module with settable properties: Python looks them up in the module's class."""

    @property
    def enabled(self) -> bool:
        """Whether autocast is on in this thread, by the switch or by a block; setting it is the switch."""
        return is_on()

    @enabled.setter
    def enabled(self, on: bool) -> None:
        switch(on)

    @property
    def low_prec_dtype(self) -> str:
        """What autocast() rounds products to: "float16", "bfloat16", or "float32" for no casting. Process-wide."""
        return name(defaults.low)

    @low_prec_dtype.setter
    def low_prec_dtype(self, value: Dtype) -> None:
        set_low(parse_low(value))

    @property
    def high_prec_dtype(self) -> str:
        """What autocast() widens delicate ops to: "float32", the only one torch's op lists know."""
        return name(defaults.high)

    @high_prec_dtype.setter
    def high_prec_dtype(self, value: Dtype) -> None:
        defaults.high = parse_high(value)
