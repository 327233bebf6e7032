"""A scan in parts, of which others have the steps before and after: here, in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import spikefuse as sf
from spikefuse import compiler
from spikefuse.testing import LAYOUTS, lay_out, make_input, poisoned


class Ends:
    """One of two relays that share two queues, forth and back."""

    def __init__(self, is_first: bool, forth: deque[Tensor], back: deque[Tensor], count: int):
        self.is_first, self.is_last = is_first, not is_first
        self.forth, self.back, self.count = forth, back, count

    def parts(self, batch: int) -> list[slice]:
        return [slice(i * batch // self.count, (i + 1) * batch // self.count)
                for i in range(self.count)]  # fmt: skip

    def forward(self, received, run: Callable[[int], Sequence[Tensor]]) -> None:
        _run(None if self.is_first else self.forth, self.forth, received, run)

    def backward(self, received, run: Callable[[int], Sequence[Tensor]]) -> None:
        _run(None if self.is_last else self.back, self.back, received, run)


def _run(source, target, received, run) -> None:
    for i, tensors in enumerate(received):
        for x in tensors:
            x.copy_(source.popleft())
        results = run(i)
        if source is None:
            target.extend(x.clone() for x in results)


def in_two(neuron: sf.Neuron, x: Tensor, weights: Tensor, impl: str, count: int) -> list[Tensor]:
    """Output, gradients of the input and the parameters, by two relays that meet at a step."""
    forth, back = deque[Tensor](), deque[Tensor]()
    halves = [x[:20].detach().requires_grad_(), x[20:].detach().requires_grad_()]
    outputs = []
    for half, is_first in zip(halves, (True, False), strict=True):
        relay = Ends(is_first, forth, back, count)
        (y,), _, _ = compiler.scan(neuron, (half,), None, impl, False, relay)
        outputs.append(y)
    assert not forth
    (outputs[1] * weights[20:]).sum().backward()
    (outputs[0] * weights[:20]).sum().backward()
    assert not back
    found = [torch.cat([y.detach() for y in outputs]), torch.cat([h.grad for h in halves])]
    return [*found, *(p.grad for p in neuron.parameters())]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 3])
def test_two_relayed_scans_are_one(backends, layout, count):
    x = lay_out(make_input((37, 5, 2, 3, 4)), layout).to(backends.device)
    weights = make_input(x.shape, seed=1, device=backends.device)
    for impl in backends.impls:
        neuron = sf.PLIF(0.6, 0.3, channels=2).to(backends.device)
        whole = x.detach().clone().requires_grad_()
        y = neuron(whole, impl=impl)
        (y * weights).sum().backward()
        expected = [y.detach(), whole.grad, *(p.grad for p in neuron.parameters())]
        neuron.zero_grad()
        with poisoned():
            found = in_two(neuron, x, weights, impl, count)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_parts_are_written_where_they_lie():
    """No copy: the output of a part is a slice of the whole one, whatever its size."""
    x = make_input((9, 5, 64))
    relay = Ends(True, deque(), deque(), 2)
    (y,), states, _ = compiler.scan(sf.LIF(), (x,), None, "numba", True, relay)
    expected, finals, _ = compiler.scan(sf.LIF(), (x,), None, "numba")
    assert y.is_contiguous()
    assert torch.equal(y, expected[0])
    assert torch.equal(states[0], finals[0])
