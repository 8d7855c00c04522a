"""Makes halfstep/data/sample from the full Fashion-MNIST.

It holds the first images of every class, in their original order.
"""

import argparse
import gzip
import io
import struct
from pathlib import Path

import torch
from torch import Tensor

from halfstep.data.readers.idx import read_split

ROOT = Path(__file__).resolve().parent.parent
IDX_UINT8 = 0x08  # the idx format's code for unsigned bytes


def first_of_each_class(labels: Tensor, per_class: int) -> Tensor:
    """Indices of the first `per_class` samples of each class, ascending."""
    class_count = int(labels.max()) + 1
    indices = [torch.nonzero(labels == c).flatten()[:per_class] for c in range(class_count)]
    counts = [len(class_indices) for class_indices in indices]
    too_few = [str(count) for count in counts if count < per_class]
    if too_few:
        raise ValueError(
            f"expected {per_class} samples in every class, found classes with {', '.join(too_few)}"
        )
    return torch.cat(indices).sort().values


def write_idx(path: Path, values: Tensor) -> int:
    """Writes uint8 values as a gzip idx file that depends on them alone. Returns its size."""
    header = struct.pack(f">4B{values.dim()}I", 0, 0, IDX_UINT8, values.dim(), *values.shape)
    packed = io.BytesIO()
    # Not gzip.compress: its header byte for the operating system differs between Python versions.
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=packed, mtime=0) as file:
        file.write(header + values.numpy().tobytes())
    return path.write_bytes(packed.getvalue())


def write_split(source: Path, target: Path, *, train: bool, per_class: int) -> int:
    """Writes the images and labels of one split. Returns their bytes on the disk."""
    images, labels = read_split(source, train=train)
    indices = first_of_each_class(labels, per_class)
    stem = "train" if train else "t10k"
    image_bytes = write_idx(target / f"{stem}-images-idx3-ubyte.gz", images[indices])
    labels_uint8 = labels[indices].to(torch.uint8)
    label_bytes = write_idx(target / f"{stem}-labels-idx1-ubyte.gz", labels_uint8)
    return image_bytes + label_bytes


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
