"""The dtype of each module: decided once, applied by casts around `forward`, observed in one run.

`plan_dtypes` decides. The casts are wrappers of a module's `forward`; a wrapper casts what comes in
and, where the module differs from its surroundings, what goes out.
"""

import inspect
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.errors import closest_name
from halfstep.precision.layout import is_scripted
from halfstep.precision.policy import F32, Precision
from halfstep.utils.text import dtype_name

Forward = Callable[..., Any]

_NORM_NAME = re.compile(r"Norm(\dd)?$")  # BatchNorm2d, LayerNorm, and LlamaRMSNorm and its like
_MAX_NAMES_SHOWN = 12  # modules listed in an error


# Which dtype each module runs in


class ModuleDtype(NamedTuple):
    """The dtype that one module runs in."""

    inside: torch.dtype
    around: torch.dtype  # of the module that contains it
    is_kept: bool  # a glob of `keep=` names it


def plan_dtypes(net: nn.Module, precision: Precision) -> dict[str, ModuleDtype]:
    """Module name → its dtype: its parent's, unless a glob of `keep=` or the norm rule says else.

    Parents come before their children.
    """
    _check_globs(net, precision)
    planned: dict[str, ModuleDtype] = {}
    for name, module in net.named_modules():
        around = precision.compute
        if name:
            parent = name.rpartition(".")[0]
            around = planned[parent].inside

        kept_dtypes = [dtype for glob, dtype in precision.keep if fnmatchcase(name, glob)]
        in_kept_block = around != precision.compute
        if kept_dtypes:
            # Two globs may name one module: the safer dtype.
            inside = max(kept_dtypes, key=lambda dtype: torch.finfo(dtype).bits)
        elif is_norm(module) and not in_kept_block:
            inside = precision.norms
        elif _is_parametrization(module) and precision.cast == "copies" and not in_kept_block:
            inside = F32  # a weight is computed from the masters, then rounded once
        else:
            inside = around
        planned[name] = ModuleDtype(inside, around, is_kept=bool(kept_dtypes))
    return planned


def is_norm(module: nn.Module) -> bool:
    """Whether it is a norm layer: torch's own, or named like one, without layers inside.

    A wrapper such as PreNorm has layers inside and is none.
    """
    has_norm_name = _NORM_NAME.search(type(module).__name__) is not None
    return has_norm_name and not any(True for _ in module.children())


def _is_parametrization(module: nn.Module) -> bool:
    return isinstance(module, parametrize.ParametrizationList)


