"""Learn receptive fields of digits by spike-timing-dependent plasticity, without gradients.

Neurons compete for each image: the one with the highest potential fires, and inhibits all. Its
weights from pixels that have fired before grow. The weights of a neuron are then scaled to a
constant sum, and a neuron that fires more than others gets a higher threshold, so that each learns
one kind of digit. Labels are used afterwards only: a neuron stands for the digit for which it fires
most. After Diehl and Cook, "Unsupervised learning of digit recognition using spike-timing-dependent
plasticity", Frontiers in Computational Neuroscience 9, 2015.

python examples/stdp_digits.py --plot fields.png
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import spikefuse as sf
from spikefuse.nn.encode import poisson

MAX_RATE = 0.3  # spikes per step of a white pixel
WEIGHT_SUM = 6.0
LEARNING_RATE, DEPRESSION, HOMEOSTASIS = 0.05, 0.3, 10.0
RULE = sf.plasticity.STDPRule(pre_decay=0.9, post_decay=0.9)


class Competition(nn.Module):
    """One step of neurons of which at most one fires, and then inhibits all in the next step."""

    weight: Tensor
    threshold: Tensor

    def __init__(self, inputs: int, neurons: int, inhibition: float = 4.0) -> None:
        super().__init__()
        self.register_buffer("weight", scaled(torch.rand(neurons, inputs)))
        self.register_buffer("threshold", torch.ones(neurons))
        self.membrane, self.inhibition = sf.LI(0.9), inhibition

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        """The spikes `[B, neurons]` for pixels `[B, inputs]` and the spikes of the last step."""
        current = F.linear(x, self.weight) - self.inhibition * last.sum(1, keepdim=True)
        h = self.membrane(current) - self.threshold
        spikes: Tensor = ((h >= 0) & (h == h.amax(1, keepdim=True))).float()
        return spikes

    def learn(self, x: Tensor, spikes: Tensor) -> None:
        """Change weights and thresholds by the spikes of pixels and of neurons over time."""
        up, down = sf.plasticity.stdp(x, spikes, RULE)
        self.weight += LEARNING_RATE * (up - DEPRESSION * down)
        self.weight.copy_(scaled(self.weight.clamp(0, 1)))
        rate = spikes.mean((0, 1))
        self.threshold += HOMEOSTASIS * (rate - rate.mean())


def scaled(weight: Tensor) -> Tensor:
    return WEIGHT_SUM * F.normalize(weight, p=1.0, dim=1)


def encode(pixels: Tensor, num_steps: int) -> Tensor:
    """Spikes `[T, B, inputs]` for images `[B, 1, H, W]` of bytes."""
    return poisson(MAX_RATE / 255 * pixels.flatten(1), num_steps)


def responses(loop: nn.Module, pixels: Tensor, num_steps: int) -> Tensor:
    """The number of spikes of each neuron for each image."""
    return torch.cat([loop(encode(part, num_steps)).sum(0) for part in pixels.split(256)])


@torch.no_grad()
def main(
    neurons: int = 100, epochs: int = 6, num_steps: int = 40, plot: str | None = None
) -> float:
    """Learn, and return the accuracy on the test images."""
    torch.manual_seed(0)
    train, test = sf.data.load("digits")
    net = Competition(train.pixels[0].numel(), neurons)
    loop, accuracy = sf.Loop(net, (neurons,)), 0.0
    for epoch in range(epochs):
        for batch in torch.randperm(len(train.labels)).split(16):
            x = encode(train.pixels[batch], num_steps)
            net.learn(x, loop(x))
        found = responses(loop, train.pixels, num_steps)
        by_digit = torch.stack([found[train.labels == digit].mean(0) for digit in range(10)])
        votes = F.one_hot(by_digit.argmax(0), 10).float()  # of the neurons, [neurons, 10]
        chosen = (responses(loop, test.pixels, num_steps) @ votes).argmax(1)
        accuracy = (chosen == test.labels).float().mean().item()
        print(f"epoch {epoch}: {found.sum(1).mean():.1f} spikes per image, accuracy {accuracy:.3f}")
    if plot is not None:
        draw(net.weight.unflatten(1, (8, 8)), plot)
    return accuracy


def draw(fields: Tensor, path: str) -> None:
    """Draw the weights `[neurons, 8, 8]` as images."""
    columns = math.ceil(len(fields) ** 0.5)
    figure = sf.plots.new_figure((8, 8))
    panels = figure.subplots(math.ceil(len(fields) / columns), columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, field in zip(panels.flat, fields, strict=False):
        axes.imshow(field.numpy(), cmap="Blues")
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--neurons", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--plot", metavar="FILE", help="where to draw the receptive fields")
    main(**vars(parser.parse_args()))
