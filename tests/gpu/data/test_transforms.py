"""Transforms on CUDA: the CPU's bits, no sync, and the same results from a captured graph."""

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

import halfstep
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
    fused_augment,
    fused_resize,
)
from halfstep.kernels import launch as launching
from tests.support.no_sync import no_sync

pytestmark = pytest.mark.gpu

SHAPES = {"HWC": (64, 32, 32, 3), "CHW": (64, 3, 32, 32), "gray": (64, 32, 32)}
AUGMENT: list[Transform] = [PadCrop(32, (4, 3, 2, 1), 9), Flip(0.3), Cutout((8, 5), 200)]
CHAINS: dict[str, list[Transform]] = {
    "pixels": AUGMENT,
    "float32": [*AUGMENT, Rescale(1 / 255, -0.1), Normalize(0.4914, 0.2023), ToCHW()],
    "float16": [
        *AUGMENT,
        Rescale(1 / 255),
        Normalize(0.4914, 0.2023),
        ToCHW(channels_last=True),
        Cast("float16"),
    ],
    "float64": [
        Cast("float64"),
        *AUGMENT,
        Rescale(1 / 255, -0.1),
        Normalize(0.4914, 0.2023),
        Flatten(),
    ],
}
COLOUR: list[Transform] = [
    *AUGMENT,
    Rescale(1 / 255),
    Normalize([0.49, 0.48, 0.45], [0.2, 0.2, 0.21]),
    ToCHW(),
]


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
def test_resize_is_close(
    layout: str, size: tuple[int, int], antialias: bool, deterministic: bool
) -> None:
    """Each side takes a coordinate below 32 from three roundings of 2^-24, along two axes of 255 levels."""
    given, chain = inputs(SHAPES[layout]), [Resize(size, antialias)]
    batch, *rest = given
    wide = (batch.float(), *rest)
    torch.use_deterministic_algorithms(
        deterministic
    )  # torch then takes another road to the same pixels
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


@pytest.mark.parametrize(
    "resize", [[], [Resize(48)], [Resize((20, 24), antialias=True)], [Resize(96)]]
)
def test_a_captured_chain_equals_the_eager_one(resize: list[Transform]) -> None:
    chain = [*AUGMENT, *resize, *COLOUR[len(AUGMENT) :], Cast("float16")]
    static = on_device(inputs(SHAPES["HWC"]))
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
    fresh: list[Transform] = [
        *spare,
        *spare,
        *AUGMENT,
        Normalize([11.5, 12.5, 13.5], [41.0, 42.0, 43.0]),
        ToCHW(),
    ]
    run(
        [*spare, *COLOUR], static
    )  # kernels are loaded; the values and draw numbers of `fresh` are new
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


# --- PadCrop, Flip and Cutout in one kernel


def kernels(chain: list[Transform], given: tuple[Tensor, Tensor, Tensor]) -> list[str]:
    """What runs on the device."""
    run(chain, given)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as seen:
        run(chain, given)
        torch.cuda.synchronize()
    return [
        event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]


@pytest.mark.parametrize("layout", SHAPES)
def test_one_kernel_makes_them(layout: str) -> None:
    given = on_device(inputs(SHAPES[layout]))
    assert kernels(AUGMENT, given) == ["_crop_flip_cutout"]
    assert kernels(AUGMENT[:1], given) == ["_crop_flip_cutout"]
    assert kernels([*AUGMENT, Resize(64), Rescale(1 / 255), ToCHW()], given) == [
        "_crop_flip_cutout",
        "_resize_bilinear",
    ]


def test_epochs_and_samples_of_any_size() -> None:
    batch, *_ = inputs(SHAPES["HWC"])
    g = torch.Generator().manual_seed(3)
    epochs, samples = (torch.randint(0, 2**62, (64,), generator=g) for _ in range(2))
    for seed in (0, 1, 2**31, 2**64 - 1, 10**30):
        got, expected = (
            apply(
                AUGMENT,
                batch.to(device),
                seed=seed,
                epochs=epochs.to(device),
                samples=samples.to(device),
            ).cpu()
            for device in ("cuda", "cpu")
        )
        assert torch.equal(got, expected)


