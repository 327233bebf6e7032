"""The recurrent scan as a PyTorch operation: kernels, gradients, library ops and their fakes.

`spikefuse::recurrent` runs a program over time. It adds the product of a weight `[heads, width,
width]` and the first output of the previous step to the first input. Its tensors are the weight,
the inputs, the initial states and the parameters. It returns the outputs, the final states and, if
asked, the total of the first input, `current`.

Backward recomputes the states from `current` with the neuron's own scan, parallel over neurons;
only the chain of gradients through the weight is sequential. The gradient of the weight is one
matrix product over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spikefuse.neurons.definition import Definition, States
from spikefuse.scan.execution import Arguments, Wanted, execution_of, launcher_of
from spikefuse.scan.op import (
    ONCE,
    check,
    choose,
    implement,
    is_plain,
    library,
)
from spikefuse.scan.program import FLOAT, Operands, program, sizes_of

# Values of a sequence that backward replays at a time, in as much memory for each state and for
# what is fed back. Fewer would take longer on a GPU.
REPLAYED = 1 << 22

library.define(
    "recurrent(str[] programs, Tensor[] tensors, int[] counts, float[] scalars, bool save) "
    "-> Tensor[]"
)
library.define(
    "recurrent_backward(str[] programs, Tensor[] tensors, int[] counts, float[] scalars, "
    "Tensor?[] grads, bool[] needed, ScalarType dtype) -> Tensor[]"
)


class RecurrentResults(NamedTuple):
    """What a recurrent scan returns.

    Attributes:
        outputs: `[T, B, N]` each.
        finals: the final states, `[B, N]` each, the first output of the last step among them.
        binary: for each output, whether all its values are sure to be 0 or 1.
    """

    outputs: tuple[Tensor, ...]
    finals: States
    binary: tuple[bool, ...]


def recurrent_scan(
    definition: Definition,
    inputs: tuple[Tensor, ...],
    state: States | None,
    weight: Tensor,
    backend: str,
) -> RecurrentResults:
    """Run `definition` with feedback over dim 0 of the inputs; see `spikefuse.reference.scan`.

    Args:
        weight: `[heads, N / heads, N / heads]`, in the dtype of the outputs.
    """
    check(backend, inputs[0])
    chosen = choose(definition, backend, inputs[0])
    num_outputs, num_states = sizes_of(chosen.name)
    fed_back = "spikes" if num_outputs == 1 else "output0"
    if fed_back in definition.states:
        raise ValueError(
            f"{type(definition).__name__} has a state '{fed_back}', which is the name of the "
            "output that is fed back: rename the state"
        )
    replay = choose(definition, backend, inputs[0], (fed_back, *definition.states)).name
    states = () if state is None else state
    tensors = [weight, *inputs, *states, *chosen.params]
    save = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    counts = [len(inputs), len(states)]
    call = RecurrentCall([chosen.name, replay], counts, list(chosen.scalars))
    if not is_plain(tensors):
        found = torch.ops.spikefuse.recurrent(call.programs, tensors, counts, call.scalars, save)
    elif save:
        found = _Recurrent.apply(call, *tensors)
    else:
        found = call.forward(tensors, save)
    outputs = tuple(found[:num_outputs])
    finals = (*found[num_outputs : num_outputs + num_states], outputs[0][-1].float())
    return RecurrentResults(outputs, finals, chosen.binary)


@dataclass
class RecurrentCall:
    """A recurrent scan without its tensors.

    Attributes:
        programs: the names of the neuron's program, and of the one whose outputs are the output
            that is fed back and the states.
        counts: the numbers of inputs and of initial states, the fed-back output included.
    """

    programs: Sequence[str]
    counts: Sequence[int]
    scalars: Sequence[float]

    def split(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Arguments, Tensor | None]:
        """The weight, the arguments of the neuron, and the initial fed-back output if given."""
        weight, *others = tensors
        split, end = self.counts[0], sum(self.counts)
        states, start = others[split:end], None
        if states:
            *states, start = states
        return weight, Arguments(others[:split], states, others[end:], self.scalars), start

    def forward(self, tensors: Sequence[Tensor], save: bool) -> list[Tensor]:
        weight, arguments, start = self.split(tensors)
        results = self.new_results(tensors, save)
        x, y = arguments.inputs[0], results[0]
        if not x.numel():
            return [result.zero_() for result in results]
        own, num_outputs = program(self.programs[0]), sizes_of(self.programs[0])[0]
        execution = execution_of(self.programs[0], arguments.inputs)
        split = len(results) - save
        finals = results[num_outputs:split]
        launcher = launcher_of(own.backend)
        operands = Operands(
            weight=weight.detach(),
            packed=launcher.pack(weight.detach(), transposed=False),
            binary=own.step.binary[0],
            start=None if start is None else start.detach().to(y.dtype).contiguous(),
            read=[*map(_rows, arguments.inputs)],
            written=[*results[:num_outputs], results[-1] if save else None],
            steps=_in_turn(_steps(arguments.states, len(finals)), finals),
            sums=[],
            params=execution.values(arguments),
        )
        launcher.run_recurrent(own.forward(recurrent=True), operands)
        return results

    def new_results(self, tensors: Sequence[Tensor], save: bool) -> list[Tensor]:
        """Unwritten outputs, final states and, with `save`, the total of the first input."""
        inputs = self.split(tensors)[1].inputs
        dtype = reduce(torch.promote_types, [x.dtype for x in inputs])
        shape, (num_outputs, num_states) = inputs[0].shape, sizes_of(self.programs[0])
        results = [inputs[0].new_empty(shape, dtype=dtype) for _ in range(num_outputs)]
        results += [_float32(inputs[0], shape[1:]) for _ in range(num_states)]
        return [*results, _float32(inputs[0], shape)] if save else results

    def backward(
        self,
        tensors: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
        dtype: torch.dtype,
        is_last: bool = False,
    ) -> list[Tensor]:
        """The gradients of the tensors that need one.

        Args:
            tensors: those of `forward`, with `current` in place of the first input.
            dtype: of the first input.
            is_last: whether `current` is not needed afterwards, and may be overwritten.
        """
        weight, arguments, start = self.split(tensors)
        if not arguments.inputs[0].numel():
            return self.new_gradients(tensors, needed, dtype, zero=True)
        chunks = self._chunks(arguments, start)
        chain = _Chain(self, tensors, grads, needed, dtype, is_last)
        for steps, part, before in reversed(chunks):
            chain.run(steps, part, before)
        first, end = 1 + self.counts[0], 1 + sum(self.counts)
        found: list[Tensor | None] = [None] * len(tensors)
        if chain.matrix is not None:
            found[0] = chain.matrix.to(weight.dtype).contiguous()
        found[1:first] = chain.inputs
        if start is not None:
            assert chain.sent is not None
            sent = chain.sent.unflatten(1, (len(weight), -1))
            ending = torch.einsum("bhi,hij->bhj", sent, weight.float()).flatten(1)
            given = zip((*chain.states, ending), (*arguments.states, start), strict=True)
            found[first:end] = [None if g is None else g.to(s.dtype) for g, s in given]
        rest = iter(chain.params)
        for i in range(end, len(tensors)):
            if needed[i]:
                total = next(rest)
                found[i] = (total if tensors[i].ndim else total.sum()).to(tensors[i].dtype)
        return [g for g, need in zip(found, needed, strict=True) if need and g is not None]

    def _chunks(
        self, arguments: Arguments, start: Tensor | None
    ) -> list[tuple[slice, Arguments, Tensor | None]]:
        """Chunks of time whose states fit into little memory: their steps, their arguments with the
        states before them, and what was fed back before them."""
        num_steps, *shape = arguments.inputs[0].shape
        # Of nearly equal lengths, since the longest one takes the most memory.
        length = -(-num_steps // -(-num_steps * math.prod(shape) // REPLAYED))
        found = []
        memory: list[Tensor] | None = None
        for first in range(0, num_steps, length):
            steps = slice(first, first + length)
            inputs = [x[steps].contiguous() for x in arguments.inputs]
            part = arguments._replace(inputs=inputs)
            found.append((steps, part, start))
            if first + length < num_steps:
                execution = execution_of(self.programs[1], inputs)
                results = execution.new_results(Wanted(final=True), memory)
                memory = execution.forward(part, results).outputs
                arguments = arguments._replace(states=results.finals)
                start = results.outputs[0][-1].clone()
        return found

    def _replay(self, arguments: Arguments, start: Tensor | None) -> list[Tensor]:
        """What is fed back and the states before each step, `[T, B, N]` each in float32."""
        inputs = arguments.inputs
        num_steps, *shape = inputs[0].shape
        rest = (0.0, *program(self.programs[0]).step.initial)
        found = [_float32(inputs[0], (num_steps + 1, *shape)) for _ in rest]
        for x, value in zip(found, rest, strict=True):
            x[0] = value
        if start is not None:
            for x, first in zip(found, (start, *arguments.states), strict=True):
                x[0] = first
        execution = execution_of(self.programs[1], inputs)
        results = execution.new_results(Wanted(), [x[1:] for x in found])
        execution.forward(arguments, results)
        return [x[:-1] for x in found]

    def new_gradients(
        self,
        tensors: Sequence[Tensor],
        needed: Sequence[bool],
        dtype: torch.dtype,
        zero: bool = False,
    ) -> list[Tensor]:
        """Gradients as `backward` returns them, without values or 0."""
        dtypes = [x.dtype for x in tensors]
        dtypes[1] = dtype
        make = torch.zeros if zero else torch.empty
        pairs = compress(zip(tensors, dtypes, strict=True), needed)
        return [make(x.shape, dtype=kind, device=x.device) for x, kind in pairs]


class _Chain:
    """The chain of gradients of a call, one chunk of its steps after the other, from the last.

    Attributes:
        inputs: the gradients of the inputs.
        params: those of the parameters, `[N]` each.
        matrix: that of the weight, if it needs one.
        states: those of the states before the last chunk that was run.
        sent: that of what was fed back to this chunk, before its product with the weight.
    """

    def __init__(
        self,
        call: RecurrentCall,
        tensors: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
        dtype: torch.dtype,
        is_last: bool,
    ) -> None:
        self.call, self.own = call, program(call.programs[0])
        self.weight, arguments, _ = call.split(tensors)
        current, *others = arguments.inputs
        num_outputs, self.num_states = sizes_of(call.programs[0])
        end = 1 + sum(call.counts)
        self.needs_matrix, self.num_params = needed[0], sum(needed[end:])
        kinds = zip(self.own.step.params, self.own.kinds, strict=True)
        names = compress([name for name, kind in kinds if kind != FLOAT], needed[end:])
        self.kernel = self.own.backward(self.own.step.inputs, (*names,), recurrent=True)
        self.launcher = launcher_of(self.own.backend)
        self.packed = self.launcher.pack(self.weight, transposed=True)
        no_gradient = _float32(current, current.shape[2:]).zero_().expand(current.shape)
        self.read = [current, *map(_rows, others)]
        self.read += [no_gradient if g is None else _rows(g) for g in grads[:num_outputs]]
        first = _at_its_end(current, dtype) if is_last else torch.empty_like(current, dtype=dtype)
        self.inputs = [first, *(x.new_empty(x.shape) for x in others)]
        self.states = [None if g is None else g.float().contiguous() for g in grads[num_outputs:]]
        self.sent: Tensor | None = None
        self.params: list[Tensor] = []
        self.matrix: Tensor | None = None

    def run(self, steps: slice, part: Arguments, before: Tensor | None) -> None:
        """Extend the chain by the steps before those of the last call.

        Args:
            part: the arguments of these steps, and the states before them.
            before: what was fed back before them.
        """
        y, *past = self.call._replay(part, before)
        written = [x[steps] for x in self.inputs]
        if written[0].dtype != torch.float32:
            # The chain is float32. A kernel reads the states of a step before it writes its result.
            written[0] = past[0] if past else _float32(y, y.shape)
        begins = [_float32(y, y.shape[1:]) for _ in range(self.num_states)]
        sums = self.launcher.new_sums(y, self.num_params)
        operands = Operands(
            weight=self.weight,
            packed=self.packed,
            binary=False,
            start=self.sent,
            read=[*(x[steps] for x in self.read), *past],
            written=written,
            steps=_in_turn(self.states, begins),
            sums=sums,
            params=execution_of(self.call.programs[0], part.inputs).values(part),
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
        """The gradient of the weight by the product with what was fed back."""
        heads = len(self.weight)
        if self.own.step.binary[0]:
            product = self.launcher.spike_product(gradient, y, heads)
            if product is not None:
                return product
        rows, sources = (_by_head(x.to(self.weight.dtype), heads) for x in (gradient, y))
        return rows.mT @ sources


def _float32(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _at_its_end(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor like `x`, which is contiguous float32, in the memory of its last values. The values
    of a step are behind those of earlier steps of `x`."""
    return x.detach().flatten().view(dtype)[-x.numel() :].view(x.shape)


