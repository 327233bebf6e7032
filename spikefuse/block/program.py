"""The program of a neuron with a batch norm, and where it expects each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

from spikefuse._torch import constant_result
from spikefuse.block.definition import SCALES, Kind, NormedNeuron, value_names, with_batch_norm
from spikefuse.neurons.definition import Neuron, with_outputs
from spikefuse.scan.kinds import CHANNEL, FLOAT, SCALAR, kinds_of
from spikefuse.scan.program import Program, prepare, program

T = TypeVar("T")
_kind = attrgetter("ndim")
#: Before the names of the values of a block's neuron.
NEURON = "neuron."


@dataclass(frozen=True)
class BlockProgram:
    """A program whose step begins with a batch norm.

    Attributes:
        tensors: the names of its tensor parameters, in its order; those of the neuron begin with
            "neuron.".
        own, own_floats: the names of the neuron's tensors and floats that it reads, without it.
        order: for each tensor of the program, its place among the norms' values, as in
            `value_names`, followed by the neuron's tensors.
        num_norms: one, or two if the residual is normalized, too.
    """

    name: str
    kind: Kind
    program: Program
    tensors: tuple[str, ...]
    own: tuple[str, ...]
    own_floats: tuple[str, ...]
    order: tuple[int, ...]
    num_norms: int
    _summed: dict[tuple[bool, ...], list[bool]] = field(default_factory=dict, repr=False)

    def summed(self, needs_own: Sequence[bool]) -> list[bool]:
        """Of which tensors the first backward pass sums the gradients, if these of the neuron need
        some: of the shift and the scales, too."""
        key = tuple(needs_own)
        if key not in self._summed:
            own, always = iter(key), ("shift", *SCALES)
            self._summed[key] = [next(own) if name.startswith(NEURON) else name in always
                                 for name in self.tensors]  # fmt: skip
        return self._summed[key]

    def select(
        self, neuron: str, params: Sequence[T], scalars: Sequence[float]
    ) -> tuple[list[T], list[float]]:
        """The tensors and floats that the block reads, of those that the program of the neuron
        alone reads."""
        alone = program(neuron)
        tensors = dict(zip(alone.params(SCALAR, CHANNEL), params, strict=True))
        floats = dict(zip(alone.params(FLOAT), scalars, strict=True))
        return [tensors[n] for n in self.own], [floats[n] for n in self.own_floats]


@cache
def block_program(name: str) -> BlockProgram:
    """The program of a block, by its name."""
    made = program(name)
    assert isinstance(made.definition, NormedNeuron)
    kind, tensors = made.definition.kind, made.params(SCALAR, CHANNEL)
    own, others = [n for n in tensors if n.startswith(NEURON)], value_names(kind)
    return BlockProgram(
        name=name,
        kind=kind,
        program=made,
        tensors=tuple(tensors),
        own=tuple(n.removeprefix(NEURON) for n in own),
        own_floats=tuple(n.removeprefix(NEURON) for n in made.params(FLOAT)),
        order=tuple(map((*others, *own).index, tensors)),
        num_norms=1 + kind.normalizes_residual,
    )


# For torch.compile, see `spikefuse.scan.program.sizes_of`.
@constant_result
def traits(name: str) -> tuple[bool, bool, bool, tuple[int, ...]]:
    """Of a block's program: whether its norms use the statistics of the batch, whether it computes
    their scales, whether backward can do without saved states, and `BlockProgram.order`."""
    made = block_program(name)
    return made.kind.by_batch, bool(made.kind.eps), made.program.rebuilds, made.order


def prepare_block(
    neuron: Neuron, backend: str, kind: Kind, outputs: tuple[str, ...] = ()
) -> BlockProgram:
    """The program of a neuron with a norm; see `Wanted.outputs`. `Program.definition` is a neuron,
    too: so a block is made for a scan of which only the program is known."""
    description = neuron.description()
    tensors = [x for x in description.values(neuron).values() if isinstance(x, Tensor)]
    key = "block", backend, kind, outputs, *map(_kind, tensors)
    found: BlockProgram | None = description.cache.get(key)
    if found is None:
        norm = (torch.zeros(2),) * len(value_names(kind._replace(by_batch=False)))
        definition = with_batch_norm(with_outputs(neuron, outputs), norm, kind)
        statics, kinds = definition.description().statics, kinds_of(definition.values())
        name = prepare(definition, backend, statics, kinds, description.cache).name
        found = description.cache[key] = block_program(name)
    return found
