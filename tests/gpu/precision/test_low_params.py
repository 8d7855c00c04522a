"""Low copies and their gradients in a graph: the same bits, in one kernel each way."""

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from halfstep.precision.low_params import LowCopies, foreach_cast_, widen

pytestmark = pytest.mark.gpu
MLP = [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)]


def kernels_of(graph: torch.cuda.CUDAGraph) -> list[str]:
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_one_kernel_each_way(low: torch.dtype) -> None:
    masters = [nn.Parameter(torch.randn(s, device="cuda")) for s in MLP]
    copies = LowCopies(masters, [low] * len(masters))
    grads: list[Tensor | None] = [torch.randn(s, device="cuda").to(low) for s in MLP]
    copies.cast_masters()
    widen(grads, [torch.float32] * len(grads))
    cast_graph = torch.cuda.CUDAGraph()
    grad_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cast_graph):
        copies_in_graph = copies.cast_masters()
    with torch.cuda.graph(grad_graph):
        wide = widen(grads, [torch.float32] * len(grads))
    for m, g in zip(masters, grads, strict=True):
        m.data.normal_()
        assert g is not None
        g.normal_()
    assert len(kernels_of(cast_graph)) == 1
    assert len(kernels_of(grad_graph)) == 1
    for m, c, g, w in zip(masters, copies_in_graph, grads, wide, strict=True):
        assert g is not None
        assert w is not None
        assert torch.equal(c.detach(), m.detach().to(low))
        assert torch.equal(w, g.float())


def test_gradients_through_captured_copies() -> None:
    """Forward and backward in one graph: gradients arrive at the masters, in their dtype."""
    p = nn.Parameter(torch.randn(300, 300, device="cuda"))
    copies = LowCopies([p], [torch.float16])
    x = torch.randn(8, 300, device="cuda", dtype=torch.float16)

    def run() -> Tensor:
        (low,) = copies.cast_masters()
        (grad,) = torch.autograd.grad((x @ low).float().sum(), [p])
        return grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grad = run()
    x.normal_()
    graph.replay()
    assert grad.dtype == torch.float32
    assert torch.equal(grad, run())


def test_pieces_only_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    list_lengths: list[int] = []
    foreach_copy_ = torch._foreach_copy_

    def record_and_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        list_lengths.append(len(targets))
        foreach_copy_(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", record_and_copy)
    targets = [torch.zeros(40960, dtype=torch.float16, device="cuda")]
    sources = [torch.zeros(40960, dtype=torch.float32, device="cuda")]
    foreach_cast_(targets, sources)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        foreach_cast_(targets, sources)
    assert list_lengths == [1, 10]
