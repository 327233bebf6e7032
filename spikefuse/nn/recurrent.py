"""Layers of neurons that receive their own spikes of the previous time step."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse import reference
from spikefuse.neurons.checks import integer
from spikefuse.neurons.definition import FIRST_OUTPUT, Neuron, States, with_outputs
from spikefuse.nn.call import mark_binary, wants_bits
from spikefuse.nn.neuron import (
    backend_of,
    call_neuron,
    check_inputs,
    checked_names,
    from_rest,
    refuse_class,
)
from spikefuse.nn.symbolic import leaf
from spikefuse.scan.records import Arguments, Results, Wanted
from spikefuse.scan.recurrent import recurrent_scan

NO_SHARDS = (
    "the time of a layer with feedback can't be sharded, as it passes no state to other processes: "
    "use data parallelism"
)


class Recurrent(nn.Module):
    """Neurons whose spikes feed back into their layer, in one kernel over all time steps.

    Equation, for the input `x`, the spikes `s` and any neuron model::

        h[t] = x[t] + W s[t - 1] + bias
        s[t] = neuron(h[t])

    The layer has no weights for x: put `nn.Linear(..., features)` before it. If the neuron has
    several outputs, the first one is fed back; if it has several inputs, the first one receives the
    feedback. The fed-back output may be graded.

    The weight is initialized to a random orthogonal matrix, one for each head. A step of k spikes
    then adds a current with a root mean square of sqrt(k / features). With a bias, it starts at 0.

    Arithmetic is in float32. The weight is rounded to the dtype of the outputs, and the bias to
    that of x. Inside `torch.autocast`, inputs are converted to its dtype, as in `nn.Linear`. Sums
    of weights are computed in a different order than by `impl="reference"`, so that a neuron may
    spike at a different time where rounding decides; from its own spikes, each step equals the
    reference.

    Shapes: `x`, spikes: `[T, B, features]` (inside `Temporal` `[T*B, features]`), float32, bfloat16
    or float16; `weight`: `[features, features]` as in nn.Linear, `weight[i, j]` from neuron j to
    neuron i, or with heads `[heads, features / heads, features / heads]`; states: `[B, features]`.

    Example::

        layer = nn.Sequential(nn.Linear(700, 128), sf.Recurrent(sf.LIF(0.9), features=128))
        spikes = sf.Temporal(layer)(torch.rand(100, 32, 700))  # [100, 32, 128]

    Args:
        neuron: an instance of any neuron model.
        features: number of neurons.
        bias: whether to add a learnable bias to the input.
        heads: number of groups of neurons that are connected among themselves only.
        self_connections: whether a neuron receives its own spikes. Otherwise the diagonal of the
            weight has no effect and no gradient.
        device: of the weight and the bias.

    Call: `layer(x, ..., state=None, return_state=False, impl="auto", outputs=None)`

    Args:
        inputs: as many as the neuron takes, of one shape `[T, B, features]`.
        state: the states of the neuron `[B, features]`, then the fed-back output of the last step,
            or None to start from rest. A sequence in parts, each with the state of the part
            before, gives the result of one call bit for bit.
        return_state: also return the final state.
        impl, outputs: see `Neuron`.

    Returns:
        The output of the neuron, or a tuple of `outputs`; with `return_state` a pair (output,
        state).

    Raises:
        TypeError, ValueError: an argument or input is not as described.

    Source: Bittar and Garner, "A surrogate gradient spiking baseline for speech command
    recognition", Frontiers in Neuroscience 2022 (recurrent layers of adaptive LIF neurons).
    """

    def __init__(
        self,
        neuron: Neuron,
        features: int,
        *,
        bias: bool = False,
        heads: int = 1,
        self_connections: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        refuse_class("neuron", neuron)
        if not isinstance(neuron, Neuron):
            raise TypeError(f"neuron is {neuron!r}: expected a neuron, such as sf.LIF()")
        for state in neuron.states:
            if re.fullmatch("spikes|output[0-9]+", state):
                raise ValueError(
                    f"{type(neuron).__name__} has a state '{state}', which is the name of an "
                    "output: rename the state"
                )
        features, heads = integer("features", features), integer("heads", heads)
        if features % heads:
            raise ValueError(
                f"features is {features} and heads {heads}: expected a multiple of the heads"
            )
        self.neuron, self.features, self.heads = neuron, features, heads
        self.self_connections = bool(self_connections)
        width = features // heads
        shape = (width, width) if heads == 1 else (heads, width, width)
        self.weight = nn.Parameter(torch.empty(shape, device=device))
        self.bias = nn.Parameter(torch.empty(features, device=device)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight to an orthogonal matrix, and the bias to 0."""
        with torch.no_grad():
            for matrix in self.weight.view(self.heads, *self.weight.shape[-2:]):
                # PyTorch has no half-precision decomposition.
                matrix.copy_(nn.init.orthogonal_(matrix.float()))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        options = [str(self.features), f"bias={self.bias is not None}"]
        options += [f"heads={self.heads}"] if self.heads > 1 else []
        options += [] if self.self_connections else ["self_connections=False"]
        return ", ".join(options)

    @leaf
    def forward(
        self,
        *inputs: Tensor,
        state: States | None = None,
        return_state: bool = False,
        impl: str = "auto",
        outputs: tuple[str, ...] | None = None,
    ) -> Any:
        names = () if outputs is None else checked_names(outputs)
        wanted = Wanted(return_state, outputs=names, impl=impl)
        return call_neuron(self.neuron, self.scan, Arguments(inputs, state), wanted)

    def receive(self, x: Tensor, spikes: Tensor) -> Tensor:
        """Return what the neurons receive in one step, of the shape of `x`, `[B, features]`."""
        received = x + reference.recurrent_current(spikes, self.effective_weight((x,)))
        return received if self.bias is None else received + self.bias.to(x.dtype)

    def scan(
        self, arguments: Arguments[Tensor], wanted: Wanted, neuron: Neuron | None = None
    ) -> Results[Tensor]:
        """Run the layer, perhaps with another neuron."""
        neuron = neuron or self.neuron
        state, inputs = arguments.states, tuple(arguments.inputs)
        if arguments.passing is not None:
            raise ValueError(NO_SHARDS)
        backend = backend_of(inputs, wanted.impl)
        check_inputs(neuron, type(neuron).input_names, inputs, state, backend, ("spikes",))
        if inputs[0].ndim != 3 or inputs[0].shape[2] != self.features:
            raise ValueError(
                f"Recurrent: the input has shape {list(inputs[0].shape)}: expected "
                f"[T, B, {self.features}], or inside Temporal [T*B, {self.features}]"
            )
        kind = inputs[0].device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            inputs = tuple(x.to(dtype) for x in inputs)
        weight = self.effective_weight(inputs)
        if weight.device != inputs[0].device:
            raise ValueError(
                f"Recurrent: the weight is on {weight.device}, the input on "
                f"{inputs[0].device}: move the layer with layer.to(x.device)"
            )
        if self.bias is not None:
            inputs = (inputs[0] + self.bias.to(inputs[0].dtype), *inputs[1:])
        # What is fed back must be the first output.
        names = wanted.outputs and (FIRST_OUTPUT, *wanted.outputs)
        skipped = 1 if names else 0
        with torch.autocast(kind, enabled=False):
            if backend == "reference":
                selected = with_outputs(neuron, names)
                outputs, final = reference.scan(selected, inputs, state, weight)
                return Results(outputs[skipped:], final)
            wanted = Wanted(wanted.final, outputs=names, impl=backend)
            if state is None and (first := from_rest(neuron, Arguments(inputs)).states):
                state = (*first, torch.zeros_like(inputs[0][0]))
            results = recurrent_scan(neuron, Arguments(inputs, state), wanted, weight)
        if wants_bits(inputs[0]):
            mark_binary(results)
        return results._replace(outputs=results.outputs[skipped:])

    def effective_weight(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The weight `[heads, width, width]` in the dtype of the outputs."""
        dtype = inputs[0].dtype
        for x in inputs[1:]:
            dtype = torch.promote_types(dtype, x.dtype)
        weight = self.weight.view(self.heads, *self.weight.shape[-2:]).to(dtype)
        if self.self_connections:
            return weight
        diagonal = torch.eye(weight.shape[-1], dtype=torch.bool, device=weight.device)
        return weight.masked_fill(diagonal, 0.0)
