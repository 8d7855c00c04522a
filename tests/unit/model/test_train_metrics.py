"""Metrics on training batches: equal to a plain torch loop, in every way that steps run."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.step_program import StepProgram
from halfstep.engine.feed import Feed
from halfstep.metrics import Accuracy
from tests.support.captured_runs import ShortSteps
from tests.support.emulated_graphs import CPU, EmulatedGraphs
from tests.support.equal_tensors import assert_equal_tensors

BATCH_SIZES = [8, 8, 8, 8, 8, 8, 8, 5]
EPOCHS = 3


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for size in BATCH_SIZES:
        x = torch.randn(size, 6, generator=generator)
        batches.append((x, torch.randint(0, 3, (size,), generator=generator)))
    return batches


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 3))


def make_model(
    metrics: Any = None, *, precision: Any = "fp32", loss: Any = None, **options: Any
) -> hs.Model:
    net = make_net()
    is_fused = precision not in ("bf16", "fp16")  # torch's fused kernels leave such weights alone
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=is_fused)
    return hs.Model(
        net, loss or nn.CrossEntropyLoss(), optimizer, precision, metrics=metrics, **options
    )


def accuracy() -> dict[str, Any]:
    return {"acc": Accuracy()}


def emulate_graphs(model: hs.Model, *, bursts: bool = False) -> dict[str, Any]:
    """Lets `fit` capture its steps by graphs that are emulated on a CPU."""
    runners: dict[str, Any] = {}

    def make_runner(step: Any, feed: Feed, steps: int | None) -> CapturedRunner:
        if "runner" not in runners or not runners["runner"].switch_feed(feed):
            program = StepProgram(step, RecordBuffer(8192, CPU), EmulatedGraphs(CPU))
            runners["runner"] = CapturedRunner(program, feed)
            if bursts:
                program.polish()
                runners["runner"].throttle = ShortSteps(CPU)
        return runners["runner"]

    model.captures.training_runner = make_runner  # type: ignore[method-assign]
    return runners


def plain_loop(
    metric: Callable[[Tensor, Tensor], Tensor], epochs: int = EPOCHS
) -> tuple[list[float], nn.Module]:
    """A metric of each epoch, from the outputs that the loss is computed from, in bare torch."""
    torch.manual_seed(7)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    torch.manual_seed(3)
    means = []
    for _ in range(epochs):
        values = []
        for x, y in make_batches():
            out = net(x)
            values.append(metric(out.detach(), y).double())
            optimizer.zero_grad()
            F.cross_entropy(out, y).backward()
            optimizer.step()
        all_values = torch.cat(values)
        means.append(float(all_values.sum()) / len(all_values))
    return means, net


def is_right(out: Tensor, y: Tensor) -> Tensor:
    return out.argmax(1) == y


def fit(model: hs.Model, epochs: int = EPOCHS, **how: Any) -> hs.Run:
    torch.manual_seed(3)
    return model.fit(epochs, make_batches(), **how)


def fit_data(model: hs.Model, **how: Any) -> hs.Run:
    """The same samples from a data set that seeks, for runs that stop and go on."""
    x, y = (torch.cat(column) for column in zip(*make_batches(), strict=True))
    torch.manual_seed(3)
    return model.fit(EPOCHS, hs.data.Dataset((x, y), seed=4).shuffle().batch(8), **how)


# --- Equal to plain torch ---


@pytest.mark.parametrize("way", ["eager", "emulated graphs", "sink 3", "bursts"])
def test_the_accuracy_of_an_epoch_is_that_of_a_plain_loop(way: str) -> None:
    expected, net = plain_loop(is_right)
    model = make_model(accuracy(), decide="device")
    runners = {}
    if way in ("emulated graphs", "bursts"):
        runners = emulate_graphs(model, bursts=way == "bursts")
    run = fit(model, sink=3 if way == "sink 3" else None)
    assert [entry["acc"] for entry in run.history] == expected
    assert_equal_tensors(model.net.state_dict().values(), net.state_dict().values())
    if runners:
        assert runners["runner"].program.replays > len(BATCH_SIZES)
        assert runners["runner"].program.refusal_reason == ""


def test_a_function_and_another_librarys_metric_count_the_same() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = {
        "acc": Accuracy(),
        "by_function": lambda out, y: (out.argmax(1) == y).float(),
        "by_torchmetrics": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
    }
    expected, _ = plain_loop(is_right)
    run = fit(make_model(metrics), valid=make_batches())
    for entry, value in zip(run.history, expected, strict=True):
        assert entry["acc"] == value
        assert entry["by_function"] == value
        assert entry["by_torchmetrics"] == pytest.approx(value, abs=1e-6)  # it divides in float32
    # Its own counts are those of the evaluation alone.
    last = run.history[-1]
    assert last["valid_by_torchmetrics"] == pytest.approx(last["valid_acc"], abs=1e-6)


def test_the_whole_step_as_one_program_counts_what_eager_steps_count() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(40)
    ]

    def train(**options: Any) -> hs.Run:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
        model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, metrics=accuracy(), **options)
        run = model.fit(3, batches)
        if options:
            program = model.captures._runner.program
            assert program.refusal_reason == ""
            assert program.replays >= 80
        return run

    eager = train()
    compiled = train(compile=True)
    for one, other in zip(eager.history, compiled.history, strict=True):
        assert one["acc"] == other["acc"]  # whole numbers of right answers, in spite of rounding
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_bits_of_training_do_not_depend_on_metrics(precision: str, accumulate: int) -> None:
    nets = []
    losses = []
    for options in ({"metrics": accuracy()}, {"metrics": accuracy(), "train_metrics": False}, {}):
        model = make_model(precision=precision, accumulate=accumulate, **options)
        history = hs.History()
        fit(model, callbacks=[history])
        nets.append(model.net)
        losses.append(history.rows["loss"])
    for net in nets[1:]:
        assert_equal_tensors(net.state_dict().values(), nets[0].state_dict().values())
    assert losses[0] == losses[1] == losses[2]


def test_outputs_come_in_float32_from_a_low_network() -> None:
    seen = []

    def remember(out: Tensor, y: Tensor) -> Tensor:
        seen.append((out.dtype, out.requires_grad))
        return is_right(out, y).float()

    fit(make_model({"acc": remember}, precision="bf16"), epochs=1)
    assert set(seen) == {(torch.float32, False)}


def test_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a visit nothing is read, after the first update: metrics add no read."""
    reads = []
    item = Tensor.item
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "item", lambda t: (reads.append("item"), item(t))[1])
    monkeypatch.setattr(Tensor, "tolist", lambda t: (reads.append("list"), tolist(t))[1])
    counts = []
    for metrics in (None, accuracy()):
        reads.clear()
        fit(make_model(metrics, decide="device"), sink=len(BATCH_SIZES))
        counts.append(len(reads))
    assert counts[1] - counts[0] <= EPOCHS  # one more at each visit


