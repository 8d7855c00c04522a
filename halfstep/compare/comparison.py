"""A comparison: check everything, then train run by run; the summary is rewritten after each run.

A run is one precision with one seed. Its result is a plain dict, ready for JSON.
"""

import math
import shutil
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.callbacks import Checkpoint
from halfstep.checkpoint import CheckpointError
from halfstep.compare import summary, verdict
from halfstep.compare.curves import RunCurves
from halfstep.compare.progress import Progress, SilentProgress
from halfstep.distributed import Ranks
from halfstep.engine import Callback
from halfstep.engine.signals import OTHER_RANK
from halfstep.errors import Notice
from halfstep.experiment import output_folder
from halfstep.experiment.build import (
    build_model,
    check_one_batch,
    warn_about_large_batch,
)
from halfstep.experiment.datasets import TrainTestData, load_train_test_data
from halfstep.experiment.machine import BusyMachineWarning, PeakMemory, describe_environment
from halfstep.experiment.output_folder import run_folder
from halfstep.experiment.rank_agreement import join_ranks, refused_together
from halfstep.experiment.saved_comparison import read_result
from halfstep.experiment.settings import Settings
from halfstep.experiment.typed_command import command_for_all
from halfstep.model import Model
from halfstep.precision.advice import HalfUnits, find_half_units, precisions_to_compare
from halfstep.utils.files import write_json
from halfstep.utils.rng import seed_everything
from halfstep.utils.text import list_some, plural
from halfstep.utils.user_code import failing_sample

CHECKPOINT_EVERY_S = 60  # within an epoch, which may be long

Result = dict[str, Any]


def compare(
    settings: Settings,
    out: str | Path,
    *,
    progress: Progress | None = None,
    fresh: bool = False,
    retry: bool = False,
    command: str = "halfstep.compare.compare",
) -> dict[str, Any]:
    """Trains every precision with every seed and says which to use: the content of compare.json.

    Called again with the same settings and folder it goes on: finished runs stay, the interrupted
    one continues from its checkpoint, bit for bit. With other seeds or precisions it trains what is
    missing of them, and the finished runs of before stay in the table. Other settings raise an
    `OtherComparisonError`. `retry` repeats the failed runs, `fresh` all of them.
    """
    out = Path(out)
    ranks = join_ranks(settings.torch_device)
    if progress is None or ranks.index > 0:
        progress = SilentProgress()
    with _notices_to(progress):
        # A data function that draws gives the same data for every seed, and when it goes on.
        seed_everything(0)
        with refused_together(ranks, "reading the data"):
            data = load_train_test_data(settings, training=True)
            _refuse_regression(settings, data)
        check_one_batch(settings, data)
        warn_about_large_batch(settings, data)

    # Rank 0 alone uses the folder. The others learn from it which runs are finished.
    head: dict[str, Any] = {}
    earlier_runs: list[Result] = []
    results: list[Result] = []
    with ExitStack() as folder_lock:
        with refused_together(ranks, "the output folder"):
            if ranks.index == 0:
                folder_lock.enter_context(output_folder.lock_output_folder(out))
                if fresh:
                    output_folder.remove_comparison(out)
                head, earlier_runs = _describe_comparison(settings, data, out, command, progress)
                results = _read_results(settings, out, data.test.size, skip_failed=retry)
        results = ranks.broadcast_object(results, "the finished runs")
        content = _train_all(settings, data, out, head, results, earlier_runs, progress, ranks)
        summary_of_all: dict[str, Any] = ranks.broadcast_object(content, "the summary")
        return summary_of_all


def _refuse_regression(settings: Settings, data: TrainTestData) -> None:
    if data.is_regression:
        raise ValueError(
            f"target: expected classes, and {settings.target!r} is a number: a comparison "
            "counts right answers. Train in each precision instead: halfstep train --precision"
        )


