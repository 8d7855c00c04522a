"""Decomposed operations: they must do what torch's own do."""

from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.compiler.decompositions import DECOMPOSITIONS

aten = torch.ops.aten
SIZES = ((5, 7), (), (33,))


def tensors(seed: int, *, least: float = -1.0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(size, generator=g) * (1 - least) + least for size in SIZES]


def run_both(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Arguments and result after torch's operation, and after ours."""
    outcomes = []
    for call in (op, DECOMPOSITIONS[op]):
        copies = [[t.clone() for t in a] if isinstance(a, list) else a.clone() for a in args]
        result = call(*copies, **kwargs)
        outcomes.append((copies, result))
    return outcomes[0], outcomes[1]


def assert_near(a: Any, b: Any) -> None:
    """A handful of float32 operations in another order: a few eps of 1.2e-7 each."""
    torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("found", [None, 0.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "is_first_step": True},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
        {"lr": torch.tensor(0.1, dtype=torch.float64)},
    ],
)
def test_sgd(options: dict[str, Any], found: float | None) -> None:
    settings = {
        "weight_decay": 0.0,
        "momentum": 0.0,
        "lr": 0.1,
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
    }
    settings |= {"is_first_step": False, **options}
    has_tensor_lr = isinstance(settings["lr"], Tensor)
    op = aten._fused_sgd_.tensor_lr if has_tensor_lr else aten._fused_sgd_.default
    momenta = tensors(3) if settings["momentum"] else []
    flag = None if found is None else torch.tensor(found)
    (theirs, _), (ours, _) = run_both(
        op, tensors(1), tensors(2), momenta, **settings, found_inf=flag
    )
    assert_near(ours[0], theirs[0])
    assert_near(ours[2], theirs[2])
    assert all(torch.equal(a, b) for a, b in zip(ours[0], tensors(1), strict=True)) == (found == 1)


@pytest.mark.parametrize("found", [None, 0.0, 1.0])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"amsgrad": True},
        {"maximize": True},
        {"lr": torch.tensor(0.01).double()},
        {"beta2": 0.9999},
        {"beta2": 0.99999},
    ],
)
def test_adam(kind: str, options: dict[str, Any], found: float | None) -> None:
    settings = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    settings |= {"amsgrad": False, "maximize": False, **options}
    packet = getattr(aten, f"_fused_{kind}_")
    op = packet.tensor_lr if isinstance(settings["lr"], Tensor) else packet.default
    max_squares = tensors(5, least=0.0) if settings["amsgrad"] else []
    states = (tensors(3), tensors(4, least=0.0), max_squares)
    steps = [torch.tensor(3.0) for _ in SIZES]
    flag = None if found is None else torch.tensor(found)
    (theirs, _), (ours, _) = run_both(
        op, tensors(1), tensors(2), *states, steps, **settings, found_inf=flag
    )
    for i in (0, 2, 3, 4):
        assert_near(ours[i], theirs[i])
    if found != 1:  # the change itself: parameters of 1 hide an error of 1e-4 in a step of 0.01
        our_change, their_change = (
            [p.double() - q.double() for p, q in zip(params, tensors(1), strict=True)]
            for params in (ours[0], theirs[0])
        )
        # float32's eps of p, over a change of 0.01
        torch.testing.assert_close(our_change, their_change, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], tensors(1), strict=True)) == (found == 1)


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_the_check(bad: float | None) -> None:
    grads = [*tensors(1), torch.full((4,), 3e38), torch.empty(0)]
    if bad is not None:
        grads[0][2, 3] = bad
    op = aten._amp_foreach_non_finite_check_and_unscale_.default
    (theirs, _), (ours, _) = run_both(op, grads, torch.zeros(()), torch.tensor(0.125))
    assert ours[1].item() == theirs[1].item() == (bad is not None)
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        for a, b in zip(ours[0], theirs[0], strict=True)
    )
    (_, their_norms), (_, our_norms) = run_both(aten._foreach_norm.Scalar, grads[:4])
    torch.testing.assert_close(our_norms, their_norms, equal_nan=True)


@pytest.mark.parametrize("stats", [True, False])
def test_batch_norm(stats: bool) -> None:
    x = torch.randn(8, 4, 3)
    weight, bias, mean, var = (torch.rand(4) for _ in range(4))
    outcomes = []
    for call in (aten.native_batch_norm.default, DECOMPOSITIONS[aten.native_batch_norm.default]):
        running = [mean.clone(), var.clone()] if stats else [None, None]
        results = call(x, weight, bias, *running, True, 0.1, 1e-5)
        outcomes.append([*results, *[t for t in running if t is not None]])
    theirs, ours = outcomes
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
