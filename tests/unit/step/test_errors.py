"""Every ValueError and TypeError of precision/ and step/.

Each is provoked, its message is checked, and its advice is followed.
"""

import ast
import copy
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.precision.advice import begin_with, find_half_units
from halfstep.precision.backend_flags import check_deterministic, check_supported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(hs.__file__).parent
# Far from overflow at loss scale 2**16.
X = torch.full((2, 3), 0.1, device=DEVICE)
Y = torch.zeros(2, 2, device=DEVICE)
CPU = torch.device("cpu")
MPS = torch.device("mps")

mse_loss = nn.functional.mse_loss


class Case(NamedTuple):
    """How to provoke an error, the words that its message must have, and how to follow its advice.

    The words say what was expected, what was received and what to do.
    """

    provoke: Callable[[], Any]
    words: tuple[str, ...]
    follow_advice: Callable[[], Any]


def linear() -> nn.Module:
    return nn.Linear(3, 2).to(DEVICE)


class Pair(nn.Module):
    """Returns a tuple, as an LSTM does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inner(x)
        return out, out.detach()


def half_linear() -> nn.Module:
    return linear().half()


def build(
    net: nn.Module | None = None,
    make_optimizer: Any = torch.optim.SGD,
    loss: Any = None,
    **options: Any,
) -> hs.TrainStep:
    net = linear() if net is None else net
    optimizer = make_optimizer(net.parameters(), lr=0.1)
    return hs.TrainStep(net, loss or nn.MSELoss(), optimizer, **options)


def assert_updates(step: hs.TrainStep, *batch: Any) -> None:
    """Asserts that the step updates on this batch, or on (X, Y)."""
    assert step(*(batch or (X, Y))).updated


def save_in_mid_cycle(*, flush: bool) -> None:
    """Saves a step whose batches are divided, after one batch of a cycle of two."""
    step = build(exact="bits", logical=3, accumulate=2)
    step(X, Y)
    if flush:
        step.flush()
    step.state_dict()


def option_case(good: Any, bad: Any, name: str, *words: str) -> Case:
    """An option of TrainStep with a bad value; the advice is a good one."""
    return Case(
        lambda: build(**{name: bad}),
        (name, "expected", *words, "received", repr(bad)),
        lambda: assert_updates(build(**{name: good})),
    )


def scale_case(good: Any, bad: Any, name: str, kind: Any = hs.DynamicScale) -> Case:
    """A setting of a loss scale with a bad value; the advice is a good one."""
    settings = {"value": 8.0} if kind is hs.FixedScale else {}

    def follow_advice() -> None:
        scale = kind(**{**settings, name: good})
        assert_updates(build(precision=hs.Precision("fp32", scale=scale)))

    return Case(
        lambda: kind(**{**settings, name: bad}),
        (name, "expected", "received", repr(bad)),
        follow_advice,
    )


def precision_case(words: str, bad: dict[str, Any], *good: dict[str, Any]) -> Case:
    """A Precision of bad settings; the words are separated by semicolons."""

    def follow_advice() -> None:
        for settings in good:
            net = nn.Sequential(linear())
            assert_updates(build(net, precision=hs.Precision(**settings)))

    return Case(lambda: hs.Precision(**bad), tuple(words.split(";")), follow_advice)


def tied() -> nn.Module:
    """Returns three layers, of which the first two have one weight."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    net[1].weight = net[0].weight
    return net.to(DEVICE)


def group_parameters(params: Any, lr: float) -> torch.optim.Optimizer:
    """Returns an optimizer with one parameter group per parameter."""
    return torch.optim.SGD([{"params": [p]} for p in params], lr=lr)


def run_after_adding_a_parameter(*, new_step: bool = False) -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.MSELoss(), optimizer)
    net.register_parameter("more", nn.Parameter(torch.zeros(1, device=DEVICE)))
    optimizer.add_param_group({"params": [net.more]})
    if new_step:
        step = hs.TrainStep(net, nn.MSELoss(), optimizer)
    assert_updates(step)


def switch_precision(old: str, new: str, *, open_cycle: bool = False, flush: bool = False) -> None:
    step = build(precision=old, accumulate=2)
    if open_cycle:
        step(X, Y)
    if flush:
        step.flush()
    step.switch(new)
    if step.options.accumulate == 1:
        assert_updates(step)
    else:
        step(X, Y)


def load_open_cycle(scale: float) -> None:
    """Loads an open cycle that was saved at loss scale 8 into a step of this scale."""
    saved_step = build(precision=hs.Precision("O2", scale=8.0), accumulate=2)
    step = build(precision=hs.Precision("O2", scale=scale), accumulate=2)
    saved_step(X, Y)
    step.load_state_dict(saved_step.state_dict())
    step(X, Y)


def open_cycle_state() -> dict[str, Any]:
    """Returns the state of a step inside a cycle of two batches."""
    step = build(accumulate=2)
    step(X, Y)
    return step.state_dict()


