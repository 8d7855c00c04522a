"""Callbacks that watch: every step once and in order; the seeds' lines, to the letter."""

import io
import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.callbacks import History, Lambda, LossMonitor, LRMonitor, ProgressLines
from halfstep.engine import Callback, Row, Run
from halfstep.model import Model

SINKS = (1, 7, 100, None)


def make_samples(count: int = 78, seed: int = 1) -> hs.data.Dataset:
    """13 batches of 6 when batched by 6; the class is where the largest of three features is."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return hs.data.Dataset((x, x[:, :3].argmax(1)))


def make_model(**options: Any) -> Model:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    options = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.5), **options}
    metrics = {"acc": hs.metrics.Accuracy()}
    return Model(net, nn.CrossEntropyLoss(), metrics=metrics, device="cpu", **options)


def fit(
    epochs: int, *callbacks: Callback, sink: int | None = None, of: Model | None = None, **how: Any
) -> Run:
    return (of or make_model()).fit(
        epochs, make_samples().batch(6), callbacks=callbacks, sink=sink, **how
    )


def plain_losses(epochs: int) -> list[float]:
    """The same training, in a bare loop."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    losses = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(epochs):
        for x, y in make_samples().batch(6):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


# every step, once, in order


@pytest.mark.parametrize("sink", SINKS)
def test_every_row_comes_once_and_in_order(sink: int | None) -> None:
    seen: list[Row] = []
    history = History()
    fit(
        2,
        history,
        Lambda(step=lambda run, row: seen.append(row)),
        sink=sink,
        valid=make_samples(30).batch(7),
    )
    assert [r.global_step for r in seen] == list(range(1, 27))
    assert [(r.epoch, r.step) for r in seen] == [(e, s) for e in (1, 2) for s in range(1, 14)]
    assert [r.loss for r in seen] == plain_losses(2)
    assert history.rows["loss"] == plain_losses(2)
    assert history.rows["samples"] == [6] * 26
    assert history.epochs["step"] == [13, 26]
    mean = np.mean(np.array(plain_losses(2)).reshape(2, 13), axis=1)
    # The sums are added in another order.
    assert history.epochs["loss"] == pytest.approx(mean.tolist(), rel=1e-15)
    assert all(0 <= acc <= 1 for acc in history.epochs["valid_acc"])


def test_events_come_in_the_order_of_the_diagram() -> None:
    events: list[str] = []
    names = ("begin", "epoch_begin", "visit", "epoch_end", "end")
    calls: dict[str, Any] = {n: lambda run, n=n: events.append(n) for n in names}
    fit(
        2,
        Lambda(step=lambda run, row: events.append("step"), **calls),
        sink=7,
        valid=make_samples(30).batch(7),
    )
    epoch = ["epoch_begin", *["step"] * 7, "visit", *["step"] * 6, "epoch_end", "visit"]
    assert events == ["begin", *epoch, *epoch, "end"]


def test_an_exact_lambda_reads_the_weights_of_its_step() -> None:
    weights: list[Tensor] = []
    fit(1, Lambda(step=lambda run, row: weights.append(run.net[0].weight.clone()), exact=True))
    assert len(weights) == 13
    assert not any(torch.equal(a, b) for a, b in pairwise(weights))
    with pytest.raises(RuntimeError, match="exact = True") as caught:
        fit(1, Lambda(step=lambda run, row: run.net), sink=7)
    assert "the callback Lambda in step" in caught.value.__notes__[0]


class Broken(Callback):
    def step(self, run: Run, row: Row) -> None:
        if row.global_step == 9:
            raise KeyError("nine")


@pytest.mark.parametrize("sink", SINKS)
def test_an_error_keeps_its_type_names_the_callback_and_the_others_end(sink: int | None) -> None:
    ended: list[Any] = []
    last = Lambda(end=lambda run: ended.append(run.error))
    with pytest.raises(KeyError, match="nine") as caught:
        fit(2, last, Broken(), Lambda(end=lambda run: ended.append(run.error)), sink=sink)
    assert caught.value.__notes__ == ["raised by the callback Broken in step, at step 9"]
    assert ended == [caught.value, caught.value]


