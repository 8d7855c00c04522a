"""Programs for several ranks, and how tests start them.

`python -m torch.distributed.run … tests/support/rank_jobs.py FOLDER CASE …` runs cases one after
another in one job, because starting processes takes seconds. Each rank writes what came out to
FOLDER/CASE-RANK.pt. `run_case` in the process of a test gives what one process computes.
"""

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240

CASES: dict[str, Callable[[], dict[str, Any]]] = {}


def case(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    CASES[function.__name__] = function
    return function


def run_ranks(
    count: int, *command: object, timeout: float = TIMEOUT_S, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a program by torchrun on `count` processes of this machine."""
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(count), "--max-restarts", str(restarts)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*launcher, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=ROOT,
        check=False,
    )


# What the C++ runtime prints when a thread of gloo takes a process down with it.
GLOO_ABORT = "terminate called without an active exception"
RANK_FAILED = "failed (exitcode:"  # a line of torchrun for a rank that did not end well


def check_restarts(result: subprocess.CompletedProcess[str]) -> bool:
    """Whether ranks were started again; nothing but an abort of gloo may be the reason."""
    has_restarted = RANK_FAILED in result.stderr
    assert not has_restarted or GLOO_ABORT in result.stderr, result.stderr[-4000:]
    return has_restarted


def run_cases(count: int, folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """What each case gives on each of `count` ranks: one dict of cases for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    result = run_ranks(count, __file__, folder, *names, restarts=1)
    assert result.returncode == 0, result.stderr[-4000:]
    check_restarts(result)
    return [
        {name: torch.load(folder / f"{name}-{rank}.pt") for name in names} for rank in range(count)
    ]


def run_case(name: str) -> dict[str, Any]:
    """What a case gives in this process alone."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hs.Notice)  # of batch norm in slices
        return CASES[name]()


# Networks and data.


UNEVEN = (37, 24, 2, 12, 30)  # one batch has fewer rows than there are ranks
LARGE = (37, 24, 50, 26, 30)  # two rows or more in each of 12 slices, as BatchNorm needs


def batches(dtype: torch.dtype, sizes: tuple[int, ...] = UNEVEN) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    result = []
    for i in range(8):
        rows = sizes[i % len(sizes)]
        x = torch.randn(rows, 6, generator=generator, dtype=dtype)
        y = torch.randint(0, 4, (rows,), generator=generator)
        result.append((x, y))
    return result


def mlp(*, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(16, 4),
    )


def outcome(step: Any, records: list[Any]) -> dict[str, Any]:
    """Weights, optimizer state, buffers and records, as tensors; and one fingerprint of it all."""
    net_state = {name: t.detach().clone() for name, t in step.net.state_dict().items()}
    columns = ("loss", "cycle_loss", "lr", "scale", "skipped", "grad_norm", "updated")
    table = torch.stack(
        [torch.stack([getattr(r, c).double() for c in columns]) for r in records if r is not None]
    )
    return {
        "net": net_state,
        "records": table,
        "fingerprint": int(step.state_fingerprint()),
        "skips": int(step.state.skips),
        "updates": int(step.state.updates),
    }


def train(step: Any, data: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    records = [step(x, y) for x, y in data]
    records.append(step.flush())
    return outcome(step, records)


# Ordinary sums, in float64: within rounding of one process.


@case
def masked_cycles() -> dict[str, Any]:
    """Uneven batches, a third of the targets ignored, cycles of three, a tail, clipping, EMA."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.5]).double()),
        optimizer,
        precision="fp64",
        accumulate=3,
        clip_norm=0.5,
        ema=0.9,
    )
    data = batches(torch.float64)
    for _, y in data:
        y[::3] = -100
    return train(step, data)


@case
def summed_loss() -> dict[str, Any]:
    """A loss that is a sum, not a mean."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    loss = nn.CrossEntropyLoss(reduction="sum")
    step = hs.TrainStep(net, loss, optimizer, precision="fp64", accumulate=2)
    return train(step, batches(torch.float64))


class Routed(nn.Module):
    """A layer that only rows with a large first feature reach: one rank has them, another not."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 4)
        self.expert = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.trunk(x)
        chosen = x[:, 0] > 5
        if bool(chosen.any()):
            out = out + chosen[:, None] * self.expert(x)
        return out


@case
def layer_of_one_rank() -> dict[str, Any]:
    net = Routed()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision="fp64")
    data = batches(torch.float64)
    for x, _ in data[::2]:
        x[-1, 0] = 10.0  # in the last lane only
    return train(step, data)


