"""An MLP on the full Fashion-MNIST, in float32 and in pure float16 with three kinds of rounding.

Runs where the data is: in HALFSTEP_DATA, or in Debian's dataset-fashion-mnist.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DATA_FOLDER = Path(os.environ.get("HALFSTEP_DATA", "/usr/share/datasets/fashion-mnist"))
PRECISIONS = ("fp32", "fp16 nearest", "fp16 stochastic", "fp16 kahan")
EPOCHS = 5
SEED = 0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (DATA_FOLDER / "train-images-idx3-ubyte.gz").exists(),
        reason=f"no Fashion-MNIST in {DATA_FOLDER}; set HALFSTEP_DATA",
    ),
]


@pytest.fixture(scope="module")
def accuracy() -> dict[str, float]:
    """Test accuracy in percent, batch 64, SGD with lr 1e-3, the same order of samples for all."""
    sys.path.insert(0, str(BENCHMARKS))
    import rounding

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(2)
    train_data = rounding.load_split(DATA_FOLDER, device, train=True)
    test_data = rounding.load_split(DATA_FOLDER, device, train=False)
    accuracies = {}
    for name in PRECISIONS:
        result = rounding.measure(rounding.WAYS[name], train_data, test_data, EPOCHS, SEED)
        accuracies[name] = result["accuracy"]
    return accuracies


def test_fp32_reaches_the_accuracy_of_torch_tpus_table(accuracy: dict[str, float]) -> None:
    assert 64 <= accuracy["fp32"] <= 66  # its table: 64.7


def test_stochastic_and_kahan_rounding_reach_fp32s_accuracy(accuracy: dict[str, float]) -> None:
    assert abs(accuracy["fp16 stochastic"] - accuracy["fp32"]) < 1
    assert abs(accuracy["fp16 kahan"] - accuracy["fp32"]) < 1


def test_nearest_rounding_loses_about_seventeen_points(accuracy: dict[str, float]) -> None:
    assert 12 < accuracy["fp32"] - accuracy["fp16 nearest"] < 22
