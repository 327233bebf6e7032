"""Where a network is cut."""

import copy
import pickle

import pytest
import torch
from spikefuse.memory.segments import Segments
from torch import nn

import spikefuse as sf
from spikefuse.block.block import Block
from spikefuse.models import MODELS


class Residual(nn.Module):
    """Spikes with two readers, a norm of its own before a sum with two readers, dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = sf.LIF(), sf.LIF(), sf.LIF()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.left, self.left_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.right = nn.Conv2d(4, 4, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.drop, self.head = nn.Dropout(0.5), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        s = self.first(self.norm(self.stem(x)))
        z = self.left_norm(self.left(s)) + self.right(s)
        y = self.drop(self.second(z) * (self.scale * 2))
        return self.head(y + self.third(z))


def described(net):
    return {
        str(s.target): (
            [str(n) for n in s.inputs],
            "block"
            if s.block
            else "once"
            if not s.is_recomputed
            else "parts"
            if s.by_sample
            else "whole",
        )
        for s in Segments(net)
    }


def test_cut():
    net = sf.fuse(Residual())
    assert described(net) == {
        "first": (["x"], "block"),
        "add": (["first"], "whole"),
        "second": (["add"], "parts"),
        "mul_1": (["second"], "parts"),
        "drop": (["mul_1"], "once"),
        "third": (["add"], "parts"),
        # Dropout might have changed dim 0.
        "head": (["drop", "third"], "whole"),
    }
    parameters = {str(s.target): len(s.parameters) for s in Segments(net)}
    expected = {"first": 4, "add": 6, "second": 0, "mul_1": 1, "drop": 0, "third": 0, "head": 2}
    assert parameters == expected


def test_evaluation():
    """Nothing is random, and norms use no statistics of the batch."""
    assert described(sf.fuse(Residual()).eval()) == {
        "first": (["x"], "parts"),
        "add": (["first"], "parts"),
        "second": (["add"], "parts"),
        "third": (["add"], "parts"),
        "head": (["second", "third"], "parts"),
    }


def test_blocks_as_modules():
    block = Block(nn.BatchNorm2d(4), sf.LIF())
    found = list(Segments(nn.Sequential(nn.Conv2d(3, 4, 1), block)))
    assert [s.block.norms for s in found] == [(block.norm,)]


def test_models_are_cut_at_neurons():
    net = sf.fuse(MODELS["resnet18"](sf.LIF, 3, 10, (32, 32)))
    segments = list(Segments(net))
    # 17 neurons, the pooling after the first that a block and its shortcut read, and the output.
    assert len(segments) == 19
    assert sum(s.block is not None for s in segments) == 17


def test_a_copy_is_cut_anew():
    net = sf.fuse(sf.Temporal(Residual(), sf.memory.Checkpoint()))
    net(torch.randn(2, 3, 3, 5, 5))
    assert net._cache["segments"].fits(net.net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert "segments" not in other._cache
    net.eval()
    assert not net._cache["segments"].fits(net.net)


class Branching(nn.Sequential):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


REFUSED = {
    "fused": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), sf.LIF()),
    "trace as a whole": lambda: Branching(nn.Conv2d(3, 4, 1), sf.LIF()),
    "can't recompute '1', which works in place": lambda: nn.Sequential(
        sf.LIF(), nn.ReLU(inplace=True)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    net = sf.Temporal(REFUSED[message](), sf.memory.Checkpoint())
    x = torch.randn(2, 3, 3, 5, 5, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        net(x)
    with torch.no_grad():
        net(x)
