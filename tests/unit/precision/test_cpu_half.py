"""FastHalf: a low product on a CPU is round(fp32 product of low operands), also backward."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.precision import Applied
from halfstep.precision.cpu_half import FastHalf, has_native

F16 = torch.float16
BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64
CPU = torch.device("cpu")  # FastHalf acts on CPU tensors only, whatever else the machine has
Op = Callable[..., Tensor]

OPS: dict[str, tuple[Op, list[tuple[int, ...]]]] = {  # function, shapes of its operands
    "linear": (F.linear, [(3, 5, 16), (7, 16), (7,)]),
    "linear without bias": (lambda x, w: F.linear(x, w), [(5, 16), (7, 16)]),
    "bilinear": (F.bilinear, [(3, 4), (3, 5), (6, 4, 5), (6,)]),
    "matmul 1-D 1-D": (torch.matmul, [(16,), (16,)]),
    "matmul 1-D 2-D": (torch.matmul, [(16,), (16, 3)]),
    "matmul 2-D 1-D": (torch.matmul, [(3, 16), (16,)]),
    "matmul 2-D 2-D": (torch.matmul, [(3, 16), (16, 5)]),
    "matmul 3-D 2-D": (torch.matmul, [(2, 3, 16), (16, 5)]),
    "matmul 4-D broadcast": (torch.matmul, [(2, 1, 3, 16), (4, 16, 5)]),
    "mm": (torch.mm, [(3, 16), (16, 5)]),
    "mv": (torch.mv, [(3, 16), (16,)]),
    "bmm": (torch.bmm, [(2, 3, 16), (2, 16, 5)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), [(5,), (3, 16), (16, 5)]),
    "addmv": (torch.addmv, [(3,), (3, 16), (16,)]),
    "addbmm": (torch.addbmm, [(3, 5), (2, 3, 16), (2, 16, 5)]),
    "baddbmm": (torch.baddbmm, [(2, 3, 5), (2, 3, 16), (2, 16, 5)]),
    "einsum": (lambda a, b: torch.einsum("bij,kj->bik", a, b), [(2, 3, 16), (5, 16)]),
    "einsum of a list": (lambda a, b: torch.einsum("ij,jk->ik", [a, b]), [(3, 16), (16, 5)]),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2), [(2, 4, 9), (6, 4, 3), (6,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 4, 6, 6), (8, 4, 3, 3), (8,)]),
    "conv2d grouped": (
        lambda x, w: F.conv2d(x, w, groups=2, dilation=2), [(2, 4, 7, 7), (8, 2, 3, 3)],
    ),
    "conv3d": (F.conv3d, [(1, 3, 4, 4, 4), (4, 3, 2, 2, 2), (4,)]),
    "conv_transpose1d": (F.conv_transpose1d, [(2, 4, 5), (4, 6, 3), (6,)]),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 4, 4, 4), (4, 6, 3, 3)],
    ),
    "conv_transpose3d": (F.conv_transpose3d, [(1, 3, 3, 3, 3), (3, 4, 2, 2, 2)]),
    "attention": (F.scaled_dot_product_attention, [(2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)]),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 2, 6, 8)] * 3,
    ),
    "Tensor.matmul": (lambda a, b: a.matmul(b), [(3, 16), (16, 5)]),
    "@": (lambda a, b: a @ b, [(2, 3, 16), (2, 16, 5)]),
    "Tensor.mm": (lambda a, b: a.mm(b), [(3, 16), (16, 5)]),
    "Tensor.bmm": (lambda a, b: a.bmm(b), [(2, 3, 16), (2, 16, 5)]),
    "Tensor.mv": (lambda a, b: a.mv(b), [(3, 16), (16,)]),
    "Tensor.addmm": (lambda c, a, b: c.addmm(a, b), [(3, 5), (3, 16), (16, 5)]),
    "Tensor.baddbmm": (lambda c, a, b: c.baddbmm(a, b), [(2, 3, 5), (2, 3, 16), (2, 16, 5)]),
}  # fmt: skip


def make_operands(name: str, low: torch.dtype) -> list[Tensor]:
    torch.manual_seed(len(name))
    return [torch.randn(shape).to(low) for shape in OPS[name][1]]


def forward_and_backward(op: Op, inputs: list[Tensor], seed: Tensor | None = None) -> list[Tensor]:
    """The output and the gradient of each operand, for a seed gradient of ones or `seed`."""
    leaves = [g.detach().clone().requires_grad_() for g in inputs]
    out = op(*leaves)
    out.backward(torch.ones_like(out) if seed is None else seed.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def rounded_fp32(op: Op, low: torch.dtype) -> Op:
    """The definition: the op in fp32 on low operands, rounded once, as is each gradient."""
    return lambda *args: op(*(a.float() for a in args)).to(low)


@pytest.mark.parametrize("low", [F16, BF16])
@pytest.mark.parametrize("name", OPS)
def test_a_product_is_the_rounded_fp32_product_forward_and_backward(
    name: str, low: torch.dtype
) -> None:
    op = OPS[name][0]
    inputs = make_operands(name, low)
    expected = forward_and_backward(rounded_fp32(op, low), inputs)
    with FastHalf(low):
        got = forward_and_backward(op, inputs)
    assert [g.dtype for g in got] == [low] * len(inputs) + [low]
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("low", [F16, BF16])
@pytest.mark.parametrize("name", OPS)
def test_its_largest_error_is_no_worse_than_torchs(name: str, low: torch.dtype) -> None:
    """Against float64 on the same low operands.

    Both round once. Before that, fp32 sums of at most 100 terms, taken in another order, may differ
    by 100 · 2**-24 < 2**-16 of the largest.
    """
    op = OPS[name][0]
    inputs = make_operands(name, low)
    exact = forward_and_backward(op, [g.double() for g in inputs])
    theirs = forward_and_backward(op, inputs)
    with FastHalf(low):
        ours = forward_and_backward(op, inputs)
    for our_value, their_value, true in zip(ours, theirs, exact, strict=True):
        our_error = (our_value.double() - true).abs().max().item()
        their_error = (their_value.double() - true).abs().max().item()
        assert our_error <= their_error + 2.0**-16 * true.abs().max().item()


@pytest.mark.parametrize("dtype", [F32, F64, torch.int64])
@pytest.mark.parametrize("cast", [False, True])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype, cast: bool) -> None:
    """With cast=True but no autocast around, fp32 is left alone too."""
    a = (torch.randn(3, 4) * 8).to(dtype)
    b = (torch.randn(4, 5) * 8).to(dtype)
    expected = a @ b
    with FastHalf(F16, cast=cast):
        out = a @ b
    assert out.dtype == dtype
    assert torch.equal(out, expected)


def test_the_other_low_dtype_is_left_to_torch() -> None:
    a = torch.randn(3, 4).bfloat16()
    b = torch.randn(4, 5).bfloat16()
    expected = a @ b
    with FastHalf(F16):
        assert torch.equal(a @ b, expected)


@pytest.mark.parametrize("cast", [False, True])
def test_out_receives_the_product(cast: bool) -> None:
    a = torch.randn(3, 4).half()
    b = torch.randn(4, 5).half()
    for function in (torch.mm, torch.matmul):
        out = torch.full((3, 5), 7.0, dtype=F16)
        with torch.autocast("cpu", dtype=F16, enabled=cast), FastHalf(F16, cast=cast):
            returned = function(a, b, out=out)
        assert returned is out
        assert torch.equal(out, (a.float() @ b.float()).half())


def test_operands_by_keyword_give_the_same_product() -> None:
    x = torch.randn(3, 4).half()
    w = torch.randn(5, 4).half()
    b = torch.randn(5).half()
    with FastHalf(F16):
        out = F.linear(input=x, weight=w, bias=b)
        mixed = F.linear(x, weight=w, bias=b)
    expected = rounded_fp32(F.linear, F16)(x, w, b)
    assert (out.dtype, mixed.dtype) == (F16, F16)
    # torch's own kernel may serve keyword calls: it rounds once as well, after fp32 sums of 4 terms
    # in another order.
    assert torch.allclose(out.float(), expected.float(), rtol=2.0**-10, atol=2.0**-20)
    assert torch.equal(mixed, expected)


@pytest.mark.parametrize("low", [F16, BF16])
@pytest.mark.parametrize(
    "name", ["linear", "matmul 2-D 2-D", "bmm", "addmm", "einsum", "conv2d", "attention", "@"]
)
def test_under_autocast_operands_are_rounded_first(name: str, low: torch.dtype) -> None:
    op = OPS[name][0]
    inputs = [torch.randn(shape) for shape in OPS[name][1]]
    expected = op(*(g.to(low).float() for g in inputs)).to(low)
    with torch.autocast("cpu", dtype=low, cache_enabled=False), FastHalf(low, cast=True):
        out = op(*inputs)
    assert out.dtype == low
    assert torch.equal(out, expected)


@pytest.mark.parametrize("other", [F16, BF16])
def test_under_autocast_a_product_takes_the_dtypes_that_torchs_autocast_takes(
    other: torch.dtype,
) -> None:
    """autocast's rule: every floating operand but fp64 becomes low, the other half dtype too."""
    low = F16 if other is BF16 else BF16
    x = torch.randn(3, 4).to(other)
    w = torch.randn(5, 4)
    with torch.autocast("cpu", dtype=low, cache_enabled=False):
        theirs = F.linear(x, w)
        with FastHalf(low, cast=True):
            ours = F.linear(x, w)
    assert ours.dtype == theirs.dtype == low
    assert torch.equal(ours, rounded_fp32(F.linear, low)(x.to(low), w.to(low)))


