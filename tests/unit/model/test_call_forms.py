"""Calls as programs for Keras, Lightning and others write them: they work, or the answer does."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.model import foreign_methods, foreign_parts
from halfstep.utils import foreign_names
from tests.support.equal_tensors import assert_equal_tensors

X = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50) % 3
XV = torch.randn(21, 6, generator=torch.Generator().manual_seed(1))
YV = torch.arange(21) % 3
TRAIN = TensorDataset(X, Y)


CLASSES = 6


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def make_model(precision: Any = "fp32", **options: Any) -> hs.Model:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    metrics = {"acc": hs.metrics.Accuracy()}
    return hs.Model(net, nn.CrossEntropyLoss(), optimizer, precision, metrics=metrics, **options)


def weights(model: hs.Model) -> list[Tensor]:
    return list(model.net.state_dict().values())


def make_data(seed: int = 0, batch_size: int = 8) -> hs.data.Dataset:
    return hs.data.Dataset((X, Y), seed=seed).shuffle().batch(batch_size)


def make_loader() -> DataLoader[Any]:
    return DataLoader(TRAIN, batch_size=8)


# Forms of fit that have one meaning.

FIT_FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "loader first": (lambda m: m.fit(make_loader(), 2), lambda m: m.fit(2, make_loader())),
    "epochs by name": (
        lambda m: m.fit(make_loader(), epochs=2),
        lambda m: m.fit(2, make_loader()),
    ),
    "both by name": (
        lambda m: m.fit(data=make_loader(), epochs=2),
        lambda m: m.fit(2, make_loader()),
    ),
    "Lightning's names": (
        lambda m: m.fit(
            train_dataloaders=make_loader(), val_dataloaders=make_loader(), max_epochs=2
        ),
        lambda m: m.fit(2, make_loader(), valid=make_loader()),
    ),
    "numpy's number": (
        lambda m: m.fit(np.int64(2), make_loader()),
        lambda m: m.fit(2, make_loader()),
    ),
    "a list of batches": (lambda m: m.fit([(X, Y)], 2), lambda m: m.fit(2, [(X, Y)])),
    "Keras": (
        lambda m: m.fit(X, Y, epochs=2, batch_size=8, validation_data=(XV, YV), verbose=0),
        lambda m: m.fit(2, make_data(), valid=hs.data.Dataset((XV, YV)).batch(8)),
    ),
    "Keras by name": (
        lambda m: m.fit(x=X, y=Y, batch_size=8, epochs=2, validation_freq=2),
        lambda m: m.fit(2, make_data()),
    ),
    "another seed": (
        lambda m: m.fit(X, Y, epochs=2, batch_size=8, seed=3),
        lambda m: m.fit(2, make_data(seed=3)),
    ),
    "not shuffled": (
        lambda m: m.fit(X, Y, epochs=2, batch_size=8, shuffle=False),
        lambda m: m.fit(2, make_loader()),
    ),
    "arrays of numpy's usual dtypes": (
        lambda m: m.fit(
            X.double().numpy(), Y.int().numpy(), epochs=2, batch_size=8, validation_data=None
        ),
        lambda m: m.fit(2, make_data()),
    ),
    "a pair": (
        lambda m: m.fit((X, Y), epochs=2, batch_size=8),
        lambda m: m.fit(2, make_data()),
    ),
    "a pair behind the epochs": (
        lambda m: m.fit(2, (X, Y), batch_size=8),
        lambda m: m.fit(2, make_data()),
    ),
    "a torch data set": (
        lambda m: m.fit(TRAIN, epochs=2, batch_size=8),
        lambda m: m.fit(2, hs.data.Dataset(TRAIN).shuffle().batch(8)),
    ),
    "a dict of columns": (
        lambda m: m.fit({"x": X, "y": Y}, epochs=2, batch_size=8),
        lambda m: m.fit(2, hs.data.Dataset({"x": X, "y": Y}).shuffle().batch(8)),
    ),
    "the last fifth validates": (
        lambda m: m.fit(X, Y, epochs=2, batch_size=8, validation_split=0.2),
        lambda m: m.fit(
            2,
            hs.data.Dataset((X[:40], Y[:40])).shuffle().batch(8),
            valid=hs.data.Dataset((X[40:], Y[40:])).batch(8),
        ),
    ),
    "validation in batches of its own": (
        lambda m: m.fit(
            X, Y, epochs=2, batch_size=8, validation_data=(XV, YV), validation_batch_size=5
        ),
        lambda m: m.fit(2, make_data(), valid=hs.data.Dataset((XV, YV)).batch(5)),
    ),
}


@pytest.mark.parametrize("name", FIT_FORMS)
def test_a_call_in_another_form_trains_like_ours(name: str) -> None:
    other, ours = FIT_FORMS[name]
    for options in ({}, {"precision": "O2", "accumulate": 4}):
        models = [make_model(**options), make_model(**options)]
        runs = [call(model) for call, model in zip((other, ours), models, strict=True)]
        assert_equal_tensors(weights(models[0]), weights(models[1]))
        assert runs[0].history == runs[1].history
        assert len(runs[0].history) == 2


def test_unshuffled_tensors_train_like_a_plain_loop() -> None:
    model = make_model()
    model.fit(X, Y, epochs=2, batch_size=16, shuffle=False)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for x, y in zip(X.split(16), Y.split(16), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    assert_equal_tensors(weights(model), list(net.state_dict().values()))


def test_every_epoch_is_shuffled_anew_and_holds_every_sample() -> None:
    seen: list[Tensor] = []

    def forward(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(x[:, 0].clone())
        return nn.functional.cross_entropy(net(x), y)

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(net, None, optimizer, forward=forward)
    model.fit(X, Y, epochs=2, batch_size=25)
    first, second = torch.cat(seen[:2]), torch.cat(seen[2:])
    assert torch.equal(first.sort().values, X[:, 0].sort().values)
    assert torch.equal(second.sort().values, X[:, 0].sort().values)
    assert not torch.equal(first, second)
    assert not torch.equal(first, X[:, 0])


def test_a_network_of_two_inputs_takes_a_pair_of_tensors() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.linear(torch.cat([a, b], 1))
            return out

    net = Two()
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    run = model.fit([X, X], Y, epochs=1, batch_size=8, validation_data=((XV, XV), YV))
    assert run.history[0]["valid_loss"] == model.evaluate([XV, XV], YV, batch_size=8)["loss"]


def test_a_run_on_tensors_is_stopped_in_an_epoch_and_goes_on_to_the_same_bits(
    tmp_path: Path,
) -> None:
    class Stop(hs.Callback):
        def step(self, run: hs.Run, row: hs.Row) -> None:
            if row.global_step == 10:
                run.stop("enough")

        exact = True

    def fit(model: hs.Model, folder: Path, *callbacks: hs.Callback) -> hs.Run:
        saver = hs.Checkpoint(folder, every_steps=5)
        options: dict[str, Any] = {"callbacks": [saver, *callbacks], "resume": "auto"}
        return model.fit(X, Y, epochs=3, batch_size=8, seed=2, **options)

    whole, stopped, resumed = make_model(), make_model(), make_model()
    fit(whole, tmp_path / "whole")
    assert fit(stopped, tmp_path / "parts", Stop()).global_step < 21
    assert fit(resumed, tmp_path / "parts").resumed is not None
    assert_equal_tensors(weights(resumed), weights(whole))


def test_the_last_checkpoint_of_lightning_is_the_newest_here(tmp_path: Path) -> None:
    first, second = make_model(), make_model()
    first.fit(make_loader(), 1, callbacks=hs.Checkpoint(tmp_path))
    run = second.fit(make_loader(), 2, callbacks=hs.Checkpoint(tmp_path), ckpt_path="last")  # type: ignore[call-overload]
    assert run.resumed is not None


@pytest.mark.parametrize(("verbose", "lines"), [(0, 0), (False, 0), (2, 2), (1, 2), ("auto", 2)])
def test_verbose_says_how_much_is_printed(
    verbose: Any, lines: int, capfd: pytest.CaptureFixture[str]
) -> None:
    make_model().fit(X, Y, epochs=2, batch_size=25, verbose=verbose)  # type: ignore[call-overload]
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count("epoch ") == lines


def test_validation_sets_by_name_may_be_pairs_of_tensors() -> None:
    model = make_model()
    valid = {"clean": (XV, YV), "noisy": [(XV + 1, YV)]}
    entry = model.fit(X, Y, epochs=1, batch_size=25, validation_data=valid).history[0]
    assert entry["valid_clean_loss"] == model.evaluate(XV, YV, batch_size=25)["loss"]
    assert entry["valid_noisy_loss"] == model.evaluate([(XV + 1, YV)])["loss"]


# Evaluation and prediction.


def test_whole_tensors_are_evaluated_and_predicted() -> None:
    model = make_model()
    scores = model.evaluate(hs.data.Dataset((XV, YV)).batch(5))
    assert model.evaluate(XV, YV, batch_size=5) == scores
    forms: list[Any] = [
        lambda m: m.evaluate((XV, YV), batch_size=5),
        lambda m: m.evaluate(x=XV, y=YV, batch_size=5, verbose=0, return_dict=True),
        lambda m: m.evaluate(XV.double().numpy(), YV.int().numpy(), batch_size=5),
        lambda m: m.evaluate(TensorDataset(XV, YV), batch_size=5),
    ]
    for form in forms:
        assert form(model) == scores
    assert model.evaluate(XV, YV)["acc"] == scores["acc"]

    outputs = model.net(XV).detach()
    assert torch.equal(model.predict(XV, batch_size=64), outputs)
    assert torch.equal(model.predict(XV.double().numpy(), batch=64), outputs)
    assert torch.equal(model.predict(x=XV, batch_size=64, verbose=0), outputs)  # type: ignore[call-overload]


# Forms without one meaning: the answer says a line, and the line works.


def namespace(folder: Path) -> dict[str, Any]:
    """What a program has at hand when it reads an answer."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = nn.CrossEntropyLoss()
    model = hs.Model(net, loss, optimizer)
    model.save(folder / "weights.safetensors")

    class Module:
        def train_dataloader(self) -> DataLoader[Any]:
            return make_loader()

        val_dataloader = train_dataloader

    class Frame:
        def __init__(self, array: Any) -> None:
            self.array = array

        def to_numpy(self) -> Any:
            return self.array

    return {
        "hs": hs,
        "nn": nn,
        "torch": torch,
        "DataLoader": DataLoader,
        "net": net,
        "loss": loss,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "model": model,
        "data": make_data(),
        "valid": make_data(),
        "loader": make_loader(),
        "train_ds": TRAIN,
        "datamodule": Module(),
        "classes": CLASSES,
        "frame": Frame(X.numpy()),
        "x": X,
        "y": Y,
        "xv": XV,
        "yv": YV,
    }


