"""How far a step is from this machine's limits: measured ceilings, counted floors, the kernels.

    python benchmarks/floor.py [--json FILE] [--works "mlp fp32" "resnet 32" "best resnet 32" …]

The ceilings: a copy on the device, matrix products in fp16, TF32 and strict fp32, a node of a CUDA
graph (1,000 tiny kernels that wait for each other) and the gap between two graphs. The floors:
every operation as a kernel of its own at the ceiling of its bytes or its arithmetic, and the same
with norms, activations and additions fused. A kernel's own floor is that of the operation that
launches it in an eager step, where shapes tell it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlp
import peers
import resnet
import roofline
import torch
from measure import wait_for_device
from roofline import Ceiling
from rows import ResultTable, describe_error
from torch import nn
from torch.profiler import ProfilerActivity, profile

import halfstep as hs

WORKS = ["mlp fp32", "mlp fp16", "mlp mixed", "resnet 32", "resnet 256"]
BEST_PREFIX = "best "  # before a work: compiled, and polished at once
TOP_KERNELS = 15
MAX_NAME_CHARACTERS = 80
CHAIN_NODES = 1000  # nodes of the CUDA graph that is timed
EAGER_WARMUP_STEPS = 3

# Bytes that an update moves per parameter. O2: gradient read, master and momentum read and written,
# low copy written.
UPDATE_BYTES = {"fp32": 12, "fp16": 6, "mixed": 12, "O2": 4 + 8 + 8 + 2}


class StepWork(NamedTuple):
    """Steps that can be timed, and what one of them must do at least."""

    clock: peers.Clock
    steps: int  # in one pass
    ops: list[roofline.Op]
    precision: str  # the ceiling of its arithmetic


class WorkName(NamedTuple):
    """The parts of a name like "best resnet 32"."""

    is_best: bool
    net: str
    variant: str  # a precision for the MLP, a batch size for the ResNet


def parse_work(name: str) -> WorkName:
    net, _, variant = name.removeprefix(BEST_PREFIX).partition(" ")
    return WorkName(name.startswith(BEST_PREFIX), net, variant)


# Ceilings.


def median_seconds(
    work: Callable[[], object], device: torch.device, *, repeat: int = 10, rounds: int = 5
) -> float:
    """Seconds of a call: the median of `rounds` rounds, warmed up."""
    work()
    times_s = []
    for _ in range(rounds):
        wait_for_device(device)
        start = time.perf_counter()
        for _ in range(repeat):
            work()
        wait_for_device(device)
        times_s.append((time.perf_counter() - start) / repeat)
    return statistics.median(times_s)


def measure_copy(count: int, device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / median_seconds(lambda: target.copy_(source), device)


def measure_product(size: int, dtype: torch.dtype, precision: str, device: torch.device) -> float:
    """FLOP/s of a product of two n × n matrices of normal numbers."""
    peers.set_torch_flags(precision, convolutions=False)
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), device, repeat=5)


def measure_graph_nodes(device: torch.device) -> dict[str, float | None]:
    """Microseconds of a node in a long chain, and of graphs of one node, one after the other."""
    if device.type != "cuda":
        return {"node_us": None, "launch_us": None}
    x = torch.zeros(1, device=device)
    chain = _capture_additions(x, CHAIN_NODES)
    single = _capture_additions(x, 1)
    return {
        "node_us": median_seconds(chain.replay, device) / CHAIN_NODES * 1e6,
        "launch_us": median_seconds(single.replay, device, repeat=500) * 1e6,
    }


def _capture_additions(x: torch.Tensor, count: int) -> torch.cuda.CUDAGraph:
    x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            x.add_(1)
    return graph


def measure_ceilings(device: torch.device, small: bool) -> tuple[Ceiling, dict[str, Any]]:
    """The limits of this machine, and the same as figures for the JSON."""
    bytes_per_s = measure_copy(2**20 if small else 2**32, device)
    size = 64 if small else 8192
    flop_per_s = {
        "fp16": measure_product(size, torch.float16, "fp32", device),
        "tf32": measure_product(size, torch.float32, "tf32", device),
        "fp32": measure_product(size, torch.float32, "fp32", device),
    }
    peers.set_torch_flags("fp32", convolutions=False)
    figures: dict[str, Any] = {"copy_tb_s": bytes_per_s / 1e12}
    for precision, rate in flop_per_s.items():
        figures[f"{precision}_tflop_s"] = rate / 1e12
    figures |= measure_graph_nodes(device)
    return Ceiling(bytes_per_s, flop_per_s), figures


# The step.


def build_work(name: str, args: argparse.Namespace) -> StepWork:
    """halfstep's step, warmed up and captured."""
    is_best, net, variant = parse_work(name)
    device = torch.device(args.device)
    if net == "mlp":
        data = mlp.build_data(mlp.load_split(args.samples), variant, device, as_bytes=False)
        way = "halfstep best" if is_best else "halfstep fused"
        return StepWork(
            clock=mlp.halfstep_clock(way, variant, data, device),
            steps=data.size,
            ops=roofline.count_ops(
                hs.nets.mlp(),
                (mlp.BATCH_SIZE, 1, 28, 28),
                element_bytes=4 if variant == "fp32" else 2,
                update_bytes=UPDATE_BYTES[variant],
            ),
            precision="fp32" if variant == "fp32" else "fp16",
        )
    batch_size = int(variant)
    way = resnet.HALFSTEP_WAYS["halfstep O2 compiled" if is_best else "halfstep O2"]
    return StepWork(
        clock=resnet.halfstep_clock(way, batch_size, args),
        steps=args.steps,
        ops=roofline.count_ops(
            hs.nets.resnet50(classes=10),
            (batch_size, 3, args.side, args.side),
            element_bytes=2,
            update_bytes=UPDATE_BYTES["O2"],
        ),
        precision="fp16",
    )


