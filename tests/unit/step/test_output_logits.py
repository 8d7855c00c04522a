"""Outputs with .logits under a loss of torch, as Hugging Face's models return them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

IDS = torch.arange(24).reshape(6, 4) % 11
MASK = torch.ones(6, 4, dtype=torch.int64)
LABELS = torch.arange(6) % 3


class Output:
    """No pytree and no dict: what torch's own functions cannot look into."""

    def __init__(self, logits: Tensor) -> None:
        self.loss = None
        self.logits = logits


class Classifier(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 3)
        self.wrap = wrap

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.wrap(self.head(self.embedding(input_ids).mean(1)))


WRAPS: dict[str, Callable[[Tensor], Any]] = {
    "object": Output,
    "dict": lambda logits: {"logits": logits},
}


def make_model(wrap: Callable[[Tensor], Any], precision: Any = "fp32", **options: Any) -> hs.Model:
    torch.manual_seed(0)
    net = Classifier(wrap)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    metrics = {"acc": hs.metrics.Accuracy()}
    return hs.Model(net, nn.CrossEntropyLoss(), optimizer, precision, metrics=metrics, **options)


@pytest.mark.parametrize("precision", ["fp32", "O2"])
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_loss_gets_the_logits_in_fit_and_evaluate(
    wrap: Callable[[Tensor], Any], precision: str
) -> None:
    """The same weights and scores as those of a network that returns the tensor itself."""
    batches = [(IDS, LABELS), (IDS.flip(0), LABELS.flip(0))]
    plain = make_model(lambda logits: logits, precision)
    model = make_model(wrap, precision)
    plain.fit(2, batches)
    model.fit(2, batches)
    for actual, expected in zip(model.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(actual, expected)
    assert model.evaluate(batches) == plain.evaluate(batches)


def test_the_hint_for_batches_of_dicts_uses_their_names_and_works() -> None:
    batches = [{"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}]
    with pytest.raises(ValueError, match="say how to use it") as caught:
        make_model(Output).fit(1, batches)
    line = (
        "forward=lambda net, b: (net(input_ids=b['input_ids'], "
        "attention_mask=b['attention_mask']), b['labels'])"
    )
    assert line in str(caught.value)
    forward = eval(line.removeprefix("forward="))
    assert make_model(Output, forward=forward).fit(1, batches).global_step == 1


def test_a_network_of_hugging_face_takes_a_loss_of_torch() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, num_labels=3, max_position_embeddings=8,
    )  # fmt: skip
    net = transformers.BertForSequenceClassification(config)
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    assert model.fit(1, [(IDS, LABELS)]).global_step == 1
