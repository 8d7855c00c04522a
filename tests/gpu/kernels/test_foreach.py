"""Fused optimizers on smaller pieces on a GPU: half parameters too, as few kernels as torch's."""

from typing import Any

import pytest
import torch
from torch import nn

from halfstep.kernels.foreach import fused_step_in_pieces
from tests.unit.kernels.test_foreach import (
    CASES,
    all_tensors,
    compare,
    fill_grads,
    flag,
    make_optimizer,
    step_by_torch,
)

pytestmark = pytest.mark.gpu
MLP_SHAPES = [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)]


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_half_parameters(case: str, dtype: torch.dtype, tensor_lr: bool) -> None:
    compare(case, dtype, tensor_lr=tensor_lr)


def make_mlp_optimizer(kind: Any, **settings: Any) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in MLP_SHAPES]
    optimizer = kind(params, **settings, fused=True)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer, params


def kernel_names(run: Any) -> list[str]:
    """The kernels of a second run."""
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
    optimizer, _ = make_mlp_optimizer(kind, **settings)
    found_inf = flag(0.0)  # made here: a number of the host's is a copy to the device
    theirs = kernel_names(lambda: step_by_torch(optimizer, found_inf))
    ours = kernel_names(lambda: fused_step_in_pieces(optimizer, found_inf))
    assert len(theirs) == count, theirs
    assert len(ours) == count, ours


@pytest.mark.parametrize("case", ["momentum", "adamw amsgrad"])
def test_captured_and_replayed(case: str) -> None:
    our_optimizer, our_params = make_optimizer(case, tensor_lr=True)
    torch_optimizer, torch_params = make_optimizer(case, tensor_lr=True)
    found_inf = flag(0.0)
    assert fused_step_in_pieces(our_optimizer, found_inf)  # loads what a capture must not
    step_by_torch(torch_optimizer, found_inf)
    static_grads = [p.grad for p in our_params]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert fused_step_in_pieces(our_optimizer, found_inf)

    for seed, value in enumerate([0.0, 1.0, 0.0]):
        fill_grads(our_params, seed)
        fill_grads(torch_params, seed)
        for static_grad, p in zip(static_grads, our_params, strict=True):
            if static_grad is not None and p.grad is not None:
                static_grad.copy_(p.grad)
        found_inf.fill_(value)
        graph.replay()
        step_by_torch(torch_optimizer, found_inf)
        ours = all_tensors(our_optimizer, our_params)
        theirs = all_tensors(torch_optimizer, torch_params)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), (seed, a.shape)
