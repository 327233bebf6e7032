"""Spike-driven attention against its equation, spikes into every layer, and mergeable layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.models.spike_driven import (
    SpikeDrivenAttention,
    WideAttention,
    _separable,
    sdt,
    sdt_v2,
    sdt_v3,
)


def test_attention_selects_channels() -> None:
    torch.manual_seed(0)
    attention = SpikeDrivenAttention(lambda: sf.IF(1.0), 8).eval()
    seen = {}
    for name in ("q", "k", "v", "projection"):
        getattr(attention, name).register_forward_hook(
            lambda m, x, y, name=name: seen.update({name: (x[0], y)})
        )
    x = (torch.rand(1, 3, 8, 2, 2) < 0.5).float() * 4
    with torch.no_grad():
        assert sf.Temporal(attention)(x).shape == x.shape
    q, k, v = (seen[name][1] for name in ("q", "k", "v"))
    chosen = (k * v).sum((2, 3), keepdim=True) >= 0.5  # the paper's threshold
    assert 0 < chosen.float().mean() < 1
    assert torch.equal(seen["projection"][0], q * chosen)


def test_attention_with_wide_values() -> None:
    """Of integers, against its equation with one matrix of attention per head."""
    torch.manual_seed(0)
    attention = WideAttention(lambda: sf.IntegerLIF(0.0), 8, 2).eval()
    x = torch.randint(0, 5, (3, 8, 2, 2)).float()
    with torch.no_grad():
        y = sf.Temporal(attention)(x[None])[0]
        q, k, v = (
            torch.round(layers[:2](x).clamp(0, 4)).flatten(2).unflatten(1, (2, -1))
            for layers in (attention.q, attention.k, attention.v)
        )
        assert v.shape == (3, 2, 16, 4)
        heads = v @ (k.mT @ q)  # [channels of a head, tokens]
        total = torch.round((2 * 4**-0.5 * heads).clamp(0, 4)).reshape(3, 32, 2, 2)
        torch.testing.assert_close(y, attention.projection(total))
        assert 0 < (total > 0).float().mean() < 1


SMALL = {
    "sdt": lambda: sdt(lambda: sf.LIF(threshold=0.3), 1, 10, (16, 16), channels=16),
    "sdt_v2": lambda: sdt_v2(
        lambda: sf.LIF(threshold=0.3), 1, 10, (16, 16), (8, 8, 16, 16), (1, 1), 2
    ),
    "sdt_v3": lambda: sdt_v3(
        lambda: sf.LIF(threshold=0.3), 1, 10, (16, 16), (8, 8, 16, 16), (1, 1), 2
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_layers_receive_spikes(name: str) -> None:
    """All but those inside a merged layer, and the first."""
    torch.manual_seed(0)
    net, seen = SMALL[name](), {}
    layers = {label: m for label, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    for label, layer in layers.items():
        layer.register_forward_hook(lambda m, x, y, label=label: seen.update({label: x[0]}))
    sf.Temporal(net)(torch.rand(2, 2, 1, 16, 16))
    others = [label for label, x in seen.items() if not set(x.unique().tolist()) <= {0.0, 1.0}]
    merged = [label for label in others if label.endswith((".2", ".3")) and "branch.1." in label]
    # In sdt_v2, after a depthwise one.
    inverted = [label for label in others if label.endswith(".branch.5") and name == "sdt_v2"]
    assert set(others) == {"0", *merged, *inverted}
    assert len(merged) == 2 * 4 * 2 * (name == "sdt_v2")


@pytest.mark.parametrize("build", [sdt_v2, sdt_v3])
def test_tokens_have_16_pixels_where_stages_have_equal_channels(build) -> None:
    sizes = []
    net = build(sf.LIF, 1, 10, (32, 32), (8, 8, 8, 8), (1, 1), 2)
    for module in net:
        module.register_forward_hook(lambda m, x, y: sizes.append(y.shape[2:]))
    sf.Temporal(net)(torch.rand(1, 2, 1, 32, 32))
    assert [*dict.fromkeys(sizes)][:4] == [(16, 16), (8, 8), (4, 4), (2, 2)]


def test_separable_layers_merge_into_one_convolution() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*_separable(4)).double()
    with torch.no_grad():
        for norm in (layers[1], layers[4], layers[5]):
            for tensor in (norm.weight, norm.bias, norm.running_mean):
                tensor.uniform_(-1, 1)
    layers.eval()
    x = torch.rand(2, 4, 5, 6, dtype=torch.float64)
    with torch.no_grad():
        bias = layers(torch.zeros_like(x))
        assert torch.allclose(bias, bias[:, :, 2:3, 2:3].expand_as(bias))
        # One 3 x 3 convolution with zero padding: its weights are the response to an impulse.
        impulses = torch.zeros(4, 4, 5, 5, dtype=torch.float64)
        impulses[range(4), range(4), 2, 2] = 1
        response = layers(impulses) - bias[:1, :, :1, :1]
        weight = response[:, :, 1:4, 1:4].flip(2, 3).transpose(0, 1)
        merged = nn.functional.conv2d(x, weight, padding=1) + bias[:, :, :1, :1]
        torch.testing.assert_close(layers(x), merged)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="num_heads is 7: expected a divisor of the 256 channels"):
        sdt_v2(sf.LIF, 3, 10, (32, 32), num_heads=7)
