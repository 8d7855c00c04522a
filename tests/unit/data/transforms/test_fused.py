"""PadCrop, Flip and Cutout by one kernel: the bits of one after the other.

Without a GPU, Triton interprets the kernel.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.data.transforms import (
    Cutout,
    Flip,
    PadCrop,
    Rescale,
    Transform,
    apply,
    fused_augment,
)
from halfstep.data.transforms.random_words import DRAWS_PER_TRANSFORM
from halfstep.errors import Notice
from tests.support.triton_interpreter import (
    INTERPRETED,
    only_interpreted,
    run_interpreted,
    starts_interpreter,
)

Inputs = tuple[Tensor, Tensor, Tensor]  # pixels, epochs, samples

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
SHAPES = {
    "HWC": (9, 12, 10, 3),
    "CHW": (9, 3, 12, 10),
    "gray": (9, 12, 10),
}
CHAINS: dict[str, list[Transform]] = {
    "all": [PadCrop((11, 13), (4, 3, 2, 1), 9), Flip(0.5), Cutout((5, 4), 200)],
    "crop": [PadCrop(8)],
    "flip": [Flip(0.3)],
    "hole": [Cutout((30, 3), 7)],
    "crop, hole": [PadCrop(12, 4), Cutout(4, 1)],
    "flipped, then not": [Flip(1.0), Flip(0.0)],
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
FILLS = (0.1, 1 + 2**-11 + 2**-30, 0.0, -0.0, 0.0)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8, seed: int = 0) -> Inputs:
    """Pixels, epochs and samples: large numbers too."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, shape, generator=generator)
    epochs = torch.randint(0, 2**40, shape[:1], generator=generator)
    samples = torch.randint(0, 2**62, shape[:1], generator=generator)
    return pixels.to(DEVICE, dtype), epochs.to(DEVICE), samples.to(DEVICE)


def apply_in_turn(chain: list[Transform], inputs: Inputs, seed: int = 5) -> Tensor:
    """One transform after the other, by torch's kernels."""
    batch, epochs, samples = inputs
    for number, transform in enumerate(chain):
        first_draw = number * DRAWS_PER_TRANSFORM
        keys = [hashing.draw_key(first_draw + i) for i in range(transform.draws)]
        draws = torch.tensor(keys, dtype=torch.int64, device=batch.device)
        batch = transform(batch, hashing.words(seed, epochs, samples, draws))
    return batch


