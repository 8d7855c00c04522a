"""Gradients on request: MegEngine's GradManager and MindSpore's GradOperation over torch.autograd.

Managers may be nested: what an inner one computes can be differentiated by those around it. Nothing
here waits for a device.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.errors import Notice

Callback = Callable[[Tensor, Tensor], Tensor | None]
Tensors = Tensor | Iterable[Tensor]
Seeds = Tensor | float | Sequence[Tensor | float]
Grads = Tensor | tuple[Tensor, ...] | tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
Targets = list[tuple[Tensor, list[Callback]]]


def gradients(
    y: Tensors, tensors: Tensors, dy: Seeds | None = None, *, retain_graph: bool = False
) -> list[Tensor]:
    """d sum(dy·y) / d tensor for each tensor; zeros where y does not depend on it, never None.

    No `.grad` changes.
    """
    inputs = _as_float_tensors(tensors)
    if not inputs or not all(tensor.requires_grad for tensor in inputs):
        received = "a frozen one" if inputs else "none"
        raise ValueError(
            f"expected float tensors that require grad, received {received}, "
            "do pass trainable ones only"
        )
    outputs, seeds = _outputs_and_seeds(y, dy)
    with _autocast_off(outputs):
        grads = torch.autograd.grad(
            outputs, inputs, seeds, retain_graph=retain_graph, materialize_grads=True
        )
    return list(grads)


# MegEngine's GradManager


class GradManagerGroup:
    """Managers that record together, made by `gm1 | gm2`.

    backward() serves them all in one pass over the graph.
    """

    def __init__(self, *managers: GradManager) -> None:
        self._managers = tuple(dict.fromkeys(managers))

    @property
    def managers(self) -> tuple[GradManager, ...]:
        """The managers of the group, each once."""
        return self._managers

    @property
    def recording(self) -> bool:
        """True for every manager from record() to release(); backward() releases."""
        return all(manager._recording is not None for manager in self.managers)

    def attached_tensors(self) -> list[Tensor]:
        """The attached tensors still alive, each once, in the order of their first attach."""
        return [tensor for tensor, _ in _merge_targets(self.managers)]

    def record(self) -> None:
        """Allows one backward(). torch's graph is the record: a forward before it counts too."""
        if any(manager.recording for manager in self.managers):
            raise RuntimeError(
                "expected a manager at rest, received record() twice, "
                "do backward() or release() first"
            )
        recording = _Recording(self.managers)
        for manager in self.managers:
            manager._strong_refs = []
            manager._recording = recording

    def release(self) -> None:
        """Ends the recording; does nothing at rest."""
        for manager in self.managers:
            recording = manager._recording
            manager._strong_refs = []
            manager._recording = None
            if recording is not None:
                recording.close_if_released()

    def backward(self, y: Tensors, dy: Seeds | None = None, *, retain_graph: bool = False) -> None:
        """Adds d sum(dy·y) to `.grad` of the attached tensors that y depends on; dy defaults to 1.

        Ends the recording, also after an error. Inside the recording of another manager, the
        gradients can be differentiated by that one.
        """
        try:
            if not self.recording:
                raise RuntimeError(
                    "expected a recording manager, received one at rest, "
                    "do call it inside `with gm:`"
                )
            targets = _merge_targets(self.managers)
            outer = _outer_recordings(self.managers)
            # Other managers that record still need the graph.
            retain_graph = retain_graph or _others_are_recording(self.managers)
            if outer:
                outer[0].differentiable += [tensor for tensor, _ in targets]
            _run_backward(targets, y, dy, retain_graph=retain_graph, create_graph=bool(outer))
        finally:
            self.release()

    def __enter__(self) -> Self:
        self.record()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __or__(self, other: GradManagerGroup) -> GradManagerGroup:
        if not isinstance(other, GradManagerGroup):
            return NotImplemented
        return GradManagerGroup(*self.managers, *other.managers)


