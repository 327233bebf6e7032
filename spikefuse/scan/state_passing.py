"""A scan whose sequence goes on in other processes: states come from the one with the steps
before and go to the one with the steps after, in backward their gradients the other way.

It is done in parts of the batch, so that one process computes a part while the next one computes
the part before. Parts are read and written where they lie in the whole sequences.

Where kernels can mend what they have made, nobody waits. All processes scan at once, from rest; a
neuron soon forgets where it has begun, by its leak and its resets. When the states arrive, each
process scans again from them, until all states of a thread block are, to the last bit, those that
it had before. In backward, which is linear, it adds what arrives makes of the gradients, until
next to nothing is left of it. What a neuron never forgets is followed to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from spikefuse.scan.execution import Call, Found, call_of, spec

#: The tensors of each part, such as its states.
Parts = Sequence[Sequence[Tensor]]
#: Computes a part and gives what the next process is to get.
Run = Callable[[int], Sequence[Tensor]]
#: Begins a part before what it needs is there.
Ahead = Callable[[int], None]
V = TypeVar("V")


class Relay(Protocol):
    """The connections of a process to those with the steps before and after its own."""

    @property
    def is_first(self) -> bool:
        """Whether no steps come before."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether no steps come after."""
        ...

    @property
    def speculates(self) -> bool:
        """Whether to begin before the states are there."""
        ...

    def parts(self, batch: int) -> list[slice]:
        """The parts of a batch, the same in all processes."""
        ...

    def forward(self, received: Parts, run: Run, ahead: Ahead | None = None) -> None:
        """For each part wait until its tensors in `received` have been written by the process
        before, `run` it, and send what that returns to the process after. The first process
        receives nothing, the last one sends nothing.

        Args:
            ahead: called for each part before anything is waited for; not in the first process.
        """
        ...

    def backward(self, received: Parts, run: Run, ahead: Ahead | None = None) -> None:
        """The same from the process after to the one before."""
        ...


@_disable_dynamo
def relayed(
    name: str,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    scalars: list[float],
    save: bool,
    final: bool,
    relay: Relay,
    bits: list[Tensor] | None = None,
) -> Sequence[Tensor]:
    """Outputs of the steps that are here, then, if asked for, the states after the last of them.

    Args:
        states: those before the first step of all, in the first process; none in the others.
        relay: how states travel. The rest is as the library op `spikefuse::scan` has it.
        bits: as `Call.forward` takes them.
    """
    tensors = (*inputs, *states, *params)
    work = _Work(name, relay, scalars, len(inputs), len(states), save, final, bits)
    return _RelayedScan.apply(work, *tensors) if save else work.forward(tensors)[0]


def calls_of(
    name: str, inputs: Sequence[Tensor], rows: Sequence[slice]
) -> tuple[list[Call], list[list[Tensor]]]:
    """The calls of a program on parts of the batch, and their inputs."""
    xs = [[x[:, part] for x in inputs] for part in rows]
    return [call_of(name, spec(x)) for x in xs], xs


def scan_parts(
    name: str,
    relay: Relay,
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    scalars: Sequence[float],
    save: bool,
    final: bool,
    bits: list[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[tuple[int, int]]]:
    """A program forward over parts of the batch, states handed on: (outputs, final states if asked
    for, initial and stored states of the parts, how many of both each part has).

    Args:
        bits: gets those of the outputs if there is one part, whose bits are those of all.
    """
    rows = relay.parts(inputs[0].shape[1])
    bits = bits if len(rows) == 1 else None
    calls, xs = calls_of(name, inputs, rows)
    outputs, _, _ = call_of(name, spec(inputs)).results(False, False)
    starts = [[s[part] for s in states] for part in rows]
    if not relay.is_first:
        starts = [call.steps() for call in calls]
    kept: list[Tensor] = []
    counts: list[tuple[int, int]] = []
    finals: list[list[Tensor]] = []
    speculates = can_speculate(relay, calls)
    # By the stored states the second scan tells where it has met the first.
    how = save or (speculates and not relay.is_first), final or not relay.is_last, bits

    def compute(i: int, begins: Sequence[Tensor]) -> Found:
        into = [y[:, rows[i]] for y in outputs]
        return calls[i].forward(xs[i], begins, params, scalars, *how, into)

    def mend(i: int, found: Found) -> None:
        calls[i].revise(xs[i], starts[i], params, scalars, *found, bits or ())

    def finish(i: int, found: Found) -> list[Tensor]:
        _, ends, stored = found
        stored = stored if save else []
        kept.extend((*starts[i], *stored))
        counts.append((len(starts[i]), len(stored)))
        finals.append(ends)
        return ends

    pass_on(relay.forward, starts, compute, mend if speculates else None, finish)
    ends = [torch.cat(parts) for parts in zip(*finals, strict=True)] if final else []
    return outputs, ends, kept, counts


def pass_on(
    way: Callable[[Parts, Run, Ahead | None], None],
    received: Parts,
    compute: Callable[[int, Sequence[Tensor]], V],
    mend: Callable[[int, V], None] | None,
    finish: Callable[[int, V], Sequence[Tensor]],
) -> None:
    """Hand states on, or their gradients: `compute` each part from what has arrived for it, and
    send what `finish` gives.

    Args:
        way: `forward` or `backward` of a relay.
        mend: with it, parts are computed from nothing, before anything is waited for, and mended
            once all has arrived in `received`.
    """
    begun: list[V] = []

    def ahead(i: int) -> None:
        begun.append(compute(i, ()))

    def run(i: int) -> Sequence[Tensor]:
        if mend is None or not begun:
            return finish(i, compute(i, received[i]))
        mend(i, begun[i])
        return finish(i, begun[i])

    way(received, run, None if mend is None else ahead)


def can_speculate(relay: Relay, calls: Sequence[Call]) -> bool:
    return relay.speculates and calls[0].program.revises


@dataclass
class _Work:
    """One scan in parts: what both passes need besides the tensors that autograd keeps."""

    name: str
    relay: Relay
    scalars: list[float]
    num_inputs: int
    num_states: int
    save: bool
    final: bool
    bits: list[Tensor] | None = None
    #: How many initial and stored states of each part are kept.
    counts: list[tuple[int, int]] = field(default_factory=list)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(outputs and the final states that are asked for, states to keep for backward)"""
        inputs, states, params = self._split([t.detach() for t in tensors])
        bits, self.bits = self.bits, None  # the caller's: not for as long as this lives
        how = params, self.scalars, self.save, self.final, bits
        outputs, ends, kept, self.counts = scan_parts(self.name, self.relay, inputs, states, *how)
        return [*outputs, *ends], kept

    def backward(
        self, saved: Sequence[Tensor], grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor], list[Tensor | None]]:
        """Gradients of the inputs, of the initial states if some were passed, and of the
        parameters.

        Args:
            needs: which of the tensors need one; those that hooks have kept do not know.
        """
        num_tensors = len(saved) - sum(map(sum, self.counts))
        inputs, states, params = self._split(saved[:num_tensors])
        rest = iter(saved[num_tensors:])
        kept = [[[next(rest) for _ in range(n)] for n in counts] for counts in self.counts]
        rows = self.relay.parts(inputs[0].shape[1])
        calls, xs = calls_of(self.name, inputs, rows)
        num_outputs = calls[0].num_outputs
        needs_inputs, _, needs_params = self._split(needs)
        wanted = needs_inputs, needs_params
        grad_inputs = call_of(self.name, spec(inputs)).gradients(wanted[0], False, ())[0]
        received = [[] if self.relay.is_last else call.steps() for call in calls]
        begins: list[list[Tensor]] = []
        sums: list[Tensor] = []

        def differentiate(i: int, ends: Sequence[Tensor]) -> Found:
            """With gradients of the final states besides those of the outputs here."""
            part, (starts, stored) = rows[i], kept[i]
            own = [None if g is None else g[part] for g in grads[num_outputs:]]
            outer = [None if g is None else g[:, part] for g in grads[:num_outputs]]
            at = xs[i], starts, params, self.scalars, stored, outer, both(own, ends)
            return calls[i].differentiate(*at, *wanted, into=[g[:, part] for g in grad_inputs])

        def mend(i: int, found: Found) -> None:
            starts, stored = kept[i]
            at = xs[i], starts, params, self.scalars, stored, received[i]
            calls[i].revise_gradients(*at, *wanted, found)

        def finish(i: int, found: Found) -> list[Tensor]:
            reduced = calls[i].reduced(found[2], params, wanted[1])
            begins.append(found[1])
            sums[:] = [a + b for a, b in zip(sums, reduced, strict=True)] if i else reduced
            return found[1]

        how = differentiate, mend if can_speculate(self.relay, calls) else None, finish
        pass_on(self.relay.backward, received, *how)
        whole = zip(states, zip(*begins, strict=True), strict=True) if states else ()
        return (
            _spread(grad_inputs, wanted[0]),
            [torch.cat(parts).to(s.dtype) for s, parts in whole],
            _spread(sums, wanted[1]),
        )

    def _split(self, values: Sequence[V]) -> tuple[Sequence[V], Sequence[V], Sequence[V]]:
        """Those of the inputs, the initial states and the parameters."""
        start, end = self.num_inputs, self.num_inputs + self.num_states
        return values[:start], values[start:end], values[end:]


class _RelayedScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, kept = work.forward(tensors)
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        ctx.work = work
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        inputs, states, params = ctx.work.backward(ctx.saved_tensors, grads, needs)
        return None, *inputs, *states, *params


def both(own: Sequence[Tensor | None], received: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of a part's final states, of which the outputs here have one part and what
    comes after has the other."""
    if not (own and received):
        return own or received
    return [b if a is None else a + b for a, b in zip(own, received, strict=True)]


def _spread(found: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    rest = iter(found)
    return [next(rest) if want else None for want in wanted]
