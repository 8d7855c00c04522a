"""A comparison from settings to table: against a plain loop, against itself, and with everything that can be wrong."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli.compare import compare as command
from halfstep.cli.main import app as whole
from halfstep.compare import Settings, compare, summary, table
from halfstep.compare.progress import Lines
from halfstep.experiment import output_folder as folder
from tests.support.user_module import work_beside

MINE = """
import os
import torch
from torch import nn

def tiny(classes=10, inputs=784):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, classes))

class Loud(nn.Module):  # 1e5 is beyond float16
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(784, 8), nn.Linear(8, 10)
    def forward(self, x):
        return self.last(1e5 * (1e-5 * self.first(x.flatten(1)) + 1) - 1e5)

def odd(size):
    return nn.Linear(size, 10)

def text():
    return "no network"

def pairs():
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return (x[:64], y[:64]), (x[64:], y[64:])

def flat(inputs):
    return nn.Linear(inputs, 3)
"""
SMALL = {
    "net": "mine:tiny",
    "samples": 160,
    "test_samples": 100,
    "epochs": 2,
    "batch": 32,
    "seeds": (0, 1),
}


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_beside(MINE, tmp_path, monkeypatch)


def settings(**changes: Any) -> Settings:
    return Settings(**{**SMALL, "precisions": ("fp32", "O2"), **changes})


def test_a_run_is_what_a_plain_loop_gives() -> None:
    """SGD with momentum and a rate that falls by a line, written out; the batches are the seed's own order."""
    found = compare(settings(precisions=("fp32",), seeds=(1,)), "out")["runs"][0]
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    images, labels = hs.data.sample()
    opt, losses = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9), []
    data = hs.data.Dataset((images, labels)).take(160).shuffle(seed=1).batch(32)
    for epoch in range(2):
        for i, (x, y) in enumerate(data):
            opt.param_groups[0]["lr"] = 0.02 * (1 - (5 * epoch + i) / 10)
            loss = nn.functional.cross_entropy(net(x.float() * (1 / 255)), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert found["curve"]["loss"] == pytest.approx(
        losses, rel=1e-5
    )  # fused and plain updates round apart
    test_images, test_labels = hs.data.sample(train=False)
    right = net(test_images[:100].float() * (1 / 255)).argmax(1) == test_labels[:100]
    assert found["acc"] == pytest.approx(
        right.double().mean().item(), abs=0.011
    )  # one image may tip
    assert found["steps"] == found["updates"] == 10
    assert found["samples"] == 320


def test_every_precision_starts_from_the_same_weights_and_batches() -> None:
    runs = compare(settings(precisions=("fp32", "fp64", "O2")), "out")["runs"]
    first = {(r["precision"], r["seed"]): r["curve"]["loss"] for r in runs}
    for seed in (0, 1):
        assert first["fp64", seed] == pytest.approx(
            first["fp32", seed], rel=1e-4
        )  # float32's rounding, ten steps on
        assert first["O2", seed] == pytest.approx(first["fp32", seed], rel=1e-2)  # float16's
    assert first["fp32", 0] != first["fp32", 1]


def test_the_summary_keeps_the_contract() -> None:
    told = compare(settings(), "out", command="halfstep compare …")
    assert json.loads(Path("out/compare.json").read_text()) == told
    assert {p.name for p in Path("out/runs").iterdir()} == {"fp32-s0", "fp32-s1", "O2-s0", "O2-s1"}
    assert [p.name for p in Path("out/runs/O2-s1").iterdir()] == [
        "result.json"
    ]  # no checkpoints left
    assert (told["halfstep_compare"], told["title"]) == (1, "mine:tiny on sample")
    assert (told["spec"]["samples"], told["spec"]["test_samples"], told["spec"]["schedule"]) == (
        160,
        100,
        "linear",
    )
    run = told["runs"][-1]
    assert run == json.loads(Path("out/runs/O2-s1/result.json").read_text())
    assert (run["precision"], run["seed"], run["status"], run["final_scale"]) == (
        "O2",
        1,
        "done",
        65536,
    )
    assert [epoch["epoch"] for epoch in run["epochs"]] == [1, 2]
    assert run["acc"] == run["epochs"][-1]["valid_acc"]
    assert {d["weight"] for d in run["dtypes"] if d["kind"] == "Linear"} == {"float16"}
    assert run["s_per_epoch"] == pytest.approx(5 * run["ms_per_step"] / 1000)
    assert [row["precision"] for row in told["rows"]] == ["fp32", "O2"]
    row = told["rows"][1]
    assert (row["n"], row["failed"], row["verdict_kind"]) == (
        2,
        0,
        "unknown",
    )  # 100 images prove nothing
    pairs = {(r["precision"], r["seed"]): r["acc"] for r in told["runs"]}
    mean = 50 * sum(pairs["O2", s] - pairs["fp32", s] for s in (0, 1))
    assert row["difference"] == pytest.approx(mean)


def test_finished_runs_are_not_repeated_and_more_may_be_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = compare(settings(), "out")
    again = compare(settings(), "out", progress=Lines())
    assert again["runs"] == before["runs"]
    assert (
        "2 precisions × 2 seeds × 2 epochs, batch 32, on cpu, 4 runs are done already"
        in capsys.readouterr().out
    )
    more = compare(
        settings(seeds=(0, 1, 2), precisions=("fp32", "O2", "O1")), "out", progress=Lines()
    )
    assert [r for r in more["runs"] if r in before["runs"]] == before["runs"]
    assert len(more["runs"]) == 9
    assert capsys.readouterr().out.count("ms/step") == 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 3}, "epochs was 2 and is 3"),
        ({"lr": 0.5, "batch": 16}, "batch was 32 and is 16; lr was 0.02 and is 0.5"),
        ({"samples": 100}, "samples was 160 and is 100"),
        ({"seeds": (0,)}, "seeds had 1 too"),
        ({"precisions": ("O2", "fp32")}, "the reference was 'fp32' and is 'O2'"),
    ],
)
def test_a_folder_of_another_comparison_is_refused(change: dict[str, Any], said: str) -> None:
    Path("out").mkdir()
    spec = {**settings().asked(), "samples": 160, "test_samples": 100}
    around = {"device": "x", "torch": "y", "threads": 1}
    folder.write_json(
        Path("out/compare.json"), {"halfstep_compare": 1, "spec": spec, "environment": around}
    )
    asked = {**settings(**change).asked(), "test_samples": 100}
    folder.check(Path("out"), {**spec, "margin": 2.0}, around)
    with pytest.raises(ValueError, match=f"{said}.*--fresh"):
        folder.check(Path("out"), asked, around)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"threads": 2},
            "holds this comparison, begun otherwise: threads was 1 and is 2. Go on with OMP_NUM_THREADS=1 in",
        ),
        (
            {"torch": "z"},
            "torch was 'y' and is 'z'. Repeat it where it was begun, name another folder",
        ),
    ],
)
def test_other_surroundings_are_refused_with_a_way_back(change: dict[str, Any], said: str) -> None:
    spec, around = settings().asked(), {"device": "x", "torch": "y", "threads": 1}
    folder.write_json(
        Path("out/compare.json"), {"halfstep_compare": 1, "spec": spec, "environment": around}
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        folder.check(Path("out"), spec, {**around, **change})
    with pytest.raises(ValueError, match="holds another comparison: batch was 32 and is 16; "):
        folder.check(Path("out"), {**spec, "batch": 16}, {**around, **change})


def test_more_threads_than_cores_are_not_advised() -> None:
    """OMP_NUM_THREADS=8 gives two on two cores, so that the advice would not work."""
    many = 1 + (os.cpu_count() or 1)
    spec, around = settings().asked(), {"device": "x", "torch": "y", "threads": many}
    folder.write_json(
        Path("out/compare.json"), {"halfstep_compare": 1, "spec": spec, "environment": around}
    )
    with pytest.raises(ValueError, match=r"Repeat it where it was begun, .*--fresh"):
        folder.check(Path("out"), spec, {**around, "threads": 1})


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    Path("photos").mkdir()
    Path("photos/cat.png").touch()
    with pytest.raises(ValueError, match=r"photos holds other things \(cat.png\)"):
        compare(settings(), "photos")
    Path("file").touch()
    with pytest.raises(ValueError, match="file/in cannot: Not a directory"):
        compare(settings(), "file/in")
    with folder.held(Path("out")), pytest.raises(ValueError, match="out: out is in use"):
        compare(settings(), "out")
    Path("out/compare.json").write_text("{")
    with pytest.raises(ValueError, match="expected JSON"):
        compare(settings(), "out")


def test_fresh_removes_a_comparison_and_nothing_else() -> None:
    compare(settings(precisions=("fp32",), seeds=(0,)), "out")
    Path("out/notes.txt").touch()
    folder.clear(Path("out"))
    assert sorted(p.name for p in Path("out").iterdir()) == ["notes.txt"]


def test_a_run_that_fails_is_recorded_and_the_others_go_on() -> None:
    told = compare(settings(net="mine:Loud", precisions=("fp32", "fp16"), seeds=(0,)), "out")
    fine, bad = told["runs"]
    assert (fine["status"], bad["status"], bad["loss"]) == ("done", "failed", None)
    assert bad["error"].startswith("NonFiniteError: step 1: non-finite gradient")
    row = told["rows"][1]
    assert (row["n"], row["failed"], row["verdict_kind"]) == (1, 1, "failed")
    assert row["verdict"].startswith("failed in every run: NonFiniteError")
    assert told["recommendation"]["precision"] == "fp32"
    assert "failed" in table.text(told)
    stamp = Path("out/runs/fp16-s0/result.json").stat().st_mtime_ns
    compare(settings(net="mine:Loud", precisions=("fp32", "fp16"), seeds=(0,)), "out")
    assert Path("out/runs/fp16-s0/result.json").stat().st_mtime_ns == stamp
    compare(settings(net="mine:Loud", precisions=("fp32", "fp16"), seeds=(0,)), "out", retry=True)
    assert Path("out/runs/fp16-s0/result.json").stat().st_mtime_ns > stamp


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"precisions": ("fp32", "fp17")}, ValueError, "received 'fp17', expected one of"),
        ({"precisions": ("fp32", "O0")}, ValueError, "'O0' is 'fp32' under another name"),
        ({"precisions": ("fp32", "fp32")}, ValueError, "'fp32' is there twice"),
        ({"precisions": "fp32"}, TypeError, "expected a list"),
        ({"precisions": ("O2+fp12",)}, ValueError, r"as in O2\+bf16 or fp16\+kahan"),
        ({"precisions": ("tf32",), "device": "cpu"}, ValueError, "needs a CUDA device"),
        ({"seeds": ()}, ValueError, "at least one"),
        ({"seeds": (-1,)}, ValueError, "0 or more"),
        ({"epochs": 0}, ValueError, "epochs: expected a whole number of 1 or more, got 0"),
        ({"lr": -1.0}, ValueError, "lr: expected a number above 0"),
        ({"margin": float("nan")}, ValueError, "margin"),
        (
            {"optimizer": "lion"},
            ValueError,
            "expected one of sgd, momentum, adam, adamw, got 'lion'$",
        ),
        ({"optimizer": "Adam"}, ValueError, "got 'Adam'. Did you mean 'adam'"),
        ({"schedule": "sine"}, ValueError, "expected one of constant, linear"),
        ({"device": "tpu"}, ValueError, "expected auto, cpu or cuda"),
        ({"device": "cuda:99"}, ValueError, "CUDA devices here"),
    ],
)
def test_settings_are_checked_as_one_value(
    change: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        settings(**change)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"net": "resnet19"}, ValueError, "did you mean"),
        ({"net": "mine:huge"}, ValueError, "huge"),
        ({"net": "yours:net"}, ValueError, "yours"),
        ({"net": "mine:odd"}, TypeError, "size"),
        ({"net": "mine:text"}, TypeError, "to return a torch.nn.Module"),
        ({"net": "mine:flat", "data": "mine:text"}, TypeError, "expected 'mine:text' to return"),
        (
            {"net": "resnet18", "data": "mine:pairs"},
            ValueError,
            "resnet18 does not take inputs of 6",
        ),
        ({"data": "nowhere"}, ValueError, "expected sample, mnist.*there is no such folder"),
        ({"data": "fashion_mnist"}, ValueError, "no such folder. Did you mean 'fashion-mnist'"),
        ({"data": "."}, ValueError, "expected train/ and test/ .*holds none of these"),
        ({"data": "sample", "path": "x"}, ValueError, "^path"),
    ],
)
def test_what_does_not_fit_is_told_before_the_first_run(
    change: dict[str, Any], error: type[Exception], said: str
) -> None:
    data = {"samples": None, "test_samples": None} if "data" in change else {}
    with pytest.raises(error, match=re.compile(said, re.DOTALL)):
        compare(settings(**data, **change), "out")
    assert not Path("out/runs").exists()


