"""A checkpoint and a network that do not belong together: what differs is named, and nothing has been touched."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.model import Model

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
DATA = hs.data.Dataset((X, X[:, :3].argmax(1))).batch(6)


def layers(*widths: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def model(
    net: nn.Module | None = None, optimizer: Any = None, precision: str = "O2", **options: Any
) -> Model:
    net = net or layers(4, 8, 3)
    optimizer = (
        optimizer(net) if optimizer else torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    )
    return Model(net, options.pop("loss", nn.CrossEntropyLoss()), optimizer, precision, **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model().fit(1, DATA, callbacks=hs.Checkpoint(tmp_path / "run"))
    return tmp_path / "run"


def everything(of: Model) -> dict[str, Tensor]:
    """Weights, optimizer state, averages, scale and counters, by the objects that hold them."""
    state = of.step.state
    found = dict(of.net.state_dict(keep_vars=True))
    found |= {f"state.{k}": v for k, v in vars(state).items() if isinstance(v, Tensor)}
    for i, p in enumerate(of.net.parameters()):
        found |= {f"{i}.{k}": v for k, v in of.optimizer.state[p].items()} if of.optimizer else {}
    return found


def two_groups(net: nn.Module) -> torch.optim.Optimizer:
    first, *rest = net.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1, momentum=0.9)


class Scaled(nn.Module):
    """A loss with a buffer of its own."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(2))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, y) * self.factor[0]


OTHERS: dict[str, tuple[Callable[[], Model], str]] = {
    "wider": (
        lambda: model(layers(4, 9, 3)),
        "of another shape: 0.weight ([8, 4] there, [9, 4] here), 0.bias ([8] there, [9] here), 1.weight ([3, 8] there, "
        "[3, 9] here). Build the network as it was",
    ),
    "deeper": (
        lambda: model(layers(4, 8, 3, 3)),
        "from another network: missing there: 2.weight, 2.bias. Build",
    ),
    "shallower": (
        lambda: model(layers(4, 8)),
        "from another network: unknown to this network: 1.weight, 1.bias. ",
    ),
    "many": (
        lambda: model(layers(4, 8, 3, 3, 3, 3, 3)),
        "missing there: 2.weight, 2.bias, 3.weight, 3.bias and 4 more. Build",
    ),
    "renamed": (
        lambda: model(nn.Sequential(OrderedDict(zip(("a", "b"), layers(4, 8, 3), strict=True)))),
        "missing there: a.weight, a.bias, b.weight, b.bias; unknown to this network: 0.weight, 0.bias, 1.weight, 1.",
    ),
    "another loss": (lambda: model(loss=Scaled()), "missing there: loss.factor. Build"),
    "groups": (
        lambda: model(optimizer=two_groups),
        "an optimizer with 4 parameters in its groups, this one has 1 + 3.",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_resuming_into_another_network(name: str, saved: Path) -> None:
    make, says = OTHERS[name]
    ours = make()
    ours.fit(1, DATA)
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in everything(ours).items()}
    scale = [ours.step.precision, torch.get_rng_state()]
    with pytest.raises(ValueError, match=f"resume: {saved}/step-000000004 ") as caught:
        ours.fit(2, DATA, callbacks=hs.Checkpoint(saved), resume="auto")
    assert says in str(caught.value)
    for key, tensor in everything(ours).items():
        assert tensor is before[key][0]
        assert torch.equal(tensor, before[key][1])
    assert ours.step.precision is scale[0]
    assert torch.equal(torch.get_rng_state(), scale[1])
    assert sorted(path.name for path in saved.iterdir()) == ["step-000000004"]


def test_the_advice_works(saved: Path) -> None:
    ours = model(layers(4, 8, 3, 3))
    account = ours.load(saved / "step-000000004", strict=False)
    assert account.matched == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert ours.fit(1, DATA, callbacks=hs.Checkpoint(saved.parent / "other")).epoch == 1
    assert model().fit(2, DATA, callbacks=hs.Checkpoint(saved), resume="auto").epoch == 2


def test_a_network_that_renames_what_it_loads_is_left_to_do_so(saved: Path) -> None:
    """torch's hook for checkpoints of older code: names differ, and everything is there."""

    def rename(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for old, new in (("0.", "first."), ("1.", "second.")):
            for name in [name for name in state if name.startswith(old)]:
                state[new + name.removeprefix(old)] = state.pop(name)

    net = nn.Sequential(OrderedDict(zip(("first", "second"), layers(4, 8, 3), strict=True)))
    net.register_load_state_dict_pre_hook(rename)
    ours, expected = model(net), model()
    for each in (ours, expected):
        each.fit(2, DATA, resume=saved)
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours.net.parameters(), expected.net.parameters(), strict=True)
    )


def test_loading_weights_of_another_network(saved: Path) -> None:
    ours = model(layers(4, 9, 3, 3))
    before = {name: tensor.clone() for name, tensor in ours.net.state_dict().items()}
    for source, name in ((saved, str(saved)), (layers(4, 8, 3).state_dict(), "load")):
        with pytest.raises(
            ValueError, match=f"^{name}: the weights do not fit the network: missing there: 2"
        ) as caught:
            ours.load(source)
        assert "0.weight ([8, 4] there, [9, 4] here)" in str(caught.value)
        assert "Nothing was loaded; load(..., strict=False) takes what fits." in str(caught.value)
        assert all(
            torch.equal(tensor, before[name]) for name, tensor in ours.net.state_dict().items()
        )


def test_a_checkpoint_that_is_no_run_is_refused(tmp_path: Path) -> None:
    hs.checkpoint.save(tmp_path / "one", [1, 2])
    with pytest.raises(ValueError, match=r"one: expected a run of version 1, got 'list'"):
        model().fit(1, DATA, resume=tmp_path / "one")