def test_a_window_first_met_in_a_capture_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given = on_device(inputs(SHAPES["HWC"]))
    expected = run(AUGMENT, given)
    works: dict[object, bool] = {}
    monkeypatch.setattr(fused_augment, "_COMPILED", works)
    with monkeypatch.context() as without:
        without.setattr(launching, "usable", lambda device: False)
        run(AUGMENT, given)  # torch's kernels are loaded, and the draws' numbers are there
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(AUGMENT, given)
    graph.replay()
    assert not works
    assert torch.equal(out, expected)


# --- Resize and its tail in one kernel

MEAN, STD = [0.49, 0.48, 0.45], [0.2, 0.2, 0.21]
ANY_CHANNELS: list[list[Transform]] = [
    [],
    [ToCHW()],
    [Cast("bfloat16")],
    [Normalize(100.0, 30.0), ToCHW()],
    [Rescale(1 / 255, -0.1), ToCHW(channels_last=True), Cast("float16")],
]
TAILS: list[list[Transform]] = [
    *ANY_CHANNELS,
    [ToCHW(), Rescale(1 / 255), Normalize(MEAN, STD)],
    [ToCHW(channels_last=True), Normalize(MEAN, STD), Cast("float16")],
    [
        Rescale(1 / 255),
        Normalize(MEAN, STD),
        Rescale(0.5, 0.25),
        Cast("bfloat16"),
        ToCHW(),
        Rescale(2.0),
    ],
]


def line(given: int, wanted: int) -> tuple[list[int], list[int], Tensor]:
    """The two pixels around each one that is wanted, and the second's weight, from whole numbers."""
    exact = [
        max(Fraction((2 * i + 1) * given - wanted, 2 * wanted), Fraction(0)) for i in range(wanted)
    ]
    first = [int(e) for e in exact]
    return (
        first,
        [min(i + 1, given - 1) for i in first],
        torch.tensor([float(e % 1) for e in exact], dtype=torch.float64),
    )


