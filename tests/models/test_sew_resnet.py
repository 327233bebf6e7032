"""Connect functions, and zero initialization to the identity."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.models.sew_resnet import CONNECT, SpikeElementWise, sew_resnet18, sew_resnet50

A, B = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("connect", "expected"), [("ADD", [0, 1, 1, 2]), ("AND", [0, 0, 0, 1]), ("IAND", [0, 1, 0, 0])]
)
def test_connect(connect: str, expected: list[int]) -> None:
    assert CONNECT[connect](A, B).tolist() == expected


@pytest.mark.parametrize("build", [sew_resnet18, sew_resnet50])
@pytest.mark.parametrize("connect", CONNECT)
def test_zero_init_is_the_identity(build, connect: str) -> None:
    net = build(lambda: sf.IF(1.0), 1, 10, (8, 8), connect=connect, zero_init=True, stem="cifar")
    blocks = [m for m in net.modules() if isinstance(m, SpikeElementWise)]
    plain = [m for m in blocks if not len(m.shortcut)]
    assert 0 < len(plain) < len(blocks)
    channels = [m.branch[0].in_channels for m in plain]
    for block, width in zip(plain, channels, strict=True):
        spikes = (torch.rand(3, 2, width, 4, 4) < 0.3).float()
        assert torch.equal(sf.Temporal(block)(spikes), spikes)


def test_a_projection_spikes() -> None:
    block = next(
        m
        for m in sew_resnet18(sf.IF, 1, 10, (8, 8)).modules()
        if isinstance(m, SpikeElementWise) and len(m.shortcut)
    )
    assert [type(m) for m in block.shortcut] == [nn.Conv2d, nn.BatchNorm2d, sf.IF]


def test_an_unknown_connect_function() -> None:
    with pytest.raises(ValueError, match="connect is 'OR': expected one of ADD, AND, IAND"):
        sew_resnet18(sf.IF, 1, 10, (8, 8), connect="OR")