class Mixed(nn.Module):
    """Complex parameters beside an odd count of real ones, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, temperature: Tensor, x: Tensor, texts: list[str]) -> Tensor:
        weights = torch.tensor([float(text) for text in texts], dtype=torch.float64)
        out = (x.to(self.weight.dtype) @ self.weight).abs() * self.scale + self.empty.sum()
        return out * temperature * weights[:, None]


def mixed_case(exact: Any) -> dict[str, Any]:
    """A number comes first in each batch, and a list of texts has one for each sample."""
    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    loss = nn.CrossEntropyLoss(reduction="sum")
    step = hs.TrainStep(net, loss, optimizer, precision="fp64", exact=exact, clip_norm=1.0)
    records = []
    for x, y in batches(torch.float64):
        texts = [str(i % 3) for i in range(len(x))]
        records.append(step(torch.tensor(0.5), x, texts, y))
    return outcome(step, records)


@case
def mixed_parameters() -> dict[str, Any]:
    return mixed_case(None)


# exact="bits".


@case
def exact_mixed() -> dict[str, Any]:
    return mixed_case("bits")


class Counting(nn.Module):
    """Buffers of many dtypes that each forward pass puts anew in place of the old ones."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("low", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("flag", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.low = self.low + x.detach().mean().bfloat16()
            self.flag = ~self.flag
            self.passes = self.passes + 1
        return self.out(x - self.mean)


@case
def exact_buffers() -> dict[str, Any]:
    """Also: a layer is frozen and trained again, and the step goes on as a copy in mid-cycle."""
    net = Counting()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, accumulate=3, exact="bits")
    records = []
    for i, (x, y) in enumerate(batches(torch.float32)):
        step.net.out.bias.requires_grad_(i not in (3, 4, 5))
        if i == 5:
            step = copy.deepcopy(step)
        records.append(step(x, y))
    records.append(step.flush())
    return outcome(step, records)


def exact_case(precision: Any, *, accumulate: int = 1, norm: bool = True) -> dict[str, Any]:
    net = mlp(dropout=0.3, norm=norm)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        precision=precision,
        accumulate=accumulate,
        clip_norm=1.0,
        ema=0.9,
        exact="bits",
    )
    return train(step, batches(torch.float32, LARGE if norm else UNEVEN))


@case
def exact_fp32() -> dict[str, Any]:
    return exact_case("fp32")


@case
def exact_fp32_cycles() -> dict[str, Any]:
    return exact_case("fp32", accumulate=3, norm=False)


@case
def exact_O1() -> dict[str, Any]:
    return exact_case("O1", accumulate=2)


@case
def exact_O2() -> dict[str, Any]:
    return exact_case("O2")


@case
def exact_bf16() -> dict[str, Any]:
    return exact_case("bf16", accumulate=2)


# Overflow on one rank only.


def overflow_case(where: str) -> dict[str, Any]:
    """The state before and after an update whose gradients overflow in one lane only."""
    net = mlp(norm=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), optimizer, precision="O2", accumulate=2, ema=0.9
    )
    generator = torch.Generator().manual_seed(2)
    data = []
    for _ in range(4):
        x = torch.randn(24, 6, generator=generator)
        data.append((x, torch.randint(0, 4, (24,), generator=generator)))
    records = [step(*data[0]), step(*data[1])]
    before = outcome(step, records)
    row = 0 if where == "first" else -1
    data[3][0][row, 0] = float("inf")  # the second micro-batch of the cycle, one row of it
    records = [step(*data[2]), step(*data[3])]
    after = outcome(step, records)
    return {"before": before, "after": after}


