"""Losses that the network computes itself are taken in float32, as those beside it are.

The measure is the same training with the loss outside: the same records and, where the loss is
torch's, the same bits. The loss scale grows every three updates, so that it soon finds its limit.
Before, a loss inside a float16 network was float16, and the scale 2^16, where backward begins, inf.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.precision.op_rules import OpRules
from tests.support.op_info import float_operations, samples_of

UPDATES = 24
F16 = torch.float16
BF16 = torch.bfloat16
F32 = torch.float32
LOWS = ["float16", "bfloat16"]

Loss = Callable[[Tensor, Tensor], Tensor]


class WithLoss(nn.Module):
    """A network that takes its targets too, and returns the loss."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.net(x), target)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(
    net: nn.Module, loss: Loss | None, target: Tensor, name: str, low: str, **options: Any
) -> list[hs.Record]:
    scale = hs.DynamicScale(interval=3) if low == "float16" else None
    kept = ("target",) if isinstance(net, WithLoss) else ()
    precision = hs.Precision(name, dtype=low, scale=scale, keep_inputs=kept)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, loss, optimizer, precision=precision, **options)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).to(F16).float()
    return [step(x, target) for _ in range(UPDATES)]


def assert_same_training(
    records: list[hs.Record], expected: list[hs.Record], net: nn.Module, expected_net: nn.Module
) -> None:
    for record, expected_record in zip(records, expected, strict=True):
        assert record.loss.dtype == F32
        assert torch.equal(record.loss, expected_record.loss)
        assert torch.equal(record.scale, expected_record.scale)
        assert torch.equal(record.skipped, expected_record.skipped)
    for p, q in zip(net.parameters(), expected_net.parameters(), strict=True):
        assert torch.equal(p, q)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


CLASSES = torch.arange(32) % 4
SIGNS = (torch.arange(32 * 4).view(32, 4) % 2 * 2 - 1).float()
PROBABILITIES = rows(32, 4).softmax(-1)
LOSS_MODULES: dict[str, tuple[Loss, Tensor]] = {
    "MSELoss": (nn.MSELoss(), rows(32, 4)),
    "L1Loss": (nn.L1Loss(), rows(32, 4)),
    "SmoothL1Loss": (nn.SmoothL1Loss(), rows(32, 4)),
    "HuberLoss": (nn.HuberLoss(), rows(32, 4)),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), CLASSES),
    "CrossEntropyLoss, smoothed": (
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.2, 0.3, 0.4]), label_smoothing=0.1),
        CLASSES,
    ),
    "CrossEntropyLoss of a sum": (nn.CrossEntropyLoss(reduction="sum"), CLASSES),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), PROBABILITIES),
    "BCEWithLogitsLoss, weighted": (
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3.0, 1.1, 0.7])),
        PROBABILITIES,
    ),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(), CLASSES[:, None].expand(32, 4).float()),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(), SIGNS),
    "SoftMarginLoss": (nn.SoftMarginLoss(), SIGNS),
    "MultiMarginLoss": (nn.MultiMarginLoss(), CLASSES),
    "MultiLabelMarginLoss": (
        nn.MultiLabelMarginLoss(),
        torch.tensor([[0, 2, -1, -1]]).expand(32, 4),
    ),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), (SIGNS + 1) / 2),
    "KLDivLoss": (nn.KLDivLoss(reduction="batchmean"), PROBABILITIES),
}


@pytest.mark.parametrize("name", ["O2", "O3"])
@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("kind", LOSS_MODULES)
def test_a_loss_of_torch_gives_the_same_bits_inside_and_outside(
    kind: str, low: str, name: str
) -> None:
    loss, target = LOSS_MODULES[kind]
    outside = make_net()
    options = {"nonfinite": "skip"}
    expected = train(outside, loss, target, name, low, **options)
    inside = make_net()
    records = train(WithLoss(inside, loss), None, target, name, low, **options)
    assert_same_training(records, expected, inside, outside)


@pytest.mark.parametrize("low", LOWS)
def test_forward_may_return_the_loss(low: str) -> None:
    """As with a LightningModule's training_step, from parts of the network."""
    loss, target = LOSS_MODULES["CrossEntropyLoss"]
    outside = make_net()
    expected = train(outside, loss, target, "O2", low)
    for forward in (
        lambda net, x, y: F.cross_entropy(net(x), y),
        lambda net, x, y: F.cross_entropy(net[2](net[1](net[0](x))), y),
        lambda net, x, y: {"loss": loss(net[2](net[1](net[0](x))), y)},
    ):
        net = make_net()
        records = train(net, None, target, "O2", low, forward=forward)
        assert_same_training(records, expected, net, outside)


def negative_log_likelihood(out: Tensor, target: Tensor) -> Tensor:
    classes = target.abs().argmax(-1, keepdim=True)
    return -out.log_softmax(-1).gather(1, classes).mean()


