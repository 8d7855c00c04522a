"""The small networks: fully connected ones and LeNet-5."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.utils.checks import expect, whole_number

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "elu": nn.ELU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}  # fmt: skip


def mlp(
    *, inputs: int = 784, hidden: Sequence[int] = (512, 512), classes: int = 10
) -> nn.Sequential:
    """Flatten, then Linear and ReLU by turns; torch's own initialisation. By default the 784-512-512-10 classifier."""
    whole_number("classes", classes, minimum=1)
    return nn.Sequential(nn.Flatten(), *_dense(inputs, hidden, classes, nn.ReLU, None))


def ffnn(
    *,
    inputs: int = 3,
    hidden: Sequence[int] = (5, 5),
    outputs: int = 1,
    dropout: float | None = None,
    activation: str | Callable[[], nn.Module] = "relu",
) -> nn.Sequential:
    """Acts on the last dimension: Linear, activation and dropout per hidden layer, then Linear alone.

    `hidden=()` is one Linear. `dropout=None` adds no Dropout layers, so the keys of its state dict are other ones
    than those of `dropout=0.0`. `activation` is a name of the table or anything that makes a module.
    """
    whole_number("outputs", outputs, minimum=1)
    between = dropout is None or (isinstance(dropout, (int, float)) and 0 <= dropout < 1)
    expect(between, "dropout", "None or a probability from 0 to below 1", dropout)
    return nn.Sequential(*_dense(inputs, hidden, outputs, _activation(activation), dropout))


def _dense(
    inputs: int,
    hidden: Sequence[int],
    outputs: int,
    activation: Callable[[], nn.Module],
    dropout: float | None,
) -> list[nn.Module]:
    whole_number("inputs", inputs, minimum=1)
    listed = isinstance(hidden, Sequence) and not isinstance(hidden, str)
    expect(listed, "hidden", "a sequence of layer widths, for instance (512, 512)", hidden)
    layers: list[nn.Module] = []
    width = inputs
    for i, after in enumerate(hidden):
        whole_number(f"hidden[{i}]", after, minimum=1)
        layers += [nn.Linear(width, after), activation()]
        layers += [] if dropout is None else [nn.Dropout(dropout)]
        width = after
    return [*layers, nn.Linear(width, outputs)]


def _activation(value: str | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    named = isinstance(value, str)
    # a class, not a module: one instance would be shared by all layers
    good = value in ACTIVATIONS if named else callable(value) and not isinstance(value, nn.Module)
    expected = f"one of {', '.join(ACTIVATIONS)}, or a class such as torch.nn.Mish"
    expect(good, "activation", expected, value, ACTIVATIONS)
    return ACTIVATIONS[value] if isinstance(value, str) else value


class LeNet5(nn.Module):
    """Convolutions without bias, max pooling, ReLU; every weight and bias starts as normal(0, 0.02) cut at ±0.04."""

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
                f"lenet5: expected images of 32×32, received {size}. Resize them, or pad 28×28 ones by 2."
            )
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(-3)))
        x = F.relu(self.fc2(x))
        out: Tensor = self.fc3(x)
        return out


def lenet5(*, classes: int = 10, channels: int = 1) -> LeNet5:
    """LeNet-5 for 32×32 images: 6 and 16 channels, 120, 84, `classes`."""
    return LeNet5(classes=classes, channels=channels)
