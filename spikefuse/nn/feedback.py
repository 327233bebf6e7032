"""Feedback through any module, one time step after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.neurons.definition import FIRST_OUTPUT, Neuron, States
from spikefuse.nn.neuron import (
    backend_of,
    call_neuron,
    check_inputs,
    check_module,
    checked_names,
    refuse_class,
    scan_neuron,
)
from spikefuse.nn.over_time import OnSequences
from spikefuse.nn.recurrent import NO_SHARDS
from spikefuse.nn.symbolic import leaf
from spikefuse.scan.records import Arguments, Results, Wanted


class Feedback(nn.Module):
    """Neurons whose spikes feed back through any module: a convolution, or several layers.

    Equation, for the input `x`, the spikes `s` and any module `body`::

        s[t] = neuron(x[t] + body(s[t - 1]))

    Time is an ordinary Python loop of T calls of `body` and of the neuron, whose kernels run one
    step at a time. `Recurrent`, for a matrix, takes one launch instead. `sf.graph_step` records the
    whole loop, which removes the cost of the calls on a GPU.

    Args:
        body: a module without states from the spikes of one step `[B, ...]` to a tensor of the same
            shape. It sees each step alone: a batch norm in training mode takes the statistics of
            one step.
        neuron: an instance of a neuron model with one input and one output.

    Call: `feedback(x, state=None, return_state=False, impl="auto", outputs=None)`

    Args:
        x: `[T, B, ...]`, inside `Temporal` `[T*B, ...]`.
        state: the states of the neuron and the last spikes, or None to start from rest.
        return_state: also return the final state.
        impl, outputs: of the neuron, see `Neuron`.

    Returns:
        The spikes, of the shape of `x`, or a tuple of `outputs`; with `return_state` a pair
        (output, state).

    Raises:
        TypeError, ValueError: an argument or input is not as described.
    """

    def __init__(self, body: nn.Module, neuron: Neuron) -> None:
        super().__init__()
        check_module("body", body)
        if any(isinstance(module, Neuron | OnSequences) for module in body.modules()):
            raise ValueError(
                "body contains a neuron, or a layer of several time steps, whose state would be "
                "lost after each step: use sf.Loop"
            )
        refuse_class("neuron", neuron)
        if not isinstance(neuron, Neuron) or len(type(neuron).input_names) != 1:
            raise TypeError(f"neuron is {neuron!r}: expected an instance of a neuron of one input")
        self.body, self.neuron = body, neuron

    @leaf
    def forward(
        self,
        x: Tensor,
        state: States | None = None,
        return_state: bool = False,
        impl: str = "auto",
        outputs: tuple[str, ...] | None = None,
    ) -> Any:
        names = () if outputs is None else checked_names(outputs)
        wanted = Wanted(return_state, outputs=names, impl=impl)
        return call_neuron(self.neuron, self.scan, Arguments((x,), state), wanted)

    def receive(self, x: Tensor, spikes: Tensor) -> Tensor:
        """Return what the neurons receive in one step, of the shape of `x`."""
        sent = self.body(spikes)
        if not isinstance(sent, Tensor):
            raise TypeError(
                f"body returned a {type(sent).__name__}: expected a tensor of the shape of the "
                f"spikes {list(x.shape)}; wrap a module with several results in one that returns "
                "a tensor"
            )
        if sent.shape != x.shape:
            raise ValueError(
                f"body returned {list(sent.shape)} for spikes {list(x.shape)}: expected the same "
                "shape"
            )
        return x + sent

    def scan(
        self, arguments: Arguments[Tensor], wanted: Wanted, neuron: Neuron | None = None
    ) -> Results[Tensor]:
        """Run the layer, perhaps with another neuron."""
        neuron = neuron or self.neuron
        (x,), state = arguments.inputs, arguments.states
        if arguments.passing is not None:
            raise ValueError(NO_SHARDS)
        backend = backend_of(arguments.inputs, wanted.impl)
        check_inputs(neuron, type(neuron).input_names, (x,), state, backend, ("spikes",))
        names = wanted.outputs and (FIRST_OUTPUT, *wanted.outputs)
        own: States | None = None
        spikes = torch.zeros_like(x[0])
        if state is not None:
            own, spikes = tuple(state[:-1]), state[-1].to(x.dtype)
        steps, step = [], Wanted(True, outputs=names, impl=backend)
        for now in x.unbind(0):
            received = self.receive(now, spikes).unsqueeze(0)
            results = scan_neuron(neuron, Arguments((received,), own), step)
            found, own = tuple(results.outputs), tuple(results.finals)
            if len(found) > 1 and not names:
                raise TypeError(f"neuron {neuron!r} has {len(found)} outputs: expected one")
            spikes = found[0].squeeze(0)
            steps.append(found[1:] if names else found)
        assert own is not None
        outputs = tuple(map(torch.cat, zip(*steps, strict=True)))
        end = spikes.to(torch.promote_types(x.dtype, torch.float32))
        return Results(outputs, (*own, end))
