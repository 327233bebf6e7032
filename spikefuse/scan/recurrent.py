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

from spikefuse.neurons.definition import Definition
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
from spikefuse.scan.op import Call, Request, check, choose, execute, register
from spikefuse.scan.program import Operands, program, sizes_of

# Values of a sequence that backward replays at a time, in as much memory for each state.
REPLAYED = 1 << 23


def recurrent_scan(
    definition: Definition, request: Request, weight: Tensor
) -> tuple[Results, tuple[bool, ...]]:
    """Run `definition` with feedback over dim 0 of the inputs; see `spikefuse.reference.scan`.

    Args:
        request: its inputs, state and backend are read; final states are always returned.
        weight: `[heads, N / heads, N / heads]`, in the dtype of the outputs.

    Returns:
        The results, among the final states the first output of the last step, and for each output
        whether all its values are sure to be 0 or 1.
    """
    inputs, states, backend = request.inputs, request.state or (), request.backend
    check(backend, inputs[0])
    name, binary, scalars, params = choose(definition, backend, inputs[0])
    num_outputs = sizes_of(name)[0]
    fed_back = "spikes" if num_outputs == 1 else "output0"
    if fed_back in definition.states:
        raise ValueError(
            f"{type(definition).__name__} has a state '{fed_back}', which is the name of the "
            "output that is fed back: rename the state"
        )
    replay = choose(definition, backend, inputs[0], (fed_back, *definition.states)).name
    call = RecurrentCall([name, replay], [len(inputs), len(states)], scalars)
    found = execute(call, [*inputs, *states, *params, weight], True)
    outputs = list(found[:num_outputs])
    finals = [*found[num_outputs:], outputs[0][-1].float()]
    return Results(outputs, finals, None, []), binary


class RecurrentCall(Call):
    """A recurrent scan. `programs` are the neuron's, and the one whose outputs are the output that
    is fed back and the states. For backward, `current` replaces the first input."""

    op = "recurrent"
    unread = 1

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
        found, own = self.new_results(tensors, save, final), program(self.programs[0])
        num = self.num_results(final)
        results, saved = found[:num], found[num:]
        if not arguments.inputs[0].numel():
            return [result.zero_() for result in results], saved
        execution = execution_of(self.programs[0], arguments.inputs)
        states = [s.detach().float().contiguous() for s in arguments.states]
        outputs, finals = results[: self.num_outputs], results[self.num_outputs :]
        operands = Operands(
            weight=weight.detach(),
            binary=own.step.binary[0],
            start=None if start is None else start.detach().to(outputs[0].dtype).contiguous(),
            read=[*map(_rows, arguments.inputs)],
            written=[*outputs, saved[0] if save else None],
            steps=execution.by_state(states, finals),
            sums=[],
            params=execution.values(arguments),
        )
        launcher_of(own.backend).run_recurrent(own.forward(recurrent=True), operands)
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
        tensors = [current, *others]
        arguments, start, weight = self.split(tensors)
        own = program(self.programs[0])
        execution = execution_of(self.programs[0], arguments.inputs)
        launcher, heads = launcher_of(own.backend), len(weight)
        num_inputs, end = self.counts[0], sum(self.counts)
        needs = Needs((True,) * num_inputs, True, tuple(needed[end:-1]))
        kernel = own.backward(*execution.names(needs), recurrent=True)
        no_gradient = _float32(current, current.shape[2:]).zero_().expand(current.shape)
        num_outputs, num_states = sizes_of(self.programs[0])
        read = [*map(_rows, arguments.inputs)]
        read += [no_gradient if g is None else _rows(g) for g in grads[:num_outputs]]
        chunks = self._chunks(arguments, start)
        # A kernel reads the states of a step before it writes a gradient in their place.
        shares_memory = len(chunks) == 1 and num_states > 0
        inputs = arguments.inputs[1 if shares_memory else 0 :]
        written = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
        states = [None if g is None else g.float().contiguous() for g in grads[num_outputs:]]
        sent: Tensor | None = None  # by the step after a chunk
        totals: list[Tensor] = []
        weight_grad: Tensor | None = None
        for steps, part, before in reversed(chunks):
            y, *past = self._replay(part, before)
            if shares_memory:
                written.insert(0, past[0])
            begins = [_float32(current, current.shape[1:]) for _ in range(num_states)]
            sums = launcher.new_sums(current, sum(needs.params))
            grad, *rest = [x[steps] for x in written]
            operands = Operands(
                weight=weight,
                binary=False,
                start=sent,
                read=[*(x[steps] for x in read), *past],
                written=[grad, *rest],
                steps=execution.by_state(states, begins),
                sums=sums,
                params=execution.values(part),
            )
            launcher.run_recurrent(kernel, operands)
            states, sent = [*begins], grad[0]
            partial = [s.sum(0) for s in sums]
            totals = [*map(torch.add, totals, partial)] if totals else partial
            if needed[-1]:
                product = None
                if own.step.binary[0] and (before is None or _is_binary(before)):
                    product = launcher.spike_product(grad, y, heads)
                if product is None:
                    rows, sources = (_by_head(x.to(weight.dtype), heads) for x in (grad, y))
                    product = rows.mT @ sources
                weight_grad = product if weight_grad is None else weight_grad + product
        found = [*written]
        if start is not None:
            assert sent is not None
            ending = torch.einsum("bhi,hij->bhj", sent.unflatten(1, (heads, -1)), weight.float())
            found += [*begins, ending.flatten(1)]
        found = [*compress(found, needed)]
        params = [*compress(arguments.params, needs.params)]
        found += execution.reduce(totals, params)
        found += [] if weight_grad is None else [weight_grad]
        return [g.to(t.dtype) for g, t in zip(found, compress(tensors, needed), strict=True)]

    def new_gradients(self, tensors: Tensors, grads: MaybeTensors, needed: Flags) -> list[Tensor]:
        *others, current = tensors
        wanted = compress((current, *others), needed)
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in wanted]

    def _chunks(
        self, arguments: Arguments, start: Tensor | None
    ) -> list[tuple[slice, Arguments, Tensor | None]]:
        """Chunks of time whose states fit into little memory: their steps, their arguments with the
        states before them, and what was fed back before them."""
        num_steps, *shape = arguments.inputs[0].shape
        length = min(num_steps, max(1, REPLAYED // math.prod(shape)))
        found = []
        for first in range(0, num_steps, length):
            steps = slice(first, first + length)
            part = arguments._replace(inputs=[x[steps].contiguous() for x in arguments.inputs])
            found.append((steps, part, start))
            if first + length < num_steps:
                execution = execution_of(self.programs[1], part.inputs)
                results = execution.forward(part, execution.new_results(Wanted(final=True)))
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


def _float32(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _is_binary(x: Tensor) -> bool:
    return bool(((x == 0) | (x == 1)).all())


def _rows(x: Tensor) -> Tensor:
    """A sequence as it is if the neurons of a sample are adjacent in memory, else a copy."""
    return x.detach() if x.stride(2) == 1 or x.shape[2] == 1 else x.detach().contiguous()


def _by_head(x: Tensor, heads: int) -> Tensor:
    """`[heads, T * B, width]` of a sequence."""
    return x.reshape(-1, heads, x.shape[-1] // heads).transpose(0, 1)


register(RecurrentCall)
