"""The loops that halfstep is compared with, each as fast as its own documentation says.

All train the same network on the same data, resident on the device, with the same SGD: fused on
CUDA, gradients set to None, no value read back in a step. A peer is a function of the training job
that returns a clock: (rounds, passes) → seconds of each round.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measure import wait_for_device
from torch import Tensor, nn

Clock = Callable[[int, int], list[float]]
Step = Callable[[Tensor, Tensor], object]
StepInput = tuple[Tensor, ...]

CAPTURE_WARMUP_STEPS = 3  # as torch's guide to CUDA graphs says
TAIL_WARMUP_STEPS = 3  # for the shorter batch that ends a pass


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training job. Images are floats as the network takes them; float16 for "fp16"."""

    build: Callable[[], nn.Module]
    images: Tensor
    labels: Tensor
    batch_size: int
    steps: int  # in one pass
    precision: str  # strict "fp32", "tf32", "fp16" (all half), "mixed" (autocast, dynamic scale)
    lr: float
    momentum: float = 0.0
    warmup_steps: int = 100
    # Shuffled batches are gathered by a new permutation each pass; others take turns as they are.
    shuffled: bool = True
    channels_last: bool = False

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """None without autocast. On a CPU, where loops are only tried out, it is bfloat16."""
        if self.precision != "mixed":
            return None
        return torch.float16 if self.device.type == "cuda" else torch.bfloat16

    def build_net(self) -> nn.Module:
        torch.manual_seed(0)
        net = self.build().to(self.device)
        if self.precision == "fp16":
            net = net.half()
        if self.channels_last:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net

    def build_optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        # On a CPU torch's fused SGD does not move half parameters.
        fused = True if self.device.type == "cuda" else None
        optimizer = torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, fused=fused)
        # Where the first step is skipped, the fused kernel would leave these unset.
        if self.momentum:
            for p in optimizer.param_groups[0]["params"]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return optimizer

    def step_inputs(self) -> Iterator[StepInput]:
        """What changes from step to step, over one pass: sample indices, or a batch as it lies."""
        if self.shuffled:
            order = torch.randperm(len(self.labels), device=self.device)
            for indices in order.split(self.batch_size)[: self.steps]:
                yield (indices,)
        else:
            image_batches = self.images.split(self.batch_size)
            label_batches = self.labels.split(self.batch_size)
            batches = list(zip(image_batches, label_batches, strict=True))
            for i in range(self.steps):
                yield batches[i % len(batches)]

    def fetch(self, *step_input: Tensor) -> tuple[Tensor, Tensor]:
        """The batch that a step input stands for."""
        if self.shuffled:
            (indices,) = step_input
            return self.images.index_select(0, indices), self.labels.index_select(0, indices)
        images, labels = step_input
        return images, labels

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.fetch(*step_input) for step_input in self.step_inputs())

    def warmup_inputs(self) -> list[StepInput]:
        """`warmup_steps` full batches, and the shorter batch that ends a pass three times."""
        step_inputs = list(self.step_inputs())
        full_size = len(step_inputs[0][0])
        full = [step_input for step_input in step_inputs if len(step_input[0]) == full_size]
        tail = [step_input for step_input in step_inputs if len(step_input[0]) != full_size]
        return [*islice(full, self.warmup_steps), *tail * TAIL_WARMUP_STEPS]


