"""Networks, batches, precisions and optimizers of the parity tests, and the comparison itself."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

import halfstep as hs
from tests.support.torch_loops import (
    BF16,
    F16,
    F32,
    F64,
    CastSpec,
    LoopRecord,
    MakeOptimizer,
    TorchLoop,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Batches = list[tuple[Tensor, Tensor]]
PrecisionCase = tuple[hs.Precision, CastSpec]

PRECISIONS: dict[str, PrecisionCase] = {
    "fp32": (hs.Precision("fp32"), CastSpec("none", F32)),
    "fp64": (hs.Precision("fp64"), CastSpec("params", F64)),
    "O1": (hs.Precision("O1", kernels="torch"), CastSpec("autocast", F16, scaled=True)),
    "O2": (hs.Precision("O2", kernels="torch"), CastSpec("copies", F16, scaled=True)),
    "O3": (hs.Precision("O3", kernels="torch"), CastSpec("copies", F16, low_norms=True)),
    "O1-bf16": (hs.Precision("O1", dtype="bfloat16", kernels="torch"), CastSpec("autocast", BF16)),
    "O2-bf16": (hs.Precision("O2", dtype="bfloat16", kernels="torch"), CastSpec("copies", BF16)),
    "O3-bf16": (
        hs.Precision("O3", dtype="bfloat16", kernels="torch"),
        CastSpec("copies", BF16, low_norms=True),
    ),
    "fp16": (hs.Precision("fp16", kernels="torch"), CastSpec("params", F16)),
    "bf16": (hs.Precision("bf16", kernels="torch"), CastSpec("params", BF16)),
}
# Loss scales that the table of precisions does not choose.
SCALED: dict[str, PrecisionCase] = {
    "fp16-scaled": (
        hs.Precision("fp16", kernels="torch", scale="dynamic"),
        CastSpec("params", F16, scaled=True),
    ),
    "O3-scaled": (
        hs.Precision("O3", kernels="torch", scale="dynamic"),
        CastSpec("copies", F16, scaled=True, low_norms=True),
    ),
}
ROUNDED: dict[str, PrecisionCase] = {
    f"{name}-{rounding}": (
        hs.Precision(name, kernels="torch", rounding=rounding),
        CastSpec("params", dtype, rounding=rounding),
    )
    for name, dtype in (("fp16", F16), ("bf16", BF16))
    for rounding in ("kahan", "stochastic")
}

# eps at least 1e-4: in float16 a smaller one is 0, and 0/0 where a gradient is 0.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 0.5, "eps": 1e-4, "weight_decay": 0.01},
    "Adafactor": {"lr": 0.05, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.05, "eps": 1e-4, "lr_decay": 0.01, "initial_accumulator_value": 0.125},
    "Adam": {"lr": 0.02, "eps": 1e-4},
    "AdamW": {"lr": 0.02, "eps": 1e-4, "weight_decay": 0.05},
    "Adamax": {"lr": 0.02, "eps": 1e-4},
    "ASGD": {"lr": 0.1, "t0": 2.0, "lambd": 0.01},
    "Muon": {"lr": 0.02, "eps": 1e-4},
    "NAdam": {"lr": 0.02, "eps": 1e-4},
    "RAdam": {"lr": 0.02, "eps": 1e-4},
    "RMSprop": {"lr": 0.01, "eps": 1e-4, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.02},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "SparseAdam": {"lr": 0.05, "eps": 1e-4},
}


class EmbeddingSum(nn.Module):
    """Sums of embeddings with sparse gradients; ids repeat within a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).sum(1)


def mlp(*, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=bias), nn.ReLU(), nn.Linear(8, 4, bias=bias))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)
    )


def net_for(name: str) -> nn.Module:
    """Returns the smallest network that this optimizer accepts, or the one called "conv".

    It is on the device and always has the same weights.
    """
    torch.manual_seed(1)
    if name == "SparseAdam":
        net: nn.Module = EmbeddingSum()
    elif name == "Muon":
        net = mlp(bias=False)
    elif name == "conv":
        net = conv()
    else:
        net = mlp()
    return net.to(DEVICE)


def batches_for(net: nn.Module, count: int, sizes: Sequence[int] = (5,)) -> Batches:
    """Returns `count` batches of inputs and classes; batch sizes go round in `sizes`."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    for i in range(count):
        size = sizes[i % len(sizes)]
        if isinstance(net, EmbeddingSum):
            x = torch.randint(10, (size, 6), generator=generator)
        elif isinstance(net[0], nn.Conv2d):
            x = torch.randn(size, 2, 5, 5, generator=generator)
        else:
            x = torch.randn(size, 6, generator=generator)
        y = torch.randint(4, (size,), generator=generator)
        batches.append((x.to(DEVICE), y.to(DEVICE)))
    return batches


def optimizer_maker(name: str, **settings: Any) -> MakeOptimizer:
    """Returns a function from parameters to the optimizer; `settings` override the table's."""
    settings = {**OPTIMIZERS[name], **settings}
    return lambda params: getattr(optim, name)(params, **settings)


