"""`summary`: the layers of a network, with shapes, parameters, dtypes, memory and operations."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.engine import Feed
from halfstep.engine.batch_errors import describe_value
from halfstep.model import Model
from halfstep.model.resume_backup import ResumeBackup
from halfstep.precision import Applied, Precision, PrecisionName
from halfstep.precision.backend_flags import set_backend_flags
from halfstep.preflight.net_costs import (
    MemoryUse,
    gradient_bytes,
    low_copy_bytes,
    optimizer_bytes,
    tensor_bytes,
)
from halfstep.preflight.net_inputs import Batch, is_shape, read_batch
from halfstep.preflight.net_trace import Trace, trace_forward
from halfstep.preflight.trial_backup import add_data
from halfstep.report.number_format import format_bytes
from halfstep.step import TrainStep
from halfstep.step.load_backup import ModuleBackup
from halfstep.utils import rng
from halfstep.utils.keywords import suggest_keywords
from halfstep.utils.python_state import PythonState
from halfstep.utils.text import dtype_name, plural, printable

# Levels of modules that are printed. The fields have all of them.
SHOWN_DEPTH = 3

COLUMNS = ("layer", "output shape", "parameters", "weights", "output", "FLOPs")
LEFT_ALIGNED = ("layer", "output shape", "weights", "output")


@dataclass(frozen=True)
class Layer:
    """One module of the network. What was not reached by the forward pass has no shape."""

    name: str
    """Its path, as in net.named_modules(); "" for the network itself."""
    kind: str
    depth: int
    output_shapes: tuple[tuple[int, ...], ...]
    """Of each tensor that it returned the first time."""
    parameters: int
    """Its own, without those of the modules inside; a tied one belongs to its first module."""
    trainable: int
    tied_to: str
    """The parameter of an earlier module that this one shares; "" where there is none."""
    weight_dtype: str
    """That its weights were used in, which may be another than they are stored in."""
    output_dtype: str
    flops: int
    """Of one forward pass, with the modules inside."""
    calls: int
    """How often it ran in one forward pass."""


@dataclass(frozen=True)
class NetSummary:
    """The figures of a network. `print` shows them."""

    layers: tuple[Layer, ...]
    parameters: int
    trainable: int
    precision: str
    """How it was run; "as it is" for a network without one."""
    batch_size: int | None
    flops: int | None
    """Floating-point operations of one forward pass: a multiplication with its addition is two."""
    memory: MemoryUse
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [COLUMNS, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [
                cell.ljust(width) if name in LEFT_ALIGNED else cell.rjust(width)
                for name, cell, width in zip(COLUMNS, row, widths, strict=True)
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, "", *self.totals()])

    def __repr__(self) -> str:
        return f"<NetSummary: {plural(self.parameters, 'parameter')}, {len(self.layers)} modules>"

    def rows(self, depth: int = SHOWN_DEPTH) -> list[tuple[str, ...]]:
        """The cells of the table. What lies deeper is counted at its last module that is shown."""
        shown = [layer for layer in self.layers if layer.depth <= depth]
        parameters = {layer.name: 0 for layer in shown}
        for layer in self.layers:
            parameters[".".join(layer.name.split(".")[:depth])] += layer.parameters
        return [self._row(layer, parameters[layer.name]) for layer in shown]

    def _row(self, layer: Layer, parameters: int) -> tuple[str, ...]:
        own_name = layer.name.rpartition(".")[2]
        label = f"{own_name} ({layer.kind})" if own_name else layer.kind
        if layer.calls > 1:
            label = f"{label} x{layer.calls}"
        count = f"{parameters:,}" if parameters else "-"
        if layer.tied_to:
            count = f"{count}, tied" if parameters else "tied"
        return (
            printable("  " * layer.depth + label),
            ", ".join(str(list(shape)) for shape in layer.output_shapes) or "-",
            count,
            layer.weight_dtype or "-",
            layer.output_dtype or "-",
            format_operations(layer.flops) if layer.flops else "-",
        )

    def totals(self) -> list[str]:
        """The lines below the table."""
        frozen = self.parameters - self.trainable
        lines = [f"parameters  {self.parameters:,}"]
        if frozen:
            lines[0] += f", of which {frozen:,} frozen"
        lines.append(f"precision   {self.precision}")
        if self.flops is not None:
            of_what = "a forward pass"
            if self.batch_size is not None:
                of_what = f"a forward pass of {plural(self.batch_size, 'sample')}"
            lines.append(f"operations  {format_operations(self.flops)}FLOP in {of_what}")
        lines.append(f"memory      {format_bytes(self.memory.total)}: {self.memory}")
        return [*lines, *(f"note        {note}" for note in self.notes)]

    def show(self) -> None:
        """Prints the table: drawn by rich in a terminal, plain text elsewhere."""
        if not sys.stdout.isatty():
            print(self)
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(highlight=False)
        table = Table()
        for name in COLUMNS:
            is_left = name in LEFT_ALIGNED
            table.add_column(name, justify="left" if is_left else "right", no_wrap=name == "layer")
        for row in self.rows():
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        for line in self.totals():
            console.print(line, markup=False, emoji=False)


# The words of other summaries.
FOREIGN_OPTIONS = {
    **dict.fromkeys(("input_size", "input_shape", "input_data", "batch", "x"), "data"),
    "model": "net",
    **dict.fromkeys(("verbose", "print_fn"), "show"),
}
# Options that nothing stands for.
MISPLACED_OPTIONS = {
    **dict.fromkeys(("depth", "max_depth"), "the fields of the result, .layers, have all levels"),
    "device": "the network is run where it is; write net.to('cuda') first",
    "batch_size": "it is the first number of a shape; write hs.summary(net, (64, 3, 32, 32))",
}


@suggest_keywords("summary", names=FOREIGN_OPTIONS, advice=MISPLACED_OPTIONS)
def summary(
    net: nn.Module | Model,
    data: Any = None,
    *,
    precision: PrecisionName | Precision | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    show: bool = True,
) -> NetSummary:
    """The layers of a network, their shapes, parameters and dtypes; memory and operations. Prints.

    `data` is a batch, a data set or loader of batches (the first one is taken), or the shape of a
    batch of floats, as (64, 3, 32, 32); without it, only parameters are counted. Of a `Model` the
    precision and the optimizer are its own. The network is left as it was, bit for bit.
    `show=False` only returns the result.
    """
    model = net if isinstance(net, Model) else None
    module: Any = model.net if model is not None else net
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"summary: expected a network (nn.Module) or a hs.Model, got {type(net).__name__}"
        )
    if model is not None and (precision is not None or optimizer is not None):
        raise ValueError(
            "summary: a Model has its own precision and optimizer; for others, give the network: "
            "hs.summary(model.net, data, precision=…)"
        )
    for name, param in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(param):
            raise ValueError(
                f"summary: {name!r} has no shape yet (a lazy module); run one batch first: "
                "net(inputs)"
            )

    device = _device_of(module)
    wanted = _precision_of(model, precision)
    if device.type == "meta" and wanted is not None:
        raise ValueError(
            "summary: precision= needs a network with values, this one is on the meta device; "
            "give it some, net.to_empty(device='cpu'), or leave precision= out"
        )
    trace = Trace()
    batch = None
    applied = None
    with _left_as_it_was(module, model) as backup:
        if wanted is not None:
            applied = Applied(module, wanted, device, convert=False)
        if data is not None:
            batch = _first_batch(module, model, data, device, backup)
            flags = set_backend_flags(
                wanted or Precision.parse("fp32"), device, deterministic=False, benchmark=False
            )
            with flags:
                try:
                    trace = trace_forward(module, batch, applied, _objective_of(model))
                except Exception as error:
                    error.add_note(_describe_inputs(batch))
                    raise
    result = _summarize(module, model, trace, applied, optimizer, batch)
    if show:
        result.show()
    return result


def format_operations(count: float) -> str:
    """A number with a decimal prefix: 4.1 G."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g} {prefix}"
    return f"{count:g} "


