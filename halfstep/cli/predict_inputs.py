"""What a network is to predict on: image files, arrays or a data set, prepared as its training data was."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep import data
from halfstep.cli.predict_inputs__prepared import Form, Preparation, form_of, preparation
from halfstep.data import Dataset
from halfstep.errors import closest_name
from halfstep.experiment.training_run import Asked

if TYPE_CHECKING:
    from halfstep.experiment.builders import Built

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")


@dataclass(frozen=True)
class Inputs:
    """Samples of one column, a name for each, and what is still to be done to them."""

    samples: Dataset | Tensor | list[Tensor]
    names: list[str]
    way: Preparation | None = None

    def batches(self, size: int) -> Dataset:
        if isinstance(self.samples, Dataset):
            return self.samples.batch(size)
        if self.way is not None:
            return self.way.batches(self.samples, size)
        return Dataset(
            (self.samples,) if isinstance(self.samples, Tensor) else [(x,) for x in self.samples]
        ).batch(size)


def read(source: str, made: "Built", asked: Asked) -> Inputs:
    """An image, a folder of images, an .npy file, or the test samples of a data set by its name."""
    path = Path(source).expanduser()
    if path.suffix.lower() == ".npy" and path.is_file():
        return _array(path, made)
    if path.is_dir() or path.suffix.lower() in _IMAGES:
        return _images(_files(path), made)
    if path.exists():
        raise ValueError(
            f"predict: expected an image, a folder of images or an .npy file, got {source}"
        )
    return _named(source, asked)


def _named(source: str, asked: Asked) -> Inputs:
    from halfstep.data.download.catalog import CATALOG
    from halfstep.experiment.datasets import material

    if source != "sample" and source not in CATALOG and ":" not in source:
        known = f"a file, a folder, or a data set of sample, {', '.join(CATALOG)}"
        close = closest_name(source, ["sample", *CATALOG])
        hint = f". Did you mean {close!r}?" if close else ""
        raise FileNotFoundError(f"predict: expected {known}; found nothing at {source!r}{hint}")
    if asked.build is not None:
        raise ValueError(
            "predict: a builder's network takes what the builder prepares: give an .npy file of it"
        )
    path = asked.path if source == asked.data else None
    test = material(
        replace(asked, data=source, path=path, test_samples=None).settings()
    ).test  # all of them
    return Inputs(test.select(test.columns[0]), [f"{source}[{i}]" for i in range(test.size)])


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(
            f"predict: expected an image or a folder of images, found nothing at {path}"
        )
    files = (
        sorted(f for f in path.rglob("*") if f.suffix.lower() in _IMAGES)
        if path.is_dir()
        else [path]
    )
    if not files:
        raise ValueError(f"predict: expected images ({' '.join(_IMAGES)}), found none in {path}")
    return files


def _images(files: list[Path], made: "Built") -> Inputs:
    """As the run's images were when they were read; by a run that does not say, float32 in 0..1 as its network takes
    them. Other sizes are resized, which a notice says."""
    from halfstep.data.readers.image_folder import _read_image

    way, shape = preparation(made.data), _shape(made)
    forms = _forms(way, shape)
    if not forms:
        raise ValueError(
            f"predict: this network takes inputs of {list(shape)}, which no image has. Give an .npy file."
        )
    form = next(
        (each for each in forms if way is None or way.result(each.sample) == shape), forms[0]
    )
    images = [_read_image(file, form.mode) for file in files]
    sizes = {(image.shape[0], image.shape[1]) for image in images}
    if (
        way is None
        or not way.resizes
        or any(way.result(replace(form, sides=each).sample) != shape for each in sizes)
    ):
        images = _sized(images, form.sides)
    laid = [form.lay(image[None])[0] for image in images]
    return Inputs(
        laid if way else [image.float() / 255 for image in laid], [str(file) for file in files], way
    )


def _sized(images: list[Tensor], sides: tuple[int, int]) -> list[Tensor]:
    import warnings

    from halfstep.errors import Notice

    others = {tuple(image.shape[:2]) for image in images} - {sides}
    if not others:
        return images
    sizes = ", ".join(f"{w} × {h}" for h, w in sorted(others)[:3])
    warnings.warn(
        f"predict: images of {sizes} are resized to {sides[1]} × {sides[0]}", Notice, stacklevel=2
    )
    resize, none = data.Resize(sides, layout="HWC"), torch.empty(0, 1)  # it draws no random numbers
    return [resize(image[None], none)[0] for image in images]


def _forms(way: Preparation | None, shape: tuple[int, ...]) -> list[Form]:
    """What an image may be: of the size that the run's were read in, or of the one that its network takes."""
    read, taken = form_of(way.shape if way else shape), form_of(shape)
    if read is None:
        return []
    return (
        [read]
        if taken is None or taken.sides == read.sides
        else [read, replace(read, sides=taken.sides)]
    )


def _array(path: Path, made: "Built") -> Inputs:
    import numpy as np

    try:
        array = torch.from_numpy(np.load(path, allow_pickle=False))
    except (ValueError, TypeError, EOFError, OSError) as error:
        raise ValueError(
            f"{path}: expected one array as numpy.save writes it, found something else ({error})"
        ) from error
    shape, way = _shape(made), preparation(made.data) if array.dtype == torch.uint8 else None
    samples = _bytes(array, way, shape) if array.dtype == torch.uint8 else _given(array, shape)
    wanted = way.shape if way else shape
    if samples is None or not samples.shape[0]:
        raise ValueError(
            f"{path}: expected an array of [samples, {', '.join(map(str, wanted))}], as the network was trained with, "
            f"got {list(array.shape)}"
        )
    return Inputs(samples, [f"{path}[{i}]" for i in range(len(samples))], way)


def _given(array: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    samples = array[None] if array.shape == shape else array
    if shape[:1] == (1,) and tuple(samples.shape[1:]) == shape[1:]:
        samples = samples[:, None]  # gray, without its channel
    return samples if tuple(samples.shape[1:]) == shape else None


def _bytes(array: Tensor, way: Preparation | None, shape: tuple[int, ...]) -> Tensor | None:
    """uint8 images as the run's were read, or by a run that does not say float32 in 0..1; None for other shapes."""
    forms = _forms(way, shape)
    for form in forms:
        found = form.found(array)
        if found is not None and way is None:
            return found.float() / 255
        if found is not None and way is not None and way.result(tuple(found.shape[1:])) == shape:
            return found
    return None if forms else _given(array, way.shape if way else shape)


def _shape(made: "Built") -> tuple[int, ...]:
    """Of one input, by the first batch of the data that the run was made with."""
    first: Any = next(iter(made.data.fresh() if isinstance(made.data, Dataset) else made.data))
    inputs = first[0] if isinstance(first, list | tuple) else first
    if not isinstance(inputs, Tensor):
        raise ValueError(
            f"predict: expected batches that begin with one tensor of inputs, got {type(inputs).__name__}"
        )
    return tuple(inputs.shape[1:])