class GradManager(GradManagerGroup):
    """Adds gradients to the `.grad` of the tensors attached to it, which it references weakly.

    It is a group of one.
    """

    def __init__(self) -> None:
        self._callbacks: MutableMapping[Tensor, list[Callback]] = WeakTensorKeyDictionary()
        # The call of record() that it records by; None at rest.
        self._recording: _Recording | None = None
        # While recording, the tensors attached since: an intermediate may have no other owner.
        self._strong_refs: list[Tensor] = []

    @property
    def managers(self) -> tuple[GradManager, ...]:
        """The manager itself."""
        return (self,)

    def attach(
        self, tensors: Tensors, callbacks: Callback | Iterable[Callback] | None = None
    ) -> Self:
        """Makes leaves require grad, and appends `cb(tensor, grad) -> grad` to their callbacks."""
        # Both are checked before anything changes.
        attached = _as_float_tensors(tensors)
        new_callbacks = _as_callbacks(callbacks)
        for tensor in attached:
            if tensor.is_leaf:
                tensor.requires_grad_()
            self._callbacks.setdefault(tensor, []).extend(new_callbacks)
        if self._recording is not None:
            self._strong_refs += attached
        return self


class _Recording:
    """One call of record(), for one manager or a group, among those of the same thread."""

    def __init__(self, managers: tuple[GradManager, ...]) -> None:
        # Weak: a recording that its owner forgets ends with its manager.
        self.managers: WeakSet[GradManager] = WeakSet(managers)
        self.differentiable: list[Tensor] = []  # whose `.grad` has history, for this recording

        self.thread_recordings = _thread.recordings  # the outermost first
        self.thread_recordings[:] = [other for other in self.thread_recordings if other.is_open]
        self.thread_recordings.append(self)

    @property
    def is_open(self) -> bool:
        """Whether one of its managers still records."""
        return any(manager._recording is self for manager in self.managers)

    def close_if_released(self) -> None:
        """After the last release, cuts the history of the gradients, which holds the graph."""
        if self.is_open:
            return
        for tensor in self.differentiable:
            if tensor.grad is not None and tensor.grad.requires_grad:
                tensor.grad = tensor.grad.detach()
        self.differentiable = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.recordings: list[_Recording] = []


_thread = _Thread()


def _outer_recordings(managers: tuple[GradManager, ...]) -> list[_Recording]:
    """The open recordings around those of the managers, the outermost first."""
    outer = []
    for recording in _recordings_beside(managers):
        if recording in [manager._recording for manager in managers]:
            break
        if recording.is_open:
            outer.append(recording)
    return outer


def _others_are_recording(managers: tuple[GradManager, ...]) -> bool:
    """Whether a manager that is not among these records in the same thread."""
    recordings = [recording for recording in _recordings_beside(managers) if recording.is_open]
    recording_managers = {
        manager
        for recording in recordings
        for manager in recording.managers
        if manager._recording is recording
    }
    return not recording_managers.issubset(managers)


def _recordings_beside(managers: tuple[GradManager, ...]) -> list[_Recording]:
    """The recordings of the thread that the managers began to record in."""
    recording = managers[0]._recording
    assert recording is not None
    return recording.thread_recordings


def _merge_targets(managers: tuple[GradManager, ...]) -> Targets:
    """Each live tensor once, with the callbacks of all managers in order."""
    merged: dict[int, tuple[Tensor, list[Callback]]] = {}
    for manager in managers:
        for tensor, callbacks in manager._callbacks.items():
            _, all_callbacks = merged.setdefault(id(tensor), (tensor, []))
            all_callbacks.extend(callbacks)
    return list(merged.values())


