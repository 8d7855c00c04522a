"""The comparisons with the peers.

Each script runs at toy size, and what it counts is what torch counts.
"""

import io
import json
import math
import os
import shlex
import subprocess
import sys
import tarfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import halfstep as hs

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "mlp": "mlp.py --samples 96 --epochs 2 --rounds 2 --precisions fp32 --ways halfstep",
    "resnet": (
        "resnet.py --batches 2 --side 32 --steps 2 --rounds 1 --net resnet18 --ways 'halfstep O2'"
    ),
    "cifar": "cifar.py --epochs 1 --steps 1 --side 32 --net resnet18 --precisions nosuch fp32",
    "floor": "floor.py --small --samples 64 --rounds 1 --works 'mlp fp32'",
}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


ScriptProcess = tuple["subprocess.Popen[str]", Path]  # the process, and the JSON it writes


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ScriptProcess]]:
    """All scripts at once, each in a process: most of their time is imports."""
    folder = tmp_path_factory.mktemp("benchmarks")
    archive = write_small_cifar(folder)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = {}
    for name, line in SCRIPTS.items():
        script, *options = shlex.split(line)
        json_path = folder / f"{name}.json"
        options += ["--device", "cpu", "--json", str(json_path)]
        if name == "cifar":
            options += ["--archive", str(archive), "--cache", str(folder / "cache")]
        process = subprocess.Popen(
            [sys.executable, ROOT / "benchmarks" / script, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        processes[name] = (process, json_path)
    yield processes
    for process, _ in processes.values():
        process.kill()
        process.communicate()


def write_small_cifar(folder: Path) -> Path:
    """A CIFAR-10 of four training images and one test image per class, as JPEGs."""
    from PIL import Image

    path = folder / "tiny.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        for split, count in (("train", 4), ("test", 1)):
            for label, name in enumerate(CLASSES):
                for number in range(count):
                    file = io.BytesIO()
                    image = Image.new("RGB", (32, 32), (label * 20, number * 40, 0))
                    image.save(file, "JPEG", quality=75)
                    info = tarfile.TarInfo(f"{split}/{name}/{number:04}.jpg")
                    info.size = file.tell()
                    tar.addfile(info, io.BytesIO(file.getvalue()))
    return path


class ScriptResult(NamedTuple):
    output: str
    result: dict[str, Any]  # what it wrote
    rows: dict[str, Any]  # its rows by name


def finish_script(scripts: dict[str, ScriptProcess], name: str) -> ScriptResult:
    """Waits for a script and reads what it wrote."""
    process, json_path = scripts[name]
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    result = json.loads(json_path.read_text())
    assert result["conditions"]["torch"] == torch.__version__
    return ScriptResult(output, result, {row["row"]: row for row in result["rows"]})


def test_mlp_times_epochs(scripts: dict[str, ScriptProcess]) -> None:
    output, result, rows = finish_script(scripts, "mlp")
    assert result["left_out"] == []
    row = rows["fp32 halfstep"]
    assert math.isclose(row["seconds"], sum(row["rounds"]) / 2)  # the median of two
    _, table = output.split("faster than Lightning")
    assert f"{row['seconds']:.3f}" in table


def test_resnet_measures_a_step(scripts: dict[str, ScriptProcess]) -> None:
    output, _, rows = finish_script(scripts, "resnet")
    row = rows["2 halfstep O2"]
    assert "error" not in row, row
    assert row["ms"] == row["rounds"][0] > 0
    line = next(line for line in output.splitlines() if line.startswith("2 halfstep O2"))
    assert f"{row['ms']:.2f} ms" in line


def test_cifar_trains_from_jpegs(scripts: dict[str, ScriptProcess]) -> None:
    output, _, rows = finish_script(scripts, "cifar")
    assert "received 'nosuch'" in rows["nosuch seed 0"]["error"]
    row = rows["fp32 seed 0"]
    assert [epoch["epoch"] for epoch in row["epochs"]] == [1]
    assert row["accuracy"] * 10 in range(11)  # ten test images, each counted once
    assert f"accuracy {row['accuracy']:.4f}" in output


def test_floor_counts_and_measures(scripts: dict[str, ScriptProcess]) -> None:
    output, result, rows = finish_script(scripts, "floor")
    # Three products for each layer but the first, which needs no gradient of the images.
    weights = 3 * (784 * 512 + 512 * 512 + 512 * 10) - 784 * 512
    product_flops = 64 * 2 * weights
    other_flops = rows["mlp fp32"]["gflop"] * 1e9 - product_flops
    assert 0 < other_flops < 0.02 * product_flops
    assert result["ceilings"]["fp32_tflop_s"] > 0
    assert "mlp fp32: " in output


@pytest.fixture
def import_benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of benchmarks/ by name, as the scripts do."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__


@pytest.mark.parametrize("peer", ["torch eager", "Accelerate", "Lightning"])
def test_peers_do_the_plain_loops_work(import_benchmark: Callable[[str], Any], peer: str) -> None:
    packages = {"Accelerate": "accelerate", "Lightning": "pytorch_lightning"}
    if peer in packages:
        pytest.importorskip(packages[peer])
    peers = import_benchmark("peers")
    nets = []

    def build() -> nn.Module:
        nets.append(nn.Linear(6, 3))
        return nets[-1]

    x = torch.randn(8, 6)
    y = torch.arange(8) % 3
    job = peers.TrainingJob(
        build=build,
        images=x,
        labels=y,
        batch_size=4,
        steps=3,
        precision="fp32",
        lr=0.1,
        warmup_steps=1,
        shuffled=False,
    )
    times_s = peers.PEERS[peer](job)(2, 1)
    assert len(times_s) == 2

    # The same in plain torch: one step of warm-up, then two passes of three.
    torch.manual_seed(0)
    plain_net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(plain_net.parameters(), lr=0.1)
    for start in (0, 0, 4, 0, 0, 4, 0):
        optimizer.zero_grad()
        F.cross_entropy(plain_net(x[start : start + 4]), y[start : start + 4]).backward()
        optimizer.step()
    for p, plain_p in zip(nets[0].parameters(), plain_net.parameters(), strict=True):
        assert torch.equal(p, plain_p)


def test_a_pass_of_shuffled_batches_is_every_sample_once(
    import_benchmark: Callable[[str], Any],
) -> None:
    job = import_benchmark("peers").TrainingJob(
        build=nn.Identity,
        images=torch.arange(10.0)[:, None],
        labels=torch.arange(10),
        batch_size=4,
        steps=3,
        precision="fp32",
        lr=0.1,
        warmup_steps=2,
    )
    batches = list(job.batches())
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(10))
    assert all(torch.equal(x[:, 0].long(), y) for x, y in batches)
    assert [len(step_input[0]) for step_input in job.warmup_inputs()] == [4, 4, 2, 2, 2]


def test_counted_products_are_torchs_own_count(
    import_benchmark: Callable[[str], Any],
) -> None:
    shape = (2, 3, 64, 64)
    ops = import_benchmark("roofline").count_ops(hs.nets.resnet50(classes=10), shape, 2, 22)
    flops = sum(op.flops for op in ops if op.name.startswith(("Conv2d", "Linear")))
    net = hs.nets.resnet50(classes=10).to("meta")
    with FlopCounterMode(display=False) as counter:
        net(torch.empty(shape, device="meta")).sum().backward()
    assert flops == counter.get_total_flops()


def test_the_floor_of_a_kernel_goes_to_its_operation(
    import_benchmark: Callable[[str], Any], tmp_path: Path
) -> None:
    roofline = import_benchmark("roofline")
    op_args = {
        "External id": 7,
        "Concrete Inputs": ["", "", "", "[True, True, False]"],
        "Input Dims": [[2, 8, 4, 4], [2, 3, 8, 8], [8, 3, 3, 3]],
        "Input type": ["c10::Half"] * 3,
    }
    events = [{"cat": "cpu_op", "name": "aten::convolution_backward", "args": op_args}]
    for name, us in (("reorder", 1.0), ("inputs", 9.0), ("weights", 8.0)):
        events.append({"cat": "kernel", "name": name, "dur": us, "args": {"External id": 7}})
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))

    # Two products of this many µs; the third kernel has no floor.
    ceiling = roofline.Ceiling(1e18, {"fp16": 1e12, "fp32": 1e9})
    product_us = 2 * (2 * 8 * 4 * 4) * (3 * 3 * 3) / 1e12 * 1e6
    floors = roofline.kernel_floors(roofline.read_kernels(trace), ceiling, "fp32")
    assert floors == {
        "inputs": pytest.approx(product_us, rel=1e-15),
        "weights": pytest.approx(product_us, rel=1e-15),
    }


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('out of luck')", "exit 1: out of luck"),
        ("import time; print('@ready', flush=True); time.sleep(60)", "no figures in 1 s, exit -9"),
        (
            "import ctypes; print('@ready', flush=True); input(); ctypes.string_at(0)",
            "Segmentation fault; File",
        ),
        ('print(\'@ready\', flush=True); input(); print(\'@row {"row": "a", "ms": 2}\')', None),
    ],
)
def test_a_child_that_fails_is_a_row(
    import_benchmark: Callable[[str], Any], tmp_path: Path, code: str, message: str | None
) -> None:
    script = tmp_path / "child.py"
    script.write_text(code)
    child = import_benchmark("rows").RowProcess.start([str(script)], "a")
    child.wait_until_ready(30.0)
    if message is None:
        assert child.measure(30.0) == {"row": "a", "ms": 2}
    else:
        assert message in child.measure(1.0)["error"]


