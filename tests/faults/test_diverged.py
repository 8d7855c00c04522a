"""Training that has failed: told while it goes on, marked in its checkpoints, not resumed from."""

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.callbacks.checkpoint import Checkpoint
from halfstep.checkpoint import latest, listing, load, name_of, prune, save
from halfstep.checkpoint.health import Health, find_nonfinite, read_health
from halfstep.engine import Callback, Row, Run
from halfstep.engine.streaks import RECOVERED_AFTER, StreakWatch
from halfstep.experiment.training_run import load_weights
from halfstep.model import Model
from halfstep.reproduce.replay_step import last_checkpoint_until
from halfstep.step.overflow import LONG_STREAK
from tests.support.run_endings import differences, leaves_by_path

JUMP = 30  # the update with the wild learning rate
WILD_RATE = 1e7


class MaskedNet(nn.Module):
    """A buffer of −inf, as attention masks are, and one of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf, 0.0]))
        self.register_buffer("unset", torch.tensor(math.nan))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def make_data(size: int = 320) -> hs.data.Dataset:
    draw = torch.Generator().manual_seed(1)
    columns = {
        "x": torch.randn(size, 20, generator=draw),
        "y": torch.randint(0, 3, (size,), generator=draw),
    }
    return hs.data.Dataset(columns, seed=3).shuffle().batch(4)


def make_model(precision: Any = "fp32", *, wild: bool = False, **options: Any) -> Model:
    torch.manual_seed(0)
    net = MaskedNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    if wild:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        options["schedule"] = [0.1] * JUMP + [WILD_RATE] + [0.1] * 1000
    return Model(net, nn.CrossEntropyLoss(), optimizer, precision, **options)


class Poison(Callback):
    """Changes something of the run at one step, before the checkpoint of that step is saved."""

    def __init__(self, at: int, change: Callable[[Any], None]) -> None:
        self.at = at
        self.change = change

    def visit(self, run: Run) -> None:
        if run.position == self.at:
            with torch.no_grad():
                self.change(run.model)


def state_of(model: Any) -> dict[str, Any]:
    values: dict[str, Any] = next(iter(model.optimizer.state.values()))
    return values


POISONS: dict[str, Callable[[Any], Any]] = {
    "a weight is NaN": lambda m: m.net.body[0].weight[3, 4].fill_(math.nan),
    "a weight is inf": lambda m: m.net.body[2].weight[0, 0].fill_(math.inf),
    "a bias is -inf": lambda m: m.net.body[2].bias[1].fill_(-math.inf),
    "an average is NaN": lambda m: m.step.state.ema[1][0].fill_(math.nan),
    "a moment of Adam is NaN": lambda m: state_of(m)["exp_avg"][0, 0].fill_(math.nan),
    "a moment of Adam is inf": lambda m: state_of(m)["exp_avg_sq"][0, 0].fill_(math.inf),
}


# What a checkpoint knows


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize("poison", POISONS)
def test_a_lost_checkpoint_is_known_and_the_one_before_is_used(
    poison: str, old_format: bool, tmp_path: Path
) -> None:
    """Also where it was saved without health.json, as before there was one."""
    saver = Checkpoint(tmp_path, every_steps=1)
    make_model(ema=0.9).fit(
        1,
        make_data(),
        callbacks=[Poison(3, POISONS[poison]), saver],
        sink=1,
        steps_per_epoch=3,
    )
    if old_format:
        for path in listing(tmp_path):
            tree = load(path).tree
            checkpoint.disk.remove_folder(path)
            save(path, tree)
    assert [read_health(path).is_lost for path in listing(tmp_path)] == [False, False, True]
    with pytest.warns(hs.Notice) as caught:
        assert latest(tmp_path) == tmp_path / name_of(2)
    text = str(caught[0].message)
    assert text.startswith(
        f"1 checkpoint of training that had failed, {tmp_path / name_of(2)} is used instead:\n"
    )
    assert f"{name_of(3)}: inf or NaN in " in text
    assert len(caught) == 1


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_every_dtype(dtype: torch.dtype) -> None:
    def tree_of(w: Tensor) -> dict[str, Any]:
        net = {"w": w, "mask": torch.tensor(-math.inf), "count": torch.tensor(3)}
        return {"halfstep_run": 1, "step": {"net": net, "state": {"ema": [w[:0]]}}}

    finite = torch.randn(4, 3).to(dtype).t()
    assert find_nonfinite(tree_of(finite), ["w"]) == ()
    for value in (math.nan, math.inf, -math.inf):
        lost = torch.randn(4, 3)
        lost[2, 1] = value
        if torch.isfinite(lost.to(dtype).to(torch.complex64)).all():
            continue  # this dtype has no infinity
        assert find_nonfinite(tree_of(lost.to(dtype).t()), ["w"]) == ("w",)


def test_a_file_of_a_newer_halfstep_is_read(tmp_path: Path) -> None:
    content = b'{"nonfinite": ["net.w"], "temperature": 3}'
    path = save(tmp_path / name_of(1), {}, extra_files={"health.json": content})
    assert read_health(path) == Health(nonfinite=("net.w",))


def test_what_is_no_run_is_good(tmp_path: Path) -> None:
    """A tree of the user's own may hold NaN, and prune counts it."""
    for step in (1, 2):
        save(tmp_path / name_of(step), {"w": torch.tensor(math.nan)})
    assert latest(tmp_path) == tmp_path / name_of(2)
    assert prune(tmp_path, 1) == [tmp_path / name_of(1)]


