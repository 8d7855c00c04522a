"""Where an error came from: the user's line and module, not those of torch or halfstep."""

import os

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.engine.captured import uncapturable


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x[:, :1]]) + 1


def test_an_error_is_located_at_the_users_line_and_in_its_module() -> None:
    net = nn.Sequential(nn.Linear(3, 3), Failing())
    with pytest.raises(RuntimeError) as raised:
        net(torch.ones(2, 3))
    location = uncapturable.locate_error(raised.value, net)
    assert location.module == "1"
    assert location.file == __file__
    assert "Sizes of tensors must match" in location.what
    assert str(location).endswith("return torch.cat([x, x[:, :1]]) + 1")


def test_frames_of_halfstep_and_torch_are_not_the_users() -> None:
    assert not uncapturable._is_user_file(uncapturable.__file__)
    assert not uncapturable._is_user_file(halfstep.__file__)
    assert not uncapturable._is_user_file(nn.__file__)
    assert not uncapturable._is_user_file(os.path.join(halfstep.__path__[0], "step", "any.py"))
    assert uncapturable._is_user_file(__file__)


def test_a_location_without_a_line_is_in_the_backward_pass() -> None:
    location = uncapturable.CodeLocation("a wait", file="?", line=0, module="")
    assert str(location) == "a wait: in the backward pass"
