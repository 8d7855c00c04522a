"""`Model` against loops written by hand: the same weights and losses, whatever the host reads."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.engine import Callback, Row, Run
from halfstep.model import Model
from tests.support.equal_tensors import assert_equal_tensors, copy_tensors

X = torch.randn(70, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (70,), generator=torch.Generator().manual_seed(2))
PRECISIONS = ["fp32", "O1", "O2", "O3", "fp16", "bf16"]


def make_net(dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.LayerNorm(16),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(16, 3),
    )


def make_momentum_sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def make_data(batch_size: int = 8) -> hs.data.Dataset:
    """70 samples: 9 batches of 8 an epoch, the last one of 6."""
    return hs.data.Dataset({"x": X, "y": Y}, seed=3).shuffle().batch(batch_size)


def make_model(precision: str | hs.Precision = "fp32", **options: Any) -> Model:
    net = make_net()
    return Model(net, nn.CrossEntropyLoss(), make_momentum_sgd(net), precision, **options)


def flat_weights(net: nn.Module) -> Tensor:
    """All parameters and buffers as one vector."""
    return torch.cat([tensor.flatten().double() for tensor in net.state_dict().values()])


class RowRecorder(Callback):
    """Stores the row of every step."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def step(self, run: Run, row: Row) -> None:
        self.rows.append(row)


class EventRecorder(Callback):
    """Stores every event with the epoch and the step at which it came."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int, int]] = []

    def record(self, event: str, run: Run) -> None:
        self.events.append((event, run.epoch, run.step, run.global_step))

    def begin(self, run: Run) -> None:
        self.record("begin", run)

    def epoch_begin(self, run: Run) -> None:
        self.record("epoch_begin", run)

    def step(self, run: Run, row: Row) -> None:
        self.record("step", run)

    def visit(self, run: Run) -> None:
        self.record("visit", run)

    def epoch_end(self, run: Run) -> None:
        self.record("epoch_end", run)

    def end(self, run: Run) -> None:
        self.record("end", run)


# --- The same as a loop written by hand ---


def test_fit_equals_the_plain_loop() -> None:
    net = make_net()
    optimizer = make_momentum_sgd(net)
    order = hs.data.Order(70, make_data().plan.stages[0].seed)
    losses = []
    for epoch in range(3):
        for indices in order.indices(epoch, 0, 70).split(8):
            loss = F.cross_entropy(net(X[indices]), Y[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    model = make_model()
    recorder = RowRecorder()
    model.fit(3, make_data(), callbacks=[recorder])
    assert torch.equal(flat_weights(model.net), flat_weights(net))
    assert [row.loss for row in recorder.rows] == losses


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_fit_equals_a_loop_over_train_step(precision: str, accumulate: int) -> None:
    model = make_model(precision, accumulate=accumulate)
    model.fit(2, make_data())

    net = make_net()
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        make_momentum_sgd(net),
        precision=precision,
        accumulate=accumulate,
    )
    batches = make_data()
    for _ in range(2):
        for batch in batches:
            step(*batch)
        step.flush()
    assert torch.equal(flat_weights(model.net), flat_weights(net))


@pytest.mark.parametrize(("accumulate", "steps_per_epoch"), [(1, None), (4, None), (1, 5), (4, 13)])
def test_sink_changes_no_weight_row_or_score(accumulate: int, steps_per_epoch: int | None) -> None:
    weights = []
    rows_and_history = []
    for sink in (None, 1, 7, 100):
        model = make_model("O2", accumulate=accumulate)
        recorder = RowRecorder()
        run = model.fit(
            4,
            make_data(),
            valid=make_data(),
            valid_every_steps=6,
            callbacks=[recorder],
            sink=sink,
            steps_per_epoch=steps_per_epoch,
        )
        weights.append(flat_weights(model.net))
        rows_and_history.append((recorder.rows, run.history))

    for sink_weights in weights[1:]:
        assert torch.equal(sink_weights, weights[0])
    for sink_rows_and_history in rows_and_history[1:]:
        assert sink_rows_and_history == rows_and_history[0]


def test_every_step_has_a_row_with_its_epoch_step_and_samples() -> None:
    recorder = RowRecorder()
    make_model(accumulate=4).fit(2, make_data(), callbacks=[recorder], sink=5)
    rows = recorder.rows
    assert [row.epoch for row in rows] == [1] * 9 + [2] * 9
    assert [row.step for row in rows] == [*range(1, 10), *range(1, 10)]
    assert [row.global_step for row in rows] == list(range(1, 19))
    assert [row.samples for row in rows] == ([8] * 8 + [6]) * 2
    # 9 batches in cycles of 4: updates after 4 and 8, and one of the last batch.
    assert [row.updated for row in rows[:9]] == [False, False, False, True] * 2 + [True]


def test_an_epoch_of_steps_continues_in_the_data_where_the_last_one_stopped() -> None:
    """As MindSpore's sink epochs: 4 epochs of 5 steps are 20 batches of a data set of 9."""
    inputs: list[Tensor] = []

    class InputRecorder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            inputs.append(x)
            out: Tensor = self.linear(x)
            return out

    net = InputRecorder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = Model(net, nn.CrossEntropyLoss(), optimizer)
    model.fit(4, make_data(), steps_per_epoch=5)

    data = make_data()
    expected = []
    for _ in range(3):
        expected += [x for x, _ in data]
    assert len(inputs) == 20
    assert_equal_tensors(inputs, expected[:20])


