"""copy.deepcopy of a step or a model trains on exactly; other kinds of copies are refused."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from tests.support.captured_runs import differing_tensors

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 4},
    "ema and clip": {"ema": 0.9, "clip_norm": 0.1},
    "table of rates": {"lr": [0.1 * 0.9**i for i in range(20)]},
    "on the device": {"decide": "device"},
    "own forward": {"forward": lambda net, x, y: (net(x), y)},
}
PRECISIONS = ("fp32", "O1+bf16", "O2", "O2+bf16", "bf16", "fp64")


class Net(nn.Module):
    """Batch norm, dropout and tied weights: everything that a copy could lose."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        out: Tensor = self.head(torch.relu(self.second(hidden)))
        return out


def make_batches(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def make_step(optimizer: str = "sgd", precision: str = "fp32", **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = Net()
    return hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        OPTIMIZERS[optimizer](net.parameters()),
        precision=precision,
        **options,
    )


def train(step: hs.TrainStep, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    torch.manual_seed(5)
    losses = [step(*batch).loss.item() for batch in batches]
    step.flush()
    return losses


@pytest.mark.filterwarnings("ignore:batch-coupled layers see micro-batches")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam fused"])
def test_a_deep_copy_trains_on_as_the_step_does(
    optimizer: str, options: str, precision: str
) -> None:
    if optimizer == "sgd" and options == "on the device":
        optimizer = "sgd fused"
    if precision == "bf16" and optimizer == "sgd fused":
        optimizer = "adam fused"  # torch's fused SGD leaves half parameters on a CPU alone
    step = make_step(optimizer, precision, **OPTIONS[options])
    batches = make_batches()
    for batch in batches[:6]:  # inside a cycle, where there are cycles
        step(*batch)
    copied = copy.deepcopy(step)
    assert not {id(p) for p in copied.params} & {id(p) for p in step.params}
    assert copied.optimizer.param_groups[0]["params"][0] is copied.params[0]
    assert copied.optimizer_kind == step.optimizer_kind

    assert train(copied, batches[6:]) == train(step, batches[6:])
    assert differing_tensors(copied, step) == []

    # Each by itself.
    before = [p.detach().clone() for p in step.params]
    train(copied, batches)
    assert all(torch.equal(p, q) for p, q in zip(step.params, before, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_deep_copy_has_the_optimizer_as_it_is(optimizer: str) -> None:
    step = make_step(optimizer)
    train(step, make_batches(3))
    calls: list[object] = []
    step.optimizer.register_step_post_hook(lambda *arguments: calls.append(arguments[0]))
    copied = copy.deepcopy(step)
    train(copied, make_batches(2))
    assert calls == [copied.optimizer] * 2
    train(step, make_batches(2))
    assert differing_tensors(copied, step) == []


def test_a_step_after_an_overflow_is_copied_with_its_scale() -> None:
    step = make_step("sgd", "O2")
    x, y = make_batches(1)[0]
    step(x * 1e30, y)
    assert step.state.scale.item() < 2**16
    copied = copy.deepcopy(step)
    assert copied.state.scale.item() == step.state.scale.item()
    assert int(copied.state.skips) == 1


def test_copies_in_one_structure_stay_together() -> None:
    step = make_step()
    both = copy.deepcopy({"net": step.net, "step": step, "optimizer": step.optimizer})
    assert both["step"].net is both["net"]
    assert both["step"].optimizer is both["optimizer"]


def test_a_function_over_the_network_of_the_original_is_refused() -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def penalty() -> Tensor:
        return net.head.weight.square().sum()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, y) + penalty()

    def forward(_: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return net(x), y

    for step in (
        hs.TrainStep(net, loss, optimizer),
        hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, forward=forward),
    ):
        with pytest.raises(TypeError, match=r"variable .*net.*step\.state_dict\(\)"):
            copy.deepcopy(step)


def test_the_advice_of_a_refused_copy_works() -> None:
    step = make_step("adam fused", "O2")
    train(step, make_batches(3))
    other = make_step("adam fused", "O2")
    other.load_state_dict(step.state_dict())
    assert train(other, make_batches()) == train(step, make_batches())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_deep_copy_of_an_evaluation_keeps_its_precision_and_its_weights(precision: str) -> None:
    """fp64 is the answer in float64; the others round, and differ from a network left in fp32."""
    torch.manual_seed(0)
    net = Net().double() if precision == "fp64" else Net()
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=net.head.bias.dtype))
    x, y = make_batches(1)[0]
    evaluate = hs.EvalStep(net, weighted, precision=precision)
    before = evaluate(x, y)

    copied = copy.deepcopy(evaluate)
    with torch.no_grad():
        net.head.weight.zero_()
        weighted.weight.zero_()
    after = copied(x, y)
    assert torch.equal(after.loss, before.loss)
    assert torch.equal(after.outputs, before.outputs)
    assert torch.equal(copied.predict(x), before.outputs)
    if precision not in ("fp32", "fp64"):
        fp32 = hs.EvalStep(copied.net, nn.CrossEntropyLoss()).predict(x)
        assert not torch.equal(after.outputs, fp32)


def test_a_deep_copy_of_a_steps_evaluator_goes_with_the_copy_of_the_step() -> None:
    step = make_step(precision="O2")
    step_copy, evaluator_copy = copy.deepcopy((step, step.evaluator()))
    assert evaluator_copy.net is step_copy.net
    alone = copy.deepcopy(step.evaluator())
    batches = make_batches(3)
    x, y = batches[0]
    before = alone(x, y).loss
    train(step, batches)
    assert torch.equal(alone(x, y).loss, before)
    train(step_copy, batches)
    assert torch.equal(evaluator_copy(x, y).loss, step.evaluator()(x, y).loss)


def test_an_evaluation_with_a_function_over_its_own_network_is_not_copied() -> None:
    net = Net()
    evaluate = hs.EvalStep(net, nn.CrossEntropyLoss(), forward=lambda _, x, y: (net(x), y))
    with pytest.raises(TypeError, match=r"forward= uses the network .* variable 'net'"):
        copy.deepcopy(evaluate)


@pytest.mark.parametrize("make_copy", [copy.copy, pickle.dumps])
def test_copies_that_would_share_or_lose_the_network_are_refused(
    make_copy: Callable[[Any], Any],
) -> None:
    step = make_step()
    model = hs.Model(step.net, nn.CrossEntropyLoss(), step.optimizer)
    for original in (step, model):
        with pytest.raises(TypeError, match=r"deepcopy|state_dict"):
            make_copy(original)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_network_under_a_step_stays_a_plain_network(precision: str) -> None:
    step = make_step("sgd", precision)
    train(step, make_batches(3))
    step.net.eval()
    file = io.BytesIO()
    torch.save(step.net, file)
    file.seek(0)
    x = make_batches(1)[0][0].to(next(step.net.parameters()).dtype)
    expected = step.net(x)
    for copied in (copy.deepcopy(step.net), torch.load(file, weights_only=False)):
        assert not any("forward" in vars(module) for module in copied.modules())
        assert torch.equal(copied(x), expected)
        assert copied.first.weight is copied.second.weight
        copied(x).sum().backward()
        assert all(p.is_leaf and p.grad is not None for p in copied.head.parameters())


@pytest.mark.parametrize("precision", ["fp32", "O2", "bf16"])
def test_a_deep_copy_of_a_model_trains_and_evaluates_by_itself(precision: str) -> None:
    def make_model() -> hs.Model:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        metrics = {"acc": hs.metrics.Accuracy()}
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return hs.Model(
            net,
            nn.CrossEntropyLoss(),
            optimizer,
            precision,
            metrics=metrics,
            schedule=schedule,
            schedule_every="update",
        )

    batches = make_batches()
    model = make_model()
    torch.manual_seed(5)
    model.fit(1, batches)
    copied = copy.deepcopy(model)
    random_state = torch.get_rng_state()
    model.fit(1, batches)
    torch.set_rng_state(random_state)
    copied.fit(1, batches)
    assert differing_tensors(copied.step, model.step) == []
    assert copied.evaluate(batches) == model.evaluate(batches)
    assert copied.net is not model.net


def test_a_model_inside_fit_is_not_copied() -> None:
    class Copies(hs.Callback):
        def visit(self, run: Any) -> None:
            copy.deepcopy(run.model)

    net = nn.Linear(6, 3)
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="inside fit"):
        model.fit(1, make_batches(2), callbacks=[Copies()])
