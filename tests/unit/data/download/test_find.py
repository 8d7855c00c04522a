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

find_module = importlib.import_module("halfstep.data.download.find")
find = find_module.find
IDX_FILES = CATALOG["mnist"].files
CIFAR10_FILES = CATALOG["cifar10"].files


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of this machine's own: no variable, an empty home, an empty Debian folder."""
    for name in ("HALFSTEP_DATA", "HALFSTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(find_module, "DEBIAN", tmp_path / "debian")
    return tmp_path


def write_files(folder: Path, files: tuple[str, ...] = IDX_FILES, suffix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        (folder / (name + suffix)).write_bytes(b"content of " + name.encode())
    return folder


def write_tar(path: Path, folder: str, files: tuple[str, ...] = CIFAR10_FILES) -> Path:
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
    # they are numbered by alphabet
    assert list(CATALOG["cifar100"].classes) == sorted(CATALOG["cifar100"].classes)


@pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="needs dataset-fashion-mnist"
)
def test_fashions_contents_are_those_of_debians_package() -> None:
    entry = CATALOG["fashion-mnist"]
    # the 47 MB of training images: by hand
    for name, checksum in zip(entry.files[1:], entry.contents[1:], strict=True):
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


def test_each_place_comes_before_the_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {
        name: write_files(root / name / "fashion-mnist")
        for name in ("given", "data", "cache", "debian")
    }
    monkeypatch.setenv("HALFSTEP_DATA", str(root / "data"))
    monkeypatch.setenv("HALFSTEP_CACHE", str(root / "cache"))
    location = find("fashion-mnist", folders["given"], download=True)
    assert (location.folder, location.origin, location.sample) == (folders["given"], "path", False)
    # there is a set on this machine: nothing is fetched
    location = find("fashion-mnist", download=True)
    assert (location.folder, location.origin) == (folders["data"], "HALFSTEP_DATA")
    monkeypatch.delenv("HALFSTEP_DATA")
    location = find("fashion-mnist", download=True)
    assert (location.folder, location.origin) == (folders["cache"], "cache")
    monkeypatch.delenv("HALFSTEP_CACHE")
    location = find("fashion-mnist", download=True)
    assert (location.folder, location.origin) == (folders["debian"], "debian")
    (folders["debian"] / IDX_FILES[3]).unlink()
    with pytest.warns(Notice, match="sample"):
        location = find("fashion-mnist")
    assert (location.folder, location.origin, location.sample) == (
        find_module.SAMPLE,
        "sample",
        True,
    )
    assert read_split(location.folder, train=False)[0].shape == (2000, 28, 28)


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
    root, monkeypatch, variable, value: str, folder: str
) -> None:
    monkeypatch.setenv(variable, value.format(root))
    write_files(root / folder / "mnist")
    assert find("mnist").folder == root / folder / "mnist"


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
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str, suffix: str
) -> None:
    write_files(root / "data" / folder, CATALOG[name].files, suffix)
    monkeypatch.setenv("HALFSTEP_DATA", str(root / "data"))
    assert find(name).folder == root / "data" / folder
    monkeypatch.delenv("HALFSTEP_DATA")
    assert find(name, str(root / "data")).folder == root / "data" / folder


def test_a_folder_called_like_the_set_comes_first(root: Path) -> None:
    write_files(root / "data")
    write_files(root / "data" / "fashion-mnist")
    assert find("fashion-mnist", root / "data").folder == root / "data" / "fashion-mnist"
    assert find("mnist", root / "data").folder == root / "data"


def test_half_a_set_is_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_DATA", str(write_files(root / "data", IDX_FILES[:3])))
    write_files(root / "debian" / "mnist")
    assert find("mnist").origin == "debian"
    with pytest.raises(
        FileNotFoundError,
        match=r"data lacks t10k-labels-idx1-ubyte\. They are: train.* plain or \.gz",
    ):
        find("mnist", root / "data")


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_another_sets_files_are_told_by_their_labels(root: Path, monkeypatch, pack) -> None:
    """MNIST and Fashion-MNIST have the same file names: the content says which it is."""
    folder = write_files(root / "data", suffix=".gz" if pack is gzip.compress else "")
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


def test_another_sets_folder_is_told_by_its_name(root: Path) -> None:
    write_files(root / "data" / "FashionMNIST" / "raw")
    for path in (root / "data" / "FashionMNIST", root / "data" / "FashionMNIST" / "raw"):
        assert find("fashion-mnist", path).folder == root / "data" / "FashionMNIST" / "raw"
        with pytest.raises(FileNotFoundError, match="raw is called like fashion-mnist"):
            find("mnist", path)


def test_the_sample_is_known_by_any_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("fashion-mnist", find_module.SAMPLE).sample
    monkeypatch.setenv("HALFSTEP_DATA", str(find_module.SAMPLE))
    assert find("fashion-mnist").sample
    with pytest.raises(FileNotFoundError, match="holds a sample of fashion-mnist"):
        find("mnist")


