"""The kernel of several weight gradients on a GPU, and the compiled steps that call it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import halfstep as hs
import halfstep.step.leaves

pytestmark = pytest.mark.gpu
SHAPES = [(512, 784, 64), (10, 512, 64), (33, 65, 7), (1, 1, 1), (64, 64, 200)]  # M, N, K
KINDS = [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("dtype", "out"), KINDS)
def test_whole_numbers_are_exact(dtype: torch.dtype, out: torch.dtype) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    lefts = [torch.randint(-4, 5, (k, m), generator=g, device="cuda").to(dtype).t() for m, _, k in SHAPES]
    rights = [torch.randint(-4, 5, (k, n), generator=g, device="cuda").to(dtype) for _, n, k in SHAPES]
    found = torch.ops.halfstep.leaves(lefts, rights, out)
    for got, a, b in zip(found, lefts, rights, strict=True):
        assert torch.equal(got, (a.double() @ b.double()).to(dtype).to(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_near_the_exact_product(dtype: torch.dtype) -> None:
    """K float32 products in any order, then one rounding: K·2⁻²⁴·Σ|a·b|, half a unit in the last place. No TF32."""
    g = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(64, n, generator=g, device="cuda").to(dtype) for n in (512, 784))
    found, _ = torch.ops.halfstep.leaves([a.t(), a.t()], [b, b], dtype)
    exact, sums = a.double().t() @ b.double(), a.double().abs().t() @ b.double().abs()
    lost = 65 * 2.0**-24 * sums
    half = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    assert ((found.double() - exact).abs() <= lost + (exact.abs() + lost) * half).all()


def build(precision: str, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision, **options)


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "fp16", "bf16"])
def test_a_compiled_step_calls_it_once(precision: str) -> None:
    step, x, y = build(precision, compile=True), torch.randn(64, 784, device="cuda"), torch.arange(64).cuda() % 10
    for _ in range(3):  # the program is made in the second
        step(x, y)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        step(x, y)
    names = [e.name for e in seen.events()]
    assert names.count("halfstep::leaves") == 1
    assert sum(name == "tiles" for name in names) == 1
