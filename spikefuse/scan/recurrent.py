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
from functools import cache, reduce
from itertools import chain, compress

import torch
from torch import Tensor

from spikefuse._torch import keeps_graph
from spikefuse.neurons.definition import FIRST_OUTPUT, Neuron, with_outputs
from spikefuse.scan.checks import check_backend
from spikefuse.scan.execution import execution_of, launcher_of
from spikefuse.scan.kinds import FLOAT, kinds_of
from spikefuse.scan.microbatches import Gradients
from spikefuse.scan.op import Call, Needs, choose, execute, register
from spikefuse.scan.program import Operands, prepare, program
from spikefuse.scan.records import Arguments, MaybeTensors, Results, Tensors, Wanted

# Values of a sequence whose states backward recomputes at a time. Each state, and what is fed back,
# takes as much memory. Shorter chunks would take longer on a GPU.
CHUNK_VALUES = 1 << 22


def recurrent_scan(
    definition: Neuron, arguments: Arguments[Tensor], wanted: Wanted, weight: Tensor
) -> Results[Tensor]:
    """Run `definition` with feedback over dim 0 of the inputs; see `spikefuse.reference.scan`.

    Backward recomputes its states by name, so no state may have the name of an output.

    Args:
        wanted: the first one of its outputs must be the one that is fed back.
        weight: `[heads, N / heads, N / heads]`, in the dtype of the outputs.

    Returns:
        The results, with the final states of the neuron, and, if they are wanted, the first output
        of the last step.
    """
    inputs, states, *_ = arguments
    check_backend(wanted.impl, inputs[0])
    name, scalars, params = choose(definition, inputs[0], wanted)
    arguments = Arguments(inputs, states, params, (weight,), scalars)
    results = execute(RecurrentCall(name, scalars), arguments, wanted._replace(final=True))
    if wanted.final:
        # A copy, since the output may be changed in place.
        end = results.outputs[0][-1].to(torch.float32, copy=True)
        results = results._replace(finals=[*results.finals, end])
    return results


