"""A Hugging Face model, which returns its own loss: batches go to it by name, in any precision.

System: any Hugging Face `PreTrainedModel`; here a vision transformer of 42,000 weights from its
configuration alone, so that nothing is downloaded. `from_pretrained(…)` in place of the
configuration is all that fine-tuning takes.

    python examples/hugging_face.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/hugging_face.py --full   # all of Fashion-MNIST

Targets: O2 learns as fp32 does; layer norms run in float32 and everything else in float16; saved
weights open in transformers.
"""

import argparse
import tempfile

import torch
from transformers import ViTConfig, ViTForImageClassification
from transformers.utils import logging

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEARNING_RATE = 5e-3
CONFIG = ViTConfig(
    image_size=28,
    patch_size=7,
    num_channels=1,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    num_labels=10,
)


def load_data(full: bool, train: bool) -> hs.data.Dataset:
    """Images and labels; the columns are named as the model's arguments are."""
    if full:
        images, labels = hs.data.read_split(hs.data.find("fashion-mnist").folder, train=train)
    else:
        images, labels = hs.data.sample(train)
    data = hs.data.Dataset({"pixel_values": images[:, None], "labels": labels})
    transforms = [hs.data.Rescale(1 / 255), hs.data.Normalize([0.286], [0.353])]
    data = data.map(transforms, "pixel_values")
    if not full:
        data = data.take(3_200 if train else 1_000)
    if train:
        return data.shuffle().batch(64)
    return data.batch(500)


def train(precision: str, full: bool, seed: int) -> tuple[hs.Model, dict[str, float]]:
    """The trained model, and its scores on the test data."""
    train_data = load_data(full, train=True)
    test_data = load_data(full, train=False)
    torch.manual_seed(seed)
    net = ViTForImageClassification(CONFIG).to(DEVICE)
    updates = train_data.size
    model = hs.Model(
        net,
        None,  # the network computes its own loss
        torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, weight_decay=0.01),
        hs.Precision(precision),
        schedule=hs.schedules.cosine(LEARNING_RATE, updates, warmup=updates // 10),
        clip_norm=1.0,
        metrics={"acc": hs.metrics.Accuracy()},
    )
    model.fit(1, train_data, callbacks=[hs.LossMonitor(100 if full else 10)])
    scores = model.evaluate(test_data)
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
    _, fp32_scores = train("fp32", args.full, args.seed)
    model, o2_scores = train("O2", args.full, args.seed)

    # The dtype of every kind of layer.
    modules = model.report().modules.values()
    norm_dtypes = {module.weight for module in modules if module.kind == "LayerNorm"}
    linear_dtypes = {module.weight for module in modules if module.kind == "Linear"}
    print("layer norms in", norm_dtypes, "linear layers in", linear_dtypes)
    assert norm_dtypes == {"float32"}
    assert linear_dtypes == {"float16"}

    # O2 learns as fp32 does.
    fp32_accuracy = fp32_scores["acc"]
    o2_accuracy = o2_scores["acc"]
    assert min(fp32_accuracy, o2_accuracy) > (0.78 if args.full else 0.35)
    assert abs(fp32_accuracy - o2_accuracy) < (0.02 if args.full else 0.10)

    # transformers reads the weights back.
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model.net.save_pretrained(folder)
        loaded = ViTForImageClassification.from_pretrained(folder)
    for weight, loaded_weight in zip(model.net.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(weight.cpu(), loaded_weight)


if __name__ == "__main__":
    main()
