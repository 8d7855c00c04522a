"""Gradients on request, no host sync: MegEngine's GradManager and MindSpore's GradOperation over torch.autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Callback = Callable[[Tensor, Tensor], Tensor]
Tensors = Tensor | Iterable[Tensor]
Seeds = Tensor | float | Sequence[Tensor | float]
Grads = Tensor | tuple[Tensor, ...] | tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
Targets = list[tuple[Tensor, list[Callback]]]


def gradients(
    y: Tensors, tensors: Tensors, dy: Seeds | None = None, *, retain_graph: bool = False
) -> list[Tensor]:
    """d sum(dy·y) / d tensor for each tensor: zeros where y does not depend on it, never None; no `.grad` changes."""
    wrt = _float_tensors(tensors)
    if not wrt or not all(tensor.requires_grad for tensor in wrt):
        got = "a frozen one" if wrt else "none"
        raise ValueError(
            f"expected float tensors that require grad, received {got}, do pass trainable ones only"
        )
    ys, dys = _roots(y, dy)
    with _autocast_off(ys):
        return list(
            torch.autograd.grad(ys, wrt, dys, retain_graph=retain_graph, materialize_grads=True)
        )


class GradManagerGroup:
    """Managers that record together, made by `gm1 | gm2`; backward() serves them all in one pass over the graph."""

    def __init__(self, *managers: GradManager) -> None:
        self._members = tuple(dict.fromkeys(managers))

    @property
    def managers(self) -> tuple[GradManager, ...]:
        """The managers of the group, each once."""
        return self._members

    @property
    def recording(self) -> bool:
        """True for every manager from record() to release(); backward() releases."""
        return all(manager._kept is not None for manager in self.managers)

    def attached_tensors(self) -> list[Tensor]:
        """The attached tensors still alive, each once, in the order of their first attach."""
        return [tensor for tensor, _ in _targets(self.managers)]

    def record(self) -> None:
        """Allow one backward(). torch's graph is the record, so a forward before it counts too."""
        if any(manager.recording for manager in self.managers):
            raise RuntimeError(
                "expected a manager at rest, received record() twice, do backward() or release() first"
            )
        for manager in self.managers:
            manager._kept, manager._group = [], self.managers

    def release(self) -> None:
        """End the recording; harmless at rest."""
        for manager in self.managers:
            manager._kept, manager._group = None, ()

    def backward(self, y: Tensors, dy: Seeds | None = None, *, retain_graph: bool = False) -> None:
        """Add d sum(dy·y), dy ones by default, to `.grad` of the attached tensors y depends on; always releases."""
        waiting = {peer for manager in self.managers for peer in manager._group if peer.recording}
        try:
            if not self.recording:
                raise RuntimeError(
                    "expected a recording manager, received one at rest, do call it inside `with gm:`"
                )
            _backward(
                _targets(self.managers), y, dy, retain_graph or not waiting.issubset(self.managers)
            )
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
    """A group of one: adds gradients to the `.grad` of the tensors attached to it, which it holds weakly."""

    def __init__(self) -> None:
        self._callbacks: MutableMapping[Tensor, list[Callback]] = WeakTensorKeyDictionary()
        self._kept: list[Tensor] | None = (
            None  # a list while recording: an intermediate may have no other owner
        )
        self._group: tuple[
            GradManager, ...
        ] = ()  # those that record with this one need the graph too

    @property
    def managers(self) -> tuple[GradManager, ...]:
        """The manager itself."""
        return (self,)

    def attach(
        self, tensors: Tensors, callbacks: Callback | Iterable[Callback] | None = None
    ) -> Self:
        """Make leaves require grad and chain `cb(tensor, grad) -> grad` behind the callbacks already attached."""
        found, chain = (
            _float_tensors(tensors),
            _callables(callbacks),
        )  # check all before changing any
        for tensor in found:
            if tensor.is_leaf:
                tensor.requires_grad_()
            self._callbacks.setdefault(tensor, []).extend(chain)
        if self._kept is not None:
            self._kept += found
        return self


