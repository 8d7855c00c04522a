"""Memory of a step that is dropped: freed at once, not when Python's garbage collector runs."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import halfstep as hs


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "fp16"])
@pytest.mark.usefixtures("no_garbage_collector")
def test_weights_and_optimizer_state_are_freed_with_the_step(
    precision: str, device: torch.device
) -> None:
    net = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, eps=1e-4)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision)
    step(torch.randn(5, 8, device=device), torch.zeros(5, dtype=torch.int64, device=device))
    weight = weakref.ref(net.weight)
    average = weakref.ref(optimizer.state[net.weight]["exp_avg"])

    del step, net, optimizer
    assert weight() is None
    assert average() is None
