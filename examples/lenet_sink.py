"""LeNet-5 with the data sunk: an epoch is a number of steps, the host reads results once per epoch.

System: MindSpore (train, on-device execution: map, shuffle, batch, repeat; Model.train with
dataset_sink_mode and sink_size=1000; LossMonitor).

    python examples/lenet_sink.py                          # the sample, 3 × 30 steps: seconds
    HALFSTEP_DATA=… python examples/lenet_sink.py --full   # MNIST: 10 epochs of 1,000 steps of 32

sink_size=N there is two things here: `steps_per_epoch=N`, where an epoch ends, and `sink=N`, how
often the host reads results.

Targets: 98.5 % on MNIST; sinking changes no bit; the pass goes on where the last epoch stopped.
"""

import argparse

import torch
from torch import nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_data(full: bool, train: bool) -> hs.data.Dataset:
    """The guide's pipeline, with a shuffle window of 10,000.

    Resize to 32 bilinearly, to 0..1, normalise, channels first.
    """
    if full:
        data = hs.data.load("mnist", "train" if train else "test")
    else:
        images, labels = hs.data.sample(train)
        data = hs.data.Dataset({"image": images[..., None], "label": labels})
    transforms = [
        hs.data.Resize(32),
        hs.data.Rescale(1 / 255),
        hs.data.Rescale(1 / 0.3081, -0.1307 / 0.3081),
        hs.data.ToCHW(),
    ]
    data = data.map(transforms, "image")
    if train:
        return data.shuffle(10_000).batch(32, drop_remainder=True)
    return data.batch(500)


def build_model(full: bool, seed: int, precision: str) -> hs.Model:
    torch.manual_seed(seed)
    net = hs.nets.lenet5().to(DEVICE)
    if not full:  # the guide's start (σ = 0.02) takes about 900 steps to leave its plateau
        for p in net.parameters():
            if p.ndim > 1:
                nn.init.kaiming_normal_(p)
    return hs.Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        hs.Precision(precision),
        metrics={"acc": hs.metrics.Accuracy()},
        deterministic=not full,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="MNIST, from HALFSTEP_DATA")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    epochs = 10 if args.full else 3
    steps = 1000 if args.full else 30

    print("============== Starting Training ==============")
    model = build_model(args.full, args.seed, args.precision)
    train_data = load_data(args.full, train=True)
    # every=1 would print each step's own loss, sunk or not.
    monitor = hs.LossMonitor(every=steps, style="mindspore-float32")
    model.fit(epochs, train_data, callbacks=[monitor], sink=steps, steps_per_epoch=steps)
    scores = model.evaluate(load_data(args.full, train=False))
    print(f"accuracy {scores['acc']:.2%}, loss {scores['loss']:.4f}")
    assert scores["acc"] > (0.985 if args.full else 0.60)

    # The same run, where the host reads results more often.
    if not args.full:
        other = build_model(args.full, args.seed, args.precision)
        other.fit(epochs, load_data(args.full, train=True), sink=7, steps_per_epoch=steps)
        for p, q in zip(model.net.parameters(), other.net.parameters(), strict=True):
            assert torch.equal(p, q), "how often the host reads results changes nothing"


if __name__ == "__main__":
    main()
