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


Inputs = tuple[Tensor, Tensor, Tensor]  # pixels, epochs, samples


def make_inputs(shape: tuple[int, ...], seed: int = 0) -> Inputs:
    """Pixels, epochs, samples, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    epochs = torch.randint(0, 90, shape[:1], generator=generator)
    samples = torch.randint(0, 10**9, shape[:1], generator=generator)
    return batch, epochs, samples


def run(chain: list[Transform], inputs: Inputs) -> Tensor:
    batch, epochs, samples = inputs
    return apply(chain, batch, seed=5, epochs=epochs, samples=samples)


def on_device(inputs: Inputs) -> Inputs:
    batch, epochs, samples = inputs
    return batch.cuda(), epochs.cuda(), samples.cuda()


def on_cpu(inputs: Inputs) -> Inputs:
    batch, epochs, samples = inputs
    return batch.cpu(), epochs.cpu(), samples.cpu()


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("layout", SHAPES)
def test_the_cpus_bits(name: str, layout: str) -> None:
    inputs = make_inputs(SHAPES[layout])
    expected = run(CHAINS[name], inputs)
    result = run(CHAINS[name], on_device(inputs))
    assert result.device.type == "cuda"
    assert result.dtype == expected.dtype
    assert torch.equal(result.cpu(), expected)


def test_the_cpus_bits_per_channel() -> None:
    inputs = make_inputs(SHAPES["HWC"])
    assert torch.equal(run(COLOUR, on_device(inputs)).cpu(), run(COLOUR, inputs))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("size", [(224, 224), (48, 51), (13, 9)])
@pytest.mark.parametrize("layout", SHAPES)
def test_resize_is_close(
    layout: str, size: tuple[int, int], antialias: bool, deterministic: bool
) -> None:
    """Each side takes a coordinate below 32 from three roundings of 2^-24.

    That moves 255 levels along strided of two axes.
    """
    inputs = make_inputs(SHAPES[layout])
    chain = [Resize(size, antialias)]
    batch, epochs, samples = inputs
    wide = (batch.float(), epochs, samples)
    # torch then takes another way to the same pixels
    torch.use_deterministic_algorithms(deterministic)
    try:
        levels = run(chain, on_device(inputs))
        floats = run(chain, on_device(wide))
    finally:
        torch.use_deterministic_algorithms(False)
    assert levels.dtype == torch.uint8
    assert (levels.cpu().int() - run(chain, inputs).int()).abs().max() <= 1
    assert (floats.cpu() - run(chain, wide)).abs().max() <= 2 * (2 * 255 * 3 * 32 * 2**-24)


def test_one_hot_needs_no_sync_and_an_unknown_label_is_off() -> None:
    labels = torch.randint(0, 10, (64,))
    words = torch.empty((0, 64), dtype=torch.int64, device="cuda")
    one_hot = OneHot(10, on=0.9, off=0.1 / 9)
    device_labels = labels.cuda()
    wrong = torch.tensor([10, -100, 3], device="cuda")
    with no_sync():
        result = one_hot(device_labels, words)
        off = one_hot(wrong, words)
    assert torch.equal(result.cpu(), one_hot(labels, words.cpu()))
    assert torch.equal(off[:2].cpu(), torch.full((2, 10), 0.1 / 9))
    assert torch.equal(off[2].cpu(), one_hot(torch.tensor([3]), words.cpu())[0])


@pytest.mark.parametrize(
    "resize", [[], [Resize(48)], [Resize((20, 24), antialias=True)], [Resize(96)]]
)
def test_a_captured_chain_equals_the_eager_one(resize: list[Transform]) -> None:
    chain = [*AUGMENT, *resize, *COLOUR[len(AUGMENT) :], Cast("float16")]
    static = on_device(make_inputs(SHAPES["HWC"]))
    others = [on_device(make_inputs(SHAPES["HWC"], seed)) for seed in range(1, 6)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(chain, static)  # constants are made here
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    replayed = []
    eager = []
    with torch.cuda.graph(graph):
        out = run(chain, static)
    with no_sync():
        for inputs in others:
            for target, value in zip(static, inputs, strict=True):
                target.copy_(value)
            graph.replay()
            replayed.append(out.clone())
            eager.append(run(chain, inputs))
    for replayed_batch, eager_batch in zip(replayed, eager, strict=True):
        assert torch.equal(replayed_batch, eager_batch)
    assert not torch.equal(replayed[0], replayed[1])


def test_constants_first_met_in_a_capture_belong_to_the_graph() -> None:
    """Without a warm-up the graph fills its own.

    Eager calls after it do not read the graph's memory.
    """
    static = on_device(make_inputs(SHAPES["HWC"]))
    spare: list[Transform] = [Rescale(1), Cast("uint8")]
    fresh: list[Transform] = [
        *spare,
        *spare,
        *AUGMENT,
        Normalize([11.5, 12.5, 13.5], [41.0, 42.0, 43.0]),
        ToCHW(),
    ]
    # kernels are loaded; the values and draw numbers of `fresh` are new
    run([*spare, *COLOUR], static)
    for dtype in (torch.int64, torch.float32):
        torch.stack([torch.full((), 1, dtype=dtype, device="cuda")] * 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(fresh, static)
    eager = run(fresh, static)  # before any replay: nothing of the graph has run yet
    graph.replay()
    assert torch.equal(eager.cpu(), run(fresh, on_cpu(static)))
    assert torch.equal(out, eager)


# --- PadCrop, Flip and Cutout in one kernel


def kernel_names(chain: list[Transform], inputs: Inputs) -> list[str]:
    """What runs on the device."""
    run(chain, inputs)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        run(chain, inputs)
        torch.cuda.synchronize()
    return [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


@pytest.mark.parametrize("layout", SHAPES)
def test_one_kernel_makes_them(layout: str) -> None:
    inputs = on_device(make_inputs(SHAPES[layout]))
    assert kernel_names(AUGMENT, inputs) == ["_crop_flip_cutout"]
    assert kernel_names(AUGMENT[:1], inputs) == ["_crop_flip_cutout"]
    assert kernel_names([*AUGMENT, Resize(64), Rescale(1 / 255), ToCHW()], inputs) == [
        "_crop_flip_cutout",
        "_resize_bilinear",
    ]


def test_epochs_and_samples_of_any_size() -> None:
    batch, *_ = make_inputs(SHAPES["HWC"])
    generator = torch.Generator().manual_seed(3)
    epochs = torch.randint(0, 2**62, (64,), generator=generator)
    samples = torch.randint(0, 2**62, (64,), generator=generator)
    for seed in (0, 1, 2**31, 2**64 - 1, 10**30):
        expected = apply(AUGMENT, batch, seed=seed, epochs=epochs, samples=samples)
        result = apply(
            AUGMENT, batch.cuda(), seed=seed, epochs=epochs.cuda(), samples=samples.cuda()
        )
        assert torch.equal(result.cpu(), expected)


def test_a_window_first_met_in_a_capture_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = on_device(make_inputs(SHAPES["HWC"]))
    expected = run(AUGMENT, inputs)
    compiled: dict[object, bool] = {}
    monkeypatch.setattr(fused_augment, "_COMPILED", compiled)
    with monkeypatch.context() as without:
        without.setattr(launching, "triton_runs_on", lambda device: False)
        run(AUGMENT, inputs)  # torch's kernels are loaded, and the draws' numbers are there
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(AUGMENT, inputs)
    graph.replay()
    assert not compiled
    assert torch.equal(out, expected)


# --- Resize and its tail in one kernel

MEAN = [0.49, 0.48, 0.45]
STD = [0.2, 0.2, 0.21]
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


def sampling_points(source_size: int, output_size: int) -> tuple[list[int], list[int], Tensor]:
    """The two source pixels around strided output pixel, and the second's weight, in fractions."""
    positions = [
        max(Fraction((2 * i + 1) * source_size - output_size, 2 * output_size), Fraction(0))
        for i in range(output_size)
    ]
    first = [int(position) for position in positions]
    second = [min(i + 1, source_size - 1) for i in first]
    weights = [float(position % 1) for position in positions]
    return first, second, torch.tensor(weights, dtype=torch.float64)


