"""EvalStep: the same network in the same precision, in eval mode, without gradients.

Means over batches are exact.
"""

import copy
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

F16 = torch.float16
F32 = torch.float32
F64 = torch.float64


def network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).to(
        device
    )


def batches(device: torch.device, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(n, 4, device=device), torch.randint(3, (n,), device=device)) for n in sizes
    ]


def mean_loss(records: list[Any]) -> Tensor:
    """Returns Σ loss · count / Σ count, as the record's contract says."""
    loss_sum = torch.zeros((), dtype=F64, device=records[0].loss.device)
    for record in records:
        loss_sum += record.loss.double() * record.count
    return loss_sum / sum(record.count for record in records)


def full_batch_loss(net: nn.Module, loss: Any, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the loss of all batches as one, in plain torch."""
    net.eval()
    x = torch.cat([x for x, _ in data])
    y = torch.cat([y for _, y in data])
    return loss(net(x), y)


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "O3"])
def test_it_runs_in_eval_mode_and_puts_every_flag_back(
    precision: str, device: torch.device
) -> None:
    net = network(device)
    net.train()
    net[1].eval()  # a user who freezes BatchNorm
    flags_before = [module.training for module in net.modules()]
    state_before = copy.deepcopy(net.state_dict())
    flags_inside = []
    net[2].register_forward_hook(lambda module, *_: flags_inside.append(module.training))
    [(x, y)] = batches(device, 5)
    hs.EvalStep(net, nn.CrossEntropyLoss(), precision=precision)(x, y)
    assert flags_inside == [False]
    flags_after = [module.training for module in net.modules()]
    assert flags_after == flags_before == [True, True, False, True, True]
    # BatchNorm's statistics did not move.
    for name, value in net.state_dict().items():
        assert torch.equal(value, state_before[name])


def test_flags_come_back_after_an_exception(device: torch.device) -> None:
    net = network(device)
    evaluate = hs.EvalStep(net, nn.CrossEntropyLoss(), precision="O2")
    with pytest.raises(RuntimeError):
        evaluate(
            torch.randn(2, 99, device=device), torch.zeros(2, dtype=torch.int64, device=device)
        )
    assert all(m.training for m in net.modules())
    assert all(p.dtype == F32 for p in net.parameters())
    [(x, y)] = batches(device, 2)
    assert evaluate(x, y).loss.isfinite()


def test_evaluation_neither_computes_nor_changes_gradients(device: torch.device) -> None:
    net = network(device)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    [(x, y)] = batches(device, 5)
    record = hs.EvalStep(net, nn.CrossEntropyLoss(), precision="O2")(x, y)
    assert not record.loss.requires_grad
    assert not record.outputs.requires_grad
    assert torch.is_grad_enabled()
    assert torch.equal(net[0].weight.grad, torch.ones_like(net[0].weight))
    assert net[3].weight.grad is None


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=1), F.cross_entropy]
)
def test_the_mean_over_uneven_batches_is_the_mean_over_the_data_set(
    loss: Any, device: torch.device
) -> None:
    net = network(device).double()
    data = [(x.double(), y) for x, y in batches(device, 7, 7, 2, 1)]
    evaluate = hs.EvalStep(net, loss, precision="fp64")
    records = [evaluate(x, y) for x, y in data]
    expected = full_batch_loss(net, loss, data)
    # float64 sums of 17 terms in another order
    assert torch.allclose(mean_loss(records), expected, rtol=1e-14, atol=0)


def test_class_weights_count_as_weights(device: torch.device) -> None:
    weight = torch.tensor([0.1, 2.0, 5.0], dtype=F64, device=device)
    net = network(device).double()
    loss = nn.CrossEntropyLoss(weight=weight)
    data = [(x.double(), y) for x, y in batches(device, 6, 3)]
    evaluate = hs.EvalStep(net, loss, precision="fp64")
    records = [evaluate(x, y) for x, y in data]
    expected = full_batch_loss(net, loss, data)
    # float64 sums in another order
    assert torch.allclose(mean_loss(records), expected, rtol=1e-14, atol=0)


def test_a_batch_without_terms_is_zero_of_zero(device: torch.device) -> None:
    evaluate = hs.EvalStep(network(device), nn.CrossEntropyLoss())
    record = evaluate(torch.randn(3, 4, device=device), torch.full((3,), -100, device=device))
    assert record.loss.item() == 0.0
    assert record.count.item() == 0


def test_a_regression_counts_elements(device: torch.device) -> None:
    net = nn.Linear(4, 3).to(device)
    record = hs.EvalStep(net, nn.MSELoss())(
        torch.randn(5, 4, device=device), torch.zeros(5, 3, device=device)
    )
    assert record.count.item() == 15


@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
def test_the_network_runs_in_its_precision_and_outputs_are_fp32(
    name: str, device: torch.device
) -> None:
    net = network(device)
    dtypes_inside = []
    net[3].register_forward_hook(lambda module, inputs, out: dtypes_inside.append(out.dtype))
    [(x, y)] = batches(device, 5)
    record = hs.EvalStep(net, nn.CrossEntropyLoss(), precision=name)(x, y)
    assert dtypes_inside == [F16]
    assert record.outputs.dtype == F32
    assert record.loss.dtype == F32
    assert torch.equal(record.loss, F.cross_entropy(record.outputs, y))
    net.eval()
    exact = net(x).detach()
    # four layers, each rounding its inputs and its output to 11 bits; logits are of order 1
    largest_logit = max(1.0, exact.abs().max().item())
    assert (record.outputs - exact).abs().max().item() <= 8 * 2.0**-11 * largest_logit
    assert not torch.equal(record.outputs, exact)


def test_fp32_is_plain_torch_bit_for_bit(device: torch.device) -> None:
    net = network(device)
    [(x, y)] = batches(device, 5)
    record = hs.EvalStep(net, nn.CrossEntropyLoss())(x, y)
    net.eval()
    with torch.no_grad():
        assert torch.equal(record.outputs, net(x))
        assert torch.equal(record.loss, F.cross_entropy(net(x), y))


def test_a_transformer_layer_evaluates_in_every_precision(device: torch.device) -> None:
    """In eval mode torch takes a fused path that reads the weights of its children directly."""
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(device)
    x = torch.randn(2, 5, 8, device=device)
    exact = hs.EvalStep(net, nn.MSELoss())(x, x).outputs
    for name in ("O1", "O2", "O3"):
        for kernels in ("auto", "torch"):
            precision = hs.Precision(name, kernels=kernels)
            outputs = hs.EvalStep(net, nn.MSELoss(), precision=precision)(x, x).outputs
            # about ten roundings to 11 bits of values up to 3
            assert (outputs - exact).abs().max().item() <= 10 * 3 * 2.0**-11


class OwnLoss(nn.Module):
    """As Hugging Face does it: keyword inputs, labels among them, the loss in the output."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.style = style

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.linear(x)
        loss = F.cross_entropy(logits, labels)
        if self.style == "dict":
            return {"loss": loss, "logits": logits}
        if self.style == "tuple":
            return loss, logits
        return types.SimpleNamespace(loss=loss, logits=logits)


@pytest.mark.parametrize("style", ["dict", "tuple", "object"])
def test_a_network_may_return_its_own_loss(style: str, device: torch.device) -> None:
    net = OwnLoss(style).to(device)
    [(x, y)] = batches(device, 5)
    evaluate = hs.EvalStep(net, count=lambda batch: len(batch["labels"]))
    record = evaluate({"x": x, "labels": y})
    logits = F.linear(x, net.linear.weight, net.linear.bias)
    assert torch.equal(record.loss, F.cross_entropy(logits, y))
    assert record.count.item() == 5
    if style == "dict":
        recorded_logits = record.outputs["logits"]
    elif style == "tuple":
        recorded_logits = record.outputs
    else:
        recorded_logits = record.outputs.logits
    assert torch.equal(recorded_logits, logits)


def build_trained(
    device: torch.device, precision: str, **options: Any
) -> tuple[hs.TrainStep, Tensor, Tensor]:
    net = network(device)
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.1),
        precision=precision,
        **options,
    )
    [(x, y)] = batches(device, 16)
    for _ in range(4):
        step(x, y)
    return step, x, y


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "O3"])
def test_evaluator_is_an_eval_step_of_the_same_precision(
    precision: str, device: torch.device
) -> None:
    step, x, y = build_trained(device, precision)
    evaluate = step.evaluator()
    eval_step = hs.EvalStep(step.net, nn.CrossEntropyLoss(), precision=precision)
    assert torch.equal(evaluate(x, y).outputs, eval_step(x, y).outputs)
    step(x, y)  # it follows the weights as they go on
    assert torch.equal(evaluate(x, y).outputs, eval_step(x, y).outputs)


