"""No host sync in a step: 1,000 mixed fp16 steps with overflows under CUDA's sync debug mode."""

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


def make_batches(steps: int, overflow_steps: frozenset[int]) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    batches = []
    for i in range(steps):
        x = torch.randn(8, 16, device="cuda")
        y = torch.randint(0, 10, (8,), device="cuda")
        if i in overflow_steps:
            x[0, 0] = torch.inf
        batches.append((x, y))
    return batches


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["O1", "O2"])
def test_a_thousand_steps_without_a_sync(name: str, precision: str) -> None:
    net = network()
    overflow_steps = frozenset({0, 1, 7, 8, 100, 500, 501, 502, 999})
    scale = hs.DynamicScale(interval=50)
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        OPTIMIZERS[name](net.parameters()),
        precision=hs.Precision(precision, scale=scale),
        clip_norm=1.0,
        ema=0.99,
        lr=[0.05] * 100 if "foreach" not in name else None,
    )
    batches = make_batches(1000, overflow_steps)

    # Two overflows, then the first committed update.
    records = [step(*batch) for batch in batches[:3]]
    reads_before = step.host_reads.reads
    with no_sync():
        records += [step(*batch) for batch in batches[3:]]
    assert step.host_reads.reads == reads_before

    # The growing scale itself overflows at further steps.
    skipped = frozenset(i for i, record in enumerate(records) if record.skipped.item())
    assert skipped >= overflow_steps
    scales = [record.scale.item() for record in records]
    assert scales == torch_scales(len(batches), skipped, scale)
    assert int(step.state.updates) == 1000 - len(skipped)
    assert step._update_on_device.captures >= 1


def torch_scales(steps: int, overflow_steps: frozenset[int], scale: hs.DynamicScale) -> list[float]:
    """Returns the scales of torch.amp.GradScaler over the same overflows."""
    scaler = torch.amp.GradScaler("cuda", init_scale=scale.init, growth_interval=scale.interval)
    param = nn.Parameter(torch.zeros(1, device="cuda"))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scales = []
    for i in range(steps):
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        scales.append(scaler.get_scale())
        if i in overflow_steps:
            param.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    return scales


@pytest.mark.parametrize("precision", ["O1", "O2", "fp16"])
def test_the_profiler_sees_half_kernels_and_no_copy_to_the_host(precision: str) -> None:
    net = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, fused=True)
    step = hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision)
    x = torch.randn(512, 1024, device="cuda")
    y = torch.randn(512, 1024, device="cuda")
    for _ in range(3):
        step(x, y)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(40):
            step(x, y)
    events = profile.events()
    on_device = torch.autograd.DeviceType.CUDA
    kernels = {event.name for event in events if event.device_type == on_device}
    products = {kernel for kernel in kernels if is_matrix_product(kernel)}
    assert products, "no matrix product was seen"
    assert all(is_half(kernel) for kernel in products), products
    # Three flags travel to pinned memory every 16 updates, asynchronously: 40 steps, at most
    # 3 copies.
    copies = [event.name for event in events if "Memcpy DtoH" in event.name]
    assert len(copies) <= 3


def is_matrix_product(kernel: str) -> bool:
    name = kernel.lower()
    return any(word in name for word in ("gemm", "nvjet", "cutlass"))


def is_half(kernel: str) -> bool:
    """Whether the kernel's name has an operand type of half, as cuBLAS writes it.

    Examples are nvjet_sm90_hsh_…, …_f16f16_…, h16816gemm and hgemm.
    """
    name = kernel.lower()
    words = ("_hsh_", "_hss_", "_hhh_", "f16", "hgemm", "h16816", "half")
    return any(word in name for word in words)


def run_in_step_with_device(step: hs.TrainStep, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Runs the batches and waits after each.

    A fast host would finish before the flag of the overflow arrives.
    """
    for batch in batches:
        step(*batch)
        torch.cuda.synchronize()


def test_a_halted_run_raises_and_nothing_moved() -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer)
    batches = make_batches(60, frozenset({10}))
    for batch in batches[:10]:
        step(*batch)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(hs.NonFiniteError, match=r"0\.weight"):
        run_in_step_with_device(step, batches[10:])
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert int(step.state.updates) == 10
