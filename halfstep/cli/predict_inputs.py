"""The inputs of `halfstep predict`: image files, arrays or a data set.

Images, and arrays of bytes, are prepared as the training data of the run was: `TrainingMaps` holds
the maps that the run applied to its uint8 inputs, `ImageFormat` how one of these lies in memory.
A run that does not tell (its data is no Dataset, or not read as uint8) takes float32 in 0..1.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from halfstep import data
from halfstep.data import Dataset
from halfstep.data.download.local_copy import local_path
from halfstep.data.pipeline.collate import stack_column
from halfstep.data.pipeline.function_map import FunctionMap
from halfstep.data.pipeline.maps import TransformMap
from halfstep.data.pipeline.torchvision_maps import TorchvisionMap, mixes_batches
from halfstep.data.readers.resize_crop import parse_image_size
from halfstep.errors import Notice, closest_name
from halfstep.experiment.training_run import TrainSettings
from halfstep.utils.text import list_some, plural, printable

if TYPE_CHECKING:
    from halfstep.experiment.builders import RunParts

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
MAX_DAMAGE_NAMED = 5  # damaged files that a message names
MAX_SIZES_NAMED = 3  # sizes of images in the notice about resizing

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Inputs:
    """Samples of one column, a name for each, and the maps that are still to be applied."""

    samples: Dataset | Tensor | list[Tensor]
    names: list[str]
    maps: "TrainingMaps | None" = None

    def batches(self, size: int) -> Dataset:
        """What the network takes, in batches."""
        if isinstance(self.samples, Dataset):
            return self.samples.batch(size)
        if self.maps is not None:
            return self.maps.batches(self.samples, size)
        if isinstance(self.samples, Tensor):
            return Dataset((self.samples,)).batch(size)
        return Dataset([(sample,) for sample in self.samples]).batch(size)


def check_skips(source: str) -> None:
    """Refuses to leave out damaged files of what is no folder of images."""
    path = local_path(source, "predict").expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError(f"--skip-damaged: expected it with a folder of images, got {source}")


def read_inputs(
    source: str, built: "RunParts", settings: TrainSettings, *, skip_damaged: bool = False
) -> Inputs:
    """Reads an image, a folder of images, an .npy file, or the test samples of a named data set.

    A URL is copied first. `skip_damaged` leaves out images that cannot be decoded.
    """
    path = local_path(source, "predict").expanduser()
    suffix = path.suffix.lower()
    if suffix == ".npy" and path.is_file():
        return _read_array(path, built)
    if path.is_dir() or suffix in IMAGE_SUFFIXES:
        return _read_images(_image_files(path), built, settings, skip_damaged=skip_damaged)
    if path.exists():
        raise ValueError(
            f"predict: expected an image, a folder of images or an .npy file, got {source}"
        )
    return _read_named_dataset(source, settings)


# What the run was trained on.


@dataclass(frozen=True)
class ImageFormat:
    """How one image lies in memory: height and width, channels, and the order of its axes."""

    sides: tuple[int, int]
    channels: int
    axes: Literal["HW", "HWC", "CHW"]  # HW is gray without an axis for its channel

    @classmethod
    def from_shape(cls, shape: Shape) -> "ImageFormat | None":
        """[H, W], [H, W, C] or [C, H, W] with 1 or 3 channels; None for what is no image."""
        if len(shape) == 2:
            return cls((shape[0], shape[1]), 1, "HW")
        if len(shape) == 3 and shape[2] in (1, 3):
            return cls((shape[0], shape[1]), shape[2], "HWC")
        if len(shape) == 3 and shape[0] in (1, 3):
            return cls((shape[1], shape[2]), shape[0], "CHW")
        return None

    @property
    def mode(self) -> str:
        """Pillow's name for these channels."""
        return "L" if self.channels == 1 else "RGB"

    @property
    def shape(self) -> Shape:
        """The shape of one image."""
        return self._shapes_by_axes()[self.axes]

    def _shapes_by_axes(self) -> dict[str, Shape]:
        """The shapes that images of these sides and channels may come in."""
        shapes: dict[str, Shape] = {
            "HWC": (*self.sides, self.channels),
            "CHW": (self.channels, *self.sides),
        }
        if self.channels == 1:
            shapes["HW"] = self.sides
        return shapes

    def from_hwc(self, images: Tensor) -> Tensor:
        """Images [N, H, W, C] with their axes in the order of this format."""
        if self.axes == "HW":
            return images[..., 0]
        if self.axes == "CHW":
            return images.permute(0, 3, 1, 2)
        return images

    def convert(self, array: Tensor) -> Tensor | None:
        """One or several images of these sides and channels, in any order of axes, to this format.

        None for an array of another shape.
        """
        for axes, shape in self._shapes_by_axes().items():
            images = array[None] if tuple(array.shape) == shape else array
            if tuple(images.shape[1:]) != shape:
                continue
            if axes == "HW":
                images = images[..., None]
            elif axes == "CHW":
                images = images.movedim(1, 3)
            return self.from_hwc(images)
        return None