def test_lambda_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match="expected visit as a function, got int"):
        Lambda(visit=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a function for one of begin, epoch_begin"):
        Lambda()


# losses


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize(
    ("style", "word", "digits"),
    [
        ("plain", "step:", None),
        ("mindspore", "step:", repr),
        ("mindspore-1.0", "step", repr),
        ("mindspore-float32", "step:", None),
    ],
)
def test_loss_lines(
    capsys: pytest.CaptureFixture[str], style: Any, word: str, digits: Any, sink: int | None
) -> None:
    fit(2, LossMonitor(style=style), sink=sink)
    shown = [digits(v) if digits else str(np.float32(v)) for v in plain_losses(2)]
    places = [(e, s) for e in (1, 2) for s in range(1, 14)]  # steps never wrap, whatever the sink
    expected = [
        f"epoch: {e} {word} {s}, loss is {v}" for (e, s), v in zip(places, shown, strict=True)
    ]
    assert capsys.readouterr().out.splitlines() == expected


def test_the_seeds_losses_are_printed_with_the_seeds_digits() -> None:
    """Lines of the two documents, from the float32 loss behind each."""
    for style, loss, line in (
        ("seed002", 0.5399815, "epoch: 1 step: 1000, loss is 0.5399815"),
        ("seed002", 0.00017951085, "epoch: 1 step: 1000, loss is 0.00017951085"),
        ("seed003", 1.2800476551055908, "epoch: 1 step 1000, loss is 1.2800476551055908"),
        ("mindspore", 1.2800476551055908, "epoch: 1 step: 1000, loss is 1.2800476551055908"),
        ("plain", 1.2800476551055908, "epoch: 1 step: 1000, loss is 1.2800477"),
    ):
        assert loss_line(float(np.float32(loss)), style) == line + "\n"


def loss_line(loss: float, style: Any) -> str:
    out = io.StringIO()
    row = Row(1, 1000, 1000, 32, loss, loss, 0.1, 1.0, False, 0.0, False)
    LossMonitor(1000, style=style, file=out).step(Run(None, 1, 1000), row)
    return out.getvalue()


@pytest.mark.parametrize(
    ("loss", "digits"),
    [
        (0.5, "0.5"),
        (0.1, "0.1"),
        (1 / 3, "0.3333333333333333"),
        (float(np.float32(1 / 3)), "0.33333334"),
        (2e-45, "2e-45"),
        (float(np.float32(1e-45)), "1e-45"),
        (1e300, "1e+300"),
        (-0.0, "-0.0"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_a_line_has_the_digits_of_the_loss_and_no_more(loss: float, digits: str) -> None:
    """At most nine of a float32, all of a float64; reading gives the loss, bit for bit."""
    line = loss_line(loss, "plain")
    assert line.endswith(f"loss is {digits}\n")
    read = torch.tensor(float(line.split()[-1]), dtype=torch.float64)
    assert math.isnan(loss) or loss in (read.item(), read.float().item())


def test_the_types_of_a_callback_of_ones_own_are_at_the_top() -> None:
    assert hs.Row is Row
    assert hs.Run is Run
    assert {"Row", "Run", "Callback"} <= set(hs.__all__)


def test_every_counts_steps_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    fit(2, LossMonitor(5), sink=7)
    printed = re.findall(r"epoch: (\d) step: (\d+),", capsys.readouterr().out)
    assert printed == [("1", "5"), ("1", "10"), ("2", "2"), ("2", "7"), ("2", "12")]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="every: expected a whole number, 1 or more"):
            LossMonitor(wrong)  # type: ignore[arg-type]
    styles = "'plain', 'mindspore', 'mindspore-float32', 'mindspore-1.0'"
    with pytest.raises(ValueError, match=f"style: expected one of {styles}, received 'keras'"):
        LossMonitor(style="keras")  # type: ignore[arg-type]


def data_with_inf(step: int) -> hs.data.Dataset:
    """The batches of samples(), with an inf in one."""
    x, y = next(iter(make_samples().batch(78)))
    x[6 * (step - 1)] = torch.inf
    return hs.data.Dataset((x, y)).batch(6)


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_nan_loss_ends_the_run_and_names_the_step(sink: int | None, accumulate: int) -> None:
    # The inf is in step 6; in cycles of four, step 8 is the one that moved the weights.
    step = {1: 6, 4: 8}[accumulate]
    with pytest.raises(
        hs.NonFiniteError, match=rf"epoch 1 step {step} \(step {step} of the run\): .*(nan|inf)"
    ):
        make_model(nonfinite="ignore", accumulate=accumulate).fit(
            1, data_with_inf(6), callbacks=LossMonitor(100), sink=sink
        )


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_skipped_step_is_said_to_be_skipped(
    capsys: pytest.CaptureFixture[str], accumulate: int
) -> None:
    trained = make_model(
        precision=hs.Precision("O2", scale=hs.DynamicScale(init=1024.0)), accumulate=accumulate
    )
    trained.fit(1, data_with_inf(6), callbacks=LossMonitor(), sink=7)
    lines = capsys.readouterr().out.splitlines()
    skipped = [line for line in lines if "skipped" in line]
    assert len(lines) == 13
    assert len(skipped) == 1
    step = {1: 6, 4: 8}[accumulate]
    assert skipped[0].startswith(f"epoch: 1 step: {step}, skipped at scale 1024, loss is ")


# progress, rates


@pytest.mark.parametrize("sink", SINKS)
def test_progress_lines(capsys: pytest.CaptureFixture[str], sink: int | None) -> None:
    losses = plain_losses(2)
    fit(2, ProgressLines(5, total=78), sink=sink)
    counts = [(i, c) for e in (0, 13) for i, c in ((e, 6), (e + 5, 36), (e + 10, 66))]
    assert capsys.readouterr().out.splitlines() == [
        f"loss: {losses[i]:.6f}  [{c:5d}/   78]" for i, c in counts
    ]
    fit(2, ProgressLines(5, start=0), sink=sink)  # seed 001 counts from 0; the data knows its total
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  [")[1] for line in lines] == [
        "    0/   78]",
        "   30/   78]",
        "   60/   78]",
    ] * 2


def test_progress_lines_of_data_that_does_not_say_its_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Known after one epoch."""
    batches = list(make_samples(78).batch(6))
    make_model().fit(2, batches, callbacks=[ProgressLines(5)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[1] for line in lines] == ["    ?]"] * 3 + ["   78]"] * 3


@pytest.mark.parametrize(("drop_last", "total"), [(False, 78), (True, 70)])
def test_progress_lines_know_the_samples_of_a_data_loader(
    capsys: pytest.CaptureFixture[str], drop_last: bool, total: int
) -> None:
    samples = TensorDataset(*next(iter(make_samples(78).batch(78))))
    loader = DataLoader(samples, batch_size=10, drop_last=drop_last)
    make_model().fit(1, loader, callbacks=[ProgressLines(5)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[1] for line in lines] == [f"   {total}]"] * 2

    # Batches of the user's own sampler may have any size: known after one epoch.
    sizes = [list(range(8)), list(range(8, 78))]
    loader = DataLoader(samples, batch_sampler=sizes)
    make_model().fit(2, loader, callbacks=[ProgressLines(5)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[1] for line in lines] == ["    ?]", "   78]"]


def test_the_seeds_whole_log(capsys: pytest.CaptureFixture[str]) -> None:
    run = fit(1, ProgressLines(100, total=60000, accuracy="acc"), valid=make_samples(30).batch(7))
    lines = capsys.readouterr().out.splitlines()
    acc = run.history[-1]["valid_acc"]
    loss = run.history[-1]["valid_loss"]
    first = f"loss: {plain_losses(1)[0]:.6f}  [    6/60000]"
    error = ["Test Error:", f"Accuracy: {100 * acc:.1f}%, Avg loss: {loss:.6f}", ""]
    assert lines[:-1] == ["Epoch 1", "-------------------------------", first, *error]
    assert re.fullmatch(r"Total execution time = \d+\.\d{3} sec", lines[-1])
    with pytest.raises(ValueError, match=r"accuracy= one of the metrics \('acc'\), got 'top1'"):
        fit(1, ProgressLines(accuracy="top1"))


@pytest.mark.parametrize("sink", SINKS)
def test_rates_are_those_of_the_schedule(
    capsys: pytest.CaptureFixture[str], sink: int | None
) -> None:
    torch.manual_seed(3)
    table = torch.linspace(0.5, 0.1, 13, dtype=torch.float64)
    monitor = LRMonitor(4)
    fit(1, monitor, of=make_model(schedule=table.tolist()), sink=sink)
    assert monitor.steps == [4, 8, 12]
    assert monitor.rates == table[[3, 7, 11]].tolist()
    expected = [f"epoch: 1 step: {s}, lr is {table[s - 1].item()!r}" for s in (4, 8, 12)]
    assert capsys.readouterr().out.splitlines() == expected


def test_rates_of_several_groups(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(4, 3)
    groups = [{"params": [net.weight], "lr": 0.25}, {"params": [net.bias], "lr": 0.125}]
    monitor = LRMonitor(13)
    history = History()
    fit(1, monitor, history, of=Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(groups)))
    assert capsys.readouterr().out == "epoch: 1 step: 13, lr is 0.25, 0.125\n"
    again = LRMonitor(13)
    history_again = History()
    again.load_state_dict(monitor.state_dict())
    history_again.load_state_dict(history.state_dict())
    assert again.rates == monitor.rates == [(0.25, 0.125)]
    assert history_again.rows == history.rows
    assert history_again.epochs == history.epochs


def test_events_of_other_libraries_are_a_notice() -> None:
    class Custom(Callback):
        def on_epoch_end(self, run: Run) -> None: ...
        def _end(self) -> None: ...

    with pytest.warns(
        hs.Notice, match=r"Custom.on_epoch_end is no event and is never called; events are begin, "
    ) as caught:
        make_model().fit(1, make_samples().batch(6), callbacks=[Custom()])
    assert len(caught) == 1
