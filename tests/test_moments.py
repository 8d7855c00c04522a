"""Mean and variance from plain sums: how near they are to the exact ones, and which are left to torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from halfstep.step import moments

aten = torch.ops.aten
EPS = 2.0**-24


def stats(x: Tensor, dims: tuple[int, ...] = (0, 2, 3), correction: int = 0) -> tuple[Tensor, Tensor]:
    var, mean = aten.var_mean.correction(x, list(dims), correction=correction, keepdim=True)
    return var, mean


def rewritten(x: Tensor, device: str = "cpu", f: Callable[..., Any] = stats) -> tuple[bool, Any]:
    """Whether the variance is taken of parts' means, and what the graph returns."""
    graph = make_fx(lambda x: f(x), tracing_mode="fake")(x)  # f may have defaults
    moments.rewrite(graph.graph, device)
    graph.graph.lint()
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.var_mean.correction)
    return node.args[1] == [0], Interpreter(graph).run(x)


def images(n: int = 8, c: int = 16, side: int = 16) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, c, side, side, generator=g).contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def _few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "LANES", 256)  # 16 parts of 128 rows


def far(x: Tensor) -> Tensor:
    return x + 1000


def first(x: Tensor) -> Tensor:
    """The row that a part measures from lies far off, as far as one of its rows can."""
    x[:, :, ::8, 0] = 1e4
    return x


def sparse(x: Tensor) -> Tensor:
    x.zero_()[0, :, 0, 0] = 1e3
    return x


def drifting(x: Tensor) -> Tensor:
    """Parts whose means differ more than their values do."""
    return x * 1e-2 + torch.arange(len(x)).view(-1, 1, 1, 1)


@pytest.mark.parametrize("change", [lambda x: x, far, first, sparse, drifting, lambda x: x * 1e-12, lambda x: x * 1e15])
def test_near_the_exact_ones(change: Callable[[Tensor], Tensor]) -> None:
    """The sums of R rows lose R·2⁻²⁴ of the variance; a mean is a float32, and loses 2⁻²⁴ of itself."""
    x = change(images())
    found, (var, mean) = rewritten(x)
    assert found
    exact_var, exact = stats(x.double())
    rows, lost = 128, EPS * exact.abs()
    assert ((mean - exact).abs() <= 2 * lost + rows * EPS * exact_var.sqrt()).all()
    assert ((var - exact_var).abs() <= 2 * rows * EPS * exact_var + 4 * lost * exact_var.sqrt() + 4 * lost**2).all()
    assert var.shape == mean.shape == (1, 16, 1, 1)


def test_of_equal_numbers_there_is_no_variance() -> None:
    found, (var, mean) = rewritten(torch.full_like(images(), 0.1))
    assert found
    assert torch.equal(var, torch.zeros_like(var))
    assert torch.equal(mean, torch.full_like(mean, 0.1))


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("row", [0, 5])
def test_what_is_not_finite_stays_so(value: float, row: int) -> None:
    """In its channel, and in no other."""
    x = images()
    x[3, 2, 0, row] = value
    _, (var, mean) = rewritten(x)
    there = torch.arange(16) == 2
    assert torch.equal(~var.flatten().isfinite(), there)
    assert torch.equal(~mean.flatten().isfinite(), there)


@pytest.mark.parametrize(
    "f", [lambda x: stats(x, correction=1), lambda x: stats(x, (0, 2)), lambda x: stats(x, (0, 1, 2, 3))]
)
def test_other_variances_stay(f: Callable[..., Any]) -> None:
    assert not rewritten(images(), f=f)[0]


@pytest.mark.parametrize(
    "x", [images().contiguous(), images().double(), images()[:, :, ::2], images()[0], images(1, 16, 8)]
)
def test_other_tensors_stay(x: Tensor) -> None:
    """Channels first, float64, with gaps, without a batch, too few rows for parts."""
    dims = tuple(i for i in range(x.dim()) if i != x.dim() - 3)
    assert not rewritten(x, f=lambda x: stats(x, dims))[0]


def test_other_devices_stay() -> None:
    assert not rewritten(images(), "cuda")[0]


@pytest.mark.parametrize("rows", [1, 7, 392, 802816, 3211264, 12544, 49 * 31])
@pytest.mark.parametrize("channels", [1, 64, 2048])
def test_parts_go_into_all_rows(rows: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "LANES", 1 << 17)
    part = moments.part(rows, channels)
    assert rows % part == 0
    assert part <= moments.MOST
    assert part == 1 or rows // part * channels >= moments.LANES
