"""Stems and residual sums."""

from __future__ import annotations

import pytest
import torch

import spikefuse as sf
from spikefuse.models.resnet import ms_resnet18, ms_resnet34, resnet18, stem_layers


def test_stems() -> None:
    x = torch.rand(1, 2, 3, 32, 32)
    shapes = []
    for stem in ("imagenet", "cifar"):
        layers = sf.Temporal(torch.nn.Sequential(*stem_layers(sf.LIF, 3, stem)))
        shapes.append(tuple(layers(x).shape[2:]))
    assert shapes == [(64, 8, 8), (64, 32, 32)]


def test_an_unknown_stem() -> None:
    with pytest.raises(ValueError, match="stem is 'mnist': expected imagenet or cifar"):
        resnet18(sf.LIF, 1, 10, (28, 28), stem="mnist")


def test_neuron_after_a_residual_sum_receives_the_sum() -> None:
    net = resnet18(sf.LIF, 1, 10, (8, 8), stem="cifar")
    block, received = net[3], []
    block.activation.register_forward_pre_hook(lambda m, x: received.append(x[0]))
    x = torch.rand(2, 64, 8, 8)
    block.eval()
    with torch.no_grad():
        sf.Temporal(block)(x[None])
        branch = sf.Temporal(block.branch)(x[None])[0]
    torch.testing.assert_close(received[0], branch + x)


def test_ms_resnet_on_small_images() -> None:
    """Its stages have the sizes of a ResNet18 for CIFAR-10, and as many parameters."""
    net, usual = (make(sf.LIF, 3, 10, (32, 32), stem="cifar") for make in (ms_resnet18, resnet18))
    sizes = []
    for layer in net[:-4]:
        layer.register_forward_hook(lambda m, x, y: sizes.append(y.shape[-1]))
    with torch.no_grad():
        assert sf.Temporal(net.eval())(torch.rand(2, 1, 3, 32, 32)).shape == (2, 1, 10)
    assert sizes == [32] * 4 + [16] * 2 + [8] * 2 + [4] * 2
    counts = [sum(p.numel() for p in n.parameters()) for n in (net, usual)]
    assert counts == [11173962, 11173962]
    with pytest.raises(ValueError, match="stem is 'mnist': expected imagenet or cifar"):
        ms_resnet18(sf.LIF, 1, 10, (28, 28), stem="mnist")


def test_shortcuts_of_ms_resnet_do_not_spike() -> None:
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
