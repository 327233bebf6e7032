"""What a network saves for backward under each policy; results do not depend on it."""

from __future__ import annotations

import threading
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import spikefuse as sf
from spikefuse import memory
from spikefuse.nn import call
from spikefuse.testing import DTYPES, make_input
from tests.memory.measuring import bytes_saved, packings
from tests.memory.networks import POLICIES, SHAPE, SPIKES, Net, assert_same, conv, step, wrapped


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_policies_give_the_same_numbers(backends, dtype, channels_last):
    x = make_input(SHAPE, dtype, backends.device)
    if channels_last:
        x = x.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, SHAPE[:2])
    expected = step(wrapped(Net, sf.memory.SaveAll(), backends.device, dtype), x)
    for policy in POLICIES:
        with packings() as seen:
            found = step(wrapped(Net, policy, backends.device, dtype), x)
        assert_same(found, expected)
        # The first neuron's spikes for two convolutions, and the third's for pooling.
        assert seen == ([SPIKES, SPIKES] if policy.packs_spikes else [])


def test_bytes(backends):
    x = make_input(SHAPE, device=backends.device)
    nets = {p: wrapped(lambda: conv(nn.Conv2d(8, 4, 1)), p, backends.device) for p in POLICIES}
    found = {p: bytes_saved(net, x) for p, net in nets.items()}
    saved = found[memory.SaveAll()][0] - found[memory.Recompute()][0]
    assert saved == SPIKES * 4 - SPIKES // 8
    assert found[memory.Recompute()][0] == found[memory.Bits()][0]


def test_backward_twice(backends):
    net = wrapped(Net, device=backends.device)
    y = net(make_input(SHAPE, device=backends.device)).sum()
    first = torch.autograd.grad(y, list(net.parameters()), retain_graph=True)
    assert_same(torch.autograd.grad(y, list(net.parameters())), first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(backends, reentrant):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.head = conv(nn.Conv2d(8, 8, 1), sf.LIF()), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return self.head(sf.checkpoint(self.part, x))

    x = make_input(SHAPE, device=backends.device)
    expected = step(wrapped(Inner, memory.SaveAll(), backends.device), x)
    net = wrapped(Inner, device=backends.device)
    with packings() as seen:
        assert_same(step(net, x), expected)
    assert seen == [SPIKES]  # what the head reads
    outer = mock.Mock(side_effect=lambda x: checkpoint(net, x, use_reentrant=reentrant))
    outer.parameters = net.parameters
    assert_same(step(outer, x), expected)


def test_a_surrounding_checkpoint_saves_nothing(backends):
    net = wrapped(Net, device=backends.device)
    x = make_input(SHAPE, device=backends.device)
    size, y = bytes_saved(net, x, lambda x: checkpoint(net, x, use_reentrant=False))
    assert size == y.nbytes


def test_other_hooks_take_precedence(backends):
    x = make_input(SHAPE, device=backends.device)
    net = wrapped(lambda: conv(nn.Conv2d(8, 4, 1)), device=backends.device)
    expected = step(net, x)
    theirs = []
    with torch.no_grad(), call.inside(None, packs_spikes=True):
        assert call.active.spikes is None
    with packings() as seen:
        with saved_tensors_hooks(lambda t: theirs.append(t.shape) or t, lambda t: t):
            assert_same(step(net, x), expected)
        with disable_saved_tensors_hooks("not here"):
            assert_same(step(net, x), expected)
        with torch.no_grad():
            assert torch.equal(net(x), expected[0])
        with torch.inference_mode():
            assert torch.equal(net(x), expected[0])
    assert (12, 8, 8, 12) in theirs
    assert seen == []


def test_neurons_in_inference_mode(backends):
    class Silent(nn.Sequential):
        def forward(self, x):
            with torch.inference_mode():
                s = self[1](self[0](x))
            return self[2](s.clone())

    net = wrapped(lambda: Silent(*conv(nn.Conv2d(8, 4, 1))), device=backends.device)
    x = make_input(SHAPE, device=backends.device)
    weight = net.net[2].weight
    found = torch.autograd.grad(net(x).square().sum(), weight)[0]
    expected = wrapped(lambda: conv(nn.Conv2d(8, 4, 1)), memory.SaveAll(), backends.device)
    assert torch.equal(
        found, torch.autograd.grad(expected(x).square().sum(), expected.net[2].weight)[0]
    )


def test_threads(backends):
    """Each call registers and packs its own spikes."""
    x = make_input(SHAPE, device=backends.device)
    expected = step(wrapped(Net, memory.SaveAll(), backends.device), x)
    nets = [wrapped(Net, policy, backends.device) for policy in POLICIES]
    found = {}

    def work(i):
        found[i] = [step(nets[i], x) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(nets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(len(nets)):
        for result in found[i]:
            assert_same(result, expected)


@pytest.mark.parametrize("part", [True, False])
def test_compiled(backends, part):
    x = make_input(SHAPE, device=backends.device)
    expected = step(wrapped(Net, device=backends.device), x)
    net = wrapped(Net, device=backends.device)
    names = ("left", "right") if part else ()
    if part:  # compiled modules read .grad of their inputs
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    for name in names:
        setattr(net.net, name, torch.compile(getattr(net.net, name), backend="aot_eager"))
    model = net if part else torch.compile(net, backend="aot_eager", fullgraph=True)
    with packings() as seen:
        found = step(model, x)
    # Compiled convolutions may sum in another order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert seen == ([SPIKES, SPIKES] if part else [])


def test_policies():
    flags = {name: (p.packs_spikes, p.saves_states) for name, p in memory.POLICIES.items()}
    expected = {"save-all": (False, True), "recompute": (True, False), "bits": (True, True)}
    assert flags == expected | {"checkpoint": (True, False)}
    for chunks in (0, 1.5, True):
        with pytest.raises(ValueError, match=r"chunks is .*: expected an integer"):
            memory.Checkpoint(chunks)
    assert repr(memory.Bits()) == "Bits()"


def test_invalid_policies():
    assert sf.Temporal(sf.LIF()).memory == sf.memory.Recompute()
    for given in ("bits", sf.memory.Bits, 1):
        with pytest.raises(TypeError, match=r"memory is .*: expected None or a policy"):
            sf.Temporal(sf.LIF(), memory=given)
