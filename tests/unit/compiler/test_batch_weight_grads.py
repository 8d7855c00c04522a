"""Weight gradients by one kernel: which products, their sums, and what is left alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from halfstep.compiler.passes import batch_weight_grads
from halfstep.compiler.passes.batch_weight_grads import compute_weight_grads
from halfstep.errors import Notice
from tests.support.triton_interpreter import only_interpreted, run_interpreted, starts_interpreter

aten = torch.ops.aten
SHAPES = [(512, 784, 64), (10, 512, 64), (33, 65, 7), (1, 1, 1), (64, 64, 200)]  # M, N, K
KINDS = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]


class Operands(NamedTuple):
    """The arguments of torch.ops.halfstep.leaves, without the dtype."""

    lefts: list[Tensor]
    rights: list[Tensor]
    masks: list[Tensor | None]
    summed: list[bool]


def make_operands(dtype: torch.dtype) -> Operands:
    """Whole numbers, whose sums are exact in every order.

    Gradients come transposed, masks in any layout.
    """
    g = torch.Generator().manual_seed(0)
    lefts = [torch.randint(-4, 5, (k, m), generator=g).to(dtype).t() for m, _, k in SHAPES]
    rights = [torch.randint(-4, 5, (k, n), generator=g).to(dtype) for _, n, k in SHAPES]
    # A row sum of 2247: 2248 in float16, and 2048 if it were summed in float16.
    lefts[4][0] = torch.tensor([2048, *[1] * 199])
    outputs = [torch.randint(-1, 2, a.shape, generator=g).to(dtype) for a in lefts]
    transposed = outputs[0].t().contiguous().t()
    masks = [transposed, None, outputs[2] > 0, outputs[3], None]
    return Operands(lefts, rights, masks, summed=[True, True, False, True, True])


def exact_results(operands: Operands, dtype: torch.dtype) -> list[Tensor]:
    """By float64, rounded twice."""
    low_dtype = operands.lefts[0].dtype
    wide_lefts = [a.double() for a in operands.lefts]
    for a, mask in zip(wide_lefts, operands.masks, strict=True):
        if mask is not None:
            a.masked_fill_(mask if mask.dtype == torch.bool else mask <= 0, 0)
    products = [a @ b.double() for a, b in zip(wide_lefts, operands.rights, strict=True)]
    pairs = zip(wide_lefts, operands.summed, strict=True)
    row_sums = [a.sum(1) for a, is_summed in pairs if is_summed]
    return [t.to(low_dtype).to(dtype) for t in (*products, *row_sums)]


def assert_exact(results: list[Tensor], operands: Operands, dtype: torch.dtype) -> None:
    for result, expected in zip(results, exact_results(operands, dtype), strict=True):
        assert torch.equal(result, expected)
        assert result.dtype == dtype
        assert result.is_contiguous()


@pytest.mark.parametrize(("dtype", "out"), KINDS)
def test_the_operation(dtype: torch.dtype, out: torch.dtype) -> None:
    operands = make_operands(dtype)
    assert_exact(torch.ops.halfstep.leaves(*operands, out), operands, out)


@only_interpreted
@pytest.mark.parametrize(("dtype", "out"), KINDS)
def test_the_kernel(dtype: torch.dtype, out: torch.dtype) -> None:
    operands = make_operands(dtype)
    assert_exact(compute_weight_grads(*operands, out), operands, out)


def check_nonfinite(op: Callable[..., list[Tensor]]) -> None:
    """A NaN or inf that is masked out is a 0.

    One behind a mask that is NaN passes, as it does in torch's ReLU.
    """
    nan = float("nan")
    inf = float("inf")
    g = torch.ones(3, 4)
    h = torch.ones(3, 4)
    g[0, 0], h[0, 0] = nan, 0.0
    g[1, 1], h[1, 1] = nan, -1.0
    g[2, 2] = inf
    g[0, 3], h[0, 3] = 7.0, nan
    x = torch.eye(3)
    masked_product, product, masked_sum, row_sum = op(
        [g.t(), g.t()], [x, x], [h.t(), None], [True, True], torch.float32
    )
    masked_g = torch.where(h <= 0, 0, g)
    assert torch.equal(masked_product.isfinite(), (masked_g.t() @ x).isfinite())
    assert torch.equal(product.isfinite(), (g.t() @ x).isfinite())
    assert torch.equal(masked_sum, masked_g.sum(0))
    assert masked_sum.tolist() == [2, 2, inf, 9]
    assert torch.equal(row_sum.isnan(), g.isnan().any(0))


def test_the_operation_keeps_what_is_not_finite() -> None:
    check_nonfinite(torch.ops.halfstep.leaves)


@only_interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
def test_the_kernel_keeps_what_is_not_finite() -> None:
    check_nonfinite(compute_weight_grads)


@starts_interpreter
def test_the_interpreted_kernel() -> None:
    run_interpreted(__file__, len(KINDS) + 1)


def fail_to_launch(*_: Any) -> None:
    raise OSError("no space left")


def test_without_the_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot be compiled is tried once, with a notice.

    One that ran before and fails now is an error.
    """
    float32 = torch.float32
    operands = make_operands(float32)
    works: dict[Any, bool] = {}
    monkeypatch.setattr(batch_weight_grads, "_WORKS", works)
    monkeypatch.setattr(batch_weight_grads, "launch", fail_to_launch)
    with pytest.warns(Notice, match="more kernels: Triton failed .*last digits"):
        assert_exact(compute_weight_grads(*operands, float32), operands, float32)
    assert_exact(compute_weight_grads(*operands, float32), operands, float32)
    works.update(dict.fromkeys(works, True))
    with pytest.raises((OSError, ImportError)):
        compute_weight_grads(*operands, float32)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast as torch's compiler writes it."""
    return torch.ops.prims.convert_element_type(x, dtype)  # type: ignore[no-any-return]


