"""The seed MLP on full Fashion-MNIST, where the data is there (HALFSTEP_DATA, or Debian's dataset-fashion-mnist)."""

import os
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DATA = Path(os.environ.get("HALFSTEP_DATA", "/usr/share/datasets/fashion-mnist"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (DATA / "train-images-idx3-ubyte.gz").exists(),
        reason=f"no Fashion-MNIST in {DATA}; set HALFSTEP_DATA",
    ),
]


@pytest.fixture(scope="module")
def accuracy(request: pytest.FixtureRequest) -> dict[str, float]:
    """Test accuracy after 5 epochs, batch 64, SGD 1e-3, one seed, the same order for all."""
    sys.path.insert(0, str(BENCHMARKS))
    import rounding

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(2)
    train, test = (rounding.load(DATA, device, train=t) for t in (True, False))
    ways = ("fp32", "fp16 nearest", "fp16 stochastic", "fp16 kahan")
    return {way: rounding.train(rounding.WAYS[way], train, test, 5, 0)["accuracy"] for way in ways}


def test_fp32_lands_where_the_guides_table_does(accuracy: dict[str, float]) -> None:
    assert 64 <= accuracy["fp32"] <= 66  # torch-tpu's table: 64.7


def test_stochastic_and_kahan_rounding_keep_fp32s_accuracy(accuracy: dict[str, float]) -> None:
    assert abs(accuracy["fp16 stochastic"] - accuracy["fp32"]) < 1
    assert abs(accuracy["fp16 kahan"] - accuracy["fp32"]) < 1


def test_nearest_rounding_loses_about_seventeen_points(accuracy: dict[str, float]) -> None:
    assert 12 < accuracy["fp32"] - accuracy["fp16 nearest"] < 22
