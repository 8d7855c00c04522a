"""torchvision's transforms in a pipeline: on the host, seeded for each sample.

halfstep does not need torchvision: its transforms are recognised by the module that they are from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.data.pipeline.collate import Batch, stack_column, unstacked_column
from halfstep.data.pipeline.function_map import FunctionMap
from halfstep.data.pipeline.seeding import seed_host_generators
from halfstep.data.transforms.axes import GRAY_AXES, Axes, image_axes

# Transforms of hs.data that do the same on whole batches, on the device.
_COUNTERPARTS = {
    "CenterCrop": "CenterCrop",
    "ColorJitter": "ColorJitter",
    "CutMix": "CutMix",
    "GaussianBlur": "GaussianBlur",
    "Grayscale": "Grayscale",
    "MixUp": "MixUp",
    "Normalize": "Normalize",
    "RandomAffine": "RandomAffine",
    "RandomApply": "RandomApply",
    "RandomCrop": "PadCrop",
    "RandomErasing": "RandomErasing",
    "RandomGrayscale": "RandomGrayscale",
    "RandomHorizontalFlip": "Flip",
    "RandomResizedCrop": "RandomResizedCrop",
    "RandomRotation": "RandomRotation",
    "Resize": "Resize",
    "ToDtype": "Rescale",
    "TrivialAugmentWide": "TrivialAugment",
}
_MIXERS = ("MixUp", "CutMix")  # they need whole batches


@dataclass(frozen=True)
class TorchvisionMap(FunctionMap):
    """A transform of torchvision, called with one sample at a time; MixUp and CutMix with a batch.

    Before each sample the generators of Python, numpy and torch are seeded by a hash of the
    pipeline's seed, the pass and the sample: what a sample becomes does not depend on its batch,
    its worker or where a run was resumed. Images [H, W, C] become [C, H, W], which torchvision
    takes, and stay so. [H, W] is handed over as [1, H, W], and is [H, W] again afterwards.
    """

    seed: int = 0

    def __str__(self) -> str:
        text = " ".join(super().__str__().split())  # the repr of a module has several lines
        return f"{text[:-1]}, torchvision)"

    def __call__(self, batch: Batch, epochs: Tensor, samples: Tensor) -> Batch:
        inputs = [batch[name] for name in self.columns]
        keys = list(zip(epochs.tolist(), samples.tolist(), strict=True))
        results: list[Any]
        if self.per_sample:
            rows = []
            for key, row in zip(keys, zip(*inputs, strict=True), strict=True):
                seed_host_generators(hashing.key(self.seed, *key))
                rows.append(self._call(row, batch_dimensions=0))
            results = [unstacked_column(parts) for parts in zip(*rows, strict=True)]
        else:
            named_inputs = zip(self.columns, inputs, strict=True)
            stacked = tuple(stack_column(name, column) for name, column in named_inputs)
            seed_host_generators(hashing.key(self.seed, *keys[0]))
            results = list(self._call(stacked, batch_dimensions=1))

        # What a function behind it draws is a matter of the batch again, in a worker too.
        seed_host_generators(hashing.key(self.seed, *keys[0], 1))
        columns = {**batch, **dict(zip(self.output, results, strict=True))}
        return {name: columns[name] for name in self.output_names(tuple(batch))}

    def _call(self, values: tuple[Any, ...], batch_dimensions: int) -> tuple[Any, ...]:
        """The transform's results for one sample, or for one batch."""
        layouts = [_layout_of(value, batch_dimensions) for value in values]
        images = [
            _to_torchvision(value, axes, batch_dimensions)
            for value, axes in zip(values, layouts, strict=True)
        ]
        try:
            parts = self._result_parts(self.function(*images))
        except TypeError as error:
            if "PIL Image or ndarray" not in str(error):
                raise
            raise TypeError(
                f"map: {error}. The samples of this column are tensors already: leave ToTensor and "
                "PILToTensor out, and put hs.data.Rescale(1 / 255) or v2.ToDtype(torch.float32, "
                "scale=True) in their place."
            ) from error
        if len(parts) != len(values):
            return tuple(_plain(part) for part in parts)
        return tuple(
            _from_torchvision(_plain(part), axes, batch_dimensions)
            for part, axes in zip(parts, layouts, strict=True)
        )


def is_torchvision(operation: Any) -> bool:
    """Whether torchvision has made it: a transform, a subclass of one, or a function."""
    owners = getattr(type(operation), "__mro__", ())
    modules = [getattr(owner, "__module__", "") for owner in owners]
    if not isinstance(operation, torch.nn.Module):
        modules.append(getattr(operation, "__module__", None) or "")
    if isinstance(operation, torch.nn.Sequential):
        return any(is_torchvision(part) for part in operation)
    return any(str(module).split(".")[0] == "torchvision" for module in modules)


def mixes_batches(operation: Any) -> bool:
    """Whether MixUp or CutMix is in it."""
    return any(type(part).__name__ in _MIXERS for part in _parts(operation))


def describe_cost(operation: Any) -> str:
    """Where it runs, in words, and what hs.data has instead."""
    names = [type(part).__name__ for part in _parts(operation)]
    counterparts = sorted({_COUNTERPARTS[name] for name in names if name in _COUNTERPARTS})
    unit = "batch by batch" if mixes_batches(operation) else "one image at a time"
    text = (
        f"map: {type(operation).__name__} is torchvision's. It runs on the host, {unit}, and not "
        "in captured graphs; workers(n) spreads it over processes."
    )
    if counterparts:
        text += f" On whole batches and on the device: hs.data.{', '.join(counterparts)}."
    return text


def _parts(operation: Any) -> Iterator[Any]:
    """The transform, and those inside of it."""
    yield operation
    inner = getattr(operation, "transforms", None)
    if inner is None and isinstance(operation, torch.nn.Sequential):
        inner = list(operation)
    if isinstance(inner, list | tuple | torch.nn.ModuleList):
        for part in inner:
            yield from _parts(part)


def _layout_of(value: Any, batch_dimensions: int) -> Axes | None:
    """The axes of a plain tensor of images that must be changed to [C, H, W]; else None."""
    if type(value) is not Tensor or value.dim() - batch_dimensions not in (2, 3):
        return None
    images = value if batch_dimensions else value[None]
    try:
        axes = image_axes("map", images, None)
    except ValueError:  # the shape does not say: as torchvision takes it
        return None
    return None if axes.channel == 1 else axes


def _to_torchvision(value: Any, axes: Axes | None, batch_dimensions: int) -> Any:
    if axes is None:
        return value
    if axes == GRAY_AXES:
        return value.unsqueeze(batch_dimensions)
    return value.movedim(-1, batch_dimensions)


def _from_torchvision(value: Any, axes: Axes | None, batch_dimensions: int) -> Any:
    """Without the channel that `_to_torchvision` added, where it is still the only one."""
    is_image = isinstance(value, Tensor) and value.dim() == batch_dimensions + 3
    if axes == GRAY_AXES and is_image:
        return value.squeeze(batch_dimensions)
    return value


def _plain(value: Any) -> Any:
    """Without torchvision's own tensor types."""
    if isinstance(value, Tensor) and type(value) is not Tensor:
        return value.as_subclass(Tensor)
    return value
