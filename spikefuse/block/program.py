"""The program of a neuron with a batch norm, and where it expects each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spikefuse.block.definition import SCALES, NormedNeuron, value_names, with_batch_norm
from spikefuse.neurons.definition import Neuron, with_outputs
from spikefuse.scan.execution import Execution
from spikefuse.scan.program import kinds_of, prepare, program

_kind = attrgetter("ndim")
# The values whose gradients are always summed.
_SUMMED = ("shift", *SCALES)


class Sums(NamedTuple):
    """The tensors of a program whose gradients the first backward pass sums, and their names."""

    needed: tuple[bool, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class BlockProgram:
    """A program whose step begins with a batch norm.

    Attributes:
        name: of the program.
        binary: for each output, whether all its values are sure to be 0 or 1.
        by_batch: whether the norm uses the statistics of the batch.
        normalizes_residual: whether the residual has a norm of its own.
        returns_sum: whether the last output is the sum that the neuron reads.
        rebuilds: whether backward can do without saved states.
        scalars: the values of its float parameters.
        floats: the names of these, without "neuron.".
        tensors: the names of its tensor parameters, in its order.
        own: the names of the neuron's tensors among them, without "neuron.".
    """

    name: str
    backend: str
    binary: tuple[bool, ...]
    num_states: int
    by_batch: bool
    normalizes_residual: bool
    returns_sum: bool
    rebuilds: bool
    scalars: list[float]
    floats: tuple[str, ...]
    tensors: tuple[str, ...]
    own: tuple[str, ...]
    _sums: dict[tuple[bool, ...], Sums] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def adds_correction(self) -> bool:
        """Whether what flows through the statistics is added to a gradient in memory. It takes
        fewer instructions than a second scan, which bound a CPU, but moves more bytes."""
        return self.backend == "numba"

    @cached_property
    def params(self) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """Put the norms' values, as in `value_names`, and then the neuron's tensors in the order of
        the program."""
        norm = value_names(self.normalizes_residual, self.by_batch)
        names = (*norm, *(f"neuron.{name}" for name in self.own))
        return itemgetter(*map(names.index, self.tensors))

    def sums(self, needs_own: Sequence[bool]) -> Sums:
        """What the first backward pass sums if these of the neuron's tensors need gradients."""
        key = tuple(needs_own)
        sums = self._sums.get(key)
        if sums is None:
            own = iter(key)
            needed = tuple(
                [name in _SUMMED or (name.startswith("neuron.") and next(own))
                 for name in self.tensors]
            )  # fmt: skip
            sums = self._sums[key] = Sums(needed, tuple(compress(self.tensors, needed)))
        return sums


class BlockExecution(NamedTuple):
    """A program, and its execution on inputs of one description."""

    program: BlockProgram
    execution: Execution


def block_program(
    neuron: Neuron,
    backend: str,
    has_residual: bool,
    by_batch: bool,
    outputs: tuple[str, ...] = (),
    normalizes_residual: bool = False,
    returns_sum: bool = False,
) -> tuple[BlockProgram, list[Tensor]]:
    """The program of a neuron with a norm, and the neuron's tensors that it reads; see
    `Request.outputs`."""
    description = neuron.description()
    values = description.values()
    kinds = map(_kind, filter(torch.is_tensor, values.values()))
    key = "block", backend, has_residual, by_batch, outputs, normalizes_residual, returns_sum, *kinds
    made = description.cache.get(key)
    if made is None:
        norm = (torch.zeros(1),) * len(value_names(normalizes_residual, by_batch=False))
        definition = with_batch_norm(neuron, norm, has_residual, by_batch, returns_sum)
        made = description.cache[key] = _make(with_outputs(definition, outputs), backend)
    own: list[Any] = list(map(values.__getitem__, made.own))
    return made, own


def program_of_scan(
    name: str, has_residual: bool, by_batch: bool, normalizes_residual: bool, returns_sum: bool
) -> BlockProgram:
    """The program of a norm and the neuron of another program."""
    scan = program(name)
    neuron = scan.definition
    options = has_residual, by_batch, neuron._selected, normalizes_residual, returns_sum
    return block_program(neuron, scan.backend, *options)[0]


def _make(definition: NormedNeuron, backend: str) -> BlockProgram:
    values = definition.values()
    compiled = prepare(definition, backend, definition.description().statics, kinds_of(values))
    used = compiled.step.params
    tensors = tuple(label for label in used if isinstance(values[label], Tensor))
    floats = {label: v for label in used if isinstance(v := values[label], float)}
    return BlockProgram(
        name=compiled.name,
        backend=backend,
        binary=compiled.step.binary,
        num_states=len(compiled.step.states),
        by_batch=definition.by_batch,
        normalizes_residual=definition.normalizes_residual,
        returns_sum=definition.returns_sum,
        rebuilds=compiled.rebuilds,
        scalars=list(floats.values()),
        floats=tuple(label.removeprefix("neuron.") for label in floats),
        tensors=tensors,
        own=tuple(n.removeprefix("neuron.") for n in tensors if n.startswith("neuron.")),
    )
