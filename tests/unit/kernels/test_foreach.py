"""Fused optimizers on smaller pieces: the bits of optimizer.step(), or no step at all."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import halfstep as hs
from halfstep.kernels import foreach
from halfstep.kernels.foreach import fused_step_in_pieces
from halfstep.utils.tensor_pieces import MIN_PIECE, piece_length

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Every setting is in one of them. fp64: on a CPU a rate of many bits is not rounded to float32.
CASES: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "sgd decay": (SGD, {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "dampening": (
        SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01, "maximize": True},
    ),
    "nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (Adam, {"lr": 0.01}),
    "adam decay": (Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-5}),
    "amsgrad": (Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (AdamW, {"lr": 0.01}),
    "adamw amsgrad": (
        AdamW,
        {"lr": 0.01, "amsgrad": True, "weight_decay": 0.3, "betas": (0.7, 0.8)},
    ),
    "decoupled": (Adam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
}
# Shapes of the parameters. The third is channels last. Lengths that are no multiple of 4 take
# another loop in torch's kernels, which rounds in its own way.
SHAPES = [
    (150, 101),
    (7,),
    (8, 3, 30, 30),
    (),
    (0, 3),
    (4096,),
    (4097,),
    (4100,),
    (13, 5),
]


def make_optimizer(
    case: str, dtype: torch.dtype = torch.float32, *, tensor_lr: bool = False
) -> tuple[Optimizer, list[Tensor]]:
    """Two groups, the last parameter frozen; every other one has state."""
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(size, dtype=dtype, device=DEVICE)) for size in SHAPES]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    params[-1].requires_grad_(False)
    kind, settings = CASES[case]
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.03}]
    optimizer = kind(groups, **settings, fused=True)
    if tensor_lr:
        for group in optimizer.param_groups:
            wide = torch.float64 if DEVICE == "cpu" else torch.float32
            group["lr"] = torch.tensor(group["lr"], dtype=wide, device=DEVICE)
    fill_grads(params, 0)
    optimizer.step()
    return optimizer, params


def fill_grads(params: list[Tensor], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in params[:-1]:
        values = torch.randn(p.shape, generator=g).to(DEVICE, p.dtype)
        p.grad = torch.empty_like(p).copy_(values)


def all_tensors(optimizer: Optimizer, params: list[Tensor]) -> Iterator[Tensor]:
    for p in params:
        yield p.detach()
        yield from (v for v in optimizer.state.get(p, {}).values() if v is not None)
        yield from (p.grad,) if p.grad is not None else ()


def step_by_torch(optimizer: Any, found_inf: Tensor) -> None:
    """optimizer.step() with GradScaler's protocol."""
    optimizer.grad_scale = None
    optimizer.found_inf = found_inf
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


