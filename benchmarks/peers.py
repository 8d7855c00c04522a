"""The loops that halfstep is compared with, each as fast as its own documentation tells how to write it.

All train the same network on the same data, resident on the device, with the same SGD: fused on CUDA, gradients set to
None, no value read back in a step. A peer is a function of the work that gives a clock: (rounds, passes) → seconds of
each round.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Clock = Callable[[int, int], list[float]]
Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One training job. `images` are floats, in float16 for precision "fp16", as a network takes them."""

    build: Callable[[], nn.Module]
    images: Tensor
    labels: Tensor
    batch: int
    steps: int
    """In one pass."""
    precision: str
    """Strict "fp32", "tf32", "fp16" (everything half) or "mixed" (autocast to fp16, dynamic scale)."""
    lr: float
    momentum: float = 0.0
    warm: int = 100
    shuffled: bool = True
    """Batches are gathered by a new permutation each pass; otherwise those that are there take turns as they are."""
    channels_last: bool = False

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def amp(self) -> torch.dtype | None:
        """What autocast computes in: bfloat16 stands in on a CPU, where these loops are only tried out."""
        if self.precision != "mixed":
            return None
        return torch.float16 if self.device.type == "cuda" else torch.bfloat16

    def net(self) -> nn.Module:
        torch.manual_seed(0)
        net = self.build().to(self.device)
        net = net.half() if self.precision == "fp16" else net
        return net.to(memory_format=torch.channels_last) if self.channels_last else net  # type: ignore[call-overload]

    def sgd(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        fused = (
            self.device.type == "cuda"
        )  # on a CPU torch's fused SGD does not move half parameters
        made = torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, fused=fused or None)
        for p in made.param_groups[0]["params"] if self.momentum else ():
            made.state[p]["momentum_buffer"] = torch.zeros_like(
                p
            )  # fused, a skipped first step leaves it unset
        return made

    def feed(self) -> Iterator[tuple[Tensor, ...]]:
        """What changes from step to step, over one pass: sample numbers, or a batch as it lies there."""
        if self.shuffled:
            order = torch.randperm(len(self.labels), device=self.device)
            yield from ((index,) for index in order.split(self.batch)[: self.steps])
        else:
            ready = list(
                zip(self.images.split(self.batch), self.labels.split(self.batch), strict=True)
            )
            yield from (ready[i % len(ready)] for i in range(self.steps))

    def fetch(self, *fed: Tensor) -> tuple[Tensor, Tensor]:
        if self.shuffled:
            return self.images.index_select(0, fed[0]), self.labels.index_select(0, fed[0])
        return fed[0], fed[1]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.fetch(*fed) for fed in self.feed())

    def samples(self) -> list[tuple[Tensor, ...]]:
        """What to warm up with: `warm` steps, and the shorter batch that ends a pass three times."""
        every = list(self.feed())
        full = [fed for fed in every if len(fed[0]) == len(every[0][0])]
        tail = [fed for fed in every if len(fed[0]) != len(every[0][0])]
        return [*islice(full, self.warm), *tail * 3]


def switches(precision: str, *, convolutions: bool) -> None:
    """TF32 only where it is asked for; cuDNN tries its algorithms, as every guide to fast convolutions says."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = convolutions


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clocked(train: Callable[[int], object], device: torch.device) -> Clock:
    """Wall seconds of `train(passes)`, the device waited for on both sides."""

    def seconds(passes: int) -> float:
        wait(device)
        start = time.perf_counter()
        train(passes)
        wait(device)
        return time.perf_counter() - start

    return lambda rounds, passes: [seconds(passes) for _ in range(rounds)]


def stepper(work: Work, net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """torch's documented step; the scale needs no host, because the fused optimizer takes the flag on the device."""
    scaler = torch.amp.GradScaler(work.device.type, enabled=work.amp == torch.float16)
    # no cache of casts: each weight is used once a step, and a captured step must not keep one
    cast = (
        partial(torch.autocast, work.device.type, work.amp, cache_enabled=False)
        if work.amp
        else nullcontext
    )

    def step(x: Tensor, y: Tensor) -> object:
        optimizer.zero_grad(set_to_none=True)
        with cast():
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def looped(work: Work, step: Step) -> Clock:
    """The plain loop around a step, warmed up."""

    def train(passes: int) -> None:
        for _ in range(passes):
            for x, y in work.batches():
                step(x, y)

    for fed in work.samples():
        step(*work.fetch(*fed))
    return clocked(train, work.device)


