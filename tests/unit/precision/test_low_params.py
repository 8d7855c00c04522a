"""Casts of many tensors in pieces: the same bits into the same memory, or the lists as they were."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.precision import split
from halfstep.precision.low_params import LowCopies
from halfstep.precision.split import split_alike

# the third: channels last
SHAPES = [
    (300, 101),
    (7,),
    (8, 3, 30, 30),
    (),
    (0, 3),
    (4096,),
    (4097,),
]


def pair(low: torch.dtype, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Room, and parameters to be cast into it: not finite ones and one beyond half's range among them."""
    given: list[Tensor] = [nn.Parameter(torch.randn(s, device=device) * 1e3) for s in SHAPES]
    given[2].data = given[2].data.to(memory_format=torch.channels_last)
    given[0].data[0, :3] = torch.tensor([torch.inf, torch.nan, 1e30], device=device)
    return [torch.empty_like(p, dtype=low, requires_grad=False) for p in given], given


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16, torch.float64])
def test_pieces_fill_the_same_memory(low: torch.dtype, device: torch.device) -> None:
    to, given = pair(low, device)
    some, parts = split_alike(to, given)
    assert len(some) == len(parts) == 8 + 1 + 6 + 1 + 1 + 1 + 2  # 4,096 elements or fewer in each
    assert not any(p.requires_grad for p in parts)
    torch._foreach_copy_(some, parts)
    for t, g in zip(to, given, strict=True):
        assert torch.equal(t.nan_to_num(7), g.detach().to(low).nan_to_num(7))
        assert t.stride() == g.stride()


def spoil() -> dict[str, Callable[[list[Tensor], list[Tensor]], None]]:
    """What would put an element elsewhere, or cost a kernel per piece."""
    return {
        "another layout": lambda to, _: to.__setitem__(2, to[2].contiguous()),
        "gaps": lambda *both: spread_out(both),
        "several dtypes": lambda to, _: to.__setitem__(0, to[0].float()),
        "another device": lambda _, given: given.__setitem__(
            0, torch.zeros(300, 101, device="meta")
        ),
        "another shape": lambda _, given: given.__setitem__(1, torch.zeros(8)),
        "sparse": lambda _, given: given.__setitem__(1, torch.zeros(7).to_sparse()),
        "a subclass": lambda _, given: given.__setitem__(1, torch.zeros(7).as_subclass(Mine)),
    }


def spread_out(both: tuple[list[Tensor], ...]) -> None:
    for x in both:
        x[5] = torch.zeros(8192, dtype=x[5].dtype)[::2]


class Mine(Tensor):
    pass


@pytest.mark.parametrize("name", spoil())
def test_left_as_they_are(name: str) -> None:
    to, given = pair(torch.float16, torch.device("cpu"))
    spoil()[name](to, given)
    some, parts = split_alike(to, given)
    assert some is to
    assert parts is given


def test_large_lists_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    to, given = pair(torch.float16, torch.device("cpu"))
    total = sum(t.numel() for t in to)
    monkeypatch.setattr(split, "MAX_ELEMENTS", total)
    assert split_alike(to, given)[0] is not to
    monkeypatch.setattr(split, "MAX_ELEMENTS", total - 1)
    assert split_alike(to, given)[0] is to


def test_copies_are_never_stale(device: torch.device) -> None:
    """Masters whose memory is exchanged, as an average's stand-in exchanges it, and turned around in place."""
    p = nn.Parameter(torch.randn(64, 64, device=device))
    copies = LowCopies([p], [torch.float16])
    for data in (p.data, torch.randn(64, 64, device=device), p.data.t(), p.data):
        p.data = data
        (low,) = copies.cast_masters()
        assert torch.equal(low.detach(), data.half())
