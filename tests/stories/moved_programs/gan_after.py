"""A usual GAN: two networks, two optimizers, one loop. It learns points around a circle."""

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from halfstep import amp

STEPS = 100
SCALER = amp.GradScaler()


def sample_points(count: int) -> Tensor:
    """Points around eight centers on the unit circle."""
    angle = torch.randint(8, (count,)) * (math.pi / 4)
    centers = torch.stack([angle.cos(), angle.sin()], dim=1)
    return centers + 0.05 * torch.randn(count, 2)


@amp.autocast(low_prec_dtype="float32")
def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    real_logits = critic(real)
    fake_logits = critic(fake)
    real_loss = bce(real_logits, torch.ones_like(real_logits))
    fake_loss = bce(fake_logits, torch.zeros_like(fake_logits))
    return real_loss + fake_loss


@amp.autocast(low_prec_dtype="float32")
def generator_loss(critic: nn.Module, generator: nn.Module, noise: Tensor) -> Tensor:
    fake_logits = critic(generator(noise))
    return bce(fake_logits, torch.ones_like(fake_logits))


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    SCALER.scale(loss).backward()
    SCALER.step(optimizer)


def main(result_path: str) -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(8, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 2),
    )
    critic = nn.Sequential(
        nn.Linear(2, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 1),
    )
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    losses = []
    for step in range(STEPS):
        noise = torch.randn(128, 8)
        loss_c = critic_loss(critic, sample_points(128), generator(noise).detach())
        update(critic_optimizer, loss_c)
        loss_g = generator_loss(critic, generator, noise)
        update(generator_optimizer, loss_g)
        SCALER.update()
        losses.append((loss_c.item(), loss_g.item()))
        if step % 25 == 0:
            print(f"step {step}: critic {loss_c.item():.4f}, generator {loss_g.item():.4f}")
    weights = generator.state_dict() | critic.state_dict(prefix="critic.")
    torch.save({"net": weights, "losses": losses}, result_path)


if __name__ == "__main__":
    main(sys.argv[1])
