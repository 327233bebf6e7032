"""Attention against the paper's equation."""

from __future__ import annotations

import pytest
import torch

import spikefuse as sf
from spikefuse.models.spikformer import SpikingSelfAttention, spikformer


def test_attention_equals_the_equation_of_the_paper() -> None:
    torch.manual_seed(0)
    steps, batch, channels, heads = 3, 2, 8, 2
    attention = SpikingSelfAttention(sf.LIF, channels, heads, scale=0.25).eval()
    received, seen = [], {}
    attention.neuron.register_forward_pre_hook(lambda m, x: received.append(x[0]))
    for name in ("q", "k", "v"):
        getattr(attention, name).register_forward_hook(
            lambda m, x, y, name=name: seen.update({name: y})
        )
    x = (torch.rand(steps, batch, channels, 4, 5) < 0.6).float() * 5
    with torch.no_grad():
        y = sf.Temporal(attention)(x)
    assert y.shape == x.shape
    # [T*B, heads, tokens, channels per head], as the paper writes q, k and v
    q, k, v = (
        seen[name].flatten(2).view(-1, heads, channels // heads, 20).transpose(2, 3)
        for name in ("q", "k", "v")
    )
    assert q.any()
    assert k.any()
    assert v.any()
    wanted = ((q @ k.transpose(2, 3)) @ v * 0.25).transpose(2, 3).reshape(6, channels, 4, 5)
    assert torch.equal(received[0], wanted)


def test_half_the_threshold_is_twice_the_scale() -> None:
    x = torch.randint(0, 9, (16, 1, 100)) * 0.125
    paper = sf.LIF(decay=0.5, threshold=0.5, decay_input=True)
    assert torch.equal(paper(x), sf.LIF(decay=0.5, decay_input=True)(2 * x))


def test_channels_that_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="channels is 100: expected a multiple of 8"):
        spikformer(sf.LIF, 3, 10, (32, 32), channels=100)
    with pytest.raises(ValueError, match="num_heads is 7: expected a divisor of the 384 channels"):
        spikformer(sf.LIF, 3, 10, (32, 32), num_heads=7)
