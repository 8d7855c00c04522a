"""Weight gradients by one kernel: which products, their sums, and what is left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from halfstep.compiler.passes import batch_weight_grads
from halfstep.errors import Notice
from tests.support.triton_interpreter import inside, interpret, outside

aten = torch.ops.aten
SHAPES = [(512, 784, 64), (10, 512, 64), (33, 65, 7), (1, 1, 1), (64, 64, 200)]  # M, N, K
KINDS = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]
Given = tuple[list[Tensor], list[Tensor], list[Tensor | None], list[bool]]


def operands(dtype: torch.dtype) -> Given:
    """Whole numbers, whose sums are exact in every order; gradients come transposed, masks in any layout."""
    g = torch.Generator().manual_seed(0)
    lefts = [torch.randint(-4, 5, (k, m), generator=g).to(dtype).t() for m, _, k in SHAPES]
    rights = [torch.randint(-4, 5, (k, n), generator=g).to(dtype) for _, n, k in SHAPES]
    lefts[4][0] = torch.tensor(
        [2048, *[1] * 199]
    )  # 2247, which is 2248 in float16 and 2048 if it were summed there
    masks = [torch.randint(-1, 2, a.shape, generator=g).to(dtype) for a in lefts]
    return (
        lefts,
        rights,
        [masks[0].t().contiguous().t(), None, masks[2] > 0, masks[3], None],
        [True] * 2 + [False, True, True],
    )


def exact(given: Given, dtype: torch.dtype) -> list[Tensor]:
    """By float64, rounded twice."""
    low, wide = given[0][0].dtype, [a.double() for a in given[0]]
    for a, h in zip(wide, given[2], strict=True):
        if h is not None:
            a.masked_fill_(h if h.dtype == torch.bool else h <= 0, 0)
    made = [a @ b.double() for a, b in zip(wide, given[1], strict=True)]
    sums = [a.sum(1) for a, too in zip(wide, given[3], strict=True) if too]
    return [t.to(low).to(dtype) for t in (*made, *sums)]


def right(found: list[Tensor], given: Given, dtype: torch.dtype) -> bool:
    pairs = zip(found, exact(given, dtype), strict=True)
    return all(torch.equal(a, b) and a.dtype == dtype and a.is_contiguous() for a, b in pairs)


@pytest.mark.parametrize(("dtype", "out"), KINDS)
def test_the_operation(dtype: torch.dtype, out: torch.dtype) -> None:
    given = operands(dtype)
    assert right(torch.ops.halfstep.leaves(*given, out), given, out)


@inside
@pytest.mark.parametrize(("dtype", "out"), KINDS)
def test_the_kernel(dtype: torch.dtype, out: torch.dtype) -> None:
    given = operands(dtype)
    assert right(batch_weight_grads.compute_weight_grads(*given, out), given, out)


def not_finite(op: Callable[..., list[Tensor]]) -> None:
    """A NaN or inf that is masked out is a 0; one behind a mask that is NaN passes, as it does in torch's ReLU."""
    nan, inf, f32 = float("nan"), float("inf"), torch.float32
    g, h = torch.ones(3, 4), torch.ones(3, 4)
    g[0, 0], h[0, 0], g[1, 1], h[1, 1], g[2, 2], h[0, 3] = nan, 0.0, nan, -1.0, inf, nan
    g[0, 3], x = 7.0, torch.eye(3)
    product, plain, total, rest = op([g.t(), g.t()], [x, x], [h.t(), None], [True, True], f32)
    clean = torch.where(h <= 0, 0, g)
    assert torch.equal(product.isfinite(), (clean.t() @ x).isfinite())
    assert torch.equal(plain.isfinite(), (g.t() @ x).isfinite())
    assert torch.equal(total, clean.sum(0))
    assert total.tolist() == [2, 2, inf, 9]
    assert torch.equal(rest.isnan(), g.isnan().any(0))


def test_the_operation_keeps_what_is_not_finite() -> None:
    not_finite(torch.ops.halfstep.leaves)


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
def test_the_kernel_keeps_what_is_not_finite() -> None:
    not_finite(batch_weight_grads.compute_weight_grads)


@outside
def test_the_interpreted_kernel() -> None:
    interpret(__file__, len(KINDS) + 1)


def fails(*_: Any) -> None:
    raise OSError("no space left")


def test_without_the_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot be compiled is tried once, with a notice; one that ran and fails is an error."""
    given = operands(torch.float32)
    monkeypatch.setattr(batch_weight_grads, "_WORKS", {})
    monkeypatch.setattr(batch_weight_grads, "launch", fails)
    with pytest.warns(Notice, match="more kernels: Triton failed .*last digits"):
        assert right(
            batch_weight_grads.compute_weight_grads(*given, torch.float32), given, torch.float32
        )
    assert right(
        batch_weight_grads.compute_weight_grads(*given, torch.float32), given, torch.float32
    )
    monkeypatch.setattr(
        batch_weight_grads, "_WORKS", dict.fromkeys(batch_weight_grads._WORKS, True)
    )
    with pytest.raises((OSError, ImportError)):
        batch_weight_grads.compute_weight_grads(*given, torch.float32)


def low(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast as torch's compiler writes it."""
    return torch.ops.prims.convert_element_type(x, dtype)  # type: ignore[no-any-return]


def rewritten(
    f: Callable[..., Any],
    *inputs: Tensor,
    device: str = "cpu",
    mode: Any = "fake",
    cut: bool = False,
) -> list[str]:
    """The operations after the rewriting; what they compute is what f did."""
    graph = make_fx(f, tracing_mode=mode)(*inputs)
    batch_weight_grads.rewrite(graph.graph, device, lambda product: cut)
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
    for name, limit in (("MAX_K", 7), ("MAX_TILES", 1), ("MAX_PRODUCTS", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(batch_weight_grads, name, limit)
            assert "halfstep.leaves.default" not in rewritten(two, G, H, X)


def test_operands_are_read_before_they_are_overwritten() -> None:
    """torch writes mutations of inputs at the end of a graph."""

    def f(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        made = two(g, h, x)
        g.copy_(aten.mul(g, 2))
        return made

    graph = make_fx(f, tracing_mode="fake")(G, H, X)
    batch_weight_grads.rewrite(graph.graph, "cpu")
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.index("halfstep.leaves.default") < names.index("aten.copy_.default")
