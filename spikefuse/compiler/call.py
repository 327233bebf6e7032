"""A call seen before: all that its program and its inputs' shapes, strides and dtypes decide.

What is left to do for the next such call is to allocate, to take addresses and to launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from spikefuse.compiler.layout import layout_from
from spikefuse.compiler.program import FLOAT, Launch, Program, program

Tensors = Sequence[Tensor]
#: Shape, strides, dtype and device of an input.
Spec = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]


class Call:
    """The calls of one program on inputs of one description; see `call_of`.

    Nothing here depends on values: calls of different neurons, threads and passes share it.
    """

    def __init__(self, chosen: Program, inputs: Sequence[Spec]) -> None:
        self.program = chosen
        self.layout = layout_from([(shape, strides) for shape, strides, _, _ in inputs])
        self.dtypes = [dtype for _, _, dtype, _ in inputs]
        self.dtype = reduce(torch.promote_types, self.dtypes)
        self.num_outputs, self.num_states = chosen.step.num_outputs, len(chosen.step.states)
        #: States that are stored for backward, per neuron: the first is given.
        self.num_saved = (self.layout.num_steps - 1) // chosen.chunk
        self._forward: Launch | None = None
        self._backward: dict[tuple[Any, ...], Launch] = {}

    def results(
        self, like: Tensor, save: bool, final: bool
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Unwritten (outputs, final states, stored states) on the device of `like`."""
        outputs = [self.layout.empty(like, self.dtype) for _ in range(self.num_outputs)]
        finals = [self.layout.empty_step(like) for _ in range(self.num_states if final else 0)]
        rows = self.num_saved
        # Of no rows at all where a sequence is short: a null address, which counts as aligned.
        saved = [self._per_neuron(like, rows) for _ in range(self.num_states if save else 0)]
        return outputs, finals, saved

    def gradients(
        self,
        like: Tensor,
        input_grads: Sequence[bool],
        state_grads: bool,
        param_grads: Sequence[bool],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Unwritten gradients of inputs and initial states, and of parameters per neuron."""
        dtypes = zip(self.dtypes, input_grads, strict=True)
        grads = [self.layout.empty(like, dtype) for dtype, wanted in dtypes if wanted]
        num_starts = self.num_states if state_grads else 0
        starts = [self.layout.empty_step(like) for _ in range(num_starts)]
        sums = [self._per_neuron(like) for wanted in param_grads if wanted]
        return grads, starts, sums

    def _per_neuron(self, like: Tensor, *rows: int) -> Tensor:
        neurons = self.layout.num_neurons
        shape, strides = (*rows, neurons), (*(neurons for _ in rows), 1)
        return torch.empty_strided(shape, strides, dtype=torch.float32, device=like.device)

    def forward(
        self,
        inputs: Tensors,
        states: Tensors,
        params: Tensors,
        scalars: Sequence[float],
        save: bool,
        final: bool,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """(outputs, final states, stored states), the last two if asked for."""
        layout = self.layout
        outputs, finals, saved = self.results(inputs[0], save, final)
        if layout.num_neurons:
            starts = [layout.conform_step(s) for s in states]
            sequences = [*map(layout.conform, inputs), *outputs]
            launch = self._forward
            if launch is None:
                kernel = self.program.module().forward
                launch = self._forward = self.program.launcher.prepare(kernel, layout, sequences)
            launch(
                sequences,
                self._by_state(starts, finals, saved),
                (),
                self._values(params, scalars),
            )
        return outputs, finals, saved

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
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Gradients of (inputs, initial states, parameters), as far as they are wanted."""
        layout = self.layout
        grads, starts, sums = self.gradients(inputs[0], input_grads, bool(states), param_grads)
        wanted = [p for p, needed in zip(params, param_grads, strict=True) if needed]
        if not layout.num_neurons:
            return grads, starts, [torch.zeros_like(p) for p in wanted]
        incoming = [self._incoming(g, inputs[0]) for g in grad_outputs]
        finals = [None if g is None else layout.conform_step(g) for g in grad_states]
        sequences = [*map(layout.conform, inputs), *incoming, *grads]
        key = (*input_grads, *param_grads, *[(g.stride(), g.dtype) for g in incoming])
        launch = self._backward.get(key)
        if launch is None:
            kernel = self.program.module(*self._names(input_grads, param_grads)).backward
            launch = self._backward[key] = self.program.launcher.prepare(kernel, layout, sequences)
        launch(
            sequences,
            self._by_state([layout.conform_step(s) for s in states], saved, finals, starts),
            sums,
            self._values(params, scalars),
        )
        reduced = [
            layout.reduce_to(total, p).to(p.dtype) for total, p in zip(sums, wanted, strict=True)
        ]
        return grads, starts, reduced

    def _incoming(self, g: Tensor | None, like: Tensor) -> Tensor:
        if g is None:
            return self.layout.empty_step(like).zero_().expand(like.shape)
        return self.layout.conform(g)

    def _by_state(self, *roles: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Each state's tensors in turn, in the order of the kernel; a role may be absent."""
        return [role[i] if role else None for i in range(self.num_states) for role in roles]

    def _values(self, params: Tensors, scalars: Sequence[float]) -> Sequence[float | Tensor]:
        """Parameters in the order of the kernel, tensors as contiguous float32."""
        if not params:
            return scalars
        tensors, floats = iter(params), iter(scalars)
        return [
            next(floats) if kind == FLOAT else next(tensors).detach().float().contiguous()
            for kind in self.program.kinds
        ]

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


def spec(inputs: Tensors) -> tuple[Spec, ...]:
    return tuple([(x.shape, x.stride(), x.dtype, x.device) for x in inputs])


@lru_cache(maxsize=4096)
def call_of(name: str, inputs: tuple[Spec, ...]) -> Call:
    """The call of a program, by its name, on inputs as `spec` tells of them."""
    return Call(program(name), inputs)
