"""Train on the digits of scikit-learn with a plain PyTorch loop, on a GPU if there is one.

python examples/plain_pytorch.py --epochs 10
"""

from __future__ import annotations

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import spikefuse as sf
from spikefuse.nn.encode import direct

Batches = DataLoader[tuple[torch.Tensor, ...]]
NUM_STEPS = 8


def load() -> tuple[Batches, Batches]:
    """Batches for training and for the test: images `[B, 1, 8, 8]` from 0 to 1, and labels."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    digits = TensorDataset(pixels.float().view(-1, 1, 8, 8) / 16, labels)
    train, test = random_split(digits, [0.8, 0.2])
    return DataLoader(train, 32, shuffle=True, drop_last=True), DataLoader(test, 128)


def make_network() -> nn.Module:
    """`[T, B, 1, 8, 8]` to `[T, B, 10]`; written for one time step."""
    return sf.fuse(sf.Temporal(nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), sf.LIF(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), sf.LIF(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10))))  # fmt: skip


@torch.no_grad()
def accuracy(net: nn.Module, batches: Batches, device: torch.device) -> float:
    net.eval()
    correct = [
        net(direct(images.to(device), NUM_STEPS)).mean(0).argmax(1).cpu() == labels
        for images, labels in batches
    ]
    return torch.cat(correct).float().mean().item()


def main(epochs: int, checkpoint: str, seed: int = 0) -> float:
    """Train, save the weights, and return the accuracy on the test images."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, test = load()
    net = make_network().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(  # a recorded step needs constant momentum
        optimizer, 5e-3, epochs * len(train), cycle_momentum=False
    )

    @sf.graph_step(net, optimizer)  # on a GPU, one launch for the whole step
    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(direct(images, NUM_STEPS)).mean(0), labels)
        loss.backward()
        optimizer.step()
        return loss

    for epoch in range(epochs):
        net.train()
        for images, labels in train:
            loss = step(images.to(device), labels.to(device))
            schedule.step()
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy(net, test, device):.3f}")
    torch.save(net.state_dict(), checkpoint)
    return accuracy(net, test, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", default="digits.pt")
    main(**vars(parser.parse_args()))
