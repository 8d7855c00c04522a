"""A precision applied to a network.

While it is active, modules find low weights and casting forwards in their own dictionaries.
Outside, the network is as it was.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from halfstep.errors import Notice
from halfstep.precision.backend_flags import check_supported
from halfstep.precision.casting import (
    Forward,
    KeptInputs,
    ModuleDtype,
    ObservedDtypes,
    UnroundedOutputs,
    cast_inputs,
    cast_outputs,
    complex_dtype,
    is_norm,
    kept_inputs,
    observe,
    plan_dtypes,
    takes_mixed_dtypes,
    without_autocast,
)
from halfstep.precision.cpu_half import FastHalf, has_native
from halfstep.precision.layout import NetworkLayout, is_scripted
from halfstep.precision.low_params import LowCopies
from halfstep.precision.module_support import check_modules
from halfstep.precision.op_rules import OpRules, needs_no_rules, without_rules
from halfstep.precision.policy import BF16, F16, Cast, Precision
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.text import dtype_name, list_some

_ABSENT = object()  # in place of a value, for a key that a dictionary did not have


class Slot(NamedTuple):
    """One entry of a module's `_parameters`, `_buffers` or `__dict__`."""

    owner: dict[str, Any]
    key: str

    def get(self) -> Any:
        """The value that stands there now."""
        return self.owner[self.key]


class SlotSwap:
    """Puts values into slots, and later puts back what was there."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Slot, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def put(self, slot: Slot, value: Any) -> None:
        """Sets the slot's value, and remembers the one before."""
        self._replaced.append((slot, slot.owner.get(slot.key, _ABSENT)))
        slot.owner[slot.key] = value

    def undo(self) -> None:
        """Restores all slots, the last one first."""
        while self._replaced:
            slot, value = self._replaced.pop()
            if value is _ABSENT:
                slot.owner.pop(slot.key, None)
            else:
                slot.owner[slot.key] = value


