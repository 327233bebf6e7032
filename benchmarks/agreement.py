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
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import spikefuse as sf
from benchmarks.steps import STEPS, Network, Result, spiking
from benchmarks.workloads import Task

# Spikes may differ in a few times as many places as for a threshold lower by two units in the last
# place, and in some where that turns none.
THRESHOLD_MOVED = 1 - 2.0**-22
FACTOR, SPARE_FLIPS = 4.0, 16
# How far apart results may be that are rounded differently, relative to their size.
ROUNDING = {"float32": 2e-3, "bfloat16": 2e-2}
# The same for gradients of fused networks: norms in float32 are not rounded alike, and what that
# turns in a rounding to bfloat16 changes more in each layer before.
FUSED_ROUNDING = {"float32": 2e-3, "bfloat16": 5e-2}
# How far apart the logits of one network may be whose convolutions add in another order, which
# turns some spikes in each layer.
ALIKE = 0.1
# The share of spikes that fusing may turn. Without it, what norms give is rounded to bfloat16.
FLIP_RATE = {"float32": 1e-5, "bfloat16": 2e-3}


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The root mean square of the differences, over that of what is expected."""
    pairs = list(zip(found, expected, strict=True))
    squares = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    size = sum(b.double().square().sum() for _, b in pairs)
    return float((squares / size).sqrt())


@dataclass
class Reference:
    """A step of the eager loop, and the spikes of all neurons in the order of their calls.

    That of the fused network is another: its norms give float32 to its neurons. `flip_rate` is the
    share of its spikes that differ from the other's, given the same inputs. `rounding` is how far
    from the step a forced one may be.
    """

    result: Result
    spikes: list[Tensor]
    flips_allowed: int
    rounding: float
    flip_rate: float

    @classmethod
    def of(
        cls, task: Task, kind: str, fused: bool = False, other: Reference | None = None
    ) -> Reference:
        make = functools.partial(spiking, task, fused=fused, impl="reference")
        network, flip_rate, spikes = make(), 0.0, []
        step = STEPS[kind](task, network)
        if other is not None:
            _, flips = forced(network, step, other.spikes)
            flip_rate = flips / other.num_spikes
            task.restore(network.net)

        def note(output: Tensor) -> Tensor:
            spikes.append(output.detach() != 0)
            return output

        with handing_on(network, note):
            result = step()
        moved = make(threshold=THRESHOLD_MOVED)
        _, flips = forced(moved, STEPS[kind](task, moved), spikes)
        rounding = (FUSED_ROUNDING if fused else ROUNDING)[task.dtype]
        return cls(result, spikes, round(FACTOR * flips) + SPARE_FLIPS, rounding, flip_rate)

    @property
    def num_spikes(self) -> int:
        return sum(s.numel() for s in self.spikes)


def forced(
    network: Network, step: Callable[[], Result], spikes: Sequence[Tensor]
) -> tuple[Result, int]:
    """A step in which each neuron hands on given spikes, and how many of its own differ."""
    given, flips = iter(spikes), [torch.zeros((), dtype=torch.int64)]

    def replace(output: Tensor) -> Tensor:
        right = torch.empty_like(output).copy_(next(given))
        flips.append((right != output).sum())
        return output + (right - output).detach()

    with handing_on(network, replace):
        result = step()
    assert next(given, None) is None, "the network has fewer neurons than the reference"
    return result, sum(int(count) for count in flips)


@contextmanager
def handing_on(network: Network, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, neurons hand on what `change` makes of their spikes."""
    kind = network.neuron
    assert kind is not None
    # The forward of a neuron that is fused is not called.
    name = "call" if issubclass(kind, sf.Neuron) else "forward"
    run = getattr(kind, name)
    with mock.patch.object(kind, name, lambda *args, **more: change(run(*args, **more))):
        yield


class Agreement:
    """What the steps of a network have to be.

    Attributes:
        expected: its first step, run eagerly.
        spread: how far apart two such steps are, which may add numbers in any order.
        flips: spikes that differ from the reference's, given the same inputs.
        flip_rate: that of the reference from the reference of the network that is not fused.
        errors: how far a forced step is from the reference's, by what.
        like: how far apart the logits are from those of the network that it is like.
    """

    def __init__(
        self, task: Task, kind: str, make: Callable[[Task], Network], reference: Reference
    ) -> None:
        self.rounding, self.forced_rounding = ROUNDING[task.dtype], reference.rounding
        self.flips, self.flips_allowed = 0, reference.flips_allowed
        self.flip_rate, self.flip_rate_allowed = reference.flip_rate, FLIP_RATE[task.dtype]
        self.errors: dict[str, float] = {}
        self.like = 0.0
        network = make(task)
        step = STEPS[kind](task, network)
        if network.neuron is not None:
            result, self.flips = forced(network, step, reference.spikes)
            task.restore(network.net)
            self.errors["logits"] = apart([result.logits], [reference.result.logits])
            if result.grads and network.same_gradient:
                self.errors["gradients"] = apart(result.grads, reference.result.grads)
        elif network.like is not None:
            other = network.like()
            logits = STEPS[kind](task, other)().logits
            self.like = apart([step().logits], [logits])
            task.restore(network.net)
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
        assert self.flip_rate <= self.flip_rate_allowed, (
            f"fusing turns {self.flip_rate:.3g} of the spikes, allowed is "
            f"{self.flip_rate_allowed:g}"
        )
        for what, error in self.errors.items():
            assert error <= self.forced_rounding, (
                f"{what} differ by {error:.3g} of their size, allowed is {self.forced_rounding:g}"
            )
        assert self.like <= ALIKE, (
            f"logits differ by {self.like:.3g} of their size from those by the default policy, "
            f"allowed is {ALIKE:g}"
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
            "flip_rate": float(f"{self.flip_rate:.3g}"),
            "errors": errors,
            "like": float(f"{self.like:.3g}"),
            "spread": float(f"{self.spread:.3g}"),
        }


def _all(result: Result) -> list[Tensor]:
    return [result.logits, *result.grads]
