"""Gradients between backward and update: which one is not finite, and how large they are."""

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.step.gradients import grad_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("clip", [{"clip_value": 1.0}, {"clip_norm": 1.0}])
def test_the_parameter_with_a_non_finite_gradient_is_found_before_clipping(
    clip: dict[str, float],
) -> None:
    """Afterwards it could not be seen: clipping by value makes an infinity a 1."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, decide="host", **clip)
    step.params[3].register_hook(lambda grad: grad * torch.inf)
    x = torch.ones(4, 3, device=DEVICE)
    y = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(hs.NonFiniteError, match=r"gradient in 2\.bias\."):
        step(x, y)


def test_the_norm_of_float16_gradients_beside_float32_ones_is_computed_in_float32() -> None:
    """This norm is 113,137, above the largest float16 number."""
    high = torch.ones(3, device=DEVICE)
    low = torch.full((8,), 40000.0, dtype=torch.float16, device=DEVICE)
    expected = [grad.double().norm().float().item() for grad in (high, low)]
    for grads in ([high, low], [low, high]):
        assert sorted(grad_norms(grads).tolist()) == expected
