"""Low copies of float32 masters follow them."""

import torch
from torch import nn

from halfstep.precision.low_params import LowCopies


def test_copies_are_never_stale(device: torch.device) -> None:
    """Masters whose memory is replaced, as evaluation of an average replaces it, and transposed."""
    p = nn.Parameter(torch.randn(64, 64, device=device))
    copies = LowCopies([p], [torch.float16])
    for data in (p.data, torch.randn(64, 64, device=device), p.data.t(), p.data):
        p.data = data
        (low,) = copies.cast_masters()
        assert torch.equal(low.detach(), data.half())
