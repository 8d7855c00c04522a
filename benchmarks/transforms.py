"""What each transform costs on the CPU, beside torchvision's on single tensors.

python benchmarks/transforms.py [--json FILE] [--threads N]

Milliseconds of processor time for 1,000 uint8 images of 3×224×224 and 3×32×32: the best of a few
rounds over batches of 64. torchvision's transforms run image by image, as its data sets call them;
they are left out where it is not installed.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import conditions, write_result
from torch import Tensor

from halfstep.data import transforms as ht

BATCH_SIZE = 64
ROUNDS = 5
SIDES = (224, 32)


def chains(side: int) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Our transform and torchvision's, by name."""
    blur = 23 if side == 224 else 3
    return {
        "RandomResizedCrop": (
            ht.RandomResizedCrop(side),
            lambda v2: v2.RandomResizedCrop(side),
        ),
        "RandomRotation(30)": (ht.RandomRotation(30), lambda v2: v2.RandomRotation(30)),
        'RandomRotation(30, "bilinear")': (
            ht.RandomRotation(30, "bilinear"),
            lambda v2: v2.RandomRotation(30, v2.InterpolationMode.BILINEAR),
        ),
        "RandomAffine(10, (0.1, 0.1), (0.8, 1.2), 5)": (
            ht.RandomAffine(10, (0.1, 0.1), (0.8, 1.2), 5),
            lambda v2: v2.RandomAffine(10, (0.1, 0.1), (0.8, 1.2), 5),
        ),
        "ColorJitter(0.4, 0.4, 0.4)": (
            ht.ColorJitter(0.4, 0.4, 0.4),
            lambda v2: v2.ColorJitter(0.4, 0.4, 0.4),
        ),
        "ColorJitter(0.4, 0.4, 0.4, 0.1)": (
            ht.ColorJitter(0.4, 0.4, 0.4, 0.1),
            lambda v2: v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        ),
        "RandomErasing(1)": (ht.RandomErasing(1), lambda v2: v2.RandomErasing(1)),
        "RandomGrayscale(0.2)": (ht.RandomGrayscale(0.2), lambda v2: v2.RandomGrayscale(0.2)),
        f"GaussianBlur({blur})": (ht.GaussianBlur(blur), lambda v2: v2.GaussianBlur(blur)),
        "TrivialAugment": (ht.TrivialAugment(), lambda v2: v2.TrivialAugmentWide()),
        "PadCrop / RandomCrop": (
            ht.PadCrop(side, side // 8),
            lambda v2: v2.RandomCrop(side, padding=side // 8),
        ),
        "Flip / RandomHorizontalFlip": (ht.Flip(), lambda v2: v2.RandomHorizontalFlip()),
        "MixUp(10)": (ht.MixUp(10), lambda v2: v2.MixUp(num_classes=10)),
        "CutMix(10)": (ht.CutMix(10), lambda v2: v2.CutMix(num_classes=10)),
    }


def best_ms(function: Callable[[], object], images: int) -> float:
    """Milliseconds for 1,000 images, the best of some rounds."""
    function()
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds) / images * 1e6


def measure(name: str, ours: Any, theirs: Callable[[Any], Any], batch: Tensor, v2: Any) -> Any:
    samples = torch.arange(len(batch))
    labels = samples % 10
    is_mixer = name.startswith(("MixUp", "CutMix"))

    def run_ours() -> object:
        if is_mixer:
            return ht.mix_batch(ours, batch, labels, seed=1, epochs=samples, samples=samples)
        return ht.apply([ours], batch, seed=1, epochs=samples, samples=samples)

    row = {"halfstep": best_ms(run_ours, len(batch))}
    if v2 is not None:
        transform = theirs(v2)
        if is_mixer:
            floats = batch.float()  # it takes no uint8
            row["torchvision"] = best_ms(lambda: transform(floats, labels), len(batch))
        else:
            row["torchvision"] = best_ms(
                lambda: torch.stack([transform(image) for image in batch]), len(batch)
            )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    v2: Any = None
    if importlib.util.find_spec("torchvision") is not None:
        from torchvision.transforms import v2

    figures: dict[str, Any] = {}
    for side in SIDES:
        batch = torch.randint(0, 256, (BATCH_SIZE, 3, side, side), dtype=torch.uint8)
        for name, (ours, theirs) in chains(side).items():
            row = measure(name, ours, theirs, batch, v2)
            figures[f"{name}, {side}"] = row
            cells = [f"{label} {ms:8.1f} ms" for label, ms in row.items()]
            print(f"{side:4d}  {name:44s} {'  '.join(cells)}", flush=True)
    if options.json:
        write_result(
            options.json, {"conditions": conditions(torch.device("cpu")), "ms_per_1000": figures}
        )


if __name__ == "__main__":
    main()
