"""Token attention against the paper's equation, and the sizes of the stages."""

from __future__ import annotations

import pytest
import torch

import spikefuse as sf
from spikefuse.models.blocks import Residual
from spikefuse.models.qkformer import TokenAttention, qkformer


def test_attention_selects_tokens() -> None:
    torch.manual_seed(0)
    heads, channels = 2, 8
    attention = TokenAttention(lambda: sf.IF(1.0), channels, heads).eval()
    seen = {}
    for name in ("q", "k", "neuron", "projection"):
        getattr(attention, name).register_forward_hook(
            lambda m, x, y, name=name: seen.update({name: (x[0], y)})
        )
    x = (torch.rand(1, 3, channels, 4, 5) < 0.6).float() * 5
    with torch.no_grad():
        assert sf.Temporal(attention)(x).shape == x.shape
    q, k = (seen[name][1].view(3, heads, 4, 20) for name in ("q", "k"))
    chosen = q.sum(2) >= 0.5  # the paper's threshold
    assert 0 < chosen.float().mean() < 1
    assert torch.equal(seen["neuron"][1][:, :, 0], chosen.float())
    assert torch.equal(seen["projection"][0].view_as(k), k * chosen[:, :, None])


@pytest.mark.parametrize(("stem", "expected"), [("cifar", [32, 16, 8]), ("imagenet", [8, 4, 2])])
def test_stages(stem: str, expected: list[int]) -> None:
    net = qkformer(sf.LIF, 1, 10, (32, 32), channels=64, stem=stem).eval()
    found = []
    for module in net:
        if isinstance(module, Residual) and len(list(module.shortcut.children())):
            module.register_forward_hook(lambda m, x, y: found.append(y.shape[1:]))
    with torch.no_grad():
        sf.Temporal(net)(torch.rand(1, 1, 1, 32, 32))
    widths = zip((16, 32, 64), expected, strict=True)
    assert found == [(width, side, side) for width, side in widths]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="stem is 'mnist': expected imagenet or cifar"):
        qkformer(sf.LIF, 1, 10, (28, 28), stem="mnist")
    with pytest.raises(ValueError, match="channels is 100: expected a multiple of 8"):
        qkformer(sf.LIF, 1, 10, (28, 28), channels=100)
    with pytest.raises(ValueError, match="num_heads is 5: expected a divisor of the 96 channels"):
        qkformer(sf.LIF, 1, 10, (28, 28), num_heads=5)
