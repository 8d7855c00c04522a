"""Weights that forward writes into: refused where forward sees copies, which are thrown away."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import halfstep as hs

LOW_COPIES = ["O2", "O3", "O2+bf16"]


def scale_in_place(key: nn.Linear) -> None:
    with torch.no_grad():
        key.weight.mul_(0.5)


def assign_data(key: nn.Linear) -> None:
    key.weight.data = key.weight.data * 0.5


def scale_data_in_place(key: nn.Linear) -> None:
    key.weight.data.mul_(0.5)


def replace_parameter(key: nn.Linear) -> None:
    key.weight = nn.Parameter(key.weight.detach() * 0.5, requires_grad=False)


WRITES = [scale_in_place, assign_data, scale_data_in_place, replace_parameter]


class MomentumEncoder(nn.Module):
    """Two layers; forward writes into the second one from its `first_write`-th call on."""

    def __init__(self, write: Callable[[nn.Linear], None], first_write: int = 1) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.key = nn.Linear(4, 4).requires_grad_(False)
        self.write = write
        self.first_write = first_write
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls >= self.first_write:
            self.write(self.key)
        return self.query(x) - self.key(x)


def build(net: MomentumEncoder, precision: str | hs.Precision, **options: object) -> hs.TrainStep:
    optimizer = torch.optim.SGD(net.query.parameters(), lr=0.1)
    return hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision, **options)


@pytest.mark.parametrize("precision", LOW_COPIES)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_write_is_refused_by_name(
    write: Callable[[nn.Linear], None], precision: str, accumulate: int
) -> None:
    net = MomentumEncoder(write)
    weight = net.key.weight
    before = weight.clone()
    step = build(net, precision, accumulate=accumulate)
    with pytest.raises(ValueError, match=r"forward writes into parameters .*: key\.weight\. "):
        step(torch.ones(2, 4), torch.ones(2, 4))
    assert net.key.weight is weight
    assert torch.equal(weight, before)


@pytest.mark.parametrize("write", [scale_in_place, assign_data, replace_parameter])
def test_a_write_that_comes_later_is_refused(write: Callable[[nn.Linear], None]) -> None:
    """Not only at the first forward, where values are compared."""
    step = build(MomentumEncoder(write, first_write=3), "O2")
    for _ in range(2):
        step(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"key\.weight"):
        step(torch.ones(2, 4), torch.ones(2, 4))


@pytest.mark.parametrize("precision", [*LOW_COPIES, "fp16", "fp64"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_an_evaluation_is_refused(
    write: Callable[[nn.Linear], None], precision: str
) -> None:
    """Evaluation converts nothing, so that fp16 and fp64 have copies there too."""
    evaluate = hs.EvalStep(MomentumEncoder(write), nn.MSELoss(), precision=precision)
    with pytest.raises(ValueError, match=r"key\.weight"):
        evaluate(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"key\.weight"):
        evaluate.predict(torch.ones(2, 4))


@pytest.mark.parametrize("write", [scale_in_place, assign_data, scale_data_in_place])
def test_keep_makes_no_copy(write: Callable[[nn.Linear], None]) -> None:
    """What the message advises: the write reaches the parameter itself."""
    net = MomentumEncoder(write)
    before = net.key.weight.clone()
    step = build(net, hs.Precision("O2", keep={"key": "fp32"}))
    for _ in range(3):
        step(torch.ones(2, 4), torch.ones(2, 4))
    assert torch.equal(net.key.weight, before * 0.125)


@pytest.mark.parametrize("precision", ["fp32", "O1", "fp16", "bf16"])
@pytest.mark.parametrize("write", [scale_in_place, assign_data, scale_data_in_place])
def test_without_copies_a_write_stays(write: Callable[[nn.Linear], None], precision: str) -> None:
    net = MomentumEncoder(write)
    step = build(net, precision)
    before = net.key.weight.clone()
    step(torch.ones(2, 4), torch.ones(2, 4))
    assert torch.equal(net.key.weight, before * 0.5)


def test_an_embedding_with_max_norm_is_refused() -> None:
    """torch renormalizes its rows inside forward, in place."""
    net = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.MSELoss(), optimizer, precision="O2")
    with pytest.raises(ValueError, match=r"parameters of the network: 0\.weight"):
        step(torch.arange(5), torch.zeros(5, 4))


def test_weights_that_are_nan_are_no_writes() -> None:
    net = nn.Linear(4, 4)
    nn.init.constant_(net.weight, float("nan"))
    assert hs.EvalStep(net, nn.MSELoss(), precision="O2").predict(torch.ones(2, 4)).isnan().all()


def test_networks_made_in_inference_mode_count_no_versions() -> None:
    with torch.inference_mode():
        net = nn.Linear(4, 4)
        out = hs.EvalStep(net, nn.MSELoss(), precision="O2").predict(torch.ones(2, 4))
    assert out.shape == (2, 4)