def run_lazy_network(*, forward: bool) -> None:
    net = nn.LazyLinear(2).to(DEVICE)
    if forward:
        net(X)
    assert_updates(build(net))


def run_on_two_devices(*, moved: bool) -> None:
    other_device = "meta" if DEVICE == "cpu" else "cpu"
    net = nn.Sequential(linear(), nn.Linear(2, 2, device=other_device))
    if moved and DEVICE == "cpu":
        # A meta tensor has no data to move.
        net = nn.Sequential(net[0], nn.Linear(2, 2).to(DEVICE))
    elif moved:
        net = net.to(DEVICE)
    assert_updates(build(net))


def run_from_meta() -> None:
    net = linear().to("meta").to_empty(device=DEVICE)
    assert isinstance(net, nn.Linear)
    net.reset_parameters()
    assert_updates(build(net))


def parallel() -> nn.DataParallel[nn.Module]:
    """As it is on a machine with two GPUs."""
    net = nn.DataParallel(linear())
    net.device_ids = [0, 1]
    return net


def run_after_one_forward() -> None:
    net = nn.Sequential(linear(), nn.LazyBatchNorm1d(affine=False).to(DEVICE))
    net(X)
    assert_updates(build(net))


def scripted() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        net: nn.Module = torch.jit.script(linear())
    return net


def with_quantized_layer() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        quantized = torch.ao.quantization.quantize_dynamic(
            nn.Sequential(nn.Linear(3, 3)), {nn.Linear}
        )
    return nn.Sequential(quantized, nn.Linear(3, 2))


def replace_parameter(net: Any) -> None:
    net.weight = nn.Parameter(net.weight.detach() * 2)


def run_changed(change: Callable[[nn.Module], object], *, new_step: bool = False) -> None:
    net = linear()
    step = build(net)
    step(X, Y)
    change(net)
    if new_step:
        step = build(net)
    assert_updates(step)


class MakesLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = linear()

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "head"):
            self.head = nn.Linear(2, 2).to(DEVICE)
        out: Tensor = self.head(self.body(x))
        return out


class WritesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.body.weight.mul_(0.5)
        out: Tensor = self.body(x)
        return out


def run_writing_forward(**precision: Any) -> None:
    assert_updates(build(WritesWeight(), precision=hs.Precision("O2", **precision)))


def run_layer_made_before() -> None:
    net = MakesLayer()
    net(X)
    assert_updates(build(net))


def run_changed_optimizer(*, new_step: bool = False) -> None:
    net = nn.Sequential(linear(), nn.Linear(2, 2).to(DEVICE))
    step = build(net, partial(optimizer_of_first, net))
    step.optimizer.param_groups[0]["params"][0] = net[1].weight
    if new_step:
        step = hs.TrainStep(net, nn.MSELoss(), step.optimizer)
    assert_updates(step)


