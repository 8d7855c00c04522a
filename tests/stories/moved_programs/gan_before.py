"""A GAN as people write it: two networks, two optimizers, one loop; what it is to imitate lies on a circle."""

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

STEPS = 100


def points(count: int) -> Tensor:
    """Around eight places on the unit circle."""
    angle = torch.randint(8, (count,)) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def judge_loss(judge: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    yes, no = judge(real), judge(fake)
    return bce(yes, torch.ones_like(yes)) + bce(no, torch.zeros_like(no))


def maker_loss(judge: nn.Module, maker: nn.Module, noise: Tensor) -> Tensor:
    yes = judge(maker(noise))
    return bce(yes, torch.ones_like(yes))


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main(out: str) -> None:
    torch.manual_seed(0)
    maker = nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    judge = nn.Sequential(
        nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )
    opt_maker = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_judge = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
    losses = []
    for step in range(STEPS):
        noise = torch.randn(128, 8)
        loss_judge = judge_loss(judge, points(128), maker(noise).detach())
        update(opt_judge, loss_judge)
        loss_maker = maker_loss(judge, maker, noise)
        update(opt_maker, loss_maker)
        losses.append((loss_judge.item(), loss_maker.item()))
        if step % 25 == 0:
            print(f"step {step}: judge {losses[-1][0]:.4f}, maker {losses[-1][1]:.4f}")
    torch.save(
        {"net": {**maker.state_dict(), **judge.state_dict(prefix="judge.")}, "losses": losses}, out
    )


if __name__ == "__main__":
    main(sys.argv[1])
