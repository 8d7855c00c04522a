"""The data path on CUDA: host and device agree bit for bit, and nothing waits."""

import gc
import threading
import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from halfstep.data import Dataset, Flip, Normalize, Order, PadCrop, Rescale, Resize, ToCHW
from halfstep.errors import Notice
from tests.support.no_sync import no_sync

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 255, 256, 1000, 60_000, 10**9, 2**61 + 12345])
def test_the_order_is_the_same_on_host_and_device(size: int) -> None:
    count = min(size, 50_000)
    for epoch in (0, 5):
        for start in {0, (size - count) // 2, size - count}:
            order = Order(size, seed=3)
            on_host = order.indices(epoch, start, count, "cpu")
            on_device = order.indices(epoch, start, count, CUDA)
            assert torch.equal(on_host, on_device.cpu())
            positions = order.position_of(epoch, on_device).cpu()
            assert torch.equal(positions, torch.arange(start, start + count))


def test_the_order_runs_without_a_sync_and_inside_a_graph() -> None:
    order = Order(60_000, seed=1)
    positions = torch.arange(64_000, device=CUDA) % 60_000
    epochs = torch.zeros(1, dtype=torch.int64, device=CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with no_sync(), torch.cuda.stream(stream):
        order.at(epochs, positions)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        samples = order.at(epochs, positions)
    for epoch in (0, 4):
        with no_sync():
            epochs.fill_(epoch)
            graph.replay()
        assert torch.equal(samples.cpu(), order.at(epoch, positions.cpu()))


def augmented_data(size: int = 500) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (size, 32, 32, 3), dtype=torch.uint8, generator=generator)
    chain = [
        PadCrop(32, 4),
        Flip(),
        ToCHW(),
        Rescale(1 / 255, 0.0),
        Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.3)),
    ]
    dataset = Dataset({"image": images, "label": torch.arange(size)}, seed=4)
    return dataset.map(chain, "image").shuffle().batch(64)


def streaming_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name == "halfstep-stream"]


def test_resident_batches_equal_the_hosts_without_a_sync_or_a_copy() -> None:
    host = augmented_data()
    resident = augmented_data().to_device(CUDA)
    list(resident)  # constants go to the device with the first batch
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        with no_sync():
            batches = list(resident)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    assert [name for name in names if "Memcpy HtoD" in name or "Memcpy DtoH" in name] == []
    list(host)
    for (x, y), (u, v) in zip(host, batches, strict=True):
        assert u.is_cuda
        assert torch.equal(y, v.cpu())
        assert torch.equal(x, u.cpu())


def test_streamed_batches_equal_the_hosts_and_arrive_in_order() -> None:
    with pytest.warns(Notice, match="not resident"):
        streamed = augmented_data(3000).to_device(CUDA, budget=0)
    work = torch.randn(2000, 2000, device=CUDA)
    for (x, y), (u, v) in zip(augmented_data(3000), streamed, strict=True):
        assert u.is_cuda
        work = work @ work / work.norm()  # the device is busy while the next batch comes in
        assert torch.equal(y, v.cpu())
        assert torch.equal(x, u.cpu())


def test_a_stream_left_early_ends_its_thread_and_an_error_reaches_the_user() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        streamed = augmented_data(3000).to_device(CUDA, budget=0)
        stream = iter(streamed)
        next(stream)
        del stream
        streamed.seek(0)
        broken = Dataset({"image": torch.zeros(9, 5, 5, 3)}).batch(3).workers(1)
        broken = broken.map(lambda x: 1 / 0, "image")
        with pytest.raises(ZeroDivisionError):
            list(broken.to_device(CUDA, budget=0))
    assert streaming_threads() == []


def test_a_break_ends_the_thread_and_the_next_for_is_the_next_pass() -> None:
    host = augmented_data(3000)
    with pytest.warns(Notice, match="not resident"):
        streamed = augmented_data(3000).workers(2).to_device(CUDA, budget=0)
    for _ in streamed:
        break
    assert streaming_threads() == []
    host.seek(1)
    for (x, y), (u, v) in zip(host, streamed, strict=True):
        assert torch.equal(x, u.cpu())
        assert torch.equal(y, v.cpu())


def test_streams_within_streams() -> None:
    with pytest.warns(Notice, match="not resident"):
        streamed = augmented_data(300).workers(1).to_device(CUDA, budget=0)
    host = augmented_data(300)
    labels = [[y.tolist() for _, y in host] for _ in range(6)]
    for step, (_, outer) in enumerate(streamed):
        assert outer.tolist() == labels[0][step]
        assert [y.tolist() for _, y in streamed] == labels[step + 1]


