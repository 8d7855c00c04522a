"""Several ranks on this machine: halfstep against torch's DistributedDataParallel, in one run.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/ranks.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/ranks.py --json FILE

Both train the same network on the same global batches; segments of steps of the one and of the
other follow each other, and what is reported is the ratio of their medians. Started without
torchrun it compares one process with a bare loop: what halfstep costs without ranks.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs

SEGMENTS = 9
WARMUP_STEPS = 10


class Transformer(nn.Module):
    """Two layers over 32 tokens of 128 numbers: a small classifier of sequences."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(1000, 128)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.embed(tokens))
        scores: Tensor = self.head(hidden.mean(1))
        return scores


def mlp() -> nn.Module:
    return hs.nets.mlp()


def mlp_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(64, 784), torch.randint(0, 10, (64,))


def transformer_batch() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 1000, (32, 32)), torch.randint(0, 10, (32,))


WORKS: dict[str, tuple[Any, Any, int]] = {
    "mlp": (mlp, mlp_batch, 60),
    "transformer": (Transformer, transformer_batch, 20),
}


def torch_loop(build: Any, batch: tuple[Tensor, Tensor], rank: int, count: int) -> Any:
    """A step of plain torch on this rank's rows of the batch."""
    torch.manual_seed(0)
    net = build()
    model = DistributedDataParallel(net) if count > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()
    x, y = (t.tensor_split(count)[rank].clone() for t in batch)

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()

    return step


def halfstep_loop(build: Any, batch: tuple[Tensor, Tensor], exact: Any) -> Any:
    torch.manual_seed(0)
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, exact=exact)
    return lambda: step(*batch)


def measure(loops: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """Milliseconds a step of each loop, segment by segment in turns."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        for _ in range(WARMUP_STEPS):
            loop()
    for _ in range(SEGMENTS):
        for name, loop in loops.items():
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                loop()
            times[name].append((time.perf_counter() - start) / steps * 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if count > 1:
        dist.init_process_group("gloo")
    rows = []
    for name, (build, make_batch, steps) in WORKS.items():
        torch.manual_seed(1)
        batch = make_batch()
        loops = {
            "torch": torch_loop(build, batch, rank, count),
            "halfstep": halfstep_loop(build, batch, None),
            "halfstep, exact='bits'": halfstep_loop(build, batch, "bits"),
        }
        times = measure(loops, steps)
        base = times["torch"]
        for loop, segments in times.items():
            ratios = [a / b for a, b in zip(segments, base, strict=True)]
            rows.append(
                {
                    "work": name,
                    "ranks": count,
                    "loop": loop,
                    "ms_per_step": statistics.median(segments),
                    "ratio_to_torch": statistics.median(ratios),
                    "ratio_spread": [min(ratios), max(ratios)],
                    "segments": SEGMENTS,
                    "steps_per_segment": steps,
                }
            )
    if rank == 0:
        for row in rows:
            print(
                f"{row['work']:12} {row['ranks']} ranks  {row['loop']:24} "
                f"{row['ms_per_step']:8.2f} ms  {row['ratio_to_torch']:.2f} x"
            )
        if arguments.json:
            chip = platform.processor() or platform.machine()
            conditions = {
                "device": f"CPU, {os.cpu_count()} cores, {chip}",
                "torch": torch.__version__,
                "threads_per_rank": 1,
                "backend": "gloo",
            }
            results = {"conditions": conditions, "rows": rows}
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