@dataclass(frozen=True)
class TrainingMaps:
    """The maps that a run applied to its inputs, without random ones: these only vary training."""

    column: str
    shape: Shape  # of one sample as it was read, uint8
    maps: tuple[TransformMap | FunctionMap, ...]

    @classmethod
    def from_data(cls, dataset: Any) -> "TrainingMaps | None":
        """The maps on the first column of a run's data; None where it does not tell.

        That is the case for data that is no Dataset, and for inputs that are not read as uint8 or
        are computed from several columns.
        """
        if not isinstance(dataset, Dataset):
            return None
        column = dataset.columns[0]
        source = dataset.plan.source
        if column not in source.names:
            return None

        # The maps that write this column. A function of other columns cannot be applied to inputs.
        maps: list[TransformMap | FunctionMap] = []
        for step in dataset.plan.maps:
            if isinstance(step, TransformMap) and column in step.columns:
                constant = tuple(part for t in step.transforms for part in _without_draws(t))
                if constant:
                    maps.append(replace(step, transforms=constant))
            elif isinstance(step, TorchvisionMap) and mixes_batches(step.function):
                continue  # only varies training
            elif isinstance(step, FunctionMap) and column in step.output:
                if step.columns != (column,) or step.output != (column,):
                    return None
                maps.append(step)

        index = torch.zeros(1, dtype=torch.int64, device=source.device)
        first_sample = stack_column(column, source.fetch(index)[column])
        if not isinstance(first_sample, Tensor) or first_sample.dtype != torch.uint8:
            return None
        return cls(column, tuple(first_sample.shape[1:]), tuple(maps))

    @property
    def resizes(self) -> bool:
        """Whether the run resized its images itself."""
        chains = [step for step in self.maps if isinstance(step, TransformMap)]
        return any(isinstance(t, data.Resize) for chain in chains for t in chain.transforms)

    def batches(self, samples: Tensor | list[Tensor], size: int) -> Dataset:
        """Batches for the network, of uint8 samples in the format that the run read its own in."""
        if isinstance(samples, Tensor):
            dataset = Dataset({self.column: samples}, [self.column])
        else:
            dataset = Dataset([(sample,) for sample in samples], [self.column])

        # A function of whole batches was mapped behind .batch() in the run, so it is here too.
        for step in self.maps:
            if isinstance(step, TransformMap):
                dataset = dataset.map(list(step.transforms), self.column)
                continue
            if not step.per_sample and not dataset.plan.batch_size:
                dataset = dataset.batch(size)
            dataset = dataset.map(step.function, self.column)
        return dataset if dataset.plan.batch_size else dataset.batch(size)

    def result_shape(self, shape: Shape) -> Shape:
        """The shape that the network gets for a sample of this shape, by trying it on zeros."""
        zeros = torch.zeros(1, *shape, dtype=torch.uint8)
        (batch,) = next(iter(self.batches(zeros, 1)))
        return tuple(batch.shape[1:])


def _without_draws(transform: Any) -> tuple[Any, ...]:
    """The transform where it draws no random numbers, else what stands for it in a prediction.

    Without a random crop to one size, images would have other sizes than the network learnt.
    """
    if not transform.draws:
        return (transform,)
    stand_ins: tuple[Any, ...] = getattr(transform, "for_evaluation", ())
    return stand_ins


def _network_shape(built: "RunParts") -> Shape:
    """The shape of one input of the network, by the first batch of the run's data."""
    batches = built.data.fresh() if isinstance(built.data, Dataset) else built.data
    first_batch: Any = next(iter(batches))
    inputs = first_batch[0] if isinstance(first_batch, list | tuple) else first_batch
    if not isinstance(inputs, Tensor):
        raise ValueError(
            "predict: expected batches that begin with one tensor of inputs, "
            f"got {type(inputs).__name__}"
        )
    return tuple(inputs.shape[1:])


