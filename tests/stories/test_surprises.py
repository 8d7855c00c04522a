"""What users do not expect of their own programs is done right or told: modes, averages, forgotten parameters."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
pytestmark = pytest.mark.filterwarnings("ignore:.*batch-coupled")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


def data(batch: int = 8) -> hs.data.Dataset:
    return hs.data.Dataset((X, Y), seed=1).shuffle().batch(batch)


def model(net: nn.Module | None = None, precision: str = "fp32", **options: Any) -> hs.Model:
    net = net or network()
    return hs.Model(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), precision, **options
    )


def weights(m: hs.Model) -> list[Tensor]:
    return [t.clone() for t in m.net.state_dict().values()]


def test_a_network_that_comes_in_eval_mode_is_trained_in_train_mode() -> None:
    right, mine = model(), model(network().eval())
    torch.manual_seed(3)
    right.fit(2, data())
    torch.manual_seed(3)
    with pytest.warns(
        hs.Notice,
        match=r"came in eval mode, and is trained in train mode.*then \.eval\(\) on those",
    ):
        mine.fit(2, data())
    assert all(torch.equal(a, b) for a, b in zip(weights(right), weights(mine), strict=True))
    assert all(module.training for module in mine.net.modules())


def test_modules_that_were_put_into_eval_mode_stay_there() -> None:
    net = network()
    net[1].eval()
    model(net).fit(1, data())  # a warning would be an error
    assert not net[1].training
    assert int(net[1].num_batches_tracked) == 0


def test_eval_mode_that_changes_nothing_is_nobodys_news() -> None:
    net = nn.Linear(6, 3).eval()
    model(net).fit(1, data())
    assert net.training


def test_a_run_with_averages_is_loaded_as_it_was_evaluated(tmp_path: Path) -> None:
    first = model(ema=0.9)
    scores = first.fit(
        2, data(), valid=data(), callbacks=[hs.Checkpoint(tmp_path, every_epochs=1)]
    ).history[-1]
    again = model()
    account = again.load(tmp_path)
    assert len(account.averaged) == 6
    assert "averages" in str(account)
    assert again.evaluate(data())["loss"] == scores["valid_loss"]
    raw = [p.detach().clone() for p in first.net.parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(raw, again.net.parameters(), strict=True))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.b(self.a(x)))
        return out


def test_a_tied_weight_is_its_average_under_every_name(tmp_path: Path) -> None:
    first, again = model(Tied(), ema=0.9), model(Tied())
    first.fit(1, data(), callbacks=[hs.Checkpoint(tmp_path, every_epochs=1)])
    again.load(tmp_path)
    with first.step.averaged():
        assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(again), strict=True))


def test_settings_that_change_the_numbers_are_told_when_they_changed(tmp_path: Path) -> None:
    saver = [hs.Checkpoint(tmp_path, every_epochs=1)]
    schedule = hs.schedules.cosine(0.1, 24)
    model(ema=0.5, clip_norm=1.0, schedule=schedule).fit(1, data(), callbacks=saver)
    net = network()
    other = hs.Model(
        net,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        torch.optim.SGD(net.parameters(), lr=0.1),
        ema=0.99,
        clip_norm=2.0,
    )
    with warnings.catch_warnings(record=True, action="always") as seen:
        other.fit(2, data(), callbacks=saver, resume="auto")
    said = "\n".join(str(each.message) for each in seen)
    assert "ema was 0.5 and is 0.99" in said
    assert "clip_norm was 1.0 and is 2.0" in said
    rate = float(other.optimizer.param_groups[0]["lr"])  # type: ignore[union-attr]
    assert f"is none: the rate stays at {rate:g}" in said
    assert rate != 0.1


def test_another_loss_is_told(tmp_path: Path) -> None:
    saver = [hs.Checkpoint(tmp_path, every_epochs=1)]
    model().fit(1, data(), callbacks=saver)
    net = network()
    other = hs.Model(net, nn.MultiMarginLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.warns(hs.Notice, match="the loss was CrossEntropyLoss and is MultiMarginLoss"):
        other.fit(2, data(), callbacks=saver, resume="auto")


def test_parameters_that_nobody_moves_are_told() -> None:
    net = network()
    with pytest.warns(
        hs.Notice, match=r"4\.weight, 4\.bias are in none of its groups.*requires_grad_\(False\)"
    ):
        hs.Model(
            net,
            nn.CrossEntropyLoss(),
            torch.optim.SGD([*net[0].parameters(), *net[1].parameters()], lr=0.1),
        )
    net[4].requires_grad_(False)
    hs.Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD([*net[0].parameters(), *net[1].parameters()], lr=0.1),
    )


def test_a_precision_beside_a_step_of_ones_own() -> None:
    with pytest.warns(hs.Notice, match=r"'O2' holds for evaluate and predict.*hs\.amp\.autocast"):
        hs.Model(network(), step=lambda x, y: x.sum(), precision="O2")
    whole = model(precision="O2").step
    with pytest.raises(ValueError, match=r"given whole, in 'O2'"):
        hs.Model(network(), step=whole, precision="O1")
    hs.Model(network(), step=whole, precision="O2")
    hs.Model(network(), step=whole)


@pytest.mark.parametrize("given", [{"x": X, "y": Y}, (X, Y)], ids=["dict", "tuple"])
def test_a_forward_of_ones_own_that_returns_the_loss_takes_the_columns_of_a_data_set(
    given: Any,
) -> None:
    def forward(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(net(x), y)

    batches = hs.data.Dataset(given, seed=1).shuffle().batch(8)
    net = network()
    mine = hs.Model(
        net,
        None,
        torch.optim.SGD(net.parameters(), lr=0.1),
        forward=forward,
        count=lambda b: len(b[1]),
    )
    right = model()
    for each in (mine, right):
        torch.manual_seed(3)
        each.fit(1, batches)
    assert all(torch.equal(a, b) for a, b in zip(weights(right), weights(mine), strict=True))


LOSSES: dict[str, Any] = {
    "tuple": (
        lambda out, y: (nn.functional.cross_entropy(out, y), out),
        "received tuple with the loss first",
    ),
    "dict": (lambda out, y: {"loss": nn.functional.cross_entropy(out, y)}, "received dict"),
    "float": (lambda out, y: nn.functional.cross_entropy(out, y).item(), "received float"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_returns_no_tensor_is_told(name: str) -> None:
    loss, said = LOSSES[name]
    net = network()
    m = hs.Model(net, loss, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=rf"loss: expected it to return a tensor.*{said}.*metrics="):
        m.fit(1, data())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("scheduler", "schedule"),
        ("metric", "metrics"),
        ("gradient_clip_val", "clip_norm"),
        ("acumulate", "accumulate"),
    ],
)
def test_an_option_by_another_name_is_answered_with_ours(name: str, meant: str) -> None:
    with pytest.raises(
        TypeError, match=rf"Model: unknown option '{name}'; did you mean '{meant}'\?.*schedule, "
    ):
        model(**{name: 1})


def test_a_step_of_ones_own_without_a_forward_is_told_how_to_evaluate() -> None:
    m = hs.Model(nn.ModuleList([network()]), step=lambda x, y: x.sum())
    with pytest.raises(ValueError, match=r"ModuleList has no forward.*eval_step="):
        m.fit(1, data(), valid=data())


class Pair(nn.Module):
    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.inner, self.named = nn.Linear(6, 3), named

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        return {"mean": out, "spread": out.exp()} if self.named else (out, out.exp())


@pytest.mark.parametrize("named", [True, False])
def test_predictions_of_several_tensors_are_whole(named: bool) -> None:
    net = Pair(named=named)
    m = hs.Model(net)
    got, right = m.predict(X, batch=10), net(X)
    assert type(got) is type(right)
    pairs = [(got[k], right[k]) for k in (right if named else range(2))]
    assert all(a.shape == b.shape for a, b in pairs)
    torch.testing.assert_close(
        [a for a, _ in pairs], [b.detach() for _, b in pairs]
    )  # other batches, other products


def test_predictions_of_several_lengths_ask_for_a_stream() -> None:
    batches = [(torch.ones(2, 5, 6),), (torch.ones(2, 7, 6),)]
    m = hs.Model(nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"samples of \[5, 3\] and of \[7, 3\].*stream=True"):
        m.predict(batches)
    assert [tuple(part.shape) for part in m.predict(batches, stream=True)] == [(2, 5, 3), (2, 7, 3)]


def test_a_forward_over_named_columns_predicts_too() -> None:
    net = network().eval()
    m = hs.Model(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1),
        forward=lambda net, b: (net(b["img"]), b["truth"]),
    )  # fmt: skip
    batches = [{"img": X[i : i + 16], "truth": Y[i : i + 16]} for i in range(0, 64, 16)]
    assert torch.equal(m.predict(batches), torch.cat([net(b["img"]) for b in batches]))
    assert torch.equal(
        m.predict(X, batch=16), torch.cat([net(b["img"]) for b in batches])
    )  # inputs alone


def test_a_device_that_halted_between_two_looks_ends_the_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA the host learns of it some calls late; here it never does by itself."""
    monkeypatch.setattr(
        "halfstep.utils.device_values.AsyncHostRead.poll", lambda self, value, device: None
    )
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 64, 8)]
    batches[4] = (batches[4][0] * torch.nan, batches[4][1])
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    m = hs.Model(net, nn.CrossEntropyLoss(), optimizer, decide="device", capture=False)
    with pytest.raises(hs.NonFiniteError, match="step 5: non-finite gradient in weight, bias"):
        m.fit(1, batches)
    assert int(m.step.state.updates) == 4
