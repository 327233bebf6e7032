"""Scans by microbatches, whose states are passed between processes; see `state_passing`.

Microbatches are slices of the whole sequences, read and written in place. A scan without state
passing is one microbatch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spikefuse.scan.execution import PLAIN, REBUILD, REPAIR, Execution, execution_of
from spikefuse.scan.program import Variant
from spikefuse.scan.records import Arguments, MaybeTensors, Results, Tensors, Wanted
from spikefuse.scan.state_passing import exchange

Gradients = Arguments[Tensor | None]


class Microbatch(NamedTuple):
    """A slice of a scan.

    Attributes:
        rows: which samples of the batch, None for all.
        arguments: of these samples, initial states included.
        saved: the states saved for backward.
        rebuilds: whether backward must first write `saved`.
    """

    rows: slice | None
    execution: Execution
    arguments: Arguments[Tensor]
    saved: Tensors = ()
    rebuilds: bool = False

    def run(
        self,
        incoming: Results[Tensor | None],
        needs: Arguments[bool],
        inputs: MaybeTensors = (),
        variant: Variant = PLAIN,
    ) -> Gradients:
        """Run the reverse of the program; see `backward`."""
        execution, written = self.execution, inputs
        if inputs and self.rows is not None:
            written = _slices(inputs, self.rows)
        # Gradients of states that arrived go back to the process that sent the states.
        needs = needs._replace(states=[True] * len(self.arguments.states or ()))
        gradients = execution.new_gradients(needs, written)
        return execution.backward(self.arguments, self.saved, incoming, gradients, variant)


def split(
    whole: Execution, arguments: Arguments[Tensor], saved: Tensors | None = None
) -> list[Microbatch]:
    """The microbatches of a scan, with what `forward` has saved of each, if that is given.

    Args:
        whole: the execution on the whole batch.
    """
    passing, scans = arguments.passing, []
    if passing is None:
        rebuilds = bool(whole.num_saved and not saved)
        saved = whole.new_saved() if rebuilds else saved or ()
        return [Microbatch(None, whole, arguments, saved, rebuilds)]
    slices = passing.microbatches(arguments.inputs[0].shape[1])
    for i, rows in enumerate(slices):
        own, execution, rebuilds = arguments, whole, False
        if len(slices) > 1:
            inputs = [x[:, rows] for x in own.inputs]
            own = own._replace(inputs=inputs, states=[s[rows] for s in own.states or ()])
            execution = execution_of(whole.program.name, inputs)
        each = len(saved or ()) // len(slices)
        read = [] if saved is None else saved[i * each : (i + 1) * each]
        if not passing.is_first and read:
            own = own._replace(states=read[: execution.num_states])
            read = read[execution.num_states :]
        if saved is not None and execution.num_saved and not read:
            read, rebuilds = execution.new_saved(), True
        scans.append(Microbatch(rows if len(slices) > 1 else None, execution, own, read, rebuilds))
    return scans


def forward(whole: Execution, arguments: Arguments[Tensor], wanted: Wanted) -> Results[Tensor]:
    """Run a program over microbatches. Bits are written for a single one only. What is saved are,
    for each microbatch, the states that arrived and those before its chunks."""
    passing, scans = arguments.passing, split(whole, arguments)
    assert passing is not None
    results = whole.new_results(Wanted(save=False))
    receives = not passing.is_first
    speculates = receives and passing.speculates and scans[0].execution.program.repairs
    inner = Wanted(
        final=wanted.final or not passing.is_last,
        bits=wanted.bits and len(scans) == 1,
        save=wanted.save or speculates,  # a repair ends where a saved state is what it was
    )
    found: dict[int, Results[Tensor]] = {}

    def compute(i: int, states: Sequence[Tensor]) -> Sequence[Tensor]:
        rows, execution, own, *_ = scans[i]
        outputs = results.outputs if rows is None else [y[:, rows] for y in results.outputs]
        written = execution.new_results(inner, outputs)
        found[i] = execution.forward(own._replace(states=states), written)
        return found[i].finals

    def repair(i: int, states: Sequence[Tensor]) -> Sequence[Tensor]:
        _, execution, own, *_ = scans[i]
        return execution.forward(own._replace(states=states), found[i], repair=True).finals

    buffers = [s.execution.new_steps() if receives else [*(s.arguments.states or ())]
               for s in scans]  # fmt: skip
    exchange(passing.forward(buffers), compute, repair if speculates else None)
    saved: list[Tensor] = []
    for i, states in enumerate(buffers):
        saved += [*(states if receives else ()), *(found[i].saved if wanted.save else ())]
    finals = joined([found[i].finals for i in range(len(scans))]) if wanted.final else []
    return results._replace(finals=finals, saved=saved, bits=found[0].bits)


def backward(
    scans: Sequence[Microbatch],
    incoming: Results[Tensor | None],
    needs: Arguments[bool],
    inputs: MaybeTensors = (),
) -> tuple[list[Gradients], list[Results[Tensor | None]]]:
    """Run the reverse of a program over microbatches.

    Args:
        inputs: the gradients of the inputs of the whole batch, to be written; none to make them.

    Returns:
        For each microbatch its gradients, of parameters as sums, and the gradients of its results,
        those of the final states that arrived included.
    """
    passing = scans[0].arguments.passing
    if passing is None:
        (scan,), variant = scans, REBUILD if scans[0].rebuilds else PLAIN
        return [scan.run(incoming, needs, inputs, variant)], [incoming]
    found: dict[int, Gradients] = {}
    arrived: dict[int, Results[Tensor | None]] = {}

    def compute(i: int, ends: Sequence[Tensor]) -> MaybeTensors:
        arrived[i] = _incoming(incoming, scans[i].rows, ends)
        variant = REBUILD if scans[i].rebuilds else PLAIN
        found[i] = scans[i].run(arrived[i], needs, inputs, variant)
        return found[i].states or ()

    def repair(i: int, ends: Sequence[Tensor]) -> MaybeTensors:
        rows, execution, own, saved, _ = scans[i]
        arrived[i] = _incoming(incoming, rows, ends)
        return execution.backward(own, saved, Results((), ends), found[i], REPAIR).states or ()

    receives = not passing.is_last
    speculates = receives and passing.speculates and scans[0].execution.program.repairs
    buffers = [s.execution.new_steps() if receives else [] for s in scans]
    exchange(passing.backward(buffers), compute, repair if speculates else None)
    places = range(len(scans))
    return [found[i] for i in places], [arrived[i] for i in places]


def of_states(arguments: Arguments[Tensor], found: Sequence[Gradients]) -> MaybeTensors:
    """The gradients of the initial states, which only the process of the first steps reads."""
    if arguments.passing is not None and not arguments.passing.is_first:
        return [None] * len(arguments.states or ())
    return joined([g.states or () for g in found])


def added(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Sums over rows that have None in the same places."""
    if len(rows) == 1:
        return [*rows[0]]
    return [None if terms[0] is None else reduce(operator.add, terms)
            for terms in zip(*rows, strict=True)]  # fmt: skip


def joined(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """The states of a batch from those of its microbatches."""
    if len(rows) == 1:
        return [*rows[0]]
    return [torch.cat(states) for states in zip(*rows, strict=True)]


def _slices(sequences: MaybeTensors, rows: slice) -> MaybeTensors:
    return [None if x is None else x[:, rows] for x in sequences]


def _incoming(
    incoming: Results[Tensor | None], rows: slice | None, ends: Sequence[Tensor]
) -> Results[Tensor | None]:
    """The gradients of a microbatch's results; `ends` arrived for its final states."""
    outputs, finals = incoming.outputs, incoming.finals
    if rows is not None:
        outputs = _slices(outputs, rows)
        finals = [None if g is None else g[rows] for g in finals]
    if finals and ends:
        finals = [b if a is None else a + b for a, b in zip(finals, ends, strict=True)]
    return Results(outputs, finals or ends)
