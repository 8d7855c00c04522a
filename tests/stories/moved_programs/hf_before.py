"""Fine-tuning a Hugging Face model as people write it: a tiny BERT tells which of two words is the more frequent."""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Of uneven length; the label says whether there are more threes than fours."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        length = int(torch.randint(8, 17, (), generator=generator))
        ids = torch.randint(2, 6, (16,), generator=generator) * (torch.arange(16) < length)
        mask, label = (
            (torch.arange(16) < length).long(),
            ((ids == 3).sum() > (ids == 4).sum()).long(),
        )
        found.append({"input_ids": ids, "attention_mask": mask, "labels": label})
    return found


def main(out: str) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=6,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = BertForSequenceClassification(config)
    loader = DataLoader(sentences(768, 1), batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=10, num_training_steps=2 * len(loader)
    )
    losses = []
    for _ in range(2):
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            rows = [
                (model(**batch).logits.argmax(1), batch["labels"])
                for batch in DataLoader(sentences(256, 2), 64)
            ]
        accuracy = sum((guess == label).sum().item() for guess, label in rows) / 256
        print(f"loss {losses[-1]:.4f}, accuracy {accuracy:.2%}")
    torch.save({"net": model.state_dict(), "losses": losses, "accuracy": accuracy}, out)


if __name__ == "__main__":
    main(sys.argv[1])
