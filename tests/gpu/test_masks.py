"""A compiled backward pass on a GPU takes a ReLU's mask from the norm's input: the mask that forward's output has."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code

from halfstep.step.generate import generate

pytestmark = pytest.mark.gpu


def near_zero(dtype: torch.dtype) -> tuple[Tensor, nn.BatchNorm2d]:
    """Images of four values a channel, one of which the norm takes to zero but for its rounding."""
    g = torch.Generator("cuda").manual_seed(0)
    values = torch.randn(4, 64, 1, 1, generator=g, device="cuda").to(dtype)
    which = torch.randint(0, 4, (16, 64, 64, 64), generator=g, device="cuda")
    x = torch.gather(values.squeeze().t().expand(16, 64, 4), 2, which.flatten(2)).view(16, 64, 64, 64)
    norm = nn.BatchNorm2d(64).cuda()
    var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(64, generator=g, device="cuda") + 0.5)
        norm.bias.copy_(-(values[0].flatten().float() - mean) * torch.rsqrt(var + norm.eps) * norm.weight)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_(), norm


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_mask_is_that_of_the_output(dtype: torch.dtype) -> None:
    """The gradient of the norm's bias is Σ g·mask; whole numbers below 2²⁴ add up exactly in any order."""
    x, norm = near_zero(dtype)
    g = torch.randint(1, 9, x.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    low = dtype != torch.float32

    def forward(x: Tensor) -> Tensor:
        return F.relu(norm(x))

    compiled = torch.compile(forward, dynamic=False, backend=partial(generate, low=low, chip="cuda"))
    out = compiled(x)
    (got,) = torch.autograd.grad((out * g.to(dtype)).sum(), norm.bias)
    assert torch.equal(got, (g * (out > 0)).sum((0, 2, 3)).float())


def test_the_output_is_not_read_again() -> None:
    """The backward program has two inputs of the images' size, gradient and norm's input; without the pass three."""
    x, norm = near_zero(torch.float16)

    def read() -> int:
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: F.relu(norm(x)), dynamic=False, backend=partial(generate, low=True, chip="cuda")
        )
        with fresh_cache():
            _, codes = run_and_get_code(lambda: compiled(x))
        return len(re.findall(r"assert_size_stride\(\w+, \(16, 64, 64, 64\)", codes[-1]))

    assert read() == 2
    with config.patch(joint_custom_post_pass=lambda graph: None):
        assert read() == 3
