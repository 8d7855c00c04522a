"""Which stream graphs are recorded on: with torch from 2.12 on, graphs that are dropped apart never share one."""

import gc
from typing import Any

import pytest
import torch

from halfstep.step import capturing
from halfstep.step.capturing import Lane

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream can be made without a device; on one see tests/gpu/test_kept.py."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(capturing, "_STREAMS", {})
    monkeypatch.setattr(capturing, "_FREE", {})


def test_what_lives_together_shares_none_and_what_is_gone_gives_its_own_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "SHARED", False)
    one, two = Lane(DEVICE), Lane(DEVICE)
    assert one.stream is not two.stream
    first, graph = one.stream, {"lane": one}  # as a graph holds it
    del one
    assert Lane(DEVICE).stream is not first
    del graph
    gc.collect()
    assert first in capturing._FREE[DEVICE]
    assert Lane(torch.device("cuda", 1)).stream is not first
    held: list[Any] = [Lane(DEVICE) for _ in range(3)]
    assert len({id(lane.stream) for lane in [two, *held]}) == 4
    assert first in [lane.stream for lane in held]


def test_before_torch_2_12_all_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "SHARED", True)
    assert Lane(DEVICE).stream is Lane(DEVICE).stream
    assert Lane(torch.device("cuda", 1)).stream is not Lane(DEVICE).stream
