"""`Model(device=…)` on a GPU: everything moves, and training goes on as if it was built there."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import Notice
from tests.support.equal_tensors import assert_equal_tensors

pytestmark = pytest.mark.gpu

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 3
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "Adam, fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    net.append(nn.Linear(4, 3))
    net[3].weight = net[0].weight
    return net


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "O2", "bf16"])
def test_parts_are_moved_and_train_like_parts_that_were_built_there(
    name: str, precision: Any
) -> None:
    data = hs.data.Dataset((X, Y)).batch(8)
    weight = torch.tensor([1.0, 2.0, 3.0])
    trained = []
    for moves in (True, False):
        net = make_net()
        optimizer = OPTIMIZERS[name](net.parameters())
        nn.functional.cross_entropy(net(X), Y).backward()
        optimizer.step()  # there is state already
        optimizer.zero_grad()
        loss: Any = nn.CrossEntropyLoss(weight=weight)
        device = None
        if moves:
            device = "auto"
        else:
            state = copy.deepcopy(optimizer.state_dict())
            net.to("cuda")
            loss.to("cuda")
            optimizer = OPTIMIZERS[name](net.parameters())
            optimizer.load_state_dict(state)
        before = [id(p) for p in net.parameters()]
        model = hs.Model(net, loss, optimizer, precision, device=device)
        assert [id(p) for p in net.parameters()] == before
        assert net[3].weight is net[0].weight
        model.fit(2, data)
        trained.append(model)
    assert trained[0].step.device.type == "cuda"
    assert_equal_tensors(*(model.net.state_dict().values() for model in trained))


def test_a_network_goes_back_to_the_cpu() -> None:
    net = make_net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    hs.Model(net, nn.CrossEntropyLoss(), optimizer).fit(1, [(X, Y)])
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, device="cpu")
    model.fit(1, [(X, Y)])
    assert {p.device.type for p in net.parameters()} == {"cpu"}


def test_tensors_that_share_memory_are_refused_before_anything_moves() -> None:
    net = make_net()
    net[4].weight.data = net[0].weight.data[:3]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"0.weight, 4.weight share memory"):
        hs.Model(net, nn.CrossEntropyLoss(), optimizer, device="cuda")
    assert {p.device.type for p in net.parameters()} == {"cpu"}


def test_an_idle_gpu_is_announced_once_and_not_where_the_cpu_is_meant() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(Notice, match="a CUDA device lies idle"):
        hs.Model(net, nn.CrossEntropyLoss(), optimizer)
    with warnings.catch_warnings(action="error"):
        hs.Model(net, nn.CrossEntropyLoss(), optimizer, device="cpu")


def test_a_step_on_another_device_is_refused() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer)
    with pytest.raises(ValueError, match=r"device: the step was built on cpu"):
        hs.Model(net, nn.CrossEntropyLoss(), step=step, device="cuda")


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"no 'cuda:99' here, only 'cpu', 'cuda:0'"):
        hs.Model(net, nn.CrossEntropyLoss(), optimizer, device="cuda:99")
