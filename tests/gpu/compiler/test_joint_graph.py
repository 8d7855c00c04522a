"""Networks with batch norms, compiled on a GPU: masks of the norm's input, the pool's kernel."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache, run_and_get_code

from halfstep.compiler.backend import compile_graph

# Registers torch.ops.halfstep.unpool. Without this import, only a test that has compiled a program
# before, in the same process, would have done so.
from halfstep.compiler.passes import max_pool

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """No test goes on with programs that another one has compiled."""
    torch._dynamo.reset()


def compile_on_gpu(f: Callable[..., Any], *, low: bool) -> Callable[..., Any]:
    backend = partial(compile_graph, low=low, chip="cuda")
    return torch.compile(f, dynamic=False, backend=backend)


def values_near_zero(dtype: torch.dtype) -> tuple[Tensor, nn.BatchNorm2d]:
    """Images of four values a channel, one of which the norm takes to zero but for its rounding."""
    g = torch.Generator("cuda").manual_seed(0)
    values = torch.randn(4, 64, 1, 1, generator=g, device="cuda").to(dtype)
    choice = torch.randint(0, 4, (16, 64, 64, 64), generator=g, device="cuda")
    values_by_channel = values.squeeze().t().expand(16, 64, 4)
    x = torch.gather(values_by_channel, 2, choice.flatten(2)).view(16, 64, 64, 64)

    norm = nn.BatchNorm2d(64).cuda()
    var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(64, generator=g, device="cuda") + 0.5)
        distance = values[0].flatten().float() - mean
        norm.bias.copy_(-distance * torch.rsqrt(var + norm.eps) * norm.weight)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_(), norm


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_mask_is_that_of_the_output(dtype: torch.dtype) -> None:
    """The gradient of the norm's bias is Σ g·mask.

    Whole numbers below 2²⁴ add up exactly in any order.
    """
    x, norm = values_near_zero(dtype)
    generator = torch.Generator("cuda").manual_seed(1)
    g = torch.randint(1, 9, x.shape, device="cuda", generator=generator)

    compiled = compile_on_gpu(lambda x: F.relu(norm(x)), low=dtype != torch.float32)
    out = compiled(x)
    (bias_grad,) = torch.autograd.grad((out * g.to(dtype)).sum(), norm.bias)
    assert torch.equal(bias_grad, (g * (out > 0)).sum((0, 2, 3)).float())


def test_the_output_is_not_read_again() -> None:
    """The backward program has two inputs of the images' size: gradient and norm's input.

    Without the pass it has three.
    """
    x, norm = values_near_zero(torch.float16)

    def count_large_inputs() -> int:
        torch._dynamo.reset()
        compiled = compile_on_gpu(lambda x: F.relu(norm(x)), low=True)
        with fresh_cache():
            _, codes = run_and_get_code(lambda: compiled(x))
        return len(re.findall(r"assert_size_stride\(\w+, \(16, 64, 64, 64\)", codes[-1]))

    assert count_large_inputs() == 2
    with inductor_config.patch(joint_custom_post_pass=lambda graph: None):
        assert count_large_inputs() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [(3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 3, 2)])
def test_the_kernel_of_a_pools_backward_pass(
    dtype: torch.dtype, window: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of torch's float32 backward pass, rounded once.

    They are of at most 25 whole numbers, so exact in any order.
    """
    monkeypatch.setattr(max_pool, "_WORKS", {})
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(3, 48, 37, 41, generator=g, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last).to(dtype).float().requires_grad_()
    kernel, stride, padding = ([n, n] for n in window)
    out, offsets = torch.ops.prims._low_memory_max_pool_with_offsets(
        x.detach(), kernel, stride, padding, [1, 1], False
    )
    grad = torch.randint(-5, 6, out.shape, generator=g, device="cuda")
    grad = grad.contiguous(memory_format=torch.channels_last)

    x_grad = torch.ops.halfstep.unpool(grad.to(dtype), offsets, kernel, stride, padding, [37, 41])
    (expected,) = torch.autograd.grad(F.max_pool2d(x, *window), x, grad.float())
    assert torch.equal(x_grad, expected.to(dtype))
    assert x_grad.stride() == x.stride()
    assert list(max_pool._WORKS.values()) == [True]  # the kernel, not what stands in for it


class Stem(nn.Module):
    """What ResNets begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, 1)


def test_a_stem_calls_the_kernel_and_repeats_itself() -> None:
    torch.manual_seed(0)
    net = Stem().cuda().half().to(memory_format=torch.channels_last)
    net.norm.float()
    x = torch.randn(16, 3, 66, 66, device="cuda", dtype=torch.float16)
    x = x.contiguous(memory_format=torch.channels_last)
    compiled = compile_on_gpu(lambda x: net(x), low=True)
    with fresh_cache():
        _, codes = run_and_get_code(lambda: compiled(x))
    assert "halfstep.unpool" in codes[-1]

    params = list(net.parameters())
    first, second = (
        torch.autograd.grad(compiled(x).float().square().mean(), params) for _ in range(2)
    )
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))
