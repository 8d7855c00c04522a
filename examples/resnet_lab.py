"""The mixed-precision lab: look at data, augment, schedule, train with callbacks, save, compare.

System: MindSpore (performance: mixed precision; ResNet-50 on CIFAR-10 with amp_level O0 against O2
and O3).

    python examples/resnet_lab.py                          # ResNet-18, 16×16: under a minute
    HALFSTEP_DATA=… python examples/resnet_lab.py --full   # ResNet-50, 224×224, 10 epochs: a GPU's

Targets, full size: 85 % or more, and O2 within half a point of tf32 (float32 where there is no
TF32). Small: both precisions learn in 60 steps, and the newest checkpoint holds the whole network.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CIFAR_MEAN = [0.4914, 0.4822, 0.4465]
CIFAR_DEVIATION = [0.2023, 0.1994, 0.2010]
SAMPLE_MEAN = [0.286]
SAMPLE_DEVIATION = [0.353]


def load_data(full: bool, train: bool) -> hs.data.Dataset:
    """Pad and crop, flip, resize, normalise: on the device, inside the step. uint8 travels."""
    if full:
        data = hs.data.load("cifar10", "train" if train else "test", seed=1)
        image_side = 32
        network_side = 224
        normalize = hs.data.Normalize(CIFAR_MEAN, CIFAR_DEVIATION)
    else:
        images, labels = hs.data.sample(train)
        data = hs.data.Dataset({"image": images[..., None], "label": labels}, seed=1)
        image_side = 28
        network_side = 16
        normalize = hs.data.Normalize(SAMPLE_MEAN, SAMPLE_DEVIATION)

    augment = [hs.data.PadCrop(image_side, 4), hs.data.Flip()] if train else []
    prepare = [hs.data.Resize(network_side), hs.data.Rescale(1 / 255), normalize, hs.data.ToCHW()]
    data = data.map([*augment, *prepare], "image")
    if train and full:
        return data.shuffle().batch(32, drop_remainder=True)
    if train:
        return data.shuffle().take(640).batch(32)
    if not full:
        data = data.take(500)
    return data.batch(250)


def build_model(precision: str, full: bool, seed: int, updates: int) -> hs.Model:
    torch.manual_seed(seed)
    if full:
        net = hs.nets.resnet50(classes=10, variant="seed").to(DEVICE)
        label_smoothing = 0.0  # the lab has label smoothing, and trains without
    else:
        net = hs.nets.resnet18(classes=10, channels=1, zero_init_residual=True).to(DEVICE)
        label_smoothing = 0.05
    return hs.Model(
        net,
        hs.losses.CrossEntropy(label_smoothing),
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        hs.Precision(precision),
        metrics={"acc": hs.metrics.Accuracy()},
        schedule=hs.schedules.poly(0.1, updates, warmup=updates // 2, start=0.01),
        deterministic=not full,
    )


def train(precision: str, full: bool, seed: int, folder: Path) -> dict[str, float]:
    """Milliseconds of a step, and the accuracy after the last epoch."""
    epochs = 10 if full else 3
    train_data = load_data(full, train=True)
    test_data = load_data(full, train=False)
    model = build_model(precision, full, seed, epochs * train_data.size)
    timer = hs.StepTimer(warmup=2, show=False)
    callbacks = [
        hs.LossMonitor(train_data.size, style="mindspore-1.0"),
        hs.TimeMonitor(style="mindspore-1.0"),
        timer,
        hs.Checkpoint(folder / precision, every_epochs=5 if full else 1, keep=10),
    ]
    print(f"============== {precision} ==============")
    # resume="auto": a run that was killed goes on from its newest checkpoint.
    run = model.fit(epochs, train_data, valid=test_data, callbacks=callbacks, resume="auto")
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
    reference = "tf32" if args.full and DEVICE == "cuda" else "fp32"
    net_name = "ResNet-50" if args.full else "ResNet-18"
    with tempfile.TemporaryDirectory() as temporary_folder:
        out = args.out or Path(temporary_folder)
        out.mkdir(parents=True, exist_ok=True)

        # Look at the data as the network will see it.
        train_data = load_data(args.full, train=True)
        hs.data.sheet(train_data, out / "augmented.png", samples=8, epochs=3)

        results = {name: train(name, args.full, args.seed, out) for name in (reference, "O2")}
        print(f"{'network':>10} {'precision':>10} {'ms/step':>8} {'accuracy':>9}")
        for name, result in results.items():
            print(f"{net_name:>10} {name:>10} {result['ms']:>8.1f} {result['acc']:>9.2%}")

        # A run's folder stands for its newest checkpoint.
        loaded = build_model("O2", args.full, args.seed, 20).load(out / "O2")
    assert not loaded.missing

    reference_accuracy = results[reference]["acc"]
    o2_accuracy = results["O2"]["acc"]
    assert min(reference_accuracy, o2_accuracy) > (0.85 if args.full else 0.40)
    if args.full:
        assert abs(reference_accuracy - o2_accuracy) < 0.005


if __name__ == "__main__":
    main()
