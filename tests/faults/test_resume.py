"""A checkpoint decides the run, leaf by leaf; errors lose nothing; changes are noticed."""

import re
import shutil
import warnings
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.callbacks.checkpoint import Checkpoint
from halfstep.callbacks.history import History, Lambda
from halfstep.callbacks.plateau import EarlyStopping
from halfstep.engine import Run
from halfstep.model import Model
from tests.support.killed_run import build_model, seed_all, train_data
from tests.support.run_endings import (
    RaisesAt,
    Snapshots,
    differences,
    leaves_by_path,
    train_and_log,
    train_model,
)

# every leaf decides, or says why it does not

# what changes only itself, and why it is in the checkpoint
INFORMATIONAL = {
    ".step.state.steps": "for messages, and for the rhythm of fingerprints",
    ".step.state.skips": "a count for the user",
    ".step.state.streak": "decides when max_skips came in a row",
    ".step.state.bad": "names for a message",
    ".step.state.halted": "decides where the device decides; here the host does",
    ".step.state.cycle.buffers.*": "decides when the open cycle overflows",
    ".step.optimizer.param_groups.0.lr": "the schedule decides",
    ".step.optimizer.param_groups.0.foreach": "the same numbers by another route",
    ".step.optimizer.param_groups.0.decoupled_weight_decay": "AdamW sets it itself",
    ".loop.epochs": "for replay and diff, which rebuild the run",
    ".loop.history.*": "the past, for the user",
    ".config.names.*": "for Model.load, which finds averages by them",
    ".callbacks.EarlyStopping.best_step": "for a message",
    ".callbacks.EarlyStopping.seen": "decides when no evaluation follows",
    ".feed.start*": "decides with shards",
}


def another_value(name: str, value: Any) -> Any:
    """Another value of the same kind."""
    if name == ".rng.torch":
        return torch.Generator().manual_seed(99).get_state()
    if name == ".rng.numpy.3":  # whether a second normal number is there already
        return 1 - value
    if isinstance(value, Tensor):
        if value.dtype == torch.bool:
            return ~value
        if value.is_floating_point():
            return value * 1.5 + 0.25
        return value + 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if name.endswith(".lr"):  # below 0 it would be refused
        return value + 1
    if isinstance(value, float):
        return value - 1
    if isinstance(value, str):
        return f"{value}x"
    return 1


def with_leaf(tree: Any, name: str, value: Any) -> Any:
    """The tree with one leaf changed."""
    if not name:
        return value
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        text = str(key)
        if name[1:] == text or name[1:].startswith(f"{text}."):
            changed = with_leaf(tree[key], name[1 + len(text) :], value)
            if isinstance(tree, dict):
                return {**tree, key: changed}
            return type(tree)([*tree[:key], changed, *tree[key + 1 :]])
    raise KeyError(name)


def train_observed(folder: Path, snapshots: Snapshots, **options: Any) -> Run:
    stopping = EarlyStopping("loss", patience=1)
    return train_model(
        folder,
        stopping,
        snapshots,
        model=build_model(accumulate=2, init=2.0**13),
        epochs=1,
        valid_every_steps=5,
        **options,
    )


def resume_from(tree: Any, folder: Path) -> dict[str, Any] | str:
    """The end of a run that goes on from this tree; or the message of its error."""
    shutil.rmtree(folder, ignore_errors=True)
    snapshots = Snapshots()
    try:
        checkpoint.save(folder, tree)
        train_observed(folder, snapshots, resume=folder)
    except Exception as error:  # refused, or a Notice, which is an error in these tests
        return str(error)
    return leaves_by_path({**snapshots.trees["end"], "rows": snapshots.rows})


