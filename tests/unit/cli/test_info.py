"""`halfstep info`: measured speeds, and the precision recommended by them."""

from typing import Any

import pytest
import torch

from halfstep.cli import info_speed
from tests.support.command_line import run_command, run_json


def dtype_row(dtype: str, gflops: float | None, native: bool = True) -> dict[str, Any]:
    return {"dtype": dtype, "native": native, "by": "torch", "gflops": gflops}


RECOMMENDATIONS = {
    "bf16 before fp16": (
        [dtype_row("fp32", 50.0), dtype_row("fp16", 500.0), dtype_row("bf16", 400.0)],
        "O1+bf16",
    ),
    "fp16 alone": (
        [dtype_row("fp32", 10.0), dtype_row("fp16", 80.0), dtype_row("bf16", 1.0, native=False)],
        "O1",
    ),
    "not worth it": (
        [dtype_row("fp32", 100.0), dtype_row("fp16", 149.0), dtype_row("bf16", 140.0)],
        "fp32",
    ),
    "just worth it": ([dtype_row("fp32", 100.0), dtype_row("fp16", 150.0)], "O1"),
    "fast but not native": (
        [dtype_row("fp32", 100.0), dtype_row("fp16", 900.0, native=False)],
        "fp32",
    ),
    "not measured": ([dtype_row("fp32", None), dtype_row("bf16", None)], "O1+bf16"),
}


@pytest.mark.parametrize("name", RECOMMENDATIONS)
def test_the_recommendation_follows_the_units_and_their_speed(name: str) -> None:
    rows, expected = RECOMMENDATIONS[name]
    assert info_speed.recommend_precision("cuda", rows)["precision"] == expected


def test_info_shows_every_dtype_and_its_speed() -> None:
    result = run_json("info", "--device", "cpu", "--seconds", "0.01")
    rows = result["dtypes"]
    assert {row["dtype"] for row in rows} == {"fp64", "fp32", "fp16", "bf16"}
    assert all(row["gflops"] > 0 for row in rows)
    assert result["recommendation"] == info_speed.recommend_precision("cpu", rows)

    lines = run_command("info", "--device", "cpu", "--seconds", "0").splitlines()
    assert any(line.split() == ["fp32", "yes", "torch"] for line in lines)


def test_a_product_of_size_n_counts_two_n_cubed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a time of 1 s per product the first size, 256, is large enough."""
    monkeypatch.setattr(info_speed, "_shortest_product", lambda *_: 1.0)
    gflops = info_speed.measure_gflops(torch.float32, torch.device("cpu"), 0.01)
    assert gflops == 2 * 256**3 / 1e9