def _run_backward(
    targets: Targets, y: Tensors, dy: Seeds | None, *, retain_graph: bool, create_graph: bool
) -> None:
    """torch's own backward, for the targets only.

    torch's AccumulateGrad adds to `.grad`, so that its hooks (and DDP's) fire as usual. With
    `create_graph` the gradients have history.
    """
    outputs, seeds = _outputs_and_seeds(y, dy, with_history=create_graph)
    targets = [(tensor, callbacks) for tensor, callbacks in targets if tensor.requires_grad]
    if not targets:
        raise RuntimeError(
            "expected attached tensors, received none alive and trainable, "
            "do attach(net.parameters())"
        )
    inputs = [tensor for tensor, _ in targets]
    with ExitStack() as contexts:
        contexts.enter_context(_autocast_off(outputs))
        if create_graph:
            # torch warns of a cycle of the parameter and its gradient: close_if_released() cuts it.
            contexts.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
        else:
            contexts.enter_context(_earlier_history_apart(inputs))
        contexts.enter_context(_callbacks_as_hooks(targets))
        torch.autograd.backward(
            outputs, seeds, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
        )


@contextmanager
def _earlier_history_apart(tensors: list[Tensor]) -> Iterator[None]:
    """Inside, gradients with history are put aside; what comes is added to them out of place.

    They are outputs of the graph that the pass goes through, which must not change under it.
    """
    earlier_grads = []
    for tensor in tensors:
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None and grad.requires_grad:
            earlier_grads.append((tensor, grad))
            tensor.grad = None
    try:
        yield
    finally:
        for tensor, earlier_grad in earlier_grads:
            new_grad = tensor.grad
            tensor.grad = earlier_grad.detach()
            if new_grad is not None:
                tensor.grad = earlier_grad.detach() + new_grad


@contextmanager
def _callbacks_as_hooks(targets: Targets) -> Iterator[None]:
    """Inside, a backward pass runs the callbacks, each tensor's after the tensor's own hooks."""
    with ExitStack() as stack:
        for tensor, callbacks in targets:
            if not callbacks:
                continue
            if tensor.is_leaf:
                stack.enter_context(_callbacks_on_leaf(tensor, callbacks))
            else:
                stack.enter_context(_callbacks_on_intermediate(tensor, callbacks))
        yield


@contextmanager
def _callbacks_on_leaf(tensor: Tensor, callbacks: list[Callback]) -> Iterator[None]:
    """Callbacks that change what a leaf accumulates: nothing if one of them returns None."""
    earlier_grads: list[Tensor | None] = []  # one entry if the gradient was dropped

    def hook(grad: Tensor) -> Tensor:
        new_grad = _apply_callbacks(callbacks, tensor, grad)
        if new_grad is not None:
            return new_grad
        # torch accumulates what a hook returns: zeros, which are taken away after the pass.
        earlier_grads.append(tensor.grad)
        tensor.grad = None
        return torch.zeros_like(grad)

    with tensor.register_hook(hook):
        yield
    for earlier_grad in earlier_grads:
        tensor.grad = earlier_grad


@contextmanager
def _callbacks_on_intermediate(tensor: Tensor, callbacks: list[Callback]) -> Iterator[None]:
    """Callbacks that change what an intermediate accumulates, not what flows to its ancestors."""
    tensor.retain_grad()  # backward(inputs=) does it anyway; before it, reading `.grad` warns
    earlier_grad = tensor.grad
    tensor.grad = None
    new_grads: list[Tensor] = []

    def hook(grad: Tensor) -> None:
        new_grad = _apply_callbacks(callbacks, tensor, grad)
        if new_grad is not None:
            # A clone: an ancestor's gradient may be a view of this one.
            new_grads.append(new_grad.clone())

    with tensor.register_hook(hook):
        try:
            yield
        finally:
            tensor.grad = earlier_grad
    for grad in new_grads:
        tensor.grad = grad if earlier_grad is None else earlier_grad + grad


