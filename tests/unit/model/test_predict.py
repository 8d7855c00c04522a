"""Predictions of networks with several outputs, of uneven samples, and with a custom forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(64) % 3


class TwoOutputs(nn.Module):
    """Returns two tensors, in a dict or in a tuple."""

    def __init__(self, *, as_dict: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.as_dict = as_dict

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        if self.as_dict:
            return {"mean": out, "spread": out.exp()}
        return out, out.exp()


@pytest.mark.parametrize("as_dict", [True, False])
def test_several_outputs_are_each_joined_over_the_batches(as_dict: bool) -> None:
    net = TwoOutputs(as_dict=as_dict)
    predictions = hs.Model(net).predict(X, batch=10)
    expected = net(X)
    assert type(predictions) is type(expected)
    keys: list[Any] = ["mean", "spread"] if as_dict else [0, 1]
    assert len(predictions) == len(keys)
    for key in keys:
        assert predictions[key].shape == expected[key].shape
        # Not bit for bit: a product of another batch size may sum in another order.
        torch.testing.assert_close(predictions[key], expected[key].detach())


class NamedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.inner(input_ids * attention_mask)
        return out


def test_a_dict_of_tensors_goes_to_the_network_by_name() -> None:
    net = NamedInputs()
    mask = (X > 0).float()
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    inputs = {"attention_mask": mask, "input_ids": X}
    expected = net(X, mask).detach()
    torch.testing.assert_close(model.predict(inputs, batch=10), expected)
    torch.testing.assert_close(model.predict({**inputs, "labels": Y}), expected)
    wide = {name: column.numpy().astype("float64") for name, column in inputs.items()}
    torch.testing.assert_close(model.predict(wide, batch_size=7), expected)


def test_a_dict_of_uneven_columns_is_refused_by_name() -> None:
    words = r"as many samples in each column, got 'input_ids' of 64, 'attention_mask' of 3"
    with pytest.raises(ValueError, match=words):
        hs.Model(NamedInputs()).predict({"input_ids": X, "attention_mask": X[:3]})


def test_samples_of_several_lengths_are_refused_and_can_be_streamed() -> None:
    batches = [(torch.ones(2, 5, 6),), (torch.ones(2, 7, 6),)]
    model = hs.Model(nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"samples of \[5, 3\] and of \[7, 3\].*stream=True"):
        model.predict(batches)
    shapes = [tuple(part.shape) for part in model.predict(batches, stream=True)]
    assert shapes == [(2, 5, 3), (2, 7, 3)]


def test_a_custom_forward_over_named_columns_predicts_too() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    ).eval()
    model = hs.Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.1),
        forward=lambda net, batch: (net(batch["img"]), batch["truth"]),
    )
    images = X.split(16)
    labels = Y.split(16)
    batches = [{"img": x, "truth": y} for x, y in zip(images, labels, strict=True)]
    expected = torch.cat([net(x) for x in images])
    assert torch.equal(model.predict(batches), expected)
    # Inputs alone.
    assert torch.equal(model.predict(X, batch=16), expected)
