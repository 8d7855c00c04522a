"""Killed while it uploads to a store that fails, and resumed on a fresh machine: the same bits."""

import json
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from halfstep import checkpoint
from halfstep.storage.mirror import StoreMirror
from tests.support.faulty_store import use_faulty_store
from tests.support.killed_run import STORE_URL, fork_server
from tests.support.run_endings import differences, leaves_by_path, undisturbed_ending

CASE = {"every_steps": 2, "keep": 2}
KILLED = -signal.SIGKILL


def store_ending(store_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a fresh machine gets from the store, the names that are there, and the log."""
    use_faulty_store({"folder": str(store_folder)})
    with tempfile.TemporaryDirectory() as machine:
        monkeypatch.setenv("HALFSTEP_OUT", machine)
        mirror = StoreMirror(STORE_URL, "test")
        mirror.fetch()
        newest = checkpoint.latest(mirror.folder)
        assert newest is not None
        tree = checkpoint.load(newest).tree
        log = (mirror.folder / "log.jsonl").read_text()
    run = store_folder / "bucket" / "run"
    assert (run / "log.jsonl").read_text() == log
    whole = sorted({manifest.parent.name for manifest in run.glob("step-*/manifest-*.json")})
    assert sorted(path.name for path in run.glob("step-*")) == whole
    return {**leaves_by_path(tree), "kept": whole, "log": log}


def train_until_it_ends(
    tmp_path: Path, deaths: list[dict[str, Any]], rate: float, *, same_machine: bool = False
) -> int:
    """Runs until one is not killed, each on a machine of its own. Returns how many were killed."""
    killed = 0
    for number, death in enumerate([*deaths, {}]):
        machine = tmp_path / ("machine" if same_machine else f"machine-{number}")
        store = {"folder": str(tmp_path / "store"), "rate": rate, "seed": number, **death}
        code = fork_server()(machine, store=store, **CASE)
        stderr = (machine / "stderr").read_text()
        assert "hunter2" not in stderr
        if death and code == KILLED:
            killed += 1
            continue
        assert code == 0, stderr
    return killed


def test_without_faults_the_store_has_what_the_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_until_it_ends(tmp_path, [], rate=0)
    ending = store_ending(tmp_path / "store", monkeypatch)
    assert differences(ending, undisturbed_ending(CASE)) == []
    folder = next(path for path in (tmp_path / "machine-0").iterdir() if path.is_dir())
    assert [path.name for path in checkpoint.listing(folder)] == ending["kept"]


def test_every_fifth_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_until_it_ends(tmp_path, [], rate=0.2)
    ending = store_ending(tmp_path / "store", monkeypatch)
    assert differences(ending, undisturbed_ending(CASE)) == []


@pytest.mark.parametrize("same_machine", [False, True], ids=["fresh machines", "one machine"])
def test_killed_in_the_middle_of_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_machine: bool
) -> None:
    """In the calls 25, 50, … of processes that follow each other, a few of them half written."""
    deaths = [{"kill_at": 25 + 25 * number} for number in range(4)]
    killed = train_until_it_ends(tmp_path, deaths, rate=0.05, same_machine=same_machine)
    assert killed >= 3
    ending = store_ending(tmp_path / "store", monkeypatch)
    assert differences(ending, undisturbed_ending(CASE)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_killed_in_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    deaths = [{"kill_at": draw.randint(1, 300)} for _ in range(draw.randint(1, 6))]
    train_until_it_ends(tmp_path, deaths, rate=draw.choice([0, 0.05, 0.2]))
    ending = store_ending(tmp_path / "store", monkeypatch)
    assert differences(ending, undisturbed_ending(CASE)) == [], json.dumps(deaths)
