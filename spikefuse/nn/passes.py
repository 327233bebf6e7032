"""The two passes of a block's backward, and the forward that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spikefuse.compiler.call import Call, Found
from spikefuse.kernels.norm import gradient_sums, revision
from spikefuse.kernels.place import Place
from spikefuse.nn.batch_norm import Ranks
from spikefuse.nn.normed import REVISION, VALUES

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Kernels:
    """The program of a neuron behind a norm."""

    name: str
    #: For each output, whether it is sure to be 0 or 1.
    binary: tuple[bool, ...]
    num_states: int
    backend: str
    #: Whether the statistics are the batch's.
    revises: bool
    rebuilds: bool
    scalars: list[float]
    #: Of the tensors that are run-time values, in the order of the program.
    labels: tuple[str, ...]
    #: Of those among them that belong to the neuron, the names there.
    own: tuple[str, ...]

    def tensors(self, given: Mapping[str, Tensor], own: Sequence[Tensor]) -> list[Tensor]:
        """The program's tensors, from those of the norm and the neuron's own."""
        rest = iter(own)
        return [given[label] if label in given else next(rest) for label in self.labels]


class Given(NamedTuple):
    """The tensors of a call, but for the weight of the norm, which the statistics contain."""

    inputs: Tensors
    states: Tensors
    shift: Tensor
    own: Tensors


@dataclass
class Job:
    """One call in training. Its methods work on the whole batch or on a part of it."""

    kernels: Kernels
    call: Call
    statistics: Tensor
    number: float | Tensor
    ranks: Ranks | None
    num_inputs: int
    num_states: int
    keeps_states: bool
    return_state: bool

    def params(self, given: Given, revision: Tensors) -> Any:
        """The program's tensors; `revision` is read by the gradient of the input only."""
        mean, scale, _, _ = self.statistics.unbind(0)
        values = (mean, scale, given.shift, *(revision or (mean, mean)))
        named = dict(zip((*VALUES, *REVISION), values, strict=True))
        return self.kernels.tensors(named, given.own)

    def forward(
        self, call: Call, given: Given, save: bool, bits: list[Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """(outputs, final states, stored states); see `Call.forward`."""
        params, what = self.params(given, ()), (save, self.return_state, bits)
        return call.forward(given.inputs, given.states, params, self.kernels.scalars, *what)

    def reduce(
        self,
        call: Call,
        given: Given,
        saved: Tensors,
        grads: Sequence[Tensor | None],
        needs_own: Sequence[bool],
        rebuild: bool,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The first pass: gradients of the initial states, and sums per neuron by the value whose
        gradient they make."""
        labels, sums = self.kernels.labels, self._summed(needs_own)
        none = [False] * self.num_inputs
        _, starts, totals = self._pass(call, given, (), saved, grads, none, sums, rebuild)
        return starts, dict(zip(compress(labels, sums), totals, strict=True))

    def revise(
        self,
        call: Call,
        given: Given,
        saved: Tensors,
        received: Tensors,
        starts: list[Tensor],
        found: dict[str, Tensor],
        needs_own: Sequence[bool],
    ) -> None:
        """Add to what `reduce` has returned, `starts` and `found`, what further gradients of the
        final states, `received`, make of it."""
        sums = self._summed(needs_own)
        values = self.params(given, ()), self.kernels.scalars, saved, received
        results: Found = [], starts, list(found.values())
        none = [False] * self.num_inputs
        call.revise_gradients(given.inputs, given.states, *values, none, sums, results)

    def _summed(self, needs_own: Sequence[bool]) -> list[bool]:
        """The values whose gradients the first pass sums."""
        owns = iter(needs_own)
        return [
            n in VALUES[1:] or (n.startswith("neuron.") and next(owns)) for n in self.kernels.labels
        ]

    def totals(self, call: Call, found: Mapping[str, Tensor]) -> Tensor:
        """What `gradient_sums` gives for the sums of a pass."""
        layout, number = call.layout, self.number
        inner, channels = layout.channel_inner, layout.channels
        place = Place(layout.num_neurons // (inner * channels), channels, inner)
        scale_sums, shift_sums = (found[name] for name in VALUES[1:])
        return gradient_sums(
            scale_sums, shift_sums, self.statistics, place, number, self.kernels.backend
        )

    def revision(self, totals: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """((offset, slope), gradient of the weight, gradient of the shift)."""
        offset, slope, by_weight, by_shift = totals
        if self.ranks is not None:
            everywhere = torch.stack((by_weight, by_shift))
            self.ranks.sum(everywhere)
            offset, slope = revision(everywhere[0], everywhere[1], self.statistics, self.number)
        return (offset, slope), by_weight, by_shift

    def write(
        self,
        call: Call,
        given: Given,
        saved: Tensors,
        grads: Sequence[Tensor | None],
        revision: Tensors,
        needs_inputs: Sequence[bool],
        rebuild: bool = False,
        into: Tensors | None = None,
    ) -> list[Tensor]:
        """The second pass: gradients of the inputs that need one, see `Call.differentiate`."""
        how = needs_inputs, [False] * len(self.kernels.labels), rebuild, into
        return self._pass(call, given, revision, saved, grads, *how)[0]

    def _pass(
        self,
        call: Call,
        given: Given,
        revision: Tensors,
        saved: Tensors,
        grads: Sequence[Tensor | None],
        *wanted: Any,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        params, num = self.params(given, revision), len(self.kernels.binary)
        results = (self.kernels.scalars, saved, grads[:num], grads[num:])
        return call.differentiate(given.inputs, given.states, params, *results, *wanted)

    def grad_own(
        self, call: Call, found: Mapping[str, Tensor], own: Tensors
    ) -> list[Tensor | None]:
        """Gradients of the neuron's own tensors, None where no sum was asked for."""
        names, layout = (f"neuron.{name}" for name in self.kernels.own), call.layout
        return [
            layout.reduce_to(found[n], p).to(p.dtype) if n in found else None
            for n, p in zip(names, own, strict=True)
        ]


class Training(torch.autograd.Function):
    """Backward is two passes over x and the incoming gradient: the first sums over each channel
    what flows through its statistics, the second writes the gradient of x."""

    @staticmethod
    def forward(
        ctx: Any, job: Job, bits: list[Tensor] | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        split, end = job.num_inputs, job.num_inputs + job.num_states
        _, shift, *own = tensors[end:]
        given = Given(tensors[:split], tensors[split:end], shift, own)
        outputs, finals, saved = job.forward(job.call, given, job.keeps_states, bits)
        ctx.save_for_backward(*given.inputs, *given.states, shift, *own, *saved)
        ctx.set_materialize_grads(False)
        ctx.job, ctx.num_own = job, len(own)
        return (*outputs, *finals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        job: Job = ctx.job
        tensors, call = ctx.saved_tensors, job.call
        split, end = job.num_inputs, job.num_inputs + job.num_states
        last = end + 1 + ctx.num_own
        given = Given(tensors[:split], tensors[split:end], tensors[end], tensors[end + 1 : last])
        rebuild = not job.keeps_states and call.num_saved > 0
        saved = call.stored() if rebuild else tensors[last:]
        _, _, *needs = ctx.needs_input_grad

        starts, found = job.reduce(call, given, saved, grads, needs[end + 2 :], rebuild)
        revision, grad_weight, grad_shift = job.revision(job.totals(call, found))
        grad_inputs: Iterator[Tensor] = iter(())
        if any(needs[:split]):
            grad_inputs = iter(job.write(call, given, saved, grads, revision, needs[:split]))
        dtype = given.shift.dtype
        return (
            *(None, None),
            *(next(grad_inputs) if wanted else None for wanted in needs[:split]),
            *(g.to(s.dtype) for g, s in zip(starts, given.states, strict=True)),
            grad_weight.to(dtype) if needs[end] else None,
            grad_shift.to(dtype) if needs[end + 1] else None,
            *job.grad_own(call, found, given.own),
        )


# That of torch.autograd.Function first looks for transforms, which `launch.check` has refused.
apply = super(torch.autograd.Function, Training).apply
