"""Tar shards with an index: which members are a sample, what becomes of them, what is refused."""

import os
import pickle
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfstep as hs
from halfstep.data.shards import tar_shards
from halfstep.data.shards.tar_shards import TarShards
from tests.support.flaky_source import flaky_source
from tests.support.tar_files import add_member, npy, pixels, png, write_shards, write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def labels_of(data: Any) -> list[int]:
    return [sample["cls"] for sample in data]


def test_every_part_is_decoded(tmp_path: Path) -> None:
    write_shards(tmp_path / "s", [3, 1, 4])
    shards = TarShards(tmp_path / "s")
    assert len(shards) == 8
    for number in range(8):
        sample = shards[number]
        assert list(sample) == ["png", "cls", "txt", "x.npy", "json"]
        assert torch.equal(sample["png"], pixels(number))
        assert sample["cls"] == number
        assert sample["txt"] == f"sample {number} ünï"
        assert sample["x.npy"].tolist() == [number, number + 1, number + 2]
        assert sample["json"] == {"number": number}
    assert shards[-1]["cls"] == 7
    with pytest.raises(IndexError):
        shards[8]


def test_a_pipeline_takes_it(tmp_path: Path) -> None:
    """Shuffled, in batches, over two ranks: each sample once, and a resume at the very next one."""
    write_shards(tmp_path / "s", [7, 5, 9], parts=2)
    columns = {"image": ("jpg", "png"), "label": "cls"}
    shards = TarShards(tmp_path / "s" / "*.tar", columns)
    seen: list[int] = []
    for rank in range(2):
        data = hs.data.Dataset(shards, seed=3).shuffle().shard(2, rank).batch(4)
        stream = iter(data)
        for _ in range(2):
            images, labels = next(stream)
            for image, label in zip(images, labels.tolist(), strict=True):
                assert torch.equal(image, pixels(label))
            seen += labels.tolist()
        state = data.state_dict()
        again = hs.data.Dataset(TarShards(tmp_path / "s", columns), seed=3).shuffle().shard(2, rank)
        again = again.batch(4)
        again.load_state_dict(state)
        rest = [labels.tolist() for _, labels in again]
        assert rest == [labels.tolist() for _, labels in stream]
        for labels in rest:
            seen += labels
    assert sorted(seen) == list(range(21))


FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


@pytest.mark.parametrize("tar_format", FORMATS)
def test_formats_of_tar_and_long_names(tar_format: int, tmp_path: Path) -> None:
    long = "folder-" * 12 + "/" + "k" * 90
    members = [(f"{long}{i}.{part}", str(i).encode()) for i in range(5) for part in ("cls", "txt")]
    path = write_tar(tmp_path / "a.tar", members, tar_format)
    shards = TarShards(path, ["cls", "txt", "__key__"])
    assert labels_of(shards) == list(range(5))
    assert shards[3]["__key__"] == f"{long}3"


def test_folders_hidden_files_and_plain_names_are_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        add_member(archive, "README", b"hello")
        add_member(archive, "a.b/", b"", type=tarfile.DIRTYPE)
        add_member(archive, "a.b/1.cls", b"1")
        add_member(archive, "a.b/._1.cls", b"mac")
        add_member(archive, "a.b/1.txt", b"one")
        add_member(archive, "a.b/.hidden", b"x")
        add_member(archive, "a.b/2.CLS", b"2")
    shards = TarShards(path)
    assert [dict(sample) for sample in shards] == [{"cls": 1, "txt": "one"}, {"cls": 2}]  # type: ignore[attr-defined]


def test_random_shards_equal_what_was_written(tmp_path: Path) -> None:
    draw = random.Random(5)
    for case in range(20):
        written = []
        members = []
        for i in range(draw.randrange(1, 30)):
            parts = draw.sample(["a", "b.c", "bin", "seg.dat"], draw.randrange(1, 5))
            sample = {
                part: draw.randbytes(draw.choice([0, 1, 511, 512, 513, 3000])) for part in parts
            }
            written.append(sample)
            members += [(f"{i}.{part}", content) for part, content in sample.items()]
        path = write_tar(tmp_path / f"{case}.tar", members)
        shards = TarShards(path)
        assert [shards[i] for i in range(len(shards))] == written


