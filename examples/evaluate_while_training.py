"""Evaluation while training: how good is the network at each stage, and when is it enough?

System: MindSpore (train, evaluating the model during training).

    python examples/evaluate_while_training.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/evaluate_while_training.py --full   # all of Fashion-MNIST

Targets: a score for every test image at every evaluation, in mid-epoch too; the weights of the best evaluation at the
end; and looking changes nothing: the losses are those of a run that was never evaluated, bit for bit.
"""

import argparse

import torch
from torch import nn

import halfstep as hs
from halfstep.engine import Run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(full: bool, train: bool) -> hs.data.Dataset:
    images, labels = hs.data.sample(train)
    data = hs.data.Dataset({"image": images, "label": labels})
    if full:
        data = hs.data.load("fashion-mnist", "train" if train else "test")
    data = data.map(hs.data.Rescale(1 / 255), "image")
    if not train:
        return data.batch(300)  # the last batch is shorter, and counts by what it holds
    return data.shuffle().batch(100) if full else data.take(4_000).shuffle().batch(100)


def build(seed: int) -> hs.Model:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2)
    )
    net = net.append(nn.Linear(128, 10)).to(DEVICE)
    metrics = {"acc": hs.metrics.Accuracy(), "top3": hs.metrics.Accuracy(top=3)}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return hs.Model(
        net, nn.CrossEntropyLoss(), optimizer, "O2", metrics=metrics, deterministic=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="all of Fashion-MNIST, from HALFSTEP_DATA"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train, test = load(args.full, train=True), load(args.full, train=False)
    scores: list[tuple[int, float, float, float]] = []

    def note(run: Run) -> None:
        if run.scores is not None:
            scores.append(
                (run.global_step, run.scores["loss"], run.scores["acc"], run.scores["top3"])
            )
            print(
                "step {:4}: loss {:.4f}, accuracy {:.2%}, among the first three {:.2%}".format(
                    *scores[-1]
                )
            )

    model, watched, alone = build(args.seed), hs.History(), hs.History()
    best = hs.EarlyStopping("acc", patience=3, restore_best=True)
    model.fit(
        3,
        train,
        valid=test,
        valid_every_steps=200 if args.full else 20,
        callbacks=[hs.Lambda(visit=note), watched, best],
    )
    train.seek(0)
    build(args.seed).fit(3, train, callbacks=[alone])
    print(f"best: {model.evaluate(test)['acc']:.2%}, and these weights are in the network now")

    steps = len(watched.rows["loss"])
    assert watched.rows["loss"] == alone.rows["loss"][:steps], (
        "evaluation moves nothing, dropout's numbers included"
    )
    assert model.evaluate(test)["acc"] == max(score[2] for score in scores)
    assert max(score[2] for score in scores) > (0.84 if args.full else 0.77)
    predicted = model.predict(hs.data.sample(train=False)[0].to(DEVICE) / 255)
    assert predicted.shape == (2_000, 10)


if __name__ == "__main__":
    main()
