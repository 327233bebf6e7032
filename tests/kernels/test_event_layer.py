"""A layer on events on a CPU: which way currents are summed changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import spikefuse as sf
from spikefuse.kernels import event_layer
from spikefuse.kernels.events import Events
from spikefuse.neurons.candidates import with_candidates


def results(num_steps: int, width: int) -> list[Tensor]:
    """Events and gradients of a layer, of inputs that are read often."""
    torch.manual_seed(0)
    neuron = sf.LIF(0.9, 1.0, surrogate=sf.surrogate.FastSigmoid(10.0, cutoff=-0.2))
    marks = torch.randint(3, (num_steps, 3, 40)).float()
    weight, bias = torch.randn(40, width) * 0.2, torch.randn(width) * 0.1
    events = Events.from_marks(marks)
    events = Events(events.shape, events.offsets, events.fired, events.indices, events.is_fired())
    layer = event_layer.Layer(events, with_candidates(neuron), weight, bias)
    outputs = layer.forward()
    assert 0 < outputs.num_fired < len(outputs.indices)
    grad = torch.randn(len(outputs.indices))
    _, *found = layer.backward(outputs, grad, False)
    return [outputs.offsets, outputs.fired, outputs.indices, *found]


@pytest.mark.parametrize("num_steps", [3, 16, 17, 40])
@pytest.mark.parametrize("width", [70, 600])
def test_ways_of_summing(num_steps: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kept in (0, 1 << 30):
        for moved in (0, 1 << 20):
            monkeypatch.setattr(event_layer, "KEPT", kept)
            monkeypatch.setattr(event_layer, "MOVED", moved)
            found.append(results(num_steps, width))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