def flag(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_step(case: str, dtype: torch.dtype, tensor_lr: bool) -> None:
    compare(case, dtype, tensor_lr=tensor_lr)


def compare(case: str, dtype: torch.dtype, *, tensor_lr: bool) -> None:
    our_optimizer, our_params = make_optimizer(case, dtype, tensor_lr=tensor_lr)
    torch_optimizer, torch_params = make_optimizer(case, dtype, tensor_lr=tensor_lr)
    for seed, found_inf in enumerate([0.0, 1.0, 0.0, 0.0], start=1):
        fill_grads(our_params, seed)
        fill_grads(torch_params, seed)
        before = [t.clone() for t in all_tensors(our_optimizer, our_params)]
        assert fused_step_in_pieces(our_optimizer, flag(found_inf))
        step_by_torch(torch_optimizer, flag(found_inf))

        after = list(all_tensors(our_optimizer, our_params))
        for a, b in zip(after, all_tensors(torch_optimizer, torch_params), strict=True):
            assert torch.equal(a, b), (seed, a.shape)
            assert a.stride() == b.stride()
        is_unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert is_unchanged is bool(found_inf)


def test_pieces_are_many_and_launches_are_not() -> None:
    """The benchmark MLP: torch takes 64 tensors of 2 lists a launch, 30 of 5.

    Its two large tensors, not split, make 11 blocks.
    """
    mlp = [512 * 784, 512, 512 * 512, 512, 512 * 10, 10]

    def count_pieces(length: int) -> int:
        return sum(-(-size // length) for size in mlp)

    for list_count, per_launch in ((2, 64), (3, 48), (4, 36), (5, 30)):
        length = piece_length(mlp, list_count)
        # torch's kernels read four elements at a time where a piece begins at a multiple of four.
        assert length % 4 == 0
        assert 2 * 11 < count_pieces(length) <= per_launch
        is_shortest = length == MIN_PIECE
        assert is_shortest or count_pieces(length - MIN_PIECE) > per_launch
    assert piece_length([1 << 22] * 64, 2) == 1 << 22  # nothing gained: whole tensors
    assert piece_length([10], 2) == MIN_PIECE


def test_pieces_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    piece_counts: list[int] = []
    kernel = torch._fused_sgd_

    def counting_kernel(params: list[Tensor], *args: Any, **options: Any) -> None:
        piece_counts.append(len(params))
        kernel(params, *args, **options)

    monkeypatch.setattr(torch, "_fused_sgd_", counting_kernel)
    optimizer, _ = make_optimizer("momentum")
    piece_counts.clear()
    assert fused_step_in_pieces(optimizer, flag(0.0))
    # 15,150 elements are no multiple of 4 and stay whole; 7; 21,600.
    first_group = 1 + 1 + 6
    # 1, 0 and 4,096 elements; 4,097 stay whole; 4,100.
    second_group = 1 + 1 + 1 + 1 + 2
    assert piece_counts == [first_group, second_group]


def refusals() -> Iterator[tuple[str, Callable[[Any, list[Any]], Any]]]:
    """What makes step() more, or something else, than its kernels on whole tensors."""
    yield "a hook before", lambda o, _: o.register_step_pre_hook(lambda *_: None)
    yield "a hook after", lambda o, _: o.register_step_post_hook(lambda *_: None)
    yield "a hook before any", lambda *_: register_optimizer_step_pre_hook(lambda *_: None)
    yield "a hook after any", lambda *_: register_optimizer_step_post_hook(lambda *_: None)
    yield "a step of its own", lambda o, _: setattr(o, "step", lambda: None)
    yield "not fused", lambda o, _: o.param_groups[1].update(fused=False)
    yield "differentiable", lambda o, _: o.param_groups[1].update(differentiable=True)
    yield "no state", lambda o, ps: o.state.pop(ps[1])
    yield "part of a state", lambda o, ps: o.state[ps[1]].popitem()
    yield (
        "a state elsewhere",
        lambda o, ps: o.state[ps[0]].update(exp_avg=o.state[ps[0]]["exp_avg"].to("meta")),
    )
    yield (
        "a counter elsewhere",
        lambda o, ps: o.state[ps[0]].update(step=o.state[ps[0]]["step"].to("meta")),
    )
    yield (
        "a rate elsewhere",
        lambda o, _: o.param_groups[0].update(lr=torch.tensor(0.1, device="meta")),
    )
    yield "betas as tensors", lambda o, _: o.param_groups[0].update(betas=(torch.tensor(0.9), 0.99))
    yield "other strides", lambda _, ps: setattr(ps[2], "grad", ps[2].grad.contiguous())
    yield "gaps", lambda _, ps: setattr(ps[2], "data", ps[2].new_zeros(16, 3, 30, 30)[::2])
    yield "sparse", lambda _, ps: setattr(ps[0], "grad", ps[0].grad.to_sparse())
    yield "no gradient", lambda _, ps: [setattr(p, "grad", None) for p in ps]


@pytest.mark.parametrize(("name", "spoil"), [pytest.param(n, f, id=n) for n, f in refusals()])
def test_refused(name: str, spoil: Callable[[Any, list[Any]], Any]) -> None:
    optimizer, params = make_optimizer("adam")
    handle = spoil(optimizer, params)
    before = [t.to_dense().clone() for t in all_tensors(optimizer, params) if not t.is_meta]
    try:
        assert not fused_step_in_pieces(optimizer, flag(0.0))
    finally:
        if "hook" in name:
            handle.remove()
    after = [t.to_dense() for t in all_tensors(optimizer, params) if not t.is_meta]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert fused_step_in_pieces(optimizer, flag(0.0)) is ("hook" in name)


def test_a_subclass_is_left_alone() -> None:
    class OwnSGD(SGD):
        pass

    p = nn.Parameter(torch.ones(3, device=DEVICE))
    p.grad = torch.ones_like(p)
    assert not fused_step_in_pieces(OwnSGD([p], fused=True), flag(0.0))
    assert fused_step_in_pieces(SGD([p], fused=True), flag(0.0))


def test_large_networks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, params = make_optimizer("sgd")
    total = sum(p.numel() for p in params[:-1])
    monkeypatch.setattr(foreach, "MAX_ELEMENTS", total - 1)
    assert not fused_step_in_pieces(optimizer, flag(0.0))
    monkeypatch.setattr(foreach, "MAX_ELEMENTS", total)
    assert fused_step_in_pieces(optimizer, flag(0.0))


def test_a_scheduler_sees_its_step() -> None:
    """torch warns when a scheduler moves before its optimizer has."""
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    p.grad = torch.ones_like(p)
    optimizer = SGD([p], lr=1.0, fused=True)
    scheduler = StepLR(optimizer, 1)
    assert fused_step_in_pieces(optimizer, flag(0.0))
    scheduler.step()
    optimizer.step = lambda: None  # type: ignore[method-assign]
    assert not fused_step_in_pieces(optimizer, flag(0.0))


def test_a_step_that_is_spread_equals_one_that_is_not() -> None:
    """Through a whole TrainStep, overflow included; the gradients are gone afterwards."""
    in_pieces = make_step(step_in_pieces=True)
    whole = make_step(step_in_pieces=False)
    for i in range(5):
        x = torch.randn(8, 100, generator=torch.Generator().manual_seed(i)).to(DEVICE)
        x[0, 0] = torch.inf if i == 2 else 0.0
        for step in (in_pieces, whole):
            step(x, torch.zeros(8, 90, device=DEVICE))
    assert int(in_pieces.state.skips) == int(whole.state.skips) == 1
    a = in_pieces.fingerprints()
    b = whole.fingerprints()
    assert [name for name in a if a[name].item() != b[name].item()] == []
    assert all(p.grad is None for p in in_pieces.params)
    assert not hasattr(in_pieces.optimizer, "found_inf")


def make_step(*, step_in_pieces: bool) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(100, 90).to(DEVICE)
    step = hs.TrainStep(
        net, nn.MSELoss(), AdamW(net.parameters(), fused=True), decide="device", nonfinite="skip"
    )
    step.update.commit.step_in_pieces = step_in_pieces
    return step
