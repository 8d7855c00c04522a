"""Networks, batches, precisions and optimizers that the parity tests run through, and the comparison itself."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

import halfstep as hs
from tests.support.torch_loops import BF16, F16, F32, F64, Loop, Make, Row, Spec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Batches = list[tuple[Tensor, Tensor]]

PRECISIONS: dict[str, tuple[hs.Precision, Spec]] = {
    "fp32": (hs.Precision("fp32"), Spec("none", F32)),
    "fp64": (hs.Precision("fp64"), Spec("whole", F64)),
    "O1": (hs.Precision("O1", kernels="torch"), Spec("autocast", F16, scaled=True)),
    "O2": (hs.Precision("O2", kernels="torch"), Spec("copies", F16, scaled=True)),
    "O3": (hs.Precision("O3", kernels="torch"), Spec("copies", F16, low_norms=True)),
    "O1-bf16": (hs.Precision("O1", dtype="bfloat16", kernels="torch"), Spec("autocast", BF16)),
    "O2-bf16": (hs.Precision("O2", dtype="bfloat16", kernels="torch"), Spec("copies", BF16)),
    "O3-bf16": (
        hs.Precision("O3", dtype="bfloat16", kernels="torch"),
        Spec("copies", BF16, low_norms=True),
    ),
    "fp16": (hs.Precision("fp16", kernels="torch"), Spec("whole", F16)),
    "bf16": (hs.Precision("bf16", kernels="torch"), Spec("whole", BF16)),
}
SCALED = {  # scales that the table does not choose
    "fp16-scaled": (
        hs.Precision("fp16", kernels="torch", scale="dynamic"),
        Spec("whole", F16, scaled=True),
    ),
    "O3-scaled": (
        hs.Precision("O3", kernels="torch", scale="dynamic"),
        Spec("copies", F16, True, low_norms=True),
    ),
}
ROUNDED = {
    f"{name}-{how}": (
        hs.Precision(name, kernels="torch", rounding=how),
        Spec("whole", dtype, rounding=how),
    )
    for name, dtype in (("fp16", F16), ("bf16", BF16))
    for how in ("kahan", "stochastic")
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


class Bag(nn.Module):
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


def net_for(optimizer: str) -> nn.Module:
    """The smallest network that `optimizer` accepts, on the device, always the same."""
    torch.manual_seed(1)
    kinds: dict[str, Callable[[], nn.Module]] = {
        "SparseAdam": Bag,
        "Muon": partial(mlp, bias=False),
        "conv": conv,
    }
    return kinds.get(optimizer, mlp)().to(DEVICE)


def batches_for(net: nn.Module, count: int, sizes: Sequence[int] = (5,)) -> Batches:
    """`count` batches of inputs and classes; batch sizes go round in `sizes`."""
    g = torch.Generator().manual_seed(2)
    shape = None if isinstance(net, Bag) else (2, 5, 5) if isinstance(net[0], nn.Conv2d) else (6,)
    found = []
    for i in range(count):
        n = sizes[i % len(sizes)]
        x = (
            torch.randint(10, (n, 6), generator=g)
            if shape is None
            else torch.randn(n, *shape, generator=g)
        )
        found.append((x.to(DEVICE), torch.randint(4, (n,), generator=g).to(DEVICE)))
    return found


def maker(name: str, **settings: Any) -> Make:
    """params → the optimizer, by name, with the table's settings unless told otherwise."""
    return lambda params: getattr(optim, name)(params, **{**OPTIMIZERS[name], **settings})


