"""Every test of amp begins with the module's default settings."""

from collections.abc import Iterator

import pytest
import torch

from halfstep import amp


@pytest.fixture(autouse=True)
def default_amp_settings() -> Iterator[None]:
    """Afterwards amp's settings are the defaults, and torch's state is as it was."""
    yield
    amp.enabled = False
    amp.low_prec_dtype = "float16"
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert torch.overrides._get_current_function_mode() is None
