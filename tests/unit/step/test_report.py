"""report(): the dtypes that were really used, module by module, and every automatic choice."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import halfstep as hs

LOW = "float16"
HIGH = "float32"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def build_and_run(
    net: nn.Module, device: torch.device, precision: str | hs.Precision, **options: object
) -> hs.TrainStep:
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision, **options)
    step(torch.randn(5, 4, device=device), torch.randint(3, (5,), device=device))
    return step


MODULES = ["body.0", "body.1", "body.2", "head"]
# By precision: the dtypes of (input, weight, output) of Linear, LayerNorm, ReLU and Linear.
# Under O1 autocast casts inside the modules.
EXPECTED_DTYPES = {
    "fp32": [(HIGH, HIGH, HIGH), (HIGH, HIGH, HIGH), (HIGH, "-", HIGH), (HIGH, HIGH, HIGH)],
    "fp64": [("float64",) * 3, ("float64",) * 3, ("float64", "-", "float64"), ("float64",) * 3],
    "O1": [(HIGH, HIGH, LOW), (LOW, HIGH, LOW), (LOW, "-", LOW), (LOW, HIGH, LOW)],
    "O2": [(LOW, LOW, LOW), (HIGH, HIGH, HIGH), (LOW, "-", LOW), (LOW, LOW, LOW)],
    "O3": [(LOW, LOW, LOW), (LOW, LOW, LOW), (LOW, "-", LOW), (LOW, LOW, LOW)],
    "fp16": [(LOW, LOW, LOW), (LOW, LOW, LOW), (LOW, "-", LOW), (LOW, LOW, LOW)],
    "bf16": [
        ("bfloat16",) * 3,
        ("bfloat16",) * 3,
        ("bfloat16", "-", "bfloat16"),
        ("bfloat16",) * 3,
    ],
}


@pytest.mark.parametrize("name", EXPECTED_DTYPES)
def test_each_module_is_listed_with_the_dtypes_it_really_used(
    name: str, device: torch.device
) -> None:
    modules = build_and_run(Net(), device, name).report().modules
    expected = EXPECTED_DTYPES[name]
    if name == "O1" and device.type == "cuda":
        # CUDA's op list has layer_norm return float32; the CPU's does not.
        expected = [expected[0], (LOW, HIGH, HIGH), (HIGH, "-", HIGH), (HIGH, HIGH, LOW)]
    dtypes = []
    kinds = []
    for module_name in MODULES:
        module = modules[module_name]
        dtypes.append((module.input, module.weight, module.output))
        kinds.append(module.kind)
    assert dtypes == expected
    assert kinds == ["Linear", "LayerNorm", "ReLU", "Linear"]

    network = modules[""]
    assert network.kind == "Net"
    assert network.input == HIGH
    assert network.output == ("float64" if name == "fp64" else HIGH)


def test_a_module_of_keep_is_listed_in_its_own_dtype(device: torch.device) -> None:
    modules = (
        build_and_run(Net(), device, hs.Precision("O2", keep={"head": "fp32"})).report().modules
    )
    assert modules["head"][1:] == (HIGH, HIGH, HIGH)
    assert modules["body.0"][1:] == (LOW, LOW, LOW)
    modules = (
        build_and_run(Net(), device, hs.Precision("O1", keep={"body*": "fp32"})).report().modules
    )
    assert modules["body.0"][1:] == (HIGH, HIGH, HIGH)
    assert modules["head"][1:] == (HIGH, HIGH, LOW)


def test_the_report_agrees_with_a_hook_of_the_users_own(device: torch.device) -> None:
    net = Net()
    output_dtypes = {}

    def record_dtype(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        output_dtypes[module] = str(out.dtype)

    for name in MODULES:
        net.get_submodule(name).register_forward_hook(record_dtype)
    modules = build_and_run(net, device, "O3").report().modules
    for name in MODULES:
        assert f"torch.{modules[name].output}" == output_dtypes[net.get_submodule(name)]


class Attention(nn.Module):
    """A module that owns weights beside children, and a parametrized one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        out: Tensor = self.normed(self.attention(x, x, x)[0].squeeze(1))
        return out


def test_modules_that_own_weights_are_listed_even_when_they_have_children(
    device: torch.device,
) -> None:
    modules = build_and_run(Attention(), device, "O2").report().modules
    assert {"attention", "normed"} <= set(modules)
    assert modules["attention"].weight == LOW
    assert modules["normed"].output == LOW


def test_before_any_step_it_says_so(device: torch.device) -> None:
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    report = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision="O2").report()
    assert report.modules == {}
    assert "run one step" in str(report)
    assert "O2" in str(report)


def test_every_automatic_choice_is_there(device: torch.device) -> None:
    choices = build_and_run(Net(), device, "O2").report().choices
    for word in ("O2", "parameters float32", "compute float16", "norms float32", "output float32"):
        assert word in choices["precision"]
    assert "DynamicScale" in choices["loss scale"]
    assert "65536" in choices["loss scale"]
    assert "SGD" in choices["optimizer"]
    assert re.search(r"fused|capturable|host", choices["optimizer"])
    assert choices["non-finite"] == "skip"
    assert choices["cycle"] == "1 batch per update"
    assert choices["half kernels"]


def test_choices_follow_the_users_options(device: torch.device) -> None:
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    precision = hs.Precision("O2", dtype="bfloat16", scale=128, kernels="torch")
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), optimizer, precision=precision, accumulate=4, nonfinite="raise"
    )
    choices = step.report().choices
    assert "compute bfloat16" in choices["precision"]
    assert "FixedScale(value=128.0" in choices["loss scale"]
    assert choices["half kernels"] == "torch's own"
    assert "AdamW, fused" in choices["optimizer"]
    assert choices["non-finite"] == "raise"
    assert choices["cycle"] == "4 batches per update"


def test_a_conversion_in_place_is_reported(device: torch.device) -> None:
    choices = build_and_run(Net(), device, "fp16").report().choices
    assert choices["converted"].startswith("6 parameters to float16")
    assert "converted" not in build_and_run(Net(), device, "O2").report().choices


def test_notices_are_repeated(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(hs.Notice, match="batch-coupled"):
        step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, accumulate=2)
    assert "batch-coupled" in step.report().choices["notices"]


def test_printed_it_is_a_table_with_aligned_columns(device: torch.device) -> None:
    report = build_and_run(Net(), device, "O2").report()
    lines = str(report).splitlines()
    columns = [line.split() for line in lines]
    head = columns.index(["module", "kind", "input", "weight", "output"])
    rows = lines[head + 1 :]
    assert [row.split()[0] for row in rows] == [*MODULES, "(network)"]
    for word in ("kind", "input", "weight", "output"):
        column = lines[head].index(word)
        assert all(row[column - 1] == " " and row[column] != " " for row in rows)
    assert all("torch." not in line for line in lines)
    assert all(re.match(r"\s*[a-z0-9 -]+: \S", line) for line in lines[: head - 1])


def test_the_report_costs_nothing_after_the_first_step(device: torch.device) -> None:
    """Watching ends with the first step: after it no module has a wrapped forward."""
    step = build_and_run(Net(), device, "fp32")
    is_wrapped: list[bool] = []
    step.net.head.register_forward_pre_hook(
        lambda module, inputs: is_wrapped.append("forward" in vars(module))
    )
    step(torch.randn(5, 4, device=device), torch.randint(3, (5,), device=device))
    assert is_wrapped == [False]
