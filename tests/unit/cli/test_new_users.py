"""What a new user runs into.

Two runs of a seed that must be equal, a resume with fewer epochs, a full disk, data that does not
fit, mistakes in options, failed runs in a table, a page of a run.
"""

import json
import random
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from halfstep import checkpoint
from halfstep.compare import summary, table
from halfstep.precision.advice import HalfUnits
from halfstep.report import charts, page, read
from halfstep.report.report_data import parse_summary
from tests.support.command_line import CommandLine
from tests.support.report_fixtures import MIB, comparison
from tests.support.user_module import write_user_module

SMALL_RUN = "--net own:net --samples 128 --test-samples 50 --device cpu"
USER_MODULE = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import halfstep as hs

def net(inputs=784, classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, classes))

def drawn(inputs=784, classes=10):
    network = net(inputs, classes)
    network[1].weight.data = torch.from_numpy(np.random.randn(16, inputs)).float() / 28
    return network

def xy(n=128):
    return torch.rand(n, 1, 28, 28), torch.arange(n) % 10

def loaders(): return DataLoader(TensorDataset(*xy()), 16), DataLoader(TensorDataset(*xy(50)), 16)
def wrapped(): return tuple(map(hs.data.Loader, loaders()))
def unwrapped(): return tuple(loader.dataset for loader in loaders())
def batched(): return xy(), hs.data.Dataset(xy()).batch(8)
def raises(): return {}["lr"]
def needs(root, n=3): return xy(), xy(n)
def no_test(): return xy(), (torch.zeros(0, 784), torch.zeros(0).long())
def no_train(): return [], xy()
def one_part(): return xy()
def doubles(): return tuple((x.double(), y) for x, y in (xy(), xy(50)))

def mended():
    cast = hs.data.Cast(torch.float32)
    return tuple(hs.data.Dataset(part).map(cast, "x") for part in doubles())

class Torn:
    def __len__(self): return 128
    def __getitem__(self, i):
        if i == 77:
            raise RuntimeError("torn")
        return torch.zeros(784), i % 10

def torn(): return Torn(), xy(50)
"""

CPU = HalfUnits("CPU", ())


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_user_module(USER_MODULE, tmp_path, monkeypatch, "own")
    return tmp_path


@pytest.fixture
def run_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command in this process: its exit code, and what went to both streams."""
    return CommandLine(monkeypatch, capsys)


def line_number(text: str) -> int:
    """The number of this line in the user's module."""
    return 1 + USER_MODULE.splitlines().index(text)


# Runs.


def test_two_runs_of_a_seed_are_equal_to_their_random_states(run_line: CommandLine) -> None:
    for out in ("a", "b"):
        # What a process has drawn before must not matter.
        random.random()
        np.random.rand()  # noqa: NPY002
        code, _ = run_line(f"train {SMALL_RUN} --epochs 1 --seed 7 --out {out}")
        assert code == 0
    code, _ = run_line("diff a b")
    assert code == 0

    newest = checkpoint.latest("a")
    assert newest is not None
    states = checkpoint.load(newest).tree["rng"]
    assert tuple(states["python"][1].tolist()) == random.Random(7).getstate()[1]
    words = np.random.RandomState(7).get_state()[1].astype(np.int64)
    assert torch.equal(states["numpy"][1], torch.from_numpy(words))


def test_a_comparison_seeds_numpy_too(run_line: CommandLine) -> None:
    options = SMALL_RUN.replace("own:net", "own:drawn")
    losses = []
    for out in ("a", "b"):
        np.random.rand()  # noqa: NPY002
        code, _ = run_line(f"compare {options} --precisions fp32 --seeds 2 --epochs 1 --out {out}")
        assert code == 0
        result = json.loads(Path(out, "compare.json").read_text())
        losses.append([run["loss"] for run in result["runs"]])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


