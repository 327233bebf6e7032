"""Classify a stream of spikes step by step, and stop as soon as the network is sure.

The network is trained on whole sequences. `sf.Stream` then runs it one time step at a time and
holds the states of its neurons in between, as for a sensor whose data arrives step by step.

python examples/streaming.py --steps 200
"""

from __future__ import annotations

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

import spikefuse as sf

NUM_STEPS, NUM_INPUTS, NUM_CLASSES = 50, 40, 4


def recordings(rates: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Spikes `[T, B, 40]`, whose rates differ between classes a little, and labels `[B]`."""
    labels = torch.randint(NUM_CLASSES, (count,))
    return torch.bernoulli(rates[labels].expand(NUM_STEPS, count, NUM_INPUTS)), labels


def train(rates: torch.Tensor, steps: int) -> nn.Module:
    net = sf.Temporal(nn.Sequential(
        nn.Linear(NUM_INPUTS, 64), nn.BatchNorm1d(64), sf.LIF(0.8),
        nn.Linear(64, NUM_CLASSES)))  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(steps):
        x, labels = recordings(rates, 64)
        # The sum so far should be right at every step, not only at the last one.
        so_far = net(x).cumsum(0)
        loss = F.cross_entropy(so_far.flatten(0, 1), labels.repeat(NUM_STEPS))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()  # a single step has no batch statistics


def decide(stream: sf.Stream, recording: torch.Tensor, sure: float) -> tuple[int, int]:
    """Read `[T, 40]` step by step; return the class and the number of steps that it took."""
    stream.reset()  # each recording starts from rest
    evidence, num_read = torch.zeros(NUM_CLASSES), 0
    for spikes in recording:
        evidence += stream(spikes[None])[0]  # [1, 40] to [1, 4]
        num_read += 1
        if evidence.softmax(0).max() > sure:
            break
    return int(evidence.argmax()), num_read


def main(steps: int, sure: float = 0.99, count: int = 100) -> tuple[float, float]:
    """Return the share of right decisions, and the mean number of steps that they took."""
    torch.manual_seed(0)
    rates = 0.2 + 0.1 * torch.rand(NUM_CLASSES, NUM_INPUTS)
    net = train(rates, steps)
    stream = sf.Stream(net)
    x, labels = recordings(rates, count)

    # The stream computes what the network computes of a whole sequence. Its state can be stored,
    # and exchanged with that of the network.
    one = x[:, :1]
    first, state = net(one[:20], return_state=True)
    stream.state = state
    rest = torch.stack([stream(spikes) for spikes in one[20:]])
    torch.testing.assert_close(torch.cat([first, rest]), net(one))

    decisions = [decide(stream, x[:, i], sure) for i in range(count)]
    right = sum(int(found == label) for (found, _), label in zip(decisions, labels, strict=True))
    mean_steps = sum(t for _, t in decisions) / count
    print(f"{right / count:.0%} right, after {mean_steps:.1f} of {NUM_STEPS} steps on average")
    return right / count, mean_steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--sure", type=float, default=0.99, help="probability that stops a reading")
    main(**vars(parser.parse_args()))
