"""What users do to a network between two steps: followed as plain torch does, or refused by name.

Each change is made in the middle of a run, in several precisions, and in eager, captured and
compiled steps. What is followed is compared with a plain loop of torch's that makes the same
change, bit for bit.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import halfstep as hs
from halfstep.errors import Notice
from tests.support.emulated_graphs import sink_with_emulated_graphs

STEPS = 24
CHANGED_AT = 12
WAYS = ("eager", "captured", "compiled")
PRECISIONS = ("fp32", "O2+bf16", "bf16")


class Net(nn.Module):
    """Two layers of one shape, a head, and room for what a change brings."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.act = nn.ReLU()
        self.adapter: nn.Module = nn.Identity()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.adapter(self.act(self.second(self.act(self.first(x))))))
        return out


class TiedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight


class Doubled(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


Change = Callable[[nn.Module, torch.optim.Optimizer], object]


def new_linear(*, trainable: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(6, 6).requires_grad_(trainable)


def double_forward(net: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    net.act.forward = forward


def write_weights(net: Any) -> None:
    with torch.no_grad():
        net.head.weight.copy_(torch.linspace(-1, 1, 18).view(3, 6))


def scaled_state(net: nn.Module) -> dict[str, Tensor]:
    return {name: (value * 0.5).detach().clone() for name, value in net.state_dict().items()}


def exchange_layers(net: Any) -> None:
    net.first, net.second = net.second, net.first


def set_data(net: Any) -> None:
    net.head.weight.data = net.head.weight.data * 0.5


def set_in_dictionary(net: Any) -> None:
    net.head._parameters["weight"] = nn.Parameter(net.head.weight.detach().clone())


def cast_with_new_parameters(net: nn.Module) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        net.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def cast_by_swapping(net: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def set_settings(opt: torch.optim.Optimizer) -> None:
    opt.param_groups[0]["lr"] = 0.01
    opt.param_groups[0]["weight_decay"] = 0.1


FOLLOWED: dict[str, Change] = {
    "nothing": lambda net, opt: None,
    "activation replaced": lambda net, opt: setattr(net, "act", nn.Tanh()),
    "activation of another class": lambda net, opt: setattr(net.act, "__class__", Doubled),
    "forward of one instance": lambda net, opt: double_forward(net),
    "layer of no parameters added": lambda net, opt: setattr(net, "adapter", nn.Softsign()),
    "frozen layer added": lambda net, opt: setattr(net, "adapter", new_linear(trainable=False)),
    "layers exchanged": lambda net, opt: exchange_layers(net),
    "parameter frozen": lambda net, opt: net.first.weight.requires_grad_(False),
    "layer frozen": lambda net, opt: net.first.requires_grad_(False),
    "values written": lambda net, opt: write_weights(net),
    "data replaced": lambda net, opt: set_data(net),
    "state loaded": lambda net, opt: net.load_state_dict(scaled_state(net)),
    "parametrized": lambda net, opt: parametrize.register_parametrization(
        net.second, "weight", Twice()
    ),
    "hook registered": lambda net, opt: net.act.register_forward_hook(lambda m, a, out: out * 2),
    "buffer registered": lambda net, opt: net.register_buffer("extra", torch.ones(3)),
    "settings of the optimizer": lambda net, opt: set_settings(opt),
}

# What is followed, with a Notice of parameters that no optimizer trains.
ANNOUNCED: dict[str, tuple[type[nn.Module], Change, str]] = {
    "layer added": (
        Net,
        lambda net, opt: setattr(net, "adapter", new_linear()),
        "adapter.weight, adapter.bias",
    ),
    "weight untied": (
        TiedNet,
        lambda net, opt: setattr(
            net.second, "weight", nn.Parameter(net.first.weight.detach().clone())
        ),
        "second.weight",
    ),
}

# What is refused, with the name that the message says.
REFUSED: dict[str, tuple[Change, str]] = {
    "parameter replaced": (
        lambda net, opt: setattr(net.head, "weight", nn.Parameter(net.head.weight.detach() * 2)),
        "head.weight",
    ),
    "parameter replaced in the dictionary": (
        lambda net, opt: set_in_dictionary(net),
        "head.weight",
    ),
    "module replaced": (
        lambda net, opt: setattr(net, "second", new_linear()),
        "second.weight, second.bias",
    ),
    "module removed": (lambda net, opt: setattr(net, "second", nn.Identity()), "second.weight"),
    "parameter removed": (lambda net, opt: setattr(net.head, "bias", None), "head.bias"),
    "weights tied": (
        lambda net, opt: setattr(net.second, "weight", net.first.weight),
        "second.weight",
    ),
    "state assigned": (
        lambda net, opt: net.load_state_dict(scaled_state(net), assign=True),
        "first.weight",
    ),
    "weight norm": (lambda net, opt: parametrizations.weight_norm(net.second), "second.weight"),
    "float64": (lambda net, opt: net.double(), "first.weight"),
    "float16": (lambda net, opt: net.half(), "first.weight"),
    "float64 by new parameters": (
        lambda net, opt: cast_with_new_parameters(net),
        "first.weight",
    ),
    "float64 by swapping": (lambda net, opt: cast_by_swapping(net), "first.weight"),
    "one layer in float16": (lambda net, opt: net.head.half(), "head.weight"),
    "data of another shape": (
        lambda net, opt: setattr(net.head.bias, "data", torch.zeros(1)),
        "head.bias",
    ),
    "group added to the optimizer": (
        lambda net, opt: opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
        "optimizer",
    ),
    "parameter replaced in the optimizer": (
        lambda net, opt: opt.param_groups[0]["params"].__setitem__(
            0, nn.Parameter(torch.zeros(6, 6))
        ),
        "optimizer",
    ),
}


@pytest.fixture(autouse=True)
def compiled_by_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs are really traced, and run by torch's own kernels: bits can be compared."""
    torch._dynamo.reset()
    backend = torch._dynamo.lookup_backend("aot_eager")

    def compile_fx(graph: Any, inputs: Any, config_patches: Any) -> Any:
        return backend(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    yield
    torch._dynamo.reset()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(STEPS)
    ]


def make_net(net_type: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return net_type()


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def plain_losses(
    precision: str, change: Change, net_type: type[nn.Module] = Net
) -> tuple[list[float], nn.Module]:
    """A plain loop of torch's in this precision."""
    net = make_net(net_type)
    optimizer = make_optimizer(net)
    low = torch.bfloat16
    if precision == "bf16":
        net.to(low)
    losses = []
    for i, (x, y) in enumerate(make_batches()):
        if i == CHANGED_AT:
            change(net, optimizer)
            if precision == "bf16":
                net.to(low)
        if precision == "O2+bf16":
            copies = {name: p.to(low) for name, p in net.named_parameters()}
            out = functional_call(net, copies, x.to(low))
        else:
            out = net(x.to(next(net.parameters()).dtype))
        loss = nn.functional.cross_entropy(out.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net


def make_step(
    precision: str, way: str, net_type: type[nn.Module] = Net, **options: Any
) -> hs.TrainStep:
    net = make_net(net_type)
    options = {"compile": way == "compiled", **options}
    if way == "captured":
        options["decide"] = "device"
    parsed = hs.Precision(precision.split("+")[0], kernels="torch")
    if precision.startswith("O2"):
        parsed = hs.Precision("O2", dtype="bfloat16", kernels="torch")
    return hs.TrainStep(
        net, nn.CrossEntropyLoss(), make_optimizer(net), precision=parsed, **options
    )


def step_losses(step: hs.TrainStep, way: str, change: Change) -> list[float]:
    """The losses of a TrainStep; the change comes between two visits where it is captured."""
    batches = make_batches()
    losses: list[float] = []
    if way != "captured":
        for i, batch in enumerate(batches):
            if i == CHANGED_AT:
                change(step.net, step.optimizer)
            losses.append(step(*batch).loss.item())
        return losses
    sink = sink_with_emulated_graphs(step, batches, every=4)
    for records in sink:
        losses += records.loss.tolist()
        if len(losses) == CHANGED_AT:
            assert sink.runner.program.replays > 0, "nothing was captured before the change"
            change(step.net, step.optimizer)
    return losses


def final_weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


# torch's tracer looks at .grad of a copy that has become part of a graph, or no longer is.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_change_with_a_clear_meaning_is_followed(name: str, precision: str, way: str) -> None:
    expected, expected_net = plain_losses(precision, FOLLOWED[name])
    step = make_step(precision, way)
    assert step_losses(step, way, FOLLOWED[name]) == expected
    pairs = zip(final_weights(step.net), final_weights(expected_net), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ANNOUNCED)
def test_new_parameters_that_nobody_trains_are_announced(
    name: str, precision: str, way: str
) -> None:
    net_type, change, names = ANNOUNCED[name]
    expected, _ = plain_losses(precision, change, net_type)
    step = make_step(precision, way, net_type)
    with pytest.warns(Notice, match=re.escape(names)):
        assert step_losses(step, way, change) == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_the_optimizer_cannot_follow_is_refused(
    name: str, precision: str, way: str
) -> None:
    if "swapping" in name and way != "eager":
        pytest.skip("torch itself does not swap tensors that a graph holds")
    change, names = REFUSED[name]
    step = make_step(precision, way)
    with pytest.raises(ValueError, match=re.escape(names)) as refusal:
        step_losses(step, way, change)
    assert "build" in str(refusal.value)

    # Until it is built again, also for those who go on, save or flush.
    for use in (partial(step, *make_batches()[0]), step.flush, step.state_dict):
        with pytest.raises(ValueError, match=re.escape(names)):
            use()
