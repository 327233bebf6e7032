"""The recurrent scan as a PyTorch operation.

A recurrent scan adds the product of a weight `[heads, width, width]` and the first output of the
previous step to the first input. Its tensors are the inputs, the initial states and that output
before the first step, the parameters, and the weight.

Backward recomputes the states with the neuron's own scan, parallel over neurons, from `current`,
the total of the first input; only the chain of gradients through the weight is sequential. The
gradient of the weight is one matrix product over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import compress

import torch
from torch import Tensor

from spikefuse.neurons.definition import FIRST_OUTPUT, Neuron
from spikefuse.scan.execution import (
    Arguments,
    Flags,
    MaybeTensors,
    Needs,
    Results,
    Tensors,
    Wanted,
    execution_of,
    launcher_of,
)
from spikefuse.scan.op import Call, Request, check_backend, choose, execute, register
from spikefuse.scan.program import FLOAT, Operands, program, sizes_of

# Values of a sequence whose states backward recomputes at a time. Each state, and what is fed back,
# takes as much memory. Shorter chunks would take longer on a GPU.
CHUNK_VALUES = 1 << 22


def recurrent_scan(
    definition: Neuron, request: Request, weight: Tensor
) -> tuple[Results, tuple[bool, ...]]:
    """Run `definition` with feedback over dim 0 of the inputs; see `spikefuse.reference.scan`.

    Backward recomputes its states by name, so no state may have the name of an output.

    Args:
        request: the first one of its outputs must be the one that is fed back.
        weight: `[heads, N / heads, N / heads]`, in the dtype of the outputs.

    Returns:
        The results, with the final states of the neuron, and, if they are requested, the first
        output of the last step; and for each output whether all its values are sure to be 0 or 1.
    """
    inputs, states, backend = request.inputs, request.state or (), request.backend
    check_backend(backend, inputs[0])
    name, binary, scalars, params = choose(definition, backend, inputs[0], request.outputs)
    replay = choose(definition, backend, inputs[0], (FIRST_OUTPUT, *definition.states)).name
    call = RecurrentCall([name, replay], [len(inputs), len(states)], scalars)
    results = execute(call, [*inputs, *states, *params, weight], True)
    if request.final:
        # A copy, since the output may be changed in place.
        results.finals.append(results.outputs[0][-1].to(torch.float32, copy=True))
    return results, binary


class RecurrentCall(Call):
    """A recurrent scan. `programs` are the neuron's, and the one whose outputs are the output that
    is fed back and the states. For backward, `current` replaces the first input."""

    op = "recurrent"
    read = slice(1, None)

    def split(self, tensors: Tensors) -> tuple[Arguments, Tensor | None, Tensor]:
        """The arguments of the neuron, what is fed back before the first step, and the weight."""
        *others, weight = tensors
        arguments, start = self.arguments(others), None
        if arguments.states:
            *states, start = arguments.states
            arguments = arguments._replace(states=states)
        return arguments, start, weight

    def forward(self, tensors: Tensors, save: bool, final: bool) -> tuple[Tensors, Tensors]:
        arguments, start, weight = self.split(tensors)
        found, num = self.new_results(tensors, save, final), self.num_results(final)
        results, saved = found[:num], found[num:]
        if not arguments.inputs[0].numel():
            return [result.zero_() for result in results], saved
        execution = execution_of(self.programs[0], arguments.inputs)
        own = execution.program
        states = [s.detach().float().contiguous() for s in arguments.states]
        outputs, finals = results[: self.num_outputs], results[self.num_outputs :]
        launcher = launcher_of(own.backend)
        operands = Operands(
            weight=weight.detach(),
            packed=launcher.pack(weight.detach(), transposed=False),
            binary=own.step.binary[0] and start is None,  # a start may have any values
            start=None if start is None else start.detach().to(outputs[0].dtype).contiguous(),
            read=[*map(_rows, arguments.inputs)],
            written=[*outputs, saved[0] if save else None],
            steps=execution.by_state(states, finals),
            sums=[],
            params=execution.values(arguments),
        )
        launcher.run_recurrent(own.forward(recurrent=True), operands)
        return results, saved

    def new_results(self, tensors: Tensors, save: bool, final: bool) -> list[Tensor]:
        inputs = self.arguments(tensors).inputs
        dtype = reduce(torch.promote_types, [x.dtype for x in inputs])
        shape, (num_outputs, num_states) = inputs[0].shape, sizes_of(self.programs[0])
        outputs = [inputs[0].new_empty(shape, dtype=dtype) for _ in range(num_outputs)]
        finals = [_float32(inputs[0], shape[1:]) for _ in range(num_states)]
        return [*outputs, *finals, *([_float32(inputs[0], shape)] if save else [])]

    def backward(self, tensors: Tensors, grads: MaybeTensors, needed: Flags) -> list[Tensor]:
        *others, current = tensors
        if not current.numel():
            return [grad.zero_() for grad in self.new_gradients(tensors, grads, needed)]
        arguments, start, weight = self.split([current, *others])
        chain = _Chain(self, arguments, weight, grads, needed)
        for steps, chunk, before in reversed(self._chunks(self._replayed(arguments), start)):
            chain.run(steps, chunk, before)
        found = [*chain.inputs]
        if start is not None:
            assert chain.sent is not None
            sent = chain.sent.unflatten(1, (len(weight), -1))
            ending = torch.einsum("bhi,hij->bhj", sent, weight.float()).flatten(1)
            found += [*filter(torch.is_tensor, chain.states), ending]
        found = [*compress(found, needed)]
        params = compress(arguments.params, needed[sum(self.counts) : -1])
        found += chain.execution.reduce(chain.params, [*params])
        found += [] if chain.matrix is None else [chain.matrix.contiguous()]
        dtypes = compress((chain.inputs[0].dtype, *(t.dtype for t in others)), needed)
        return [g.to(dtype) for g, dtype in zip(found, dtypes, strict=True)]

    def new_gradients(self, tensors: Tensors, grads: MaybeTensors, needed: Flags) -> list[Tensor]:
        *others, current = tensors
        first = current.to(self.dtype_of(grads)) if needed[0] else current
        wanted = compress((first, *others), needed)
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in wanted]

    def dtype_of(self, grads: MaybeTensors) -> torch.dtype:
        """The dtype of the gradient of the first input: that of the outputs where it is known."""
        num_outputs = sizes_of(self.programs[0])[0]
        return next((g.dtype for g in grads[:num_outputs] if g is not None), torch.float32)

    def _replayed(self, arguments: Arguments) -> Arguments:
        """The arguments of the second program, which reads no parameters of other outputs."""
        own, read = program(self.programs[0]), program(self.programs[1]).step.params
        kinds = [*zip(own.step.params, own.kinds, strict=True)]
        tensors = [name in read for name, kind in kinds if kind != FLOAT]
        floats = [name in read for name, kind in kinds if kind == FLOAT]
        params, scalars = compress(arguments.params, tensors), compress(arguments.scalars, floats)
        return arguments._replace(params=[*params], scalars=[*scalars])

    def _chunks(
        self, arguments: Arguments, start: Tensor | None
    ) -> list[tuple[slice, Arguments, Tensor | None]]:
        """Chunks of time whose states fit into little memory: their steps, their arguments with the
        states before them, and what was fed back before them."""
        num_steps, *shape = arguments.inputs[0].shape
        # Of nearly equal lengths, since the longest one takes the most memory.
        length = -(-num_steps // -(-num_steps * math.prod(shape) // CHUNK_VALUES))
        found = []
        memory: list[Tensor] | None = None
        for first in range(0, num_steps, length):
            steps = slice(first, first + length)
            chunk = arguments._replace(inputs=[x[steps].contiguous() for x in arguments.inputs])
            found.append((steps, chunk, start))
            if first + length < num_steps:
                execution = execution_of(self.programs[1], chunk.inputs)
                results = execution.new_results(Wanted(final=True), memory)
                memory = execution.forward(chunk, results).outputs
                arguments = arguments._replace(states=results.finals)
                start = results.outputs[0][-1].clone()
        return found

    def _replay(self, arguments: Arguments, start: Tensor | None) -> list[Tensor]:
        """What is fed back and the states before each step, `[T, B, N]` each in float32."""
        inputs = arguments.inputs
        num_steps, *shape = inputs[0].shape
        rest = (0.0, *program(self.programs[0]).step.initial)
        found = [_float32(inputs[0], (num_steps + 1, *shape)) for _ in rest]
        firsts: Sequence[float | Tensor] = rest if start is None else (start, *arguments.states)
        for x, first in zip(found, firsts, strict=True):
            x[0] = first
        execution = execution_of(self.programs[1], inputs)
        execution.forward(arguments, execution.new_results(Wanted(), [x[1:] for x in found]))
        return [x[:-1] for x in found]


class _Chain:
    """The chain of gradients of a call, one chunk of its steps after the other, from the last.

    Attributes:
        inputs: gradients of the inputs.
        params: sums of the gradients of the parameters, `[N]` each.
        matrix: gradient of the weight; None if it needs none.
        states: gradients of the states before the chunk that was run last.
        sent: gradient of the total of the first input at the first step of that chunk. Its product
            with the weight is the gradient of what was fed back before.
    """

    def __init__(
        self,
        call: RecurrentCall,
        arguments: Arguments,
        weight: Tensor,
        grads: MaybeTensors,
        needed: Flags,
    ) -> None:
        self.call, self.weight = call, weight
        current, *others = arguments.inputs
        self.execution = execution_of(call.programs[0], arguments.inputs)
        self.own, num_outputs = self.execution.program, self.execution.num_outputs
        self.values = self.execution.values(arguments)
        params = tuple(needed[sum(call.counts) : -1])
        self.needs_matrix, self.num_params = needed[-1], sum(params)
        needs = Needs((True,) * len(arguments.inputs), True, params)
        self.kernel = self.own.backward(*self.execution.names(needs), recurrent=True)
        self.launcher = launcher_of(self.own.backend)
        self.packed = self.launcher.pack(self.weight, transposed=True)
        no_gradient = _float32(current, current.shape[2:]).zero_().expand(current.shape)
        self.read = [current, *map(_rows, others)]
        self.read += [no_gradient if g is None else _rows(g) for g in grads[:num_outputs]]
        dtype = call.dtype_of(grads)
        # Numba's kernels are compiled for sequences that do not overlap.
        self.may_overlap = self.own.backend == "triton"
        if self.may_overlap and call.overwrites and current.is_contiguous():
            # At the end of its memory, where writing a step leaves the earlier steps as they are.
            first = current.detach().flatten().view(dtype)[-current.numel() :].view(current.shape)
        else:
            first = current.new_empty(current.shape, dtype=dtype)
        self.inputs = [first, *(x.new_empty(x.shape) for x in others)]
        self.states = [None if g is None else g.float().contiguous() for g in grads[num_outputs:]]
        self.sent: Tensor | None = None
        self.params: list[Tensor] = []
        self.matrix: Tensor | None = None

    def run(self, steps: slice, chunk: Arguments, before: Tensor | None) -> None:
        """Extend the chain by the steps before those of the last call.

        Args:
            chunk: the arguments of the replay of these steps, and the states before them.
            before: what was fed back before them.
        """
        y, *past = self.call._replay(chunk, before)
        written = [x[steps] for x in self.inputs]
        if written[0].dtype != torch.float32:
            # The chain is float32. A kernel reads the states of a step before it writes its result.
            written[0] = past[0] if past and self.may_overlap else _float32(y, y.shape)
        begins = [_float32(y, y.shape[1:]) for _ in range(self.execution.num_states)]
        sums = self.launcher.new_sums(y, self.num_params)
        operands = Operands(
            weight=self.weight,
            packed=self.packed,
            binary=False,
            start=self.sent,
            read=[*(x[steps] for x in self.read), *past],
            written=written,
            steps=self.execution.by_state(self.states, begins),
            sums=sums,
            params=self.values,
        )
        self.launcher.run_recurrent(self.kernel, operands)
        gradient = written[0]
        self.states, self.sent = [*begins], gradient[0].clone()
        partial = [s.sum(0) for s in sums]
        self.params = [*map(torch.add, self.params, partial)] if self.params else partial
        if self.needs_matrix:
            product = self._product(gradient, y)
            # The product is in the dtype of the weight, the sum in float32.
            self.matrix = product if self.matrix is None else self.matrix.float() + product
        if gradient.dtype != self.inputs[0].dtype:
            self.inputs[0][steps] = gradient

    def _product(self, gradient: Tensor, y: Tensor) -> Tensor:
        """The gradient of the weight, from that of the currents and `y`, what was fed back."""
        heads, width, _ = self.weight.shape
        if self.own.step.binary[0]:
            product = self.launcher.spike_product(gradient, y, heads)
            if product is not None:
                return product
        values = [x.to(self.weight.dtype).reshape(-1, heads, width) for x in (gradient, y)]
        rows, sources = (x.transpose(0, 1) for x in values)
        return rows.mT @ sources


def _float32(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _rows(x: Tensor) -> Tensor:
    """A sequence as it is if the neurons of a sample are adjacent in memory, else a copy."""
    return x.detach() if x.stride(2) == 1 or x.shape[2] == 1 else x.detach().contiguous()


register(RecurrentCall)
