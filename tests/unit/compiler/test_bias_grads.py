"""Bias gradients and a first layer's mask in the kernel of weight gradients: which ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.fx import Graph

from halfstep.compiler.backend import compile_graph
from halfstep.compiler.passes import batch_weight_grads
from tests.unit.compiler.test_batch_weight_grads import (
    JOINED,
    G,
    H,
    X,
    aten,
    cast,
    ops_after_pass,
    two_products,
)


def batch_sum(g: Tensor, *shape: int) -> Tensor:
    """A bias gradient as torch's compiler writes it."""
    return aten.sum(g, [0], True).reshape(shape or g.shape[1:])  # type: ignore[no-any-return]


def shared_gradient(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Two products of one gradient around another's, and their sums in the other order."""
    products = aten.mm(g.t(), x), aten.mm(h.t(), x), aten.mm(g.t(), h)
    return batch_sum(h), *products, batch_sum(g)


def from_bfloat16(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Each sum is rounded to bfloat16 first."""
    g, h, x = (cast(t, torch.bfloat16) for t in (g, h, x))
    gradients = (*two_products(g, h, x), batch_sum(g), batch_sum(h))
    return tuple(cast(t, torch.float32) for t in gradients)


@pytest.mark.parametrize("f", [shared_gradient, from_bfloat16])
def test_sums_over_the_batch_are_part_of_it(f: Callable[..., Any]) -> None:
    names = ops_after_pass(f, G * 99, H, X)
    assert names.count(JOINED) == 1
    assert not {"aten.sum.dim_IntList", "aten.view.default", "aten.mm.default"} & set(names)


SQUARE = torch.randint(-4, 5, (8, 8)).float()
SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "over something else": lambda g, h, x: aten.sum(g, [1], True).reshape(8),
    "of all": lambda g, h, x: aten.sum(g, [0, 1], True).reshape(1),
    "of a right operand": lambda g, h, x: batch_sum(h),
    "in another dtype": lambda g, h, x: aten.sum(g, [0], True, dtype=torch.float64).reshape(8),
    "cast to another": lambda g, h, x: cast(batch_sum(g), torch.bfloat16),
    "of another shape": lambda g, h, x: batch_sum(g, 2, 4),
    "that is used": lambda g, h, x: aten.relu(batch_sum(g)),
}


@pytest.mark.parametrize("which", SUMS)
def test_sums_that_stay(which: str) -> None:
    def f(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return aten.mm(g.t(), x), aten.mm(x.t(), h), SUMS[which](g, h, x)

    names = ops_after_pass(f, SQUARE, H, X)
    assert names.count(JOINED) == 1
    assert names.count("aten.sum.dim_IntList") == 1


def relu_backward(g: Tensor, out: Tensor, limit: float = 0, value: float = 0.0) -> Tensor:
    """The gradient behind a ReLU as torch's compiler writes it."""
    condition = out if out.dtype == torch.bool else aten.le(out, limit)
    zero = aten.full([], value, dtype=g.dtype)
    return aten.where(condition, zero, g)  # type: ignore[no-any-return]


def first_and_last_layer(g: Tensor, out: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the first layer comes from a product."""
    g = relu_backward(aten.mm(h, g), out)
    return aten.mm(g.t(), x), aten.mm(h.t(), x), batch_sum(g)


OUT = torch.randint(-1, 2, (8, 16)).float()
W = torch.randint(-4, 5, (4, 16)).float()


@pytest.mark.parametrize("out", [OUT, OUT.half(), OUT.t().contiguous().t(), OUT > 0])
def test_the_mask_of_a_first_layer_is_part_of_it(out: Tensor) -> None:
    mask_ops = {"aten.where.self", "aten.le.Scalar", "aten.full.default"}
    assert not mask_ops & set(ops_after_pass(first_and_last_layer, W, out, H, X))
    # The kernel that adds up the parts of a split product applies the mask.
    assert "aten.where.self" in ops_after_pass(first_and_last_layer, W, out, H, X, is_split=True)


@pytest.mark.parametrize("out", [OUT[:1], OUT[0], OUT.int(), OUT.double()])
def test_masks_of_another_kind_stay(out: Tensor) -> None:
    assert "aten.where.self" in ops_after_pass(first_and_last_layer, W, out, H, X)


def test_a_comparison_of_true_and_false_is_not_one() -> None:
    def f(g: Tensor, out: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        masked = aten.where(aten.le(out, 0), aten.full([], 0.0), g)
        return aten.mm(masked.t(), x), aten.mm(h.t(), x)

    assert "aten.where.self" in ops_after_pass(f, G, OUT > 0, H, X)


# Each returns a masked gradient, and one more result of the graph.
MASKS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "used by another product": lambda g, out, h, x: (
        masked := relu_backward(g, out),
        aten.relu(aten.mm(masked, g.t())),
    ),
    "returned": lambda g, out, h, x: (relu_backward(g, out),) * 2,
    "a transpose that is returned": lambda g, out, h, x: (
        masked := relu_backward(g, out),
        masked.t(),
    ),
    "a right operand": lambda g, out, h, x: (
        masked := relu_backward(g, out),
        aten.mm(h.t(), masked),
    ),
    "a right operand, turned": lambda g, out, h, x: (
        masked := relu_backward(g, out),
        aten.mm(g, masked.t()),
    ),
    "a sum that stays": lambda g, out, h, x: (
        masked := relu_backward(g, out),
        aten.sum(masked, [1]),
    ),
    "at another limit": lambda g, out, h, x: (relu_backward(g, out, limit=1), h),
    "to another value": lambda g, out, h, x: (relu_backward(g, out, value=1.0), h),
    "of what a kernel makes": lambda g, out, h, x: (relu_backward(aten.relu(g), out), h),
    "by what a kernel makes": lambda g, out, h, x: (relu_backward(g, aten.neg(out)), h),
}


@pytest.mark.parametrize("which", MASKS)
def test_masks_that_stay(which: str) -> None:
    def f(g: Tensor, out: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        masked, other_result = MASKS[which](g, out, h, x)
        return aten.mm(masked.t(), x), aten.mm(h.t(), x), other_result

    names = ops_after_pass(f, G, OUT, H, X)
    assert names.count(JOINED) == 1
    assert "aten.where.self" in names
    assert "aten.permute.default" not in names  # as which the kernel gets a mask


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_compiler_writes_both_so(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real compiler, with the CPU as the device."""
    calls: list[Any] = []
    rewrite = batch_weight_grads.rewrite

    def recording_rewrite(graph: Graph, *args: Any, **options: Any) -> None:
        rewrite(graph, *args, **options)
        op = torch.ops.halfstep.leaves.default
        calls.extend(node.args for node in graph.find_nodes(op="call_function", target=op))

    monkeypatch.setattr(batch_weight_grads, "rewrite", recording_rewrite)
    net = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    is_low = dtype != torch.float32
    with fresh_cache(), torch.autocast("cpu", dtype, enabled=is_low):
        backend = partial(compile_graph, low=is_low, chip="cpu")
        compiled = torch.compile(net, dynamic=False, backend=backend)
        compiled(torch.randn(8, 16))
    [(_, _, masks, summed, _)] = calls
    assert [mask is not None for mask in masks] == [False, False, True]
    assert summed == [True, True, True]
