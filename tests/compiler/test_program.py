"""Which calls share kernels, and which must not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spikefuse import LIF, Neuron


def test_a_value_may_be_a_float_or_a_tensor() -> None:
    x = torch.linspace(-1, 2, 24).view(4, 2, 3)
    expected = LIF(decay=0.25, threshold=0.75)(x)
    assert expected.any()
    for decay, threshold in ((0.25, torch.tensor(0.75)), (torch.tensor(0.25), 0.75)):
        assert torch.equal(LIF(decay=decay, threshold=threshold)(x), expected)


def test_equal_kernels_forward_but_not_backward() -> None:
    class Gain(Neuron):
        def __init__(self, learned: bool) -> None:
            super().__init__()
            self.gain, self.learned = nn.Parameter(torch.tensor(2.0)), learned

        def step(self, x: Tensor) -> tuple[Tensor, tuple[()]]:
            return x * (self.gain if self.learned else self.gain.detach()), ()

    x = torch.ones(3, 4)
    found = []
    for learned in (False, True):
        neuron = Gain(learned)
        neuron(x).sum().backward()
        assert neuron.gain.grad is not None
        found.append(neuron.gain.grad.item())
    assert found == [0.0, 12.0]
