"""Every operation of torch's own table on CUDA, inside a low network.

The checks are those of tests/unit/precision/test_op_table.py.
"""

import warnings

import pytest
import torch

from tests.unit.precision.test_op_table import (
    all_mixed_refusals,
    unsound_gradients,
    unsound_results,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_every_operation_is_sound(low: torch.dtype) -> None:
    with warnings.catch_warnings(action="ignore"):
        assert unsound_results(low, "cuda") == {}
        assert unsound_gradients(low, "cuda") == {}


def test_no_operation_refuses_a_float32_buffer_beside_low_tensors() -> None:
    with warnings.catch_warnings(action="ignore"):
        assert all_mixed_refusals("cuda") == {}