def _image_formats(maps: TrainingMaps | None, network_shape: Shape) -> list[ImageFormat]:
    """The formats that an image may have, best first; none where inputs are no images.

    Images have the size that the run read its own in, or the size that its network takes.
    """
    read_format = ImageFormat.from_shape(network_shape if maps is None else maps.shape)
    if read_format is None:
        return []
    network_format = ImageFormat.from_shape(network_shape)
    if network_format is None or network_format.sides == read_format.sides:
        return [read_format]
    return [read_format, replace(read_format, sides=network_format.sides)]


# Data sets.


def _read_named_dataset(name: str, settings: TrainSettings) -> Inputs:
    """All test samples of a data set, prepared as by `halfstep train`."""
    from halfstep.data.download.catalog import CATALOG
    from halfstep.experiment.datasets import load_train_test_data

    if name != "sample" and name not in CATALOG and ":" not in name:
        close = closest_name(name, ["sample", *CATALOG])
        hint = f". Did you mean {close!r}?" if close else ""
        raise FileNotFoundError(
            f"predict: expected a file, a folder, or a data set of sample, {', '.join(CATALOG)}; "
            f"found nothing at {name!r}{hint}"
        )
    if settings.build is not None:
        raise ValueError(
            "predict: a builder's network takes what the builder prepares: give an .npy file of it"
        )
    path = settings.path if name == settings.data else None
    if name != settings.data:  # what the run chose for its own data says nothing of this
        settings = replace(settings, size=None, test_share=None, split_seed=None)
    settings = replace(settings, data=name, path=path, test_samples=None, class_weights=None)
    test_data = load_train_test_data(settings.comparison_settings()).test
    names = [f"{name}[{i}]" for i in range(test_data.size)]
    return Inputs(test_data.select(test_data.columns[0]), names)


# Image files.


def _image_files(path: Path) -> list[Path]:
    """The file itself, or all images below a folder, sorted."""
    if not path.exists():
        raise FileNotFoundError(
            f"predict: expected an image or a folder of images, found nothing at {path}"
        )
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        raise ValueError(
            f"predict: expected images ({' '.join(IMAGE_SUFFIXES)}), found none in {path}"
        )
    return files


def _read_images(
    files: list[Path], built: "RunParts", settings: TrainSettings, *, skip_damaged: bool
) -> Inputs:
    """Images as the run's own were when they were read; others are resized, with a notice.

    Where the run brought its photos to one size as they were read, so are these.
    """
    maps = TrainingMaps.from_data(built.data)
    network_shape = _network_shape(built)
    formats = _image_formats(maps, network_shape)
    if not formats:
        raise ValueError(
            f"predict: this network takes inputs of {list(network_shape)}, which no image has. "
            "Give an .npy file."
        )

    # The first format that the maps turn into what the network takes.
    chosen = formats[0]
    if maps is not None:
        for image_format in formats:
            if maps.result_shape(image_format.shape) == network_shape:
                chosen = image_format
                break

    # Images of another size are resized here, unless the run's own maps do it.
    size = _photo_size(built, settings)
    files, images = _decode(files, chosen.mode, size, skip_damaged=skip_damaged)
    if maps is None or not _maps_resize(maps, chosen, images, network_shape):
        images = _resize_images(images, chosen.sides)

    images = [chosen.from_hwc(image[None])[0] for image in images]
    if maps is None:
        images = [image.float() / 255 for image in images]
    return Inputs(images, [str(file) for file in files], maps)


def _decode(
    files: list[Path], mode: str, size: tuple[int, int] | None, *, skip_damaged: bool
) -> tuple[list[Path], list[Tensor]]:
    """The files and their pixels. Damaged ones are an error, or are left out with a notice."""
    from halfstep.data.readers.image_folder import read_image

    whole_files: list[Path] = []
    images: list[Tensor] = []
    errors: list[str] = []
    for file in files:
        try:
            image = read_image(file, mode, size=size)
        except (ValueError, OSError) as error:
            if len(files) == 1:
                raise
            if not skip_damaged:
                advice = "--skip-damaged leaves such files out"
                raise ValueError(f"predict: {str(error).rstrip('.')}. {advice}") from error
            errors.append(str(error).rstrip("."))
            continue
        whole_files.append(file)
        images.append(image)

    if not images:
        shown = list_some(errors, MAX_DAMAGE_NAMED)
        raise ValueError(f"predict: expected an image that can be read, found none: {shown}")
    if errors:
        shown = "; ".join(errors[:MAX_DAMAGE_NAMED])
        if len(errors) > MAX_DAMAGE_NAMED:
            shown += f"; and {len(errors) - MAX_DAMAGE_NAMED:,} more"
        warnings.warn(
            f"predict: {plural(len(errors), 'damaged file')} left out: {printable(shown)}",
            Notice,
            stacklevel=3,
        )
    return whole_files, images