def optimizer_of_first(net: Any, _: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([net[0].weight], lr=lr)


def run_beside(*, reached: bool) -> None:
    """One layer in the optimizer, the other one in the loss."""
    net = nn.Sequential(linear(), linear())
    index = 0 if reached else 1
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    loss = nn.MSELoss()
    step = hs.TrainStep(net, loss, optimizer, forward=lambda net, x, y: (net[index](x), y))
    assert_updates(step)


def copy_with_forward(make_forward: Callable[[nn.Module], Any]) -> None:
    net = linear()
    assert_updates(copy.deepcopy(build(net, forward=make_forward(net))))


def run_deterministic(**options: Any) -> None:
    """Runs on the CPU, where a deterministic step needs no setting of cuBLAS."""
    step = build(nn.Linear(3, 2), deterministic=True, **options)
    assert_updates(step, X.cpu(), Y.cpu())


def run_frozen_network(*, unfreeze: bool) -> None:
    net = linear().requires_grad_(False)
    step = build(net)
    net.requires_grad_(unfreeze)
    assert_updates(step)


def run_with_parameters_of(source: nn.Module | None) -> None:
    """Trains with an optimizer over the parameters of `source`, or of the network itself."""
    net = linear()
    optimizer = torch.optim.SGD((source or net).parameters(), lr=0.1)
    assert_updates(hs.TrainStep(net, nn.MSELoss(), optimizer))


class DictLinear(nn.Linear):
    """Returns a dict: of the loss where it gets a target, else of the output."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = super().forward(x)
        return {"out": out} if y is None else {"loss": mse_loss(out, y)}


def run_dict_network(*batch: Any, loss: Any = None, **options: Any) -> None:
    net = DictLinear(3, 2).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert_updates(hs.TrainStep(net, loss, optimizer, **options), *batch)


class OutputsThenLoss(nn.Linear):
    """Returns (outputs, loss), as many published language models do."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = super().forward(x)
        return out, mse_loss(out, y)


def run_outputs_then_loss(**options: Any) -> None:
    net = OutputsThenLoss(3, 2).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert_updates(hs.TrainStep(net, None, optimizer, **options), X, Y)


def load_edited_state(edit: Callable[[dict[str, Any]], Any]) -> None:
    saved = build().state_dict()
    edit(saved)
    build().load_state_dict(saved)


def load_with_hook(*, fails: bool) -> None:
    step = build()

    def hook(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if fails:
            raise KeyError("momentum_of_mine")

    step.optimizer.register_load_state_dict_pre_hook(hook)
    step.load_state_dict(build().state_dict())


def enter_averaged(*, train: bool = False, **options: Any) -> None:
    step = build(**options)
    with step.averaged():
        if train:
            assert_updates(step)


def check_with_cublas_config(value: str | None) -> None:
    value_before = os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    try:
        if value is not None:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = value
        check_deterministic(torch.device("cuda"))
    finally:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        if value_before is not None:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = value_before


def own_loss(out: Tensor, y: Tensor) -> Tensor:
    """A loss that is not in torch's table."""
    return (out - y).abs().mean()


def run_cycle_of_own_loss(**options: Any) -> None:
    step = build(loss=own_loss, accumulate=2, **options)
    step(X, Y)
    assert_updates(step)


O1 = {"name": "O1"}
O2 = {"name": "O2"}


def run_changing_parts(*, always: bool) -> None:
    """Two steps; the second has a part only with `always`."""
    losses: list[Tensor] = []

    def loss(out: Tensor, y: Tensor) -> dict[str, Tensor]:
        losses.append(mse_loss(out, y))
        if len(losses) == 1:
            return {"loss": losses[0], "mask": losses[0]}
        if always:
            return {"loss": losses[1], "mask": torch.zeros_like(losses[1])}
        return {"loss": losses[1]}

    step = build(loss=loss)
    step(X, Y)
    step(X, Y)


def both(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    out = nn.Linear.forward(net, x)  # type: ignore[arg-type]
    return {"loss": mse_loss(out, y), "outputs": out}


OPTIONS = {
    "accumulate": option_case(1, 0, "accumulate", "1 or more"),
    "clip_norm": option_case(1.0, -1.0, "clip_norm", "positive"),
    "clip_value": option_case(None, 0, "clip_value", "positive"),
    "ema": option_case(0.5, 1.0, "ema", "between 0 and 1"),
    "sens": option_case(-1.0, 0, "sens", "other than 0"),
    "nonfinite": option_case("skip", "explode", "nonfinite", "'raise', 'skip', 'ignore'"),
    "fingerprint_every": option_case(0, -1, "fingerprint_every", "0 (never)"),
    "decide": option_case("host", "gpu", "decide", "'auto', 'host' or 'device'"),
    "flag": option_case("auto", "yes", "compile", "True, False or 'auto'"),
    "strategy": option_case("none", "fsdp", "strategy", "'auto', 'ddp' or 'none'"),
    "exact": option_case("bits", "yes", "exact", "'bits' or None"),
    "logical": option_case(3, 0, "logical", "1 or more micro-batches"),
    "compiled bits": Case(
        lambda: build(exact="bits", compile=True),
        ("compile: expected 'auto' or False", "exact='bits'", "received True"),
        lambda: assert_updates(build(exact="bits", compile="auto")),
    ),
    "measured bits": Case(
        lambda: build(exact="bits", cudnn_benchmark=True),
        ("cudnn_benchmark: expected 'auto' or False", "exact='bits'", "received True"),
        lambda: assert_updates(build(exact="bits", cudnn_benchmark=False)),
    ),
    "measured algorithms": Case(
        lambda: run_deterministic(cudnn_benchmark=True),
        ("cudnn_benchmark: expected 'auto' or False", "deterministic=True", "received True"),
        lambda: (
            run_deterministic(cudnn_benchmark="auto"),
            run_deterministic(cudnn_benchmark=False),
        ),
    ),
    "count": option_case(len, 3, "count", "a function"),
    "forward": option_case(None, 3, "forward", "a function"),
    "unknown": Case(
        lambda: build(clip=1.0),
        ("'clip'", "did you mean 'clip_norm'"),
        lambda: assert_updates(build(clip_norm=1.0)),
    ),
    "rates": Case(
        lambda: build(lr=[[0.1], [0.1]]),
        ("lr", "one row of rates, or 1 rows", "received shape (2, 1)"),
        lambda: (assert_updates(build(lr=[0.1])), assert_updates(build(lr=[[0.1]]))),
    ),
    "a schedule": Case(
        lambda: build(lr=hs.schedules.cosine(0.1, 10)),
        ("lr: expected a table", "Schedule", "hs.schedules.tables("),
        lambda: assert_updates(build(lr=hs.schedules.tables([hs.schedules.cosine(0.1, 10)], 10))),
    ),
    "a rate": Case(
        lambda: build(lr=0.05),
        (
            "lr: expected a table of rates by update, received the number 0.05",
            "the optimizer's own; write torch.optim.SGD(net.parameters(), lr=0.05)",
        ),
        lambda: assert_updates(build()),
    ),
    "schedule=": Case(
        lambda: build(schedule=[0.1]),
        ("'schedule'", "did you mean 'lr'"),
        lambda: assert_updates(build(lr=[0.1])),
    ),
    "no rates": Case(
        lambda: build(lr=[]),
        ("lr", "one row", "received shape (0,)"),
        lambda: assert_updates(build(lr=[0.1])),
    ),
    "bad rates": Case(
        lambda: build(lr=[0.1, -0.5]),
        ("0 or more", "received", "-0.5"),
        lambda: assert_updates(build(lr=[0.1, 0])),
    ),
}
SCALES = {
    "init": scale_case(1.0, float("inf"), "init"),
    "growth": scale_case(1.5, 1.0, "growth"),
    "backoff": scale_case(0.9, 1.0, "backoff"),
    "interval": scale_case(1, 0, "interval"),
    "floor": scale_case(0.0, -1.0, "floor"),
    "cap": scale_case(None, 1.0, "cap"),
    "max_skips": scale_case(1, 0, "max_skips"),
    "on_skips": scale_case("fp32", "fp8", "on_skips"),
    "fixed": scale_case(1.0, 0.0, "value", hs.FixedScale),
    "fixed max_skips": scale_case(1, 0, "max_skips", hs.FixedScale),
}
PRECISIONS = {
    "scale": precision_case(
        "scale;'dynamic';received 'big'", {"scale": "big"}, {"scale": "dynamic"}, {"scale": 8}
    ),
    "name": precision_case("expected one of;O2 ;received 'fp7'", {"name": "fp7"}, O2),
    "plus": precision_case(
        "'O2+bf61';expected fp16, bf16;Did you mean 'O2+bf16'",
        {"name": "O2+bf61"},
        {"name": "O2+bf16"},
    ),
    "plus twice": precision_case(
        "received 'O2+bf16';'fp16' too;leave one of them out",
        {"name": "O2+bf16", "dtype": "fp16"},
        {"name": "O2+bf16"},
        {**O2, "dtype": "fp16"},
    ),
    "planned": precision_case("'fp8';planned;O2 ", {"name": "fp8"}, {"name": "bf16"}),
    "kind": Case(
        lambda: build(precision=16),
        ("a name or a Precision", "received int"),
        lambda: assert_updates(build(precision="O1")),
    ),
    "dtype": precision_case(
        "expected one of;bfloat16;received 'half'", {**O1, "dtype": "half"}, {**O1, "dtype": "fp16"}
    ),
    "low dtype": precision_case(
        "'float16' or 'bfloat16';received 'fp32'", {**O2, "dtype": "fp32"}, {**O2, "dtype": "bf16"}
    ),
    "no dtype": precision_case(
        "'bf16';received 'fp16';O1, O2", {"name": "bf16", "dtype": "fp16"}, {**O1, "dtype": "fp16"}
    ),
    "rounding": precision_case(
        "'nearest', 'stochastic', 'kahan';received 'up'",
        {"rounding": "up"},
        {"rounding": "nearest"},
    ),
    "kernels": precision_case(
        "one of 'auto', 'torch';received 'fast'", {"kernels": "fast"}, {"kernels": "torch"}
    ),
    "wide": precision_case(
        "'kahan';'O2';'fp16'", {**O2, "rounding": "kahan"}, {"name": "fp16", "rounding": "kahan"}
    ),
    "norms": precision_case(
        "keep_batchnorm_fp32;None;'fp32';O2, O3",
        {"keep_batchnorm_fp32": True},
        {},
        {**O2, "keep_batchnorm_fp32": True},
    ),
    "keep": precision_case(
        "keep;'fp32';O1", {"keep": {"0": "fp32"}}, {**O2, "keep": {"0": "fp32"}}
    ),
    "keep O1": precision_case(
        "keep;'fp32';O1", {**O1, "keep": {"0": "bf16"}}, {**O1, "keep": {"0": "fp32"}}
    ),
    "glob": Case(
        lambda: build(
            nn.Sequential(linear()), precision=hs.Precision("O2", keep={"head*": "fp32"})
        ),
        ("'head*'", "matches no module", "its modules are: 0"),
        lambda: assert_updates(
            build(nn.Sequential(linear()), precision=hs.Precision("O2", keep={"0": "fp32"}))
        ),
    ),
    "tied weights": Case(
        lambda: build(tied(), precision=hs.Precision("fp16", keep={"1": "fp32"})),
        ("'0' and '1' share one", "float16 and float32", "keep= or neither", "'O2'"),
        lambda: (
            build(tied(), precision=hs.Precision("fp16", keep={"*": "fp32"})),
            build(tied(), precision="fp16"),
            assert_updates(build(tied(), precision=hs.Precision("O2", keep={"1": "fp32"}))),
        ),
    ),
    "kept inputs": Case(
        lambda: build(precision=hs.Precision("O2", keep_inputs=("imput",))),
        ("keep_inputs", "'imput'", "did you mean 'input'"),
        lambda: assert_updates(build(precision=hs.Precision("O2", keep_inputs=("input",)))),
    ),
    "names of kept inputs": Case(
        lambda: hs.Precision("O2", keep_inputs="input"),
        ("keep_inputs", "expected names", "received 'input'"),
        lambda: hs.Precision("O2", keep_inputs=("input",)),
    ),
    "tf32": Case(
        lambda: check_supported(hs.Precision("tf32"), CPU),
        ("CUDA", "cpu", "use 'fp32'"),  # and, on a device with half units, what uses them
        lambda: (
            check_supported(hs.Precision("fp32"), CPU),
            check_supported(hs.Precision(begin_with(find_half_units(CPU))), CPU),
        ),
    ),
    "mps": Case(
        lambda: check_supported(hs.Precision("fp64"), MPS),
        ("float64", "'fp32'", "'cpu'"),
        lambda: (
            check_supported(hs.Precision("fp32"), MPS),
            check_supported(hs.Precision("fp64"), CPU),
        ),
    ),
    "cublas": Case(
        lambda: check_with_cublas_config(None),
        ("expected CUBLAS", "received None", ":4096:8"),
        lambda: check_with_cublas_config(":4096:8"),
    ),
    "lazy": Case(
        lambda: run_lazy_network(forward=False),
        ("'weight'", "run one forward"),
        lambda: run_lazy_network(forward=True),
    ),
    "stored": Case(
        lambda: build(half_linear()),
        ("torch.float32", "'weight' is torch.float16", "net.float()", "'fp16'"),
        lambda: (
            assert_updates(build(half_linear().float())),
            assert_updates(build(half_linear(), precision="fp16")),
        ),
    ),
    "switch": Case(
        lambda: switch_precision("O2", "fp16"),
        ("'fp16'", "'O2'", "new TrainStep"),
        lambda: assert_updates(build(precision="fp16")),
    ),
    "fallback": Case(
        lambda: build(precision=hs.Precision("fp16", scale=hs.DynamicScale(on_skips="bf16"))),
        ("on_skips", "expected 'raise' for 'fp16'", "received 'bf16'", "O1, O2 and O3"),
        lambda: assert_updates(
            build(precision=hs.Precision("O2", scale=hs.DynamicScale(on_skips="bf16")))
        ),
    ),
    "open cycle": Case(
        lambda: switch_precision("O2", "fp32", open_cycle=True),
        ("cycle is open", "flush()"),
        lambda: switch_precision("O2", "fp32", open_cycle=True, flush=True),
    ),
}
STEPS = {
    "net": Case(
        lambda: hs.TrainStep(own_loss, own_loss, torch.optim.SGD(linear().parameters())),
        ("expected a torch.nn.Module", "received function"),
        lambda: assert_updates(build()),
    ),
    "optimizer": Case(
        lambda: build(make_optimizer=lambda p, lr: lr),
        ("a torch.optim.Optimizer", "received float"),
        lambda: assert_updates(build()),
    ),
    "closure": Case(
        lambda: build(make_optimizer=torch.optim.LBFGS),
        ("LBFGS", "closure", "AdamW"),
        lambda: assert_updates(build(make_optimizer=torch.optim.AdamW)),
    ),
    "target shape": Case(
        lambda: build()(X, torch.zeros(2, 2, 1, device=DEVICE)),
        ("MSELoss", "expected a target of the outputs' shape [2, 2]", "received [2, 2, 1]"),
        lambda: assert_updates(build(), X, torch.zeros(2, 2, 1, device=DEVICE).squeeze(-1)),
    ),
    "whole numbers as a binary target": Case(
        lambda: build(loss=nn.BCEWithLogitsLoss())(X, Y.long()),
        ("BCEWithLogitsLoss: expected a target of floats", "received int64", "y.float()"),
        lambda: assert_updates(build(loss=nn.BCEWithLogitsLoss()), X, Y.long().float()),
    ),
    "inner target shape": Case(
        lambda: build(loss=lambda out, y: mse_loss(out, y))(X, Y[:, :1]),
        ("mse_loss, which the loss calls", "received [2, 1]", "broadcast_tensors(out, y)"),
        lambda: assert_updates(
            build(loss=lambda out, y: mse_loss(*torch.broadcast_tensors(out, y))), X, Y[:, :1]
        ),
    ),
    "outputs of several": Case(
        lambda: build(Pair())(X, Y),
        ("MSELoss", "expected the network to return a tensor", "received tuple", "(net(x)[0], y)"),
        lambda: assert_updates(build(Pair(), forward=lambda net, x, y: (net(x)[0], y))),
    ),
    "foreign": Case(
        lambda: run_with_parameters_of(linear()),
        ("none of the network's", "net.parameters()"),
        lambda: run_with_parameters_of(None),
    ),
    "devices": Case(
        lambda: run_on_two_devices(moved=False),
        ("one device", "cpu", "net.to(device)") if DEVICE == "cuda" else ("meta", "to_empty"),
        lambda: run_on_two_devices(moved=True),
    ),
    "meta": Case(
        lambda: build(linear().to("meta")),
        ("weight", "meta device", "net.to_empty", "reset_parameters"),
        lambda: run_from_meta(),
    ),
    "parallel": Case(
        lambda: build(parallel()),
        ("DataParallel", "2 devices", "net.module"),
        lambda: assert_updates(build(parallel().module)),
    ),
    "lazy buffer": Case(
        lambda: build(nn.Sequential(linear(), nn.LazyBatchNorm1d(affine=False).to(DEVICE))),
        ("1.running_mean", "no shape yet", "one forward"),
        lambda: run_after_one_forward(),
    ),
    "scripted": Case(
        lambda: build(scripted(), precision="O2"),
        ("TorchScript", "'O2'", "'fp32' or 'O1'"),
        lambda: assert_updates(build(scripted())),
    ),
    "quantized": Case(
        lambda: build(with_quantized_layer(), precision="O2"),
        ("'0.0'", "quantized", "'fp32' or 'O1'"),
        lambda: assert_updates(build(with_quantized_layer()), X.cpu(), Y.cpu()),
    ),
    "parameter replaced": Case(
        lambda: run_changed(replace_parameter),
        ("no longer uses weight", "load_state_dict without assign=True", "build the optimizer"),
        lambda: run_changed(replace_parameter, new_step=True),
    ),
    "parameter cast": Case(
        lambda: run_changed(lambda net: net.double()),
        ("weight was float32", "is now float64", "build the optimizer"),
        lambda: run_changed(lambda net: net.float(), new_step=True),
    ),
    "parameter in forward": Case(
        lambda: assert_updates(build(MakesLayer())),
        ("forward has added", "head.weight", "one forward first"),
        lambda: run_layer_made_before(),
    ),
    "write in forward": Case(
        lambda: run_writing_forward(),
        ("writes into parameters", "body.weight", "would be lost", "after the step", "keep="),
        lambda: run_writing_forward(keep={"body": "fp32"}),
    ),
    "optimizer's parameter": Case(
        lambda: run_changed_optimizer(),
        ("others in their place", "build a new step"),
        lambda: run_changed_optimizer(new_step=True),
    ),
    "complex loss": Case(
        lambda: build(loss=lambda out, y: torch.fft.fft(out - y).sum())(X, Y),
        ("real numbers", "complex64", "loss.abs()"),
        lambda: assert_updates(build(loss=lambda out, y: torch.fft.fft(out - y).sum().abs())),
    ),
    "unreached": Case(
        lambda: run_beside(reached=False),
        ("none of the optimizer's 2 parameters", "0.weight", "detached"),
        lambda: run_beside(reached=True),
    ),
    "copy": Case(
        lambda: copy.copy(build()),
        ("a TrainStep", "copy.deepcopy(step)"),
        lambda: assert_updates(copy.deepcopy(build())),
    ),
    "pickle": Case(
        lambda: pickle.dumps(build()),
        ("a TrainStep", "step.state_dict()"),
        lambda: build().load_state_dict(build().state_dict()),
    ),
    "copy with its forward": Case(
        lambda: copy_with_forward(lambda net: lambda _, x, y: (net(x), y)),
        ("forward=", "'net'", "first argument"),
        lambda: copy_with_forward(lambda _: lambda net, x, y: (net(x), y)),
    ),
    "cycle": Case(
        run_cycle_of_own_loss,
        ("accumulate=2", "own_loss", "count=lambda batch: len(batch[1])"),
        lambda: run_cycle_of_own_loss(count=lambda batch: len(batch[1])),
    ),
    "host": Case(
        lambda: build(make_optimizer=torch.optim.Adam, decide="device"),
        ("decide='device'", "fused=True", "decide='host'"),
        lambda: (
            assert_updates(
                build(make_optimizer=partial(torch.optim.Adam, fused=True), decide="device")
            ),
            assert_updates(build(make_optimizer=torch.optim.Adam, decide="host")),
        ),
    ),
    "frozen": Case(
        lambda: run_frozen_network(unfreeze=False),
        ("no trainable parameter", "requires_grad"),
        lambda: run_frozen_network(unfreeze=True),
    ),
    "loss": Case(
        lambda: build(loss="mse"),
        ("expected a loss module", "received 'mse'"),
        lambda: assert_updates(build(loss=nn.MSELoss())),
    ),
    "one item": Case(
        lambda: build()({"x": X, "y": Y}),
        (
            "inputs and a target",
            "received one dict",
            "forward=lambda net, b: (net(b['x']), b['y'])",
        ),
        lambda: assert_updates(
            build(forward=lambda net, b: (net(b["x"]), b["y"])), {"x": X, "y": Y}
        ),
    ),
    "no item": Case(
        lambda: build()(),
        ("inputs and a target", "received nothing"),
        lambda: assert_updates(build()),
    ),
    "arguments": Case(
        lambda: assert_updates(build(forward=lambda net, x, y: net(x))),
        ("expected a tuple", "received Tensor", "(outputs, target)", "loss=None"),
        lambda: (
            assert_updates(build(forward=lambda net, x, y: (net(x), y))),
            run_dict_network(
                X, Y, forward=lambda net, x, y: own_loss(nn.Linear.forward(net, x), y)
            ),
        ),
    ),
    "own loss": Case(
        lambda: run_dict_network(X),
        ("loss=None", "received a dict of 'out'", "give loss=", "labels in the batch"),
        lambda: (
            run_dict_network(X, Y),
            run_dict_network(X, Y, loss=lambda out, y: own_loss(out["out"], y)),
        ),
    ),
    "loss behind outputs": Case(
        run_outputs_then_loss,
        ("its loss first", "shape [", "position 1", "forward=lambda net, *batch: net(*batch)[1]"),
        lambda: run_outputs_then_loss(forward=lambda net, *batch: net(*batch)[1]),
    ),
    "saved keys": Case(
        lambda: load_edited_state(lambda s: s.pop("net")),
        ("expected net", "optimizer, state", "received"),
        lambda: load_edited_state(lambda s: None),
    ),
    "saved fields": Case(
        lambda: load_edited_state(lambda s: s["state"].pop("skips")),
        ("expected the fields", "skips", "received steps"),
        lambda: load_edited_state(lambda s: None),
    ),
    "saved hook": Case(
        lambda: load_with_hook(fails=True),
        ("load_state_dict of SGD failed", "KeyError: 'momentum_of_mine'", "Nothing was loaded"),
        lambda: load_with_hook(fails=False),
    ),
    "saved scale": Case(
        lambda: load_open_cycle(2.0), ("cycle is open", "same scale"), lambda: load_open_cycle(8.0)
    ),
    "saved cycle": Case(
        lambda: build().load_state_dict(open_cycle_state()),
        ("1 batches", "accumulate=1", "flush()"),
        lambda: build(accumulate=2).load_state_dict(open_cycle_state()),
    ),
    "saved average": Case(
        lambda: build(ema=0.9).load_state_dict(build().state_dict()),
        ("expected 2", "received 0", "ema="),
        lambda: build(ema=0.9).load_state_dict(build(ema=0.9).state_dict()),
    ),
    "loss type": Case(
        lambda: build(loss=lambda out, y: mse_loss(out, y).item())(X, Y),
        ("expected it to return a tensor", "received float", "as 'loss'"),
        lambda: (
            assert_updates(build(loss=lambda out, y: mse_loss(out, y))),
            assert_updates(build(loss=lambda out, y: {"loss": mse_loss(out, y), "x": out.sum()})),
        ),
    ),
    "loss dict": Case(
        lambda: build(loss=lambda out, y: {"total": mse_loss(out, y)})(X, Y),
        ("expected a dict with 'loss'", "'total'", "add it"),
        lambda: assert_updates(build(loss=lambda out, y: {"loss": mse_loss(out, y)})),
    ),
    "part type": Case(
        lambda: build(loss=lambda out, y: {"loss": mse_loss(out, y), "mask": 0.5})(X, Y),
        ("the part 'mask'", "expected a tensor of one number", "received float", "not .item()"),
        lambda: assert_updates(
            build(loss=lambda out, y: {"loss": mse_loss(out, y), "mask": out.sum()})
        ),
    ),
    "part shape": Case(
        lambda: build(loss=lambda out, y: (mse_loss(out, y), out))(X, Y),
        ("the part 'part_1'", "expected one real number", "of shape [", "its mean", "forward="),
        lambda: (
            assert_updates(build(loss=lambda out, y: (mse_loss(out, y), out.mean()))),
            run_dict_network(X, Y, forward=both),
        ),
    ),
    "part name": Case(
        lambda: build(loss=lambda out, y: {"loss": mse_loss(out, y), "a b": out.sum()})(X, Y),
        ("names of parts", "columns", "received 'a b'"),
        lambda: assert_updates(
            build(loss=lambda out, y: {"loss": mse_loss(out, y), "a_b": out.sum()})
        ),
    ),
    "part names": Case(
        lambda: run_changing_parts(always=False),
        ("expected the parts 'mask' with every batch", "received none", "torch.zeros_like(loss)"),
        lambda: run_changing_parts(always=True),
    ),
    "groups": Case(
        run_after_adding_a_parameter,
        ("expected the 2 parameters", "received 3", "build a new step"),
        lambda: run_after_adding_a_parameter(new_step=True),
    ),
    "saved network": Case(
        lambda: build().load_state_dict(build(nn.Linear(3, 5).to(DEVICE)).state_dict()),
        (
            "weight",
            "expected shape [2, 3]",
            "received shape [5, 3]",
            "as they were",
            "Nothing was loaded",
        ),
        lambda: build().load_state_dict(build().state_dict()),
    ),
    "saved optimizer": Case(
        lambda: build().load_state_dict(build(make_optimizer=group_parameters).state_dict()),
        ("expected an optimizer with [2]", "received [1, 1]", "Nothing was loaded"),
        lambda: build(make_optimizer=group_parameters).load_state_dict(
            build(make_optimizer=group_parameters).state_dict()
        ),
    ),
    "saved kind": Case(
        lambda: build(make_optimizer=torch.optim.AdamW).load_state_dict(build().state_dict()),
        (
            "expected the state of AdamW",
            "without betas, eps, amsgrad",
            "with momentum",
            "Nothing was loaded",
        ),
        lambda: build(make_optimizer=torch.optim.AdamW).load_state_dict(
            build(make_optimizer=torch.optim.Adam).state_dict()
        ),
    ),
    "saved bits": Case(
        lambda: build(exact="bits", logical=6).load_state_dict(build(exact="bits").state_dict()),
        ("exact='bits' in 12 logical micro-batches", "logical=6", "give logical=12"),
        lambda: build(exact="bits", logical=12).load_state_dict(build(exact="bits").state_dict()),
    ),
    "state in mid-cycle": Case(
        lambda: save_in_mid_cycle(flush=False),
        ("the update cycle is open", "spread over lanes", "flush()"),
        lambda: save_in_mid_cycle(flush=True),
    ),
    "in averaged": Case(
        lambda: enter_averaged(train=True, ema=0.9),
        ("to evaluate", "leave the block"),
        lambda: assert_updates(build(ema=0.9)),
    ),
    "averaged": Case(
        enter_averaged, ("no moving average", "ema=0.999"), lambda: enter_averaged(ema=0.999)
    ),
}
CASES: dict[str, Case] = {**OPTIONS, **SCALES, **PRECISIONS, **STEPS}
# Errors that this file cannot provoke: the source file, and words of the message.
UNREACHED = {
    ("backend_flags.py", "has no bfloat16 units"),  # needs a GPU before compute capability 8.0
    ("options.py", "on one device, found"),  # needs a GPU: then the case "devices" has it
    ("options.py", "fused SGD does not update"),  # see tests/parity/test_optimizers.py
    ("plain_paths.py", "compile=True"),  # needs step/fast deleted: tests/rules/test_layers.py
    ("plain_paths.py", "channels_last=True"),
    # Several ranks or divided batches: tests/parity/test_ranks.py and test_lanes.py.
    ("rank_startup.py", ""),
    ("lane_accumulate.py", ""),
    ("lanes.py", ""),
    ("state_dict.py", "summed by one process"),
}


def provoke(case: Case) -> BaseException:
    """Returns the error of the case."""
    with pytest.raises((ValueError, TypeError)) as caught:
        case.provoke()
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_the_error_names_what_was_expected_and_what_came(name: str) -> None:
    message = str(provoke(CASES[name]))
    assert [words for words in CASES[name].words if words not in message] == [], message


@pytest.mark.parametrize("name", CASES)
def test_the_advice_works(name: str) -> None:
    CASES[name].follow_advice()


def test_a_scale_that_never_grows_is_written_as_the_error_says() -> None:
    message = str(provoke(CASES["interval"]))
    expression = message[message.index("FixedScale(") : message.index(")") + 1]
    expression = expression.replace("value)", "8.0)").replace("…", "8.0")
    scale = eval(expression, {"FixedScale": hs.FixedScale})
    assert scale == hs.FixedScale(value=8.0)


@pytest.mark.parametrize(
    ("name", "bad"), [("accumulate", 2.5), ("accumulate", "4"), ("clip_norm", "1"), ("ema", "0.9")]
)
def test_a_value_of_the_wrong_kind_gets_the_same_kind_of_error(name: str, bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"{name}.*expected.*received {bad!r}"):
        build(**{name: bad})


def find_raise_sites() -> dict[tuple[str, int], str]:
    """Where precision/ and step/ raise ValueError or TypeError, or call expect(); with its code."""
    sites = {}
    for path in [*ROOT.glob("precision/*.py"), *ROOT.glob("step/*.py")]:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Raise):
                call = node.exc
                names = ("ValueError", "TypeError")
            elif isinstance(node, ast.Expr):
                call = node.value
                names = ("expect",)
            else:
                continue
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            if call.func.id in names:
                sites[str(path), node.lineno] = ast.get_source_segment(source, node) or ""
    return sites


def test_every_error_of_precision_and_step_is_provoked() -> None:
    """A new error needs a case above, with its words and its advice."""
    reached = set()
    for case in CASES.values():
        frames = traceback.extract_tb(provoke(case).__traceback__)
        reached |= {(frame.filename, frame.lineno) for frame in frames}
    missed = []
    for (path, line), code in find_raise_sites().items():
        is_excused = any(Path(path).name == name and words in code for name, words in UNREACHED)
        if (path, line) not in reached and not is_excused:
            missed.append((Path(path).name, line, code))
    assert missed == []