def _describe_comparison(
    settings: Settings, data: TrainTestData, out: Path, command: str, progress: Progress
) -> tuple[dict[str, Any], list[Result]]:
    """The head of the summary, and the finished runs of before that stay in it."""
    spec = _build_spec(settings, data)
    machine = describe_environment(settings.torch_device)
    before = output_folder.check_same_comparison(out, spec, machine)
    earlier_runs = []
    if before is not None:
        earlier_runs = output_folder.finished_runs_beside(out, before, settings, data.test.size)
        spec = _add_earlier_runs(spec, before, earlier_runs, progress)
        usual = precisions_to_compare(find_half_units(settings.torch_device))
        command = command_for_all(command, spec["precisions"], spec["seeds"], usual)
    head = {
        "halfstep_compare": output_folder.FORMAT_VERSION,
        "title": f"{settings.net} on {settings.data}",
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "environment": machine,
        "spec": spec,
        "planned_runs": len(settings.precision_seed_pairs) + len(earlier_runs),
    }
    return head, earlier_runs


def _build_spec(settings: Settings, data: TrainTestData) -> dict[str, Any]:
    """The settings, with the real numbers of samples; a constant rate is saved as no schedule."""
    spec = settings.to_spec()
    if settings.schedule == "constant":
        spec["schedule"] = None
    spec["samples"] = data.train.size
    spec["test_samples"] = data.test.size
    return spec | data.chosen


def _add_earlier_runs(
    spec: dict[str, Any],
    before: Mapping[str, Any],
    earlier_runs: Sequence[Result],
    progress: Progress,
) -> dict[str, Any]:
    """The settings with the precisions and seeds of the runs that stay in the table.

    The reference stays the first one asked for, unless a comparison is only added to.
    """
    if not earlier_runs:
        return spec
    merged = dict(spec)
    for name, field in (("precisions", "precision"), ("seeds", "seed")):
        present = [run[field] for run in earlier_runs]
        earlier = [value for value in before["spec"][name] if value in present]
        merged[name] = list(dict.fromkeys([*spec[name], *earlier]))

    # Without the reference of before, precisions were asked for as additions to it.
    reference = before["spec"]["precisions"][0]
    if reference in merged["precisions"] and reference not in spec["precisions"]:
        before_first = [*before["spec"]["precisions"], *spec["precisions"]]
        merged["precisions"] = [
            name for name in dict.fromkeys(before_first) if name in merged["precisions"]
        ]
    names = sorted({f"{run['precision']} seed {run['seed']}" for run in earlier_runs})
    progress.note(
        f"{plural(len(names), 'finished run')} of before {'stays' if len(names) == 1 else 'stay'} "
        f"in the table: {list_some(names, 4)}; the reference is {merged['precisions'][0]}"
    )
    return merged


def _train_all(
    settings: Settings,
    data: TrainTestData,
    out: Path,
    head: dict[str, Any],
    results: list[Result],
    earlier_runs: list[Result],
    progress: Progress,
    ranks: Ranks,
) -> dict[str, Any]:
    """Trains the runs that have no result yet. Returns the summary; rank 0 has and writes it."""
    writes = ranks.index == 0
    finished = {(result["precision"], result["seed"]) for result in results}
    progress.begin(settings, data, len(results))
    results = [*results, *earlier_runs]
    units = find_half_units(settings.torch_device)
    content = _write_summary(out, head, results, units) if writes else {}
    watchers: list[Callback] = []
    if ranks.count == 1:  # the other ranks are busy, as they should be
        command = head["command"]
        watchers = [BusyMachineWarning(settings.torch_device, command, progress.note)]
    try:
        for precision, seed in settings.precision_seed_pairs:
            if (precision, seed) in finished:
                continue
            folder = run_folder(out, precision, seed)
            with _notices_to(progress):
                callbacks = [*progress.callbacks(precision, seed), *watchers]
                result = _train_one(settings, data, precision, seed, folder, callbacks, ranks)
            if writes:
                results.append(result)
                content = _write_summary(out, head, results, units)
            progress.done(result)
    finally:
        progress.end()
    return content


