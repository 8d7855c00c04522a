"""The options of a step, and everything that is refused or remarked on when a step is built."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import Notice
from halfstep.precision import Precision
from halfstep.precision.casting import batch_dependent_modules
from halfstep.precision.module_support import check_has_values
from halfstep.step.objective import Objective
from halfstep.step.optimizer import OptimizerKind, named_parameters
from halfstep.utils.checks import expect
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.text import dtype_name, list_some

NonFinite: TypeAlias = Literal["raise", "skip", "ignore"]
AutoFlag: TypeAlias = bool | Literal["auto"]
Decider: TypeAlias = Literal["auto", "host", "device"]
Strategy: TypeAlias = Literal["auto", "ddp", "none"]
Exactness: TypeAlias = Literal["bits"]
LearningRateTable: TypeAlias = Sequence[float] | Sequence[Sequence[float]] | Tensor
CountFunction: TypeAlias = Callable[[Any], float | Tensor]

STRATEGIES = "'auto', 'ddp' or 'none' ('fsdp' is not there yet: a network must fit on each device)"

# Options as other libraries call them.
FOREIGN_OPTIONS = {
    "accumulate_grad_batches": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "accumulation_steps": "accumulate",
    "gradient_clip_val": "clip_norm",
    "grad_clip": "clip_norm",
    "max_grad_norm": "clip_norm",
    "max_norm": "clip_norm",
    "clipnorm": "clip_norm",
    "clipvalue": "clip_value",
    "ema_decay": "ema",
    "use_ema": "ema",
    "jit_compile": "compile",
    "torch_compile": "compile",
    "benchmark": "cudnn_benchmark",
    "amp_level": "precision",
    "amp": "precision",
    "dtype": "precision",
    "mixed_precision": "precision",
    "criterion": "loss",
    "loss_fn": "loss",
    "model": "net",
    "module": "net",
    "network": "net",
    "optim": "optimizer",
    "optimiser": "optimizer",
}


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Everything a TrainStep can be told besides network, loss, optimizer and precision."""

    accumulate: int = 1
    """Batches per update (the update cycle)."""
    clip_norm: float | None = None
    """Largest norm of all gradients together, after unscaling."""
    clip_value: float | None = None
    """Largest absolute value of a gradient element, after unscaling, before clip_norm."""
    lr: LearningRateTable | None = None
    """Learning rates by update number: one row, or one row for each parameter group.

    Past the end of the table its last rate holds.
    """
    ema: float | None = None
    """Decay of an exponential moving average of the weights. Only real updates move it."""
    count: CountFunction | None = None
    """batch → how many terms its mean loss averages.

    Needed with accumulate > 1 and a loss that halfstep does not know.
    """
    forward: Callable[..., Any] | None = None
    """(net, *batch) → the loss's arguments as a tuple, or the loss itself when `loss` is None."""
    sens: float | Tensor = 1.0
    """Factor on the loss gradient (MindSpore's sens)."""
    nonfinite: NonFinite | None = None
    """What a non-finite gradient does; None: "skip" with loss scaling, "raise" without."""
    deterministic: bool = False
    """Deterministic kernels only, so that a run repeats bit for bit."""
    fingerprint_every: int = 0
    """Record a 64-bit fingerprint of the whole state every n steps (0: never)."""
    decide: Decider = "auto"
    """Where an update is committed or skipped; "auto": the device if the optimizer allows."""
    compile: AutoFlag = "auto"
    """Forward and loss compiled; "auto": once a long `fit` asks for it."""
    channels_last: AutoFlag = "auto"
    """2-d convolutions in channels-last order; "auto": on CUDA, below float64."""
    polish: AutoFlag = "auto"
    """Captured on CUDA: bookkeeping in few Triton kernels, graphs of many steps.

    "auto": once a run is long.
    """
    cudnn_benchmark: AutoFlag = "auto"
    """cuDNN measures its algorithms for each new shape; "auto": on CUDA, unless deterministic."""
    strategy: Strategy = "auto"
    """How the processes of torchrun train together.

    "ddp": each computes a part of every batch, and gradients are summed. "none": each trains by
    itself. "auto": "ddp" where there are several.
    """
    exact: Exactness | None = None
    """ "bits": the same weights, records and optimizer state for any number of ranks."""
    logical: int = 12
    """With exact="bits": the micro-batches that every batch is cut into, for 1 to so many ranks."""

    def __post_init__(self) -> None:
        is_count = isinstance(self.accumulate, int) and self.accumulate >= 1
        expect(is_count, "accumulate", "1 or more batches per update", self.accumulate)
        for name in ("clip_norm", "clip_value"):
            limit = getattr(self, name)
            is_limit = limit is None or (_is_number(limit) and limit > 0)
            expect(is_limit, name, "a positive number or None", limit)
        is_decay = self.ema is None or (_is_number(self.ema) and 0 < self.ema < 1)
        expect(is_decay, "ema", "a decay between 0 and 1, or None", self.ema)
        is_factor = isinstance(self.sens, Tensor) or self.sens != 0
        expect(is_factor, "sens", "a number other than 0", self.sens)
        is_policy = self.nonfinite in (None, "raise", "skip", "ignore")
        expect(is_policy, "nonfinite", "'raise', 'skip', 'ignore' or None", self.nonfinite)
        is_period = self.fingerprint_every >= 0
        expected = "0 (never) or a number of steps"
        expect(is_period, "fingerprint_every", expected, self.fingerprint_every)
        is_place = self.decide in ("auto", "host", "device")
        expect(is_place, "decide", "'auto', 'host' or 'device'", self.decide)

        is_strategy = self.strategy in ("auto", "ddp", "none")
        expect(is_strategy, "strategy", STRATEGIES, self.strategy)
        expect(self.exact in (None, "bits"), "exact", "'bits' or None", self.exact)
        is_number = isinstance(self.logical, int) and not isinstance(self.logical, bool)
        is_lane_count = is_number and self.logical >= 1
        expect(is_lane_count, "logical", "1 or more micro-batches per batch", self.logical)

        if self.exact == "bits":
            expected = "'auto' or False beside exact='bits', as programs depend on the batches met"
            expect(self.compile is not True, "compile", expected, self.compile)
            expected = "'auto' or False beside exact='bits', since no measurement repeats"
            expect(self.cudnn_benchmark is not True, "cudnn_benchmark", expected, True)

        for name in ("compile", "channels_last", "cudnn_benchmark", "polish"):
            flag = getattr(self, name)
            is_flag = isinstance(flag, bool) or flag == "auto"
            expect(is_flag, name, "True, False or 'auto'", flag)
        can_repeat = self.cudnn_benchmark is not True or not self.deterministic
        expected = "'auto' or False beside deterministic=True, since no measurement repeats"
        expect(can_repeat, "cudnn_benchmark", expected, self.cudnn_benchmark)

        for name in ("count", "forward"):
            function = getattr(self, name)
            expect(function is None or callable(function), name, "a function", function)

    def settled_for(self, device: torch.device) -> "StepOptions":
        """The options with what exact="bits" leaves no choice about."""
        if self.exact != "bits":
            return self
        needs_kernels = device.type == "cuda"
        return replace(
            self,
            compile=False,
            cudnn_benchmark=False,
            deterministic=self.deterministic or needs_kernels,
        )

    @property
    def measures_algorithms(self) -> bool:
        """Whether cuDNN may choose its algorithms by measuring them."""
        if self.cudnn_benchmark == "auto":
            return not (self.deterministic or torch.are_deterministic_algorithms_enabled())
        return self.cudnn_benchmark

    @property
    def backend_flags(self) -> dict[str, bool]:
        """The switches of torch's backends that hold during a step."""
        return {"deterministic": self.deterministic, "benchmark": self.measures_algorithms}

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "StepOptions":
        """The options among the arguments of a call, `locals()` at its start."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    @classmethod
    def changed_arguments(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The options among the arguments of a call that are not left at their default."""
        changed = {}
        for field in fields(cls):
            value = arguments[field.name]
            is_plain = isinstance(value, bool | int | float | str)
            if value is field.default or (is_plain and value == field.default):
                continue
            changed[field.name] = value
        return changed


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def find_parameters(net: Any, loss: Any, optimizer: Optimizer) -> tuple[list[str], list[Tensor]]:
    """Names and tensors of everything the optimizer trains, in the network's order."""
    if not isinstance(net, nn.Module):
        raise TypeError(f"net: expected a torch.nn.Module, received {type(net).__name__}")
    named = named_parameters(optimizer, ("", net), ("loss.", loss))
    net_ids = {id(p) for p in net.parameters()}
    if not any(id(p) in net_ids for _, p in named):
        raise ValueError(
            "optimizer: it holds none of the network's parameters; build it from net.parameters(), "
            "after any net.to(device) that replaces them"
        )
    names = [name for name, _ in named]
    params = [p for _, p in named]
    _warn_stale_optimizer(net, named)
    return names, params