def test_events_come_in_order() -> None:
    recorder = EventRecorder()
    three_batches = hs.data.Dataset({"x": X[:24], "y": Y[:24]}).batch(8)
    make_model().fit(2, three_batches, valid=make_data(), callbacks=[recorder], sink=2)
    epoch = ["epoch_begin", "step", "step", "visit", "step", "epoch_end", "visit"]
    assert [name for name, *_ in recorder.events] == ["begin", *epoch, *epoch, "end"]
    assert recorder.events[4] == ("visit", 1, 2, 2)
    assert recorder.events[-2] == ("visit", 2, 3, 6)


# --- Callbacks that read weights, with sink= ---


class WeightReader(Callback):
    """Reads the weights at one step.

    It declares this with `next_stop`, with `exact` (a stop after every step), or not at all.
    """

    def __init__(self, step: int, *, declares_stop: bool = False, exact: bool = False) -> None:
        self.read_step = step
        self.declares_stop = declares_stop
        self.exact = exact
        self.weights: Tensor | None = None

    def next_stop(self, run: Run) -> int | None:
        if self.declares_stop and run.position < self.read_step:
            return self.read_step
        return None

    def step(self, run: Run, row: Row) -> None:
        if row.global_step == self.read_step:
            self.weights = flat_weights(run.net)


def test_declared_reads_see_the_weights_of_their_step_and_others_are_refused() -> None:
    stopping_reader = WeightReader(5, declares_stop=True)
    make_model().fit(1, make_data(), callbacks=[stopping_reader], sink=100)
    exact_reader = WeightReader(5, exact=True)
    make_model().fit(1, make_data(), callbacks=[exact_reader])

    reference = make_model()
    for batch in list(make_data())[:5]:
        reference.step(*batch)
    assert stopping_reader.weights is not None
    assert exact_reader.weights is not None
    assert torch.equal(stopping_reader.weights, flat_weights(reference.net))
    assert torch.equal(exact_reader.weights, flat_weights(reference.net))

    message = r"the row is that of step 5, the network stands at 9.*next_stop\(\)"
    with pytest.raises(RuntimeError, match=message):
        make_model().fit(1, make_data(), callbacks=[WeightReader(5)], sink=100)


# --- Evaluation and prediction ---


