"""PadCrop, Flip and Cutout on CUDA by one kernel: the bits and strides of one after the other, by torch's kernels."""

import pytest
import torch

from halfstep.data.transforms import Cutout, Flip, PadCrop
from tests.unit.data.transforms.test_fused import CHAINS, DTYPES, SHAPES, as_in_turn, given, room

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_WORKS", {})


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("name", CHAINS)
def test_one_after_the_other(name: str, layout: str) -> None:
    assert as_in_turn(CHAINS[name], given(SHAPES[layout]))
    assert list(room._WORKS.values()) == [True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_fill_and_seed(dtype: torch.dtype) -> None:
    for seed in range(6):
        assert as_in_turn(
            [PadCrop(12, 4, 17), Flip(), Cutout(4, 33)], given(SHAPES["HWC"], dtype, seed), seed
        )
    for fill in (0.1, 1 + 2**-11 + 2**-30, 0.0, -0.0, 0.0) if dtype.is_floating_point else ():
        assert as_in_turn([PadCrop(12, 4, fill), Cutout(4, -fill)], given(SHAPES["CHW"], dtype))


def test_any_strides() -> None:
    batch, epochs, samples = given((9, 12, 10, 3))
    odd, turned = torch.cat([batch, batch], dim=2)[:, :, :10], batch.permute(0, 3, 1, 2)
    shifted = torch.cat([batch.flatten()[:1], batch.flatten()])[1:].view(
        batch.shape
    )  # starts at an odd address
    for each in (odd, shifted, batch.flip(0)[::2], batch[:1].expand_as(batch), turned):
        for name in ("all", "flip", "hole"):
            assert as_in_turn(CHAINS[name], (each, epochs[: len(each)], samples[: len(each)]))


def test_images_of_many_blocks() -> None:
    """Images of more pixels than a program has, and more of them than fit on the chip."""
    assert as_in_turn(CHAINS["all"], given((700, 40, 36, 3)))
    assert as_in_turn(
        [PadCrop(224, 16), Flip(), Cutout(64)], given((33, 3, 224, 224), torch.float16)
    )
