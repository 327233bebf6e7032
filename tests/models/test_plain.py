"""Feedforward networks with and without batch norm, and their poolings."""

from __future__ import annotations

import pytest
from torch import nn

import spikefuse as sf
from spikefuse.models.plain import cifar_medium, vgg11


@pytest.mark.parametrize("norm", [True, False])
def test_batch_norm_or_biases(norm: bool) -> None:
    net = cifar_medium(sf.LIF, 3, 10, (32, 32), norm=norm)
    convolutions = [m for m in net if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [128, 128, 128, 256, 256, 512, 512]
    assert [m.stride[0] for m in convolutions] == [1, 1, 2, 1, 2, 1, 2]
    assert all((m.bias is None) == norm for m in convolutions)
    assert sum(isinstance(m, nn.BatchNorm2d | nn.BatchNorm1d) for m in net) == 9 * norm


def test_poolings_of_vgg() -> None:
    net = vgg11(sf.LIF, 3, 10, (40, 32), hidden=(), pooling="average")
    assert sum(isinstance(m, nn.AvgPool2d) for m in net) == 5
    assert not any(isinstance(m, nn.MaxPool2d) for m in net)
    assert net[-1].in_features == 512 * 2 * 1
    with pytest.raises(ValueError, match="pooling is 'mean': expected max or average"):
        vgg11(sf.LIF, 3, 10, (32, 32), pooling="mean")
