"""`find_lr`: a learning-rate range test. The rate rises, the loss tells, the model stays."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfstep.engine import Callback, Loop, Row, Run, Timing, signals
from halfstep.errors import NonFiniteError, Notice
from halfstep.model import Model
from halfstep.model.validate import set_train_mode
from halfstep.preflight.lr_curve import (
    LRCurve,
    descends,
    divergence_limit,
    smooth,
    smooth_curve,
    smoothing_width,
    suggest_rate,
)
from halfstep.preflight.trial_backup import add_data, undone_trial
from halfstep.step import TrainStep
from halfstep.utils.checks import finite_number, whole_number
from halfstep.utils.keywords import suggest_keywords

MIN_UPDATES = 10

# The test ends by itself; a run needs a number of epochs all the same.
ENDLESS_EPOCHS = 1 << 62


# The words of other learning rate finders.
FOREIGN_OPTIONS = {
    **dict.fromkeys(("min_lr", "start_lr", "init_lr", "lr_min"), "low"),
    **dict.fromkeys(("max_lr", "end_lr", "final_lr", "lr_max"), "high"),
    **dict.fromkeys(("num_training", "num_iter", "num_it", "steps", "num_steps"), "updates"),
    **dict.fromkeys(("train_dataloaders", "train_loader", "dataloader", "loader"), "data"),
    "net": "model",
}


@suggest_keywords("find_lr", names=FOREIGN_OPTIONS)
def find_lr(
    model: Model,
    data: Any,
    *,
    low: float = 1e-7,
    high: float = 10.0,
    updates: int = 100,
    on_update: Callable[[], None] | None = None,
) -> LRCurve:
    """The loss by learning rate, and the rate where it falls fastest: one to begin with.

    Trains for `updates` updates, with a rate that grows evenly in its logarithm from `low` to
    `high`, and stops where the loss diverges; then puts everything back, bit for bit. Parameter
    groups keep the proportion of their rates, the highest one goes from `low` to `high`. This is
    the range test of Smith (Cyclical Learning Rates for Training Neural Networks, 2015,
    arXiv:1506.01186); taking the steepest descent of the smoothed loss is the rule of fastai's
    first finder and of Lightning's. Where that is more than 30 times below the rate of the lowest
    loss, as where few samples come again and again, the suggestion is a tenth of the latter, which
    `rule` says. `on_update` is called after each update, to show where it is.
    """
    finite_number("low", low, above=0)
    finite_number("high", high, above=low)
    whole_number("updates", updates, minimum=MIN_UPDATES)
    step = _training_step(model)
    shares = _rate_shares(step)
    growth = math.log(high / low) / (updates - 1)
    rates = [low * math.exp(growth * i) for i in range(updates)]

    watch = RangeTestWatch(updates, on_update)
    with undone_trial(model) as backup, _quiet():
        set_train_mode(model.net, step)
        step.set_learning_rates(_rate_table(rates, shares, int(step.state.updates)))
        step.state.cycle.close()
        feed = model._make_feed(data)
        add_data(backup, feed)
        loop = Loop(
            Run(model=model, epochs=ENDLESS_EPOCHS, epoch_steps=None),
            step,
            feed,
            [watch],
            Timing(ENDLESS_EPOCHS, epoch_steps=None, sink=None, valid_epochs=lambda epoch: False),
            evaluate=None,
            make_runner=partial(model.captures.training_runner, step, feed, None),
        )
        try:
            loop.run_epochs()
        except NonFiniteError:
            watch.diverged()
        del loop  # and with it the workers of a DataLoader
    return _curve(rates, watch, shares)


class RangeTestWatch(Callback):
    """Collects the loss of each update, and ends the run where it diverges or the rates end."""

    def __init__(self, updates: int, on_update: Callable[[], None] | None = None) -> None:
        self.updates = updates
        self.on_update = on_update
        self.losses: list[float] = []
        self.stop_reason = ""
        self._width = smoothing_width(updates)
        self._first = math.nan
        self._best = math.inf

    def step(self, run: Run, row: Row) -> None:
        if self._has_ended():
            return  # rows of the same visit, behind the end
        if not math.isfinite(row.loss):
            self.diverged()
        elif row.updated:
            self._add(row.cycle_loss)
        if self._has_ended():
            run.stop(self.stop_reason)

    def next_stop(self, run: Run) -> int | None:
        """No step is made that can not count any more."""
        accumulate: int = run.model.step.options.accumulate
        return run.global_step + max(1, self.updates - len(self.losses)) * accumulate

    def diverged(self) -> None:
        """The end, by a loss or a gradient that is not finite."""
        self.stop_reason = self.stop_reason or "the loss is not finite from there on"

    def _has_ended(self) -> bool:
        return bool(self.stop_reason)

    def _add(self, loss: float) -> None:
        self.losses.append(loss)
        if self.on_update is not None:
            self.on_update()
        newest = smooth(self.losses[-math.ceil(3 * self._width) - 1 :], self._width)[-1]
        if len(self.losses) == 1:
            self._first = newest
        self._best = min(self._best, newest)
        if newest > divergence_limit(self._first, self._best):
            self.stop_reason = "the loss diverges from there on"
        elif len(self.losses) == self.updates:
            self.stop_reason = "the highest rate was reached"


def _training_step(model: Any) -> TrainStep:
    """The step of a model that can be tested; an error for any other."""
    if not isinstance(model, Model):
        advice = ""
        if isinstance(model, torch.nn.Module):
            advice = ": hs.find_lr(hs.Model(net, loss, optimizer), data)"
        raise TypeError(f"find_lr: expected a hs.Model, got {type(model).__name__}{advice}")
    if model._fit is not None:
        raise RuntimeError("find_lr: this model is being fitted; call it before fit")
    if not isinstance(model.step, TrainStep):
        raise ValueError(
            "find_lr: expected a model with an optimizer and the built-in step, whose rates it "
            "can set: hs.Model(net, loss, optimizer)"
        )
    return model.step


def _rate_shares(step: TrainStep) -> list[float]:
    """The rate of each parameter group beside the highest one, which is 1."""
    rates = []
    for group in step.optimizer.param_groups:
        # A scheduler of torch's has begun to move the rate, and notes where it was.
        rates.append(float(group.get("initial_lr", group["lr"])))
    highest = max(rates)
    if highest <= 0:
        return [1.0] * len(rates)
    return [rate / highest for rate in rates]


def _rate_table(rates: list[float], shares: list[float], past_updates: int) -> Tensor:
    """The rates by group and update number. Columns of updates that are over stand first."""
    row = torch.tensor([*([rates[0]] * past_updates), *rates], dtype=torch.float64)
    return torch.tensor(shares, dtype=torch.float64)[:, None] * row


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, nothing is announced: what concerns training, `fit` says."""
    before = signals.QUIET
    signals.QUIET = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Notice)
            yield
    finally:
        signals.QUIET = before


