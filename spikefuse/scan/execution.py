"""A call seen before: all that its program and its inputs' shapes, strides and dtypes decide.

What is left to do for the next such call is to allocate, to take addresses and to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property, lru_cache, reduce
from itertools import compress
from operator import itemgetter

import torch
from torch import Tensor

from spikefuse.scan.layout import layout_from, outer_stride
from spikefuse.scan.program import FLOAT, Launch, program

Tensors = Sequence[Tensor]
Found = tuple[list[Tensor], list[Tensor], list[Tensor]]
#: Shape, strides, dtype and device of an input.
Spec = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]


class Call:
    """The calls of one program on inputs of one description; see `call_of`.

    Nothing here depends on values: calls of different neurons, threads and passes share it.
    """

    def __init__(self, name: str, inputs: Sequence[Spec]) -> None:
        self.program = program(name)
        step = self.program.step
        self.layout = layout_from([(shape, strides) for shape, strides, _, _ in inputs])
        self.dtypes = [dtype for _, _, dtype, _ in inputs]
        self.dtype = reduce(torch.promote_types, self.dtypes)
        self.device = inputs[0][3]
        self.num_outputs, self.num_states = step.num_outputs, len(step.states)
        #: States that are stored for backward, per neuron: the first is given.
        self.num_saved = (self.layout.num_steps - 1) // self.program.chunk(self.layout.num_steps)
        self._inputs = inputs
        self._absent = (None,) * self.num_states
        self._forward: dict[Hashable, Launch] = {}
        self._backward: dict[Hashable, Launch] = {}

    def results(self, save: bool, final: bool, into: Tensors | None = None) -> Found:
        """Unwritten (outputs, final states, stored states); a short sequence stores none."""
        outputs = self._targets((self.dtype,) * self.num_outputs, into)
        finals = self.steps() if final else []
        return outputs, finals, self.stored() if save else []

    def stored(self) -> list[Tensor]:
        """Unwritten stored states."""
        if not self.num_saved:
            return []
        return self._per_neuron(self.num_states, self.num_saved)

    @cached_property
    def packs(self) -> bool:
        """Whether forward can write the bits of outputs: those of a step fill whole bytes, and
        Triton knows that they do, of multiples of 16."""
        return bool(self._no_bits) and self.layout.num_neurons % 16 == 0

    @cached_property
    def _no_bits(self) -> tuple[None, ...]:
        """What kernels that can write bits get for each binary output if they shall not."""
        return (None,) * sum(self.program.step.binary) if self.program.backend == "triton" else ()

    def _bits(self) -> Tensor:
        num = self.layout.num_steps * self.layout.num_neurons
        return torch.empty(num // 8, dtype=torch.uint8, device=self.device)

    @cached_property
    def num_stored_bytes(self) -> int:
        """Bytes of the stored states."""
        return 4 * self.num_saved * self.num_states * self.layout.num_neurons

    def gradients(
        self,
        input_grads: Sequence[bool],
        state_grads: bool,
        param_grads: Sequence[bool],
        into: Tensors | None = None,
    ) -> Found:
        """Unwritten gradients of inputs and initial states, and of parameters per neuron."""
        grads = self._targets(compress(self.dtypes, input_grads), into)
        starts = self.steps() if state_grads else []
        return grads, starts, self._per_neuron(sum(param_grads))

    def steps(self) -> list[Tensor]:
        """One unwritten time step for each state."""
        return [self._step() for _ in range(self.num_states)]

    def _targets(self, dtypes: Iterable[torch.dtype], into: Tensors | None) -> list[Tensor]:
        """New sequences, or those of `into` wherever kernels can write them in place."""
        if into is not None:
            return [x if self.layout.fits(x) else self._targets([x.dtype], None)[0] for x in into]
        memory = self.layout.shape, self.layout.all_strides
        return [torch.empty_strided(*memory, dtype=d, device=self.device) for d in dtypes]

    def _step(self) -> Tensor:
        layout = self.layout
        return torch.empty_strided(
            layout.step_shape, layout.step_strides, dtype=torch.float32, device=self.device
        )

    def _per_neuron(self, num: int, *rows: int) -> list[Tensor]:
        """So many unwritten tensors `[*rows, N]`."""
        neurons = self.layout.num_neurons
        memory = (*rows, neurons), (*(neurons for _ in rows), 1)
        return [
            torch.empty_strided(*memory, dtype=torch.float32, device=self.device)
            for _ in range(num)
        ]

    def forward(
        self,
        inputs: Tensors,
        states: Tensors,
        params: Tensors,
        scalars: Sequence[float],
        save: bool,
        final: bool,
        bits: list[Tensor] | None = None,
        into: Tensors | None = None,
    ) -> Found:
        """(outputs, final states, stored states), the last two if asked for.

        Args:
            bits: gets the bits of each binary output, one per value in memory, if it `packs`.
            into: sequences into which outputs are written.
        """
        layout = self.layout
        outputs, finals, saved = self.results(save, final, into)
        if layout.num_neurons:
            read = self._conforming(inputs)
            sequences = [*read, *outputs]
            packs = bits is not None and self.packs
            key: Hashable = packs if into is None else (packs, *[y.stride() for y in outputs])
            launch = self._forward.get(key)
            if launch is None:
                kernel, prepare = self.program.module().forward, self.program.launcher.prepare
                launch = self._forward[key] = prepare(kernel, layout, sequences, packs=packs)
            starts = [layout.conform_step(s) for s in states]
            stored = saved or (self._no_rows if save else ())
            packed: Sequence[Tensor | None] = self._no_bits
            if bits is not None and packs:
                bits += [self._bits() for _ in self._no_bits]
                packed = bits
            launch(
                sequences,
                self._by_state(starts, finals, stored),
                packed,
                self._values(params, scalars),
            )
        return outputs if into is None else _delivered(outputs, into), finals, saved

    def revise(
        self,
        inputs: Tensors,
        states: Tensors,
        params: Tensors,
        scalars: Sequence[float],
        outputs: Tensors,
        finals: Tensors,
        saved: Tensors,
        bits: Tensors = (),
    ) -> None:
        """Mend what `forward` has written from rest, now that the initial states are known.

        It costs as many steps as the states need to become, to the last bit, those that they were.

        Args:
            saved: as `forward` has stored them, which it has to have done.
            bits: those that `forward` has written.
        """
        if not self.layout.num_neurons:
            return
        written = [self.layout.conform(y) for y in outputs]
        sequences = [*self._conforming(inputs), *written]
        packs = bool(bits)
        key = ("revises", packs, *[y.stride() for y in written])
        launch = self._forward.get(key)
        if launch is None:
            kernel, prepare = self.program.module().forward, self.program.launcher.prepare
            flags = {"packs": packs, "revises": True}
            launch = self._forward[key] = prepare(kernel, self.layout, sequences, **flags)
        starts = [self.layout.conform_step(s) for s in states]
        by_state = self._by_state(starts, finals, saved or self._no_rows)
        launch(sequences, by_state, bits or self._no_bits, self._values(params, scalars))
        _delivered(written, outputs)

    def backward(
        self,
        inputs: Tensors,
        states: Tensors,
        params: Tensors,
        scalars: Sequence[float],
        saved: Tensors,
        grad_outputs: Sequence[Tensor | None],
        grad_states: Sequence[Tensor | None],
        input_grads: Sequence[bool],
        param_grads: Sequence[bool],
        into: Tensors | None = None,
    ) -> Found:
        """Gradients of (inputs, initial states, parameters), as far as they are wanted; those of
        the inputs are written into the sequences of `into`, if there are any."""
        grads, starts, sums = self.differentiate(
            inputs,
            states,
            params,
            scalars,
            saved,
            grad_outputs,
            grad_states,
            input_grads,
            param_grads,
            into=into,
        )
        return grads, starts, self.reduced(sums, params, param_grads)

    def reduced(self, sums: Tensors, params: Tensors, param_grads: Sequence[bool]) -> list[Tensor]:
        """Gradients of parameters, from those per neuron."""
        totals = zip(sums, compress(params, param_grads), strict=True)
        return [self.layout.reduce_to(total, p).to(p.dtype) for total, p in totals]

    def differentiate(
        self,
        inputs: Tensors,
        states: Tensors,
        params: Tensors,
        scalars: Sequence[float],
        saved: Tensors,
        grad_outputs: Sequence[Tensor | None],
        grad_states: Sequence[Tensor | None],
        input_grads: Sequence[bool],
        param_grads: Sequence[bool],
        rebuild: bool = False,
        into: Tensors | None = None,
    ) -> Found:
        """The same, but gradients of parameters per neuron.

        Args:
            rebuild: `saved` is unwritten, and is written here; where the program `rebuilds`.
        """
        layout = self.layout
        grads, starts, sums = self.gradients(input_grads, bool(states), param_grads, into)
        if not layout.num_neurons:
            return grads if into is None else _delivered(grads, into), starts, sums
        read = self._conforming(inputs)
        incoming = [self._zeros() if g is None else layout.conform(g) for g in grad_outputs]
        finals = [None if g is None else layout.conform_step(g) for g in grad_states]
        sequences = [*read, *incoming, *grads]
        key = (rebuild, *input_grads, *param_grads, *[(g.stride(), g.dtype) for g in incoming])
        if into is not None:
            key += tuple([g.stride() for g in grads])
        launch = self._backward.get(key)
        if launch is None:
            kernel = self.program.module(*self._names(input_grads, param_grads)).backward
            launcher = self.program.launcher
            launch = self._backward[key] = launcher.prepare(kernel, layout, sequences, rebuild)
        begins = [layout.conform_step(s) for s in states]
        launch(
            sequences,
            self._by_state(begins, saved or self._no_rows, finals, starts),
            sums,
            self._values(params, scalars),
        )
        return grads if into is None else _delivered(grads, into), starts, sums

    def revise_gradients(
        self,
        inputs: Tensors,
        states: Tensors,
        params: Tensors,
        scalars: Sequence[float],
        saved: Tensors,
        grad_states: Tensors,
        input_grads: Sequence[bool],
        param_grads: Sequence[bool],
        found: Found,
    ) -> None:
        """Add to what `differentiate` has found what `grad_states` make of it, which come on top of
        those it knew; until 2^-32 of them is left, neuron by neuron."""
        if not self.layout.num_neurons:
            return
        grads, starts, sums = found
        layout, written = self.layout, [self.layout.conform(g) for g in found[0]]
        read = self._conforming(inputs)
        # In place of the gradients of the outputs, which have had their part and are not read.
        sequences = [*read, *[read[0]] * self.num_outputs, *written]
        key = ("revises", *input_grads, *param_grads, *[g.stride() for g in written])
        launch = self._backward.get(key)
        if launch is None:
            kernel = self.program.module(*self._names(input_grads, param_grads)).backward
            prepare = self.program.launcher.prepare
            launch = self._backward[key] = prepare(kernel, layout, sequences, revises=True)
        begins = [layout.conform_step(s) for s in states]
        ends = [layout.conform_step(g) for g in grad_states]
        by_state = self._by_state(begins, saved or self._no_rows, ends, starts)
        launch(sequences, by_state, sums, self._values(params, scalars))
        _delivered(written, grads)

    def _conforming(self, inputs: Tensors) -> Tensors:
        return inputs if self._fits else [self.layout.conform(x) for x in inputs]

    @cached_property
    def _fits(self) -> bool:
        """Whether kernels can read all inputs in place."""
        at = self.layout.order, self.layout.inner
        return all(outer_stride(x[0], x[1], *at) is not None for x in self._inputs)

    def _zeros(self) -> Tensor:
        return self._step().zero_().expand(self.layout.shape)

    @cached_property
    def _no_rows(self) -> tuple[Tensor, ...]:
        """What kernels get for the stored states of a short sequence, which has none: with None
        in their place, they would be other kernels. A null address counts as aligned."""
        nothing = torch.empty(0, dtype=torch.float32, device=self.device)
        return (nothing,) * self.num_states

    def _by_state(self, *roles: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Each state's tensors in turn, in the order of the kernel; a role may be absent."""
        if self.num_states == 1:
            return [role[0] if role else None for role in roles]
        given = [role or self._absent for role in roles]
        return [tensor for state in zip(*given, strict=True) for tensor in state]

    def _values(self, params: Tensors, scalars: Sequence[float]) -> Sequence[float | Tensor]:
        """Parameters in the order of the kernel, tensors as contiguous float32."""
        if not params:
            return scalars
        for p in params:
            if p.dtype is not torch.float32 or not p.is_contiguous():
                params = [p.detach().float().contiguous() for p in params]
                break
        return self._in_order((*params, *scalars))

    @cached_property
    def _in_order(self) -> Callable[[tuple[float | Tensor, ...]], tuple[float | Tensor, ...]]:
        """Puts tensors and, behind them, floats where the kernel expects them."""
        kinds = self.program.kinds
        tensors_first = sorted(range(len(kinds)), key=lambda i: kinds[i] == FLOAT)
        places = sorted(range(len(kinds)), key=tensors_first.__getitem__)
        return itemgetter(*places) if len(places) > 1 else tuple

    def _names(
        self, input_grads: Sequence[bool], param_grads: Sequence[bool]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The inputs and the parameters whose gradients are wanted."""
        step = self.program.step
        values = zip(step.params, self.program.kinds, strict=True)
        tensors = [label for label, kind in values if kind != FLOAT]
        return (
            tuple(compress(step.inputs, input_grads)),
            tuple(compress(tensors, param_grads)),
        )


def _delivered(written: list[Tensor], into: Tensors) -> list[Tensor]:
    """`into`, once it holds what was written elsewhere."""
    for x, wanted in zip(written, into, strict=True):
        if x is not wanted:
            wanted.copy_(x)
    return list(into)


def spec(inputs: Tensors) -> tuple[Spec, ...]:
    return tuple([(x.shape, x.stride(), x.dtype, x.device) for x in inputs])


@lru_cache(maxsize=4096)
def call_of(name: str, inputs: tuple[Spec, ...]) -> Call:
    """The call of a program, by its name, on inputs as `spec` tells of them."""
    return Call(name, inputs)
