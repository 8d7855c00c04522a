"""A training by Model.fit, for one process or several ranks: `rank_fit.py FOLDER [key=value …]`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import halfstep as hs


def train(
    folder: Path,
    *,
    epochs: int = 2,
    exact: str | None = "bits",
    precision: Any = "O2",
    accumulate: int = 3,
    every_steps: int = 5,
) -> Any:
    """Trains with dropout, averages, augmentation, a log, checkpoints and evaluations."""
    torch.manual_seed(0)
    images, labels = hs.data.sample()
    images, labels = images[:600], labels[:600]
    train_data = (
        hs.data.Dataset({"image": images, "label": labels})
        .map(hs.data.Rescale(1 / 255), "image")
        .map(hs.data.Flip(), "image")
        .shuffle()
        .batch(48)
    )
    valid = (
        hs.data.Dataset({"image": images[:200], "label": labels[:200]})
        .map(hs.data.Rescale(1 / 255), "image")
        .batch(100)
    )
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = hs.Model(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        precision,
        metrics={"acc": hs.metrics.Accuracy()},
        schedule=hs.schedules.cosine(0.1, 26),
        accumulate=accumulate,
        ema=0.9,
        exact=exact,  # type: ignore[arg-type]
    )
    run = model.fit(
        epochs,
        train_data,
        valid=valid,
        callbacks=[hs.Checkpoint(folder, every_steps=every_steps), hs.CSVLog(folder / "log.csv")],
        progress=False,
        resume="auto",
    )
    return model, run


def outcome(model: Any, run: Any) -> dict[str, Any]:
    return {
        "fingerprint": int(model.step.state_fingerprint()),
        "history": run.history,
        "net": {name: t.clone() for name, t in model.net.state_dict().items()},
    }


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    settings: dict[str, Any] = {}
    for text in sys.argv[2:]:
        name, value = text.split("=")
        settings[name] = int(value) if value.isdecimal() else value
    if settings.get("exact") == "none":
        settings["exact"] = None
    model, run = train(folder, **settings)
    if model.step.ranks is None or model.step.ranks.index == 0:
        torch.save(outcome(model, run), folder / "outcome.pt")
    print(f"rank {os.environ.get('RANK', '0')} has ended")


if __name__ == "__main__":
    main()
