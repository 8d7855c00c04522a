"""Comparisons as `halfstep compare` writes them, made up from a seed.

They may have any size, failed runs, nulls, and names that are markup.
"""

import math
import random
from typing import Any

HOSTILE = "</script><img src=x onerror=alert(1)>"
MIB = 1 << 20

VERDICT_KINDS = {"fp32": "reference", "O1": "same", "O2": "same", "fp16": "worse"}
VERDICTS = {
    "same": "same within 0.5 points",
    "unknown": "cannot tell: more seeds needed, about 9",
    "reference": "reference",
}
MS_AND_MIB = {"fp32": (4.1, 412), "fp16": (2.9, 301), "O1": (3.3, 377), "O2": (2.6, 318)}

# Numbers of a run that a row averages over seeds.
AVERAGED = (
    "ms_per_step",
    "s_per_epoch",
    "samples_per_s",
    "peak_memory",
    "loss",
    "acc",
    "skipped",
    "final_scale",
)


def comparison(
    precisions: tuple[str, ...] = ("fp32", "fp16", "O1", "O2"),
    seeds: int = 3,
    *,
    steps: int = 1128,
    epochs: int = 6,
) -> dict[str, Any]:
    """A finished comparison: every run of every precision."""
    runs = []
    for precision in precisions:
        for seed in range(seeds):
            runs.append(run_result(precision, seed, steps=steps, epochs=epochs))
    return {
        "halfstep_compare": 1,
        "title": "mlp on fashion-mnist-sample",
        "command": (
            f"halfstep compare --net mlp --precisions {','.join(precisions)} --seeds {seeds} "
            "--out runs/demo"
        ),
        "date": "2026-03-02",
        "environment": {
            "device": "cpu",
            "torch": "2.13.0",
            "python": "3.11.7",
            "cuda": None,
            "threads": 2,
            "halfstep": "0.1.0",
            "platform": "Linux-6.1.0-x86_64",
        },
        "spec": {
            "net": "mlp",
            "data": "fashion-mnist-sample",
            "samples": 12000,
            "test_samples": 2000,
            "epochs": epochs,
            "batch": 64,
            "optimizer": "sgd",
            "lr": 0.1,
            "schedule": "cosine",
            "precisions": list(precisions),
            "seeds": list(range(seeds)),
            "sink": None,
            "margin": 0.5,
        },
        "runs": runs,
        "rows": [summary_row(precision, runs, precisions[0]) for precision in precisions],
        "recommendation": recommendation(precisions),
    }


def recommendation(precisions: tuple[str, ...]) -> dict[str, Any]:
    if "O2" in precisions:
        reason = (
            "O2 is the fastest of the precisions whose accuracy is that of fp32 within 0.5 points."
        )
        return {"precision": "O2", "reason": reason}
    reason = "Nothing was shown to be the same as the first precision: add seeds."
    return {"precision": None, "reason": reason}