def _rows(x: Tensor) -> Tensor:
    """A sequence as it is if the neurons of a sample are adjacent in memory, else a copy."""
    return x.detach() if x.stride(2) == 1 or x.shape[2] == 1 else x.detach().contiguous()


def _steps(states: Sequence[Tensor], count: int) -> list[Tensor | None]:
    """States as contiguous float32 tensors, None for each that is at rest."""
    return [s.detach().float().contiguous() for s in states] or [None] * count


def _in_turn(*roles: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors of each state in turn, in the order of the kernel."""
    return [x for role in zip(*roles, strict=True) for x in role]


def _by_head(x: Tensor, heads: int) -> Tensor:
    """`[heads, T * B, width]` of a sequence."""
    return x.reshape(-1, heads, x.shape[-1] // heads).transpose(0, 1)


def _recurrent(
    programs: list[str],
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    save: bool,
) -> list[Tensor]:
    return RecurrentCall(programs, counts, scalars).forward(tensors, save)


def _recurrent_fake(
    programs: list[str],
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    save: bool,
) -> list[Tensor]:
    return RecurrentCall(programs, counts, scalars).new_results(tensors, save)


def _recurrent_backward(
    programs: list[str],
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    grads: list[Tensor | None],
    needed: list[bool],
    dtype: torch.dtype,
) -> list[Tensor]:
    with torch.no_grad():
        return RecurrentCall(programs, counts, scalars).backward(tensors, grads, needed, dtype)


def _recurrent_backward_fake(
    programs: list[str],
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    grads: list[Tensor | None],
    needed: list[bool],
    dtype: torch.dtype,
) -> list[Tensor]:
    return RecurrentCall(programs, counts, scalars).new_gradients(tensors, needed, dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    programs, tensors, counts, scalars, save = inputs
    _save(ctx, RecurrentCall(programs, counts, scalars), tensors, output[-1] if save else None)


def _save(ctx: Any, call: RecurrentCall, tensors: Sequence[Tensor], current: Tensor | None) -> None:
    ctx.call, ctx.dtype = call, tensors[1].dtype
    ctx.needed = [t.requires_grad for t in tensors]
    ctx.set_materialize_grads(False)
    if current is not None:
        # The first input itself is not read again.
        ctx.save_for_backward(tensors[0], current, *tensors[2:])


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a scan's tensors, None where none is needed."""
    call, tensors = ctx.call, list(ctx.saved_tensors)
    if not torch.is_grad_enabled() and is_plain(tensors):
        is_last = not torch._C._autograd._get_current_graph_task_keep_graph()
        found = call.backward(tensors, grads, ctx.needed, ctx.dtype, is_last)
    else:
        # With create_graph, the op raises the error about double backward.
        found = torch.ops.spikefuse.recurrent_backward(
            call.programs,
            tensors,
            call.counts,
            call.scalars,
            list(grads),
            ctx.needed,
            ctx.dtype,
        )
    rest = iter(found)
    return [next(rest) if need else None for need in ctx.needed]


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    found = _differentiate(ctx, grads[:-1])  # the last one is that of `current`
    # PyTorch takes an empty list for one of tensors, and expects the gradients of its items.
    return None, found, None, None if ctx.call.scalars else [], None


class _Recurrent(torch.autograd.Function):
    """The autograd of eager scans."""

    @staticmethod
    def forward(ctx: Any, call: RecurrentCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        *results, current = call.forward(tensors, True)
        _save(ctx, call, tensors, current)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *_differentiate(ctx, grads)


implement("recurrent", _recurrent, _recurrent_fake, (_backward, _setup_context))
implement("recurrent_backward", _recurrent_backward, _recurrent_backward_fake, ONCE)
