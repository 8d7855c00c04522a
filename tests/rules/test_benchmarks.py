"""The comparisons with the peers: each script runs at toy size, and what it counts is what torch counts."""

import io
import json
import math
import os
import shlex
import subprocess
import sys
import tarfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import halfstep as hs

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "mlp": "mlp.py --samples 96 --epochs 2 --rounds 2 --precisions fp32 --ways halfstep",
    "resnet": "resnet.py --batches 2 --side 32 --steps 2 --rounds 1 --net resnet18 --ways 'halfstep O2'",
    "cifar": "cifar.py --epochs 1 --steps 1 --side 32 --net resnet18 --precisions nosuch fp32",
    "floor": "floor.py --small --samples 64 --rounds 1 --works 'mlp fp32'",
}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple["subprocess.Popen[str]", Path]]]:
    """All scripts at once, each in a process: most of their time is imports."""
    folder = tmp_path_factory.mktemp("benchmarks")
    more = {"cifar": ["--archive", str(archive(folder)), "--cache", str(folder / "cache")]}
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = {}
    for name, line in SCRIPTS.items():
        target, (script, *options) = folder / f"{name}.json", shlex.split(line)
        options += [*more.get(name, []), "--device", "cpu", "--json", str(target)]
        command = [sys.executable, ROOT / "benchmarks" / script, *options]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        found[name] = (process, target)
    yield found
    for process, _ in found.values():
        process.kill()
        process.communicate()


def archive(folder: Path) -> Path:
    """A CIFAR-10 of four training images and one test image per class, as JPEGs."""
    from PIL import Image

    path = folder / "tiny.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        for split, count in (("train", 4), ("test", 1)):
            for label, name in enumerate(CLASSES):
                for number in range(count):
                    data = io.BytesIO()
                    Image.new("RGB", (32, 32), (label * 20, number * 40, 0)).save(
                        data, "JPEG", quality=75
                    )
                    info = tarfile.TarInfo(f"{split}/{name}/{number:04}.jpg")
                    info.size = data.tell()
                    tar.addfile(info, io.BytesIO(data.getvalue()))
    return path


