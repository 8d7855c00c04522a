"""Precisions on CUDA: strict fp32, TF32 only for "tf32", the caller's flags as before."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import halfstep as hs

pytestmark = pytest.mark.gpu


def relative_error_of_linear(precision: str) -> float:
    """The relative error of one Linear's output against float64."""
    torch.manual_seed(0)
    net = nn.Linear(2048, 512, bias=False).cuda()
    x = torch.randn(256, 2048, device="cuda")
    out = hs.EvalStep(net, nn.MSELoss(), precision=precision)(
        x, torch.zeros(256, 512, device="cuda")
    ).outputs
    exact = x.double() @ net.weight.double().T
    return float(((out.double() - exact).norm() / exact.norm()).detach())


def test_fp32_is_strict_and_tf32_is_a_precision_of_its_own() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        # 2048 products in fp32: √2048 · 2⁻²⁴ ≈ 2.7e-6 at worst, measured near 3e-7
        assert relative_error_of_linear("fp32") < 2e-6
        assert relative_error_of_linear("tf32") > 5e-5  # TF32 keeps 10 bits: near 3e-4
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_convolutions_too() -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(64, 64, 3, bias=False).cuda()
    x = torch.randn(8, 64, 32, 32, device="cuda")
    exact = nn.functional.conv2d(x.double(), net.weight.double())

    def relative_error(precision: str) -> float:
        out = hs.EvalStep(net, nn.MSELoss(), precision=precision)(
            x, torch.zeros_like(exact).float()
        ).outputs
        return float(((out.double() - exact).norm() / exact.norm()).detach())

    assert relative_error("fp32") < 2e-6  # 576 products: √576 · 2⁻²⁴ ≈ 1.4e-6
    assert relative_error("tf32") > 5e-5


def test_memory_does_not_grow_with_steps() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).cuda()
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(net.parameters(), fused=True),
        precision="O2",
        ema=0.9,
    )
    x = torch.randn(32, 64, device="cuda")
    y = torch.randint(0, 8, (32,), device="cuda")
    for _ in range(20):
        step(x, y)
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        step(x, y)
    assert torch.cuda.memory_allocated() <= before


REPEAT = """
import torch, halfstep as hs
from torch import nn
def run():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(16 * 36, 10),
    ).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, fused=True)
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), optimizer,
        precision="O2", deterministic=True, fingerprint_every=1,
    )
    x, y = torch.randn(32, 3, 8, 8, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    return [step(x, y).fingerprint.item() for _ in range(30)]
a, b = run(), run()
assert a == b and len(set(a)) == 30, (a, b)
assert not torch.are_deterministic_algorithms_enabled()
"""


def test_deterministic_repeats_bit_for_bit() -> None:
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    process = subprocess.run(
        [sys.executable, "-c", REPEAT], env=env, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def test_deterministic_without_a_workspace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    net = nn.Linear(2, 2).cuda()
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        hs.TrainStep(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1), deterministic=True)