def _read_results(
    settings: Settings, out: Path, image_count: int, *, skip_failed: bool
) -> list[Result]:
    """Results of the runs that are finished."""
    results: list[Result] = []
    for precision, seed in settings.precision_seed_pairs:
        path = run_folder(out, precision, seed) / output_folder.RESULT_FILE
        result = read_result(path, image_count)
        if result is None:
            continue
        if (result["precision"], result["seed"]) != (precision, seed):
            raise ValueError(
                f"{path}: expected the result of {precision} with seed {seed}, got that of "
                f"{result['precision']!r} with seed {result['seed']}. Remove that file, or name "
                "another folder: --out"
            )
        if skip_failed and result["status"] == "failed":
            continue
        results.append(result)
    return results


def _write_summary(
    out: Path, head: dict[str, Any], results: list[Result], units: HalfUnits
) -> dict[str, Any]:
    """Writes compare.json, its runs in the order of precisions, then seeds. Returns its content."""
    spec = head["spec"]
    pairs = [(precision, seed) for precision in spec["precisions"] for seed in spec["seeds"]]
    runs = sorted(results, key=lambda run: pairs.index((run["precision"], run["seed"])))
    rows = summary.build_rows(spec, runs)
    content = {
        **head,
        "runs": runs,
        "rows": rows,
        "recommendation": summary.recommend(
            spec, rows, runs, units, planned_runs=head["planned_runs"]
        ),
    }
    write_json(out / output_folder.SUMMARY_FILE, content)
    return content


