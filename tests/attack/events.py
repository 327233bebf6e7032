"""Random spike lists: `EventLinear` against dense layers, and lists that break their own rules.

Weights and potentials are multiples of a power of 2, so that sums are exact in any order and every
spike must be equal.
"""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.nn import EventLinear, Events
from spikefuse.testing import within_budget
from tests.events.networks import dense, gradients

INTEGERS = (-1, 0, 1, 2**31 - 1, -(2**31), 2**40, -(2**62))


def neuron(rng: random.Random) -> sf.Neuron:
    surrogate = sf.surrogate.FastSigmoid(rng.choice((1.0, 10.0)), cutoff=rng.choice((-0.5, -2.0)))
    kind = rng.choice((sf.LIF, sf.PLIF, sf.ALIF))
    reset = rng.choice(("hard", "soft"))
    return kind(0.5, 1.0, surrogate=surrogate, reset=reset, detach_reset=rng.random() < 0.5)


def network(rng: random.Random, width: int) -> sf.Temporal:
    widths = [width, *(rng.choice((1, 5, 31, 64, 130)) for _ in range(rng.randint(1, 3)))]
    layers = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        hidden = i < len(widths) - 2
        layers.append(EventLinear(a, b, neuron(rng) if hidden else None))
        for p in (layers[-1].weight, layers[-1].bias):
            p.data = (torch.randn_like(p) * 32 / a**0.5).round() / 16
    return sf.Temporal(nn.Sequential(*layers))


def lists(spikes: Tensor) -> Events:
    """List spikes by the constructor."""
    rows = spikes.flatten(0, 1)
    counts = rows.sum(1)
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).long()
    return Events((*spikes.shape,), offsets, counts.int(), rows.nonzero()[:, 1].int())


def events_of(rng: random.Random, spikes: Tensor) -> Events | Tensor:
    form = rng.choice(("dense", "from_dense", "bits", "lists"))
    if form == "bits":
        packed = np.packbits(spikes.bool().numpy(), axis=2, bitorder="little")
        return Events.from_bits(torch.from_numpy(packed), spikes.shape[2])
    return {"dense": lambda x: x, "from_dense": Events.from_dense, "lists": lists}[form](spikes)


def compare(net: sf.Temporal, x: Events | Tensor, spikes: Tensor) -> list[str]:
    other, found = dense(net), []
    y, expected = net(x), other(spikes)
    if not torch.equal(y, expected):
        found.append(f"outputs differ by {(y - expected).abs().max()}")
    double = copy.deepcopy(other).double()
    truth = gradients(double, double(spikes.double(), impl="reference"))
    scale = max(t.abs().max().item() for t in truth if t is not None)
    results = zip(gradients(net, y), gradients(other, expected), truth, strict=True)
    for i, row in enumerate(results):
        values = (torch.zeros(()) if g is None else g for g in row)
        try:
            within_budget(f"gradient {i}", (*values,), 16.0, scale)
        except AssertionError as error:
            found.append(str(error))
    return found


def hostile(rng: random.Random, spikes: Tensor) -> tuple[Events, Tensor] | None:
    """Change lists or bits at random; return what is accepted, and the spikes that it must mean."""
    shape = steps, batch, width = spikes.shape
    if rng.random() < 0.2:
        packed = torch.from_numpy(np.packbits(spikes.bool().numpy(), axis=2, bitorder="little"))
        packed[rng.randrange(steps), rng.randrange(batch), -1] ^= 1 << rng.randrange(8)
        bits = np.unpackbits(packed.numpy(), axis=2, bitorder="little")
        if bits[..., width:].any():
            refused = True
            try:
                Events.from_bits(packed, width)
                refused = False
            except ValueError:
                pass
            assert refused, "bits beyond the sites are accepted"
            return None
        return Events.from_bits(packed, width), torch.from_numpy(bits[..., :width]).float()
    x = lists(spikes)
    fields = {"offsets": x.offsets, "fired": x.fired, "indices": x.indices}
    fields = {name: value.clone() for name, value in fields.items()}
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*fields])
        value, change = fields[name], rng.randrange(5)
        at = rng.randrange(max(1, len(value)))
        limits = torch.iinfo(value.dtype)
        if change == 0 and len(value):
            number = rng.choice((*INTEGERS, width, width - 1, len(x.indices)))
            value[at] = min(max(number, limits.min), limits.max)
        elif change == 1 and len(value):
            value[at] += rng.choice((-1, 1))
        elif change == 2:
            fields[name] = torch.cat([value[:at], value[at + 1 :]])
        elif change == 3:
            fields[name] = torch.cat([value, value[:1]])
        else:
            fields[name] = value[torch.randperm(len(value))]
    if rng.random() < 0.2:
        shape = tuple(rng.choice((n, n, n + 1, n - 1, 0, -n)) for n in shape)
    if rng.random() < 0.2:
        fields["values"] = torch.ones(len(fields["indices"])) * rng.choice((1.0, 0.0, 0.5))
    try:
        events = Events(shape, **fields)
    except (ValueError, TypeError):
        return None
    meant = torch.zeros(shape[0] * shape[1], shape[2])
    begins, indices = events.offsets.tolist(), events.indices.tolist()
    for r, (begin, end) in enumerate(itertools.pairwise(begins)):
        row, fired = indices[begin:end], int(events.fired[r])
        assert 0 <= fired <= len(row) == len(set(row)), "wrong lists are accepted"
        for site in row[:fired]:
            meant[r, site] = 1.0
    return events, meant.view(shape)


def case(seed: int) -> list[str]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shape = rng.randint(1, 6), rng.randint(1, 4), rng.choice((1, 2, 8, 31, 32, 33, 70, 257))
    spikes = (torch.rand(shape) < rng.choice((0.0, 0.02, 0.1, 0.3, 0.8, 1.0))).float()
    if rng.random() < 0.5:
        return compare(network(rng, shape[2]), events_of(rng, spikes), spikes)
    accepted = hostile(rng, spikes)
    if accepted is None:
        return []
    events, meant = accepted
    if not torch.equal(events.to_dense(), meant):
        return ["the accepted lists are read wrongly"]
    return compare(network(rng, meant.shape[2]), events, meant) if meant.numel() else []
