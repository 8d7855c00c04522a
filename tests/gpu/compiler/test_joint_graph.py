"""Networks with batch norms, compiled on a GPU: masks of the norm's input, the pool's kernel."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code

from halfstep.compiler.backend import generate

pytestmark = pytest.mark.gpu


def near_zero(dtype: torch.dtype) -> tuple[Tensor, nn.BatchNorm2d]:
    """Images of four values a channel, one of which the norm takes to zero but for its rounding."""
    g = torch.Generator("cuda").manual_seed(0)
    values = torch.randn(4, 64, 1, 1, generator=g, device="cuda").to(dtype)
    which = torch.randint(0, 4, (16, 64, 64, 64), generator=g, device="cuda")
    x = torch.gather(values.squeeze().t().expand(16, 64, 4), 2, which.flatten(2)).view(
        16, 64, 64, 64
    )
    norm = nn.BatchNorm2d(64).cuda()
    var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(64, generator=g, device="cuda") + 0.5)
        norm.bias.copy_(
            -(values[0].flatten().float() - mean) * torch.rsqrt(var + norm.eps) * norm.weight
        )
    return x.contiguous(memory_format=torch.channels_last).requires_grad_(), norm


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_mask_is_that_of_the_output(dtype: torch.dtype) -> None:
    """The gradient of the norm's bias is Σ g·mask; whole numbers below 2²⁴ add up exactly in any order."""
    x, norm = near_zero(dtype)
    g = torch.randint(
        1, 9, x.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    low = dtype != torch.float32

    def forward(x: Tensor) -> Tensor:
        return F.relu(norm(x))

    compiled = torch.compile(
        forward, dynamic=False, backend=partial(generate, low=low, chip="cuda")
    )
    out = compiled(x)
    (got,) = torch.autograd.grad((out * g.to(dtype)).sum(), norm.bias)
    assert torch.equal(got, (g * (out > 0)).sum((0, 2, 3)).float())


def test_the_output_is_not_read_again() -> None:
    """The backward program has two inputs of the images' size, gradient and norm's input; without the pass three."""
    x, norm = near_zero(torch.float16)

    def read() -> int:
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: F.relu(norm(x)),
            dynamic=False,
            backend=partial(generate, low=True, chip="cuda"),
        )
        with fresh_cache():
            _, codes = run_and_get_code(lambda: compiled(x))
        return len(re.findall(r"assert_size_stride\(\w+, \(16, 64, 64, 64\)", codes[-1]))

    assert read() == 2
    with config.patch(joint_custom_post_pass=lambda graph: None):
        assert read() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [(3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 3, 2)])
def test_the_kernel_of_a_pools_backward_pass(
    dtype: torch.dtype, window: tuple[int, int, int]
) -> None:
    """Sums of torch's float32 backward pass, rounded once: at most 25 whole numbers, so in any order."""
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(3, 48, 37, 41, generator=g, device="cuda").contiguous(
        memory_format=torch.channels_last
    )
    x = x.to(dtype).float().requires_grad_()
    kernel, stride, padding = ([n, n] for n in window)
    out, offsets = torch.ops.prims._low_memory_max_pool_with_offsets(
        x.detach(), kernel, stride, padding, [1, 1], False
    )
    grad = torch.randint(-5, 6, out.shape, generator=g, device="cuda").contiguous(
        memory_format=torch.channels_last
    )
    got = torch.ops.halfstep.unpool(grad.to(dtype), offsets, kernel, stride, padding, [37, 41])
    (wanted,) = torch.autograd.grad(F.max_pool2d(x, *window), x, grad.float())
    assert torch.equal(got, wanted.to(dtype))
    assert got.stride() == x.stride()


class Stem(nn.Module):
    """What ResNets begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, 1)


def test_a_stem_calls_the_kernel_and_repeats_itself() -> None:
    torch.manual_seed(0)
    net = Stem().cuda().half().to(memory_format=torch.channels_last)
    net.norm.float()
    x = torch.randn(16, 3, 66, 66, device="cuda", dtype=torch.float16).contiguous(
        memory_format=torch.channels_last
    )
    compiled = torch.compile(
        lambda x: net(x), dynamic=False, backend=partial(generate, low=True, chip="cuda")
    )
    with fresh_cache():
        _, codes = run_and_get_code(lambda: compiled(x))
    assert "halfstep.unpool" in codes[-1]
    grads = [
        torch.autograd.grad(compiled(x).float().square().mean(), list(net.parameters()))
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*grads, strict=True))
