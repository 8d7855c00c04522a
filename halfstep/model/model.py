"""`Model`: network, loss and optimizer in one precision, with fit, evaluate and predict."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Unpack, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from halfstep import checkpoint
from halfstep.callbacks import Checkpoint
from halfstep.callbacks.checkpoint import check_claims, lock_folders
from halfstep.callbacks.progress_bar import add_progress
from halfstep.checkpoint.attempts import Job
from halfstep.distributed import Ranks, job_of_environment
from halfstep.engine import Callback, Feed, Loop, Run, Timing
from halfstep.engine.auto_compile import auto_compile_callbacks
from halfstep.engine.batch_errors import explain_batch_error
from halfstep.engine.evaluate import EMPTY_DATA_ADVICE, evaluate, to_host, without_target
from halfstep.engine.feed import refuse_sharded_data
from halfstep.engine.limits import BatchLimit, TimeLimit
from halfstep.engine.loop import Evaluate
from halfstep.engine.train_metrics import TrainMetrics, train_metric_columns
from halfstep.metrics import Metrics
from halfstep.metrics.counters import logits_of
from halfstep.model import fit_arguments, validate
from halfstep.model.call_forms import (
    EVAL_BATCH_SIZE,
    Columns,
    FitOptions,
    accept_evaluate_forms,
    accept_fit_forms,
    accept_predict_forms,
)
from halfstep.model.custom_step import CustomStep
from halfstep.model.device import place_parts
from halfstep.model.foreign_methods import NOT_CALLABLE, missing_attribute_message
from halfstep.model.foreign_parts import answer_foreign_parts
from halfstep.model.learning_rates import EpochRates, ScheduleTables
from halfstep.model.no_captures import NoCaptures
from halfstep.model.resume import describe_run, restore_snapshot, take_snapshot
from halfstep.model.resume_backup import ResumeBackup
from halfstep.model.resume_check import check_snapshot, named_part
from halfstep.model.schedule_unit import Unit, check_unit
from halfstep.model.valid_sets import (
    check_not_empty,
    evaluate_sets,
    named_sets,
    score_names,
)
from halfstep.model.weights import Account, load_weights, save_weights
from halfstep.precision import Precision, PrecisionName
from halfstep.step import EvalStep, TrainStep
from halfstep.step.loss_shapes import loss_name
from halfstep.step.options import (
    AutoFlag,
    CountFunction,
    Decider,
    Exactness,
    LearningRateTable,
    NonFinite,
    StepOptions,
    Strategy,
)
from halfstep.step.rank_startup import check_equal_states, check_same_sizes
from halfstep.step.state_dict import reset_averages
from halfstep.step.step_copy import refuse_copy
from halfstep.storage.url import hide_credentials, is_store_url
from halfstep.utils.keywords import suggest_keywords
from halfstep.utils.optional_folders import is_left_out
from halfstep.utils.saved_state import SavedValue
from halfstep.utils.text import plural


class FitInProgress(NamedTuple):
    """The parts of the fit that is running."""

    loop: Loop
    feed: Feed
    callbacks: dict[str, Callback]  # by names that stay over a resume
    valid_feeds: dict[str, Feed] | None = None  # by the names of the data sets


def _total_size(feeds: Iterable[Feed]) -> int | None:
    """The batches of all of them; None where there are none, or one does not know."""
    sizes = [feed.size for feed in feeds]
    known = [size for size in sizes if size is not None]
    return sum(known) if sizes and len(known) == len(sizes) else None


def _job_of(step: Any) -> Job | None:
    """The job of torchrun whose ranks train together; None where this process trains by itself."""
    job = job_of_environment()
    if job is None or getattr(step, "ranks", None) is None:
        return None
    return Job(job.name, job.restart, job.ranks)


def _load_checkpoint(path: Path, ranks: Ranks) -> Any:
    """The tree of the checkpoint that rank 0 has chosen."""
    try:
        return checkpoint.load(path).tree
    except checkpoint.CheckpointError as error:
        if ranks.index == 0:
            raise
        raise checkpoint.CheckpointError(
            f"{ranks}, in {os.getcwd()} on {os.uname().nodename}: {error} Rank 0 chose this "
            "checkpoint, and every rank reads it: its folder must be one that all hosts share, "
            "given to Checkpoint as an absolute path"
        ) from error


def choose_captures(eval_step: EvalStep, capture: bool | str, verify: int) -> Any:
    """What a model keeps captured; without the folder engine/captured everything runs eagerly."""
    try:
        from halfstep.engine.captured.cache import ModelCaptures
    except ModuleNotFoundError as error:
        if not is_left_out(error):
            raise
        return NoCaptures(capture, verify)
    return ModelCaptures(eval_step, capture, verify)


class Model:
    """Training, evaluation and prediction around one step.

    `metrics` by name; `train_metrics` says which of them training batches count for: True (all
    whose memory does not grow with the batches), False, or names. `schedule` is anything
    halfstep.schedules takes. It moves once per real update, a scheduler of torch's once per epoch;
    `schedule_every` says it otherwise. `labels` says where a batch keeps the labels for metrics,
    when they are neither the target of the loss nor the last item; `step` and `eval_step` replace
    the built-in steps. `device` moves network, loss and optimizer state there. `capture`: on CUDA
    the step is replayed from graphs where it can be ("auto"), must be (True) or is not (False);
    `verify=K` proves K replays bit for bit before the first fit. Every other option is TrainStep's:
    accumulate, clip_norm, ema, compile, count, forward, nonfinite, deterministic, …
    """

    @suggest_keywords("Model", names=validate.FOREIGN_OPTIONS, advice=validate.MISPLACED_OPTIONS)
    def __init__(
        self,
        net: nn.Module,
        loss: Any = None,
        optimizer: Optimizer | None = None,
        precision: PrecisionName | Precision = "fp32",
        *,
        metrics: Mapping[str, Any] | None = None,
        train_metrics: bool | Iterable[str] = True,
        schedule: Any = None,
        schedule_every: Unit | None = None,
        labels: Callable[[Any], Any] | None = None,
        step: Any = None,
        eval_step: Any = None,
        device: str | torch.device | None = None,
        capture: AutoFlag = "auto",
        verify: int = 0,
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        lr: LearningRateTable | None = None,
        ema: float | None = None,
        count: CountFunction | None = None,
        forward: Callable[..., Any] | None = None,
        sens: float | Tensor = 1.0,
        nonfinite: NonFinite | None = None,
        deterministic: bool = False,
        fingerprint_every: int = 0,
        decide: Decider = "auto",
        compile: AutoFlag = "auto",
        channels_last: AutoFlag = "auto",
        polish: AutoFlag = "auto",
        cudnn_benchmark: AutoFlag = "auto",
        strategy: Strategy = "auto",
        exact: Exactness | None = None,
        logical: int = 12,
    ) -> None:
        options = StepOptions.changed_arguments(locals())
        option_names = list(options)
        if schedule is not None:
            option_names.append("schedule")
        answer_foreign_parts(loss, optimizer, metrics)
        check_unit(schedule, schedule_every)
        validate.check_parts(net, loss, optimizer, step, option_names)
        validate.check_precision(step, precision)
        place_parts(device, net, loss, optimizer, step)
        self.net = net
        self.loss = loss
        self.optimizer = optimizer
        self.schedule = schedule
        self.schedule_every = schedule_every
        self.metrics = Metrics(metrics)
        self.labels = labels
        self._train_metrics = TrainMetrics(self.metrics, labels, train_metrics)
        validate.warn_ignored_labels(loss, self.metrics)

        # The training step: the user's own, or ours.
        self._chose_fused = False
        self.step: Any = step
        if step is not None and not isinstance(step, TrainStep):
            self.step = CustomStep(step)
        if step is None and optimizer is not None:
            self._chose_fused = validate.choose_fused(net, optimizer, precision, schedule, options)
            self.step = TrainStep(net, loss, optimizer, precision=precision, **options)
            validate.warn_untrained(net, optimizer)

        # The evaluation step: the user's own, or the training step's counterpart.
        self._built_in_eval = self._build_eval_step(precision, options)
        self._eval_step: Any = eval_step or self._built_in_eval
        self._has_own_forward = options.get("forward") is not None
        has_own_step = step is not None or eval_step is not None
        self._takes_dicts = loss is None and not has_own_step and not self._has_own_forward

        self._fit: FitInProgress | None = None
        self.captures = choose_captures(self._built_in_eval, capture, verify)
        self._schedule_tables = ScheduleTables()

    def _build_eval_step(
        self, precision: PrecisionName | Precision, options: dict[str, Any]
    ) -> EvalStep:
        if isinstance(self.step, TrainStep):
            return self.step.evaluator()
        eval_options = {name: options[name] for name in ("forward", "count") if name in options}
        return EvalStep(self.net, self.loss, precision=precision, **eval_options)

    # Training. Data first, or whole tensors with a batch size, are other forms of the same call.

    @overload
    def fit(self, epochs: int, data: Any, **options: Unpack[FitOptions]) -> Run: ...
    @overload
    def fit(self, data: Any, epochs: int, **options: Unpack[FitOptions]) -> Run: ...
    @overload
    def fit(
        self,
        x: Columns,
        y: Columns,
        *,
        epochs: int,
        batch_size: int,
        validation_data: Any = None,
        validation_split: float = 0.0,
        shuffle: bool = True,
        seed: int = 0,
        **options: Unpack[FitOptions],
    ) -> Run: ...
    @accept_fit_forms
    def fit(
        self,
        epochs: int,
        data: Any,
        *,
        valid: Any = None,
        valid_every: int | Iterable[int] = 1,
        valid_every_steps: int = 0,
        callbacks: Callback | Iterable[Callback] | None = (),
        progress: bool | Literal["lines"] = True,
        sink: int | None = None,
        steps_per_epoch: int | None = None,
        max_time: float | str | timedelta | None = None,
        limit_batches: float | None = None,
        resume: str | Path | None = None,
    ) -> Run:
        """Trains up to epoch number `epochs`.

        `sink` is how many steps pass between two reads of results by the host; it never changes
        results. `steps_per_epoch` makes an epoch that many steps, the data going on where it
        stopped. `max_time`: this call ends after so many seconds, or "1h30m", at the next read of
        results. `limit_batches`: only so many batches, or such a fraction, of an epoch and of an
        evaluation. `resume="auto"` continues from the newest checkpoint of the Checkpoint callback,
        a path from that one. `progress`: a bar in a terminal, a table in a notebook, elsewhere a
        line for each epoch; "lines" everywhere, or False. Where a callback shows it, only that one
        does.

        Also `fit(data, epochs)`, and `fit(x, y, epochs=…, batch_size=…, validation_data=(xv, yv))`
        for whole tensors or arrays, shuffled in each epoch by `seed`.
        """
        if self._fit is not None:
            raise RuntimeError(
                "fit: this model is being fitted already; a callback may not call fit again"
            )
        time_limit = TimeLimit.of(max_time)
        backup = ResumeBackup()
        if resume is not None:
            backup.add_model(self)
        try:
            loop = self._build_loop(
                epochs,
                data,
                valid=valid,
                valid_every=valid_every,
                valid_every_steps=valid_every_steps,
                callbacks=callbacks,
                progress=progress,
                sink=sink,
                steps_per_epoch=steps_per_epoch,
                limit=BatchLimit.of(limit_batches),
            )
            loop.time_limit = time_limit
            loop.on_begun = backup.forget
            if self._ranks is not None:  # an attempt that was given up gets no further
                self._ranks.any_of([], "the start of fit")
            loop.before_rows = partial(check_claims, loop.callbacks)
            with lock_folders(loop.callbacks, _job_of(self.step)):
                self._resume(loop, resume, backup)
                self._schedule_tables.check()
                loop.run_epochs()
        except BaseException:
            backup.put_back()
            raise
        finally:
            self._fit = None
            self._observe(None)
        return loop.run

    def _build_loop(
        self,
        epochs: int,
        data: Any,
        *,
        valid: Any,
        valid_every: int | Iterable[int],
        valid_every_steps: int,
        callbacks: Any,
        progress: bool | str,
        sink: int | None,
        steps_per_epoch: int | None,
        limit: BatchLimit,
    ) -> Loop:
        if self.step is None:
            raise ValueError(
                "fit: this model has no optimizer and no step=; write "
                "hs.Model(net, loss, torch.optim.SGD(net.parameters(), lr=0.1))"
            )
        fit_arguments.check_epochs_and_data(epochs, data)
        validate.set_train_mode(self.net, self.step)
        feed = self._make_feed(data)
        steps_per_epoch = fit_arguments.limit_epoch(feed, steps_per_epoch, limit)
        epoch_steps = steps_per_epoch or feed.size
        total_steps = None if epoch_steps is None else epochs * epoch_steps

        # Callbacks: the user's, and the one that decides on compile="auto".
        user_callbacks = fit_arguments.check_callbacks(callbacks)
        compile_callbacks = auto_compile_callbacks(
            self.step,
            total_steps,
            whole_step=bool(self.captures.mode),
            has_checkpoint=any(isinstance(c, Checkpoint) for c in user_callbacks),
        )
        schedule_callbacks: list[Callback] = []
        if self.schedule is not None:
            schedule_callbacks.append(EpochRates(self._schedule_tables, self.step))
        shown_callbacks = add_progress(user_callbacks, progress)
        named_callbacks = fit_arguments.name_callbacks(
            [*schedule_callbacks, *shown_callbacks, *compile_callbacks]
        )
        if self._rank > 0:  # rank 0 alone prints and writes
            named_callbacks = {
                name: callback for name, callback in named_callbacks.items() if not callback.writes
            }

        # Times and learning rates.
        timing = fit_arguments.make_timing(
            epochs,
            feed.size,
            steps_per_epoch=steps_per_epoch,
            sink=sink,
            valid_every=valid_every,
            valid_every_steps=valid_every_steps,
        )
        if valid is None and valid_every_steps:
            raise ValueError(
                "valid_every_steps: expected validation data too, got none; give valid=…"
            )
        self._set_learning_rates(timing, feed)
        valid_sets = {} if valid is None else named_sets("valid", valid)
        scores = score_names("valid", list(valid_sets), list(self.metrics))
        valid_feeds = {name: self._make_feed(data) for name, data in valid_sets.items()}
        for valid_feed in valid_feeds.values():
            valid_feed.limit = limit
        if self._ranks is not None:
            valid_sizes = {f"valid {name}".strip(): f.size for name, f in valid_feeds.items()}
            check_same_sizes({"training": feed.size, **valid_sizes}, self._ranks)
        if any(isinstance(callback, Checkpoint) for callback in user_callbacks):
            feed.announce_resume_limits("data")
            for name, valid_feed in valid_feeds.items():
                valid_feed.announce_resume_limits(f"valid: {name}" if name else "valid")

        run = Run(
            model=self,
            epochs=epochs,
            epoch_steps=epoch_steps,
            epoch_samples=None if steps_per_epoch else feed.samples,
            valid_steps=_total_size(valid_feeds.values()),
            score_names=scores,
            valid_sets=tuple(valid_sets),
            may_have_parts=validate.may_have_parts(self.step),
        )
        self._train_metrics.labels = self.labels  # which may be set at any time
        self._observe(self._train_metrics)
        loop = Loop(
            run,
            self.step,
            feed,
            list(named_callbacks.values()),
            timing,
            evaluate=self._make_validation(valid_feeds) if valid_feeds else None,
            make_runner=partial(self.captures.training_runner, self.step, feed, total_steps),
        )
        loop.config = describe_run(self.step, feed, self._updates_made())
        loop.config |= self._schedule_tables.describe(self.schedule)
        if limit.value is not None:
            loop.config["limit_batches"] = limit.value
        if isinstance(self.step, TrainStep):
            self._train_metrics.begin()
        if loop.train_metrics is not None:
            loop.train_metrics.use_captured(loop.captured_runner is not None)
            run.train_metrics = train_metric_columns(loop.train_metrics)
        self._fit = FitInProgress(loop, feed, named_callbacks, valid_feeds)
        return loop

    def _observe(self, train_metrics: TrainMetrics | None) -> None:
        """Lets metrics look at the training batches; None: nobody looks."""
        if isinstance(self.step, TrainStep):
            has_metrics = train_metrics is not None and len(train_metrics) > 0
            self.step.objective.observer = train_metrics if has_metrics else None

    def _updates_made(self) -> int:
        """Updates of earlier fits."""
        return int(self.step.state.updates) if isinstance(self.step, TrainStep) else 0

    def _set_learning_rates(
        self, timing: Timing, feed: Feed, saved: dict[str, Any] | None = None
    ) -> None:
        """The schedule's rates for a new fit, or for the one that a checkpoint was made in."""
        tables = self._schedule_tables
        if saved is None:
            table = tables.for_new_fit(
                self.schedule, self.schedule_every, self.step, timing, feed, self._updates_made()
            )
        else:
            table = tables.for_resumed_fit(
                self.schedule, self.schedule_every, self.step, timing, feed, saved
            )
        if table is not None:
            self.step.set_learning_rates(table)

    def _make_validation(self, feeds: dict[str, Feed]) -> Evaluate:
        uses_built_in = self._eval_step is self._built_in_eval
        validate.check_can_evaluate(self.net, uses_built_in, self.step)
        check_not_empty(feeds)

        def evaluate_or_rewind(stop: Callable[[], bool]) -> dict[str, float] | None:
            generators = {name: feed.save_generators() for name, feed in feeds.items()}
            scores = None
            try:
                scores = evaluate_sets(feeds, self._evaluate_feed, stop)
            finally:
                if scores is None:  # cut short: the run that goes on evaluates from the start
                    for name, feed in feeds.items():
                        feed.load_generators(generators[name])
            return scores

        return evaluate_or_rewind

    @property
    def _ranks(self) -> Ranks | None:
        """The processes that train this model together; None where there is this one alone."""
        ranks: Ranks | None = getattr(self.step, "ranks", None)
        return ranks if ranks is not None and ranks.count > 1 else None

    @property
    def _rank(self) -> int:
        return 0 if self._ranks is None else self._ranks.index

    def _make_feed(self, data: Any) -> Feed:
        feed: Feed = self.captures.make_feed(data, named=self._takes_dicts)
        if self._ranks is not None:
            refuse_sharded_data(feed)
        return feed

    def _resume(self, loop: Loop, source: str | Path | None, backup: ResumeBackup) -> None:
        """Continues from a checkpoint, if one is asked for and found.

        All of it is checked first. What is refused after that, `backup` takes back.
        """
        assert self._fit is not None
        if source is None:
            _check_folders(loop.callbacks, resumed_step=None)
            fit_arguments.close_cycle(self.step)
            return
        if not isinstance(source, str | Path):
            raise TypeError(
                "resume: expected 'auto', the path of a checkpoint or of a run, or None, "
                f"got {source!r}"
            )
        loop.run.resume = str(source)
        path = None
        if self._rank == 0:
            path = _newest_checkpoint(source, loop.callbacks)
        if self._ranks is not None:
            path = self._ranks.broadcast_object(path, "the checkpoint to go on from")
        if path is None:
            _check_folders(loop.callbacks, resumed_step=None)
            fit_arguments.close_cycle(self.step)
            return
        fit = self._fit
        ranks = self._ranks or Ranks()
        with ranks.all_or_none("reading the checkpoint"):
            saved = _load_checkpoint(path, ranks)
            check_snapshot(saved, self.step, loop, fit.feed, fit.callbacks, path, fit.valid_feeds)
            _check_folders(loop.callbacks, resumed_step=saved["loop"]["global_step"])

        backup.add_callbacks(fit.callbacks.values())
        backup.add(fit.feed.undo_function())
        for valid_feed in (fit.valid_feeds or {}).values():
            backup.add(valid_feed.undo_function())
        with named_part(SavedValue(saved, f"resume: {path}"), "the run"):
            self._set_learning_rates(loop.timing, fit.feed, saved)
            loop.config["began"] = saved["config"].get("began", 0)
            loop.config |= self._schedule_tables.describe(self.schedule)
            restore_snapshot(saved, self.step, loop, fit.feed, fit.callbacks, fit.valid_feeds)
        loop.run.resumed = str(path)
        if self._ranks is not None:
            check_equal_states(self.step, self._ranks)

    def snapshot(self) -> dict[str, Any]:
        """Inside `fit`: everything that decides the next step, as a tree for a checkpoint."""
        if self._fit is None:
            raise RuntimeError(
                "snapshot: expected to be called inside fit, by a callback; outside use save()"
            )
        fit = self._fit
        return take_snapshot(self.step, fit.loop, fit.feed, fit.callbacks, fit.valid_feeds)

    # Evaluation and prediction.

    @overload
    def evaluate(self, data: Any, *, limit_batches: float | None = None) -> dict[str, float]: ...
    @overload
    def evaluate(
        self,
        x: Columns,
        y: Columns,
        *,
        batch_size: int = EVAL_BATCH_SIZE,
        limit_batches: float | None = None,
    ) -> dict[str, float]: ...
    @accept_evaluate_forms
    def evaluate(self, data: Any, *, limit_batches: float | None = None) -> dict[str, float]:
        """Mean loss and metrics over one pass, every sample counted once.

        With ema=, by the averaged weights. `limit_batches`: only so many batches, or such a
        fraction of them. Of a dict of data sets by name, each score of each: `clean_loss`,
        `noisy_acc`.
        """
        sets = named_sets("evaluate", data)
        score_names("evaluate", list(sets), list(self.metrics))
        feeds = {name: self._make_feed(one_set) for name, one_set in sets.items()}
        for feed in feeds.values():
            feed.limit = BatchLimit.of(limit_batches)
        scores = evaluate_sets(feeds, self._evaluate_feed, lambda: False)
        assert scores is not None
        return scores

    def _evaluate_feed(
        self, set_name: str, feed: Feed, stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        with self._averaged_weights(), self._evaluation_buffers():
            runner = self.captures.eval_runner(
                self._eval_step, self.metrics, self.labels, set_name=set_name
            )
            if runner is not None:
                scores: dict[str, float] | None = runner(feed, stop)
                return scores
            return evaluate(self._eval_step, feed, self.metrics, self.labels, stop, net=self.net)

    def _evaluation_buffers(self) -> AbstractContextManager[None]:
        if isinstance(self.step, TrainStep):
            return self.step.evaluation_buffers()
        return nullcontext()

    def _has_averages(self) -> bool:
        return isinstance(self.step, TrainStep) and bool(self.step.state.ema)

    def _averaged_weights(self) -> AbstractContextManager[None]:
        """Inside, the network holds its averaged weights, where the step keeps some."""
        if not self._has_averages():
            return nullcontext()
        averaged: AbstractContextManager[None] = self.step.averaged()
        return averaged

    @overload
    def predict(
        self, data: Any, *, batch: int = 256, stream: bool = False, targets: bool | None = None
    ) -> Any: ...
    @overload
    def predict(
        self, data: Any, *, batch_size: int, stream: bool = False, targets: bool | None = None
    ) -> Any: ...
    @accept_predict_forms
    def predict(
        self, data: Any, *, batch: int = 256, stream: bool = False, targets: bool | None = None
    ) -> Any:
        """Outputs for a tensor, a dict of them, a data set or batches, on the host.

        They are in float32 or wider. A dict goes to the network by name.

        One tensor (or one tuple or dict of them, as the network returns), or with `stream` an
        iterator of batches. `targets`: batches end with one, which is left out. None: they do if
        there is a loss, and dicts lose their labels; False: batches are inputs as they are.
        """
        if targets is None and self.loss is not None:
            targets = True
        outputs = self._predict_batches(data, batch, targets, stream)
        return outputs if stream else join_outputs(list(outputs))

    def _predict_batches(
        self, data: Any, batch: int, has_targets: bool | None, stream: bool
    ) -> Iterator[Any]:
        feed = self._make_feed(split_batches(data, batch))
        if feed.size == 0:
            raise ValueError(_nothing_to_predict())
        runner = self.captures.predict_runner()
        # Not from graphs where somebody may train between two batches of a stream.
        if runner is not None and not self._has_averages() and not stream:
            predict_one = partial(self._predict_batch, has_targets=has_targets)
            yield from runner(feed, predict_one, self._built_in_eval.applied, has_targets)
            return
        feed.go_to_pass(0)
        batch_number = 0
        for batch_number, args in enumerate(feed.start(), 1):
            try:
                with self._averaged_weights(), self._evaluation_buffers():
                    out = self._predict_batch(args, has_targets)
            except Exception as error:
                where = f"prediction, batch {batch_number}"
                explain_batch_error(error, where, args, feed.names, self.net)
                raise
            yield to_host(out)
        if batch_number == 0:
            raise ValueError(_nothing_to_predict())

    def _predict_batch(self, args: tuple[Any, ...], has_targets: bool | None) -> Any:
        # A forward of the user's own takes the batch as it is.
        is_dict_with_target = has_targets and not isinstance(args[0], Tensor)
        if self._has_own_forward and (len(args) > 1 or is_dict_with_target):
            outputs = self._built_in_eval(*args).outputs
            if outputs is None:
                raise ValueError(
                    "predict: forward= returned the loss and no outputs; let it return "
                    "(loss, outputs) or {'loss': loss, 'logits': outputs}, or predict from inputs "
                    "alone, without the target"
                )
            return logits_of(outputs)
        inputs = without_target(args, targets=has_targets)
        return logits_of(self._built_in_eval.predict(*inputs))

    # Copying.

    def __deepcopy__(self, memo: dict[int, Any]) -> "Model":
        """A model over copies of network, loss, optimizer and step, which trains on by itself."""
        if self._fit is not None:
            refuse_copy("a Model", "copied inside fit", "copy it when fit is over")
        if not isinstance(self.step, TrainStep) or self._eval_step is not self._built_in_eval:
            refuse_copy(
                "a Model with a step of your own, or without optimizer",
                "copied",
                "build another Model around copy.deepcopy(net)",
            )
        copied = object.__new__(type(self))
        copied.__dict__.update(vars(self))
        copied.step = copy.deepcopy(self.step, memo)
        copied.net = copied.step.net
        copied.loss = copied.step.objective.loss
        copied.optimizer = copied.step.optimizer
        for name in ("schedule", "metrics", "labels", "_schedule_tables"):
            setattr(copied, name, copy.deepcopy(getattr(self, name), memo))
        copied._train_metrics = TrainMetrics(
            copied.metrics, copied.labels, list(self._train_metrics)
        )
        copied._built_in_eval = copied.step.evaluator()
        copied._eval_step = copied._built_in_eval
        captures = self.captures
        copied.captures = choose_captures(copied._built_in_eval, captures.mode, captures.verify)
        return copied

    def __copy__(self) -> NoReturn:
        """Two models over one step would undo each other's work."""
        refuse_copy("a Model", "copied without its network", "copy.deepcopy(model) copies both")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """A model holds functions and entries of its network, which no pickle holds."""
        refuse_copy(
            "a Model",
            "pickled",
            "model.save(file) writes the weights, hs.Checkpoint a run to resume; "
            "or save model.step.state_dict()",
        )

    # What a user of another library would call. Hidden from type checkers, which know that a Model
    # has none of it.

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(missing_attribute_message(name, [*dir(type(self)), *vars(self)]))

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise TypeError(NOT_CALLABLE)

    # Looking, saving.

    def __repr__(self) -> str:
        """The parts by their names, and the size of the network: a notebook shows a Model."""
        count = sum(p.numel() for p in self.net.parameters())
        parts = [f"{type(self.net).__name__} with {plural(count, 'parameter')}"]
        if self.loss is not None:
            parts.append(loss_name(self.loss))
        if self.optimizer is not None:
            parts.append(type(self.optimizer).__name__)
        if isinstance(self.step, TrainStep):
            parts.append(f"precision {self.step.precision.name!r}")
        if len(self.metrics):
            parts.append(f"metrics {', '.join(self.metrics)}")
        return f"Model({', '.join(parts)})"

    def report(self) -> Any:
        """The dtypes really used, module by module, and every choice made for the user."""
        if not isinstance(self.step, TrainStep):
            raise ValueError("report: expected a model with an optimizer and the built-in step")
        choices = {}
        if self._chose_fused:
            choices["fused"] = "chosen, as neither fused= nor foreach= was given"
        return self.step.report().adding(engine=self.captures.describe(self.step), **choices)

    def save(self, path: str | Path) -> None:
        """Writes the weights in the format of the suffix; with ema=, the averaged ones.

        .safetensors; or .pt and .pth, a state_dict that torch.load reads. Of several ranks the
        first one writes.
        """
        if self._rank > 0:
            return
        with self._averaged_weights(), self._evaluation_buffers():
            save_weights(self.net, path)

    def load(self, source: str | Path | Mapping[str, Tensor], *, strict: bool = True) -> Account:
        """Starts from weights: a file of `save` or torch.save, a checkpoint, a run or a state_dict.

        Of a run's folder the newest checkpoint. `strict=False` takes what fits, and says what.
        """
        account = load_weights(self.net, source, strict=strict)
        if isinstance(self.step, TrainStep):
            reset_averages(self.step)
        return account


def _nothing_to_predict() -> str:
    return f"predict: expected at least one batch, got none; {EMPTY_DATA_ADVICE}"


def _newest_checkpoint(source: str | Path, callbacks: Sequence[Callback]) -> Path | None:
    """The checkpoint that resume= means; None where "auto" finds none."""
    if is_store_url(source):
        shown = hide_credentials(str(source))
        raise ValueError(
            f"resume: expected 'auto' or a path of this machine, got {shown}. "
            "Give the URL to hs.Checkpoint and write resume='auto'."
        )
    folders = [Path(source)]
    if source == "auto":
        savers = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
        for saver in savers:
            saver.fetch()
        folders = [saver.folder for saver in savers]
        if not folders:
            raise ValueError(
                "resume='auto': expected a Checkpoint among the callbacks, to know where to look"
            )
    paths = []
    for folder in folders:
        path = checkpoint.choose(folder)
        if path is not None:
            paths.append(path)
    if not paths and source != "auto":
        raise FileNotFoundError(f"resume: no checkpoint in {source}")
    return max(paths, key=lambda path: path.name, default=None)


def _check_folders(callbacks: Sequence[Callback], *, resumed_step: int | None) -> None:
    """Refuses folders with checkpoints of another run before logs are cut or begun anew."""
    for callback in callbacks:
        if isinstance(callback, Checkpoint):
            callback.check_no_other_run(resumed_step)


def split_batches(data: Any, batch: int) -> Any:
    """A tensor, an array or a dict of them in batches; anything else as it is."""
    if isinstance(data, Tensor | np.ndarray):
        return [(part,) for part in torch.as_tensor(data).split(batch)]
    is_columns = isinstance(data, Mapping) and bool(data)
    if not is_columns or not all(isinstance(x, Tensor | np.ndarray) for x in data.values()):
        return data
    columns = {name: torch.as_tensor(column) for name, column in data.items()}
    sizes = {name: len(column) if column.dim() else 0 for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name!r} of {size}" for name, size in sizes.items())
        raise ValueError(
            f"predict: expected as many samples in each column, got {listed}; "
            "a dict is one batch of inputs by name"
        )
    batches = zip(*[column.split(batch) for column in columns.values()], strict=True)
    return [dict(zip(columns, parts, strict=True)) for parts in batches]


def join_outputs(outputs: Sequence[Any]) -> Any:
    """The outputs of batches as one tensor, or one tuple or dict of whole tensors.

    As a list of batches where they hold anything but tensors.
    """
    flat = [tree_flatten(output) for output in outputs]
    if not flat:
        return list(outputs)
    structure = flat[0][1]
    leaves = [leaf for batch_leaves, _ in flat for leaf in batch_leaves]
    have_one_structure = all(spec == structure for _, spec in flat)
    are_tensors = all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves)
    if not have_one_structure or not are_tensors:
        return list(outputs)

    columns = list(zip(*(batch_leaves for batch_leaves, _ in flat), strict=True))
    for column in columns:
        sample_shapes = sorted({tuple(leaf.shape[1:]) for leaf in column})
        if len(sample_shapes) > 1:
            first, second = (list(shape) for shape in sample_shapes[:2])
            raise ValueError(
                "predict: expected outputs of one shape, to make one tensor of them, "
                f"got samples of {first} and of {second}; "
                "predict(…, stream=True) gives them batch by batch"
            )
    return tree_unflatten([torch.cat(column) for column in columns], structure)