def build_eager_step(name: str, args: argparse.Namespace) -> Callable[[], object]:
    """One step of the same work, not captured: each kernel can be traced to its operation."""
    _, net_name, variant = parse_work(name)
    device = torch.device(args.device)
    if net_name == "mlp":
        net = hs.nets.mlp().to(device)
        precision = mlp.PRECISION_NAMES[variant]
        momentum = 0.0
        x = torch.rand(mlp.BATCH_SIZE, 1, 28, 28, device=device)
    else:
        net = hs.nets.resnet50(classes=10).to(device)
        precision = "O2"
        momentum = resnet.MOMENTUM
        x = torch.rand(int(variant), args.side, args.side, 3, device=device).permute(0, 3, 1, 2)
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=1e-3,
        momentum=momentum,
        fused=True if device.type == "cuda" else None,
    )
    y = torch.arange(len(x), device=device) % 10
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision)
    return lambda: step(x, y)


def trace_kernels(
    work: Callable[[], object], device: torch.device, *, record_shapes: bool = False
) -> list[dict[str, Any]]:
    """The kernels of one call, by way of a trace file."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=record_shapes) as profiler:
        work()
        wait_for_device(device)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        profiler.export_chrome_trace(path)
        return roofline.read_kernels(path)


def longest_kernels(
    kernels: list[dict[str, Any]], steps: int, floors_us: dict[str, float]
) -> list[dict[str, Any]]:
    """The kernels that take longest, per step, with their share and their floor."""
    total_us = sum(kernel["us"] for kernel in kernels)
    launches_us: dict[str, list[float]] = {}
    for kernel in kernels:
        launches_us.setdefault(kernel["name"], []).append(kernel["us"])
    names = sorted(launches_us, key=lambda name: -sum(launches_us[name]))[:TOP_KERNELS]

    rows = []
    for name in names:
        kernel_us = sum(launches_us[name])
        launches = len(launches_us[name])
        floor_us = floors_us.get(name)
        rows.append(
            {
                "kernel": name,
                "us_per_step": kernel_us / steps,
                "launches_per_step": launches / steps,
                "share": kernel_us / total_us,
                "floor_us": None if floor_us is None else floor_us * launches / steps,
            }
        )
    return rows


def measure(
    name: str, ceiling: Ceiling, node_us: float | None, args: argparse.Namespace
) -> dict[str, Any]:
    """A row: the step beside its floors, and its longest kernels."""
    device = torch.device(args.device)
    work = build_work(name, args)
    step_ms = statistics.median(work.clock(args.rounds, 1)) / work.steps * 1e3
    kernels = trace_kernels(lambda: work.clock(1, 1), device)
    floor = roofline.step_floor(work.ops, ceiling, work.precision)
    kernels_per_step = len(kernels) / work.steps
    row = {
        "row": name,
        "ms": step_ms,
        **floor,
        "gap": step_ms / floor["floor_ms"],
        "gap_fused": step_ms / floor["floor_fused_ms"],
        "kernels_per_step": kernels_per_step,
        "busy_ms": sum(kernel["us"] for kernel in kernels) / work.steps / 1e3,
        "latency_ms": None if node_us is None else kernels_per_step * node_us / 1e3,
    }

    # The floors of single kernels. The step's own figures stand without these.
    floors_us: dict[str, float] = {}
    try:
        step = build_eager_step(name, args)
        for _ in range(EAGER_WARMUP_STEPS):
            step()
        eager_kernels = trace_kernels(step, device, record_shapes=True)
        floors_us = roofline.kernel_floors(eager_kernels, ceiling, work.precision)
    except Exception as error:
        row["note"] = f"no floors of kernels: {describe_error(error)}"
    return {**row, "top": longest_kernels(kernels, work.steps, floors_us)}


def print_row(row: dict[str, Any]) -> None:
    latency = ""
    if row["latency_ms"] is not None:
        latency = f", {row['latency_ms']:.3f} ms of nodes"
    print(
        f"\n{row['row']}: {row['ms']:.3f} ms a step; floor {row['floor_ms']:.3f} ms, "
        f"{row['gap']:.2f} × (fused {row['floor_fused_ms']:.3f} ms, {row['gap_fused']:.2f} ×)\n"
        f"  {row['gflop']:.2f} GFLOP {row['gb']:.3f} GB; {row['kernels_per_step']:.1f} kernels a "
        f"step, busy {row['busy_ms']:.3f} ms{latency}"
    )
    for kernel in row["top"]:
        floor = "–" if kernel["floor_us"] is None else f"{kernel['floor_us']:.1f}"
        name = kernel["kernel"]
        if len(name) > MAX_NAME_CHARACTERS:
            name = name[: MAX_NAME_CHARACTERS - 1] + "…"
        print(
            f"  {kernel['share']:6.1%} {kernel['us_per_step']:9.1f} µs "
            f"{kernel['launches_per_step']:6.1f} × floor {floor:>8}  {name}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--works",
        nargs="+",
        default=WORKS,
        metavar="WORK",
        help=f"{', '.join(WORKS)}; '{BEST_PREFIX}' before one: compiled",
    )
    parser.add_argument(
        "--small", action="store_true", help="ceilings of tiny sizes: to try the script out"
    )
    parser.add_argument("--samples", type=int, default=mlp.FULL_SAMPLES)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="written after every work")
    args = parser.parse_args()
    args.again = True  # every work is measured, whatever the JSON holds
    args.net = "resnet50"

    table = ResultTable.open(args)
    ceiling, figures = measure_ceilings(torch.device(args.device), args.small)
    texts = [f"{name} {'–' if v is None else f'{v:.3f}'}" for name, v in figures.items()]
    print("  ".join(texts), flush=True)
    table.save(ceilings=figures)
    for name in args.works:
        try:
            row = measure(name, ceiling, figures["node_us"], args)
            print_row(row)
        except Exception as error:
            row = {"row": name, "error": describe_error(error)}
            print(f"\n{name}: {row['error']}", flush=True)
        table.add(row)


if __name__ == "__main__":
    main()
