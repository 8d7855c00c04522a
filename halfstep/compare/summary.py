"""From results to the table: one row per precision, a verdict each, and one recommendation with its reason."""

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from halfstep.compare import verdict
from halfstep.compare.verdict import Verdict

Result = Mapping[str, Any]
Row = dict[str, Any]

_FASTER = 0.95  # of the reference's step time or memory: what is nearer than that may be chance
_SHORT = 80  # characters of an error in a table's cell


def rows(spec: Mapping[str, Any], results: Sequence[Result]) -> list[Row]:
    """One per precision, in the order asked; the first is what the others are compared with."""
    by = {
        name: {r["seed"]: r for r in results if r["precision"] == name}
        for name in spec["precisions"]
    }
    reference = spec["precisions"][0]
    return [
        _row(name, by[name], _verdict(name, by[name], reference, by[reference], spec), spec)
        for name in by
    ]


def short(error: str) -> str:
    """An error's kind and first sentence, in 80 characters; the whole stands below the table and in the JSON."""
    line = (error.splitlines() or [""])[0]
    first = re.split(r"(?<=[^.])\. |; ", line, maxsplit=1)[0].rstrip(" .:")
    return (
        first
        if len(first) <= _SHORT
        else first[: _SHORT - 1].rsplit(" ", 1)[0].rstrip(" ,:(") + "…"
    )


def _row(name: str, runs: Mapping[int, Result], found: Verdict, spec: Mapping[str, Any]) -> Row:
    done = [r for r in runs.values() if r["status"] == "done"]
    accs = [r["acc"] for r in done]
    return {
        "precision": name,
        "n": len(runs),
        "failed": len(runs) - len(done),
        **_times(done, spec["samples"]),
        "peak_memory": _typical(done, "peak_memory"),
        "loss": statistics.fmean(r["loss"] for r in done) if done else None,
        "acc": statistics.fmean(accs) if accs else None,
        "acc_interval": verdict.half_width(accs),
        "difference": found.difference,
        "difference_interval": found.interval,
        "verdict": found.text,
        "verdict_kind": found.kind,
        "skipped": statistics.fmean(r["skipped"] for r in runs.values()) if runs else None,
        "final_scale": _typical(done, "final_scale"),
    }


def _times(done: Sequence[Result], samples: int) -> Row:
    """One median, of the step; the epoch is so many of it, and samples/s follow from the epoch: they always agree."""
    step, epoch = _typical(done, "ms_per_step"), _typical(done, "s_per_epoch")
    return {
        "ms_per_step": step,
        "s_per_epoch": epoch,
        "samples_per_s": samples / epoch if epoch else None,
    }


def _typical(done: Sequence[Result], key: str) -> float | None:
    """The median over seeds: one disturbed run does not move it."""
    values = [r[key] for r in done if r[key] is not None]
    return statistics.median(values) if values else None


def _verdict(
    name: str,
    runs: Mapping[int, Result],
    reference: str,
    base: Mapping[int, Result],
    spec: Mapping[str, Any],
) -> Verdict:
    failed = [r for r in runs.values() if r["status"] == "failed"]
    if failed:
        where = (
            f"in {len(failed)} of {len(runs)} runs" if len(failed) < len(runs) else "in every run"
        )
        return Verdict("failed", f"failed {where}: {short(failed[0]['error'])}")
    if not runs:
        return Verdict("unknown", "not run yet")
    if name == reference:
        return Verdict("reference", "reference")
    seeds = [seed for seed in runs if base.get(seed, {}).get("status") == "done"]
    if not seeds:
        return Verdict("unknown", f"cannot tell: no run of {reference} to compare with")
    differences = [100 * (runs[seed]["acc"] - base[seed]["acc"]) for seed in seeds]
    bits = [
        [verdict.unpack(of[seed]["correct"], spec["test_samples"]) for seed in seeds]
        for of in (base, runs)
    ]
    return verdict.judge(differences, margin=spec["margin"], images=verdict.images_of(*bits))


def recommend(
    spec: Mapping[str, Any], table: Sequence[Row], results: Sequence[Result]
) -> dict[str, Any]:
    """The fastest that is proved to be no worse; the reference where none is, or where none is faster."""
    first, *others = table
    total = len(spec["precisions"]) * len(spec["seeds"])
    ended = sum(row["n"] for row in table)
    if ended < total:
        return {"precision": None, "reason": f"{ended} of {total} runs are done"}
    if first["verdict_kind"] == "failed":
        return {
            "precision": None,
            "reason": f"{first['precision']}, the reference, {first['verdict']}",
        }
    if not others:
        return {"precision": first["precision"], "reason": "the only precision that was run"}
    good = [row for row in others if row["verdict_kind"] in ("same", "better")]
    quick = [row for row in others if _faster(row["precision"], first["precision"], results)]
    best = min(
        (row for row in good if row in quick),
        key=lambda row: float(row["ms_per_step"]),
        default=None,
    )
    if best is not None:
        exact = all(
            r["memory_kind"] == "device" for r in results
        )  # a process's growth is too rough to praise
        return {
            "precision": best["precision"],
            "reason": _praise(best, first) + (_memory(best, first) if exact else ""),
        }
    return {"precision": first["precision"], "reason": _stay(first, others, good, quick)}


def _faster(name: str, reference: str, results: Sequence[Result]) -> bool:
    """In every seed, by 5 % or more: a machine with other work to do makes some runs slow, not all of them."""
    times = {
        key: {r["seed"]: r["ms_per_step"] for r in results if r["precision"] == key}
        for key in (name, reference)
    }
    return all(
        ms is not None and base is not None and ms < _FASTER * base
        for ms, base in ((ms, times[reference].get(seed)) for seed, ms in times[name].items())
    )


def _praise(best: Row, first: Row) -> str:
    ratio = first["ms_per_step"] / best["ms_per_step"]
    times = f"{best['ms_per_step']:.3g} ms a step against {first['ms_per_step']:.3g}"
    text = (
        f"{best['verdict']} as {first['precision']}"
        if best["verdict_kind"] == "same"
        else best["verdict"]
    )
    return f"{text}, and {ratio:.2g} × as fast ({times})"


def _memory(best: Row, first: Row) -> str:
    if not best["peak_memory"] or not first["peak_memory"]:
        return ""
    share = best["peak_memory"] / first["peak_memory"]
    return f", with {share:.0%} of its memory" if share < _FASTER else ""


def _stay(first: Row, others: Sequence[Row], good: Sequence[Row], quick: Sequence[Row]) -> str:
    """Why the reference is the answer."""
    if not good:
        kinds = "; ".join(f"{row['precision']}: {row['verdict']}" for row in others)
        return f"no other precision is proved to be as accurate ({kinds})"
    names = ", ".join(row["precision"] for row in good)
    are = "is" if len(good) == 1 else "are"
    doubtful = [row["precision"] for row in quick if row["verdict_kind"] == "unknown"]
    left = (
        f"; whether {', '.join(doubtful)}, which is faster, is as accurate is not settled"
        if doubtful
        else ""
    )
    return f"{names} {are} as accurate, but {_pace(first, good)}{left}"


def _pace(first: Row, good: Sequence[Row]) -> str:
    times = [row["ms_per_step"] for row in good]
    if all(ms > first["ms_per_step"] for ms in times):
        return f"slower ({', '.join(f'{ms:.3g}' for ms in times)} ms a step against {first['ms_per_step']:.3g})"
    return "not faster in every seed by 5 % or more"
