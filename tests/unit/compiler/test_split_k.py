"""Products split along K: which and into what, sums within their error bound, no operand copied.

An inner product of K terms in float32, summed in any order, lies within K·2⁻²⁴·Σ|a·b| of the exact
one (to first order; one rounding more for a bias). That is the tolerance here, element by element,
against float64.
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

from halfstep.compiler.backend import compile_graph
from halfstep.compiler.passes.split_k import MAX_BLOCKS, MIN_PART, SplitK, count_parts

# Half a unit in the last place of 1: what one rounding to float32 may change, relative.
ULP = 2.0**-24
aten = torch.ops.aten
PARTS = {
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


@pytest.mark.parametrize("shape", PARTS)
def test_the_rule(shape: tuple[int, int, int]) -> None:
    assert count_parts(*shape) == PARTS[shape]


@given(st.integers(0, 600), st.integers(0, 600), st.integers(0, 5000))
def test_parts_are_equal_and_long_enough_and_fit_the_chip(m: int, n: int, k: int) -> None:
    parts = count_parts(m, n, k)
    assert parts >= 1
    if parts > 1:
        assert k % parts == 0
        assert k // parts >= MIN_PART
        assert parts * -(-m // 64) * -(-n // 64) <= MAX_BLOCKS


def linear(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """A Linear's output and its three gradients: addmm forward, two mm backward."""
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    out = F.linear(x, w, b)
    return out.detach(), *torch.autograd.grad(out, (x, w, b), g)


