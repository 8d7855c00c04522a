"""Damaged, malicious and foreign checkpoints, full disks, kills.

The result is always a named error or a complete checkpoint, nothing less.
"""

import errno
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from halfstep.checkpoint import (
    CheckpointError,
    latest,
    listing,
    load,
    name_of,
    save,
    step_of,
    verify,
)
from halfstep.checkpoint.disk import explain_save_error
from halfstep.utils.atomic_files import _host_id, _process_start

EXTRA = {"notes.txt": b"the learning rate was lowered by hand\n"}
MIB = 1 << 20


def make_state(step: int) -> dict[str, Any]:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
    return {"step": step, "weight": weight, "tied": weight[3:], "lr": 0.1 / (step + 1)}


def equal_states(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = a["step"] == b["step"] and a["lr"] == b["lr"]
    return same and torch.equal(a["weight"], b["weight"]) and torch.equal(a["tied"], b["tied"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / name_of(1), {"w": torch.arange(6.0), "n": [1, "x"]}, extra_files=EXTRA)


def check_refused(path: Path, match: str = "expected") -> None:
    """Both readers refuse it, in little memory.

    The message names the path, what was expected and what was found.
    """
    tracemalloc.start()
    try:
        for read in (load, verify):
            with pytest.raises(CheckpointError, match=match) as caught:
                read(path)
            text = str(caught.value)
            assert text.startswith(str(path))
            assert ": expected " in text
            assert ", found " in text
            assert "expected memory" not in text  # torch's allocator was never asked
            assert len(text) < 1500
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def reseal(path: Path, edit: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Makes manifest and seal agree with the files again, as someone who means harm would."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("seal", None)
    for name in manifest["files"]:
        if (path / name).is_file():
            content = (path / name).read_bytes()
            manifest["files"][name] = {
                "size": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
    edit(manifest)
    seal = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**manifest, "seal": seal}, indent=1) + "\n")


def test_the_harm_doer_here_can_make_a_good_one(path: Path) -> None:
    before = (path / "manifest.json").read_bytes()
    reseal(path)
    assert (path / "manifest.json").read_bytes() == before
    assert load(path).tree["n"] == [1, "x"]


@pytest.mark.parametrize("name", ["manifest.json", "tree.json", "tensors.safetensors", "notes.txt"])
def test_every_flipped_byte_is_found(path: Path, name: str) -> None:
    content = (path / name).read_bytes()
    for at in range(0, len(content), 1 + len(content) // 200):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        (path / name).write_bytes(flipped)
        with pytest.raises(CheckpointError, match="expected"):
            load(path)
    (path / name).write_bytes(content)
    load(path)


@pytest.mark.parametrize("name", ["manifest.json", "tree.json", "tensors.safetensors", "notes.txt"])
def test_every_cut_and_every_addition_is_found(path: Path, name: str) -> None:
    content = (path / name).read_bytes()
    for wrong in (
        b"",
        content[:1],
        content[: len(content) // 2],
        content[:-1],
        content + b"\0",
        content + b"\n",
    ):
        (path / name).write_bytes(wrong)
        check_refused(path, name)


@pytest.mark.parametrize("name", ["tree.json", "tensors.safetensors", "notes.txt"])
def test_a_missing_file_is_named(path: Path, name: str) -> None:
    (path / name).unlink()
    check_refused(path, f"expected the files of its manifest.json, found no {name}")


@pytest.mark.parametrize("name", ["more.bin", ".hidden", "tree.json~", "new\nline", "data.pkl"])
def test_an_additional_file_is_named(path: Path, name: str) -> None:
    (path / name).touch()
    check_refused(
        path,
        "expected only the files of its manifest.json, found .* too. Move what does not belong",
    )
    (path / name).unlink()
    load(path)  # the advice works


def test_renamed_and_swapped_files_are_found(path: Path, tmp_path: Path) -> None:
    os.rename(path / "notes.txt", path / "note.txt")
    check_refused(path, "found no notes.txt")
    os.rename(path / "note.txt", path / "notes.txt")
    other = save(
        tmp_path / "other", {"w": torch.arange(1.0, 7.0), "n": [1, "x"]}, extra_files=EXTRA
    )
    # A sound file of the same size, from another checkpoint.
    shutil.copy(other / "tensors.safetensors", path)
    check_refused(path, r"tensors\.safetensors: expected sha256")


@pytest.mark.parametrize("name", ["manifest.json", "tree.json", "tensors.safetensors", "notes.txt"])
def test_links_folders_and_pipes_inside_are_not_followed(
    path: Path, name: str, tmp_path: Path
) -> None:
    os.rename(path / name, tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    check_refused(path, f"{name}: expected a file that can be read, found a symbolic link")
    (path / name).unlink()
    (path / name).mkdir()
    check_refused(path, f"{name}: expected a regular file, found something else")
    (path / name).rmdir()
    os.mkfifo(path / name)  # reading it would wait for a writer
    check_refused(path, f"{name}: expected a regular file, found something else")


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/hostname", "..", "a/b", "", ".x", "manifest.json"]
)
def test_names_that_leave_the_folder_are_refused(path: Path, name: str) -> None:
    (path.parent / "outside").write_bytes(b"secret")
    entry = {"size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    reseal(path, lambda manifest: manifest["files"].update({name: entry}))
    check_refused(path, r"manifest\.json: expected versions, files with size and sha256")


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("format", "other", r'expected "format": "halfstep checkpoint"'),
        (
            "version",
            2,
            "found version 2, from a newer halfstep. Upgrade halfstep: pip install -U halfstep",
        ),
        ("version", 10**30, "from a newer halfstep"),
        ("version", 0, "expected a version of 1 to 1, found 0"),
        ("version", True, "expected a version of 1 to 1, found True"),
        ("version", "1", "expected a version of 1 to 1, found '1'"),
        ("files", [], "expected versions, files"),
        ("files", {}, "expected versions, files"),
        ("more", 1, "expected versions, files"),
        ("torch", 2, "expected a manifest that agrees with its seal"),
    ],
)
def test_wrong_manifests(path: Path, field: str, value: Any, match: str) -> None:
    reseal(path, lambda manifest: manifest.update({field: value}))
    check_refused(path, match)


@pytest.mark.parametrize("size", [2**60, 2**62, -1, 1.0, True, "9", None])
def test_wrong_sizes_allocate_nothing(path: Path, size: Any) -> None:
    reseal(path, lambda manifest: manifest["files"]["tensors.safetensors"].update(size=size))
    check_refused(path)


def test_a_huge_manifest_is_not_read(path: Path) -> None:
    os.truncate(path / "manifest.json", 1 << 40)  # a hole: no disk is used
    check_refused(path, r"manifest\.json: expected at most 1048576 bytes, found 1099511627776")


def test_a_huge_tree_is_not_read(path: Path) -> None:
    entry = {"size": 1 << 40, "sha256": "0" * 64}
    reseal(path, lambda manifest: manifest["files"].update({"tree.json": entry}))
    os.truncate(path / "tree.json", 1 << 40)
    check_refused(path, r"tree\.json: expected at most 268435456 bytes, found 1099511627776")


VIEW = {"storage": 0, "dtype": "float32", "size": [6], "stride": [1], "offset": 0}
STORAGES = [{"bytes": 24, "device": "cpu"}]


def tree_json(tree: Any = None, tensors: Any = None, storages: Any = None) -> dict[str, Any]:
    return {
        "tree": tree,
        "tensors": [] if tensors is None else tensors,
        "storages": storages or STORAGES,
    }


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\x80\x04K\x01.", "expected JSON"),
        (b"{", "expected JSON"),
        (b"NaN", "NaN is not JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b"9" * 5000, "expected JSON"),
        (
            b'{"tensors":[],"storages":[],"tree":' + b"[" * 102 + b"]" * 102 + b"}",
            "expected at most 100 levels",
        ),
        (b"[]", "expected an object with storages, tensors, tree"),
        ({"tree": None}, "expected an object with storages, tensors, tree"),
        (tree_json(tensors={}), "tensors: expected a list"),
        (tree_json(storages=[3]), r"storages\[0\]: expected a size in bytes and a device"),
        (tree_json(storages=[{"bytes": -1, "device": "cpu"}]), r"storages\[0\]: expected a size"),
        (
            tree_json(storages=[{"bytes": 24, "device": "toaster"}]),
            r"storages\[0\]: expected a device",
        ),
        (
            tree_json(storages=[{"bytes": 2**60, "device": "cpu"}]),
            "bytes, as tree.json has them, found",
        ),
        (
            tree_json(storages=[{"bytes": 2**61, "device": "cpu"}] * 5),
            "bytes, as tree.json has them, found",
        ),
        (
            tree_json(storages=[{"bytes": 12, "device": "cpu"}] * 2),
            "bytes, as tree.json has them, found",
        ),
        (
            tree_json(tensors=[{}]),
            r"tensors\[0\]: expected an object with dtype, offset, size, storage, stride",
        ),
        (tree_json(tensors=[{**VIEW, "dtype": "qint8"}]), "expected a dtype of bool, uint8"),
        (tree_json(tensors=[{**VIEW, "dtype": ["float32"]}]), "expected a dtype of bool, uint8"),
        (tree_json(tensors=[{**VIEW, "dtype": "__dict__"}]), "expected a dtype of bool, uint8"),
        (
            tree_json(tensors=[{**VIEW, "offset": 1}]),
            "expected a window within 24 bytes, found one that ends at 28",
        ),
        (tree_json(tensors=[{**VIEW, "offset": -1}]), "expected sizes and strides"),
        (tree_json(tensors=[{**VIEW, "size": [-1]}]), "expected sizes and strides"),
        (tree_json(tensors=[{**VIEW, "stride": [-1]}]), "expected sizes and strides"),
        (tree_json(tensors=[{**VIEW, "size": [True]}]), "expected sizes and strides"),
        (tree_json(tensors=[{**VIEW, "size": [1, 1]}]), "expected sizes and strides"),
        (
            tree_json(tensors=[{**VIEW, "size": [0] * 65, "stride": [0] * 65}]),
            "expected sizes and strides",
        ),
        (tree_json(tensors=[{**VIEW, "size": [2**62]}]), "expected a window within 24 bytes"),
        (
            tree_json(tensors=[{**VIEW, "size": [2**40] * 2, "stride": [0, 0]}]),
            r"expected at most 2\^62 elements",
        ),
        (tree_json(tensors=[{**VIEW, "storage": 1}]), "expected one of 1 storages, found 1"),
        (tree_json(tensors=[{**VIEW, "storage": -1}]), "expected one of 1 storages, found -1"),
        (tree_json(tensors=[{**VIEW, "storage": None}]), "expected one of 1 storages, found None"),
        (tree_json({"tensor": 0}), "expected a tagged value"),
        (tree_json({"tensor": -1}, [VIEW]), "expected a tagged value"),
        (tree_json({"object": "os.system"}), "expected a tagged value"),
        (
            tree_json({"int": "0x1f"}),
            "expected a value of kind 'int'",
        ),  # it fits JSON, so it is never written so
        (tree_json({"int": 5}), "expected a value of kind 'int'"),
        (tree_json({"float": "00"}), "expected a value of kind 'float'"),
        (tree_json({"float": "3ff0000000000000"}), "expected a value of kind 'float'"),
        (tree_json({"bytes": "0 0"}), "expected a value of kind 'bytes'"),
        (tree_json({"tuple": {}}), "expected a tagged value"),
        (tree_json({"dict": [["a"]]}), "expected a pair of key and value"),
        (tree_json({"dict": [["a", 1], ["a", 2]]}), "expected keys that are str or int, each once"),
        (tree_json({"dict": [[1.5, 1]]}), "expected keys that are str or int, each once"),
        (tree_json({"dict": [[[], 1]]}), "expected keys that are str or int, each once"),
        (tree_json({"dict": [], "tuple": []}), "expected an object of one key"),
        (tree_json({}), "expected an object of one key"),
        (b'{"tree":1e999,"tensors":[],"storages":[]}', "expected a finite number"),
    ],
)
def test_malicious_trees_are_refused(path: Path, content: Any, match: str) -> None:
    """The checksums are right: only the content is not."""
    (path / "tree.json").write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    reseal(path)
    check_refused(path, match)


def test_a_good_tree_by_hand_is_no_trouble(path: Path) -> None:
    tree = tree_json({"dict": [["w", {"tensor": 0}]]}, [VIEW])
    (path / "tree.json").write_text(json.dumps(tree))
    reseal(path)
    assert torch.equal(load(path).tree["w"], torch.arange(6.0))


def safetensors_head(entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 0),
        safetensors_head(
            {"storage.0": {"dtype": "U8", "shape": [2**60], "data_offsets": [0, 2**60]}}
        ),
        safetensors_head({"storage.0": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}),
        safetensors_head({"storage.0": {"dtype": "U8", "shape": [24], "data_offsets": [4, 28]}}),
    ],
)
def test_malicious_headers_are_refused(path: Path, head: bytes) -> None:
    size = (path / "tensors.safetensors").stat().st_size
    (path / "tensors.safetensors").write_bytes((head + bytes(size))[:size])
    reseal(path)
    check_refused(
        path, "expected the safetensors header that tree.json asks for, found another one"
    )


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(BOMBED),)


