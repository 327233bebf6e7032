"""Segment what moves before an event camera: a class for each pixel at each time step.

A disc and a square move in front of a camera, which reports the pixels that become brighter or
darker, with noise. Events come from edges only, and rarely: the neurons remember the rest. The
network is a small U-Net of spiking neurons.

python examples/event_segmentation.py --steps 150
"""

from __future__ import annotations

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import spikefuse as sf

SIZE, NUM_STEPS, CLASSES = 32, 12, ("background", "disc", "square")


def paths(count: int) -> Tensor:
    """Straight paths of the centres of objects `[T, B, 2]`, which stay inside the image."""
    ends = 6 + (SIZE - 12) * torch.rand(2, count, 2)
    return torch.lerp(ends[0], ends[1], torch.linspace(0, 1, NUM_STEPS + 1)[:, None, None])


def record(count: int) -> tuple[Tensor, Tensor]:
    """Events `[T, B, 2, H, W]`, zeros and ones, and the class of each pixel `[T, B, H, W]`."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    pixels = torch.stack([y, x], -1)
    away = [(pixels - path[:, :, None, None]).abs() for path in (paths(count), paths(count))]
    disc, square = away[0].square().sum(-1) < 5**2, away[1].amax(-1) < 4
    classes = torch.where(square, 2, torch.where(disc, 1, 0))  # the square passes in front
    brightness = torch.tensor([0.0, 1.0, 2.0])[classes]
    change = brightness.diff(dim=0)
    events = torch.stack([change > 0, change < 0], 2)
    events &= torch.rand(events.shape) < 0.8
    events |= torch.rand(events.shape) < 0.01
    return events.float(), classes[1:]


def block(in_channels: int, out_channels: int) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), sf.LIF(decay=0.8))


class UNet(nn.Module):
    """For one time step: events `[B, 2, H, W]` to potentials of classes `[B, 3, H, W]`.

    Source: Ronneberger, Fischer, Brox, "U-Net: Convolutional Networks for Biomedical Image
    Segmentation", MICCAI 2015.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = block(2, width), block(width, 2 * width)
        self.bottom = block(2 * width, 2 * width)
        self.up2, self.up1 = block(4 * width, width), block(2 * width, width)
        self.head = nn.Sequential(nn.Conv2d(width, len(CLASSES), 1), sf.LI(0.8))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        y = self.bottom(F.max_pool2d(coarse, 2))
        y = self.up2(torch.cat([F.interpolate(y, scale_factor=2.0), coarse], 1))
        y = self.up1(torch.cat([F.interpolate(y, scale_factor=2.0), fine], 1))
        classes: Tensor = self.head(y)
        return classes


@torch.no_grad()
def overlap(net: nn.Module, device: torch.device, count: int = 32) -> list[float]:
    """Return the intersection over union of each class, in the second half of new recordings."""
    net.eval()
    events, classes = (x.to(device) for x in record(count))
    found, classes = net(events).argmax(2)[NUM_STEPS // 2 :], classes[NUM_STEPS // 2 :]
    net.train()
    pairs = [(found == i, classes == i) for i in range(len(CLASSES))]
    return [((a & b).sum() / (a | b).sum()).item() for a, b in pairs]


def main(steps: int, width: int = 16, batch: int = 16) -> list[float]:
    """Train on new recordings in each step, and return the overlap of each class."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = sf.fuse(sf.Temporal(UNet(width))).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    weight = torch.tensor([1.0, 4.0, 4.0], device=device)  # most pixels are background
    for step in range(steps):
        events, classes = (x.to(device) for x in record(batch))
        loss = F.cross_entropy(net(events).flatten(0, 1), classes.flatten(0, 1), weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"\rstep {step + 1} of {steps}: loss {loss:.3f}", end="", flush=True)
    overlaps = overlap(net, device)
    print("\noverlap:", ", ".join(f"{n} {o:.2f}" for n, o in zip(CLASSES, overlaps, strict=True)))
    return overlaps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    parser.add_argument("--width", type=int, default=16, help="channels of the finest layer")
    main(**vars(parser.parse_args()))