def run_result(precision: str, seed: int, *, steps: int = 1128, epochs: int = 6) -> dict[str, Any]:
    """One run: a falling, noisy loss; a loss scale with overflows where the precision has one."""
    rng = random.Random(f"{precision}-{seed}")
    has_scale = precision in ("O1", "O2")
    extra_loss = 0.09 if precision == "fp16" else 0.0
    ms, mib = MS_AND_MIB.get(precision, (3.0 + rng.random(), 350 + 40 * rng.random()))
    ms *= rng.uniform(0.97, 1.03)
    accuracy = 0.871 - extra_loss / 3 + rng.gauss(0, 0.0006)
    skipped_steps = []
    if has_scale:
        skipped_steps = [3, 4, 5, steps // 2 + seed, steps // 2 + 150 + 5 * seed]

    epoch_results = []
    for epoch in range(1, epochs + 1):
        epoch_results.append(epoch_result(epoch, epochs, accuracy, extra_loss, rng))

    points = min(500, steps)
    recorded = [1 + i * (steps - 1) // max(1, points - 1) for i in range(points)]
    losses = []
    scales = []
    for step in recorded:
        decay = 2.0 * math.exp(-step / (steps / 7))
        losses.append(0.28 + extra_loss + decay + abs(rng.gauss(0, 0.05)))
        halvings = sum(step > skipped for skipped in skipped_steps)
        doublings = int(step > steps * 0.8)
        scales.append(2.0 ** (16 - halvings + doublings) if has_scale else 1.0)
    return {
        "precision": precision,
        "seed": seed,
        "status": "done",
        "error": None,
        "epochs": epoch_results,
        "curve": {
            "step": recorded,
            "loss": losses,
            "scale": scales,
            "lr": [0.05 * (1 + math.cos(math.pi * step / steps)) for step in recorded],
        },
        "skipped_steps": skipped_steps,
        "steps": steps,
        "updates": steps - len(skipped_steps),
        "samples": steps * 64,
        "ms_per_step": ms,
        "s_per_epoch": ms * steps / epochs / 1000,
        "samples_per_s": 64000 / ms,
        "peak_memory": int(mib * MIB * rng.uniform(0.99, 1.01)),
        "memory_kind": "process",
        "loss": 0.36 + extra_loss + rng.gauss(0, 0.002),
        "acc": accuracy,
        "final_scale": 4096.0 if has_scale else None,
        "skipped": len(skipped_steps),
        "dtypes": module_dtypes(precision),
        "choices": {
            "half kernels": "round(fp32 product) on this CPU",
            "cycle": "1 batch per update",
        },
    }


def epoch_result(
    epoch: int, epochs: int, accuracy: float, extra_loss: float, rng: random.Random
) -> dict[str, Any]:
    decay = math.exp(-2.5 * epoch / epochs)
    return {
        "epoch": epoch,
        "loss": 0.3 + decay,
        "valid_loss": 0.36 + extra_loss + 0.5 * decay,
        "valid_acc": accuracy - 0.2 * (decay - math.exp(-2.5)) + rng.gauss(0, 0.002),
        "seconds": 0.7,
    }


def module_dtypes(precision: str) -> list[dict[str, str]]:
    compute = {"fp32": "float32", "bf16": "bfloat16"}.get(precision, "float16")
    weight = "float32" if precision in ("fp32", "O1") else compute
    modules = []
    for name, kind in (("0", "Flatten"), ("1", "Linear"), ("2", "ReLU"), ("3", "Linear")):
        modules.append(
            {
                "module": name,
                "kind": kind,
                "input": "float32" if name == "0" else compute,
                "weight": weight if kind == "Linear" else "-",
                "output": compute,
            }
        )
    return modules


def summary_row(precision: str, runs: list[dict[str, Any]], first: str) -> dict[str, Any]:
    """The means over seeds; interval and verdict are made up, as the report only shows them."""
    finished = [run for run in runs if run["precision"] == precision and run["status"] == "done"]
    kind = "reference" if precision == first else VERDICT_KINDS.get(precision, "unknown")
    row: dict[str, Any] = {"precision": precision, "n": len(finished), "failed": 0}
    for name in AVERAGED:
        row[name] = mean([run[name] for run in finished])

    difference = None
    if kind != "reference":
        first_accuracy = {run["seed"]: run["acc"] for run in runs if run["precision"] == first}
        difference = mean([(run["acc"] - first_accuracy[run["seed"]]) * 100 for run in finished])
    interval = None
    difference_interval = None
    if len(finished) > 1:
        interval = 0.0021
        if kind != "reference":
            difference_interval = 1.6 if kind == "unknown" else 0.31
    return row | {
        "acc_interval": interval,
        "difference": difference,
        "difference_interval": difference_interval,
        "verdict": VERDICTS.get(kind, "worse by 3.0 ± 0.3"),
        "verdict_kind": kind,
    }


def mean(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def fail_run(
    summary: dict[str, Any], precision: str, seed: int, error: str, *, points: int
) -> None:
    """Turns one run into one that failed after `points` points of its curve."""
    run = next(r for r in summary["runs"] if (r["precision"], r["seed"]) == (precision, seed))
    run["status"] = "failed"
    run["error"] = error
    run["loss"] = None
    run["acc"] = None
    run["epochs"] = run["epochs"][:1]
    run["curve"] = {name: column[:points] for name, column in run["curve"].items()}
    for row in summary["rows"]:
        if row["precision"] == precision:
            row["n"] -= 1
            row["failed"] += 1


def hostile_comparison() -> dict[str, Any]:
    """Every text is markup that would run, or half a character."""
    summary = comparison((HOSTILE, "O1", '"><svg onload=alert(2)>\u2028'), 2, steps=60)
    summary |= {"title": HOSTILE, "command": f"halfstep compare '{HOSTILE}'", "date": HOSTILE}
    summary["environment"] |= {"device": HOSTILE, HOSTILE: HOSTILE, "half": "\ud800"}
    summary["spec"] |= {"net": "${alert(3)}", "data": "javascript:alert(4)", HOSTILE: [HOSTILE]}
    summary["recommendation"] = {"precision": HOSTILE, "reason": HOSTILE}
    for row in summary["rows"]:
        row |= {"verdict": HOSTILE, "verdict_kind": 'x" onmouseover="alert(5)'}
    for run in summary["runs"]:
        run["dtypes"][0] |= {"module": HOSTILE, "kind": HOSTILE, "input": HOSTILE}
        run["choices"] = {HOSTILE: HOSTILE}
    fail_run(summary, HOSTILE, 1, HOSTILE, points=20)
    return summary