def operands(
    batch: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Input, weight, bias, output gradient."""
    shapes = (batch, inputs), (outputs, inputs), (outputs,), (batch, outputs)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def trace(f: Callable[..., Any], inputs: list[Tensor], tracing_mode: Any = "fake") -> GraphModule:
    return make_fx(f, tracing_mode=tracing_mode)(*inputs)


def trace_and_split(
    f: Callable[..., Any], inputs: list[Tensor], tracing_mode: Any = "fake", device: str = "cpu"
) -> GraphModule:
    module = trace(f, inputs, tracing_mode)
    SplitK(device)(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def count_calls(module: GraphModule, target: Any) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


def count_products(module: GraphModule) -> tuple[int, int]:
    """How many products are whole, and how many split."""
    whole = count_calls(module, aten.mm.default) + count_calls(module, aten.addmm.default)
    return whole, count_calls(module, aten.bmm.default)


def bounds(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> list[Tensor]:
    """How far from exact the output and the gradients by x and w may lie."""
    x, w, b, g = (t.double().abs() for t in (x, w, b, g))
    batch, inputs = x.shape
    outputs = len(w)
    return [
        (inputs + 1) * ULP * (x @ w.T + b),
        outputs * ULP * (g @ w),
        batch * ULP * (g.T @ x),
    ]


@pytest.mark.parametrize(
    ("sizes", "split_count"),
    [
        ((64, 784, 512), 2),  # output and input gradient
        ((64, 512, 512), 2),
        ((64, 512, 10), 1),  # the output: ten columns are too few to cut in the gradient
        ((256, 512, 512), 3),  # the weight gradient too, whose left operand is transposed
        ((50, 300, 7), 1),
    ],
)
def test_a_linear_layers_products_are_cut_both_ways(
    sizes: tuple[int, int, int], split_count: int
) -> None:
    inputs = operands(*sizes)
    whole = trace(linear, inputs)
    split = trace_and_split(linear, inputs)
    assert count_products(whole) == (3, 0)
    assert count_products(split) == (3 - split_count, split_count)

    exact_results = linear(*(t.double() for t in inputs))
    whole_results = whole(*inputs)
    split_results = split(*inputs)
    for bound, exact, a, b in zip(
        bounds(*inputs), exact_results, split_results, whole_results, strict=False
    ):
        assert ((a.double() - exact).abs() <= bound).all()
        assert ((a.double() - b.double()).abs() <= 2 * bound).all()
    # Another order of summation gives other bits; the bias gradient is no product.
    pairs = zip(split_results, whole_results, strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(split_results[3], whole_results[3])


def test_exact_sums_are_the_same_bit_for_bit() -> None:
    """Small integers: every order of summation is exact in float32."""
    inputs = [t.mul(4).round() for t in operands(64, 784, 512)]
    whole = trace(linear, inputs)
    split = trace_and_split(linear, inputs)
    assert count_products(split)[1] == 2
    assert all(torch.equal(a, b) for a, b in zip(split(*inputs), whole(*inputs), strict=True))


def test_an_infinity_and_a_nan_stay_in_their_row() -> None:
    x, w, b, g = operands(64, 512, 128)
    x[3, 5] = torch.inf
    x[7, 500] = torch.nan
    split = trace_and_split(linear, [x, w, b, g])
    split_out = split(x, w, b, g)[0]
    whole_out = trace(linear, [x, w, b, g])(x, w, b, g)[0]
    assert count_products(split)[1] == 1
    assert torch.equal(split_out.isnan(), whole_out.isnan())
    assert torch.equal(split_out[3], whole_out[3])
    assert split_out[7].isnan().all()


class CheckedInterpreter(Interpreter):
    """Runs a graph; compares each result with its node's metadata, and notes its address there."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            value = n.meta["val"]
            assert (value.shape, value.stride()) == (result.shape, result.stride()), n
            assert value.dtype == result.dtype, n
            n.meta["address"] = result.untyped_storage().data_ptr()
        return result


@pytest.mark.parametrize("sizes", [(64, 784, 512), (256, 512, 512)])
def test_nodes_tell_the_truth_and_operands_are_views(sizes: tuple[int, int, int]) -> None:
    inputs = operands(*sizes)
    module = trace_and_split(linear, inputs)
    CheckedInterpreter(module).run(*inputs)
    input_addresses = {t.untyped_storage().data_ptr() for t in inputs}
    batched = module.graph.find_nodes(op="call_function", target=aten.bmm.default)
    assert len(batched) >= 2
    for node in batched:
        assert {arg.meta["address"] for arg in node.args} <= input_addresses
        assert not any(arg.meta["val"].requires_grad for arg in node.all_input_nodes)


def test_a_bias_of_full_size_is_added() -> None:
    a = torch.randn(64, 512)
    b = torch.randn(512, 32)
    bias = torch.randn(64, 32)
    module = trace_and_split(torch.addmm, [bias, a, b])
    assert count_products(module) == (0, 1)
    exact = bias.double() + a.double() @ b.double()
    bound = 513 * ULP * (bias.abs().double() + a.abs().double() @ b.abs().double())
    assert ((module(bias, a, b).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("factors", [{"alpha": 2}, {"beta": 0.5}, {"beta": 0}])
def test_scaled_products_are_left_alone(factors: dict[str, float]) -> None:
    inputs = [torch.randn(32), torch.randn(64, 512), torch.randn(512, 32)]
    assert count_products(trace_and_split(torch.addmm, inputs)) == (0, 1)
    module = trace_and_split(lambda c, a, b: torch.addmm(c, a, b, **factors), inputs)
    assert count_products(module) == (1, 0)
    assert torch.equal(module(*inputs), torch.addmm(*inputs, **factors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    assert count_products(trace_and_split(linear, operands(64, 512, 512, dtype))) == (3, 0)


def test_other_devices_and_open_shapes_are_left_alone() -> None:
    inputs = operands(64, 512, 512)
    assert count_products(trace_and_split(linear, inputs, device="cuda")) == (3, 0)
    assert count_products(trace_and_split(linear, inputs, "symbolic")) == (3, 0)


def test_torchs_cache_tells_passes_apart() -> None:
    assert SplitK("cuda").uuid() == pickle.loads(pickle.dumps(SplitK("cuda").uuid()))
    assert SplitK("cuda").uuid() != SplitK("cpu").uuid()


@pytest.mark.slow
def test_generated_code_runs_the_cut_products_forward_and_backward() -> None:
    """The real compiler, with the CPU as the device whose products are split.

    Its hook reaches both graphs.
    """
    x, w, b, g = operands(64, 784, 512)

    def run(f: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Output and gradients."""
        inputs = [t.to(dtype).requires_grad_() for t in (x, w, b)]
        out = f(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, g.to(dtype))]

    backend = partial(compile_graph, low=False, chip="cpu")
    compiled = torch.compile(F.linear, dynamic=False, backend=backend)
    run(compiled)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        results = run(compiled)
    names = [event.name for event in profiler.events()]
    assert names.count("aten::bmm") == 2
    assert names.count("aten::mm") == 1
    assert names.count("aten::addmm") == 0

    exact_results = run(F.linear, torch.float64)
    for bound, exact, result in zip(bounds(x, w, b, g), exact_results, results, strict=False):
        assert ((result.double() - exact).abs() <= bound).all()
