"""fit(max_time=…) and fit(limit_batches=…): what they leave out, and that a run goes on from there.

Limited passes are compared with plain loops over itertools.islice, bit for bit.
"""

import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.step_program import StepProgram
from halfstep.model import Model
from halfstep.utils.durations import duration_s, format_duration
from tests.support.emulated_graphs import CPU, EmulatedGraphs

X = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(2))


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    metrics = {"acc": hs.metrics.Accuracy()}
    return Model(net, nn.CrossEntropyLoss(), optimizer, metrics=metrics, **options)


def flat_weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def dataset(batch_size: int = 8) -> hs.data.Dataset:
    """Shuffled anew in every epoch: 8 batches of 8."""
    return hs.data.Dataset((X, Y), seed=3).shuffle().batch(batch_size)


def data_loader() -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(X, Y),
        batch_size=8,
        shuffle=True,
        generator=torch.Generator().manual_seed(5),
    )


class Stream:
    """Batches whose number nobody says."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(X[i : i + 8].clone(), Y[i : i + 8]) for i in range(0, 64, 8)])


DATA: dict[str, Any] = {
    "Dataset": dataset,
    "DataLoader": data_loader,
    "list": lambda: list(Stream()),
    "no length": Stream,
}


def train_plain(data: Any, epochs: int, limit: int) -> Tensor:
    """The plain loop over the first batches of every pass."""
    model = make_model()
    net, optimizer = model.net, model.optimizer
    assert optimizer is not None
    for _ in range(epochs):
        for x, y in islice(data, limit):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return flat_weights(net)


def stop_at(step: int) -> hs.Callback:
    def stop(run: Any) -> None:
        if run.position == step:
            run.stop("enough")

    return hs.Lambda(visit=stop)


def emulate_graphs(model: Model) -> list[StepProgram]:
    """Lets the fits of a model run from graphs, by emulation; returns their programs."""
    programs: list[StepProgram] = []

    def make_runner(step: Any, feed: Any, steps: Any) -> CapturedRunner:
        program = StepProgram(step, RecordBuffer(8192, CPU), EmulatedGraphs(CPU), "raise")
        programs.append(program)
        return CapturedRunner(program, feed)

    model.captures.training_runner = make_runner
    return programs


CAPTURABLE = {"decide": "device", "nonfinite": "skip"}

# --- limit_batches ---


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", DATA)
def test_every_pass_ends_at_the_limit(kind: str, captured: bool) -> None:
    model = make_model(**CAPTURABLE)
    programs = emulate_graphs(model) if captured else []
    run = model.fit(3, DATA[kind](), limit_batches=5)
    assert run.epoch_steps == 5
    assert run.global_step == 15
    assert [entry["step"] for entry in run.history] == [5, 10, 15]
    assert not captured or programs[0].replays > 10
    # The epochs of a Dataset in a loop are those of its passes.
    data = DATA[kind]()
    if kind == "Dataset":
        passes = [list(islice(data, 8)) for _ in range(3)]
        batches = [batch for one_pass in passes for batch in one_pass[:5]]
        assert torch.equal(flat_weights(model.net), train_plain(batches, 1, 15))
    else:
        assert torch.equal(flat_weights(model.net), train_plain(data, 3, 5))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_both_kinds_end_their_pass_at_the_limit(persistent: bool) -> None:
    expected = make_model()
    expected.fit(3, dataset(), limit_batches=3)
    with_workers = make_model()
    with_workers.fit(3, dataset().workers(2), limit_batches=3)
    assert torch.equal(flat_weights(with_workers.net), flat_weights(expected.net))

    def loader() -> DataLoader[Any]:
        return DataLoader(
            TensorDataset(X, Y),
            batch_size=8,
            shuffle=True,
            generator=torch.Generator().manual_seed(5),
            num_workers=2,
            persistent_workers=persistent,
        )

    model = make_model()
    model.fit(3, loader(), limit_batches=3)
    assert torch.equal(flat_weights(model.net), train_plain(loader(), 3, 3))


@pytest.mark.parametrize(
    ("limit", "steps"), [(1, 1), (8, 8), (100, 8), (1.0, 8), (0.5, 4), (0.3, 2), (0.001, 1)]
)
def test_numbers_count_batches_and_fractions_count_of_all(limit: float, steps: int) -> None:
    model = make_model()
    run = model.fit(2, dataset(), limit_batches=limit)
    assert (run.epoch_steps, run.global_step, run.epoch_samples) == (steps, 2 * steps, 8 * steps)


@pytest.mark.parametrize("limit", [2, 0.25])
def test_validation_and_evaluate_are_limited_alike(limit: float) -> None:
    valid = hs.data.Dataset((X, Y)).batch(8)
    model = make_model()
    run = model.fit(1, dataset(), valid=valid, limit_batches=limit)
    first_batches = list(islice(Stream(), 2))
    expected = model.evaluate(first_batches)
    assert run.history[-1]["valid_loss"] == expected["loss"]
    assert run.history[-1]["valid_acc"] == expected["acc"]
    assert model.evaluate(valid, limit_batches=limit) == expected
    assert model.evaluate(valid) != expected
    assert model.evaluate(valid, limit_batches=8) == model.evaluate(valid)
    if isinstance(limit, int):
        assert model.evaluate(Stream(), limit_batches=limit) == expected


def test_a_captured_evaluation_is_limited_too() -> None:
    from halfstep.engine.captured.eval_runner import EvalRunner
    from halfstep.engine.feed import Feed
    from halfstep.engine.limits import BatchLimit

    model = make_model()
    runner = EvalRunner(model._built_in_eval, model.metrics, None, direct=True)
    for data in (hs.data.Dataset((X, Y)).batch(8), list(Stream())):
        feed = Feed(data)
        feed.limit = BatchLimit(3)
        for _ in range(2):
            scores = runner(feed, lambda: False)
            assert scores == model.evaluate(list(islice(Stream(), 3)))


def test_schedules_see_the_real_number_of_updates() -> None:
    history = hs.History()
    model = make_model(schedule=hs.schedules.linear(0.1, 6))
    model.fit(2, dataset(), limit_batches=3, callbacks=history)
    assert history.rows["lr"] == [0.1 - 0.1 * i / 6 for i in range(6)]

    short = make_model(schedule=hs.schedules.linear(0.1, 3), accumulate=2)
    with pytest.raises(ValueError, match="expected rates for 4 updates, received 3"):
        short.fit(2, dataset(), limit_batches=3)  # two updates an epoch: of 2 and of 1

    model = make_model()
    assert model.optimizer is not None
    model.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(model.optimizer, 20)
    with pytest.raises(ValueError, match="2 epochs of 3 updates, 6 in all"):
        model.fit(2, dataset(), limit_batches=3)


def test_steps_per_epoch_are_limited_and_the_data_goes_on() -> None:
    expected = make_model()
    expected.fit(4, dataset(), steps_per_epoch=3)
    model = make_model()
    model.fit(4, dataset(), steps_per_epoch=6, limit_batches=0.5)
    assert torch.equal(flat_weights(model.net), flat_weights(expected.net))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("step", [3, 5, 7])
@pytest.mark.parametrize("kind", ["Dataset", "DataLoader"])
def test_a_limited_run_is_resumed_exactly(
    kind: str, step: int, captured: bool, tmp_path: Path
) -> None:
    make_data = DATA[kind]
    whole = make_model(**CAPTURABLE)
    whole.fit(3, make_data(), valid=dataset(), limit_batches=5)
    models = []
    for stop in (step, None):
        model = make_model(**CAPTURABLE)
        if captured:
            emulate_graphs(model)
        callbacks: list[Any] = [hs.Checkpoint(tmp_path)]
        if stop is not None:
            callbacks.append(stop_at(stop))
        resume = "auto" if stop is None else None
        options = {"valid": dataset(), "limit_batches": 5, "callbacks": callbacks, "sink": 1}
        if kind == "DataLoader" and resume and step % 5:
            with pytest.warns(hs.Notice, match="DataLoader cannot seek"):
                model.fit(3, make_data(), resume=resume, **options)
        else:
            model.fit(3, make_data(), resume=resume, **options)
        models.append(model)
    assert torch.equal(flat_weights(models[1].net), flat_weights(whole.net))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("limit", "positions"),
    [
        (None, [8, 16, 24]),  # the pass goes on to its end
        (4, [6, 10, 14]),  # a pass that is beyond the limit ends with its next step
    ],
)
def test_another_limit_holds_from_the_resume_on(
    limit: int | None, positions: list[int], captured: bool, tmp_path: Path
) -> None:
    model = make_model(**CAPTURABLE)
    callbacks = [hs.Checkpoint(tmp_path), stop_at(5)]
    model.fit(3, dataset(), limit_batches=6, callbacks=callbacks, sink=1)
    model = make_model(**CAPTURABLE)
    if captured:
        emulate_graphs(model)
    with pytest.warns(hs.Notice, match=rf"limit_batches was 6 and is {limit}"):
        run = model.fit(3, dataset(), limit_batches=limit, resume=tmp_path)
    assert [entry["step"] for entry in run.history] == positions
    too_short = make_model(schedule=[0.1] * (positions[-1] - 1), **CAPTURABLE)
    with pytest.raises(ValueError, match=f"expected rates for {positions[-1]} updates"):
        too_short.fit(3, dataset(), limit_batches=limit, resume=tmp_path)


@pytest.mark.parametrize("limit", [0, -3, 0.0, 1.5, -0.5, float("nan")])
def test_limits_without_a_batch_are_refused(limit: float) -> None:
    message = "limit_batches: expected a number of batches, 1 or more, or a fraction above 0"
    model = make_model()
    with pytest.raises(ValueError, match=message):
        model.fit(1, dataset(), limit_batches=limit)
    with pytest.raises(ValueError, match=message):
        model.evaluate(dataset(), limit_batches=limit)


def test_other_mistakes_about_limits() -> None:
    for wrong in ("5", True, [3]):
        with pytest.raises(TypeError, match="limit_batches: expected a number of batches"):
            make_model().fit(1, dataset(), limit_batches=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected data that says how many batches it has"):
        make_model().fit(1, Stream(), limit_batches=0.5)


# --- max_time ---


def slow_steps() -> hs.Callback:
    return hs.Lambda(step=lambda run, row: time.sleep(0.01))


@pytest.mark.parametrize("captured", [False, True])
def test_a_run_of_many_short_calls_is_the_run_of_one_call(captured: bool, tmp_path: Path) -> None:
    whole = make_model(**CAPTURABLE)
    whole.fit(4, dataset())

    calls = []
    for _ in range(30):
        model = make_model(**CAPTURABLE)
        if captured:
            emulate_graphs(model)
        run = model.fit(
            4,
            dataset(),
            max_time=0.05,
            sink=1,
            callbacks=[slow_steps(), hs.Checkpoint(tmp_path)],
            resume="auto",
        )
        calls.append(run)
        if run.stopped is None:
            break
    assert len(calls) > 3
    assert all(run.position > before.position for before, run in pairwise(calls))
    reason = f"max_time: 0.05s were over after step {calls[0].position}"
    assert calls[0].stopped == reason
    assert calls[-1].position == 32
    assert torch.equal(flat_weights(model.net), flat_weights(whole.net))


def test_the_end_of_a_run_is_no_stop() -> None:
    run = make_model().fit(1, dataset(), max_time=1e-6, sink=8)
    assert run.stopped is None
    run = make_model().fit(2, dataset(), max_time=1e-6, sink=8)
    assert run.stopped == "max_time: 1e-06s were over after step 8"
    assert run.position == 8


def test_a_run_that_reads_rarely_stops_soon_after_its_time() -> None:
    began = time.monotonic()
    run = make_model().fit(4000, dataset(), max_time="0.6s")
    assert run.stopped is not None
    assert run.stopped.startswith("max_time: 0.6s")
    assert 0.6 <= time.monotonic() - began < 5.0


def test_lengths_of_time() -> None:
    cases: dict[Any, float] = {
        90: 90.0,
        1.5: 1.5,
        "90": 90.0,
        "45s": 45.0,
        "90 min": 5400.0,
        "1h30m": 5400.0,
        "1h 30m 5s": 5405.0,
        "2 hours": 7200.0,
        "1.5h": 5400.0,
        "1d2h": 93600.0,
        "1D": 86400.0,
        timedelta(minutes=2): 120.0,
    }
    for value, seconds in cases.items():
        assert duration_s("max_time", value) == seconds
    for wrong in ("", "soon", "1h30", "30m1h", "-5s", 0, -1.0, float("inf"), timedelta(0), "0s"):
        with pytest.raises(ValueError, match="max_time: expected seconds as a number, a text such"):
            make_model().fit(1, dataset(), max_time=wrong)
    for other in (True, [5]):
        with pytest.raises(TypeError, match="max_time: expected seconds"):
            make_model().fit(1, dataset(), max_time=other)  # type: ignore[arg-type]
    assert [format_duration(s) for s in (0.5, 45, 60, 5400, 93605)] == [
        "0.5s",
        "45s",
        "1m",
        "1h30m",
        "1d2h5s",
    ]
