"""Compiled low steps on a GPU: casts joined, ReLU inside its product, the same bits where only casts are joined."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import halfstep as hs

pytestmark = pytest.mark.gpu
X, Y = torch.randn(64, 784, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 10


def build(precision: str, act: Callable[[], nn.Module] = nn.ReLU, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 512), act(), nn.Linear(512, 512), act(), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision, **options)


def called(step: hs.TrainStep) -> tuple[int, int]:
    """Joined casts and products with a ReLU inside, in one step."""
    x, y = X.cuda(), Y.cuda()
    for _ in range(3):  # the program is made in the second
        step(x, y)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        step(x, y)
    names = [e.name for e in seen.events()]
    return names.count("halfstep::casts"), names.count("aten::_addmm_activation")


@pytest.mark.parametrize(
    ("precision", "expected"), [("O1", (2, 2)), ("O2", (0, 2)), ("fp16", (0, 2)), ("bf16", (0, 2)), ("tf32", (0, 0))]
)
def test_what_a_compiled_step_calls(precision: str, expected: tuple[int, int]) -> None:
    assert called(build(precision, compile=True)) == expected
    assert called(build(precision, compile=False)) == (0, 0)


def weights(step: hs.TrainStep) -> list[Tensor]:
    for _ in range(6):
        step(X.cuda(), Y.cuda())
    return [p.detach().clone() for p in step.params]


def test_joined_casts_change_no_bit() -> None:
    """tanh stays outside products: a pass of one's own instead of ours leaves every cast by itself."""
    ours = weights(build("O1", nn.Tanh, compile=True))
    torch._dynamo.reset()
    with inductor.patch(post_grad_custom_pre_pass=lambda graph: None):  # a bare function: nothing is cached
        theirs = weights(build("O1", nn.Tanh, compile=True))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [784, 512])
def test_a_relu_inside_its_product_rounds_once(dtype: torch.dtype, k: int) -> None:
    """Sums of K float32 products in any order, then one rounding: K·2⁻²⁴·Σ|a·b|, and half a unit in the last place."""
    g = torch.Generator().manual_seed(2)
    x, w, b = (torch.randn(s, generator=g).to("cuda", dtype) for s in ((64, k), (512, k), (512,)))
    got = torch.ops.aten._addmm_activation(b, x, w.t())
    wide = [t.double() for t in (x, w, b)]
    exact = F.relu(F.linear(*wide))
    sums = F.linear(wide[0].abs(), wide[1].abs(), wide[2].abs()) * (k + 1) * 2.0**-24
    half = torch.finfo(dtype).eps / 2
    assert ((got.double() - exact).abs() <= sums + (exact + sums) * half).all()
