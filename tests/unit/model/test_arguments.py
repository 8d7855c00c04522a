"""Losses, forwards and options that a user passes to `Model`: used as meant, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from tests.support.equal_tensors import assert_equal_tensors

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(64) % 3
pytestmark = pytest.mark.filterwarnings("ignore:.*batch-coupled")


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


def make_data(columns: Any = (X, Y)) -> hs.data.Dataset:
    return hs.data.Dataset(columns, seed=1).shuffle().batch(8)


def make_model(loss: Any, **options: Any) -> hs.Model:
    net = make_net()
    return hs.Model(net, loss, torch.optim.SGD(net.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("columns", [{"x": X, "y": Y}, (X, Y)], ids=["dict", "tuple"])
def test_a_forward_that_returns_the_loss_takes_the_columns_of_a_data_set(columns: Any) -> None:
    def forward(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    custom = make_model(None, forward=forward, count=lambda batch: len(batch[1]))
    plain = make_model(nn.CrossEntropyLoss())
    batches = make_data(columns)
    for model in (custom, plain):
        torch.manual_seed(3)
        model.fit(1, batches)
    assert_equal_tensors(custom.net.state_dict().values(), plain.net.state_dict().values())


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "list": (lambda out, y: [None, F.cross_entropy(out, y)], "received NoneType"),
    "dict": (lambda out, y: {"loss": F.cross_entropy(out, y).item()}, "received float"),
    "float": (lambda out, y: F.cross_entropy(out, y).item(), "received float"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_returns_no_tensor_is_refused(name: str) -> None:
    loss, received = LOSSES[name]
    model = make_model(loss)
    message = rf"loss: expected it to return a tensor.*{received}.*a dict with it as 'loss'"
    with pytest.raises(TypeError, match=message):
        model.fit(1, make_data())


OPTIONS = [
    ("scheduler", "schedule"),
    ("metric", "metrics"),
    ("gradient_clip_val", "clip_norm"),
    ("acumulate", "accumulate"),
]


@pytest.mark.parametrize(("name", "suggestion"), OPTIONS)
def test_an_option_by_another_name_is_refused_with_ours(name: str, suggestion: str) -> None:
    message = rf"Model: unknown option '{name}'; did you mean '{suggestion}'\?.*schedule, "
    with pytest.raises(TypeError, match=message):
        make_model(nn.CrossEntropyLoss(), **{name: 1})


def test_validation_of_a_network_without_forward_asks_for_eval_step() -> None:
    model = hs.Model(nn.ModuleList([make_net()]), step=lambda x, y: x.sum())
    with pytest.raises(ValueError, match=r"ModuleList has no forward.*eval_step="):
        model.fit(1, make_data(), valid=make_data())
