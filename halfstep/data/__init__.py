"""Data that is exact, seekable and as fast as the device.

Readers, an order of samples without a table, pipelines, transforms.
"""

from typing import TYPE_CHECKING

from halfstep.data.class_weights import class_weights
from halfstep.data.contact_sheet import sheet
from halfstep.data.download.find import find
from halfstep.data.named import load, sample
from halfstep.data.order import Order
from halfstep.data.pipeline.dataset import Dataset
from halfstep.data.pipeline.loader import Loader
from halfstep.data.readers.cifar import read_cifar
from halfstep.data.readers.idx import read_idx, read_split
from halfstep.data.readers.image_folder import ImageFolder
from halfstep.data.shards.shard_stream import ShardStream
from halfstep.data.shards.tar_shards import TarShards
from halfstep.data.tables.table_encoding import TableEncoding
from halfstep.data.tables.typed_table import Table, read_csv
from halfstep.data.transforms.affine import RandomAffine, RandomRotation
from halfstep.data.transforms.colour import ColorJitter, GaussianBlur, Grayscale, RandomGrayscale
from halfstep.data.transforms.crops import CenterCrop, RandomErasing, RandomResizedCrop
from halfstep.data.transforms.images import Cutout, Flip, PadCrop, Resize, ToCHW
from halfstep.data.transforms.mixing import CutMix, MixUp
from halfstep.data.transforms.random_apply import RandomApply
from halfstep.data.transforms.trivial_augment import TrivialAugment
from halfstep.data.transforms.values import Cast, Flatten, Normalize, OneHot, Rescale
from halfstep.utils.foreign_names import DATA_NAMES, missing_names

__all__ = [
    "Cast",
    "CenterCrop",
    "ColorJitter",
    "CutMix",
    "Cutout",
    "Dataset",
    "Flatten",
    "Flip",
    "GaussianBlur",
    "Grayscale",
    "ImageFolder",
    "Loader",
    "MixUp",
    "Normalize",
    "OneHot",
    "Order",
    "PadCrop",
    "RandomAffine",
    "RandomApply",
    "RandomErasing",
    "RandomGrayscale",
    "RandomResizedCrop",
    "RandomRotation",
    "Rescale",
    "Resize",
    "ShardStream",
    "Table",
    "TableEncoding",
    "TarShards",
    "ToCHW",
    "TrivialAugment",
    "class_weights",
    "find",
    "load",
    "read_cifar",
    "read_csv",
    "read_idx",
    "read_split",
    "sample",
    "sheet",
]

if not TYPE_CHECKING:  # type checkers know every other name as wrong
    __getattr__ = missing_names(__name__, __all__, DATA_NAMES)
