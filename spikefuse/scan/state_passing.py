"""State passing: where the first state of a scan comes from and where its last state goes.

A scan of a whole sequence begins at rest, or from the state that its caller gives, and its last
state stays here: `StatePassing` itself does nothing. A subclass connects scans whose processes hold
neighbouring steps of a sequence. Forward, states travel with time; backward, their gradients travel
against it.

The batch goes in microbatches, so that one process computes a microbatch while the next process
computes the one before. They are slices of the whole sequences, read and written in place.

When kernels support repair, processes scan speculatively from rest and fix up the result when the
state arrives. A neuron soon forgets its first state, by its leak and its resets, so the repair ends
as soon as all states of a thread block are, to the last bit, what they were. Backward is linear:
the repair adds the contribution of the gradients that arrive, until nearly nothing is left of it.
A neuron that forgets nothing is followed to its last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from spikefuse.scan.execution import (
    REPAIR,
    Arguments,
    Execution,
    Incoming,
    Results,
    ScanGradients,
    Tensors,
    Wanted,
    execution_of,
)

V = TypeVar("V")
#: The states of each microbatch, or their gradients.
Buffers = Sequence[list[Tensor]]


class Collectives(Protocol):
    """Sums and gathers over all processes that hold steps of a sequence."""

    def sum(self, x: Tensor) -> None:
        """Replace `x` by its sum over the processes."""

    def gather(self, x: Tensor) -> Tensor:
        """`x` of all k processes, `[k, ...]`."""


class Channel:
    """The states of one pass on their way. This one has nothing to wait for and sends nothing."""

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
        """End a call of a network, its backward pass excepted."""

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


def exchange(
    channel: Channel,
    count: int,
    compute: Callable[[int, list[Tensor]], V],
    finish: Callable[[int, V], Sequence[Tensor]],
    repair: Callable[[int, V, list[Tensor]], None] | None = None,
) -> None:
    """Compute `count` microbatches, each from the states that arrive for it, and send what `finish`
    returns.

    Args:
        repair: compute all microbatches from nothing first, and repair each one with its states.
    """
    begun = [compute(i, []) for i in range(count)] if repair is not None else []
    for i in range(count):
        states = channel.receive(i)
        if repair is None:
            result = compute(i, states)
        else:
            result = begun[i]
            repair(i, result, states)
        channel.send(i, finish(i, result))
    channel.close()


class StateMemory(NamedTuple):
    """How states lie in memory on their way: alike in all processes, whatever kernels write."""

    num: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    @classmethod
    def like(cls, x: Tensor, num: int) -> StateMemory:
        """For `num` states of a scan of `x` `[T, B, ...]`, sample after sample."""
        inner = torch.empty_like(x[0, 0], device="meta").stride()
        return cls(num, x.shape[2:], (math.prod(x.shape[2:]), *inner), x.device)

    def empty(self, batch: int) -> list[Tensor]:
        shape, dtype = (batch, *self.shape), torch.float32
        return [
            torch.empty_strided(shape, self.strides, dtype=dtype, device=self.device)
            for _ in range(self.num)
        ]

    def conform(self, states: Sequence[Tensor]) -> Sequence[Tensor]:
        if all(s.stride() == self.strides for s in states):
            return states
        return [y.copy_(s) for y, s in zip(self.empty(len(states[0])), states, strict=True)]


def split(passing: StatePassing, name: str, arguments: Arguments) -> list[MicrobatchScan]:
    """The microbatches of a scan, with their initial states as far as they are here."""
    found = []
    for rows in passing.microbatches(arguments.inputs[0].shape[1]):
        inputs = [x[:, rows] for x in arguments.inputs]
        states = [s[rows] for s in arguments.states]
        part = arguments._replace(inputs=inputs, states=states)
        found.append(MicrobatchScan(rows, execution_of(name, inputs), part, []))
    return found


def scan_forward(
    passing: StatePassing, name: str, arguments: Arguments, wanted: Wanted
) -> tuple[Results, list[MicrobatchScan]]:
    """Run a program forward over microbatches.

    Returns:
        The results for the whole batch, without saved states, and the microbatches with theirs.
        Bits are written for a single microbatch only.
    """
    parts = split(passing, name, arguments)
    outputs = execution_of(name, arguments.inputs).new_results(Wanted()).outputs
    receives = not passing.is_first
    buffers = [part.execution.new_steps() if receives else list(part.arguments.states)
               for part in parts]  # fmt: skip
    speculates = receives and can_speculate(passing, parts)
    # A repair ends where a saved state is what it was.
    inner = Wanted(
        save=wanted.save or speculates,
        final=wanted.final or not passing.is_last,
        bits=wanted.bits and len(parts) == 1,
    )
    finals: list[list[Tensor]] = []
    bits: list[Tensor] = []

    def compute(i: int, states: list[Tensor]) -> Results:
        part = parts[i]
        results = part.execution.new_results(inner, [y[:, part.rows] for y in outputs])
        return part.execution.forward(part.arguments._replace(states=states), results)

    def repair(i: int, results: Results, states: list[Tensor]) -> None:
        arguments = parts[i].arguments._replace(states=states)
        parts[i].execution.forward(arguments, results, repair=True)

    def finish(i: int, results: Results) -> list[Tensor]:
        saved = (results.saved or []) if wanted.save else []
        arguments = parts[i].arguments._replace(states=buffers[i])
        parts[i] = parts[i]._replace(arguments=arguments, saved=saved)
        finals.append(results.finals)
        bits.extend(results.bits)
        return results.finals

    channel = passing.forward(buffers)
    exchange(channel, len(parts), compute, finish, repair if speculates else None)
    ends = [torch.cat(rows) for rows in zip(*finals, strict=True)] if wanted.final else []
    return Results(outputs, ends, None, bits), parts


def scan_backward(
    passing: StatePassing, parts: Sequence[MicrobatchScan], whole: ScanGradients, incoming: Incoming
) -> list[Tensor]:
    """Run a program's backward over microbatches.

    Args:
        whole: its `inputs` are written; `needs` are those of each microbatch.

    Returns:
        The reduced gradients of the parameters; those of the initial states go to `whole.states`.
    """
    totals: list[Tensor] = []
    starts: list[list[Tensor]] = []

    def compute(i: int, ends: list[Tensor]) -> ScanGradients:
        rows, execution, arguments, saved = parts[i]
        into = execution.new_gradients(whole.needs, [g[:, rows] for g in whole.inputs])
        return execution.backward(arguments, saved, incoming_of(incoming, rows, ends), into)

    def finish(i: int, found: ScanGradients) -> list[Tensor]:
        _, execution, arguments, _ = parts[i]
        params = compress(arguments.params, whole.needs.params)
        reduced = execution.reduce(found.params, [*params])
        totals[:] = [a + b for a, b in zip(totals, reduced, strict=True)] if i else reduced
        starts.append(found.states)
        return found.states

    exchange_gradients(passing, parts, (compute, finish))
    whole.states[:] = [torch.cat(rows) for rows in zip(*starts, strict=True)]
    return totals


def exchange_gradients(
    passing: StatePassing,
    parts: Sequence[MicrobatchScan],
    steps: tuple[
        Callable[[int, list[Tensor]], ScanGradients],
        Callable[[int, ScanGradients], Sequence[Tensor]],
    ],
) -> Buffers:
    """`exchange` against time, with repair where kernels support it; `steps` are its `compute` and
    `finish`. Returns the gradients of the final states that arrived."""
    receives = not passing.is_last
    buffers = [part.execution.new_steps() if receives else [] for part in parts]

    def repair(i: int, found: ScanGradients, ends: list[Tensor]) -> None:
        _, execution, arguments, saved = parts[i]
        execution.backward(arguments, saved, Incoming((), ends), found, REPAIR)

    speculates = receives and can_speculate(passing, parts)
    channel = passing.backward(buffers)
    exchange(channel, len(parts), *steps, repair if speculates else None)
    return buffers


def incoming_of(incoming: Incoming, rows: slice | None, ends: Tensors) -> Incoming:
    """The gradients of a microbatch's results; `ends` arrived for its final states."""
    outputs = [None if g is None else g[:, rows] for g in incoming.outputs]
    own = [None if g is None else g[rows] for g in incoming.finals]
    if not (own and ends):
        return Incoming(outputs, own or ends)
    return Incoming(outputs, [b if a is None else a + b for a, b in zip(own, ends, strict=True)])


def can_speculate(passing: StatePassing, parts: Sequence[MicrobatchScan]) -> bool:
    return passing.speculates and parts[0].execution.program.repairs


def flatten(parts: Sequence[MicrobatchScan]) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The initial and saved states of microbatches, for autograd to save, and their numbers."""
    tensors = [x for part in parts for x in (*part.arguments.states, *part.saved)]
    return tensors, [(len(part.arguments.states), len(part.saved)) for part in parts]


def unflatten(
    parts: Sequence[MicrobatchScan], tensors: Sequence[Tensor], counts: Sequence[tuple[int, int]]
) -> list[MicrobatchScan]:
    """Microbatches from `split`, with the states that `flatten` gave."""
    rest = iter(tensors)
    found = []
    for part, (num_states, num_saved) in zip(parts, counts, strict=True):
        states = [next(rest) for _ in range(num_states)]
        saved = [next(rest) for _ in range(num_saved)]
        arguments = part.arguments._replace(states=states)
        found.append(part._replace(arguments=arguments, saved=saved))
    return found