def test_the_index_is_kept_until_the_shard_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = write_shards(tmp_path / "s", [4], parts=2)
    assert labels_of(TarShards(path)) == [0, 1, 2, 3]
    scans = []
    scan = tar_shards.scan_samples
    monkeypatch.setattr(tar_shards, "scan_samples", lambda *a: scans.append(a) or scan(*a))
    assert labels_of(TarShards(path)) == [0, 1, 2, 3]
    assert scans == []
    write_tar(path, [("7.cls", b"7")])
    assert labels_of(TarShards(path)) == [7]
    assert len(scans) == 1


def test_a_damaged_index_is_made_again(tmp_path: Path, cache: Path) -> None:
    (path,) = write_shards(tmp_path / "s", [4], parts=2)
    TarShards(path)
    (index,) = cache.rglob("*.npy")
    for content in (b"", b"nonsense", pickle.dumps([1]), npy(np.zeros(3))):
        index.write_bytes(content)
        assert labels_of(TarShards(path)) == [0, 1, 2, 3]


def test_shards_of_a_store_are_copied_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_shards(tmp_path / "s", [3, 2], parts=2)
    objects = {f"bucket/s/{path.name}": path.read_bytes() for path in paths}
    with flaky_source(objects):
        for names in (
            "flaky://bucket/s",
            "flaky://bucket/s/*.tar",
            "flaky://bucket/s/shard-{000..001}.tar",
        ):
            assert labels_of(TarShards(names)) == list(range(5))
    capsys.readouterr()


# What is refused


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/halfstep-was-unpickled"),))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("1.pyd", pickle.dumps(Evil())),
        ("1.pkl", pickle.dumps(Evil())),
        ("1.weights.pt", pickle.dumps(Evil())),
        ("1.npy", npy(np.array([{}], dtype=object))),
    ],
)
def test_members_that_would_be_unpickled_are_refused_by_name(
    name: str, content: bytes, tmp_path: Path
) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.cls", b"1"), (name, content)])
    with pytest.raises(ValueError, match=f"1.{name[2:]} is refused: .*unpickling"):
        TarShards(path)[0]
    assert not Path("/tmp/halfstep-was-unpickled").exists()
    assert TarShards(path, ["cls"])[0] == {"cls": 1}
    own = TarShards(path, decode={name[2:]: len})
    assert own[0][name[2:]] == len(content)


def test_a_pickle_called_npy_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.npy", pickle.dumps(Evil()))])
    with pytest.raises(ValueError, match=r"1\.npy: expected an array of numpy"):
        TarShards(path)[0]


def test_an_array_that_claims_more_than_is_there_takes_no_memory(tmp_path: Path) -> None:
    whole = npy(np.zeros(4))
    content = whole.replace(b"(4,), }          ", b"(9999999999,), } ")
    assert len(content) == len(whole)
    assert content != whole
    path = write_tar(tmp_path / "a.tar", [("1.npy", content)])
    with pytest.raises(ValueError, match=r"1\.npy: expected an array of numpy"):
        TarShards(path)[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "no plain file"),
        ({"type": tarfile.LNKTYPE, "linkname": "1.cls"}, "no plain file"),
        ({"type": tarfile.CHRTYPE}, "no plain file"),
    ],
)
def test_links_and_devices_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        add_member(archive, "1.cls", b"1")
        add_member(archive, "2.cls", b"", **fields)
    with pytest.raises(ValueError, match=message):
        TarShards(path)


def test_a_part_twice_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.cls", b"1"), ("1.cls", b"2")])
    with pytest.raises(ValueError, match=r"'1\.cls' is there twice|1\.cls is there twice"):
        TarShards(path)[0]