def test_evaluation_counts_every_sample_once() -> None:
    """70 samples in batches of 32, 32 and 6: the last batch neither is dropped nor counts as 32."""
    model = make_model(metrics={"acc": hs.metrics.Accuracy()})
    model.net.eval()
    with torch.no_grad():
        out = model.net(X)
    scores = model.evaluate(make_data(32))
    assert scores["acc"] == (out.argmax(1) == Y).double().mean().item()
    # The batches' losses are float32.
    expected_loss = F.cross_entropy(out.double(), Y).item()
    assert math.isclose(scores["loss"], expected_loss, rel_tol=1e-6)


def test_evaluation_comes_at_the_requested_epochs_and_steps() -> None:
    def evaluated_at(run: Run, unit: str) -> list[float]:
        return [entry[unit] for entry in run.history if "valid_loss" in entry]

    run = make_model().fit(6, make_data(), valid=make_data(), valid_every=[2, 5])
    assert evaluated_at(run, "epoch") == [2, 5]

    run = make_model().fit(2, make_data(), valid=make_data(), valid_every=0, valid_every_steps=4)
    assert evaluated_at(run, "step") == [4, 8, 12, 16]

    run = make_model().fit(4, make_data(), valid=make_data(), valid_every=2)
    assert evaluated_at(run, "epoch") == [2, 4]
    assert [entry["epoch"] for entry in run.history] == [1, 2, 3, 4]


def test_evaluation_changes_nothing_in_training() -> None:
    without = make_model("O2", ema=0.9)
    without.fit(2, make_data())
    evaluated = make_model("O2", ema=0.9)
    evaluated.fit(2, make_data(), valid=make_data(5), valid_every_steps=1)
    assert torch.equal(flat_weights(without.net), flat_weights(evaluated.net))


def test_every_evaluation_sees_the_same_augmented_samples() -> None:
    images = torch.rand(20, 6, 6, generator=torch.Generator().manual_seed(4))
    data = hs.data.Dataset({"x": images, "y": Y[:20]}).map(hs.data.Flip(), "x").batch(8)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    run = Model(net, nn.CrossEntropyLoss(), optimizer).fit(3, data, valid=data)
    assert len({entry["valid_loss"] for entry in run.history}) == 1


def test_with_averages_the_averaged_weights_are_evaluated_predicted_and_saved(
    tmp_path: Path,
) -> None:
    averaging = make_model(ema=0.5)
    averaging.fit(1, make_data())
    plain = make_model()
    plain.fit(1, make_data())
    assert torch.equal(flat_weights(averaging.net), flat_weights(plain.net))
    assert averaging.evaluate(make_data()) != plain.evaluate(make_data())

    with averaging.step.averaged():
        expected = averaging.net.eval()(X).detach()
    averaging.net.train()
    assert torch.equal(averaging.predict(X, batch=70), expected)

    averaging.save(tmp_path / "w.safetensors")
    loaded = make_model()
    loaded.load(tmp_path / "w.safetensors")
    assert torch.equal(loaded.predict(X, batch=70), expected)


def test_predict_takes_tensors_data_sets_and_batches() -> None:
    model = make_model("O2")
    outputs = model.predict(X, batch=70)
    assert outputs.dtype == torch.float32
    assert model.net.training
    ordered = hs.data.Dataset({"x": X, "y": Y}).batch(70)
    assert torch.equal(model.predict(ordered), outputs)
    assert torch.equal(model.predict([(X, Y)]), outputs)
    loader = DataLoader(TensorDataset(X, Y), batch_size=35)
    assert [len(part) for part in model.predict(loader, stream=True)] == [35, 35]


# --- Schedules ---


