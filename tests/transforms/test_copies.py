"""Transformations of pruned networks, whose weights have a gradient after training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import spikefuse as sf
from tests.transforms.clock_driven import LIFNode


def pruned(activation: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    """A network after a backward pass, and its input."""
    torch.manual_seed(0)
    conv, linear = nn.Conv2d(1, 6, 3, bias=False), nn.Linear(24, 3)
    prune.ln_structured(conv, "weight", 0.5, n=2, dim=0)
    prune.l1_unstructured(linear, "weight", 0.5)
    prune.random_unstructured(norm := nn.BatchNorm2d(6), "weight", 0.5)
    net = nn.Sequential(conv, norm, activation(), nn.AvgPool2d(2), nn.Flatten(), linear)
    x = torch.rand(8, 1, 6, 6)
    sf.Temporal(net)(sf.nn.encode.direct(x, 4)).sum().backward()
    with torch.no_grad():
        conv.weight_orig += 0.1  # so that a weight that is not computed anew is another
    return net.eval(), x


def nir_and_back(net: nn.Module, x: Tensor) -> nn.Module:
    pytest.importorskip("nir", reason="needs the extra nir")
    return sf.Temporal(sf.from_nir(sf.to_nir(net, x, dt=0.1), dt=0.1))


@pytest.mark.parametrize("transform", [lambda net, x: sf.exportable(net), nir_and_back])
def test_spiking_networks(transform: Callable[..., nn.Module]) -> None:
    net, x = pruned(lambda: sf.LIF(0.5, 0.2))
    temporal, x = sf.Temporal(net), sf.nn.encode.direct(x, 4)
    result = transform(temporal, x)
    torch.testing.assert_close(result(x), temporal(x))
    assert not any(name.endswith("_mask") for name, _ in result.named_buffers())
    assert prune.is_pruned(temporal)


def test_relu_networks() -> None:
    """Those of `spiking` remain pruned, and those of `from_ann` fold pruned norms."""
    net, x = pruned(nn.ReLU)
    with torch.no_grad():
        expected = net(x)
    converted = sf.from_ann(net, x, 64)
    y = converted(sf.nn.encode.direct(x, 64)).mean(0)
    assert (y - expected).norm() < 0.05 * expected.norm()
    assert not prune.is_pruned(converted)
    spiking = sf.Temporal(sf.spiking(net, lambda: sf.LIF(0.5, 0.2)))
    spiking(sf.nn.encode.direct(x, 4)).sum().backward()
    torch.optim.SGD(spiking.parameters(), 0.1).step()
    spiking(sf.nn.encode.direct(x, 4))
    for layer in (spiking.net[0], spiking.net[1], spiking.net[5]):
        assert (layer.weight == 0).float().mean() == 0.5


def test_binary_spikes() -> None:
    net, x = pruned(lambda: sf.IntegerLIF(0.5, 0.2))
    prune.random_unstructured(net.get_submodule("5"), "bias", 1)
    temporal, x = sf.Temporal(net), sf.nn.encode.direct(x, 4)
    binary = sf.unroll_integer_spikes(temporal, x)
    torch.testing.assert_close(binary(x), temporal(x))
    assert prune.is_pruned(temporal)
    assert not prune.is_pruned(binary)


def test_copies_of_networks_that_hold_states():
    net, x = nn.Sequential(nn.Linear(5, 5), LIFNode(v_threshold=0.1)), torch.randn(6, 2, 5)
    expected = torch.stack([net(step) for step in x])
    net[1].registered = {"v": net[1].v}  # as SpikingJelly 2.0.0
    net[1].register_buffer("mem", net[1].v, persistent=False)  # as snnTorch
    ours = sf.convert(net, copy=True)
    assert torch.equal(sf.Temporal(ours)(x), expected)
    assert ours[0].weight is not net[0].weight
    assert net[1].v.requires_grad
