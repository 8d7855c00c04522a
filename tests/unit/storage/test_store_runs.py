"""`hs.Checkpoint` with a URL, and `halfstep train --out` with one, on a local store by its URL."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.errors import Notice
from halfstep.model import Model
from tests.support.command_line import CommandLine, run_command, run_json

SMALL = ["--samples", "320", "--test-samples", "100", "--device", "cpu", "--schedule", "constant"]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALFSTEP_OUT", str(tmp_path / "machine"))
    return tmp_path / "machine"


def build_model() -> Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Model(net, nn.CrossEntropyLoss(), optimizer, metrics={"acc": hs.metrics.Accuracy()})


def build_data() -> hs.data.Dataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, generator=draw)
    y = torch.randint(0, 2, (24,), generator=draw)
    return hs.data.Dataset((x, y)).shuffle(seed=0).batch(8)


def stored_steps(store: Path) -> list[str]:
    return sorted(path.parent.name for path in store.glob("step-*/manifest-*.json"))


def test_a_best_checkpoint_of_another_machine_comes_when_it_is_asked_for(
    tmp_path: Path, machine: Path
) -> None:
    url = f"file://{tmp_path}/store"

    def fit(epochs: int) -> hs.Checkpoint:
        saver = hs.Checkpoint(url, keep=1, best="acc")
        model = build_model()
        arguments = {"valid": build_data(), "callbacks": saver, "progress": False}
        model.fit(epochs, build_data(), resume="auto", **arguments)
        return saver

    best = fit(1).best_step
    assert best == 3
    shutil.rmtree(machine)
    saver = fit(2)
    assert saver.best_step is not None
    path = saver.best_path
    assert path is not None
    assert checkpoint.load(path).tree["loop"]["global_step"] == saver.best_step


def test_urls_where_they_have_no_place_say_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"JSONLLog: expected a file .* JSONLLog\(saver\.folder"):
        hs.JSONLLog("s3://bucket/run/log.jsonl")
    with pytest.raises(ValueError, match=r"Give the URL to hs\.Checkpoint"):
        build_model().fit(1, build_data(), resume="s3://bucket/run", progress=False)
    with pytest.raises(ValueError, match=r"Checkpoint: expected a URL without a user") as caught:
        hs.Checkpoint("s3://me:hunter2@bucket/run")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match=r"has lost a slash"):
        hs.Checkpoint(Path("s3://bucket/run"))


def test_a_store_that_is_not_there_refuses_the_run_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, where a folder must be")
    saver = hs.Checkpoint(f"file://{tmp_path}/store/run")
    assert saver.store is not None
    saver.store.retries = hs.storage.store_access.RetryPolicy(tries=2, first_delay_s=0.001)
    with pytest.raises(OSError, match=r"Checkpoint: cannot create file://.*: \w+Error"):
        build_model().fit(1, build_data(), callbacks=saver, progress=False)


def test_train_goes_on_from_a_store_on_a_fresh_machine(tmp_path: Path, machine: Path) -> None:
    url = f"file://{tmp_path}/store"
    store = tmp_path / "store"
    run_command("train", *SMALL, "--out", url, "--epochs", "1")
    assert stored_steps(store) == ["step-000000005"]
    assert {"log.jsonl", "run.json", "weights.safetensors"} < {p.name for p in store.iterdir()}

    shutil.rmtree(machine)
    summary = run_json("train", *SMALL, "--out", url, "--epochs", "2", "--resume", "auto")
    assert summary["out"] == url
    assert summary["steps"] == 10
    folder = str(tmp_path / "plain")
    run_command("train", *SMALL, "--out", folder, "--epochs", "2")
    for name in ("log.jsonl", "weights.safetensors"):
        assert (store / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert stored_steps(store) == ["step-000000005", "step-000000010"]

    # Nothing more is to be done, on another machine too.
    shutil.rmtree(machine)
    output = run_command("train", *SMALL, "--out", url, "--epochs", "2", "--resume", "auto")
    assert "what is missing is written again" in output
    output = run_command("train", *SMALL, "--out", url, "--epochs", "2", "--resume", "auto")
    assert "nothing was done" in output


def test_train_refuses_a_store_with_a_run_or_starts_over(
    tmp_path: Path,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"file://{tmp_path}/store"
    run_command("train", *SMALL, "--out", url, "--epochs", "2")
    shutil.rmtree(machine)
    halfstep = CommandLine(monkeypatch, capsys)
    code, output = halfstep(f"train {' '.join(SMALL)} --out {url} --epochs 1")
    assert code == 2
    assert "holds checkpoints of another run" in output
    run_command("train", *SMALL, "--out", url, "--epochs", "1", "--fresh")
    assert stored_steps(tmp_path / "store") == ["step-000000005"]


def test_commands_show_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    halfstep = CommandLine(monkeypatch, capsys)
    for line in (
        "train --out s3://me:hunter2@bucket/run",
        "train --out 's3://bucket/run?sig=hunter2'",
        "compare --out s3://me:hunter2@bucket/run",
    ):
        code, output = halfstep(line)
        assert code == 2
        assert "hunter2" not in output
        assert "out: expected" in output
    assert list(tmp_path.iterdir()) == []


def test_run_json_names_the_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    run_command("train", *SMALL, "--out", url, "--epochs", "1")
    assert json.loads((tmp_path / "store" / "run.json").read_text())["asked"]["epochs"] == 1


def test_a_notice_says_that_training_goes_on(tmp_path: Path, machine: Path) -> None:
    """The folder of the store becomes a file while the run goes on."""
    store = tmp_path / "store"
    saver = hs.Checkpoint(f"file://{store}", every_steps=1, keep=1)
    assert saver.store is not None
    saver.store.retries = hs.storage.store_access.RetryPolicy(tries=1)
    saver.store.give_up_after_s = 0.1

    class Breaks(hs.Callback):
        def epoch_begin(self, run: object) -> None:
            shutil.rmtree(store, ignore_errors=True)
            store.write_text("no folder any more")

    with pytest.warns(Notice) as caught:
        run = build_model().fit(1, build_data(), callbacks=[saver, Breaks()], progress=False)
    last = str(caught[-1].message)
    assert "not uploaded to file://" in last
    assert "step-000000001, step-000000002, step-000000003" in last
    assert [str(notice.message).count("Checkpoint: ") for notice in caught] == [1] * len(caught)
    assert run.global_step == 3
    assert len(checkpoint.listing(saver.folder)) == 3  # none of them was removed
