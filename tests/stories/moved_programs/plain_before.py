"""A usual training script: a small network on a sample of Fashion-MNIST, and its accuracy."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.data import sample


def load(train: bool) -> TensorDataset:
    """The first 1,500 images, from 0 to 1, and their labels."""
    images, labels = sample(train)
    return TensorDataset(images[:1500, None].float() / 255, labels[:1500])


def main(result_path: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(1152, 10),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * 24)
    loader = DataLoader(load(train=True), batch_size=64, shuffle=True)
    losses = []
    for _ in range(2):
        net.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        net.eval()
        with torch.no_grad():
            correct = 0
            for images, labels in DataLoader(load(train=False), batch_size=500):
                correct += (net(images).argmax(1) == labels).sum().item()
        print(f"loss {losses[-1]:.4f}, accuracy {correct / 1500:.2%}")
    torch.save({"net": net.state_dict(), "losses": losses}, result_path)


if __name__ == "__main__":
    main(sys.argv[1])
