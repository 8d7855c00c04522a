"""The kernel of several weight gradients on a GPU, and the compiled steps that call it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import halfstep as hs
import halfstep.compiler.passes.batch_weight_grads

pytestmark = pytest.mark.gpu
SHAPES = [(512, 784, 64), (10, 512, 64), (33, 65, 7), (1, 1, 1), (64, 64, 200)]  # M, N, K
KINDS = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(("dtype", "out"), KINDS)
def test_whole_numbers_are_exact(dtype: torch.dtype, out: torch.dtype) -> None:
    g = torch.Generator("cuda").manual_seed(0)

    def draw(low: int, high: int, rows: int, columns: int) -> torch.Tensor:
        return torch.randint(low, high, (rows, columns), generator=g, device="cuda").to(dtype)

    lefts = [draw(-4, 5, k, m).t() for m, _, k in SHAPES]
    rights = [draw(-4, 5, k, n) for _, n, k in SHAPES]
    outputs = [draw(-1, 2, k, m).t() for m, _, k in SHAPES]  # of ReLUs
    masks = [outputs[0], None, outputs[2].contiguous(), outputs[3], outputs[4] <= 0]
    wide_lefts = []
    for a, mask, output in zip(lefts, masks, outputs, strict=True):
        masked = a if mask is None else torch.where(output <= 0, 0, a)
        wide_lefts.append(masked.double())
    summed = [True, True, True, False, True]

    results = torch.ops.halfstep.leaves(lefts, rights, masks, summed, out)
    exact = [a @ b.double() for a, b in zip(wide_lefts, rights, strict=True)]
    exact += [a.sum(1) for a, is_summed in zip(wide_lefts, summed, strict=True) if is_summed]
    for result, value in zip(results, exact, strict=True):
        assert torch.equal(result, value.to(dtype).to(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_near_the_exact_product(dtype: torch.dtype) -> None:
    """K float32 products in any order, then one rounding. No TF32.

    The bounds: K·2⁻²⁴·Σ|a·b|, and half a unit in the last place. A sum over the batch is such a
    product with ones.
    """
    g = torch.Generator("cuda").manual_seed(0)
    a, h, b = (torch.randn(64, n, generator=g, device="cuda").to(dtype) for n in (512, 512, 784))
    product, masked_product, row_sum, masked_sum = torch.ops.halfstep.leaves(
        [a.t(), a.t()], [b, b], [None, h.t()], [True, True], dtype
    )
    masked_a = torch.where(h <= 0, 0, a)
    ones = b.new_ones(64, 1)
    half_ulp = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for result, left, right in (
        (product, a, b),
        (row_sum[:, None], a, ones),
        (masked_product, masked_a, b),
        (masked_sum[:, None], masked_a, ones),
    ):
        exact = left.double().t() @ right.double()
        summing = 65 * 2.0**-24 * (left.double().abs().t() @ right.double().abs())
        bound = summing + (exact.abs() + summing) * half_ulp
        assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite(dtype: torch.dtype) -> None:
    """What is masked out is a 0, whatever it was.

    Behind a ReLU of NaN a gradient passes, as torch lets it.
    """
    nan = float("nan")
    inf = float("inf")
    g = torch.ones(64, 33, dtype=dtype, device="cuda")
    h = torch.ones(64, 33, dtype=dtype, device="cuda")
    g[0, 0], h[0, 0] = nan, 0.0
    g[5, 1], h[5, 1] = inf, -1.0
    g[63, 2] = inf
    g[7, 3], h[7, 3] = 9.0, nan
    g[8, 32] = nan
    x = torch.eye(64, 70, dtype=dtype, device="cuda")
    masked_g = torch.where(h <= 0, 0, g)
    masked_product, product, masked_sum, row_sum = torch.ops.halfstep.leaves(
        [g.t()] * 2, [x] * 2, [h.t(), None], [True, True], dtype
    )
    assert torch.equal(masked_product.isfinite(), (masked_g.t().float() @ x.float()).isfinite())
    assert torch.equal(product.isfinite(), (g.t().float() @ x.float()).isfinite())
    for result, left in ((masked_sum, masked_g), (row_sum, g)):
        expected = left.float().sum(0).to(dtype)
        assert torch.equal(result.nan_to_num(-1.0, -2.0), expected.nan_to_num(-1.0, -2.0))


def build(precision: str, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    ).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision, **options)


@pytest.mark.parametrize(
    ("precision", "masks"), [("fp32", 2), ("O1", 1), ("O2", 1), ("fp16", 1), ("bf16", 1)]
)
def test_a_compiled_step_calls_it_once(precision: str, masks: int) -> None:
    """Sums over the batch are in it, and a first layer's mask.

    Not in fp32, where a kernel adds up a split product's parts before.
    """
    step = build(precision, compile=True)
    x = torch.randn(64, 784, device="cuda")
    y = torch.arange(64).cuda() % 10
    for _ in range(3):  # the program is compiled in the second
        step(x, y)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        step(x, y)
    events = profiler.events()
    assert [event.name for event in events].count("halfstep::leaves") == 1
    on_cuda = torch.autograd.DeviceType.CUDA
    kernels = [event.name for event in events if event.device_type == on_cuda]
    assert kernels.count("weight_grad_tiles") == 1
    generated = [name for name in kernels if name.startswith("triton_")]
    assert sum("threshold_backward" in name for name in generated) == masks
    assert not [name for name in generated if "sum" in name and "softmax" not in name]