class Applied:
    """`with applied:` puts a precision into the network's slots; afterwards they are as before.

    fp64, fp16 and bf16 store the parameters themselves in that dtype. With `convert=False` they
    work on copies instead.
    """

    def __init__(
        self, net: nn.Module, precision: Precision, device: torch.device, *, convert: bool = True
    ) -> None:
        check_supported(precision, device)
        self.net = net
        self.precision = precision
        self.device = device

        self.cast: Cast = precision.cast
        if precision.cast == "whole" and not convert:
            self.cast = "copies"
        self.module_dtypes = plan_dtypes(net, precision)
        check_modules(net, precision)
        _check_parameters(net, precision, any_dtype=precision.cast == "whole")
        self.kept_inputs = kept_inputs(net, precision)
        self.converted_names: list[str] = []
        self.rounded_buffers: list[str] = []
        if self.cast == "whole":
            _check_tied_parameters(net, precision, self.module_dtypes)
            self.converted_names = _convert_parameters(net, self.module_dtypes)
            self.rounded_buffers = _convert_buffers(net, self.module_dtypes)

        # Whether products run as round(fp32 product), on a CPU without half units.
        low = precision.compute
        may_be_fast = device.type == "cpu" and precision.kernels == "auto" and low in (F16, BF16)
        self.rounds_fp32_products = may_be_fast and not has_native(low)

        # Rules for operations, where the network is low.
        self._op_rules: OpRules | None = None
        if self.cast in ("copies", "whole") and low in (F16, BF16):
            self._op_rules = OpRules(low)

        # What is put into slots while active. The first forward also observes the dtypes of
        # leaf modules; after it, `_forwards` are replaced by those that do not.
        self.observed: dict[str, ObservedDtypes] = {}
        self._observing = True
        self._unrounded = UnroundedOutputs()
        self._swap = SlotSwap()
        self._forwards = self._wrap_forwards(observing=True)
        self._weights, self._copies = self._low_weights()
        self._compared_modes: set[bool] = set()  # train or eval, whose copies were compared

        # What all of this was planned for. A change of the network needs another Applied.
        owners = {id(slot.owner) for slot, _ in self._wrap_forwards(observing=False)}
        self.layout = NetworkLayout(net, [m for m in net.modules() if id(vars(m)) in owners])
        self._buffers = _floating_buffers(net)

        # What is entered while active; and of that, what a forward repeated in backward needs.
        self._contexts = self._make_contexts()
        repeated = (FastHalf, OpRules)
        self._recompute_contexts = [c for c in self._contexts if isinstance(c, repeated)]

        # What the last forward used, until its backward pass is over.
        self._forward_copies: tuple[Tensor, ...] = ()

    def is_current(self, *, every_forward: bool = False) -> bool:
        """Whether the network is still what this was planned for.

        `every_forward`: also the forwards that are called as they are, for what runs no Python.
        """
        every_forward = every_forward or self._observing  # the first forward wraps all of them
        return self.layout.is_current(every_forward=every_forward)

    def __enter__(self) -> "Applied":
        assert not self._swap, "a precision is not re-entrant on one network"
        try:
            self._fill_slots()
        except BaseException:
            self._swap.undo()
            raise
        for context in self._contexts:
            context.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exc)
        lost_writes: list[Slot] = []
        try:
            if exc[0] is None:
                lost_writes = self._find_lost_writes()
        finally:
            self._swap.undo()
        self._unrounded.clear()
        if exc[0] is not None or lost_writes:
            self._forward_copies = ()
        if self._op_rules is not None:
            self._keep_buffer_dtypes()

        if self._observing and self.observed:
            self._observing = False
            self._forwards = self._wrap_forwards(observing=False)
        if lost_writes:
            self._refuse_writes(lost_writes)

    @contextmanager
    def for_recompute(self) -> Iterator[None]:
        """Around the backward pass of the last forward, for parts of forward that are repeated.

        Activation checkpointing repeats them, and must find the same copies, casts and kernels. It
        restores autocast itself.
        """
        try:
            self._restore_forward()
            with ExitStack() as stack:
                for context in self._recompute_contexts:
                    stack.enter_context(context)
                yield
        finally:
            self._swap.undo()
            self._forward_copies = ()

    @property
    def widened_modules(self) -> list[str]:
        """Low modules whose outputs were seen to be float32, because of buffers or kept inputs."""
        if self._op_rules is None:
            return []
        names = []
        for name, dtypes in self.observed.items():
            is_low = name and self.module_dtypes[name].inside == self.precision.compute
            is_loss = dtypes.kind.endswith("Loss")
            if is_low and not is_loss and "float32" in dtypes.output.split("/"):
                names.append(name)
        return names

    def unrounded_outputs(self, out: Any) -> Any:
        """`out` with outputs of kept modules as they were before rounding."""
        return self._unrounded.restore(out) if self.precision.keep else out

    def _fill_slots(self) -> None:
        """Puts forwards and fresh low weights into their slots."""
        for slot, forward in self._forwards:
            self._swap.put(slot, forward)
        self._forward_copies = ()  # frees the last graph before a new one is made
        copies = self._copies.cast_masters()
        self._forward_copies = copies
        for slot, index in self._weights:
            self._swap.put(slot, copies[index])

    def _restore_forward(self) -> None:
        """Puts into the slots what the last forward found there, its copies included."""
        for slot, forward in self._forwards:
            self._swap.put(slot, forward)
        if self._forward_copies:
            for slot, index in self._weights:
                self._swap.put(slot, self._forward_copies[index])

    def _find_lost_writes(self) -> list[Slot]:
        """The slots of weights that forward has written into, or replaced.

        It saw low copies, which are thrown away. Values are compared at the first forward in train
        mode and the first in eval mode only: that waits for the device.
        """
        if not self._weights:
            return []
        copies = self._forward_copies
        numbers = self._copies.written_numbers(copies)
        if self.net.training not in self._compared_modes and _may_wait(self.device):
            numbers |= self._copies.changed_numbers()
            if not numbers:
                self._compared_modes.add(self.net.training)
        return [
            slot
            for slot, number in self._weights
            if slot.owner.get(slot.key) is not copies[number] or number in numbers
        ]

    def _refuse_writes(self, slots: list[Slot]) -> NoReturn:
        """Raises a ValueError with the names of these weights."""
        keys_by_owner: dict[int, list[str]] = {}
        for slot in slots:
            keys_by_owner.setdefault(id(slot.owner), []).append(slot.key)
        names = []
        for module_name, module in self.net.named_modules():
            prefix = f"{module_name}." if module_name else ""
            keys = keys_by_owner.get(id(module._parameters), [])
            names += [prefix + key for key in keys]

        advice = ""
        if self.precision.compute in (F16, BF16):
            advice = (
                ", or name its module in keep= (keep={name: 'fp32'}), which makes no copy of it"
            )
        raise ValueError(
            f"forward writes into parameters of the network: {list_some(names, 4)}. In precision "
            f"{self.precision.name!r} forward works on {dtype_name(self.precision.compute)} copies "
            "of parameters, and what it writes into them would be lost. Write into a parameter "
            f"after the step, under torch.no_grad(), or store it as a buffer{advice}"
        )

    def _keep_buffer_dtypes(self) -> None:
        """Buffers that forward has replaced by a tensor of another dtype: in their own dtype."""
        for slot, dtype in self._buffers:
            buffer = slot.owner.get(slot.key)
            if buffer is not None and buffer.dtype != dtype and buffer.is_floating_point():
                slot.owner[slot.key] = buffer.to(dtype)

    def _make_contexts(self) -> list[Any]:
        contexts: list[Any] = []
        if self.cast in ("copies", "whole"):
            contexts.append(_NoFusedTransformerLayer())
        if self.cast == "autocast":
            # No cache: after an update, or a forward without gradients, its casts would be stale.
            low = self.precision.compute
            contexts.append(torch.autocast(self.device.type, dtype=low, cache_enabled=False))
        if self.rounds_fp32_products:
            contexts.append(FastHalf(self.precision.compute, cast=self.cast == "autocast"))
        if self._op_rules is not None:
            contexts.append(self._op_rules)  # last: it sees a call before FastHalf does
        return contexts

    def _wrap_forwards(self, *, observing: bool) -> list[tuple[Slot, Forward]]:
        """The forwards that are not a module's own: with casts, and with observation if asked."""
        wrapped = []
        for name, module in self.net.named_modules():
            if is_scripted(module):
                continue
            is_network = not name
            own_forward = module.forward
            forward = own_forward

            # A leaf is observed inside its casts, the network around all of them.
            if observing and not is_network and _is_observed(module):
                forward = observe(forward, module, name, self.observed)
            kept = self.kept_inputs.get(name)
            dtypes = self.module_dtypes[name]
            forward = self._add_casts(dtypes, module, forward, kept)
            if self._op_rules is not None and not is_network:
                torchs = not self.rounds_fp32_products
                if needs_no_rules(module, dtypes.inside, products_are_torchs=torchs):
                    forward = without_rules(forward)
            if is_network and self.cast != "none":
                forward = self._unrounded.cast_network_output(forward, self.precision.output)
            if is_network and observing:
                forward = observe(forward, module, name, self.observed)

            if forward is not own_forward:
                wrapped.append((Slot(module.__dict__, "forward"), forward))
        return wrapped

    def _add_casts(
        self, dtypes: ModuleDtype, module: nn.Module, forward: Forward, kept: KeptInputs | None
    ) -> Forward:
        """`forward` with the casts that this module needs; itself if it needs none."""
        if self.cast == "none":
            return forward
        if self.cast == "autocast":
            return without_autocast(forward, self.device.type) if dtypes.is_kept else forward

        if dtypes.inside != dtypes.around:
            if takes_mixed_dtypes(module) and not dtypes.is_kept:
                return forward
            if dtypes.is_kept and self._op_rules is not None:
                forward = self._op_rules.with_products_in(dtypes.inside, forward)
            forward = cast_inputs(forward, dtypes.inside, kept)
            unrounded = self._unrounded if dtypes.is_kept else None
            return cast_outputs(forward, dtypes.around, unrounded)

        if module is self.net or _has_own_parameters(module):
            return cast_inputs(forward, dtypes.inside, kept)
        return forward

    def _low_weights(self) -> tuple[list[tuple[Slot, int]], LowCopies]:
        """The slots that take a low copy, each with the number of its copy, and the copies.

        There is one copy for each (parameter, dtype), so that tied weights stay tied.
        """
        copy_numbers: dict[tuple[Tensor, torch.dtype], int] = {}
        slots: list[tuple[Slot, int]] = []
        for slot, dtype in self._low_parameter_slots():
            number = copy_numbers.setdefault((slot.get(), dtype), len(copy_numbers))
            slots.append((slot, number))
        masters = [param for param, _ in copy_numbers]
        dtypes = [dtype for _, dtype in copy_numbers]
        return slots, LowCopies(masters, dtypes)

    def _low_parameter_slots(self) -> list[tuple[Slot, torch.dtype]]:
        """Slots of parameters that are stored in another dtype than their module runs in.

        Each comes with the module's dtype.
        """
        if self.cast != "copies":
            return []
        slots = []
        for name, module in self.net.named_modules():
            inside = self.module_dtypes[name].inside
            for key, param in module._parameters.items():
                is_floating = param is not None and param.is_floating_point()
                if is_floating and param.dtype != inside:
                    slots.append((Slot(module._parameters, key), inside))
        return slots