def test_the_schedule_counts_updates_and_skipped_steps_do_not_move_it() -> None:
    rates = [0.1 / (update + 1) for update in range(20)]
    recorder = RowRecorder()
    net = nn.Linear(6, 3)
    model = Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=1.0),
        hs.Precision("O2", scale=hs.DynamicScale(init=2.0**20)),
        schedule=rates,
    )
    # Gradients of these inputs overflow at a scale of 2^20, not at lower ones.
    data = hs.data.Dataset({"x": X * 300, "y": Y}).batch(8)
    model.fit(2, data, callbacks=[recorder])
    assert any(row.skipped for row in recorder.rows)
    update_rates = [row.lr for row in recorder.rows if row.updated]
    assert update_rates == rates[: len(update_rates)]


def test_torchs_schedulers_work_with_parameter_groups() -> None:
    net = make_net()
    groups = [
        {"params": net[0].parameters(), "lr": 0.1},
        {"params": [*net[1].parameters(), *net[4].parameters()]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    recorder = RowRecorder()
    model = Model(
        net, nn.CrossEntropyLoss(), optimizer, schedule=scheduler, schedule_every="update"
    )
    model.fit(1, make_data(), callbacks=[recorder])
    expected = []
    for step in range(9):
        factor = 0.5 ** (step // 4)
        expected.append((0.1 * factor, 0.01 * factor))
    assert [row.lr for row in recorder.rows] == expected


def test_a_second_fit_uses_the_schedule_too() -> None:
    model = make_model(schedule=hs.schedules.constant(0.05))
    recorder = RowRecorder()
    model.fit(1, make_data())
    model.fit(1, make_data(), callbacks=[recorder])
    assert {row.lr for row in recorder.rows} == {0.05}


# --- A user's own step ---


def test_a_custom_step_and_a_custom_evaluation_train_and_score() -> None:
    net = make_net(0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def eval_step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out = net(x)
        return F.cross_entropy(out, y), out

    metrics = {"acc": hs.metrics.Accuracy()}
    model = Model(net, step=train_step, eval_step=eval_step, metrics=metrics)
    recorder = RowRecorder()
    run = model.fit(2, make_data(), valid=make_data(), callbacks=[recorder])
    assert len(recorder.rows) == 18
    assert recorder.rows[-1].loss < recorder.rows[0].loss
    assert set(run.history[-1]) == {"epoch", "step", "loss", "valid_loss", "valid_acc"}


# --- Files of weights ---


def test_loading_names_weights_that_match_are_missing_or_have_another_shape(
    tmp_path: Path,
) -> None:
    source = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 10))
    Model(source).save(tmp_path / "w.safetensors")
    target = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(3, 2))
    before = copy_tensors(target.state_dict().values())

    message = r"w\.safetensors: the weights.*strict=False.*takes what fits"
    with pytest.raises(ValueError, match=message) as caught:
        Model(target).load(tmp_path / "w.safetensors")
    differences = (
        "missing there: 2.weight, 2.bias; of another shape: 1.weight ([10, 16] there, [3, 16] here)"
    )
    assert differences in str(caught.value)
    assert_equal_tensors(target.state_dict().values(), before)

    result = Model(target).load(tmp_path / "w.safetensors", strict=False)
    assert result.matched == ("0.weight", "0.bias")
    assert result.missing == ("2.weight", "2.bias")
    assert set(result.reshaped) == {"1.weight", "1.bias"}
    assert torch.equal(target[0].weight, source[0].weight)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_text("weights")
    message = r"expected a safetensors file or one of torch\.save, found something else"
    with pytest.raises(ValueError, match=message):
        Model(make_net()).load(path)
    with pytest.raises(FileNotFoundError, match="found nothing at"):
        Model(make_net()).load(tmp_path / "none")


# --- Data of other kinds ---


def test_a_dataloader_a_list_and_a_dataset_train_alike() -> None:
    sources = [
        [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 70, 8)],
        DataLoader(TensorDataset(X, Y), batch_size=8),
        hs.data.Dataset({"x": X, "y": Y}).batch(8),
    ]
    weights = []
    for source in sources:
        # Without dropout: a DataLoader draws from torch's generator itself.
        net = make_net(dropout=0.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        Model(net, nn.CrossEntropyLoss(), optimizer).fit(2, source)
        weights.append(flat_weights(net))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


class Stream:
    """Three batches without a length, as an IterableDataset gives them."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:24], Y[16:24])])


def test_data_without_a_length_ends_its_epoch_where_it_ends() -> None:
    recorder = RowRecorder()
    make_model(accumulate=2).fit(2, Stream(), callbacks=[recorder])
    steps = [(row.epoch, row.step) for row in recorder.rows]
    assert steps == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]

    message = r"the data does not say how long it is; give fit\(steps_per_epoch"
    with pytest.raises(ValueError, match=message):
        make_model(schedule=hs.schedules.constant(0.1)).fit(1, Stream())


def test_a_hugging_face_model_trains_with_its_own_loss() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    net = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 50, (12, 10))
    samples = [{"input_ids": sequence, "labels": sequence} for sequence in tokens]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = Model(net, None, optimizer, accumulate=2)
    recorder = RowRecorder()
    model.fit(
        3,
        hs.data.Dataset(samples).shuffle().batch(4),
        valid=hs.data.Dataset(samples).batch(4),
        callbacks=[recorder],
    )
    assert recorder.rows[-1].loss < recorder.rows[0].loss
    assert model.predict([{"input_ids": tokens}]).shape == (12, 10, 50)


# --- One fit after another ---


def test_loaded_weights_are_those_of_the_averages_too(tmp_path: Path) -> None:
    trained = make_model()
    trained.fit(2, make_data())
    trained.save(tmp_path / "w.safetensors")
    averaging = make_model(ema=0.99)
    averaging.load(tmp_path / "w.safetensors")
    assert averaging.evaluate(make_data()) == trained.evaluate(make_data())


def test_loading_weights_clears_kahan_residues(tmp_path: Path) -> None:
    precision = hs.Precision("bf16", rounding="kahan")
    make_model(precision).save(tmp_path / "w.safetensors")
    trained = make_model(precision)
    untrained = make_model(precision)
    trained.fit(1, make_data())
    trained.load(tmp_path / "w.safetensors")
    assert all(not residue.any() for residue in trained.step.state.residue)
    assert torch.equal(flat_weights(trained.net), flat_weights(untrained.net))


def test_weights_are_loaded_from_a_checkpoint(tmp_path: Path) -> None:
    trained = make_model("O2")
    trained.fit(1, make_data(), callbacks=[hs.Checkpoint(tmp_path)])
    for source in (tmp_path, tmp_path / "step-000000009"):
        loaded = make_model()
        assert loaded.load(source).complete
        assert torch.equal(flat_weights(loaded.net), flat_weights(trained.net))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="found none in"):
        make_model().load(tmp_path / "empty")


def test_an_open_cycle_does_not_leak_into_the_next_fit() -> None:
    model = make_model(accumulate=4)
    recorder = RowRecorder()
    model.fit(1, make_data(), steps_per_epoch=6)
    message = "the 2 batches of an update cycle that an earlier run left open are dropped"
    with pytest.warns(hs.Notice, match=message):
        model.fit(1, make_data(), callbacks=[recorder])
    updated = [row.updated for row in recorder.rows]
    assert updated == [False, False, False, True] * 2 + [True]


def test_the_schedule_begins_anew_with_every_fit() -> None:
    model = make_model(schedule=hs.schedules.linear(1.0, 9))
    first = RowRecorder()
    second = RowRecorder()
    model.fit(1, make_data(), callbacks=[first])
    model.fit(1, make_data(), callbacks=[second])
    assert [row.lr for row in first.rows] == [row.lr for row in second.rows]
    assert len({row.lr for row in first.rows}) == 9


def test_validating_with_a_dataloader_changes_nothing_in_training() -> None:
    weights = []
    for valid in (None, DataLoader(TensorDataset(X, Y), batch_size=8)):
        model = make_model()
        torch.manual_seed(3)
        model.fit(2, make_data(), valid=valid)
        weights.append(flat_weights(model.net))
    assert torch.equal(weights[0], weights[1])


def test_the_loss_of_a_skipped_step_is_not_in_the_mean() -> None:
    x = X.clone()
    x[3] = torch.inf
    model = make_model(hs.Precision("O2", scale=hs.DynamicScale(init=2.0**8)))
    run = model.fit(1, hs.data.Dataset({"x": x, "y": Y}).batch(8))
    assert math.isfinite(run.history[0]["loss"])


class NamedInputs(nn.Module):
    """Takes its columns by name and returns a loss if labels are among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(
        self, x: Tensor, labels: Tensor | None = None, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        if mask is not None:
            x = x * mask
        logits = self.linear(x)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def test_predict_by_name_leaves_labels_out_in_any_column_order() -> None:
    net = NamedInputs()
    model = Model(net, None, torch.optim.SGD(net.parameters(), lr=0.1))
    mask = torch.rand(70, 6)
    data = hs.data.Dataset({"labels": Y, "mask": mask, "x": X}).batch(70)
    model.fit(1, data)
    assert torch.equal(model.predict(data), net(X, mask=mask)["logits"].detach())


def test_predict_works_with_a_custom_forward_and_without_targets() -> None:
    net = make_net(0.0)
    model = Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.1),
        forward=lambda net, x, y: (net(2 * x), y),
    )
    predictions = model.predict(hs.data.Dataset((X, Y)).batch(70))
    assert torch.equal(predictions, net.eval()(2 * X).detach())

    plain = Model(net, nn.CrossEntropyLoss())
    expected = net.eval()(X).detach()
    assert torch.equal(plain.predict(X.numpy(), batch=70), expected)
    assert torch.equal(plain.predict([(X,)], targets=False), expected)


