"""The data sets known by name: their files, where these are published, how to recognise them."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halfstep.errors import closest_name

DIGEST_LENGTHS = {"md5": 32, "sha256": 64}  # hex digits


@dataclass(frozen=True)
class Checksum:
    """The digest a file must have: `Checksum("sha256", "<64 hex digits>")`."""

    algorithm: Literal["md5", "sha256"]
    hex: str

    def __post_init__(self) -> None:
        length = DIGEST_LENGTHS.get(self.algorithm)
        if length is None:
            algorithms = " or ".join(DIGEST_LENGTHS)
            raise ValueError(f"expected a checksum of {algorithms}, got {self.algorithm!r}")
        if not re.fullmatch(f"[0-9a-f]{{{length}}}", self.hex):
            raise ValueError(
                f"expected {length} lower-case hex digits for {self.algorithm}, got {self.hex!r}"
            )

    @classmethod
    def of(cls, path: Path, algorithm: Literal["md5", "sha256"] = "sha256") -> "Checksum":
        """The checksum of a file on disk."""
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, lambda: _new_hasher(algorithm))
        return cls(algorithm, digest.hexdigest())

    def hasher(self) -> Any:
        """A new hashlib object of this algorithm."""
        return _new_hasher(self.algorithm)


def _new_hasher(algorithm: str) -> Any:
    # md5 tells a damaged file from a good one, and no more: it is taken over https only.
    return hashlib.new(algorithm, usedforsecurity=False)


@dataclass(frozen=True)
class PublishedFile:
    """One file to download: its mirrors in the order to try, and its checksum."""

    file: str
    urls: tuple[str, ...]
    checksum: Checksum


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A known data set."""

    name: str
    title: str
    kind: Literal["idx", "cifar"]
    files: tuple[str, ...]  # their names after unpacking
    sources: tuple[PublishedFile, ...]
    classes: tuple[str, ...]
    licence: str
    contents: tuple[Checksum, ...] = ()  # sha256 of each file, where somebody had the files
    folders: tuple[str, ...] = ()  # names of its folder that are no spelling of `name`
    package: str = ""  # Debian's

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def is_called(self, name: str) -> bool:
        """Whether a folder or a user means this set; case, dashes and underscores do not matter."""
        own_names = (self.name, *self.folders)
        return _normalise(name) in {_normalise(own_name) for own_name in own_names}


def _normalise(name: str) -> str:
    return re.sub("[-_ ]", "", name).casefold()


def catalog_entry(name: str) -> CatalogEntry:
    """The data set of that name in any spelling: "fashion-mnist", "FashionMNIST"."""
    if not isinstance(name, str):
        raise TypeError(f"expected the name of a data set, got {name!r}")
    for entry in CATALOG.values():
        if entry.is_called(name):
            return entry
    suggestion = ""
    closest = closest_name(name, CATALOG)
    if closest is not None:
        suggestion = f" Did you mean {closest!r}?"
    raise ValueError(f"expected one of {', '.join(CATALOG)}, got {name!r}.{suggestion}")


# The MNIST family: four files of the same names, each published as .gz.

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _idx_sources(sha256s: tuple[str, ...], *mirrors: str) -> tuple[PublishedFile, ...]:
    sources = []
    for name, sha256 in zip(IDX_FILES, sha256s, strict=True):
        file = f"{name}.gz"
        urls = tuple(mirror + file for mirror in mirrors)
        sources.append(PublishedFile(file, urls, Checksum("sha256", sha256)))
    return tuple(sources)


def _sha256s(*digests: str) -> tuple[Checksum, ...]:
    return tuple(Checksum("sha256", digest) for digest in digests)


_MNIST = CatalogEntry(
    name="mnist",
    title="MNIST, handwritten digits",
    kind="idx",
    files=IDX_FILES,
    sources=_idx_sources(
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    contents=_sha256s(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    classes=tuple("0123456789"),
    licence="CC BY-SA 3.0, Yann LeCun and Corinna Cortes, http://yann.lecun.com/exdb/mnist/",
)

_FASHION = CatalogEntry(
    name="fashion-mnist",
    title="Fashion-MNIST, articles of clothing",
    kind="idx",
    files=IDX_FILES,
    sources=_idx_sources(
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    contents=_sha256s(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    licence="MIT, Zalando SE, https://github.com/zalandoresearch/fashion-mnist",
    package="dataset-fashion-mnist",
)

# CIFAR: one archive each, in the binary version.

_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_KRIZHEVSKY = (
    "no licence stated; cite Krizhevsky, "
    "Learning Multiple Layers of Features from Tiny Images, 2009"
)

_CIFAR10 = CatalogEntry(
    name="cifar10",
    title="CIFAR-10, small colour images",
    kind="cifar",
    files=(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    sources=(
        PublishedFile(
            "cifar-10-binary.tar.gz",
            (f"{_TORONTO}cifar-10-binary.tar.gz",),
            Checksum("sha256", "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
        ),
    ),
    classes=(
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ),
    licence=f"{_KRIZHEVSKY}, {_TORONTO}cifar.html",
    folders=("cifar-10-batches-bin", "cifar-10-binary"),
)

_CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
    mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain
    plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
    television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

_CIFAR100 = CatalogEntry(
    name="cifar100",
    title="CIFAR-100, small colour images, fine labels",
    kind="cifar",
    files=("train.bin", "test.bin"),
    sources=(
        PublishedFile(
            "cifar-100-binary.tar.gz",
            (f"{_TORONTO}cifar-100-binary.tar.gz",),
            Checksum("sha256", "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
        ),
    ),
    classes=tuple(_CIFAR100_CLASSES.split()),
    licence=f"{_KRIZHEVSKY}, {_TORONTO}cifar.html",
    folders=("cifar-100-binary",),
)

CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry for entry in (_MNIST, _FASHION, _CIFAR10, _CIFAR100)
}
