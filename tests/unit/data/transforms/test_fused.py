"""PadCrop, Flip and Cutout by one kernel: the bits of one after the other. Without a GPU, Triton interprets it."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.data.transforms import Cutout, Flip, PadCrop, Rescale, Transform, apply
from halfstep.data.transforms.words import DRAWS
from halfstep.errors import Notice
from tests.support.triton_interpreter import INTERPRETED, inside, interpret, outside

room: Any = importlib.import_module(
    "halfstep.data.transforms.fused__window"
)  # the package's name is the function

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
SHAPES = {"HWC": (9, 12, 10, 3), "CHW": (9, 3, 12, 10), "gray": (9, 12, 10)}
CHAINS: dict[str, list[Transform]] = {
    "all": [PadCrop((11, 13), (4, 3, 2, 1), 9), Flip(0.5), Cutout((5, 4), 200)],
    "crop": [PadCrop(8)],
    "flip": [Flip(0.3)],
    "hole": [Cutout((30, 3), 7)],
    "crop, hole": [PadCrop(12, 4), Cutout(4, 1)],
    "turned, as it was": [Flip(1.0), Flip(0.0)],
    "another order": [Cutout(5, 250), PadCrop(12, 4, 3), Flip()],
    "twice": [PadCrop(10, 3, 4), PadCrop(9, 3, 5), Flip(), Flip(), Cutout(3, 6), Cutout(3, 7)],
    "behind others": [Rescale(1.0), PadCrop(12, 4, 0.1), Flip(), Cutout(4, -0.0)],
}
DTYPES = [
    torch.uint8,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int16,
    torch.int32,
]


def given(
    shape: tuple[int, ...], dtype: torch.dtype = torch.uint8, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels, epochs and samples: no small numbers alone."""
    g = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, shape, generator=g)
    epochs, samples = (torch.randint(0, top, shape[:1], generator=g) for top in (2**40, 2**62))
    return pixels.to(DEVICE, dtype), epochs.to(DEVICE), samples.to(DEVICE)


def in_turn(
    chain: list[Transform], batch: Tensor, epochs: Tensor, samples: Tensor, seed: int = 5
) -> Tensor:
    """One transform after the other, by torch's kernels."""
    for place, part in enumerate(chain):
        keys = [hashing.draw_key(place * DRAWS + i) for i in range(part.draws)]
        draws = torch.tensor(keys, dtype=torch.int64, device=batch.device)
        batch = part(batch, hashing.words(seed, epochs, samples, draws))
    return batch


def alike(got: Tensor, expected: Tensor) -> bool:
    """Shape, strides of what is longer than 1, dtype and bits: −0.0 is not 0.0."""
    kinds = [
        (t.dtype, [(n, step if n > 1 else 0) for n, step in zip(t.shape, t.stride(), strict=True)])
        for t in (got, expected)
    ]
    bits = [t.contiguous().view(-1).view(torch.uint8) for t in (got, expected)]
    return kinds[0] == kinds[1] and torch.equal(*bits)


def as_in_turn(chain: list[Transform], told: tuple[Tensor, Tensor, Tensor], seed: int = 5) -> bool:
    batch, epochs, samples = told
    return alike(
        apply(chain, batch, seed=seed, epochs=epochs, samples=samples), in_turn(chain, *told, seed)
    )


