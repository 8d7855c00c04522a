"""A loss in parts: recorded with every step, averaged as the loss is, and logged."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from tests.support.emulated_graphs import sink_with_emulated_graphs
from tests.support.equal_tensors import assert_equal_tensors
from tests.unit.model.test_train_metrics import (
    EPOCHS,
    StopAt,
    accuracy,
    emulate_graphs,
    fit,
    fit_data,
    make_batches,
    make_model,
    make_net,
)


def parts_of(out: Tensor, y: Tensor) -> dict[str, Tensor]:
    mask = F.cross_entropy(out, y)
    dice = out.square().mean()
    return {"loss": mask + 0.1 * dice, "mask": mask, "dice": dice}


class LossModule(nn.Module):
    def forward(self, out: Tensor, y: Tensor) -> dict[str, Tensor]:
        return parts_of(out, y)


def forward_dict(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    out = net(x)
    return {**parts_of(out, y), "logits": out}


def forward_tuple(net: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = net(x)
    parts = parts_of(out, y)
    return parts.pop("loss"), parts, out


def loss_tuple(out: Tensor, y: Tensor) -> Any:
    parts = parts_of(out, y)
    return parts.pop("loss"), parts


def total_loss(out: Tensor, y: Tensor) -> Tensor:
    return parts_of(out, y)["loss"]


# By name: the loss and the forward of a model.
FORMS: dict[str, dict[str, Any]] = {
    "function": {"loss": parts_of},
    "module": {"loss": LossModule()},
    "loss and dict": {"loss": loss_tuple},
    "forward": {"forward": forward_dict},
    "forward tuple": {"forward": forward_tuple},
}


def build(form: str, **options: Any) -> hs.Model:
    how = {**FORMS[form], **options}
    if "forward" not in how:
        return make_model(**how)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    precision = how.pop("precision", "fp32")
    return hs.Model(net, None, optimizer, precision, **how)


def plain_parts(epochs: int = EPOCHS) -> tuple[dict[str, list[float]], nn.Module]:
    """Every step's loss and parts in bare torch."""
    torch.manual_seed(7)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    torch.manual_seed(3)
    columns: dict[str, list[float]] = {"loss": [], "mask": [], "dice": []}
    for _ in range(epochs):
        for x, y in make_batches():
            parts = parts_of(net(x), y)
            optimizer.zero_grad()
            parts["loss"].backward()
            optimizer.step()
            for name, value in parts.items():
                columns[name].append(value.item())
    return columns, net


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("graphs", [False, True])
def test_parts_are_those_of_a_plain_loop(form: str, graphs: bool) -> None:
    expected, net = plain_parts()
    model = build(form, decide="device")
    runners = emulate_graphs(model) if graphs else {}
    history = hs.History()
    run = fit(model, callbacks=[history])
    for name, values in expected.items():
        assert history.rows[name] == values
    assert_equal_tensors(model.net.state_dict().values(), net.state_dict().values())
    if graphs:
        assert runners["runner"].program.replays > 0

    # Averaged over the epoch with the weights of the loss.
    samples = history.rows["samples"][:8]
    for name, values in expected.items():
        total = sum(value * n for value, n in zip(values[:8], samples, strict=True))
        assert run.history[0][name] == total / sum(samples)


@pytest.mark.parametrize("precision", ["O1", "O2", "bf16", "fp16"])
def test_parts_change_no_bit_of_a_low_network(precision: str) -> None:
    nets = []
    for loss in (parts_of, total_loss):
        model = make_model(loss=loss, precision=precision, nonfinite="skip")
        history = hs.History()
        fit(model, callbacks=[history])
        nets.append(model.net)
        if loss is parts_of:
            assert all(map(math.isfinite, history.rows["mask"]))
            columns = zip(history.rows["mask"], history.rows["dice"], strict=True)
            sums = [mask + 0.1 * dice for mask, dice in columns]
            assert history.rows["loss"] == pytest.approx(sums, rel=1e-5)
    assert_equal_tensors(nets[0].state_dict().values(), nets[1].state_dict().values())


def test_compiled_forward_and_loss_give_the_parts_of_the_uncompiled() -> None:
    history = {}
    for way, options in {"eager": {}, "compiled": {"compile": True, "capture": False}}.items():
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = hs.Model(net, None, optimizer, forward=forward_dict, metrics=accuracy(), **options)
        history[way] = model.fit(2, make_batches()[:-1]).history
        if options:
            assert model.step.compiled.on
    for one, other in zip(history["eager"], history["compiled"], strict=True):
        assert one["acc"] == other["acc"]
        for name in ("loss", "mask", "dice"):
            assert one[name] == pytest.approx(other[name], rel=1e-5)


