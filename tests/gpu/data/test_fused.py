"""PadCrop, Flip and Cutout on CUDA by one kernel.

The bits and strides are those of one transform after the other, by torch's kernels.
"""

import pytest
import torch

from halfstep.data.transforms import Cutout, Flip, PadCrop, Transform, fused_augment
from tests.unit.data.transforms.test_fused import (
    CHAINS,
    DTYPES,
    FILLS,
    SHAPES,
    equals_one_after_the_other,
    make_inputs,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_augment, "_COMPILED", {})


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("name", CHAINS)
def test_one_after_the_other(name: str, layout: str) -> None:
    assert equals_one_after_the_other(CHAINS[name], make_inputs(SHAPES[layout]))
    assert list(fused_augment._COMPILED.values()) == [True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_fill_and_seed(dtype: torch.dtype) -> None:
    chain: list[Transform] = [PadCrop(12, 4, 17), Flip(), Cutout(4, 33)]
    for seed in range(6):
        assert equals_one_after_the_other(chain, make_inputs(SHAPES["HWC"], dtype, seed), seed)
    for fill in FILLS if dtype.is_floating_point else ():
        chain = [PadCrop(12, 4, fill), Cutout(4, -fill)]
        assert equals_one_after_the_other(chain, make_inputs(SHAPES["CHW"], dtype))


def test_any_strides() -> None:
    batch, epochs, samples = make_inputs((9, 12, 10, 3))
    pixels = batch.flatten()
    batches = [
        torch.cat([batch, batch], dim=2)[:, :, :10],  # rows do not follow each other
        torch.cat([pixels[:1], pixels])[1:].view(batch.shape),  # starts at an odd address
        batch.flip(0)[::2],
        batch[:1].expand_as(batch),
        batch.permute(0, 3, 1, 2),
    ]
    for strided in batches:
        size = len(strided)
        for name in ("all", "flip", "hole"):
            inputs = (strided, epochs[:size], samples[:size])
            assert equals_one_after_the_other(CHAINS[name], inputs)


def test_images_of_many_blocks() -> None:
    """Images of more pixels than a program has, and more of them than fit on the chip."""
    assert equals_one_after_the_other(CHAINS["all"], make_inputs((700, 40, 36, 3)))
    chain: list[Transform] = [PadCrop(224, 16), Flip(), Cutout(64)]
    assert equals_one_after_the_other(chain, make_inputs((33, 3, 224, 224), torch.float16))
