"""Linear layers whose inputs are spikes that are few."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from spikefuse.events import autograd as event_autograd
from spikefuse.events.candidates import with_candidates
from spikefuse.events.choice import Choice, choose
from spikefuse.events.format import Events
from spikefuse.nn.call import TemporalCall as Sequence
from spikefuse.nn.neuron import Neuron, backend_of, calls
from spikefuse.scan.op import Request
from spikefuse.scan.op import check as check_backend

IMPLEMENTATIONS = ("auto", "numba", "triton", "dense")
OVERFLOWS = ("drop", "dense", "raise")
NO_EVENTS = (
    "the neurons of an EventLinear can't share their time, since they hand no state to the next "
    "rank: share the neurons by shard_neurons, or use nn.Linear and the neuron"
)


@dataclass(frozen=True)
class Activity:
    """What an `EventLinear` was given in its last call.

    Attributes:
        sites: T B W.
        by_row: int32 `[T B]`: the spikes among them, on the device that counts them.
        spikes: int64, of one value: all of these, on the same device.
        fired: the same as a number. Reading it waits for a GPU, once.
        candidates: spikes, and neurons near the threshold, which carry a gradient.
        dropped: spikes above the capacity, which had no effect; they count in `fired`.
        dropped_candidates: candidates that did not fire, and got no gradient.
        choice: what the layer ran on, and why.
    """

    sites: int
    by_row: Tensor
    candidates: int
    dropped: int
    dropped_candidates: int
    choice: Choice

    @cached_property
    def spikes(self) -> Tensor:
        # Not before it is asked for: each layer's next product would wait for it.
        return self.by_row.sum()

    @cached_property
    def fired(self) -> int:
        return int(self.spikes)

    @property
    def rate(self) -> float:
        """Share of the sites that fired."""
        return self.fired / max(self.sites, 1)


class EventLinear(nn.Module):
    """A linear layer on spikes, and perhaps its neurons, whose work shrinks with activity.

    Equation, for each step and sample, with s the spikes of the inputs::

        y = bias + sum of weight[i] over the inputs i that fired (s[i] = 1)

    Weights begin as nn.Linear's, at which neurons behind spikes that are few may never fire, and
    nothing is learned: call `spikefuse.nn.scale_to_rate` on the first batch.

    `weight` is `[in_features, out_features]`, the transpose of nn.Linear's: the row of an input is
    contiguous. Backward reads and writes the rows of inputs that fired, and of inputs whose
    potential was near their threshold (`cutoff` of their surrogate), which are the only ones that
    carry a gradient: docs/events.md derives it. Without dropped events, outputs and gradients are
    those of nn.Linear and the same neuron, up to rounding.

    With `neuron`, the layer gives the `Events` of these neurons, for the next layer; on a CPU
    currents and potentials then never reach memory. Its surrogate needs a cutoff. Without, it gives
    the currents y.

    Call: `layer(x)`. x is `Events` of T steps and B samples, or dense spikes, 0 or 1: inside
    `Temporal` `[T*B, in_features]`, outside `[T, B, in_features]`; of dense spikes that require a
    gradient the whole gradient is computed, by a dense product. The result is `Events` with
    `neuron`, else currents `[T*B, out_features]`, outside Temporal `[T, B, out_features]`.

    Args:
        neuron: the neurons that receive y, or None.
        capacity: of each step and sample, the largest share of inputs whose events are used,
            in (0, 1]; None: no limit. Spikes come first, then candidates, each from the lowest
            index up.
        overflow: what becomes of a batch with more. "drop": the rest is left out: such a spike
            reaches no neuron here, and such an input gets no gradient from here. "dense": the
            batch is computed by dense products. "raise": a ValueError.
        sparse_grad: the gradient of `weight` is a sparse tensor with the rows of inputs that fired,
            for optimizers that take it: torch.optim.SGD, or `spikefuse.nn.RowAdam`.
        impl: "numba" (lists of events, CPU), "triton" (lists of events, GPU) or "dense" (matrix
            products); "auto": on a CPU lists up to an activity, on a GPU what turns out quicker
            when an activity is first met. `spikefuse.explain` tells.

    Source: Finkbeiner and Neftci, "Drastically Improved SNN-Training Throughput on the IPU by
    Utilizing Activation Sparsity".

    Raises:
        TypeError, ValueError: an argument or input is not as described.
    """

    #: The neuron with candidates, of the last call.
    _marking: Neuron | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        neuron: Neuron | None = None,
        *,
        bias: bool = True,
        capacity: float | None = None,
        overflow: str = "drop",
        sparse_grad: bool = False,
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
        if isinstance(neuron, type):
            raise TypeError(f"neuron is the class {neuron.__name__}: pass one, {neuron.__name__}()")
        if neuron is not None:
            with_candidates(neuron)  # whose errors should come now
        self.in_features, self.out_features, self.neuron = in_features, out_features, neuron
        self.capacity, self.overflow = capacity, overflow
        self.sparse_grad, self.impl = sparse_grad, impl
        self.weight = nn.Parameter(torch.empty(in_features, out_features, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, device=device)) if bias else None
        self.activity: Activity | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Linear does: uniform within 1 / sqrt(in_features)."""
        bound = 1 / math.sqrt(max(self.in_features, 1))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def limit(self) -> int:
        """Events of a step and sample that are used at most."""
        share = 1.0 if self.capacity is None else self.capacity
        return max(1, int(share * self.in_features))

    def extra_repr(self) -> str:
        options = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
        return f"{options}, capacity={self.capacity}, overflow={self.overflow!r}"

    def forward(self, x: Events | Tensor) -> Events | Tensor:
        # Not disabled as a whole: that would import all of Dynamo in the first call.
        return self._uncompiled(x) if torch.compiler.is_compiling() else self._run(x)

    @_disable_dynamo
    def _uncompiled(self, x: Events | Tensor) -> Events | Tensor:
        return self._run(x)

    def _run(self, x: Events | Tensor) -> Events | Tensor:
        sequence = calls.sequence
        if sequence is not None and not (self.neuron is None or id(self.neuron) in sequence.names):
            sequence = None
        self._check_weights()
        if isinstance(x, Events):
            dense, events = None, x
            if x.shape[2] != self.in_features:
                raise ValueError(
                    f"the events are of {x.shape[2]} sites: expected {self.in_features}"
                )
        else:
            dense = self._unfolded(x, sequence)
            events = Events.from_dense(dense)
        kept, impl = self._limited(events)
        if dense is not None and dense.requires_grad:
            impl = "dense"
            dense = dense if kept is events else dense * kept.to_dense(dense.dtype)
        else:
            dense = None
        if self.neuron is not None:
            return self._fire(self.neuron, kept, dense, impl, sequence)
        y = self._currents(kept, dense, impl)
        return y if sequence is None else y.flatten(0, 1)

    def _check_weights(self) -> None:
        for x in (self.weight, self.bias):
            if x is not None and x.dtype != torch.float32:
                raise TypeError(
                    f"the weights are {x.dtype}: layers on events compute in float32; convert them "
                    "with .float()"
                )
        if not self.weight.is_contiguous():
            raise ValueError(
                "the weights are not contiguous, and rows of them are read: store "
                "weight.contiguous()"
            )

    def __getstate__(self) -> dict[str, Any]:
        # The class of the neuron's copy is made as the program runs.
        return {name: value for name, value in self.__dict__.items() if name != "_marking"}

    def _unfolded(self, x: Tensor, sequence: Sequence | None) -> Tensor:
        """Dense spikes as `[T, B, in_features]`."""
        if not isinstance(x, Tensor):
            raise TypeError(f"the input is a {type(x).__name__}: expected Events or a tensor")
        dims = 3 if sequence is None else 2
        if x.ndim != dims or x.shape[-1] != self.in_features:
            raise ValueError(
                f"the spikes have shape {list(x.shape)}: expected [T, B, {self.in_features}], or "
                f"inside Temporal [T*B, {self.in_features}]"
            )
        return x if sequence is None else x.unflatten(0, (sequence.num_steps, -1))

    def _limited(self, events: Events) -> tuple[Events, str]:
        """The events within the capacity, and what they go through."""
        choice, kept = self._choose(events), events
        # To look costs a wait for a GPU, so only where a row can have more.
        if self.limit < self.in_features and events.num_rows:
            if self.overflow == "drop":
                kept = events.kept(self.limit)
            elif (most := int(events.offsets.diff().max())) > self.limit:
                if self.overflow == "raise":
                    raise ValueError(
                        f"a step of a sample has {most} events, but of {self.in_features} inputs "
                        f"the capacity {self.capacity} allows {self.limit}: raise it, or choose "
                        'overflow="drop" or "dense"'
                    )
                choice = Choice("dense", "more events than the capacity")
        dropped = kept.dropped - events.dropped
        self.activity = Activity(
            sites=events.num_rows * self.in_features,
            by_row=events.fired,
            candidates=len(events.indices),
            dropped=dropped,
            dropped_candidates=len(events.indices) - len(kept.indices) - dropped,
            choice=choice,
        )
        return kept, choice.impl

    def _choose(self, events: Events) -> Choice:
        if self.impl != "auto":
            if self.impl != "dense":
                check_backend(self.impl, events.indices)
            return Choice(self.impl, "asked for")
        return choose(events, self.out_features, self._try)

    def _try(self, impl: str, events: Events) -> None:
        """Forward and backward, for their time only."""
        with torch.enable_grad():
            y = self._currents(events, None, impl)
            values = [] if events.values is None else [events.values]
            leaves = [*values, *self.parameters(recurse=False)]
            torch.autograd.grad(y, leaves, y.detach())

    def _currents(self, events: Events, dense: Tensor | None, impl: str) -> Tensor:
        """`[T, B, out_features]`."""
        if impl != "dense":
            sparse = self.sparse_grad
            y = event_autograd.product(events, self.weight, self.bias, sparse, impl)
            return y.view(*events.shape[:2], self.out_features)
        spikes = events.to_dense() if dense is None else dense.float()
        y = spikes @ self.weight
        return y if self.bias is None else y + self.bias

    def _fire(
        self,
        neuron: Neuron,
        events: Events,
        dense: Tensor | None,
        impl: str,
        sequence: Sequence | None,
    ) -> Events:
        if sequence is not None and sequence.passing is not None:
            raise ValueError(NO_EVENTS)
        if events.shape[0] == 0:
            raise ValueError(
                f"the input has shape {list(events.shape)}: expected [T, B, {self.in_features}] "
                "with T >= 1"
            )
        name, marking = "", with_candidates(neuron, self._marking)
        self.__dict__["_marking"] = marking  # no module of this one
        state, keep, backend = None, False, "auto"
        if sequence is not None:
            name, keep, backend = sequence.names[id(neuron)], sequence.final, sequence.impl
            state = None if sequence.initial is None else sequence.initial[name]
        from_rest = state is None and not keep and backend in ("auto", "numba")
        if impl == "numba" and from_rest and event_autograd.can_fuse(marking, self.weight):
            bias, sparse = self.bias, self.sparse_grad
            return self._given(event_autograd.layer(events, marking, self.weight, bias, sparse))
        currents = (self._currents(events, dense, impl),)
        backend = backend_of(currents, backend)
        (marks,), final = marking._scan(Request(currents, state, backend, keep))
        if sequence is not None:
            sequence.finals[name] = final
        return self._listed(marks)

    # What the layer gives of its neurons' marks, or of their events: of a layer that is shared out
    # those of all ranks.

    def _listed(self, marks: Tensor) -> Events:
        return event_autograd.listed(marks)

    def _given(self, events: Events) -> Events:
        return events
