"""Data sets by name: small ones made by hand, and the real ones where HALFSTEP_DATA has them."""

import functools
import os
import shutil
import struct
import threading
import warnings
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import halfstep as hs
from halfstep.errors import Notice


def write_idx(folder: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
    """An MNIST-family folder by hand: magic, sizes, bytes."""
    folder.mkdir(parents=True)
    for split in ("train", "t10k"):
        image_header = struct.pack(">4I", 2051, *images.shape)
        image_bytes = images.numpy().tobytes()
        (folder / f"{split}-images-idx3-ubyte").write_bytes(image_header + image_bytes)
        label_header = struct.pack(">2I", 2049, len(labels))
        label_bytes = labels.to(torch.uint8).numpy().tobytes()
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(label_header + label_bytes)


@pytest.fixture
def data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No data on this machine but what the test puts into the folder returned, as HALFSTEP_DATA."""
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("halfstep.data.download.find.DEBIAN", tmp_path / "debian")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_an_idx_set_comes_as_height_width_channels(data_folder: Path) -> None:
    images = torch.arange(5 * 6 * 7, dtype=torch.uint8).view(5, 6, 7)
    write_idx(data_folder / "mnist", images, torch.arange(5))
    data = hs.data.load("mnist", "test", seed=4)
    assert data.classes == tuple("0123456789")
    image, label = next(iter(data.batch(5)))
    assert torch.equal(image, images.unsqueeze(-1))
    assert torch.equal(label, torch.arange(5))
    assert label.dtype == torch.int64


def test_a_cifar_set_comes_as_height_width_channels(data_folder: Path) -> None:
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    folder = data_folder / "cifar-10-batches-bin"
    folder.mkdir()
    records = b"".join(bytes([i]) + pixels[i].numpy().tobytes() for i in range(3))
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / f"{name}.bin").write_bytes(records)
    data = hs.data.load("cifar10")
    assert data.size == 15
    image, label = next(iter(data.batch(3)))
    assert torch.equal(image, pixels.permute(0, 2, 3, 1))
    assert label.tolist() == [0, 1, 2]
    assert data.classes[0] == "airplane"


def test_without_the_data_fashion_mnist_is_the_sample_and_says_so(data_folder: Path) -> None:
    with pytest.warns(Notice, match="fashion-mnist is a sample of it: 11,000"):
        data = hs.data.load("fashion-mnist")
    assert data.size == 11_000
    with pytest.raises(FileNotFoundError, match="mnist was not found"):
        hs.data.load("mnist")


def test_a_folder_on_the_web_that_gave_a_wrong_file_is_asked_again(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server in maintenance answers every address with the same page."""
    monkeypatch.setenv("no_proxy", "*")
    write_idx(tmp_path / "web" / "mended", torch.zeros(5, 6, 7, dtype=torch.uint8), torch.arange(5))
    shutil.copytree(tmp_path / "web" / "mended", tmp_path / "web" / "set")
    for path in (tmp_path / "web" / "set").iterdir():
        path.write_bytes(b"<html>maintenance</html>")

    class QuietHandler(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(QuietHandler, directory=str(tmp_path / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/set"
        with pytest.raises(ValueError, match="web page"):
            hs.data.load("mnist", path=address)
        shutil.rmtree(tmp_path / "web" / "set")
        (tmp_path / "web" / "mended").rename(tmp_path / "web" / "set")
        assert hs.data.load("mnist", path=address).size == 5
        server.shutdown()
        thread.join()
    assert hs.data.load("mnist", path=address).size == 5  # from the cache


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="expected split 'train' or 'test', got 'valid'"):
        hs.data.load("mnist", "valid")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="expected one of mnist, fashion-mnist, cifar10, cifar100, got 'mnits'"
    ):
        hs.data.load("mnits")


# Shapes of the real sets. Those of CIFAR-10 hold for the original pixels and for JPEG copies alike.
REAL = {"mnist": (28, 28, 1), "fashion-mnist": (28, 28, 1), "cifar10": (32, 32, 3)}


@pytest.mark.parametrize("name", REAL)
def test_the_real_sets_at_full_size(name: str) -> None:
    if "HALFSTEP_DATA" not in os.environ:
        pytest.skip("HALFSTEP_DATA is not set")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)  # the sample would not do
        try:
            train = hs.data.load(name)
            test = hs.data.load(name, "test")
        except (FileNotFoundError, Notice) as error:
            pytest.skip(f"{name} is not in HALFSTEP_DATA: {str(error)[:80]}")
    assert train.size == (50_000 if name == "cifar10" else 60_000)
    assert test.size == 10_000
    labels = torch.cat([y for _, y in train.shuffle().batch(1000).workers(0)])
    counts = torch.bincount(labels, minlength=10)
    assert len(counts) == 10
    if name == "mnist":
        assert int(counts[1]) == 6742
    else:
        assert counts.tolist() == [len(labels) // 10] * 10
    image, _ = next(iter(train.batch(16)))
    assert tuple(image.shape) == (16, *REAL[name])
    assert image.dtype == torch.uint8
