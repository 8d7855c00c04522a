"""The common ResNets are torchvision's: the same names, initial weights and output bits."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep import nets
from halfstep.nets.padding import SameConv2d, SameMaxPool2d

pytestmark = pytest.mark.gpu
NAMES = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuDNN's backward adds in any order otherwise."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def ours_and_torchvisions(
    name: str, *, seeds: tuple[int, int] = (0, 0), **options: bool
) -> tuple[nn.Module, nn.Module]:
    """The same network of 10 classes, by halfstep and by torchvision."""
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(seeds[0])
    ours = nets.load(name, classes=10, **options)
    torch.manual_seed(seeds[1])
    return ours, getattr(models, name)(num_classes=10, **options)


def assert_equal_states(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("zero", [False, True], ids=["ones", "zeros"])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_weights(name: str, zero: bool) -> None:
    ours, theirs = ours_and_torchvisions(name, zero_init_residual=zero)
    assert_equal_states(ours.state_dict(), theirs.state_dict())


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_loaded_weights_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    pair = ours_and_torchvisions(name, seeds=(0, 1))
    ours, theirs = (net.to("cuda", dtype) for net in pair)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 3, 64, 80, device="cuda", dtype=dtype)
    for train in (True, False):
        out = ours.train(train)(x)
        expected = theirs.train(train)(x)
        assert torch.equal(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
    assert_equal_states(ours.state_dict(), theirs.state_dict())  # running statistics too
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_same_layers_on_cuda_are_those_of_the_cpu() -> None:
    x = torch.randn(2, 3, 33, 46, dtype=torch.float64)
    pool = SameMaxPool2d(3, 2)
    assert torch.equal(pool(x.cuda()).cpu(), pool(x))
    conv = SameConv2d(3, 8, 7, 2, bias=False).double()
    expected = conv(x)
    received = conv.cuda()(x.cuda())
    # 1e-13: 147 float64 products in another order
    torch.testing.assert_close(received.cpu(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("variant", ["common", "seed"])
def test_resnet50_trains_in_channels_last_half_precision(variant: str) -> None:
    with torch.device("cuda"):
        net = nets.load("resnet50", classes=10, variant=variant)
        net = net.to(memory_format=torch.channels_last)
        x = torch.randn(16, 3, 64, 64).to(memory_format=torch.channels_last)
        y = torch.arange(16) % 10
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision="O2")
    losses = torch.stack([step(x, y).loss for _ in range(30)])
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()  # one batch, learnt by heart
