"""Several validation sets by name: their scores, who follows them, and what a resume needs."""

import csv
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import halfstep as hs
from halfstep.metrics import Accuracy
from tests.support.emulated_graphs import CPU, EmulatedGraphs
from tests.unit.model.test_train_metrics import (
    StopAt,
    accuracy,
    fit_data,
    make_batches,
    make_model,
    make_net,
)

KNOWN = ("clean_loss", "clean_acc", "noisy_loss", "noisy_acc")


def noisy_batches() -> list[tuple[Tensor, Tensor]]:
    return [(x + torch.ones_like(x), y) for x, y in make_batches()[:5]]


def two_sets() -> dict[str, Any]:
    return {"clean": make_batches(), "noisy": noisy_batches()}


def test_each_set_has_the_scores_that_it_has_alone(tmp_path: Path) -> None:
    model = make_model(accuracy())
    run = fit_data(model, valid=two_sets(), callbacks=[hs.CSVLog(tmp_path / "log.csv")])
    alone = {name: model.evaluate(batches) for name, batches in two_sets().items()}
    expected = {
        f"{name}_{score}": value
        for name, scores in alone.items()
        for score, value in scores.items()
    }
    assert model.evaluate(two_sets()) == expected
    assert list(expected) == list(KNOWN)
    last = run.history[-1]
    assert {name: last[f"valid_{name}"] for name in KNOWN} == expected
    with (tmp_path / "log.csv").open(newline="") as file:
        row = list(csv.DictReader(file))[-1]
    assert {name: float(row[f"valid_{name}"]) for name in KNOWN} == expected


def test_the_same_bits_of_training_as_with_one_set_or_none() -> None:
    losses = []
    for valid in (None, make_batches(), two_sets()):
        history = hs.History()
        fit_data(make_model(accuracy()), valid=valid, callbacks=[history])
        losses.append(history.rows["loss"])
    assert losses[0] == losses[1] == losses[2]


def test_graphs_of_each_set_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.engine.captured import cache
    from halfstep.engine.captured.eval_runner import EvalRunner

    built: list[Any] = []

    def emulated(*parts: Any) -> EvalRunner:
        runner = EvalRunner(*parts, direct=True)
        runner.forward.graphs = EmulatedGraphs(CPU)
        built.append(runner)
        return runner

    monkeypatch.setattr(cache, "EvalRunner", emulated)
    model = make_model(accuracy())
    expected = model.evaluate(two_sets())
    model.captures._runs_graphs = True
    for _ in range(3):
        assert model.evaluate(two_sets()) == pytest.approx(expected, rel=1e-6)
    assert len(built) == 2
    assert (
        sum(runner.forward.graphs.captures for runner in built) == 3
    )  # the first set has a tail too


# --- Who follows a score ---


@pytest.mark.parametrize("name", ["clean_loss", "valid_clean_loss", "valid_noisy_acc"])
def test_callbacks_follow_a_score_by_either_name(name: str, tmp_path: Path) -> None:
    checkpoint = hs.Checkpoint(tmp_path / "run", best=name)
    callbacks = [hs.EarlyStopping(name, patience=9), hs.ReduceLROnPlateau(name), checkpoint]
    run = fit_data(make_model(accuracy()), valid=two_sets(), callbacks=callbacks)
    scores = [entry[f"valid_{name.removeprefix('valid_')}"] for entry in run.history]
    best = max(scores) if name.endswith("acc") else min(scores)
    assert callbacks[0].best.value == best
    assert checkpoint.best.value == best


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("loss", "There are several validation sets: name one, such as 'clean_loss'"),
        ("valid_loss", "There are several validation sets: name one, such as 'clean_loss'"),
        ("valid_noisy_los", "Did you mean 'noisy_loss' (the history's 'valid_noisy_loss')?"),
    ],
)
@pytest.mark.parametrize("kind", ["EarlyStopping", "ReduceLROnPlateau", "Checkpoint"])
def test_a_name_that_is_none_is_answered_with_the_choices(
    name: str, advice: str, kind: str, tmp_path: Path
) -> None:
    makers = {
        "EarlyStopping": lambda: hs.EarlyStopping(name, mode="min"),
        "ReduceLROnPlateau": lambda: hs.ReduceLROnPlateau(name, mode="min"),
        "Checkpoint": lambda: hs.Checkpoint(tmp_path / "run", best=name, mode="min"),
    }
    choices = ", ".join(map(repr, KNOWN))
    message = re.escape(f"one of the scores {choices}, got {name!r}. {advice}")
    with pytest.raises(ValueError, match=message):
        fit_data(make_model(accuracy()), valid=two_sets(), callbacks=[makers[kind]()])


# --- What is no dict of data sets ---