WRITTEN_BY_HAND: dict[str, Loss] = {
    "mean": lambda out, target: ((out - target) ** 2).mean(),
    "torch.mean": lambda out, target: torch.mean((out - target).abs()),
    "mean over all dimensions": lambda out, target: ((out - target) ** 2).mean(dim=(0, 1)),
    "mean of means": lambda out, target: ((out - target) ** 2).mean(1).mean(),
    "sum over the number": lambda out, target: ((out - target) ** 2).sum() / out.numel(),
    "einsum": lambda out, target: torch.einsum("ij,ij->", out, target) / out.numel(),
    "variance": lambda out, target: (out - target).var(),
    "deviation": lambda out, target: torch.std(out - target, None),
    "distance": lambda out, target: torch.dist(out, target.to(out.dtype)) / out.numel(),
    "norm": lambda out, target: (out - target).norm(),
    "dot": lambda out, target: torch.dot(out.flatten(), target.flatten()) / out.numel(),
    "log likelihood": negative_log_likelihood,
}


@pytest.mark.parametrize("kind", WRITTEN_BY_HAND)
def test_a_loss_written_by_hand_loses_no_more_updates_inside(kind: str) -> None:
    """Also where its target was rounded with the other inputs."""
    loss = WRITTEN_BY_HAND[kind]
    target = rows(32, 4).half().float()
    outside = make_net()
    expected = train(outside, loss, target, "O2", "float16")
    inside = WithLoss(make_net(), loss)
    precision = hs.Precision("O2", scale=hs.DynamicScale(interval=3))
    optimizer = torch.optim.SGD(inside.parameters(), lr=0.1)
    step = hs.TrainStep(inside, None, optimizer, precision=precision)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).to(F16).float()
    records = [step(x, target) for _ in range(UPDATES)]
    assert not records[0].skipped or expected[0].skipped
    assert sum(r.skipped for r in records) <= sum(r.skipped for r in expected)
    for record, expected_record in zip(records, expected, strict=True):
        # The target was subtracted in half.
        assert record.loss.item() == pytest.approx(expected_record.loss.item(), rel=5e-3, abs=5e-3)


@pytest.mark.filterwarnings("ignore:(linear_cross_entropy|reduction):UserWarning")
@pytest.mark.parametrize("low", [F16, BF16])
def test_every_loss_function_of_torch_is_float32_in_a_low_network(low: torch.dtype) -> None:
    """Equal to that of its operands in float32, bit for bit."""
    names = [name for name in float_operations() if is_loss(name)]
    assert len(names) > 20
    for name in names:
        op = float_operations()[name]
        for sample in samples_of(op, 8):
            low_sample = sample.to(low)
            expected = low_sample.to(F32).call(op.op)
            with OpRules(low):
                value = low_sample.call(op.op)
            assert value.dtype == F32, name
            assert torch.equal(value.nan_to_num(), expected.nan_to_num()), name


def is_loss(name: str) -> bool:
    function = name.removeprefix("nn.functional.").partition(".")[0]
    is_named_so = function.endswith(("_loss", "cross_entropy", "kl_div", "_with_logits"))
    return is_named_so and name.startswith("nn.functional.")


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "torch.sum": torch.sum,
    "sum by name": lambda x: torch.sum(input=x),
    "mean of no dimensions": lambda x: x.mean(dim=()),
    "sum over a list": lambda x: x.sum([0, 1]),
    "nansum": lambda x: x.nansum(),
    "trace": lambda x: x[:300, :300].trace(),
    "norm": lambda x: x.norm() ** 2,
    "vector_norm": lambda x: torch.linalg.vector_norm(x) ** 2,
    "einsum": lambda x: torch.einsum("ij->", x),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_one_number_from_a_low_tensor_is_float32(name: str) -> None:
    """90,000 and 300 · 300: more than float16 holds, or rounded in it."""
    x = torch.ones(300, 300, dtype=F16)
    exact = REDUCTIONS[name](x.double())
    with OpRules(F16):
        value = REDUCTIONS[name](x)
    assert value.dtype == F32
    assert value.item() == pytest.approx(exact.item(), rel=1e-6)


def test_a_reduction_that_leaves_dimensions_stays_low() -> None:
    x = torch.ones(3, 4, dtype=F16)
    with OpRules(F16):
        for value in (
            x.sum(0),
            x.var(0),
            x.std(1, keepdim=True),
            torch.var_mean(x, dim=0)[0],
            x.mean(1),
            x.sum(dim=(0,)),
            x.sum(0, True),
            x.mean(dim=(0, 1), keepdim=True),
            x.norm(dim=1),
            torch.einsum("ij->i", x),
        ):
            assert value.dtype == F16


@pytest.mark.parametrize("low", LOWS)
def test_hugging_face_models_take_their_loss_in_float32(low: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    tokens = torch.randint(32, (4, 12))
    for net, batch in (
        (transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}),
        (bert_classifier(transformers, 3), {"input_ids": tokens, "labels": tokens[:, 0] % 3}),
        (bert_classifier(transformers, 1), {"input_ids": tokens, "labels": rows(4)}),
    ):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        precision = hs.Precision("O2", dtype=low)
        step = hs.TrainStep(net, None, optimizer, precision=precision)
        records = [step(batch) for _ in range(6)]
        assert all(record.loss.dtype == F32 for record in records)
        assert all(record.updated for record in records)
        # Not a number that float16 holds: no rounding on the way.
        assert records[0].loss != records[0].loss.to(getattr(torch, low)).float()


def bert_classifier(transformers: Any, labels: int) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    net: nn.Module = transformers.BertForSequenceClassification(config)
    return net
