"""Products cut along K: which ones and into what, the same sums within their error bound, and no operand copied.

An inner product of K terms in float32, summed in any order, lies within K·2⁻²⁴·Σ|a·b| of the exact one (to first order;
one rounding more for a bias). That is the tolerance here, element by element, against float64.
"""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from halfstep.compiler.backend import generate
from halfstep.compiler.passes.split_k import MAX_BLOCKS, MIN_PART, SplitK, count_parts

ULP = (
    2.0**-24
)  # half a unit in the last place of 1: what one rounding to float32 may change, relative
aten = torch.ops.aten
RULE = {
    (64, 512, 784): 7,  # 112 each; 8 · 98 would leave rows off 16 bytes
    (64, 512, 512): 4,  # 8 would be a reduction
    (64, 512, 1024): 4,
    (64, 10, 512): 4,
    (320, 512, 1400): 2,  # 40 tiles · 3 = 120 blocks would fit, but 3 does not divide
    (512, 512, 256): 2,  # 64 tiles
    (64, 512, 260): 4,  # 65 each: no aligned part is long enough
    (64, 512, 686): 7,  # 98 each: no row of the whole is aligned either
    (8, 8, 2**20): 4,
    (576, 512, 4096): 1,  # 72 tiles: two parts would be more blocks than there is room for
    (64, 512, 252): 1,
    (512, 784, 64): 1,
    (64, 512, 257): 1,  # a prime
    (64, 1, 512): 1,
    (1, 512, 512): 1,
    (0, 512, 512): 1,
}


@pytest.mark.parametrize("shape", RULE)
def test_the_rule(shape: tuple[int, int, int]) -> None:
    assert count_parts(*shape) == RULE[shape]


