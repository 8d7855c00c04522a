"""A compiled run with dropout that is stopped and resumed.

With compiled forward and loss it ends with equal bits; with the whole step as one program to
rounding, and its random numbers are those of an uncompiled step.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.errors import Notice
from tests.support.data_kinds import SIZE, make_columns
from tests.support.killed_run import seed_all

# A pass has six batches of 4 and one of 2: two programs.
STEPS = (1, 2, 6, 7, 9, 20)

# Sums in another order, by a few ulp of weights below 1, over 80 updates.
ROUNDING = 64 * 2.0**-23


class Net(nn.Module):
    """Dropout, and noise that compiled code draws in another way than torch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.4)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.first(x)))
        out: Tensor = self.last(h * (torch.rand_like(h) > 0.2) + 0.1 * torch.randn(h.shape))
        return out


def train(
    folder: Path,
    *,
    resume: Any = None,
    precision: str = "fp32",
    epochs: int = 3,
    size: int = SIZE,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The weights at the end, and torch's random state."""
    seed_all(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, precision, compile=True, **options)
    if resume is not None:
        seed_all(99)
    saver = hs.Checkpoint(folder, every_steps=1, keep=100)
    x, y = make_columns(size=size)
    data = hs.data.Dataset({"x": x, "y": y}, seed=3).shuffle().batch(4)
    model.fit(epochs, data, callbacks=[saver], resume=resume)
    if resume is None and "capture" not in options:
        assert re.search("programs of the whole step: [12] held", str(model.report()))
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return weights, torch.get_rng_state()


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp32", {}),
        pytest.param("O2", {}, marks=pytest.mark.slow),
        pytest.param("O1", {}, marks=pytest.mark.slow),
        pytest.param("fp32", {"accumulate": 2}, marks=pytest.mark.slow),
    ],
)
def test_with_compiled_forward_and_loss_it_ends_with_equal_bits(
    precision: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing is announced, but the overflow of a first update in half precision."""
    options = {"precision": precision, "capture": False, **options}
    expected = train(tmp_path / "whole", **options)
    for step in STEPS:
        source = tmp_path / "whole" / checkpoint.name_of(step)
        ends = train(tmp_path / f"from {step}", resume=source, **options)
        assert all(map(torch.equal, ends, expected)), step


@pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.12"),
    reason="torch 2.11 compiles a whole step that draws to other values: fit says so, runs parts",
)
def test_with_the_whole_step_compiled_it_ends_the_same_to_rounding(tmp_path: Path) -> None:
    # Long enough to be recorded, checked on eight batches, and compiled.
    long_run = {"epochs": 2, "size": 160}
    weights, random_state = train(tmp_path / "whole", **long_run)
    for step in (2, 40, 65):
        source = tmp_path / "whole" / checkpoint.name_of(step)
        with pytest.warns(Notice, match="to rounding, not bit for bit, as its first steps run"):
            resumed_weights, resumed_state = train(
                tmp_path / f"from {step}", resume=source, **long_run
            )
        torch.testing.assert_close(resumed_weights, weights, atol=ROUNDING, rtol=0)
        assert torch.equal(resumed_state, random_state)


def test_a_checkpoint_that_does_not_say_what_was_compiled_is_announced(tmp_path: Path) -> None:
    train(tmp_path / "whole", capture=False)
    tree = checkpoint.load(tmp_path / "whole" / checkpoint.name_of(20)).tree
    assert len(tree.pop("compiled")) == 2
    checkpoint.save(tmp_path / "older" / checkpoint.name_of(20), tree)
    source = tmp_path / "older" / checkpoint.name_of(20)
    with pytest.warns(Notice, match="the first batch of each shape runs uncompiled"):
        train(tmp_path / "from older", resume=source, capture=False)


@pytest.mark.slow
def test_more_shapes_than_are_compiled_stay_uncompiled(tmp_path: Path) -> None:
    """Which shapes are compiled is decided over the whole run, not from the stop on."""
    draw = torch.Generator().manual_seed(0)
    batches = []
    for size in range(1, 9):
        batches.append((torch.randn(size, 6, generator=draw), torch.zeros(size).long()))

    def end(resume: Any = None) -> Tensor:
        seed_all(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, compile=True, capture=False)
        folder = tmp_path / f"resumed {resume is not None}"
        with warnings.catch_warnings(action="ignore", category=Notice):
            model.fit(3, batches, callbacks=[hs.Checkpoint(folder, keep=9)], resume=resume)
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    expected = end()
    assert torch.equal(end(tmp_path / "resumed False" / checkpoint.name_of(16)), expected)
