"""The small networks: fully connected ones and LeNet-5."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.utils.checks import expect, whole_number

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


def mlp(
    *, inputs: int = 784, hidden: Sequence[int] = (512, 512), classes: int = 10
) -> nn.Sequential:
    """Flatten, then Linear and ReLU by turns, with torch's own initialisation.

    By default the 784-512-512-10 classifier.
    """
    whole_number("classes", classes, minimum=1)
    layers = _dense_layers(inputs, hidden, classes, activation=nn.ReLU, dropout=None)
    return nn.Sequential(nn.Flatten(), *layers)


def ffnn(
    *,
    inputs: int = 3,
    hidden: Sequence[int] = (5, 5),
    outputs: int = 1,
    dropout: float | None = None,
    activation: str | Callable[[], nn.Module] = "relu",
) -> nn.Sequential:
    """Acts on the last dimension: Linear, activation and dropout per hidden layer, then Linear.

    `hidden=()` is a single Linear. `dropout=None` adds no Dropout layers, so the keys of its state
    dict differ from those of `dropout=0.0`. `activation` is a name of ACTIVATIONS or anything that
    makes a module.
    """
    whole_number("outputs", outputs, minimum=1)
    is_probability = isinstance(dropout, (int, float)) and 0 <= dropout < 1
    expect(
        dropout is None or is_probability,
        "dropout",
        "None or a probability from 0 to below 1",
        dropout,
    )
    layers = _dense_layers(
        inputs, hidden, outputs, activation=_activation_class(activation), dropout=dropout
    )
    return nn.Sequential(*layers)


def _dense_layers(
    inputs: int,
    hidden: Sequence[int],
    outputs: int,
    *,
    activation: Callable[[], nn.Module],
    dropout: float | None,
) -> list[nn.Module]:
    whole_number("inputs", inputs, minimum=1)
    is_sequence = isinstance(hidden, Sequence) and not isinstance(hidden, str)
    expect(is_sequence, "hidden", "a sequence of layer widths, for instance (512, 512)", hidden)

    layers: list[nn.Module] = []
    input_width = inputs
    for i, width in enumerate(hidden):
        whole_number(f"hidden[{i}]", width, minimum=1)
        layers.append(nn.Linear(input_width, width))
        layers.append(activation())
        if dropout is not None:
            layers.append(nn.Dropout(dropout))
        input_width = width
    layers.append(nn.Linear(input_width, outputs))
    return layers


def _activation_class(activation: str | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    if isinstance(activation, str):
        is_valid = activation in ACTIVATIONS
    else:
        # A class, not a module: one module would be shared by all layers.
        is_valid = callable(activation) and not isinstance(activation, nn.Module)
    expected = f"one of {', '.join(ACTIVATIONS)}, or a class such as torch.nn.Mish"
    expect(is_valid, "activation", expected, activation, ACTIVATIONS)
    return ACTIVATIONS[activation] if isinstance(activation, str) else activation


class LeNet5(nn.Module):
    """Convolutions without bias, max pooling, ReLU.

    Every weight and bias starts as normal(0, 0.02), cut off at ±0.04.
    """

    def __init__(self, *, classes: int = 10, channels: int = 1) -> None:
        super().__init__()
        whole_number("classes", classes, minimum=1)
        whole_number("channels", channels, minimum=1)
        self.conv1 = nn.Conv2d(channels, 6, 5, bias=False)
        self.conv2 = nn.Conv2d(6, 16, 5, bias=False)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)
        for p in self.parameters():
            nn.init.trunc_normal_(p, std=0.02, a=-0.04, b=0.04)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (32, 32):
            size = "×".join(map(str, x.shape[-2:]))
            raise ValueError(
                f"lenet5: expected images of 32×32, received {size}. "
                "Resize them, or pad 28×28 ones by 2."
            )
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(-3)))
        x = F.relu(self.fc2(x))
        out: Tensor = self.fc3(x)
        return out


def lenet5(*, classes: int = 10, channels: int = 1) -> LeNet5:
    """LeNet-5 for 32×32 images: 6 and 16 channels, then layers of 120, 84 and `classes`."""
    return LeNet5(classes=classes, channels=channels)
