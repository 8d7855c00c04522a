"""`halfstep bench`: a row of times for each way to train."""

import importlib
import shlex
from typing import Any

import pytest
import torch

from halfstep.precision.advice import (
    HalfUnits,
    advise,
    find_half_units,
    precisions_to_compare,
)
from tests.support.command_line import run_command, run_json

bench_timing: Any = importlib.import_module("halfstep.cli.bench_timing")
bench: Any = importlib.import_module("halfstep.cli.bench")
QUICK = shlex.split("bench --net ffnn --batch 8 --seconds 0.1 --device cpu")


def test_bench_times_each_way() -> None:
    line = "bench --net ffnn --precisions fp32,O2 --batch 8 --seconds 0.1 --device cpu"
    words = shlex.split(line)
    rows = run_json(*words)["rows"]
    assert [row["way"] for row in rows] == ["torch, fp32", "fp32", "O2"]
    assert rows[1]["ratio"] == 1
    for row in rows:
        low, high = row["quartiles"]
        assert low <= row["ms"] <= high
        assert row["samples_per_s"] == pytest.approx(8000 / row["ms"])
    with pytest.raises(ValueError, match=r"does not take inputs of 7: .*--shape 3,32,32"):
        run_command(*words, "--shape", "7")
    with pytest.raises(ValueError, match="--shape: expected the sizes of one input"):
        run_command(*words, "--shape", "3,x,y")


def bench_row(way: str, ratio: float, low: float, high: float) -> dict[str, Any]:
    return {"way": way, "ms": 4 * ratio, "ratio": ratio, "ratio_quartiles": [low, high]}


FP32 = [bench_row("torch, fp32", 0.9, 0.9, 0.9), bench_row("fp32", 1.0, 1.0, 1.0)]


def test_bench_says_in_words_what_is_faster_or_slower_and_why() -> None:
    rows = [
        *FP32,
        bench_row("O2", 1.31, 1.2, 1.4),
        bench_row("bf16", 0.5, 0.45, 0.55),
        bench_row("O1+bf16", 1.01, 0.98, 1.04),
        bench_row("fp16", 1.0, 0.6, 2.0),
    ]
    assert bench._in_words(HalfUnits("CPU", ("bf16",)), rows) == [
        "O2 is 1.31 × as slow as fp32 here: this CPU has no fp16 units",
        "bf16 is 2 × as fast as fp32 here",
        "O1+bf16 is as fast as fp32 here",
        "fp16 takes 0.60 to 2.00 × the time of fp32 in half of the rounds: "
        "faster or slower is not clear",
    ]
    [sentence] = bench._in_words(HalfUnits("CPU", ()), [*FP32, rows[2]])
    assert sentence == "O2 is 1.31 × as slow as fp32 here: this CPU has no half-precision units"


def test_the_figures_of_a_row_agree() -> None:
    """Rounds as on a busy machine: the median of their ratios is 0.25, that of the medians 0.5."""
    fp32_ms = [16.0, 16.0, 16.0, 8.0, 8.0, 2.0, 2.0]
    bf16_ms = [4.0, 4.0, 4.0, 2.0, 8.0, 8.0, 8.0]
    rows = [
        bench_timing._row("fp32", fp32_ms, fp32_ms, 64),
        bench_timing._row("bf16", bf16_ms, fp32_ms, 64),
    ]
    fp32, bf16 = rows
    assert bf16["ratio"] == bf16["ms"] / fp32["ms"] == 0.5
    assert bf16["samples_per_s"] / fp32["samples_per_s"] == 1 / bf16["ratio"]
    assert [step.ms_per_step for step in bench._step_times(rows)] == [8.0, 4.0]

    # Rounds that say the opposite of the medians leave it open, in words and in the advice.
    row = bench_row("bf16", 1.1, 0.4, 0.6)
    steps = bench._step_times([*FP32, row])
    assert [step.is_faster for step in steps] == [False, False]
    [sentence] = bench._in_words(HalfUnits("CPU", ("bf16",)), [*FP32, row])
    assert sentence.endswith("faster or slower is not clear")


def test_bench_recommends_by_the_function_of_compare() -> None:
    words = [*QUICK, "--precisions", "O2,fp32"]
    result = run_json(*words)
    steps = bench._step_times(result["rows"])
    assert [step.precision for step in steps] == ["fp32", "O2"]
    units = find_half_units(torch.device("cpu"))
    assert result["recommendation"] == advise(units, steps=steps)._asdict()
    text = run_command(*words)
    assert "by time alone, use " in text
    assert "O2 " in text.rpartition("samples/s")[2].partition("by time alone")[0]

    alone = run_json(*QUICK, "--precisions", "O2")
    assert alone["recommendation"] is None
    assert alone["in_words"] == []


def test_bench_times_what_compare_tries() -> None:
    rows = run_json(*QUICK)["rows"]
    units = find_half_units(torch.device("cpu"))
    assert tuple(row["way"] for row in rows[1:]) == precisions_to_compare(units)
