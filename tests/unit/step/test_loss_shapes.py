"""A target that torch would repeat to the outputs, or the outputs to it, is refused: everywhere.

Outputs [N, 1] against targets [N] are N * N terms to torch's elementwise losses, and train to the
mean of the targets.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.step.loss_shapes import find_shape_problem
from tests.support.emulated_graphs import sink_with_emulated_graphs

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(1)

LOSSES: dict[str, Any] = {
    "mse": nn.MSELoss(),
    "sum": nn.MSELoss(reduction="sum"),
    "l1": nn.L1Loss(),
    "smooth l1": nn.SmoothL1Loss(),
    "huber": nn.HuberLoss(),
    "poisson": nn.PoissonNLLLoss(),
    "soft margin": nn.SoftMarginLoss(),
    "kl": nn.KLDivLoss(reduction="batchmean"),
    "logits": nn.BCEWithLogitsLoss(),
    "function": F.mse_loss,
    "partial": partial(F.huber_loss, delta=2.0),
}


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MSELoss()

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.inner(out, y) + 0.1 * out.abs().mean()
        return loss


OWN_LOSSES: dict[str, Any] = {
    "module": OwnLoss(),
    "function": lambda out, y: F.mse_loss(out, y),
    "keywords": lambda out, y: F.l1_loss(target=y, input=out),
}


def make_step(loss: Any, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    return hs.TrainStep(net, loss, torch.optim.SGD(net.parameters(), lr=0.1), **options)


def make_model(loss: Any = None, **options: Any) -> hs.Model:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    return hs.Model(net, loss or nn.MSELoss(), optimizer, **options)


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r"expected a target of the outputs' shape") as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "O2"}], ids=str)
def test_a_step_refuses_and_says_what_to_write(loss: Any, options: dict[str, Any]) -> None:
    step = make_step(loss, **options)
    target = Y.sigmoid()
    message = refusal(lambda: step(X, target))
    assert "outputs' shape [32, 1], received [32], which torch would repeat" in message
    assert "to [32, 32]. Write y.unsqueeze(-1) for the target y. " in message
    assert step.state.steps == 0
    assert torch.isfinite(step(X, target.unsqueeze(-1)).loss)


@pytest.mark.parametrize("loss", OWN_LOSSES.values(), ids=OWN_LOSSES)
def test_a_loss_that_calls_one_of_torchs_is_watched(loss: Any) -> None:
    message = refusal(lambda: make_step(loss)(X, Y))
    assert "which the loss calls: expected" in message
    assert "Write y.unsqueeze(-1) for the target y; " in message
    step = make_step(loss)
    step(X, Y.unsqueeze(-1))
    refusal(lambda: step(X, Y))  # a shape that was not there before
    refusal(lambda: step.evaluator()(X, Y))


def test_an_own_loss_computes_what_it_did() -> None:
    """Watched at the first batch of a shape, and not at the second: the same loss."""
    step = make_step(OwnLoss())
    out = step.net(X)
    expected = F.mse_loss(out, Y[:, None]) + 0.1 * out.abs().mean()
    assert torch.equal(step.evaluator()(X, Y[:, None]).loss, expected)
    assert torch.equal(step(X, Y[:, None]).loss, expected)


def test_fit_names_the_column_and_its_advice_trains() -> None:
    message = refusal(lambda: make_model().fit(X, Y, epochs=1, batch_size=8))
    assert message.startswith("step 1: MSELoss: expected a target of the outputs' shape [8, 1], ")
    assert "got 'y' (float32 [8]), which torch would repeat, like the outputs, to [8, 8]" in message
    assert "Write y.unsqueeze(-1) for y." in message

    data = hs.data.Dataset((X, Y), ["x", "y"]).batch(8)
    advice = re.search(r"behind \.batch\(…\): (\.map\(.*'y'\))\. To", message)
    assert advice is not None
    advised = make_model()
    advised.fit(60, eval(f"data{advice[1]}", {"data": data}))
    assert advised.evaluate(X, Y.unsqueeze(-1))["loss"] < 0.01


def test_repeating_on_purpose_is_written_as_the_message_says() -> None:
    message = refusal(lambda: make_step(nn.MSELoss())(X, Y))
    forward = re.search(r"on purpose: forward=(.*)\.$", message)
    assert forward is not None
    step = make_step(nn.MSELoss(), forward=eval(forward[1], {"torch": torch}))
    expected = (step.net(X) - Y).square().mean()  # [32, 32], by hand
    assert torch.allclose(step(X, Y).loss, expected, rtol=1e-6, atol=0)


def test_evaluation_refuses_too() -> None:
    message = refusal(lambda: make_model().evaluate(X, Y))
    assert message.startswith("evaluation, batch 1: MSELoss: expected")


def test_several_outputs_for_one_target_are_the_networks_fault() -> None:
    net = nn.Linear(4, 3)
    step = hs.TrainStep(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    message = refusal(lambda: step(X, torch.zeros(32, dtype=torch.int64)))
    assert "received [32], which cannot be compared with them. The network has 3 outputs" in message
    assert "let it end with 1, or give nn.CrossEntropyLoss()" in message
    assert ".." not in message


@pytest.mark.parametrize(
    ("out_shape", "target_shape", "fix"),
    [
        ((8, 1), (8,), "y.unsqueeze(-1)"),
        ((8,), (8, 1), "y.squeeze(-1)"),
        ((8, 2, 3), (8, 6), "y.reshape(-1, 2, 3)"),
        ((8, 3), (3,), ""),
        ((8, 3), (1, 3), ""),
        ((8, 1), (), ""),
        ((3,), (8, 3), ""),
    ],
)
def test_the_fix_gives_the_target_the_shape_of_the_outputs(
    out_shape: tuple[int, ...], target_shape: tuple[int, ...], fix: str
) -> None:
    # On the meta device a tensor has a shape and no values: nothing is read, so nothing waits.
    out = torch.empty(out_shape, device="meta")
    y = torch.empty(target_shape, device="meta")
    problem = find_shape_problem((out, y))
    assert problem is not None
    assert problem.fix == fix
    if fix:
        assert eval(fix, {"y": y}).shape == out.shape


@pytest.mark.parametrize(
    ("out_shape", "target_shape"), [((8, 1), (8, 1)), ((1, 3), (3,)), ((1, 1), (1,)), ((), (1,))]
)
def test_shapes_that_pair_each_output_with_one_target_are_right(
    out_shape: tuple[int, ...], target_shape: tuple[int, ...]
) -> None:
    out = torch.empty(out_shape, device="meta")
    assert find_shape_problem((out, torch.empty(target_shape, device="meta"))) is None


def test_losses_whose_target_has_a_shape_of_its_own_are_left_alone() -> None:
    net = nn.Linear(4, 3)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    assert step(X, torch.zeros(32, dtype=torch.int64)).updated


@pytest.mark.parametrize("loss", [nn.MSELoss(), OWN_LOSSES["function"]], ids=["torch", "own"])
def test_a_captured_run_refuses_a_shape_that_comes_late(loss: Any) -> None:
    """Graphs replay the first shape; a batch of another one runs in Python first."""
    batches = [(X, Y[:, None])] * 8 + [(X, Y)]
    sink = sink_with_emulated_graphs(make_step(loss, decide="device"), batches)

    def run() -> None:
        for _ in sink:
            pass

    refusal(run)
    assert sink.captures == 1


@pytest.mark.parametrize("loss", [nn.MSELoss(), OWN_LOSSES["function"]], ids=["torch", "own"])
def test_a_compiled_step_refuses_a_shape_that_comes_late(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfstep.step.fast.compiled_forward.compile_graph", run_as_traced)
    step = make_step(loss, compile=True)
    for _ in range(3):
        step(X, Y[:, None])
    assert any(step.compiled.compiled_shapes().values())
    for _ in range(2):
        refusal(lambda: step(X, Y))
    assert step(X, Y[:, None]).updated


def run_as_traced(graph: Any, inputs: Any, **settings: Any) -> Any:
    """A backend that compiles nothing: the graph that torch has traced."""
    return graph.forward


def own_binary_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, y)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize(
    "loss",
    [nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits, own_binary_loss],
    ids=["module", "function", "own"],
)
def test_a_binary_target_of_whole_numbers_is_answered_with_the_line(
    loss: Any, dtype: torch.dtype
) -> None:
    y = (torch.arange(len(X)) % 2).to(dtype)[:, None]
    net = nn.Linear(4, 1)
    with pytest.raises((RuntimeError, TypeError)):
        loss(net(X), y)  # torch alone fails too
    name = str(dtype).removeprefix("torch.")
    message = rf"expected a target of floats, 0.0 to 1.0, received {name}. Write y.float\(\)"
    with pytest.raises(TypeError, match=message):
        make_step(loss)(X, y)
    with pytest.raises(TypeError, match=message):
        make_model(loss).fit(1, [(X, y)], progress=False)
    assert make_step(loss)(X, y.float()).loss > 0