def read_files(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_fewer_epochs_than_a_stopped_run_has_begun_change_nothing(run_line: CommandLine) -> None:
    code, _ = run_line(f"train {SMALL_RUN} --epochs 3 --out r")
    assert code == 0
    Path("r/weights.safetensors").unlink()  # as after a signal
    files = read_files("r")
    code, output = run_line(f"train {SMALL_RUN} --epochs 2 --out r --resume auto")
    assert code == 2
    assert output == (
        "halfstep: --epochs: r is in epoch 3 already, after step 6, and 2 are asked for. "
        "Go on with --epochs 3 or more.\n"
    )
    assert read_files("r") == files

    for source in ("r", "r/step-000000006"):
        code, output = run_line(f"train {SMALL_RUN} --epochs 2 --out s --resume {source}")
        assert code == 2
        assert f"{source} is in epoch 3 already" in output
    assert not Path("s/run.json").exists()

    code, _ = run_line(f"train {SMALL_RUN} --epochs 3 --out r --resume auto")
    assert code == 0
    assert Path("r/weights.safetensors").is_file()


@pytest.mark.filterwarnings("default::halfstep.errors.Notice")
def test_weights_that_fit_are_written_when_the_last_checkpoint_does_not(
    run_line: CommandLine,
) -> None:
    code, _ = run_line(f"train {SMALL_RUN} --epochs 1 --out whole")
    assert code == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Enough for 12,730 weights; a checkpoint has their momentum too.
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, limits[1]))
    try:
        code, output = run_line(f"train {SMALL_RUN} --epochs 1 --out r")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert output.endswith("Training is done, and its weights are in r/weights.safetensors.\n")
    assert not checkpoint.listing("r")
    expected = Path("whole/weights.safetensors").read_bytes()
    assert Path("r/weights.safetensors").read_bytes() == expected


def test_a_comparison_has_no_weights_to_evaluate(run_line: CommandLine) -> None:
    code, _ = run_line(
        f"compare {SMALL_RUN} --precisions fp32 --seeds 1 --epochs 1 --lr 0.1 "
        "--schedule constant --out c"
    )
    assert code == 0
    command = (
        "halfstep train --net own:net --data sample --epochs 1 --batch 64 --optimizer momentum "
        "--lr 0.1 --schedule constant --precision fp32 --out runs/chosen"
    )
    for source in ("c", "c/runs/fp32-s0"):
        code, output = run_line(f"eval {source}")
        assert code == 2
        assert output.startswith(
            "halfstep: eval: c is a comparison, which keeps results and no weights"
        )
        assert command in output


# Data functions.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "loaders",
            "--data: expected samples as the training data of 'own:loaders', got DataLoader. "
            "Return (train, ",
        ),
        (
            "wrapped",
            "--data: expected samples as the training data of 'own:wrapped', got Loader. "
            "Return (train, test)",
        ),
        (
            "batched",
            "as the test data of 'own:batched', got batches; leave .batch() to the command. "
            "Return (train, ",
        ),
        (
            "needs",
            "expected the data function own:needs to need no arguments, and it asks for root: "
            "give it a default",
        ),
        ("no_test", "--data: expected at least one sample as the test data of 'own:no_test'"),
        ("no_train", "--data: expected at least one sample as the training data of 'own:no_train'"),
        (
            "one_part",
            "got the columns ['x'] of own:one_part. A data function returns (train, test): "
            "(x, y), (x_test",
        ),
        ("lodaers", "has no attribute 'lodaers'. Did you mean own:loaders?"),
    ],
)
def test_a_wrong_data_function_is_explained(name: str, message: str, run_line: CommandLine) -> None:
    code, output = run_line(f"train --data own:{name} --epochs 1")
    assert code == 2
    assert message in output
    assert "--debug" not in output  # a traceback says no more
    assert not Path("runs").exists()


