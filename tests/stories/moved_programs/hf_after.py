"""A usual Hugging Face script: a tiny BERT learns which of two words is more frequent."""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import halfstep as hs


def make_sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of uneven length; the label says whether it has more threes than fours."""
    generator = torch.Generator().manual_seed(seed)
    sentences = []
    for _ in range(count):
        length = int(torch.randint(8, 17, (), generator=generator))
        mask = (torch.arange(16) < length).long()
        ids = torch.randint(2, 6, (16,), generator=generator) * mask
        label = ((ids == 3).sum() > (ids == 4).sum()).long()
        sentences.append({"input_ids": ids, "attention_mask": mask, "labels": label})
    return sentences


def main(result_path: str) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=6,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = BertForSequenceClassification(config)
    loader = DataLoader(make_sentences(768, seed=1), batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=10, num_training_steps=2 * len(loader)
    )
    step = hs.TrainStep(model, None, optimizer, precision="fp32", clip_norm=1.0)
    losses = []
    for _ in range(2):
        model.train()
        for batch in loader:
            loss = step(batch).loss
            scheduler.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            correct = 0
            for batch in DataLoader(make_sentences(256, seed=2), batch_size=64):
                predictions = model(**batch).logits.argmax(1)
                correct += (predictions == batch["labels"]).sum().item()
        accuracy = correct / 256
        print(f"loss {losses[-1]:.4f}, accuracy {accuracy:.2%}")
    results = {"net": model.state_dict(), "losses": losses, "accuracy": accuracy}
    torch.save(results, result_path)


if __name__ == "__main__":
    main(sys.argv[1])
