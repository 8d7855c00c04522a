"""Comparisons as `halfstep compare` writes them, made up from a seed: any size, failures, nulls, hostile names."""

import math
import random
from typing import Any

HOSTILE = "</script><img src=x onerror=alert(1)>"
KINDS = {"fp32": "reference", "O1": "same", "O2": "same", "fp16": "worse"}
COST = {"fp32": (4.1, 412), "fp16": (2.9, 301), "O1": (3.3, 377), "O2": (2.6, 318)}
MIB = 1 << 20


def comparison(
    precisions: tuple[str, ...] = ("fp32", "fp16", "O1", "O2"),
    seeds: int = 3,
    *,
    steps: int = 1128,
    epochs: int = 6,
) -> dict[str, Any]:
    """A finished comparison: every run of every precision."""
    runs = [
        result(name, seed, steps=steps, epochs=epochs)
        for name in precisions
        for seed in range(seeds)
    ]
    command = f"halfstep compare --net mlp --precisions {','.join(precisions)} --seeds {seeds} --out runs/demo"
    return {
        "halfstep_compare": 1,
        "title": "mlp on fashion-mnist-sample",
        "command": command,
        "date": "2026-03-02",
        "environment": {
            "device": "cpu", "torch": "2.13.0", "python": "3.11.7", "cuda": None, "threads": 2, "halfstep": "0.1.0",
            "platform": "Linux-6.1.0-x86_64",
        },
        "spec": {
            "net": "mlp", "data": "fashion-mnist-sample", "samples": 12000, "test_samples": 2000, "epochs": epochs,
            "batch": 64, "optimizer": "sgd", "lr": 0.1, "schedule": "cosine", "precisions": list(precisions),
            "seeds": list(range(seeds)), "sink": None, "margin": 0.5,
        },
        "runs": runs,
        "rows": [row(name, runs, precisions[0]) for name in precisions],
        "recommendation": advice(precisions),
    }  # fmt: skip


def advice(precisions: tuple[str, ...]) -> dict[str, Any]:
    if "O2" in precisions:
        reason = (
            "O2 is the fastest of the precisions whose accuracy is that of fp32 within 0.5 points."
        )
        return {"precision": "O2", "reason": reason}
    return {
        "precision": None,
        "reason": "Nothing was shown to be the same as the first precision: add seeds.",
    }