def grouped_optimizer_maker(
    name: str, rates: Sequence[float], *, interleaved: bool = False, **settings: Any
) -> MakeOptimizer:
    """Returns a function from parameters to the optimizer, with one parameter group per rate.

    A group is a run of neighbours, or every n-th parameter.
    """
    settings = {**OPTIMIZERS[name], **settings}
    count = len(rates)

    def make_optimizer(params: list[Tensor]) -> optim.Optimizer:
        size = len(params) // count
        groups = []
        for i, rate in enumerate(rates):
            start = i * len(params) // count
            group_params = params[i::count] if interleaved else params[start : start + size]
            groups.append({"params": group_params, "lr": rate})
        return getattr(optim, name)(groups, **settings)

    return make_optimizer


def has_fused(name: str) -> bool:
    """Whether this torch has a fused kernel of that optimizer for the device.

    torch 2.11 has no fused Adagrad for CUDA.
    """
    param = nn.Parameter(torch.ones(2, 2, device=DEVICE))
    param.grad = torch.ones_like(param)
    try:
        getattr(optim, name)([param], fused=True).step()
    except RuntimeError:
        return False
    return True


def fused_sgd_works(dtype: torch.dtype) -> bool:
    """Whether torch's fused SGD moves every element of a long parameter.

    On CPUs it does not move half parameters (pytorch#191763).
    """
    param = nn.Parameter(torch.ones(256, dtype=dtype, device=DEVICE))
    param.grad = torch.ones_like(param)
    optim.SGD([param], lr=1.0, fused=True).step()
    return not param.any()


def overflow_at(batches: Batches, steps: Sequence[int]) -> Batches:
    """Returns the batches with an inf among the inputs of these steps."""
    overflowing = [(x.clone(), y) for x, y in batches]
    for i in steps:
        x, _ = overflowing[i]
        x[0, 0] = float("inf")
    return overflowing


def run_batches(step: hs.TrainStep, batches: Batches) -> list[hs.Record]:
    """Runs every batch, and flushes the tail of the last cycle."""
    records = [step(x, y) for x, y in batches]
    tail = step.flush()
    if tail is not None:
        records.append(tail)
    return records


def assert_equals_torch_loop(
    net: nn.Module,
    make_optimizer: MakeOptimizer,
    precision_name: str,
    batches: Batches,
    *,
    loss: Any = None,
    step_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[hs.TrainStep, TorchLoop]:
    """Runs halfstep and plain torch from the same start and asserts that nothing differs.

    `step_options` are for halfstep alone. Returns the step and the loop.
    """
    precision, spec = {**PRECISIONS, **SCALED, **ROUNDED}[precision_name]
    if loss is None:
        loss = nn.CrossEntropyLoss()
    loop = TorchLoop(copy.deepcopy(net), make_optimizer, spec, loss=loss, **options)
    optimizer = make_optimizer(list(net.parameters()))
    step = hs.TrainStep(
        net, loss, optimizer, precision=precision, **options, **(step_options or {})
    )
    records = run_batches(step, batches)
    assert_same_records(records, loop.run(batches))
    assert_same_state(step, loop)
    return step, loop


def assert_same_records(records: list[hs.Record], expected_records: list[LoopRecord]) -> None:
    """Asserts equal loss, cycle loss, scale, norm and decision at every step."""
    assert len(records) == len(expected_records)
    for i, (record, expected) in enumerate(zip(records, expected_records, strict=True)):
        assert is_same(record.loss, expected.loss), (i, "loss", record.loss, expected.loss)

        # CUDA divides by a Python number as a product with its reciprocal: one ulp of float64.
        cycle_loss = record.cycle_loss
        if cycle_loss.device.type == "cpu" or cycle_loss.dtype != torch.float64:
            matches = is_same(cycle_loss, expected.cycle_loss)
        else:
            matches = torch.allclose(
                cycle_loss, expected.cycle_loss, rtol=2.0**-52, atol=0, equal_nan=True
            )
        assert matches, (i, cycle_loss, expected.cycle_loss)

        ends_cycle = expected.norm is not None
        assert record.scale.item() == expected.scale, (i, "scale")
        assert bool(record.updated) == expected.updated, (i, "updated")
        assert bool(record.skipped) == (ends_cycle and not expected.updated), (i, "skipped")
        norm = expected.norm if ends_cycle else torch.zeros_like(record.grad_norm)
        assert is_same(record.grad_norm, norm), (i, "grad_norm", record.grad_norm, norm)


def assert_same_state(step: hs.TrainStep, loop: TorchLoop) -> None:
    """Asserts equal parameters, buffers and optimizer state."""
    actual_tensors = step.net.state_dict()
    expected_tensors = loop.net.state_dict()
    for name, expected in zip(actual_tensors, expected_tensors.values(), strict=True):
        assert is_same(actual_tensors[name], expected), (name, actual_tensors[name], expected)

    loop_params = loop.wide_params if loop.updates_wide else loop.params
    for param, loop_param in zip(step.net.parameters(), loop_params, strict=True):
        actual_state = step.optimizer.state.get(param, {})
        expected_state = loop.optimizer.state.get(loop_param, {})
        assert set(actual_state) == set(expected_state)
        for key, actual in actual_state.items():
            assert is_same(actual, expected_state[key]), (key, actual, expected_state[key])


def is_same(actual: Any, expected: Any) -> bool:
    """Whether dtype, shape and values are equal; NaN equals NaN."""
    if not isinstance(actual, Tensor):
        return bool(actual == expected)
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    both_nan = actual.isnan() & expected.isnan()
    return bool(((actual == expected) | both_nan).all())
