"""Write a neuron and train it: a resonator with a learned frequency, which tells tones apart.

A leaky neuron integrates its input. A resonator (Izhikevich, "Resonate-and-fire neurons", Neural
Networks 14, 2001) rotates its state `re + i im` by a frequency in each step, so that an input of
this frequency drives it the most.

python examples/own_neuron.py --steps 300
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import spikefuse as sf
from spikefuse.testing import assert_matches_reference, make_input

NUM_STEPS, NUM_TONES = 100, 8


class Wave(sf.Learnable):
    """`decay * wave(frequency)`, one value per neuron: computed in PyTorch, once per call."""

    def __init__(
        self, wave: Callable[[Tensor], Tensor], frequency: nn.Parameter, decay: float
    ) -> None:
        super().__init__()
        self.wave, self.frequency, self.decay = wave, frequency, decay

    def forward(self) -> Tensor:
        return self.decay * self.wave(self.frequency)


class Resonator(sf.Neuron):
    """Spikes while the imaginary part of its state is at the threshold or above.

    The rotation is `re = c re - s im + x`, `im = s re + c im`, with `c = decay cos(frequency)` and
    `s = decay sin(frequency)`. There is no reset.
    """

    re, im = sf.State(), sf.State()

    def __init__(self, neurons: int, decay: float = 0.95, threshold: float = 1.0) -> None:
        super().__init__()
        # In radians per step, one for each neuron: dim 2 of [T, B, neurons].
        frequency = nn.Parameter(torch.empty(neurons).uniform_(0.05, math.pi / 2))
        self.cos: Any = Wave(torch.cos, frequency, decay)
        self.sin: Any = Wave(torch.sin, frequency, decay)
        self.threshold, self.surrogate = threshold, sf.surrogate.Arctan()

    def step(self, x: Tensor, re: Tensor, im: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        next_re = self.cos * re - self.sin * im + x
        next_im = self.sin * re + self.cos * im
        return self.surrogate(next_im - self.threshold), (next_re, next_im)


def tones(count: int) -> tuple[Tensor, Tensor]:
    """Noisy tones `[T, B, 1]` with a random phase, and which of the frequencies they have."""
    labels = torch.randint(NUM_TONES, (count,))
    frequency = 0.1 + 1.2 * labels / NUM_TONES
    phase = 2 * math.pi * torch.rand(count)
    signal = torch.sin(frequency * torch.arange(NUM_STEPS)[:, None] + phase)
    return (signal + 0.5 * torch.randn_like(signal))[..., None], labels


def train(neuron: nn.Module, steps: int) -> float:
    """Train a network with one layer of these 64 neurons; return its accuracy on new tones."""
    net = sf.Temporal(nn.Sequential(nn.Linear(1, 64), neuron, nn.Linear(64, NUM_TONES)))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(steps):
        x, labels = tones(64)
        loss = F.cross_entropy(net(x).mean(0), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, labels = tones(1000)
    with torch.no_grad():
        return float((net(x).mean(0).argmax(1) == labels).float().mean())


def main(steps: int) -> tuple[float, float]:
    """Check the kernels of the neuron, and return accuracies: with it, and with LIF neurons."""
    torch.manual_seed(0)
    # Outputs, states and gradients of the compiled kernels against an eager loop.
    assert_matches_reference(Resonator(17), [make_input((20, 3, 17))], impls=["numba"])
    accuracies = train(Resonator(64), steps), train(sf.LIF(0.9), steps)
    print("accuracy: {:.3f} with resonators, {:.3f} with LIF neurons".format(*accuracies))
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(**vars(parser.parse_args()))
