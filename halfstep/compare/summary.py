"""From results to the table: a row and a verdict for each precision, and one recommendation."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from halfstep.compare import verdict
from halfstep.compare.verdict import Verdict
from halfstep.precision.advice import FASTER_SHARE, HalfUnits, StepTime, advise

Result = Mapping[str, Any]
Row = dict[str, Any]

MAX_ERROR_LENGTH = 80  # characters of an error in a cell of the table


# The table


def build_rows(spec: Mapping[str, Any], results: Sequence[Result]) -> list[Row]:
    """One row for each precision, in the order of the settings; the first is the reference."""
    runs_by_seed: dict[str, dict[int, Result]] = {}
    for precision in spec["precisions"]:
        runs_by_seed[precision] = {
            result["seed"]: result for result in results if result["precision"] == precision
        }
    reference = spec["precisions"][0]
    reference_learned = _has_learned(runs_by_seed[reference], spec)
    table: list[Row] = []
    for precision, runs in runs_by_seed.items():
        has_learned = _has_learned(runs, spec)
        precision_verdict = _reach_verdict(
            precision, runs, reference, runs_by_seed[reference], spec
        )
        # Two networks that learned nothing are alike in every precision.
        if has_learned is False and reference_learned is False:
            precision_verdict = _verdict_at_chance(precision_verdict)
        row = _build_row(precision, runs, precision_verdict, spec["samples"])
        row["chance"] = _chance_share(runs, spec)
        row["at_chance"] = has_learned is False
        table.append(row)
    return table


def _has_learned(runs: Mapping[int, Result], spec: Mapping[str, Any]) -> bool | None:
    """Whether a precision is better than always answering the most frequent class.

    None where this is not known: no finished run says how often that is right (earlier versions
    did not note it), or classes are weighted, so that the network is not trained for accuracy.
    """
    runs_with_chance = _runs_with_chance(runs)
    if not runs_with_chance or spec.get("class_weights") is not None:
        return None
    image_count = spec["test_samples"]
    return verdict.is_above_chance(
        [verdict.unpack_bits(run["correct"], image_count) for run in runs_with_chance],
        [verdict.unpack_bits(run["chance_correct"], image_count) for run in runs_with_chance],
    )


def _chance_share(runs: Mapping[int, Result], spec: Mapping[str, Any]) -> float | None:
    """The share of the most frequent class among the test labels."""
    for run in _runs_with_chance(runs):
        return float(verdict.unpack_bits(run["chance_correct"], spec["test_samples"]).mean())
    return None


def _runs_with_chance(runs: Mapping[int, Result]) -> list[Result]:
    return [run for run in runs.values() if run.get("chance_correct") is not None]


def _verdict_at_chance(before: Verdict) -> Verdict:
    if before.kind == "reference":
        return Verdict("reference", "reference, at chance level")
    if before.kind == "failed":
        return before
    return Verdict("unknown", verdict.AT_CHANCE, before.difference, before.interval)


def shorten_error(error: str) -> str:
    """The class and first sentence of an error, in 80 characters.

    The complete error stands below the table and in the JSON.
    """
    lines = error.splitlines()
    first_line = lines[0] if lines else ""
    sentence = re.split(r"(?<=[^.])\. |; ", first_line, maxsplit=1)[0].rstrip(" .:")
    if len(sentence) <= MAX_ERROR_LENGTH:
        return sentence
    complete_words = sentence[: MAX_ERROR_LENGTH - 1].rsplit(" ", 1)[0]
    return complete_words.rstrip(" ,:(") + "…"


def _build_row(
    precision: str,
    runs: Mapping[int, Result],
    precision_verdict: Verdict,
    samples_per_epoch: int,
) -> Row:
    """Times, scores and verdict. Of the times, one median: that of the step.

    An epoch is so many steps, and samples/s follow from the epoch, so that the three agree.
    """
    done = [result for result in runs.values() if result["status"] == "done"]
    accuracies = [result["acc"] for result in done]
    s_per_epoch = _median(done, "s_per_epoch")
    return {
        "precision": precision,
        "n": len(runs),
        "failed": len(runs) - len(done),
        "ms_per_step": _median(done, "ms_per_step"),
        "s_per_epoch": s_per_epoch,
        "samples_per_s": samples_per_epoch / s_per_epoch if s_per_epoch else None,
        "peak_memory": _median(done, "peak_memory"),
        "loss": _mean([result["loss"] for result in done]),
        "acc": _mean(accuracies),
        "acc_interval": verdict.interval_half_width(accuracies),
        "difference": precision_verdict.difference,
        "difference_interval": precision_verdict.interval,
        "verdict": precision_verdict.text,
        "verdict_kind": precision_verdict.kind,
        "skipped": _mean([result["skipped"] for result in runs.values()]),
        "final_scale": _median(done, "final_scale"),
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(results: Sequence[Result], key: str) -> float | None:
    """The median over seeds: one disturbed run does not move it."""
    values = [result[key] for result in results if result[key] is not None]
    return statistics.median(values) if values else None


def _reach_verdict(
    precision: str,
    runs: Mapping[int, Result],
    reference: str,
    reference_runs: Mapping[int, Result],
    spec: Mapping[str, Any],
) -> Verdict:
    """The verdict on one precision, from the seeds that it shares with the reference."""
    failed = [result for result in runs.values() if result["status"] == "failed"]
    if failed:
        where = "in every run"
        if len(failed) < len(runs):
            where = f"in {len(failed)} of {len(runs)} runs"
        return Verdict("failed", f"failed {where}: {shorten_error(failed[0]['error'])}")
    if not runs:
        return Verdict("unknown", "not run yet")
    if precision == reference:
        return Verdict("reference", "reference")
    seeds = [seed for seed in runs if reference_runs.get(seed, {}).get("status") == "done"]
    if not seeds:
        return Verdict("unknown", f"cannot tell: no run of {reference} to compare with")

    differences = [100 * (runs[seed]["acc"] - reference_runs[seed]["acc"]) for seed in seeds]
    image_count = spec["test_samples"]
    reference_bits = [
        verdict.unpack_bits(reference_runs[seed]["correct"], image_count) for seed in seeds
    ]
    bits = [verdict.unpack_bits(runs[seed]["correct"], image_count) for seed in seeds]
    images = verdict.measure_image_noise(reference_bits, bits)
    return verdict.judge(differences, margin=spec["margin"], images=images)


# The recommendation


def recommend(
    spec: Mapping[str, Any],
    table: Sequence[Row],
    results: Sequence[Result],
    units: HalfUnits,
    *,
    planned_runs: int | None = None,
) -> dict[str, Any]:
    """The fastest precision that is proved to be no worse, with the reason.

    It is the reference where no other is proved, or none of these is faster. There is none before
    all `planned_runs` are done; None: every precision with every seed.
    """
    reference = table[0]
    if planned_runs is None:
        planned_runs = len(spec["precisions"]) * len(spec["seeds"])
    runs_done = sum(row["n"] for row in table)
    if runs_done < planned_runs:
        return _recommendation(None, f"{runs_done} of {planned_runs} runs are done")
    if reference["verdict_kind"] == "failed":
        reason = f"{reference['precision']}, the reference, {reference['verdict']}"
        return _recommendation(None, reason)

    if reference["at_chance"]:
        return _recommendation(None, _reason_at_chance(reference))

    steps = [_step_time(row, reference, results) for row in table]
    precision, reason = advise(units, steps=steps)
    # The growth of a process is too rough to be an argument.
    is_exact = all(result["memory_kind"] == "device" for result in results)
    if is_exact and precision != reference["precision"]:
        best = next(row for row in table if row["precision"] == precision)
        reason += _memory_share(best, reference)
    return _recommendation(precision, reason)


def _recommendation(precision: str | None, reason: str) -> dict[str, Any]:
    return {"precision": precision, "reason": reason}


def _reason_at_chance(reference: Row) -> str:
    return (
        f"{reference['precision']}, the reference, is at chance level: "
        f"{100 * reference['acc']:.2f} % are right, and always answering the most frequent class "
        f"gives {100 * reference['chance']:.2f} %. Nothing can be concluded about a precision from "
        "a network that learned nothing: train longer (--epochs), on more samples, or at another "
        "rate (halfstep find-lr, then --lr)"
    )


def _step_time(row: Row, reference: Row, results: Sequence[Result]) -> StepTime:
    """What `advise` needs to know of a precision. One without a time counts as slow."""
    ms_per_step = row["ms_per_step"]
    return StepTime(
        precision=row["precision"],
        ms_per_step=math.inf if ms_per_step is None else float(ms_per_step),
        is_faster=_is_faster(row["precision"], reference["precision"], results),
        verdict_kind=row["verdict_kind"],
        verdict=row["verdict"],
    )


def _is_faster(precision: str, reference: str, results: Sequence[Result]) -> bool:
    """By 5 % or more in every seed that both have: other load makes some runs slow, not all."""
    times = _step_times(precision, results)
    reference_times = _step_times(reference, results)
    shared_seeds = times.keys() & reference_times.keys()
    for seed in shared_seeds:
        ms_per_step = times[seed]
        reference_ms = reference_times[seed]
        if ms_per_step is None or reference_ms is None:
            return False
        if not ms_per_step < FASTER_SHARE * reference_ms:
            return False
    return bool(shared_seeds)


def _step_times(precision: str, results: Sequence[Result]) -> dict[int, float | None]:
    """ms/step by seed."""
    return {
        result["seed"]: result["ms_per_step"]
        for result in results
        if result["precision"] == precision
    }


def _memory_share(best: Row, reference: Row) -> str:
    if not best["peak_memory"] or not reference["peak_memory"]:
        return ""
    share = best["peak_memory"] / reference["peak_memory"]
    return f", with {share:.0%} of its memory" if share < FASTER_SHARE else ""
