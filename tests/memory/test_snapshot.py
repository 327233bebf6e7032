"""Changes between forward and a backward pass that recomputes the network."""

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.memory import Checkpoint
from spikefuse.testing import make_input
from tests.memory.networks import Mixed, fused

SHAPE = (4, 6, 3, 8, 8)  # T, B, C, H, W


def test_parameters_changed_before_backward(backends):
    net = fused(Mixed, Checkpoint(), backends.device)
    y = net(make_input(SHAPE, device=backends.device)).sum()
    with torch.no_grad():
        net.net.right.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


class Scaled(nn.Module):
    """All that backward reads of a network: statistics, a decay, a setting, an attribute."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.lif, self.last = sf.LIF(decay=torch.tensor(0.5)), sf.LIF()
        self.register_buffer("gain", torch.tensor(2.0))

    def forward(self, x):
        return self.last(self.lif(self.bn(self.conv(x))) * self.gain)


CHANGES = {
    "LIF.decay": lambda n: n.lif.decay.mul_(0.2),
    "LIF.threshold": lambda n: setattr(n.lif, "threshold", 0.5),
    "LIF.detach_reset": lambda n: setattr(n.last, "detach_reset", True),
    "LIF.surrogate": lambda n: setattr(n.last, "surrogate", sf.surrogate.Triangle()),
    "FusedBatchNorm2d.running_mean": lambda n: n.bn.running_mean.add_(1),
    "FusedBatchNorm2d.eps": lambda n: setattr(n.bn, "eps", 0.1),
    "Scaled.gain": lambda n: n.gain.mul_(2),
    "Conv2d.weight": lambda n: setattr(n.conv, "weight", nn.Parameter(n.conv.weight * 2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_before_backward(name, backends):
    net = fused(Scaled, Checkpoint(), backends.device).eval()
    y = net(make_input(SHAPE, device=backends.device)).sum()
    with torch.no_grad():
        CHANGES[name](net.net)
    with pytest.raises(RuntimeError, match=rf"{name} was changed between forward and backward"):
        y.backward()


@pytest.mark.parametrize("training", [True, False])
def test_what_backward_does_not_read_may_change(training, backends):
    """A second call may update running statistics. Backward uses the modes of the first call."""
    x, found = make_input(SHAPE, device=backends.device), []
    for change in (False, True):
        net = fused(Scaled, Checkpoint(), backends.device).train(training)
        y = net(x).sum()
        if change:
            net(x * 2)
            net.train(not training)
        y.backward()
        assert net.net.bn.training == (training != change)
        found.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, *found))
