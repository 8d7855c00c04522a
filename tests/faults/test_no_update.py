"""A fit that made no update at all says so when it ends, however short it was."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(64) % 3


def make_model(precision: Any = "O2", **options: Any) -> hs.Model:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hs.Model(net, nn.CrossEntropyLoss(), optimizer, precision, **options)


def with_nan(rows: slice) -> Tensor:
    x = X.clone()
    x[rows] = math.nan
    return x


@pytest.mark.parametrize("precision", ["O1", "O2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_fit_of_nothing_but_skips_says_so(precision: str, accumulate: int) -> None:
    model = make_model(precision, accumulate=accumulate)
    before = model.net.state_dict()["weight"].clone()
    with pytest.warns(hs.Notice) as caught:
        run = model.fit(with_nan(slice(None)), Y, epochs=2, batch_size=16)
    count = 8 // accumulate
    messages = [w for w in caught if "no update was made" in str(w.message)]
    assert [str(w.message).partition(" of this")[0] for w in messages] == [
        f"no update was made: {count} updates"
    ]
    assert messages[0].filename == __file__  # the line that called fit
    assert run.skipped == count
    assert torch.equal(model.net.state_dict()["weight"], before)


def test_one_update_is_enough() -> None:
    with warnings.catch_warnings(action="error"):
        run = make_model().fit(with_nan(slice(16, 64)), Y, epochs=1, batch_size=16, shuffle=False)
    assert run.skipped == 3


def test_a_streak_that_was_told_is_not_told_twice() -> None:
    with pytest.warns(hs.Notice) as caught:
        make_model().fit(with_nan(slice(None)), Y, epochs=4, batch_size=16)
    messages = [str(w.message) for w in caught]
    assert sum("updates in a row were skipped" in message for message in messages) == 1
    assert not any("no update was made" in message for message in messages)


def test_a_run_that_was_stopped_is_not_at_its_end() -> None:
    """A checkpoint goes on from here, and the search for the loss scale with it."""
    stop = hs.Lambda(visit=lambda run: run.stop("enough"))
    with warnings.catch_warnings(action="error"):
        make_model().fit(with_nan(slice(None)), Y, epochs=2, batch_size=16, callbacks=[stop])
