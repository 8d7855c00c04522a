"""Checkpoints on the disk: the files, their checksums, and the folders of a run."""

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from halfstep import Notice
from halfstep.checkpoint import (
    CheckpointError,
    latest,
    listing,
    load,
    name_of,
    prune,
    save,
    step_of,
    verify,
)

FILES = {"manifest.json", "tensors.safetensors", "tree.json"}


def make_state(step: int = 0) -> dict[str, Any]:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
    return {
        "step": step,
        "net": {"weight": weight, "tied": weight.t()},
        "scale": (2.0**16, float("inf")),
        7: None,
    }


def equal_states(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """The two are states of one step, to the bit."""
    if not all(torch.equal(a["net"][name], b["net"][name]) for name in a["net"]):
        return False
    return list(a) == list(b) and all(a[key] == b[key] for key in ("step", "scale", 7))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage_checkpoint(folder: Path) -> None:
    """One bit of the last weight."""
    path = folder / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path / "deep" / "er" / "one", make_state(3))
    assert path == tmp_path / "deep" / "er" / "one"
    assert set(os.listdir(path)) == FILES
    loaded = load(path)
    assert equal_states(loaded.tree, make_state(3))
    assert loaded.files == {}
    loaded.tree["net"]["weight"].zero_()
    assert not loaded.tree["net"]["tied"].any()  # still one memory
    assert os.listdir(path.parent) == ["one"]  # no temporary is left


def test_relative_paths_and_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert equal_states(load(str(save("here", make_state()))).tree, make_state())


@pytest.mark.parametrize("tree", [None, {}, [], 1.5, torch.empty(0), torch.tensor(2)])
def test_small_trees(tmp_path: Path, tree: Any) -> None:
    back = load(save(tmp_path / "small", tree)).tree
    assert torch.equal(back, tree) if isinstance(tree, torch.Tensor) else back == tree


def test_larger_than_every_buffer(tmp_path: Path) -> None:
    tensor = torch.randint(256, (9_000_001,), dtype=torch.uint8)
    path = save(tmp_path / "large", [tensor, tensor[:5].clone()])
    verify(path)
    assert torch.equal(load(path).tree[0], tensor)