def takes_mixed_dtypes(module: nn.Module) -> bool:
    """Whether its kernel takes low inputs beside float32 weights, and rounds once: BatchNorm."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def batch_dependent_modules(net: nn.Module) -> list[str]:
    """Names of the modules whose output for a sample depends on the other samples of its batch."""
    names = []
    for name, module in net.named_modules():
        is_batch_norm = isinstance(module, nn.modules.batchnorm._NormBase)
        if is_batch_norm and not isinstance(module, nn.modules.instancenorm._InstanceNorm):
            names.append(name)
    return names


def _check_globs(net: nn.Module, precision: Precision) -> None:
    module_names = [name for name, _ in net.named_modules() if name]
    for glob, _ in precision.keep:
        if not any(fnmatchcase(name, glob) for name in module_names):
            listed_names = ", ".join(module_names[:_MAX_NAMES_SHOWN])
            if len(module_names) > _MAX_NAMES_SHOWN:
                listed_names += ", …"
            raise ValueError(
                f"keep={{{glob!r}: …}} matches no module of the network; "
                f"its modules are: {listed_names}"
            )


# Casts around forward


def complex_dtype(dtype: torch.dtype) -> torch.dtype:
    """The complex dtype that goes with a floating one: complex128 with float64, else complex64.

    There is no complex half: torch has hardly a kernel for one.
    """
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor inside it in `dtype`, complex ones to match in float64."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            return value.to(dtype) if value.dtype != dtype else value
        if dtype == torch.float64 and value.dtype == torch.complex64:
            return value.to(torch.complex128)
        return value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return tree_map(
        lambda leaf: cast_floats(leaf, dtype) if isinstance(leaf, Tensor) else leaf, value
    )


class KeptInputs(NamedTuple):
    """The arguments of one forward that are not cast."""

    positions: tuple[str, ...]  # names of the arguments by position
    names: frozenset[str]  # "positions", or "batch.positions" for a key of a dictionary

    def cast(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
        """The arguments, with floating tensors in `dtype` except those to be kept."""
        last = len(self.positions) - 1
        cast_args = []
        for i, arg in enumerate(args):
            name = self.positions[min(i, last)] if self.positions else ""
            cast_args.append(self._cast_argument(name, arg, dtype))
        cast_kwargs = {name: self._cast_argument(name, arg, dtype) for name, arg in kwargs.items()}
        return cast_args, cast_kwargs

    def _cast_argument(self, name: str, value: Any, dtype: torch.dtype) -> Any:
        if name in self.names:
            return value
        if not isinstance(value, dict):
            return cast_floats(value, dtype)
        return {
            key: item if f"{name}.{key}" in self.names else cast_floats(item, dtype)
            for key, item in value.items()
        }


# Masks that torch's attention adds to a product: there they get a low copy that stays finite.
_ATTENTION_MASKS = frozenset({"attn_mask", "key_padding_mask"})


def kept_inputs(net: nn.Module, precision: Precision) -> dict[str, KeptInputs]:
    """Module name → its inputs that are not cast, for the modules that have some."""
    kept: dict[str, KeptInputs] = {}
    unmatched = set(precision.keep_inputs)
    argument_names: set[str] = set()
    for module_name, module in net.named_modules():
        has_masks = isinstance(module, nn.MultiheadAttention)
        if is_scripted(module) or not (precision.keep_inputs or has_masks):
            continue
        parameters = list(inspect.signature(module.forward).parameters.values())
        names = [parameter.name for parameter in parameters]
        argument_names.update(names)
        takes_any_name = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)

        here = {
            name
            for name in precision.keep_inputs
            if takes_any_name or name.partition(".")[0] in names
        }
        unmatched -= here
        if has_masks:
            here |= _ATTENTION_MASKS
        if here:
            by_position = [p.name for p in parameters if p.kind != p.KEYWORD_ONLY]
            kept[module_name] = KeptInputs(tuple(by_position), frozenset(here))

    for name in sorted(unmatched):
        close = closest_name(name, sorted(argument_names))
        suggestion = f"; did you mean {close!r}?" if close else ""
        raise ValueError(
            f"keep_inputs: {name!r} is no argument of a forward of this network{suggestion}"
        )
    return kept


def cast_inputs(forward: Forward, dtype: torch.dtype, kept: KeptInputs | None = None) -> Forward:
    """`forward` with its inputs in `dtype`: low weights need low inputs, whatever comes in."""
    if kept is not None:

        @wraps(forward)
        def forward_with_kept_inputs(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = kept.cast(args, kwargs, dtype)
            return forward(*args, **kwargs)

        return forward_with_kept_inputs

    @wraps(forward)
    def forward_with_cast_inputs(*args: Any, **kwargs: Any) -> Any:
        args = tuple([cast_floats(arg, dtype) for arg in args])
        if not kwargs:
            return forward(*args)
        return forward(*args, **{key: cast_floats(arg, dtype) for key, arg in kwargs.items()})

    return forward_with_cast_inputs


def cast_outputs(
    forward: Forward, dtype: torch.dtype, unrounded: "UnroundedOutputs | None"
) -> Forward:
    """A module that runs in another dtype, with its outputs in the dtype around it.

    With `unrounded`, outputs are remembered as they were before that.
    """

    @wraps(forward)
    def forward_with_cast_outputs(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if unrounded is None:
            return cast_floats(out, dtype)
        return unrounded.round(out, dtype)

    return forward_with_cast_outputs


def without_autocast(forward: Forward, device_type: str) -> Forward:
    """A module kept in float32 under O1: autocast is off inside, and its inputs are float32."""
    fp32_forward = cast_inputs(forward, F32)

    @wraps(forward)
    def forward_without_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return fp32_forward(*args, **kwargs)

    return forward_without_autocast


class _RoundedOutput(NamedTuple):
    rounded: Tensor  # stored so that its id is not used again
    version: int  # of `rounded` when it was made; writing into it counts up
    unrounded: Tensor


class UnroundedOutputs:
    """Outputs of kept modules before they were rounded to the dtype around them.

    A kept module is often the last one. The network's output is then its unrounded output, without
    the detour through the low dtype.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, _RoundedOutput] = {}

    def round(self, out: Any, dtype: torch.dtype) -> Any:
        """`out` in `dtype`; remembers what it was."""

        def round_leaf(leaf: Any) -> Any:
            rounded = cast_floats(leaf, dtype)
            if rounded is not leaf:
                self._by_id[id(rounded)] = _RoundedOutput(rounded, rounded._version, leaf)
            return rounded

        return round_leaf(out) if isinstance(out, Tensor) else tree_map(round_leaf, out)

    def restore(self, out: Any) -> Any:
        """`out` with rounded outputs replaced by unrounded ones, unless they were written into."""
        # Not needed for the result. But torch 2.11 cannot trace the id() of an intermediate: it
        # would break a compiled program in three.
        if not self._by_id:
            return out

        def restore_leaf(leaf: Any) -> Any:
            entry = self._by_id.get(id(leaf))
            if entry is None or leaf._version != entry.version:
                return leaf
            return entry.unrounded

        return restore_leaf(out) if isinstance(out, Tensor) else tree_map(restore_leaf, out)

    def cast_network_output(self, forward: Forward, dtype: torch.dtype) -> Forward:
        """The network's own `forward`, with unrounded outputs in `dtype`."""

        @wraps(forward)
        def network_forward(*args: Any, **kwargs: Any) -> Any:
            return cast_floats(self.restore(forward(*args, **kwargs)), dtype)

        return network_forward

    def clear(self) -> None:
        """Forgets all outputs."""
        self._by_id.clear()


# The dtypes that modules really received and returned


class ObservedDtypes(NamedTuple):
    """One module's input, weight and output dtypes in one forward ("-" where it has none)."""

    kind: str  # the module's class
    input: str
    weight: str
    output: str


def observe(
    forward: Forward, module: nn.Module, name: str, observed: dict[str, ObservedDtypes]
) -> Forward:
    """`forward` that writes the dtypes of its first call into `observed[name]`."""

    @wraps(forward)
    def observed_forward(*args: Any, **kwargs: Any) -> Any:
        weights = [weight for weight in module._parameters.values() if weight is not None]
        out = forward(*args, **kwargs)
        dtypes = ObservedDtypes(
            kind=type(module).__name__,
            input=_list_dtypes((args, kwargs)),
            weight=_list_dtypes(weights),
            output=_list_dtypes(out),
        )
        observed.setdefault(name, dtypes)
        return out

    return observed_forward


def _list_dtypes(values: Any) -> str:
    """The floating and complex dtypes in `values`, each once; all dtypes where there is none."""
    dtypes = [leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    names = dict.fromkeys(dtype_name(dtype) for dtype in floating or dtypes)
    return "/".join(names) or "-"
