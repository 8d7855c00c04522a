"""Where a pipeline stands, as a few integers: saved, loaded, carried over to other shards."""

from dataclasses import dataclass, replace
from typing import Any, NoReturn

from halfstep.data.pipeline.plan import Plan
from halfstep.data.pipeline.stages import Shard
from halfstep.utils.saved_state import MAX_WHOLE_NUMBER, describe_value

VERSION = 1
_NUMBERS = ("epoch", "step", "shards", "start", "start_epoch")
_OPEN_SHARD = "shard(count"  # how the line of a plan's last shard begins


@dataclass(frozen=True)
class Position:
    """`step` items of pass `epoch` are delivered; the plan says how the pass goes on."""

    plan: Plan
    epoch: int = 0
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Integers and strings, for JSON.

        `start`: items of pass `start_epoch` that an earlier sharding has delivered to all its
        shards.
        """
        shard = self.plan.last_shard()
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "step": self.step,
            "shards": shard.count if shard else 1,
            "start": shard.start if shard else 0,
            "start_epoch": self.epoch,
            "pipeline": list(self.plan.describe()),
        }

    def next_pass(self) -> "Position":
        """The start of the next pass, which all shards share from its first item on."""
        return Position(_with_last_shard(self.plan, start=0), self.epoch + 1)

    def after_finished_pass(self) -> "Position":
        """The start of the next pass where this one is over, else this position.

        A shard that has no more items while others have stays where it is: its steps say how far
        all of them are, whichever of them loads the position.
        """
        if self.step < self.plan.size:
            return self
        if _can_reshard(self.plan):
            longest_shard = _with_last_shard(self.plan, index=0)
            if longest_shard.size > self.step:
                return self
        return self.next_pass()


def load_position(plan: Plan, state: dict[str, Any]) -> Position:
    """The position that a state names, in `plan`.

    With another number of shards, the remaining items of the pass are dealt out anew, each once.
    """
    _check_state(state)
    epoch: int = state["epoch"]
    step: int = state["step"]
    shards: int = state["shards"]
    start = state["start"] if state["start_epoch"] == epoch else 0  # it belongs to one pass alone
    shard = plan.last_shard()
    if shard is None and (shards != 1 or start):
        _raise_unsharded(state, start)
    _check_same_pipeline(plan, state["pipeline"])

    # As many shards as before: the same place.
    if shards == (shard.count if shard else 1):
        position = Position(_with_last_shard(plan, start=start), epoch, step)
        size = position.plan.size
        if step > size:
            raise ValueError(f"expected a step of 0 to {size} in the position, got {step}")
        return position.after_finished_pass() if step else position

    # Another number of shards.
    assert shard is not None
    if not _can_reshard(plan):
        raise ValueError(
            "a position can go to another number of shards only where .shard(...) is the last "
            "stage before .batch(...) and nothing reorders batches: put shuffle, take and repeat "
            "before it"
        )
    delivered = start + step * plan.samples_per_item * shards
    if delivered >= shard.input_size:
        return Position(plan, epoch + 1, 0)
    return Position(_with_last_shard(plan, start=delivered), epoch, 0)


def _can_reshard(plan: Plan) -> bool:
    return bool(plan.stages) and isinstance(plan.stages[-1], Shard) and not plan.batch_stages


def _with_last_shard(plan: Plan, **changes: int) -> Plan:
    """The plan with other fields of its last shard; the same plan where nothing changes.

    `index`: another shard. `start`: items of the pass that are left out for all shards.
    """
    shard = plan.last_shard()
    if shard is None or all(getattr(shard, name) == value for name, value in changes.items()):
        return plan
    new_shard = replace(shard, **changes)  # type: ignore[arg-type]
    return replace(
        plan,
        stages=tuple(new_shard if stage is shard else stage for stage in plan.stages),
        batch_stages=tuple(new_shard if stage is shard else stage for stage in plan.batch_stages),
    )


def _check_state(state: dict[str, Any]) -> None:
    """Raises a ValueError unless the state is one of `Position.state_dict`."""
    version = state.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"expected a position of version {VERSION}, got {state.get('version')!r} "
            f"in {sorted(state)}"
        )
    missing = [name for name in (*_NUMBERS, "pipeline") if name not in state]
    if missing:
        raise ValueError(
            f"expected the state of a hs.data.Dataset, but {missing} are missing in {sorted(state)}"
        )
    for name in _NUMBERS:
        number = state[name]
        minimum = 1 if name == "shards" else 0
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if not is_whole or not minimum <= number <= MAX_WHOLE_NUMBER:
            raise ValueError(
                f"expected a whole number for {name} in the position, got {describe_value(number)}"
            )
    lines = state["pipeline"]
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ValueError(
            f"expected lines of text for pipeline in the position, got {describe_value(lines)}"
        )


def _raise_unsharded(state: dict[str, Any], start: int) -> NoReturn:
    """Raises the error for a shard's position in a pipeline without shards."""
    call = "shard(count, index)"
    for line in state["pipeline"]:
        if line.startswith(_OPEN_SHARD):
            call = line
            break
    call = call.replace("count, index", "1, 0")
    raise ValueError(
        f"the position is that of one of {state['shards']} shards, after {start} items, and this "
        f"pipeline has none. Add .{call} where .shard(...) was: the rest of the pass goes to one "
        "shard."
    )


def _check_same_pipeline(plan: Plan, saved_lines: list[str]) -> None:
    """Raises a ValueError that names the first difference to the saved pipeline."""
    lines = list(plan.describe())
    # What is left of an unsharded pass may go to shards.
    if not any(line.startswith(_OPEN_SHARD) for line in saved_lines):
        lines = [line for line in lines if not line.startswith(_OPEN_SHARD)]
    pairs = zip([*lines, "the end"], [*saved_lines, "the end"], strict=False)
    for line, saved_line in pairs:
        if line != saved_line:
            raise ValueError(
                f"expected the pipeline of the saved position, but it had {saved_line!r} where "
                f"this one has {line!r}. Build the same pipeline, or start a new pass without the "
                "position."
            )