def test_every_leaf_decides_or_says_why_not(tmp_path: Path) -> None:
    """Saved at step 5 of 14 inside a cycle; a change of any leaf must change something else."""
    snapshots = Snapshots(5)
    train_observed(tmp_path, snapshots)
    tree = snapshots.trees["at"]
    expected = leaves_by_path({**snapshots.trees["end"], "rows": snapshots.rows})
    without_effect = []
    assert differences(resume_from(tree, tmp_path / "same"), expected) == []
    for name, value in leaves_by_path(tree).items():
        if isinstance(value, dict | list) or (value is None and ".config." in name):
            continue
        changed = with_leaf(tree, name, another_value(name, value))
        result = resume_from(changed, tmp_path / "other")
        if isinstance(result, str):  # it was refused
            continue
        if not [different for different in differences(result, expected) if different != name]:
            without_effect.append(name)

    # Every leaf without an effect is in the table, and every pattern of the table has one.
    for name in without_effect:
        assert any(fnmatch(name, pattern) for pattern in INFORMATIONAL), name
    for pattern in INFORMATIONAL:
        assert any(fnmatch(name, pattern) for name in without_effect), pattern


@pytest.mark.parametrize("at", [1, 3, 5, 7, 9])
def test_what_was_loaded_is_what_was_saved(at: int, tmp_path: Path) -> None:
    """Right after a skipped step, after evaluations, inside a cycle, at a pass's end."""
    first = Snapshots(at)
    second = Snapshots()
    train_model(tmp_path, History(), first, model=build_model(accumulate=4))
    train_model(
        tmp_path,
        History(),
        second,
        model=build_model(accumulate=4),
        resume=checkpoint.save(tmp_path / "s", first.trees["at"]),
    )
    assert (
        differences(leaves_by_path(second.trees["begin"]), leaves_by_path(first.trees["at"])) == []
    )
    assert (
        differences(leaves_by_path(second.trees["end"]), leaves_by_path(first.trees["end"])) == []
    )


# errors


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    ("event", "at"), [("epoch_begin", 7), ("step", 4), ("visit", 3), ("visit", 6), ("epoch_end", 7)]
)
def test_a_callback_that_raises_is_named_and_loses_nothing(
    event: str, at: int, accumulate: int, tmp_path: Path
) -> None:
    """The other callbacks see what they would have seen, and the run goes on exactly.

    With sink=5, rows 5 and 6 are out when the one at 4 fails.
    """
    expected = train_and_log(tmp_path / "whole", model=build_model(accumulate=accumulate), sink=5)
    with pytest.raises(LookupError, match="a mistake") as caught:
        train_and_log(
            tmp_path / "cut", RaisesAt(event, at), model=build_model(accumulate=accumulate), sink=5
        )
    assert any(
        f"raised by the callback RaisesAt in {event}, at step {at}" in note
        for note in caught.value.__notes__
    )
    resumed = train_and_log(tmp_path / "cut", model=build_model(accumulate=accumulate), sink=5)
    assert differences(resumed, expected) == []


@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_a_network_that_raises(broken: str, tmp_path: Path) -> None:
    """The steps before it are saved; the run goes on with the batch that failed."""

    def fail(moment: str) -> None:
        if moment == broken and model.step.state.steps == 4:
            raise LookupError(f"in {moment}")

    snapshots = Snapshots(4)
    train_model(tmp_path, snapshots)
    model = build_model()
    model.net.on_moment = fail
    with pytest.raises(LookupError, match=f"in {broken}"):
        train_and_log(tmp_path, model=model)
    saved = checkpoint.load(tmp_path / "run" / checkpoint.name_of(4)).tree
    changed = differences(
        leaves_by_path(saved["step"]), leaves_by_path(snapshots.trees["at"]["step"])
    )
    touched_by_forward = (".state.cycle.", ".net.norm.")
    assert [name for name in changed if not name.startswith(touched_by_forward)] == []
    assert saved["loop"]["global_step"] == saved["feed"]["step"] == 4
    assert train_and_log(tmp_path)[".loop.global_step"] == 14


