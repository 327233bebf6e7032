"""Run a single neuron in the eager loop, in float64."""

from __future__ import annotations

import torch

from spikefuse import Neuron


def trace(neuron: Neuron, *inputs: float) -> tuple[list[float], list[list[float]]]:
    """Return the spikes and the states after each step."""
    x = torch.tensor(inputs, dtype=torch.float64)[:, None]
    spikes, states = [], None
    history = []
    for step in x:
        s, states = neuron(step[None], state=states, return_state=True, impl="reference")
        spikes.append(s.item())
        history.append([state.item() for state in states])
    return spikes, history


def gradient(neuron: Neuron, *inputs: float) -> list[float]:
    """Return the gradient of the sum of all spikes with respect to each input."""
    x = torch.tensor(inputs, dtype=torch.float64)[:, None].requires_grad_()
    neuron(x, impl="reference").sum().backward()
    assert x.grad is not None
    return x.grad[:, 0].tolist()