class _NoFusedTransformerLayer:
    """Inside, torch's fused transformer layer is off.

    It reads its children's weights as if all had one dtype.
    """

    def __enter__(self) -> None:
        self._was_enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *exc: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self._was_enabled)


def _may_wait(device: torch.device) -> bool:
    """Whether the host may read a value: no operations are recorded, and nobody counts waits.

    An engine refuses to capture a step that it has seen waiting for the device.
    """
    if is_in_torch_dispatch_mode():
        return False
    if device.type != "cuda":
        return True
    return torch.cuda.get_sync_debug_mode() == 0 and not torch.cuda.is_current_stream_capturing()


def _has_own_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _is_observed(module: nn.Module) -> bool:
    """Whether its dtypes are listed: a leaf, or a module with tensors beside its children's."""
    is_leaf = not any(True for _ in module.children())
    has_tensors = _has_own_parameters(module) or parametrize.is_parametrized(module)
    has_float_buffers = any(b.is_floating_point() for b in module.buffers(recurse=False))
    return is_leaf or has_tensors or has_float_buffers


def _floating_buffers(net: nn.Module) -> list[tuple[Slot, torch.dtype]]:
    """The slots of floating buffers, each with the dtype in which it is stored."""
    slots = []
    for module in net.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                slots.append((Slot(module._buffers, key), buffer.dtype))
    return slots


