"""Compiled 16-bit steps on a GPU: casts joined, same bits, NaN where uncompiled steps have it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.profiler import ProfilerActivity, profile

import halfstep as hs
from halfstep.compiler.passes import batch_weight_grads

pytestmark = pytest.mark.gpu
X = torch.randn(64, 784, generator=torch.Generator().manual_seed(1))
Y = torch.arange(64) % 10


def build(precision: str, act: Callable[[], nn.Module] = nn.ReLU, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(784, 512), act(), nn.Linear(512, 512), act(), nn.Linear(512, 10)
    ).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision, **options)


def count_joined_casts(step: hs.TrainStep) -> int:
    """Joined casts in one step, those of the weights: gradients are cast by their own kernel."""
    x = X.cuda()
    y = Y.cuda()
    for _ in range(3):  # the program is compiled in the second
        step(x, y)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        step(x, y)
    return [event.name for event in profiler.events()].count("halfstep::casts")


@pytest.mark.parametrize(
    ("precision", "expected"), [("O1", 1), ("O2", 0), ("fp16", 0), ("bf16", 0), ("tf32", 0)]
)
def test_what_a_compiled_step_calls(precision: str, expected: int) -> None:
    assert count_joined_casts(build(precision, compile=True)) == expected
    assert count_joined_casts(build(precision, compile=False)) == 0


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "O3", "fp16", "bf16"])
@pytest.mark.parametrize("where", ["weight", "bias"])
def test_a_nan_before_a_relu_is_seen(precision: str, where: str) -> None:
    """In the first layer, whose input has no gradient.

    A ReLU inside cuBLASLt's products is said to make a zero of NaN.
    """
    step = build(precision, compile=True, nonfinite="skip")
    for _ in range(3):
        assert step(X.cuda(), Y.cuda()).updated
    with torch.no_grad():
        step.params[("weight", "bias").index(where)].view(-1)[0] = float("nan")
    assert step(X.cuda(), Y.cuda()).skipped


def weights_after_steps(step: hs.TrainStep) -> list[Tensor]:
    for _ in range(6):
        step(X.cuda(), Y.cuda())
    return [p.detach().clone() for p in step.params]


def test_joined_casts_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of one's own instead of ours leaves every cast by itself.

    Weight gradients are torch's products in both.
    """
    monkeypatch.setattr(batch_weight_grads, "rewrite", lambda graph, device: None)
    with fresh_cache():
        torch._dynamo.reset()
        assert count_joined_casts(build("O1", nn.Tanh, compile=True)) == 2
        ours = weights_after_steps(build("O1", nn.Tanh, compile=True))
        torch._dynamo.reset()
        # A bare function, unlike a pass with a key: nothing is cached.
        with inductor.patch(post_grad_custom_pre_pass=lambda graph: None):
            theirs = weights_after_steps(build("O1", nn.Tanh, compile=True))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
