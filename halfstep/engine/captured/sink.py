"""`hs.sink`: a loop over visits instead of steps, for a TrainStep or a user's own step function."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.cuda_graphs.capture import GraphCache
from halfstep.data import Dataset
from halfstep.engine.captured import verify as verification
from halfstep.engine.captured.function_program import FunctionProgram
from halfstep.engine.captured.inputs import RECORD_ROWS
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.uncapturable import OnUncapturable, why_not_capturable
from halfstep.engine.captured.verify import VerifiedStep
from halfstep.engine.feed import Feed
from halfstep.engine.run import SCALE, SKIPPED, UPDATED, part_columns
from halfstep.errors import Notice
from halfstep.step import TrainStep
from halfstep.step.overflow import raise_device_errors
from halfstep.step.state import ROW_FIELDS
from halfstep.utils import rng
from halfstep.utils.checks import expect, one_of, whole_number
from halfstep.utils.keywords import user_stacklevel

FLAG_FIELDS = ("skipped", "updated")  # of ROW_FIELDS: these are true or false


class Records:
    """The records of one visit, column by column, on the host.

    `records.loss` has one number for each step. Of a TrainStep there are loss, cycle_loss, lr
    ([steps] or [steps, groups]), scale, grad_norm, skipped, updated, fingerprint and the parts that
    the loss returns; of a function
    what it returned, by name. `samples` is the size of each batch.
    """

    def __init__(self, columns: dict[str, Tensor], samples: list[int]) -> None:
        self.columns = columns
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getattr__(self, name: str) -> Tensor:
        columns: dict[str, Tensor] = self.__dict__.get("columns", {})
        if name not in columns:
            raise AttributeError(f"records: expected one of {', '.join(columns)}, got {name!r}")
        return columns[name]

    def __repr__(self) -> str:
        return f"Records({len(self)} steps: {', '.join(self.columns)})"


class Sink:
    """Each `for` over it is one pass over the data, in visits of `every` steps.

    Graphs are kept from pass to pass.
    """

    def __init__(self, runner: CapturedRunner, step: Any, every: int, data: Any = None) -> None:
        self.runner = runner
        self.step = step
        self.every = every
        # A Dataset counts its own passes.
        self._dataset = data if isinstance(data, Dataset) else None

    @property
    def captures(self) -> int:
        """Graphs captured so far."""
        return self.runner.program.graphs.captures

    def __iter__(self) -> Iterator[Records]:
        runner = self.runner
        feed = runner.feed

        # Which pass is next? One that was left early counts.
        if self._dataset is not None:
            feed.load_state_dict(self._dataset.take_pass())
        elif not runner.pass_over:
            feed.go_to_pass(feed.pass_number + 1)
        runner.pass_over = True

        while True:
            samples = runner.run(self.every, lambda: False)
            if runner.pass_over:
                runner.flush()
                feed.end_pass()
            rows, fingerprints = runner.rows()
            extras = runner.extras()
            if isinstance(self.step, TrainStep):
                raise_device_errors(self.step, [_Outcome.of(row) for row in rows])
            if samples:
                yield self._make_records(rows, fingerprints, extras, samples)
            if runner.pass_over:
                return

    def _make_records(
        self,
        rows: list[list[float]],
        fingerprints: list[int],
        extras: list[list[float]],
        samples: list[int],
    ) -> Records:
        table = torch.tensor(rows, dtype=torch.float64)
        program = self.runner.program
        if isinstance(program, FunctionProgram):
            return Records({name: table[:, i] for i, name in enumerate(program.names)}, samples)

        columns = {name: table[:, i] for i, name in enumerate(ROW_FIELDS)}
        for name in FLAG_FIELDS:
            columns[name] = columns[name] != 0
        rates = table[:, len(ROW_FIELDS) :]
        columns["lr"] = rates.squeeze(1) if rates.shape[1] == 1 else rates
        columns["fingerprint"] = torch.tensor(fingerprints)
        part_names = self.step.objective.part_names or ()
        parts = torch.tensor(extras, dtype=torch.float64)
        for i, name in enumerate(part_columns(part_names, ())):
            columns[name] = parts[:, i]
        return Records(columns, samples)


class _Outcome(NamedTuple):
    """What a row says of its step's update."""

    skipped: bool
    updated: bool
    scale: float

    @classmethod
    def of(cls, row: list[float]) -> "_Outcome":
        return cls(row[SKIPPED] != 0, row[UPDATED] != 0, row[SCALE])


