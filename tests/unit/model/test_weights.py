"""Weights of a checkpoint or a file in another network.

What differs is named and nothing is changed; averages are loaded in place of the weights.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.model import Model
from tests.support.equal_tensors import assert_equal_tensors, copy_tensors

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
DATA = hs.data.Dataset((X, X[:, :3].argmax(1))).batch(6)

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def make_layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairwise(widths)))


def make_named_layers(first: str, second: str) -> nn.Sequential:
    """The layers of `make_layers(4, 8, 3)` under these names instead of 0 and 1."""
    layers = make_layers(4, 8, 3)
    return nn.Sequential(OrderedDict([(first, layers[0]), (second, layers[1])]))


def make_sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def make_sgd_with_two_groups(net: nn.Module) -> torch.optim.Optimizer:
    first, *others = net.parameters()
    groups = [{"params": [first]}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def make_model(
    net: nn.Module | None = None,
    loss: Any = None,
    make_optimizer: MakeOptimizer = make_sgd,
) -> Model:
    if net is None:
        net = make_layers(4, 8, 3)
    if loss is None:
        loss = nn.CrossEntropyLoss()
    return Model(net, loss, make_optimizer(net), "O2")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder with the checkpoint of one epoch, at step 4."""
    folder = tmp_path / "run"
    make_model().fit(1, DATA, callbacks=hs.Checkpoint(folder))
    return folder


def all_tensors(model: Model) -> dict[str, Tensor]:
    """Weights, optimizer state, averages, loss scale and counters, by name; not copies."""
    tensors = dict(model.net.state_dict(keep_vars=True))
    for name, value in vars(model.step.state).items():
        if isinstance(value, Tensor):
            tensors[f"state.{name}"] = value
    assert model.optimizer is not None
    for index, p in enumerate(model.net.parameters()):
        for name, value in model.optimizer.state[p].items():
            tensors[f"{index}.{name}"] = value
    return tensors