def test_older_halfsteps_read_it(tmp_path: Path) -> None:
    """The manifest is as it was: health.json is an extra file, which they ignore."""
    make_model().fit(1, make_data(), callbacks=[Checkpoint(tmp_path)], steps_per_epoch=2)
    path = listing(tmp_path)[-1]
    manifest = checkpoint.verify(path)
    assert manifest.version == 1
    assert set(manifest.files) == {"tensors.safetensors", "tree.json", "health.json"}


# A wild learning rate under a loss scale: nothing but skips


def fit_wild(folder: Path, precision: str = "O2", **options: Any) -> Run:
    saver = options.pop("saver", None) or Checkpoint(folder, every_steps=5, keep=3)
    return make_model(precision, wild=True, compile=options.pop("compile", False)).fit(
        1, make_data(), callbacks=[saver], resume="auto", **options
    )


@pytest.mark.parametrize(
    ("compiled", "sink"), [(False, 1), (False, 7), (False, None), (True, 7), (True, None)]
)
def test_a_streak_is_told_once_and_the_weights_before_it_stay(
    compiled: bool, sink: int | None, tmp_path: Path
) -> None:
    """80 steps, the last 48 skipped: in fp16 no gradient is finite any more after the jump.

    Compiled: the whole step is one program, and rows come many at a time, as on a GPU.
    """
    with pytest.warns(hs.Notice) as caught:
        run = fit_wild(tmp_path, sink=sink, compile=compiled)
    messages = [str(w.message) for w in caught if "in a row" in str(w.message)]
    assert len(messages) == 1
    assert "updates in a row were skipped since step 33, because gradients were" in messages[0]
    assert run.position == 80

    # Those that hold the weights after the jump do not count, however few skips they had seen.
    steps = [checkpoint.step_of(path) for path in listing(tmp_path)]
    assert steps == [20, 25, 30, 80]  # keep=3, and the newest of the failed ones
    with pytest.warns(hs.Notice, match="48 updates in a row had been skipped"):
        assert latest(tmp_path) == tmp_path / name_of(30)


def test_right_after_the_jump_weights_look_good_and_are_known_later(tmp_path: Path) -> None:
    """A checkpoint of every step: that of the jump itself has no skip before it."""
    saver = Checkpoint(tmp_path, every_steps=1, keep=3)
    with pytest.warns(hs.Notice, match="in a row"):
        fit_wild(tmp_path, saver=saver, steps_per_epoch=32 + LONG_STREAK + 5)
    assert [checkpoint.step_of(path) for path in listing(tmp_path)] == [30, 31, 47]
    with pytest.warns(hs.Notice, match="1 checkpoint of training that had failed"):
        assert latest(tmp_path) == tmp_path / name_of(31)


