"""Max pooling's backward pass: by one kernel where channels come last, with the sums of torch's float32 one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from halfstep.compiler.passes import max_pool
from halfstep.errors import Notice
from tests.support.triton_interpreter import inside, interpret, outside

aten, prims = torch.ops.aten, torch.ops.prims
# Shape, kernel, stride, padding, ceil_mode: overlapping, apart, with gaps between, uneven, beyond the edge.
CASES: list[Any] = [
    ((2, 64, 12, 12), (3, 3), (2, 2), (1, 1), False), ((1, 3, 7, 9), (2, 2), (2, 2), (0, 0), False),
    ((2, 5, 9, 8), (3, 2), (1, 2), (1, 0), False), ((1, 8, 10, 11), (3, 3), (2, 2), (1, 1), True),
    ((1, 130, 5, 17), (5, 3), (2, 1), (2, 1), False), ((1, 4, 8, 8), (2, 2), (3, 3), (0, 0), False),
]  # fmt: skip
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def made(case: Any, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """Input, gradient and offsets, channels last."""
    shape, kernel, stride, padding, ceil_mode = case
    g = torch.Generator().manual_seed(0)
    x = (
        torch.randn(shape, generator=g)
        .to(device, dtype)
        .contiguous(memory_format=torch.channels_last)
    )
    out, offsets = prims._low_memory_max_pool_with_offsets(
        x, kernel, stride, padding, (1, 1), ceil_mode
    )
    grad = (
        torch.randn(out.shape, generator=g)
        .to(device, dtype)
        .contiguous(memory_format=torch.channels_last)
    )
    return x, grad, offsets


def wanted(case: Any, x: Tensor, grad: Tensor) -> Tensor:
    """torch's own, in float32, rounded once."""
    _, kernel, stride, padding, ceil_mode = case
    wide = x.float().requires_grad_()
    (found,) = torch.autograd.grad(
        F.max_pool2d(wide, kernel, stride, padding, 1, ceil_mode), wide, grad.float()
    )
    return found.to(x.dtype)


def options(case: Any) -> list[list[int]]:
    shape, kernel, stride, padding, _ = case
    return [list(kernel), list(stride), list(padding), list(shape[2:])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_operation(case: Any, dtype: torch.dtype) -> None:
    x, grad, offsets = made(case, dtype)
    got = torch.ops.halfstep.unpool(grad, offsets, *options(case))
    assert torch.equal(got, wanted(case, x, grad))
    assert got.stride() == x.stride()


@inside
@pytest.mark.parametrize(
    "dtype", DTYPES[:2]
)  # the interpreter cuts off where a bfloat16 is to be rounded
@pytest.mark.parametrize("case", CASES)
def test_the_kernel(case: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pool, "BLOCK", 128)  # several to a row
    x, grad, offsets = made(case, dtype)
    assert torch.equal(max_pool.unpool(grad, offsets, *options(case)), wanted(case, x, grad))


@outside
def test_the_interpreted_kernel() -> None:
    interpret(__file__, len(CASES) * 2)


def fails(*_: Any) -> None:
    raise OSError("no space left")


def test_without_the_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pool, "_WORKS", {})
    monkeypatch.setattr(max_pool, "launch", fails)
    x, grad, offsets = made(CASES[0], torch.float32)
    with pytest.warns(Notice, match="more kernels: Triton failed"):
        assert torch.equal(
            max_pool.unpool(grad, offsets, *options(CASES[0])), wanted(CASES[0], x, grad)
        )
    assert list(max_pool._WORKS.values()) == [False]


def backward(x: Tensor, grad: Tensor, dilation: int = 1, stride: int = 2) -> tuple[Tensor]:
    """As torch's compiler writes it."""
    window = [3, 3], [stride, stride], [1, 1], [dilation, dilation]
    _, offsets = prims._low_memory_max_pool_with_offsets(x, *window, False)
    kernel, *rest = window
    indices = prims._low_memory_max_pool_offsets_to_indices(
        offsets, kernel, list(x.shape[2:]), *rest
    )
    return (aten.max_pool2d_with_indices_backward(grad, x, *window, False, indices),)


def rewritten(
    x: Tensor, grad: Tensor, device: str = "cpu", mode: Any = "fake", **window: int
) -> bool:
    """Whether it is ours now; the result is the same."""
    graph = make_fx(lambda x, grad: backward(x, grad, **window), tracing_mode=mode)(x, grad)
    max_pool.rewrite(graph.graph, device)
    graph.graph.lint()
    assert torch.equal(Interpreter(graph).run(x, grad)[0], backward(x, grad, **window)[0])
    return bool(
        graph.graph.find_nodes(op="call_function", target=torch.ops.halfstep.unpool.default)
    )


def last(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def test_which_are_replaced() -> None:
    x, grad = last(2, 4, 8, 8), last(2, 4, 4, 4)
    assert rewritten(x, grad)
    assert not rewritten(x, grad, "cuda")
    assert not rewritten(x, grad, mode="symbolic")
    assert not rewritten(x.double(), grad.double())
    assert not rewritten(x.contiguous(), grad.contiguous())
    assert not rewritten(x, grad.contiguous())
    assert not rewritten(x, last(2, 4, 3, 3), dilation=2)