def test_manifest_lists_sizes_and_checksums(tmp_path: Path) -> None:
    path = save(tmp_path / "one", make_state(), extra_files={"log.csv": b"step,loss\n"})
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("halfstep checkpoint", 1)
    assert manifest["torch"] == torch.__version__
    files = {name: content for name, content in contents(path).items() if name != "manifest.json"}
    expected = {}
    for name, content in files.items():
        expected[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest["files"] == expected
    assert load(path).manifest.files["log.csv"].size == 10


def test_safetensors_itself_reads_the_file(tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    path = save(
        tmp_path / "one",
        {"w": weight, "none": torch.empty(0, 2), "odd": torch.tensor([True, False, True])},
    )
    with safe_open(path / "tensors.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"storage.0", "storage.1", "storage.2"}
        assert torch.equal(file.get_tensor("storage.0").view(torch.float32), weight.flatten())
        assert file.get_tensor("storage.2").tolist() == [1, 0, 1]


def test_same_tree_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (save(tmp_path / name, make_state(5), extra_files={"a": b"1"}) for name in "xy")
    assert contents(first) == contents(second)


def test_extra_files_come_back(tmp_path: Path) -> None:
    extra = {"config.toml": b"lr = 0.1\n", "empty": b"", "All_1-2.bin": bytes(range(256))}
    assert load(save(tmp_path / "one", None, extra_files=extra)).files == extra


@pytest.mark.parametrize(
    "name",
    ["../out", "a/b", "a\\b", "..", ".", "", ".hidden", "-rf", "a" * 101, "ü", "a\0", "a\n", "a b"],
)
def test_names_with_tricks_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="extra_files: expected names of 1 to 100 letters"):
        save(tmp_path / "one", None, extra_files={name: b""})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("names", [["tree.json"], ["Manifest.JSON"], ["a", "A"]])
def test_names_twice_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ValueError, match="expected each name once, case aside"):
        save(tmp_path / "one", None, extra_files=dict.fromkeys(names, b""))


def test_extra_files_are_bytes(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"extra_files\['a'\]: expected bytes, got str"):
        save(tmp_path / "one", None, extra_files={"a": "text"})  # type: ignore[dict-item]


def test_what_does_not_fit_is_refused_before_the_disk_is_touched(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^net\.hook: expected .* got function"):
        save(tmp_path / "runs" / "one", {"net": {"hook": lambda: 0}})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("taken", ["folder", "file", "link", "checkpoint"])
def test_nothing_is_overwritten(tmp_path: Path, taken: str) -> None:
    path = tmp_path / "one"
    make = {"folder": path.mkdir, "file": path.touch, "link": lambda: path.symlink_to("nowhere")}
    make.get(taken, lambda: save(path, make_state(1)))()
    with pytest.raises(
        CheckpointError, match=r"one: expected a name that is not taken, found .* never overwritten"
    ):
        save(path, make_state(2))
    assert os.listdir(tmp_path) == ["one"]
    if taken == "checkpoint":
        assert equal_states(load(path).tree, make_state(1))


def test_a_moved_checkpoint_and_a_link_to_one_load(tmp_path: Path) -> None:
    save(tmp_path / "one", make_state(1))
    os.rename(tmp_path / "one", tmp_path / "two")
    (tmp_path / "last").symlink_to("two")
    assert equal_states(load(tmp_path / "last").tree, make_state(1))


def test_unverified_load_skips_only_the_tensors_checksum(tmp_path: Path) -> None:
    path = save(tmp_path / "one", make_state(), extra_files={"a": b"1"})
    damage_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors: expected sha256"):
        load(path)
    assert load(path, verify=False).tree["step"] == 0
    (path / "a").write_bytes(b"2")
    with pytest.raises(CheckpointError, match="a: expected sha256"):
        load(path, verify=False)


def test_default_device_does_not_matter(tmp_path: Path) -> None:
    path = save(tmp_path / "one", make_state())
    with torch.device("meta"):
        loaded = load(path)
    assert equal_states(loaded.tree, make_state())


def test_load_to_a_device(tmp_path: Path, device: torch.device) -> None:
    net = nn.Linear(3, 2, device=device)
    path = save(tmp_path / "one", net.state_dict())
    assert load(path).tree["weight"].device.type == "cpu"
    back = load(path, device=lambda saved: saved).tree["weight"]
    assert back.device == device
    assert torch.equal(back, net.weight)


def test_names_and_steps() -> None:
    assert [name_of(step) for step in (0, 123, 10**9)] == [
        "step-000000000",
        "step-000000123",
        "step-1000000000",
    ]
    assert [step_of(Path("a") / name_of(step)) for step in (0, 123, 10**9)] == [0, 123, 10**9]
    for name in (
        "step-1",
        "step-0000000001",
        "step-00000012a",
        "step-000000001.tmp",
        "xstep-000000001",
        f"step-{chr(0x661) * 9}",
    ):
        with pytest.raises(ValueError, match="expected a name such as step-000000123"):
            step_of(name)
    for step in (-1, 1.0, True):
        with pytest.raises(ValueError, match="expected a step of 0 or more"):
            name_of(step)  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five checkpoints, and things that are none."""
    for step in (10**9, 3, 20, 1, 100):
        save(tmp_path / name_of(step), make_state(step))
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-000000050").touch()
    return tmp_path


def listed_steps(root: Path) -> list[int]:
    return [step_of(path) for path in listing(root)]


def test_listing_is_by_step(root: Path) -> None:
    assert listed_steps(root) == [1, 3, 20, 100, 10**9]
    assert listing(root / "absent") == []
    with pytest.raises(
        CheckpointError,
        match="step-000000050: expected a folder of checkpoints, found Not a directory",
    ):
        listing(root / "step-000000050")


def test_latest_is_the_newest(root: Path) -> None:
    assert latest(root) == root / name_of(10**9)
    assert latest(root / "absent") is None
    assert latest(root / "notes") is None


def test_latest_passes_over_broken_ones_and_names_them(root: Path) -> None:
    damage_checkpoint(root / name_of(10**9))
    (root / name_of(100) / "manifest.json").unlink()
    (root / name_of(200)).mkdir()
    with pytest.warns(Notice) as caught:
        assert latest(root) == root / name_of(20)
    [notice] = caught
    text = str(notice.message)
    assert text.startswith(f"3 checkpoints broken, {root / name_of(20)} is used instead:\n")
    assert "step-1000000000/tensors.safetensors: expected sha256" in text
    assert (
        "step-000000200: expected a checkpoint, a folder with manifest.json, found an empty folder"
        in text
    )
    assert (
        "step-000000100: expected a checkpoint, a folder with manifest.json, found one without"
        in text
    )
    assert Path(notice.filename) == Path(__file__)


def test_latest_of_only_broken_ones_is_none(tmp_path: Path) -> None:
    damage_checkpoint(save(tmp_path / name_of(1), make_state()))
    with pytest.warns(Notice, match="1 checkpoint broken, no whole one is left"):
        assert latest(tmp_path) is None


def test_prune_removes_the_oldest(root: Path) -> None:
    assert prune(root, 3) == [root / name_of(1), root / name_of(3)]
    assert listed_steps(root) == [20, 100, 10**9]
    assert prune(root, 3) == []
    assert prune(root, 99) == []
    names = {name_of(step) for step in listed_steps(root)}
    assert set(os.listdir(root)) == names | {"notes", "step-000000050"}


def test_prune_spares_the_protected(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)  # the same folder by another path is the same folder
    prune(root, 1, protect=[Path(name_of(3)), Path("..") / root.name / name_of(20)])
    assert listed_steps(root) == [3, 20, 10**9]


def test_prune_never_counts_a_broken_one(root: Path) -> None:
    (root / name_of(10**9) / "manifest.json").unlink()
    prune(root, 1)
    assert listed_steps(root) == [100, 10**9]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        assert latest(root) == root / name_of(100)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_prune_keeps_at_least_one(root: Path, keep: int) -> None:
    with pytest.raises(ValueError, match="expected keep of 1 or more"):
        prune(root, keep)
    assert len(listed_steps(root)) == 5


def test_prune_removes_a_link_and_not_what_it_points_to(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    moved = tmp_path_factory.mktemp("other") / "moved"
    os.rename(root / name_of(1), moved)
    (root / name_of(1)).symlink_to(moved)
    assert listed_steps(root)[0] == 1
    prune(root, 1)
    assert listed_steps(root) == [10**9]
    assert equal_states(load(moved).tree, make_state(1))
