"""Which tensors are saved as bits, and when their memory is released."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import conv2d

import spikefuse as sf
from spikefuse import memory
from spikefuse.memory import spikes as spikes_module
from spikefuse.testing import make_input
from tests.memory.measuring import packings
from tests.memory.networks import POLICIES, SHAPE, SPIKES, assert_same, conv, step, wrapped


class Functional(nn.Module):
    """Spikes, and a function of them and of a weight."""

    def __init__(self, function, neuron=sf.LIF):
        super().__init__()
        self.conv, self.neuron, self.function = nn.Conv2d(5, 8, 3, padding=1), neuron(), function
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3))

    def forward(self, x):
        y = self.function(self.neuron(self.conv(x)), self.weight)
        return y if y.shape[0] == x.shape[0] else y.expand(x.shape[0], *y.shape[1:])


def test_spikes_are_freed(backends):
    """Spikes are freed while the network runs, their bits with the graph."""
    alive = []

    class Watched(nn.Module):
        def forward(self, y):
            alive.append([not storage.expired() for storage in spikes])
            return y

    net = wrapped(lambda: conv(nn.Conv2d(8, 4, 1), Watched()), device=backends.device)
    spikes, packed = [], []
    net.net[1].register_forward_hook(
        lambda m, i, y: spikes.append(StorageWeakRef(y.untyped_storage()))
    )
    save = spikes_module._BinaryTensor.save
    spy = lambda *args: packed.append(save(*args)) or packed[-1]  # noqa: E731
    with mock.patch.object(spikes_module._BinaryTensor, "save", spy):
        y = net(make_input(SHAPE, device=backends.device))
    assert alive == [[False]]
    storage = StorageWeakRef(packed.pop().bits.untyped_storage())
    assert not storage.expired()
    del y
    assert storage.expired()


def test_bits_of_a_dropped_output_are_freed(device):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = conv(nn.Conv2d(8, 4, 1))

        def forward(self, x):
            return self.part(x), (x * 2).sigmoid()

    packed = []
    net, x = wrapped(Heads, device=device), make_input(SHAPE, device=device).requires_grad_()
    save = spikes_module._BinaryTensor.save
    spy = lambda *args: packed.append(save(*args)) or packed[-1]  # noqa: E731
    with mock.patch.object(spikes_module._BinaryTensor, "save", spy):
        dropped, stays = net(x)
    storage = StorageWeakRef(packed.pop().bits.untyped_storage())
    del dropped
    assert storage.expired()
    assert stays.requires_grad


def test_no_layer_keeps_itself_alive(device):
    """Layers that save their own output, without a backward pass that would free it."""
    for layer in (nn.Sigmoid(), nn.Softmax(1), sf.LI()):
        net = wrapped(lambda layer=layer: conv(layer), device=device)
        y = net(make_input(SHAPE, device=device))
        storage = StorageWeakRef(y.untyped_storage())
        del y
        gc.collect()
        assert storage.expired()


VIEWS = {
    "itself": lambda s, w: conv2d(s, w),
    "flattened": lambda s, w: s.flatten(1) @ w.repeat(2, 1, 1, 1).flatten()[:768, None],
    "permuted": lambda s, w: s.permute(0, 2, 3, 1) * w[0, :, 0, 0],
    "one step": lambda s, w: conv2d(s[3:6], w).mean(0, keepdim=True),
    "some channels": lambda s, w: conv2d(s[:, 2:6], w[:, :4]),
    "broadcast": lambda s, w: conv2d(s[:, :1].expand(-1, 8, -1, -1), w),
    "detached": lambda s, w: conv2d(s.detach(), w),
    "several": lambda s, w: conv2d(s, w) + conv2d(s.transpose(2, 3), w).transpose(2, 3),
}


def packed_by(function, device):
    """The sizes of what the default policy packs; its results equal those of SaveAll()."""
    x = make_input(SHAPE, device=device)
    expected = step(wrapped(lambda: Functional(function), memory.SaveAll(), device), x)
    with packings() as seen:
        assert_same(step(wrapped(lambda: Functional(function), device=device), x), expected)
    return seen


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_a_packing(backends, name):
    assert packed_by(VIEWS[name], backends.device) == [SPIKES]


NOT_BINARY = {
    "changed in place": lambda s, w: conv2d(s.mul_(2), w),
    "changed in a view": lambda s, w: (s[0].add_(3), conv2d(s, w))[1],
    "changed without gradients": lambda s, w: (torch.no_grad()(s.mul_)(3), conv2d(s, w))[1],
    "copied": lambda s, w: conv2d(s + 0.5, w),
    "viewed as another dtype": lambda s, w: s.detach().view(torch.float16) * w[0, :, :1, :1].half(),
}


@pytest.mark.parametrize("name", NOT_BINARY)
def test_tensors_that_are_not_spikes_pass_unchanged(backends, name):
    assert packed_by(NOT_BINARY[name], backends.device) == []


NEURONS = {sf.RefractoryLIF: 1, sf.ALIF: 1, sf.TernaryLIF: 0, sf.IntegerLIF: 0, sf.LI: 0}


@pytest.mark.parametrize("neuron", NEURONS)
def test_only_outputs_proven_binary_are_packed(backends, neuron):
    net = wrapped(lambda: Functional(VIEWS["itself"], neuron), device=backends.device)
    with packings() as seen:
        step(net, make_input(SHAPE, device=backends.device))
    assert len(seen) == NEURONS[neuron]


def test_the_reference_and_small_tensors_pass_unchanged(backends):
    net = wrapped(lambda: Functional(VIEWS["itself"]), device=backends.device)
    x = make_input(SHAPE, device=backends.device)
    with packings() as seen:
        step(net, x, impl="reference")
        step(net, x[:, :, :, :4, :4])
    assert spikes_module.MIN_VALUES > 12 * 8 * 4 * 4
    assert seen == []


def test_in_place_changes_after_saving(backends):
    def change_spikes(s, w):
        y = conv2d(s, w)
        s.detach().zero_()
        return y

    def change_potentials(s, w):
        h = s * 0.5
        y = conv2d(h, w)
        h.detach().zero_()
        return y

    x = make_input(SHAPE, device=backends.device)
    expected = step(wrapped(lambda: Functional(VIEWS["itself"]), device=backends.device), x)
    assert_same(
        step(wrapped(lambda: Functional(change_spikes), device=backends.device), x), expected
    )
    for policy in POLICIES:
        net = wrapped(lambda: Functional(change_potentials), policy, backends.device)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(net, x)
