"""Casts joined: which ones, the same bits, and what is left alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from halfstep.compiler.backend import compile_graph
from halfstep.compiler.passes import batch_weight_grads, join_casts
from halfstep.compiler.passes.join_casts import JoinCasts

aten = torch.ops.aten
LOW = torch.bfloat16


def cast(x: Tensor, dtype: torch.dtype = LOW) -> Tensor:
    """A cast as torch's compiler writes it."""
    return torch.ops.prims.convert_element_type(x, dtype)  # type: ignore[no-any-return]


def ops_after_pass(
    f: Callable[..., Any], *inputs: Tensor, device: str = "cpu", tracing_mode: Any = "fake"
) -> list[str]:
    """The operations of f after the pass, in order; they compute what f did, bit for bit."""
    module: GraphModule = make_fx(f, tracing_mode=tracing_mode)(*inputs)
    JoinCasts(device)(module.graph)
    module.graph.lint()
    for result, expected in zip(Interpreter(module).run(*inputs), f(*inputs), strict=True):
        assert result.dtype == expected.dtype
        assert result.stride() == expected.stride()
        assert torch.equal(result, expected)
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def count(names: list[str], word: str) -> int:
    return sum(word in name for name in names)


X = torch.randn(8, 16)
W = torch.randn(32, 16)
B = torch.randn(32)


def test_casts_of_inputs_are_one() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor]:
        return (torch.relu(aten.addmm(cast(b), cast(x), cast(w).t())),)

    names = ops_after_pass(f, X, W, B)
    assert (count(names, "convert"), count(names, "casts"), count(names, "relu")) == (0, 1, 1)


def test_a_view_that_comes_later_is_made_earlier() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor]:
        first = aten.mm(cast(x), cast(w).t())
        return (aten.mm(first, cast(v.reshape(32, 4))),)

    names = ops_after_pass(f, X, W, torch.randn(128))
    assert names.index("halfstep.casts.default") < names.index("aten.mm.default")
    assert count(names, "convert") == 0


def test_casts_of_results_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_weight_grads, "MAX_K", 0)  # which casts by itself

    def f(g: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = cast(aten.mm(g, x), torch.float32)
        second = cast(aten.mm(g, y), torch.float32)
        return first, second, aten.mm(g, x)

    names = ops_after_pass(f, X.to(LOW), W.t().to(LOW), torch.randn(16, 3, dtype=LOW))
    assert (count(names, "convert"), count(names, "casts")) == (0, 1)


def test_the_results_of_a_convolutions_backward_too() -> None:
    def f(g: Tensor, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        ones = [1, 1]
        wanted = [True, True, False]
        grads = aten.convolution_backward(g, x, w, [4], ones, ones, ones, False, [0, 0], 1, wanted)
        return grads[0], cast(grads[1], torch.float32), cast(aten.mm(y, y), torch.float32)

    shapes = (2, 4, 6, 6), (2, 3, 6, 6), (4, 3, 3, 3), (5, 5)
    names = ops_after_pass(f, *[torch.randn(shape).to(LOW) for shape in shapes])
    assert (count(names, "convert"), count(names, "casts")) == (0, 1)


def fused_with_what_follows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The compiler fuses these casts with what follows."""
    return cast(x) * 2, cast(w) + 1


def of_inner_values(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (aten.mm(cast(x * 2), cast(w + 1).t()),)


def of_other_results(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Results, but not of products."""
    return cast(cast(x) + 1, torch.float32), cast(cast(w) * 2, torch.float32)


@pytest.mark.parametrize("f", [fused_with_what_follows, of_inner_values, of_other_results])
def test_casts_that_stay(f: Callable[..., Any]) -> None:
    names = ops_after_pass(f, X, W)
    assert count(names, "casts") == 0
    assert count(names, "convert") > 1


def cast_product(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (aten.mm(cast(x), cast(w).t()),)


def test_one_cast_stays_and_many_bytes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_cast(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (aten.mm(cast(x), w.t()),)

    assert count(ops_after_pass(one_cast, X, W.to(LOW)), "casts") == 0
    total_bytes = 2 * (X.numel() + W.numel())
    monkeypatch.setattr(join_casts, "MAX_BYTES", total_bytes)
    assert count(ops_after_pass(cast_product, X, W), "casts") == 1
    monkeypatch.setattr(join_casts, "MAX_BYTES", total_bytes - 1)
    assert count(ops_after_pass(cast_product, X, W), "casts") == 0


def test_dtypes_are_joined_apart() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        half = torch.float16
        return aten.mm(cast(x), cast(w).t()), aten.mm(cast(x, half), cast(w, half).t())

    assert count(ops_after_pass(f, X, W), "casts") == 2


def test_other_devices_and_open_shapes_are_left_alone() -> None:
    assert count(ops_after_pass(cast_product, X, W, device="cuda"), "casts") == 0
    assert count(ops_after_pass(cast_product, X, W, tracing_mode="symbolic"), "casts") == 0


def test_torchs_cache_tells_passes_apart() -> None:
    assert JoinCasts("cuda").uuid() == JoinCasts("cuda").uuid()
    assert JoinCasts("cuda").uuid() != JoinCasts("cpu").uuid()


@pytest.mark.slow
def test_generated_code_has_them_forward_and_backward() -> None:
    """The real compiler, with the CPU as the device.

    The hook reaches both graphs, and the bits are those without it.
    """
    x = torch.randn(8, 16)
    y = torch.randint(0, 4, (8,))

    def run(chip: str | None) -> tuple[list[Tensor], list[str]]:
        """Loss and gradients, and the names of the operations that ran."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

        def loss(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", LOW):
                out = net(x)
            return F.cross_entropy(out.float(), y)

        backend = partial(compile_graph, low=True, chip=chip)
        compiled = torch.compile(loss, dynamic=False, backend=backend)
        compiled(x, y).backward()
        net.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            value = compiled(x, y)
            value.backward()
        names = [event.name for event in profiler.events()]
        return [value.detach(), *[p.grad for p in net.parameters() if p.grad is not None]], names

    plain, plain_ops = run(None)
    joined, joined_ops = run("cpu")
    assert all(torch.equal(a, b) for a, b in zip(plain, joined, strict=True))
    assert plain_ops.count("halfstep::casts") == 0
    assert joined_ops.count("halfstep::casts") == 1
    assert joined_ops.count("halfstep::leaves") == 1