def test_a_non_finite_gradient_keeps_its_error_and_its_run(tmp_path: Path) -> None:
    def poison(moment: str) -> None:
        if moment == "forward" and model.step.state.steps == 4:
            model.net.last.bias.data[0] = float("inf")

    model = build_model(precision="fp32")
    model.net.on_moment = poison
    with pytest.raises(hs.NonFiniteError, match=r"step 5: non-finite gradient in .*last"):
        train_and_log(tmp_path, model=model)
    # The fifth step is over, without an update.
    assert checkpoint.listing(tmp_path / "run")[-1].name == checkpoint.name_of(5)
    healed = build_model(precision="fp32")
    heal = Lambda(begin=lambda run: run.net.last.bias.data.nan_to_num_(posinf=0.0))
    # The state at the error is lost: the run goes on from the one before.
    with pytest.warns(hs.Notice, match="step-000000003 is used instead"):
        assert train_and_log(tmp_path, heal, model=healed)[".loop.global_step"] == 14


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 6), (4, 2)], ids=["step", "flush"])
def test_an_error_inside_an_update_saves_no_half_of_it(
    accumulate: int, updates: int, tmp_path: Path
) -> None:
    """The optimizer has moved, averages and counters have not: a resume finds the one before.

    The second update of a pass of 7 in cycles of 4 is its tail.
    """
    options = {"accumulate": accumulate, "init": 1024.0}
    expected = train_and_log(tmp_path / "whole", model=build_model(**options))
    model = build_model(**options)
    updates_done = []

    def fail_at_last_update(*_: Any) -> None:
        updates_done.append(1)
        if len(updates_done) == updates:
            raise ZeroDivisionError

    model.optimizer.register_step_post_hook(fail_at_last_update)
    saver = Checkpoint(tmp_path / "cut" / "run", best="acc", every_steps=2)
    with (
        pytest.warns(hs.Notice, match="in the middle of an update"),
        pytest.raises(ZeroDivisionError),
    ):
        train_and_log(tmp_path / "cut", model=model, saver=saver)
    last_step = 4 if accumulate == 1 else 6
    newest = checkpoint.listing(tmp_path / "cut" / "run")[-1]
    assert newest.name == checkpoint.name_of(last_step)
    assert (
        differences(train_and_log(tmp_path / "cut", model=build_model(**options)), expected) == []
    )