@dataclass(frozen=True)
class GradOperation:
    """`GradOperation(...)(fn, weights)(*inputs[, sens])`: gradients as values, zeros if unused; no `.grad` changes."""

    get_all: bool = False
    get_by_list: bool = False
    sens_param: bool = False

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(
                    f"expected a bool for {name}, received {_kind(value)}, do GradOperation()(fn)"
                )

    def __call__(
        self, fn: Callable[..., Any], weights: Tensors | None = None
    ) -> Callable[..., Grads]:
        """The gradient function of fn, which returns one tensor; one gradient comes bare, several as a tuple."""
        listed = [] if weights is None else _float_tensors(weights)
        if bool(listed) != self.get_by_list:
            do = "pass list(net.parameters())" if self.get_by_list else "set get_by_list=True"
            raise ValueError(
                f"expected weights with get_by_list and only then, received {len(listed)}, do {do}"
            )
        return partial(self._grads, fn, listed)

    def _grads(self, fn: Callable[..., Any], listed: list[Tensor], *args: Any) -> Grads:
        """MindSpore's four forms; the inputs to differentiate are the first n."""
        inputs, sens = self._split(args)
        n = len(inputs) if self.get_all else int(not self.get_by_list)
        leaves = [_leaf(x) for x in inputs[:n]]
        with torch.enable_grad():
            y = fn(*leaves, *inputs[n:])
        if not isinstance(y, Tensor):
            raise TypeError(
                f"expected one tensor from fn, received {_kind(y)}, do select it: lambda *xs: fn(*xs)[0]"
            )
        found = iter(gradients(y, [x for x in leaves if x.requires_grad] + listed, sens))
        d_inputs = tuple(next(found) if x.requires_grad else torch.zeros_like(x) for x in leaves)
        if self.get_all and self.get_by_list:
            return d_inputs, tuple(found)
        grads = d_inputs or tuple(found)
        return grads[0] if len(grads) == 1 else grads

    def _split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor | float | None]:
        """The inputs of fn, and the sens where sens_param says that it comes last."""
        need = int(self.sens_param) + int(not self.get_by_list)
        if len(args) < need or (self.sens_param and args[-1] is None):
            got = f"{len(args)} ending in {_kind(args[-1])}" if args else "none"
            do = "pass the inputs, then the sens" if self.sens_param else "pass the inputs"
            raise TypeError(f"expected {need} arguments or more, received {got}, do {do}")
        return (args[:-1], args[-1]) if self.sens_param else (args, None)


def _leaf(x: object) -> Tensor:
    """A fresh leaf on x's memory, so that x itself stays as it is; an integer tensor passes, its gradient is zeros."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"expected tensor inputs, received {_kind(x)}, do bind it: functools.partial(fn, name=value)"
        )
    return x.detach().requires_grad_(x.is_floating_point())


def _backward(targets: Targets, y: Tensors, dy: Seeds | None, retain_graph: bool) -> None:
    """torch's own backward, for the targets only: AccumulateGrad adds, so its hooks (and DDP's) fire as usual."""
    ys, dys = _roots(y, dy)
    targets = [target for target in targets if target[0].requires_grad]
    if not targets:
        raise RuntimeError(
            "expected attached tensors, received none alive and trainable, do attach(net.parameters())"
        )
    inputs = [tensor for tensor, _ in targets]
    with _autocast_off(ys), _applied(targets):
        torch.autograd.backward(ys, dys, retain_graph=retain_graph, inputs=inputs)


def _targets(managers: tuple[GradManager, ...]) -> Targets:
    """Each live tensor once, with the callbacks of all managers in order."""
    merged: dict[int, tuple[Tensor, list[Callback]]] = {}
    for manager in managers:
        for tensor, chain in manager._callbacks.items():
            merged.setdefault(id(tensor), (tensor, []))[1].extend(chain)
    return list(merged.values())


@contextmanager
def _applied(targets: Targets) -> Iterator[None]:
    """The callbacks act in this pass only, each chain after its tensor's own hooks."""
    with ExitStack() as stack:
        for tensor, chain in targets:
            if chain and tensor.is_leaf:
                stack.enter_context(tensor.register_hook(partial(_run, chain, tensor)))
            elif chain:
                stack.enter_context(_applied_to_intermediate(tensor, chain))
        yield


