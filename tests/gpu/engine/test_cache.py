"""What a model keeps captured from one call to the next, and what it must notice; each against a run without graphs."""

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAUROC

import halfstep as hs
from halfstep.cuda_graphs import capture as capturing
from halfstep.model import Model
from tests.gpu.engine.test_captured import CUDA, model
from tests.support.captured_runs import data, same_state

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:.*batch-coupled"),
]


def pair(**options: Any) -> tuple[Model, Model]:
    return model(capture="auto", **options), model(capture=False, **options)


def test_evaluations_count_the_same_captured_or_not_and_again_after_training() -> None:
    scores = []
    metrics = {
        "acc": hs.metrics.Accuracy(),
        "auroc": MulticlassAUROC(3),
    }  # one counts in the graph, one beside it
    for m in pair(metrics=metrics):
        seen = [m.evaluate(data(CUDA, samples=50))]
        torch.manual_seed(5)
        m.fit(2, data(CUDA))
        seen += [m.evaluate(data(CUDA, samples=50)), m.evaluate(data(CUDA, samples=50, batch=7))]
        scores.append(seen)
    assert scores[0] == scores[1]
    assert scores[0][0] != scores[0][1]


def test_labels_found_another_way_are_found_that_way() -> None:
    scores = []
    for m in pair():
        first = m.evaluate(data(CUDA, samples=50))
        m.labels = lambda batch: (batch[1] + 1) % 3
        scores.append((first, m.evaluate(data(CUDA, samples=50))))
    assert scores[0] == scores[1]
    assert scores[0][0]["acc"] != scores[0][1]["acc"]


def test_labels_on_the_host_are_taken_along() -> None:
    scores = []
    for m in pair():
        m.labels = lambda batch: torch.zeros(len(batch[1]), dtype=torch.int64)
        with warnings.catch_warnings(
            action="ignore", category=hs.Notice
        ):  # a copy from the host cannot be captured
            scores.append(m.evaluate(data(CUDA, samples=50)))
    assert scores[0] == scores[1]


def test_data_that_is_written_to_between_two_fits_is_read_anew() -> None:
    models = pair()
    for m in models:
        x, y = torch.randn(96, 6, generator=torch.Generator().manual_seed(2)), torch.arange(96) % 3
        given = hs.data.Dataset((x, y), seed=3).shuffle().batch(8)
        torch.manual_seed(5)
        m.fit(1, given)
        x.mul_(-2)
        m.fit(2, given)
    assert same_state(models[0].step, models[1].step) == []


def test_predictions_as_a_stream_are_of_the_weights_at_their_time() -> None:
    outputs = []
    for m in pair():
        x = torch.randn(64, 6, generator=torch.Generator().manual_seed(2))
        torch.manual_seed(5)
        found = [m.predict(x, batch=16)]
        stream = m.predict(x, batch=16, stream=True)
        found.append(next(stream))
        m.fit(1, data(CUDA))
        found += [next(stream), m.predict(x, batch=16)]
        outputs.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


class Warns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("something of the user's", UserWarning, stacklevel=2)
        out: Tensor = self.inner(x)
        return out


def test_warnings_of_the_network_are_passed_on() -> None:
    net = Warns().to(CUDA)
    m = Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1, fused=True))
    with pytest.warns(UserWarning, match="something of the user's"):
        m.fit(1, data(CUDA))


class Waits(nn.Module):
    """Spoils a capture in a way that torch does not see coming."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(6, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.inner(x))
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return out


def test_after_a_spoiled_capture_random_numbers_are_those_of_an_eager_run() -> None:
    weights, draws = [], []
    for capture in ("auto", False):
        torch.manual_seed(0)
        net = Waits().to(CUDA)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
        m = Model(net, nn.CrossEntropyLoss(), optimizer, capture=capture, deterministic=True)
        torch.manual_seed(5)
        with warnings.catch_warnings(action="ignore", category=hs.Notice):
            m.fit(2, data(CUDA))
        weights.append(net.inner.weight.detach().clone())
        draws.append(torch.rand(4, device=CUDA))
    assert torch.equal(*weights)
    assert torch.equal(*draws)


def test_a_stream_of_the_users_own_gives_the_same() -> None:
    models = pair()
    for m, stream in zip(models, (torch.cuda.Stream(), torch.cuda.default_stream()), strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.manual_seed(5)
            m.fit(2, data(CUDA), valid=data(CUDA, samples=50))
            m.predict(torch.randn(20, 6))
        torch.cuda.synchronize()
    assert same_state(models[0].step, models[1].step) == []


def test_verify_says_when_there_were_too_few_batches_to_compare() -> None:
    m = model(verify=50)
    with pytest.warns(hs.Notice, match="of 50 replays were compared"):
        m.fit(1, data(CUDA, samples=64))


def wide(capture: Any) -> Model:
    """Its products are long enough for cuBLAS to cut them, which takes memory of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 3)
    ).to(CUDA)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, fused=True)
    return Model(net, nn.CrossEntropyLoss(), optimizer, "fp32", capture=capture, deterministic=True)


@pytest.mark.parametrize(
    "shared", sorted({capturing.SHARES_STREAM, False})
)  # False: what newer versions of torch need
def test_graphs_that_are_gone_take_nothing_along(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch frees what cuBLAS uses with the graphs that were recorded on a stream; those that live go on rightly.

    torch 2.11 frees nothing: what can go wrong there is a lane itself.
    """
    monkeypatch.setattr(capturing, "SHARES_STREAM", shared)
    monkeypatch.setattr(capturing, "_shared_streams", {})
    weights = []
    for capture in ("auto", False):
        other, m = wide(capture), wide(capture)
        for each in (other, m):
            torch.manual_seed(5)
            each.fit(2, data(CUDA), valid=data(CUDA, samples=50))
        del other, each
        gc.collect()
        torch.cuda.empty_cache()
        rest = [torch.full((1 << 20,), torch.nan, device=CUDA) for _ in range(64)]
        m.fit(3, data(CUDA), valid=data(CUDA, samples=50))
        assert all(t.isnan().all() for t in rest)
        weights.append([p.detach().clone() for p in m.net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