def finished(started: Any, name: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What a script printed, what it wrote, and its rows by name."""
    process, path = started[name]
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    result = json.loads(path.read_text())
    assert result["conditions"]["torch"] == torch.__version__
    return out, result, {row["row"]: row for row in result["rows"]}


def test_mlp_times_epochs(started: Any) -> None:
    out, result, rows = finished(started, "mlp")
    assert result["left_out"] == []
    row = rows["fp32 halfstep"]
    assert math.isclose(row["seconds"], sum(row["rounds"]) / 2)  # the median of two
    assert f"{row['seconds']:.3f}" in out.split("faster than Lightning")[1]  # the table


def test_resnet_measures_a_step(started: Any) -> None:
    out, _, rows = finished(started, "resnet")
    row = rows["2 halfstep O2"]
    assert "error" not in row, row
    assert row["ms"] == row["rounds"][0] > 0
    assert f"{row['ms']:.2f} ms" in next(
        line for line in out.splitlines() if line.startswith("2 halfstep O2")
    )


def test_cifar_trains_from_jpegs(started: Any) -> None:
    out, _, rows = finished(started, "cifar")
    assert "received 'nosuch'" in rows["nosuch seed 0"]["error"]
    row = rows["fp32 seed 0"]
    assert [epoch["epoch"] for epoch in row["epochs"]] == [1]
    assert row["accuracy"] * 10 in range(11)  # ten test images, each counted once
    assert f"accuracy {row['accuracy']:.4f}" in out


def test_floor_counts_and_measures(started: Any) -> None:
    out, result, rows = finished(started, "floor")
    products = (
        64 * 2 * (3 * (784 * 512 + 512 * 512 + 512 * 10) - 784 * 512)
    )  # no gradient of the images
    others = rows["mlp fp32"]["gflop"] * 1e9 - products
    assert 0 < others < 0.02 * products
    assert result["ceilings"]["fp32_tflop_s"] > 0
    assert "mlp fp32: " in out


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of benchmarks/ by name, as the scripts import them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def load(name: str) -> ModuleType:
        return __import__(name)

    return load


@pytest.mark.parametrize("peer", ["torch eager", "Accelerate", "Lightning"])
def test_peers_do_the_plain_loops_work(bench: Any, peer: str) -> None:
    if peer != "torch eager":
        pytest.importorskip({"Accelerate": "accelerate", "Lightning": "pytorch_lightning"}[peer])
    peers, nets = bench("peers"), []

    def build() -> nn.Module:
        nets.append(nn.Linear(6, 3))
        return nets[-1]

    x, y = torch.randn(8, 6), torch.arange(8) % 3
    work = peers.Work(
        build=build,
        images=x,
        labels=y,
        batch=4,
        steps=3,
        precision="fp32",
        lr=0.1,
        warm=1,
        shuffled=False,
    )
    times = peers.PEERS[peer](work)(2, 1)
    torch.manual_seed(0)
    plain = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for part in (0, *(0, 4, 0) * 2):  # one step of warm-up, then two passes of three
        optimizer.zero_grad()
        F.cross_entropy(plain(x[part : part + 4]), y[part : part + 4]).backward()
        optimizer.step()
    assert len(times) == 2
    assert all(
        torch.equal(a, b) for a, b in zip(nets[0].parameters(), plain.parameters(), strict=True)
    )


def test_a_pass_of_shuffled_batches_is_every_sample_once(bench: Any) -> None:
    images, labels = torch.arange(10.0)[:, None], torch.arange(10)
    work = bench("peers").Work(
        build=nn.Identity,
        images=images,
        labels=labels,
        batch=4,
        steps=3,
        precision="fp32",
        lr=0.1,
        warm=2,
    )
    batches = list(work.batches())
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(10))
    assert all(torch.equal(x[:, 0].long(), y) for x, y in batches)
    assert [len(fed[0]) for fed in work.samples()] == [4, 4, 2, 2, 2]


def test_counted_products_are_torchs_own_count(bench: Any) -> None:
    ops = bench("roofline").ops_of(hs.nets.resnet50(classes=10), (2, 3, 64, 64), 2, 22)
    products = sum(op.flops for op in ops if op.name.startswith(("Conv2d", "Linear")))
    net = hs.nets.resnet50(classes=10).to("meta")
    with FlopCounterMode(display=False) as counter:
        net(torch.empty(2, 3, 64, 64, device="meta")).sum().backward()
    assert products == counter.get_total_flops()


def test_floor_of_a_kernel_goes_to_its_operation(bench: Any, tmp_path: Path) -> None:
    roofline = bench("roofline")
    shapes = {
        "Input Dims": [[2, 8, 4, 4], [2, 3, 8, 8], [8, 3, 3, 3]],
        "Input type": ["c10::Half"] * 3,
    }
    both = {"External id": 7, "Concrete Inputs": ["", "", "", "[True, True, False]"], **shapes}
    events = [{"cat": "cpu_op", "name": "aten::convolution_backward", "args": both}]
    for name, us in (("reorder", 1.0), ("inputs", 9.0), ("weights", 8.0)):
        events.append({"cat": "kernel", "name": name, "dur": us, "args": {"External id": 7}})
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    kernels = roofline.kernels_of(tmp_path / "trace.json")
    ceiling = roofline.Ceiling(1e18, {"fp16": 1e12, "fp32": 1e9})
    each = (
        2 * (2 * 8 * 4 * 4) * (3 * 3 * 3) / 1e12 * 1e6
    )  # two products of this many µs; the third kernel has no floor
    found = roofline.floors_of(kernels, ceiling, "fp32")
    assert found == {
        "inputs": pytest.approx(each, rel=1e-15),
        "weights": pytest.approx(each, rel=1e-15),
    }


@pytest.mark.parametrize(
    ("code", "said"),
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
    bench: Any, tmp_path: Path, code: str, said: str | None
) -> None:
    (tmp_path / "child.py").write_text(code)
    child = bench("rows").Child.start([str(tmp_path / "child.py")], "a")
    child.ready(30.0)
    figures = child.measure(30.0 if said is None else 1.0)
    assert said in figures["error"] if said else figures == {"row": "a", "ms": 2}


def test_a_row_that_fails_is_not_the_end(bench: Any, tmp_path: Path) -> None:
    said = "sys.argv[2] == 'bad' and sys.exit('gone'); print('@ready', flush=True); input(); print(row)"
    (tmp_path / "child.py").write_text(
        f'import sys; row = \'@row {{"row": "good", "ms": 3}}\'; {said}'
    )
    rows, path = bench("rows"), tmp_path / "t.json"
    args = Namespace(device="cpu", json=str(path), again=False, seconds=60.0, row_seconds=30.0)
    table = rows.Table.open(args)
    rows.drive([str(tmp_path / "child.py")], ["bad", "good"], table, args, str)
    bad, good = json.loads(path.read_text())["rows"]
    assert bad["error"].endswith("exit 1: gone")
    assert (good["row"], table.value("good", "ms")) == ("good", 3.0)


def test_a_spent_budget_names_what_it_left_and_kept_rows_stay(
    bench: Any, tmp_path: Path, capsys: Any
) -> None:
    rows, path = bench("rows"), tmp_path / "t.json"
    args = Namespace(device="cpu", json=str(path), again=False, seconds=0.0, row_seconds=1.0)
    first = rows.Table.open(args)
    first.add({"row": "a", "seconds": 2.0})
    first.add({"row": "b", "error": "gone"})
    table = rows.Table.open(args)
    rows.drive(["nothing.py"], ["a", "b", "c"], table, args, str)
    saved = json.loads(path.read_text())
    assert (saved["left_out"], [row["row"] for row in saved["rows"]]) == (
        ["b", "c"],
        ["a"],
    )  # a failed row is tried again
    assert "b, c" in capsys.readouterr().out
    assert (table.value("a"), table.value("b")) == (2.0, None)


@pytest.mark.parametrize(
    ("value", "least", "word"),
    [
        (None, False, "no figure"), (0.9, False, "pass, aim reached"), (1.5, False, "pass"), (2.1, False, "FAIL"),
        (2.1, True, "pass"), (3.1, True, "pass, aim reached"), (1.9, True, "FAIL"),
    ],
)  # fmt: skip
def test_verdicts(bench: Any, value: float | None, least: bool, word: str) -> None:
    assert bench("rows").verdict(value, 2.0, 3.0 if least else 1.0, least=least) == word