def _photo_size(built: "RunParts", settings: TrainSettings) -> tuple[int, int] | None:
    """The size that the run brings its photos to; None where it leaves them as they are."""
    if settings.build is None and settings.size is not None:
        return parse_image_size("size", settings.size)
    source = getattr(getattr(built.data, "plan", None), "source", None)
    folder = getattr(source, "dataset", None)
    return folder.size if isinstance(folder, data.ImageFolder) else None


def _maps_resize(
    maps: TrainingMaps, image_format: ImageFormat, images: list[Tensor], network_shape: Shape
) -> bool:
    """Whether the maps bring images of all these sizes [H, W, C] to what the network takes."""
    if not maps.resizes:
        return False
    sizes = {(image.shape[0], image.shape[1]) for image in images}
    for sides in sizes:
        shape = replace(image_format, sides=sides).shape
        if maps.result_shape(shape) != network_shape:
            return False
    return True


def _resize_images(images: list[Tensor], sides: tuple[int, int]) -> list[Tensor]:
    """Images [H, W, C] of these sides. A notice says which were resized."""
    height, width = sides
    other_sizes = {tuple(image.shape[:2]) for image in images} - {sides}
    if not other_sizes:
        return images
    sizes = ", ".join(f"{w} × {h}" for h, w in sorted(other_sizes)[:MAX_SIZES_NAMED])
    warnings.warn(
        f"predict: images of {sizes} are resized to {width} × {height}", Notice, stacklevel=2
    )
    resize = data.Resize(sides, layout="HWC")
    random_numbers = torch.empty(0, 1)  # Resize draws none
    return [resize(image[None], random_numbers)[0] for image in images]


# Arrays.


def _read_array(path: Path, built: "RunParts") -> Inputs:
    """An .npy file: floats as the network takes them, or bytes as the run read its own."""
    import numpy as np

    try:
        array = torch.from_numpy(np.load(path, allow_pickle=False))
    except (ValueError, TypeError, EOFError, OSError) as error:
        raise ValueError(
            f"{path}: expected one array as numpy.save writes it, found something else ({error})"
        ) from error

    network_shape = _network_shape(built)
    maps = None
    if array.dtype == torch.uint8:
        maps = TrainingMaps.from_data(built.data)
        samples = _byte_samples(array, maps, network_shape)
    else:
        samples = _samples_of_shape(array, network_shape)
    if samples is None or not samples.shape[0]:
        expected = network_shape if maps is None else maps.shape
        raise ValueError(
            f"{path}: expected an array of [samples, {', '.join(map(str, expected))}], as the "
            f"network was trained with, got {list(array.shape)}"
        )
    return Inputs(samples, [f"{path}[{i}]" for i in range(len(samples))], maps)


def _samples_of_shape(array: Tensor, shape: Shape) -> Tensor | None:
    """The array as samples of this shape, a single one or many; None where it is no such array."""
    samples = array[None] if array.shape == shape else array
    if shape[:1] == (1,) and tuple(samples.shape[1:]) == shape[1:]:
        samples = samples[:, None]  # gray, without its channel
    return samples if tuple(samples.shape[1:]) == shape else None


def _byte_samples(array: Tensor, maps: TrainingMaps | None, network_shape: Shape) -> Tensor | None:
    """uint8 samples in the format that the run read its own in; None for other shapes.

    For a run that does not tell its format, float32 in 0..1 as the network takes them.
    """
    formats = _image_formats(maps, network_shape)
    if not formats:
        return _samples_of_shape(array, network_shape if maps is None else maps.shape)
    for image_format in formats:
        images = image_format.convert(array)
        if images is None:
            continue
        if maps is None:
            return images.float() / 255
        if maps.result_shape(tuple(images.shape[1:])) == network_shape:
            return images
    return None