@given(st.integers(0, 600), st.integers(0, 600), st.integers(0, 5000))
def test_parts_are_equal_and_long_enough_and_fit_the_chip(m: int, n: int, k: int) -> None:
    parts = count_parts(m, n, k)
    assert parts >= 1
    if parts > 1:
        assert k % parts == 0
        assert k // parts >= MIN_PART
        assert parts * -(-m // 64) * -(-n // 64) <= MAX_BLOCKS


def linear(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """A Linear's output and its three gradients, as aten operations: addmm forward, two mm backward."""
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    out = F.linear(x, w, b)
    return out.detach(), *torch.autograd.grad(out, (x, w, b), g)


def operands(
    batch: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    shapes = (batch, inputs), (outputs, inputs), (outputs,), (batch, outputs)
    return [torch.randn(s, dtype=dtype) for s in shapes]


def traced(f: Callable[..., Any], inputs: list[Tensor], mode: Any = "fake") -> GraphModule:
    return make_fx(f, tracing_mode=mode)(*inputs)


def applied(
    f: Callable[..., Any], inputs: list[Tensor], mode: Any = "fake", device: str = "cpu"
) -> GraphModule:
    graph = traced(f, inputs, mode)
    SplitK(device)(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph


def count(graph: GraphModule, target: Any) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=target))


def products(graph: GraphModule) -> tuple[int, int]:
    """How many are whole, and how many cut."""
    return count(graph, aten.mm.default) + count(graph, aten.addmm.default), count(
        graph, aten.bmm.default
    )


def bounds(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> list[Tensor]:
    """How far from exact the output and the gradients by x and w may lie."""
    x, w, b, g = (t.double().abs() for t in (x, w, b, g))
    (rows, k), n = x.shape, len(w)
    return [(k + 1) * ULP * (x @ w.T + b), n * ULP * (g @ w), rows * ULP * (g.T @ x)]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ((64, 784, 512), 2),  # output and input gradient
        ((64, 512, 512), 2),
        ((64, 512, 10), 1),  # the output: ten columns are too few to cut in the gradient
        ((256, 512, 512), 3),  # the weight gradient too, whose left operand is transposed
        ((50, 300, 7), 1),
    ],
)
def test_a_linear_layers_products_are_cut_both_ways(
    sizes: tuple[int, int, int], parts: int
) -> None:
    inputs = operands(*sizes)
    plain, graph = traced(linear, inputs), applied(linear, inputs)
    assert products(plain) == (3, 0)
    assert products(graph) == (3 - parts, parts)
    exact = linear(*(t.double() for t in inputs))
    whole, mine = plain(*inputs), graph(*inputs)
    for far, e, a, b in zip(bounds(*inputs), exact, mine, whole, strict=False):
        assert ((a.double() - e).abs() <= far).all()
        assert ((a.double() - b.double()).abs() <= 2 * far).all()
    assert not all(
        torch.equal(a, b) for a, b in zip(mine, whole, strict=True)
    )  # another order of summation
    assert torch.equal(mine[3], whole[3])  # the bias gradient is no product


def test_exact_sums_are_the_same_bit_for_bit() -> None:
    """Small integers: every order of summation is exact in float32."""
    inputs = [t.mul(4).round() for t in operands(64, 784, 512)]
    plain, graph = traced(linear, inputs), applied(linear, inputs)
    assert products(graph)[1] == 2
    assert all(torch.equal(a, b) for a, b in zip(graph(*inputs), plain(*inputs), strict=True))


def test_an_infinity_and_a_nan_stay_in_their_row() -> None:
    x, w, b, g = operands(64, 512, 128)
    x[3, 5], x[7, 500] = torch.inf, torch.nan
    plain, graph = traced(linear, [x, w, b, g]), applied(linear, [x, w, b, g])
    mine, whole = graph(x, w, b, g)[0], plain(x, w, b, g)[0]
    assert products(graph)[1] == 1
    assert torch.equal(mine.isnan(), whole.isnan())
    assert torch.equal(mine[3], whole[3])
    assert mine[7].isnan().all()


class Seen(Interpreter):
    """Runs a graph, comparing each result with what the node says of it, and keeps where results lie."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            said = n.meta["val"]
            assert (said.shape, said.stride(), said.dtype) == (
                result.shape,
                result.stride(),
                result.dtype,
            ), n
            n.meta["lies"] = result.untyped_storage().data_ptr()
        return result


@pytest.mark.parametrize("sizes", [(64, 784, 512), (256, 512, 512)])
def test_nodes_tell_the_truth_and_operands_are_views(sizes: tuple[int, int, int]) -> None:
    inputs = operands(*sizes)
    graph = applied(linear, inputs)
    Seen(graph).run(*inputs)
    given = {t.untyped_storage().data_ptr() for t in inputs}
    batched = graph.graph.find_nodes(op="call_function", target=aten.bmm.default)
    assert len(batched) >= 2
    for node in batched:
        assert {arg.meta["lies"] for arg in node.args} <= given
        assert not any(arg.meta["val"].requires_grad for arg in node.all_input_nodes)


def test_a_bias_of_full_size_is_added() -> None:
    a, b, c = torch.randn(64, 512), torch.randn(512, 32), torch.randn(64, 32)
    graph = applied(torch.addmm, [c, a, b])
    assert products(graph) == (0, 1)
    exact, far = (
        c.double() + a.double() @ b.double(),
        513 * ULP * (c.abs().double() + a.abs().double() @ b.abs().double()),
    )
    assert ((graph(c, a, b).double() - exact).abs() <= far).all()


@pytest.mark.parametrize("factors", [{"alpha": 2}, {"beta": 0.5}, {"beta": 0}])
def test_scaled_products_are_left_alone(factors: dict[str, float]) -> None:
    inputs = [torch.randn(32), torch.randn(64, 512), torch.randn(512, 32)]
    assert products(applied(torch.addmm, inputs)) == (0, 1)
    graph = applied(lambda c, a, b: torch.addmm(c, a, b, **factors), inputs)
    assert products(graph) == (1, 0)
    assert torch.equal(graph(*inputs), torch.addmm(*inputs, **factors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    assert products(applied(linear, operands(64, 512, 512, dtype))) == (3, 0)


def test_other_devices_and_open_shapes_are_left_alone() -> None:
    inputs = operands(64, 512, 512)
    assert products(applied(linear, inputs, device="cuda")) == (3, 0)
    assert products(applied(linear, inputs, "symbolic")) == (3, 0)


def test_torchs_cache_tells_passes_apart() -> None:
    assert SplitK("cuda").uuid() == pickle.loads(pickle.dumps(SplitK("cuda").uuid()))
    assert SplitK("cuda").uuid() != SplitK("cpu").uuid()


@pytest.mark.slow
def test_generated_code_runs_the_cut_products_forward_and_backward() -> None:
    """The real compiler, with the CPU as the device whose products are cut: its hook reaches both graphs."""
    x, w, b, g = operands(64, 784, 512)

    def run(f: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        mine = [t.to(dtype).requires_grad_() for t in (x, w, b)]
        out = f(*mine)
        return [out.detach(), *torch.autograd.grad(out, mine, g.to(dtype))]

    compiled = torch.compile(
        F.linear, dynamic=False, backend=partial(generate, low=False, chip="cpu")
    )
    run(compiled)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        result = run(compiled)
    names = [e.name for e in seen.events()]
    assert (names.count("aten::bmm"), names.count("aten::mm"), names.count("aten::addmm")) == (
        2,
        1,
        0,
    )
    for far, exact, a in zip(
        bounds(x, w, b, g), run(F.linear, torch.float64), result, strict=False
    ):
        assert ((a.double() - exact).abs() <= far).all()