def in_groups(
    name: str, rates: Sequence[float], *, interleaved: bool = False, **settings: Any
) -> Make:
    """params → the optimizer with one parameter group per rate: runs of neighbours, or every n-th parameter."""

    def make(params: list[Tensor]) -> optim.Optimizer:
        n = len(rates)
        cut = [
            params[i::n] if interleaved else params[i * len(params) // n :][: len(params) // n]
            for i in range(n)
        ]
        groups = [{"params": part, "lr": rate} for part, rate in zip(cut, rates, strict=True)]
        return getattr(optim, name)(groups, **{**OPTIMIZERS[name], **settings})

    return make


def has_fused(name: str) -> bool:
    """Whether this torch has a fused kernel of that optimizer for the device (2.11 has no Adagrad for CUDA)."""
    p = nn.Parameter(torch.ones(2, 2, device=DEVICE))
    p.grad = torch.ones_like(p)
    try:
        getattr(optim, name)([p], fused=True).step()
    except RuntimeError:
        return False
    return True


def fused_sgd_works(dtype: torch.dtype) -> bool:
    """Whether torch's fused SGD moves every element of a long parameter; on CPUs half ones stay (pytorch#191763)."""
    p = nn.Parameter(torch.ones(256, dtype=dtype, device=DEVICE))
    p.grad = torch.ones_like(p)
    optim.SGD([p], lr=1.0, fused=True).step()
    return not p.any()


def overflow_at(batches: Batches, steps: Sequence[int]) -> Batches:
    """The batches with an inf among the inputs of these steps."""
    spoiled = [(x.clone(), y) for x, y in batches]
    for i in steps:
        spoiled[i][0][0, 0] = float("inf")
    return spoiled


def run(step: hs.TrainStep, batches: Batches) -> list[hs.Record]:
    """Every batch, and the tail."""
    records = [step(x, y) for x, y in batches]
    tail = step.flush()
    return records if tail is None else [*records, tail]


def both(
    net: nn.Module, make: Make, precision: str, batches: Batches, **options: Any
) -> tuple[hs.TrainStep, Loop]:
    """Runs halfstep and plain torch from the same start and asserts that nothing differs. `given` is for halfstep."""
    given = options.pop("given", {})
    ours, spec = {**PRECISIONS, **SCALED, **ROUNDED}[precision]
    loss = options.pop("loss", nn.CrossEntropyLoss())
    loop = Loop(copy.deepcopy(net), make, spec, loss=loss, **options)
    step = hs.TrainStep(net, loss, make(list(net.parameters())), precision=ours, **options, **given)
    records, rows = run(step, batches), loop.run(batches)
    same_records(records, rows)
    same_state(step, loop)
    return step, loop


def same_records(records: list[hs.Record], rows: list[Row]) -> None:
    assert len(records) == len(rows)
    for i, (record, row) in enumerate(zip(records, rows, strict=True)):
        assert same(record.loss, row.loss), (i, "loss", record.loss, row.loss)
        # CUDA divides by a Python number as a product with its reciprocal: one ulp of float64
        close = torch.allclose(
            record.cycle_loss, row.cycle_loss, rtol=2.0**-52, atol=0, equal_nan=True
        )
        exact = record.cycle_loss.device.type == "cpu" or record.cycle_loss.dtype != torch.float64
        assert same(record.cycle_loss, row.cycle_loss) if exact else close, (
            i,
            record.cycle_loss,
            row.cycle_loss,
        )
        assert record.scale.item() == row.scale, (i, "scale")
        assert bool(record.updated) == row.updated, (i, "updated")
        assert bool(record.skipped) == (row.norm is not None and not row.updated), (i, "skipped")
        norm = torch.zeros_like(record.grad_norm) if row.norm is None else row.norm
        assert same(record.grad_norm, norm), (i, "grad_norm", record.grad_norm, norm)


def same_state(step: hs.TrainStep, loop: Loop) -> None:
    """Parameters, buffers and optimizer state."""
    for (name, a), b in zip(
        step.net.state_dict().items(), loop.net.state_dict().values(), strict=True
    ):
        assert same(a, b), (name, a, b)
    held = loop.held if loop.rounded else loop.params
    for p, q in zip(step.net.parameters(), held, strict=True):
        ours, theirs = step.optimizer.state.get(p, {}), loop.optimizer.state.get(q, {})
        assert set(ours) == set(theirs)
        for key in ours:
            assert same(ours[key], theirs[key]), (key, ours[key], theirs[key])


def same(a: Any, b: Any) -> bool:
    """Equal dtype, shape and values; NaN equals NaN."""
    if not isinstance(a, Tensor):
        return bool(a == b)
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )
