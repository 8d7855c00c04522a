"""What a step must move and compute at least.

Counted from the network's shapes, and kernel by kernel from a trace.
"""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.nets.resnet import BasicBlock, Bottleneck

# Bytes of an element by the type names of a Chrome trace.
ELEMENT_BYTES = {
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "float": 4,
    "double": 8,
    "long": 8,
    "long int": 8,
    "int": 4,
    "unsigned char": 1,
    "bool": 1,
}
HALF_TYPES = ("c10::Half", "c10::BFloat16")

# Operations that are one pass over memory.
MEMORY_OPS = (
    "aten::add",
    "aten::add_",
    "aten::mul",
    "aten::mul_",
    "aten::div",
    "aten::relu",
    "aten::relu_",
    "aten::clamp_min",
    "aten::clamp_min_",
    "aten::threshold_backward",
    "aten::copy_",
    "aten::cudnn_batch_norm",
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update",
    "aten::cudnn_batch_norm_backward",
    "aten::native_batch_norm_backward",
    "aten::batch_norm_backward",
    "aten::max_pool2d_with_indices",
    "aten::max_pool2d_with_indices_backward",
    "aten::index_select",
    "aten::sum",
    "aten::mean",
)
# Of these, those whose inputs include what they write, or that write next to nothing.
WITHOUT_OUTPUT = ("aten::copy_", "aten::sum", "aten::mean")
PRODUCT_OPS = ("aten::addmm", "aten::mm", "aten::cudnn_convolution")
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Ceiling:
    """The limits of this machine, measured."""

    bytes_per_s: float
    flop_per_s: dict[str, float]  # by precision: "fp16", "tf32", "fp32"

    def seconds(self, flops: float, moved: float, precision: str) -> float:
        """The least time for this arithmetic and these bytes."""
        return max(flops / self.flop_per_s[precision], moved / self.bytes_per_s)


@dataclass(frozen=True)
class Op:
    """One operation of a step: what it computes, and the bytes that it moves at least."""

    name: str
    flops: float
    moved: float  # bytes, as a kernel of its own
    fused: float  # bytes where norm, activation and addition are one kernel


