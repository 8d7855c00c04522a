"""What a TrainStep costs over the bare PyTorch loop that does the same work: the seed MLP, batch 64, in one run.

python benchmarks/overhead.py [--device cuda] [--rounds 30] [--json benchmarks/results/overhead-cpu.json]
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from measure import conditions, interleave, ratios, write
from torch import Tensor, nn

import halfstep as hs

PRECISIONS = ("fp32", "O1", "O2", "fp16")


def mlp(device: torch.device) -> nn.Module:
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


def optimizer(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-3, fused=kind == "fused" or None)


def bare(x: Tensor, y: Tensor, kind: str) -> Callable[[], object]:
    """The loop everybody writes, in fp32."""
    net, loss_fn = mlp(x.device), nn.CrossEntropyLoss()
    opt = optimizer(net, kind)

    def step() -> object:
        opt.zero_grad()
        loss = loss_fn(net(x), y)
        loss.backward()
        opt.step()
        return loss

    return step


def bare_amp(x: Tensor, y: Tensor, kind: str) -> Callable[[], object]:
    """torch's documented mixed-precision loop, in float16."""
    net, loss_fn, scaler = mlp(x.device), nn.CrossEntropyLoss(), torch.amp.GradScaler(x.device.type)
    opt = optimizer(net, kind)

    def step() -> object:
        opt.zero_grad()
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = loss_fn(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss

    return step


def halfstep(x: Tensor, y: Tensor, kind: str, precision: str) -> Callable[[], object]:
    net = mlp(x.device)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer(net, kind), precision=precision)
    return lambda: step(x, y)


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
    x, y = torch.randn(64, 1, 28, 28, device=device), torch.randint(0, 10, (64,), device=device)
    result = {
        "conditions": conditions(device),
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "rows": [],
    }
    print(f"{'optimizer':10} {'way':16} {'ms/step':>9} {'against':>10} {'ratio':>7}  quartiles")
    for kind in args.optimizers.split(","):
        ways = {"bare": bare(x, y, kind)}
        if (
            device.type == "cuda"
        ):  # on a CPU torch's half products take 15 × as long: nothing to compare with
            ways["bare-amp"] = bare_amp(x, y, kind)
        refused = (
            device.type == "cpu" and kind == "fused"
        )  # torch's fused SGD does not move half parameters on a CPU
        ways |= {p: halfstep(x, y, kind, p) for p in PRECISIONS if not (refused and p == "fp16")}
        times = interleave(ways, rounds=args.rounds, steps=args.steps, device=device)
        for name, each in times.items():
            base = (
                "bare-amp"
                if name == "O1" and "bare-amp" in ways
                else "fp32"
                if name in ("O1", "O2", "fp16")
                else "bare"
            )
            middle, low, high = ratios(times, name, base)
            ms = statistics.median(each)
            print(f"{kind:10} {name:16} {ms:9.3f} {base:>10} {middle:7.3f}  {low:.3f}–{high:.3f}")
            row = {
                "optimizer": f"SGD {kind}",
                "way": name,
                "ms": ms,
                "against": base,
                "ratio": middle,
                "quartiles": [low, high],
            }
            result["rows"].append(row)
    write(args.json, result)


if __name__ == "__main__":
    main()
