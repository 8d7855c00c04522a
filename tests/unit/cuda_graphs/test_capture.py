"""Which stream graphs are recorded on: with torch from 2.12 on, graphs that are dropped apart never share one."""

import gc
from typing import Any

import pytest
import torch

from halfstep.cuda_graphs import capture as capturing
from halfstep.cuda_graphs.capture import CaptureStream

DEVICE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    """As torch gives them out: one of 32, in turn. On a device see tests/gpu/engine/test_cache.py."""

    given = 0

    def __init__(self, device: torch.device, priority: int) -> None:
        assert priority < 0  # those of copies have none
        self.cuda_stream = Stream.given % capturing.POOL
        Stream.given += 1


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(capturing, "_STREAMS", {})
    monkeypatch.setattr(capturing, "_TAKEN", set())


def test_what_lives_together_shares_none_and_what_is_gone_gives_its_own_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capturing, "SHARED", False)
    first, graph = CaptureStream(DEVICE), dict[str, Any]()
    graph["lane"] = first  # as a graph holds it
    place = first.stream.cuda_stream
    for _ in range(100):
        assert CaptureStream(DEVICE).stream.cuda_stream != place
    del first
    assert len(capturing._TAKEN) == 1
    many = [CaptureStream(DEVICE) for _ in range(capturing.POOL - 1)]
    assert len({lane.stream.cuda_stream for lane in many} | {place}) == capturing.POOL
    assert CaptureStream(DEVICE).stream is not None  # one too many: shared
    graph.clear()
    gc.collect()
    assert CaptureStream(DEVICE).stream.cuda_stream == place


def test_before_torch_2_12_all_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "SHARED", True)
    assert CaptureStream(DEVICE).stream is CaptureStream(DEVICE).stream
    assert CaptureStream(OTHER).stream is not CaptureStream(DEVICE).stream


def test_which_versions_share() -> None:
    assert capturing.shares("2.11.0+cu130")
    assert not any(map(capturing.shares, ("2.12.0a0+4f1b.nv26.05", "2.12.0rc1", "2.13.0+cpu")))