def test_data_and_network_of_the_users_own() -> None:
    found = compare(
        settings(net="mine:flat", data="mine:pairs", samples=None, test_samples=None), "out"
    )
    assert (found["spec"]["samples"], found["spec"]["test_samples"]) == (64, 32)


def result(name: str, seed: int, acc: float, ms: float, correct: str) -> dict[str, Any]:
    return {
        "precision": name, "seed": seed, "status": "done", "error": None, "acc": acc, "loss": 1.0, "ms_per_step": ms,
        "s_per_epoch": ms / 100, "samples_per_s": 64_000 / ms, "peak_memory": 100 if name == "fp32" else 60,
        "memory_kind": "device", "skipped": 0, "final_scale": None, "correct": correct,
    }  # fmt: skip


def test_the_advice_is_the_fastest_that_is_proved_the_same() -> None:
    """4,000 images: "near" loses 2 of them, "far" 200, "slow" none; only a lead in every seed counts as faster."""
    from halfstep.compare.verdict import pack

    wrong = {"fp32": 0, "near": 2, "far": 200, "slow": 0}
    spec = {
        "precisions": list(wrong),
        "seeds": [0, 1, 2],
        "margin": 0.5,
        "samples": 640,
        "test_samples": 4000,
    }

    def advice(times: dict[str, tuple[float, ...]]) -> dict[str, Any]:
        runs = [
            result(
                name, seed, 1 - count / 4000, times[name][seed], pack(torch.arange(4000) >= count)
            )
            for name, count in wrong.items()
            for seed in (0, 1, 2)
        ]
        found = summary.rows(spec, runs)
        assert [row["verdict_kind"] for row in found] == ["reference", "same", "worse", "same"]
        return summary.recommend(spec, found, runs)

    quick = advice({"fp32": (4, 4, 4), "near": (2, 2, 2), "far": (1, 1, 1), "slow": (5, 5, 5)})
    assert quick["precision"] == "near"
    assert (
        quick["reason"]
        == "same within 0.5 points as fp32, and 2 × as fast (2 ms a step against 4), with 60% of its memory"
    )
    noisy = advice({"fp32": (4, 4, 4), "near": (2, 2, 5), "far": (1, 1, 1), "slow": (5, 5, 5)})
    assert noisy["precision"] == "fp32"
    assert (
        noisy["reason"] == "near, slow are as accurate, but not faster in every seed by 5 % or more"
    )
    slower = advice({"fp32": (4, 4, 4), "near": (7, 7, 7), "far": (1, 1, 1), "slow": (5, 5, 5)})
    assert slower["reason"] == "near, slow are as accurate, but slower (7, 5 ms a step against 4)"


