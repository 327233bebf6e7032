"""Networks for the tests of memory policies, and steps of their training."""

import contextlib

import torch
from torch import nn

import spikefuse as sf
from spikefuse import memory

# The policies for any network; tests/memory/test_checkpoint.py tests the one for fused networks.
POLICIES = (memory.SaveAll(), memory.Recompute(), memory.Bits())
SHAPE = (4, 3, 5, 8, 12)  # T, B, C, H, W of the input of Net and conv
SPIKES = 4 * 3 * 8 * 8 * 12  # of their first neuron


class Net(nn.Module):
    """Spikes with several readers, views of spikes, and sums that are not binary."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(5, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.first, self.second, self.third = sf.LIF(), sf.PLIF(0.5), sf.LIF()
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.pool, self.head = nn.AvgPool2d(2), nn.Linear(8 * 4 * 6, 7)

    def forward(self, x):
        s = self.first(self.stem(x))
        s = s + self.second(self.left(s) + self.right(s))
        return self.head(self.pool(self.third(s)).flatten(1))


def conv(*layers, channels=8):
    """A convolution of 5 channels, a neuron, and more layers."""
    return nn.Sequential(nn.Conv2d(5, channels, 3, padding=1), sf.LIF(), *layers)


# For images [3, 8, 8].
class Mixed(nn.Module):
    """A wide layer, pooling, a stride, all kinds of readers, a norm of its own, and a head."""

    def __init__(self, neuron=sf.LIF, drop=0.0):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), neuron()
        )
        self.pool = nn.MaxPool2d(2)
        self.left = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.right, self.join = nn.Conv2d(16, 8, 1), neuron()
        self.deep = nn.Sequential(neuron(), nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.wide = nn.Sequential(nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24, affine=False))
        self.last = neuron()
        self.drop, self.head = nn.Dropout(drop), nn.Linear(24 * 4 * 4, 5)

    def forward(self, x):
        y = self.pool(self.stem(x))
        y = self.join(self.left(y) + self.right(y)) + 0.5
        y = y + self.deep(y)
        return self.head(self.drop(self.last(self.wide(y))).flatten(1))


def wrapped(net, policy=None, device="cpu", dtype=torch.float32):
    """`net()` inside Temporal; always the same parameters."""
    torch.manual_seed(0)
    return sf.Temporal(net(), policy).to(device, dtype)


def fused(net, policy, device, **options):
    """`net(**options)` inside Temporal, fused; always the same parameters."""
    torch.manual_seed(0)
    return sf.fuse(sf.Temporal(net(**options), policy)).to(device)


def step(net, x, **keywords):
    """The output, and the gradients of input and parameters."""
    leaves = [x.detach().requires_grad_(), *net.parameters()]
    for leaf in leaves:
        leaf.grad = None
    y = net(leaves[0], **keywords)
    y.float().square().sum().backward()
    return [y.detach(), *(torch.tensor(0) if p.grad is None else p.grad for p in leaves)]


def train(net, x, cast=None, **keywords):
    """Output, gradients and running statistics after a step."""
    torch.manual_seed(1)
    context = contextlib.nullcontext() if cast is None else torch.autocast(x.device.type, cast)
    with context:
        found = step(net, x, **keywords)
    return [*found, *(b.clone() for b in net.buffers())]


def assert_same(found, expected):
    """Compare two lists of tensors bit for bit."""
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
