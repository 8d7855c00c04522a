"""Proof that a change left every computed bit alone: sixteen small runs, and a fingerprint of each.

    python tools/identical_runs.py before.json            # with the code before the change
    python tools/identical_runs.py after.json             # with the code after it, same machine
    python tools/identical_runs.py --compare before.json after.json

Each run trains a small network with convolutions, batch norm and dropout for 24 steps. The four
precisions (fp32, O1, O2, fp16 with Kahan rounding) run in four ways: eager steps, captured steps
(`hs.sink`), four micro-batches an update, and compiled. The loss scale of O1 and O2 starts so high
that the first steps overflow, so skipped steps are part of it. A fingerprint is the SHA-256 of
every record, parameter, buffer and optimizer state, bit by bit.

It uses only the public interface, so that it runs with older versions too.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products on CUDA

import torch
from torch import Tensor, nn

import halfstep as hs

STEPS = 24
BATCH_SIZE = 32
PRECISIONS = ("fp32", "O1", "O2", "fp16+kahan")
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "captured": {},
    "accumulate 4": {"accumulate": 4},
    "compiled": {"compile": True},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="where the fingerprints go")
    parser.add_argument("--compare", action="store_true", help="compare two files")
    parser.add_argument("--skip-compiled", action="store_true", help="leave out the slow runs")
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(*arguments.files)
    (file,) = arguments.files
    file.write_text(json.dumps(fingerprint_all(arguments.skip_compiled), indent=1) + "\n")
    return 0


def fingerprint_all(skip_compiled: bool) -> dict[str, Any]:
    """The fingerprint of every run, with the machine that they ran on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    fingerprints = {}
    for precision in PRECISIONS:
        for way in WAYS:
            if way == "compiled" and skip_compiled:
                continue
            fingerprints[f"{precision}, {way}"] = fingerprint_run(precision, way, device)
            print(f"{precision:12} {way:13} {fingerprints[f'{precision}, {way}'][:16]}", flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    return {"device": f"{device.type} {name}", "torch": torch.__version__, "runs": fingerprints}


def fingerprint_run(precision: str, way: str, device: torch.device) -> str:
    """Trains one small network and hashes all that came of it."""
    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8 * 14 * 14, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    ).to(device)
    images, labels = hs.data.sample()
    count = STEPS * BATCH_SIZE
    columns = {
        "image": images[:count].reshape(count, 1, 28, 28),
        "label": labels[:count],
    }
    data = hs.data.Dataset(columns).map(hs.data.Rescale(1 / 255), "image").shuffle(seed=3)
    data = data.batch(BATCH_SIZE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        precision=parse_precision(precision),
        clip_norm=1.0,
        ema=0.9,
        deterministic=device.type == "cuda",
        **WAYS[way],
    )

    digest = hashlib.sha256()
    if way == "captured":
        for records in hs.sink(step, data, every=7):
            add_to_digest(digest, *records_to_tensors(records))
    else:
        for batch in data:
            images, labels = batch.values() if isinstance(batch, dict) else batch
            record = step(images.to(device), labels.to(device))
            add_to_digest(digest, *records_to_tensors(record))
        step.flush()
    step.check()
    add_to_digest(digest, *net.state_dict().values())
    for state in optimizer.state.values():
        add_to_digest(digest, *(value for value in state.values() if isinstance(value, Tensor)))
    return digest.hexdigest()


def parse_precision(word: str) -> hs.Precision:
    if word == "fp16+kahan":
        return hs.Precision("fp16", rounding="kahan")
    if word in ("O1", "O2"):
        return hs.Precision(word, scale=hs.DynamicScale(init=2.0**24, interval=8))
    return hs.Precision(word)


def records_to_tensors(record: Any) -> list[Tensor]:
    fields = ("loss", "lr", "scale", "skipped", "grad_norm", "updated")
    return [torch.as_tensor(getattr(record, field)) for field in fields]


def add_to_digest(digest: Any, *tensors: Tensor) -> None:
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous()
        digest.update(str(values.dtype).encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())


def compare(before: Path, after: Path) -> int:
    """Prints the runs whose bits differ. Returns 1 if there is one, for the shell."""
    old = json.loads(before.read_text())
    new = json.loads(after.read_text())
    if (old["device"], old["torch"]) != (new["device"], new["torch"]):
        print("warning: the two files come from different machines or versions of torch")
    different = [run for run in old["runs"] if old["runs"][run] != new["runs"].get(run)]
    for run in different:
        print(f"differs: {run}")
    print(f"{len(old['runs']) - len(different)} of {len(old['runs'])} runs are identical")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