def test_samples_per_second_follow_from_the_step() -> None:
    """Two seeds, 10 batches of 64: the median step is 3 ms, and 64 samples in 3 ms are not the mean of both rates."""
    spec = {
        "precisions": ["fp32"],
        "seeds": [0, 1],
        "margin": 0.5,
        "samples": 640,
        "test_samples": 8,
    }
    [row] = summary.rows(
        spec, [result("fp32", seed, 1.0, ms, "/w==") for seed, ms in enumerate((2.0, 4.0))]
    )
    assert (row["ms_per_step"], row["s_per_epoch"]) == (3.0, 0.03)
    assert row["samples_per_s"] == pytest.approx(64 / 3e-3)


# the command

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(command)
FLAGS = [
    "--net",
    "mine:tiny",
    "--samples",
    "160",
    "--test-samples",
    "100",
    "--epochs",
    "1",
    "--batch",
    "32",
]


def test_the_command_prints_lines_table_and_report() -> None:
    ran = CliRunner().invoke(
        app, [*FLAGS, "--precisions", "fp32,O1", "--seeds", "1", "--plain", "--out", "out"]
    )
    assert ran.exit_code == 0, ran.output
    lines = ran.output.splitlines()
    assert (
        lines[0]
        == "mine:tiny on sample: 160 samples, 100 to test; 2 precisions × 1 seed × 1 epoch, batch 32, on cpu"
    )
    assert re.fullmatch(
        r"loss: \d\.\d{6}  \[   32/  160\]", next(line for line in lines if line.startswith("loss"))
    )
    assert "\x1b" not in ran.output
    start = next(i for i, line in enumerate(lines) if line.startswith("precision"))
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["fp32", "O1"]
    assert "cannot tell from one seed" in lines[start + 2]
    assert Path("out/report.html").is_file()


