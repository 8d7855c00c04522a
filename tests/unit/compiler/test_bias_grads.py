"""Bias gradients and a first layer's mask in the kernel of weight gradients: which ones, and what is left alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.fx import Graph

from halfstep.compiler.backend import generate
from halfstep.compiler.passes import batch_weight_grads
from tests.unit.compiler.test_batch_weight_grads import G, H, X, aten, low, rewritten, two


def over_batch(g: Tensor, *shape: int) -> Tensor:
    """A bias gradient as torch's compiler writes it."""
    return aten.sum(g, [0], True).reshape(shape or g.shape[1:])  # type: ignore[no-any-return]


def shared(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Two products of one gradient around another's, and their sums in the other order."""
    made = aten.mm(g.t(), x), aten.mm(h.t(), x), aten.mm(g.t(), h)
    return over_batch(h), *made, over_batch(g)


def widened(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """From bfloat16: each sum is rounded to it first."""
    g, h, x = (low(t, torch.bfloat16) for t in (g, h, x))
    return tuple(low(t, torch.float32) for t in (*two(g, h, x), over_batch(g), over_batch(h)))


@pytest.mark.parametrize("f", [shared, widened])
def test_sums_over_the_batch_are_part_of_it(f: Callable[..., Any]) -> None:
    names = rewritten(f, G * 99, H, X)
    assert names.count("halfstep.leaves.default") == 1
    assert not {"aten.sum.dim_IntList", "aten.view.default", "aten.mm.default"} & set(names)


SQUARE = torch.randint(-4, 5, (8, 8)).float()
SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "over something else": lambda g, h, x: aten.sum(g, [1], True).reshape(8),
    "of all": lambda g, h, x: aten.sum(g, [0, 1], True).reshape(1),
    "of a right operand": lambda g, h, x: over_batch(h),
    "in another dtype": lambda g, h, x: aten.sum(g, [0], True, dtype=torch.float64).reshape(8),
    "cast to another": lambda g, h, x: low(over_batch(g), torch.bfloat16),
    "of another shape": lambda g, h, x: over_batch(g, 2, 4),
    "that is used": lambda g, h, x: aten.relu(over_batch(g)),
}


@pytest.mark.parametrize("which", SUMS)
def test_sums_that_stay(which: str) -> None:
    def f(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return aten.mm(g.t(), x), aten.mm(x.t(), h), SUMS[which](g, h, x)

    names = rewritten(f, SQUARE, H, X)
    assert names.count("halfstep.leaves.default") == names.count("aten.sum.dim_IntList") == 1


def masked(g: Tensor, out: Tensor, limit: float = 0, value: float = 0.0) -> Tensor:
    """The gradient behind a ReLU as torch's compiler writes it."""
    where = out if out.dtype == torch.bool else aten.le(out, limit)
    return aten.where(where, aten.full([], value, dtype=g.dtype), g)  # type: ignore[no-any-return]


def first(g: Tensor, out: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """A first layer and the last: the gradient comes from a product."""
    g = masked(aten.mm(h, g), out)
    return aten.mm(g.t(), x), aten.mm(h.t(), x), over_batch(g)


OUT = torch.randint(-1, 2, (8, 16)).float()
W = torch.randint(-4, 5, (4, 16)).float()


@pytest.mark.parametrize("out", [OUT, OUT.half(), OUT.t().contiguous().t(), OUT > 0])
def test_the_mask_of_a_first_layer_is_part_of_it(out: Tensor) -> None:
    assert not {"aten.where.self", "aten.le.Scalar", "aten.full.default"} & set(
        rewritten(first, W, out, H, X)
    )
    assert "aten.where.self" in rewritten(
        first, W, out, H, X, cut=True
    )  # it is in the kernel that adds the parts


@pytest.mark.parametrize("out", [OUT[:1], OUT[0], OUT.int(), OUT.double()])
def test_masks_of_another_kind_stay(out: Tensor) -> None:
    assert "aten.where.self" in rewritten(first, W, out, H, X)


def test_a_comparison_of_true_and_false_is_not_one() -> None:
    def f(g: Tensor, out: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        m = aten.where(aten.le(out, 0), aten.full([], 0.0), g)
        return aten.mm(m.t(), x), aten.mm(h.t(), x)

    assert "aten.where.self" in rewritten(f, G, OUT > 0, H, X)


MASKS: dict[
    str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
] = {  # a gradient, and what is more
    "used by another product": lambda g, out, h, x: (
        m := masked(g, out),
        aten.relu(aten.mm(m, g.t())),
    ),
    "returned": lambda g, out, h, x: (masked(g, out),) * 2,
    "a transpose that is returned": lambda g, out, h, x: (m := masked(g, out), m.t()),
    "a right operand": lambda g, out, h, x: (m := masked(g, out), aten.mm(h.t(), m)),
    "a right operand, turned": lambda g, out, h, x: (m := masked(g, out), aten.mm(g, m.t())),
    "a sum that stays": lambda g, out, h, x: (m := masked(g, out), aten.sum(m, [1])),
    "at another limit": lambda g, out, h, x: (masked(g, out, 1), h),
    "to another value": lambda g, out, h, x: (masked(g, out, 0, 1.0), h),
    "of what a kernel makes": lambda g, out, h, x: (masked(aten.relu(g), out), h),
    "by what a kernel makes": lambda g, out, h, x: (masked(g, aten.neg(out)), h),
}


@pytest.mark.parametrize("which", MASKS)
def test_masks_that_stay(which: str) -> None:
    def f(g: Tensor, out: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        m, more = MASKS[which](g, out, h, x)
        return aten.mm(m.t(), x), aten.mm(h.t(), x), more

    names = rewritten(f, G, OUT, H, X)
    assert names.count("halfstep.leaves.default") == 1
    assert "aten.where.self" in names
    assert "aten.permute.default" not in names  # as which the kernel gets a mask


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_compiler_writes_both_so(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real compiler, with the CPU as the device."""
    made: list[Any] = []
    rewrite = batch_weight_grads.rewrite

    def look(graph: Graph, *args: Any, **options: Any) -> None:
        rewrite(graph, *args, **options)
        made.extend(
            n.args
            for n in graph.find_nodes(op="call_function", target=torch.ops.halfstep.leaves.default)
        )

    monkeypatch.setattr(batch_weight_grads, "rewrite", look)
    net = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    with fresh_cache(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        backend = partial(generate, low=dtype != torch.float32, chip="cpu")
        compiled = torch.compile(net, dynamic=False, backend=backend)
        compiled(torch.randn(8, 16))
    [(_, _, masks, summed, _)] = made
    assert [mask is not None for mask in masks] == [False, False, True]
    assert summed == [True, True, True]
