"""A run as callbacks see it: where it stands, what it scored, and how to end it."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer


@dataclass
class Run:
    """Progress of one `fit`. Epochs and steps count from 1; `step` is 0 before an epoch's first.

    While rows are handed out, `epoch`, `step` and `global_step` are those of the row; `position` is where the network
    stands. They agree at a visit.
    """

    model: Any
    epochs: int
    epoch_steps: int | None
    """Steps in an epoch; None when the data does not say."""
    epoch_samples: int | None = None
    """Samples in an epoch, where the data says."""
    evaluates: bool = False
    """Whether there is validation data."""
    epoch: int = 1
    step: int = 0
    global_step: int = 0
    position: int = 0
    seconds: float = 0.0
    """Time spent training in this epoch, evaluations left out."""
    scores: dict[str, float] | None = None
    """What an evaluation at this very step gave; None between evaluations."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One entry per evaluation or epoch end: epoch, step, the mean training loss since the last, and the scores."""
    epoch_over: bool = False
    """At a visit: this one ends the epoch."""
    stopped: str | None = None
    error: BaseException | None = None
    resume: str | None = None
    """What fit(resume=…) asked for."""
    resumed: str | None = None
    """The checkpoint that this run went on from; None also where resume="auto" found none to go on from."""

    def stop(self, reason: str) -> None:
        """End the run after this visit."""
        self.stopped = self.stopped or reason

    @property
    def net(self) -> nn.Module:
        """The network, where its weights are those of the step at hand; elsewhere an error that says how to ask."""
        self._check("net")
        net: nn.Module = self.model.net
        return net

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, where its state is that of the step at hand."""
        self._check("optimizer")
        optimizer: Optimizer = self.model.optimizer
        return optimizer

    def _check(self, what: str) -> None:
        if self.global_step != self.position:
            raise RuntimeError(
                f"run.{what}: the row is that of step {self.global_step}, the network stands at {self.position}. "
                "Read weights in visit(), name the step in next_stop(), or set exact = True on the callback."
            )
