"""States in fixed point: values by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import spikefuse as sf
from spikefuse.neurons.fixed_point import fixed_point
from spikefuse.testing import Backends, assert_matches_reference, make_input
from tests.neurons.traces import trace

BITS = -1, 1, True, "8", 2.5


def test_rounds_and_saturates() -> None:
    x = torch.tensor([-9.0, -1.2, -0.375, -0.125, -0.1, 0.1, 0.125, 0.7, 0.8, 9.0, torch.inf])
    y = fixed_point(x.requires_grad_(), torch.tensor(0.25), -4, 3)
    assert (4 * y).tolist() == [-4, -4, -1, 0, 0, 0, 1, 3, 3, 3, 3]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    assert fixed_point(torch.tensor(torch.nan), torch.tensor(0.25), -4, 3).isnan()


def test_gradient_at_the_bounds() -> None:
    x = torch.tensor([-1.0, 0.75], requires_grad=True)
    fixed_point(x, torch.tensor(0.25), -4, 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1]


def test_states_of_a_neuron() -> None:
    neuron = sf.IF(threshold=1.5, reset="soft")
    neuron.state_bits, neuron.v_step = 4, 0.25
    spikes, history = trace(neuron, 0.3, 0.3, 0.9, 4.0, -7.0, 0.4)
    assert spikes == [0, 0, 0, 1, 0, 0]
    assert history == [[0.25], [0.5], [1.5], [1.75], [-2.0], [-1.5]]
    x = torch.tensor([0.3, 0.3, 0.9, 4.0, -7.0, 0.4])[:, None]
    _, v = neuron(x, outputs=("spikes", "v"), impl="reference")
    assert v[:, 0].tolist() == [row[0] for row in history]


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize(
    ("bits", "step", "message"),
    [
        *((b, 0.25, "state_bits is .*: expected an integer of at least 2, or 0") for b in BITS),
        *((8, s, "v_step is .*: expected a positive finite number") for s in (0.0, -1, torch.nan)),
        (8, "x", "v_step is 'x': expected a number"),
        (8, None, r"state_bits is 8, but IF has no v_step: .*neuron\.v_step = 1 / 64"),
    ],
)
def test_wrong_bits_and_steps(bits: Any, step: Any, message: str, impl: str) -> None:
    neuron = sf.IF()
    neuron.state_bits, neuron.v_step = bits, step
    with pytest.raises((TypeError, ValueError), match=message):
        neuron(torch.ones(2, 1, 1), impl=impl)
    neuron.state_bits = 0
    assert neuron(torch.ones(2, 1, 1), impl="reference").sum() == 2


class Own(sf.Neuron):
    """A user's neuron: two inputs, outputs and states, one of which does not start at 0."""

    v, w = sf.State(0.25), sf.State()

    def __init__(self) -> None:
        super().__init__()
        self.rho, self.surrogate = 0.9, sf.surrogate.Arctan()

    def step(self, x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        h = self.rho * v + x - w
        s = self.surrogate(h - 0.5)
        return (s, h), (h * (1 - s), 0.8 * w + s * y)


def test_kernels_equal_the_reference(backends: Backends) -> None:
    neuron = Own()
    neuron.state_bits, neuron.w_step = 6, 0.125
    neuron.v_step = torch.tensor(0.0625)
    inputs = [make_input((19, 2, 3, 17), device=backends.device, seed=seed) for seed in (1, 2)]
    neuron.to(backends.device)
    _, v, w = neuron(*inputs, outputs=("spikes", "v", "w"), impl="reference")
    assert (v.min(), w.min()) == (-2, -4)  # both saturate
    assert_matches_reference(neuron, inputs, backends.impls)