def test_evaluating_between_steps_changes_no_bit_of_training(device: torch.device) -> None:
    plain, x, y = build_trained(device, "O2")
    evaluated, *_ = build_trained(device, "O2")
    evaluated.load_state_dict(plain.state_dict())
    evaluate = evaluated.evaluator()
    for i in range(3):
        torch.manual_seed(i)
        plain(x, y)
        torch.manual_seed(i)
        evaluate(x, y)
        evaluated(x, y)
    expected = plain.net.state_dict()
    actual = evaluated.net.state_dict()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_averaged_evaluates_the_moving_average_and_gives_the_weights_back(
    device: torch.device,
) -> None:
    net = network(device)
    average = [p.detach().clone() for p in net.parameters()]
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), ema=0.9
    )
    [(x, y)] = batches(device, 16)
    for _ in range(4):
        step(x, y)
        average = [
            a.lerp(p.detach(), 1 - 0.9) for a, p in zip(average, net.parameters(), strict=True)
        ]
    weights = [p.detach().clone() for p in net.parameters()]
    parameter_ids = [id(p) for p in net.parameters()]
    with step.averaged():
        assert all(torch.equal(p, a) for p, a in zip(net.parameters(), average, strict=True))
        averaged_record = step.evaluator()(x, y)
    record = step.evaluator()(x, y)
    assert not torch.equal(averaged_record.outputs, record.outputs)
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), weights, strict=True))
    assert [id(p) for p in net.parameters()] == parameter_ids
    with pytest.raises(KeyError), step.averaged():
        raise KeyError
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), weights, strict=True))


def test_averaged_needs_an_average(device: torch.device) -> None:
    step, *_ = build_trained(device, "fp32")
    with pytest.raises(ValueError, match="ema="), step.averaged():
        pass
