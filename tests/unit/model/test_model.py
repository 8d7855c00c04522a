"""The automatic gear against loops written by hand: same weights, same losses, whatever the host looks at."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.engine import Callback, Row, Run
from halfstep.model import Model

X = torch.randn(70, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (70,), generator=torch.Generator().manual_seed(2))
PRECISIONS = ["fp32", "O1", "O2", "O3", "fp16", "bf16"]


def network(dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3)
    )


def data(batch: int = 8) -> hs.data.Dataset:
    return hs.data.Dataset({"x": X, "y": Y}, seed=3).shuffle().batch(batch)


def model(precision: str = "fp32", **options: Any) -> Model:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return Model(net, nn.CrossEntropyLoss(), optimizer, precision, **options)


def weights(net: nn.Module) -> Tensor:
    return torch.cat([t.flatten().double() for t in net.state_dict().values()])


class Rows(Callback):
    """Keeps what it was shown."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def step(self, run: Run, row: Row) -> None:
        self.rows.append(row)


class Events(Callback):
    """Writes down every event with where the run stood."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int, int]] = []

    def note(self, event: str, run: Run) -> None:
        self.seen.append((event, run.epoch, run.step, run.global_step))

    def begin(self, run: Run) -> None:
        self.note("begin", run)

    def epoch_begin(self, run: Run) -> None:
        self.note("epoch_begin", run)

    def step(self, run: Run, row: Row) -> None:
        self.note("step", run)

    def visit(self, run: Run) -> None:
        self.note("visit", run)

    def epoch_end(self, run: Run) -> None:
        self.note("epoch_end", run)

    def end(self, run: Run) -> None:
        self.note("end", run)


# the same as a loop written by hand


def test_fit_is_the_plain_loop() -> None:
    net, order = network(), hs.data.Order(70, data().plan.stages[0].seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(3):
        for numbers in order.indices(epoch, 0, 70).split(8):
            loss = nn.functional.cross_entropy(net(X[numbers]), Y[numbers])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    ours, rows = model(), Rows()
    ours.fit(3, data(), callbacks=[rows])
    assert torch.equal(weights(ours.net), weights(net))
    assert [row.loss for row in rows.rows] == losses


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_semi_automatic_gear_gives_the_same(precision: str, accumulate: int) -> None:
    ours = model(precision, accumulate=accumulate)
    ours.fit(2, data())
    net = network()
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), precision=precision,
        accumulate=accumulate,
    )  # fmt: skip
    batches = data()
    for _ in range(2):
        for batch in batches:
            step(*batch)
        step.flush()
    assert torch.equal(weights(ours.net), weights(net))


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 4}, {"steps_per_epoch": 5}, {"steps_per_epoch": 13, "accumulate": 4}],
)
def test_sink_never_changes_anything(options: dict[str, Any]) -> None:
    found = []
    fitting = {k: v for k, v in options.items() if k == "steps_per_epoch"}
    for sink in (None, 1, 7, 100):
        ours, rows = model("O2", **{k: v for k, v in options.items() if k not in fitting}), Rows()
        run = ours.fit(
            4, data(), valid=data(), valid_every_steps=6, callbacks=[rows], sink=sink, **fitting
        )
        found.append((weights(ours.net), rows.rows, run.history))
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0])
        assert other[1:] == found[0][1:]


def test_every_step_has_its_row_in_order_and_tells_where_it_is() -> None:
    rows = Rows()
    model(accumulate=4).fit(2, data(), callbacks=[rows], sink=5)
    assert [(r.epoch, r.step, r.global_step) for r in rows.rows] == [
        (e, s, 9 * (e - 1) + s) for e in (1, 2) for s in range(1, 10)
    ]
    assert [r.samples for r in rows.rows] == [8] * 8 + [6] + [8] * 8 + [6]
    # 9 batches at a cycle of 4: updates after 4 and 8, and the tail with the last
    assert [r.updated for r in rows.rows[:9]] == [False, False, False, True] * 2 + [True]


def test_an_epoch_of_steps_goes_on_in_the_data_where_it_stopped() -> None:
    """MindSpore's sink epoch: 4 epochs of 5 steps are 20 batches of a data set of 9."""
    seen: list[Tensor] = []

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            out: Tensor = self.linear(x)
            return out

    net = Seen()
    Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1)).fit(
        4, data(), steps_per_epoch=5
    )
    source = data()
    expected = [x for _ in range(3) for x, _ in source][:20]
    assert len(seen) == 20
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_events_come_in_order() -> None:
    events = Events()
    model().fit(
        2,
        hs.data.Dataset({"x": X[:24], "y": Y[:24]}).batch(8),
        valid=data(),
        callbacks=[events],
        sink=2,
    )
    epoch = ["epoch_begin", "step", "step", "visit", "step", "epoch_end", "visit"]
    assert [name for name, *_ in events.seen] == ["begin", *epoch, *epoch, "end"]
    assert events.seen[4] == ("visit", 1, 2, 2)
    assert events.seen[-2] == ("visit", 2, 3, 6)


