"""Adapt a decoder to a user whose signals drift, by an update at each step of a running stream.

A network decodes a movement from the spikes of 64 channels, each of which fires for movements in a
direction that it prefers. It is trained on whole recordings. Then the preferred directions have
turned, as after electrodes have moved. While the user follows a known movement, `sf.Online` learns
at each step: eligibility traces stand for all earlier steps, so nothing of the past is stored.

python examples/online_adaptation.py --steps 200
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import spikefuse as sf

CHANNELS, TURN = 64, math.pi / 3


def movements(num_steps: int, count: int) -> torch.Tensor:
    """Smooth movements `[T, B, 2]` between -1 and 1."""
    time = torch.arange(num_steps)[:, None, None]
    period, phase = 60 + 60 * torch.rand(2, count, 2), 2 * math.pi * torch.rand(2, count, 2)
    return torch.sin(2 * math.pi * time / period[:, None] + phase[:, None]).mean(0)


def spikes(movement: torch.Tensor, turn: float) -> torch.Tensor:
    """Spikes `[T, B, 64]` of channels whose preferred directions have turned by an angle."""
    angles = 2 * math.pi * torch.arange(CHANNELS) / CHANNELS + turn
    preferred = torch.stack([torch.cos(angles), torch.sin(angles)])
    return torch.bernoulli((0.2 + 0.2 * movement @ preferred).clamp(0, 1))


def train(net: nn.Module, steps: int) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(steps):
        movement = movements(60, 32)
        loss = F.mse_loss(net(spikes(movement, 0.0)), movement)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def adapt(net: sf.Temporal, num_steps: int) -> None:
    """Learn from one stream, step by step."""
    learner = sf.Online(net, rule="ottt")
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.003)
    movement, state = movements(num_steps, 1), None
    for now, target in zip(spikes(movement, TURN).split(1), movement.split(1), strict=True):
        decoded, state = learner(now, state=state, return_state=True)
        optimizer.zero_grad()
        F.mse_loss(decoded, target).backward()
        optimizer.step()


@torch.no_grad()
def error(net: nn.Module, turn: float) -> float:
    """The mean squared error, relative to that of a decoder that always returns 0."""
    movement = movements(200, 20)
    decoded = net(spikes(movement, turn))
    return (F.mse_loss(decoded, movement) / movement.square().mean()).item()


def main(steps: int, adaptation: int = 1000) -> tuple[float, float, float]:
    """Return the errors after training, with turned channels, and after the adaptation."""
    torch.manual_seed(0)
    net = sf.Temporal(nn.Sequential(nn.Linear(CHANNELS, 128), sf.LIF(0.9), nn.Linear(128, 2)))
    train(net, steps)
    trained, drifted = error(net, 0.0), error(net, TURN)
    adapt(net, adaptation)
    adapted = error(net, TURN)
    print(f"relative error: {trained:.2f}, drifted: {drifted:.2f}, adapted: {adapted:.2f}")
    return trained, drifted, adapted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--adaptation", type=int, default=1000, help="steps of the stream")
    main(**vars(parser.parse_args()))
