"""Whatever the data is, a run that is stopped anywhere goes on with equal bits, or says it cannot.

Each run trains with dropout and augmentation, skips its first update, accumulates two batches, and
evaluates within a pass and at its end.
"""

import re
import signal
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.engine import Callback, Row, Run
from halfstep.errors import Notice
from tests.support.data_kinds import (
    ANNOUNCED,
    BATCH,
    EXACT,
    PASS,
    SIZE,
    AsDicts,
    AugmentedByOwnGenerator,
    add_noise,
    loader,
    make_columns,
    plain,
)
from tests.support.killed_run import seed_all
from tests.support.run_endings import differences, leaves_by_path

EPOCHS = 3
EVALUATION = "during the evaluation at a pass's end"

# By the number of steps that were done. Passes have 7 steps; step 2 is the skipped update.
PLACES: dict[str, int] = {
    "after the first step, inside a cycle": 1,
    "just after a skipped step": 2,
    "in the middle of a pass, inside a cycle": 3,
    "before the last step of a pass": 6,
    "at a pass's end": 7,
    EVALUATION: 7,
    "in the second pass": 10,
    "at the third pass's first step": 15,
    "in the third pass": 18,
}

FAST_KINDS = (
    "Dataset, workers",
    "DataLoader",
    "DataLoader, workers",
    "DataLoader, own generators",
    "generator function",
)
FAST_PLACES = ("just after a skipped step", EVALUATION, "in the third pass")


class Net(nn.Module):
    """Dropout, and a stop inside an evaluation if one is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))
        self.batches_until_signal = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.batches_until_signal:
            self.batches_until_signal -= 1
            if not self.batches_until_signal:
                signal.raise_signal(signal.SIGTERM)
        out: Tensor = self.layers(x)
        return out


class CopyEnd(Callback):
    """The run's whole state at its end; a SIGTERM inside the evaluation at a step."""

    last = True
    tree: Any = None

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at

    def step(self, run: Run, row: Row) -> None:
        if row.global_step == self.stop_at:
            run.model.net.batches_until_signal = 2

    def end(self, run: Run) -> None:
        self.tree = run.model.snapshot()


