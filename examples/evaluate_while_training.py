"""Evaluation while training: how good is the network at each stage, and when is it enough?

System: MindSpore (train, evaluating the model during training).

    python examples/evaluate_while_training.py                          # the sample: seconds
    HALFSTEP_DATA=… python examples/evaluate_while_training.py --full   # all of Fashion-MNIST

Targets: a score for every test image at every evaluation, in mid-epoch too; the weights of the best
evaluation at the end; and looking changes nothing: the losses are those of a run that was never
evaluated, bit for bit.
"""

import argparse

import torch
from torch import nn

import halfstep as hs
from halfstep.engine import Run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_data(full: bool, train: bool) -> hs.data.Dataset:
    if full:
        data = hs.data.load("fashion-mnist", "train" if train else "test")
    else:
        images, labels = hs.data.sample(train)
        data = hs.data.Dataset({"image": images, "label": labels})
    data = data.map(hs.data.Rescale(1 / 255), "image")
    if not train:
        return data.batch(300)  # the last batch is shorter, and counts by what it holds
    if not full:
        data = data.take(4_000)
    return data.shuffle().batch(100)


def build_model(seed: int) -> hs.Model:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    ).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    metrics = {"acc": hs.metrics.Accuracy(), "top3": hs.metrics.Accuracy(top=3)}
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
    train_data = load_data(args.full, train=True)
    test_data = load_data(args.full, train=False)
    accuracies: list[float] = []

    def print_scores(run: Run) -> None:
        if run.scores is None:  # the host looked in, but nothing was evaluated
            return
        scores = run.scores
        accuracies.append(scores["acc"])
        print(
            f"step {run.global_step:4}: loss {scores['loss']:.4f}, accuracy {scores['acc']:.2%}, "
            f"among the first three {scores['top3']:.2%}"
        )

    # Evaluated every so many steps; the best weights come back at the end.
    model = build_model(args.seed)
    history = hs.History()
    model.fit(
        3,
        train_data,
        valid=test_data,
        valid_every_steps=200 if args.full else 20,
        callbacks=[
            hs.Lambda(visit=print_scores),
            history,
            hs.EarlyStopping("acc", patience=3, restore_best=True),
        ],
    )

    # The same run without any evaluation.
    train_data.seek(0)
    history_alone = hs.History()
    build_model(args.seed).fit(3, train_data, callbacks=[history_alone])

    accuracy = model.evaluate(test_data)["acc"]
    print(f"best: {accuracy:.2%}, and these weights are in the network now")
    steps = len(history.rows["loss"])
    assert history.rows["loss"] == history_alone.rows["loss"][:steps], (
        "evaluation moves nothing, dropout's numbers included"
    )
    assert accuracy == max(accuracies)
    assert max(accuracies) > (0.84 if args.full else 0.77)
    test_images, _ = hs.data.sample(train=False)
    assert model.predict(test_images.to(DEVICE) / 255).shape == (2_000, 10)


if __name__ == "__main__":
    main()
