"""Modules that a precision cannot run in, refused by name before anything runs."""

from torch import nn

from halfstep.precision.layout import is_scripted
from halfstep.precision.policy import Precision


def check_has_values(net: nn.Module) -> None:
    """Raises a ValueError for a network on the meta device, whose tensors have no memory."""
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"net: {name!r} is on the meta device, which has shapes and no values; "
                "before building optimizer and step call net.to_empty(device=...) and set the "
                "weights: load_state_dict, or each module's reset_parameters()"
            )


def check_modules(net: nn.Module, precision: Precision) -> None:
    """Raises a ValueError for a module that cannot run as asked, with what to do instead."""
    for name, module in net.named_modules():
        label = f"module {name!r}" if name else "the network"
        kind = type(module).__name__
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ValueError(
                f"{label} is a DataParallel over {len(module.device_ids)} devices, and a step runs "
                "on one; give the module inside, net.module"
            )
        for key, tensor in module.named_buffers(recurse=False):
            if nn.parameter.is_lazy(tensor):
                buffer_name = f"{name}.{key}" if name else key
                raise ValueError(
                    f"buffer {buffer_name!r} has no shape yet: "
                    "run one forward of the network before building the step"
                )

        keeps_weights = precision.cast in ("none", "autocast")
        if keeps_weights:
            continue
        if is_scripted(module):
            raise ValueError(
                f"{label} is a TorchScript module ({kind}), whose weights and casts cannot be "
                f"exchanged from Python, which {precision.name!r} does; use 'fp32' or 'O1', "
                "or the module before torch.jit.script"
            )
        if _is_quantized(module):
            raise ValueError(
                f"{label} is a quantized module ({kind}), whose kernels take float32 only; "
                f"{precision.name!r} hands it another dtype: use 'fp32' or 'O1'"
            )


def _is_quantized(module: nn.Module) -> bool:
    """Whether its weights are packed integers, as in torch.ao.nn.quantized."""
    is_from_torch = type(module).__module__.startswith("torch.ao.nn.")
    return is_from_torch and hasattr(module, "_packed_params")
