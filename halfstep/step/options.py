"""The options of a step, checked when it is built."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

from torch import Tensor

NonFinite: TypeAlias = Literal["raise", "skip", "ignore"]
AutoFlag: TypeAlias = bool | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Everything a TrainStep can be told besides network, loss, optimizer and precision."""

    accumulate: int = 1
    """Batches per update (the update cycle)."""
    clip_norm: float | None = None
    """Largest norm of all gradients together, after unscaling."""
    clip_value: float | None = None
    """Largest absolute value of a gradient element, after unscaling, before clip_norm."""
    lr: Sequence[float] | Sequence[Sequence[float]] | Tensor | None = None
    """Learning rates by update number (one row, or one row per parameter group); the last one holds past the end."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, moved by real updates only."""
    count: Callable[[Any], float | Tensor] | None = None
    """batch → how many terms its mean loss averages; needed with accumulate > 1 and a loss halfstep does not know."""
    forward: Callable[..., Any] | None = None
    """(net, *batch) → the loss's arguments as a tuple, or the loss itself when `loss` is None."""
    sens: float | Tensor = 1.0
    """Factor on the loss gradient (MindSpore's sens)."""
    nonfinite: NonFinite | None = None
    """What a non-finite gradient does; None: "skip" with loss scaling, "raise" without."""
    deterministic: bool = False
    """Deterministic kernels only, so that a run repeats bit for bit."""
    fingerprint_every: int = 0
    """Record a 64-bit fingerprint of the whole state every n steps (0: never)."""
    decide: Literal["auto", "host", "device"] = "auto"
    """Where an update is committed or skipped; "auto" keeps it on the device whenever the optimizer allows."""
    compile: AutoFlag = "auto"
    """Forward and loss compiled; "auto": once a long `fit` asks for it."""
    channels_last: AutoFlag = "auto"
    """2-d convolutions in channels-last order; "auto": on CUDA, below float64."""
    polish: AutoFlag = "auto"
    """Captured on CUDA: bookkeeping in few kernels by Triton, graphs of many steps; "auto": once a run is long."""
    cudnn_benchmark: AutoFlag = "auto"
    """cuDNN measures its algorithms for each new shape, inside the step; "auto": on CUDA, unless deterministic."""

    def __post_init__(self) -> None:
        whole = isinstance(self.accumulate, int) and self.accumulate >= 1
        _expect(whole, "accumulate", "1 or more batches per update", self.accumulate)
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            _expect(
                value is None or (_is_number(value) and value > 0),
                name,
                "a positive number or None",
                value,
            )
        decay = self.ema is None or (_is_number(self.ema) and 0 < self.ema < 1)
        _expect(decay, "ema", "a decay between 0 and 1, or None", self.ema)
        _expect(
            isinstance(self.sens, Tensor) or self.sens != 0,
            "sens",
            "a number other than 0",
            self.sens,
        )
        _expect(
            self.nonfinite in (None, "raise", "skip", "ignore"),
            "nonfinite",
            "'raise', 'skip', 'ignore' or None",
            self.nonfinite,
        )
        _expect(
            self.fingerprint_every >= 0,
            "fingerprint_every",
            "0 (never) or a number of steps",
            self.fingerprint_every,
        )
        for ok, name, expected in self._switches():
            _expect(ok, name, expected, getattr(self, name))
        for name in ("count", "forward"):
            value = getattr(self, name)
            _expect(value is None or callable(value), name, "a function", value)

    def _switches(self) -> Iterator[tuple[bool, str, str]]:
        yield self.decide in ("auto", "host", "device"), "decide", "'auto', 'host' or 'device'"
        for name in ("compile", "channels_last", "cudnn_benchmark", "polish"):
            value = getattr(self, name)
            yield isinstance(value, bool) or value == "auto", name, "True, False or 'auto'"
        repeats = self.cudnn_benchmark is not True or not self.deterministic
        yield (
            repeats,
            "cudnn_benchmark",
            "'auto' or False beside deterministic=True, since no measurement repeats",
        )

    @property
    def measures_algorithms(self) -> bool:
        """Whether cuDNN may choose its algorithms by measuring them."""
        return not self.deterministic if self.cudnn_benchmark == "auto" else self.cudnn_benchmark

    @property
    def backend_flags(self) -> dict[str, bool]:
        """The switches that a step hands to backend()."""
        return {"deterministic": self.deterministic, "benchmark": self.measures_algorithms}

    @classmethod
    def parse(cls, options: dict[str, Any]) -> "StepOptions":
        """Options by name; an unknown name is a TypeError that lists the known ones."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                close = ["lr"] if name == "schedule" else get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise TypeError(
                    f"TrainStep: unknown option {name!r}; {hint}options are: precision, {', '.join(known)}"
                )
        return cls(**options)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _expect(ok: bool, name: str, expected: str, received: object) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {expected}, received {received!r}")