def ops_after_pass(
    f: Callable[..., Any],
    *inputs: Tensor,
    device: str = "cpu",
    tracing_mode: Any = "fake",
    is_split: bool = False,
) -> list[str]:
    """The operations of f after the pass; what they compute is what f did."""
    module = make_fx(f, tracing_mode=tracing_mode)(*inputs)
    batch_weight_grads.rewrite(module.graph, device, lambda product: is_split)
    module.graph.lint()
    for result, expected in zip(Interpreter(module).run(*inputs), f(*inputs), strict=True):
        assert torch.equal(result, expected)
        assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


JOINED = "halfstep.leaves.default"
G = torch.randint(-4, 5, (8, 16)).float()
H = torch.randint(-4, 5, (8, 4)).float()
X = torch.randint(-4, 5, (8, 12)).float()


def two_products(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return aten.mm(g.t(), x), aten.mm(h.t(), x)


def test_those_that_are_returned_are_one() -> None:
    names = ops_after_pass(two_products, G, H, X)
    assert names.count(JOINED) == 1
    assert "aten.mm.default" not in names


def test_a_cast_is_part_of_it() -> None:
    def f(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(cast(t, torch.float32) for t in two_products(g, h, x))

    names = ops_after_pass(f, *[t.bfloat16() for t in (G, H, X)])
    assert names.count(JOINED) == 1
    assert not {"aten.mm.default", "prims.convert_element_type.default"} & set(names)


def used_again(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """One goes on into another operation."""
    first = aten.mm(g.t(), x)
    return aten.mm(h.t(), x), aten.relu(first), first


def only_one(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return (aten.mm(g.t(), x),)


def two_dtypes(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return aten.mm(g.t(), x), aten.mm(h.t().bfloat16(), x.bfloat16())


def cast_to_integers(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(cast(t, torch.int64) for t in two_products(g, h, x))


@pytest.mark.parametrize("f", [used_again, only_one, two_dtypes, cast_to_integers])
def test_others_stay(f: Callable[..., Any]) -> None:
    assert JOINED not in ops_after_pass(f, G, H, X)


def test_large_and_unknown_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert JOINED not in ops_after_pass(two_products, G, H, X, device="cuda")
    assert JOINED not in ops_after_pass(two_products, G, H, X, tracing_mode="symbolic")
    assert JOINED not in ops_after_pass(two_products, *[t.double() for t in (G, H, X)])
    for name, limit in (("MAX_K", 7), ("MAX_TILES", 1), ("MAX_PRODUCTS", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(batch_weight_grads, name, limit)
            assert JOINED not in ops_after_pass(two_products, G, H, X)


def test_operands_are_read_before_they_are_overwritten() -> None:
    """torch writes mutations of inputs at the end of a graph."""

    def f(g: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        products = two_products(g, h, x)
        g.copy_(aten.mul(g, 2))
        return products

    module = make_fx(f, tracing_mode="fake")(G, H, X)
    batch_weight_grads.rewrite(module.graph, "cpu")
    names = [str(node.target) for node in module.graph.nodes]
    assert names.index(JOINED) < names.index("aten.copy_.default")