def check_answer(message: str, names: dict[str, Any]) -> None:
    """Runs the line that the message says; a Model that it builds trains."""
    found = re.search(r"; write (.+)$", message)
    assert found, f"no line to write in: {message}"
    line = found[1]
    try:
        code = compile(line, "answer", "eval")
    except SyntaxError:
        exec(compile(line, "answer", "exec"), names)
        return
    result = eval(code, names)
    if isinstance(result, hs.Model):
        assert isinstance(result.step, hs.TrainStep)
        data: Any = make_data()
        if "lambda outputs" in line:  # metrics of numbers, not of classes
            data = [(X, torch.zeros(len(X), CLASSES))]
        if isinstance(result.loss, nn.CrossEntropyLoss):
            result.fit(1, data, progress=False)


ANSWERS: dict[str, tuple[str, str]] = {
    "no epochs": ("model.fit(x, y, batch_size=32)", "number of epochs"),
    "no batch size": ("model.fit(x, y, epochs=2)", "size of a batch"),
    "x and y only": ("model.fit(x, y)", "number of epochs"),
    "Keras by position": ("model.fit(x, y, 32, 2)", "two arguments without a name, got 4"),
    "epochs first, then x and y": ("model.fit(2, x, y)", "two arguments without a name, got 3"),
    "two data sets": ("model.fit(train_ds, train_ds)", "two of data"),
    "two loaders": ("model.fit(loader, loader, epochs=2)", "two of data"),
    "a trainer's call": ("model.fit(net, loader)", "holds its network already"),
    "float epochs": ("model.fit(2.0, loader)", "epochs: expected a whole number.*got 2.0"),
    "text epochs": ("model.fit(loader, '2')", "epochs: expected a whole number.*got '2'"),
    "data only": ("model.fit(loader)", "number of epochs"),
    "epochs only": ("model.fit(2)", "expected data"),
    "nothing": ("model.fit()", "expected data"),
    "batch size of a loader": ("model.fit(loader, 2, batch_size=3)", "DataLoader says it itself"),
    "a table": ("model.fit(frame, frame, epochs=1, batch_size=8)", "got Frame"),
    "a float64 tensor": ("model.fit(x.double(), y, epochs=1, batch_size=8)", "float64 tensor"),
    "both validations": (
        "model.fit(x, y, epochs=1, batch_size=8, validation_data=(x, y), validation_split=0.1)",
        "expected one of them",
    ),
    "a split in percent": (
        "model.fit(x, y, epochs=1, batch_size=8, validation_split=20)",
        "share from 0 to below 1",
    ),
    "an empty split": (
        "model.fit(x[:3], y[:3], epochs=1, batch_size=8, validation_split=0.999)",
        "one side empty",
    ),
    "a split of a data set": (
        "model.fit(train_ds, epochs=1, batch_size=8, validation_split=0.2)",
        "validation_split is for whole tensors",
    ),
    "class weights": (
        "model.fit(x, y, epochs=1, batch_size=8, class_weight={0: 1.0})",
        "class_weight: weights of the classes belong to the loss",
    ),
    "sample weights": (
        "model.fit(x, y, epochs=1, batch_size=8, sample_weight=x)",
        "weights of samples belong into the loss",
    ),
    "workers": ("model.fit(loader, 2, workers=4)", "processes that read"),
    "a data module": ("model.fit(datamodule=datamodule)", "argument of its own"),
    "the first epoch": ("model.fit(loader, 2, initial_epoch=1)", "goes on where"),
    "validation steps": ("model.fit(loader, 2, validation_steps=1)", "one pass"),
    "a rate": ("model.fit(2, loader, lr=0.1)", "learning rate belongs to the optimizer"),
    "a loss in fit": ("model.fit(2, loader, loss=loss)", "belongs to the Model"),
    "a chatty evaluation": ("model.evaluate(data, verbose=1)", "prints nothing"),
    "a list of scores": ("model.evaluate(data, return_dict=False)", "a dict by name"),
    "evaluate a loader by a size": ("model.evaluate(loader, batch_size=3)", "comes in batches"),
    "evaluate two": ("model.evaluate(loader, loader)", "one argument without a name"),
    "evaluate nothing": ("model.evaluate()", "expected data"),
    "predict by position": ("model.predict(x, 32)", "one argument without a name"),
    "call": ("model(x)", "not called like its network"),
    "no loss": ("hs.Model(net, None, optimizer).fit(2, data)", "gets the whole batch"),
    "no optimizer": ("hs.Model(net, loss).fit(2, data)", "has no optimizer"),
    "a loss by name": ("hs.Model(net, 'mse', optimizer)", "got the name 'mse'"),
    "an optimizer by name": ("hs.Model(net, loss, 'adam')", "got the name 'adam'"),
    "an optimizer's class": ("hs.Model(net, loss, torch.optim.AdamW)", "got the class AdamW"),
    "a scheduler": ("hs.Model(net, loss, scheduler)", "got a scheduler, ExponentialLR"),
    "a plateau": (
        "hs.Model(net, loss, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))",
        "got a scheduler, ReduceLROnPlateau",
    ),
    "swapped": ("hs.Model(net, optimizer, loss)", "third argument"),
    "swapped names": ("hs.Model(net, 'adam', 'mse')", "third argument"),
    "a loss as optimizer": ("hs.Model(net, None, loss)", "second argument"),
    "a list of metrics": ("hs.Model(net, loss, optimizer, metrics=['accuracy'])", "'accuracy'"),
    "a metric alone": (
        "hs.Model(net, loss, optimizer, metrics=hs.metrics.Accuracy())",
        "expected a dict by name, got Accuracy",
    ),
    "a list of objects": (
        "hs.Model(net, loss, optimizer, metrics=[hs.metrics.Accuracy()])",
        "expected a dict by name, got list",
    ),
    "a metric's name in a dict": (
        "hs.Model(net, loss, optimizer, metrics={'a': 'mae'})",
        "the name 'mae'",
    ),
    "epochs in Model": ("hs.Model(net, loss, optimizer, epochs=3)", "unknown option 'epochs'"),
    "callbacks in Model": ("hs.Model(net, loss, optimizer, callbacks=[])", "'callbacks'"),
    "a batch size in Model": ("hs.Model(net, loss, optimizer, batch_size=3)", "'batch_size'"),
    "a rate in Model": ("hs.Model(net, loss, optimizer, learning_rate=3)", "'learning_rate'"),
    "a number as the rate": (
        "hs.Model(net, loss, optimizer, lr=0.01)",
        "received the number 0.01. A rate that stays is the optimizer's own",
    ),
    "a schedule's class": (
        "hs.Model(net, loss, optimizer, schedule=torch.optim.lr_scheduler.StepLR)",
        "schedule: expected an object, got the class StepLR",
    ),
    "the class of a plateau": (
        "hs.Model(net, loss, optimizer, schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)",
        "schedule: expected an object, got the class ReduceLROnPlateau",
    ),
    "a flag for a precision": ("hs.Model(net, loss, optimizer, fp16=True)", "'fp16'"),
    "an unknown device": ("hs.Model(net, loss, optimizer, device='gpu')", "there is no 'gpu' here"),
    "a GPU": ("hs.Model(net, loss, optimizer, device='gpu')", "'gpu' is called 'cuda'"),
    "a CPU": ("hs.Model(net, loss, optimizer, device='CPU')", "'CPU' is called 'cpu'"),
    "a device of shapes": ("hs.Model(net, loss, optimizer, device='meta')", "no values"),
    "a far device": ("hs.Model(net, loss, optimizer, device='cuda:99')", "no 'cuda:99' here"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_call_without_one_meaning_is_answered_with_a_line_that_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, problem = ANSWERS[name]
    names = namespace(tmp_path)
    with pytest.raises((TypeError, ValueError), match=problem) as caught:
        eval(call, names)
    if name == "a table":
        names.update(x=names["frame"], y=type(names["frame"])(Y.numpy()))
    check_answer(str(caught.value), names)


@pytest.mark.parametrize("name", foreign_methods.METHODS)
def test_a_method_of_another_library_is_answered_with_a_line_that_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = namespace(tmp_path)
    assert not hasattr(names["model"], name)
    with pytest.raises(AttributeError, match=f"Model has no '{name}'") as caught:
        getattr(names["model"], name)
    check_answer(str(caught.value), names)


@pytest.mark.parametrize("name", foreign_names.NAMES)
def test_a_name_of_another_library_is_answered_with_a_line_that_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("tensorboard") if name == "TensorBoardLogger" else None
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'") as caught:
        getattr(hs, name)
    check_answer(str(caught.value), namespace(tmp_path))


@pytest.mark.parametrize("name", foreign_parts.LOSSES)
def test_a_loss_by_name_is_answered_with_a_loss_of_torch(name: str, tmp_path: Path) -> None:
    names = namespace(tmp_path)
    with pytest.raises(TypeError, match=f"got the name '{name}'") as caught:
        hs.Model(names["net"], name, names["optimizer"])
    check_answer(str(caught.value), names)


@pytest.mark.parametrize("name", foreign_parts.OPTIMIZERS)
def test_an_optimizer_by_name_is_answered_with_one_of_torch(name: str, tmp_path: Path) -> None:
    names = namespace(tmp_path)
    call: Any = hs.Model
    with pytest.raises(TypeError, match=f"got the name '{name}'") as caught:
        call(names["net"], names["loss"], name)
    check_answer(str(caught.value), names)


@pytest.mark.parametrize("name", foreign_parts.METRICS)
def test_a_metric_by_name_is_answered_with_one_by_key(name: str, tmp_path: Path) -> None:
    names = namespace(tmp_path)
    call: Any = hs.Model
    with pytest.raises(TypeError, match=f"got the name '{name}'") as caught:
        call(names["net"], names["loss"], names["optimizer"], metrics=[name])
    check_answer(str(caught.value), names)


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Modle'; did you mean 'Model'"):
        _ = hs.Modle  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'evalute'; did you mean 'evaluate'"):
        _ = make_model().evalute  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="fit: unknown option 'valdi'; did you mean 'valid'"):
        make_model().fit(1, make_data(), valdi=make_data())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'epochs' was given twice"):
        make_model().fit(1, make_data(), epochs=2)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'valid' was given twice"):
        make_model().fit(1, make_data(), valid=X, validation_data=X)  # type: ignore[call-overload]
