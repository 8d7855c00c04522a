"""Compiled strict float32 steps cut their small products; others keep theirs whole."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import halfstep as hs

pytestmark = pytest.mark.gpu


def network() -> nn.Module:
    torch.manual_seed(0)
    return hs.nets.mlp(inputs=784, hidden=(512, 512)).cuda()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(64, 784, device="cuda"), torch.randint(10, (64,), device="cuda")


def build(net: nn.Module, precision: str, **options: Any) -> hs.TrainStep:
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, fused=True)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision, **options)


def run_by(step: hs.TrainStep) -> tuple[int, int]:
    """How many products a step runs whole, and how many batched, as the profiler sees them called."""
    for _ in range(4):  # the program is made in the second
        step(*batch())
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        step(*batch())
    names = [e.name for e in seen.events()]
    return sum(
        names.count(f"aten::{name}") for name in ("mm", "addmm", "_addmm_activation")
    ), names.count("aten::bmm")


@pytest.mark.parametrize("precision", ["fp32", "O0"])
def test_strict_products_are_cut(precision: str) -> None:
    # Cut: the three outputs (K = 784, 512, 512) and the gradient by the second layer's input (K = 512). Whole: the
    # gradient by the last layer's input (K = 10). Three weight gradients (K = 64) are one kernel of ours.
    assert run_by(build(network(), precision, compile=True)) == (1, 4)


@pytest.mark.parametrize(
    ("precision", "whole"),
    [("tf32", 8), ("fp64", 8), ("O1", 5), ("O2", 5), ("fp16", 5), ("bf16", 5)],
)
def test_other_precisions_are_not_cut(precision: str, whole: int) -> None:
    """Low ones have three weight gradients by one kernel of ours."""
    assert run_by(build(network(), precision, compile=True)) == (whole, 0)


def test_uncompiled_products_are_untouched() -> None:
    assert run_by(build(network(), "fp32", compile=False)) == (8, 0)


def moved(net: nn.Module, precision: str, compile: bool) -> list[Tensor]:
    """What two steps, the second of them compiled where asked, moved each parameter by."""
    start, dtype = copy.deepcopy(net), torch.float64 if precision == "fp64" else torch.float32
    step, (x, y) = build(net, precision, compile=compile), batch()
    for _ in range(2):
        step(x.to(dtype), y)
    return [
        p.detach().double() - q.detach().double()
        for p, q in zip(net.parameters(), start.parameters(), strict=True)
    ]


def test_cut_steps_are_as_exact_as_whole_ones() -> None:
    # Both are compared with float64. The error of a sum of K terms grows like √K · 2⁻²⁴ of its size, here √784 = 28,
    # through three layers forward and two backward: 5 · 28 = 140. Two updates round the weights, by 2⁻²⁴ of up to 7
    # times the largest change: 14. Set, for both: 160 · 2⁻²⁴ of each parameter's largest change (10 on a CPU).
    exact = moved(network(), "fp64", compile=False)
    for compile in (False, True):
        for e, a in zip(exact, moved(network(), "fp32", compile), strict=True):
            assert float((a - e).abs().max()) <= 160 * 2.0**-24 * float(e.abs().max())
