"""Where data is looked for, in which order, and what is said when it is not there."""

import functools
import gzip
import hashlib
import importlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from halfstep.data.download.catalog import CATALOG, Checksum, PublishedFile, catalog_entry
from halfstep.data.readers.idx import read_split
from halfstep.errors import Notice

module = importlib.import_module("halfstep.data.download.find")
find = module.find
IDX = CATALOG["mnist"].files
TEN = CATALOG["cifar10"].files


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of this machine's own: no variable, an empty home, an empty Debian folder."""
    for name in ("HALFSTEP_DATA", "HALFSTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(module, "DEBIAN", tmp_path / "debian")
    return tmp_path


def fill(folder: Path, files: tuple[str, ...] = IDX, suffix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        (folder / (name + suffix)).write_bytes(b"content of " + name.encode())
    return folder


def tarred(path: Path, folder: str, files: tuple[str, ...] = TEN) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name in files:
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(name)
            archive.addfile(info, io.BytesIO(name.encode()))
    return path


# The table


def test_the_table_is_consistent() -> None:
    assert {name: entry.num_classes for name, entry in CATALOG.items()} == {
        "mnist": 10,
        "fashion-mnist": 10,
        "cifar10": 10,
        "cifar100": 100,
    }
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert len(set(entry.classes)) == entry.num_classes
        assert all(
            url.endswith(f"/{source.file}") for source in entry.sources for url in source.urls
        )
        assert len(entry.contents) in (0, len(entry.files))
    assert list(CATALOG["cifar100"].classes) == sorted(
        CATALOG["cifar100"].classes
    )  # they are numbered by alphabet


@pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="needs dataset-fashion-mnist"
)
def test_fashions_contents_are_those_of_debians_package() -> None:
    entry = CATALOG["fashion-mnist"]
    for name, checksum in zip(
        entry.files[1:], entry.contents[1:], strict=True
    ):  # the 47 MB of training images: by hand
        content = gzip.decompress(Path(f"/usr/share/datasets/fashion-mnist/{name}.gz").read_bytes())
        assert hashlib.sha256(content).hexdigest() == checksum.hex


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("mnist", "mnist"),
        ("MNIST", "mnist"),
        ("FashionMNIST", "fashion-mnist"),
        ("fashion_mnist", "fashion-mnist"),
        ("CIFAR-10", "cifar10"),
        ("cifar_100", "cifar100"),
        ("CIFAR100", "cifar100"),
    ],
)
def test_names_in_any_spelling(spelling: str, name: str) -> None:
    assert catalog_entry(spelling).name == name


def test_unknown_names_list_the_table() -> None:
    with pytest.raises(
        ValueError, match="expected one of mnist, fashion-mnist, cifar10, cifar100, got 'minst'"
    ) as caught:
        find("minst")
    assert "Did you mean 'mnist'?" in str(caught.value)
    with pytest.raises(ValueError, match=r"got 'imagenet'.$"):
        find("imagenet")
    with pytest.raises(TypeError, match="expected the name of a data set, got 5"):
        find(5)