def test_a_global_header_that_renames_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(
        path, "w", format=tarfile.PAX_FORMAT, pax_headers={"path": "x.cls"}
    ) as archive:
        add_member(archive, "1.cls", b"1")
    with pytest.raises(ValueError, match="no global headers"):
        TarShards(path)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_packed_shards_are_refused_by_content(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, f"w:{suffix}") as archive:
        add_member(archive, "1.cls", b"1")
    with pytest.raises(ValueError, match=r"expected a plain tar, found (gzip|bzip2|xz)"):
        TarShards(path)


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path / "s", [3], parts=2)
    whole = path.read_bytes()
    end = whole.rstrip(b"\0")
    length = -(-len(end) // 512) * 512
    for cut in (0, 1, 100, 511, 512, 700, length - 512, length - 1, length):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"(damaged|cut off|expected a tar shard)"):
            TarShards(path)


def test_flipped_headers_never_end_in_something_else(tmp_path: Path) -> None:
    """Damage is a ValueError, or a sample as good as any; never another exception."""
    (path,) = write_shards(tmp_path / "s", [2], parts=4)
    whole = path.read_bytes()
    draw = random.Random(3)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(4600)] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            shards = TarShards(path)
            [shards[i] for i in range(len(shards))]
        except ValueError:
            pass


@pytest.mark.parametrize(
    ("members", "columns", "message"),
    [
        ([("1.cls", b"one")], None, r"1\.cls: expected a whole number"),
        ([("1.json", b"{")], None, r"1\.json: expected JSON"),
        ([("1.json", b"[" * 100_000)], None, r"1\.json: expected JSON"),
        ([("1.npy", npy(np.zeros(3))[:-1])], None, r"1\.npy: expected an array"),
        ([("1.npy", npy(np.zeros(3)).replace(b"(3,)", b"(3 <"))], None, r"1\.npy: expected an arr"),
        ([("1.txt", b"\xff")], None, r"1\.txt: expected text in UTF-8"),
        ([("1.png", b"nonsense")], None, r"1\.png: expected an image"),
        ([("1.cls", b"1")], ["clss"], "has no clss, but cls; did you mean 'cls'"),
        ([("1.cls", b"1")], {"image": ["jpg", "png"]}, "has no jpg or png, but cls"),
    ],
)
def test_what_cannot_be_decoded(
    members: list[tuple[str, bytes]], columns: Any, message: str, tmp_path: Path
) -> None:
    shards = TarShards(write_tar(tmp_path / "a.tar", members), columns)
    with pytest.raises(ValueError, match=message):
        shards[0]


def test_names_in_errors_are_printable(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("\x1b[2J.cls", b"x")])
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is looked at
        TarShards(path)[0]
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("shards", "columns", "message"),
    [
        ("nothing.tar", None, "found nothing there"),
        ("*.nothing", None, "got none in"),
        (["a.tar", "a.tar"], None, "is there twice"),
        ("a-{5..3}.tar", None, "expected a range"),
        ("a-{0..99999999}.tar", None, "expected a range"),
        ("a.tar", "cls", "expected a list"),
        ("a.tar", [], "expected different names"),
    ],
)
def test_arguments_that_are_refused(
    shards: Any, columns: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tar(tmp_path / "a.tar", [("1.cls", b"1")])
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        TarShards(shards, columns)


def test_images_are_resized_as_by_an_image_folder(tmp_path: Path) -> None:
    folder = tmp_path / "photos" / "a"
    folder.mkdir(parents=True)
    (folder / "1.png").write_bytes(png(1, side=40))
    path = write_tar(tmp_path / "a.tar", [("1.png", png(1, side=40))])
    image, _ = hs.data.ImageFolder(tmp_path / "photos", size=16, mode="L")[0]
    assert torch.equal(TarShards(path, size=16, mode="L")[0]["png"], image)


def test_what_is_read_stays_open_no_longer(tmp_path: Path) -> None:
    write_shards(tmp_path / "s", [3], parts=2)
    shards = TarShards(tmp_path / "s")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        shards.__getitems__([0, 1, 2])
    assert len(os.listdir("/proc/self/fd")) == before
