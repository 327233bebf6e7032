"""A block in training: forward, and the two passes of its backward.

The statistics of the batch connect all values of a channel. So backward reads the input and the
incoming gradient twice: the first pass sums over each channel what flows through the statistics,
the second pass writes the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spikefuse.block.definition import SCALES
from spikefuse.block.program import NEURON, BlockProgram, block_program
from spikefuse.kernels.norm import gradient_sums
from spikefuse.kernels.threads import import_module
from spikefuse.scan import microbatches
from spikefuse.scan.execution import execution_of
from spikefuse.scan.layout import Layout
from spikefuse.scan.microbatches import Gradients, Microbatch
from spikefuse.scan.op import Call, Needs, register
from spikefuse.scan.records import Arguments, MaybeTensors, Results, Tensors


@dataclass
class BlockCall(Call):
    """A block in training: a scan with one norm or two as its prologue, and the neuron's tensors as
    its parameters.

    The prologue has the shift, which is the sum of the norms' biases; the statistics of the batch
    for each norm, `[4, C]`, see `spikefuse.kernels.norm.statistics`; and the norms' weights, which
    the statistics contain, so that they are only there to receive gradients.

    Attributes:
        number: values per channel in all processes, if these share the statistics.
    """

    number: Tensor | None = None
    op = "block"

    @cached_property
    def block(self) -> BlockProgram:
        return block_program(self.program)

    def resolve(self, arguments: Arguments[Tensor], correction: Tensors = ()) -> Arguments[Tensor]:
        block, prologue = self.block, arguments.prologue
        values: list[Tensor] = []
        for statistics in prologue[1 : 1 + block.num_norms]:
            mean, scale, *_ = statistics.unbind(0)
            values += mean, scale
        values.insert(2, prologue[0])
        # Only the second pass of backward reads the correction.
        values += correction or [values[0]] * (2 * block.num_norms)
        values += arguments.params
        return arguments._replace(params=[*map(values.__getitem__, block.order)])

    def compile_backward(
        self, arguments: Arguments[Tensor], results: Results[Tensor], needs: Needs
    ) -> None:
        execution, (inputs, states, own, *_) = self.execution, needs
        assert execution is not None
        first = Arguments([False] * len(inputs), states, self.block.summed(own))
        super().compile_backward(arguments, results, first)
        if True in inputs:
            second = Arguments(inputs, states, [False] * len(first.params))
            execution.compile_backward(arguments, results, second)
        if self.block.program.backend == "triton" and execution.layout.num_neurons:
            place = execution.layout.by_channel(execution.num_sums)
            norm_triton = import_module("spikefuse.kernels.norm_triton")
            norm_triton.compile_gradient_sums(place, execution.device)

    def backward(
        self,
        arguments: Arguments[Tensor],
        saved: Tensors,
        incoming: Results[Tensor | None],
        needs: Needs,
    ) -> Gradients:
        execution = self.execution or execution_of(self.program, arguments.inputs)
        block, none = self.block, [False]
        inputs: MaybeTensors = ()
        if self.passing is not None:  # microbatches write into gradients of the whole batch
            inputs = execution.new_gradients(Arguments(needs.inputs)).inputs
        # If the correction is added later, the first pass also writes the gradients of the inputs,
        # as if the statistics were constants.
        adds = self._adds_correction(arguments, needs)
        zeros = [torch.zeros_like(arguments.prologue[1][0])] * (2 * block.num_norms) if adds else ()
        scans = microbatches.split(execution, self.resolve(arguments, zeros), saved)
        first = needs.inputs if adds else none * len(needs.inputs)
        first_needs = Arguments(first, params=block.summed(needs.params))
        written = inputs if adds else ()
        found, arrived = microbatches.backward(scans, incoming, first_needs, written)
        written = inputs or found[0].inputs
        own: list[MaybeTensors] = []
        totals: list[Sequence[Tensor]] = []
        for scan, gradients in zip(scans, found, strict=True):
            sums = dict(zip(block.tensors, gradients.params, strict=True))
            totals.append(self._totals(scan, sums, arguments))
            if arguments.params:
                by_own = [sums[NEURON + name] for name in block.own]
                own.append(scan.execution.reduce(by_own, arguments.params))
        total = totals[0] if len(totals) == 1 else microbatches.added(totals)
        correction, prologue = self._corrected(total, arguments)
        if adds:
            self._add_correction(execution.layout, arguments, written, correction)
        elif True in needs.inputs:
            params = self.resolve(arguments, correction).params
            # The gradients of the initial states are computed again, but not read.
            second = Arguments(needs.inputs, params=none * len(params))
            for scan, grads in zip(scans, arrived, strict=True):
                scan = scan._replace(arguments=scan.arguments._replace(params=params))
                found_inputs = scan.run(grads, second, inputs).inputs
            written = inputs or found_inputs
        states = arguments.states and microbatches.of_states(arguments, found)
        return Arguments(written, states, own and microbatches.added(own), prologue)

    def _totals(
        self, scan: Microbatch, sums: dict[str, Tensor | None], arguments: Arguments[Tensor]
    ) -> list[Tensor]:
        """The results of `gradient_sums` for the sums of a first pass, of each norm."""
        x, shift, (_, *statistics) = arguments.inputs[0], sums["shift"], arguments.prologue
        assert shift is not None
        number = x.numel() / x.shape[2] if self.number is None else 1.0
        place, backend = scan.execution.layout.by_channel(len(shift)), self.block.program.backend
        found = []
        for name, of_norm in zip(SCALES[: self.block.num_norms], statistics, strict=False):
            scale = sums[name]
            assert scale is not None
            found.append(gradient_sums(scale, shift, of_norm, place, number, backend))
        return found

    def _corrected(
        self, totals: Tensors, arguments: Arguments[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The correction (offset and slope of each norm), and the gradients of the prologue."""
        shift, *others = arguments.prologue
        correction, by_weights = [], []
        for total, statistics in zip(totals, others, strict=False):
            offset, slope, by_weight, by_shift = total.unbind(0)
            if self.number is not None:
                assert self.passing is not None and self.passing.statistics is not None
                # The sums that norms without a neuron exchange, too.
                sums = torch.stack([by_shift, by_weight])
                self.passing.statistics.sum(sums)
                _, scale, inverse, _ = statistics.unbind(0)
                offset, slope = sums * (-scale / self.number)
                slope = slope * inverse
            correction += [offset, slope]
            by_weights.append(by_weight)
        grads: list[Tensor | None] = [by_shift.to(shift.dtype), *[None] * len(totals)]
        for by_weight, weight in zip(by_weights, others[len(totals) :], strict=False):
            grads.append(by_weight.to(weight.dtype))
        return correction, grads

    def _adds_correction(self, arguments: Arguments[Tensor], needs: Needs) -> bool:
        """Whether what flows through the statistics is added to gradients in memory. It takes fewer
        instructions than a second scan, which bound a CPU, but moves more bytes. In half precision,
        the gradient before it would be rounded."""
        adds, normed = self.block.program.backend == "numba", self.block.num_norms
        for needed, x in zip(needs.inputs[:normed], arguments.inputs[:normed], strict=True):
            adds = adds and needed and x.dtype is torch.float32
        return adds

    def _add_correction(
        self,
        layout: Layout,
        arguments: Arguments[Tensor],
        grads: MaybeTensors,
        correction: Tensors,
    ) -> None:
        # Only a process with Numba kernels imports Numba.
        norm_numba = import_module("spikefuse.kernels.norm_numba")
        known = layout.outer_strides
        for i in range(self.block.num_norms):
            grad, mean = grads[i], arguments.prologue[1 + i][0]
            assert grad is not None
            x, written = arguments.inputs[i], grad
            if not (known.get(x.stride()) and known.get(grad.stride())):
                x, written = layout.conform(x), layout.conform(grad)
            strides, grouping = [*layout.strides(x), *layout.strides(written)], layout.inner
            coefficients = mean, *correction[2 * i : 2 * i + 2]
            norm_numba.add_correction(
                x, written, strides, (grouping, layout.channel_inner), coefficients
            )
            if written is not grad:
                grad.copy_(written)


register(BlockCall)