def test_under_autocast_fp64_is_left_alone_and_an_inner_off_is_off() -> None:
    a = torch.randn(3, 4)
    b = torch.randn(4, 5)
    with torch.autocast("cpu", dtype=F16, cache_enabled=False), FastHalf(F16, cast=True):
        assert torch.equal(a.double() @ b.double(), torch.matmul(a.double(), b.double()))
        assert (a.double() @ b.double()).dtype == F64
        with torch.autocast("cpu", enabled=False):
            high = a @ b
        assert (high.dtype, (a @ b).dtype) == (F32, F16)
    assert torch.equal(high, a @ b)


def test_autocast_is_as_it_was_after_a_product_that_fails() -> None:
    with torch.autocast("cpu", dtype=F16), FastHalf(F16, cast=True):
        with pytest.raises(RuntimeError):
            torch.randn(2, 3) @ torch.randn(4, 5)
        assert torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == F16


def test_another_thread_is_not_affected() -> None:
    a = torch.randn(64, 64).half()
    b = torch.randn(64, 64).half()
    out = []
    expected = a @ b
    with FastHalf(F16):
        thread = threading.Thread(
            target=lambda: out.append((a @ b, torch.overrides._get_current_function_mode()))
        )
        thread.start()
        thread.join()
    assert torch.equal(out[0][0], expected)
    assert out[0][1] is None


