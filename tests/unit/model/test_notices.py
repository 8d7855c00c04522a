"""What a user may not have meant is done right, and a `Notice` says so.

A network in eval mode, forgotten parameters, a resumed run with other settings.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from tests.support.equal_tensors import assert_equal_tensors, copy_tensors

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(64) % 3
pytestmark = pytest.mark.filterwarnings("ignore:.*batch-coupled")


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


def make_data() -> hs.data.Dataset:
    return hs.data.Dataset((X, Y), seed=1).shuffle().batch(8)


def make_model(net: nn.Module | None = None, **options: Any) -> hs.Model:
    if net is None:
        net = make_net()
    loss = options.pop("loss", nn.CrossEntropyLoss())
    return hs.Model(net, loss, torch.optim.SGD(net.parameters(), lr=0.1), **options)


def copy_state(model: hs.Model) -> list[Tensor]:
    return copy_tensors(model.net.state_dict().values())


# --- Train and eval mode ---


def test_a_network_in_eval_mode_is_trained_in_train_mode() -> None:
    in_train_mode = make_model()
    in_eval_mode = make_model(make_net().eval())
    torch.manual_seed(3)
    in_train_mode.fit(2, make_data())
    torch.manual_seed(3)
    message = r"came in eval mode, and is trained in train mode.*then \.eval\(\) on those"
    with pytest.warns(hs.Notice, match=message):
        in_eval_mode.fit(2, make_data())
    assert_equal_tensors(copy_state(in_eval_mode), copy_state(in_train_mode))
    assert all(module.training for module in in_eval_mode.net.modules())


def test_single_modules_in_eval_mode_stay_there_without_a_notice() -> None:
    net = make_net()
    net[1].eval()
    make_model(net).fit(1, make_data())  # a warning would be an error
    assert not net[1].training
    assert int(net[1].num_batches_tracked) == 0


def test_eval_mode_that_makes_no_difference_gives_no_notice() -> None:
    net = nn.Linear(6, 3).eval()
    make_model(net).fit(1, make_data())
    assert net.training


# --- A run that is resumed with other settings ---


def test_changed_settings_that_change_the_numbers_give_a_notice(tmp_path: Path) -> None:
    checkpoint = hs.Checkpoint(tmp_path, every_epochs=1)
    schedule = hs.schedules.cosine(0.1, 24)
    model = make_model(ema=0.5, clip_norm=1.0, schedule=schedule)
    model.fit(1, make_data(), callbacks=[checkpoint])

    changed = make_model(loss=nn.CrossEntropyLoss(label_smoothing=0.1), ema=0.99, clip_norm=2.0)
    with warnings.catch_warnings(record=True, action="always") as caught:
        changed.fit(2, make_data(), callbacks=[checkpoint], resume="auto")
    messages = "\n".join(str(warning.message) for warning in caught)
    assert "ema was 0.5 and is 0.99" in messages
    assert "clip_norm was 1.0 and is 2.0" in messages
    rate = float(changed.optimizer.param_groups[0]["lr"])  # type: ignore[union-attr]
    assert f"is none: the rate stays at {rate:g}" in messages
    assert rate != 0.1


def test_another_loss_gives_a_notice(tmp_path: Path) -> None:
    checkpoint = hs.Checkpoint(tmp_path, every_epochs=1)
    make_model().fit(1, make_data(), callbacks=[checkpoint])
    changed = make_model(loss=nn.MultiMarginLoss())
    with pytest.warns(hs.Notice, match="the loss was CrossEntropyLoss and is MultiMarginLoss"):
        changed.fit(2, make_data(), callbacks=[checkpoint], resume="auto")


# --- Construction ---


def test_parameters_in_no_group_of_the_optimizer_give_a_notice() -> None:
    net = make_net()

    def make_model_without_the_last_layer() -> None:
        parameters = [*net[0].parameters(), *net[1].parameters()]
        hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(parameters, lr=0.1))

    message = r"4\.weight, 4\.bias are in none of its groups.*requires_grad_\(False\)"
    with pytest.warns(hs.Notice, match=message):
        make_model_without_the_last_layer()
    net[4].requires_grad_(False)
    make_model_without_the_last_layer()


def test_a_precision_beside_a_custom_step_gives_a_notice_or_an_error() -> None:
    message = r"'O2' holds for evaluate and predict.*hs\.amp\.autocast"
    with pytest.warns(hs.Notice, match=message):
        hs.Model(make_net(), step=lambda x, y: x.sum(), precision="O2")

    step = make_model(precision="O2").step
    with pytest.raises(ValueError, match=r"given whole, in 'O2'"):
        hs.Model(make_net(), step=step, precision="O1")
    hs.Model(make_net(), step=step, precision="O2")
    hs.Model(make_net(), step=step)