def test_a_stream_of_predictions_leaves_the_model_usable() -> None:
    model = make_model(ema=0.9)
    stream = model.predict(X, batch=8, stream=True)
    next(stream)
    model.fit(1, make_data())
    assert len(next(stream)) == 8


def test_a_train_step_given_to_a_model_is_used_as_it_is() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision="O2", ema=0.5)
    model = Model(net, nn.CrossEntropyLoss(), step=step)
    model.fit(1, make_data())
    assert model.step is step
    with step.averaged():
        expected = net.eval()(X.half().float()).detach()
    net.train()
    # The same averages, but computed in float16.
    assert (model.predict(X, batch=70) - expected).abs().max() < 0.02


def test_a_device_that_halted_between_two_host_reads_ends_the_fit_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA the host learns of a halt some calls late; here it never does by itself."""
    monkeypatch.setattr(
        "halfstep.utils.device_values.AsyncHostRead.poll", lambda self, value, device: None
    )
    batches = list(zip(X[:64].split(8), Y[:64].split(8), strict=True))
    x, y = batches[4]
    batches[4] = (x * torch.nan, y)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, decide="device", capture=False)
    with pytest.raises(hs.NonFiniteError, match="step 5: non-finite gradient in weight, bias"):
        model.fit(1, batches)
    assert int(model.step.state.updates) == 4


# --- Mistakes ---


def fit(*arguments: Any, **options: Any) -> Callable[[], Any]:
    """A call of fit with these arguments, to be made later."""
    return lambda: make_model().fit(*arguments, **options)


def build(*arguments: Any, **options: Any) -> Callable[[], Any]:
    """The construction of a Model with these arguments, to be made later."""
    return lambda: Model(*arguments, **options)


def fit_with_the_same_callback_twice() -> None:
    recorder = RowRecorder()
    make_model().fit(1, make_data(), callbacks=[recorder, recorder])


def fit_inside_fit() -> None:
    fit_again = hs.Lambda(epoch_end=lambda run: run.model.fit(1, make_data()))
    make_model().fit(1, make_data(), callbacks=[fit_again])


def evaluate_with_a_step_that_returns_a_number() -> None:
    Model(make_net(), eval_step=lambda *batch: 3).evaluate(make_data())


def evaluate_a_metric_without_labels() -> None:
    def eval_step(batch: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(()), X

    metrics = {"a": hs.metrics.Accuracy()}
    Model(make_net(), eval_step=eval_step, metrics=metrics).evaluate([{"x": X}])


NET = make_net()
DATA = make_data()
WHOLE_NUMBER = "expected a whole number of 1 or more, got "
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "net": (build("net"), "net: expected an nn.Module, got str"),
    "training without an optimizer": (
        build(NET, accumulate=2),
        "accumulate: these are about training",
    ),
    "fit without an optimizer": (
        lambda: Model(NET).fit(1, DATA),
        "fit: this model has no optimizer",
    ),
    "epochs": (fit(0, DATA), f"epochs: {WHOLE_NUMBER}0"),
    "epochs as text": (fit("2", DATA), f"epochs: {WHOLE_NUMBER}'2'"),
    "no whole epochs": (fit(1.5, DATA), f"epochs: {WHOLE_NUMBER}1.5"),
    "no data": (fit(1, None), r"expected data as batches, such as hs.data.Dataset.*got None"),
    "a number": (fit(1, 3), "expected data as batches, such as .*, a DataLoader or a list.*got 3"),
    "a name": (fit(1, "cifar10"), r"got 'cifar10'.*hs.data.load\('cifar10', 'train'\).batch"),
    "sink": (fit(1, DATA, sink=0), f"sink: {WHOLE_NUMBER}0"),
    "steps": (fit(1, DATA, steps_per_epoch=-1), "steps_per_epoch: expected a whole number"),
    "valid_every": (fit(1, DATA, valid_every="x"), "valid_every: expected a number of epochs"),
    "valid steps without data": (fit(1, DATA, valid_every_steps=3), "expected validation data too"),
    "samples": (fit(1, hs.data.Dataset((X, Y))), r"got single samples.*Add \.batch\(64\)"),
    "tensors": (fit(1, (X, Y)), r"got whole tensors. Make them a data set"),
    "a torch data set": (fit(1, TensorDataset(X, Y)), r"got TensorDataset. Say how they are made"),
    "a class": (
        fit(1, DATA, callbacks=[RowRecorder]),
        r"expected hs.Callback objects.*Call it: RowRecorder\(\)",
    ),
    "twice": (fit_with_the_same_callback_twice, "the same object is given twice"),
    "resume nowhere": (fit(1, DATA, resume="auto"), "expected a Checkpoint among the callbacks"),
    "resume nothing": (fit(1, DATA, resume="/nonexistent"), "resume: no checkpoint in"),
    "step": (build(NET, step=3), "step: expected a function of a batch"),
    "options of no use": (
        build(NET, step=print, clip_norm=1.0),
        "clip_norm: the step was given whole",
    ),
    "a schedule of no use": (
        build(NET, step=print, schedule=0.1),
        "schedule: the step was given whole",
    ),
    "a loss class": (
        build(NET, nn.CrossEntropyLoss),
        r"got the class CrossEntropyLoss. Write Cross",
    ),
    "an optimizer class": (build(NET, None, torch.optim.SGD), "got the class SGD"),
    "resume": (fit(1, DATA, resume=True), "resume: expected 'auto', the path"),
    "fit in fit": (fit_inside_fit, "this model is being fitted already"),
    "eval_step": (evaluate_with_a_step_that_returns_a_number, "eval_step: expected an EvalRec"),
    "snapshot": (lambda: make_model().snapshot(), "expected to be called inside fit"),
    "labels": (evaluate_a_metric_without_labels, "no labels among"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_advice(name: str) -> None:
    act, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError, FileNotFoundError, RuntimeError), match=message):
        act()
