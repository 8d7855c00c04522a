"""Float buffers and losses in low networks on CUDA, where torch's kernels refuse mixed operands.

The checks are those of tests/unit/precision/test_float_buffers.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from tests.unit.precision.test_float_buffers import (
    TABLES,
    UPDATES,
    Rotary,
    Setting,
    check_statistics,
    check_table,
    check_update,
)

pytestmark = pytest.mark.gpu
SETTINGS = [
    Setting(name, low, "auto") for name in ("O2", "O3") for low in (torch.float16, torch.bfloat16)
]
every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=Setting.__str__)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@every_setting
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_not_rounded(name: str, setting: Setting) -> None:
    check_table(name, setting, "cuda")


@every_setting
@pytest.mark.parametrize("name", UPDATES)
def test_a_buffer_is_updated_in_float32(name: str, setting: Setting) -> None:
    check_update(name, setting, "cuda")


@every_setting
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_of_norm_layers_do_not_stall(kind: type[nn.Module], setting: Setting) -> None:
    check_statistics(kind, setting, "cuda")


class RotaryWithLoss(Rotary):
    """Counts its batches in a float buffer, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(4096.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        return F.mse_loss(super().forward(x), y)


@pytest.mark.parametrize("name", ["O2", "O3", "O2+bf16"])
@pytest.mark.parametrize("sunk", [False, True])
def test_captured_and_compiled_steps_follow_the_same_rules(name: str, sunk: bool) -> None:
    torch.manual_seed(0)
    net = RotaryWithLoss().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = torch.randn(64, 6, 8), torch.randn(64, 6, 8)
    data = hs.data.Dataset({"x": x, "y": y}).batch(8)
    model = hs.Model(
        net, None, optimizer, hs.Precision.parse(name), forward=lambda net, x, y: net(x, y)
    )
    if sunk:
        model.fit(3, data.to_device("cuda"))
    else:
        for _ in range(3):
            for batch in data:
                model.step(*(t.cuda() for t in batch))
    assert net.count.item() == 4096 + 24
    assert net.count.dtype == torch.float32