def _warn_stale_optimizer(net: nn.Module, named: list[tuple[str, Tensor]]) -> None:
    """Warns where a layer was probably replaced between the optimizer and the step.

    Then the optimizer holds parameters that nobody uses, and the network has some that nobody
    trains. Either of the two alone is usual: two networks in one optimizer, or a frozen body.
    """
    outside = [name for name, _ in named if name.startswith("group")]
    trained = {id(p) for _, p in named}
    untrained = [n for n, p in net.named_parameters() if p.requires_grad and id(p) not in trained]
    if outside and untrained:
        warnings.warn(
            f"optimizer: it holds parameters that are not the network's ({list_some(outside, 3)}), "
            f"and does not hold {list_some(untrained, 3)} of the network; was a layer replaced "
            "after the optimizer was built? Build it again from net.parameters()",
            Notice,
            stacklevel=user_stacklevel(),
        )


def unreached_message(names: list[str], params: list[Tensor], step: int) -> str:
    """What is wrong with a loss that gives no parameter of the optimizer a gradient."""
    advice = (
        "is an output detached, a forward under no_grad, or is this the optimizer of another "
        "network?"
    )
    if not any(p.requires_grad for p in params):
        advice = "all of them are frozen (requires_grad is False)"
    return (
        f"step {step}: the loss depends on none of the optimizer's {len(params)} parameters "
        f"({list_some(names, 3)}): {advice}"
    )