# weights under sink


class Peek(Callback):
    """Reads weights at a step, having asked for it or not."""

    def __init__(self, at: int, ask: bool, exact: bool = False) -> None:
        self.at, self.ask, self.exact = at, ask, exact
        self.found: Tensor | None = None

    def next_stop(self, run: Run) -> int | None:
        return self.at if self.ask and run.position < self.at else None

    def step(self, run: Run, row: Row) -> None:
        if row.global_step == self.at:
            self.found = weights(run.net)


def test_declared_reads_see_the_weights_of_their_step_and_others_are_refused() -> None:
    asked, exact = Peek(5, ask=True), Peek(5, ask=False, exact=True)
    model().fit(1, data(), callbacks=[asked], sink=100)
    model().fit(1, data(), callbacks=[exact])
    reference = model()
    for batch in [b for b, _ in zip(data(), range(5), strict=False)]:
        reference.step(*batch)
    assert asked.found is not None
    assert exact.found is not None
    assert torch.equal(asked.found, weights(reference.net))
    assert torch.equal(exact.found, weights(reference.net))
    with pytest.raises(
        RuntimeError, match=r"the row is that of step 5, the network stands at 9.*next_stop\(\)"
    ):
        model().fit(1, data(), callbacks=[Peek(5, ask=False)], sink=100)


# evaluation


def test_evaluation_counts_every_sample_once() -> None:
    """MindSpore reports the last batch's loss, and drops the remainder: 70 samples in batches of 32, 32 and 6."""
    ours = model(metrics={"acc": hs.metrics.Accuracy()})
    ours.net.eval()
    with torch.no_grad():
        out = ours.net(X)
    scores = ours.evaluate(data(32))
    assert scores["acc"] == (out.argmax(1) == Y).double().mean().item()
    assert math.isclose(
        scores["loss"], nn.functional.cross_entropy(out.double(), Y).item(), rel_tol=1e-6
    )  # float32


def test_evaluation_at_epochs_and_steps() -> None:
    run = model().fit(6, data(), valid=data(), valid_every=[2, 5])
    assert [e["epoch"] for e in run.history if "valid_loss" in e] == [2, 5]
    run = model().fit(2, data(), valid=data(), valid_every=0, valid_every_steps=4)
    assert [e["step"] for e in run.history if "valid_loss" in e] == [4, 8, 12, 16]
    run = model().fit(4, data(), valid=data(), valid_every=2)
    assert [e["epoch"] for e in run.history if "valid_loss" in e] == [2, 4]
    assert [e["epoch"] for e in run.history] == [1, 2, 3, 4]


def test_evaluation_changes_nothing_in_training() -> None:
    one = model("O2", ema=0.9)
    one.fit(2, data())
    other = model("O2", ema=0.9)
    other.fit(2, data(), valid=data(5), valid_every_steps=1)
    assert torch.equal(weights(one.net), weights(other.net))