def _describe_inputs(batch: Batch) -> str:
    """What the network was called with when it raised an error."""
    named = {f"item {i}": value for i, value in enumerate(batch.inputs)}
    named.update(batch.named_inputs)
    described = [f"{name} ({describe_value(value)})" for name, value in named.items()]
    return (
        f"in summary, on {', '.join(described)}; a shape has the size of the batch first, as in "
        "hs.summary(net, (64, 3, 32, 32))"
    )


def _device_of(net: nn.Module) -> torch.device:
    first = next(iter([*net.parameters(), *net.buffers()]), None)
    return torch.device("cpu") if first is None else first.device


def _precision_of(model: Model | None, precision: str | Precision | None) -> Precision | None:
    if model is not None:
        applied_precision: Precision = model._built_in_eval.applied.precision
        return applied_precision
    return None if precision is None else Precision.parse(precision)


def _objective_of(model: Model | None) -> Any:
    return None if model is None else model._built_in_eval.objective


@contextmanager
def _left_as_it_was(net: nn.Module, model: Model | None) -> Iterator[ResumeBackup]:
    """Inside, the network may run; afterwards it and the random states are what they were."""
    python_state = PythonState(net)  # train and eval modes among it
    tensors = ModuleBackup(net, None if model is None else model.loss)
    backup = ResumeBackup()
    try:
        with rng.preserved_states():
            yield backup
    finally:
        backup.put_back()
        tensors.put_back()
        python_state.restore()


