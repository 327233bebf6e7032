"""Shortcuts carry membrane input."""

from __future__ import annotations

import torch

import spikefuse as sf
from spikefuse.models.ms_resnet import ms_resnet34


def test_shortcuts_carry_what_does_not_spike() -> None:
    net = ms_resnet34(sf.LIF, 1, 10, (8, 8)).eval()
    first, second = net[2], net[3]
    spikes, inputs = [], []
    first[0].register_forward_hook(lambda m, x, y: spikes.append(y))
    second.shortcut.register_forward_hook(lambda m, x, y: inputs.append(y))
    with torch.no_grad():
        sf.Temporal(net)(torch.rand(2, 3, 1, 32, 32))
        # A projection reads spikes; where the shape stays, the sum goes on as it is.
        assert set(spikes[0].unique().tolist()) <= {0.0, 1.0}
    assert len(inputs[0].unique()) > 2