def result(precision: str, seed: int, *, steps: int = 1128, epochs: int = 6) -> dict[str, Any]:
    """One run: a falling, noisy loss; a loss scale with overflows where the precision has one."""
    rng = random.Random(f"{precision}-{seed}")
    scaled = precision in ("O1", "O2")
    low = 0.09 if precision == "fp16" else 0.0
    ms, mib = COST.get(precision, (3.0 + rng.random(), 350 + 40 * rng.random()))
    ms, acc = ms * rng.uniform(0.97, 1.03), 0.871 - low / 3 + rng.gauss(0, 0.0006)
    skipped = [3, 4, 5, steps // 2 + seed, steps // 2 + 150 + 5 * seed] if scaled else []
    at = [1 + i * (steps - 1) // max(1, min(500, steps) - 1) for i in range(min(500, steps))]
    return {
        "precision": precision, "seed": seed, "status": "done", "error": None,
        "epochs": [epoch(e, epochs, acc, low, rng) for e in range(1, epochs + 1)],
        "curve": {
            "step": at,
            "loss": [0.28 + low + 2.0 * math.exp(-s / (steps / 7)) + abs(rng.gauss(0, 0.05)) for s in at],
            "scale": [2.0 ** (16 - sum(s > k for k in skipped) + (s > steps * 0.8)) if scaled else 1.0 for s in at],
            "lr": [0.05 * (1 + math.cos(math.pi * s / steps)) for s in at],
        },
        "skipped_steps": skipped, "steps": steps, "updates": steps - len(skipped), "samples": steps * 64,
        "ms_per_step": ms, "s_per_epoch": ms * steps / epochs / 1000, "samples_per_s": 64000 / ms,
        "peak_memory": int(mib * MIB * rng.uniform(0.99, 1.01)), "memory_kind": "process",
        "loss": 0.36 + low + rng.gauss(0, 0.002), "acc": acc,
        "final_scale": 4096.0 if scaled else None, "skipped": len(skipped),
        "dtypes": dtypes(precision),
        "choices": {"half kernels": "round(fp32 product) on this CPU", "cycle": "1 batches per update"},
    }  # fmt: skip


def epoch(e: int, epochs: int, acc: float, low: float, rng: random.Random) -> dict[str, Any]:
    gone = math.exp(-2.5 * e / epochs)
    reached = acc - 0.2 * (gone - math.exp(-2.5)) + rng.gauss(0, 0.002)
    return {
        "epoch": e,
        "loss": 0.3 + gone,
        "valid_loss": 0.36 + low + 0.5 * gone,
        "valid_acc": reached,
        "seconds": 0.7,
    }


def dtypes(precision: str) -> list[dict[str, str]]:
    low = {"fp32": "float32", "bf16": "bfloat16"}.get(precision, "float16")
    weight = "float32" if precision in ("fp32", "O1") else low
    layers = [
        ("0", "Flatten", "-"),
        ("1", "Linear", weight),
        ("2", "ReLU", "-"),
        ("3", "Linear", weight),
    ]
    return [
        {
            "module": name,
            "kind": kind,
            "input": low if name != "0" else "float32",
            "weight": w,
            "output": low,
        }
        for name, kind, w in layers
    ]


def row(precision: str, runs: list[dict[str, Any]], first: str) -> dict[str, Any]:
    """The means over seeds; interval and verdict are made up, as the report only shows them."""
    done = [r for r in runs if r["precision"] == precision and r["status"] == "done"]
    kind = KINDS.get(precision, "unknown") if precision != first else "reference"
    base = {r["seed"]: r["acc"] for r in runs if r["precision"] == first}
    said = {
        "same": "same within 0.5 points",
        "unknown": "cannot tell: more seeds needed, about 9",
        "reference": "reference",
    }
    names = (
        "ms_per_step",
        "s_per_epoch",
        "samples_per_s",
        "peak_memory",
        "loss",
        "acc",
        "skipped",
        "final_scale",
    )
    means = {n: mean([r[n] for r in done]) for n in names}
    many = len(done) > 1
    return {
        "precision": precision, "n": len(done), "failed": 0, **means,
        "acc_interval": 0.0021 if many else None,
        "difference": None if kind == "reference" else mean([(r["acc"] - base[r["seed"]]) * 100 for r in done]),
        "difference_interval": (1.6 if kind == "unknown" else 0.31) if many and kind != "reference" else None,
        "verdict": said.get(kind, "worse by 3.0 ± 0.3"), "verdict_kind": kind,
    }  # fmt: skip


def mean(values: list[Any]) -> float | None:
    found = [v for v in values if v is not None]
    return sum(found) / len(found) if found else None


def fail(summary: dict[str, Any], precision: str, seed: int, error: str, *, keep: int) -> None:
    """Turns one run into one that failed after `keep` points of its curve."""
    run = next(r for r in summary["runs"] if (r["precision"], r["seed"]) == (precision, seed))
    run |= {
        "status": "failed",
        "error": error,
        "loss": None,
        "acc": None,
        "epochs": run["epochs"][:1],
    }
    run["curve"] = {name: each[:keep] for name, each in run["curve"].items()}
    for each in summary["rows"]:
        if each["precision"] == precision:
            each["n"], each["failed"] = each["n"] - 1, each["failed"] + 1


def hostile() -> dict[str, Any]:
    """Every text is markup that would run, or half a character."""
    made = comparison((HOSTILE, "O1", '"><svg onload=alert(2)>\u2028'), 2, steps=60)
    made |= {"title": HOSTILE, "command": f"halfstep compare '{HOSTILE}'", "date": HOSTILE}
    made["environment"] |= {"device": HOSTILE, HOSTILE: HOSTILE, "half": "\ud800"}
    made["spec"] |= {"net": "${alert(3)}", "data": "javascript:alert(4)", HOSTILE: [HOSTILE]}
    made["recommendation"] = {"precision": HOSTILE, "reason": HOSTILE}
    for each in made["rows"]:
        each |= {"verdict": HOSTILE, "verdict_kind": 'x" onmouseover="alert(5)'}
    for run in made["runs"]:
        run["dtypes"][0] |= {"module": HOSTILE, "kind": HOSTILE, "input": HOSTILE}
        run["choices"] = {HOSTILE: HOSTILE}
    fail(made, HOSTILE, 1, HOSTILE, keep=20)
    return made
