"""Weight gradients by one kernel: which products, their sums, and what is left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import inside, interpret, outside
from torch import Tensor
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from halfstep.errors import Notice
from halfstep.step import leaves

aten = torch.ops.aten
SHAPES = [(512, 784, 64), (10, 512, 64), (33, 65, 7), (1, 1, 1), (64, 64, 200)]  # M, N, K
KINDS = [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.float32)]


def operands(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Whole numbers, whose sums are exact in every order; gradients come transposed."""
    g = torch.Generator().manual_seed(0)
    lefts = [torch.randint(-4, 5, (k, m), generator=g).to(dtype).t() for m, _, k in SHAPES]
    return lefts, [torch.randint(-4, 5, (k, n), generator=g).to(dtype) for _, n, k in SHAPES]


def right(found: list[Tensor], lefts: list[Tensor], rights: list[Tensor], dtype: torch.dtype) -> bool:
    wanted = [(a.double() @ b.double()).to(a.dtype).to(dtype) for a, b in zip(lefts, rights, strict=True)]
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("dtype", "out"), KINDS)
def test_the_operation(dtype: torch.dtype, out: torch.dtype) -> None:
    lefts, rights = operands(dtype)
    assert right(torch.ops.halfstep.leaves(lefts, rights, out), lefts, rights, out)


@inside
@pytest.mark.parametrize(("dtype", "out"), KINDS)
def test_the_kernel(dtype: torch.dtype, out: torch.dtype) -> None:
    lefts, rights = operands(dtype)
    assert right(leaves.leaves(lefts, rights, out), lefts, rights, out)


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
def test_the_kernel_keeps_what_is_not_finite() -> None:
    lefts, rights = operands(torch.float32)
    lefts[0][3, 5], rights[1][2, 7] = float("nan"), float("inf")
    found = leaves.leaves(lefts, rights, torch.float32)
    for got, a, b in zip(found, lefts, rights, strict=True):
        assert torch.equal(got.isfinite(), (a @ b).isfinite())


@outside
def test_the_interpreted_kernel() -> None:
    interpret(__file__, len(KINDS) + 1)


def fails(*_: Any) -> None:
    raise OSError("no space left")


def test_without_the_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot be compiled is tried once, with a notice; one that ran and fails is an error."""
    lefts, rights = operands(torch.float32)
    monkeypatch.setattr(leaves, "_WORKS", {})
    monkeypatch.setattr(leaves, "launch", fails)
    with pytest.warns(Notice, match="more kernels: Triton failed .*last digits"):
        assert right(leaves.leaves(lefts, rights, torch.float32), lefts, rights, torch.float32)
    assert right(leaves.leaves(lefts, rights, torch.float32), lefts, rights, torch.float32)
    monkeypatch.setattr(leaves, "_WORKS", dict.fromkeys(leaves._WORKS, True))
    with pytest.raises((OSError, ImportError)):
        leaves.leaves(lefts, rights, torch.float32)


def low(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast as torch's compiler writes it."""
    return torch.ops.prims.convert_element_type(x, dtype)  # type: ignore[no-any-return]


def rewritten(f: Callable[..., Any], *inputs: Tensor, device: str = "cpu", mode: Any = "fake") -> list[str]:
    """The operations after the rewriting; what they compute is what f did."""
    graph = make_fx(f, tracing_mode=mode)(*inputs)
    leaves.rewrite(graph.graph, device)
    graph.graph.lint()
    for a, b in zip(Interpreter(graph).run(*inputs), f(*inputs), strict=True):
        assert torch.equal(a, b)
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


G, H, X = (torch.randint(-4, 5, (8, n)).float() for n in (16, 4, 12))


def two(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return aten.mm(g.t(), x), aten.mm(h.t(), x)


def test_those_that_are_returned_are_one() -> None:
    names = rewritten(two, G, H, X)
    assert names.count("halfstep.leaves.default") == 1
    assert "aten.mm.default" not in names


def test_a_cast_is_part_of_it() -> None:
    def f(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(low(t, torch.float32) for t in two(g, h, x))

    names = rewritten(f, *[t.bfloat16() for t in (G, H, X)])
    assert names.count("halfstep.leaves.default") == 1
    assert not {"aten.mm.default", "prims.convert_element_type.default"} & set(names)


def used(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """One goes on into another product."""
    first = aten.mm(g.t(), x)
    return aten.mm(h.t(), x), aten.relu(first), first


def one(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return (aten.mm(g.t(), x),)


def kinds(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return aten.mm(g.t(), x), aten.mm(h.t().bfloat16(), x.bfloat16())


def whole(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(low(t, torch.int64) for t in two(g, h, x))


@pytest.mark.parametrize("f", [used, one, kinds, whole])
def test_others_stay(f: Callable[..., Any]) -> None:
    assert "halfstep.leaves.default" not in rewritten(f, G, H, X)


def test_large_and_unknown_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "halfstep.leaves.default" not in rewritten(two, G, H, X, device="cuda")
    assert "halfstep.leaves.default" not in rewritten(two, G, H, X, mode="symbolic")
    assert "halfstep.leaves.default" not in rewritten(two, *[t.double() for t in (G, H, X)])
    for name, limit in (("LONGEST", 7), ("TILES", 1), ("MOST", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(leaves, name, limit)
            assert "halfstep.leaves.default" not in rewritten(two, G, H, X)


def test_operands_are_read_before_they_are_overwritten() -> None:
    """torch writes mutations of inputs at the end of a graph."""

    def f(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        made = two(g, h, x)
        g.copy_(aten.mul(g, 2))
        return made

    graph = make_fx(f, tracing_mode="fake")(G, H, X)
    leaves.rewrite(graph.graph, "cpu")
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.index("halfstep.leaves.default") < names.index("aten.copy_.default")
