"""Operations in other words: they must do what torch's own do."""

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


def both(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The arguments after torch's operation, and after ours."""
    sides = []
    for call in (op, DECOMPOSITIONS[op]):
        copied = [[t.clone() for t in a] if isinstance(a, list) else a.clone() for a in args]
        result = call(*copied, **kwargs)
        sides.append((copied, result))
    return sides[0], sides[1]


def near(a: Any, b: Any) -> None:
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
    given = {
        "weight_decay": 0.0,
        "momentum": 0.0,
        "lr": 0.1,
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
    }
    given |= {"is_first_step": False, **options}
    op = aten._fused_sgd_.tensor_lr if isinstance(given["lr"], Tensor) else aten._fused_sgd_.default
    moments = tensors(3) if given["momentum"] else []
    flag = None if found is None else torch.tensor(found)
    (theirs, _), (ours, _) = both(op, tensors(1), tensors(2), moments, **given, found_inf=flag)
    near(ours[0], theirs[0])
    near(ours[2], theirs[2])
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
    given = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    given |= {"amsgrad": False, "maximize": False, **options}
    packet = getattr(aten, f"_fused_{kind}_")
    op = packet.tensor_lr if isinstance(given["lr"], Tensor) else packet.default
    states = tensors(3), tensors(4, least=0.0), tensors(5, least=0.0) if given["amsgrad"] else []
    steps = [torch.tensor(3.0) for _ in SIZES]
    flag = None if found is None else torch.tensor(found)
    (theirs, _), (ours, _) = both(
        op, tensors(1), tensors(2), *states, steps, **given, found_inf=flag
    )
    for i in (0, 2, 3, 4):
        near(ours[i], theirs[i])
    if found != 1:  # the change itself: parameters of 1 hide an error of 1e-4 in a step of 0.01
        moved = [
            [p.double() - q.double() for p, q in zip(side[0], tensors(1), strict=True)]
            for side in (ours, theirs)
        ]
        torch.testing.assert_close(
            *moved, rtol=1e-5, atol=1e-7
        )  # float32's eps of p, over a change of 0.01
    assert all(torch.equal(a, b) for a, b in zip(ours[0], tensors(1), strict=True)) == (found == 1)


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_the_check(bad: float | None) -> None:
    grads = [*tensors(1), torch.full((4,), 3e38), torch.empty(0)]
    if bad is not None:
        grads[0][2, 3] = bad
    op = aten._amp_foreach_non_finite_check_and_unscale_.default
    (theirs, _), (ours, _) = both(op, grads, torch.zeros(()), torch.tensor(0.125))
    assert ours[1].item() == theirs[1].item() == (bad is not None)
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        for a, b in zip(ours[0], theirs[0], strict=True)
    )
    (_, norms), (_, mine) = both(aten._foreach_norm.Scalar, grads[:4])
    torch.testing.assert_close(mine, norms, equal_nan=True)


@pytest.mark.parametrize("stats", [True, False])
def test_batch_norm(stats: bool) -> None:
    x, (w, b, mean, var) = torch.randn(8, 4, 3), (torch.rand(4) for _ in range(4))
    sides = []
    for call in (aten.native_batch_norm.default, DECOMPOSITIONS[aten.native_batch_norm.default]):
        kept = (mean.clone(), var.clone()) if stats else (None, None)
        sides.append((*call(x, w, b, *kept, True, 0.1, 1e-5), *(k for k in kept if k is not None)))
    assert all(torch.equal(a, b) for a, b in zip(*sides, strict=True))
