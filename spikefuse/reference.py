"""The eager time loop: the specification that every kernel is compared with.

It runs on any device and with any floating-point dtype. Arithmetic is in float64 for float64
inputs (used for error budgets) and in float32 for all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spikefuse.neurons.definition import (
    Neuron,
    Outputs,
    States,
    call_step,
    channel_view,
    first_states,
)
from spikefuse.neurons.description import bind


def scan(
    definition: Neuron,
    inputs: tuple[Tensor, ...],
    state: Sequence[Tensor] | None = None,
    weight: Tensor | None = None,
) -> tuple[Outputs, States]:
    """Run `definition` over dim 0 of `inputs` and return (outputs, final states).

    Args:
        inputs: tensors of the same shape `[T, B, ...]`, T >= 1.
        state: one tensor `[B, ...]` per declared state, or None to start from rest.
        weight: recurrent weights `[N, N]`, or `[heads, N / heads, N / heads]`. Each step adds
            `recurrent_current` of the first output of the previous step to the first input, which
            is `[T, B, N]`. The state has one more tensor at its end, that output.

    Returns:
        Outputs `[T, B, ...]` in the dtype of the inputs, states `[B, ...]` in that of the
        arithmetic.

    Raises:
        WrongResult: `step` does not return outputs and one new tensor per state.
        ValueError: a parameter is neither a scalar nor one value per channel.
    """
    like, dtype = inputs[0][0], inputs[0].dtype
    for x in inputs[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    values = {}
    for name, value in definition.values().items():
        if isinstance(value, float):
            values[name] = torch.full((), value, dtype=compute, device=like.device)
        else:
            values[name] = channel_view(name, value, like.shape).to(like.device, compute)
    bound = bind(definition, values)
    if state is None:
        state = first_states(definition, definition.values(), like.to(compute))
        if weight is not None:
            state = (*state, torch.zeros_like(like))
    states = tuple(s.to(compute) for s in state)
    recurrent = None if weight is None else weight.to(compute)

    steps = []
    for now in zip(*(x.unbind(0) for x in inputs), strict=True):
        xs = tuple(x.to(compute) for x in now)
        if recurrent is not None:
            # What is fed back is rounded to the dtype of the outputs.
            states, fed_back = states[:-1], states[-1].to(dtype).to(compute)
            xs = (xs[0] + recurrent_current(fed_back, recurrent), *xs[1:])
        outputs, states = call_step(bound, xs, states)
        if recurrent is not None:
            states = (*states, outputs[0].to(dtype).to(compute))
        steps.append(outputs)
    return tuple(_stack(series).to(dtype) for series in zip(*steps, strict=True)), states


def recurrent_current(spikes: Tensor, weight: Tensor) -> Tensor:
    """Return `spikes @ weight.T` for spikes `[B, N]`, head by head if there are heads."""
    if weight.ndim == 2:
        return spikes @ weight.t()
    heads = spikes.unflatten(1, (len(weight), -1))
    return torch.einsum("bhj,hij->bhi", heads, weight).flatten(1)


def _stack(series: tuple[Tensor, ...]) -> Tensor:
    """`torch.stack(series)`, but its strides are ambiguous for one channels-last sample."""
    return torch.stack(series) if len(series) > 1 else series[0].clone().unsqueeze(0)