def _apply_callbacks(callbacks: list[Callback], tensor: Tensor, grad: Tensor) -> Tensor | None:
    """The gradient after all callbacks, one after the other; None as soon as one returns None."""
    for callback in callbacks:
        result: object = callback(tensor, grad)
        if result is None:
            warnings.warn(
                f"a callback returned None, so the tensor of shape {tuple(tensor.shape)} receives "
                "no gradient; do end with `return grad` to leave it as it is",
                Notice,
                stacklevel=2,
            )
            return None
        if not isinstance(result, Tensor):
            raise TypeError(
                f"expected a tensor or None from a callback, received {_type_name(result)}, "
                "do end with `return grad`"
            )
        grad = result
    return grad


# MindSpore's GradOperation


@dataclass(frozen=True)
class GradOperation:
    """`GradOperation(...)(fn, weights)(*inputs[, sens])`: gradients as values.

    Zeros for what is unused; no `.grad` changes.
    """

    get_all: bool = False
    get_by_list: bool = False
    sens_param: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise TypeError(
                    f"expected a bool for {field.name}, received {_type_name(value)}, "
                    "do GradOperation()(fn)"
                )

    def __call__(
        self, fn: Callable[..., Any], weights: Tensors | None = None
    ) -> Callable[..., Grads]:
        """The gradient function of fn, which returns one tensor.

        One gradient is returned as it is, several as a tuple.
        """
        weight_list = [] if weights is None else _as_float_tensors(weights)
        if bool(weight_list) != self.get_by_list:
            advice = "set get_by_list=True"
            if self.get_by_list:
                advice = "pass list(net.parameters())"
            raise ValueError(
                "expected weights with get_by_list and only then, "
                f"received {len(weight_list)}, do {advice}"
            )
        return partial(self._gradients, fn, weight_list)

    def _gradients(self, fn: Callable[..., Any], weights: list[Tensor], *args: Any) -> Grads:
        """The gradients in MindSpore's four forms.

        By inputs: all with get_all, none with get_by_list alone, else the first one.
        By weights: all with get_by_list, else none.
        """
        inputs, sens = self._split_sens(args)
        if self.get_all:
            count = len(inputs)
        elif self.get_by_list:
            count = 0
        else:
            count = 1
        leaves = [_as_leaf(value) for value in inputs[:count]]

        # Forward.
        with torch.enable_grad():
            y = fn(*leaves, *inputs[count:])
        if not isinstance(y, Tensor):
            raise TypeError(
                f"expected one tensor from fn, received {_type_name(y)}, "
                "do select it: lambda *xs: fn(*xs)[0]"
            )

        # Backward. Integer inputs have no gradient in torch: theirs is zeros.
        trainable_leaves = [leaf for leaf in leaves if leaf.requires_grad]
        remaining = iter(gradients(y, trainable_leaves + weights, sens))
        input_grads = tuple(
            next(remaining) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves
        )
        weight_grads = tuple(remaining)

        if self.get_all and self.get_by_list:
            return input_grads, weight_grads
        grads = input_grads or weight_grads
        return grads[0] if len(grads) == 1 else grads

    def _split_sens(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor | float | None]:
        """The inputs of fn, and the sens: the last argument with sens_param, else None."""
        needed = int(self.sens_param) + int(not self.get_by_list)
        if len(args) < needed or (self.sens_param and args[-1] is None):
            received = "none"
            if args:
                received = f"{len(args)} ending in {_type_name(args[-1])}"
            advice = "pass the inputs"
            if self.sens_param:
                advice = "pass the inputs, then the sens"
            raise TypeError(
                f"expected {needed} arguments or more, received {received}, do {advice}"
            )
        if self.sens_param:
            return args[:-1], args[-1]
        return args, None


