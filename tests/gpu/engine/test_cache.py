"""What a model keeps captured from one call to the next, and what it must notice.

Each against a run without graphs.
"""

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAUROC

import halfstep as hs
from halfstep.cuda_graphs import capture as capture_module
from halfstep.model import Model
from tests.gpu.engine.test_captured import CUDA, make_model
from tests.support.captured_runs import differing_tensors, make_data

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:.*batch-coupled"),
]


def captured_and_eager(**options: Any) -> tuple[Model, Model]:
    return make_model(capture="auto", **options), make_model(capture=False, **options)


def test_evaluations_count_the_same_captured_or_not_and_again_after_training() -> None:
    scores = []
    metrics = {
        "acc": hs.metrics.Accuracy(),  # counts in the graph
        "auroc": MulticlassAUROC(3),  # counts beside it
    }
    for model in captured_and_eager(metrics=metrics, train_metrics=["acc"]):
        before = model.evaluate(make_data(CUDA, samples=50))
        torch.manual_seed(5)
        model.fit(2, make_data(CUDA))
        after = model.evaluate(make_data(CUDA, samples=50))
        in_other_batches = model.evaluate(make_data(CUDA, samples=50, batch=7))
        scores.append([before, after, in_other_batches])
    assert scores[0] == scores[1]
    assert scores[0][0] != scores[0][1]


def test_labels_found_another_way_are_found_that_way() -> None:
    scores = []
    for model in captured_and_eager():
        first = model.evaluate(make_data(CUDA, samples=50))
        model.labels = lambda batch: (batch[1] + 1) % 3
        scores.append((first, model.evaluate(make_data(CUDA, samples=50))))
    assert scores[0] == scores[1]
    assert scores[0][0]["acc"] != scores[0][1]["acc"]


def test_labels_on_the_host_are_taken_along() -> None:
    scores = []
    for model in captured_and_eager():
        model.labels = lambda batch: torch.zeros(len(batch[1]), dtype=torch.int64)
        # A copy from the host cannot be captured.
        with warnings.catch_warnings(action="ignore", category=hs.Notice):
            scores.append(model.evaluate(make_data(CUDA, samples=50)))
    assert scores[0] == scores[1]


def test_data_that_is_written_to_between_two_fits_is_read_anew() -> None:
    models = captured_and_eager()
    for model in models:
        x = torch.randn(96, 6, generator=torch.Generator().manual_seed(2))
        dataset = hs.data.Dataset((x, torch.arange(96) % 3), seed=3).shuffle().batch(8)
        torch.manual_seed(5)
        model.fit(1, dataset)
        x.mul_(-2)
        model.fit(2, dataset)
    assert differing_tensors(models[0].step, models[1].step) == []


def test_predictions_as_a_stream_are_of_the_weights_at_their_time() -> None:
    outputs = []
    for model in captured_and_eager():
        x = torch.randn(64, 6, generator=torch.Generator().manual_seed(2))
        torch.manual_seed(5)
        before = model.predict(x, batch=16)
        stream = model.predict(x, batch=16, stream=True)
        streamed_before = next(stream)
        model.fit(1, make_data(CUDA))
        streamed_after = next(stream)
        after = model.predict(x, batch=16)
        outputs.append([before, streamed_before, streamed_after, after])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


class WarnsInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("something of the user's", UserWarning, stacklevel=2)
        out: Tensor = self.inner(x)
        return out


def test_warnings_of_the_network_are_passed_on() -> None:
    net = WarnsInForward().to(CUDA)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    model = Model(net, nn.CrossEntropyLoss(), optimizer)
    with pytest.warns(UserWarning, match="something of the user's"):
        model.fit(1, make_data(CUDA))


class WaitsInCapture(nn.Module):
    """Spoils a capture in a way that torch does not see coming."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.inner(x))
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return out


def test_after_a_spoiled_capture_random_numbers_are_those_of_an_eager_run() -> None:
    weights = []
    draws = []
    for capture in ("auto", False):
        torch.manual_seed(0)
        net = WaitsInCapture().to(CUDA)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
        model = Model(net, nn.CrossEntropyLoss(), optimizer, capture=capture, deterministic=True)
        torch.manual_seed(5)
        with warnings.catch_warnings(action="ignore", category=hs.Notice):
            model.fit(2, make_data(CUDA))
        weights.append(net.inner.weight.detach().clone())
        draws.append(torch.rand(4, device=CUDA))
    assert torch.equal(*weights)
    assert torch.equal(*draws)


def test_a_stream_of_the_users_own_gives_the_same() -> None:
    models = captured_and_eager()
    streams = (torch.cuda.Stream(), torch.cuda.default_stream())
    for model, stream in zip(models, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.manual_seed(5)
            model.fit(2, make_data(CUDA), valid=make_data(CUDA, samples=50))
            model.predict(torch.randn(20, 6))
        torch.cuda.synchronize()
    assert differing_tensors(models[0].step, models[1].step) == []


def test_verify_says_when_there_were_too_few_batches_to_compare() -> None:
    model = make_model(verify=50)
    with pytest.warns(hs.Notice, match="of 50 replays were compared"):
        model.fit(1, make_data(CUDA, samples=64))


def make_wide_model(capture: Any) -> Model:
    """Its products are long enough for cuBLAS to split them, which takes memory of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 3)
    ).to(CUDA)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, fused=True)
    return Model(net, nn.CrossEntropyLoss(), optimizer, "fp32", capture=capture, deterministic=True)


# False is what newer versions of torch need.
@pytest.mark.parametrize("shared", sorted({capture_module.SHARES_STREAM, False}))
def test_graphs_that_are_gone_take_nothing_along(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs that live go on rightly when others are freed.

    torch frees the memory of cuBLAS with the graphs that were recorded on a stream. torch 2.11
    frees nothing: what can go wrong there is the capture stream itself.
    """
    monkeypatch.setattr(capture_module, "SHARES_STREAM", shared)
    monkeypatch.setattr(capture_module, "_shared_streams", {})
    weights = []
    for capture in ("auto", False):
        freed_model = make_wide_model(capture)
        model = make_wide_model(capture)
        torch.manual_seed(5)
        freed_model.fit(2, make_data(CUDA), valid=make_data(CUDA, samples=50))
        torch.manual_seed(5)
        model.fit(2, make_data(CUDA), valid=make_data(CUDA, samples=50))
        del freed_model
        gc.collect()
        torch.cuda.empty_cache()
        # Take the memory that was freed: nobody may write to it any more.
        taken_memory = [torch.full((1 << 20,), torch.nan, device=CUDA) for _ in range(64)]
        model.fit(3, make_data(CUDA), valid=make_data(CUDA, samples=50))
        assert all(t.isnan().all() for t in taken_memory)
        weights.append([p.detach().clone() for p in model.net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
