"""Fused optimizers on smaller pieces on a GPU: half parameters too, in as few kernels as on whole tensors."""

from typing import Any

import pytest
import torch
from torch import nn

from halfstep.kernels.foreach import fused_step_in_pieces
from tests.unit.kernels.test_foreach import CASES, compare, contents, fill, flag, make, plainly

pytestmark = pytest.mark.gpu
MLP = [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)]


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_half_parameters(case: str, dtype: torch.dtype, tensor_lr: bool) -> None:
    compare(case, dtype, tensor_lr=tensor_lr)


def mlp(kind: Any, **settings: Any) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(size, device="cuda")) for size in MLP]
    optimizer = kind(params, **settings, fused=True)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer, params


def kernels(run: Any) -> list[str]:
    run()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        run()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize(
    ("kind", "settings", "count"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 1),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
        (torch.optim.AdamW, {"lr": 0.1}, 3),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}, 3),
    ],
)
def test_as_few_kernels_as_torch(kind: Any, settings: dict[str, Any], count: int) -> None:
    optimizer, _ = mlp(kind, **settings)
    found = flag(0.0)  # here: made from a host's number, it is a copy to the device
    theirs, ours = (
        kernels(lambda: plainly(optimizer, found)),
        kernels(lambda: fused_step_in_pieces(optimizer, found)),
    )
    assert len(theirs) == count, theirs
    assert len(ours) == count, ours


@pytest.mark.parametrize("case", ["momentum", "adamw amsgrad"])
def test_captured_and_replayed(case: str) -> None:
    (one, mine), (two, theirs) = (make(case, tensor_lr=True) for _ in range(2))
    found, graph = flag(0.0), torch.cuda.CUDAGraph()
    assert fused_step_in_pieces(one, found)  # loads what a capture must not
    plainly(two, found)
    grads = [p.grad for p in mine]
    with torch.cuda.graph(graph):
        assert fused_step_in_pieces(one, found)
    for seed, value in enumerate([0.0, 1.0, 0.0]):
        fill(mine, seed)
        fill(theirs, seed)
        for static, p in zip(grads, mine, strict=True):
            if static is not None and p.grad is not None:
                static.copy_(p.grad)
        found.fill_(value)
        graph.replay()
        plainly(two, found)
        for a, b in zip(contents(one, mine), contents(two, theirs), strict=True):
            assert torch.equal(a, b), (seed, a.shape)
