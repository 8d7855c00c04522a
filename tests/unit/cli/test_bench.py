"""`halfstep bench`: a row of times for each way to train."""

import shlex

import pytest

from tests.support.command_line import run_command, run_json


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
