"""Neurons at the end of segments computed again for backward, a part of the batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from spikefuse.block.passes import Given, Job
from spikefuse.memory.microbatch import Part, rows, size
from spikefuse.memory.segment_values import Store, Values
from spikefuse.memory.segments import BlockCall, NeuronCall, Segment
from spikefuse.scan.execution import call_of, spec

Found = Sequence[Tensor | None]


class NeuronAgain:
    """What goes into a neuron for a part of the batch, and its gradient.

    It takes two steps, as layers before a neuron may need other processes for theirs, and those
    with the steps before can go on after the first one.
    """

    def __init__(self, store: Store, segment: Segment, called: NeuronCall, part: Part) -> None:
        self.called = called
        self.values = Values(store, segment, part, differentiable=True)
        self.inputs = self.values.sequences(called.inputs)
        #: Of the inputs, once `differentiate` has found them.
        self.grads: Found = ()

    def differentiate(
        self,
        states: Sequence[Tensor],
        grad: Tensor | None,
        ends: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> tuple[list[Tensor], Found]:
        """(gradients of the initial states, of the parameters).

        Args:
            states: the initial ones, none if the neuron began at rest.
            grad: of what it gives, folded.
            ends: gradients of its final states, if there are any.
        """
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in self.inputs]
        starts = [s.detach().requires_grad_() for s in states]
        y, finals = self.values.fire(self.called, inputs, starts, bool(ends))
        read = [x for x in inputs if x.requires_grad]
        grads = (_unfolded(grad, self.values.part), *ends)
        pairs = zip((y, *finals), grads, strict=True)
        found = iter(gradients(pairs, [*read, *starts, *parameters]))
        self.grads = [next(found) if x.requires_grad else None for x in inputs]
        begins = [(s, next(found)) for s in starts]
        return [torch.zeros_like(s) if g is None else g for s, g in begins], list(found)


class BlockAgain:
    """What goes into a block for a part of the batch, and the two passes of its backward.

    Args:
        given: the block's own tensors.
        states: the initial ones, none if the neuron began at rest.
    """

    def __init__(
        self,
        store: Store,
        segment: Segment,
        called: BlockCall,
        part: Part,
        job: Job,
        given: Given,
        states: Sequence[Tensor],
    ) -> None:
        self.job = job
        self.values = Values(store, segment, part, differentiable=True)
        self.inputs = self.values.sequences(called.inputs)
        inputs = tuple(x.detach() for x in self.inputs)
        self.given = given._replace(inputs=inputs, states=states)
        self.call = call_of(job.kernels.name, spec(inputs))
        self.saved: Sequence[Tensor] = ()
        stores = self.call.num_saved > 0
        self.rebuild = stores and not job.keeps_states
        if self.rebuild:
            self.saved = self.call.stored()
        elif stores:
            self.saved = job.forward(self.call, self.given, save=True)[2]

    def reduce(
        self,
        grad: Tensor | None,
        ends: Sequence[Tensor],
        needs_own: Sequence[bool],
        sums: dict[str, Tensor],
    ) -> list[Tensor]:
        """The first pass, into `sums` per neuron of the whole batch: gradients of the initial
        states, from those of the final ones, `ends`, and `grad`, of what the block gives."""
        job, call = self.job, self.call
        grads = (_unfolded(grad, self.values.part), *ends)
        starts, found = job.reduce(call, self.given, self.saved, grads, needs_own, self.rebuild)
        self.rebuild = False
        if call.layout == job.call.layout:
            sums |= found
            return starts
        for name, total in found.items():
            if name not in sums:
                sums[name] = total.new_empty(job.call.layout.num_neurons)
            whole, piece = (
                x.as_strided(at.layout.step_shape, at.layout.step_strides)
                for x, at in ((sums[name], job.call), (total, call))
            )
            whole[slice(*self.values.part)].copy_(piece)
        return starts

    def write(
        self, grad: Tensor | None, ends: Sequence[Tensor], revision: Sequence[Tensor]
    ) -> Found:
        """The second pass, from the same gradients: those of the inputs, None if not needed."""
        needs = [x.requires_grad for x in self.inputs]
        if not any(needs):
            return [None for _ in needs]
        grads = (_unfolded(grad, self.values.part), *ends)
        at = (self.call, self.given, self.saved, grads)
        written = iter(self.job.write(*at, revision, needs, self.rebuild))
        return [next(written) if wanted else None for wanted in needs]


def gradients(pairs: Iterable[tuple[Tensor, Tensor | None]], of: Sequence[Tensor]) -> Found:
    """Gradients of tensors from results and theirs, as far as there are any."""
    found = [(y, g.to(y.dtype)) for y, g in pairs if g is not None and y.requires_grad]
    if not (found and of):
        return [None for _ in of]
    results, grads = zip(*found, strict=True)
    return torch.autograd.grad(results, of, grads, allow_unused=True)


def _unfolded(grad: Tensor | None, part: Part) -> Tensor | None:
    return None if grad is None else rows(grad, size(part))
