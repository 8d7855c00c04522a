"""Networks of unusual modules: they train as in plain torch, or are refused by name at once."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 3, 0, 1])
STEPS = 4
PRECISIONS = ("fp32", "O1+bf16", "O2+bf16", "bf16", "fp64")


def base() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        torch.manual_seed(1)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x))
        return out


class Slots(nn.Module):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)
        self.factor = 2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.factor
        return out


class BufferedScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        return out


def script(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        scripted: nn.Module = torch.jit.script(module)
    return scripted


def traced() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        module: nn.Module = torch.jit.trace(base(), X)
    return module


def compiled() -> Any:
    torch._dynamo.reset()
    return torch.compile(base(), backend="eager")


def with_forward(change: Callable[[Any], Any]) -> nn.Module:
    net = base()
    net.forward = change(net.forward)  # type: ignore[method-assign]
    return net


def with_shared_forward() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    second = nn.Linear(8, 8)
    second.forward = first.forward  # type: ignore[method-assign]
    return nn.Sequential(first, second, nn.Linear(8, 4))


def quantized() -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        inner = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})
    return nn.Sequential(inner, nn.Linear(8, 4))


FOLLOWED: dict[str, Callable[[], nn.Module]] = {
    "compiled by torch.compile": compiled,
    "torch.compile inside": lambda: Outer(compiled()),
    "fx graph module": lambda: torch.fx.symbolic_trace(base()),
    "fx graph module inside": lambda: Outer(torch.fx.symbolic_trace(base())),
    "data parallel on one device": lambda: nn.DataParallel(base()),
    "slots": Slots,
    "partial forward": lambda: with_forward(functools.partial),
    "forward of the instance": lambda: with_forward(lambda forward: lambda x: forward(x) * 2),
    "shared forward": with_shared_forward,
    "a module twice": lambda: nn.Sequential(*([nn.Linear(8, 8)] * 2), nn.Linear(8, 4)),
}
SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: script(base()),
    "traced": traced,
    "scripted inside": lambda: Outer(script(base())),
    "scripted with buffers": lambda: script(BufferedScript()),
    "quantized inside": quantized,
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "meta": (lambda: base().to("meta"), r"'0\.weight' is on the meta device.*to_empty"),
    "meta inside": (
        lambda: nn.Sequential(base(), nn.Linear(4, 4, device="meta")),
        r"'1\.weight' is on the meta device.*to_empty",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4)), r"'0\.weight' has no shape.*one forward"),
    "lazy buffers": (
        lambda: nn.Sequential(nn.Linear(8, 4), nn.LazyBatchNorm1d(affine=False)),
        r"'1\.running_mean' has no shape.*one forward",
    ),
}


def plain_training(net: nn.Module, precision: str) -> tuple[list[float], list[Tensor]]:
    """A plain loop of torch's in fp32, bf16 or fp64."""
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    net.to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        out = net(X.to(dtype))
        target = Y.to(out.device)  # nn.DataParallel moves its module to a GPU where there is one
        loss = nn.functional.cross_entropy(out if precision == "fp64" else out.float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in net.parameters()]


def make_step(net: nn.Module, precision: str, **options: Any) -> hs.TrainStep:
    name, _, dtype = precision.partition("+")
    settings = {"dtype": "bfloat16"} if dtype else {}
    parsed = hs.Precision(name, kernels="torch", **settings)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=parsed, **options)


# torch's tracer looks at .grad of the low copies.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", FOLLOWED)
def test_unusual_modules_train_as_in_plain_torch(kind: str, precision: str) -> None:
    torch.manual_seed(0)
    net = FOLLOWED[kind]()
    torch.manual_seed(0)
    other = FOLLOWED[kind]()
    step = make_step(net, precision)
    losses = [step(X, Y).loss.item() for _ in range(STEPS)]
    if precision.startswith("O"):
        # Nothing of torch's has the rounding of O1 and O2 in one line: near the others.
        expected, _ = plain_training(other, "fp32")
        assert losses == pytest.approx(expected, rel=0.02)
        return
    expected, weights = plain_training(other, precision)
    assert losses == expected
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), weights, strict=True))


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"nonfinite": "skip", "ema": 0.9}])
@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripted_and_quantized_modules_train_where_weights_stay(
    kind: str, options: dict[str, Any]
) -> None:
    net = SCRIPTED[kind]()
    other = SCRIPTED[kind]()
    with warnings.catch_warnings(action="ignore"):
        step = make_step(net, "fp32", **options)
        records = [step(X, Y) for _ in range(STEPS * step.options.accumulate)]
        mixed = make_step(SCRIPTED[kind](), "O1+bf16", **options)
        mixed_records = [mixed(X, Y) for _ in range(STEPS * step.options.accumulate)]
    expected, _ = plain_training(other, "fp32")
    losses = [record.loss.item() for record in records if record.updated]
    if not options.get("accumulate"):
        assert losses == expected
    assert losses == pytest.approx(expected, rel=1e-5)
    mixed_losses = [record.loss.item() for record in mixed_records if record.updated]
    assert mixed_losses == pytest.approx(expected, rel=0.02)
    assert step.report().choices
    if "quantized" not in kind:  # torch wants the version of these modules beside their state
        step.load_state_dict(step.state_dict())

    # A skip restores the buffers of TorchScript too.
    if options.get("nonfinite") == "skip":
        before = step.fingerprints()
        assert step(X * torch.inf, Y).skipped
        after = step.fingerprints()
        assert all(after[name] == before[name] for name in before if name.startswith("net."))


@pytest.mark.parametrize("precision", ["O2+bf16", "O3+bf16", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripted_and_quantized_modules_are_refused_where_weights_change(
    kind: str, precision: str
) -> None:
    net = SCRIPTED[kind]()
    dtypes = [p.dtype for p in net.parameters()]
    with pytest.raises(ValueError, match=r"(TorchScript|quantized) module.*use 'fp32' or 'O1'"):
        make_step(net, precision)
    assert [p.dtype for p in net.parameters()] == dtypes, "refused after it was changed"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_values_is_refused_at_construction(kind: str, precision: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        make_step(make(), precision)
    if kind.startswith("meta"):
        with pytest.raises(ValueError, match=message):
            hs.Model(make(), nn.CrossEntropyLoss(), precision=precision)


def test_data_parallel_over_several_devices_is_refused_by_name() -> None:
    net = nn.DataParallel(base())
    net.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"DataParallel over 2 devices.*net\.module"):
        make_step(net, "O2")