# --- Skipped steps, cycles, interruptions ---


@pytest.mark.parametrize("graphs", [False, True])
def test_a_skipped_step_is_left_out_as_its_loss_is(graphs: bool) -> None:
    batches = make_batches()[:-1] * 2
    batches[5] = (torch.full((8, 6), torch.nan), torch.zeros(8, dtype=torch.int64))
    batches[9] = (torch.full((8, 6), torch.nan), torch.zeros(8, dtype=torch.int64))
    model = make_model(accuracy(), decide="device", nonfinite="skip")
    if graphs:
        emulate_graphs(model)
    history = hs.History()
    torch.manual_seed(3)
    run = model.fit(1, batches, callbacks=[history])
    skipped = history.rows["skipped"]
    assert [i for i, flag in enumerate(skipped) if flag] == [5, 9]
    good = [acc for acc, flag in zip(history.rows["acc"], skipped, strict=True) if not flag]
    assert run.history[0]["acc"] == sum(good) / len(good)
    assert not math.isnan(run.history[0]["loss"])


@pytest.mark.parametrize("graphs", [False, True])
def test_every_batch_of_a_cycle_counts(graphs: bool) -> None:
    model = make_model(accuracy(), accumulate=3, decide="device")
    if graphs:
        emulate_graphs(model)
    history = hs.History()
    run = fit(model, callbacks=[history])
    rows = history.rows
    for epoch in range(EPOCHS):
        part = slice(epoch * len(BATCH_SIZES), (epoch + 1) * len(BATCH_SIZES))
        right = sum(
            acc * n for acc, n in zip(rows["acc"][part], rows["samples"][part], strict=True)
        )
        assert run.history[epoch]["acc"] == pytest.approx(right / sum(BATCH_SIZES), abs=1e-12)
    eager = make_model(accuracy(), accumulate=3)
    assert fit(eager).history == run.history


class StopAt(hs.Callback):
    writes = True

    def __init__(self, step: int) -> None:
        self.step_number = step

    def next_stop(self, run: hs.Run) -> int | None:
        return self.step_number

    def visit(self, run: hs.Run) -> None:
        if run.position == self.step_number:
            run.stop("asked for")


@pytest.mark.parametrize("graphs", [False, True])
def test_a_run_that_was_stopped_within_an_epoch_goes_on_with_its_counts(
    graphs: bool, tmp_path: Path
) -> None:
    def model_for(metrics: Any) -> hs.Model:
        model = make_model(metrics, decide="device")
        if graphs:
            emulate_graphs(model)
        return model

    whole = fit_data(model_for(accuracy()))
    checkpoint = hs.Checkpoint(tmp_path / "run")
    stopped = fit_data(model_for(accuracy()), callbacks=[checkpoint, StopAt(11)])
    assert len(stopped.history) == 1
    run = fit_data(
        model_for(accuracy()), callbacks=[hs.Checkpoint(tmp_path / "run")], resume="auto"
    )
    assert run.history == whole.history