def _curve(rates: list[float], watch: RangeTestWatch, shares: list[float]) -> LRCurve:
    """The result; ValueError where no rate can be suggested."""
    losses = watch.losses
    count = len(losses)
    if count < 3:
        raise ValueError(
            f"find_lr: {watch.stop_reason}, after {count} of {watch.updates} updates, at a rate of "
            f"{rates[min(count, len(rates) - 1)]:.3g}. Look at the data and the loss first "
            "(docs/guide/nan.md), or begin at a lower rate: find_lr(…, low=…)"
        )
    width = smoothing_width(watch.updates)
    smoothed = smooth_curve(losses, width)
    if not descends(losses, smoothed):
        raise ValueError(
            f"find_lr: the loss does not fall: from {smoothed[0]:.4g} at a rate of {rates[0]:.3g} "
            f"to {min(smoothed):.4g} at best, among losses from {min(losses):.4g} to "
            f"{max(losses):.4g} ({count} updates, {watch.stop_reason}). If the losses scatter, "
            "give larger batches or more updates: find_lr(…, updates=300). If they stay the same, "
            "give a higher rate, find_lr(…, high=…), and see that the parameters are not frozen "
            "and the targets fit the inputs. A network that is trained already may have nothing "
            "to fall"
        )
    suggestion, rule = suggest_rate(rates[:count], smoothed)
    return LRCurve(
        rates=tuple(rates[:count]),
        losses=tuple(losses),
        smoothed=tuple(smoothed),
        suggestion=suggestion,
        group_suggestions=tuple(share * suggestion for share in shares),
        stop_reason=watch.stop_reason,
        rule=rule,
    )