CHILD_SCRIPT = """
import sys
if sys.argv[2] == "bad":
    sys.exit("gone")
print("@ready", flush=True)
input()
print('@row {"row": "good", "ms": 3}')
"""


def test_a_row_that_fails_is_not_the_end(
    import_benchmark: Callable[[str], Any], tmp_path: Path
) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD_SCRIPT)
    rows = import_benchmark("rows")
    path = tmp_path / "t.json"
    args = Namespace(device="cpu", json=str(path), again=False, seconds=60.0, row_seconds=30.0)
    table = rows.ResultTable.open(args)
    rows.measure_missing_rows([str(script)], ["bad", "good"], table, args, str)
    bad, good = json.loads(path.read_text())["rows"]
    assert bad["error"].endswith("exit 1: gone")
    assert good["row"] == "good"
    assert table.value("good", "ms") == 3.0


def test_a_spent_budget_names_what_it_left_out_and_measured_rows_stay(
    import_benchmark: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = import_benchmark("rows")
    path = tmp_path / "t.json"
    args = Namespace(device="cpu", json=str(path), again=False, seconds=0.0, row_seconds=1.0)
    first_table = rows.ResultTable.open(args)
    first_table.add({"row": "a", "seconds": 2.0})
    first_table.add({"row": "b", "error": "gone"})

    # A failed row is tried again.
    table = rows.ResultTable.open(args)
    rows.measure_missing_rows(["nothing.py"], ["a", "b", "c"], table, args, str)
    result = json.loads(path.read_text())
    assert result["left_out"] == ["b", "c"]
    assert [row["row"] for row in result["rows"]] == ["a"]
    assert "b, c" in capsys.readouterr().out
    assert table.value("a") == 2.0
    assert table.value("b") is None


@pytest.mark.parametrize(
    ("value", "larger_is_better", "word"),
    [
        (None, False, "no figure"),
        (0.9, False, "pass, aim reached"),
        (1.5, False, "pass"),
        (2.1, False, "FAIL"),
        (2.1, True, "pass"),
        (3.1, True, "pass, aim reached"),
        (1.9, True, "FAIL"),
    ],
)
def test_verdicts(
    import_benchmark: Callable[[str], Any],
    value: float | None,
    larger_is_better: bool,
    word: str,
) -> None:
    rows = import_benchmark("rows")
    aim = 3.0 if larger_is_better else 1.0
    limit = rows.Limit("a figure", value, 2.0, aim, larger_is_better)
    assert rows.verdict(limit) == word