def find_device(net: nn.Module, params: list[Tensor]) -> torch.device:
    """The one device of all parameters and buffers."""
    check_has_values(net)
    devices = {t.device for t in (*params, *net.parameters(), *net.buffers())}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"net: expected every parameter and buffer on one device, found {names}; "
            "call net.to(device) first"
        )
    return devices.pop()


def check_cycle(
    objective: Objective, net: nn.Module, accumulate: int, lane_count: int = 1
) -> list[str]:
    """Refuses a cycle whose weights nobody knows. Returns notices on one that is not exact.

    `lane_count`: the slices of each batch that are computed apart, on other ranks for instance.
    """
    if accumulate == 1 and lane_count == 1:
        return []
    division = f"accumulate={accumulate}"
    if accumulate == 1:
        division = f"a batch in {lane_count} slices"
    if not objective.can_weight:
        raise ValueError(_unknown_loss_message(objective.loss, division))

    coupled_layers = batch_dependent_modules(net)
    if not coupled_layers:
        return []
    notice = (
        f"batch-coupled layers see micro-batches: {list_some(list(map(repr, coupled_layers)), 3)}; "
        f"{division} is then not exactly the full batch"
    )
    warnings.warn(notice, Notice, stacklevel=user_stacklevel())
    return [notice]


def _unknown_loss_message(loss: Any, division: str) -> str:
    example = "len(batch[1])"
    if loss is None:
        name = "the network's own loss"
        example = 'len(batch["labels"])'
    elif isinstance(loss, nn.Module):
        name = type(loss).__name__
    else:
        name = getattr(loss, "__name__", str(loss))
    return (
        f"{division}: expected to know how many terms the loss averages, "
        f"but {name} is not a loss of torch.nn; "
        f"give count=, for instance count=lambda batch: {example}"
    )


def check_optimizer_precision(
    optimizer: Optimizer, precision: Precision, device: torch.device
) -> None:
    """Warns of settings that are 0 in half, and refuses a kernel of torch's that does nothing.

    torch's fused SGD leaves half parameters on a CPU where they were (pytorch#191763).
    """
    is_half = precision.params in (torch.float16, torch.bfloat16)
    if not is_half or precision.rounding != "nearest":
        return
    _warn_eps_underflow(optimizer, precision.params)

    is_sgd = isinstance(optimizer, torch.optim.SGD)
    is_fused_sgd = is_sgd and any(group["fused"] for group in optimizer.param_groups)
    if not is_fused_sgd or device.type != "cpu":
        return
    # Newer versions of torch have mended it: try.
    p = nn.Parameter(torch.ones(256, dtype=precision.params))
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=1.0, fused=True).step()
    if p.any():
        raise ValueError(
            f"optimizer: torch {torch.__version__}'s fused SGD does not update {precision.params} "
            "parameters on a CPU (pytorch#191763); build it without fused=True, "
            "or use rounding='kahan' or 'stochastic'"
        )


def _warn_eps_underflow(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Adam's 1e-8 is 0 in float16: a gradient whose square underflows is then divided by 0."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float) or eps <= 0 or torch.tensor(eps, dtype=dtype):
            continue
        warnings.warn(
            f"{type(optimizer).__name__}: eps={eps:g} is 0 in {dtype_name(dtype)}, "
            "and weights may become inf; give eps=1e-4, or rounding='kahan', "
            "or a precision with float32 parameters (O1, O2, O3)",
            Notice,
            stacklevel=user_stacklevel(),
        )
        return


def where_to_decide(requested: str, kind: OptimizerKind, device: torch.device) -> str:
    """Where updates are committed or skipped: "host" or "device".

    "auto" is the device where the optimizer allows it and a wait for the device costs something.
    """
    if requested == "device" and kind == "host":
        raise ValueError(
            "decide='device': this optimizer reads values on the host or keeps state there; "
            "build it with fused=True or capturable=True, or use decide='host'"
        )
    if requested != "auto":
        return requested
    return "device" if kind != "host" and device.type != "cpu" else "host"


def parameter_storage(precision: Precision) -> tuple[Any, ...]:
    """How a precision stores parameters: what a switch of precision must not change."""
    kept_modules = None
    if precision.cast == "whole":
        kept_modules = (precision.keep, precision.norms)
    return (precision.params, precision.rounding, kept_modules)


def check_switch(old: Precision, new: Precision, open_micro_batches: int) -> None:
    """Refuses a switch that could not continue from the same weights and gradients."""
    if parameter_storage(new) != parameter_storage(old):
        raise ValueError(
            f"switch: {new.name!r} stores parameters otherwise than {old.name!r}; "
            "build a new TrainStep"
        )
    if open_micro_batches:
        raise ValueError(
            "switch: an update cycle is open and its gradients carry the old scale; "
            "call flush() first"
        )