@case
def overflow_in_first_lane() -> dict[str, Any]:
    return overflow_case("first")


@case
def overflow_in_last_lane() -> dict[str, Any]:
    return overflow_case("last")


# Losses in parts, metrics, hs.sink, evaluation.


def loss_in_parts(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    entropy = nn.functional.cross_entropy(outputs, labels)
    size = outputs.pow(2).mean()
    return {"loss": entropy + 0.1 * size, "entropy": entropy, "size": size}


@case
def parts_and_metrics() -> dict[str, Any]:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(
        net,
        loss_in_parts,
        optimizer,
        metrics={"acc": hs.metrics.Accuracy()},
        count=lambda batch: len(batch[1]),
        exact="bits",
    )
    data = batches(torch.float32)
    run = model.fit(2, data, valid=data[:3], progress=False)
    return {"history": [dict(entry) for entry in run.history], "scores": model.evaluate(data)}


@case
def sunk() -> dict[str, Any]:
    """The same steps by hs.sink and one by one."""
    fingerprints = []
    for through_sink in (True, False):
        torch.manual_seed(0)
        net = mlp(dropout=0.2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, accumulate=3)
        step.set_lane_seed(5)
        data = batches(torch.float32)
        if through_sink:
            for _ in hs.sink(step, data, every=4):
                pass
        else:
            train(step, data)
        fingerprints.append(int(step.state_fingerprint()))
    return {"fingerprints": fingerprints}


@case
def time_limits() -> dict[str, Any]:
    """The time limit of a run that has ended is nothing to the next run."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer)
    x, y = batches(torch.float32)[0]
    # It is over at the first visit, after 50 steps; the ranks learn of that in the last step.
    model.fit(1, [(x, y)] * 51, max_time=1e-6, progress=False)
    run = model.fit(1, [(x, y)] * 51, max_time=1000.0, progress=False)
    return {"position": run.position}


# What is refused, on all ranks with the same words. RANK is missing in a process alone.


def error_of(function: Callable[[], object]) -> dict[str, Any]:
    try:
        function()
    except (ValueError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def step_of(net: nn.Module, loss: Any = None, **options: Any) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hs.TrainStep(net, loss or nn.CrossEntropyLoss(), optimizer, **options)


@case
def other_network() -> dict[str, Any]:
    width = 4 + int(os.environ["RANK"])
    return error_of(lambda: step_of(nn.Linear(6, width)))


@case
def other_options() -> dict[str, Any]:
    accumulate = 1 + int(os.environ["RANK"])
    return error_of(lambda: step_of(mlp(), accumulate=accumulate))


@case
def other_order() -> dict[str, Any]:
    names = ["a", "b"] if os.environ["RANK"] == "0" else ["b", "a"]
    return error_of(lambda: step_of(nn.ModuleDict({name: nn.Linear(6, 4) for name in names})))


@case
def other_rate() -> dict[str, Any]:
    """Not the rate that the step was built with, but one that was set later."""
    step = step_of(mlp())
    step.optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * int(os.environ["RANK"])
    x = torch.ones(8, 6)
    y = torch.zeros(8, dtype=torch.long)
    step(x, y)
    return error_of(lambda: step(x, y))


@case
def shuffled_otherwise() -> dict[str, Any]:
    """After the first pass, at a step whose batch is not looked at for its number."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer)
    rows = torch.utils.data.TensorDataset(torch.arange(30.0).view(5, 6), torch.zeros(5).long())
    loader = torch.utils.data.DataLoader(rows, 1, shuffle=True)
    model.fit(1, loader, progress=False)
    torch.manual_seed(int(os.environ["RANK"]))
    return error_of(lambda: model.fit(1, loader, progress=False))


def fit_on(train_batches: int, valid_batches: int) -> dict[str, Any]:
    net = mlp()
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    batch = (torch.ones(8, 6), torch.zeros(8, dtype=torch.long))
    valid = [batch] * valid_batches
    return error_of(lambda: model.fit(1, [batch] * train_batches, valid=valid, progress=False))


@case
def longer_data() -> dict[str, Any]:
    return fit_on(3 + int(os.environ["RANK"]), 2)


@case
def longer_valid_data() -> dict[str, Any]:
    return fit_on(3, 2 + int(os.environ["RANK"]))


@case
def other_parts() -> dict[str, Any]:
    def loss(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        entropy = nn.functional.cross_entropy(outputs, labels)
        return {"loss": entropy, f"part_{os.environ['RANK']}": entropy}

    step = step_of(mlp(), loss, count=lambda batch: len(batch[1]))
    return error_of(lambda: step(torch.ones(8, 6), torch.zeros(8, dtype=torch.long)))


@case
def growing_buffer() -> dict[str, Any]:
    class Growing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.register_buffer("cache", torch.zeros(len(x)))
            return super().forward(x)

    step = step_of(Growing(6, 4))
    step.net.register_buffer("cache", torch.zeros(1))
    step.buffers.collect_again()
    return error_of(lambda: step(torch.ones(8, 6), torch.zeros(8, dtype=torch.long)))


@case
def sizes_in_a_tuple() -> dict[str, Any]:
    step = step_of(mlp())
    return error_of(lambda: step(torch.ones(2, 6), (224, 224), torch.zeros(2).long()))


@case
def dicts_in_a_dict() -> dict[str, Any]:
    step = step_of(mlp(), forward=lambda net, b: (net(b["x"]), b["y"]))
    boxes = [{"box": torch.zeros(3, 4)}, {"box": torch.zeros(1, 4)}]
    batch = {"x": torch.ones(2, 6), "y": torch.zeros(2).long(), "targets": boxes}
    return error_of(lambda: step(batch))


@case
def other_batches() -> dict[str, Any]:
    step = step_of(mlp())
    x = torch.full((8, 6), float(os.environ["RANK"]))
    return error_of(lambda: step(x, torch.zeros(8, dtype=torch.long)))


@case
def lists_of_samples() -> dict[str, Any]:
    step = step_of(mlp())
    return error_of(lambda: step([torch.zeros(6), torch.zeros(6)], torch.zeros(2).long()))


@case
def wrapped_network() -> dict[str, Any]:
    step_of(mlp())  # joins the process group
    wrapped = nn.parallel.DistributedDataParallel(mlp())
    return error_of(lambda: step_of(wrapped))


@case
def distributed_sampler() -> dict[str, Any]:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer)
    rows = torch.utils.data.TensorDataset(torch.zeros(8, 6), torch.zeros(8).long())
    sampler: Any = torch.utils.data.DistributedSampler(rows)
    loader = torch.utils.data.DataLoader(rows, 4, sampler=sampler)
    return error_of(lambda: model.fit(1, loader, progress=False))


@case
def unknown_loss() -> dict[str, Any]:
    return error_of(lambda: step_of(mlp(), lambda out, y: (out[:, 0] - y).abs().mean()))


@case
def too_few_slices() -> dict[str, Any]:
    return error_of(lambda: step_of(mlp(), exact="bits", logical=1))


@case
def sparse_gradients() -> dict[str, Any]:
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 4))
    step = step_of(net)
    return error_of(lambda: step(torch.zeros(4, 2).long(), torch.zeros(4).long()))


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    for name in names:
        # Rank 0's seed decides: the others begin from other weights.
        torch.manual_seed(int(rank))
        torch.save(CASES[name](), folder / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
