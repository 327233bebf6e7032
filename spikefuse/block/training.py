"""A block in training: forward, and the two passes of its backward.

The statistics of the batch connect all values of a channel. So backward reads the input and the
incoming gradient twice: the first pass sums over each channel what flows through the statistics,
the second pass writes the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from itertools import compress
from operator import add, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spikefuse.block.definition import SCALES
from spikefuse.block.program import BlockExecution
from spikefuse.kernels.norm import gradient_sums
from spikefuse.scan import state_passing
from spikefuse.scan.execution import (
    PLAIN,
    REBUILD,
    Arguments,
    Execution,
    Flags,
    Incoming,
    MaybeTensors,
    Needs,
    Results,
    ScanGradients,
    Tensors,
    Wanted,
)
from spikefuse.scan.op import Call
from spikefuse.scan.state_passing import (
    WHOLE,
    Collectives,
    MicrobatchScan,
    StatePassing,
    exchange_gradients,
    incoming_of,
)


class BlockTensors(NamedTuple):
    """The tensors of a block's arguments, except the weights of norms, which belong to the
    statistics."""

    inputs: Tensors
    states: Tensors
    shift: Tensor
    own: Tensors


#: Gradients of the needed inputs, of all initial states, of the neuron's own tensors (None where
#: not needed), and of the shift and the weight of each norm.
BlockGradients = tuple[list[Tensor], list[Tensor], list[Tensor | None], list[Tensor]]


class BatchStatistics(NamedTuple):
    """The statistics of a batch.

    Attributes:
        by_norm: of each norm `[4, C]`, see `spikefuse.kernels.norm.statistics`.
        number: values per channel, of all processes.
        collectives: over which they were taken, None for this process alone.
    """

    by_norm: Tensors
    number: float | Tensor
    collectives: Collectives | None = None


class TrainingCall(Call):
    """A block in training. Its tensors are the inputs, the initial states, the neuron's own, the
    shift, and the weights of the norms that have one.

    Args:
        block: its execution on the whole batch.

    Attributes:
        rebuilds: whether the first pass of backward writes the saved states, which forward did not.
    """

    passing: StatePassing

    def __init__(
        self,
        block: BlockExecution,
        statistics: BatchStatistics,
        num_states: int = 0,
        passing: StatePassing = WHOLE,
        wants_bits: bool = False,
        saves_states: bool = True,
    ) -> None:
        self.program, self.execution = program, execution = block
        self.programs, self.counts = [program.name], [len(execution.dtypes), num_states]
        self.statistics, self.scalars = statistics, program.scalars
        self.passing, self.wants_bits, self.saves_states = passing, wants_bits, saves_states
        self.rebuilds = not saves_states and execution.num_saved > 0
        self._means_and_scales: list[Tensor] = []
        for mean, scale, *_ in statistics.by_norm:
            self._means_and_scales += mean, scale
        self.read, self._split = _places(*self.counts, len(program.own))

    def arguments_of(self, tensors: BlockTensors, correction: Tensors = ()) -> Arguments:
        """The arguments of the program; only the second backward pass reads the `correction`."""
        mean, scale, *residual = self._means_and_scales
        norm = mean, scale, tensors.shift, *residual
        correction = correction or [mean] * len(self._means_and_scales)
        params = self.program.params((*norm, *correction, *tensors.own))
        return Arguments(tensors.inputs, tensors.states, params, self.scalars)

    def forward(self, tensors: Tensors, save: bool, final: bool) -> tuple[Tensors, Tensors]:
        arguments = self.arguments_of(BlockTensors(*self._split(tensors)))
        wanted = Wanted(save and self.saves_states, final, self.wants_bits)
        saved: Tensors
        if self.passing is WHOLE:
            results = self.execution.new_results(wanted)
            if save and not self.execution.is_ahead:
                self._compile_backward(arguments, results, [t.requires_grad for t in tensors])
            self.execution.forward(arguments, results)
            saved = results.saved or ()
        else:
            name = self.program.name
            passed = state_passing.scan_forward(self.passing, name, arguments, wanted)
            results, saved, self.microbatches = passed
        self.num_outputs, self.bits = len(results.outputs), results.bits
        return [*results.outputs, *results.finals], saved

    def backward(self, tensors: Tensors, grads: MaybeTensors, needed: Flags) -> list[Tensor]:
        block, saved = BlockTensors(*self._split(tensors)), tensors[self.read.stop :]
        for_inputs, for_states, _, for_own = self._split(needed)
        needs = Needs(tuple(for_inputs), bool(for_states), tuple(for_own))
        num_outputs, dtype = len(self.program.binary), block.shift.dtype
        incoming = Incoming(grads[:num_outputs], grads[num_outputs:])
        differentiate = (
            self._differentiate if self.passing is WHOLE else self._differentiate_microbatches
        )
        inputs, states, own, norm = differentiate(block, saved, incoming, needs)
        if dtype is not torch.float32:
            norm = [grad.to(dtype) for grad in norm]
        norm = [*compress(norm, needed[self.read.stop - 1 :])]
        return [*inputs, *compress(states, for_states), *filter(torch.is_tensor, own), *norm]

    def _differentiate(
        self, tensors: BlockTensors, saved: Tensors, incoming: Incoming, needs: Needs
    ) -> BlockGradients:
        """Both passes of backward. `needs.params` are those of the neuron's own tensors."""
        execution, xs = self.execution, tensors.inputs
        if self.rebuilds:
            saved = execution.new_saved()
        # If the correction is added later, the first pass also writes the gradients of the inputs,
        # as if the statistics were constants.
        adds = self._adds_correction(needs.inputs, xs)
        arguments = self.arguments_of(tensors, self._no_correction if adds else ())
        scan = MicrobatchScan(None, execution, arguments, saved)
        found = self.reduce(scan, incoming, needs.params, needs.inputs if adds else None)
        sums = self.named(found, needs.params)
        correction, norm = self.correct(self.totals(execution, sums))
        inputs = found.inputs
        if adds:
            self._add_correction(inputs, xs, correction, execution)
        elif True in needs.inputs:
            inputs = self.write(scan, incoming, needs.inputs, (tensors, correction))
        own = self.own_gradients(execution, sums, tensors.own)
        return inputs, found.states, own, norm

    def _differentiate_microbatches(
        self, tensors: BlockTensors, saved: Tensors, incoming: Incoming, needs: Needs
    ) -> BlockGradients:
        """`_differentiate` over microbatches, whose states other processes send."""
        scans = state_passing.split(self.passing, self.program.name, self.arguments_of(tensors))
        scans = state_passing.with_states(scans, saved, self.microbatches)
        totals: list[list[Tensor]] = []
        by_own: list[list[Tensor | None]] = []

        def compute(i: int, ends: list[Tensor]) -> ScanGradients:
            scan = scans[i]
            if self.rebuilds:
                scans[i] = scan = scan._replace(saved=scan.execution.new_saved())
            return self.reduce(scan, incoming_of(incoming, scan.rows, ends), needs.params)

        found, buffers = exchange_gradients(self.passing, scans, compute)
        for scan, gradients in zip(scans, found, strict=True):
            sums = self.named(gradients, needs.params)
            totals.append(self.totals(scan.execution, sums))
            by_own.append(self.own_gradients(scan.execution, sums, tensors.own))
        correction, norm = self.correct(
            [reduce(add, of_norm) for of_norm in zip(*totals, strict=True)]
        )
        inputs: list[Tensor] = []
        if True in needs.inputs:
            inputs = self.execution.new_gradients(Needs(needs.inputs, False, ())).inputs
            for scan, ends in zip(scans, buffers, strict=True):
                into = [g[:, scan.rows] for g in inputs]
                arriving = incoming_of(incoming, scan.rows, ends)
                self.write(scan, arriving, needs.inputs, (tensors, correction), into)
        # Gradients of states that arrived from another process have gone back there.
        states: list[Tensor] = []
        if tensors.states:
            states = [torch.cat(rows) for rows in zip(*[g.states for g in found], strict=True)]
        own = [None if g[0] is None else reduce(add, g) for g in zip(*by_own, strict=True)]
        return inputs, states, own, norm

    def _compile_backward(self, arguments: Arguments, results: Results, needed: Flags) -> None:
        """Begin to compile both passes of `backward`, while other layers run forward."""
        needs_inputs, starts, _, needs_own = self._split(needed)
        execution, states = self.execution, bool(starts)
        variant = REBUILD if self.rebuilds else PLAIN
        none = (False,) * len(self.program.tensors)
        first = Needs((False,) * len(needs_inputs), states, self.program.sums(needs_own).needed)
        execution.compile_backward(arguments, results, first, variant)
        if True in needs_inputs:
            needs = Needs(tuple(needs_inputs), states, none)
            execution.compile_backward(arguments, results, needs)
        if self.program.backend == "triton" and execution.layout.num_neurons:
            from spikefuse.kernels import norm_triton

            place = execution.layout.by_channel(execution.num_sums)
            norm_triton.compile_gradient_sums(place, execution.device)

    @property
    def _no_correction(self) -> list[Tensor]:
        return [torch.zeros_like(self.statistics.by_norm[0][0])] * len(self._means_and_scales)

    def _adds_correction(self, needs_inputs: Sequence[bool], xs: Tensors) -> bool:
        """Whether a scan leaves the correction to `_add_correction`. In half precision, the
        gradient before it would be rounded."""
        adds = self.program.adds_correction
        for needed, x, _ in zip(needs_inputs, xs, self.statistics.by_norm, strict=False):
            adds = adds and needed and x.dtype is torch.float32
        return adds

    def _add_correction(
        self, grads: Tensors, xs: Tensors, correction: Tensors, execution: Execution
    ) -> None:
        # Only a process with Numba kernels imports Numba.
        from spikefuse.kernels.norm_numba import add_correction

        layout = execution.layout
        for i, (mean, *_) in enumerate(self.statistics.by_norm):
            x, written = layout.conform(xs[i]), layout.conform(grads[i])
            strides = *layout.strides(x), *layout.strides(written)
            grouping, coefficients = (layout.inner, layout.channel_inner), correction[2 * i :]
            add_correction(x, written, strides, grouping, (mean, *coefficients[:2]))
            if written is not grads[i]:
                grads[i].copy_(written)

    def reduce(
        self,
        scan: MicrobatchScan,
        incoming: Incoming,
        needs_own: Sequence[bool],
        needs_inputs: tuple[bool, ...] | None = None,
    ) -> ScanGradients:
        """The first pass: gradients of the initial states and of the needed inputs (default: none),
        and sums per neuron."""
        needs_inputs = needs_inputs or (False,) * len(scan.arguments.inputs)
        needed = self.program.sums(needs_own).needed
        needs = Needs(needs_inputs, bool(scan.arguments.states), needed)
        gradients = scan.execution.new_gradients(needs)
        variant = REBUILD if self.rebuilds else PLAIN
        return scan.execution.backward(scan.arguments, scan.saved, incoming, gradients, variant)

    def write(
        self,
        scan: MicrobatchScan,
        incoming: Incoming,
        needs_inputs: Sequence[bool],
        values: tuple[BlockTensors, Tensors],
        into: list[Tensor] | None = None,
        rebuild: bool = False,
    ) -> list[Tensor]:
        """The second pass: gradients of the needed inputs.

        Args:
            values: the block's tensors, of which only the parameters are read, and the correction.
        """
        tensors, correction = values
        adds = self._adds_correction(needs_inputs, scan.arguments.inputs)
        params = self.arguments_of(tensors, self._no_correction if adds else correction).params
        (inputs, states, _, scalars), execution = scan.arguments, scan.execution
        arguments = Arguments(inputs, states, params, scalars)
        none = (False,) * len(self.program.tensors)
        # The gradients of the initial states are computed again, but not read.
        needs = Needs(tuple(needs_inputs), bool(states), none)
        gradients = execution.new_gradients(needs, into)
        variant = REBUILD if rebuild else PLAIN
        execution.backward(arguments, scan.saved, incoming, gradients, variant)
        if adds:
            self._add_correction(gradients.inputs, inputs, correction, execution)
        return gradients.inputs

    def named(self, gradients: ScanGradients, needs_own: Sequence[bool]) -> dict[str, Tensor]:
        """The sums of the first pass, by the tensor whose gradient they make."""
        return dict(zip(self.program.sums(needs_own).names, gradients.params, strict=True))

    def totals(self, execution: Execution, sums: Mapping[str, Tensor]) -> list[Tensor]:
        """The results of `gradient_sums` for the sums of a first pass, of each norm."""
        shift, backend = sums["shift"], self.program.backend
        place = execution.layout.by_channel(len(shift))
        by_norm, number, _ = self.statistics
        number = number if isinstance(number, float) else 1.0
        found = []
        for scale, statistics in zip(SCALES, by_norm, strict=False):
            found.append(gradient_sums(sums[scale], shift, statistics, place, number, backend))
        return found

    def correct(self, totals: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """The corrections (offset and slope of each norm), and the gradients of the shift and the
        weights."""
        corrections, weights = [], []
        _, number, collectives = self.statistics
        for total in totals:
            if collectives is not None:
                everywhere = total[:2]  # changed in place
                collectives.sum(everywhere)
                everywhere /= number
            offset, slope, by_weight, by_shift = total.unbind(0)
            corrections += [offset, slope]
            weights.append(by_weight)
        return corrections, [by_shift, *weights]

    def own_gradients(
        self, execution: Execution, sums: Mapping[str, Tensor], own: Tensors
    ) -> list[Tensor | None]:
        """Gradients of the neuron's own tensors, None without a sum."""
        if not own:
            return []
        names, layout = (f"neuron.{name}" for name in self.program.own), execution.layout
        return [
            layout.reduce_to(sums[n], p).to(p.dtype) if n in sums else None
            for n, p in zip(names, own, strict=True)
        ]


@lru_cache
def _places(num_inputs: int, num_states: int, num_own: int) -> tuple[slice, itemgetter[Any]]:
    """Where the tensors of a block are that backward reads, and those of `BlockTensors`."""
    end, last = num_inputs + num_states, num_inputs + num_states + num_own
    places = slice(num_inputs), slice(num_inputs, end), last, slice(end, last)
    # The statistics contain the weights, which come last.
    return slice(last + 1), itemgetter(*places)