def test_the_whole_step_as_one_program_records_parts() -> None:
    batches = make_batches()[:-1] * 6
    history = {}
    for way, options in {"eager": {}, "compiled": {"compile": True}}.items():
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
        model = hs.Model(net, parts_of, optimizer, **options)
        history[way] = model.fit(2, batches).history
        if options:
            assert model.captures._runner.program.refusal_reason == ""
            assert model.captures._runner.program.replays > 40
    for one, other in zip(history["eager"], history["compiled"], strict=True):
        for name in ("loss", "mask", "dice"):
            assert one[name] == pytest.approx(other[name], rel=1e-5)


@pytest.mark.parametrize("graphs", [False, True])
def test_every_batch_of_a_cycle_has_its_own_parts(graphs: bool) -> None:
    options = {"accumulate": 3, "count": lambda batch: len(batch[1]), "decide": "device"}
    model = build("function", **options)
    if graphs:
        emulate_graphs(model)
    history = hs.History()
    fit(model, epochs=1, callbacks=[history])
    assert history.rows["loss"] == pytest.approx(
        [m + 0.1 * d for m, d in zip(history.rows["mask"], history.rows["dice"], strict=True)]
    )
    assert len(set(history.rows["mask"])) == 8


@pytest.mark.parametrize("graphs", [False, True])
def test_hs_sink_and_the_records_of_a_step_have_the_parts(graphs: bool) -> None:
    model = build("function", decide="device")
    make_sink = sink_with_emulated_graphs if graphs else hs.sink
    torch.manual_seed(3)
    expected, _ = plain_parts(epochs=1)
    torch.manual_seed(3)
    columns: dict[str, list[float]] = {"mask": [], "dice": []}
    for records in make_sink(model.step, make_batches(), every=3):
        for name, values in columns.items():
            values += getattr(records, name).tolist()
    assert columns == {name: expected[name] for name in columns}

    record = model.step(*make_batches()[0])
    assert list(record.parts) == ["mask", "dice"]
    assert not record.parts["mask"].requires_grad
    assert len(record) == 8  # a record is the tuple that it was


# --- Evaluation and prediction ---


@pytest.mark.parametrize("form", FORMS)
def test_an_evaluation_averages_parts_with_the_weights_of_the_loss(form: str) -> None:
    model = build(form, metrics=accuracy())
    run = fit(model, epochs=1, valid=make_batches())
    scores = model.evaluate(make_batches())
    model.net.eval()
    with torch.no_grad():
        batches = [(parts_of(model.net(x), y), len(y)) for x, y in make_batches()]
    for name in ("loss", "mask", "dice"):
        total = sum(parts[name].double().item() * n for parts, n in batches)
        assert scores[name] == pytest.approx(total / sum(n for _, n in batches), rel=1e-12)
        assert run.history[0][f"valid_{name}"] == scores[name]


@pytest.mark.parametrize("form", ["forward", "forward tuple"])
def test_outputs_beside_the_loss_go_to_metrics_and_predict(form: str) -> None:
    model = build(form, metrics=accuracy())
    run = fit(model, epochs=1, valid=make_batches())
    assert run.history[0]["acc"] > 0
    predicted = model.predict(make_batches())
    model.net.eval()
    with torch.no_grad():
        expected = torch.cat([model.net(x) for x, _ in make_batches()])
    assert torch.equal(predicted, expected)
    right = (expected.argmax(1) == torch.cat([y for _, y in make_batches()])).double().mean()
    assert run.history[0]["valid_acc"] == right.item()


def test_a_loss_may_replace_the_outputs_that_metrics_get() -> None:
    def loss(out: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(out, y), "logits": F.one_hot(y, 3).float()}

    run = fit(make_model(accuracy(), loss=loss), epochs=1, valid=make_batches())
    assert (run.history[0]["acc"], run.history[0]["valid_acc"]) == (1.0, 1.0)


# --- Names ---


def test_a_part_whose_name_is_taken_gets_another() -> None:
    def loss(out: Tensor, y: Tensor) -> dict[str, Tensor]:
        value = F.cross_entropy(out, y)
        return {"loss": value, "acc": value, "lr": value, "mask": value}

    model = make_model(accuracy(), loss=loss)
    run = fit(model, epochs=1, valid=make_batches())
    assert list(run.history[0]) == [
        *("epoch", "step", "loss", "loss_acc", "loss_lr", "mask", "acc"),
        *("valid_loss", "valid_loss_acc", "valid_loss_lr", "valid_mask", "valid_acc"),
    ]
    assert run.history[0]["loss_acc"] == run.history[0]["loss"]


