"""Perceptrons and their options."""

from __future__ import annotations

import pytest
from torch import nn

import spikefuse as sf
from spikefuse.models.mlp import mlp, split_mlp, split_widths


def test_widths_of_the_split() -> None:
    assert [split_widths(n, 1)[0] for n in (2, 3, 4, 5)] == [735, 490, 367, 294]
    for num_layers in (2, 3, 4, 5):
        widths = split_widths(num_layers)
        assert len(widths) == num_layers
        assert 2_938 <= sum(widths) <= 2_944


@pytest.mark.parametrize(("num_layers", "scale"), [(1, 2), (6, 2), (2, 0)])
def test_a_wrong_split(num_layers: int, scale: int) -> None:
    with pytest.raises(ValueError, match="expected 2 to 5 layers and a scale of at least 1"):
        split_widths(num_layers, scale)


def test_the_split_has_no_norm() -> None:
    kinds = [type(m) for m in split_mlp(3)(sf.LIF, 1, 20, (1, 700))]
    assert kinds == [nn.Flatten, *[nn.Linear, sf.LIF] * 3, nn.Linear]


def test_hidden_layers_can_be_chosen() -> None:
    net = mlp(sf.IF, 1, 3, (2, 2), hidden=(5, 7, 6))
    assert [m.out_features for m in net if isinstance(m, nn.Linear)] == [5, 7, 6, 3]