@contextmanager
def _notices_to(progress: Progress) -> Iterator[None]:
    """Inside, notices go to the progress display; other warnings stay what they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        show_as_before = warnings.showwarning

        def show(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
            if issubclass(category, Notice):
                progress.note(str(message))
            else:
                show_as_before(message, category, *args, **kwargs)

        warnings.showwarning = show
        yield


# One run


def _train_one(
    settings: Settings,
    data: TrainTestData,
    precision: str,
    seed: int,
    folder: Path,
    callbacks: Sequence[Callback],
    ranks: Ranks,
) -> Result:
    """Trains one run, or goes on from its checkpoint; writes its result, removes the checkpoints.

    Whatever the network, the precision or the device raise is the run's result, and the comparison
    goes on. An error of the disk is not: the other runs would have it too. Of several ranks only an
    error that all of them have is a result: numbers that are not finite.
    """
    steps_per_epoch = data.train_batches(seed, settings.batch).size
    curves = RunCurves(settings.epochs * steps_per_epoch)
    peak_memory = PeakMemory(settings.torch_device)
    result: Result = {
        "precision": precision,
        "seed": seed,
        "status": "done",
        "error": None,
        "epochs": [],
        "loss": None,
        "acc": None,
        "final_scale": None,
        "correct": None,
        "chance_correct": None,
        "dtypes": [],
        "choices": {},
    }
    try:
        model = build_model(settings, data, precision, seed)
        _fit(settings, data, model, seed, [curves, *callbacks, _checkpoints_in(folder)])
        result |= _final_scores(curves)
        result |= _inspect_model(model, data, settings)
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        if ranks.count > 1 and not isinstance(error, FloatingPointError):
            raise
        result["status"] = "failed"
        result["error"] = _describe_error(error)

    result |= _counts_and_times(curves, steps_per_epoch, data.train.size)
    result["peak_memory"] = peak_memory.read()
    result["memory_kind"] = peak_memory.kind
    if ranks.index > 0:
        return result
    write_json(folder / output_folder.RESULT_FILE, result)
    for path in folder.glob("step-*"):
        shutil.rmtree(path, ignore_errors=True)
    return result


def _fit(
    settings: Settings, data: TrainTestData, model: Model, seed: int, callbacks: list[Callback]
) -> None:
    run = model.fit(
        settings.epochs,
        data.train_batches(seed, settings.batch),
        valid=data.test_batches(settings.batch),
        callbacks=callbacks,
        progress=False,
        sink=settings.sink,
        resume="auto",
    )
    if run.stopped == OTHER_RANK:
        raise SystemExit(128 + signal.SIGTERM)


def _checkpoints_in(folder: Path) -> Checkpoint:
    return Checkpoint(
        folder, every_epochs=1, every_seconds=CHECKPOINT_EVERY_S, keep=1, on_error=False
    )


def _final_scores(curves: RunCurves) -> Result:
    """Test loss and accuracy after the last epoch; without a finite loss the run has failed."""
    last_epoch = curves.history[-1]
    loss = last_epoch["valid_loss"]
    if not math.isfinite(loss):
        raise FloatingPointError(f"the test loss is {loss} after the last epoch")
    return {"loss": loss, "acc": last_epoch["valid_acc"]}


def _inspect_model(model: Model, data: TrainTestData, settings: Settings) -> Result:
    """Which test samples the model gets right, its dtypes, and the loss scale of the next step.

    Beside them, which samples have the most frequent class: what a network gets right that has
    learned nothing.
    """
    batches = data.test_batches(settings.batch)
    outputs = model.predict(batches)
    batches.seek(0)
    labels = torch.cat([torch.as_tensor(batch[-1]).cpu() for batch in batches])

    report = model.report()
    dtypes = [
        {"module": name or "(network)", **module_dtypes._asdict()}
        for name, module_dtypes in report.modules.items()
    ]
    final_scale = None
    if model.step.applied.precision.loss_scale.is_active:
        final_scale = float(model.step.state.scale)
    return {
        "correct": verdict.pack_bits(_correct_samples(outputs, labels)),
        "chance_correct": verdict.pack_bits(labels == labels.mode().values),
        "dtypes": dtypes,
        "choices": dict(report.choices),
        "final_scale": final_scale,
    }


def _correct_samples(outputs: Any, labels: Tensor) -> Tensor:
    """As the accuracy counts: the first of equal scores wins, and a sample with a NaN is wrong."""
    scores = outputs.flatten(1)
    is_correct: Tensor = (scores.argmax(1) == labels) & ~scores.isnan().any(1)
    return is_correct


def _counts_and_times(curves: RunCurves, steps_per_epoch: int, samples_per_epoch: int) -> Result:
    """Curves, counts and times, of a failed run too. `epochs` holds those that were finished."""
    names = ("epoch", "loss", "valid_loss", "valid_acc")
    epochs = []
    for entry, seconds in zip(curves.history, curves.epoch_seconds, strict=False):
        epochs.append({name: entry[name] for name in names} | {"seconds": seconds})

    ms_per_step = None
    s_per_epoch = None
    samples_per_s = None
    step_seconds = curves.step_seconds
    if step_seconds:
        ms_per_step = 1000 * step_seconds
        s_per_epoch = step_seconds * steps_per_epoch
        samples_per_s = samples_per_epoch / s_per_epoch
    return {
        "epochs": epochs,
        "curve": curves.curve | {"step": [int(step) for step in curves.curve["step"]]},
        "skipped_steps": curves.skipped_steps,
        "steps": curves.steps,
        "updates": curves.updates,
        "samples": curves.samples,
        "skipped": len(curves.skipped_steps),
        "ms_per_step": ms_per_step,
        "s_per_epoch": s_per_epoch,
        "samples_per_s": samples_per_s,
    }


def _describe_error(error: Exception) -> str:
    """The error, its notes, and the sample of a user's data set that raised it."""
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    sample_note = failing_sample(error)
    if sample_note is not None:
        lines.append(sample_note)
    return "\n".join(lines)
