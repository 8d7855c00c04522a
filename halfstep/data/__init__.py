"""Data that is exact, seekable and as fast as the device: readers, an order without a table, pipelines, transforms."""

from halfstep.data.flow.dataset import Dataset
from halfstep.data.flow.loader import Loader
from halfstep.data.get.find import find
from halfstep.data.named import load, sample
from halfstep.data.order import Order
from halfstep.data.read.cifar import read_cifar
from halfstep.data.read.folder import ImageFolder
from halfstep.data.read.idx import read_idx, read_split
from halfstep.data.sheet import sheet
from halfstep.data.transforms.images import Cutout, Flip, PadCrop, Resize, ToCHW
from halfstep.data.transforms.values import Cast, Flatten, Normalize, OneHot, Rescale

__all__ = [
    "Cast", "Cutout", "Dataset", "Flatten", "Flip", "ImageFolder", "Loader", "Normalize", "OneHot", "Order", "PadCrop",
    "Rescale", "Resize", "ToCHW", "find", "load", "read_cifar", "read_idx", "read_split", "sample", "sheet",
]  # fmt: skip
