"""The mixed-precision lab: look at the data, augment it, schedule, train with callbacks, save, validate, compare.

System: MindSpore (performance: mixed precision; ResNet-50 on CIFAR-10 with amp_level O0 against O2 and O3).

    python examples/resnet_lab.py                          # ResNet-18 on 16×16 images of the sample: under a minute
    HALFSTEP_DATA=… python examples/resnet_lab.py --full   # ResNet-50, 224×224, 10 epochs: a GPU's work

Targets, full size: 85 % or more, and O2 within half a point of tf32 (float32 where there is no TF32). Small: both
precisions learn in 60 steps, and the newest checkpoint holds the whole network.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CIFAR = ([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010])


def pipeline(full: bool, train: bool) -> hs.data.Dataset:
    """Pad and crop, flip, resize, normalise: on the device, inside the step. uint8 travels."""
    images, labels = hs.data.sample(train)
    data = hs.data.Dataset({"image": images[..., None], "label": labels}, seed=1)
    side, small, scale = 28, 16, ([0.286], [0.353])
    if full:
        data, side, small, scale = (
            hs.data.load("cifar10", "train" if train else "test", seed=1),
            32,
            224,
            CIFAR,
        )
    chain = [hs.data.PadCrop(side, 4), hs.data.Flip()] if train else []
    chain += [
        hs.data.Resize(small),
        hs.data.Rescale(1 / 255),
        hs.data.Normalize(*scale),
        hs.data.ToCHW(),
    ]
    data = data.map(chain, "image")
    if not train:
        return data.batch(250) if full else data.take(500).batch(250)
    return (
        data.shuffle().batch(32, drop_remainder=True)
        if full
        else data.shuffle().take(640).batch(32)
    )


def build(precision: str, full: bool, seed: int, updates: int) -> hs.Model:
    torch.manual_seed(seed)
    if full:
        net = hs.nets.resnet50(classes=10, variant="seed").to(DEVICE)
    else:
        net = hs.nets.resnet18(classes=10, channels=1, zero_init_residual=True).to(DEVICE)
    lr = hs.schedules.poly(0.1, updates, warmup=updates // 2, start=0.01)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loss = hs.losses.CrossEntropy(
        0.0 if full else 0.05
    )  # the lab has label smoothing, and trains without
    metrics = {"acc": hs.metrics.Accuracy()}
    return hs.Model(
        net, loss, optimizer, precision, metrics=metrics, schedule=lr, deterministic=not full
    )


def train(precision: str, full: bool, seed: int, folder: Path) -> dict[str, float]:
    epochs, data, test = 10 if full else 3, pipeline(full, train=True), pipeline(full, train=False)
    model, timer = (
        build(precision, full, seed, epochs * data.size),
        hs.StepTimer(warmup=2, show=False),
    )
    keep = hs.Checkpoint(folder / precision, every_epochs=5 if full else 1, keep=10)
    print(f"============== {precision} ==============")
    lines = [
        hs.LossMonitor(data.size, style="seed003"),
        hs.TimeMonitor(style="seed003"),
        timer,
        keep,
    ]
    run = model.fit(
        epochs, data, valid=test, callbacks=lines, resume="auto"
    )  # killed, it goes on from here
    times = timer.times()
    return {"ms": times.median if times else 0.0, "acc": run.history[-1]["valid_acc"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="ResNet-50 on CIFAR-10, from HALFSTEP_DATA"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="where checkpoints and the picture stay (default: nowhere)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        hs.data.sheet(pipeline(args.full, train=True), out / "augmented.png", samples=8, epochs=3)
        single = "tf32" if args.full and DEVICE == "cuda" else "fp32"
        rows = {name: train(name, args.full, args.seed, out) for name in (single, "O2")}
        print(f"{'network':>10} {'precision':>10} {'ms/step':>8} {'accuracy':>9}")
        for name, row in rows.items():
            print(
                f"{'ResNet-50' if args.full else 'ResNet-18':>10} {name:>10} {row['ms']:>8.1f} {row['acc']:>9.2%}"
            )
        resumed = build("O2", args.full, args.seed, 20).load(
            out / "O2"
        )  # a run's folder: its newest checkpoint
    assert not resumed.missing
    best, other = rows[single]["acc"], rows["O2"]["acc"]
    assert min(best, other) > (0.85 if args.full else 0.40)
    if args.full:
        assert abs(best - other) < 0.005


if __name__ == "__main__":
    main()