class LowProducts(TorchDispatchMode):
    """Names of the product kernels that received a half tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = any(word in str(func) for word in ("mm", "conv", "attention", "mv", "dot"))
        if product and any(isinstance(a, Tensor) and a.dtype in (F16, BF16) for a in args):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(8, 8), (2, 5, 8)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 6, 6)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 6, 6)),
    "MultiheadAttention": (Attention, (2, 5, 8)),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        (2, 5, 8),
    ),
}


@pytest.mark.skipif(
    has_native(F16), reason="this CPU multiplies float16 in hardware, so torch's kernels are used"
)
@pytest.mark.parametrize("precision", ["O1", "O2"])
@pytest.mark.parametrize("name", NETS)
def test_no_half_product_reaches_torchs_slow_kernels(name: str, precision: str) -> None:
    make, shape = NETS[name]
    net = make()
    with LowProducts() as low_products:
        with Applied(net, hs.Precision(precision), CPU):
            out = net(torch.randn(shape))
        out.sum().backward()  # outside, as the step does it
    assert low_products.names == set()


@pytest.mark.parametrize("low", [F16, BF16])
def test_kernels_torch_is_torchs_own_bit_for_bit(low: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    twin = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(8, 16)
    twin.load_state_dict(net.state_dict())
    twin.to(low)
    with Applied(net, hs.Precision("O2", dtype=low, kernels="torch"), CPU) as applied:
        assert not applied.rounds_fp32_products
        out = net(x)
        out.square().sum().backward()
    theirs = twin(x.to(low))
    theirs.float().square().sum().backward()
    assert torch.equal(out, theirs.float())
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad.float())
