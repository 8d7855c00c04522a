"""`halfstep info`: measured speeds, and the precision recommended by them."""

from typing import Any

import pytest
import torch

from halfstep.cli import info_speed
from halfstep.precision.advice import advise, begin_with, find_half_units
from tests.support.command_line import run_command, run_json


def dtype_row(dtype: str, gflops: float | None, native: bool = True) -> dict[str, Any]:
    return {"dtype": dtype, "native": native, "by": "torch", "gflops": gflops}


SPEEDUPS = {
    "both": (
        [dtype_row("fp32", 50.0), dtype_row("fp16", 500.0), dtype_row("bf16", 400.0)],
        {"bf16": 8.0, "fp16": 10.0},
    ),
    "one is emulated": (
        [dtype_row("fp32", 10.0), dtype_row("fp16", 80.0), dtype_row("bf16", 1.0, native=False)],
        {"fp16": 8.0},
    ),
    "two ways, both emulated": (
        [
            dtype_row("fp32", 100.0),
            dtype_row("fp16", 1.0, native=False),
            dtype_row("fp16", 900.0, native=False),
        ],
        {},
    ),
    "not measured": ([dtype_row("fp32", None), dtype_row("bf16", None)], {}),
}


@pytest.mark.parametrize("name", SPEEDUPS)
def test_only_native_products_count(name: str) -> None:
    rows, expected = SPEEDUPS[name]
    assert info_speed.product_speedups(rows) == expected


def test_info_shows_every_dtype_and_its_speed() -> None:
    result = run_json("info", "--device", "cpu", "--seconds", "0.01")
    rows = result["dtypes"]
    assert {row["dtype"] for row in rows} == {"fp64", "fp32", "fp16", "bf16"}
    assert all(row["gflops"] > 0 for row in rows)
    units = find_half_units(torch.device("cpu"))
    assert {row["dtype"] for row in rows if row["native"]} == {"fp64", "fp32", *units.dtypes}
    advice = advise(units, product_speedups=info_speed.product_speedups(rows))
    assert result["recommendation"] == advice._asdict()

    lines = run_command("info", "--device", "cpu", "--seconds", "0").splitlines()
    assert f"begin with {begin_with(units)}: {units.describe()}" in "\n".join(lines)
    assert any(line.split() == ["fp32", "yes", "torch"] for line in lines)


def test_a_product_of_size_n_counts_two_n_cubed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a time of 1 s per product the first size, 256, is large enough."""
    monkeypatch.setattr(info_speed, "_shortest_product", lambda *_: 1.0)
    gflops = info_speed.measure_gflops(torch.float32, torch.device("cpu"), 0.01)
    assert gflops == 2 * 256**3 / 1e9
