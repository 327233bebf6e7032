"""State passing: where the first state of a scan comes from and where its last state goes.

A scan of a whole sequence begins at rest, or from the state that its caller gives, and its last
state stays here: `StatePassing` itself does nothing. A subclass connects scans whose processes hold
neighbouring steps of a sequence. Forward, states travel with time; backward, their gradients travel
against it.

The batch is split into microbatches, so that one process computes a microbatch while the next
process computes the one before. They are slices of the whole sequences, read and written in place.

When kernels support repair, processes scan speculatively from rest and fix up the result when the
state arrives. A neuron soon forgets its first state, by its leak and its resets, so the repair ends
as soon as all states of a thread block are, to the last bit, what they were. Backward is linear:
the repair adds the contribution of the gradients that arrive, until nearly nothing is left of it.
The repair of a neuron that forgets nothing runs to the last step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import compress, islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spikefuse.scan.execution import (
    REPAIR,
    Arguments,
    Execution,
    Incoming,
    Needs,
    Results,
    ScanGradients,
    Tensors,
    Wanted,
    execution_of,
)

#: The states of each microbatch, or their gradients.
Buffers = Sequence[list[Tensor]]


class Collectives(Protocol):
    """Sums and gathers over all processes that hold steps of a sequence."""

    def sum(self, x: Tensor) -> None:
        """Replace `x` by its sum over the processes."""

    def gather(self, x: Tensor) -> Tensor:
        """`x` of all k processes, `[k, ...]`."""


class Channel:
    """Passes the states of one pass between processes; this base class passes none."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers

    def receive(self, i: int) -> list[Tensor]:
        """The states of microbatch i, once they have arrived; empty where the sequence begins."""
        return self.buffers[i]

    def send(self, i: int, states: Sequence[Tensor]) -> None:
        """Send the last states of microbatch i."""

    def close(self) -> None:
        """End the pass."""


class StatePassing:
    """How a scan receives its first state and sends its last; by default it does neither.

    Attributes:
        is_first: whether no steps come before.
        is_last: whether no steps come after.
        speculates: whether to scan before the states have arrived.
        statistics: over which batch norms take their statistics, None for this process alone.
    """

    is_first = is_last = True
    speculates = False
    statistics: Collectives | None = None

    def begin(self, x: Tensor, call: str, has_state: bool) -> None:
        """Begin a call of a network on the steps `x`.

        Args:
            call: describes what must be the same in all processes, besides what `x` shows.
            has_state: whether the caller passes an initial state.
        """

    def end(self) -> None:
        """End a call of a network, except for its backward pass."""

    def microbatches(self, batch: int) -> list[slice]:
        """The slices of a batch, the same in all processes."""
        return [slice(0, batch)]

    def forward(self, buffers: Buffers) -> Channel:
        """The channel of a forward pass; `buffers` are unwritten."""
        return Channel(buffers)

    def backward(self, buffers: Buffers) -> Channel:
        """The channel of a backward pass, which runs against time."""
        return Channel(buffers)


#: For a sequence whose steps are all here.
WHOLE = StatePassing()


class MicrobatchScan(NamedTuple):
    """A slice of a scan.

    Attributes:
        rows: which samples of the batch, None for all.
        arguments: of these samples, initial states included.
        saved: the states saved for backward.
    """

    rows: slice | None
    execution: Execution
    arguments: Arguments
    saved: Tensors


def split(passing: StatePassing, name: str, arguments: Arguments) -> list[MicrobatchScan]:
    """The microbatches of a scan, with their initial states as far as they are here."""
    microbatches = passing.microbatches(arguments.inputs[0].shape[1])
    if len(microbatches) == 1:
        execution = execution_of(name, arguments.inputs)
        return [MicrobatchScan(microbatches[0], execution, arguments, [])]
    found = []
    for rows in microbatches:
        inputs = [x[:, rows] for x in arguments.inputs]
        states = [s[rows] for s in arguments.states]
        own = arguments._replace(inputs=inputs, states=states)
        found.append(MicrobatchScan(rows, execution_of(name, inputs), own, []))
    return found