def test_torchmetrics_goes_on_within_an_epoch_too(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def metrics() -> dict[str, Any]:
        return {"acc": torchmetrics.classification.MulticlassAccuracy(3, average="micro")}

    whole = fit_data(make_model(metrics()))
    fit_data(make_model(metrics()), callbacks=[hs.Checkpoint(tmp_path / "run"), StopAt(11)])
    again = [hs.Checkpoint(tmp_path / "run")]
    run = fit_data(make_model(metrics()), callbacks=again, resume="auto")
    assert [entry["acc"] for entry in run.history] == [entry["acc"] for entry in whole.history]


def test_a_checkpoint_from_before_training_metrics_goes_on(tmp_path: Path) -> None:
    whole = fit_data(make_model(accuracy()))
    callbacks = [hs.Checkpoint(tmp_path / "run"), StopAt(11)]
    # Its tree is that of older versions.
    fit_data(make_model(accuracy(), train_metrics=False), callbacks=callbacks)
    again = [hs.Checkpoint(tmp_path / "run")]
    run = fit_data(make_model(accuracy()), callbacks=again, resume="auto")
    assert "acc" not in run.history[0]
    assert run.history[1]["loss"] == whole.history[1]["loss"]
    assert run.history[2] == whole.history[2]


# --- What cannot be counted ---


def test_captured_steps_leave_a_function_to_evaluations_and_say_so() -> None:
    metrics = {"acc": Accuracy(), "mine": lambda out, y: (out.argmax(1) == y).float()}
    model = make_model(metrics, decide="device")
    runners = emulate_graphs(model)
    with pytest.warns(hs.Notice, match=r"'mine': counted in evaluations only, as the steps are"):
        run = fit(model, valid=make_batches())
    assert runners["runner"].program.replays > 0
    assert runners["runner"].program.refusal_reason == ""
    assert [entry["acc"] for entry in run.history] == plain_loop(is_right)[0]
    assert "mine" not in run.history[0]
    assert run.history[0]["valid_mine"] == run.history[0]["valid_acc"]


class Collector:
    """A metric of the user's own that keeps all that it sees."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.seen.append(outputs.argmax(1) == labels)

    def compute(self) -> Tensor:
        return torch.cat(self.seen).double().mean()

    def reset(self) -> None:
        self.seen = []


def test_a_metric_that_may_keep_everything_counts_where_it_is_named() -> None:
    with pytest.warns(hs.Notice, match=r"'mine': counted in evaluations only.*train_metrics=\["):
        run = fit(make_model({"mine": Collector()}), valid=make_batches())
    assert "mine" not in run.history[0]
    model = make_model({"mine": Collector()}, train_metrics=["mine"])
    run = fit(model, valid=make_batches())
    assert [entry["mine"] for entry in run.history] == plain_loop(is_right)[0]


def test_a_name_that_is_no_metric_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train_metrics: .*names of metrics= \('acc'\), got 'ac'"):
        make_model(accuracy(), train_metrics=["ac"])


def test_a_metric_that_does_not_fit_training_outputs_is_left_to_evaluations() -> None:
    def forward(net: nn.Module, x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(net(x), y)
        return loss if net.training else (loss, net(x))

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(net, None, optimizer, forward=forward, metrics=accuracy())
    with pytest.warns(hs.Notice, match=r"'acc' cannot be counted on .*only the loss was returned"):
        run = fit(model, epochs=1, valid=make_batches())
    assert run.history[0]["acc"] is None
    assert run.history[0]["valid_acc"] > 0


def test_an_empty_batch_counts_nothing() -> None:
    batches = make_batches()
    batches.insert(2, (torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64)))
    model = make_model(accuracy())
    torch.manual_seed(3)
    run = model.fit(EPOCHS, batches)
    assert [entry["acc"] for entry in run.history] == plain_loop(is_right)[0]


@pytest.mark.parametrize("graphs", [False, True])
def test_labels_that_are_set_later_are_those_of_the_next_fit(graphs: bool) -> None:
    model = make_model({"acc": Accuracy()}, decide="device")
    if graphs:
        emulate_graphs(model)
    fit(model, epochs=1)
    state = {name: value.clone() for name, value in model.net.state_dict().items()}
    model.labels = lambda batch: (batch[1] + 1) % 3
    by_name = make_model({"acc": Accuracy()}, labels=lambda batch: (batch[1] + 1) % 3)
    by_name.net.load_state_dict(state)
    history = hs.History()
    fit(by_name, epochs=1, callbacks=[history])
    again = hs.History()
    fit(model, epochs=1, callbacks=[again])
    # From the second batch on the momentum of the first fit makes a difference.
    assert again.rows["acc"][0] == history.rows["acc"][0]


def test_after_fit_nobody_looks_at_the_steps() -> None:
    model = make_model(accuracy())
    fit(model, epochs=1)
    record = model.step(*make_batches()[0])
    assert dict(record.counts) == {}
    assert model.step.objective.observer is None
