"""Networks to train: fully connected, LeNet-5, ResNet-18 to -152, and the user's own by name."""

from typing import TYPE_CHECKING

from halfstep.nets.registry import load, names, register
from halfstep.nets.resnet import ResNet, resnet18, resnet34, resnet50, resnet101, resnet152
from halfstep.nets.small import LeNet5, ffnn, lenet5, mlp
from halfstep.utils.foreign_names import missing_names

__all__ = [
    "LeNet5",
    "ResNet",
    "ffnn",
    "lenet5",
    "load",
    "mlp",
    "names",
    "register",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
]

if not TYPE_CHECKING:  # type checkers know every other name as wrong
    __getattr__ = missing_names(__name__, __all__)