def test_numbers_without_names_are_called_by_their_position() -> None:
    model = make_model(loss=lambda out, y: (total_loss(out, y), out.mean(), out.std()))
    run = fit(model, epochs=1)
    assert list(run.history[0]) == ["epoch", "step", "loss", "part_1", "part_2"]


# --- Logs, resumed runs ---


@pytest.mark.parametrize("graphs", [False, True])
def test_logs_have_the_parts_and_go_on_after_a_resume(graphs: bool, tmp_path: Path) -> None:
    def train(folder: Path, *more: hs.Callback, **how: Any) -> hs.Run:
        model = build("forward", metrics=accuracy(), decide="device")
        if graphs:
            emulate_graphs(model)
        callbacks = [
            hs.Checkpoint(folder / "run"),
            hs.CSVLog(folder / "log.csv"),
            hs.JSONLLog(folder / "log.jsonl"),
            *more,
        ]
        return fit_data(model, valid=make_batches(), callbacks=callbacks, **how)

    whole_history = hs.History()
    whole = train(tmp_path / "whole", whole_history)
    train(tmp_path / "again", hs.History(), StopAt(11))
    history = hs.History()
    resumed = train(tmp_path / "again", history, resume="auto")
    assert resumed.history == whole.history
    assert history.rows == whole_history.rows
    assert history.epochs == whole_history.epochs
    for name in ("log.csv", "log.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

    with (tmp_path / "whole" / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    text = (tmp_path / "whole" / "log.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [float(row["mask"]) for row in steps] == whole_history.rows["mask"]
    assert [line["dice"] for line in lines if line["kind"] == "step"] == whole_history.rows["dice"]
    assert [line["acc"] for line in lines if line["kind"] == "step"] == whole_history.rows["acc"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    assert [float(row["valid_mask"]) for row in evaluations] == whole_history.epochs["valid_mask"]
    assert [float(row["valid_acc"]) for row in evaluations] == whole_history.epochs["valid_acc"]


def test_tensorboard_has_the_parts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected, _ = plain_parts(epochs=1)
    fit(build("function"), epochs=1, valid=make_batches(), callbacks=[hs.TensorBoard(tmp_path)])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.value for e in events.Scalars("mask")] == pytest.approx(expected["mask"], rel=1e-6)
    assert len(events.Scalars("valid/dice")) == 1


def test_a_part_can_be_followed(tmp_path: Path) -> None:
    how = {"valid": make_batches(), "callbacks": [hs.EarlyStopping("mask", 1, mode="min")]}
    fit(build("function"), **how)
    how["callbacks"] = [hs.Checkpoint(tmp_path / "run", best="valid_dice", mode="min")]
    fit(build("function"), **how)
    assert how["callbacks"][0].best_path is not None
    how["callbacks"] = [hs.EarlyStopping("masks", mode="min")]
    message = r"one of the scores 'loss', 'mask', 'dice', got 'masks'\. Did you mean 'mask'"
    with pytest.raises(ValueError, match=message):
        fit(build("function"), sink=1, **how)


# --- What is refused ---


def test_a_network_that_returns_losses_without_their_sum_says_what_to_do() -> None:
    net = make_net()
    model = hs.Model(
        net,
        None,
        torch.optim.SGD(net.parameters(), lr=0.1),
        forward=lambda net, x, y: {"mask": total_loss(net(x), y)},
    )
    with pytest.raises(TypeError, match=r"a dict of 'mask' without 'loss'.*add them up in forward"):
        fit(model)


@pytest.mark.parametrize("value", [0.5, torch.ones(8)])
def test_a_part_of_a_forward_that_is_not_one_tensor_number_is_refused(value: Any) -> None:
    def forward(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": total_loss(net(x), y), "mask_loss": value}

    net = make_net()
    model = hs.Model(net, None, torch.optim.SGD(net.parameters(), lr=0.1), forward=forward)
    with pytest.raises((TypeError, ValueError), match=r"the part 'mask_loss': expected .*number"):
        fit(model)


@pytest.mark.parametrize("graphs", [False, True])
def test_inf_in_a_part_is_recorded_and_said_once(graphs: bool) -> None:
    def loss(out: Tensor, y: Tensor) -> dict[str, Tensor]:
        value = total_loss(out, y)
        return {"loss": value, "log": (value - value.detach()).detach().log()}

    model = make_model(loss=loss, decide="device")
    if graphs:
        emulate_graphs(model)
    with pytest.warns(hs.Notice, match="'log', returned with the loss, is -inf at step 1") as said:
        run = fit(model)
    assert len(said) == 1
    assert run.history[-1]["log"] == -math.inf
    assert math.isfinite(run.history[-1]["loss"])
