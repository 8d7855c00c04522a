"""Folders of photos as training and test data: split, brought to one size, decoded once.

What is chosen for the user, the size and the split, is said in a line when training begins, and
noted with the run, so that every other command chooses the same.
"""

import contextlib
import hashlib
import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.data import Dataset, ImageFolder
from halfstep.data.pipeline.source import ColumnSource, RowSource
from halfstep.data.readers.image_folder import describe_unread, read_in_threads
from halfstep.data.readers.image_survey import ImageSurvey, survey_images
from halfstep.data.readers.resize_crop import Size, format_image_size, parse_image_size
from halfstep.data.readers.split_folder import SplitFolder
from halfstep.data.splits import DEFAULT_SPLIT_SEED, DEFAULT_TEST_SHARE
from halfstep.errors import Notice
from halfstep.experiment.data_parts import DataParts
from halfstep.experiment.reading_progress import reading_progress
from halfstep.experiment.settings import Settings
from halfstep.utils.text import format_bytes, list_some, plural, printable

# The side that photos of several sizes are brought to where no size is requested: what the network
# was designed for, and for fully connected ones a number of weights that trains on any machine.
USUAL_SIDES = {"lenet5": 32, "mlp": 64, "ffnn": 64}
USUAL_SIDE = 224
SIDE_STEP = 8  # a side chosen from small photos is a multiple of it
# A fully connected network on larger images than these has billions of weights.
DENSE_NETS = ("mlp", "ffnn")
MAX_DENSE_PIXELS = 512 * 512

MEMORY_STATUS = Path("/proc/meminfo")
MAX_NAMED = 5  # damaged files, or duplicates, that a message names
MEMORY_SHARE = 0.5  # of the free memory that decoded photos may take
FILES_AT_ONCE = 64
# Files that could be duplicates are compared up to so many bytes in all.
MAX_COMPARED_BYTES = 1 << 28


def read_photos(
    folder: SplitFolder, settings: Settings, *, training: bool, split: bool
) -> DataParts:
    """Training and test photos by the settings.

    `training`: say what was chosen, and decode all photos now, as far as they fit into memory.
    Without `split`, both parts of a folder that nobody has split are all of it.
    """
    chosen: dict[str, Any] = {}
    if folder.classes_in is not None and not split:
        train = test = ImageFolder(folder.classes_in)
    else:
        chosen = _choose_split(folder, settings)
        share = chosen.get("test_share", DEFAULT_TEST_SHARE)
        seed = chosen.get("split_seed", DEFAULT_SPLIT_SEED)
        train, test = folder.images(share, seed)

    if settings.skip_damaged:
        train, test = _without_damaged((train, test), settings, training=training)
    survey = _survey(train, test, visible=training)
    if survey.damage:
        files = [*train.files, *test.files]
        raise _damage_error([survey.damage[i] for i in survey.damage], len(files))

    size = _choose_size(survey, settings)
    if size is not None:
        chosen["size"] = format_image_size(size)
        train = train.resized(size)
        test = test.resized(size)

    facts: dict[str, Any] = {"classes": list(train.classes), "train": len(train), "test": len(test)}
    if folder.kind == "unsplit":
        facts["test_files"] = _digest_of_names(test)
    if training:
        _announce(folder, settings, survey, (train, test), chosen)
    datasets = [Dataset(part, ["image", "label"]) for part in (train, test)]
    if training and settings.samples is None:
        datasets = _load_if_it_fits(datasets, (train, test), survey, settings)
    return DataParts(datasets[0], datasets[1], chosen, facts)


# The split


def _choose_split(folder: SplitFolder, settings: Settings) -> dict[str, Any]:
    """Share and seed of the split that is made here; nothing for a folder that is split."""
    if folder.kind == "unsplit":
        share = settings.test_share
        seed = settings.split_seed
        return {
            "test_share": DEFAULT_TEST_SHARE if share is None else share,
            "split_seed": DEFAULT_SPLIT_SEED if seed is None else seed,
        }
    refuse_split_settings(settings, f"{folder.root} has {' and '.join(folder.parts)} already")
    return {}


