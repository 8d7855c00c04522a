"""A max pool's backward pass by one kernel: sums of torch's float32 one, and what is replaced."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from halfstep.compiler.passes import max_pool
from halfstep.errors import Notice
from tests.support.triton_interpreter import only_interpreted, run_interpreted, starts_interpreter

aten = torch.ops.aten
prims = torch.ops.prims


class Pool(NamedTuple):
    shape: tuple[int, int, int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool = False

    def unpool_options(self) -> list[list[int]]:
        """Kernel, stride, padding and the input's size, as torch.ops.halfstep.unpool takes them."""
        return [list(self.kernel), list(self.stride), list(self.padding), list(self.shape[2:])]


CASES = [
    Pool((2, 64, 12, 12), kernel=(3, 3), stride=(2, 2), padding=(1, 1)),  # windows overlap
    Pool((1, 3, 7, 9), kernel=(2, 2), stride=(2, 2), padding=(0, 0)),  # side by side
    Pool((2, 5, 9, 8), kernel=(3, 2), stride=(1, 2), padding=(1, 0)),  # uneven
    Pool((1, 8, 10, 11), kernel=(3, 3), stride=(2, 2), padding=(1, 1), ceil_mode=True),
    Pool((1, 130, 5, 17), kernel=(5, 3), stride=(2, 1), padding=(2, 1)),  # beyond the edge
    Pool((1, 4, 8, 8), kernel=(2, 2), stride=(3, 3), padding=(0, 0)),  # gaps between windows
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def channels_last(*shape: int, generator: torch.Generator | None = None) -> Tensor:
    images = torch.randn(shape, generator=generator)
    return images.contiguous(memory_format=torch.channels_last)


def pool_tensors(case: Pool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Input, output gradient and offsets, channels last."""
    generator = torch.Generator().manual_seed(0)
    x = channels_last(*case.shape, generator=generator).to(dtype)
    out, offsets = prims._low_memory_max_pool_with_offsets(
        x, case.kernel, case.stride, case.padding, (1, 1), case.ceil_mode
    )
    grad = channels_last(*out.shape, generator=generator).to(dtype)
    return x, grad, offsets


def expected_grad(case: Pool, x: Tensor, grad: Tensor) -> Tensor:
    """torch's own backward pass in float32, rounded once."""
    wide_x = x.float().requires_grad_()
    out = F.max_pool2d(wide_x, case.kernel, case.stride, case.padding, 1, case.ceil_mode)
    (x_grad,) = torch.autograd.grad(out, wide_x, grad.float())
    return x_grad.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_operation(case: Pool, dtype: torch.dtype) -> None:
    x, grad, offsets = pool_tensors(case, dtype)
    x_grad = torch.ops.halfstep.unpool(grad, offsets, *case.unpool_options())
    assert torch.equal(x_grad, expected_grad(case, x, grad))
    assert x_grad.stride() == x.stride()


def test_the_operation_whatever_torchs_default_dtype_is() -> None:
    x, grad, offsets = pool_tensors(CASES[0], torch.float16)
    torch.set_default_dtype(torch.float64)
    try:
        x_grad = torch.ops.halfstep.unpool(grad, offsets, *CASES[0].unpool_options())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(x_grad, expected_grad(CASES[0], x, grad))


# The interpreter cuts off where a bfloat16 is to be rounded.
@only_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel(case: Pool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pool, "BLOCK", 512)  # several to a row, where channels are many
    monkeypatch.setattr(max_pool, "_WORKS", {})
    x, grad, offsets = pool_tensors(case, dtype)
    x_grad = max_pool.unpool(grad, offsets, *case.unpool_options())
    assert torch.equal(x_grad, expected_grad(case, x, grad))
    assert list(max_pool._WORKS.values()) == [True]  # the kernel, not what stands in for it


@starts_interpreter
def test_the_interpreted_kernel() -> None:
    run_interpreted(__file__, len(CASES) * 2)


def fail_to_launch(*_: Any) -> None:
    raise OSError("no space left")


def test_without_the_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pool, "_WORKS", {})
    monkeypatch.setattr(max_pool, "launch", fail_to_launch)
    case = CASES[0]
    x, grad, offsets = pool_tensors(case, torch.float32)
    with pytest.warns(Notice, match="more kernels: Triton failed"):
        x_grad = max_pool.unpool(grad, offsets, *case.unpool_options())
    assert torch.equal(x_grad, expected_grad(case, x, grad))
    assert list(max_pool._WORKS.values()) == [False]


def pool_backward(x: Tensor, grad: Tensor, dilation: int = 1) -> tuple[Tensor]:
    """As torch's compiler writes it, for windows of 3×3 with a stride of 2."""
    kernel, stride, padding, dilations = [3, 3], [2, 2], [1, 1], [dilation, dilation]
    window = (kernel, stride, padding, dilations)
    _, offsets = prims._low_memory_max_pool_with_offsets(x, *window, False)
    indices = prims._low_memory_max_pool_offsets_to_indices(
        offsets, kernel, list(x.shape[2:]), stride, padding, dilations
    )
    return (aten.max_pool2d_with_indices_backward(grad, x, *window, False, indices),)


def is_replaced(
    x: Tensor, grad: Tensor, device: str = "cpu", tracing_mode: Any = "fake", dilation: int = 1
) -> bool:
    """Whether the pass puts our operation into the graph; results must be the same."""

    def f(x: Tensor, grad: Tensor) -> tuple[Tensor]:
        return pool_backward(x, grad, dilation)

    module = make_fx(f, tracing_mode=tracing_mode)(x, grad)
    max_pool.rewrite(module.graph, device)
    module.graph.lint()
    assert torch.equal(Interpreter(module).run(x, grad)[0], f(x, grad)[0])
    unpool_op = torch.ops.halfstep.unpool.default
    return bool(module.graph.find_nodes(op="call_function", target=unpool_op))


def test_which_are_replaced() -> None:
    x = channels_last(2, 4, 8, 8)
    grad = channels_last(2, 4, 4, 4)
    assert is_replaced(x, grad)
    assert not is_replaced(x, grad, device="cuda")
    assert not is_replaced(x, grad, tracing_mode="symbolic")
    assert not is_replaced(x.double(), grad.double())
    assert not is_replaced(x.contiguous(), grad.contiguous())
    assert not is_replaced(x, grad.contiguous())
    assert not is_replaced(x, channels_last(2, 4, 3, 3), dilation=2)
