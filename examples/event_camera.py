"""Train on recordings of an event camera that tonic reads and turns into frames.

python examples/event_camera.py                    # generated recordings of moving bars
python examples/event_camera.py --nmnist folder    # N-MNIST, which tonic downloads into the folder
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import tonic
import torch
import torch.nn as nn
import torch.nn.functional as F
from tonic import transforms
from torch.utils.data import DataLoader, Dataset

import spikefuse as sf

Batches = DataLoader[Any]
SENSOR = (34, 34, 2)  # columns, rows and polarities, as tonic has them


class MovingBars(Dataset[tuple[Any, int]]):
    """Bars that move right, left, down or up: events in tonic's format, and the direction."""

    dtype = np.dtype([("x", int), ("y", int), ("t", int), ("p", int)])

    def __init__(self, count: int, seed: int, transform: Callable[[Any], Any]) -> None:
        self.count, self.seed, self.transform = count, seed, transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        direction, rng = index % 4, np.random.default_rng((self.seed, index))
        y, along = np.nonzero(rng.random((34, 34)) < 0.5)  # half of the pixels see the bar
        near = abs(y - rng.integers(8, 26)) < 8
        y, along = y[near], along[near]
        t = 2500 * ((along - rng.integers(34)) % 34) + rng.integers(1500, size=len(y))
        along = 33 - along if direction % 2 else along
        x, y = (along, y) if direction < 2 else (y, along)
        noise = (*rng.integers(34, size=(2, 60)), rng.integers(85_000, size=60))
        x, y, t = (np.concatenate(pair) for pair in zip((x, y, t), noise, strict=True))
        events = np.zeros(len(t), self.dtype)
        events["x"], events["y"], events["t"] = x, y, t
        events["p"] = rng.integers(2, size=len(t))
        return self.transform(events[events["t"].argsort()]), direction


def load(nmnist: str | None, count: int) -> tuple[Batches, Batches, int]:
    """Batches for training and for the test, `[B, T, 2, 34, 34]`, and the number of classes."""
    transform = transforms.Compose([
        transforms.Denoise(filter_time=10_000),  # drops events without a neighbour within 10 ms
        transforms.ToFrame(SENSOR, n_time_bins=12),  # counts of events
        lambda frames: torch.from_numpy(frames).float(),
    ])  # fmt: skip
    train: Any
    test: Any
    if nmnist is None:
        train, test, classes = MovingBars(count, 0, transform), MovingBars(200, 1, transform), 4
    else:
        train, test = (
            tonic.datasets.NMNIST(nmnist, train=part, transform=transform) for part in (True, False)
        )
        classes = 10
    # Later epochs take the frames from memory. MemoryCachedDataset(..., transform=...) augments.
    train = tonic.MemoryCachedDataset(train)
    return DataLoader(train, 32, shuffle=True), DataLoader(test, 100), classes


def make_network(classes: int) -> nn.Module:
    """`[B, T, 2, 34, 34]` to `[B, T, classes]`: loaders put the batch first."""
    net = nn.Sequential(
        nn.Conv2d(2, 8, 5, stride=2, bias=False), nn.BatchNorm2d(8), sf.LIF(decay=0.5),
        nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), sf.LIF(decay=0.5),
        nn.Flatten(), nn.Linear(16 * 7 * 7, classes))  # fmt: skip
    return sf.fuse(sf.Temporal(net, batch_first=True))


@torch.no_grad()
def accuracy(net: nn.Module, batches: Batches, device: torch.device) -> float:
    net.eval()
    correct = [
        net(frames.to(device)).mean(1).argmax(1).cpu() == labels for frames, labels in batches
    ]
    return torch.cat(correct).float().mean().item()


def main(epochs: int, nmnist: str | None = None, count: int = 800) -> float:
    """Train, and return the accuracy on the test recordings."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, test, classes = load(nmnist, count)
    net = make_network(classes).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(epochs):
        net.train()
        for frames, labels in train:
            loss = F.cross_entropy(net(frames.to(device)).mean(1), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy(net, test, device):.3f}")
    return accuracy(net, test, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--nmnist", metavar="FOLDER", help="of the dataset")
    main(**vars(parser.parse_args()))