@contextmanager
def _applied_to_intermediate(tensor: Tensor, chain: list[Callback]) -> Iterator[None]:
    """The callbacks change what the intermediate accumulates, not what flows on to its ancestors."""
    tensor.retain_grad()  # backward(inputs=) does it anyway; before it, reading `.grad` warns
    before, tensor.grad = tensor.grad, None
    seen: list[Tensor] = []

    def hook(grad: Tensor) -> None:
        seen.append(
            _run(chain, tensor, grad).clone()
        )  # clone: an ancestor's grad may be a view of this one

    with tensor.register_hook(hook):
        try:
            yield
        finally:
            tensor.grad = before
    for grad in seen:
        tensor.grad = grad if before is None else before + grad


def _run(chain: list[Callback], tensor: Tensor, grad: Tensor) -> Tensor:
    for callback in chain:
        result: object = callback(tensor, grad)
        if not isinstance(result, Tensor):
            raise TypeError(
                f"expected a tensor from a callback, received {_kind(result)}, do end with `return grad`"
            )
        grad = result
    return grad


def _roots(y: Tensors, dy: Seeds | None) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs and their seeds; one dy serves every y."""
    ys = _float_tensors(y, do="pass the loss or a list of losses")
    if not ys or not all(tensor.requires_grad for tensor in ys):
        got, do = (
            "one without" if ys else "none",
            "run the forward after attach(), without no_grad() and detach()",
        )
        raise ValueError(f"expected y with history, received {got}, do {do}")
    dys = list(dy) if isinstance(dy, list | tuple) else [dy] * len(ys)
    if len(dys) != len(ys):
        raise ValueError(
            f"expected one dy for each of {len(ys)} y, received {len(dys)}, do pass as many or one number"
        )
    return ys, [_seed(tensor, seed) for tensor, seed in zip(ys, dys, strict=True)]


def _seed(y: Tensor, dy: object) -> Tensor:
    """dy in y's shape and dtype; a number or a 0-dim tensor is expanded, and a device tensor is not read."""
    if dy is None:
        return torch.ones_like(y)
    if isinstance(dy, int | float):
        if (top := torch.finfo(y.dtype).max) < abs(dy) < math.inf:
            raise ValueError(
                f"expected |dy| <= {top:g} for {y.dtype}, received {dy:g}, do compute the loss in float32"
            )
        return y.new_full((), dy).expand(y.shape)
    if not isinstance(dy, Tensor):
        raise TypeError(
            f"expected dy as a tensor or a number, received {_kind(dy)}, do pass torch.ones_like(y)"
        )
    if dy.ndim and dy.shape != y.shape:
        raise ValueError(
            f"expected dy of shape {[*y.shape]} or 0-dim, received {[*dy.shape]}, do reshape or expand it"
        )
    if dy.ndim == 0 and dy.is_cpu and not y.is_cpu:
        return y.new_full((), dy.item()).expand(
            y.shape
        )  # host memory: a fill does not wait for the device
    if dy.device != y.device:
        raise ValueError(
            f"expected dy on {y.device}, received one on {dy.device}, do dy.to(y.device), which may wait"
        )
    return dy.detach().to(y.dtype).expand(y.shape)


def _autocast_off(ys: list[Tensor]) -> ExitStack:
    """Backward in the forward's dtypes: inside autocast, torch would run a float32 island's backward matmuls low."""
    stack = ExitStack()
    for kind in {"cpu", "cuda", *(y.device.type for y in ys)}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _float_tensors(
    tensors: object, do: str = "pass float tensors such as net.parameters()"
) -> list[Tensor]:
    found: list[Any] = (
        list(tensors)
        if isinstance(tensors, Iterable) and not isinstance(tensors, Tensor)
        else [tensors]
    )
    for x in found:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else _kind(x)
            raise TypeError(f"expected one or more float tensors, received {got}, do {do}")
    return found


def _callables(callbacks: object) -> list[Callback]:
    found: list[Any] = (
        []
        if callbacks is None
        else list(callbacks)
        if isinstance(callbacks, Iterable)
        else [callbacks]
    )
    for callback in found:
        if not callable(callback):
            raise TypeError(
                f"expected callbacks, received {_kind(callback)}, do pass cb(tensor, grad) -> grad"
            )
    return found


def _kind(value: object) -> str:
    return type(value).__name__
