"""Make halfstep/data/sample from the full Fashion-MNIST: the first images of every class, in their original order."""

import argparse
import gzip
import io
import struct
from pathlib import Path

import torch
from torch import Tensor

from halfstep.data.readers.idx import read_split

ROOT = Path(__file__).resolve().parent.parent


def select(labels: Tensor, per_class: int) -> Tensor:
    """Indices of the first `per_class` samples of each class, ascending."""
    firsts = [
        torch.nonzero(labels == label).flatten()[:per_class]
        for label in range(int(labels.max()) + 1)
    ]
    if short := [str(len(first)) for first in firsts if len(first) < per_class]:
        raise ValueError(
            f"expected {per_class} samples in every class, found classes with {', '.join(short)}"
        )
    return torch.cat(firsts).sort().values


def write_idx(path: Path, values: Tensor) -> int:
    """Write uint8 values as a gzip idx file that depends on nothing but them; returns its size in bytes."""
    header = struct.pack(f">4B{values.dim()}I", 0, 0, 0x08, values.dim(), *values.shape)
    packed = io.BytesIO()
    # GzipFile and not gzip.compress, whose header byte for the operating system differs between Python versions
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=packed, mtime=0) as file:
        file.write(header + values.numpy().tobytes())
    return path.write_bytes(packed.getvalue())


def write_split(source: Path, target: Path, *, train: bool, per_class: int) -> int:
    images, labels = read_split(source, train=train)
    chosen = select(labels, per_class)
    stem = "train" if train else "t10k"
    size = write_idx(target / f"{stem}-images-idx3-ubyte.gz", images[chosen])
    return size + write_idx(target / f"{stem}-labels-idx1-ubyte.gz", labels[chosen].to(torch.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--target", type=Path, default=ROOT / "halfstep" / "data" / "sample")
    parser.add_argument("--train-per-class", type=int, default=1100)
    parser.add_argument("--test-per-class", type=int, default=200)
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    size = write_split(args.source, args.target, train=True, per_class=args.train_per_class)
    size += write_split(args.source, args.target, train=False, per_class=args.test_per_class)
    print(f"{args.target}: {size:,} bytes")


if __name__ == "__main__":
    main()
