"""Neurons at the end of segments computed again for backward, a part of the batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from spikefuse.block.training import BlockTensors, TrainingCall
from spikefuse.memory.microbatch import Part, rows, size
from spikefuse.memory.segment_values import Store, Values
from spikefuse.memory.segments import BlockCall, NeuronCall, Segment
from spikefuse.scan.execution import Incoming, Wanted, execution_of
from spikefuse.scan.state_passing import Microbatch

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
        tensors: of the block, less its inputs; no states if the neuron began at rest.
    """

    def __init__(
        self,
        store: Store,
        segment: Segment,
        called: BlockCall,
        part: Part,
        call: TrainingCall,
        tensors: BlockTensors,
    ) -> None:
        self.call = call
        self.values = Values(store, segment, part, differentiable=True)
        self.inputs = self.values.sequences(called.inputs)
        self.tensors = tensors._replace(inputs=tuple(x.detach() for x in self.inputs))
        execution = execution_of(call.program.name, self.tensors.inputs)
        arguments = call.arguments(self.tensors)
        saved: list[Tensor] = []
        stores = execution.num_saved > 0
        self.rebuild = stores and not call.saves_states
        if self.rebuild:
            saved = execution.new_saved()
        elif stores:
            results = execution.new_results(Wanted(save=True, final=call.final))
            saved = execution.forward(arguments, results).saved or []
        self.part = Microbatch(None, execution, arguments, saved)

    def reduce(
        self,
        grad: Tensor | None,
        ends: Sequence[Tensor],
        needs_own: Sequence[bool],
        sums: dict[str, Tensor],
    ) -> list[Tensor]:
        """The first pass, into `sums` per neuron of the whole batch: gradients of the initial
        states, from those of the final ones, `ends`, and `grad`, of what the block gives."""
        call = self.call
        incoming = Incoming([_unfolded(grad, self.values.part)], ends)
        found = call.reduce(self.part, incoming, needs_own, self.rebuild)
        self.rebuild = False
        named, layout, whole_layout = (
            call.named(found, needs_own),
            self.part.execution.layout,
            call.execution.layout,
        )
        if layout == whole_layout:
            sums |= named
            return found.states
        for name, total in named.items():
            if name not in sums:
                sums[name] = total.new_empty(whole_layout.num_neurons)
            whole, piece = (
                x.as_strided(at.step_shape, at.step_strides)
                for x, at in ((sums[name], whole_layout), (total, layout))
            )
            whole[slice(*self.values.part)].copy_(piece)
        return found.states

    def write(
        self, grad: Tensor | None, ends: Sequence[Tensor], correction: Sequence[Tensor]
    ) -> Found:
        """The second pass, from the same gradients: those of the inputs, None if not needed."""
        needs = [x.requires_grad for x in self.inputs]
        if not any(needs):
            return [None for _ in needs]
        incoming = Incoming([_unfolded(grad, self.values.part)], ends)
        part = self.part._replace(arguments=self.call.arguments(self.tensors, correction))
        written = iter(self.call.write(part, incoming, needs, rebuild=self.rebuild))
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
