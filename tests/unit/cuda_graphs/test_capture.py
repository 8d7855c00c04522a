"""Which stream graphs are recorded on.

With torch from 2.12 on, graphs that are dropped at different times never share a stream.
"""

import gc

import pytest
import torch

from halfstep.cuda_graphs import capture
from halfstep.cuda_graphs.capture import CaptureStream

DEVICE = torch.device("cuda", 0)
OTHER_DEVICE = torch.device("cuda", 1)


class FakeStream:
    """As torch gives streams out: one of 32, in turn.

    The same on a device: tests/gpu/engine/test_cache.py.
    """

    streams_given_out = 0

    def __init__(self, device: torch.device, priority: int) -> None:
        assert priority < 0  # batches are copied on streams of priority 0
        self.cuda_stream = FakeStream.streams_given_out % capture.STREAMS_PER_PRIORITY
        FakeStream.streams_given_out += 1


@pytest.fixture(autouse=True)
def fake_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(capture, "_shared_streams", {})
    monkeypatch.setattr(capture, "_streams_in_use", set())


def test_graphs_that_exist_together_share_no_stream_and_dropped_ones_free_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "SHARES_STREAM", False)
    graph_attributes = {"capture_stream": CaptureStream(DEVICE)}  # as a graph holds it
    handle = graph_attributes["capture_stream"].stream.cuda_stream

    # Streams that are dropped at once never get in the way of one in use.
    for _ in range(100):
        assert CaptureStream(DEVICE).stream.cuda_stream != handle
    assert len(capture._streams_in_use) == 1

    # All others in use too: every stream once. One more has to share.
    others = [CaptureStream(DEVICE) for _ in range(capture.STREAMS_PER_PRIORITY - 1)]
    handles = {other.stream.cuda_stream for other in others}
    assert len(handles | {handle}) == capture.STREAMS_PER_PRIORITY
    assert CaptureStream(DEVICE).stream is not None

    # The graph is gone: its stream is the only free one.
    graph_attributes.clear()
    gc.collect()
    assert CaptureStream(DEVICE).stream.cuda_stream == handle


def test_before_torch_2_12_all_graphs_of_a_device_share_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "SHARES_STREAM", True)
    assert CaptureStream(DEVICE).stream is CaptureStream(DEVICE).stream
    assert CaptureStream(OTHER_DEVICE).stream is not CaptureStream(DEVICE).stream


def test_which_versions_of_torch_can_share() -> None:
    assert capture.can_share_stream("2.11.0+cu130")
    for version in ("2.12.0a0+4f1b.nv26.05", "2.12.0rc1", "2.13.0+cpu"):
        assert not capture.can_share_stream(version)
