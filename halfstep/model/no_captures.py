"""What a Model uses where the folder engine/captured is not there: everything runs eagerly."""

from typing import Any

from halfstep.engine.feed import Feed

REASON = "the folder halfstep/engine/captured is not there"


class NoCaptures:
    """The methods of ModelCaptures, for eager steps, evaluations and predictions."""

    def __init__(self, mode: bool | str, verify: int) -> None:
        if mode is True or verify:
            raise RuntimeError(f"capture=True and verify= need captured steps: {REASON}")
        self.mode = False

    def training_runner(self, step: Any, feed: Feed, steps: int | None) -> None:
        """None: the step runs eagerly."""

    def eval_runner(self, eval_step: Any, metrics: Any, labels: Any, *, set_name: str = "") -> None:
        """None: evaluations run eagerly."""

    def predict_runner(self) -> None:
        """None: predictions run eagerly."""

    def make_feed(self, data: Any, *, named: bool) -> Feed:
        return Feed(data, named=named)

    def describe(self, step: Any) -> str:
        return f"eager, step by step: {REASON}"