def sink(
    step: TrainStep | Callable[..., Any],
    data: Any,
    *,
    every: int = 100,
    on_uncapturable: OnUncapturable = "raise",
    verify: int = 0,
    state: Sequence[Any] = (),
    device: torch.device | str | None = None,
) -> Sink:
    """Trains with one host visit per `every` steps: `for records in hs.sink(step, data): …`.

    Each `for` is one pass. On CUDA the step is captured as graphs after a few eager ones and
    replayed. It gives what calling the step batch by batch gives; the tail of an update cycle is
    flushed with the pass's last step. The data's own passes go on.

    A function of your own must do the same work at every call, on tensors that stay where they are,
    and return its loss or a dict of numbers (as tensors). `state` names the network, optimizer and
    so on that it changes, so that a rate set by hand is seen. `device` says where it runs when
    neither they nor the data do.

    `verify=K` first runs the steps up to K replays eagerly, eagerly again and captured, compares
    every tensor bit by bit, and puts everything back.
    """
    every = whole_number("every", every, minimum=1, of_what="steps")
    one_of("on_uncapturable", on_uncapturable, ("raise", "eager"))
    check_verify(verify)
    if not callable(step):
        raise TypeError(
            f"step: expected a TrainStep or a function of a batch, got {type(step).__name__}"
        )

    if isinstance(step, TrainStep):
        _check_capturable(step)
        run_device = step.device
        feed = Feed(data, named=step.objective.loss is None, device=run_device)
        make_runner: Callable[[Feed], CapturedRunner] = partial(
            CapturedRunner.for_step, step, on_uncapturable=on_uncapturable
        )
    else:
        run_device = _find_device(device, data, state)
        feed = Feed(data, device=run_device)

        def make_runner(feed: Feed) -> CapturedRunner:
            records = RecordBuffer(RECORD_ROWS, run_device)
            graphs = GraphCache(run_device)
            return CapturedRunner(
                FunctionProgram(step, records, graphs, on_uncapturable, state), feed
            )

    if verify:
        verified_step = VerifiedStep(step, state)
        verify_replays(verified_step, feed, make_runner, run_device, replays=verify)
    return Sink(make_runner(feed), step, every, data)


def check_verify(verify: Any) -> None:
    """Raises a ValueError unless `verify` is a number of replays."""
    ok = isinstance(verify, int) and verify >= 0
    expect(ok, "verify", "a number of replays to check, or 0", verify)


def verify_replays(
    verified_step: VerifiedStep,
    feed: Feed,
    make_runner: Callable[[Feed], CapturedRunner],
    device: torch.device,
    *,
    replays: int,
) -> None:
    """verify=K, on the first batches of the data. Afterwards the feed is where it was."""
    step = verified_step.step
    if device.type == "cpu" and isinstance(step, TrainStep) and step.compiled.on:
        raise ValueError(
            "verify: expected a step that is not compiled, got compile=True: on a CPU all of it is "
            "one program, which rounds in an order of its own. Its first run is compared with the "
            "step's own, to rounding, in any case."
        )

    # Copy enough batches for so many replays.
    rng_state = rng.save()
    feed_state = feed.state_dict()
    batch_count = verification.warmup_steps(step) + replays
    batches = [verification.clone_batch(args, device) for args in islice(feed.start(), batch_count)]
    feed.load_state_dict(feed_state)
    rng.load(rng_state)

    def run_captured(batches: list[Any], after_step: Callable[[], None]) -> None:
        runner = make_runner(Feed(batches))
        for _ in batches:
            runner.run(1, lambda: False)
            after_step()
        compared = runner.program.replays
        if device.type == "cuda" and compared < replays:
            warnings.warn(
                f"verify: {compared} of {replays} replays were compared in the {len(batches)} "
                "batches there were: give more data, or a step whose first updates are not skipped",
                Notice,
                stacklevel=user_stacklevel(),
            )

    verification.verify(verified_step, batches, run_captured)


def _check_capturable(step: TrainStep) -> None:
    reason = why_not_capturable(step, step.device)
    if reason and step.device.type == "cuda":
        raise ValueError(f"sink: {reason}; call the step batch by batch otherwise")


def _find_device(
    device: torch.device | str | None, data: Any, state: Sequence[Any]
) -> torch.device:
    """Where a function runs: as it was said, or where its network or its data is."""
    if device is not None:
        return torch.device(device)
    for part in state:
        if isinstance(part, nn.Module):
            parameter = next(part.parameters(), None)
            if parameter is not None:
                return parameter.device
    data_device = getattr(getattr(data, "placement", None), "device", None)
    if isinstance(data_device, torch.device):
        return data_device
    return torch.device("cpu")