def describe(tensor: Tensor) -> tuple[torch.dtype, list[tuple[int, int]]]:
    """The dtype, and each size with its stride; the stride of a size of 1 means nothing."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.dtype, [(size, stride if size > 1 else 0) for size, stride in sizes]


def is_identical(result: Tensor, expected: Tensor) -> bool:
    """Shape, strides, dtype and bits: −0.0 is not 0.0."""
    result_bits = result.contiguous().view(-1).view(torch.uint8)
    expected_bits = expected.contiguous().view(-1).view(torch.uint8)
    return describe(result) == describe(expected) and torch.equal(result_bits, expected_bits)


def equals_one_after_the_other(chain: list[Transform], inputs: Inputs, seed: int = 5) -> bool:
    batch, epochs, samples = inputs
    result = apply(chain, batch, seed=seed, epochs=epochs, samples=samples)
    return is_identical(result, apply_in_turn(chain, inputs, seed))


@only_interpreted
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("name", CHAINS)
def test_the_kernel_has_the_bits_of_one_after_the_other(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_augment, "_COMPILED", {})
    assert equals_one_after_the_other(CHAINS[name], make_inputs(SHAPES[layout]))
    assert list(fused_augment._COMPILED.values()) == [True]


@only_interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_moves_any_dtype(dtype: torch.dtype) -> None:
    chain: list[Transform] = [PadCrop(12, 4, 17), Flip(), Cutout(4, 33)]
    for seed in range(6):
        assert equals_one_after_the_other(chain, make_inputs(SHAPES["HWC"], dtype, seed), seed)


@only_interpreted
def test_the_kernel_fills_as_torch_rounds() -> None:
    """0.1 in half precision is rounded by way of float32.

    −0.0 and 0.0 are told apart, though they are equal.
    """
    for fill in FILLS:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            chain: list[Transform] = [PadCrop(12, 4, fill), Cutout(4, -fill)]
            assert equals_one_after_the_other(chain, make_inputs(SHAPES["CHW"], dtype))


@only_interpreted
def test_the_kernel_reads_any_strides() -> None:
    batch, epochs, samples = make_inputs((9, 12, 10, 3))
    channels_last = batch.permute(0, 3, 1, 2)
    batches = [
        torch.cat([batch, batch], dim=2)[:, :, :10],  # rows do not follow each other
        batch.flip(0)[::2],
        batch[:1].expand_as(batch),
        channels_last,
        torch.cat([channels_last] * 2, dim=2)[:, :, ::2],
    ]
    for strided in batches:
        size = len(strided)
        for name in ("all", "flip", "hole"):
            inputs = (strided, epochs[:size], samples[:size])
            assert equals_one_after_the_other(CHAINS[name], inputs)


@only_interpreted
def test_the_kernel_is_left_out_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, subclasses, numbers of samples with gaps between them, nothing at all."""
    monkeypatch.setattr(fused_augment, "_COMPILED", {})
    batch, epochs, samples = make_inputs((4, 3, 12, 3), torch.float32)
    flip: list[Transform] = [Flip(layout="HWC")]
    with_grad = batch.clone().requires_grad_()
    subclass = torch.nn.Parameter(batch, requires_grad=False)
    epochs_with_gaps = epochs.repeat(2)[::2]
    assert equals_one_after_the_other(flip, (with_grad, epochs, samples))
    assert equals_one_after_the_other(flip, (subclass, epochs, samples))
    assert equals_one_after_the_other(flip, (batch, epochs_with_gaps, samples))
    assert equals_one_after_the_other(flip, (batch[:0], epochs[:0], samples[:0]))
    assert not fused_augment._COMPILED
    mixed: list[Transform] = [PadCrop(3, layout="HWC"), Flip(layout="CHW")]
    assert equals_one_after_the_other(mixed, (batch, epochs, samples))


@only_interpreted
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.func's own
def test_the_kernel_is_left_out_where_torch_goes_through_derivatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_augment, "_COMPILED", {})
    batch, epochs, samples = make_inputs((4, 12, 10, 3), torch.float32)
    chain: list[Transform] = [PadCrop(12, 4), Flip()]
    expected = apply_in_turn(chain, (batch, epochs, samples))

    def run(x: Tensor) -> Tensor:
        return apply(chain, x, seed=5, epochs=epochs, samples=samples)

    def run_flip(x: Tensor) -> Tensor:
        return apply([Flip()], x, seed=5, epochs=epochs, samples=samples)

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(batch, 2 * batch)
        primal, tangent = torch.autograd.forward_ad.unpack_dual(run(dual))
    assert torch.equal(primal, expected)
    assert torch.equal(tangent, 2 * expected)

    _, tangent = torch.func.jvp(run, (batch,), (2 * batch,))
    assert torch.equal(tangent, 2 * expected)

    both = torch.vmap(run_flip)(torch.stack([batch, batch]))
    assert torch.equal(both[1], apply_in_turn([Flip()], (batch, epochs, samples)))

    assert not fused_augment._COMPILED
    negative = torch.complex(batch, batch).conj().imag  # torch negates it when it is read
    assert negative.is_neg()
    assert torch.equal(run(negative), -expected)


@only_interpreted
def test_the_kernel_takes_any_number_as_a_fill() -> None:
    inputs = make_inputs(SHAPES["HWC"], torch.float32)
    batch, epochs, samples = inputs
    expected = apply_in_turn([PadCrop(12, 4, 0.5), Cutout(4, 0.25)], inputs)
    for number_type in (np.float64, np.float32, np.float16, torch.tensor):
        chain: list[Transform] = [
            PadCrop(12, 4, number_type(0.5)),
            Cutout(4, number_type(0.25)),
        ]
        result = apply(chain, batch, seed=5, epochs=epochs, samples=samples)
        assert torch.equal(result, expected)
        assert torch.equal(apply_in_turn(chain, inputs), expected)