def test_every_evaluation_sees_the_same_augmented_samples() -> None:
    images = torch.rand(20, 6, 6, generator=torch.Generator().manual_seed(4))
    flipped = hs.data.Dataset({"x": images, "y": Y[:20]}).map(hs.data.Flip(), "x").batch(8)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    run = Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.0)).fit(
        3, flipped, valid=flipped
    )
    assert len({entry["valid_loss"] for entry in run.history}) == 1


def test_with_averages_the_averaged_weights_are_evaluated_predicted_and_saved(
    tmp_path: Path,
) -> None:
    ours = model(ema=0.5)
    ours.fit(1, data())
    plain = model()
    plain.fit(1, data())
    assert torch.equal(weights(ours.net), weights(plain.net))
    assert ours.evaluate(data()) != plain.evaluate(data())
    with ours.step.averaged():
        expected = ours.net.eval()(X).detach()
    ours.net.train()
    assert torch.equal(ours.predict(X, batch=70), expected)
    ours.save(tmp_path / "w.safetensors")
    third = model()
    third.load(tmp_path / "w.safetensors")
    assert torch.equal(third.predict(X, batch=70), expected)


def test_predict_takes_tensors_data_sets_and_batches() -> None:
    ours = model("O2")
    whole = ours.predict(X, batch=70)
    assert whole.dtype == torch.float32
    assert ours.net.training
    ordered = hs.data.Dataset({"x": X, "y": Y}).batch(70)
    assert torch.equal(ours.predict(ordered), whole)
    assert torch.equal(ours.predict([(X, Y)]), whole)
    parts = ours.predict(DataLoader(TensorDataset(X, Y), batch_size=35), stream=True)
    assert [len(part) for part in parts] == [35, 35]


# schedules


def test_the_schedule_counts_updates_and_skips_do_not_move_it() -> None:
    rates = [0.1 / (k + 1) for k in range(20)]
    rows = Rows()
    ours = Model(
        net := nn.Linear(6, 3), nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=1.0),
        hs.Precision("O2", scale=hs.DynamicScale(init=2.0**20)), schedule=rates,
    )  # fmt: skip
    x = X * 300  # overflows at 2^20, not at lower scales
    ours.fit(2, hs.data.Dataset({"x": x, "y": Y}).batch(8), callbacks=[rows])
    updated = [row.lr for row in rows.rows if row.updated]
    assert any(row.skipped for row in rows.rows)
    assert updated == rates[: len(updated)]


def test_torchs_schedulers_and_groups_go_through() -> None:
    net = network()
    groups = [
        {"params": net[0].parameters(), "lr": 0.1},
        {"params": [*net[1].parameters(), *net[4].parameters()]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    rows = Rows()
    Model(net, nn.CrossEntropyLoss(), optimizer, schedule=scheduler).fit(
        1, data(), callbacks=[rows]
    )
    assert [row.lr for row in rows.rows] == [
        (0.1 * 0.5 ** (k // 4), 0.01 * 0.5 ** (k // 4)) for k in range(9)
    ]


def test_a_second_fit_goes_on_with_its_own_schedule() -> None:
    ours, rows = model(schedule=hs.schedules.constant(0.05)), Rows()
    ours.fit(1, data())
    ours.fit(1, data(), callbacks=[rows])
    assert {row.lr for row in rows.rows} == {0.05}


# custom cells


def test_a_custom_step_and_a_custom_evaluation() -> None:
    net = network(0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def check(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out = net(x)
        return nn.functional.cross_entropy(out, y), out

    ours, rows = (
        Model(net, step=train, eval_step=check, metrics={"acc": hs.metrics.Accuracy()}),
        Rows(),
    )
    run = ours.fit(2, data(), valid=data(), callbacks=[rows])
    assert len(rows.rows) == 18
    assert rows.rows[-1].loss < rows.rows[0].loss
    assert set(run.history[-1]) == {"epoch", "step", "loss", "valid_loss", "valid_acc"}


# weights


def test_weights_account_for_what_matched_what_was_missing_and_what_was_reshaped(
    tmp_path: Path,
) -> None:
    source = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 10))
    Model(source).save(tmp_path / "w.safetensors")
    target = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(3, 2))
    before = {n: t.clone() for n, t in target.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"w\.safetensors: the weights.*strict=False.*takes what fits"
    ) as caught:
        Model(target).load(tmp_path / "w.safetensors")
    assert (
        "missing there: 2.weight, 2.bias; of another shape: 1.weight ([10, 16] there, [3, 16] here)"
        in str(caught.value)
    )
    assert all(torch.equal(before[n], t) for n, t in target.state_dict().items())
    account = Model(target).load(tmp_path / "w.safetensors", strict=False)
    assert account.matched == ("0.weight", "0.bias")
    assert account.missing == ("2.weight", "2.bias")
    assert set(account.reshaped) == {"1.weight", "1.bias"}
    assert torch.equal(target[0].weight, source[0].weight)


def test_a_file_that_is_no_safetensors_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(network().state_dict(), path)
    with pytest.raises(
        ValueError, match=r"expected a safetensors file, found something else.*is a pickle"
    ):
        Model(network()).load(path)
    with pytest.raises(FileNotFoundError, match="found nothing at"):
        Model(network()).load(tmp_path / "none")


# data of other kinds


def test_a_dataloader_and_a_list_of_batches_train_alike() -> None:
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 70, 8)]
    found = []
    for source in (
        batches,
        DataLoader(TensorDataset(X, Y), batch_size=8),
        hs.data.Dataset({"x": X, "y": Y}).batch(8),
    ):
        net = network(dropout=0.0)  # a DataLoader draws from torch's generator itself
        ours = Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
        ours.fit(2, source)
        found.append(weights(ours.net))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Stream:
    """Batches without a length, as an IterableDataset has."""

    def __iter__(self) -> Any:
        return iter([(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:24], Y[16:24])])


