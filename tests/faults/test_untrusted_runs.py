"""Run folders from elsewhere: what they name is not imported, opened or fetched unasked.

Every command meets every kind of hostile folder. A mark says that code was run, a real server
counts what is fetched, and Python's own audit events say what is opened.
"""

import functools
import http.server
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfstep.cli.main import app
from halfstep.experiment import run_seal
from halfstep.experiment.training_run import TrainSettings
from tests.support.command_line import CommandLine, every_command, run_command, run_json
from tests.support.flaky_source import flaky_source
from tests.support.user_module import write_user_module

EVIL_MODULE = """
from pathlib import Path
Path({mark!r}).touch()
import torch
import halfstep as hs

def net(*args, **kwargs):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))

def data():
    x = torch.zeros(16, 784)
    return (x, torch.arange(16) % 10), (x, torch.arange(16) % 10)

def build():
    model = hs.Model(
        net(),
        torch.nn.CrossEntropyLoss(),
        torch.optim.SGD(net().parameters(), lr=0.1),
        metrics={{"acc": hs.metrics.Accuracy()}},
    )
    data = hs.data.Dataset((torch.zeros(16, 784), torch.arange(16) % 10)).batch(8)
    return {{"model": model, "data": data, "valid": data, "epochs": 1}}
"""
SMALL = "--samples 64 --test-samples 16 --epochs 1 --device cpu"

# Settings that a hostile run.json may have. {url} is a server, {secret} a folder of someone's.
HOSTILE: dict[str, dict[str, Any]] = {
    "a builder": {"build": "evil:build"},
    "a builder's file": {"build": "{folder}/evil.py:build"},
    "a network": {"net": "evil:net"},
    "a data function": {"data": "evil:data"},
    "a folder of data": {"data": "{secret}"},
    "a folder of a data set": {"data": "mnist", "path": "{secret}"},
    "an archive": {"data": "mnist", "path": "{secret}/mnist.zip"},
    "an address": {"data": "mnist", "path": "{url}/mnist"},
    "an archive's address": {"data": "cifar10", "path": "{url}/cifar.tar.gz"},
    "a file's address": {"data": "mnist", "path": "file://{secret}/mnist.zip"},
    "an address as data": {"data": "{url}/mnist"},
    "a store": {"data": "flaky://bucket/photos"},
    "a table in a store": {"data": "csv:flaky://bucket/t.csv", "target": "y"},
    "a data set in a store": {"data": "mnist", "path": "flaky://bucket/mnist"},
    "a network and an address": {"net": "evil:net", "data": "mnist", "path": "{url}/mnist"},
}
# What a command does to a hostile folder {run}, and its exit code.
LINES = {
    "eval": ("eval {run}", 2),
    "eval of a checkpoint": ("eval {run}/step-000000001", 2),
    "eval of weights": ("eval {run}/weights.safetensors", 2),
    "eval elsewhere": ("eval {run} --test-samples 3 --precision O2", 2),
    "predict": ("predict {run} sample", 2),
    "replay": ("replay {run} --step 1", 2),
    "diff": ("diff {run} {run}", 0),
    "report": ("report {run} --out pages", 0),
    "train": ("train --out {run} --resume auto", 2),
    "compare": ("compare --out {run} --seeds 1 --precisions fp32 " + SMALL, 2),
    "data get": ("data get mnist --path {run}", 2),
    "data show": ("data show {run}", 2),
    "data check": ("data check {run}", 2),
}
NO_FOLDER = {"info", "bench", "find-lr"}  # these commands read none
BUILDING = ("eval", "predict", "replay")