BOMBED = Path("/tmp") / f"halfstep-bomb-{os.getpid()}"


def foreign_paths(folder: Path) -> Iterator[tuple[Path, str]]:
    """Things that are no checkpoint, made by what makes them, and what the error says of each."""
    torch.save({"w": torch.ones(2), "bomb": Bomb()}, folder / "model.pt")
    yield (
        folder / "model.pt",
        r"a zip file, as torch.save and Lightning write .* Read it with torch\.load",
    )
    with zipfile.ZipFile(folder / "epoch=1.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    yield folder / "epoch=1.ckpt", "a zip file"
    torch.save({"w": torch.ones(2)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    yield folder / "old.pt", "a pickle, which is never loaded"
    (folder / "bomb.pkl").write_bytes(pickle.dumps(Bomb()))
    yield folder / "bomb.pkl", "a pickle, which is never loaded"
    save_file({"w": torch.ones(2)}, folder / "w.safetensors")
    yield (
        folder / "w.safetensors",
        r"a bare safetensors file. Read it with safetensors\.torch\.load_file",
    )
    (folder / "text").write_text("hello")
    yield folder / "text", "a file that starts with 68 65 6c 6c"
    (folder / "nothing").touch()
    yield folder / "nothing", "an empty file"
    yield folder / "absent", "nothing there"
    yield folder / "text" / "below", "nothing there"
    for name, files, words in (
        ("empty", [], "an empty folder"),
        (
            "hf",
            ["config.json", "model.safetensors"],
            "a Hugging Face folder. Load the network with transformers'",
        ),
        ("dcp", [".metadata", "__0_0.distcp"], r"a torch\.distributed checkpoint"),
        (
            "run",
            ["step-000000001", "step-000000002"],
            "a folder of checkpoints. Name one of them, such as .*2$",
        ),
        ("other", ["a", "b", "c", "d"], "a folder with a, b, c and more"),
        ("half", ["tree.json"], r"one without manifest\.json, so not a whole one"),
    ):
        (folder / name).mkdir()
        for file in files:
            (folder / name / file).touch()
        yield folder / name, words


def test_foreign_things_are_named_and_never_run(tmp_path: Path) -> None:
    for path, words in foreign_paths(tmp_path):
        check_refused(path, f"expected a checkpoint, a folder with manifest.json, found {words}")
    assert not BOMBED.exists()


@pytest.mark.parametrize("name", ["manifest.json", "tree.json", "tensors.safetensors", "notes.txt"])
def test_a_pickle_in_place_of_a_file_is_never_run(path: Path, name: str) -> None:
    (path / name).write_bytes(pickle.dumps(Bomb()))
    if name != "manifest.json":
        reseal(path)
    if name == "notes.txt":
        assert load(path).files[name] == pickle.dumps(Bomb())  # bytes are bytes
    else:
        check_refused(path)
    assert not BOMBED.exists()


def test_one_file_of_a_checkpoint_leads_to_its_folder(path: Path) -> None:
    check_refused(path / "tree.json", f"found one file of it. Name its folder: {path}$")


# --- the disk ---


def check_save_fails(path: Path, match: str, tree: Any = None, root: Path | None = None) -> None:
    """The save fails in these words and leaves nothing behind."""
    before = sorted((root or path.parent).rglob("*"))
    with pytest.raises(CheckpointError, match=match) as caught:
        save(path, tree)
    assert isinstance(caught.value.__cause__, OSError)
    assert sorted((root or path.parent).rglob("*")) == before


def test_places_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    long = "n" * 300
    no_place = "expected a place for a new folder, found "
    for name, words in (
        ("file/one", f"{no_place}Not a directory. Choose a path under an existing folder"),
        ("file/deep/one", f"{no_place}Not a directory"),
        ("loop/one", no_place),
        (
            long,
            "expected a name that the file system takes, found File name too long. "
            "Choose a shorter one",
        ),
        (f"{long}/one", "found File name too long"),
    ):
        check_save_fails(tmp_path / name, words, root=tmp_path)
    check_save_fails(
        Path("/proc/halfstep/one"),
        "proc/halfstep/one: expected a place for a new folder",
        root=tmp_path,
    )


@contextmanager
def limit_file_size(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_half_way_leaves_nothing_and_the_next_succeeds(tmp_path: Path) -> None:
    tree = {"w": torch.zeros(MIB)}
    with limit_file_size(
        MIB
    ):  # Python ignores SIGXFSZ, so the system says EFBIG after the first MiB
        check_save_fails(
            tmp_path / "one",
            r"expected files of up to 4,19\d,\d{3} bytes, found File too large. Allow",
            tree,
        )
    assert torch.equal(load(save(tmp_path / "one", tree)).tree["w"], tree["w"])


# in a mount namespace of its own, so that nothing stays mounted
DISK = """
import json, os, subprocess, sys, torch
from halfstep.checkpoint import CheckpointError, load, save
root, words = sys.argv[1], []
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", root], check=True)
def attempt(name, count):
    try:
        save(f"{root}/{name}", torch.ones(count, dtype=torch.uint8))
    except CheckpointError as error:
        words.append([str(error), sorted(os.listdir(root))])
attempt("first", 300_000)
attempt("second", 2_000_000)
attempt("third", 300_000)
assert load(f"{root}/first").tree.sum() == load(f"{root}/third").tree.sum() == 300_000
subprocess.run(["mount", "-o", "remount,ro", root], check=True)
attempt("fourth", 3)
print(json.dumps(words))
"""


def test_full_and_read_only_disks(tmp_path: Path) -> None:
    if subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("this system lets no test mount a disk of its own")
    command = ["unshare", "-rm", sys.executable, "-c", DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (full, names_when_full), (read_only, names_when_read_only) = json.loads(done.stdout)
    assert names_when_full == ["first"]
    assert names_when_read_only == ["first", "third"]
    assert "second: expected room for 2,00" in full
    free, more = (
        int(full.split(word)[1].split()[0].replace(",", "")) for word in (", found ", "Free ")
    )
    assert 600_000 < free < MIB - 300_000
    assert 2_000_000 < free + more < 2_010_000  # what it says is what is missing
    assert "fourth: expected a folder that can be written, found Read-only file system" in read_only


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """A folder that this process may read and not write: root gives its rights away meanwhile."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    user = os.geteuid()
    folder.chmod(0o555)
    if user == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    folder.rmdir()


def test_no_permission(read_only_folder: Path) -> None:
    words = (
        "expected a folder that can be written, found Permission denied. "
        "Save to a folder that you may write to"
    )
    check_save_fails(read_only_folder / "one", words)
    check_save_fails(read_only_folder / "deep" / "one", words, root=read_only_folder)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (
            errno.EDQUOT,
            r"expected room for 12,345 bytes, found Disk quota exceeded\. "
            "Free 12,345 bytes of your quota",
        ),
        (
            errno.EIO,
            r"expected a disk that takes the checkpoint, found Input/output error\. Check the disk",
        ),
    ],
)
def test_words_for_what_no_test_can_provoke(tmp_path: Path, number: int, words: str) -> None:
    error = explain_save_error(OSError(number, os.strerror(number)), tmp_path / "one", 12_345)
    with pytest.raises(CheckpointError, match=words):
        raise error


# --- kills ---

# A process that has everything imported, and forks a saver for each line that it reads. The saver
# is killed after a delay in seconds, or before its n-th call of the system that Python reports.
SAVERS = """
import os, signal, sys, time, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from test_checkpoint_faults import make_state
from halfstep.checkpoint import latest, name_of, prune, save, step_of
root = sys.argv[1]
CALLS = (
    "open", "os.mkdir", "os.rename", "os.remove",
    "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree",
)
def run(calls, keep):
    path = latest(root)
    step = step_of(path) if path else 0
    left = [calls]
    def count(event, args):
        if event in CALLS:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    if calls:
        sys.addaudithook(count)
    os.write(1, b"started\\n")
    while step < 10**6:
        step += 1
        save(f"{root}/{name_of(step)}", make_state(step))
        prune(root, keep)
print("ready", flush=True)
for line in sys.stdin:
    delay, calls, keep = line.split()
    child = os.fork()
    if child == 0:
        run(int(calls), int(keep))
        os._exit(1)
    if int(calls) == 0:
        time.sleep(float(delay))
        os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    print("killed", flush=True)
"""


@pytest.fixture(scope="module")
def savers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Callable[..., None]]]:
    """The folder of a run, and a function that saves into it until a kill."""
    root = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-c", SAVERS, str(root), str(Path(__file__).parent)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        stdin = process.stdin
        stdout = process.stdout
        assert stdout.readline() == "ready\n"

        def saved_until(delay: float, calls: int = 0, keep: int = 3) -> None:
            stdin.write(f"{delay} {calls} {keep}\n")
            stdin.flush()
            line = stdout.readline()
            while line not in ("killed\n", ""):
                line = stdout.readline()
            assert line == "killed\n"

        yield root, saved_until
        stdin.close()


def check_latest(root: Path, floor: int) -> int:
    """Checks latest(): no notice, no older than it was, and the state that was saved. Its step."""
    path = latest(root)  # a Notice would be an error here
    if path is None:
        assert floor == 0
        return 0
    step = step_of(path)
    assert step >= floor
    assert equal_states(load(path).tree, make_state(step))
    return step


def temporaries(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(".halfstep")]


def test_a_kill_before_any_system_call_leaves_a_whole_checkpoint(savers: Any) -> None:
    root, saved_until = savers
    step = 0
    kills_with_leftovers = 0
    # A save and a prune make 31 calls together, and clearing up after a kill some more.
    for calls in range(1, 51):
        saved_until(0, calls)
        step = check_latest(root, step)
        kills_with_leftovers += bool(temporaries(root))
        # One unfinished, one being deleted: the next save removes both.
        assert len(temporaries(root)) <= 2
    assert step > 0
    assert kills_with_leftovers > 10  # the kills did hit saves


def test_kills_at_random_moments(savers: Any) -> None:
    root, saved_until = savers
    rng = random.Random(0)
    step = 0
    kills_with_leftovers = 0
    for _ in range(30):
        saved_until(rng.uniform(0, 0.06))
        step = check_latest(root, step)
        kills_with_leftovers += bool(temporaries(root))
    assert step > 0
    assert kills_with_leftovers > 0
    save(root / name_of(step + 1), make_state(step + 1))
    assert temporaries(root) == []


@pytest.mark.parametrize("keep", [1, 10**6])
def test_a_reader_never_sees_a_broken_one(savers: Any, keep: int) -> None:
    """Another process saves all the while, and prunes down to one with keep=1.

    What `latest` found may then be gone before it is loaded, but `latest` itself never fails,
    warns or goes back.
    """
    root, saved_until = savers
    writer = threading.Thread(target=saved_until, args=(0.6, 0, keep))
    step = 0
    seen = set()
    writer.start()
    while writer.is_alive():
        if keep > 1:
            step = check_latest(root, step)
        elif (path := latest(root)) is not None or step:
            assert path is not None
            assert step_of(path) >= step
            step = step_of(path)
        seen.add(step)
    writer.join()
    assert check_latest(root, step) >= step > 0
    assert len(seen) > 1


def test_a_live_temporary_is_left_alone(tmp_path: Path) -> None:
    """Two saves at once into one folder: neither takes the other's temporary for a dead one."""
    threads = [
        threading.Thread(target=save, args=(tmp_path / name_of(i), make_state(i))) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [load(path).tree["step"] for path in listing(tmp_path)] == list(range(8))


def test_a_temporary_stays_as_long_as_its_process(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as owner:
        folder = tmp_path / f".halfstep-tmp-{_host_id()}-{owner.pid}-{_process_start(owner.pid)}-00"
        # Of an earlier process with the same pid.
        reborn = tmp_path / f".halfstep-tmp-{_host_id()}-{owner.pid}-1-00"
        folder.mkdir()
        reborn.mkdir()
        save(tmp_path / "one", None)
        assert temporaries(tmp_path) == [folder.name]
        owner.kill()
        # Dead, and still in the table of processes.
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        save(tmp_path / "two", None)
        assert temporaries(tmp_path) == []


def test_temporaries_of_other_hosts_go_after_an_hour(tmp_path: Path) -> None:
    old, new = (tmp_path / f".halfstep-tmp-elsewhere-1-2-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
        (folder / "tensors.safetensors").touch()
    for path in (old / "tensors.safetensors", old, new):
        os.utime(path, (0, 0))  # in `new` a file is still being written
    save(tmp_path / "one", None)
    assert temporaries(tmp_path) == [new.name]