def test_the_command_speaks_json_alone() -> None:
    flags = [*FLAGS, "--precisions", "fp32", "--seeds", "4,", "--json", "--out", "out"]
    ran = CliRunner().invoke(app, flags)
    assert json.loads(ran.stdout)["runs"][0]["seed"] == 4


def test_seeds_that_are_none_are_refused() -> None:
    ran = CliRunner().invoke(app, ["--seeds", "many"])
    assert "how many (--seeds 5) or which" in str(ran.exception)


def test_help_teaches() -> None:
    ran = CliRunner().invoke(whole, ["compare", "--help"])
    assert "halfstep compare --net resnet18" in ran.output


def test_a_batch_larger_than_the_data_is_said() -> None:
    ran = CliRunner().invoke(
        app, [*FLAGS[:8], "--batch", "200", "--precisions", "fp32", "--seeds", "1", "--out", "out"]
    )
    assert ran.output.startswith(
        "note: batch: 200 is more than the 160 training samples: an epoch is one batch of 160\n"
    )


@pytest.mark.slow
def test_stopped_it_says_what_is_kept_and_how_to_go_on() -> None:
    """Ctrl-C in a second process, --fresh among its flags: the command that goes on is without it, and works."""
    line = [
        "compare",
        *FLAGS[:6],
        "--epochs",
        "100000",
        "--precisions",
        "fp32",
        "--seeds",
        "1",
        "--out",
        "out",
        "--fresh",
    ]
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from halfstep.cli import main; main()"  # a shell's background jobs ignore SIGINT
    process = subprocess.Popen(
        [sys.executable, "-c", code, *line], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(Path("out").glob("runs/*/step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert (
        "stopped; out keeps 0 of 1 runs and a checkpoint of the next. The same command goes on from here, "
        in said
    )
    assert said.endswith(f"less --fresh: {shlex.join(['halfstep', *line[:-1]])}\n")