class Server:
    """A web server on this machine that counts its requests and has nothing."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append(self.path)
                self.send_error(404)

            def log_message(self, *args: Any) -> None: ...

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        # shutdown() waits for the next poll.
        serve = functools.partial(self.http.serve_forever, poll_interval=0.01)
        threading.Thread(target=serve, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with flaky_source({}) as store:
        store.list_fault = lambda: server.requests.append("store")
        yield server
    server.http.shutdown()
    server.http.server_close()


# Audit hooks cannot be removed: there is one, and it notes what is under WATCHED.
WATCHED: list[str] = []
EVENTS: list[str] = []


def note_event(event: str, arguments: tuple[Any, ...]) -> None:
    if not WATCHED or not event.startswith(("open", "os.", "socket.", "shutil.", "glob.")):
        return
    if event == "socket.connect" or any(WATCHED[0] in str(argument) for argument in arguments):
        EVENTS.append(f"{event} {arguments}")


sys.addaudithook(note_event)


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A folder of someone's; EVENTS has what is done to it, and every connection."""
    folder = tmp_path / "secret-folder"
    (folder / "train" / "cat").mkdir(parents=True)
    (folder / "mnist.zip").write_bytes(b"PK")
    EVENTS.clear()
    WATCHED[:] = ["secret-folder"]
    yield folder
    WATCHED.clear()


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists when the module `evil` was run. The module lies in the current folder."""
    (tmp_path / "here").mkdir()
    path = tmp_path / "code-was-run"
    source = EVIL_MODULE.format(mark=str(path))
    write_user_module(source, tmp_path / "here", monkeypatch, name="evil")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_command("train", *SMALL.split(), "--out", str(folder))
    return folder


@pytest.fixture
def make_hostile(trained: Path, tmp_path: Path, server: Server, secret: Path, mark: Path) -> Any:
    """A function that makes a hostile run folder out of a whole one."""

    def make(kind: str) -> Path:
        run = tmp_path / "downloaded"
        shutil.copytree(trained, run)
        content = json.loads((run / "run.json").read_text())
        for name, text in HOSTILE[kind].items():
            value = text.format(url=server.url, secret=secret, folder=Path.cwd())
            content["asked"][name] = value
        (run / "run.json").write_text(json.dumps(content))
        return run

    return make


def test_there_is_a_line_for_every_command() -> None:
    assert {name.split(" of ")[0] for name in LINES} - {"eval elsewhere"} | NO_FOLDER == set(
        every_command()
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("what", LINES)
def test_nothing_is_imported_opened_or_fetched(
    what: str,
    kind: str,
    make_hostile: Any,
    mark: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line, expected_code = LINES[what]
    run = make_hostile(kind)
    code, output = CommandLine(monkeypatch, capsys)(line.format(run=run))
    assert code == expected_code, output
    assert not mark.exists()
    assert server.requests == []
    assert EVENTS == []
    if what.startswith(BUILDING):
        assert f"{run}/run.json is not known to be one, and by it halfstep would " in output
        assert "--trust" in output


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("command", BUILDING)
def test_trust_uses_all_of_it(
    command: str,
    kind: str,
    make_hostile: Any,
    mark: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same folders with --trust: the test above can fail."""
    line, _ = LINES[command]
    monkeypatch.setenv("HALFSTEP_CACHE", str(mark.parent / "cache"))
    run = make_hostile(kind)
    _, output = CommandLine(monkeypatch, capsys)(f"{line.format(run=run)} --trust")
    assert "is not known to be one" not in output
    used = [*server.requests, *EVENTS]
    if mark.exists():
        used.append("code")
    # A web server does not list folders; how a table was encoded stands in run.json.
    uses_nothing = kind == "an address as data" or (command, kind) == (
        "predict",
        "a table in a store",
    )
    assert used or uses_nothing, output


