"""No host sync in a step: 1,000 mixed fp16 steps with forced overflows under CUDA's sync debug mode."""

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from tests.support.no_sync import no_sync

pytestmark = pytest.mark.gpu

OPTIMIZERS = {
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "Adam capturable": lambda p: torch.optim.Adam(p, lr=1e-3, capturable=True),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).cuda()


def batches(steps: int, bad: frozenset[int]) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    made = []
    for i in range(steps):
        x, y = torch.randn(8, 16, device="cuda"), torch.randint(0, 10, (8,), device="cuda")
        if i in bad:
            x[0, 0] = torch.inf
        made.append((x, y))
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["O1", "O2"])
def test_a_thousand_steps_without_a_sync(name: str, precision: str) -> None:
    net, bad = network(), frozenset({0, 1, 7, 8, 100, 500, 501, 502, 999})
    scale = hs.DynamicScale(interval=50)
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), OPTIMIZERS[name](net.parameters()), precision=hs.Precision(precision, scale=scale),
        clip_norm=1.0, ema=0.99, lr=[0.05] * 100 if "foreach" not in name else None,
    )  # fmt: skip
    data = batches(1000, bad)
    records = [step(*b) for b in data[:3]]  # two overflows, then the first committed update
    reads = step.host_reads.reads
    with no_sync():
        records += [step(*b) for b in data[3:]]
    assert step.host_reads.reads == reads
    skipped = frozenset(i for i, r in enumerate(records) if r.skipped.item())
    assert skipped >= bad  # and where the growing scale itself overflowed
    assert [r.scale.item() for r in records] == torch_scales(len(data), skipped, scale)
    assert int(step.state.updates) == 1000 - len(skipped)
    assert step._update_on_device.captures >= 1


def torch_scales(steps: int, bad: frozenset[int], scale: hs.DynamicScale) -> list[float]:
    """torch.amp.GradScaler's trajectory over the same overflows."""
    scaler = torch.amp.GradScaler("cuda", init_scale=scale.init, growth_interval=scale.interval)
    p = nn.Parameter(torch.zeros(1, device="cuda"))
    opt, seen = torch.optim.SGD([p], lr=0.0), []
    for i in range(steps):
        opt.zero_grad()
        scaler.scale(p.sum()).backward()
        seen.append(scaler.get_scale())
        if i in bad:
            p.grad.fill_(torch.inf)
        scaler.step(opt)
        scaler.update()
    return seen


@pytest.mark.parametrize("precision", ["O1", "O2", "fp16"])
def test_the_profiler_sees_half_kernels_and_no_copy_to_the_host(precision: str) -> None:
    net = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
    opt = torch.optim.SGD(net.parameters(), lr=1e-3, fused=True)
    step = hs.TrainStep(net, nn.MSELoss(), opt, precision=precision)
    x, y = torch.randn(512, 1024, device="cuda"), torch.randn(512, 1024, device="cuda")
    for _ in range(3):
        step(x, y)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        for _ in range(40):
            step(x, y)
    kernels = {e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA}
    gemms = {
        k for k in kernels if "gemm" in k.lower() or "nvjet" in k.lower() or "cutlass" in k.lower()
    }
    copies = [e.name for e in profile.events() if "Memcpy DtoH" in e.name]
    assert gemms, "no matrix product was seen"
    assert all(is_half(k) for k in gemms), gemms
    # Three flags travel to pinned memory every 16 updates, asynchronously: 40 steps, at most 3 copies.
    assert len(copies) <= 3


def is_half(kernel: str) -> bool:
    """cuBLAS names the operand type: nvjet_sm90_hsh_…, …_f16f16_…, h16816gemm, hgemm."""
    name = kernel.lower()
    return any(
        mark in name for mark in ("_hsh_", "_hss_", "_hhh_", "f16", "hgemm", "h16816", "half")
    )


def run(step: hs.TrainStep, data: list[tuple[Tensor, Tensor]]) -> None:
    for b in data:
        step(*b)
        torch.cuda.synchronize()  # a fast host would be done before the flag of step 10 arrives


def test_a_halted_run_is_heard_of_and_nothing_moved() -> None:
    net = network()
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), torch.optim.AdamW(net.parameters(), fused=True))
    data = batches(60, frozenset({10}))
    for b in data[:10]:
        step(*b)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(hs.NonFiniteError, match=r"0\.weight"):
        run(step, data[10:])
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert int(step.state.updates) == 10