def test_checkpoints_of_the_same_weights_have_failed_with_them(tmp_path: Path) -> None:
    """Nothing is wrong with the one of step 2 alone: a later one tells."""
    healths = [
        Health(updates=1),
        Health(updates=2),
        Health(updates=2, skips_in_a_row=3),
        Health(updates=2, skips_in_a_row=12, stalled=True),
    ]
    for step, health in enumerate(healths, 1):
        save(tmp_path / name_of(step), {}, extra_files={"health.json": health.encode()})
    with pytest.warns(hs.Notice, match="000002: training failed with these very weights"):
        assert latest(tmp_path) == tmp_path / name_of(1)
    checkpoint.disk.remove_folder(tmp_path / name_of(4))
    with warnings.catch_warnings(action="error"):
        assert latest(tmp_path) == tmp_path / name_of(3)


@pytest.mark.parametrize("every_steps", [3, 5])
def test_with_keep_1_the_one_before_the_streak_stays(every_steps: int, tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path, every_steps=every_steps, keep=1)
    with pytest.warns(hs.Notice, match="in a row"):
        fit_wild(tmp_path, saver=saver)
    steps = [checkpoint.step_of(path) for path in listing(tmp_path)]
    assert steps == [32 // every_steps * every_steps, 80]


def test_a_resumed_run_replaces_those_of_the_failed_one(tmp_path: Path) -> None:
    """With another rate it goes on from before the jump, past the steps of the failed one."""
    with pytest.warns(hs.Notice, match="in a row"):
        fit_wild(tmp_path)
    healed = make_model("O2", wild=True, schedule=None)
    healed.schedule = [0.1] * 1000
    with pytest.warns(hs.Notice, match="failed"):
        run = healed.fit(
            2,
            make_data(),
            callbacks=[Checkpoint(tmp_path, every_steps=5, keep=3)],
            resume="auto",
        )
    assert run.resumed == str(tmp_path / name_of(30))
    steps = [checkpoint.step_of(path) for path in listing(tmp_path)]
    assert steps == [150, 155, 160]
    with warnings.catch_warnings(action="error"):
        assert latest(tmp_path) == tmp_path / name_of(160)


def test_the_failed_ones_say_nothing_about_the_run_that_goes_on(tmp_path: Path) -> None:
    """Stopped at the number of updates with which the failed run had skipped the rest."""
    with pytest.warns(hs.Notice, match="in a row"):
        fit_wild(tmp_path)
    failed = read_health(tmp_path / name_of(80)).updates
    before = read_health(tmp_path / name_of(30)).updates
    assert failed is not None
    assert before is not None
    stop_at = 30 + failed - before

    healed = make_model("O2", wild=True)
    healed.schedule = [0.1] * 1000
    with pytest.warns(hs.Notice, match="failed"):
        run = healed.fit(
            1,
            make_data(),
            callbacks=[Checkpoint(tmp_path, every_steps=50, keep=3)],
            resume="auto",
            steps_per_epoch=stop_at,
        )
    assert run.position == stop_at
    newest = tmp_path / name_of(stop_at)
    assert read_health(newest).updates == failed
    assert listing(tmp_path)[-1] == newest
    with warnings.catch_warnings(action="error"):
        assert latest(tmp_path) == newest


class StopAt(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def visit(self, run: Run) -> None:
        if run.position == self.at:
            run.stop("the test")


def test_a_search_for_the_scale_is_no_failure(tmp_path: Path) -> None:
    """A scale that begins too large: the skips are not told, and are resumed from exactly."""

    def fit(folder: Path, stop_at: int) -> dict[str, Any]:
        scale = hs.DynamicScale(init=2.0**24, interval=2000)
        model = make_model(hs.Precision("O2", scale=scale))
        callbacks = [StopAt(stop_at), Checkpoint(folder, every_steps=1)]
        with warnings.catch_warnings(action="error"):
            model.fit(1, make_data(), callbacks=callbacks, resume="auto", sink=1)
            newest = latest(folder)
        assert newest is not None
        return leaves_by_path(load(newest).tree)

    expected = fit(tmp_path / "whole", 12)
    assert fit(tmp_path / "cut", 2)[".step.state.streak"] == 2
    end = fit(tmp_path / "cut", 12)
    assert end[".step.state.skips"] > 2
    assert differences(end, expected) == []


def test_nothing_but_skips_from_the_start_is_gone_on_from(tmp_path: Path) -> None:
    """There is no better one: the newest, not the beginning."""
    scale = hs.DynamicScale(init=2.0**100, max_skips=200)
    model = make_model(hs.Precision("O2", scale=scale))
    with pytest.warns(hs.Notice, match="updates in a row were skipped since step 1,"):
        model.fit(
            1, make_data(), callbacks=[Checkpoint(tmp_path, every_steps=5)], steps_per_epoch=20
        )
    with warnings.catch_warnings(action="ignore"):
        assert latest(tmp_path) == tmp_path / name_of(20)


# nonfinite="raise": the error's own checkpoint


def poisoned_data(value: float = math.nan) -> hs.data.Dataset:
    """A NaN in the samples of one batch, always the sixth."""
    data = {"x": torch.randn(80, 20), "y": torch.randint(0, 3, (80,))}
    data["x"][22] = value
    return hs.data.Dataset(data).batch(4)


@pytest.mark.parametrize("every_steps", [1, 2, None])
def test_the_errors_own_checkpoint_is_not_resumed_from(
    every_steps: int | None, tmp_path: Path
) -> None:
    """Nor the one of the step before, which holds the same weights."""
    saver = Checkpoint(tmp_path, every_steps=every_steps)

    def fit() -> None:
        make_model().fit(1, poisoned_data(), callbacks=[saver], resume="auto")

    with pytest.raises(hs.NonFiniteError, match="step 6: non-finite gradient"):
        fit()
    newest = listing(tmp_path)[-1]
    assert newest.name == name_of(6)
    health = read_health(newest)
    assert health.error is not None
    assert health.error.startswith("NonFiniteError: step 6: non-finite gradient in ")
    assert not health.nonfinite
    with pytest.warns(hs.Notice, match="step-000000006: the run ended there: NonFiniteError"):
        assert latest(tmp_path) == (tmp_path / name_of(4) if every_steps else None)
    if every_steps is None:
        with (
            pytest.warns(
                hs.Notice, match="1 checkpoint of training that had failed, no good one is left"
            ),
            pytest.raises(FileExistsError, match="only checkpoints of training that had failed"),
        ):
            fit()
        return

    # The run again gets as far as the error and no further, and goes on when the cause is gone.
    with (
        pytest.warns(hs.Notice, match="is used instead"),
        pytest.raises(hs.NonFiniteError, match="step 6"),
    ):
        fit()
    with pytest.warns(hs.Notice, match="is used instead"):
        run = make_model().fit(1, poisoned_data(0.0), callbacks=[saver], resume="auto")
    assert run.resumed == str(tmp_path / name_of(4))
    assert run.position == 20


def test_other_errors_are_resumed_from(tmp_path: Path) -> None:
    class Stop(Callback):
        def step(self, run: Run, row: Row) -> None:
            if row.global_step == 3:
                raise LookupError

    saver = Checkpoint(tmp_path, every_steps=1)
    with pytest.raises(LookupError):
        make_model().fit(1, make_data(), callbacks=[Stop(), saver], sink=1)
    with warnings.catch_warnings(action="error"):
        newest = latest(tmp_path)
    assert newest is not None
    assert newest == listing(tmp_path)[-1]


# Lost weights


@pytest.mark.parametrize("best", [None, "loss"])
@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_good_one_is_never_pruned(keep: int, best: str | None, tmp_path: Path) -> None:
    """Fifty saves after the weights became NaN, where nobody stops: nonfinite="ignore"."""
    model = make_model(nonfinite="ignore")
    saver = Checkpoint(tmp_path, every_steps=1, keep=keep, best=best)
    poison = Poison(10, POISONS["a weight is NaN"])
    with pytest.warns(hs.Notice) as caught:
        model.fit(
            1,
            make_data(),
            valid=make_data(8),
            callbacks=[poison, saver],
            sink=1,
            steps_per_epoch=60,
        )
    told = [w for w in caught if "the loss is nan at step 11, and the up" in str(w.message)]
    assert len(told) == 1
    steps = [checkpoint.step_of(path) for path in listing(tmp_path)]
    assert [step for step in steps if step < 10] == list(range(10 - keep, 10))
    assert [step for step in steps if step >= 10] == [60]
    with pytest.warns(hs.Notice, match="1 checkpoint of training that had failed"):
        assert latest(tmp_path) == tmp_path / name_of(9)


def test_without_a_good_one_the_newest_stay(tmp_path: Path) -> None:
    model = make_model(nonfinite="ignore")
    with pytest.warns(hs.Notice, match="the loss is nan"):
        model.fit(
            1,
            make_data(),
            callbacks=[Poison(1, POISONS["a weight is NaN"]), Checkpoint(tmp_path, every_steps=1)],
            sink=1,
        )
    assert [checkpoint.step_of(path) for path in listing(tmp_path)] == list(range(76, 81))
    with pytest.warns(
        hs.Notice, match="5 checkpoints of training that had failed, no good one is left"
    ):
        assert latest(tmp_path) is None


def test_one_that_is_named_is_loaded_with_a_notice(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path / "a", every_steps=1)
    model = make_model(nonfinite="ignore")
    poison = Poison(3, POISONS["a weight is NaN"])
    model.fit(1, make_data(), callbacks=[poison, saver], sink=1, steps_per_epoch=3)
    lost = tmp_path / "a" / name_of(3)
    words = "step-000000003: inf or NaN in body.0.weight.* It is used all the same"
    again = make_model(nonfinite="ignore")
    with pytest.warns(hs.Notice, match=words):
        again.load(lost)
    assert again.net.body[0].weight.isnan().any()
    with pytest.warns(hs.Notice, match=words):
        load_weights(make_model(), lost)
    with pytest.warns(hs.Notice) as caught:
        run = again.fit(2, make_data(), resume=lost, steps_per_epoch=3)
    messages = [str(w.message) for w in caught]
    assert re.search(words, messages[0])
    assert messages[1].startswith("the loss is nan at step 4")
    assert run.position == 6

    # A folder means its newest good one, for every reader.
    for read in (
        lambda: again.load(tmp_path / "a"),
        lambda: load_weights(again, tmp_path / "a"),
        lambda: again.fit(2, make_data(), resume=tmp_path / "a", steps_per_epoch=3),
    ):
        with pytest.warns(hs.Notice, match=f"failed, .*{name_of(2)} is used instead"):
            read()
        assert all(p.isfinite().all() for p in again.net.parameters())
    assert last_checkpoint_until(tmp_path / "a", 3) == tmp_path / "a" / name_of(2)


# The notices


def row(step: int, *, loss: float = 1.0, skipped: bool = False, updated: bool = True) -> Row:
    return Row(
        epoch=1,
        step=step,
        global_step=step,
        samples=1,
        loss=loss,
        cycle_loss=loss,
        lr=0.1,
        scale=1.0,
        skipped=skipped,
        grad_norm=1.0,
        updated=updated and not skipped,
    )


def notices_of(rows: list[Row], visit_every: int) -> list[str]:
    watch = StreakWatch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, one in enumerate(rows, 1):
            watch.take(one)
            if i % visit_every == 0:
                watch.warn()
        watch.warn()
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("visit_every", [1, 7, 1000])
def test_one_notice_for_each_streak(visit_every: int) -> None:
    kinds = {
        ".": {},
        "s": {"skipped": True},
        "n": {"loss": math.nan},
        "i": {"loss": math.inf, "skipped": True},
        "m": {"updated": False},
    }

    def count(text: str) -> int:
        rows = [row(i, **kinds[kind]) for i, kind in enumerate(text, 1)]
        return len(notices_of(rows, visit_every))

    recovery = "." * RECOVERED_AFTER
    assert count("." * 100) == 0
    assert count("s" * (LONG_STREAK - 1) + ".") == 0
    assert count("s" * 40) == 1
    assert count("i" * 40) == 1  # the loss of a skipped step may be anything
    assert count("mmms" * 40) == 1  # cycles of four: their first batches move nothing
    assert count("s." * 40) == 0
    assert count("n" * 40) == 1
    if visit_every == 1:
        assert count("n") == 1
        assert count("n.n.n.n") == 1
        assert count("s" * 12 + "...." + "s" * 12) == 1
        assert count("s" * 12 + recovery + "s" * 12) == 2
        assert count("n" + recovery + "n") == 2
        assert count("n" + "s" * 12) == 2