def test_the_advice_for_a_loader_works(run_line: CommandLine) -> None:
    code, _ = run_line("train --net own:net --data own:unwrapped --epochs 1 --out r")
    assert code == 0


def test_a_data_function_that_raises_is_named(run_line: CommandLine, project: Path) -> None:
    line = line_number('def raises(): return {}["lr"]')
    code, output = run_line("train --data own:raises")
    assert code == 2
    assert output == (
        "halfstep: KeyError: 'lr'\n"
        f"raised by the data function own:raises, {project / 'own.py'}, line {line}\n"
        "(--debug shows where it was raised)\n"
    )


def test_a_sample_that_raises_is_named(run_line: CommandLine, project: Path) -> None:
    line = line_number('            raise RuntimeError("torn")')
    location = f"raised by sample 77 of Torn, {project / 'own.py'}, line {line}"
    code, output = run_line("train --net own:net --data own:torn --epochs 1 --out r")
    assert code == 2
    assert output == (
        f"halfstep: RuntimeError: torn\n{location}\n(--debug shows where it was raised)\n"
    )
    code, output = run_line(
        "compare --net own:net --data own:torn --epochs 1 --seeds 1 --precisions fp32 --out c"
    )
    assert code == 1
    assert f"fp32 seed 0 failed: RuntimeError: torn\n  {location}\n" in output


def test_advice_about_batches_becomes_advice_about_the_data_function(
    run_line: CommandLine,
) -> None:
    code, output = run_line("train --net own:net --data own:doubles --epochs 1 --out r")
    assert code == 2
    advice = (
        "on both parts (hs.data.Dataset(…) where they are none): "
        ".map(hs.data.Cast(torch.float32), 'x')"
    )
    assert advice in output
    code, _ = run_line("train --net own:net --data own:mended --epochs 1 --out r")
    assert code == 0


def test_a_folder_inside_a_split_folder(run_line: CommandLine) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            Path("photos", part, name).mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8), np.uint8)).save(f"photos/{part}/{name}/0.png")
    for folder in ("photos/train", "photos/test/", "photos/train/cat"):
        code, output = run_line(f"train --data {folder}")
        assert code == 2
        assert output == (
            f"halfstep: --data: {folder.rstrip('/')} is a part of photos, which has train/ and "
            "test/: say --data photos\n"
        )
    _, output = run_line("data check photos/train")
    assert output.endswith("own files: name photos to them\n")


# Options.


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --seed -1", "--seed: expected a whole number of 0 or more, got -1"),
        ("train --clip-norm -1", "--clip-norm: expected a positive number or None, received -1.0"),
        ("train --clip-norm=-1", "--clip-norm: expected a positive number or None, received -1.0"),
        (
            "compare --seeds 0",
            "--seeds: one number is how many, and 0 are too few: --seeds 3. "
            "Seed 0 alone: --seeds 0,",
        ),
    ],
)
def test_mistakes_name_the_option_as_it_was_typed(
    line: str, message: str, run_line: CommandLine
) -> None:
    assert run_line(line) == (2, f"halfstep: {message}\n")


def test_seed_0_alone(run_line: CommandLine) -> None:
    code, _ = run_line(f"compare {SMALL_RUN} --precisions fp32 --seeds 0, --epochs 1 --out c")
    assert code == 0
    runs = json.loads(Path("c/compare.json").read_text())["runs"]
    assert [run["seed"] for run in runs] == [0]


# Failed runs in a table.


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("RuntimeError: torn", "RuntimeError: torn"),
        (
            "ValueError: step 3: expected a. Do b, then c.\nat step 3",
            "ValueError: step 3: expected a",
        ),
        ("ValueError: version 1.5 is none. Do b", "ValueError: version 1.5 is none"),
        ("E: " + "word " * 30, "E: " + "word " * 14 + "word…"),
    ],
)
def test_an_error_in_a_cell_is_its_first_sentence(error: str, expected: str) -> None:
    assert summary.shorten_error(error) == expected
    assert len(expected) <= 80


