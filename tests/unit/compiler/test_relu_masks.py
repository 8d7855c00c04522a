"""A ReLU's mask from a norm's input, sums of branches stored once: which ones, same bits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from halfstep.compiler.backend import compile_graph
from halfstep.compiler.passes import relu_masks

aten = torch.ops.aten
X = torch.randn(4, 3, 5, 5)
G = torch.randn(4, 3, 5, 5)
SPECIAL = torch.tensor(
    [float("nan"), 0.0, -0.0, float("inf"), -float("inf"), 1e-45, -1e-45, 2.0, -2.0]
)


def norm(x: Tensor) -> Tensor:
    """A batch norm as torch's compiler writes it, with casts around it."""
    wide = torch.ops.prims.convert_element_type(x, torch.float32)
    var, mean = aten.var_mean.correction(wide, [0, 2, 3], correction=0, keepdim=True)
    return torch.ops.prims.convert_element_type((wide - mean) * torch.rsqrt(var + 1e-5), x.dtype)


def relu_backward(out: Tensor, grad: Tensor) -> Tensor:
    """A ReLU's backward pass as torch's compiler writes it."""
    return aten.where.self(aten.le.Scalar(out, 0), torch.zeros((), dtype=grad.dtype), grad)


def is_stored(node: Any) -> bool:
    return bool(node.meta.get("inductor_realize_to_strides"))


def after_pass(
    f: Callable[..., Any], *inputs: Tensor, device: str = "cpu"
) -> tuple[list[str], int]:
    """What each mask is taken of, and how many results are stored; bits as without the pass."""
    module: GraphModule = make_fx(f, tracing_mode="fake")(*inputs)
    relu_masks.rewrite(module.graph, device)
    module.graph.lint()
    for result, expected in zip(Interpreter(module).run(*inputs), f(*inputs), strict=True):
        assert torch.equal(result, expected)
    masks = module.graph.find_nodes(op="call_function", target=aten.le.Scalar)
    sources = [str(mask.args[0].target) for mask in masks]
    stored = [node for node in module.graph.nodes if is_stored(node)]
    assert all(node.target is aten.where.self for node in stored)
    return sources, len(stored)


CAST = "prims.convert_element_type.default"
RELU = "aten.relu.default"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_behind_a_norm_is_that_of_what_went_in(dtype: torch.dtype) -> None:
    def f(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        out = torch.relu(norm(x))
        return out, relu_backward(out, g)

    assert after_pass(f, X.to(dtype), G.to(dtype)) == ([CAST], 0)
    assert after_pass(f, X.to(dtype), G.to(dtype), device="cuda") == ([RELU], 0)


def test_relu_and_its_input_have_one_mask() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = SPECIAL.to(dtype)
        assert torch.equal(torch.relu(x) <= 0, x <= 0)


def without_norm(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """No norm: the input is not read otherwise."""
    out = torch.relu(x * 2)
    return out, relu_backward(out, g)


def of_two_branches(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Two tensors would have to be read for it."""
    out = torch.relu(norm(x) + g)
    return out, relu_backward(out, g)


def of_two_norms(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Two again, and both come from a norm."""
    out = torch.relu(norm(x) + norm(g))
    return out, relu_backward(out, g)


def of_a_nonlinear_map(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """A norm, then something that is no affine map."""
    out = torch.relu(torch.sin(norm(x)))
    return out, relu_backward(out, g)


def at_another_limit(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """relu(x) <= 1 where x <= 1, but it is no ReLU's mask."""
    out = torch.relu(norm(x))
    return out, aten.where.self(aten.le.Scalar(out, 1), torch.zeros(()), g)


@pytest.mark.parametrize(
    "f", [without_norm, of_two_branches, of_two_norms, of_a_nonlinear_map, at_another_limit]
)
def test_masks_that_stay(f: Callable[..., Any]) -> None:
    assert after_pass(f, X, G) == ([RELU], 0)


def used_twice(x: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    masked = relu_backward(torch.relu(x), g + h)
    return masked.sum((0, 2, 3)), masked * 2


def used_once(x: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    return (relu_backward(torch.relu(x), g + h) * 2,)


def one_branch_is_small(x: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    masked = relu_backward(torch.relu(x), g + h[:1, :, :1, :1])
    return masked.sum((0, 2, 3)), masked * 2


@pytest.mark.parametrize(
    ("f", "stored_count"), [(used_twice, 1), (used_once, 0), (one_branch_is_small, 0)]
)
def test_a_sum_of_two_branches_that_is_used_twice_is_written(
    f: Callable[..., Any], stored_count: int
) -> None:
    assert after_pass(f, X, G, torch.randn_like(X)) == ([RELU], stored_count)


class Block(nn.Module):
    """Two branches that end in a ReLU, twice: a gradient with two sources and three users."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2):
            inner = F.relu(self.norms[i](self.convs[i](x)))
            x = F.relu(self.norms[i + 1](self.convs[i + 1](inner)) + x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generated_code_has_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real compiler, with the CPU as the device.

    The pass reaches the graph of both, and rewrites masks and sums.
    """
    rewrites: list[tuple[int, int]] = []
    rewrite = relu_masks.rewrite

    def counting_rewrite(graph: Any, device: str) -> None:
        rewrite(graph, device)
        masks = graph.find_nodes(op="call_function", target=aten.le.Scalar)
        moved = sum(mask.args[0].target is not aten.relu.default for mask in masks)
        stored = sum(is_stored(node) for node in graph.nodes)
        rewrites.append((moved, stored))

    monkeypatch.setattr(relu_masks, "rewrite", counting_rewrite)

    def run(chip: str | None) -> list[Tensor]:
        """Loss and gradients."""
        torch.manual_seed(0)
        net = Block().to(dtype)
        compiled = torch.compile(
            lambda x: net(x).float().square().mean(),
            dynamic=False,
            backend=partial(compile_graph, low=dtype != torch.float32, chip=chip),
        )
        value = compiled(X.to(dtype))
        value.backward()
        return [value.detach(), *[p.grad for p in net.parameters() if p.grad is not None]]

    with fresh_cache():  # a program from torch's cache is not rewritten again
        before = run(None)
        after = run("cpu")
    assert len(after) == 13
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert rewrites == [(2, 1)]
