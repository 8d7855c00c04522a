"""Streams of tar shards: order, exact position, parts for ranks and workers, stores."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.data.download import store_reads
from halfstep.data.shards import shard_reads
from tests.support.flaky_source import FaultEvery, flaky_source
from tests.support.tar_files import pixels, write_shards

SIZES = [7, 5, 9, 1, 8]
TOTAL = sum(SIZES)
COLUMNS = {"image": "png", "label": "cls"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream") / "s"
    write_shards(folder, SIZES, parts=2)
    return folder


def stream(shards: Any, **options: Any) -> hs.data.ShardStream:
    return hs.data.ShardStream(
        shards, COLUMNS, **{"batch_size": 4, "buffer_size": 6, "seed": 3, **options}
    )


def labels(batches: Any) -> list[list[int]]:
    return [batch[1].tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return [number for batch in labels(batches) for number in batch]


def test_each_sample_once_in_another_order_each_pass(folder: Path) -> None:
    data = stream(folder)
    first = flat(data)
    second = flat(data)
    assert sorted(first) == sorted(second) == list(range(TOTAL))
    assert len({tuple(first), tuple(second), tuple(range(TOTAL))}) == 3
    again = stream(folder)
    assert flat(again) == first
    again.set_epoch(0)
    assert flat(again) == first
    assert flat(stream(folder, seed=4)) != first


def test_images_and_labels_belong_together(folder: Path) -> None:
    for images, numbers in stream(folder):
        assert images.shape[1:] == (6, 6, 3)
        for image, number in zip(images, numbers.tolist(), strict=True):
            assert torch.equal(image, pixels(number))


def test_without_a_buffer_the_order_is_that_of_the_shards(folder: Path) -> None:
    assert flat(stream(folder, buffer_size=None)) == list(range(TOTAL))


def test_the_buffer_is_that_of_a_dataset(tmp_path: Path) -> None:
    """Of one shard, the order is a shuffle by a buffer as hs.data.Dataset has it."""
    from halfstep.data import hashing

    write_shards(tmp_path, [40], parts=2)
    seed = hashing.key(3, 2)
    expected = hs.data.Dataset((torch.arange(40),)).shuffle(6, seed=seed).batch(4)
    assert labels(stream(tmp_path)) == [numbers.tolist() for (numbers,) in expected]


@pytest.mark.parametrize("buffer_size", [None, 2, 6, 100])
def test_every_position_is_exact(buffer_size: int | None, folder: Path) -> None:
    """Saved behind each batch, through JSON, and loaded into a new stream."""
    data = stream(folder, buffer_size=buffer_size)
    states = [data.state_dict()]
    batches = []
    for _ in range(2):
        for batch in data:
            batches.append(batch[1].tolist())
            states.append(data.state_dict())
    passes = -(-TOTAL // 4)
    assert len(batches) == 2 * passes
    for step, state in enumerate(states[:-1]):
        again = stream(folder, buffer_size=buffer_size)
        again.load_state_dict(json.loads(json.dumps(state)))
        rest = labels(again)
        if step % passes or step == 0:
            assert rest == batches[step : (step // passes + 1) * passes]
        else:  # all was delivered, and nobody had asked for more
            assert rest == []
        if step < passes:
            assert labels(again) == batches[passes:]


def test_the_next_pass_follows_a_resumed_one(folder: Path) -> None:
    data = stream(folder)
    whole = [labels(data), labels(data)]
    data = stream(folder)
    batches = iter(data)
    next(batches)
    state = data.state_dict()
    again = stream(folder)
    again.load_state_dict(state)
    assert [labels(again), labels(again)] == [whole[0][1:], whole[1]]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_ranks_take_each_sample_once(count: int, folder: Path) -> None:
    seen: list[int] = []
    for index in range(count):
        seen += flat(stream(folder, count=count, index=index))
    assert sorted(seen) == list(range(TOTAL))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_take_each_sample_once(workers: int, folder: Path) -> None:
    loader = torch.utils.data.DataLoader(stream(folder), batch_size=None, num_workers=workers)
    assert sorted(flat(loader)) == list(range(TOTAL))


def test_drop_remainder(folder: Path) -> None:
    batches = labels(stream(folder, drop_remainder=True))
    assert [len(batch) for batch in batches] == [4] * (TOTAL // 4)


def test_transforms_depend_on_the_sample_alone(folder: Path) -> None:
    """The same pixels in batches of another size, from another rank, and after a resume."""

    def augmented(**options: Any) -> dict[int, torch.Tensor]:
        data = stream(folder, **options).map([hs.data.PadCrop(6, 2), hs.data.Flip()], "image")
        return {
            number: image
            for images, numbers in data
            for image, number in zip(images, numbers.tolist(), strict=True)
        }

    whole = augmented()
    parts = {**augmented(count=2, batch_size=3), **augmented(count=2, index=1, buffer_size=3)}
    assert all(torch.equal(whole[number], parts[number]) for number in range(TOTAL))
    assert any(not torch.equal(whole[number], pixels(number)) for number in range(TOTAL))


def test_a_function_of_the_users(folder: Path) -> None:
    data = stream(folder).map(lambda x: x.flatten(1).float(), "image")
    assert next(iter(data))[0].shape == (4, 108)


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"batch_size": 5}, {"buffer_size": 7}, {"count": 2}]
)
def test_the_state_of_another_stream_is_refused(change: dict[str, int], folder: Path) -> None:
    state = stream(folder).state_dict()
    with pytest.raises(ValueError, match="as in this stream"):
        stream(folder, **change).load_state_dict(state)


def test_mutated_states_are_refused(folder: Path) -> None:
    data = stream(folder)
    batches = iter(data)
    next(batches)
    state = data.state_dict()
    for name in state:
        for value in (None, -1, "x", [[0, 0, 0]], [[99, 0, 0, 512]], {"a": 1}, 1 << 60):
            mutated = {**state, name: value}
            with pytest.raises(ValueError, match="ShardStream: the saved position"):
                stream(folder).load_state_dict(mutated)
        with pytest.raises(ValueError, match="ShardStream: the saved position"):
            stream(folder).load_state_dict({key: state[key] for key in state if key != name})


def test_a_stream_of_a_store_keeps_nothing_and_reads_ahead(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store_reads, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(shard_reads, "BLOCK_BYTES", 1 << 11)
    local = labels(stream(folder))
    objects = {f"bucket/s/{path.name}": path.read_bytes() for path in folder.iterdir()}
    with flaky_source(objects) as store:
        fault = FaultEvery(4)
        store.fault = fault
        data = stream("flaky://bucket/s/shard-{000..004}.tar")
        batches = iter(data)
        begin = [next(batches)[1].tolist() for _ in range(3)]
        state = data.state_dict()
        assert begin + labels(batches) == local
        again = stream("flaky://bucket/s")
        again.load_state_dict(state)
        assert begin + labels(again) == local
        assert fault.faults >= 10
    assert not (tmp_path / "cache").exists()


def test_a_missing_shard_is_an_error_with_its_name(folder: Path) -> None:
    with flaky_source({"bucket/other": b""}):
        data = stream("flaky://bucket/s-{000..001}.tar")
        with pytest.raises(FileNotFoundError, match=r"flaky://bucket/s-00\d\.tar"):
            list(data)


def test_too_few_shards_for_the_ranks(folder: Path) -> None:
    with pytest.raises(ValueError, match="index < count <= 5 shards"):
        stream(folder, count=6)


def model() -> hs.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 32))
    return hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.01))


def training_data(folder: Path) -> hs.data.ShardStream:
    chain = [hs.data.Flip(), hs.data.ToCHW(), hs.data.Rescale(1 / 255)]
    return stream(folder).map(chain, "image")


def test_a_batch_that_was_not_trained_on_comes_again(folder: Path) -> None:
    """In a resumed pass, which cannot be replayed from its start."""
    whole = labels(stream(folder))
    loader = hs.data.Loader(stream(folder))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    resumed = hs.data.Loader(stream(folder))
    resumed.load_state_dict(loader.state_dict())
    batches = iter(resumed)
    for _ in range(2):
        next(batches)
    state = resumed.state_dict(step=4)
    again = hs.data.Loader(stream(folder))
    again.load_state_dict(state)
    assert labels(again) == whole[4:]


KILLED_FIT = """
import os, signal, sys
from pathlib import Path
import halfstep as hs
sys.path.insert(0, sys.argv[1])
from tests.unit.data.shards.test_shard_stream import model, training_data
class Kill(hs.Callback):
    def step(self, run, row):
        if row.global_step == int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)
checkpoint = hs.Checkpoint(sys.argv[3], every_steps=1)
data = training_data(Path(sys.argv[2]))
model().fit(2, data, callbacks=[checkpoint, Kill()], resume="auto", progress=False)
"""


def test_a_killed_fit_goes_on_with_the_very_next_sample(folder: Path, tmp_path: Path) -> None:
    """A real SIGKILL in the second pass, and the weights of a fit without one."""
    root = Path(hs.__file__).parents[1]
    command = [
        sys.executable,
        "-c",
        KILLED_FIT,
        str(root),
        str(folder),
        str(tmp_path / "run"),
        "11",
    ]
    result = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    resumed = model()
    checkpoint = hs.Checkpoint(tmp_path / "run", every_steps=1)
    run = resumed.fit(
        2, training_data(folder), callbacks=[checkpoint], resume="auto", progress=False
    )
    assert run.global_step == 16
    whole = model()
    whole.fit(2, training_data(folder), progress=False)
    for a, b in zip(resumed.net.parameters(), whole.net.parameters(), strict=True):
        assert torch.equal(a, b)
