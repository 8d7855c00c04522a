"""hs.seed_everything: what it decides, compared with each library's own seed."""

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import halfstep as hs


def draw_from_all() -> tuple[float, float, Tensor]:
    return random.random(), float(np.random.rand()), torch.rand(3)  # noqa: NPY002


class DrawingSamples(Dataset[Any]):
    """Samples that are drawn where they are fetched: in a worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Tensor:
        own, numpy_own, torch_own = draw_from_all()
        return torch.tensor([float(i), own, numpy_own, float(torch_own[0])], dtype=torch.float64)


def worker_batches() -> Tensor:
    loader = DataLoader(DrawingSamples(), batch_size=2, shuffle=True, num_workers=2)
    return torch.cat(list(loader))


def test_it_sets_what_each_library_sets_for_that_seed() -> None:
    assert hs.seed_everything(7) == 7
    drawn = draw_from_all()

    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    torch.manual_seed(7)
    expected = draw_from_all()
    assert drawn[:2] == expected[:2]
    assert torch.equal(drawn[2], expected[2])

    hs.seed_everything(8)
    assert not torch.equal(draw_from_all()[2], expected[2])


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1, np.int64(5)])
def test_any_seed_that_torch_takes_is_taken_and_returned_as_an_int(seed: int) -> None:
    returned = hs.seed_everything(seed)
    assert returned == seed
    assert type(returned) is int
    assert torch.initial_seed() == seed


def test_the_workers_of_a_dataloader_draw_what_the_seed_says() -> None:
    hs.seed_everything(3)
    first = worker_batches()
    hs.seed_everything(3)
    again = worker_batches()
    hs.seed_everything(4)
    other = worker_batches()
    assert torch.equal(first, again)
    for column in range(4):
        assert not torch.equal(first[:, column], other[:, column])


def test_a_training_run_repeats_and_the_order_of_a_dataset_has_its_own_seed() -> None:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    y = torch.arange(64) % 3

    def train(seed: int) -> tuple[list[Tensor], list[Tensor]]:
        hs.seed_everything(seed)
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
        data = hs.data.Dataset((x, y)).shuffle().batch(8)
        order = [batch[0] for batch in data]
        model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
        model.fit(2, data)
        return list(net.parameters()), order

    weights, order = train(1)
    weights_again, _ = train(1)
    other_weights, other_order = train(2)
    assert all(map(torch.equal, weights, weights_again))
    assert not any(map(torch.equal, weights, other_weights))
    assert all(map(torch.equal, order, other_order))  # decided by Dataset(seed=…) alone


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (None, "seed: expected a whole number, 0 or more, received None"),
        (True, "received True"),
        (1.0, "received 1.0"),
        ("1", "received '1'"),
        (-1, "0 or more, received -1"),
        (2**63, r"below 2\*\*63, received 9223372036854775808"),
    ],
)
def test_a_wrong_seed_is_refused_and_nothing_is_seeded(seed: Any, message: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        hs.seed_everything(seed)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_deterministic_that_is_no_flag_is_refused() -> None:
    with pytest.raises(TypeError, match="deterministic: expected True or False, received 1"):
        hs.seed_everything(1, deterministic=1)  # type: ignore[arg-type]


DETERMINISTIC = """
import os
import torch
import halfstep as hs

torch.backends.cudnn.benchmark = True
assert not torch.are_deterministic_algorithms_enabled()
hs.seed_everything(1)
assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark
assert hs.seed_everything(1, deterministic=True) == 1
assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
print(os.environ["CUBLAS_WORKSPACE_CONFIG"])
hs.seed_everything(1)
assert torch.are_deterministic_algorithms_enabled()  # left as it is

# A step on the GPU would let cuDNN measure, and measurements do not repeat.
from halfstep.step.options import StepOptions
assert not StepOptions().backend_flags["benchmark"]
torch.use_deterministic_algorithms(False)
assert StepOptions().backend_flags["benchmark"]
"""


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_deterministic_sets_the_switches_of_the_process(
    workspace: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    result = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == (workspace or ":4096:8")
