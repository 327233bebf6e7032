"""The two passes of a block's backward, and the forward that they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spikefuse.block.batch_norm import Ranks
from spikefuse.block.definition import REVISION, VALUES
from spikefuse.kernels.norm import gradient_sums
from spikefuse.kernels.place import Place
from spikefuse.scan.execution import Call, Found

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
    _summed: dict[tuple[bool, ...], Sums] = field(default_factory=dict, compare=False, repr=False)

    def tensors(self, norm: Tensors, own: Tensors) -> list[Tensor]:
        """The program's tensors, from the neuron's own and those of the norm, which are VALUES
        and, where the statistics are the batch's, REVISION."""
        values = (*norm, *own)
        return [values[i] for i in self._places]

    @cached_property
    def _places(self) -> list[int]:
        norm = (*VALUES, *REVISION) if self.revises else VALUES
        names = (*norm, *(f"neuron.{name}" for name in self.own))
        return [names.index(label) for label in self.labels]

    def sums(self, needs_own: Sequence[bool]) -> Sums:
        """What the first pass of backward sums, if these of the neuron's own need gradients."""
        key = tuple(needs_own)
        found = self._summed.get(key)
        if found is None:
            owns = iter(key)
            wanted = [
                n in VALUES[1:] or (n.startswith("neuron.") and next(owns)) for n in self.labels
            ]
            found = self._summed[key] = Sums(tuple(wanted), tuple(compress(self.labels, wanted)))
        return found


class Sums(NamedTuple):
    """Which tensors of a program have their gradients summed, and their labels."""

    wanted: tuple[bool, ...]
    labels: tuple[str, ...]


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

    def __post_init__(self) -> None:
        self._mean_and_scale = self.statistics.unbind(0)[:2]

    def params(self, given: Given, revision: Tensors) -> list[Tensor]:
        """The program's tensors; `revision` is read by the gradient of the input only."""
        mean, scale = self._mean_and_scale
        norm = mean, scale, given.shift, *(revision or (mean, mean))
        return self.kernels.tensors(norm, given.own)

    def forward(
        self, call: Call, given: Given, save: bool, bits: list[Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """(outputs, final states, stored states); see `Call.forward`."""
        tensors = given.inputs, given.states, self.params(given, ())
        return call.forward(*tensors, self.kernels.scalars, save, self.return_state, bits)

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
        sums, num = self.kernels.sums(needs_own), len(self.kernels.binary)
        _, starts, totals = call.differentiate(
            given.inputs,
            given.states,
            self.params(given, ()),
            self.kernels.scalars,
            saved,
            grads[:num],
            grads[num:],
            (False,) * self.num_inputs,
            sums.wanted,
            rebuild,
        )
        return starts, dict(zip(sums.labels, totals, strict=True))

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
        sums = self.kernels.sums(needs_own).wanted
        values = self.params(given, ()), self.kernels.scalars, saved, received
        results: Found = [], starts, list(found.values())
        none = (False,) * self.num_inputs
        call.revise_gradients(given.inputs, given.states, *values, none, sums, results)

    def totals(self, call: Call, found: Mapping[str, Tensor]) -> Tensor:
        """What `gradient_sums` gives for the sums of a pass."""
        _, scale, shift = VALUES
        place, backend = Place(*call.layout.by_channel), self.kernels.backend
        number = self.number if isinstance(self.number, float) else 1.0
        return gradient_sums(found[scale], found[shift], self.statistics, place, number, backend)

    def revision(self, totals: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """((offset, slope), gradient of the weight, gradient of the shift)."""
        if self.ranks is not None:
            everywhere = totals[:2]  # in place
            self.ranks.sum(everywhere)
            everywhere /= self.number
        offset, slope, by_weight, by_shift = totals.unbind(0)
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
        num = len(self.kernels.binary)
        written, _, _ = call.differentiate(
            given.inputs,
            given.states,
            self.params(given, revision),
            self.kernels.scalars,
            saved,
            grads[:num],
            grads[num:],
            needs_inputs,
            (False,) * len(self.kernels.labels),
            rebuild,
            into,
        )
        return written

    def grad_own(
        self, call: Call, found: Mapping[str, Tensor], own: Tensors
    ) -> list[Tensor | None]:
        """Gradients of the neuron's own tensors, None where no sum was asked for."""
        if not own:
            return []
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
        grad_inputs: list[Tensor | None] = [None] * split
        if True in needs[:split]:
            written = iter(job.write(call, given, saved, grads, revision, needs[:split]))
            grad_inputs = [next(written) if wanted else None for wanted in needs[:split]]
        dtype = given.shift.dtype
        return (
            *(None, None, *grad_inputs),
            *[g.to(s.dtype) for g, s in zip(starts, given.states, strict=True)],
            grad_weight.to(dtype) if needs[end] else None,
            grad_shift.to(dtype) if needs[end + 1] else None,
            *job.grad_own(call, found, given.own),
        )


# That of torch.autograd.Function first looks for transforms, which `launch.check` has refused.
apply = super(torch.autograd.Function, Training).apply