def set_torch_flags(precision: str, *, convolutions: bool) -> None:
    """TF32 only where it is asked for. With convolutions, cuDNN tries its algorithms."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = convolutions


def clock_of(train: Callable[[int], object], device: torch.device) -> Clock:
    """Wall seconds of `train(passes)`, the device waited for on both sides."""

    def time_once(passes: int) -> float:
        wait_for_device(device)
        start = time.perf_counter()
        train(passes)
        wait_for_device(device)
        return time.perf_counter() - start

    return lambda rounds, passes: [time_once(passes) for _ in range(rounds)]


def build_step(job: TrainingJob, net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """torch's documented step.

    The scale needs no host, because the fused optimizer takes the overflow flag on the device.
    """
    autocast_dtype = job.autocast_dtype
    scaler = torch.amp.GradScaler(job.device.type, enabled=autocast_dtype == torch.float16)

    # No cache of casts: each weight is used once a step, and a captured step must not keep one.
    def autocast() -> AbstractContextManager[Any]:
        if autocast_dtype is None:
            return nullcontext()
        return torch.autocast(job.device.type, autocast_dtype, cache_enabled=False)

    def step(x: Tensor, y: Tensor) -> object:
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def plain_loop(job: TrainingJob, step: Step) -> Clock:
    """The plain loop around a step, warmed up."""

    def train(passes: int) -> None:
        for _ in range(passes):
            for x, y in job.batches():
                step(x, y)

    for step_input in job.warmup_inputs():
        step(*job.fetch(*step_input))
    return clock_of(train, job.device)


def torch_eager(job: TrainingJob) -> Clock:
    net = job.build_net()
    return plain_loop(job, build_step(job, net, job.build_optimizer(net.parameters())))


def torch_compile(job: TrainingJob) -> Clock:
    """torch.compile of the network with CUDA graphs, one per shape; the optimizer stays eager."""
    net = job.build_net()
    compiled_net: Any = torch.compile(net, mode="reduce-overhead", dynamic=False)
    uncounted_step = build_step(job, compiled_net, job.build_optimizer(net.parameters()))

    def step(x: Tensor, y: Tensor) -> object:
        # The gradients of the step before are no longer needed.
        torch.compiler.cudagraph_mark_step_begin()
        return uncounted_step(x, y)

    return plain_loop(job, step)


class CapturedStep(NamedTuple):
    graph: Any
    inputs: StepInput  # the memory that the graph reads
    step: Step  # keeps network and optimizer alive: a graph does not keep what it reads and writes


def cuda_graph_by_hand(job: TrainingJob) -> Clock:
    """The whole step captured by hand, with gather and optimizer: a copy and a launch a step."""
    if job.device.type != "cuda":
        raise ValueError(f"CUDA graphs: expected a CUDA device, got {job.device}")
    net = job.build_net()
    step = build_step(job, net, job.build_optimizer(net.parameters()))

    # One graph for whole batches, one for the shorter batch that ends a pass.
    warmup_inputs = job.warmup_inputs()
    examples = {len(example[0]): example for example in (warmup_inputs[0], warmup_inputs[-1])}
    captured = {size: _capture(job, net, step, example) for size, example in examples.items()}

    def train(passes: int) -> None:
        for _ in range(passes):
            for step_input in job.step_inputs():
                captured_step = captured[len(step_input[0])]
                for target, source in zip(captured_step.inputs, step_input, strict=True):
                    target.copy_(source)
                captured_step.graph.replay()

    train(1)
    return clock_of(train, job.device)


def _capture(job: TrainingJob, net: nn.Module, step: Step, example: StepInput) -> CapturedStep:
    """A graph of the step over inputs of its own, captured on the stream that warmed it up."""
    static_inputs = tuple(tensor.clone() for tensor in example)
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(CAPTURE_WARMUP_STEPS):
            step(*job.fetch(*static_inputs))
    torch.cuda.current_stream().wait_stream(side_stream)
    net.zero_grad(set_to_none=True)  # so that the graph makes its own, as torch's guide says
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side_stream):
        step(*job.fetch(*static_inputs))
    return CapturedStep(graph, static_inputs, step)


def accelerate(job: TrainingJob) -> Clock:
    """Its documented loop; the data is on the device, so there is no loader to prepare."""
    from accelerate import Accelerator

    if job.precision == "fp16":
        raise ValueError("Accelerate has no training in pure float16")
    modes = {None: "no", torch.float16: "fp16", torch.bfloat16: "bf16"}
    accelerator = Accelerator(
        mixed_precision=modes[job.autocast_dtype], cpu=job.device.type == "cpu"
    )
    bare_net = job.build_net()
    net, optimizer = accelerator.prepare(bare_net, job.build_optimizer(bare_net.parameters()))

    def step(x: Tensor, y: Tensor) -> object:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        return loss

    return plain_loop(job, step)


def lightning(job: TrainingJob) -> Clock:
    """A Trainer with everything optional turned off, timed by its hooks, without its set-up."""
    from lightning_peer import time_epochs

    def clock(rounds: int, passes: int) -> list[float]:
        if passes != 1:
            raise ValueError(f"Lightning is timed pass by pass, got {passes} passes a round")
        return time_epochs(job, rounds)

    return clock


PEERS: dict[str, Callable[[TrainingJob], Clock]] = {
    "torch eager": torch_eager,
    "torch.compile": torch_compile,
    "CUDA graph by hand": cuda_graph_by_hand,
    "Accelerate": accelerate,
    "Lightning": lightning,
}

# The modules that a peer needs, to be imported before its row is measured.
PEER_MODULES = {
    "Accelerate": "accelerate",
    "Lightning": "lightning_peer",
    "torch.compile": "torch._inductor",
}


def import_peer(name: str) -> None:
    """Imports what a peer needs. Where it is not installed, its row will say so."""
    module = PEER_MODULES.get(name)
    if module is None:
        return
    try:
        __import__(module)
    except ImportError:
        return