@pytest.mark.parametrize("owner", ["valid", "evaluate"])
def test_a_dict_of_tensors_is_no_dict_of_data_sets(owner: str) -> None:
    x, y = make_batches()[0]
    columns = {"x": x, "y": y}
    model = make_model(accuracy())
    uses = {
        "valid": lambda: fit_data(model, valid=columns),
        "evaluate": lambda: model.evaluate(columns),
    }
    message = rf"{owner}: .*a dict of tensors \('x', 'y'\).*Dataset\("
    with pytest.raises(TypeError, match=message):
        uses[owner]()
    # The advice works.
    model.evaluate(hs.data.Dataset(columns).batch(4))


def test_data_sets_of_dicts_by_name() -> None:
    def forward(net: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        out = net(batch["x"])
        return {"loss": nn.functional.cross_entropy(out, batch["label"]), "logits": out}

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(net, None, optimizer, forward=forward, metrics={"acc": Accuracy()})
    batches = [{"x": x, "label": y} for x, y in make_batches()]
    run = model.fit(1, batches, valid={"a": batches, "b": batches[:2]})
    assert run.history[0]["acc"] > 0
    assert run.history[0]["valid_b_acc"] == model.evaluate(batches[:2])["acc"]


@pytest.mark.parametrize(
    ("valid", "words"),
    [
        ({}, "valid: expected data sets by name, got an empty dict"),
        ({"a b": make_batches()}, "valid: expected names of data sets"),
        ({"a": []}, "valid: 'a': expected at least one batch"),
        (
            {"a": make_batches(), "a_b": make_batches()},
            "valid: 'a_b_loss' would be a score of two data sets, 'a' and 'a_b'",
        ),
    ],
)
def test_sets_that_cannot_be_are_refused(valid: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_data(make_model({"b_loss": hs.metrics.Loss()}), valid=valid)


# --- Resuming ---


class Interrupting(Dataset[Any]):
    """Samples; the one at `at` is when somebody presses Ctrl-C, once."""

    def __init__(self, at: int) -> None:
        self.x, self.y = (torch.cat(column) for column in zip(*make_batches(), strict=True))
        self.at = at
        self.reads = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        if self.reads == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.x[i], self.y[i]


def shuffled(data: Dataset[Any], seed: int) -> DataLoader[Any]:
    """Another order at each evaluation: a metric that depends on it shows where it stands."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(data, batch_size=8, shuffle=True, generator=generator)


def first_label(out: Tensor, y: Tensor) -> Tensor:
    """Depends on the order of the samples."""
    return (y * torch.arange(len(y))).double()


@pytest.mark.parametrize("stop", ["between", "within"])
def test_the_generators_of_every_set_go_on(stop: str, tmp_path: Path) -> None:
    def train(*more: hs.Callback, at: int = 0, **how: Any) -> hs.Run:
        x, y = (torch.cat(column) for column in zip(*make_batches(), strict=True))
        # The second set is read when the first one of this evaluation is over.
        valid = {"a": shuffled(TensorDataset(x, y), 1), "b": shuffled(Interrupting(at), 2)}
        model = make_model({"order": first_label}, train_metrics=False)
        callbacks = [hs.Checkpoint(tmp_path / "run"), *more]
        return fit_data(model, valid=valid, callbacks=callbacks, **how)

    def whole() -> hs.Run:
        x, y = (torch.cat(column) for column in zip(*make_batches(), strict=True))
        valid = {"a": shuffled(TensorDataset(x, y), 1), "b": shuffled(TensorDataset(x, y), 2)}
        model = make_model({"order": first_label}, train_metrics=False)
        return fit_data(model, valid=valid)

    if stop == "between":
        train(StopAt(11))
    else:
        samples = sum(len(y) for _, y in make_batches())
        with pytest.raises(SystemExit):
            train(at=samples + 20)
    run = train(resume="auto")
    assert run.history == whole().history
    orders = [entry["valid_b_order"] for entry in run.history]
    assert len(set(orders)) > 1


def test_a_run_with_one_set_goes_on_with_several(tmp_path: Path) -> None:
    callbacks: list[hs.Callback] = [hs.Checkpoint(tmp_path / "run"), StopAt(11)]
    fit_data(make_model(accuracy()), valid=make_batches(), callbacks=callbacks)
    again = [hs.Checkpoint(tmp_path / "run")]
    run = fit_data(make_model(accuracy()), valid=two_sets(), callbacks=again, resume="auto")
    assert "valid_acc" in run.history[0]
    assert "valid_noisy_acc" in run.history[1]


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_sets_without_names_are_refused_before_training(kind: type) -> None:
    loaders = kind(DataLoader(make_batches(), batch_size=None) for _ in range(2))  # type: ignore[arg-type]
    model = make_model(accuracy())
    before = [p.clone() for p in model.net.parameters()]
    expected = f"valid: several data sets are given by name, got a {kind.__name__} of 2; write {{"
    with pytest.raises(TypeError, match=re.escape(expected)):
        fit_data(model, valid=loaders)
    assert all(map(torch.equal, before, model.net.parameters()))
    with pytest.raises(TypeError, match="evaluate: several data sets"):
        model.evaluate(loaders)
