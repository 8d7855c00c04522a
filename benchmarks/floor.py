"""How far a step is from this machine's limits: ceilings measured, floors counted, halfstep's step and its kernels.

    python benchmarks/floor.py [--json FILE] [--works "mlp fp32" "resnet 32" "best resnet 32" …]

The ceilings: a copy on the device, matrix products in fp16, TF32 and strict fp32, a node of a CUDA graph (1,000 tiny
kernels that wait for each other) and the gap between two graphs. The floors: every operation as a kernel of its own at
the ceiling of its bytes or its arithmetic, and the same with norms, activations and additions fused. A kernel's own
floor is that of the operation that launches it in an eager step, where shapes tell it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlp
import peers
import resnet
import roofline
import torch
from roofline import Ceiling
from rows import Table, first_line
from torch import nn
from torch.profiler import ProfilerActivity, profile

import halfstep as hs

WORKS = ["mlp fp32", "mlp fp16", "mlp mixed", "resnet 32", "resnet 256"]
BEST = "best "  # before a work: compiled, and polished at once
TOP = 15
# bytes that an update moves per parameter: gradient read, master and momentum read and written, low copy written
KEPT = {"fp32": 12, "fp16": 6, "mixed": 12, "O2": 4 + 8 + 8 + 2}


def clock(
    work: Callable[[], object], device: torch.device, *, repeat: int = 10, rounds: int = 5
) -> float:
    """Seconds of a call: the median of `rounds` rounds, warmed up."""
    work()
    times = []
    for _ in range(rounds):
        peers.wait(device)
        start = time.perf_counter()
        for _ in range(repeat):
            work()
        peers.wait(device)
        times.append((time.perf_counter() - start) / repeat)
    return statistics.median(times)


def copy(count: int, device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / clock(lambda: target.copy_(source), device)


def product(n: int, dtype: torch.dtype, precision: str, device: torch.device) -> float:
    """FLOP/s of an n × n × n product of normal numbers."""
    peers.switches(precision, convolutions=False)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / clock(lambda: torch.mm(a, b, out=out), device, repeat=5)


def nodes(device: torch.device) -> dict[str, float | None]:
    """Microseconds of a node in a chain of 1,000, and of one graph of a single node after the other."""
    if device.type != "cuda":
        return {"node_us": None, "launch_us": None}
    x = torch.zeros(1, device=device)
    chain, single = _captured(x, 1000), _captured(x, 1)
    return {
        "node_us": clock(chain.replay, device) / 1000 * 1e6,
        "launch_us": clock(single.replay, device, repeat=500) * 1e6,
    }


def _captured(x: torch.Tensor, count: int) -> torch.cuda.CUDAGraph:
    x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            x.add_(1)
    return graph


def ceilings(device: torch.device, small: bool) -> tuple[Ceiling, dict[str, Any]]:
    copied, n = copy(2**20 if small else 2**32, device), 64 if small else 8192
    rates = {
        "fp16": product(n, torch.float16, "fp32", device), "tf32": product(n, torch.float32, "tf32", device),
        "fp32": product(n, torch.float32, "fp32", device),
    }  # fmt: skip
    peers.switches("fp32", convolutions=False)
    shown = {
        "copy_tb_s": copied / 1e12,
        **{f"{k}_tflop_s": rate / 1e12 for k, rate in rates.items()},
        **nodes(device),
    }
    return Ceiling(copied, rates), shown


def job(work: str, args: argparse.Namespace) -> tuple[peers.Clock, int, list[roofline.Op], str]:
    """What runs a pass, its steps, what a step must do at least, and the ceiling of its arithmetic."""
    best, (name, _, which) = work.startswith(BEST), work.removeprefix(BEST).partition(" ")
    device = torch.device(args.device)
    if name == "mlp":
        data = mlp.pipeline(mlp.load(args.samples), which, device, raw=False)
        size, shape = (4 if which == "fp32" else 2), (mlp.BATCH, 1, 28, 28)
        ops = roofline.ops_of(hs.nets.mlp(), shape, size, KEPT[which])
        way = "halfstep best" if best else "halfstep fused"
        return (
            mlp.ours(way, which, data, device),
            data.size,
            ops,
            "fp32" if which == "fp32" else "fp16",
        )
    ops = roofline.ops_of(
        hs.nets.resnet50(classes=10), (int(which), 3, args.side, args.side), 2, KEPT["O2"]
    )
    return (
        resnet.ours("halfstep O2 compiled" if best else "halfstep O2", int(which), args),
        args.steps,
        ops,
        "fp16",
    )


def eager_step(work: str, args: argparse.Namespace) -> Callable[[], object]:
    """One step of the same work, not captured, so that each kernel can be traced to its operation."""
    name, _, which = work.removeprefix(BEST).partition(" ")
    device, net = torch.device(args.device), nn.Module()
    if name == "mlp":
        net, precision, count = hs.nets.mlp().to(device), mlp.NAMES[which], mlp.BATCH
        x = torch.rand(count, 1, 28, 28, device=device)
    else:
        net, precision, count = hs.nets.resnet50(classes=10).to(device), "O2", int(which)
        x = torch.rand(count, args.side, args.side, 3, device=device).permute(0, 3, 1, 2)
    momentum = 0.0 if name == "mlp" else resnet.MOMENTUM
    optimizer = torch.optim.SGD(
        net.parameters(), lr=1e-3, momentum=momentum, fused=device.type == "cuda" or None
    )
    y = torch.arange(count, device=device) % 10
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision)
    return lambda: step(x, y)


def traced(
    work: Callable[[], object], device: torch.device, *, shapes: bool = False
) -> list[dict[str, Any]]:
    """The kernels of one call, by way of a trace file."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, record_shapes=shapes) as seen:
        work()
        peers.wait(device)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        seen.export_chrome_trace(path)
        return roofline.kernels_of(path)