def blend(images: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Bilinear for [B, H, W] or [B, H, W, C].

    The weights are rounded to `dtype`, then every product and every sum.
    """
    top, bottom, down = sampling_points(images.shape[1], height)
    left, right, across = sampling_points(images.shape[2], width)
    down = down.to(dtype).view(-1, *[1] * (images.dim() - 2))
    across = across.to(dtype).view(-1, *[1] * (images.dim() - 3))
    x = images.to(dtype)
    above = x[:, top][:, :, left] * (1 - across) + x[:, top][:, :, right] * across
    below = x[:, bottom][:, :, left] * (1 - across) + x[:, bottom][:, :, right] * across
    return above * (1 - down) + below * down


def resize_by_hand(images: Tensor, height: int, width: int) -> Tensor:
    value = blend(images, height, width, torch.float32)
    if images.dtype == torch.uint8:
        value = value + 0.5
    return value.to(images.dtype)


@pytest.mark.parametrize("size", [(224, 224), (67, 130), (96, 43)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_the_kernel_rounds_as_by_hand(size: tuple[int, int], dtype: torch.dtype) -> None:
    """80 rows and 52 columns that grow, or shrink to 67 and 43.

    Four roundings along each axis, 2^-24 each.
    """
    batch, epochs, samples = make_inputs((5, 80, 52, 3))
    batch = batch.to(dtype) if dtype == torch.uint8 else (batch.float() / 31).to(dtype)
    result = run([Resize(size)], on_device((batch, epochs, samples))).cpu()
    assert torch.equal(result, resize_by_hand(batch, *size))
    if dtype == torch.float32:
        assert (result - blend(batch, *size, torch.float64)).abs().max() <= 8 * 2**-24 * batch.max()


@pytest.mark.parametrize("layout", SHAPES)
def test_the_kernel_reads_any_layout_and_strides(layout: str) -> None:
    batch, epochs, samples = on_device(make_inputs(SHAPES[layout]))
    pixels = batch.flatten()
    batches = [
        batch,
        torch.cat([batch, batch], dim=-1)[..., : batch.shape[-1]],  # rows with gaps between them
        torch.cat([pixels[:1], pixels])[1:].view(batch.shape),  # starts at an odd address
        batch[:1].expand_as(batch),
        batch.flip(0)[3:],
    ]
    for strided in batches:
        size = len(strided)
        images = strided.cpu()
        result = run([Resize((70, 75))], (strided, epochs[:size], samples[:size])).cpu()
        if layout == "CHW":
            images = images.movedim(1, -1)
            result = result.movedim(1, -1)
        assert torch.equal(result, resize_by_hand(images, 70, 75))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
@pytest.mark.parametrize("layout", SHAPES)
def test_the_tail_has_the_bits_and_strides_of_one_transform_after_the_other(
    layout: str, dtype: torch.dtype
) -> None:
    batch, epochs, samples = make_inputs(SHAPES[layout])
    inputs = on_device((batch.to(dtype), epochs, samples))
    no_words = torch.empty((0, 64), dtype=torch.int64, device="cuda")
    resize = Resize((64, 80))
    resized = run([resize], inputs)
    by_torch = resize(inputs[0], no_words)
    assert resized.stride() == by_torch.stride()
    for tail in ANY_CHANNELS if layout == "gray" else TAILS:
        result = run([resize, *tail], inputs)
        assert torch.equal(result, run(tail, (resized, *inputs[1:])))
        expected = by_torch
        for transform in tail:
            expected = transform(expected, no_words)
        assert (result.shape, result.stride(), result.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )


def test_a_sample_comes_out_the_same_in_any_batch() -> None:
    chain = [*AUGMENT, Resize(80), *COLOUR[len(AUGMENT) :]]
    inputs = on_device(make_inputs(SHAPES["HWC"]))
    batches = zip(*(t.split([1, 40, 23]) for t in inputs), strict=True)
    parts = [run(chain, part) for part in batches]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(parts), run(chain, inputs))
    assert torch.equal(run(chain, inputs), run(chain, inputs))
    batch, epochs, samples = inputs
    assert run(chain, (batch[:0], epochs[:0], samples[:0])).shape == (0, 3, 80, 80)


def test_a_kernel_first_met_in_a_capture_is_left_to_torch() -> None:
    inputs = on_device(make_inputs(SHAPES["HWC"]))
    chain = [Resize((101, 90)), Rescale(1 / 255)]
    by_torch = chain[0](inputs[0], inputs[1]) * (1 / 255) + 0.0  # torch's kernels are loaded
    known = dict(fused_resize._COMPILED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(chain, inputs)
    assert known == fused_resize._COMPILED
    graph.replay()
    assert torch.equal(out, by_torch)
    eager = run(chain, inputs)
    assert len(fused_resize._COMPILED) == len(known) + 1
    assert (out - eager).abs().max() <= 1.001 / 255  # a level


def test_gradients_go_through_torch() -> None:
    batch, epochs, samples = make_inputs((4, 32, 32, 3))
    grads = []
    for device in ("cpu", "cuda"):
        x = batch.to(device, torch.float32).requires_grad_()
        out = run([Resize(80), Rescale(2.0)], (x, epochs.to(device), samples.to(device)))
        out.sum().backward()
        grads.append(x.grad.cpu())
    # sums of some 25 weights, none negative
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=0)


def test_without_triton_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = on_device(make_inputs(SHAPES["HWC"]))
    resize = Resize((99, 90))
    pixels = run(AUGMENT, inputs)
    monkeypatch.setitem(sys.modules, "triton", None)
    launching._triton_devices.cache_clear()
    try:
        assert torch.equal(run([resize], inputs), resize(inputs[0], inputs[1]))
        assert torch.equal(run(AUGMENT, inputs), pixels)
    finally:
        launching._triton_devices.cache_clear()


NO_COMPILER = """
import torch, warnings
from halfstep.data.transforms import Resize, apply
batch = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8, device="cuda")
samples = torch.arange(4, device="cuda")
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
