"""What a TrainStep costs over the bare PyTorch loop of the same work: the benchmark MLP, batch 64.

python benchmarks/overhead.py [--device cuda] [--rounds 30]
                              [--json benchmarks/results/overhead-cpu.json]
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from measure import compare_rounds, conditions, time_in_turns, write_result
from torch import Tensor, nn

import halfstep as hs

PRECISIONS = ("fp32", "O1", "O2", "fp16")
BATCH_SIZE = 64

Step = Callable[[], object]


def build_mlp(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Flatten(),
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    ]
    return nn.Sequential(*layers).to(device)


def build_optimizer(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-3, fused=kind == "fused" or None)


def bare_step(x: Tensor, y: Tensor, kind: str) -> Step:
    """The loop everybody writes, in fp32."""
    net = build_mlp(x.device)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = build_optimizer(net, kind)

    def step() -> object:
        optimizer.zero_grad()
        loss = loss_fn(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def bare_amp_step(x: Tensor, y: Tensor, kind: str) -> Step:
    """torch's documented mixed-precision loop, in float16."""
    net = build_mlp(x.device)
    loss_fn = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler(x.device.type)
    optimizer = build_optimizer(net, kind)

    def step() -> object:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = loss_fn(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def halfstep_step(x: Tensor, y: Tensor, kind: str, precision: str) -> Step:
    net = build_mlp(x.device)
    optimizer = build_optimizer(net, kind)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision)
    return lambda: step(x, y)


def build_ways(x: Tensor, y: Tensor, kind: str) -> dict[str, Step]:
    """All steps that can be compared on this device with this kind of optimizer."""
    on_cpu = x.device.type == "cpu"
    ways = {"bare": bare_step(x, y, kind)}
    # On a CPU torch's half products take 15 × as long: nothing to compare with.
    if x.device.type == "cuda":
        ways["bare-amp"] = bare_amp_step(x, y, kind)
    for precision in PRECISIONS:
        # torch's fused SGD does not move half parameters on a CPU.
        if precision == "fp16" and on_cpu and kind == "fused":
            continue
        ways[precision] = halfstep_step(x, y, kind, precision)
    return ways


def base_of(name: str, ways: dict[str, Step]) -> str:
    """The way that another is compared with."""
    if name == "O1" and "bare-amp" in ways:
        return "bare-amp"
    if name in ("O1", "O2", "fp16"):
        return "fp32"
    return "bare"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40, help="steps per round and way")
    parser.add_argument(
        "--optimizers", default="foreach,fused", help="SGD implementations to compare"
    )
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    device = torch.device(args.device)
    x = torch.randn(BATCH_SIZE, 1, 28, 28, device=device)
    y = torch.randint(0, 10, (BATCH_SIZE,), device=device)

    rows = []
    result = {
        "conditions": conditions(device),
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "rows": rows,
    }
    print(f"{'optimizer':10} {'way':16} {'ms/step':>9} {'against':>10} {'ratio':>7}  quartiles")
    for kind in args.optimizers.split(","):
        ways = build_ways(x, y, kind)
        times_ms = time_in_turns(ways, rounds=args.rounds, steps=args.steps, device=device)
        for name in ways:
            step_ms = statistics.median(times_ms[name])
            base = base_of(name, ways)
            ratio = compare_rounds(times_ms, name, base)
            print(
                f"{kind:10} {name:16} {step_ms:9.3f} {base:>10} {ratio.median:7.3f}  "
                f"{ratio.low:.3f}–{ratio.high:.3f}"
            )
            rows.append(
                {
                    "optimizer": f"SGD {kind}",
                    "way": name,
                    "ms": step_ms,
                    "against": base,
                    "ratio": ratio.median,
                    "quartiles": [ratio.low, ratio.high],
                }
            )
    write_result(args.json, result)


if __name__ == "__main__":
    main()