def _check_parameters(net: nn.Module, precision: Precision, *, any_dtype: bool) -> None:
    """Raises a ValueError for a parameter without a shape, or in a dtype other than expected."""
    for name, param in net.named_parameters():
        if is_lazy(param):
            raise ValueError(
                f"parameter {name!r} has no shape yet: "
                "run one forward of the network before building the step"
            )
        if any_dtype or not (param.is_floating_point() or param.is_complex()):
            continue
        expected = complex_dtype(precision.params) if param.is_complex() else precision.params
        if param.dtype != expected:
            raise ValueError(
                f"precision {precision.name!r} keeps parameters in {expected}, "
                f"but {name!r} is {param.dtype}; "
                "call net.float() before building the optimizer, or choose 'fp16' or 'bf16' to "
                "train low parameters, 'fp64' for float64 ones"
            )


def _check_tied_parameters(
    net: nn.Module, precision: Precision, module_dtypes: dict[str, ModuleDtype]
) -> None:
    """Raises a ValueError for a parameter that two modules would store in different dtypes."""
    first_modules: dict[Tensor, str] = {}
    for name, module in net.named_modules():
        for param in module.parameters(recurse=False):
            first = first_modules.setdefault(param, name)
            first_dtype = module_dtypes[first].inside
            dtype = module_dtypes[name].inside
            if dtype != first_dtype and param.is_floating_point():
                raise ValueError(
                    f"precision {precision.name!r} stores a parameter in one dtype, but modules "
                    f"{first!r} and {name!r} share one, and run in {dtype_name(first_dtype)} and "
                    f"{dtype_name(dtype)}; name both in keep= or neither, or use 'O2', where each "
                    "module takes a copy in its own dtype"
                )


def _convert_parameters(net: nn.Module, module_dtypes: dict[str, ModuleDtype]) -> list[str]:
    """Stores parameters in their module's dtype, and returns the names of those that had another.

    In place: the optimizer keeps its references.
    """
    converted = []
    for name, module in net.named_modules():
        dtype = module_dtypes[name].inside
        for param_name, param in module.named_parameters(prefix=name, recurse=False):
            stored_dtype = _stored_dtype(param, dtype)
            if param.dtype != stored_dtype:
                param.data = param.data.to(stored_dtype)
                param.grad = None
                converted.append(param_name)
    return converted


def _stored_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter or buffer in a module of this dtype: whole numbers stay as they are.

    A complex tensor is complex128 in float64, complex64 in all others: there is no complex half.
    """
    if tensor.is_complex():
        return complex_dtype(dtype)
    return dtype if tensor.is_floating_point() else tensor.dtype


def _convert_buffers(net: nn.Module, module_dtypes: dict[str, ModuleDtype]) -> list[str]:
    """Stores floating buffers in their module's dtype, as `net.half()` does.

    Returns the names of those that this has rounded, except statistics of norm layers, and warns of
    them. A buffer that modules share stays one: the widest of their dtypes.
    """
    slots: dict[Tensor, list[Slot]] = {}
    dtypes: dict[Tensor, torch.dtype] = {}
    names: dict[Tensor, str] = {}
    for name, module in net.named_modules():
        for buffer_name, buffer in module.named_buffers(prefix=name, recurse=False):
            if not (buffer.is_floating_point() or buffer.is_complex()):
                continue
            dtype = _stored_dtype(buffer, module_dtypes[name].inside)
            key = buffer_name.rpartition(".")[2]
            slots.setdefault(buffer, []).append(Slot(module._buffers, key))
            dtypes[buffer] = torch.promote_types(dtype, dtypes.get(buffer, dtype))
            if not is_norm(module):
                names[buffer] = buffer_name

    rounded = []
    for buffer, dtype in dtypes.items():
        converted = buffer.to(dtype)
        for slot in slots[buffer]:
            slot.owner[slot.key] = converted
        back = converted.to(buffer.dtype)
        is_exact = torch.allclose(back, buffer, rtol=0, atol=0, equal_nan=True)
        if buffer in names and not is_exact:
            rounded.append(names[buffer])
    if rounded:
        warnings.warn(
            f"float buffers lose digits in this precision, which stores them low: "
            f"{list_some(rounded, 3)}; keep= keeps their modules in float32, "
            "and O2 keeps all float buffers in float32",
            Notice,
            stacklevel=user_stacklevel(),
        )
    return rounded
