"""Where a pipeline stands, as a few integers: saved, loaded, and carried over to another number of shards."""

from dataclasses import dataclass, replace
from typing import Any

from halfstep.data.flow.plan import Plan
from halfstep.data.flow.stages import Shard

VERSION = 1


@dataclass(frozen=True)
class Position:
    """`step` items of pass `epoch` delivered; the plan says how the pass goes on."""

    plan: Plan
    epoch: int = 0
    step: int = 0

    def state(self) -> dict[str, Any]:
        """JSON-able. `start`: items of the pass that an earlier sharding had delivered to all its shards."""
        shard = _shard(self.plan)
        return {
            "version": VERSION, "epoch": self.epoch, "step": self.step,
            "shards": shard.count if shard else 1, "start": shard.start if shard else 0,
            "pipeline": list(self.plan.describe()),
        }  # fmt: skip


def load(plan: Plan, state: dict[str, Any]) -> Position:
    """The position in `plan`; with another number of shards, the rest of the pass is dealt out anew, each item once."""
    if state.get("version") != VERSION:
        raise ValueError(f"expected a position of version {VERSION}, got {state.get('version')!r} in {sorted(state)}")
    _check_same(plan, state["pipeline"])
    shard = _shard(plan)
    if state["shards"] == (shard.count if shard else 1):
        return Position(_started(plan, shard, state["start"]), state["epoch"], state["step"])
    if shard is None:
        raise ValueError(
            f"the position is that of one of {state['shards']} shards and this pipeline has none. "
            "Add .shard(1, 0) where .shard(...) was, so that the rest of the pass goes to one shard."
        )
    _check_can_reshard(plan, shard)
    done = state["start"] + state["step"] * max(1, plan.batch) * state["shards"]
    if done >= shard.input_size:  # that pass was over
        return Position(plan, state["epoch"] + 1, 0)
    return Position(_started(plan, shard, done), state["epoch"], 0)


def _shard(plan: Plan) -> Shard | None:
    found = [stage for stage in (*plan.stages, *plan.batch_stages) if isinstance(stage, Shard)]
    return found[-1] if found else None


def _started(plan: Plan, shard: Shard | None, start: int) -> Plan:
    """The plan with the first `start` items of the pass left out for all shards."""
    if shard is None or not start:
        return plan
    stages = tuple(replace(stage, start=start) if stage is shard else stage for stage in plan.stages)
    return replace(plan, stages=stages)


def _check_same(plan: Plan, lines: list[str]) -> None:
    for mine, saved in zip([*plan.describe(), "the end"], [*lines, "the end"], strict=False):
        if mine != saved:
            raise ValueError(
                f"expected the pipeline of the saved position, but it had {saved!r} where this one has {mine!r}. "
                "Build the same pipeline, or start a new pass without the position."
            )


def _check_can_reshard(plan: Plan, shard: Shard) -> None:
    if not plan.stages or plan.stages[-1] is not shard or plan.batch_stages:
        raise ValueError(
            "a position can go to another number of shards only where .shard(...) is the last stage before .batch(...) "
            "and nothing reorders batches: put shuffle, take and repeat before it"
        )