def _as_leaf(value: object) -> Tensor:
    """A new leaf on the same memory, so that the tensor itself stays as it is.

    An integer tensor is accepted; its leaf does not require grad.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"expected tensor inputs, received {_type_name(value)}, "
            "do bind it: functools.partial(fn, name=value)"
        )
    return value.detach().requires_grad_(value.is_floating_point())


# Shared by both


def _outputs_and_seeds(
    y: Tensors, dy: Seeds | None, *, with_history: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs and their seed gradients, which one can ask to differentiate by.

    One dy serves every y.
    """
    outputs = _as_float_tensors(y, advice="pass the loss or a list of losses")
    if not outputs or not all(output.requires_grad for output in outputs):
        received = "one without" if outputs else "none"
        raise ValueError(
            f"expected y with history, received {received}, "
            "do run the forward after attach(), without no_grad() and detach()"
        )

    dys: list[Any] = list(dy) if isinstance(dy, list | tuple) else [dy] * len(outputs)
    if len(dys) != len(outputs):
        raise ValueError(
            f"expected one dy for each of {len(outputs)} y, received {len(dys)}, "
            "do pass as many or one number"
        )
    seeds = [_as_seed(value, output) for value, output in zip(dys, outputs, strict=True)]
    if not with_history:
        seeds = [seed.detach() for seed in seeds]
    return outputs, seeds


def _as_seed(dy: object, y: Tensor) -> Tensor:
    """dy in y's shape and dtype, ones for None.

    A number or a 0-dim tensor is expanded. A tensor on the device is not read.
    """
    if dy is None:
        return torch.ones_like(y)
    if isinstance(dy, int | float):
        largest = torch.finfo(y.dtype).max
        if largest < abs(dy) < math.inf:
            raise ValueError(
                f"expected |dy| <= {largest:g} for {y.dtype}, received {dy:g}, "
                "do compute the loss in float32"
            )
        return y.new_full((), dy).expand(y.shape)

    if not isinstance(dy, Tensor):
        raise TypeError(
            f"expected dy as a tensor or a number, received {_type_name(dy)}, "
            "do pass torch.ones_like(y)"
        )
    if dy.ndim and dy.shape != y.shape:
        raise ValueError(
            f"expected dy of shape {[*y.shape]} or 0-dim, received {[*dy.shape]}, "
            "do reshape or expand it"
        )
    # A number in host memory: filling a tensor with it does not wait for the device.
    if dy.ndim == 0 and dy.is_cpu and not y.is_cpu:
        return y.new_full((), dy.item()).expand(y.shape)
    if dy.device != y.device:
        raise ValueError(
            f"expected dy on {y.device}, received one on {dy.device}, "
            "do dy.to(y.device), which may wait"
        )
    return dy.to(y.dtype).expand(y.shape)


def _autocast_off(outputs: list[Tensor]) -> ExitStack:
    """A context for the backward pass, in which autocast is off.

    Inside autocast, torch would run the backward products of a float32 part of the network low.
    """
    stack = ExitStack()
    for device_type in {"cpu", "cuda", *(output.device.type for output in outputs)}:
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


def _as_float_tensors(
    tensors: object, advice: str = "pass float tensors such as net.parameters()"
) -> list[Tensor]:
    """One tensor or several as a list; a TypeError if one is no float tensor."""
    values: list[Any] = [tensors]
    if isinstance(tensors, Iterable) and not isinstance(tensors, Tensor):
        values = list(tensors)
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            continue
        received = value.dtype if isinstance(value, Tensor) else _type_name(value)
        raise TypeError(f"expected one or more float tensors, received {received}, do {advice}")
    return values


def _as_callbacks(callbacks: object) -> list[Callback]:
    """None, one callback or several as a list; a TypeError if one is not callable."""
    values: list[Any]
    if callbacks is None:
        values = []
    elif isinstance(callbacks, Iterable):
        values = list(callbacks)
    else:
        values = [callbacks]
    for value in values:
        if not callable(value):
            raise TypeError(
                f"expected callbacks, received {_type_name(value)}, "
                "do pass cb(tensor, grad) -> grad"
            )
    return values


def _type_name(value: object) -> str:
    return type(value).__name__
