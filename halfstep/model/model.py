"""`Model`: network, loss and optimizer in one precision, with fit, evaluate and predict."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import checkpoint
from halfstep.callbacks import Checkpoint
from halfstep.callbacks.checkpoint import lock_folders
from halfstep.engine import Callback, Feed, Loop, Run, Timing
from halfstep.engine.auto_compile import auto_compile_callbacks
from halfstep.engine.batch_errors import explain_batch_error
from halfstep.engine.captured.cache import ModelCaptures
from halfstep.engine.evaluate import evaluate, find_labels, to_host, without_target
from halfstep.engine.memory import kept
from halfstep.metrics import Metrics
from halfstep.metrics.counters import logits_of
from halfstep.model import resume, weights
from halfstep.model import validate as parts
from halfstep.model import validate__plan as plan
from halfstep.model.custom_step import OwnStep
from halfstep.model.learning_rates import Tables
from halfstep.model.model__outputs import batches, joined
from halfstep.precision import Precision
from halfstep.step import EvalStep, TrainStep
from halfstep.step.state_dict import reset_averages


class Model:
    """Training, evaluation and prediction around one step.

    `metrics` by name; `schedule` is anything halfstep.schedules takes, by real updates; `labels` says where a batch
    keeps its labels when that is not its last item; `step` and `eval_step` replace the built-in cells. `capture`: on
    CUDA the step is replayed from graphs where it can be ("auto"), must be (True) or is not (False); `verify=K` proves
    K replays bit for bit before the first fit. Every other option is TrainStep's: accumulate, clip_norm, ema, compile,
    count, forward, nonfinite, deterministic, …
    """

    def __init__(
        self, net: nn.Module, loss: Any = None, optimizer: Optimizer | None = None,
        precision: str | Precision = "fp32", *, metrics: Mapping[str, Any] | None = None, schedule: Any = None,
        labels: Callable[[Any], Any] | None = None, step: Any = None, eval_step: Any = None,
        capture: bool | str = "auto", verify: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        parts.check(
            net, loss, optimizer, step, [*options, *(["schedule"] if schedule is not None else [])]
        )
        parts.precisions(step, precision)
        self.net, self.loss, self.optimizer, self.schedule, self._fused = (
            net,
            loss,
            optimizer,
            schedule,
            False,
        )
        self.metrics, self.labels = Metrics(metrics), labels or find_labels
        self.step: Any = step if step is None or isinstance(step, TrainStep) else OwnStep(step)
        if step is None and optimizer is not None:
            self._fused = parts.fused(net, optimizer, precision, schedule, options)
            self.step = TrainStep(net, loss, optimizer, precision=precision, **parts.known(options))
            parts.untrained(net, optimizer)
        self._cell = self._evaluator(precision, options)
        self._eval: Any = eval_step or self._cell
        self._whole = options.get("forward") is not None
        self._by_name = loss is None and step is None and eval_step is None and not self._whole
        self._fit: tuple[Loop, Feed, dict[str, Callback]] | None = None
        self.graphs, self._tables = ModelCaptures(self._cell, capture, verify), Tables()

    def _evaluator(self, precision: str | Precision, options: dict[str, Any]) -> EvalStep:
        if isinstance(self.step, TrainStep):
            return self.step.evaluator()
        kept = {k: v for k, v in options.items() if k in ("forward", "count")}
        return EvalStep(self.net, self.loss, precision=precision, **kept)

    # training

    def fit(
        self, epochs: int, data: Any, *, valid: Any = None, valid_every: int | Iterable[int] = 1,
        valid_every_steps: int = 0, callbacks: Any = (), sink: int | None = None, steps_per_epoch: int | None = None,
        resume: str | Path | None = None,
    ) -> Run:  # fmt: skip
        """Train up to epoch number `epochs`.

        `sink` is how many steps pass between two looks of the host; it never changes results. `steps_per_epoch` makes
        an epoch that many steps, the data going on where it stopped. `resume="auto"` goes on from the newest checkpoint
        of the Checkpoint callback, a path from that one.
        """
        if self._fit is not None:
            raise RuntimeError(
                "fit: this model is being fitted already; a callback may not call fit again"
            )
        try:
            loop = self._loop(
                epochs,
                data,
                valid,
                valid_every,
                valid_every_steps,
                callbacks,
                sink,
                steps_per_epoch,
            )
            with lock_folders(loop.callbacks):
                self._resume(loop, resume)
                self._tables.check()
                with kept() if self._cell.device.type == "cpu" else nullcontext():
                    loop.run_epochs()
        finally:
            self._fit = None
        return loop.run

    def _loop(
        self, epochs: int, data: Any, valid: Any, valid_every: int | Iterable[int], valid_every_steps: int,
        callbacks: Any, sink: int | None, steps_per_epoch: int | None,
    ) -> Loop:  # fmt: skip
        if self.step is None:
            raise ValueError(
                "fit: this model has no optimizer; build it with optimizer=…, or step=…"
            )
        plan.arguments(epochs, data)
        parts.training(self.net, self.step)
        feed = self._feed(data)
        size = steps_per_epoch or feed.size
        steps = None if size is None else epochs * size
        given = plan.checked(callbacks)
        saved = any(isinstance(each, Checkpoint) for each in given)
        named = plan.named(
            [
                *given,
                *auto_compile_callbacks(
                    self.step,
                    steps,
                    whole_step=bool(self.graphs.wish),
                    has_checkpoint=saved,
                ),
            ]
        )
        timing = plan.timing(
            epochs, feed.size, steps_per_epoch=steps_per_epoch, sink=sink, valid_every=valid_every,
            valid_every_steps=valid_every_steps,
        )  # fmt: skip
        if valid is None and valid_every_steps:
            raise ValueError(
                "valid_every_steps: expected validation data too, got none; give valid=…"
            )
        self._set_rates(timing, feed)
        run = Run(self, epochs, size, None if steps_per_epoch else feed.samples)
        check = self._validation(valid) if valid is not None else None
        engine = partial(self.graphs.training, self.step, feed, steps)
        loop = Loop(run, self.step, feed, list(named.values()), timing, check, engine)
        loop.config = resume.config(self.step, feed, self._done)
        self._fit = (loop, feed, named)
        return loop

    @property
    def _done(self) -> int:
        """Updates of earlier fits."""
        return int(self.step.state.updates) if isinstance(self.step, TrainStep) else 0

    def _set_rates(self, timing: Timing, feed: Feed, saved: dict[str, Any] | None = None) -> None:
        """The schedule's rates for a new fit, or for the one that a checkpoint was made in."""
        table = self._tables(self.schedule, self.step, timing, feed, saved, self._done)
        if table is not None:
            self.step.set_learning_rates(table)

    def _validation(self, valid: Any) -> Callable[[Callable[[], bool]], dict[str, float] | None]:
        parts.evaluation(self.net, self._eval is self._cell, self.step)
        feed = self._feed(valid)
        return lambda stop: self._scores(feed, stop)

    def _feed(self, data: Any) -> Feed:
        return self.graphs.feed(data, named=self._by_name)

    def _resume(self, loop: Loop, source: str | Path | None) -> None:
        assert self._fit is not None
        if source is None:
            return plan.close_cycle(self.step)
        if not isinstance(source, str | Path):
            raise TypeError(
                f"resume: expected 'auto', the path of a checkpoint or of a run, or None, got {source!r}"
            )
        loop.run.resume = str(source)
        folders = [Path(source)]
        if source == "auto":
            folders = [c.folder for c in loop.callbacks if isinstance(c, Checkpoint)]
            if not folders:
                raise ValueError(
                    "resume='auto': expected a Checkpoint among the callbacks, to know where to look"
                )
        each = [f if (f / "manifest.json").is_file() else checkpoint.latest(f) for f in folders]
        found = max(
            (path for path in each if path is not None), key=lambda path: path.name, default=None
        )
        if found is None:
            if source != "auto":
                raise FileNotFoundError(f"resume: no checkpoint in {source}")
            return plan.close_cycle(self.step)
        _, feed, named = self._fit
        saved = checkpoint.load(found).tree
        resume.check(saved, self.step, found)
        self._set_rates(loop.timing, feed, saved)
        loop.config["began"] = saved["config"].get("began", 0)
        resume.restore(saved, self.step, loop, feed, named)
        loop.run.resumed = str(found)

    def snapshot(self) -> dict[str, Any]:
        """Inside `fit`: everything that decides the next step, as a tree for halfstep.checkpoint."""
        if self._fit is None:
            raise RuntimeError(
                "snapshot: expected to be called inside fit, by a callback; outside use save()"
            )
        loop, feed, named = self._fit
        return resume.snapshot(self.step, loop, feed, named)

    # evaluation and prediction

    def evaluate(self, data: Any) -> dict[str, float]:
        """Mean loss and metrics over one pass, every sample counted once; with ema=, by the averaged weights."""
        scores = self._scores(self._feed(data), lambda: False)
        assert scores is not None
        return scores

    def _scores(self, feed: Feed, stop: Callable[[], bool]) -> dict[str, float] | None:
        with self._averaged():
            scores = self.graphs.scores(self._eval, self.metrics, self.labels)
            if scores is not None:
                return scores(feed, stop)
            return evaluate(self._eval, feed, self.metrics, self.labels, stop, net=self.net)

    @property
    def _kept_average(self) -> bool:
        return isinstance(self.step, TrainStep) and bool(self.step.state.ema)

    def _averaged(self) -> Any:
        return self.step.averaged() if self._kept_average else nullcontext()

    def predict(
        self, data: Any, *, batch: int = 256, stream: bool = False, targets: bool | None = None
    ) -> Any:
        """Outputs for a tensor, a data set or batches, in float32 or wider, on the host; one tensor (or one tuple or
        dict of them, as the network returns), or with `stream` an iterator of batches. `targets`: batches end with
        one, which is left out (None: where there is a loss)."""
        found = self._predictions(
            data, batch, self.loss is not None if targets is None else targets, stream
        )
        return found if stream else joined(list(found))

    def _predictions(self, data: Any, batch: int, targets: bool, stream: bool) -> Iterator[Any]:
        feed = self._feed(batches(data, batch))
        outputs = self.graphs.outputs()
        if (
            outputs is not None and not self._kept_average and not stream
        ):  # there one may train on between two
            yield from outputs(
                feed, lambda args: self._output(args, targets), self._cell.applied, targets
            )
            return
        feed.go_to_pass(0)
        for number, args in enumerate(feed.start(), 1):
            try:
                with self._averaged():
                    out = self._output(args, targets)
            except Exception as error:
                explain_batch_error(
                    error, f"prediction, batch {number}", args, feed.names, self.net
                )
                raise
            yield to_host(out)

    def _output(self, args: tuple[Any, ...], targets: bool) -> Any:
        named = targets and not isinstance(args[0], Tensor)
        if self._whole and (
            len(args) > 1 or named
        ):  # a forward of the user's own takes the batch as it is
            return logits_of(self._cell(*args).outputs)
        return logits_of(self._cell.predict(*without_target(args, targets=targets)))

    # looking, saving

    def report(self) -> Any:
        """The dtypes really used, module by module, and every choice made for the user; print it."""
        if not isinstance(self.step, TrainStep):
            raise ValueError("report: expected a model with an optimizer and the built-in step")
        chosen = (
            {"fused": "chosen, as neither fused= nor foreach= was given"} if self._fused else {}
        )
        return self.step.report().adding(engine=self.graphs.describe(self.step), **chosen)

    def save(self, path: str | Path) -> None:
        """The weights as one safetensors file; with ema=, the averaged ones."""
        with self._averaged():
            weights.save(self.net, path)

    def load(
        self, source: str | Path | Mapping[str, Tensor], *, strict: bool = True
    ) -> weights.Account:
        """Start from weights: a safetensors file, a checkpoint, a run's folder (its newest) or a state_dict.
        `strict=False` takes what fits, and says what."""
        account = weights.load(self.net, source, strict=strict)
        if isinstance(self.step, TrainStep):
            reset_averages(self.step)
        return account
