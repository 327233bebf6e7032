"""Whether the steps of a network are those of the reference.

A spike that rounding turns changes what follows in all layers after it, so the results of two right
networks may have little in common. Hence two comparisons. Forced, each neuron hands on the
reference's spikes, through which gradients flow as through its own: the spikes that it would have
handed on, given the same inputs, the logits and the gradients are held to the reference's. And as
it is, a network has to repeat its own first step, however it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks.steps import STEPS, Network, Result, eager_loop
from benchmarks.workloads import Task

# Spikes may differ in a few times as many places as for a threshold lower by two units in the last
# place, and in some where that turns none.
THRESHOLD_MOVED = 1 - 2.0**-22
FACTOR, SPARE_FLIPS = 4.0, 16
# How far apart results may be that are rounded differently, relative to their size.
ROUNDING = {"float32": 2e-3, "bfloat16": 2e-2}


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The root mean square of the differences, over that of what is expected."""
    pairs = list(zip(found, expected, strict=True))
    squares = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    size = sum(b.double().square().sum() for _, b in pairs)
    return float((squares / size).sqrt())


@dataclass
class Reference:
    """A step of the eager loop, and the spikes of all neurons in the order of their calls."""

    result: Result
    spikes: list[Tensor]
    flips_allowed: int

    @classmethod
    def of(cls, task: Task, kind: str) -> Reference:
        network, spikes = eager_loop(task), []

        def note(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            spikes.append(output.detach() != 0)

        with hooked(network, note):
            result = STEPS[kind](task, network)()
        net = task.network(functools.partial(task.workload.neuron, THRESHOLD_MOVED))
        call = functools.partial(sf.Temporal(net), impl="reference")
        moved = Network(net, call, neuron=sf.LIF)
        _, flips = forced(moved, STEPS[kind](task, moved), spikes)
        return cls(result, spikes, round(FACTOR * flips) + SPARE_FLIPS)

    @property
    def num_spikes(self) -> int:
        return sum(s.numel() for s in self.spikes)


def forced(
    network: Network, step: Callable[[], Result], spikes: Sequence[Tensor]
) -> tuple[Result, int]:
    """A step in which each neuron hands on given spikes, and how many of its own differ."""
    given, flips = iter(spikes), [torch.zeros((), dtype=torch.int64)]

    def replace(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        right = torch.empty_like(output).copy_(next(given))
        flips.append((right != output).sum())
        return output + (right - output).detach()

    with hooked(network, replace):
        result = step()
    assert next(given, None) is None, "the network has fewer neurons than the reference"
    return result, sum(int(count) for count in flips)


@contextmanager
def hooked(network: Network, hook: Callable[..., Any]) -> Iterator[None]:
    assert network.neuron is not None
    handles = [
        m.register_forward_hook(hook)
        for m in network.net.modules()
        if isinstance(m, network.neuron)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Agreement:
    """What the steps of a network have to be.

    Attributes:
        expected: its first step, run eagerly.
        spread: how far apart two such steps are, which may add numbers in any order.
        flips: spikes that differ from the reference's, given the same inputs.
        errors: how far a forced step is from the reference's, by what.
    """

    def __init__(
        self, task: Task, kind: str, make: Callable[[Task], Network], reference: Reference
    ) -> None:
        self.rounding = ROUNDING[task.dtype]
        self.flips, self.flips_allowed = 0, reference.flips_allowed
        self.errors: dict[str, float] = {}
        network = make(task)
        step = STEPS[kind](task, network)
        if network.neuron is not None:
            result, self.flips = forced(network, step, reference.spikes)
            task.restore(network.net)
            self.errors["logits"] = apart([result.logits], [reference.result.logits])
            if result.grads and network.same_gradient:
                self.errors["gradients"] = apart(result.grads, reference.result.grads)
        self.expected = step()
        task.restore(network.net)
        self.spread = apart(_all(step()), _all(self.expected))
        if network.exact:
            self.flips_allowed = 0
            logits = [self.expected.logits], [reference.result.logits]
            self.errors["logits, not forced"] = max(0.0, apart(*logits) - self.spread)

    def verify(self, result: Result, labels: Tensor) -> None:
        """Check a step from the shared weights.

        Raises:
            AssertionError: what differs.
        """
        assert self.flips <= self.flips_allowed, (
            f"{self.flips} spikes differ for the same inputs, allowed are {self.flips_allowed}"
        )
        for what, error in self.errors.items():
            assert error <= self.rounding, (
                f"{what} differ by {error:.3g} of their size, allowed is {self.rounding:g}"
            )
        assert all(value.isfinite().all() for value in _all(result)), "the results are not finite"
        error, allowed = apart(_all(result), _all(self.expected)), self.rounding + 2 * self.spread
        assert error <= allowed, (
            f"steps differ by {error:.3g} of their size from its first, allowed is {allowed:.3g}"
        )
        if result.loss is not None:
            loss = F.cross_entropy(result.logits, labels)
            assert torch.allclose(result.loss, loss, rtol=1e-4), "the loss is another's"

    def about(self) -> dict[str, Any]:
        """For the record."""
        errors = {what: float(f"{error:.3g}") for what, error in self.errors.items()}
        return {
            "flips": self.flips,
            "flips_allowed": self.flips_allowed,
            "errors": errors,
            "spread": float(f"{self.spread:.3g}"),
        }


def _all(result: Result) -> list[Tensor]:
    return [result.logits, *result.grads]
