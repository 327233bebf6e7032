"""Verification of whole networks against the reference.

A spike flipped by rounding changes everything in the layers behind it, so the results of two
correct networks may have little in common. Hence two comparisons. In a forced step, each neuron's
spikes are replaced by the reference's, and gradients flow as through its own: its own spikes for
the same inputs, the logits and the gradients are compared with the reference's. In addition, an
unmodified network must repeat its own first step, whichever way it runs.
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
from benchmarks.network_steps import STEPS, Network, StepResult, Task, spiking

# The allowed number of differing spikes: some, plus a multiple of those that flip with a threshold
# lower by two units in the last place.
SHIFTED_THRESHOLD = 1 - 2.0**-22
FACTOR, SPARE_FLIPS = 4.0, 16
# Allowed relative difference of results that are rounded differently.
ROUNDING = {"float32": 2e-3, "bfloat16": 2e-2}
# The same for gradients of fused networks, whose float32 norms round differently.
FUSED_ROUNDING = {"float32": 2e-3, "bfloat16": 5e-2}
# Allowed share of spikes that fusing flips. Unfused, results of norms are rounded to bfloat16.
FLIP_RATE = {"float32": 1e-5, "bfloat16": 2e-3}
# Allowed relative difference of a network's logits if its convolutions sum in another order, which
# flips some spikes in each layer.
ALIKE = 0.1


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of the difference over the norm of what is expected."""
    pairs = list(zip(found, expected, strict=True))
    squares = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    size = sum(b.double().square().sum() for _, b in pairs)
    return float((squares / size).sqrt())


@dataclass
class NetworkReference:
    """A step of the eager loop, and the spikes of all neurons in the order of their calls.

    The fused network has its own, because its norms give float32 to the neurons. `flip_rate` is the
    share of its spikes that differ from those of the unfused reference for the same inputs.
    `rounding` is the allowed difference of a forced step.
    """

    result: StepResult
    spikes: list[Tensor]
    flips_allowed: int
    rounding: float
    flip_rate: float

    @classmethod
    def of(cls, task: Task, kind: str, unfused: NetworkReference | None = None) -> NetworkReference:
        """Compute that of the network, or with `unfused` that of the fused network."""
        fused = unfused is not None
        make = functools.partial(spiking, task, fused=fused, impl="reference")
        network, flip_rate, spikes = make(), 0.0, []
        step = STEPS[kind](task, network)
        if unfused is not None:
            _, flips = forced(network, step, unfused.spikes)
            flip_rate = flips / unfused.num_spikes
            task.restore(network.net)

        def note(output: Tensor) -> Tensor:
            spikes.append(output.detach() != 0)
            return output

        with replaced_spikes(network, note):
            result = step()
        shifted = make(threshold=SHIFTED_THRESHOLD)
        _, flips = forced(shifted, STEPS[kind](task, shifted), spikes)
        rounding = (FUSED_ROUNDING if fused else ROUNDING)[task.dtype]
        return cls(result, spikes, round(FACTOR * flips) + SPARE_FLIPS, rounding, flip_rate)

    @property
    def num_spikes(self) -> int:
        return sum(s.numel() for s in self.spikes)


def forced(
    network: Network, step: Callable[[], StepResult], spikes: Sequence[Tensor]
) -> tuple[StepResult, int]:
    """Run a step with the given spikes; return it and how many of the network's own differ."""
    given, flips = iter(spikes), [torch.zeros((), dtype=torch.int64)]

    def replace(output: Tensor) -> Tensor:
        right = torch.empty_like(output).copy_(next(given))
        flips.append((right != output).sum())
        return output + (right - output).detach()

    with replaced_spikes(network, replace):
        result = step()
    assert next(given, None) is None, "the network has fewer neurons than the reference"
    return result, sum(int(count) for count in flips)