def count_ops(
    net: nn.Module, shape: tuple[int, ...], element_bytes: int, update_bytes: int
) -> list[Op]:
    """Forward, backward and update of a step, by a run on the meta device: nothing is computed.

    `element_bytes` are those of an activation, `update_bytes` what the update moves per parameter.
    """
    ops: list[Op] = []

    def add_ops(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ops.extend(_module_ops(module, inputs[0], output, element_bytes, is_first=not ops))

    net = net.to("meta")
    for module in net.modules():
        is_leaf = next(module.children(), None) is None
        if is_leaf or isinstance(module, BasicBlock | Bottleneck):
            module.register_forward_hook(add_ops)
    net(torch.empty(shape, device="meta"))

    param_count = sum(p.numel() for p in net.parameters())
    moved = float(update_bytes * param_count)
    ops.append(Op("update", 2.0 * param_count, moved, moved))
    return ops


def _module_ops(
    module: nn.Module, x: Tensor, y: Tensor, element_bytes: int, *, is_first: bool
) -> list[Op]:
    """Forward and backward of one module. The first needs no gradient of its inputs."""
    x_bytes = x.numel() * element_bytes
    y_bytes = y.numel() * element_bytes
    name = type(module).__name__
    if isinstance(module, nn.Linear | nn.Conv2d):
        moved = x_bytes + y_bytes + module.weight.numel() * element_bytes
        flops = 2.0 * y.numel() * module.weight[0].numel()
        products = ["forward", "weights' gradient"]
        if not is_first:
            products.append("inputs' gradient")
        return [Op(f"{name} {product}", flops, moved, moved) for product in products]
    if isinstance(module, nn.BatchNorm2d):
        # Its statistics need a pass of their own, forward and backward.
        forward = 2 * x_bytes + y_bytes
        backward = 2 * (x_bytes + y_bytes) + x_bytes
        return [
            Op(f"{name} forward", 4.0 * x.numel(), forward, forward),
            Op(f"{name} backward", 8.0 * x.numel(), backward, backward),
        ]
    if isinstance(module, nn.ReLU):
        # Fused, its backward reads one bit for each element.
        return [
            Op("ReLU forward", x.numel(), x_bytes + y_bytes, 0),
            Op("ReLU backward", x.numel(), x_bytes + 2 * y_bytes, y_bytes / 16),
        ]
    if isinstance(module, BasicBlock | Bottleneck):
        return [
            Op("addition forward", y.numel(), 3 * y_bytes, y_bytes),
            Op("addition backward", y.numel(), 3 * y_bytes, y_bytes),
        ]
    if isinstance(module, nn.Flatten):
        return []
    moved = x_bytes + y_bytes
    return [
        Op(f"{name} forward", x.numel(), moved, moved),
        Op(f"{name} backward", x.numel(), moved, moved),
    ]


def step_floor(ops: list[Op], ceiling: Ceiling, precision: str) -> dict[str, float]:
    """The least milliseconds of a step: every operation a kernel of its own, and with fusion."""
    flops = sum(op.flops for op in ops)
    moved = sum(op.moved for op in ops)
    fused = sum(op.fused for op in ops)
    floor_s = sum(ceiling.seconds(op.flops, op.moved, precision) for op in ops)
    floor_fused_s = sum(ceiling.seconds(op.flops, op.fused, precision) for op in ops)
    return {
        "gflop": flops / 1e9,
        "gb": moved / 1e9,
        "gb_fused": fused / 1e9,
        "arithmetic_ms": flops / ceiling.flop_per_s[precision] * 1e3,
        "memory_ms": fused / ceiling.bytes_per_s * 1e3,
        "floor_ms": floor_s * 1e3,
        "floor_fused_ms": floor_fused_s * 1e3,
    }


def read_kernels(path: str | Path) -> list[dict[str, Any]]:
    """Each kernel of a Chrome trace: name, µs, and the operation that launched it where known."""
    trace = json.loads(Path(path).read_text())
    events = [event for event in trace["traceEvents"] if isinstance(event.get("args"), dict)]
    ops = {}
    for event in events:
        if event.get("cat") == "cpu_op" and "External id" in event["args"]:
            ops[event["args"]["External id"]] = event

    kernels = []
    for event in events:
        if event.get("cat") in GPU_EVENTS:
            op_id = event["args"].get("External id")
            kernels.append(
                {
                    "name": event["name"],
                    "us": float(event["dur"]),
                    "op": ops.get(op_id),
                    "id": op_id,
                }
            )
    return kernels


def kernel_floors(
    kernels: list[dict[str, Any]], ceiling: Ceiling, precision: str
) -> dict[str, float]:
    """The mean floor in µs of a launch of each kernel, where the shapes of its operation tell.

    The floors of an operation go to its longest kernels: the backward pass of a convolution is two
    products, and its other kernels reorder.
    """
    kernels_by_op = defaultdict(list)
    for kernel in kernels:
        if kernel["op"] is not None:
            kernels_by_op[kernel["id"]].append(kernel)

    floors_us: dict[str, list[float]] = defaultdict(list)
    for op_kernels in kernels_by_op.values():
        longest_first = sorted(op_kernels, key=lambda kernel: -kernel["us"])
        floors_s = op_floors(op_kernels[0]["op"], ceiling, precision)
        for kernel, floor_s in zip(longest_first, floors_s, strict=False):
            floors_us[kernel["name"]].append(floor_s * 1e6)
    return {name: sum(floors) / len(floors) for name, floors in floors_us.items()}


def op_floors(event: dict[str, Any], ceiling: Ceiling, precision: str) -> list[float]:
    """Seconds of each product, or pass over memory, of an operation; empty without shapes.

    `event` is the operation in a Chrome trace.
    """
    name = event["name"]
    args = event["args"]
    shapes = args.get("Input Dims", [])
    types = args.get("Input type", [])
    if not shapes or not isinstance(shapes[0], list):
        return []
    if not types or types[0] not in ELEMENT_BYTES:
        return []
    if types[0] in HALF_TYPES:
        precision = "fp16"
    input_bytes = [
        math.prod(shape) * ELEMENT_BYTES.get(type_name, 0)
        for shape, type_name in zip(shapes, types, strict=False)
        if shape and isinstance(shape[0], int)
    ]

    if name == "aten::convolution_backward":
        flops = 2.0 * math.prod(shapes[0]) * math.prod(shapes[2][1:])
        # "[True, True, False]": which gradients are computed, of inputs, weights and bias.
        needs_grad = args["Concrete Inputs"][-1].strip("[]").split(", ")
        product_count = needs_grad[:2].count("True")
        return [ceiling.seconds(flops, sum(input_bytes), precision)] * product_count
    if name in PRODUCT_OPS:
        return [ceiling.seconds(_product_flops(name, shapes, args), sum(input_bytes), precision)]
    if name in MEMORY_OPS and input_bytes:
        output_bytes = 0 if name in WITHOUT_OUTPUT else max(input_bytes)
        return [(sum(input_bytes) + output_bytes) / ceiling.bytes_per_s]
    return []


def _product_flops(name: str, shapes: list[list[int]], args: dict[str, Any]) -> float:
    """The arithmetic of a matrix product or a convolution."""
    if name == "aten::cudnn_convolution":
        # Its arguments are x, weight, padding, stride, …; the latter two as text, "[3, 3]".
        padding, stride = (json.loads(text) for text in args["Concrete Inputs"][2:4])
        count, _, *image_sides = shapes[0]
        weight_shape = shapes[1]
        output_sides = [
            (n + 2 * p - k) // s + 1
            for n, k, p, s in zip(image_sides, weight_shape[2:], padding, stride, strict=True)
        ]
        return float(2 * count * math.prod(output_sides) * math.prod(weight_shape))
    # addmm has the bias before its two matrices.
    a_shape, b_shape = shapes[:2] if name == "aten::mm" else shapes[1:3]
    rows, inner = a_shape
    _, columns = b_shape
    return 2.0 * rows * inner * columns