class LossWithBuffer(nn.Module):
    """A loss with a buffer of its own."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(2))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) * self.factor[0]


# --- Resuming ---

# The model that resumes, and what the error says.
OTHER_MODELS: dict[str, tuple[Callable[[], Model], str]] = {
    "wider": (
        lambda: make_model(make_layers(4, 9, 3)),
        "of another shape: 0.weight ([8, 4] there, [9, 4] here), 0.bias ([8] there, [9] here), "
        "1.weight ([3, 8] there, [3, 9] here). Build the network as it was",
    ),
    "deeper": (
        lambda: make_model(make_layers(4, 8, 3, 3)),
        "from another network: missing there: 2.weight, 2.bias. Build",
    ),
    "shallower": (
        lambda: make_model(make_layers(4, 8)),
        "from another network: unknown to this network: 1.weight, 1.bias. ",
    ),
    "many": (
        lambda: make_model(make_layers(4, 8, 3, 3, 3, 3, 3)),
        "missing there: 2.weight, 2.bias, 3.weight, 3.bias and 4 more. Build",
    ),
    "renamed": (
        lambda: make_model(make_named_layers("a", "b")),
        "missing there: a.weight, a.bias, b.weight, b.bias; "
        "unknown to this network: 0.weight, 0.bias, 1.weight, 1.",
    ),
    "another loss": (
        lambda: make_model(loss=LossWithBuffer()),
        "missing there: loss.factor. Build",
    ),
    "groups": (
        lambda: make_model(make_optimizer=make_sgd_with_two_groups),
        "an optimizer with 4 parameters in its groups, this one has 1 + 3.",
    ),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_resuming_into_another_network_is_refused_and_changes_nothing(
    name: str, checkpoints: Path
) -> None:
    make_other, differences = OTHER_MODELS[name]
    model = make_other()
    model.fit(1, DATA)
    tensors_before = all_tensors(model)
    values_before = copy_tensors(tensors_before.values())
    precision_before = model.step.precision
    rng_state_before = torch.get_rng_state()

    message = f"resume: {checkpoints}/step-000000004 "
    with pytest.raises(ValueError, match=message) as caught:
        model.fit(2, DATA, callbacks=hs.Checkpoint(checkpoints), resume="auto")
    assert differences in str(caught.value)

    for key, tensor in all_tensors(model).items():
        assert tensor is tensors_before[key]
    assert_equal_tensors(tensors_before.values(), values_before)
    assert model.step.precision is precision_before
    assert torch.equal(torch.get_rng_state(), rng_state_before)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000000004"]


def test_the_advice_for_another_network_works(checkpoints: Path) -> None:
    deeper = make_model(make_layers(4, 8, 3, 3))
    result = deeper.load(checkpoints / "step-000000004", strict=False)
    assert result.matched == ("0.weight", "0.bias", "1.weight", "1.bias")
    other_folder = checkpoints.parent / "other"
    assert deeper.fit(1, DATA, callbacks=hs.Checkpoint(other_folder)).epoch == 1

    same = make_model()
    assert same.fit(2, DATA, callbacks=hs.Checkpoint(checkpoints), resume="auto").epoch == 2


def test_a_network_that_renames_what_it_loads_is_resumed(checkpoints: Path) -> None:
    """torch has a hook for checkpoints of older code: the names differ, and all weights exist."""

    def rename(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for old, new in (("0.", "first."), ("1.", "second.")):
            for name in list(state):
                if name.startswith(old):
                    state[new + name.removeprefix(old)] = state.pop(name)

    net = make_named_layers("first", "second")
    net.register_load_state_dict_pre_hook(rename)
    renamed = make_model(net)
    plain = make_model()
    for model in (renamed, plain):
        model.fit(2, DATA, resume=checkpoints)
    assert_equal_tensors(renamed.net.parameters(), plain.net.parameters())


def test_a_checkpoint_that_is_no_run_is_refused(tmp_path: Path) -> None:
    hs.checkpoint.save(tmp_path / "one", [1, 2])
    with pytest.raises(ValueError, match=r"one: expected a run of version 1, got 'list'"):
        make_model().fit(1, DATA, resume=tmp_path / "one")


# --- Loading weights alone ---


def test_loading_weights_of_another_network_is_refused_and_changes_nothing(
    checkpoints: Path,
) -> None:
    model = make_model(make_layers(4, 9, 3, 3))
    before = copy_tensors(model.net.state_dict().values())
    state_dict = make_layers(4, 8, 3).state_dict()
    for source, name in ((checkpoints, str(checkpoints)), (state_dict, "load")):
        message = f"^{name}: the weights do not fit the network: missing there: 2"
        with pytest.raises(ValueError, match=message) as caught:
            model.load(source)
        assert "0.weight ([8, 4] there, [9, 4] here)" in str(caught.value)
        assert "Nothing was loaded; load(..., strict=False) takes what fits." in str(caught.value)
        assert_equal_tensors(model.net.state_dict().values(), before)


# --- Loading averages ---


def make_net_with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


class TiedWeights(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.b(self.a(x)))
        return out


def make_fp32_model(net: nn.Module, ema: float | None = None) -> Model:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Model(net, nn.CrossEntropyLoss(), optimizer, ema=ema)


def make_data() -> hs.data.Dataset:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    return hs.data.Dataset((x, torch.arange(64) % 3), seed=1).shuffle().batch(8)


@pytest.mark.filterwarnings("ignore:.*batch-coupled")
def test_a_run_with_averages_is_loaded_as_it_was_evaluated(tmp_path: Path) -> None:
    trained = make_fp32_model(make_net_with_batch_norm(), ema=0.9)
    checkpoint = hs.Checkpoint(tmp_path, every_epochs=1)
    run = trained.fit(2, make_data(), valid=make_data(), callbacks=[checkpoint])

    loaded = make_fp32_model(make_net_with_batch_norm())
    result = loaded.load(tmp_path)
    assert len(result.averaged) == 6
    assert "averages" in str(result)
    assert loaded.evaluate(make_data())["loss"] == run.history[-1]["valid_loss"]
    for p, average in zip(trained.net.parameters(), loaded.net.parameters(), strict=True):
        assert not torch.equal(p, average)


def test_a_tied_weight_is_its_average_under_every_name(tmp_path: Path) -> None:
    trained = make_fp32_model(TiedWeights(), ema=0.9)
    loaded = make_fp32_model(TiedWeights())
    trained.fit(1, make_data(), callbacks=[hs.Checkpoint(tmp_path, every_epochs=1)])
    loaded.load(tmp_path)
    with trained.step.averaged():
        averages = trained.net.state_dict().values()
        assert_equal_tensors(loaded.net.state_dict().values(), averages)