def comparison_spec(seeds: list[int]) -> dict[str, object]:
    return {
        "precisions": ["fp32"],
        "seeds": seeds,
        "samples": 10,
        "test_samples": 10,
        "margin": 0.5,
    }


def test_the_whole_error_stands_once_below_the_table() -> None:
    error = f"ValueError: {'expected this ' * 20}. Do that."
    failed = {"precision": "fp32", "status": "failed", "error": error, "skipped": 0}
    runs = [{**failed, "seed": seed} for seed in (0, 1)]
    spec = comparison_spec([0, 1])
    rows = summary.build_rows(spec, runs)
    recommendation = summary.recommend(spec, rows, runs, CPU)
    text = table.text({"rows": rows, "runs": runs, "recommendation": recommendation})
    assert text.count(error) == 1
    assert ".." not in text
    assert max(len(line) for line in text.splitlines() if error not in line) < 230


# The page.


def test_memory_of_a_process_is_not_compared_below_20_mib() -> None:
    data = comparison(("fp32", "O1", "O2"))
    for row, mib in zip(data["rows"], (60, 41, 39), strict=True):
        row["peak_memory"] = mib * MIB
    report = parse_summary(data)
    first, near, far = report.rows
    assert report.ratio_to_first("peak_memory", near, first) is None
    assert report.ratio_to_first("peak_memory", far, first) == 39 / 60
    assert page(data).count("0.68×") == 0  # 41 / 60
    assert "Differences below 20 MiB mean nothing." in page(data)
    for run in data["runs"]:
        run["memory_kind"] = "device"
    assert parse_summary(data).ratio_to_first("peak_memory", near, first) == 41 / 60


def test_memory_is_the_median_of_the_seeds() -> None:
    done = {
        "precision": "fp32",
        "status": "done",
        "acc": 0.5,
        "loss": 1.0,
        "skipped": 0,
        "final_scale": None,
        "ms_per_step": 1.0,
        "s_per_epoch": 1.0,
    }
    runs = [{**done, "seed": seed, "peak_memory": m} for seed, m in enumerate((10, 90, 20))]
    (row,) = summary.build_rows(comparison_spec([0, 1, 2]), runs)
    assert row["peak_memory"] == 20


def test_the_page_of_a_run_says_what_it_was(run_line: CommandLine) -> None:
    line = f"train {SMALL_RUN} --epochs 1 --precision O2+bf16 --lr 0.05 --out r"
    code, _ = run_line(line)
    assert code == 0
    report = parse_summary(read("r"))
    assert report.command == f"halfstep {line}"
    assert report.spec["precision"] == "O2+bf16"
    assert report.spec["net"] == "own:net"
    assert report.spec["lr"] == 0.05
    assert report.date == json.loads(Path("r/run.json").read_text())["date"]
    assert report.environment["torch"] == torch.__version__
    title = "own:net on sample · O2+bf16 · 1 epoch · batch 64 · momentum · learning rate 0.05"
    assert title in page(read("r"))

    Path("r/run.json").write_text("{")  # damaged: the log is still worth a page
    assert parse_summary(read("r")).command == ""


@pytest.mark.parametrize(
    ("value", "low", "high"), [(0.0, 0.0, 0.5), (1.0, 0.9, 1.0), (0.5, 0.45, 0.55)]
)
def test_an_axis_of_accuracy_stays_within_0_and_100_percent(
    value: float, low: float, high: float
) -> None:
    epochs = [{"epoch": 1, "valid_acc": value}]
    run = {"precision": "r", "seed": 0, "epochs": epochs, "status": "done"}
    data = {"halfstep_compare": 1, "runs": [run], "rows": [{"precision": "r"}]}
    (chart,) = charts.training_charts(parse_summary(data))
    assert (chart.y_axis.low, chart.y_axis.high) == pytest.approx((low, high))