def test_data_without_a_length_ends_its_epoch_where_it_ends() -> None:
    rows, ours = Rows(), model(accumulate=2)
    ours.fit(2, Stream(), callbacks=[rows])
    assert [(r.epoch, r.step) for r in rows.rows] == [
        (1, 1),
        (1, 2),
        (1, 3),
        (2, 1),
        (2, 2),
        (2, 3),
    ]
    with pytest.raises(
        ValueError, match=r"the data does not say how long it is; give fit\(steps_per_epoch"
    ):
        model(schedule=hs.schedules.constant(0.1)).fit(1, Stream())


def test_a_hugging_face_model_with_its_own_loss() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    net = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 50, (12, 10))
    rows = [{"input_ids": t, "labels": t} for t in tokens]
    ours, seen = (
        Model(net, None, torch.optim.AdamW(net.parameters(), lr=1e-2), accumulate=2),
        Rows(),
    )
    ours.fit(
        3,
        hs.data.Dataset(rows).shuffle().batch(4),
        valid=hs.data.Dataset(rows).batch(4),
        callbacks=[seen],
    )
    assert seen.rows[-1].loss < seen.rows[0].loss
    assert ours.predict([{"input_ids": tokens}]).shape == (
        12,
        10,
        50,
    )


# one fit after another


def test_loaded_weights_are_those_of_the_averages_too(tmp_path: Path) -> None:
    trained = model()
    trained.fit(2, data())
    trained.save(tmp_path / "w.safetensors")
    averaging = model(ema=0.99)
    averaging.load(tmp_path / "w.safetensors")
    assert averaging.evaluate(data()) == trained.evaluate(data())


def test_kahan_owes_nothing_to_loaded_weights(tmp_path: Path) -> None:
    def bf16() -> Model:
        return model(hs.Precision("bf16", rounding="kahan"))  # type: ignore[arg-type]

    start = bf16()
    start.save(tmp_path / "w.safetensors")
    used, fresh = bf16(), bf16()
    used.fit(1, data())
    used.load(tmp_path / "w.safetensors")
    assert all(not residue.any() for residue in used.step.state.residue)
    assert torch.equal(weights(used.net), weights(fresh.net))


def test_weights_come_out_of_a_checkpoint(tmp_path: Path) -> None:
    trained = model("O2")
    trained.fit(1, data(), callbacks=[hs.Checkpoint(tmp_path)])
    for source in (tmp_path, tmp_path / "step-000000009"):
        other = model()
        assert other.load(source).complete
        assert torch.equal(weights(other.net), weights(trained.net))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="found none in"):
        model().load(tmp_path / "empty")


