"""Linear layers whose inputs are sparse spikes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached, is_parametrized

from spikefuse.events import autograd
from spikefuse.events.candidates import with_candidates
from spikefuse.events.choice import Choice, choose
from spikefuse.events.format import Events
from spikefuse.neurons.checks import integer
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.call import TemporalCall, active
from spikefuse.nn.checkpoint import refuse_recomputation
from spikefuse.nn.neuron import backend_of, refuse_class, scan_neuron
from spikefuse.nn.symbolic import leaf
from spikefuse.scan.checks import call_untraced, check_backend, refuse_export, refuse_transforms
from spikefuse.scan.records import Arguments, Wanted

IMPLEMENTATIONS = ("auto", "numba", "triton", "dense")
OVERFLOWS = ("drop", "dense", "raise")
NO_EVENTS = (
    "the neurons of an EventLinear can't share their time with other processes, because they pass "
    "no state: shard the neurons with shard_neurons, or use nn.Linear and the neuron"
)


@dataclass(frozen=True)
class InputActivity:
    """Statistics of the input of an `EventLinear` in its last call.

    Attributes:
        sites: T B W.
        by_row: int32 `[T B]`, spikes of each row, on the device of the input.
        candidates: number of entries: spikes, and candidates that did not fire.
        dropped: spikes that exceeded the capacity and had no effect; included in `fired`.
        dropped_candidates: candidates that did not fire and got no gradient.
        choice: the implementation that the layer ran on, and why.
    """

    sites: int
    by_row: Tensor
    candidates: int
    dropped: int
    dropped_candidates: int
    choice: Choice

    @cached_property
    def spikes(self) -> Tensor:
        """The number of spikes, int64, one value on the device of the input."""
        # Lazy, because the layer's next product would wait for the sum.
        return self.by_row.sum()

    @cached_property
    def fired(self) -> int:
        """The number of spikes. The first read synchronizes with a GPU."""
        return int(self.spikes)

    @property
    def rate(self) -> float:
        """Share of the sites that fired."""
        return self.fired / max(self.sites, 1)


class EventLinear(nn.Module):
    """Apply a linear layer to sparse spikes, followed by neurons if given.

    Equation, for each step and sample, with s the spikes of the inputs::

        y = bias + sum of weight[:, i] over the inputs i that fired (s[i] = 1)

    The cost is proportional to activity. Backward reads and writes the weights of inputs that
    fired, and of inputs whose potential reached the `cutoff` of their surrogate, the only ones with
    a gradient: docs/events.md derives it. Without dropped events, outputs and gradients equal those
    of nn.Linear and the same neuron, up to rounding.

    `weight` is `[out_features, in_features]` as in nn.Linear, so that state dicts load both ways.
    Its strides are (1, out_features): the weights of an input are contiguous in memory. It is
    initialized like nn.Linear's. Neurons that read sparse spikes may then never fire, and learn
    nothing: call `spikefuse.nn.scale_to_rate` on the first batch.

    With `neuron`, the layer returns the neurons' `Events` for the next layer. On a CPU, currents
    and potentials are then never stored. Without `neuron`, the layer returns the currents y.

    Call: `layer(x)`. x is `Events` of T steps and B samples, or dense spikes of any dtype, 0 or 1,
    `[T, B, in_features]` (inside `Temporal` `[T*B, in_features]`). Dense spikes that require a
    gradient get the full gradient, by dense products. Currents are float32 `[T, B, out_features]`
    (inside `Temporal` `[T*B, out_features]`). Weights must be float32.

    Args:
        in_features, out_features, bias, device: as in nn.Linear.
        neuron: the neurons that receive y, or None. Takes one input, returns one binary spike, and
            its surrogate has a cutoff.
        capacity: for each step and sample, the largest share of inputs whose events are used, in
            (0, 1], or None for no limit. Spikes come first, then candidates, each in ascending
            order.
        overflow: policy for a batch that exceeds the capacity. "drop" ignores the excess: dropped
            spikes have no effect on this layer, and dropped inputs get no gradient from it. "dense"
            computes the batch by dense products. "raise" raises a ValueError.
        impl: "numba" (event lists, CPU), "triton" (event lists, GPU), "dense" (matrix products) or
            "auto": on a CPU lists up to a certain activity, on a GPU the faster of the two,
            measured when an activity first occurs. `spikefuse.explain` reports the choice.

    Source: Finkbeiner and Neftci, "Drastically Improved SNN-Training Throughput on the IPU by
    Utilizing Activation Sparsity".

    Raises:
        TypeError, ValueError: an argument or input is not as described.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        neuron: Neuron | None = None,
        *,
        bias: bool = True,
        capacity: float | None = None,
        overflow: str = "drop",
        impl: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if capacity is not None and not (isinstance(capacity, Real) and 0 < capacity <= 1):
            raise ValueError(f"capacity is {capacity!r}: expected a share in (0, 1], or None")
        if overflow not in OVERFLOWS:
            raise ValueError(f"overflow is {overflow!r}: expected one of {', '.join(OVERFLOWS)}")
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl is {impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
        refuse_class("neuron", neuron)
        if neuron is not None:
            with_candidates(neuron)  # raises its errors early
        self.in_features = integer("in_features", in_features, 0)
        self.out_features, self.neuron = integer("out_features", out_features, 0), neuron
        self.capacity, self.overflow = capacity, overflow
        self.impl = impl
        self.weight = nn.Parameter(torch.empty(in_features, out_features, device=device).t())
        self.bias = nn.Parameter(torch.empty(out_features, device=device)) if bias else None
        self.activity: InputActivity | None = None
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_check_weight)
        self.register_load_state_dict_post_hook(_restore_strides)

    def reset_parameters(self) -> None:
        """Initialize like nn.Linear: uniform in ±1 / sqrt(in_features)."""
        bound = 1 / math.sqrt(max(self.in_features, 1))
        for x in (self.weight, self.bias):
            if x is not None:
                nn.init.uniform_(x, -bound, bound)

    @property
    def limit(self) -> int:
        """The largest number of events used per step and sample."""
        share = 1.0 if self.capacity is None else self.capacity
        return max(1, int(share * self.in_features))

    def extra_repr(self) -> str:
        options = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
        return f"{options}, capacity={self.capacity}, overflow={self.overflow!r}"

    @leaf
    def forward(self, x: Events | Tensor) -> Events | Tensor:
        # A parametrized weight is computed once in a call.
        return call_untraced(cached()(self._run) if is_parametrized(self) else self._run, x)

    def _run(self, x: Events | Tensor) -> Events | Tensor:
        refuse_export()
        refuse_recomputation(self)
        call = active.call
        if call is not None and not (self.neuron is None or id(self.neuron) in call.names):
            call = None
        weight = self.kernel_weight()  # raises its errors early
        refuse_transforms([x, weight] if isinstance(x, Tensor) else [weight])
        spikes = None
        if not isinstance(x, Events):
            dense = self._unfold(x, call)
            x, spikes = Events.from_dense(dense), dense if dense.requires_grad else None
        elif x.shape[2] != self.in_features:
            raise ValueError(f"the events are of {x.shape[2]} sites: expected {self.in_features}")
        used, impl = self._apply_capacity(x)
        if spikes is not None and used is not x:
            spikes = spikes * used.to_dense(spikes.dtype)
        if self.neuron is not None:
            return self._fire(self.neuron, used, spikes, impl, call)
        y = self._currents(used, spikes, impl)
        return y if call is None else y.flatten(0, 1)

    def kernel_weight(self) -> Tensor:
        """Return the weight with the strides that kernels read: a copy, with history, of a weight
        that is computed, as by a parametrization, in other strides."""
        weight = self.weight
        for x in (weight, self.bias):
            if x is not None and x.dtype != torch.float32:
                raise TypeError(
                    f"the weights are {x.dtype}: layers on events compute in float32; convert them "
                    "with .float()"
                )
        if weight.t().is_contiguous():
            return weight
        if not isinstance(weight, nn.Parameter):
            return weight.t().contiguous().t()
        raise ValueError(
            f"the weight has strides {weight.stride()}, but kernels read the contiguous weights of "
            f"an input, strides (1, {self.out_features}): assign "
            "weight.data = weight.t().contiguous().t()"
        )

    def refuse_computed(self, task: str) -> None:
        """Raise a ValueError if the weight is not a parameter."""
        if not isinstance(self.weight, nn.Parameter):
            raise ValueError(
                "the weight of an EventLinear is computed, as by a parametrization, and cannot be "
                f"{task}: do this before registering it, or after removing it"
            )

    def _unfold(self, x: Tensor, call: TemporalCall | None) -> Tensor:
        """Return dense spikes as `[T, B, in_features]`."""
        if not isinstance(x, Tensor):
            raise TypeError(f"the input is a {type(x).__name__}: expected Events or a tensor")
        dims = 3 if call is None else 2
        if x.ndim != dims or x.shape[-1] != self.in_features:
            raise ValueError(
                f"the spikes have shape {list(x.shape)}: expected [T, B, {self.in_features}], or "
                f"inside Temporal [T*B, {self.in_features}]"
            )
        return x if call is None else x.unflatten(0, (call.num_steps, -1))

    def _apply_capacity(self, events: Events) -> tuple[Events, str]:
        """Return the events within the capacity, and the impl; record the activity."""
        choice, used = self._choose(events), events
        # Comparing lengths synchronizes with a GPU, so only if a row can exceed the capacity.
        if self.limit < self.in_features and events.num_rows:
            if self.overflow == "drop":
                used = events.truncate(self.limit)
            elif (longest := int(events.offsets.diff().max())) > self.limit:
                if self.overflow == "raise":
                    raise ValueError(
                        f"a step of a sample has {longest} events, but of {self.in_features} "
                        f"inputs the capacity {self.capacity} allows {self.limit}: raise it, or "
                        'choose overflow="drop" or "dense"'
                    )
                choice = Choice("dense", "more events than the capacity")
        dropped = used.dropped - events.dropped
        self.activity = InputActivity(
            sites=events.num_rows * self.in_features,
            by_row=events.fired,
            candidates=len(events.indices),
            dropped=dropped,
            dropped_candidates=len(events.indices) - len(used.indices) - dropped,
            choice=choice,
        )
        return used, choice.impl

    def _choose(self, events: Events) -> Choice:
        if self.impl == "auto":
            return choose(events, self.out_features, self._try)
        if self.impl != "dense":
            check_backend(self.impl, events.indices)
        return Choice(self.impl, "requested")

    def _try(self, impl: str, events: Events) -> None:
        """Run forward and backward, to be timed."""
        with torch.enable_grad():
            y = self._currents(events, None, impl)
            leaves = [events.values, self.weight, self.bias]
            needed = [x for x in leaves if x is not None and x.requires_grad]
            torch.autograd.grad(y, needed, y.detach())

    def _currents(self, events: Events, spikes: Tensor | None, impl: str) -> Tensor:
        """Return `[T, B, out_features]`.

        Args:
            spikes: the dense spikes if they need a gradient; then impl is ignored.
        """
        if impl != "dense" and spikes is None:
            kernels = autograd.kernels_of(impl)
            y = autograd.product(events, self.kernel_weight(), self.bias, kernels)
            return y.view(*events.shape[:2], self.out_features)
        y = (events.to_dense() if spikes is None else spikes.float()) @ self.weight.t()
        return y if self.bias is None else y + self.bias

    def _fire(
        self,
        neuron: Neuron,
        events: Events,
        spikes: Tensor | None,
        impl: str,
        call: TemporalCall | None,
    ) -> Events:
        if call is not None and call.passing is not None:
            raise ValueError(NO_EVENTS)
        if events.shape[0] == 0:
            raise ValueError(
                f"the input has shape {list(events.shape)}: expected [T, B, {self.in_features}] "
                "with T >= 1"
            )
        marking = with_candidates(neuron)
        state, final_wanted, backend = None, False, "auto"
        if call is not None:
            name = call.names[id(neuron)]
            final_wanted, backend = call.final, call.impl
            state = None if call.initial is None else call.initial.get(name) or None
        stateless = state is None and not final_wanted and backend in ("auto", "numba")
        on_lists = impl == "numba" and spikes is None
        if on_lists and stateless and autograd.can_fuse(marking, self.weight):
            layer = autograd.layer(events, marking, self.kernel_weight(), self.bias)
            return self._from_events(layer)
        currents = (self._currents(events, spikes, impl),)
        backend = backend_of(currents, backend)
        wanted = Wanted(final_wanted, impl=backend)
        results = scan_neuron(marking, Arguments(currents, state), wanted)
        if call is not None:
            call.finals[name] = tuple(results.finals)
        return self._from_marks(results.outputs[0])

    # Overridden by layers whose output has more neurons than they compute.

    def _from_marks(self, marks: Tensor) -> Events:
        return autograd.list_marks(marks)

    def _from_events(self, events: Events) -> Events:
        return events


def _check_weight(layer: EventLinear, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before a state dict is loaded: explain a weight that is transposed."""
    expected = layer.out_features, layer.in_features
    weight, errors = state_dict.get(f"{prefix}weight"), rest[-1]
    if weight is not None and weight.shape == expected[::-1] != expected:
        errors.append(
            f"{prefix}weight is {list(weight.shape)}: expected {list(expected)}, as in "
            "nn.Linear. Version 0.1 stored the transpose: transpose the weights of all "
            "EventLinear layers in the state dict, square ones included"
        )


def _restore_strides(layer: EventLinear, _: Any) -> None:
    """After a state dict was loaded: with assign=True, its tensor is the weight."""
    # Not `layer.weight`: reading a parametrized weight may change its buffers.
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    if weight is not None:
        weight.data = weight.t().contiguous().t()
