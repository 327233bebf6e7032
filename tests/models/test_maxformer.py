"""Max-Former: what its stages mix tokens with, and spikes into every layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.models.maxformer import maxformer


def test_layers_receive_spikes() -> None:
    torch.manual_seed(0)
    sizes: list[tuple[int, ...]] = []
    seen: dict[str, torch.Tensor] = {}
    net = maxformer(
        lambda: sf.LIF(threshold=0.3), 1, 10, (32, 32), (1, 1, 1), channels=32, num_heads=2
    )
    layers = {label: m for label, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    for label, layer in layers.items():
        layer.register_forward_hook(lambda m, x, y, label=label: seen.update({label: x[0]}))
    for module in net:
        module.register_forward_hook(lambda m, x, y: sizes.append((*y.shape[1:],)))
    sf.Temporal(net)(torch.rand(2, 2, 1, 32, 32))
    assert [label for label, x in seen.items() if not set(x.unique().tolist()) <= {0.0, 1.0}] == [
        "0"
    ]
    expected = [(4, 16, 16), (8, 8, 8), (16, 4, 4), (32, 2, 2), (32, 1, 1), (32,), (10,)]
    assert [*dict.fromkeys(sizes)] == expected
    depthwise = [
        m.kernel_size for m in layers.values() if isinstance(m, nn.Conv2d) and m.groups > 1
    ]
    assert depthwise == [(7, 7), (5, 5)]


def test_channels_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="channels is 36: expected a multiple of 8"):
        maxformer(sf.LIF, 3, 10, (32, 32), channels=36)
    with pytest.raises(ValueError, match="num_heads is 5"):
        maxformer(sf.LIF, 3, 10, (32, 32), num_heads=5)
