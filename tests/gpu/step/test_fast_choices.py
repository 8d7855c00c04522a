"""The choices that make a step fast on CUDA: compiled code, channels-last, measured cuDNN algorithms."""

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import halfstep as hs

pytestmark = pytest.mark.gpu


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Flatten(),
        nn.Linear(16 * 36, 10),
    ).cuda()  # fmt: skip


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()


def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 8, 8, 8, device="cuda"), torch.randint(10, (16,), device="cuda")


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(32, 64, device="cuda"), torch.randint(10, (32,), device="cuda")


def build(net: nn.Module, precision: Any = "fp32", **options: Any) -> hs.TrainStep:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision, **options)


def is_last(t: Tensor) -> bool:
    return t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "O1", "O2", "fp16"])
def test_convolutions_run_channels_last_from_end_to_end(precision: str) -> None:
    net, seen = convolutional(), []
    step = build(net, precision)
    net[0].register_forward_hook(
        lambda m, args, out: seen.append((is_last(args[0]), is_last(m.weight), is_last(out)))
    )
    for _ in range(6):
        assert step(*images()).updated
    assert set(seen) == {(True, True, True)}
    p = net[0].weight
    assert is_last(p)
    assert is_last(step.optimizer.state[p]["momentum_buffer"])
    assert step.report().choices["memory format"].startswith("channels-last: ")


def test_float64_and_dense_networks_stay_as_they_are() -> None:
    assert not is_last(build(convolutional(), "fp64").net[0].weight)
    assert not build(dense()).channels_last.on


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_fused_kernels_go_on_from_a_state_of_the_other_order(last: bool, make: Any) -> None:
    def fresh(last: bool) -> hs.TrainStep:
        net = convolutional()
        settings = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = make(net.parameters(), lr=0.01, fused=True, **settings)
        return hs.TrainStep(
            net, nn.CrossEntropyLoss(), optimizer, precision="O2", ema=0.9, channels_last=last
        )

    one, other = fresh(last), fresh(not last)
    for _ in range(6):
        one(*images())
    other.load_state_dict(one.state_dict())
    a, b = one.fingerprints(), other.fingerprints()
    assert [k for k in a if not torch.equal(a[k], b[k])] == []
    for _ in range(6):
        assert other(*images()).updated


def test_cudnn_measures_inside_the_step_and_the_users_switch_comes_back() -> None:
    seen: list[bool] = []

    def look(m: nn.Module, args: Any) -> None:
        seen.append(torch.backends.cudnn.benchmark)

    for mine in (True, False):
        torch.backends.cudnn.benchmark = mine
        try:
            for options in ({}, {"cudnn_benchmark": False}):
                net = convolutional()
                net.register_forward_pre_hook(look)
                step = build(net, **options)
                step(*images())
                step.evaluator()(*images())
                step.evaluator().predict(images()[0])
                assert torch.backends.cudnn.benchmark is mine
        finally:
            torch.backends.cudnn.benchmark = False
    assert seen == [True, True, True, False, False, False] * 2


REPEATS = """
import torch, halfstep as hs
from torch import nn
seen = []
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3)).cuda()
net.register_forward_pre_hook(lambda m, args: seen.append(torch.backends.cudnn.benchmark))
step = hs.TrainStep(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), deterministic=True)
x, y = torch.randn(2, 3, 8, 8, device="cuda"), torch.tensor([0, 1], device="cuda")
step(x, y), step.evaluator()(x, y)
assert seen == [False, False], seen
assert step.report().choices["cudnn benchmark"] == "no: deterministic=True"
assert step.compiled(True) is False
"""


def test_a_deterministic_step_measures_nothing() -> None:
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [sys.executable, "-c", REPEATS], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def moved(
    make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], precision: str, compile: bool
) -> Tensor:
    """What two steps moved the weights by; the second is compiled where that was asked for."""
    net = make()
    start = copy.deepcopy(net)
    step = build(net, precision, compile=compile)
    for _ in range(2):
        step(*batch)
    parts = [
        (p.double() - q.double()).flatten()
        for p, q in zip(net.parameters(), start.parameters(), strict=True)
    ]
    return torch.cat(parts).detach()


ULP = {
    "fp32": 2.0**-23,
    "tf32": 2.0**-10,
    "O1": 2.0**-10,
    "O2": 2.0**-10,
    "O3": 2.0**-10,
    "bf16": 2.0**-7,
}


@pytest.mark.parametrize("precision", ULP)
def test_compiled_steps_differ_by_rounding(precision: str) -> None:
    # Sums in another order: an ulp of the compute dtype per rounded intermediate, of which the dense network has six
    # on both ways; in fp32 sums of up to 128 terms, √128 ≈ 11 ulp. 32 ulp of the largest change is the limit set.
    plain, compiled = (moved(dense, rows(), precision, on) for on in (False, True))
    assert float((compiled - plain).abs().max() / plain.abs().max()) <= 32 * ULP[precision]


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2"])
def test_compiled_steps_make_one_program_and_no_sync(precision: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    step = build(convolutional(), precision, compile=True)
    x, y = images()
    for _ in range(6):  # overflows, the first committed update, the program, the captured update
        step(x, y)
    with warnings.catch_warnings(action="ignore"):  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            step(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counters["stats"]["unique_graphs"] == 1


def test_a_compiled_forward_can_be_captured() -> None:
    step = build(dense(), "O2", compile=True)
    x, y = rows()
    for _ in range(3):
        step(x, y)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step.compiled.forward_and_loss(step.applied, (x, y), weighted=False)[0].sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, _ = step.compiled.forward_and_loss(step.applied, (x, y), weighted=False)
    graph.replay()
    again, _ = step.compiled.forward_and_loss(step.applied, (x, y), weighted=False)
    assert torch.equal(loss, again)


def test_the_report_names_every_choice() -> None:
    choices = build(convolutional(), "tf32").report().choices
    assert choices["tf32"] == "yes: precision 'tf32'"
    assert choices["cudnn benchmark"].startswith("yes: ")
    assert choices["compiled"].startswith("no: ")
    assert build(dense(), "fp32").report().choices["tf32"].startswith("no: 'fp32'")