@inside
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("name", CHAINS)
def test_the_kernel_has_the_bits_of_one_after_the_other(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_WORKS", {})
    assert as_in_turn(CHAINS[name], given(SHAPES[layout]))
    assert list(room._WORKS.values()) == [True]


@inside
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_moves_any_dtype(dtype: torch.dtype) -> None:
    chain = [PadCrop(12, 4, 17), Flip(), Cutout(4, 33)]
    assert all(as_in_turn(chain, given(SHAPES["HWC"], dtype, seed), seed) for seed in range(6))


@inside
def test_the_kernel_fills_as_torch_rounds() -> None:
    """0.1 in half precision is rounded by way of float32; −0.0 and 0.0 are told apart, though they are equal."""
    for fill in (0.1, 1 + 2**-11 + 2**-30, 0.0, -0.0, 0.0):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert as_in_turn([PadCrop(12, 4, fill), Cutout(4, -fill)], given(SHAPES["CHW"], dtype))


@inside
def test_the_kernel_reads_any_strides() -> None:
    batch, epochs, samples = given((9, 12, 10, 3))
    odd = torch.cat([batch, batch], dim=2)[:, :, :10]
    turned = batch.permute(0, 3, 1, 2)  # CHW, channels last
    gaps, again = torch.cat([turned] * 2, dim=2)[:, :, ::2], batch[:1].expand_as(batch)
    for each in (odd, batch.flip(0)[::2], again, turned, gaps):
        told = epochs[: len(each)], samples[: len(each)]
        for name in ("all", "flip", "hole"):
            assert as_in_turn(CHAINS[name], (each, *told))


@inside
def test_the_kernel_is_left_out_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, subclasses, numbers of samples with gaps between them, nothing at all."""
    monkeypatch.setattr(room, "_WORKS", {})
    batch, epochs, samples = given((4, 3, 12, 3), torch.float32)
    assert as_in_turn([Flip(layout="HWC")], (batch.clone().requires_grad_(), epochs, samples))
    assert as_in_turn(
        [Flip(layout="HWC")], (torch.nn.Parameter(batch, requires_grad=False), epochs, samples)
    )
    assert as_in_turn([Flip(layout="HWC")], (batch, epochs.repeat(2)[::2], samples))
    assert as_in_turn([Flip(layout="HWC")], (batch[:0], epochs[:0], samples[:0]))
    assert not room._WORKS
    mixed: list[Transform] = [PadCrop(3, layout="HWC"), Flip(layout="CHW")]
    assert as_in_turn(mixed, (batch, epochs, samples))


@inside
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.func's own
def test_the_kernel_is_left_out_where_torch_goes_through_derivatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_WORKS", {})
    batch, epochs, samples = given((4, 12, 10, 3), torch.float32)
    chain: list[Transform] = [PadCrop(12, 4), Flip()]
    turned = in_turn(chain, batch, epochs, samples)

    def run(x: Tensor) -> Tensor:
        return apply(chain, x, seed=5, epochs=epochs, samples=samples)

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(batch, 2 * batch)
        made, tangent = torch.autograd.forward_ad.unpack_dual(run(dual))
    assert torch.equal(made, turned)
    assert torch.equal(tangent, 2 * turned)
    made, tangent = torch.func.jvp(run, (batch,), (2 * batch,))
    assert torch.equal(tangent, 2 * turned)
    both = torch.vmap(lambda x: apply([Flip()], x, seed=5, epochs=epochs, samples=samples))(
        torch.stack([batch, batch])
    )
    assert torch.equal(both[1], in_turn([Flip()], batch, epochs, samples))
    assert not room._WORKS
    negative = torch.complex(batch, batch).conj().imag  # torch negates it when it is read
    assert negative.is_neg()
    assert torch.equal(run(negative), -turned)


@inside
def test_the_kernel_takes_any_number_as_a_fill() -> None:
    told = given(SHAPES["HWC"], torch.float32)
    expected = in_turn([PadCrop(12, 4, 0.5), Cutout(4, 0.25)], *told)
    for kind in (np.float64, np.float32, np.float16, torch.tensor):
        chain: list[Transform] = [PadCrop(12, 4, kind(0.5)), Cutout(4, kind(0.25))]
        assert torch.equal(apply(chain, told[0], seed=5, epochs=told[1], samples=told[2]), expected)
        assert torch.equal(in_turn(chain, *told), expected)


@inside
def test_the_kernel_that_fails_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.data.transforms import triton_kernels__window_kernel as window_kernel

    def fails(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(room, "_WORKS", {})
    monkeypatch.setattr(window_kernel, "launch", fails)
    with pytest.warns(
        Notice, match="take more kernels: Triton failed .no space left.*Images are the same"
    ):
        assert as_in_turn(CHAINS["all"], given(SHAPES["HWC"]))
    assert as_in_turn(CHAINS["all"], given(SHAPES["HWC"]))


@outside
def test_the_interpreted_kernel() -> None:
    interpret(__file__, 3 * len(CHAINS) + len(DTYPES) + 6)


def test_words_are_made_for_those_that_draw_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hash for all of them, and none where nothing is drawn."""
    made, words = [], hashing.words
    monkeypatch.setattr(hashing, "words", lambda *given: made.append(given) or words(*given))
    batch, epochs, samples = given((4, 12, 12, 3))
    apply([Rescale(1 / 255)], batch, seed=0, epochs=epochs, samples=samples)
    assert not made
    if not INTERPRETED and DEVICE.type == "cpu":
        apply(CHAINS["all"], batch, seed=0, epochs=epochs, samples=samples)
        assert len(made) == 1


def test_which_go_together() -> None:
    """Each kind once and in order; a class of one's own is not one of them."""

    class Own(Flip):
        pass

    crop, flip, hole = PadCrop(8), Flip(), Cutout(3)
    chains = [
        [crop, flip, hole],
        [crop, hole, flip],
        [flip, crop],
        [flip, flip],
        [Rescale(1.0), flip],
        [Own()],
        [],
    ]
    assert [room._reach(chain) for chain in chains] == [3, 2, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, torch.tensor])
def test_fills_are_pythons_numbers(kind: Any) -> None:
    """A kernel is given their bits by their text, which numpy and torch write in their own ways."""
    crop, hole = PadCrop(12, 4, kind(3)), Cutout(4, kind(3))
    assert {type(crop.fill), type(hole.fill)} <= {int, float}
    assert (crop, hole) == (PadCrop(12, 4, 3), Cutout(4, 3))


def test_a_plan_by_the_parts_themselves() -> None:
    """A crop of 8 × 9 from 14 × 16 padded: 7 places down and 8 across; half of the words turn an image."""
    plan = room._plan(
        (PadCrop((8, 9), (4, 1, 2, 1)), Flip(), Cutout((2, 3))),
        (5, 3, 12, 10),
        (360, 120, 10, 1),
        torch.uint8,
    )
    assert plan[:5] == ((5, 3, 8, 9), (216, 72, 9, 1), (360, 120, 10, 1), (216, 72, 9, 1), (12, 10))
    assert plan[5:] == ((3, 8, 9, 1), (1, 4, 7, 8), 2**31, (2, 3))
    with pytest.raises(ValueError, match="fits into"):
        room._plan((PadCrop(20),), (5, 12, 10, 3), (360, 30, 3, 1), torch.uint8)


@pytest.mark.parametrize(
    ("part", "shape", "strides"),
    [
        (Flip(layout="HWC"), (2, 2, 2, 3), (2**33, 2**31, 3, 1)),  # rows far apart
        (
            Flip(layout="CHW"),
            (4, 1, 12, 10),
            (120, 2**31, 10, 1),
        ),  # a channel of its own, from planes of many images
        (Flip(), (4, 2, 10), (10, 1_500_000_000, 1)),
        (Cutout(2**31), (4, 12, 10), (120, 10, 1)),
        (PadCrop(12, (0, 2**31, 0, 0)), (4, 12, 12), (144, 12, 1)),
    ],
)
def test_what_32_bits_do_not_reach_is_left_to_torch(
    part: Transform, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    assert room._plan((part,), shape, strides, torch.uint8) is None