def top(kernels: list[dict[str, Any]], steps: int, least: dict[str, float]) -> list[dict[str, Any]]:
    """The kernels that take longest, per step, with their share and their floor."""
    total = sum(kernel["us"] for kernel in kernels)
    each: dict[str, list[float]] = {}
    for kernel in kernels:
        each.setdefault(kernel["name"], []).append(kernel["us"])
    longest = sorted(each.items(), key=lambda item: -sum(item[1]))[:TOP]
    return [
        {
            "kernel": name, "us_per_step": sum(us) / steps, "launches_per_step": len(us) / steps,
            "share": sum(us) / total, "floor_us": least[name] * len(us) / steps if name in least else None,
        }
        for name, us in longest
    ]  # fmt: skip


def measure(
    work: str, ceiling: Ceiling, latency: float | None, args: argparse.Namespace
) -> dict[str, Any]:
    device = torch.device(args.device)
    run, steps, ops, kind = job(work, args)
    ms = statistics.median(run(args.rounds, 1)) / steps * 1e3
    kernels = traced(lambda: run(1, 1), device)
    least = roofline.floor(ops, ceiling, kind)
    count = len(kernels) / steps
    row = {
        "row": work,
        "ms": ms,
        **least,
        "gap": ms / least["floor_ms"],
        "gap_fused": ms / least["floor_fused_ms"],
    }
    row |= {
        "kernels_per_step": count,
        "busy_ms": sum(kernel["us"] for kernel in kernels) / steps / 1e3,
    }
    row["latency_ms"] = None if latency is None else count * latency / 1e3
    try:
        step = eager_step(work, args)
        for _ in range(3):
            step()
        floors = roofline.floors_of(traced(step, device, shapes=True), ceiling, kind)
    except Exception as error:  # the step's own figures stand without these
        floors, row["note"] = (
            {},
            f"no floors of kernels: {type(error).__name__}: {first_line(error)}",
        )
    return {**row, "top": top(kernels, steps, floors)}


def show(row: dict[str, Any]) -> None:
    latency = "" if row["latency_ms"] is None else f", {row['latency_ms']:.3f} ms of nodes"
    print(
        f"\n{row['row']}: {row['ms']:.3f} ms a step; floor {row['floor_ms']:.3f} ms, {row['gap']:.2f} × (fused "
        f"{row['floor_fused_ms']:.3f} ms, {row['gap_fused']:.2f} ×)\n  {row['gflop']:.2f} GFLOP {row['gb']:.3f} GB; "
        f"{row['kernels_per_step']:.1f} kernels a step, busy {row['busy_ms']:.3f} ms{latency}"
    )
    for k in row["top"]:
        floor = "–" if k["floor_us"] is None else f"{k['floor_us']:.1f}"
        name = k["kernel"] if len(k["kernel"]) <= 80 else k["kernel"][:79] + "…"
        print(
            f"  {k['share']:6.1%} {k['us_per_step']:9.1f} µs {k['launches_per_step']:6.1f} × floor {floor:>8}  {name}"
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
        help=f"{', '.join(WORKS)}; '{BEST}' before one: compiled",
    )
    parser.add_argument(
        "--small", action="store_true", help="ceilings of tiny sizes: to try the script out"
    )
    parser.add_argument("--samples", type=int, default=mlp.FULL)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="written after every work")
    args = parser.parse_args()
    args.again, args.net = True, "resnet50"
    table = Table.open(args)
    ceiling, shown = ceilings(torch.device(args.device), args.small)
    print(
        "  ".join(
            f"{name} {'–' if value is None else f'{value:.3f}'}" for name, value in shown.items()
        ),
        flush=True,
    )
    table.save(ceilings=shown)
    for work in args.works:
        try:
            row = measure(work, ceiling, shown["node_us"], args)
            show(row)
        except Exception as error:
            row = {"row": work, "error": f"{type(error).__name__}: {first_line(error)}"}
            print(f"\n{work}: {row['error']}", flush=True)
        table.add(row)


if __name__ == "__main__":
    main()