def test_without_on_error_nothing_is_saved_after_one(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        train_and_log(
            tmp_path,
            RaisesAt("visit", 4),
            saver=Checkpoint(tmp_path / "run", on_error=False),
            sink=4,
        )
    assert checkpoint.listing(tmp_path / "run") == []


# another run than the saved one

Change = tuple[Callable[[], dict[str, Any]], str, int]
CHANGES: dict[str, Change] = {
    "nothing": (dict, "", 14),
    "O2 to fp32": (
        lambda: {"model": build_model(precision="fp32")},
        "ran in 'O2', this one runs in 'fp32'",
        14,
    ),
    "O2 to O1": (
        lambda: {"model": build_model(precision="O1")},
        "ran in 'O2', this one runs in 'O1'",
        14,
    ),
    "optimizer": (
        lambda: {"model": build_model("sgd")},
        "the optimizer was AdamW and is SGD: its state starts anew, weights go on",
        14,
    ),
    "accumulate": (
        lambda: {"model": build_model(accumulate=4)},
        "accumulate was 1 and is 4: that many batches an update",
        14,
    ),
    "schedule": (
        lambda: {"model": build_model(schedule=hs.schedules.constant(0.5))},
        "the schedule's rate for the next update was 0.005 and is 0.5: the new one holds",
        14,
    ),
    "no schedule": (
        lambda: {"model": build_model(schedule=None)},
        "the schedule's rate for the next update was 0.005 and is none",
        14,
    ),
    "size of the data": (
        lambda: {"data": train_data(size=30)},
        "the data had .*and has .*new pass, number 1",
        4 + 8 + 8,
    ),
    "batch": (
        lambda: {"data": train_data(batch=5)},
        r"batch\(4.*batch\(5.*new pass, number 1, from its start",
        4 + 6 + 6,
    ),
    "pipeline": (lambda: {"data": train_data(pad=1)}, "PadCrop.*new pass, number 1", 4 + 7 + 7),
    "longer": (lambda: {"epochs": 3}, "", 21),
    "shorter": (lambda: {"epochs": 1}, "", 7),
    "sink": (lambda: {"sink": 100}, "", 14),
    "a callback more": (
        lambda: {"more": [EarlyStopping("loss", patience=9)]},
        "had no EarlyStopping: new here",
        14,
    ),
    "a callback less": (
        lambda: {"without": True},
        "had the callbacks History, this one has not",
        14,
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of step 4, with a schedule in its warm-up: updates 3 and 5 were real."""
    folder = tmp_path_factory.mktemp("saved")
    snapshots = Snapshots(4)
    train_model(folder, History(), snapshots)
    return checkpoint.save(folder / "four", snapshots.trees["at"])


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_training_goes_on(name: str, saved: Path, tmp_path: Path) -> None:
    make, words, end = CHANGES[name]
    options = make()
    callbacks = options.pop("more", [])
    if not options.pop("without", False):
        callbacks = [*callbacks, History()]
    with warnings.catch_warnings(record=True, action="always") as caught:
        run = train_model(tmp_path, *callbacks, resume=saved, **options)
    notices = [str(w.message) for w in caught if issubclass(w.category, hs.Notice)]
    assert len(notices) == bool(words), notices
    assert all(re.search(words, text) for text in notices)
    assert run.position == end
    assert all(torch.isfinite(t).all() for t in run.model.net.state_dict().values())


def test_fp32_to_O2_starts_a_scale_of_its_own(tmp_path: Path) -> None:
    snapshots = Snapshots(4)
    train_model(tmp_path, snapshots, model=build_model(precision="fp32"))
    path = checkpoint.save(tmp_path / "four", snapshots.trees["at"])
    scales: list[float] = []
    with pytest.warns(
        hs.Notice, match="ran in 'fp32', this one runs in 'O2': weights and optimizer continue"
    ):
        train_model(tmp_path, Lambda(step=lambda run, row: scales.append(row.scale)), resume=path)
    assert scales[0] == 2.0**17


def test_an_optimizers_setting_is_the_checkpoints_until_it_is_set_in_the_run(
    tmp_path: Path,
) -> None:
    def model(lr: float) -> Model:
        seed_all(0)
        net = nn.Linear(6, 3)
        return Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=lr))

    data = hs.data.Dataset({"x": torch.randn(20, 6), "y": torch.randint(0, 3, (20,))}).batch(4)
    model(0.1).fit(1, data, callbacks=[Checkpoint(tmp_path)])
    words = (
        r"the optimizer's lr was 0.1 and is 0.01 in group 0: the checkpoint's holds. "
        "To change it, set it in"
    )
    rates: list[Any] = []
    watch = Lambda(step=lambda run, row: rates.append(row.lr))
    with pytest.warns(hs.Notice, match=words):
        model(0.01).fit(2, data, callbacks=[Checkpoint(tmp_path), watch], resume="auto")
    assert set(rates) == {0.1}
    change = Lambda(begin=lambda run: run.optimizer.param_groups[0].update(lr=0.01))
    model(0.01).fit(3, data, callbacks=[Checkpoint(tmp_path), watch, change], resume="auto")
    assert set(rates[5:]) == {0.01}


REFUSED: dict[str, tuple[int, int, Callable[[], Model], str]] = {
    "scale in an open cycle": (
        4,
        5,
        lambda: build_model(precision="fp32", accumulate=4),
        "carry another loss scale",
    ),
    "accumulate in an open cycle": (
        4,
        6,
        lambda: build_model(accumulate=2),
        "2 batches .* open.*give the accumulate= it had",
    ),
    "averages": (
        1,
        5,
        lambda: build_model(ema=None),
        "expected 0 tensors of ema, received 6; build the step with the ema=",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_go_on_is_refused_with_advice(name: str, tmp_path: Path) -> None:
    accumulate, at, make, words = REFUSED[name]
    snapshots = Snapshots(at)
    train_model(tmp_path, snapshots, model=build_model(accumulate=accumulate))
    path = checkpoint.save(tmp_path / "saved", snapshots.trees["at"])
    with pytest.raises(ValueError, match=words):
        train_model(tmp_path, resume=path, model=make())