def eager(work: Work) -> Clock:
    net = work.net()
    return looped(work, stepper(work, net, work.sgd(net.parameters())))


def compiled(work: Work) -> Clock:
    """torch.compile of the network with CUDA graphs, one per shape; the optimizer stays eager."""
    net = work.net()
    fast: Any = torch.compile(net, mode="reduce-overhead", dynamic=False)
    inner = stepper(work, fast, work.sgd(net.parameters()))

    def step(x: Tensor, y: Tensor) -> object:
        torch.compiler.cudagraph_mark_step_begin()  # the gradients of the step before are no longer needed
        return inner(x, y)

    return looped(work, step)


def graphed(work: Work) -> Clock:
    """The whole step captured by hand, gather and optimizer included: one copy and one launch a step."""
    if work.device.type != "cuda":
        raise ValueError(f"CUDA graphs: expected a CUDA device, got {work.device}")
    net = work.net()
    step = stepper(work, net, work.sgd(net.parameters()))
    first = work.samples()
    sizes = {
        len(fed[0]): fed for fed in (first[0], first[-1])
    }  # whole batches, and the one that ends a pass
    # the step too, and with it network and optimizer: a graph does not keep what it reads and writes
    kept = {size: (*_capture(work, net, step, fed), step) for size, fed in sizes.items()}

    def train(passes: int) -> None:
        for _ in range(passes):
            for fed in work.feed():
                graph, static, _ = kept[len(fed[0])]
                for to, part in zip(static, fed, strict=True):
                    to.copy_(part)
                graph.replay()

    train(1)
    return clocked(train, work.device)


def _capture(
    work: Work, net: nn.Module, step: Step, fed: tuple[Tensor, ...]
) -> tuple[Any, tuple[Tensor, ...]]:
    """A graph of the step over inputs of its own, captured on the stream that warmed it up, as torch asks for."""
    static = tuple(part.clone() for part in fed)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*work.fetch(*static))
    torch.cuda.current_stream().wait_stream(side)
    net.zero_grad(set_to_none=True)  # so that the graph makes its own, as torch's guide says
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step(*work.fetch(*static))
    return graph, static


def accelerate(work: Work) -> Clock:
    """Its documented loop; the data is on the device, so there is no loader to prepare."""
    from accelerate import Accelerator

    if work.precision == "fp16":
        raise ValueError("Accelerate has no training in pure float16")
    mode = "no" if work.amp is None else "fp16" if work.amp == torch.float16 else "bf16"
    accelerator = Accelerator(mixed_precision=mode, cpu=work.device.type == "cpu")
    bare = work.net()
    net, optimizer = accelerator.prepare(bare, work.sgd(bare.parameters()))

    def step(x: Tensor, y: Tensor) -> object:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        return loss

    return looped(work, step)


def lightning(work: Work) -> Clock:
    """A Trainer with everything optional turned off; passes are timed by its own hooks, its set-up left out."""
    from lightning_peer import fit

    def clock(rounds: int, passes: int) -> list[float]:
        if passes != 1:
            raise ValueError(f"Lightning is timed pass by pass, got {passes} passes a round")
        return fit(work, rounds)

    return clock


PEERS: dict[str, Callable[[Work], Clock]] = {
    "torch eager": eager, "torch.compile": compiled, "CUDA graph by hand": graphed, "Accelerate": accelerate,
    "Lightning": lightning,
}  # fmt: skip


def prepare(way: str) -> None:
    """Import what a peer needs, before its row is measured; a missing one is told by the row."""
    module = {
        "Accelerate": "accelerate",
        "Lightning": "lightning_peer",
        "torch.compile": "torch._inductor",
    }.get(way)
    if module:
        try:
            __import__(module)
        except ImportError:
            return
