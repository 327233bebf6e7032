"""The passes of a block whose sequences are shared by several processes.

States travel as in `spikefuse.scan.state_passing`, in parts of the batch: forward once, backward in
the first pass, whose gradients of final states the second pass has at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from spikefuse.block.passes import Given, Job, Tensors
from spikefuse.scan.execution import Call
from spikefuse.scan.state_passing import Relay, both, calls_of, can_speculate, pass_on, scan_parts

#: Gradients of a part's initial states, and sums per neuron by the value whose gradient they make.
Sums = tuple[list[Tensor], dict[str, Tensor]]


@dataclass
class Part:
    """A part of the batch in backward."""

    rows: slice
    call: Call
    given: Given
    saved: Tensors
    #: Of the outputs and, behind them, of the final states.
    grads: list[Tensor | None] = field(default_factory=list)


@dataclass
class Shared:
    """One call in training, of which this process has some steps."""

    job: Job
    relay: Relay
    #: Gets the bits of the outputs, see `Call.forward`.
    bits: list[Tensor] | None = None
    #: How many initial and stored states of each part are kept.
    counts: list[tuple[int, int]] = field(default_factory=list)

    def forward(self, given: Given, save: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """(outputs, final states if asked for, states to keep for backward)."""
        job = self.job
        bits, self.bits = self.bits, None  # the caller's: not for as long as this lives
        tensors = given.inputs, given.states, job.params(given, ())
        save, scalars = save and job.keeps_states, job.kernels.scalars
        *results, self.counts = scan_parts(
            job.kernels.name, self.relay, *tensors, scalars, save, job.return_state, bits
        )
        outputs, finals, kept = results
        return outputs, finals, kept

    def backward(
        self,
        given: Given,
        kept: Tensors,
        grads: Sequence[Tensor | None],
        needs_inputs: Sequence[bool],
        needs_own: Sequence[bool],
    ) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor, list[Tensor | None]]:
        """Gradients of the inputs that need one, of the initial states if some were passed, of the
        weight and the shift of the norm, and of the neuron's own tensors."""
        job = self.job
        parts = list(self._parts(given, kept))
        rebuild = not job.keeps_states and parts[0].call.num_saved > 0
        received = [[] if self.relay.is_last else part.call.steps() for part in parts]
        begins: list[list[Tensor]] = []
        totals: list[Tensor] = []
        by_own: list[list[Tensor | None]] = []

        def sums(i: int, ends: Tensors) -> Sums:
            part = parts[i]
            part.grads = _of_part(part, job.call.num_outputs, grads, ends)
            if rebuild:
                part.saved = part.call.stored()
            return job.reduce(part.call, part.given, part.saved, part.grads, needs_own, rebuild)

        def mend(i: int, reduced: Sums) -> None:
            part = parts[i]
            at = part.call, part.given, part.saved, received[i]
            job.revise(*at, *reduced, needs_own)
            part.grads = _of_part(part, job.call.num_outputs, grads, received[i])

        def finish(i: int, reduced: Sums) -> list[Tensor]:
            call, (starts, found) = parts[i].call, reduced
            begins.append(starts)
            totals.append(job.totals(call, found))
            by_own.append(job.grad_own(call, found, given.own))
            return starts

        speculates = can_speculate(self.relay, [part.call for part in parts])
        pass_on(self.relay.backward, received, sums, mend if speculates else None, finish)
        revision, by_weight, by_shift = job.revision(reduce(add, totals))
        grad_inputs = job.call.gradients(needs_inputs, False, ())[0]
        for part in parts if grad_inputs else ():
            at = part.call, part.given, part.saved, part.grads
            into = [g[:, part.rows] for g in grad_inputs]
            job.write(*at, revision, needs_inputs, into=into)
        states = [torch.cat(found) for found in zip(*begins, strict=True)] if given.states else []
        owns = [None if g[0] is None else reduce(add, g) for g in zip(*by_own, strict=True)]
        return grad_inputs, states, by_weight, by_shift, owns

    def _parts(self, given: Given, kept: Tensors) -> Iterator[Part]:
        rows = self.relay.parts(given.inputs[0].shape[1])
        calls, rest = calls_of(self.job.kernels.name, given.inputs, rows), iter(kept)
        for part, call, x, counts in zip(rows, *calls, self.counts, strict=True):
            starts, stored = ([next(rest) for _ in range(n)] for n in counts)
            yield Part(part, call, Given(x, starts, given.shift, given.own), stored)


def _of_part(
    part: Part, num_outputs: int, grads: Sequence[Tensor | None], ends: Tensors
) -> list[Tensor | None]:
    """The gradients of a part's outputs, and of its final states with those that came, `ends`."""
    own = [None if g is None else g[part.rows] for g in grads[num_outputs:]]
    outer = [None if g is None else g[:, part.rows] for g in grads[:num_outputs]]
    return [*outer, *both(own, ends)]


class _SharedTraining(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Shared, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = _given(shared.job, [t if t is None else t.detach() for t in tensors])
        outputs, finals, kept = shared.forward(given, save=True)
        ctx.save_for_backward(*given.inputs, *given.states, given.shift, *given.own, *kept)
        ctx.set_materialize_grads(False)
        ctx.shared = shared
        return (*outputs, *finals)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        shared, tensors = ctx.shared, ctx.saved_tensors
        job = shared.job
        _, *needs = ctx.needs_input_grad
        split, end = job.num_inputs, job.num_inputs + job.num_states
        num = len(needs) - 1  # the weight of the norm is not kept
        given = _given(job, (*tensors[:end], None, *tensors[end:num]))
        how = needs[:split], needs[end + 2 :]
        found, states, by_weight, by_shift, own = shared.backward(given, tensors[num:], grads, *how)
        inputs, dtype = iter(found), given.shift.dtype
        return (
            None,
            *(next(inputs) if wanted else None for wanted in needs[:split]),
            *(g.to(s.dtype) for g, s in zip(states, given.states, strict=True)),
            by_weight.to(dtype) if needs[end] else None,
            by_shift.to(dtype) if needs[end + 1] else None,
            *own,
        )


def _given(job: Job, tensors: Sequence[Any]) -> Given:
    """The tensors of a call, which are inputs, states, weight, shift and the neuron's own."""
    split, end = job.num_inputs, job.num_inputs + job.num_states
    _, shift, *own = tensors[end:]
    return Given(tensors[:split], tensors[split:end], shift, own)


def train(
    job: Job, relay: Relay, tensors: Sequence[Any], bits: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs, final states) of this process's steps, with gradients of `tensors`."""
    shared = Shared(job, relay, bits)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        results = _SharedTraining.apply(shared, *tensors)
        end = job.call.num_outputs
        return list(results[:end]), list(results[end:])
    outputs, finals, _ = shared.forward(_given(job, tensors), save=False)
    return outputs, finals