def blend(images: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Bilinear for [B, H, W] or [B, H, W, C]: the weights rounded to `dtype`, then every product and every sum."""
    (top, bottom, down), (left, right, across) = (
        line(images.shape[1], height),
        line(images.shape[2], width),
    )
    down, across = (
        w.to(dtype).view(-1, *[1] * (images.dim() - 1 - at)) for w, at in ((down, 1), (across, 2))
    )
    x = images.to(dtype)
    above, below = (
        x[:, y][:, :, left] * (1 - across) + x[:, y][:, :, right] * across for y in (top, bottom)
    )
    return above * (1 - down) + below * down


def by_hand(images: Tensor, height: int, width: int) -> Tensor:
    value = blend(images, height, width, torch.float32)
    return (value + 0.5 if images.dtype == torch.uint8 else value).to(images.dtype)


@pytest.mark.parametrize("size", [(224, 224), (67, 130), (96, 43)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_the_kernel_rounds_as_by_hand(size: tuple[int, int], dtype: torch.dtype) -> None:
    """80 rows and 52 columns that grow, or shrink to 67 and 43; four roundings along each axis, 2^-24 each."""
    batch, *rest = inputs((5, 80, 52, 3))
    batch = batch.to(dtype) if dtype == torch.uint8 else (batch.float() / 31).to(dtype)
    got = run([Resize(size)], on_device((batch, *rest))).cpu()  # type: ignore[arg-type]
    assert torch.equal(got, by_hand(batch, *size))
    if dtype == torch.float32:
        assert (got - blend(batch, *size, torch.float64)).abs().max() <= 8 * 2**-24 * batch.max()


@pytest.mark.parametrize("layout", SHAPES)
def test_the_kernel_reads_any_layout_and_strides(layout: str) -> None:
    batch, epochs, samples = on_device(inputs(SHAPES[layout]))
    odd = torch.cat([batch, batch], dim=-1)[..., : batch.shape[-1]]  # rows do not follow each other
    shifted = torch.cat([batch.flatten()[:1], batch.flatten()])[1:].view(
        batch.shape
    )  # starts at an odd address
    expanded = batch[:1].expand_as(batch)
    for each in (batch, odd, shifted, expanded, batch.flip(0)[3:]):
        images = each.cpu().movedim(1, -1) if layout == "CHW" else each.cpu()
        got = run([Resize((70, 75))], (each, epochs[: len(each)], samples[: len(each)])).cpu()
        assert torch.equal(got.movedim(1, -1) if layout == "CHW" else got, by_hand(images, 70, 75))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
@pytest.mark.parametrize("layout", SHAPES)
def test_the_tail_has_the_bits_and_strides_of_one_transform_after_the_other(
    layout: str, dtype: torch.dtype
) -> None:
    batch, *rest = inputs(SHAPES[layout])
    given = on_device((batch.to(dtype), *rest))  # type: ignore[arg-type]
    none, resize = torch.empty((0, 64), dtype=torch.int64, device="cuda"), Resize((64, 80))
    resized, passes = run([resize], given), resize(given[0], none)
    assert resized.stride() == passes.stride()
    for tail in ANY_CHANNELS if layout == "gray" else TAILS:
        got = run([resize, *tail], given)
        assert torch.equal(got, run(tail, (resized, *given[1:])))
        expected = passes
        for part in tail:
            expected = part(expected, none)
        assert (got.shape, got.stride(), got.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )


def test_a_sample_comes_out_the_same_in_any_batch() -> None:
    chain, given = [*AUGMENT, Resize(80), *COLOUR[len(AUGMENT) :]], on_device(inputs(SHAPES["HWC"]))
    parts = [run(chain, part) for part in zip(*(t.split([1, 40, 23]) for t in given), strict=True)]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(parts), run(chain, given))
    assert torch.equal(run(chain, given), run(chain, given))
    assert run(chain, tuple(t[:0] for t in given)).shape == (0, 3, 80, 80)  # type: ignore[arg-type]


def test_a_kernel_first_met_in_a_capture_is_left_to_torch() -> None:
    given, chain = on_device(inputs(SHAPES["HWC"])), [Resize((101, 90)), Rescale(1 / 255)]
    passes = chain[0](given[0], given[1]) * (1 / 255) + 0.0  # torch's kernels are loaded
    known = dict(fused_resize._COMPILED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(chain, given)
    assert known == fused_resize._COMPILED
    graph.replay()
    assert torch.equal(out, passes)
    eager = run(chain, given)
    assert len(fused_resize._COMPILED) == len(known) + 1
    assert (out - eager).abs().max() <= 1.001 / 255  # a level


def test_gradients_go_through_torch() -> None:
    batch, *rest = inputs((4, 32, 32, 3))
    grads = []
    for device in ("cpu", "cuda"):
        x = batch.to(device, torch.float32).requires_grad_()
        run([Resize(80), Rescale(2.0)], (x, *(t.to(device) for t in rest))).sum().backward()  # type: ignore[arg-type]
        grads.append(x.grad.cpu())
    torch.testing.assert_close(
        grads[1], grads[0], rtol=1e-4, atol=0
    )  # sums of some 25 weights, none negative


def test_without_triton_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given, resize = on_device(inputs(SHAPES["HWC"])), Resize((99, 90))
    pixels = run(AUGMENT, given)
    monkeypatch.setitem(sys.modules, "triton", None)
    launching._devices.cache_clear()
    try:
        assert torch.equal(run([resize], given), resize(given[0], given[1]))
        assert torch.equal(run(AUGMENT, given), pixels)
    finally:
        launching._devices.cache_clear()


NO_COMPILER = """
import torch, warnings
from halfstep.data.transforms import Resize, apply
batch, samples = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8, device="cuda"), torch.arange(4, device="cuda")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        out = apply([Resize(64)], batch, seed=0, epochs=samples, samples=samples)
print(*[w.category.__name__ for w in caught if "Triton failed" in str(w.message)])
print(torch.equal(out, Resize(64)(batch, samples)))
"""


def test_without_a_compiler_torch_does_it_and_a_notice_says_so_once(tmp_path: Path) -> None:
    nowhere = {
        "CC": str(tmp_path / "cc"),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_HOME": str(tmp_path),
    }
    root = str(Path(halfstep.__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", NO_COMPILER],
        env={**os.environ, **nowhere, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["Notice", "True"]
