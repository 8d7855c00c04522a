"""Residency: what stays on the device, what streams there, and why; the batches are the same."""

import threading

import pytest
import torch
from torch import Tensor

from halfstep.data import Dataset, Flip, PadCrop
from halfstep.data.pipeline.residency import budget_bytes
from halfstep.errors import Notice
from halfstep.utils.text import format_bytes


def augmented_data(size: int = 50) -> Dataset:
    images = torch.arange(size * 75, dtype=torch.int32).view(size, 5, 5, 3).to(torch.uint8)
    return Dataset({"image": images, "label": torch.arange(size)}, seed=4).map(
        [PadCrop(5, 1), Flip()], "image"
    )


def deliver_the_same(a: Dataset, b: Dataset) -> bool:
    pairs = list(zip(a, b, strict=True))
    same_images = [torch.equal(x.cpu(), other_x.cpu()) for (x, _), (other_x, _) in pairs]
    same_labels = [torch.equal(y.cpu(), other_y.cpu()) for (_, y), (_, other_y) in pairs]
    return all(same_images) and all(same_labels)


def test_a_small_set_stays_on_the_device_and_gives_the_hosts_batches(device: torch.device) -> None:
    host = augmented_data().shuffle().batch(7)
    resident = host.to_device(device, budget="1MB")
    assert str(resident.placement) == f"resident on {device}: 4.053 KiB of a budget of 1 MiB"
    assert deliver_the_same(host, resident)
    assert deliver_the_same(host, resident)
    assert all(x.device.type == device.type and x.dtype == torch.uint8 for x, _ in resident)


def test_a_shuffle_by_a_buffer_can_be_resident_too(device: torch.device) -> None:
    host = augmented_data().shuffle(8).repeat(2).batch(7)
    assert deliver_the_same(host, host.to_device(device, budget="1MB"))


def test_over_the_budget_it_streams_and_says_so(device: torch.device) -> None:
    host = augmented_data().shuffle().batch(7)
    with pytest.warns(
        Notice,
        match=r"streaming to .*, not resident: it takes 4\.053 KiB and the budget is 1 KiB; "
        r"budget=",
    ):
        streamed = host.to_device(device, budget=1024)
    assert streamed.placement.kind == "stream"
    assert deliver_the_same(host, streamed)
    assert deliver_the_same(host, streamed)


def test_samples_read_one_by_one_stream_until_they_are_loaded(device: torch.device) -> None:
    rows = [(torch.full((3,), i), i) for i in range(20)]
    host = Dataset(rows).shuffle().batch(6)
    with pytest.warns(
        Notice, match=r"its samples are read one by one by a Dataset; \.load\(\) reads them"
    ):
        streamed = host.to_device(device)
    assert deliver_the_same(host, streamed)
    host.seek(0)
    resident = host.load().to_device(device)
    assert resident.placement.kind == "resident"
    assert deliver_the_same(host, resident)


def test_functions_of_single_samples_keep_it_on_the_host_and_those_of_batches_do_not(
    device: torch.device,
) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    with pytest.warns(
        Notice,
        match="map.*double on label.* works on single samples on the host; use a transform, or",
    ):
        streamed = augmented_data().map(double, "label").batch(7).to_device(device)
    resident = augmented_data().batch(7).map(double, "label").to_device(device)
    assert resident.placement.kind == "resident"
    assert deliver_the_same(streamed, resident)


def test_workers_and_a_stream_together(device: torch.device) -> None:
    host = augmented_data().shuffle().batch(7)
    with pytest.warns(Notice, match="not resident"):
        streamed = host.workers(2).to_device(device, budget=0)
    assert deliver_the_same(host, streamed)


def test_a_stream_left_early_leaves_no_thread(device: torch.device) -> None:
    with pytest.warns(Notice, match="not resident"):
        streamed = augmented_data().batch(2).to_device(device, budget=0)
    stream = iter(streamed)
    next(stream)
    state = streamed.state_dict()
    del stream
    streamed.seek(0)
    assert state["step"] == 1
    assert "halfstep-stream" not in [thread.name for thread in threading.enumerate()]


def test_a_function_of_batches_is_random_alike_on_host_and_device(device: torch.device) -> None:
    host = (
        augmented_data()
        .shuffle()
        .batch(7)
        .map(lambda y: y + torch.randint(0, 1000, ()).to(y.device), "label")
    )
    assert deliver_the_same(host, host.to_device(device, budget="1MB"))


BUDGETS = {
    "0": 0,
    "12": 12,
    "1kb": 1024,
    "1.5 GiB": 3 << 29,
    "2M": 2 << 20,
    "1TB": 1 << 40,
    "7 b": 7,
}


@pytest.mark.parametrize("text", BUDGETS)
def test_budgets_are_read(text: str) -> None:
    assert budget_bytes(text, torch.device("cpu")) == BUDGETS[text]


@pytest.mark.parametrize("budget", ["", "much", "-1GB", -1, 0.0, 1.5, True])
def test_other_budgets_are_refused(budget: object) -> None:
    with pytest.raises(
        ValueError, match="budget: expected bytes, a size such as '8GB' or a fraction"
    ):
        augmented_data().to_device("cpu", budget=budget)  # type: ignore[arg-type]


def test_sizes_are_readable() -> None:
    sizes = {
        0: "0 bytes",
        1023: "1023 bytes",
        1 << 20: "1 MiB",
        47_040_000: "44.86 MiB",
        3 << 40: "3 TiB",
    }
    assert {count: format_bytes(count) for count in sizes} == sizes
