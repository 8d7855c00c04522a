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
    lefts = [
        torch.randint(-4, 5, (k, m), generator=g, device="cuda").to(dtype).t() for m, _, k in SHAPES
    ]
    rights = [
        torch.randint(-4, 5, (k, n), generator=g, device="cuda").to(dtype) for _, n, k in SHAPES
    ]
    outs = [
        torch.randint(-1, 2, (k, m), generator=g, device="cuda").to(dtype).t() for m, _, k in SHAPES
    ]
    masks = [outs[0], None, outs[2].contiguous(), outs[3], outs[4] <= 0]
    wide = [
        (a if h is None else torch.where(o <= 0, 0, a)).double()
        for a, h, o in zip(lefts, masks, outs, strict=True)
    ]
    summed = [True, True, True, False, True]
    found = torch.ops.halfstep.leaves(lefts, rights, masks, summed, out)
    exact = [a @ b.double() for a, b in zip(wide, rights, strict=True)]
    exact += [a.sum(1) for a, too in zip(wide, summed, strict=True) if too]
    for got, value in zip(found, exact, strict=True):
        assert torch.equal(got, value.to(dtype).to(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_near_the_exact_product(dtype: torch.dtype) -> None:
    """K float32 products in any order, then one rounding: K·2⁻²⁴·Σ|a·b|, half a unit in the last place. No TF32.

    A sum over the batch is such a product with ones.
    """
    g = torch.Generator("cuda").manual_seed(0)
    a, h, b = (torch.randn(64, n, generator=g, device="cuda").to(dtype) for n in (512, 512, 784))
    found = torch.ops.halfstep.leaves([a.t(), a.t()], [b, b], [None, h.t()], [True, True], dtype)
    half = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for i, left in enumerate((a.double(), torch.where(h <= 0, 0, a).double())):
        for got, right in zip(
            (found[i], found[i + 2][:, None]), (b.double(), b.new_ones(64, 1).double()), strict=True
        ):
            exact, lost = left.t() @ right, 65 * 2.0**-24 * (left.abs().t() @ right.abs())
            assert ((got.double() - exact).abs() <= lost + (exact.abs() + lost) * half).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite(dtype: torch.dtype) -> None:
    """What is masked out is a 0, whatever it was; behind a ReLU of NaN a gradient passes, as torch lets it."""
    nan, inf = float("nan"), float("inf")
    g, h = (
        torch.ones(64, 33, dtype=dtype, device="cuda"),
        torch.ones(64, 33, dtype=dtype, device="cuda"),
    )
    g[0, 0], h[0, 0], g[5, 1], h[5, 1], g[63, 2], g[7, 3], h[7, 3] = (
        nan,
        0.0,
        inf,
        -1.0,
        inf,
        9.0,
        nan,
    )
    g[8, 32], x = nan, torch.eye(64, 70, dtype=dtype, device="cuda")
    clean = torch.where(h <= 0, 0, g)
    made, plain, total, rest = torch.ops.halfstep.leaves(
        [g.t()] * 2, [x] * 2, [h.t(), None], [True, True], dtype
    )
    assert torch.equal(made.isfinite(), (clean.t().float() @ x.float()).isfinite())
    assert torch.equal(plain.isfinite(), (g.t().float() @ x.float()).isfinite())
    for got, left in ((total, clean), (rest, g)):
        assert torch.equal(
            got.nan_to_num(-1.0, -2.0), left.float().sum(0).to(dtype).nan_to_num(-1.0, -2.0)
        )


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
    """Sums over the batch are in it, and a first layer's mask where no kernel adds a product's parts before (fp32)."""
    step, x, y = (
        build(precision, compile=True),
        torch.randn(64, 784, device="cuda"),
        torch.arange(64).cuda() % 10,
    )
    for _ in range(3):  # the program is made in the second
        step(x, y)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        step(x, y)
    assert [e.name for e in seen.events()].count("halfstep::leaves") == 1
    kernels = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels.count("weight_grad_tiles") == 1
    generated = [name for name in kernels if name.startswith("triton_")]
    assert sum("threshold_backward" in name for name in generated) == masks
    assert not [name for name in generated if "sum" in name and "softmax" not in name]
