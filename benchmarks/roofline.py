"""What a step must move and compute at least: counted from the network's shapes, and kernel by kernel from a trace."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.nets.resnet import BasicBlock, Bottleneck

SIZES = {"c10::Half": 2, "c10::BFloat16": 2, "float": 4, "double": 8, "long": 8, "long int": 8, "int": 4,
         "unsigned char": 1, "bool": 1}  # fmt: skip
MOVERS = (
    "aten::add", "aten::add_", "aten::mul", "aten::mul_", "aten::div", "aten::relu", "aten::relu_", "aten::clamp_min",
    "aten::clamp_min_", "aten::threshold_backward", "aten::copy_", "aten::cudnn_batch_norm", "aten::native_batch_norm",
    "aten::_native_batch_norm_legit", "aten::_batch_norm_with_update", "aten::cudnn_batch_norm_backward",
    "aten::native_batch_norm_backward", "aten::batch_norm_backward", "aten::max_pool2d_with_indices",
    "aten::max_pool2d_with_indices_backward", "aten::index_select", "aten::sum", "aten::mean",
)  # fmt: skip


@dataclass(frozen=True)
class Ceiling:
    """Of this machine, measured."""

    bytes_per_s: float
    flop_per_s: dict[str, float]
    """By precision: "fp16", "tf32", "fp32"."""

    def seconds(self, flops: float, moved: float, kind: str) -> float:
        return max(flops / self.flop_per_s[kind], moved / self.bytes_per_s)


@dataclass(frozen=True)
class Op:
    """One operation of the step: what it computes, and the bytes that it reads and writes at least."""

    name: str
    flops: float
    moved: float
    fused: float
    """Bytes that remain where norm, activation and addition are one kernel."""


def ops_of(net: nn.Module, shape: tuple[int, ...], size: int, kept: int) -> list[Op]:
    """Forward, backward and update of a step, by a run on the meta device, where nothing is computed.

    `size` is an activation's bytes, `kept` those that the update moves per parameter.
    """
    found: list[Op] = []
    net = net.to("meta")
    for module in net.modules():
        if next(module.children(), None) is None or isinstance(module, BasicBlock | Bottleneck):
            module.register_forward_hook(
                lambda m, given, out: found.extend(_ops(m, given[0], out, size, not found))
            )
    net(torch.empty(shape, device="meta"))
    count = sum(p.numel() for p in net.parameters())
    return [*found, Op("update", 2.0 * count, float(kept * count), float(kept * count))]


def _ops(module: nn.Module, x: Tensor, y: Tensor, size: int, first: bool) -> Iterable[Op]:
    a, b = x.numel() * size, y.numel() * size
    name = type(module).__name__
    if isinstance(module, nn.Linear | nn.Conv2d):
        w = module.weight.numel() * size
        flops = 2.0 * y.numel() * module.weight[0].numel()
        both = (
            ("forward", "weights' gradient")
            if first
            else ("forward", "weights' gradient", "inputs' gradient")
        )
        return [Op(f"{name} {part}", flops, a + b + w, a + b + w) for part in both]
    if isinstance(
        module, nn.BatchNorm2d
    ):  # its statistics need a pass of their own, forward and backward
        return [Op(f"{name} forward", 4.0 * x.numel(), 2 * a + b, 2 * a + b),
                Op(f"{name} backward", 8.0 * x.numel(), 2 * (a + b) + a, 2 * (a + b) + a)]  # fmt: skip
    if isinstance(module, nn.ReLU):
        return [
            Op("ReLU forward", x.numel(), a + b, 0),
            Op("ReLU backward", x.numel(), a + 2 * b, b / 16),
        ]
    if isinstance(module, BasicBlock | Bottleneck):
        return [
            Op("addition forward", y.numel(), 3 * b, b),
            Op("addition backward", y.numel(), 3 * b, b),
        ]
    if isinstance(module, nn.Flatten):
        return []
    return [
        Op(f"{name} forward", x.numel(), a + b, a + b),
        Op(f"{name} backward", x.numel(), a + b, a + b),
    ]


def floor(ops: list[Op], ceiling: Ceiling, kind: str) -> dict[str, float]:
    """Milliseconds: every operation a kernel of its own, and the same with all fused that can be."""
    flops, fused = sum(op.flops for op in ops), sum(op.fused for op in ops)
    return {
        "gflop": flops / 1e9, "gb": sum(op.moved for op in ops) / 1e9, "gb_fused": fused / 1e9,
        "arithmetic_ms": flops / ceiling.flop_per_s[kind] * 1e3, "memory_ms": fused / ceiling.bytes_per_s * 1e3,
        "floor_ms": sum(ceiling.seconds(op.flops, op.moved, kind) for op in ops) * 1e3,
        "floor_fused_ms": sum(ceiling.seconds(op.flops, op.fused, kind) for op in ops) * 1e3,
    }  # fmt: skip


def kernels_of(path: str) -> list[dict[str, Any]]:
    """Each kernel of a Chrome trace: its name, µs, and the operation that launched it where the trace says."""
    events = [
        e
        for e in json.loads(Path(path).read_text())["traceEvents"]
        if isinstance(e.get("args"), dict)
    ]
    ops = {
        e["args"]["External id"]: e
        for e in events
        if e.get("cat") == "cpu_op" and "External id" in e["args"]
    }
    found = []
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            op = ops.get(e["args"].get("External id"))
            found.append(
                {
                    "name": e["name"],
                    "us": float(e["dur"]),
                    "op": op,
                    "id": e["args"].get("External id"),
                }
            )
    return found


def floors_of(kernels: list[dict[str, Any]], ceiling: Ceiling, kind: str) -> dict[str, float]:
    """The mean floor in µs of a launch of each kernel, where its operation's shapes tell.

    An operation's floors go to its longest kernels: a convolution's backward is two products, the rest reorders.
    """
    launches = defaultdict(list)
    for kernel in kernels:
        if kernel["op"] is not None:
            launches[kernel["id"]].append(kernel)
    found: dict[str, list[float]] = defaultdict(list)
    for group in launches.values():
        least = op_floors(group[0]["op"], ceiling, kind)
        for kernel, seconds in zip(sorted(group, key=lambda k: -k["us"]), least, strict=False):
            found[kernel["name"]].append(seconds * 1e6)
    return {name: sum(each) / len(each) for name, each in found.items()}


def op_floors(event: dict[str, Any], ceiling: Ceiling, kind: str) -> list[float]:
    """Seconds of each product or pass over memory that an operation is made of; empty where shapes do not tell."""
    name, args = event["name"], event["args"]
    dims, types = args.get("Input Dims", []), args.get("Input type", [])
    if not dims or not isinstance(dims[0], list) or not types or types[0] not in SIZES:
        return []
    kind = "fp16" if types[0] in ("c10::Half", "c10::BFloat16") else kind
    moved = [
        math.prod(d) * SIZES.get(t, 0)
        for d, t in zip(dims, types, strict=False)
        if d and isinstance(d[0], int)
    ]
    if name == "aten::convolution_backward":
        flops = 2.0 * math.prod(dims[0]) * math.prod(dims[2][1:])
        wanted = (
            args["Concrete Inputs"][-1].strip("[]").split(", ")[:2]
        )  # "[False, True, False]": inputs', weights'
        return [ceiling.seconds(flops, sum(moved), kind)] * wanted.count("True")
    if name in ("aten::addmm", "aten::mm", "aten::cudnn_convolution"):
        return [ceiling.seconds(_flops(name, dims, args), sum(moved), kind)]
    if name in MOVERS and moved:
        written = 0 if name in ("aten::copy_", "aten::sum", "aten::mean") else max(moved)
        return [(sum(moved) + written) / ceiling.bytes_per_s]
    return []


def _flops(name: str, dims: list[list[int]], args: dict[str, Any]) -> float:
    if (
        name == "aten::cudnn_convolution"
    ):  # (x, weight, padding, stride, …); padding and stride as text, "[3, 3]"
        padding, stride = (json.loads(text) for text in args["Concrete Inputs"][2:4])
        (count, _, *image), weight = dims[0], dims[1]
        sides = [
            (n + 2 * p - k) // s + 1
            for n, k, p, s in zip(image, weight[2:], padding, stride, strict=True)
        ]
        return float(2 * count * math.prod(sides) * math.prod(weight))
    (rows, inner), (_, columns) = dims[:2] if name == "aten::mm" else dims[1:3]
    return 2.0 * rows * inner * columns