@contextmanager
def replaced_spikes(network: Network, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Apply `change` to the outputs of all neurons of a network."""
    kind = network.neuron
    assert kind is not None
    # A fused neuron's `forward` is not called.
    name = "call" if issubclass(kind, sf.Neuron) else "forward"
    run = getattr(kind, name)
    with mock.patch.object(kind, name, lambda *args, **more: change(run(*args, **more))):
        yield


class Agreement:
    """Expected results of a network's steps, and its differences from the reference.

    Attributes:
        expected: its first step, run eagerly.
        spread: relative difference of two such steps, which may sum in any order.
        flips: spikes that differ from the reference's for the same inputs.
        errors: relative differences of a forced step from the reference's, by quantity.
        like: relative difference of the logits from those of `Network.like`.
    """

    def __init__(
        self, task: Task, kind: str, make: Callable[[Task], Network], reference: NetworkReference
    ) -> None:
        self.reference, self.task, self.flips, self.like = reference, task, 0, 0.0
        self.flips_allowed = reference.flips_allowed
        self.errors: dict[str, float] = {}
        network = make(task)
        step = STEPS[kind](task, network)
        if network.neuron is not None:
            result, self.flips = forced(network, step, reference.spikes)
            task.restore(network.net)
            self.errors["logits"] = difference([result.logits], [reference.result.logits])
            if result.grads and network.same_gradient:
                self.errors["gradients"] = difference(result.grads, reference.result.grads)
        elif network.like is not None:
            logits = STEPS[kind](task, network.like())().logits
            self.like = difference([step().logits], [logits])
            task.restore(network.net)
        self.expected = step()
        task.restore(network.net)
        self.spread = difference(_all(step()), _all(self.expected))
        if network.exact:
            self.flips_allowed = 0
            error = difference([self.expected.logits], [reference.result.logits])
            self.errors["logits, not forced"] = max(0.0, error - self.spread)

    def forget_spikes(self) -> None:
        """Free the reference's spikes, which verification does not need."""
        self.reference.spikes = []

    def verify(self, result: StepResult) -> None:
        """Check a step from the shared weights.

        Raises:
            AssertionError: the step is wrong.
        """
        reference, dtype = self.reference, self.task.dtype
        assert self.flips <= self.flips_allowed, (
            f"{self.flips} spikes differ for the same inputs, allowed are {self.flips_allowed}"
        )
        assert reference.flip_rate <= FLIP_RATE[dtype], (
            f"fusing flips {reference.flip_rate:.3g} of the spikes, allowed is {FLIP_RATE[dtype]:g}"
        )
        for what, error in self.errors.items():
            assert error <= reference.rounding, (
                f"{what} differ by {error:.3g} of their norm, allowed is {reference.rounding:g}"
            )
        assert self.like <= ALIKE, (
            f"logits differ by {self.like:.3g} of their norm from those with the default policy"
        )
        assert all(value.isfinite().all() for value in _all(result)), "the results are not finite"
        error = difference(_all(result), _all(self.expected))
        allowed = ROUNDING[dtype] + 2 * self.spread
        assert error <= allowed, (
            f"a step differs by {error:.3g} of its norm from the first, allowed is {allowed:.3g}"
        )
        if result.loss is not None:
            loss = F.cross_entropy(result.logits, self.task.labels)
            assert torch.allclose(result.loss, loss, rtol=1e-4), (
                "the loss is not that of the logits"
            )

    def about(self) -> dict[str, Any]:
        """Return the differences, for the result file."""
        return {
            "flips": self.flips,
            "flips_allowed": self.flips_allowed,
            "flip_rate": float(f"{self.reference.flip_rate:.3g}"),
            "errors": {what: float(f"{error:.3g}") for what, error in self.errors.items()},
            "like": float(f"{self.like:.3g}"),
            "spread": float(f"{self.spread:.3g}"),
        }


def _all(result: StepResult) -> list[Tensor]:
    return [result.logits, *result.grads]
