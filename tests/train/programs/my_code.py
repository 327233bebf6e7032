"""A user's own models and datasets, which the tests copy into the working directory."""

import numpy as np
import torch
from torch import nn

import spikefuse as sf
from spikefuse.data import DataError, Dataset, Frames, Images, Recording, Series

NAMES = ("up", "down", "left")


def small(neuron, in_channels, num_classes, size):
    width = in_channels * size[0] * size[1]
    hidden = nn.Linear(width, 16, bias=False), nn.BatchNorm1d(16), neuron()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(16, num_classes))


def fixed(neuron, in_channels, num_classes, size):
    return small(sf.LIF, in_channels, num_classes, size)


def lazy(neuron, in_channels, num_classes, size):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(16), neuron(), nn.Linear(16, num_classes))


class Small(nn.Module):
    def __init__(self, neuron, in_channels, num_classes, size):
        super().__init__()
        self.net = small(neuron, in_channels, num_classes, size)

    def forward(self, x):
        return self.net(x)


def wrapped(*arguments):
    return sf.Temporal(small(*arguments))


def unflattened(neuron, in_channels, num_classes, size):
    return nn.Sequential(nn.Linear(size[1], 16), neuron(), nn.Linear(16, num_classes))


def short(neuron):
    return neuron()


network = small(sf.LIF, 1, 3, (6, 4))


def bars(count, seed):
    """Images whose class is told by a bright bar."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(NAMES)
    pixels = torch.randint(0, 60, (count, 1, 6, 4), generator=generator, dtype=torch.uint8)
    for i, label in enumerate(labels.tolist()):
        pixels[i, 0, 2 * label] = 250
    return Images(pixels, labels)


def read(directory, download):
    if (directory / "missing").exists():
        raise DataError(f"{directory} has no bars: draw some")
    return bars(120, 0), bars(30, 1)


shapes = Dataset((1, 6, 4), NAMES, read)


def read_squares(directory, download):
    parts = bars(120, 0), bars(30, 1)
    return tuple(Images(p.pixels[..., [0, 0, 1, 1, 2, 3]], p.labels) for p in parts)


squares = Dataset((1, 6, 6), NAMES, read_squares)


def read_events(directory, download, num_steps):
    parts = []
    for count in (120, 30):
        images = bars(count, count)
        frames = (images.pixels > 100).byte()[:, None].expand(-1, num_steps, 2, 6, 4).flatten(2)
        parts.append(Frames(frames, images.labels, (2, 6, 4), 8))
    return tuple(parts)


def recordings(path):
    x, y, p = np.frombuffer(path.read_bytes(), np.uint8).reshape(3, -1)
    yield Recording(x, y, p, np.arange(len(x)), (2, 6, 4))


events = Dataset((2, 6, 4), NAMES, read_events, "events", {"num_steps": 3}, (".ev", recordings))
one_part = Dataset((1, 6, 4), NAMES, lambda directory, download: bars(30, 0))
in_tuple = Dataset((1, 6, 4), NAMES, lambda directory, download: (bars(30, 0),))
pairs = Dataset((1, 6, 4), NAMES, lambda *_: ((torch.ones(9), torch.ones(9)),) * 2)
wrong_shape = Dataset((1, 4, 6), NAMES, read)
wrong_labels = Dataset((1, 6, 4), NAMES[:2], read)
no_steps = Dataset((2, 6, 4), NAMES, read_events, "events")
no_shape = Dataset((6, 4), NAMES, read)


def waves(count, num_steps, seed):
    """Noisy sines, the frequency of each, and the same sines half a step later without noise."""
    generator = torch.Generator().manual_seed(seed)
    rates, phases = torch.rand(2, count, 1, generator=generator)
    t = torch.arange(num_steps + 1) / 4
    x = torch.sin((0.5 + rates) * t + 6.28 * phases)[..., None]
    noise = 0.05 * torch.randn(x.shape, generator=generator)
    return (x + noise)[:, :-1], rates, x[:, 1:]


def read_waves(targets):
    def read(directory, download, num_steps):
        parts = [waves(count, num_steps, count) for count in (240, 60)]
        return tuple(Series(x, targets(rates, later)) for x, rates, later in parts)

    return read


def series_in(path, num_steps):
    yield from np.load(path)[:, :num_steps]


OF_WAVES = {"kind": "series", "transform": {"num_steps": 20}, "files": (".npy", series_in)}
rates = Dataset((1,), ("rate",), read_waves(lambda rates, later: rates), **OF_WAVES)
forecast = Dataset((1,), ("next",), read_waves(lambda rates, later: later), **OF_WAVES)
signs = Dataset(
    (1,), ("down", "up"), read_waves(lambda rates, later: (later > 0).long().squeeze(2)), **OF_WAVES
)


def padded_signs(rates, later):
    """The signs of the first steps of each example, of a length of its own."""
    labels = (later > 0).long().squeeze(2)
    ends = (20 * rates).long().clamp(min=1)
    return labels.where(torch.arange(20) < ends, -100)


padded = Dataset((1,), ("down", "up"), read_waves(padded_signs), **OF_WAVES)


def slow(neuron, in_channels, num_classes, size):
    """Neurons, and integrators that they drive."""
    hidden = nn.Linear(in_channels, 32), sf.LIF(decay=0.9, threshold=0.3)
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, num_classes), sf.LI(0.7))