@only_interpreted
def test_the_kernel_that_fails_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.data.transforms import augment_triton

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(fused_augment, "_COMPILED", {})
    monkeypatch.setattr(augment_triton, "launch", fail)
    match = "take more kernels: Triton failed .no space left.*Images are the same"
    with pytest.warns(Notice, match=match):
        assert equals_one_after_the_other(CHAINS["all"], make_inputs(SHAPES["HWC"]))
    assert equals_one_after_the_other(CHAINS["all"], make_inputs(SHAPES["HWC"]))


@starts_interpreter
def test_the_interpreted_kernel() -> None:
    run_interpreted(__file__, 3 * len(CHAINS) + len(DTYPES) + 6)


def test_words_are_made_for_those_that_draw_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hash for all of them, and none where nothing is drawn."""
    calls = []
    original = hashing.words

    def counted_words(*args: Any) -> Tensor:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(hashing, "words", counted_words)
    batch, epochs, samples = make_inputs((4, 12, 12, 3))
    apply([Rescale(1 / 255)], batch, seed=0, epochs=epochs, samples=samples)
    assert not calls
    if not INTERPRETED and DEVICE.type == "cpu":
        apply(CHAINS["all"], batch, seed=0, epochs=epochs, samples=samples)
        assert len(calls) == 1


def test_which_go_together() -> None:
    """Each kind once and in order; a class of one's own is not one of them."""

    class OwnFlip(Flip):
        pass

    crop = PadCrop(8)
    flip = Flip()
    hole = Cutout(3)
    chains = [
        [crop, flip, hole],
        [crop, hole, flip],
        [flip, crop],
        [flip, flip],
        [Rescale(1.0), flip],
        [OwnFlip()],
        [],
    ]
    counts = [fused_augment._count_fusable(chain) for chain in chains]
    assert counts == [3, 2, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("number_type", [np.float64, np.float32, np.int64, torch.tensor])
def test_fills_are_pythons_numbers(number_type: Any) -> None:
    """A kernel is given their bits by their text, which numpy and torch write in their own ways."""
    crop = PadCrop(12, 4, number_type(3))
    hole = Cutout(4, number_type(3))
    assert {type(crop.fill), type(hole.fill)} <= {int, float}
    assert (crop, hole) == (PadCrop(12, 4, 3), Cutout(4, 3))


def test_a_plan_by_the_transforms_themselves() -> None:
    """A crop of 8 × 9 from 14 × 16 padded: 7 positions down and 8 across; half the words flip."""
    plan = fused_augment._plan(
        (PadCrop((8, 9), (4, 1, 2, 1)), Flip(), Cutout((2, 3))),
        (5, 3, 12, 10),
        (360, 120, 10, 1),
        torch.uint8,
    )
    assert plan == fused_augment.AugmentPlan(
        output_shape=(5, 3, 8, 9),
        output_strides=(216, 72, 9, 1),
        read_strides=(360, 120, 10, 1),
        write_strides=(216, 72, 9, 1),
        source_size=(12, 10),
        output_size=(3, 8, 9, 1),
        crop=(1, 4, 7, 8),
        flip_threshold=2**31,
        hole_size=(2, 3),
    )
    with pytest.raises(ValueError, match="fits into"):
        fused_augment._plan((PadCrop(20),), (5, 12, 10, 3), (360, 30, 3, 1), torch.uint8)


@pytest.mark.parametrize(
    ("transform", "shape", "strides"),
    [
        # rows far apart
        (Flip(layout="HWC"), (2, 2, 2, 3), (2**33, 2**31, 3, 1)),
        # a channel of its own, from planes of many images
        (Flip(layout="CHW"), (4, 1, 12, 10), (120, 2**31, 10, 1)),
        (Flip(), (4, 2, 10), (10, 1_500_000_000, 1)),
        (Cutout(2**31), (4, 12, 10), (120, 10, 1)),
        (PadCrop(12, (0, 2**31, 0, 0)), (4, 12, 12), (144, 12, 1)),
    ],
)
def test_what_32_bits_do_not_reach_is_left_to_torch(
    transform: Transform, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    assert fused_augment._plan((transform,), shape, strides, torch.uint8) is None