def scan_forward(
    passing: StatePassing, name: str, arguments: Arguments, wanted: Wanted
) -> tuple[Results, list[Tensor], list[tuple[int, int]]]:
    """Run a program forward over microbatches.

    Returns:
        The results for the whole batch, without saved states; the initial and saved states of all
        microbatches, for autograd to save, and their numbers in each. Bits are written for a single
        microbatch only.
    """
    scans = split(passing, name, arguments)
    outputs = execution_of(name, arguments.inputs).new_results(Wanted()).outputs
    receives = not passing.is_first
    speculates = receives and passing.speculates and scans[0].execution.program.repairs
    # A repair ends where a saved state is what it was.
    inner = Wanted(
        save=wanted.save or speculates,
        final=wanted.final or not passing.is_last,
        bits=wanted.bits and len(scans) == 1,
    )

    def compute(scan: MicrobatchScan, states: list[Tensor]) -> Results:
        results = scan.execution.new_results(inner, [y[:, scan.rows] for y in outputs])
        return scan.execution.forward(scan.arguments._replace(states=states), results)

    buffers = [scan.execution.new_steps() if receives else list(scan.arguments.states)
               for scan in scans]  # fmt: skip
    channel = passing.forward(buffers)
    found = [compute(scan, []) for scan in scans] if speculates else []
    tensors: list[Tensor] = []
    counts: list[tuple[int, int]] = []
    for i, scan in enumerate(scans):
        states = channel.receive(i)
        if speculates:
            repaired = scan.arguments._replace(states=states)
            scan.execution.forward(repaired, found[i], repair=True)
        else:
            found.append(compute(scan, states))
        saved = (found[i].saved or []) if wanted.save else []
        tensors += [*states, *saved]
        counts.append((len(states), len(saved)))
        channel.send(i, found[i].finals)
    channel.close()
    finals: list[Tensor] = []
    if wanted.final:
        rows = zip(*[results.finals for results in found], strict=True)
        finals = [torch.cat(states) for states in rows]
    return Results(outputs, finals, None, found[0].bits), tensors, counts


def scan_backward(
    passing: StatePassing,
    scans: Sequence[MicrobatchScan],
    incoming: Incoming,
    needs: Needs,
    inputs: list[Tensor],
) -> ScanGradients:
    """Run a program's backward over microbatches.

    Args:
        inputs: the unwritten gradients of the needed inputs.

    Returns:
        The gradients, among them reduced ones of the parameters.
    """
    # Gradients of states that arrived go back to the process that sent the states.
    needs = needs._replace(states=bool(scans[0].arguments.states))

    def compute(i: int, ends: list[Tensor]) -> ScanGradients:
        rows, execution, arguments, saved = scans[i]
        into = execution.new_gradients(needs, [g[:, rows] for g in inputs])
        return execution.backward(arguments, saved, incoming_of(incoming, rows, ends), into)

    found, _ = exchange_gradients(passing, scans, compute)
    states = [torch.cat(rows) for rows in zip(*[g.states for g in found], strict=True)]
    params = list(compress(scans[0].arguments.params, needs.params))
    reduced = [scans[i].execution.reduce(g.params, params) for i, g in enumerate(found)]
    totals = [reduce(operator.add, terms) for terms in zip(*reduced, strict=True)]
    return ScanGradients(needs, inputs, states, totals)


def exchange_gradients(
    passing: StatePassing,
    scans: Sequence[MicrobatchScan],
    compute: Callable[[int, list[Tensor]], ScanGradients],
) -> tuple[list[ScanGradients], Buffers]:
    """Differentiate microbatches, with repair where kernels support it.

    Args:
        compute: differentiate a microbatch, given the gradients of its final states.

    Returns:
        What `compute` returned, and the gradients of the final states that arrived.
    """
    receives = not passing.is_last
    speculates = receives and passing.speculates and scans[0].execution.program.repairs
    channel = passing.backward([s.execution.new_steps() if receives else [] for s in scans])
    found = [compute(i, []) for i in range(len(scans))] if speculates else []
    for i in range(len(scans)):
        ends = channel.receive(i)
        if speculates:
            _, execution, arguments, saved = scans[i]
            execution.backward(arguments, saved, Incoming((), ends), found[i], REPAIR)
        else:
            found.append(compute(i, ends))
        channel.send(i, found[i].states)
    channel.close()
    return found, channel.buffers


def incoming_of(incoming: Incoming, rows: slice | None, ends: Tensors) -> Incoming:
    """The gradients of a microbatch's results; `ends` arrived for its final states."""
    outputs = [None if g is None else g[:, rows] for g in incoming.outputs]
    own = [None if g is None else g[rows] for g in incoming.finals]
    if not (own and ends):
        return Incoming(outputs, own or ends)
    return Incoming(outputs, [b if a is None else a + b for a, b in zip(own, ends, strict=True)])


def with_states(
    scans: Sequence[MicrobatchScan], tensors: Sequence[Tensor], counts: Sequence[tuple[int, int]]
) -> list[MicrobatchScan]:
    """Scans from `split`, with the states that `scan_forward` returned to be saved."""
    rest = iter(tensors)
    found = []
    for scan, (num_states, num_saved) in zip(scans, counts, strict=True):
        arguments = scan.arguments._replace(states=[*islice(rest, num_states)])
        found.append(scan._replace(arguments=arguments, saved=[*islice(rest, num_saved)]))
    return found
