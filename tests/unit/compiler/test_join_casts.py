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

from halfstep.compiler.backend import generate
from halfstep.compiler.passes import batch_weight_grads, join_casts
from halfstep.compiler.passes.join_casts import JoinCasts

aten, cast = torch.ops.aten, torch.ops.prims.convert_element_type.default
LOW = torch.bfloat16


def low(x: Tensor, dtype: torch.dtype = LOW) -> Tensor:
    """A cast as torch's compiler writes it."""
    return torch.ops.prims.convert_element_type(x, dtype)  # type: ignore[no-any-return]


def rewritten(
    f: Callable[..., Any], *inputs: Tensor, device: str = "cpu", mode: Any = "fake"
) -> list[str]:
    """The operations of f after the pass, in order; what they compute is what f did, bit for bit."""
    graph: GraphModule = make_fx(f, tracing_mode=mode)(*inputs)
    JoinCasts(device)(graph.graph)
    graph.graph.lint()
    got, wanted = Interpreter(graph).run(*inputs), f(*inputs)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def count(names: list[str], word: str) -> int:
    return sum(word in name for name in names)


X, W, B = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32)


def test_casts_of_inputs_are_one() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor]:
        return (torch.relu(aten.addmm(low(b), low(x), low(w).t())),)

    names = rewritten(f, X, W, B)
    assert (count(names, "convert"), count(names, "casts"), count(names, "relu")) == (0, 1, 1)


def test_a_view_that_comes_later_is_made_earlier() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor]:
        first = aten.mm(low(x), low(w).t())
        return (aten.mm(first, low(v.reshape(32, 4))),)

    names = rewritten(f, X, W, torch.randn(128))
    assert names.index("halfstep.casts.default") < names.index("aten.mm.default")
    assert count(names, "convert") == 0


def test_casts_of_results_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_weight_grads, "MAX_K", 0)  # which casts by itself

    def f(g: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return low(aten.mm(g, x), torch.float32), low(aten.mm(g, y), torch.float32), aten.mm(g, x)

    names = rewritten(f, X.to(LOW), W.t().to(LOW), torch.randn(16, 3, dtype=LOW))
    assert (count(names, "convert"), count(names, "casts")) == (0, 1)


def test_the_results_of_a_convolutions_backward_too() -> None:
    def f(g: Tensor, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        grads = aten.convolution_backward(
            g, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        return grads[0], low(grads[1], torch.float32), low(aten.mm(y, y), torch.float32)

    shapes = (2, 4, 6, 6), (2, 3, 6, 6), (4, 3, 3, 3), (5, 5)
    names = rewritten(f, *[torch.randn(s).to(LOW) for s in shapes])
    assert (count(names, "convert"), count(names, "casts")) == (0, 1)


def pointwise(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The compiler fuses these casts with what follows."""
    return low(x) * 2, low(w) + 1


def inner(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (aten.mm(low(x * 2), low(w + 1).t()),)


def returned(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Results, but not of products."""
    return low(low(x) + 1, torch.float32), low(low(w) * 2, torch.float32)


@pytest.mark.parametrize("f", [pointwise, inner, returned])
def test_casts_that_stay(f: Callable[..., Any]) -> None:
    names = rewritten(f, X, W)
    assert count(names, "casts") == 0
    assert count(names, "convert") > 1


def test_one_cast_stays_and_many_bytes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (aten.mm(low(x), low(w).t()),)

    def one(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (aten.mm(low(x), w.t()),)

    assert count(rewritten(one, X, W.to(LOW)), "casts") == 0
    monkeypatch.setattr(join_casts, "MAX_BYTES", 2 * (X.numel() + W.numel()))
    assert count(rewritten(f, X, W), "casts") == 1
    monkeypatch.setattr(join_casts, "MAX_BYTES", 2 * (X.numel() + W.numel()) - 1)
    assert count(rewritten(f, X, W), "casts") == 0


def test_dtypes_are_joined_apart() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        half = torch.float16
        return aten.mm(low(x), low(w).t()), aten.mm(low(x, half), low(w, half).t())

    assert count(rewritten(f, X, W), "casts") == 2


def test_other_devices_and_open_shapes_are_left_alone() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (aten.mm(low(x), low(w).t()),)

    assert count(rewritten(f, X, W, device="cuda"), "casts") == 0
    assert count(rewritten(f, X, W, mode="symbolic"), "casts") == 0


def test_torchs_cache_tells_passes_apart() -> None:
    assert JoinCasts("cuda").uuid() == JoinCasts("cuda").uuid()
    assert JoinCasts("cuda").uuid() != JoinCasts("cpu").uuid()


@pytest.mark.slow
def test_generated_code_has_them_forward_and_backward() -> None:
    """The real compiler, with the CPU as the device: the hook reaches both graphs, and the bits are those without."""
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))

    def run(chip: str | None) -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

        def loss(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", LOW):
                out = net(x)
            return F.cross_entropy(out.float(), y)

        compiled = torch.compile(
            loss, dynamic=False, backend=partial(generate, low=True, chip=chip)
        )
        compiled(x, y).backward()
        net.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            value = compiled(x, y)
            value.backward()
        names = [e.name for e in seen.events()]
        return [value.detach(), *[p.grad for p in net.parameters() if p.grad is not None]], names

    (plain, before), (joined, after) = run(None), run("cpu")
    assert all(torch.equal(a, b) for a, b in zip(plain, joined, strict=True))
    assert (before.count("halfstep::casts"), after.count("halfstep::casts")) == (0, 1)
    assert after.count("halfstep::leaves") == 1