def _first_batch(
    net: nn.Module, model: Model | None, data: Any, device: torch.device, backup: ResumeBackup
) -> Batch:
    """The first batch of the data, or the batch itself, on the network's device."""
    is_batch = isinstance(data, Tensor | dict) or is_shape(data)
    is_tuple = isinstance(data, tuple | list) and any(isinstance(x, Tensor) for x in data)
    if not is_batch and not is_tuple and not hasattr(data, "keys"):
        feed = Feed(data, named=bool(model is not None and model._takes_dicts))
        add_data(backup, feed)
        args = next(feed.start(), None)
        if args is None:
            raise ValueError("summary: expected at least one batch in the data, got none")
        data = args if len(args) > 1 else args[0]
    return read_batch(net, model, data, device)


def _summarize(
    net: nn.Module,
    model: Model | None,
    trace: Trace,
    applied: Applied | None,
    optimizer: torch.optim.Optimizer | None,
    batch: Batch | None,
) -> NetSummary:
    layers = tuple(_layers(net, trace))
    unique = {id(p): p for p in net.parameters()}.values()
    trained = [p for p in unique if p.requires_grad]
    step = model.step if model is not None else None
    accumulate = 1
    averages: list[Tensor] = []
    if isinstance(step, TrainStep):
        accumulate = step.options.accumulate
        averages = [*step.state.ema, *step.state.residue]
        optimizer = step.optimizer
    memory = MemoryUse(
        parameters=tensor_bytes(unique),
        buffers=tensor_bytes({id(b): b for b in net.buffers()}.values()),
        low_copies=0 if applied is None else low_copy_bytes(applied),
        gradients=gradient_bytes(trained, summed=accumulate > 1),
        optimizer=None if optimizer is None else optimizer_bytes(optimizer),
        averages=tensor_bytes(averages),
        activations=trace.saved_bytes,
    )
    return NetSummary(
        layers=layers,
        parameters=sum(p.numel() for p in unique),
        trainable=sum(p.numel() for p in trained),
        precision="as it is" if applied is None else _describe(applied.precision),
        batch_size=None if batch is None else batch.size,
        flops=trace.total_flops,
        memory=memory,
        notes=tuple(trace.notes),
    )


def _describe(precision: Precision) -> str:
    return (
        f"{precision.name}: parameters {dtype_name(precision.params)}, "
        f"compute {dtype_name(precision.compute)}"
    )


def _layers(net: nn.Module, trace: Trace) -> Iterator[Layer]:
    """Every module in the order of the network, each parameter with the first that has it."""
    names_of_seen: dict[int, str] = {}
    for name, module in net.named_modules():
        own: list[Tensor] = []
        tied_to = ""
        for key, param in module._parameters.items():
            if param is None:
                continue
            if id(param) in names_of_seen:
                tied_to = names_of_seen[id(param)]
                continue
            names_of_seen[id(param)] = f"{name}.{key}" if name else key
            own.append(param)
        weights = [p for p in module._parameters.values() if p is not None]
        stored = ", ".join(dict.fromkeys(dtype_name(p.dtype) for p in weights))
        seen = trace.modules.get(name)
        yield Layer(
            name=name,
            kind=type(module).__name__,
            depth=name.count(".") + 1 if name else 0,
            output_shapes=() if seen is None else seen.output_shapes,
            parameters=sum(p.numel() for p in own),
            trainable=sum(p.numel() for p in own if p.requires_grad),
            tied_to=tied_to,
            weight_dtype=trace.weight_dtypes.get(name, stored),
            output_dtype="" if seen is None else seen.output_dtype,
            flops=0 if seen is None else seen.flops,
            calls=0 if seen is None else seen.calls,
        )
