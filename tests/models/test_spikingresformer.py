"""Dual spike attention against the paper's equations, and its running rates."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

import spikefuse as sf
from spikefuse.models.spikingresformer import (
    MOMENTUM,
    DualSpikeAttention,
    SpikeScale,
    spikingresformer,
)


def test_attention_equals_the_equations_of_the_paper() -> None:
    torch.manual_seed(0)
    steps, batch, channels, heads = 2, 3, 8, 2
    attention = DualSpikeAttention(lambda: sf.IF(1.0), channels, heads, 2)
    seen = {}
    for name in ("attention_neuron", "neuron", "norm"):
        getattr(attention, name).register_forward_hook(
            lambda m, x, y, name=name: seen.update({name: (x[0], y)})
        )
    x = (torch.rand(steps, batch, channels, 4, 6) < 0.6).float()
    with torch.no_grad():
        assert sf.Temporal(attention)(x).shape == x.shape
    spikes = x.view(steps * batch, heads, 4, 24)
    keys, values = seen["norm"][1].view(steps * batch, heads, 2, 4, 6).unbind(2)
    rate = spikes.mean((0, 2, 3)).view(heads, 1, 1)
    torch.testing.assert_close(attention.attention_scale.rate, rate)
    wanted = keys.transpose(2, 3) @ spikes / (rate * 4).sqrt()
    torch.testing.assert_close(seen["attention_neuron"][0], wanted)
    attended = seen["attention_neuron"][1]
    assert attended.shape == (steps * batch, heads, 6, 24)
    rate = attended.mean((0, 2, 3)).view(heads, 1, 1)
    wanted = values @ attended / (rate * 6).sqrt()
    torch.testing.assert_close(seen["neuron"][0], wanted.view(-1, channels, 4, 6))


def test_rates_are_averaged_in_training_only() -> None:
    scale = SpikeScale(2)
    first, second = torch.zeros(3, 2, 4, 5), torch.ones(3, 2, 4, 5)
    first[:, 1] = 1
    assert scale(first).isfinite().all()  # a head that did not fire
    scale(second)
    torch.testing.assert_close(scale.rate.flatten(), torch.tensor([1.0, 1.0]))
    scale(first)
    torch.testing.assert_close(scale.rate.flatten(), torch.tensor([1 - MOMENTUM, 1.0]))
    scale.eval()(first)
    torch.testing.assert_close(scale.rate.flatten(), torch.tensor([1 - MOMENTUM, 1.0]))


def test_checkpointing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[spikingresformer.__module__]
    monkeypatch.setattr(module, "DEPTHS", (1, 1, 1))
    torch.manual_seed(0)
    net = spikingresformer(lambda: sf.LIF(threshold=0.3), 1, 5, (8, 8), (64, 64, 64), "cifar")
    x, found = torch.rand(2, 2, 1, 8, 8), []
    for memory in (sf.memory.Recompute(), sf.memory.Checkpoint()):
        temporal = sf.fuse(sf.Temporal(copy.deepcopy(net), memory))
        temporal(x).square().sum().backward()
        found.append([p.grad for p in temporal.parameters()] + list(temporal.buffers()))
    for plain, checkpointed in zip(*found, strict=True):
        scale = float(plain.abs().max())
        torch.testing.assert_close(checkpointed, plain, rtol=1e-3, atol=1e-5 * scale)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="stem is 'mnist': expected imagenet or cifar"):
        spikingresformer(sf.LIF, 1, 10, (28, 28), stem="mnist")
    with pytest.raises(ValueError, match="channels is 65"):
        spikingresformer(sf.LIF, 1, 10, (28, 28), (64, 65, 64))
