"""Validation data: one data set, or several by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from halfstep.engine import Feed
from halfstep.engine.evaluate import EMPTY_DATA_ADVICE
from halfstep.engine.feed import is_data_set
from halfstep.engine.run import score_name
from halfstep.metrics.metric_group import is_valid_name
from halfstep.utils.text import write_line

ONE_SET = ""  # the name of the only data set, which stands in no score

# Scores of a data set; None when `stop` cut the evaluation short.
EvaluateFeed = Callable[[str, Feed, Callable[[], bool]], dict[str, Any] | None]


def named_sets(owner: str, data: Any) -> dict[str, Any]:
    """Data sets by name: the entries of a dict of them, or the only one as ONE_SET."""
    if isinstance(data, list | tuple) and data and all(map(is_data_set, data)):
        raise TypeError(
            write_line(
                f"{owner}: several data sets are given by name, got a {type(data).__name__} of "
                f"{len(data)}",
                '{"clean": first, "noisy": second}',
            )
        )
    if not isinstance(data, Mapping):
        return {ONE_SET: data}
    if not data:
        raise ValueError(f"{owner}: expected data sets by name, got an empty dict")
    columns = [name for name, value in data.items() if isinstance(value, Tensor | np.ndarray)]
    if columns:
        raise TypeError(
            f"{owner}: expected data, or a dict of data sets by name, got a dict of tensors "
            f"({', '.join(map(repr, columns))}): one batch, or columns. Make them a data set: "
            "hs.data.Dataset({…}).batch(64)"
        )
    for name in data:
        if not is_valid_name(name):
            raise ValueError(
                f"{owner}: expected names of data sets of letters, digits and _ . @ - (they name "
                f"columns), got {name!r}"
            )
    return dict(data)


def score_names(
    owner: str, set_names: Sequence[str], metric_names: Sequence[str]
) -> tuple[str, ...]:
    """The scores that are known before the first evaluation: of each set the loss and the metrics.

    A ValueError where two of them would have one name.
    """
    names: dict[str, str] = {}
    for set_name in set_names:
        for metric_name in dict.fromkeys(["loss", *metric_names]):
            name = score_name(set_name, metric_name)
            if name in names:
                raise ValueError(
                    f"{owner}: {name!r} would be a score of two data sets, {names[name]!r} and "
                    f"{set_name!r}; give one of them another name"
                )
            names[name] = set_name
    return tuple(names)


def evaluate_sets(
    feeds: Mapping[str, Feed], evaluate_feed: EvaluateFeed, stop: Callable[[], bool]
) -> dict[str, Any] | None:
    """The scores of all data sets, by names like `clean_acc`; None when `stop` cut them short."""
    all_scores: dict[str, Any] = {}
    for set_name, feed in feeds.items():
        scores = evaluate_feed(set_name, feed, stop)
        if scores is None:
            return None
        for name, score in scores.items():
            all_scores[score_name(set_name, name)] = score
    return all_scores


def check_not_empty(feeds: Mapping[str, Feed]) -> None:
    """Refuses validation data without batches, as far as that is known."""
    for set_name, feed in feeds.items():
        if feed.size == 0:
            where = f"valid: {set_name!r}" if set_name else "valid"
            raise ValueError(f"{where}: expected at least one batch, got none; {EMPTY_DATA_ADVICE}")