class RecurrentCall(Call):
    """A recurrent scan, whose prologue is the weight. Its states are those of the neuron, and what
    is fed back before the first step. For backward, `current` replaces the first input."""

    op = "recurrent"
    replaced = 1
    feeds_back = True

    def forward(
        self, arguments: Arguments[Tensor], wanted: Wanted, ahead: bool = False
    ) -> Results[Tensor]:
        (weight,), found = arguments.prologue, self.new_results(arguments, wanted)
        self.execution = execution = execution_of(self.program, arguments.inputs)
        if not arguments.inputs[0].numel():
            zeroed = [x.zero_() for x in found.outputs], [x.zero_() for x in found.finals]
            return found._replace(outputs=zeroed[0], finals=zeroed[1])
        own, (states, start) = execution.program, _starts(arguments)
        starts = [s.detach().float().contiguous() for s in states]
        launcher = launcher_of(own.backend)
        operands = Operands(
            weight=weight.detach(),
            packed=launcher.pack(weight.detach(), transposed=False),
            binary=own.step.binary[0] and start is None,  # a start may have any values
            start=None if start is None else start.detach().to(execution.dtype).contiguous(),
            read=[*map(_rows, arguments.inputs)],
            written=[*found.outputs, found.saved[0] if found.saved else None],
            steps=_by_state(starts or execution.no_states, found.finals or execution.no_states),
            sums=[],
            params=execution.values(arguments),
        )
        launcher.run_recurrent(own.forward(recurrent=True), operands)
        return found

    def new_results(self, arguments: Arguments[Tensor], wanted: Wanted) -> Results[Tensor]:
        inputs, step = arguments.inputs, program(self.program).step
        dtype, shape = reduce(torch.promote_types, [x.dtype for x in inputs]), inputs[0].shape
        outputs = [inputs[0].new_empty(shape, dtype=dtype) for _ in step.outputs]
        finals = [_float32(inputs[0], shape[1:]) for _ in step.states] if wanted.final else []
        saved = [_float32(inputs[0], shape)] if wanted.save else []
        return Results(outputs, finals, saved, (), step.binary)

    def backward(
        self,
        arguments: Arguments[Tensor],
        saved: Tensors,
        incoming: Results[Tensor | None],
        needs: Needs,
    ) -> Gradients:
        if not arguments.inputs[0].numel():
            found = self.new_gradients(arguments, incoming, needs)
            for grad in self.flatten(found):
                if grad is not None:
                    grad.zero_()
            return found
        chain = _Chain(self, arguments, incoming, needs)
        _, start = _starts(arguments)
        for steps, chunk, before in reversed(self._chunks(self._replayed(arguments), start)):
            chain.run(steps, chunk, before)
        states: list[Tensor | None] = []
        (weight,) = arguments.prologue
        if start is not None:
            assert chain.sent is not None
            sent = chain.sent.unflatten(1, (len(weight), -1))
            ending = torch.einsum("bhi,hij->bhj", sent, weight.float()).flatten(1)
            states = [*chain.states, ending]
        sums = iter(chain.params)
        params = chain.execution.reduce(
            [next(sums) if need else None for need in needs.params], arguments.params
        )
        matrix = None if chain.matrix is None else chain.matrix.contiguous()
        found = Arguments([*chain.inputs], states, params, [matrix])
        dtypes = [chain.inputs[0].dtype, *(t.dtype for t in self.flatten(arguments)[1:])]
        grads = zip(self.flatten(found), dtypes, strict=True)
        return self.unflatten([None if g is None else g.to(dtype) for g, dtype in grads])

    def new_gradients(
        self, arguments: Arguments[Tensor], incoming: Results[Tensor | None], needs: Needs
    ) -> Gradients:
        tensors = self.flatten(arguments)
        tensors[0] = tensors[0].to(self.dtype_of(incoming))
        return self.unflatten(
            [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        )

    def dtype_of(self, incoming: Results[Tensor | None]) -> torch.dtype:
        """The dtype of the gradient of the first input: that of the outputs where it is known."""
        return next((g.dtype for g in incoming.outputs if g is not None), torch.float32)

    def _replayed(self, arguments: Arguments[Tensor]) -> Arguments[Tensor]:
        """The arguments of the replay, which reads no parameters of other outputs."""
        own, read = program(self.program), program(self.replay).step.params
        kinds = [*zip(own.step.params, own.kinds, strict=True)]
        tensors = [name in read for name, kind in kinds if kind != FLOAT]
        floats = [name in read for name, kind in kinds if kind == FLOAT]
        params, scalars = compress(arguments.params, tensors), compress(arguments.scalars, floats)
        states, _ = _starts(arguments)
        return Arguments(arguments.inputs, states, [*params], scalars=[*scalars])

    @property
    def replay(self) -> str:
        """The program whose outputs are the output that is fed back and the states."""
        return _replay_of(self.program)

    def _chunks(
        self, arguments: Arguments[Tensor], start: Tensor | None
    ) -> list[tuple[slice, Arguments[Tensor], Tensor | None]]:
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
                execution = execution_of(self.replay, chunk.inputs)
                results = execution.new_results(Wanted(final=True, save=False), memory)
                memory = [*execution.forward(chunk, results).outputs]
                arguments = arguments._replace(states=results.finals)
                start = results.outputs[0][-1].clone()
        return found

    def _replay(self, arguments: Arguments[Tensor], start: Tensor | None) -> list[Tensor]:
        """What is fed back and the states before each step, `[T, B, N]` each in float32."""
        inputs = arguments.inputs
        num_steps, *shape = inputs[0].shape
        rest = (0.0, *program(self.program).step.initial)
        found = [_float32(inputs[0], (num_steps + 1, *shape)) for _ in rest]
        firsts: Sequence[float | Tensor] = rest
        if start is not None:
            firsts = start, *(arguments.states or ())
        for x, first in zip(found, firsts, strict=True):
            x[0] = first
        execution = execution_of(self.replay, inputs)
        execution.forward(
            arguments, execution.new_results(Wanted(save=False), [x[1:] for x in found])
        )
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
        arguments: Arguments[Tensor],
        incoming: Results[Tensor | None],
        needs: Needs,
    ) -> None:
        self.call, (self.weight,) = call, arguments.prologue
        current, *others = arguments.inputs
        self.execution = execution_of(call.program, arguments.inputs)
        self.own = self.execution.program
        self.values = self.execution.values(arguments)
        (self.needs_matrix,), self.num_params = needs.prologue, sum(needs.params)
        needs = needs._replace(inputs=[True] * len(arguments.inputs))
        self.kernel = self.own.backward(*self.execution.names(needs), recurrent=True)
        self.launcher = launcher_of(self.own.backend)
        self.packed = self.launcher.pack(self.weight, transposed=True)
        no_gradient = _float32(current, current.shape[2:]).zero_().expand(current.shape)
        self.read = [current, *map(_rows, others)]
        self.read += [no_gradient if g is None else _rows(g) for g in incoming.outputs]
        dtype = call.dtype_of(incoming)
        # Numba's kernels are compiled for sequences that do not overlap.
        self.may_overlap = self.own.backend == "triton"
        # Without retain_graph, nobody reads what is saved after this. An op must not write to it.
        is_last = call.execution is not None and not keeps_graph()
        if self.may_overlap and is_last and current.is_contiguous():
            # At the end of its memory, where writing a step leaves the earlier steps as they are.
            first = current.detach().flatten().view(dtype)[-current.numel() :].view(current.shape)
        else:
            first = current.new_empty(current.shape, dtype=dtype)
        self.inputs = [first, *(x.new_empty(x.shape) for x in others)]
        self.states = [None if g is None else g.float().contiguous() for g in incoming.finals]
        self.sent: Tensor | None = None
        self.params: list[Tensor] = []
        self.matrix: Tensor | None = None

    def run(self, steps: slice, chunk: Arguments[Tensor], before: Tensor | None) -> None:
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
            steps=_by_state(self.states or self.execution.no_states, begins),
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


@cache
def _replay_of(name: str) -> str:
    own = program(name)
    definition = with_outputs(own.definition, (FIRST_OUTPUT, *own.definition.states))
    statics, kinds = definition.description().statics, kinds_of(definition.values())
    return prepare(definition, own.backend, statics, kinds).name


def _starts(arguments: Arguments[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
    """The initial states of the neuron, and what is fed back before the first step."""
    states = arguments.states
    return (states[:-1], states[-1]) if states else ((), None)


def _by_state(*roles: MaybeTensors) -> list[Tensor | None]:
    """The tensors of each state in turn, as kernels take them."""
    return [*chain.from_iterable(zip(*roles, strict=True))]


def _float32(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _rows(x: Tensor) -> Tensor:
    """A sequence as it is if the neurons of a sample are adjacent in memory, else a copy."""
    return x.detach() if x.stride(2) == 1 or x.shape[2] == 1 else x.detach().contiguous()


register(RecurrentCall)
