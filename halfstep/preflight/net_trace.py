"""One forward pass, watched: shapes, dtypes, operations, and what is kept for the backward pass."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from halfstep.precision import Applied
from halfstep.preflight.net_inputs import Batch
from halfstep.step.eval_step import eval_mode
from halfstep.utils.text import dtype_name, first_line


@dataclass(frozen=True)
class ModuleTrace:
    """What one module returned the first time, and its calls and operations in all."""

    output_shapes: tuple[tuple[int, ...], ...]
    output_dtype: str
    calls: int = 1
    flops: int = 0


@dataclass
class Trace:
    """What was seen. Without a forward pass, nothing."""

    modules: dict[str, ModuleTrace] = field(default_factory=dict)
    weight_dtypes: dict[str, str] = field(default_factory=dict)
    total_flops: int | None = None
    saved_bytes: int | None = None
    notes: list[str] = field(default_factory=list)


def trace_forward(net: nn.Module, batch: Batch, applied: Applied | None, objective: Any) -> Trace:
    """Runs the batch twice: without gradients for shapes and operations, then as in training."""
    trace = Trace()
    counter = FlopCounterMode(display=False, custom_mapping=_uncounted_operations())
    as_is = _no_fused_transformer_layers()
    with torch.no_grad(), eval_mode(net), as_is, _watched_modules(net, trace), counter:
        _call(net, batch, applied, objective)
    trace.total_flops = counter.get_total_flops()
    _add_flops(net, trace, counter)
    if applied is not None:
        trace.weight_dtypes = {
            name: seen.weight for name, seen in applied.observed.items() if seen.weight != "-"
        }
    _add_saved_bytes(net, batch, applied, objective, trace)
    if applied is not None and applied.rounds_fp32_products:
        low = dtype_name(applied.precision.compute)
        trace.notes.append(
            f"this CPU has no {low} units, so products keep float32 operands among the "
            "activations; a GPU keeps none"
        )
    return trace


def _call(net: nn.Module, batch: Batch, applied: Applied | None, objective: Any) -> Any:
    with applied or nullcontext():
        if batch.calls_forward_option and objective is not None:
            return objective.forward(net, *batch.inputs)
        return net(*batch.inputs, **batch.named_inputs)


def _uncounted_operations() -> dict[Any, Any]:
    """Operations that torch's counter passes over: attention on a CPU."""
    cpu_attention = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    return {} if cpu_attention is None else {cpu_attention: _attention_flops}


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


@contextmanager
def _no_fused_transformer_layers() -> Iterator[None]:
    """Inside, no transformer layer of torch is one operation, which the counter does not know."""
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)


@contextmanager
def _watched_modules(net: nn.Module, trace: Trace) -> Iterator[None]:
    """Inside, each module notes what it returns."""
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def note(_: nn.Module, args: Any, output: Any) -> None:
            seen = trace.modules.get(name)
            if seen is not None:
                trace.modules[name] = replace(seen, calls=seen.calls + 1)
                return
            tensors = [leaf for leaf in _leaves(output) if isinstance(leaf, Tensor)]
            dtypes = dict.fromkeys(dtype_name(t.dtype) for t in tensors)
            shapes = tuple(tuple(t.shape) for t in tensors)
            trace.modules[name] = ModuleTrace(shapes, ", ".join(dtypes))

        handles.append(module.register_forward_hook(note))

    try:
        for name, module in net.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                watch(name, module)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leaves(output: Any) -> list[Any]:
    """The parts of what a module returned; Hugging Face's outputs are mappings of their own."""
    if isinstance(output, Mapping):
        output = dict(output.items())
    return tree_leaves(output)


def _add_flops(net: nn.Module, trace: Trace, counter: FlopCounterMode) -> None:
    root = type(net).__name__
    counts = counter.get_flop_counts()
    for name, seen in trace.modules.items():
        by_operation = counts.get(f"{root}.{name}" if name else root, {})
        trace.modules[name] = replace(seen, flops=sum(by_operation.values()))


def _add_saved_bytes(
    net: nn.Module, batch: Batch, applied: Applied | None, objective: Any, trace: Trace
) -> None:
    """The memory that autograd keeps: each storage once, without the weights themselves."""
    saved: list[Tensor] = []
    weights: list[Tensor] = [*net.parameters(), *net.buffers()]

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())  # its memory stays, so that no other tensor gets its address
        return tensor

    def note_low_copies(*_: Any) -> None:
        """While a precision is applied, the network holds copies in place of its parameters."""
        for module in net.modules():
            for value in (*module._parameters.values(), *vars(module).values()):
                if isinstance(value, Tensor):
                    weights.append(value)

    def run() -> None:
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            if batch.whole is not None and objective is not None and applied is not None:
                objective(applied, batch.whole, weighted=False)
            else:
                _call(net, batch, applied, objective)

    if not any(module.training for module in net.modules()):
        net.train()
    handle = net.register_forward_hook(note_low_copies)
    try:
        run()
    except Exception as error:
        # Batch norm, for one, does not train on a single sample.
        saved.clear()
        trace.notes.append(f"activations in eval mode, as training fails: {first_line(error)}")
        with eval_mode(net):
            run()
    finally:
        handle.remove()
    sizes = {_storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    for tensor in weights:
        sizes.pop(_storage_key(tensor), None)
    trace.saved_bytes = sum(sizes.values())


def _storage_key(tensor: Tensor) -> int:
    """The same number for tensors that share their memory."""
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.is_meta else storage.data_ptr()
