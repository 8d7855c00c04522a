"""A comparison from settings to table: against a plain loop, against itself, and mistakes."""

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
from halfstep.cli.main import app as complete_app
from halfstep.compare import Settings, compare, summary, table
from halfstep.compare.progress import LineProgress
from halfstep.compare.verdict import pack_bits
from halfstep.experiment import output_folder
from halfstep.experiment.output_folder import check_same_comparison
from halfstep.precision.advice import HalfUnits
from halfstep.report import write as write_report
from halfstep.report.report_data import parse_summary
from halfstep.utils.files import write_json
from tests.support.report_fixtures import comparison
from tests.support.user_module import write_user_module

CPU = HalfUnits("CPU", ())
USER_MODULE = """
import os
import torch
from torch import nn

def tiny(classes=10, inputs=784):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, classes))

def dead():  # no input reaches the outputs: always the same class
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    nn.init.constant_(net[1].bias, -1e3)
    return net

class Loud(nn.Module):  # 1e5 is beyond float16
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(784, 8)
        self.last = nn.Linear(8, 10)
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
ENVIRONMENT = {"device": "x", "torch": "y", "threads": 1}


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_user_module(USER_MODULE, tmp_path, monkeypatch)


def settings(**changes: Any) -> Settings:
    return Settings(**{**SMALL, "precisions": ("fp32", "O2"), **changes})


def write_summary(spec: dict[str, Any], environment: dict[str, Any]) -> None:
    """A folder "out" of a comparison with these settings."""
    content = {"halfstep_compare": 1, "spec": spec, "environment": environment}
    write_json(Path("out/compare.json"), content)


def test_a_run_is_what_a_plain_loop_gives() -> None:
    """SGD with momentum and a linear schedule, written out; batches in the order of the seed."""
    run = compare(settings(precisions=("fp32",), seeds=(1,)), "out")["runs"][0]

    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    images, labels = hs.data.sample()
    data = hs.data.Dataset((images, labels)).take(160).shuffle(seed=1).batch(32)
    losses = []
    for epoch in range(2):
        for i, (x, y) in enumerate(data):
            optimizer.param_groups[0]["lr"] = 0.02 * (1 - (5 * epoch + i) / 10)
            loss = nn.functional.cross_entropy(net(x.float() * (1 / 255)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    # Fused and plain updates round differently.
    assert run["curve"]["loss"] == pytest.approx(losses, rel=1e-5)
    test_images, test_labels = hs.data.sample(train=False)
    is_correct = net(test_images[:100].float() * (1 / 255)).argmax(1) == test_labels[:100]
    # Rounding may change the class of one image.
    assert run["acc"] == pytest.approx(is_correct.double().mean().item(), abs=0.011)
    assert run["steps"] == run["updates"] == 10
    assert run["samples"] == 320


def test_every_precision_starts_from_the_same_weights_and_batches() -> None:
    runs = compare(settings(precisions=("fp32", "fp64", "O2")), "out")["runs"]
    losses = {(run["precision"], run["seed"]): run["curve"]["loss"] for run in runs}
    for seed in (0, 1):
        # float32's rounding, ten steps on, and float16's
        assert losses["fp64", seed] == pytest.approx(losses["fp32", seed], rel=1e-4)
        assert losses["O2", seed] == pytest.approx(losses["fp32", seed], rel=1e-2)
    assert losses["fp32", 0] != losses["fp32", 1]


def test_the_summary_keeps_the_contract() -> None:
    content = compare(settings(), "out", command="halfstep compare …")

    # Files: the summary, and a result without checkpoints for each run.
    assert json.loads(Path("out/compare.json").read_text()) == content
    folders = {path.name for path in Path("out/runs").iterdir()}
    assert folders == {"fp32-s0", "fp32-s1", "O2-s0", "O2-s1"}
    assert [path.name for path in Path("out/runs/O2-s1").iterdir()] == ["result.json"]

    # The head.
    assert content["halfstep_compare"] == 1
    assert content["title"] == "mine:tiny on sample"
    assert content["spec"]["samples"] == 160
    assert content["spec"]["test_samples"] == 100
    assert content["spec"]["schedule"] == "linear"

    # A run.
    run = content["runs"][-1]
    assert run == json.loads(Path("out/runs/O2-s1/result.json").read_text())
    assert (run["precision"], run["seed"]) == ("O2", 1)
    assert (run["status"], run["final_scale"]) == ("done", 65536)
    assert [epoch["epoch"] for epoch in run["epochs"]] == [1, 2]
    assert run["acc"] == run["epochs"][-1]["valid_acc"]
    weight_dtypes = {entry["weight"] for entry in run["dtypes"] if entry["kind"] == "Linear"}
    assert weight_dtypes == {"float16"}
    assert run["s_per_epoch"] == pytest.approx(5 * run["ms_per_step"] / 1000)

    # A row: 100 images prove nothing.
    assert [row["precision"] for row in content["rows"]] == ["fp32", "O2"]
    row = content["rows"][1]
    assert (row["n"], row["failed"], row["verdict_kind"]) == (2, 0, "unknown")
    accuracies = {(run["precision"], run["seed"]): run["acc"] for run in content["runs"]}
    differences = [accuracies["O2", seed] - accuracies["fp32", seed] for seed in (0, 1)]
    assert row["difference"] == pytest.approx(50 * sum(differences))


def test_finished_runs_are_not_repeated_and_more_may_be_added(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = compare(settings(), "out")
    again = compare(settings(), "out", progress=LineProgress())
    assert again["runs"] == first["runs"]
    assert (
        "2 precisions × 2 seeds × 2 epochs, batch 32, on cpu, 4 runs are done already"
        in capsys.readouterr().out
    )
    larger = settings(seeds=(0, 1, 2), precisions=("fp32", "O2", "O1"))
    more = compare(larger, "out", progress=LineProgress())
    assert [run for run in more["runs"] if run in first["runs"]] == first["runs"]
    assert len(more["runs"]) == 9
    assert capsys.readouterr().out.count("ms/step") == 5


def test_a_precision_alone_is_added_and_only_it_is_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = compare(settings(), "out")
    lines = LineProgress()
    more = compare(settings(precisions=("O2+bf16",)), "out", progress=lines)
    output = capsys.readouterr().out
    assert output.count("ms/step") == 2
    assert "4 finished runs of before stay in the table" in output
    assert "the reference is fp32" in output
    assert more["spec"]["precisions"] == ["fp32", "O2", "O2+bf16"]
    assert [run for run in more["runs"] if run["precision"] != "O2+bf16"] == first["runs"]
    assert [row["n"] for row in more["rows"]] == [2, 2, 2]
    assert more["rows"][2]["difference"] is not None
    assert more["planned_runs"] == 6
    assert parse_summary(more).planned_runs == 6


def test_fewer_seeds_and_another_reference_keep_what_is_finished() -> None:
    first = compare(settings(), "out")
    # O1 with one seed; fp32 and O2 stay with their two.
    fewer = compare(settings(precisions=("O2", "O1"), seeds=(1,)), "out")
    assert fewer["spec"]["precisions"] == ["fp32", "O2", "O1"]
    assert fewer["spec"]["seeds"] == [1, 0]
    rows = {row["precision"]: row for row in fewer["rows"]}
    assert {name: row["n"] for name, row in rows.items()} == {"fp32": 2, "O2": 2, "O1": 1}
    assert rows["O1"]["verdict"].startswith("cannot tell from one seed")
    assert fewer["recommendation"]["precision"] is not None  # all that was asked for is done

    other = compare(settings(precisions=("O2", "fp32")), "out")
    assert [row["precision"] for row in other["rows"]] == ["O2", "fp32", "O1"]
    assert other["rows"][0]["verdict_kind"] == "reference"
    kept = [run for run in other["runs"] if run["precision"] != "O1"]
    assert sorted(map(str, kept)) == sorted(map(str, first["runs"]))


def test_unfinished_runs_of_before_do_not_come_back_unasked() -> None:
    """Only what is finished stays: a comparison of ten seeds that was stopped is not resumed."""
    compare(settings(precisions=("fp32",), seeds=(0,)), "out")
    summary_file = Path("out/compare.json")
    content = json.loads(summary_file.read_text())
    content["spec"] |= {"seeds": [0, 1, 2], "precisions": ["fp32", "O1"]}
    write_json(summary_file, content)
    after = compare(settings(precisions=("fp32", "O2"), seeds=(0,)), "out")
    assert after["spec"]["precisions"] == ["fp32", "O2"]
    assert after["spec"]["seeds"] == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 3}, "epochs was 2 and is 3"),
        ({"lr": 0.5, "batch": 16}, "batch was 32 and is 16; lr was 0.02 and is 0.5"),
        ({"samples": 100}, "samples was 160 and is 100"),
        ({"seeds": (0,), "net": "mine:odd"}, "net was 'mine:tiny' and is 'mine:odd'"),
    ],
)
def test_a_folder_of_another_comparison_is_refused(change: dict[str, Any], message: str) -> None:
    spec = {**settings().to_spec(), "samples": 160, "test_samples": 100}
    write_summary(spec, ENVIRONMENT)
    check_same_comparison(Path("out"), {**spec, "margin": 2.0}, ENVIRONMENT)
    other_spec = {**settings(**change).to_spec(), "test_samples": 100}
    with pytest.raises(ValueError, match=f"{message}.*--fresh"):
        check_same_comparison(Path("out"), other_spec, ENVIRONMENT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"threads": 2},
            "holds this comparison, begun otherwise: threads was 1 and is 2. "
            "Go on with OMP_NUM_THREADS=1 in",
        ),
        (
            {"torch": "z"},
            "torch was 'y' and is 'z'. Repeat it where it was begun, name another folder",
        ),
    ],
)
def test_another_environment_is_refused_with_advice(change: dict[str, Any], message: str) -> None:
    spec = settings().to_spec()
    write_summary(spec, ENVIRONMENT)
    environment = {**ENVIRONMENT, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        check_same_comparison(Path("out"), spec, environment)
    with pytest.raises(ValueError, match="holds another comparison: batch was 32 and is 16; "):
        check_same_comparison(Path("out"), {**spec, "batch": 16}, environment)


def test_more_threads_than_cores_are_not_advised() -> None:
    """OMP_NUM_THREADS=8 gives two on two cores, so that the advice would not work."""
    more_than_cores = 1 + (os.cpu_count() or 1)
    spec = settings().to_spec()
    environment = {**ENVIRONMENT, "threads": more_than_cores}
    write_summary(spec, environment)
    with pytest.raises(ValueError, match=r"Repeat it where it was begun, .*--fresh"):
        check_same_comparison(Path("out"), spec, {**environment, "threads": 1})


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    Path("photos").mkdir()
    Path("photos/cat.png").touch()
    with pytest.raises(ValueError, match=r"photos holds other things \(cat.png\)"):
        compare(settings(), "photos")
    Path("file").touch()
    with pytest.raises(ValueError, match="file/in cannot: Not a directory"):
        compare(settings(), "file/in")
    in_use = pytest.raises(ValueError, match="out: out is in use")
    with output_folder.lock_output_folder(Path("out")), in_use:
        compare(settings(), "out")
    Path("out/compare.json").write_text("{")
    with pytest.raises(ValueError, match="expected JSON"):
        compare(settings(), "out")


def test_fresh_removes_a_comparison_and_nothing_else() -> None:
    compare(settings(precisions=("fp32",), seeds=(0,)), "out")
    Path("out/notes.txt").touch()
    output_folder.remove_comparison(Path("out"))
    assert sorted(path.name for path in Path("out").iterdir()) == ["notes.txt"]


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 160])
def test_no_word_of_the_table_is_cut(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    names = ("fp32", "O2", "O2+bf16+kahan")
    table.print_table(comparison(names))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in "".join(lines)
    words = {word for line in lines for word in line.split()}
    assert words >= {*names, *(word for name in table.COLUMNS for word in name.split())}


def test_a_run_that_fails_is_recorded_and_the_others_go_on() -> None:
    overflowing = settings(net="mine:Loud", precisions=("fp32", "fp16"), seeds=(0,), samples=2000)
    content = compare(overflowing, "out")
    finished, failed = content["runs"]
    assert finished["status"] == "done"
    assert (failed["status"], failed["loss"]) == ("failed", None)
    assert failed["error"].startswith("NonFiniteError: step 1: non-finite gradient")
    row = content["rows"][1]
    assert (row["n"], row["failed"], row["verdict_kind"]) == (1, 1, "failed")
    assert row["verdict"].startswith("failed in every run: NonFiniteError")
    assert content["recommendation"]["precision"] == "fp32"
    assert "failed" in table.text(content)

    # The failed run is repeated with `retry` only.
    failed_result = Path("out/runs/fp16-s0/result.json")
    written_at = failed_result.stat().st_mtime_ns
    compare(overflowing, "out")
    assert failed_result.stat().st_mtime_ns == written_at
    compare(overflowing, "out", retry=True)
    assert failed_result.stat().st_mtime_ns > written_at


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"precisions": ("fp32", "fp17")}, ValueError, "received 'fp17', expected one of"),
        ({"precisions": ("fp32", "O0")}, ValueError, "'O0' is 'fp32' under another name"),
        ({"precisions": ("fp32", "fp32")}, ValueError, "'fp32' is there twice"),
        ({"precisions": "fp32"}, TypeError, "expected a list"),
        ({"precisions": ("O2+fp12",)}, ValueError, r"as in O2\+bf16 or fp16\+kahan"),
        ({"precisions": ("tf32",), "device": "cpu"}, ValueError, "needs a CUDA device"),
        ({"seeds": ()}, ValueError, "at least one"),
        ({"seeds": (-1,)}, ValueError, "0 or more"),
        ({"epochs": 0}, ValueError, "epochs: expected a whole number, 1 or more, received 0"),
        ({"lr": -1.0}, ValueError, "lr: expected a finite number above 0"),
        ({"margin": float("nan")}, ValueError, "margin"),
        (
            {"optimizer": "lion"},
            ValueError,
            "expected one of 'sgd', 'momentum', 'adam', 'adamw', received 'lion'$",
        ),
        ({"optimizer": "Adam"}, ValueError, "received 'Adam'; did you mean 'adam'"),
        ({"schedule": "sine"}, ValueError, "expected one of 'constant', 'linear'"),
        ({"device": "tpu"}, ValueError, "expected auto, cpu or cuda"),
        ({"device": "cuda:99"}, ValueError, "CUDA devices here"),
    ],
)
def test_settings_are_checked_as_one_value(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        settings(**change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
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
        ({"data": "."}, ValueError, "expected one folder of images .*holds none of these"),
        ({"data": "sample", "path": "x"}, ValueError, "^path"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_run(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    if "data" in change:
        change = {"samples": None, "test_samples": None, **change}
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        compare(settings(**change), "out")
    assert not Path("out/runs").exists()


def test_data_and_network_of_the_users_own() -> None:
    own = settings(net="mine:flat", data="mine:pairs", samples=None, test_samples=None)
    spec = compare(own, "out")["spec"]
    assert (spec["samples"], spec["test_samples"]) == (64, 32)


def result_of(
    precision: str, seed: int, acc: float, ms_per_step: float, correct: str
) -> dict[str, Any]:
    """A finished run on a GPU."""
    return {
        "precision": precision,
        "seed": seed,
        "status": "done",
        "error": None,
        "acc": acc,
        "loss": 1.0,
        "ms_per_step": ms_per_step,
        "s_per_epoch": ms_per_step / 100,
        "samples_per_s": 64_000 / ms_per_step,
        "peak_memory": 100 if precision == "fp32" else 60,
        "memory_kind": "device",
        "skipped": 0,
        "final_scale": None,
        "correct": correct,
    }


def test_the_advice_is_the_fastest_that_is_proved_the_same() -> None:
    """4,000 images: "O1" loses 2 of them, "fp16" 200, "O2" none.

    Only a lead in every seed counts as faster.
    """
    wrong_images = {"fp32": 0, "O1": 2, "fp16": 200, "O2": 0}
    spec = {
        "precisions": list(wrong_images),
        "seeds": [0, 1, 2],
        "margin": 0.5,
        "samples": 640,
        "test_samples": 4000,
    }

    def recommendation(times: dict[str, tuple[float, ...]]) -> dict[str, Any]:
        """`times` are ms/step of each seed."""
        runs = []
        for precision, wrong in wrong_images.items():
            acc = 1 - wrong / 4000
            correct = pack_bits(torch.arange(4000) >= wrong)
            for seed in (0, 1, 2):
                runs.append(result_of(precision, seed, acc, times[precision][seed], correct))
        rows = summary.build_rows(spec, runs)
        assert [row["verdict_kind"] for row in rows] == ["reference", "same", "worse", "same"]
        return summary.recommend(spec, rows, runs, CPU)

    times = {"fp32": (4, 4, 4), "O1": (2, 2, 2), "fp16": (1, 1, 1), "O2": (5, 5, 5)}
    faster = recommendation(times)
    assert faster["precision"] == "O1"
    assert faster["reason"] == (
        "same within 0.5 points as fp32, and 2 × as fast (2 ms a step against 4), "
        "with 60% of its memory"
    )
    disturbed = recommendation({**times, "O1": (2, 2, 5)})
    assert disturbed["precision"] == "fp32"
    assert disturbed["reason"] == (
        "O1, O2 are as accurate, but not faster in every seed by 5 % or more: "
        "this CPU has no half-precision units"
    )
    slower = recommendation({**times, "O1": (7, 7, 7)})
    assert slower["reason"] == (
        "O1, O2 are as accurate, but slower (7, 5 ms a step against 4): "
        "this CPU has no half-precision units"
    )


def test_samples_per_second_follow_from_the_step() -> None:
    """Two seeds, 10 batches of 64: the median step is 3 ms.

    64 samples in 3 ms are not the mean of both rates.
    """
    spec = {
        "precisions": ["fp32"],
        "seeds": [0, 1],
        "margin": 0.5,
        "samples": 640,
        "test_samples": 8,
    }
    runs = [result_of("fp32", 0, 1.0, 2.0, "/w=="), result_of("fp32", 1, 1.0, 4.0, "/w==")]
    [row] = summary.build_rows(spec, runs)
    assert (row["ms_per_step"], row["s_per_epoch"]) == (3.0, 0.03)
    assert row["samples_per_s"] == pytest.approx(64 / 3e-3)


def test_a_network_that_learned_nothing_gets_no_verdict() -> None:
    """A network of dead units gives one answer, so all precisions agree image by image.

    It is said in the table, on the page and in Markdown; a network that learned keeps its verdict.
    """
    options: dict[str, Any] = {"samples": 320, "test_samples": 2000, "epochs": 1}
    dead = compare(settings(**options, net="mine:dead"), "out")
    labels = hs.data.sample(train=False)[1][:2000]
    most_frequent = float(torch.bincount(labels).max()) / len(labels)
    assert [row["verdict"] for row in dead["rows"]] == [
        "reference, at chance level",
        "at chance level: nothing can be concluded",
    ]
    assert [row["verdict_kind"] for row in dead["rows"]] == ["reference", "unknown"]
    assert dead["rows"][0]["chance"] == pytest.approx(most_frequent)
    assert dead["recommendation"]["precision"] is None
    reason = f"always answering the most frequent class gives {100 * most_frequent:.2f} %. Nothing"
    assert reason in dead["recommendation"]["reason"]
    write_report("out")
    for text in (table.text(dead), Path("out/report.md").read_text()):
        assert "at chance level: nothing can be concluded" in text
        assert reason in text
    page = Path("out/report.html").read_text()
    assert "at chance level: nothing can be concluded" in page
    assert reason in page

    options = {**options, "net": "mlp", "lr": 0.1}
    learned = compare(settings(**options), "learned")
    assert [row["at_chance"] for row in learned["rows"]] == [False, False]
    assert learned["rows"][0]["verdict"] == "reference"
    assert learned["recommendation"]["precision"] is not None

    # Results of an earlier version do not say it: their verdicts stay.
    spec = dead["spec"]
    earlier = [{k: v for k, v in run.items() if k != "chance_correct"} for run in dead["runs"]]
    rows = summary.build_rows(spec, earlier)
    assert rows[0]["verdict"] == "reference"
    assert rows[0]["chance"] is None

    # With class weights a network is not trained for accuracy: no share of a class is its chance.
    rows = summary.build_rows({**spec, "class_weights": "balanced"}, dead["runs"])
    assert [row["at_chance"] for row in rows] == [False, False]


# The command

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(command)
SIZES = ["--net", "mine:tiny", "--samples", "160", "--test-samples", "100"]
FLAGS = [*SIZES, "--epochs", "1", "--batch", "32"]


def test_the_command_prints_lines_table_and_report() -> None:
    flags = ["--precisions", "fp32,O1", "--seeds", "1", "--plain", "--out", "out"]
    result = CliRunner().invoke(app, [*FLAGS, *flags])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    lines = result.output.splitlines()
    assert lines[0] == (
        "mine:tiny on sample: 160 samples, 100 to test; "
        "2 precisions × 1 seed × 1 epoch, batch 32, on cpu"
    )
    loss_line = next(line for line in lines if line.startswith("loss"))
    assert re.fullmatch(r"loss: \d\.\d{6}  \[   32/  160\]", loss_line)
    header = next(i for i, line in enumerate(lines) if line.startswith("precision"))
    assert [line.split()[0] for line in lines[header + 1 : header + 3]] == ["fp32", "O1"]
    assert lines[header + 2].endswith("at chance level: nothing can be concluded")  # five steps
    assert Path("out/report.html").is_file()


def test_json_is_all_that_goes_to_stdout() -> None:
    flags = [*FLAGS, "--precisions", "fp32", "--seeds", "4,", "--json", "--out", "out"]
    result = CliRunner().invoke(app, flags)
    assert json.loads(result.stdout)["runs"][0]["seed"] == 4


def test_seeds_that_are_no_numbers_are_refused() -> None:
    result = CliRunner().invoke(app, ["--seeds", "many"])
    assert "how many (--seeds 5) or which" in str(result.exception)


def test_help_has_examples() -> None:
    result = CliRunner().invoke(complete_app, ["compare", "--help"])
    assert "halfstep compare --net resnet18" in result.output


def test_a_batch_larger_than_the_data_gives_a_note() -> None:
    flags = ["--epochs", "1", "--batch", "200", "--precisions", "fp32", "--seeds", "1"]
    result = CliRunner().invoke(app, [*SIZES, *flags, "--out", "out"])
    assert result.output.startswith(
        "note: batch: 200 is more than the 160 training samples: an epoch is one batch of 160\n"
    )


# A shell's background jobs ignore SIGINT.
INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from halfstep.cli import main
main()
"""


@pytest.mark.slow
def test_stopped_it_says_what_is_kept_and_how_to_go_on() -> None:
    """Ctrl-C in a second process with --fresh; the command that goes on is without it."""
    flags = ["--epochs", "100000", "--precisions", "fp32", "--seeds", "1", "--out", "out"]
    words = ["compare", *SIZES, *flags, "--fresh"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *words], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(Path("out").glob("runs/*/step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert (
        "stopped; out keeps 0 of 1 runs and a checkpoint of the next. "
        "The same command goes on from here, "
    ) in errors
    assert errors.endswith(f"less --fresh: {shlex.join(['halfstep', *words[:-1]])}\n")
