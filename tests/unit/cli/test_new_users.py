"""What a new user runs into: twins that must be equal, runs begun further, full disks, data that does not fit."""

import json
import random
import resource
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from halfstep import checkpoint
from halfstep.cli import main
from halfstep.compare import summary, table
from halfstep.report import charts, page, read
from halfstep.report.report_data import parse_summary
from tests.support.report_fixtures import MIB, comparison
from tests.support.user_module import work_beside

FIT = "--net own:net --samples 128 --test-samples 50 --device cpu"
OWN = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import halfstep as hs

def net(inputs=784, classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, classes))

def drawn(inputs=784, classes=10):
    made = net(inputs, classes)
    made[1].weight.data = torch.from_numpy(np.random.randn(16, inputs)).float() / 28
    return made

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
def mended(): return tuple(hs.data.Dataset(each).map(hs.data.Cast(torch.float32), "x") for each in doubles())

class Torn:
    def __len__(self): return 128
    def __getitem__(self, i):
        if i == 77:
            raise RuntimeError("torn")
        return torch.zeros(784), i % 10

def torn(): return Torn(), xy(50)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work_beside(OWN, tmp_path, monkeypatch, "own")
    return tmp_path


class Told:
    """The command in this process: its exit code, and what went to both streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, line: str) -> tuple[object, str]:
        self.monkeypatch.setattr(sys, "argv", ["halfstep", *shlex.split(line)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, "".join(self.capsys.readouterr())


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    return Told(monkeypatch, capsys)


# runs


def test_two_runs_of_a_seed_are_equal_to_their_random_states(told: Told) -> None:
    for out in ("a", "b"):
        random.random(), np.random.rand()  # noqa: NPY002 - what a process has drawn before must not matter
        assert told(f"train {FIT} --epochs 1 --seed 7 --out {out}")[0] == 0
    assert told("diff a b")[0] == 0
    kept = checkpoint.latest("a")
    assert kept is not None
    states = checkpoint.load(kept).tree["rng"]
    assert tuple(states["python"][1].tolist()) == random.Random(7).getstate()[1]
    words = np.random.RandomState(7).get_state()[1].astype(np.int64)
    assert torch.equal(states["numpy"][1], torch.from_numpy(words))


def test_a_comparison_seeds_numpy_too(told: Told) -> None:
    found = []
    for out in ("a", "b"):
        np.random.rand()  # noqa: NPY002
        line = f"compare {FIT.replace('own:net', 'own:drawn')} --precisions fp32 --seeds 2 --epochs 1 --out {out}"
        assert told(line)[0] == 0
        found.append(
            [run["loss"] for run in json.loads(Path(out, "compare.json").read_text())["runs"]]
        )
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_fewer_epochs_than_a_stopped_run_has_begun_change_nothing(told: Told) -> None:
    assert told(f"train {FIT} --epochs 3 --out r")[0] == 0
    Path("r/weights.safetensors").unlink()  # as after a signal
    before = {path: path.read_bytes() for path in Path("r").rglob("*") if path.is_file()}
    code, said = told(f"train {FIT} --epochs 2 --out r --resume auto")
    assert (code, said) == (
        2,
        "halfstep: --epochs: r is in epoch 3 already, after step 6, and 2 are asked for. Go on with --epochs 3 or "
        "more.\n",
    )
    assert {path: path.read_bytes() for path in Path("r").rglob("*") if path.is_file()} == before
    for place in ("r", "r/step-000000006"):
        code, said = told(f"train {FIT} --epochs 2 --out s --resume {place}")
        assert code == 2
        assert f"{place} is in epoch 3 already" in said
    assert not Path("s/run.json").exists()
    assert told(f"train {FIT} --epochs 3 --out r --resume auto")[0] == 0
    assert Path("r/weights.safetensors").is_file()


@pytest.mark.filterwarnings("default::halfstep.errors.Notice")
def test_weights_that_fit_are_written_when_the_last_checkpoint_does_not(told: Told) -> None:
    assert told(f"train {FIT} --epochs 1 --out whole")[0] == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (80_000, limits[1])
    )  # 12,730 weights; a checkpoint has momentum too
    try:
        code, said = told(f"train {FIT} --epochs 1 --out r")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert said.endswith("Training is done, and its weights are in r/weights.safetensors.\n")
    assert not checkpoint.listing("r")
    assert (
        Path("r/weights.safetensors").read_bytes() == Path("whole/weights.safetensors").read_bytes()
    )


def test_a_comparison_has_no_weights_to_evaluate(told: Told) -> None:
    line = (
        f"compare {FIT} --precisions fp32 --seeds 1 --epochs 1 --lr 0.1 --schedule constant --out c"
    )
    assert told(line)[0] == 0
    for place in ("c", "c/runs/fp32-s0"):
        code, said = told(f"eval {place}")
        again = "train --net own:net --data sample --epochs 1 --batch 64 --optimizer momentum --lr 0.1 --schedule constant"
        assert code == 2
        assert said.startswith(
            "halfstep: eval: c is a comparison, which keeps results and no weights"
        )
        assert f"halfstep {again} --precision fp32 --out runs/chosen" in said


# data functions


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "loaders",
            "--data: expected samples as the training data of 'own:loaders', got DataLoader. Return (train, ",
        ),
        (
            "wrapped",
            "--data: expected samples as the training data of 'own:wrapped', got Loader. Return (train, test)",
        ),
        (
            "batched",
            "as the test data of 'own:batched', got batches; leave .batch() to the command. Return (train, ",
        ),
        (
            "needs",
            "expected the data function own:needs to need no arguments, and it asks for root: give it a default",
        ),
        ("no_test", "--data: expected at least one sample as the test data of 'own:no_test'"),
        ("no_train", "--data: expected at least one sample as the training data of 'own:no_train'"),
        (
            "one_part",
            "got the columns ['x'] of own:one_part. A data function returns (train, test): (x, y), (x_test",
        ),
        ("lodaers", "has no attribute 'lodaers'. Did you mean own:loaders?"),
    ],
)
def test_what_a_data_function_returns_is_told(name: str, said: str, told: Told) -> None:
    code, came = told(f"train --data own:{name} --epochs 1")
    assert code == 2
    assert said in came
    assert "--debug" not in came  # a traceback says no more
    assert not Path("runs").exists()


def test_the_advice_for_a_loader_works(told: Told) -> None:
    assert told("train --net own:net --data own:unwrapped --epochs 1 --out r")[0] == 0


def test_a_data_function_that_raises_is_named(told: Told, project: Path) -> None:
    line = 1 + OWN.splitlines().index('def raises(): return {}["lr"]')
    where = f"raised by the data function own:raises, {project / 'own.py'}, line {line}"
    said = f"halfstep: KeyError: 'lr'\n{where}\n(--debug shows where it was raised)\n"
    assert told("train --data own:raises") == (2, said)


def test_a_sample_that_raises_is_named(told: Told, project: Path) -> None:
    line = 1 + OWN.splitlines().index('            raise RuntimeError("torn")')
    where = f"raised by sample 77 of Torn, {project / 'own.py'}, line {line}"
    code, said = told("train --net own:net --data own:torn --epochs 1 --out r")
    assert code == 2
    assert said == f"halfstep: RuntimeError: torn\n{where}\n(--debug shows where it was raised)\n"
    code, said = told(
        "compare --net own:net --data own:torn --epochs 1 --seeds 1 --precisions fp32 --out c"
    )
    assert code == 1
    assert f"fp32 seed 0 failed: RuntimeError: torn\n{where}\n" in said


def test_what_to_do_to_batches_is_told_for_a_function_that_makes_none(told: Told) -> None:
    code, said = told("train --net own:net --data own:doubles --epochs 1 --out r")
    assert code == 2
    assert (
        "on both parts (hs.data.Dataset(…) where they are none): .map(hs.data.Cast(torch.float32), 'x')"
        in said
    )
    assert told("train --net own:net --data own:mended --epochs 1 --out r")[0] == 0


def test_a_folder_named_too_deep(told: Told) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            Path("photos", part, name).mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8), np.uint8)).save(f"photos/{part}/{name}/0.png")
    for place in ("photos/train", "photos/test/", "photos/train/cat"):
        code, said = told(f"train --data {place}")
        deep = place.rstrip("/")
        assert code == 2
        assert (
            said
            == f"halfstep: --data: {deep} is a part of photos, which has train/ and test/: say --data photos\n"
        )
    assert told("data check photos/train")[1].endswith("own files: name photos to them\n")


# options


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --seed -1", "--seed: expected a whole number of 0 or more, got -1"),
        ("train --clip-norm -1", "--clip-norm: expected a positive number or None, received -1.0"),
        ("train --clip-norm=-1", "--clip-norm: expected a positive number or None, received -1.0"),
        (
            "compare --seeds 0",
            "--seeds: one number is how many, and 0 are too few: --seeds 3. Seed 0 alone: --seeds 0,",
        ),
    ],
)
def test_options_by_their_own_names(line: str, said: str, told: Told) -> None:
    assert told(line) == (2, f"halfstep: {said}\n")


def test_seed_0_alone(told: Told) -> None:
    assert told(f"compare {FIT} --precisions fp32 --seeds 0, --epochs 1 --out c")[0] == 0
    assert [run["seed"] for run in json.loads(Path("c/compare.json").read_text())["runs"]] == [0]


# failures in a table


@pytest.mark.parametrize(
    ("error", "said"),
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
def test_an_error_in_a_cell_is_its_first_sentence(error: str, said: str) -> None:
    assert summary.short(error) == said
    assert len(said) <= 80


def test_an_error_stands_whole_once_below_the_table() -> None:
    error = f"ValueError: {'expected this ' * 20}. Do that."
    runs = [
        {"precision": "fp32", "seed": s, "status": "failed", "error": error, "skipped": 0}
        for s in (0, 1)
    ]
    spec = {
        "precisions": ["fp32"],
        "seeds": [0, 1],
        "samples": 10,
        "test_samples": 10,
        "margin": 0.5,
    }
    rows = summary.rows(spec, runs)
    told = table.text(
        {"rows": rows, "runs": runs, "recommendation": summary.recommend(spec, rows, runs)}
    )
    assert told.count(error) == 1
    assert ".." not in told
    assert max(len(line) for line in told.splitlines() if error not in line) < 230


# the page


def test_memory_of_a_process_is_not_compared_below_20_mib() -> None:
    given = comparison(("fp32", "O1", "O2"))
    for row, mib in zip(given["rows"], (60, 41, 39), strict=True):
        row["peak_memory"] = mib * MIB
    report = parse_summary(given)
    first, near, far = report.rows
    assert report.ratio_to_first("peak_memory", near, first) is None
    assert report.ratio_to_first("peak_memory", far, first) == 39 / 60
    assert page(given).count("0.68×") == 0  # 41 / 60
    assert "Differences below 20 MiB mean nothing." in page(given)
    for run in given["runs"]:
        run["memory_kind"] = "device"
    assert parse_summary(given).ratio_to_first("peak_memory", near, first) == 41 / 60


def test_memory_is_the_median_of_the_seeds() -> None:
    done = {
        "status": "done",
        "acc": 0.5,
        "loss": 1.0,
        "skipped": 0,
        "final_scale": None,
        "ms_per_step": 1.0,
    }
    done |= {"s_per_epoch": 1.0, "precision": "fp32"}
    runs = [{**done, "seed": s, "peak_memory": m} for s, m in enumerate((10, 90, 20))]
    spec = {
        "precisions": ["fp32"],
        "seeds": [0, 1, 2],
        "samples": 10,
        "test_samples": 10,
        "margin": 0.5,
    }
    assert summary.rows(spec, runs)[0]["peak_memory"] == 20


def test_the_page_of_a_run_says_what_it_was(told: Told) -> None:
    assert told(f"train {FIT} --epochs 1 --precision O2+bf16 --lr 0.05 --out r")[0] == 0
    found = parse_summary(read("r"))
    assert found.command == f"halfstep train {FIT} --epochs 1 --precision O2+bf16 --lr 0.05 --out r"
    assert (found.spec["precision"], found.spec["net"], found.spec["lr"]) == (
        "O2+bf16",
        "own:net",
        0.05,
    )
    assert found.date == json.loads(Path("r/run.json").read_text())["date"]
    assert found.environment["torch"] == torch.__version__
    shown = page(read("r"))
    assert (
        "own:net on sample · O2+bf16 · 1 epoch · batch 64 · momentum · learning rate 0.05" in shown
    )
    Path("r/run.json").write_text("{")  # damaged: the log is still worth a page
    assert parse_summary(read("r")).command == ""


@pytest.mark.parametrize(
    ("value", "lo", "hi"), [(0.0, 0.0, 0.5), (1.0, 0.9, 1.0), (0.5, 0.45, 0.55)]
)
def test_an_axis_of_accuracy_stays_within_0_and_100_percent(
    value: float, lo: float, hi: float
) -> None:
    epochs = [{"epoch": 1, "valid_acc": value}]
    run = {"precision": "r", "seed": 0, "epochs": epochs, "status": "done"}
    given = {"halfstep_compare": 1, "runs": [run], "rows": [{"precision": "r"}]}
    (chart,) = charts.training_charts(parse_summary(given))
    assert (chart.y_axis.low, chart.y_axis.high) == pytest.approx((lo, hi))
