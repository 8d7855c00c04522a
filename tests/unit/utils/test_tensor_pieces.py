"""Lists of tensors in pieces: the same memory, or the lists as they are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.utils import tensor_pieces
from halfstep.utils.tensor_pieces import split_alike

# The third one is stored channels last.
SHAPES = [
    (300, 101),
    (7,),
    (8, 3, 30, 30),
    (),
    (0, 3),
    (4096,),
    (4097,),
]


def make_lists(low: torch.dtype, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Targets, and parameters to be cast into them.

    Some values are not finite, and one is beyond half's range.
    """
    sources: list[Tensor] = [nn.Parameter(torch.randn(s, device=device) * 1e3) for s in SHAPES]
    sources[2].data = sources[2].data.to(memory_format=torch.channels_last)
    sources[0].data[0, :3] = torch.tensor([torch.inf, torch.nan, 1e30], device=device)
    targets = [torch.empty_like(p, dtype=low, requires_grad=False) for p in sources]
    return targets, sources


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16, torch.float64])
def test_pieces_fill_the_same_memory(low: torch.dtype, device: torch.device) -> None:
    targets, sources = make_lists(low, device)
    target_pieces, source_pieces = split_alike(targets, sources)
    piece_count = 8 + 1 + 6 + 1 + 1 + 1 + 2  # 4,096 elements or fewer in each
    assert len(target_pieces) == len(source_pieces) == piece_count
    assert not any(p.requires_grad for p in source_pieces)
    torch._foreach_copy_(target_pieces, source_pieces)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.nan_to_num(7), source.detach().to(low).nan_to_num(7))
        assert target.stride() == source.stride()


def changes() -> dict[str, Callable[[list[Tensor], list[Tensor]], None]]:
    """What would put an element elsewhere, or cost a kernel per piece."""
    return {
        "another layout": lambda targets, _: targets.__setitem__(2, targets[2].contiguous()),
        "gaps": lambda *both: leave_gaps(both),
        "several dtypes": lambda targets, _: targets.__setitem__(0, targets[0].float()),
        "another device": lambda _, sources: sources.__setitem__(
            0, torch.zeros(300, 101, device="meta")
        ),
        "another shape": lambda _, sources: sources.__setitem__(1, torch.zeros(8)),
        "sparse": lambda _, sources: sources.__setitem__(1, torch.zeros(7).to_sparse()),
        "a subclass": lambda _, sources: sources.__setitem__(
            1, torch.zeros(7).as_subclass(TensorSubclass)
        ),
    }


def leave_gaps(both: tuple[list[Tensor], ...]) -> None:
    for tensors in both:
        tensors[5] = torch.zeros(8192, dtype=tensors[5].dtype)[::2]


class TensorSubclass(Tensor):
    pass


@pytest.mark.parametrize("change", changes())
def test_lists_that_do_not_fit_stay_as_they_are(change: str) -> None:
    targets, sources = make_lists(torch.float16, torch.device("cpu"))
    changes()[change](targets, sources)
    target_pieces, source_pieces = split_alike(targets, sources)
    assert target_pieces is targets
    assert source_pieces is sources


def test_large_lists_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    targets, sources = make_lists(torch.float16, torch.device("cpu"))
    total = sum(t.numel() for t in targets)
    monkeypatch.setattr(tensor_pieces, "MAX_ELEMENTS", total)
    assert split_alike(targets, sources)[0] is not targets
    monkeypatch.setattr(tensor_pieces, "MAX_ELEMENTS", total - 1)
    assert split_alike(targets, sources)[0] is targets
