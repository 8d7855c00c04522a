"""What makes a step fast on CUDA: compiled code, channels-last, measured cuDNN algorithms."""

import copy
import os
import subprocess
import sys
import warnings
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
        nn.Conv2d(8, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 1),
        nn.Flatten(),
        nn.Linear(16 * 36, 10),
    ).cuda()


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


def is_channels_last(tensor: Tensor) -> bool:
    is_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return is_last and not tensor.is_contiguous()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "O1", "O2", "fp16"])
def test_convolutions_run_channels_last_from_end_to_end(precision: str) -> None:
    net = convolutional()
    step = build(net, precision)
    formats = []

    def record_formats(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        tensors = (inputs[0], module.weight, output)
        formats.extend(is_channels_last(tensor) for tensor in tensors)

    net[0].register_forward_hook(record_formats)
    for _ in range(6):
        assert step(*images()).updated
    assert set(formats) == {True}
    weight = net[0].weight
    assert is_channels_last(weight)
    assert is_channels_last(step.optimizer.state[weight]["momentum_buffer"])
    assert step.report().choices["memory format"].startswith("channels-last: ")


def test_float64_and_dense_networks_stay_as_they_are() -> None:
    assert not is_channels_last(build(convolutional(), "fp64").net[0].weight)
    assert not build(dense()).channels_last.on


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_fused_kernels_go_on_from_a_state_of_the_other_memory_format(
    channels_last: bool, make_optimizer: Any
) -> None:
    def build_in_format(channels_last: bool) -> hs.TrainStep:
        net = convolutional()
        settings = {"momentum": 0.9} if make_optimizer is torch.optim.SGD else {}
        return hs.TrainStep(
            net,
            nn.CrossEntropyLoss(),
            make_optimizer(net.parameters(), lr=0.01, fused=True, **settings),
            precision="O2",
            ema=0.9,
            channels_last=channels_last,
        )

    saved_step = build_in_format(channels_last)
    loaded_step = build_in_format(not channels_last)
    for _ in range(6):
        saved_step(*images())
    loaded_step.load_state_dict(saved_step.state_dict())
    saved = saved_step.fingerprints()
    loaded = loaded_step.fingerprints()
    assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []
    for _ in range(6):
        assert loaded_step(*images()).updated


def test_cudnn_measures_inside_the_step_and_the_users_switch_comes_back() -> None:
    benchmark_flags: list[bool] = []

    def record_flag(module: nn.Module, inputs: Any) -> None:
        benchmark_flags.append(torch.backends.cudnn.benchmark)

    for user_flag in (True, False):
        torch.backends.cudnn.benchmark = user_flag
        try:
            for options in ({}, {"cudnn_benchmark": False}):
                net = convolutional()
                net.register_forward_pre_hook(record_flag)
                step = build(net, **options)
                step(*images())
                step.evaluator()(*images())
                step.evaluator().predict(images()[0])
                assert torch.backends.cudnn.benchmark is user_flag
        finally:
            torch.backends.cudnn.benchmark = False
    assert benchmark_flags == [True, True, True, False, False, False] * 2


DETERMINISTIC_STEP = """
import torch
from torch import nn
import halfstep as hs

flags = []
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3)).cuda()
net.register_forward_pre_hook(lambda *_: flags.append(torch.backends.cudnn.benchmark))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, deterministic=True)
x = torch.randn(2, 3, 8, 8, device="cuda")
y = torch.tensor([0, 1], device="cuda")
step(x, y)
step.evaluator()(x, y)
assert flags == [False, False], flags
assert step.report().choices["cudnn benchmark"] == "no: deterministic=True"
assert step.compiled(True) is False
"""


def test_a_deterministic_step_measures_nothing() -> None:
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    run = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC_STEP],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def weight_changes(precision: str, *, compile: bool) -> Tensor:
    """Returns by how much two steps change the weights; with `compile` the second is compiled."""
    net = dense()
    start = copy.deepcopy(net)
    step = build(net, precision, compile=compile)
    x, y = rows()
    for _ in range(2):
        step(x, y)
    changes = []
    for param, start_param in zip(net.parameters(), start.parameters(), strict=True):
        changes.append((param.double() - start_param.double()).flatten())
    return torch.cat(changes).detach()


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
    # Sums in another order: an ulp of the compute dtype per rounded intermediate, of which the
    # dense network has six on both ways; in fp32 sums of up to 128 terms, √128 ≈ 11 ulp.
    # 32 ulp of the largest change is the limit set.
    plain = weight_changes(precision, compile=False)
    compiled = weight_changes(precision, compile=True)
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
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        loss, *_ = step.compiled.forward_and_loss(step.applied, (x, y), weighted=False)
        loss.sum().backward()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, *_ = step.compiled.forward_and_loss(step.applied, (x, y), weighted=False)
    graph.replay()
    eager_loss, *_ = step.compiled.forward_and_loss(step.applied, (x, y), weighted=False)
    assert torch.equal(loss, eager_loss)


def test_the_report_names_every_choice() -> None:
    choices = build(convolutional(), "tf32").report().choices
    assert choices["tf32"] == "yes: precision 'tf32'"
    assert choices["cudnn benchmark"].startswith("yes: ")
    assert choices["compiled"].startswith("no: ")
    assert build(dense(), "fp32").report().choices["tf32"].startswith("no: 'fp32'")