# What is said


def test_not_found_lists_every_place_and_the_ways_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "data").mkdir()
    monkeypatch.setenv("HALFSTEP_DATA", str(root / "data"))
    write_files(root / "debian" / "mnist", IDX_FILES[1:])
    with pytest.raises(FileNotFoundError) as caught:
        find("mnist")
    assert str(caught.value).splitlines() == [
        "mnist was not found:",
        f"  HALFSTEP_DATA: {root}/data has neither the files nor a folder called mnist",
        f"  cache: there is no folder {root}/home/.cache/halfstep",
        f"  debian: {root}/debian/mnist lacks train-images-idx3-ubyte",
        "Set HALFSTEP_DATA to a folder that holds mnist, "
        "pass path= (a folder, an archive or a URL), "
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


def test_halfstep_data_must_be_a_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(root / "debian" / "mnist")
    monkeypatch.setenv("HALFSTEP_DATA", "/no/such/folder")
    with pytest.raises(
        NotADirectoryError, match="expected a folder in HALFSTEP_DATA, got '/no/such/folder'"
    ):
        find("mnist")


@pytest.mark.parametrize("path", ["nothing", "nosuch://bucket/mnist", "file://host/mnist"])
def test_a_path_is_final(root: Path, path: str) -> None:
    write_files(root / "debian" / "mnist")
    with pytest.raises(
        (FileNotFoundError, ValueError),
        match=r"expected (a folder|a file:// URL|a scheme)",
    ):
        find("mnist", path)


def test_an_empty_path_is_a_mistake_and_not_this_folder(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_files(root / "here"))
    with pytest.raises(ValueError, match="path: expected a folder, an archive or a URL, got ''"):
        find("mnist", "")


# Archives


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_an_archive_is_unpacked_once(root: Path, prefix: str) -> None:
    archive = write_tar(root / "set.tar.gz", "some/folder")
    location = find("cifar10", f"{prefix}{archive}")
    assert (location.origin, location.folder.name) == ("path", "folder")
    assert [path.name for path in sorted(location.folder.iterdir())] == sorted(CIFAR10_FILES)
    before = location.folder.stat().st_mtime_ns
    assert find("cifar10", f"{prefix}{archive}") == location
    assert location.folder.stat().st_mtime_ns == before
    write_tar(archive, "changed")
    assert find("cifar10", f"{prefix}{archive}").folder.name == "changed"


def test_a_zip_with_both_sets_serves_both(root: Path) -> None:
    with zipfile.ZipFile(root / "both.zip", "w") as archive:
        for folder in ("x/MNIST", "x/fashion_mnist"):
            for name in IDX_FILES:
                archive.writestr(f"{folder}/{name}", folder)
    with zipfile.ZipFile(root / "one.zip", "w") as archive:
        for name in IDX_FILES:
            archive.writestr(f"MNIST/raw/{name}", "")
    assert find("mnist", root / "both.zip").folder.name == "MNIST"
    assert find("mnist", root / "one.zip").folder.name == "raw"
    assert find("fashion-mnist", root / "both.zip").folder.name == "fashion_mnist"


def test_an_archive_of_other_things_is_refused(root: Path) -> None:
    archive = write_tar(root / "set.tar.gz", "folder", CIFAR10_FILES[1:])
    with pytest.raises(
        FileNotFoundError,
        match=r"set\.tar\.gz.*expected the files of cifar10, .*lacks data_batch_1\.bin",
    ):
        find("cifar10", archive)
    (root / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x03"))
    with pytest.raises(
        ValueError, match=r"expected a tar archive .* or pass a folder of plain files"
    ):
        find("mnist", root / "train-images-idx3-ubyte.gz")


# URLs and downloads


@pytest.fixture
def web(root: Path) -> Iterator[str]:
    """A web server over the folder `web`, which counts what it is asked for."""

    class Pages(SimpleHTTPRequestHandler):
        def log_message(self, *args) -> None:
            asked.append(self.path)

    asked: list[str] = []
    (root / "web").mkdir()
    handler = functools.partial(Pages, directory=str(root / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as pages:
        thread = threading.Thread(target=pages.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{pages.server_port}"
        pages.shutdown()
        thread.join()


def test_a_url_of_an_archive(root: Path, web: str) -> None:
    archive = write_tar(root / "web" / "set.tgz", "folder")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    location = find("cifar10", f"{web}/set.tgz")
    assert location.origin == f"{web}/set.tgz#sha256={sha256}"
    assert root / "home/.cache/halfstep" in location.folder.parents
    assert find("cifar10", location.origin) == location  # what came is a pin
    archive.unlink()
    assert find("cifar10", f"{web}/set.tgz") == location  # from the cache
    with pytest.raises(OSError, match="the server answered 404"):
        find("cifar10", f"{web}/other.tgz")


def test_a_pin_is_kept(root: Path, web: str) -> None:
    archive = write_tar(root / "web" / "set.tgz", "folder")
    for address in (f"{web}/set.tgz", f"file://{archive}"):
        with pytest.raises((OSError, ValueError), match=r"expected .*sha256"):
            find("cifar10", f"{address}#sha256={'0' * 64}")
        with pytest.raises(ValueError, match="expected #sha256="):
            find("cifar10", f"{address}#sha1=0")
        md5 = hashlib.md5(archive.read_bytes()).hexdigest()
        assert find("cifar10", f"{address}#md5={md5}").folder.name == "folder"
    write_files(root / "web" / "mnist")
    for address in (f"{web}/mnist", f"file://{root}/web/mnist"):
        with pytest.raises(ValueError, match="a checksum pins an archive"):
            find("mnist", f"{address}#sha256={'0' * 64}")


def test_a_bad_archive_is_fetched_again(root: Path, web: str) -> None:
    (root / "web" / "set.zip").write_bytes(b"not yet")
    with pytest.raises(ValueError, match="expected a tar archive"):
        find("cifar10", f"{web}/set.zip")
    write_tar(root / "web" / "set.zip", "folder")  # told by its content, not by its name
    assert find("cifar10", f"{web}/set.zip").folder.name == "folder"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_a_url_of_a_folder(root: Path, web: str, suffix: str, slash: str) -> None:
    write_files(root / "web" / "a", suffix=suffix)
    location = find("mnist", f"{web}/a{slash}")
    assert location.origin == f"{web}/a{slash}"
    assert {path.name: path.read_bytes() for path in location.folder.iterdir()} == {
        name + suffix: b"content of " + name.encode() for name in IDX_FILES
    }
    with pytest.raises(OSError, match="404"):
        find("mnist", f"{web}/b")


def publish(monkeypatch: pytest.MonkeyPatch, folder: Path, base: str, name: str) -> None:
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


def test_download_of_four_files(root: Path, monkeypatch: pytest.MonkeyPatch, web: str) -> None:
    publish(monkeypatch, write_files(root / "web", suffix=".gz"), web, "mnist")
    with pytest.raises(FileNotFoundError):
        find("mnist")
    assert not (root / "home").exists()  # looking makes nothing
    location = find("mnist", download=True)
    assert (location.folder, location.origin) == (root / "home/.cache/halfstep/mnist", f"{web}/")
    (location.folder / f"{IDX_FILES[1]}.gz").unlink()
    (root / "web" / f"{IDX_FILES[0]}.gz").unlink()  # what is there whole is not asked for again
    assert find("mnist", download=True).origin == f"{web}/"
    assert find("mnist").origin == "cache"


def test_download_of_an_archive(root: Path, monkeypatch: pytest.MonkeyPatch, web: str) -> None:
    write_tar(root / "web" / "cifar-10-binary.tar.gz", "cifar-10-batches-bin")
    publish(monkeypatch, root / "web", web, "cifar10")
    location = find("cifar10", download=True)
    cache = root / "home/.cache/halfstep"
    assert (location.folder, location.origin) == (
        cache / "cifar10" / "cifar-10-batches-bin",
        f"{web}/",
    )
    assert not list((cache / "downloads").iterdir())
    assert find("cifar10") == replace(location, origin="cache")
    (location.folder / CIFAR10_FILES[0]).unlink()
    with pytest.raises(
        FileNotFoundError, match=r"lacks data_batch_1.bin\. Remove .*cifar10 and try again"
    ):
        find("cifar10", download=True)


def test_a_failed_download_is_no_sample(
    root: Path, monkeypatch: pytest.MonkeyPatch, web: str
) -> None:
    publish(monkeypatch, write_files(root / "web", suffix=".gz"), f"{web}/moved", "fashion-mnist")
    with pytest.raises(OSError, match="could not be fetched"):
        find("fashion-mnist", download=True)


def test_every_known_file_is_proved_by_a_sha256() -> None:
    for entry in CATALOG.values():
        for source in entry.sources:
            assert source.checksum.algorithm == "sha256", (entry.name, source.file)
            assert source.urls[0].startswith("https://"), (entry.name, source.file)


@pytest.mark.parametrize("name", ["mnist.zip", "mnist"])
def test_an_open_address_without_a_sha256_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path))
    address = f"http://no.such.host.invalid/{name}"
    with (
        pytest.warns(Notice, match=f"{address} is fetched over http, where anybody"),
        pytest.raises(OSError, match="could not be fetched"),
    ):
        find("mnist", address)
    with pytest.raises(ValueError, match="expected https, or a sha256"):
        find("mnist", f"http://no.such.host.invalid/mnist.zip#md5={'0' * 32}")
