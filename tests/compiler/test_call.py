"""Which calls are one call, and what is left to differ between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import spikefuse as sf
from spikefuse.compiler.call import Call, call_of, spec
from spikefuse.compiler.program import kind_of, prepare
from spikefuse.testing import make_input

X = make_input((20, 2, 6))


def call(*inputs: Tensor, neuron: sf.Neuron | None = None) -> Call:
    neuron = sf.LIF() if neuron is None else neuron
    values, statics = neuron.describe()
    kinds = tuple((name, kind_of(value)) for name, value in values.items())
    return call_of(prepare(neuron, "numba", statics, kinds)[0], spec(inputs))


def test_values_make_no_other_call():
    assert call(X) is call(2 * X)
    assert call(X) is call(X, neuron=sf.LIF(0.25, 2.0))


@pytest.mark.parametrize(
    "other",
    [X[1:], X[:, 1:], X.bfloat16(), X.transpose(1, 2), X[:, :1].expand(20, 2, 6), X.to("meta")],
    ids=["steps", "batch", "dtype", "order", "strides", "device"],
)
def test_whatever_a_kernel_is_told_makes_another_call(other):
    assert call(X) is not call(other)


def test_what_a_call_allocates():
    made = call(X.bfloat16())
    outputs, finals, saved = made.results(save=True, final=True)
    assert [(t.shape, t.dtype) for t in outputs] == [(X.shape, torch.bfloat16)]
    assert [(t.shape, t.dtype) for t in finals] == [(X.shape[1:], torch.float32)]
    assert [(list(t.shape), t.dtype) for t in saved] == [([1, 12], torch.float32)]
    assert made.results(save=False, final=False)[1:] == ([], [])
    grads, starts, sums = made.gradients([True], True, [True, False, True])
    assert [(t.shape, t.dtype) for t in grads] == [(X.shape, torch.bfloat16)]
    assert [t.shape for t in starts] == [X.shape[1:]]
    assert [list(t.shape) for t in sums] == [[12], [12]]


def test_a_short_sequence_stores_no_states():
    outputs, finals, saved = call(X[:1]).results(save=True, final=True)
    assert (len(outputs), len(finals), len(saved)) == (1, 1, 0)


def test_gradients_of_one_call_may_lie_in_any_order(backends):
    neuron = sf.PLIF(channels=6, threshold=0.3)
    x = X.to(backends.device).requires_grad_()
    leaves = [x, *neuron.to(backends.device).parameters()]
    gradient = make_input(X.shape, device=backends.device, seed=1)
    orders = [
        gradient,
        gradient.transpose(0, 2).contiguous().transpose(0, 2),
        gradient.repeat(1, 1, 2)[..., :6],
        gradient,
    ]
    for impl in backends.impls:
        results = [torch.autograd.grad(neuron(x, impl=impl), leaves, g) for g in orders]
        for found in results[1:]:
            assert all(map(torch.equal, found, results[0]))
        sums = torch.autograd.grad(neuron(x, impl=impl).sum(), leaves)
        ones = torch.autograd.grad(neuron(x, impl=impl), leaves, torch.ones_like(x))
        assert all(map(torch.equal, sums, ones))