@pytest.mark.parametrize(
    ("algorithm", "digits"), [("sha1", "0" * 40), ("md5", "0" * 31), ("sha256", "G" * 64)]
)
def test_checksums_are_checked_themselves(algorithm, digits: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Checksum(algorithm, digits)


# The order


def test_each_place_comes_before_the_next(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {
        name: fill(places / name / "fashion-mnist") for name in ("given", "data", "cache", "debian")
    }
    monkeypatch.setenv("HALFSTEP_DATA", str(places / "data"))
    monkeypatch.setenv("HALFSTEP_CACHE", str(places / "cache"))
    found = find("fashion-mnist", folders["given"], download=True)
    assert (found.folder, found.origin, found.sample) == (folders["given"], "path", False)
    found = find(
        "fashion-mnist", download=True
    )  # there is a set on this machine: nothing is fetched
    assert (found.folder, found.origin) == (folders["data"], "HALFSTEP_DATA")
    monkeypatch.delenv("HALFSTEP_DATA")
    found = find("fashion-mnist", download=True)
    assert (found.folder, found.origin) == (folders["cache"], "cache")
    monkeypatch.delenv("HALFSTEP_CACHE")
    found = find("fashion-mnist", download=True)
    assert (found.folder, found.origin) == (folders["debian"], "debian")
    (folders["debian"] / IDX[3]).unlink()
    with pytest.warns(Notice, match="sample"):
        found = find("fashion-mnist")
    assert (found.folder, found.origin, found.sample) == (module.SAMPLE, "sample", True)
    assert read_split(found.folder, train=False)[0].shape == (2000, 28, 28)


@pytest.mark.parametrize(
    ("variable", "value", "folder"),
    [
        ("HALFSTEP_CACHE", "{}/mine", "mine"),
        ("HALFSTEP_CACHE", "~/mine", "home/mine"),
        ("XDG_CACHE_HOME", "{}/xdg", "xdg/halfstep"),
        ("XDG_CACHE_HOME", "relative", "home/.cache/halfstep"),
        ("HALFSTEP_CACHE", "", "home/.cache/halfstep"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    places, monkeypatch, variable, value: str, folder: str
) -> None:
    monkeypatch.setenv(variable, value.format(places))
    fill(places / folder / "mnist")
    assert find("mnist").folder == places / folder / "mnist"


@pytest.mark.parametrize(
    ("name", "folder", "suffix"),
    [
        ("mnist", "", ""),
        ("mnist", "", ".gz"),
        ("mnist", "mnist", ".gz"),
        ("mnist", "MNIST/raw", ""),
        ("mnist", "raw", ""),
        ("fashion-mnist", "fashion_mnist", ".gz"),
        ("fashion-mnist", "FashionMNIST/raw", ""),
        ("cifar10", "", ""),
        ("cifar10", "CIFAR10", ""),
        ("cifar10", "cifar-10", ""),
        ("cifar10", "cifar-10-batches-bin", ""),
        ("cifar10", "cifar10/cifar-10-batches-bin", ""),
        ("cifar100", "cifar-100-binary", ""),
        ("cifar100", "CIFAR_100", ""),
    ],
)
def test_layouts(
    places: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str, suffix: str
) -> None:
    fill(places / "data" / folder, CATALOG[name].files, suffix)
    monkeypatch.setenv("HALFSTEP_DATA", str(places / "data"))
    assert find(name).folder == places / "data" / folder
    monkeypatch.delenv("HALFSTEP_DATA")
    assert find(name, str(places / "data")).folder == places / "data" / folder


def test_a_folder_called_like_the_set_comes_first(places: Path) -> None:
    fill(places / "data")
    fill(places / "data" / "fashion-mnist")
    assert find("fashion-mnist", places / "data").folder == places / "data" / "fashion-mnist"
    assert find("mnist", places / "data").folder == places / "data"


def test_half_a_set_is_none(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_DATA", str(fill(places / "data", IDX[:3])))
    fill(places / "debian" / "mnist")
    assert find("mnist").origin == "debian"
    with pytest.raises(
        FileNotFoundError,
        match=r"data lacks t10k-labels-idx1-ubyte\. They are: train.* plain or \.gz",
    ):
        find("mnist", places / "data")


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_another_sets_files_are_told_by_their_labels(places: Path, monkeypatch, pack) -> None:
    """MNIST and Fashion-MNIST have the same file names: the content says which it is."""
    folder = fill(places / "data", suffix=".gz" if pack is gzip.compress else "")
    labels = next(folder.glob("t10k-labels*"))
    labels.write_bytes(pack(b"these labels"))
    own = Checksum("sha256", hashlib.sha256(b"these labels").hexdigest())
    fashion = replace(CATALOG["fashion-mnist"], contents=(own,) * 4)
    monkeypatch.setitem(CATALOG, "fashion-mnist", fashion)
    assert find("fashion-mnist", folder).folder == folder
    with pytest.raises(
        FileNotFoundError, match=r"expected the files of mnist, .*data holds fashion-mnist"
    ):
        find("mnist", folder)


def test_another_sets_folder_is_told_by_its_name(places: Path) -> None:
    fill(places / "data" / "FashionMNIST" / "raw")
    for path in (places / "data" / "FashionMNIST", places / "data" / "FashionMNIST" / "raw"):
        assert find("fashion-mnist", path).folder == places / "data" / "FashionMNIST" / "raw"
        with pytest.raises(FileNotFoundError, match="raw is called like fashion-mnist"):
            find("mnist", path)


def test_the_sample_is_known_by_any_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("fashion-mnist", module.SAMPLE).sample
    monkeypatch.setenv("HALFSTEP_DATA", str(module.SAMPLE))
    assert find("fashion-mnist").sample
    with pytest.raises(FileNotFoundError, match="holds a sample of fashion-mnist"):
        find("mnist")


# What is said


def test_not_found_lists_every_place_and_the_ways_out(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (places / "data").mkdir()
    monkeypatch.setenv("HALFSTEP_DATA", str(places / "data"))
    fill(places / "debian" / "mnist", IDX[1:])
    with pytest.raises(FileNotFoundError) as caught:
        find("mnist")
    assert str(caught.value).splitlines() == [
        "mnist was not found:",
        f"  HALFSTEP_DATA: {places}/data has neither the files nor a folder called mnist",
        f"  cache: there is no folder {places}/home/.cache/halfstep",
        f"  debian: {places}/debian/mnist lacks train-images-idx3-ubyte",
        "Set HALFSTEP_DATA to a folder that holds mnist, pass path= (a folder, an archive or a URL), "
        "or allow download=True.",
    ]


def test_the_samples_notice_says_how_to_get_the_whole() -> None:
    with pytest.warns(Notice) as caught:
        find("fashion-mnist")
    text = str(caught[0].message)
    assert caught[0].filename == __file__
    for part in ("11,000 + 2,000 of its 70,000", "HALFSTEP_DATA", "path=", "download=True"):
        assert part in text
    assert text.endswith("apt-get install dataset-fashion-mnist.")


def test_halfstep_data_must_be_a_folder(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(places / "debian" / "mnist")
    monkeypatch.setenv("HALFSTEP_DATA", "/no/such/folder")
    with pytest.raises(
        NotADirectoryError, match="expected a folder in HALFSTEP_DATA, got '/no/such/folder'"
    ):
        find("mnist")


@pytest.mark.parametrize("path", ["nothing", "s3://bucket/mnist", "file://host/mnist"])
def test_a_path_is_final(places: Path, path: str) -> None:
    fill(places / "debian" / "mnist")
    with pytest.raises((FileNotFoundError, ValueError), match=r"expected a (folder|path)"):
        find("mnist", path)


def test_an_empty_path_is_a_mistake_and_not_this_folder(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fill(places / "here"))
    with pytest.raises(ValueError, match="path: expected a folder, an archive or a URL, got ''"):
        find("mnist", "")


# Archives


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_an_archive_is_unpacked_once(places: Path, prefix: str) -> None:
    archive = tarred(places / "set.tar.gz", "some/folder")
    found = find("cifar10", f"{prefix}{archive}")
    assert (found.origin, found.folder.name) == ("path", "folder")
    assert [path.name for path in sorted(found.folder.iterdir())] == sorted(TEN)
    before = found.folder.stat().st_mtime_ns
    assert find("cifar10", f"{prefix}{archive}") == found
    assert found.folder.stat().st_mtime_ns == before
    tarred(archive, "changed")
    assert find("cifar10", f"{prefix}{archive}").folder.name == "changed"


def test_a_zip_with_both_sets_serves_both(places: Path) -> None:
    with zipfile.ZipFile(places / "both.zip", "w") as archive:
        for folder in ("x/MNIST", "x/fashion_mnist"):
            for name in IDX:
                archive.writestr(f"{folder}/{name}", folder)
    with zipfile.ZipFile(places / "one.zip", "w") as archive:
        for name in IDX:
            archive.writestr(f"MNIST/raw/{name}", "")
    assert find("mnist", places / "both.zip").folder.name == "MNIST"
    assert find("mnist", places / "one.zip").folder.name == "raw"
    assert find("fashion-mnist", places / "both.zip").folder.name == "fashion_mnist"


def test_an_archive_of_other_things_is_refused(places: Path) -> None:
    archive = tarred(places / "set.tar.gz", "folder", TEN[1:])
    with pytest.raises(
        FileNotFoundError,
        match=r"set\.tar\.gz.*expected the files of cifar10, .*lacks data_batch_1\.bin",
    ):
        find("cifar10", archive)
    (places / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x03"))
    with pytest.raises(
        ValueError, match=r"expected a tar archive .* or pass a folder of plain files"
    ):
        find("mnist", places / "train-images-idx3-ubyte.gz")


# URLs and downloads


@pytest.fixture
def web(places: Path) -> Iterator[str]:
    """A web server over the folder `web`, which counts what it is asked for."""

    class Pages(SimpleHTTPRequestHandler):
        def log_message(self, *args) -> None:
            asked.append(self.path)

    asked: list[str] = []
    (places / "web").mkdir()
    handler = functools.partial(Pages, directory=str(places / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as pages:
        thread = threading.Thread(target=pages.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{pages.server_port}"
        pages.shutdown()
        thread.join()


def test_a_url_of_an_archive(places: Path, web: str) -> None:
    archive = tarred(places / "web" / "set.tgz", "folder")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    found = find("cifar10", f"{web}/set.tgz")
    assert found.origin == f"{web}/set.tgz#sha256={sha256}"
    assert places / "home/.cache/halfstep" in found.folder.parents
    assert find("cifar10", found.origin) == found  # what came is a pin
    archive.unlink()
    assert find("cifar10", f"{web}/set.tgz") == found  # from the cache
    with pytest.raises(OSError, match="the server answered 404"):
        find("cifar10", f"{web}/other.tgz")


def test_a_pin_is_kept(places: Path, web: str) -> None:
    archive = tarred(places / "web" / "set.tgz", "folder")
    for address in (f"{web}/set.tgz", f"file://{archive}"):
        with pytest.raises((OSError, ValueError), match=r"expected .*sha256"):
            find("cifar10", f"{address}#sha256={'0' * 64}")
        with pytest.raises(ValueError, match="expected #sha256="):
            find("cifar10", f"{address}#sha1=0")
        md5 = hashlib.md5(archive.read_bytes()).hexdigest()
        assert find("cifar10", f"{address}#md5={md5}").folder.name == "folder"
    fill(places / "web" / "mnist")
    for address in (f"{web}/mnist", f"file://{places}/web/mnist"):
        with pytest.raises(ValueError, match="a checksum pins an archive"):
            find("mnist", f"{address}#sha256={'0' * 64}")


def test_a_bad_archive_is_fetched_again(places: Path, web: str) -> None:
    (places / "web" / "set.zip").write_bytes(b"not yet")
    with pytest.raises(ValueError, match="expected a tar archive"):
        find("cifar10", f"{web}/set.zip")
    tarred(places / "web" / "set.zip", "folder")  # told by its content, not by its name
    assert find("cifar10", f"{web}/set.zip").folder.name == "folder"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_a_url_of_a_folder(places: Path, web: str, suffix: str, slash: str) -> None:
    fill(places / "web" / "a", suffix=suffix)
    found = find("mnist", f"{web}/a{slash}")
    assert found.origin == f"{web}/a{slash}"
    assert {path.name: path.read_bytes() for path in found.folder.iterdir()} == {
        name + suffix: b"content of " + name.encode() for name in IDX
    }
    with pytest.raises(OSError, match="404"):
        find("mnist", f"{web}/b")


def published(monkeypatch: pytest.MonkeyPatch, folder: Path, base: str, name: str) -> None:
    """The entry as if `base` were its second mirror, with these files' checksums."""
    entry = CATALOG[name]
    sources = tuple(
        PublishedFile(
            source.file,
            (f"{base}/gone/{source.file}", f"{base}/{source.file}"),
            Checksum("md5", hashlib.md5((folder / source.file).read_bytes()).hexdigest()),
        )
        for source in entry.sources
    )
    monkeypatch.setitem(CATALOG, name, replace(entry, sources=sources))


def test_download_of_four_files(places: Path, monkeypatch: pytest.MonkeyPatch, web: str) -> None:
    published(monkeypatch, fill(places / "web", suffix=".gz"), web, "mnist")
    with pytest.raises(FileNotFoundError):
        find("mnist")
    assert not (places / "home").exists()  # looking makes nothing
    found = find("mnist", download=True)
    assert (found.folder, found.origin) == (places / "home/.cache/halfstep/mnist", f"{web}/")
    (found.folder / f"{IDX[1]}.gz").unlink()
    (places / "web" / f"{IDX[0]}.gz").unlink()  # what is there whole is not asked for again
    assert find("mnist", download=True).origin == f"{web}/"
    assert find("mnist").origin == "cache"


def test_download_of_an_archive(places: Path, monkeypatch: pytest.MonkeyPatch, web: str) -> None:
    tarred(places / "web" / "cifar-10-binary.tar.gz", "cifar-10-batches-bin")
    published(monkeypatch, places / "web", web, "cifar10")
    found = find("cifar10", download=True)
    cache = places / "home/.cache/halfstep"
    assert (found.folder, found.origin) == (cache / "cifar10" / "cifar-10-batches-bin", f"{web}/")
    assert not list((cache / "downloads").iterdir())
    assert find("cifar10") == replace(found, origin="cache")
    (found.folder / TEN[0]).unlink()
    with pytest.raises(
        FileNotFoundError, match=r"lacks data_batch_1.bin\. Remove .*cifar10 and try again"
    ):
        find("cifar10", download=True)


def test_a_failed_download_is_no_sample(
    places: Path, monkeypatch: pytest.MonkeyPatch, web: str
) -> None:
    published(monkeypatch, fill(places / "web", suffix=".gz"), f"{web}/moved", "fashion-mnist")
    with pytest.raises(OSError, match="could not be fetched"):
        find("fashion-mnist", download=True)
