"""Streams of Hugging Face's datasets as batches of a fit, with an exact position.

Needs the package datasets; without it the tests are skipped.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

TOTAL = 30
BATCH = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("hf")
    number = 0
    for file in range(3):
        lines = []
        for _ in range(TOTAL // 3):
            lines.append(json.dumps({"x": [float(number), 1.0], "y": number % 3, "id": number}))
            number += 1
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
    return sorted(map(str, folder.glob("*.jsonl")))


def stream(files: list[str], shuffle: int | None = None) -> Any:
    cache = str(Path(files[0]).parent / "cache")
    dataset = datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=cache
    )
    if shuffle is not None:
        dataset = dataset.shuffle(seed=1, buffer_size=shuffle)
    return dataset.with_format("torch").batch(BATCH)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


@pytest.mark.parametrize("shuffle", [None, 7, 100])
def test_every_position_is_exact(shuffle: int | None, files: list[str]) -> None:
    """Its own state loses the samples of its shuffle buffer, so that such a stream is replayed."""
    loader = hs.data.Loader(stream(files, shuffle))
    passes = [ids(loader), ids(loader)]
    assert sorted(sum(passes[0], [])) == list(range(TOTAL))  # noqa: RUF017 - a few
    assert (passes[0] != passes[1]) == (shuffle is not None)
    for step in range(1, len(passes[0])):
        loader = hs.data.Loader(stream(files, shuffle))
        batches = iter(loader)
        begin = [next(batches)["id"].tolist() for _ in range(step)]
        state = loader.state_dict()
        assert (state["own"] is None) == (shuffle is not None)
        again = hs.data.Loader(stream(files, shuffle))
        again.load_state_dict(state)
        assert begin + ids(again) == passes[0]
        assert ids(again) == passes[1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = nn.functional.cross_entropy(self.linear(batch["x"] / 30), batch["y"])
        return out


def model() -> hs.Model:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hs.Model(net, None, optimizer, forward=lambda net, batch: net(batch))


@pytest.mark.parametrize("shuffle", [None, 7])
def test_a_stopped_fit_goes_on_with_the_very_next_sample(
    shuffle: int | None, files: list[str], tmp_path: Path
) -> None:
    class Stop(hs.Callback):
        def step(self, run: Any, row: Any) -> None:
            if row.global_step == 11:
                raise KeyboardInterrupt

    with warnings.catch_warnings(action="ignore"):
        with pytest.raises(KeyboardInterrupt):
            model().fit(
                2,
                stream(files, shuffle),
                callbacks=[hs.Checkpoint(tmp_path, every_steps=1), Stop()],
                progress=False,
            )
        resumed = model()
        checkpoint = hs.Checkpoint(tmp_path, every_steps=1)
        resumed.fit(
            2, stream(files, shuffle), callbacks=[checkpoint], resume="auto", progress=False
        )
        whole = model()
        whole.fit(2, stream(files, shuffle), progress=False)
    for a, b in zip(resumed.net.parameters(), whole.net.parameters(), strict=True):
        assert torch.equal(a, b)