def test_a_cycle_left_open_does_not_leak_into_the_next_fit() -> None:
    ours, rows = model(accumulate=4), Rows()
    ours.fit(1, data(), steps_per_epoch=6)
    with pytest.warns(
        hs.Notice,
        match="the 2 batches of an update cycle that an earlier run left open are dropped",
    ):
        ours.fit(1, data(), callbacks=[rows])
    assert [r.updated for r in rows.rows] == [False, False, False, True] * 2 + [True]


def test_the_schedule_begins_with_each_fit() -> None:
    ours = model(schedule=hs.schedules.linear(1.0, 9))
    first, second = Rows(), Rows()
    ours.fit(1, data(), callbacks=[first])
    ours.fit(1, data(), callbacks=[second])
    assert [r.lr for r in first.rows] == [r.lr for r in second.rows]
    assert len({r.lr for r in first.rows}) == 9


def test_validating_with_a_dataloader_changes_nothing_in_training() -> None:
    found = []
    for valid in (None, DataLoader(TensorDataset(X, Y), batch_size=8)):
        ours = model()
        torch.manual_seed(3)
        ours.fit(2, data(), valid=valid)
        found.append(weights(ours.net))
    assert torch.equal(found[0], found[1])


def test_a_skipped_steps_loss_is_not_in_the_mean() -> None:
    x = X.clone()
    x[3] = torch.inf
    ours = model(hs.Precision("O2", scale=hs.DynamicScale(init=2.0**8)))  # type: ignore[arg-type]
    run = ours.fit(1, hs.data.Dataset({"x": x, "y": Y}).batch(8))
    assert math.isfinite(run.history[0]["loss"])


def test_predict_by_name_leaves_labels_out_whatever_their_place() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(
            self, x: Tensor, labels: Tensor | None = None, mask: Tensor | None = None
        ) -> dict[str, Tensor]:
            out = {"logits": self.linear(x) if mask is None else self.linear(x * mask)}
            return (
                out
                if labels is None
                else {**out, "loss": nn.functional.cross_entropy(out["logits"], labels)}
            )

    net = Named()
    ours = Model(net, None, torch.optim.SGD(net.parameters(), lr=0.1))
    mask = torch.rand(70, 6)
    named = hs.data.Dataset({"labels": Y, "mask": mask, "x": X}).batch(70)
    ours.fit(1, named)
    assert torch.equal(ours.predict(named), net(X, mask=mask)["logits"].detach())


def test_predict_with_a_forward_of_ones_own_and_without_targets() -> None:
    net = network(0.0)
    ours = Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.1),
        forward=lambda n, x, y: (n(2 * x), y),
    )
    assert torch.equal(ours.predict(hs.data.Dataset((X, Y)).batch(70)), net.eval()(2 * X).detach())
    plain = Model(net, nn.CrossEntropyLoss())
    assert torch.equal(plain.predict(X.numpy(), batch=70), net.eval()(X).detach())
    assert torch.equal(plain.predict([(X,)], targets=False), net.eval()(X).detach())


def test_a_stream_of_predictions_leaves_the_model_usable() -> None:
    ours = model(ema=0.9)
    stream = ours.predict(X, batch=8, stream=True)
    next(stream)
    ours.fit(1, data())
    assert len(next(stream)) == 8


def test_a_step_of_the_semi_automatic_gear_is_used_as_it_is() -> None:
    net = network()
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), precision="O2", ema=0.5
    )  # fmt: skip
    ours = Model(net, nn.CrossEntropyLoss(), step=step)
    ours.fit(1, data())
    assert ours.step is step
    with step.averaged():
        expected = net.eval()(X.half().float()).detach()
    net.train()
    assert (
        ours.predict(X, batch=70) - expected
    ).abs().max() < 0.02  # the same averages, computed in float16


# mistakes

