"""What a network is to predict on: image files, arrays or a data set, prepared as its training data was."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep import data
from halfstep.cli.runs import Asked
from halfstep.data import Dataset
from halfstep.errors import meant

if TYPE_CHECKING:
    from halfstep.again.build import Built

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")


@dataclass(frozen=True)
class Inputs:
    """Samples of one column, and a name for each."""

    samples: Dataset
    names: list[str]

    def batches(self, size: int) -> Dataset:
        return self.samples.batch(size)


def read(source: str, made: "Built", asked: Asked) -> Inputs:
    """An image, a folder of images, an .npy file, or the test samples of a data set by its name."""
    path = Path(source).expanduser()
    if path.suffix.lower() == ".npy" and path.is_file():
        return _array(path, made)
    if path.is_dir() or path.suffix.lower() in _IMAGES:
        files = _files(path)
        return Inputs(Dataset([(each,) for each in _images(files, made)]), [str(file) for file in files])
    if path.exists():
        raise ValueError(f"predict: expected an image, a folder of images or an .npy file, got {source}")
    return _named(source, asked)


def _named(source: str, asked: Asked) -> Inputs:
    from halfstep.compare.material import material
    from halfstep.data.get.catalog import CATALOG

    if source != "sample" and source not in CATALOG and ":" not in source:
        known = f"a file, a folder, or a data set of sample, {', '.join(CATALOG)}"
        close = meant(source, ["sample", *CATALOG])
        hint = f". Did you mean {close!r}?" if close else ""
        raise FileNotFoundError(f"predict: expected {known}; found nothing at {source!r}{hint}")
    if asked.build is not None:
        raise ValueError("predict: a builder's network takes what the builder prepares: give an .npy file of it")
    path = asked.path if source == asked.data else None
    test = material(replace(asked, data=source, path=path, test_samples=None).settings()).test  # all of them
    return Inputs(test.select(test.columns[0]), [f"{source}[{i}]" for i in range(test.size)])


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"predict: expected an image or a folder of images, found nothing at {path}")
    files = sorted(f for f in path.rglob("*") if f.suffix.lower() in _IMAGES) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"predict: expected images ({' '.join(_IMAGES)}), found none in {path}")
    return files


def _images(files: list[Path], made: "Built") -> list[Tensor]:
    """Float32 in 0..1, [C, H, W] as the network was trained with; other sizes are resized, which a notice says."""
    import warnings

    from halfstep.data.read.folder import _read_image
    from halfstep.errors import Notice

    shape = _shape(made)
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise ValueError(f"predict: this network takes inputs of {list(shape)}, which no image has. Give an .npy file.")
    read = [_read_image(file, "L" if shape[0] == 1 else "RGB") for file in files]
    others = {tuple(image.shape[:2]) for image in read} - {shape[1:]}
    if others:
        sizes = ", ".join(f"{w} × {h}" for h, w in sorted(others)[:3])
        warnings.warn(f"predict: images of {sizes} are resized to {shape[2]} × {shape[1]}", Notice, stacklevel=2)
    resize, none = data.Resize((shape[1], shape[2])), torch.empty(0, 1)  # it draws no random numbers
    return [(resize(image[None], none)[0] if others else image).permute(2, 0, 1).float() / 255 for image in read]


def _array(path: Path, made: "Built") -> Inputs:
    import numpy as np

    try:
        array = torch.from_numpy(np.load(path, allow_pickle=False))
    except (ValueError, TypeError, EOFError, OSError) as error:
        raise ValueError(
            f"{path}: expected one array as numpy.save writes it, found something else ({error})"
        ) from error
    shape = _shape(made)
    samples = _prepared(array, shape) if array.dtype == torch.uint8 else array
    samples = samples[None] if samples.shape == shape else samples
    if shape[:1] == (1,) and tuple(samples.shape[1:]) == shape[1:]:
        samples = samples[:, None]  # gray, without its channel
    if tuple(samples.shape[1:]) != shape or not samples.shape[0]:
        wanted = f"[samples, {', '.join(map(str, shape))}]"
        raise ValueError(
            f"{path}: expected an array of {wanted}, as the network was trained with, got {list(array.shape)}"
        )
    return Inputs(Dataset((samples,)), [f"{path}[{i}]" for i in range(len(samples))])


def _prepared(array: Tensor, shape: tuple[int, ...]) -> Tensor:
    """uint8 [N, H, W], [N, H, W, C] or one of them without N, to float32 [N, C, H, W] in 0..1."""
    if len(shape) != 3:
        return array
    images = array[None] if array.dim() == 2 or tuple(array.shape) == (*shape[1:], shape[0]) else array
    images = images[..., None] if images.dim() == 3 else images
    if tuple(images.shape[1:]) == (*shape[1:], shape[0]):
        images = images.permute(0, 3, 1, 2)
    return images.float() / 255


def _shape(made: "Built") -> tuple[int, ...]:
    """Of one input, by the first batch of the data that the run was made with."""
    first: Any = next(iter(made.data.fresh() if isinstance(made.data, Dataset) else made.data))
    inputs = first[0] if isinstance(first, list | tuple) else first
    if not isinstance(inputs, Tensor):
        raise ValueError(f"predict: expected batches that begin with one tensor of inputs, got {type(inputs).__name__}")
    return tuple(inputs.shape[1:])
