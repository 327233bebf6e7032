"""Norm and neuron as one: `x -> batch norm -> (+ residual) -> neuron`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.neurons.definition import States
from spikefuse.nn.neuron import Neuron, calls


class Block(nn.Module):
    """`neuron(norm(x))`, or `neuron(norm(x) + residual)`."""

    def __init__(self, norm: _BatchNorm, neuron: Neuron) -> None:
        super().__init__()
        self.norm, self.neuron = norm, neuron

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        state: States | None = None,
        return_state: bool = False,
        impl: str = "auto",
    ) -> Any:
        y = self.norm(x)
        y = y if residual is None else y + residual
        return self.neuron(y, state=state, return_state=return_state, impl=impl)


def normed(norm: _BatchNorm, neuron: Neuron, x: Tensor, residual: Tensor | None = None) -> Any:
    """The same as a function of the two modules."""
    sequence = calls.sequence
    if sequence is not None and x.shape[0] == sequence.constant_rows:
        x = x.repeat(sequence.num_steps, *[1] * (x.ndim - 1))
    y = norm(x)
    return neuron(y if residual is None else y + residual)
