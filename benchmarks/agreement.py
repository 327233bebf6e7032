"""Verification of whole networks against the reference.

A spike that rounding flips changes all layers behind it, so the results of two correct networks may
differ widely. Networks are therefore verified twice. In a forced step, each neuron's spikes are
replaced by the reference's, and gradients pass through the neuron unchanged: the neuron's own
spikes for the same inputs, the logits and the gradients are compared with the reference's. In
addition, an unmodified network must repeat its own first step, eagerly and as a CUDA graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import spikefuse as sf
from benchmarks.runner import difference

if TYPE_CHECKING:
    from benchmarks.networks import Network, Task

# Spikes that may differ: FACTOR times as many as flip if the threshold is lower by two units
# in the last place, and SPARE_FLIPS.
SHIFTED_THRESHOLD = 1 - 2.0**-22
FACTOR, SPARE_FLIPS = 4.0, 16
# Allowed relative difference of results that are rounded differently.
ROUNDING = {"float32": 2e-3, "bfloat16": 2e-2}
# The same for gradients of fused networks, whose float32 norms round differently.
FUSED_ROUNDING = {"float32": 2e-3, "bfloat16": 5e-2}
# Allowed share of spikes that fusing flips. Unfused, results of norms are rounded to bfloat16.
FLIP_RATE = {"float32": 1e-5, "bfloat16": 2e-3}
# Allowed relative difference of the logits of equivalent networks whose convolutions sum in another
# order, which flips some spikes in each layer.
EQUIVALENT = 0.1


@dataclass
class StepResult:
    """Logits `[B, classes]`; in training also the loss and the gradients."""

    logits: Tensor
    loss: Tensor | None = None
    grads: tuple[Tensor, ...] = ()

    def tensors(self) -> list[Tensor]:
        return [self.logits, *self.grads]


@dataclass
class NetworkReference:
    """A step of the eager loop; fused networks, whose norms stay in float32, have their own."""

    result: StepResult
    spikes: list[Tensor]  # of all neurons in the order of their calls
    flips_allowed: int  # spikes that may differ for the same inputs
    rounding: float  # allowed relative difference of a forced step
    flip_rate: float  # share of the spikes that fusing flips for the same inputs

    @classmethod
    def of(
        cls,
        task: Task,
        kind: str,
        make: Callable[..., Network],
        unfused: NetworkReference | None = None,
    ) -> NetworkReference:
        """Compute the reference of the network, or of the fused one if `unfused` is given.

        `make` makes the network; it takes `fused`, `impl` and `threshold`.
        """
        fused = unfused is not None
        make = partial(make, fused=fused, impl="reference")
        network, flip_rate, spikes = make(), 0.0, []
        step = network.step(task, kind)
        if unfused is not None:
            _, flips = forced(network, step, unfused.spikes)
            flip_rate = flips / sum(s.numel() for s in unfused.spikes)
            task.restore(network.net)

        def save(output: Tensor) -> Tensor:
            spikes.append(output.detach() != 0)
            return output

        with replaced_spikes(network, save):
            result = step()
        shifted = make(threshold=SHIFTED_THRESHOLD)
        _, flips = forced(shifted, shifted.step(task, kind), spikes)
        rounding = (FUSED_ROUNDING if fused else ROUNDING)[task.dtype]
        return cls(result, spikes, round(FACTOR * flips) + SPARE_FLIPS, rounding, flip_rate)


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
        repeated: relative difference of two such steps, which may sum in any order.
        flips: spikes that differ from the reference's for the same inputs.
        errors: relative differences from the reference in a forced step, by quantity.
        logits_error: relative difference of the logits from the equivalent network's.
    """

    def __init__(
        self, task: Task, kind: str, make: Callable[[Task], Network], reference: NetworkReference
    ) -> None:
        self.reference, self.task, self.flips, self.logits_error = reference, task, 0, 0.0
        self.flips_allowed = reference.flips_allowed
        self.errors: dict[str, float] = {}
        network = make(task)
        step = network.step(task, kind)
        if network.neuron is not None:
            result, self.flips = forced(network, step, reference.spikes)
            task.restore(network.net)
            self.errors["logits"] = difference([result.logits], [reference.result.logits])
            if result.grads and network.same_gradient:
                self.errors["gradients"] = difference(result.grads, reference.result.grads)
        elif network.equivalent is not None:
            logits = network.equivalent().step(task, kind)().logits
            self.logits_error = difference([step().logits], [logits])
            task.restore(network.net)
        # A compiled network's next step overwrites its results.
        self.expected = copy.deepcopy(step())
        task.restore(network.net)
        self.repeated = difference(step().tensors(), self.expected.tensors())
        if network.exact:
            self.flips_allowed = 0
            error = difference([self.expected.logits], [reference.result.logits])
            self.errors["logits, not forced"] = max(0.0, error - self.repeated)

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
        assert self.logits_error <= EQUIVALENT, (
            f"logits differ by {self.logits_error:.3g} of their norm from the default policy's"
        )
        assert all(t.isfinite().all() for t in result.tensors()), "the results are not finite"
        error = difference(result.tensors(), self.expected.tensors())
        allowed = ROUNDING[dtype] + 2 * self.repeated
        assert error <= allowed, (
            f"a step differs by {error:.3g} of its norm from the first, allowed is {allowed:.3g}"
        )
        if result.loss is not None:
            loss = F.cross_entropy(result.logits, self.task.labels)
            assert torch.allclose(result.loss, loss, rtol=1e-4), (
                f"the loss is {result.loss:.6g}, but {loss:.6g} follows from the logits"
            )

    def about(self) -> dict[str, Any]:
        """Return the differences, for the result file."""
        errors = {what: float(f"{error:.3g}") for what, error in self.errors.items()}
        return {"flips": self.flips, "flips_allowed": self.flips_allowed, "errors": errors}