def refuse_split_settings(settings: Settings, reason: str) -> None:
    """Raises a ValueError if the settings split what is split already."""
    for name in ("test_share", "split_seed"):
        if getattr(settings, name) is not None:
            raise ValueError(f"{name}: expected it with data that is not split; {reason}")


def _digest_of_names(part: ImageFolder) -> str:
    """A digest of the paths below the folder: another one is another split."""
    digest = hashlib.sha256()
    for path in part.files:
        digest.update(Path(path).relative_to(part.root).as_posix().encode(errors="surrogateescape"))
        digest.update(b"\0")
    return digest.hexdigest()


def find_duplicates(train: ImageFolder, test: ImageFolder) -> list[tuple[str, str]]:
    """Pairs of a test file and a training file with the same bytes; empty where there are many.

    Only files of the same length are read.
    """
    train_by_length = defaultdict(list)
    for path in train.files:
        train_by_length[os.path.getsize(path)].append(path)
    candidates = [path for path in test.files if os.path.getsize(path) in train_by_length]
    to_read = sum(
        os.path.getsize(path) * (1 + len(train_by_length[os.path.getsize(path)]))
        for path in candidates
    )
    if to_read > MAX_COMPARED_BYTES:
        return []

    digests: dict[str, bytes] = {}

    def digest_of(path: str) -> bytes:
        if path not in digests:
            digests[path] = hashlib.sha256(Path(path).read_bytes()).digest()
        return digests[path]

    pairs = []
    for path in candidates:
        for other in train_by_length[os.path.getsize(path)]:
            if digest_of(path) == digest_of(other):
                pairs.append((path, other))
                break
    return pairs


def describe_duplicates(root: Path, pairs: list[tuple[str, str]]) -> str:
    """One line about the pairs that `find_duplicates` gave."""
    shown = [f"{Path(a).relative_to(root)} = {Path(b).relative_to(root)}" for a, b in pairs]
    verb = "is" if len(pairs) == 1 else "are"
    return (
        f"{plural(len(pairs), 'test photo')} {verb} among the training photos too, byte for byte, "
        f"which makes scores better than they are: {list_some(shown, MAX_NAMED)}"
    )


# The size


def _choose_size(survey: ImageSurvey, settings: Settings) -> Size | None:
    """The size in the settings, else one that the photos and the network suggest.

    None where all photos have one size already that the network can take.
    """
    if settings.size is not None:
        return parse_image_size("size", settings.size)
    if not survey.sizes:
        return None
    if len(survey.sizes) == 1:
        ((height, width),) = survey.sizes
        if settings.net not in DENSE_NETS or height * width <= MAX_DENSE_PIXELS:
            return None
    side = min(USUAL_SIDES.get(settings.net, USUAL_SIDE), survey.median_short_side)
    if side > SIDE_STEP and settings.net != "lenet5":
        side -= side % SIDE_STEP
    return side, side


# Damage


def _survey(train: ImageFolder, test: ImageFolder, *, visible: bool) -> ImageSurvey:
    files = [*train.files, *test.files]
    with reading_progress("looking at the photos", len(files), visible=visible) as on_read:
        return survey_images(files, on_read=on_read)


def _damage_error(errors: list[str], file_count: int) -> ValueError:
    shown = "; ".join(error.rstrip(".") for error in errors[:MAX_NAMED])
    if len(errors) > MAX_NAMED:
        shown += f"; and {len(errors) - MAX_NAMED:,} more"
    return ValueError(
        f"data: {plural(len(errors), 'file')} of {file_count:,} cannot be read: {shown}. "
        "--skip-damaged leaves such files out"
    )


def _without_damaged(
    parts: Iterable[ImageFolder], settings: Settings, *, training: bool
) -> list[ImageFolder]:
    """The parts without the files that cannot be decoded; a notice names them."""
    whole_parts = []
    errors: list[str] = []
    for part in parts:
        chosen = []
        with reading_progress("checking the photos", len(part), visible=training) as on_read:
            for start in range(0, len(part), FILES_AT_ONCE):
                indices = range(start, min(start + FILES_AT_ONCE, len(part)))
                found = read_in_threads(partial(_error_of, part), indices)
                for index, error in zip(indices, found, strict=True):
                    if error is None:
                        chosen.append(index)
                    else:
                        errors.append(error)
                on_read(len(indices))
        whole_parts.append(part.subset(chosen))
    for part in whole_parts:
        if not len(part):
            raise _damage_error(errors, len(errors))
    if errors and training:
        shown = "; ".join(error.rstrip(".") for error in errors[:MAX_NAMED])
        more = f"; and {len(errors) - MAX_NAMED:,} more" if len(errors) > MAX_NAMED else ""
        _notice(f"{plural(len(errors), 'damaged file')} left out: {shown}{more}")
    return whole_parts


