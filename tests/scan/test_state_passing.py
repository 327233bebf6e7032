"""Scans of which other processes hold the steps before and after: here, all in one process."""

from __future__ import annotations

from collections import deque
from functools import partial

import pytest
import torch
from torch import Tensor

import spikefuse as sf
from spikefuse.kernels.bits import pack
from spikefuse.scan import op
from spikefuse.scan.records import Arguments, Wanted
from spikefuse.testing import DTYPES, LAYOUTS, lay_out, make_input, poisoned
from tests.definitions import DEFINITIONS
from tests.queues import Queues


def in_two(
    neuron: sf.Neuron,
    x: Tensor,
    weights: Tensor,
    impl: str,
    count: int,
    speculates: bool = False,
    at: int = 20,
) -> list[Tensor]:
    """Output, gradients of the input and the parameters, by two processes that meet at a step."""
    forth, back = deque[Tensor](), deque[Tensor]()
    halves = [x[:at].detach().requires_grad_(), x[at:].detach().requires_grad_()]
    outputs = []
    for half, is_first in zip(halves, (True, False), strict=True):
        passing = Queues(is_first, forth, back, count, speculates)
        arguments = Arguments((half,), passing=passing)
        outputs += op.scan(neuron, arguments, Wanted(impl=impl)).outputs
    assert not forth
    (outputs[1] * weights[at:]).sum().backward()
    (outputs[0] * weights[:at]).sum().backward()
    assert not back
    found = [torch.cat([y.detach() for y in outputs]), torch.cat([h.grad for h in halves])]
    return [*found, *(p.grad for p in neuron.parameters())]


def in_one(neuron: sf.Neuron, x: Tensor, weights: Tensor, impl: str) -> list[Tensor]:
    """The same in one process."""
    whole = x.detach().clone().requires_grad_()
    y = neuron(whole, impl=impl)
    (y * weights).sum().backward()
    found = [y.detach(), whole.grad, *(p.grad for p in neuron.parameters())]
    neuron.zero_grad()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("count", "speculates"), [(1, False), (3, False), (1, True), (2, True)])
def test_two_connected_scans_equal_one(backends, layout, count, speculates):
    x = lay_out(make_input((37, 5, 2, 3, 4)), layout).to(backends.device)
    weights = make_input(x.shape, seed=1, device=backends.device)
    for impl in backends.impls:
        neuron = sf.PLIF(0.6, 0.3, channels=2).to(backends.device)
        expected = in_one(neuron, x, weights, impl)
        with poisoned():
            found = in_two(neuron, x, weights, impl, count, speculates)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_speculative_scans_of_every_model_equal_one_scan(backends, turn):
    """Every model, those that never forget too: spikes to the last bit, and gradients, of which
    those of half precision are rounded twice. On a CPU, each model has one place of division."""
    for i, (name, make) in enumerate(DEFINITIONS.items()):
        if name in ("Gated", "StochasticLIF"):  # of several inputs
            continue
        if backends.device == "cpu" and i % 3 != turn:
            continue
        at = (1, 8, 18)[(i + i // 3 + turn) % 3]
        neuron, dtype = make(4, reset="hard").to(backends.device), DTYPES[(i + at) % 3]
        x = make_input((19, 3, 4, 10), dtype, backends.device)
        weights = make_input(x.shape, seed=1, device=backends.device)
        expected = in_one(neuron, x, weights, "triton")
        with poisoned():
            found = in_two(neuron, x, weights, "triton", 1, True, at)
        assert torch.equal(found[0], expected[0]), name
        for actual, wanted in zip(found[1:], expected[1:], strict=True):
            # Of half precision, what the first pass has rounded may nearly vanish in the sum.
            scale, rounding = wanted.abs().max().item(), 8 * torch.finfo(dtype).eps
            close = partial(torch.testing.assert_close, rtol=rounding, atol=rounding * scale)
            close(actual, wanted, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("speculates", [False, True])
def test_two_connected_scans_with_potentials_equal_one(backends, speculates):
    names, x = ("spikes", "v"), make_input((37, 5, 2, 3), device=backends.device)
    for impl in backends.impls:
        neuron = sf.LIF(0.9, 0.7)
        whole = x.clone().requires_grad_()
        expected = neuron(whole, impl=impl, outputs=names)
        expected[1].square().sum().backward()
        forth, back = deque[Tensor](), deque[Tensor]()
        halves = [x[:20].clone().requires_grad_(), x[20:].clone().requires_grad_()]
        found = []
        for half, is_first in zip(halves, (True, False), strict=True):
            passing = Queues(is_first, forth, back, 1, speculates)
            wanted = Wanted(outputs=names, impl=impl)
            found.append(op.scan(neuron, Arguments((half,), passing=passing), wanted).outputs)
        for y, pieces in zip(expected, zip(*found, strict=True), strict=True):
            assert torch.equal(torch.cat(pieces), y)
        for outputs in reversed(found):
            outputs[1].square().sum().backward()
        gradient = torch.cat([half.grad for half in halves])
        torch.testing.assert_close(gradient, whole.grad, rtol=1e-5, atol=1e-4)


def test_bits_are_repaired(backends):
    """Of the second half, whose first pass began from rest."""
    x = make_input((40, 4, 32), device=backends.device)
    states = deque([torch.full_like(x[0], 3.0)])
    passing = Queues(False, states, deque(), 1, True)
    arguments, wanted = Arguments((x,), passing=passing), Wanted(bits=True, impl="triton")
    (y,), _, _, bits, _ = op.scan(sf.LIF(0.9), arguments, wanted)
    (alone,), *_ = op.scan(sf.LIF(0.9), Arguments((x,)), Wanted(impl="triton"))
    assert not torch.equal(y, alone)
    assert len(bits) == 1
    assert torch.equal(bits[0], pack(y).bits)


def test_microbatches_are_written_in_place():
    """No copy: the output of a microbatch is a slice of the whole one, whatever its size."""
    x = make_input((9, 5, 64))
    wanted, passing = Wanted(final=True, impl="numba"), Queues(True, deque(), deque(), 2)
    (y,), states, *_ = op.scan(sf.LIF(), Arguments((x,), passing=passing), wanted)
    expected, finals, *_ = op.scan(sf.LIF(), Arguments((x,)), wanted)
    assert y.is_contiguous()
    assert torch.equal(y, expected[0])
    assert torch.equal(states[0], finals[0])
