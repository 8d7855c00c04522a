"""A Hugging Face model, which returns its own loss: batches go to it by name, in any precision.

System: any Hugging Face `PreTrainedModel`; here a vision transformer of 42,000 weights from its configuration alone, so
that nothing is downloaded. `from_pretrained(…)` in place of the configuration is all that fine-tuning takes.

    python examples/hugging_face.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/hugging_face.py --full   # all of Fashion-MNIST

Targets: O2 learns as fp32 does; layer norms run in float32 and everything else in float16; saved weights open in
transformers.
"""

import argparse
import tempfile

import torch
from transformers import ViTConfig, ViTForImageClassification
from transformers.utils import logging

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LR = 5e-3
CONFIG = ViTConfig(
    image_size=28, patch_size=7, num_channels=1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=96, num_labels=10,
)  # fmt: skip


def splits(full: bool) -> tuple[hs.data.Dataset, hs.data.Dataset]:
    """Columns are named as the model's arguments are."""
    folder = hs.data.find("fashion-mnist").folder if full else None
    pairs = [
        hs.data.read_split(folder, train=t) if folder else hs.data.sample(t) for t in (True, False)
    ]
    chain = [hs.data.Rescale(1 / 255), hs.data.Normalize([0.286], [0.353])]
    train, test = (
        hs.data.Dataset({"pixel_values": images[:, None], "labels": labels}).map(
            chain, "pixel_values"
        )
        for images, labels in pairs
    )
    return (train if full else train.take(3_200)).shuffle().batch(64), (
        test if full else test.take(1_000)
    ).batch(500)


def train(precision: str, full: bool, seed: int) -> tuple[hs.Model, dict[str, float]]:
    data, test = splits(full)
    torch.manual_seed(seed)
    net = ViTForImageClassification(CONFIG).to(DEVICE)
    updates = data.size
    model = hs.Model(
        net, None, torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.01), precision,
        schedule=hs.schedules.cosine(LR, updates, warmup=updates // 10), clip_norm=1.0,
        metrics={"acc": hs.metrics.Accuracy()},
    )  # fmt: skip
    model.fit(1, data, callbacks=[hs.LossMonitor(100 if full else 10)])
    scores = model.evaluate(test)
    print(f"{precision}: accuracy {scores['acc']:.2%}, loss {scores['loss']:.4f}\n")
    return model, scores


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="all of Fashion-MNIST, from HALFSTEP_DATA"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    (_, fp32), (model, half) = (train(name, args.full, args.seed) for name in ("fp32", "O2"))

    seen = model.report().modules
    norms = {row.weight for name, row in seen.items() if row.kind == "LayerNorm"}
    linears = {row.weight for name, row in seen.items() if row.kind == "Linear"}
    print("layer norms in", norms, "linear layers in", linears)
    assert (norms, linears) == ({"float32"}, {"float16"})
    assert min(fp32["acc"], half["acc"]) > (0.78 if args.full else 0.35)
    assert abs(fp32["acc"] - half["acc"]) < (0.02 if args.full else 0.10)

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model.net.save_pretrained(folder)
        again = ViTForImageClassification.from_pretrained(folder)
    assert all(
        torch.equal(a.cpu(), b)
        for a, b in zip(model.net.parameters(), again.parameters(), strict=True)
    )


if __name__ == "__main__":
    main()