def _error_of(part: ImageFolder, index: int) -> str | None:
    """Why a photo cannot be decoded; None where it can."""
    try:
        part[index]
    except (ValueError, OSError) as error:
        return str(error)
    return None


# What is said


def _announce(
    folder: SplitFolder,
    settings: Settings,
    survey: ImageSurvey,
    parts: tuple[ImageFolder, ImageFolder],
    chosen: dict[str, Any],
) -> None:
    """One line for each thing that was chosen, or that the user should know of the data."""
    train, test = parts
    if folder.kind == "unsplit" and settings.test_share is None:
        _notice(
            f"{settings.data} has no test part: {chosen['test_share']:.0%} of each class are test "
            f"data, {len(train):,} photos to train and {len(test):,} to test. "
            "--test-share and --split-seed change that"
        )
    if "size" in chosen and settings.size is None:
        size = parse_image_size("size", chosen["size"])
        _notice(
            f"photos of {survey.describe_sizes()}: resized to cover {size[1]} × {size[0]} and "
            "cropped to the centre. --size 224 chooses another size"
        )
    unread = train.unread + (test.unread if folder.kind == "images" else Counter())
    if unread:
        _notice(
            f"{describe_unread(unread)} left out: such files are not read, convert them to JPEG"
        )
    modes = survey.describe_modes()
    if modes is not None:
        _notice(f"{modes} of {sum(survey.modes.values()):,} photos: converted to RGB")
    pairs = find_duplicates(train, test)
    if pairs:
        _notice(describe_duplicates(folder.root, pairs))


def _notice(text: str) -> None:
    warnings.warn(f"data: {printable(text)}", Notice, stacklevel=4)


# Memory


def _load_if_it_fits(
    datasets: list[Dataset],
    parts: tuple[ImageFolder, ImageFolder],
    survey: ImageSurvey,
    settings: Settings,
) -> list[Dataset]:
    """The data sets with their photos decoded in memory, uint8; or as they are, with a notice."""
    size = parts[0].size
    if size is None:
        (size,) = survey.sizes
    count = sum(map(len, parts))
    needed = count * size[0] * size[1] * len(parts[0].mode)
    free = _free_memory()
    if free is not None and needed > MEMORY_SHARE * free:
        _notice(
            f"{count:,} photos take {format_bytes(needed)} decoded, more than half of the free "
            f"memory ({format_bytes(free)}): they are decoded again in every epoch"
        )
        return datasets
    with reading_progress("decoding the photos", count, visible=True) as on_read:
        loaded = []
        for dataset, part in zip(datasets, parts, strict=True):
            part.on_read = on_read
            try:
                loaded.append(dataset.load())
            except (ValueError, OSError) as error:
                raise ValueError(
                    f"data: {settings.data}: {error} --skip-damaged leaves such files out"
                ) from error
            finally:
                part.on_read = None
    return loaded


def _free_memory() -> int | None:
    """Bytes that a program may take without swapping; None where the system does not say."""
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB", MEMORY_STATUS.read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else None
    return None


def labels_of(dataset: Dataset) -> Tensor | None:
    """The labels of data in memory or of photos; None where they would have to be read one by one.

    Labels are whole numbers from 0 in the last column.
    """
    source = dataset.plan.source
    labels = None
    if isinstance(source, ColumnSource) and len(source.names) > 1:
        labels = source.tensors.get(dataset.columns[-1])
    elif isinstance(source, RowSource) and isinstance(source.dataset, ImageFolder):
        labels = torch.tensor(source.dataset.labels)
    if labels is None or labels.dim() != 1 or labels.is_floating_point() or not len(labels):
        return None
    if labels.dtype == torch.bool or labels.min() < 0:
        return None
    return labels[: dataset.size]
