"""Train a recurrent network on the Spiking Heidelberg Digits: spoken digits as spikes of 700 cells.

The files shd_train.h5 and shd_test.h5 are read from the folder that SPIKEFUSE_DATA names (extra
`events`). Without them, the program generates data of the same form.

python examples/spoken_digits.py --epochs 30
"""

from __future__ import annotations

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

import spikefuse as sf
from spikefuse.data import DataError, Examples, Frames

NUM_STEPS, NUM_CELLS, NUM_CLASSES = 100, 700, 20


def load(num_generated: int) -> tuple[Examples, Examples]:
    """The training and test recordings, as counts of spikes in steps of 10 ms."""
    try:
        train, test = sf.data.load("shd", num_steps=NUM_STEPS, dt=10_000)
        return train, test
    except DataError as error:
        print(f"{error}\nUsing generated data.")
    classes = torch.rand(NUM_CLASSES, 5, 14) ** 4  # rates in 5 parts of a word, for 14 bands
    return generate(classes, num_generated), generate(classes, num_generated // 4)


def generate(classes: torch.Tensor, count: int) -> Frames:
    labels = torch.randint(NUM_CLASSES, (count,))
    rates = classes.repeat_interleave(NUM_STEPS // 5, 1).repeat_interleave(NUM_CELLS // 14, 2)
    counts = torch.bernoulli(0.1 * rates[labels]).to(torch.uint8)  # [N, T, 700]
    return Frames(counts, labels, (NUM_CELLS,), bits=8)


def inputs(batch: Examples) -> torch.Tensor:
    """Counts `[T, B, 140]`: five neighbouring cells are one input."""
    counts: torch.Tensor = sf.data.expand(batch).unflatten(-1, (140, 5))
    return counts.sum(-1)


def make_network(width: int) -> nn.Module:
    """Two layers of recurrent adaptive neurons, and a readout that integrates over time."""

    def layer(num_inputs: int) -> list[nn.Module]:
        neuron = sf.AdLIF(surrogate=sf.surrogate.Rectangle(), detach_reset=True)
        recurrent = sf.Recurrent(neuron, width, self_connections=False)
        nn.init.orthogonal_(recurrent.weight, 0.5)
        return [nn.Linear(num_inputs, width, bias=False), nn.BatchNorm1d(width), recurrent]

    readout = [nn.Linear(width, NUM_CLASSES), sf.LI(0.9, decay_input=True)]
    return sf.Temporal(nn.Sequential(*layer(140), nn.Dropout(0.2), *layer(width), *readout))


def classified(potentials: torch.Tensor) -> torch.Tensor:
    """Scores `[B, 20]`: how much of the recording each class was ahead."""
    return potentials.softmax(-1).sum(0)


@torch.no_grad()
def accuracy(net: nn.Module, recordings: Examples, device: torch.device) -> float:
    net.eval()
    correct = 0.0
    for rows in torch.arange(len(recordings)).split(128):
        batch = recordings[rows].to(device)
        correct += (classified(net(inputs(batch))).argmax(1) == batch.labels).sum().item()
    return correct / len(recordings)


def main(epochs: int, width: int, num_generated: int = 2000) -> float:
    """Train, and return the accuracy on the test recordings."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, test = load(num_generated)
    net = make_network(width).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(epochs):
        net.train()
        for rows in torch.randperm(len(train)).split(64):
            batch = train[rows].to(device)
            loss = F.cross_entropy(classified(net(inputs(batch))), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy(net, test, device):.3f}")
    return accuracy(net, test, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--width", type=int, default=128, help="neurons in a layer")
    main(**vars(parser.parse_args()))
