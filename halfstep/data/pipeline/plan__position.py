"""Where a pipeline stands, as a few integers: saved, loaded, and carried over to another number of shards."""

from dataclasses import dataclass, replace
from typing import Any

from halfstep.data.pipeline.plan import Plan
from halfstep.data.pipeline.stages import Shard

VERSION = 1
_NUMBERS = ("epoch", "step", "shards", "start", "start_epoch")


@dataclass(frozen=True)
class Position:
    """`step` items of pass `epoch` delivered; the plan says how the pass goes on."""

    plan: Plan
    epoch: int = 0
    step: int = 0

    def state(self) -> dict[str, Any]:
        """JSON-able. `start`: items of pass `start_epoch` that an earlier sharding had delivered to all its shards."""
        shard = self.plan.last_shard()
        return {
            "version": VERSION, "epoch": self.epoch, "step": self.step,
            "shards": shard.count if shard else 1, "start": shard.start if shard else 0, "start_epoch": self.epoch,
            "pipeline": list(self.plan.describe()),
        }  # fmt: skip

    def next(self) -> "Position":
        """The start of the next pass, which all shards share from its first item on."""
        return Position(_dealt(self.plan, start=0), self.epoch + 1)

    def settled(self) -> "Position":
        """The next pass where this one is over. A shard that has no more while others have stays: its steps say how
        far they all are, whoever loads them."""
        over = self.step >= self.plan.size
        others = _can_reshard(self.plan) and _dealt(self.plan, index=0).size > self.step
        return self.next() if over and not others else self


def load(plan: Plan, state: dict[str, Any]) -> Position:
    """The position in `plan`; with another number of shards, the rest of the pass is dealt out anew, each item once."""
    epoch, step, shards, start = _checked(state)
    shard = plan.last_shard()
    if shard is None and (shards != 1 or start):
        called = next(
            (line for line in state["pipeline"] if line.startswith("shard(count")),
            "shard(count, index)",
        )
        raise ValueError(
            f"the position is that of one of {shards} shards, after {start} items, and this pipeline has none. Add "
            f".{called.replace('count, index', '1, 0')} where .shard(...) was: the rest of the pass goes to one shard."
        )
    _check_same(plan, state["pipeline"])
    if shards == (shard.count if shard else 1):
        return _same(Position(_dealt(plan, start=start), epoch, step))
    assert shard is not None
    if not _can_reshard(plan):
        raise ValueError(
            "a position can go to another number of shards only where .shard(...) is the last stage before .batch(...) "
            "and nothing reorders batches: put shuffle, take and repeat before it"
        )
    done = start + step * max(1, plan.batch) * shards
    if done >= shard.input_size:  # that pass was over
        return Position(plan, epoch + 1, 0)
    return Position(_dealt(plan, start=done), epoch, 0)


def _same(here: Position) -> Position:
    if here.step > here.plan.size:
        raise ValueError(
            f"expected a step of 0 to {here.plan.size} in the position, got {here.step}"
        )
    return here.settled() if here.step else here


def _can_reshard(plan: Plan) -> bool:
    return bool(plan.stages) and isinstance(plan.stages[-1], Shard) and not plan.batch_stages


def _dealt(plan: Plan, **changes: int) -> Plan:
    """The plan with its last shard changed: another index, or items of the pass left out for all shards."""
    shard = plan.last_shard()
    if shard is None or all(getattr(shard, name) == value for name, value in changes.items()):
        return plan
    changed = replace(shard, **changes)  # type: ignore[arg-type]
    return replace(
        plan,
        stages=tuple(changed if stage is shard else stage for stage in plan.stages),
        batch_stages=tuple(changed if stage is shard else stage for stage in plan.batch_stages),
    )


def _checked(state: dict[str, Any]) -> tuple[int, int, int, int]:
    """Epoch, step, shards, and the items left out of that epoch."""
    if state.get("version") != VERSION:
        raise ValueError(
            f"expected a position of version {VERSION}, got {state.get('version')!r} in {sorted(state)}"
        )
    lacking = [name for name in (*_NUMBERS, "pipeline") if name not in state]
    if lacking:
        raise ValueError(
            f"expected the state of a hs.data.Dataset, but {lacking} are missing in {sorted(state)}"
        )
    for name in _NUMBERS:
        if not isinstance(state[name], int) or state[name] < (name == "shards"):
            raise ValueError(
                f"expected a whole number for {name} in the position, got {state[name]!r}"
            )
    start = (
        state["start"] if state["start_epoch"] == state["epoch"] else 0
    )  # it belongs to one pass alone
    return state["epoch"], state["step"], state["shards"], start


def _check_same(plan: Plan, lines: list[str]) -> None:
    here = list(plan.describe())
    if not any(
        line.startswith("shard(count") for line in lines
    ):  # a whole pipeline's rest may go to shards
        here = [line for line in here if not line.startswith("shard(count")]
    for mine, saved in zip([*here, "the end"], [*lines, "the end"], strict=False):
        if mine != saved:
            raise ValueError(
                f"expected the pipeline of the saved position, but it had {saved!r} where this one has {mine!r}. "
                "Build the same pipeline, or start a new pass without the position."
            )
