"""The key of our passes in torch's cache of compiled programs."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor.custom_graph_pass import get_hash_for_files

import halfstep
from halfstep.compiler import fx
from halfstep.compiler.fx import GraphPass
from halfstep.compiler.passes.join_casts import JoinCasts
from halfstep.compiler.passes.joint_graph import JointGraphPass
from halfstep.compiler.passes.split_k import SplitK

PACKAGE = Path(halfstep.__file__).parent


@pytest.fixture
def copied_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copies of compiler/ and kernels/ that the key is taken of, to be changed."""
    for folder in ("compiler", "kernels"):
        shutil.copytree(PACKAGE / folder, tmp_path / folder)
    monkeypatch.setattr(fx, "SOURCE_FOLDERS", (tmp_path / "compiler", tmp_path / "kernels"))
    fx._source_files.cache_clear()
    yield tmp_path
    fx._source_files.cache_clear()
    get_hash_for_files.cache_clear()


def current_key(graph_pass: GraphPass) -> bytes:
    """As a new process would compute it: torch remembers the last one."""
    get_hash_for_files.cache_clear()
    return graph_pass.uuid()


@pytest.mark.parametrize(
    "path",
    [
        "compiler/fx.py",
        "compiler/backend.py",
        "compiler/decompositions.py",
        "compiler/passes/batch_weight_grads.py",
        "compiler/passes/max_pool.py",
        "compiler/passes/relu_masks.py",
        "kernels/backward_triton.py",
        "kernels/launch.py",
    ],
)
@pytest.mark.parametrize("pass_class", [JoinCasts, SplitK, JointGraphPass])
def test_a_change_of_any_source_file_changes_the_key(
    pass_class: type[GraphPass], path: str, copied_sources: Path
) -> None:
    before = current_key(pass_class("cuda"))
    assert current_key(pass_class("cuda")) == before
    with (copied_sources / path).open("a") as file:
        file.write("# changed\n")
    assert current_key(pass_class("cuda")) != before


def test_passes_and_devices_have_different_keys() -> None:
    pass_classes: list[type[GraphPass]] = [JoinCasts, SplitK, JointGraphPass]
    keys = {pass_class(device).uuid() for pass_class in pass_classes for device in ("cuda", "cpu")}
    assert len(keys) == 6


def test_the_key_is_taken_of_both_folders() -> None:
    files = {Path(file).relative_to(PACKAGE).as_posix() for file in fx._source_files()}
    expected = {
        path.relative_to(PACKAGE).as_posix()
        for folder in ("compiler", "kernels")
        for path in (PACKAGE / folder).rglob("*.py")
    }
    assert files == expected
