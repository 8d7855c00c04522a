"""From results to the table: a row and a verdict for each precision, and one recommendation."""

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from halfstep.compare import verdict
from halfstep.compare.verdict import Verdict

Result = Mapping[str, Any]
Row = dict[str, Any]

# A precision is faster, or smaller, if it takes less than this share of the reference's time or
# memory. What is nearer may be chance.
FASTER_SHARE = 0.95

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
    table: list[Row] = []
    for precision, runs in runs_by_seed.items():
        precision_verdict = _reach_verdict(
            precision, runs, reference, runs_by_seed[reference], spec
        )
        table.append(_build_row(precision, runs, precision_verdict, spec["samples"]))
    return table


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
    spec: Mapping[str, Any], table: Sequence[Row], results: Sequence[Result]
) -> dict[str, Any]:
    """The fastest precision that is proved to be no worse, with the reason.

    It is the reference where no other is proved, or none of these is faster.
    """
    reference, *others = table
    total_runs = len(spec["precisions"]) * len(spec["seeds"])
    runs_done = sum(row["n"] for row in table)
    if runs_done < total_runs:
        return _recommendation(None, f"{runs_done} of {total_runs} runs are done")
    if reference["verdict_kind"] == "failed":
        reason = f"{reference['precision']}, the reference, {reference['verdict']}"
        return _recommendation(None, reason)
    if not others:
        return _recommendation(reference["precision"], "the only precision that was run")

    proved = [row for row in others if row["verdict_kind"] in ("same", "better")]
    faster = [
        row for row in others if _is_faster(row["precision"], reference["precision"], results)
    ]
    candidates = [row for row in proved if row in faster]
    if not candidates:
        reason = _why_reference(reference, others, proved, faster)
        return _recommendation(reference["precision"], reason)

    best = min(candidates, key=lambda row: float(row["ms_per_step"]))
    reason = _why_best(best, reference)
    # The growth of a process is too rough to be an argument.
    if all(result["memory_kind"] == "device" for result in results):
        reason += _memory_share(best, reference)
    return _recommendation(best["precision"], reason)


def _recommendation(precision: str | None, reason: str) -> dict[str, Any]:
    return {"precision": precision, "reason": reason}


def _is_faster(precision: str, reference: str, results: Sequence[Result]) -> bool:
    """By 5 % or more in every seed: other load makes some runs slow, not all of them."""
    times = _step_times(precision, results)
    reference_times = _step_times(reference, results)
    for seed, ms_per_step in times.items():
        reference_ms = reference_times.get(seed)
        if ms_per_step is None or reference_ms is None:
            return False
        if not ms_per_step < FASTER_SHARE * reference_ms:
            return False
    return True


def _step_times(precision: str, results: Sequence[Result]) -> dict[int, float | None]:
    """ms/step by seed."""
    return {
        result["seed"]: result["ms_per_step"]
        for result in results
        if result["precision"] == precision
    }


def _why_best(best: Row, reference: Row) -> str:
    text = best["verdict"]
    if best["verdict_kind"] == "same":
        text = f"{text} as {reference['precision']}"
    ratio = reference["ms_per_step"] / best["ms_per_step"]
    times = f"{best['ms_per_step']:.3g} ms a step against {reference['ms_per_step']:.3g}"
    return f"{text}, and {ratio:.2g} × as fast ({times})"


def _memory_share(best: Row, reference: Row) -> str:
    if not best["peak_memory"] or not reference["peak_memory"]:
        return ""
    share = best["peak_memory"] / reference["peak_memory"]
    return f", with {share:.0%} of its memory" if share < FASTER_SHARE else ""


def _why_reference(
    reference: Row, others: Sequence[Row], proved: Sequence[Row], faster: Sequence[Row]
) -> str:
    if not proved:
        verdicts = "; ".join(f"{row['precision']}: {row['verdict']}" for row in others)
        return f"no other precision is proved to be as accurate ({verdicts})"

    names = ", ".join(row["precision"] for row in proved)
    verb = "is" if len(proved) == 1 else "are"
    times = [row["ms_per_step"] for row in proved]
    reference_time = reference["ms_per_step"]
    if all(ms > reference_time for ms in times):
        listed = ", ".join(f"{ms:.3g}" for ms in times)
        pace = f"slower ({listed} ms a step against {reference_time:.3g})"
    else:
        pace = "not faster in every seed by 5 % or more"

    undecided = ""
    unknown = [row["precision"] for row in faster if row["verdict_kind"] == "unknown"]
    if unknown:
        undecided = (
            f"; whether {', '.join(unknown)}, which is faster, is as accurate is not settled"
        )
    return f"{names} {verb} as accurate, but {pace}{undecided}"