@pytest.mark.parametrize("command", BUILDING)
def test_the_same_builder_on_the_command_line_is_enough(
    command: str,
    make_hostile: Any,
    mark: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line, _ = LINES[command]
    run = make_hostile("a builder")
    _, output = CommandLine(monkeypatch, capsys)(f"{line.format(run=run)} --build evil:build")
    assert "is not known to be one" not in output
    assert mark.exists()


def test_what_the_command_line_replaces_needs_no_trust(
    make_hostile: Any, mark: Path, server: Server
) -> None:
    run = make_hostile("a network and an address")
    words = ["eval", str(run), "--test-samples", "16"]
    with pytest.raises(ValueError, match="import and call 'evil:net'; fetch 'http:"):
        run_json(*words)
    with pytest.raises(ValueError, match="halfstep would fetch 'http:") as refusal:
        run_json(*words, "--net", "mlp")
    assert "import" not in str(refusal.value)
    # The path of the run belongs to the run's data: with other data it is not used.
    assert run_json(*words, "--net", "mlp", "--data", "sample")["scores"]["acc"] > 0
    assert not mark.exists()
    assert server.requests == []


WRONG_VALUES = {
    "a number as a builder": {"build": 1},
    "a list as a network": {"net": ["evil:net"]},
    "nothing as a network": {"net": None},
    "an object as data": {"data": {"evil": "data"}},
    "a list as a path": {"path": ["/etc"]},
    "text as a number": {"batch": "evil:net"},
    "a setting of its own": {"import": "evil"},
}


@pytest.mark.parametrize("what", WRONG_VALUES)
def test_a_value_of_another_type_is_refused(
    what: str, trained: Path, tmp_path: Path, mark: Path
) -> None:
    run = tmp_path / "r"
    shutil.copytree(trained, run)
    content = json.loads((run / "run.json").read_text())
    content["asked"] |= WRONG_VALUES[what]
    (run / "run.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="expected what this version of halfstep train writes"):
        run_json("eval", str(run), "--trust")
    assert not mark.exists()


# One's own runs.


@pytest.fixture
def own_run(mark: Path) -> Path:
    """A run of this user's own network, trained in the current folder."""
    words = ["--net", "evil:net", *SMALL.split()]
    run_json("train", *words, "--out", "own")
    return Path("own")


def test_own_runs_need_no_flag(own_run: Path, tmp_path: Path) -> None:
    assert run_json("eval", "own")["scores"]["loss"] > 0
    assert run_json("predict", "own", "sample")
    assert run_json("replay", "own", "--step", "1")
    # Wherever the folder goes, its settings are still this user's.
    shutil.move("own", tmp_path / "moved")
    assert run_json("eval", str(tmp_path / "moved"))["scores"]["loss"] > 0


def refusal(*words: str) -> str:
    with pytest.raises(ValueError, match="expected a run that you trained in this folder") as error:
        run_json(*words)
    return str(error.value)


def test_the_seal_is_of_one_folder_and_of_all_settings(
    own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own_run.resolve() / "run.json"
    written = path.read_text()
    for changed in ({"net": "evil:build"}, {"batch": 63}, {"data": "mnist", "path": "/etc"}):
        content = json.loads(written)
        content["asked"] |= changed
        path.write_text(json.dumps(content))
        assert "--trust" in refusal("eval", "own")
    for seal in (None, "", "0" * 64, 5, ["x"], "\ud800"):
        content = json.loads(written)
        content["seal"] = seal
        path.write_text(json.dumps(content))
        assert "--trust" in refusal("eval", "own")
    path.write_text(written)
    run_json("eval", "own")

    # In another folder `evil` is another module.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert "--trust" in refusal("eval", str(path.parent))


def test_only_a_key_of_this_user_alone_counts(
    own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_path = Path(os.environ["XDG_STATE_HOME"]) / "halfstep" / run_seal.KEY_FILE
    assert key_path.stat().st_mode & 0o777 == 0o600
    key = key_path.read_bytes()
    assert len(key) == run_seal.KEY_BYTES
    assert [path.name for path in key_path.parent.iterdir()] == [run_seal.KEY_FILE]

    own_key = tmp_path / "state" / "halfstep" / run_seal.KEY_FILE
    own_key.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    refusal("eval", "own")  # another user has no key, or another one
    for content, mode in ((key, 0o640), (key, 0o604), (key[:-1], 0o600), (bytes(32), 0o600)):
        own_key.write_bytes(content)
        own_key.chmod(mode)
        refusal("eval", "own")
    own_key.write_bytes(key)
    own_key.chmod(0o600)
    run_json("eval", "own")


def test_a_user_without_a_home_trains_and_says_trust(
    mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "no-folder"))
    run_json("train", "--net", "evil:net", *SMALL.split(), "--out", "own")
    assert json.loads(Path("own/run.json").read_text())["seal"] is None
    refusal("eval", "own")
    run_json("eval", "own", "--trust")


def test_two_processes_make_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find no key and make one: the second takes that of the first."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    keys = [run_seal._create_key(), run_seal._create_key()]
    assert keys[0] is not None
    assert keys[0] == keys[1]
    seals = {run_seal.make_seal({"net": "a"}) for _ in range(2)}
    assert len(seals) == 1


def test_every_setting_is_either_a_number_or_looked_at(tmp_path: Path) -> None:
    """A new setting that holds text must be judged here: is it imported, opened or fetched?"""
    judged = {"build", "net", "data", "path"}
    names_of_tables = {"precision", "optimizer", "schedule", "device", "class_weights", "task"}
    names_of_tables.add("exact")
    parsed = {"size"}  # into two numbers
    names_of_columns = {"target", "drop"}  # compared with what a table has
    texts = set()
    for name, annotation in TrainSettings.__annotations__.items():
        if "str" in str(annotation):
            texts.add(name)
    assert texts == judged | names_of_tables | parsed | names_of_columns
    for name in sorted(names_of_tables | parsed | names_of_columns):
        option = f"--{name.replace('_', '-')}"
        result = CliRunner().invoke(
            app, ["train", option, "evil:net", "--out", str(tmp_path / "o")]
        )
        assert isinstance(result.exception, ValueError), name


def test_a_table_is_opened_only_if_trusted() -> None:
    settings = {"build": None, "net": "mlp", "data": "csv:/etc/passwd", "path": None}
    assert run_seal.reasons_to_distrust(settings) == {"data": "open the table 'csv:/etc/passwd'"}