MISTAKES: dict[str, tuple[Any, str]] = {
    "net": (lambda: Model("net"), "net: expected an nn.Module, got str"),
    "training without an optimizer": (lambda: Model(network(), accumulate=2), "accumulate: these are about training"),
    "fit without an optimizer": (lambda: Model(network()).fit(1, data()), "fit: this model has no optimizer"),
    "epochs": (lambda: model().fit(0, data()), "epochs: expected a whole number of 1 or more, got 0"),
    "epochs as text": (lambda: model().fit("2", data()), "epochs: expected a whole number of 1 or more, got '2'"),
    "no whole epochs": (lambda: model().fit(1.5, data()), "epochs: expected a whole number of 1 or more, got 1.5"),
    "swapped": (lambda: model().fit(data(), 3), r"fit\(epochs, data\), got them the other way.*Write fit\(3, data\)"),
    "swapped lists": (lambda: model().fit([(X, Y)], 1), r"got them the other way round. Write fit\(1, data\)"),
    "no data": (lambda: model().fit(1, None), r"expected data as batches, such as hs.data.Dataset.*got None"),
    "a number": (lambda: model().fit(1, 3), "expected data as batches, such as .*, a DataLoader or a list.*got 3"),
    "a name": (lambda: model().fit(1, "cifar10"), r"got 'cifar10'.*hs.data.load\('cifar10', 'train'\).batch"),
    "sink": (lambda: model().fit(1, data(), sink=0), "sink: expected a whole number of 1 or more, got 0"),
    "steps": (lambda: model().fit(1, data(), steps_per_epoch=-1), "steps_per_epoch: expected a whole number"),
    "valid_every": (lambda: model().fit(1, data(), valid_every="x"), "valid_every: expected a number of epochs"),
    "valid steps without data": (lambda: model().fit(1, data(), valid_every_steps=3), "expected validation data too"),
    "samples": (lambda: model().fit(1, hs.data.Dataset((X, Y))), r"got single samples.*Add \.batch\(64\)"),
    "tensors": (lambda: model().fit(1, (X, Y)), r"got whole tensors. Make them a data set"),
    "a torch data set": (lambda: model().fit(1, TensorDataset(X, Y)), r"got TensorDataset. Say how they are made"),
    "a class": (lambda: model().fit(1, data(), callbacks=[Rows]), r"expected hs.Callback objects.*Call it: Rows\(\)"),
    "twice": (lambda: model().fit(1, data(), callbacks=[r := Rows(), r]), "the same object is given twice"),
    "resume nowhere": (lambda: model().fit(1, data(), resume="auto"), "expected a Checkpoint among the callbacks"),
    "resume nothing": (lambda: model().fit(1, data(), resume="/nonexistent"), "resume: no checkpoint in"),
    "step": (lambda: Model(network(), step=3), "step: expected a function of a batch"),
    "options of no use": (lambda: Model(network(), step=print, clip_norm=1.0), "clip_norm: the step was given whole"),
    "a schedule of no use": (lambda: Model(network(), step=print, schedule=0.1), "schedule: the step was given whole"),
    "a loss class": (lambda: Model(network(), nn.CrossEntropyLoss), r"got the class CrossEntropyLoss. Write Cross"),
    "an optimizer class": (lambda: Model(network(), None, torch.optim.SGD), "got the class SGD"),
    "resume": (lambda: model().fit(1, data(), resume=True), "resume: expected 'auto', the path"),
    "fit in fit": (lambda: model().fit(1, data(), callbacks=[hs.Lambda(epoch_end=lambda r: r.model.fit(1, data()))]),
                   "this model is being fitted already"),
    "eval_step": (lambda: Model(network(), eval_step=lambda *b: 3).evaluate(data()), "eval_step: expected an EvalRec"),
    "snapshot": (lambda: model().snapshot(), "expected to be called inside fit"),
    "labels": (lambda: Model(network(), eval_step=lambda b: (torch.zeros(()), X), metrics={"a": hs.metrics.Accuracy()})
               .evaluate([{"x": X}]), "no labels among"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str) -> None:
    act, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError, FileNotFoundError, RuntimeError), match=message):
        act()