def test_tensors_that_are_on_the_device_are_gathered_there() -> None:
    x = torch.arange(1000, dtype=torch.uint8)
    y = torch.arange(1000)
    on_device = Dataset({"x": x.to(CUDA), "y": y.to(CUDA)}, seed=1).shuffle().batch(64)
    host = Dataset({"x": x, "y": y}, seed=1).shuffle().batch(64)
    assert str(on_device.placement) == "resident on cuda:0: its tensors were there"
    list(on_device)
    with no_sync():
        batches = list(on_device)
    list(host)
    for (a, b), (c, d) in zip(host, batches, strict=True):
        assert c.is_cuda
        assert torch.equal(a, c.cpu())
        assert torch.equal(b, d.cpu())
    with pytest.raises(
        ValueError, match=r"expected columns on one device, got \{'x': 'cpu', 'y': 'cuda:0'\}"
    ):
        Dataset({"x": x, "y": y.to(CUDA)})


def test_a_function_of_resident_batches_waits_for_nothing_and_is_random_as_on_the_host() -> None:
    def noisy(y: torch.Tensor) -> torch.Tensor:
        return y + int(torch.randint(0, 1000, ()))  # the host's generator, seeded for the batch

    host = augmented_data().map(noisy, "label")
    resident = augmented_data().map(noisy, "label").to_device(CUDA)
    list(resident)
    with no_sync():
        batches = list(resident)
    list(host)
    for (_, y), (_, v) in zip(host, batches, strict=True):
        assert torch.equal(y, v.cpu())


def test_resident_data_can_be_loaded_and_has_no_use_for_workers() -> None:
    resident = augmented_data().to_device(CUDA)
    assert resident.load().placement == resident.placement
    for (x, _), (u, _) in zip(resident, resident.load(), strict=True):
        assert torch.equal(x, u)
    with pytest.raises(
        ValueError, match="workers: expected data on the host, got it resident on cuda:0"
    ):
        resident.workers(2)
    for (x, _), (u, _) in zip(
        augmented_data(), augmented_data().workers(2).to_device(CUDA), strict=True
    ):
        assert torch.equal(x, u.cpu())


def test_rows_that_were_streamed_are_resident_once_loaded() -> None:
    rows = [(torch.full((3,), i), i) for i in range(20)]
    with pytest.warns(Notice, match="not resident"):
        streamed = Dataset(rows).batch(6).to_device(CUDA)
    loaded = streamed.load()
    assert loaded.placement.kind == "resident"
    for (x, y), (u, v) in zip(streamed, loaded, strict=True):
        assert u.is_cuda
        assert torch.equal(x, u)
        assert torch.equal(y, v)


def test_memory_stays_flat_over_many_streamed_batches() -> None:
    with pytest.warns(Notice, match="not resident"):
        streamed = augmented_data(2000).to_device(CUDA, budget=0)
    # From the same state whatever ran before: blocks that other tests left behind, of other sizes
    # and streams, decide what the allocator has to reserve anew.
    gc.collect()
    torch.cuda.empty_cache()
    # Blocks are free again when the copies that used them have ended, so how many there are depends
    # on how busy the device is: the first passes find out.
    for _ in range(5):
        list(streamed)
    before = torch.cuda.memory_reserved()
    for _ in range(10):
        for _batch in streamed:
            pass
    assert torch.cuda.memory_reserved() <= before + (32 << 20)


def test_a_chain_with_resize_stays_within_its_tolerance() -> None:
    chain = [PadCrop(32, 4), Flip(), Resize(224), ToCHW(), Rescale(1 / 255, 0.0)]
    images = torch.randint(0, 256, (64, 32, 32, 3), dtype=torch.uint8)
    host = Dataset({"image": images}).map(chain, "image").batch(64)
    resident = host.to_device(CUDA)
    (x,), (u,) = next(iter(host)), next(iter(resident))
    # uint8 in, uint8 out of the resize: a value next to a tie may round to the other neighbour.
    assert (x - u.cpu()).abs().max() <= 1 / 255 + 1e-6
    assert ((x - u.cpu()).abs() > 1e-6).double().mean() < 1e-3


def test_the_default_budget_is_half_of_the_free_memory() -> None:
    free = torch.cuda.mem_get_info(CUDA)[0]
    placed = augmented_data().to_device(CUDA)
    assert placed.placement.kind == "resident"
    assert "GiB" in placed.placement.reason
    assert free > 0