def dict_loss(net: Net, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(net(batch["x"]), batch["y"])


def train(
    folder: Path,
    data: Any,
    *,
    resume: Any = None,
    seed: int = 0,
    stop_in_evaluation_at: int = 0,
    steps_per_epoch: int | None = None,
) -> dict[str, Any]:
    """All leaves of the run's state at its end."""
    seed_all(0)
    net = Net()
    takes_dicts = isinstance(getattr(data, "dataset", None), AsDicts)
    options = {}
    if takes_dicts:
        options = {"forward": dict_loss, "count": lambda batch: len(batch["y"])}
    model = hs.Model(
        net,
        None if takes_dicts else nn.CrossEntropyLoss(),
        torch.optim.AdamW(net.parameters(), lr=0.02),
        hs.Precision("O2", scale=hs.DynamicScale(init=2.0**40, interval=4, backoff=2.0**-30)),
        accumulate=2,
        ema=0.9,
        **options,
    )
    seed_all(seed)
    end = CopyEnd(stop_in_evaluation_at)
    saver = hs.Checkpoint(folder, every_steps=1, keep=100)
    history = hs.History()
    valid = loader(
        AsDicts() if takes_dicts else AugmentedByOwnGenerator(),
        batch_size=10,
        shuffle=True,
        generator=torch.Generator().manual_seed(12),
    )
    model.fit(
        EPOCHS,
        data,
        valid=valid,
        valid_every_steps=5,
        callbacks=[saver, history, end],
        steps_per_epoch=steps_per_epoch,
        resume=resume,
    )
    return leaves_by_path(end.tree)


@cache
def uninterrupted(kind: str) -> tuple[Path, dict[str, Any]]:
    """The folder with a checkpoint of every step, and the end."""
    folder = Path(mkdtemp(prefix="halfstep-resume-"))
    with warnings.catch_warnings(action="ignore", category=Notice):
        return folder, train(folder, build(kind))


def build(kind: str) -> Any:
    return EXACT[kind]() if kind in EXACT else ANNOUNCED[kind][0]()


def resumed(kind: str, place: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The end of a run that was stopped there and went on with new objects, and its notices."""
    whole, _ = uninterrupted(kind)
    step = PLACES[place]
    if kind == "Dataset, repeat" and step % PASS == 0:
        step = 2 * SIZE // BATCH  # a pass has 13 steps there
    source = whole / checkpoint.name_of(step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Notice)
        if place == EVALUATION:
            with pytest.raises(SystemExit):
                train(folder / "stopped", build(kind), stop_in_evaluation_at=step)
            source = folder / "stopped" / checkpoint.name_of(step)
            assert checkpoint.load(source).tree["loop"]["pending"]
        end = train(folder / "resumed", build(kind), resume=source, seed=99)
    return end, [str(warning.message) for warning in caught]


def matrix(kinds: Any) -> list[Any]:
    cases = []
    for kind in kinds:
        for place in PLACES:
            is_fast = kind in FAST_KINDS and place in FAST_PLACES
            marks = () if is_fast else pytest.mark.slow
            cases.append(pytest.param(kind, place, id=f"{kind}-{place}", marks=marks))
    return cases


def test_the_run_skips_its_first_update_and_no_other() -> None:
    _, end = uninterrupted("Dataset, shuffle")
    assert end[".step.state.skips"] == 1
    assert end[".step.state.steps"] == EPOCHS * PASS
    before = checkpoint.load(uninterrupted("Dataset, shuffle")[0] / checkpoint.name_of(2)).tree
    assert before["step"]["state"]["skips"] == 1


@pytest.mark.parametrize(("kind", "place"), matrix(EXACT))
def test_a_stopped_run_ends_with_equal_bits(kind: str, place: str, tmp_path: Path) -> None:
    end, _ = resumed(kind, place, tmp_path)
    assert differences(end, uninterrupted(kind)[1]) == []


@pytest.mark.filterwarnings("ignore:.* cannot seek")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "DataLoader" else pytest.mark.slow) for kind in EXACT],
)
def test_epochs_that_end_within_a_pass(kind: str, tmp_path: Path) -> None:
    """The next epoch goes on in the data, and so does a resumed one."""
    expected = train(tmp_path / "whole", build(kind), steps_per_epoch=5)
    for step in (5, 8, 10):
        source = tmp_path / "whole" / checkpoint.name_of(step)
        folder = tmp_path / str(step)
        end = train(folder, build(kind), steps_per_epoch=5, resume=source, seed=99)
        assert differences(end, expected) == []


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_any_number_of_workers_trains_alike(tmp_path: Path) -> None:
    """With dropout, which draws from the generator of the process."""

    def end(workers: int) -> dict[str, Any]:
        data = plain().map(add_noise, "x").shuffle().batch(BATCH).workers(workers)
        return train(tmp_path / str(workers), data)

    without = end(0)
    for workers in (1, 4):
        assert differences(end(workers), without) == []


@pytest.mark.parametrize(("kind", "place"), matrix(ANNOUNCED))
def test_what_cannot_be_equal_is_announced(kind: str, place: str, tmp_path: Path) -> None:
    _, notices = resumed(kind, place, tmp_path)
    assert any(re.search(ANNOUNCED[kind][1], notice) for notice in notices), notices


@pytest.mark.parametrize("kind", ANNOUNCED)
def test_it_is_announced_before_anything_is_stopped(kind: str, tmp_path: Path) -> None:
    with pytest.warns(Notice, match=ANNOUNCED[kind][1]):
        train(tmp_path, build(kind))


@pytest.mark.parametrize("part", ["began", "generators"])
@pytest.mark.parametrize("value", ["a text", 7, torch.zeros(3, dtype=torch.uint8)])
def test_a_changed_state_of_a_generator_is_refused_by_name(
    part: str, value: Any, tmp_path: Path
) -> None:
    whole, _ = uninterrupted("DataLoader, generator=")
    tree = checkpoint.load(whole / checkpoint.name_of(10)).tree
    assert isinstance(tree["feed"][part]["loader"], Tensor)
    tree["feed"][part]["loader"] = value
    source = tmp_path / "changed" / checkpoint.name_of(10)
    checkpoint.save(source, tree)
    with pytest.raises(ValueError, match=rf"feed\.{part}\.loader: .*Nothing was loaded"):
        train(tmp_path / "resumed", build("DataLoader, generator="), resume=source)


class Seekable:
    """A loader with a state of its own, as torchdata's, which notes what it gave."""

    def __init__(self) -> None:
        self.position = 0
        self.given: list[int] = []

    def __len__(self) -> int:
        return PASS

    def __iter__(self) -> Iterator[Any]:
        x, y = make_columns()
        while self.position < PASS:
            rows = slice(self.position * BATCH, (self.position + 1) * BATCH)
            self.position += 1
            self.given.append(self.position)
            yield x[rows], y[rows]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.mark.filterwarnings("ignore:.* cannot seek")
@pytest.mark.parametrize("make_data", [Seekable, EXACT["DataLoader"]])
def test_the_batch_of_a_failed_step_comes_again(make_data: Any, tmp_path: Path) -> None:
    """The loader has given it, but nothing was trained on it."""
    seen: list[Tensor] = []

    def fit(fails_at: int, resume: Any = None) -> None:
        seed_all(0)
        net = nn.Sequential(nn.Linear(6, 3))

        def forward(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            seen.append(y)
            if len(seen) == fails_at:
                raise LookupError("a mistake")
            return nn.functional.cross_entropy(net(x), y)

        model = hs.Model(net, None, torch.optim.SGD(net.parameters(), lr=0.1), forward=forward)
        model.fit(1, make_data(), callbacks=[hs.Checkpoint(tmp_path)], resume=resume)

    with pytest.raises(LookupError):
        fit(fails_at=4)
    fit(fails_at=-1, resume="auto")
    assert len(seen) == PASS + 1
    assert torch.equal(seen[3], seen[4])
    assert torch.equal(torch.cat(seen[:3] + seen[4:]).sort()[0], make_columns()[1].sort()[0])
