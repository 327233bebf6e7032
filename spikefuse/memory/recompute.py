"""Recompute the neurons at the end of segments for backward, one microbatch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from spikefuse.block.training import BlockTensors, TrainingCall
from spikefuse.memory.microbatch import Microbatch, batch_size, unfolded
from spikefuse.memory.segment_values import Store, Values
from spikefuse.memory.segments import NeuronCall, Segment
from spikefuse.scan.execution import Incoming, Wanted, execution_of
from spikefuse.scan.state_passing import MicrobatchScan

Gradients = Sequence[Tensor | None]


class RecomputedNeuron:
    """A neuron's inputs for a microbatch, recomputed, and their gradients.

    Construction recomputes the inputs, for which layers may wait for other processes.
    `differentiate` is a separate step, after which processes with earlier steps can continue.

    Attributes:
        inputs: `[T, B, ...]` each.
        grads: gradients of the inputs, set by `differentiate`.
    """

    def __init__(
        self, store: Store, segment: Segment, called: NeuronCall, microbatch: Microbatch
    ) -> None:
        self.called = called
        self.values = Values(store, segment, microbatch, differentiable=True)
        self.inputs = self.values.sequences(called.inputs)
        self.grads: Gradients = ()

    def differentiate(
        self,
        states: Sequence[Tensor],
        grad: Tensor | None,
        grad_finals: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> tuple[list[Tensor], Gradients]:
        """Return gradients of the initial states and of the parameters.

        Args:
            states: the initial states, empty if the neuron starts from rest.
            grad: gradient of the output, folded.
            grad_finals: gradients of the final states, or empty.
        """
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in self.inputs]
        starts = [s.detach().requires_grad_() for s in states]
        y, finals = self.values.fire(self.called, inputs, starts, bool(grad_finals))
        differentiable = [x for x in inputs if x.requires_grad]
        grads = (_unfolded(grad, self.values.microbatch), *grad_finals)
        pairs = zip((y, *finals), grads, strict=True)
        results = iter(gradients(pairs, [*differentiable, *starts, *parameters]))
        self.grads = [next(results) if x.requires_grad else None for x in inputs]
        grad_starts = [(s, next(results)) for s in starts]
        zeroed = [torch.zeros_like(s) if g is None else g for s, g in grad_starts]
        return zeroed, list(results)


class RecomputedBlock:
    """A block's inputs for a microbatch, recomputed, and the two passes of its backward.

    Args:
        tensors: all tensors of the block but its inputs; no states if the neuron starts from rest.
    """

    def __init__(
        self,
        store: Store,
        segment: Segment,
        microbatch: Microbatch,
        call: TrainingCall,
        tensors: BlockTensors,
    ) -> None:
        assert segment.block is not None
        self.call = call
        self.values = Values(store, segment, microbatch, differentiable=True)
        self.inputs = self.values.sequences(segment.block.inputs)
        self.tensors = tensors._replace(inputs=tuple(x.detach() for x in self.inputs))
        execution = execution_of(call.program.name, self.tensors.inputs)
        arguments = call.arguments_of(self.tensors)
        saved: list[Tensor] = []
        self.rebuild = call.rebuilds
        if self.rebuild:
            saved = execution.new_saved()
        elif execution.num_saved:
            results = execution.new_results(Wanted(save=True))
            saved = execution.forward(arguments, results).saved or []
        self.scan = MicrobatchScan(None, execution, arguments, saved)

    def reduce(
        self,
        grad: Tensor | None,
        grad_finals: Sequence[Tensor],
        needs_own: Sequence[bool],
        sums: dict[str, Tensor],
    ) -> list[Tensor]:
        """Run the first pass: return gradients of the initial states, and write to `sums`.

        Args:
            grad: gradient of the output, folded.
            grad_finals: gradients of the final states.
            sums: by name, added up per channel where there are several microbatches.
        """
        call = self.call
        incoming = Incoming([_unfolded(grad, self.values.microbatch)], grad_finals)
        results = call.reduce(self.scan, incoming, needs_own)
        self.rebuild = False
        named = call.named(results, needs_own)
        layout = self.scan.execution.layout
        if layout == call.execution.layout:
            sums |= named
            return results.states
        for name, total in named.items():
            total = layout.sum_by_channel(total)
            sums[name] = sums[name] + total if name in sums else total
        return results.states

    def write(
        self, grad: Tensor | None, grad_finals: Sequence[Tensor], correction: Sequence[Tensor]
    ) -> Gradients:
        """Run the second pass: return gradients of the inputs, None where not needed."""
        needs = [x.requires_grad for x in self.inputs]
        if not any(needs):
            return [None for _ in needs]
        incoming = Incoming([_unfolded(grad, self.values.microbatch)], grad_finals)
        values = self.tensors, correction
        written = iter(self.call.write(self.scan, incoming, needs, values, rebuild=self.rebuild))
        return [next(written) if needed else None for needed in needs]


def gradients(pairs: Iterable[tuple[Tensor, Tensor | None]], of: Sequence[Tensor]) -> Gradients:
    """Return the gradients of tensors, given pairs of a result and its gradient or None."""
    known = [(y, g.to(y.dtype)) for y, g in pairs if g is not None and y.requires_grad]
    if not (known and of):
        return [None for _ in of]
    results, grads = zip(*known, strict=True)
    return torch.autograd.grad(results, of, grads, allow_unused=True)


def _unfolded(grad: Tensor | None, microbatch: Microbatch) -> Tensor | None:
    return None if grad is None else unfolded(grad, batch_size(microbatch))
