"""Complex parameters in captured steps on CUDA: the bits of eager ones, skips included."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from tests.support.captured_runs import differing_tensors
from tests.unit.step.test_complex_parameters import Wave, make_batches

pytestmark = pytest.mark.gpu

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam capturable": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, capturable=True),
    "adam capturable foreach": lambda p: torch.optim.Adam(
        p, lr=0.01, eps=1e-4, capturable=True, foreach=True
    ),
}


def make_step(optimizer: str, precision: str, **options: Any) -> hs.TrainStep:
    net = Wave().cuda()
    return hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        OPTIMIZERS[optimizer](net.parameters()),
        precision=precision,
        deterministic=True,
        nonfinite="skip",
        **options,
    )


def cuda_batches() -> list[tuple[Tensor, Tensor]]:
    batches = [(x.cuda(), y.cuda()) for x, y in make_batches(24)]
    batches[15] = (batches[15][0] * 1e30, batches[15][1])  # overflows everywhere
    return batches


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"clip_norm": 0.05}, {"clip_value": 0.01}, {"ema": 0.9}]
)
@pytest.mark.parametrize("precision", ["fp32", "fp64", "O1", "O2", "O2+bf16", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_captured_steps_have_the_bits_of_eager_ones(
    optimizer: str, precision: str, options: dict[str, Any]
) -> None:
    batches = cuda_batches()
    eager = make_step(optimizer, precision, **options)
    losses = [eager(*batch).loss.item() for batch in batches]
    captured = make_step(optimizer, precision, **options)
    sink = hs.sink(captured, batches, every=6)
    received = [loss for records in sink for loss in records.loss.tolist()]
    assert torch.equal(torch.tensor(received).nan_to_num(), torch.tensor(losses).nan_to_num())
    assert sink.runner.program.replays > 0
    assert differing_tensors(eager, captured) == []
