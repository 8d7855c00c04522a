"""Transforms on CUDA: the CPU's bits, no sync, and the same results from a captured graph."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from halfstep.data.transforms import (
    Cast,
    Cutout,
    Flatten,
    Flip,
    Normalize,
    OneHot,
    PadCrop,
    Rescale,
    Resize,
    ToCHW,
    Transform,
    apply,
)

pytestmark = pytest.mark.gpu

SHAPES = {"HWC": (64, 32, 32, 3), "CHW": (64, 3, 32, 32), "gray": (64, 32, 32)}
AUGMENT: list[Transform] = [PadCrop(32, (4, 3, 2, 1), 9), Flip(0.3), Cutout((8, 5), 200)]
CHAINS: dict[str, list[Transform]] = {
    "pixels": AUGMENT,
    "float32": [*AUGMENT, Rescale(1 / 255, -0.1), Normalize(0.4914, 0.2023), ToCHW()],
    "float16": [*AUGMENT, Rescale(1 / 255), Normalize(0.4914, 0.2023), ToCHW(channels_last=True), Cast("float16")],
    "float64": [Cast("float64"), *AUGMENT, Rescale(1 / 255, -0.1), Normalize(0.4914, 0.2023), Flatten()],
}
COLOUR: list[Transform] = [*AUGMENT, Rescale(1 / 255), Normalize([0.49, 0.48, 0.45], [0.2, 0.2, 0.21]), ToCHW()]


@contextmanager
def no_sync() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def inputs(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels, epochs, samples, on the CPU."""
    g = torch.Generator().manual_seed(seed)
    batch = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)
    epochs, samples = (torch.randint(0, top, shape[:1], generator=g) for top in (90, 10**9))
    return batch, epochs, samples


def run(chain: list[Transform], given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    batch, epochs, samples = given
    return apply(chain, batch, seed=5, epochs=epochs, samples=samples)


def on_device(given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    batch, epochs, samples = (t.cuda() for t in given)
    return batch, epochs, samples


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("layout", SHAPES)
def test_the_cpus_bits(name: str, layout: str) -> None:
    given = inputs(SHAPES[layout])
    expected, got = run(CHAINS[name], given), run(CHAINS[name], on_device(given))
    assert got.device.type == "cuda"
    assert got.dtype == expected.dtype
    assert torch.equal(got.cpu(), expected)


def test_the_cpus_bits_per_channel() -> None:
    given = inputs(SHAPES["HWC"])
    assert torch.equal(run(COLOUR, on_device(given)).cpu(), run(COLOUR, given))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("size", [(224, 224), (48, 51), (13, 9)])
@pytest.mark.parametrize("layout", SHAPES)
def test_resize_is_close(layout: str, size: tuple[int, int], antialias: bool, deterministic: bool) -> None:
    """Each side takes a coordinate below 32 from three roundings of 2^-24, along two axes of 255 levels."""
    given, chain = inputs(SHAPES[layout]), [Resize(size, antialias)]
    batch, *rest = given
    wide = (batch.float(), *rest)
    torch.use_deterministic_algorithms(deterministic)  # torch then takes another road to the same pixels
    try:
        levels, floats = run(chain, on_device(given)), run(chain, on_device(wide))
    finally:
        torch.use_deterministic_algorithms(False)
    assert levels.dtype == torch.uint8
    assert (levels.cpu().int() - run(chain, given).int()).abs().max() <= 1
    assert (floats.cpu() - run(chain, wide)).abs().max() <= 2 * (2 * 255 * 3 * 32 * 2**-24)


def test_one_hot_needs_no_sync_and_an_unknown_label_is_off() -> None:
    labels = torch.randint(0, 10, (64,))
    words = torch.empty((0, 64), dtype=torch.int64, device="cuda")
    one_hot, device = OneHot(10, on=0.9, off=0.1 / 9), labels.cuda()
    wrong = torch.tensor([10, -100, 3], device="cuda")
    with no_sync():
        got, off = one_hot(device, words), one_hot(wrong, words)
    assert torch.equal(got.cpu(), one_hot(labels, words.cpu()))
    assert torch.equal(off[:2].cpu(), torch.full((2, 10), 0.1 / 9))
    assert torch.equal(off[2].cpu(), one_hot(torch.tensor([3]), words.cpu())[0])


@pytest.mark.parametrize("resize", [[], [Resize(48)], [Resize((20, 24), antialias=True)]])
def test_a_captured_chain_equals_the_eager_one(resize: list[Transform]) -> None:
    chain, static = [*resize, *COLOUR, Cast("float16")], on_device(inputs(SHAPES["HWC"]))
    others = [on_device(inputs(SHAPES["HWC"], seed)) for seed in range(1, 6)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(chain, static)  # constants are made here
    torch.cuda.current_stream().wait_stream(side)
    graph, replayed, eager = torch.cuda.CUDAGraph(), [], []
    with torch.cuda.graph(graph):
        out = run(chain, static)
    with no_sync():
        for given in others:
            for to, value in zip(static, given, strict=True):
                to.copy_(value)
            graph.replay()
            replayed.append(out.clone())
            eager.append(run(chain, given))
    for a, b in zip(replayed, eager, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(replayed[0], replayed[1])


def test_constants_first_met_in_a_capture_belong_to_the_graph() -> None:
    """Without a warm-up the graph fills its own, and eager calls after it do not read the graph's memory."""
    static = on_device(inputs(SHAPES["HWC"]))
    spare: list[Transform] = [Rescale(1), Cast("uint8")]
    fresh: list[Transform] = [*spare, *spare, *AUGMENT, Normalize([11.5, 12.5, 13.5], [41.0, 42.0, 43.0]), ToCHW()]
    run([*spare, *COLOUR], static)  # kernels are loaded; the values and draw numbers of `fresh` are new
    for dtype in (torch.int64, torch.float32):
        torch.stack([torch.full((), 1, dtype=dtype, device="cuda")] * 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(fresh, static)
    eager = run(fresh, static)  # before any replay: nothing of the graph has run yet
    graph.replay()
    assert torch.equal(eager.cpu(), run(fresh, tuple(t.cpu() for t in static)))  # type: ignore[arg-type]
    assert torch.equal(out, eager)
