"""Compiled strict float32 steps split their small products; others keep theirs whole."""

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


def count_products(step: hs.TrainStep) -> tuple[int, int]:
    """How many products a step runs whole, and how many batched, by the profiler."""
    for _ in range(4):  # the program is compiled in the second
        step(*batch())
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        step(*batch())
    names = [event.name for event in profiler.events()]
    whole = sum(names.count(f"aten::{name}") for name in ("mm", "addmm", "_addmm_activation"))
    return whole, names.count("aten::bmm")


@pytest.mark.parametrize("precision", ["fp32", "O0"])
def test_strict_products_are_cut(precision: str) -> None:
    # Split: the three outputs (K = 784, 512, 512) and the gradient by the second layer's input
    # (K = 512). Whole: the gradient by the last layer's input (K = 10). Three weight gradients
    # (K = 64) are one kernel of ours.
    assert count_products(build(network(), precision, compile=True)) == (1, 4)


@pytest.mark.parametrize(
    ("precision", "whole"),
    [("tf32", 8), ("fp64", 8), ("O1", 5), ("O2", 5), ("fp16", 5), ("bf16", 5)],
)
def test_other_precisions_are_not_cut(precision: str, whole: int) -> None:
    """Low ones have three weight gradients by one kernel of ours."""
    assert count_products(build(network(), precision, compile=True)) == (whole, 0)


def test_uncompiled_products_are_untouched() -> None:
    assert count_products(build(network(), "fp32", compile=False)) == (8, 0)


def change_by_two_steps(net: nn.Module, precision: str, compile: bool) -> list[Tensor]:
    """How far two steps move each parameter; the second is compiled if `compile` says so."""
    before = copy.deepcopy(net)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    step = build(net, precision, compile=compile)
    x, y = batch()
    for _ in range(2):
        step(x.to(dtype), y)
    pairs = zip(net.parameters(), before.parameters(), strict=True)
    return [p.detach().double() - q.detach().double() for p, q in pairs]


def test_cut_steps_are_as_exact_as_whole_ones() -> None:
    # Both are compared with float64. The error of a sum of K terms grows like √K · 2⁻²⁴ of its
    # size, here √784 = 28, through three layers forward and two backward: 5 · 28 = 140. Two updates
    # round the weights, by 2⁻²⁴ of up to 7 times the largest change: 14. Set, for both: 160 · 2⁻²⁴
    # of each parameter's largest change (10 on a CPU).
    exact_changes = change_by_two_steps(network(), "fp64", compile=False)
    for compile in (False, True):
        changes = change_by_two_steps(network(), "fp32", compile)
        for exact, change in zip(exact_changes, changes, strict=True):
            error = float((change - exact).abs().max())
            assert error <= 160 * 2.0**-24 * float(exact.abs().max())
