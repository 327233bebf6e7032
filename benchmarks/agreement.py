"""Verification of whole networks against the reference.

A spike that rounding flips changes all layers after it, so the results of two correct networks may
differ widely. Networks are therefore verified twice. In a forced step, each neuron's spikes are
replaced by the reference's, and gradients pass through the neuron unchanged: the neuron's own
spikes for the same inputs, the logits and the gradients are compared with the reference's. In
addition, an unmodified network must repeat its own first step, eagerly and as a CUDA graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.runner import difference
from benchmarks.steps import Network, StepResult, Task

# Allowed relative difference of results that are rounded differently.
ROUNDING = {"float32": 2e-3, "bfloat16": 2e-2}
# The same for gradients of networks that are not exact. Fused networks keep normalized values in
# float32, the reference rounds them to bfloat16.
INEXACT = {"float32": 2e-3, "bfloat16": 0.2}
# Allowed share of spikes that this flips, and a number of spikes beside it.
FLIP_RATE, SPARE_FLIPS = {"float32": 1e-5, "bfloat16": 2e-3}, 16
# Allowed relative difference of the logits of equivalent networks whose convolutions sum in another
# order, which flips some spikes in each layer.
EQUIVALENT = 0.1
# The same if each layer rounds otherwise, as torch.compile's code does.
FLIPPED = 0.5


class NetworkReference:
    """A step of the eager loop, with the spikes of all neurons in the order of their calls."""

    def __init__(self, task: Task, kind: str, network: Network) -> None:
        self.spikes: list[Tensor] = []

        def save(output: Tensor) -> Tensor:
            self.spikes.append(output.detach() != 0)
            return output

        step = network.step(task, kind)
        with replaced_spikes(network, save):
            self.result = step()
        self.num_spikes = sum(s.numel() for s in self.spikes)


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
    run = kind.forward
    with (
        mock.patch.object(kind, "forward", lambda *args, **more: change(run(*args, **more))),
        torch.compiler.set_stance("force_eager"),  # a captured network runs its modules
    ):
        yield


class Agreement:
    """Expected results of a network's steps, and its differences from the reference.

    Attributes:
        expected: its first step, run eagerly.
        repeated: relative difference of two such steps, which may sum in any order.
        flips, flips_allowed: spikes that differ from the reference's for the same inputs.
        errors: relative differences by quantity: from the reference in a forced step, or from the
            equivalent network.
        allowed: of these differences.
    """

    def __init__(
        self, task: Task, kind: str, make: Callable[[Task], Network], reference: NetworkReference
    ) -> None:
        network = make(task)
        step = network.step(task, kind)
        self.dtype, self.flips, self.flips_allowed = task.dtype, 0, 0
        if not network.exact:
            rate = FLIP_RATE[task.dtype] * reference.num_spikes
            self.flips_allowed = round(rate) + SPARE_FLIPS
        self.allowed = (ROUNDING if network.exact else INEXACT)[task.dtype]
        self.errors: dict[str, float] = {}
        if network.neuron is not None:
            result, self.flips = forced(network, step, reference.spikes)
            self.errors["logits"] = difference([result.logits], [reference.result.logits])
            if result.grads and network.same_gradient:
                self.errors["gradients"] = difference(result.grads, reference.result.grads)
        elif network.equivalent is not None:
            logits = network.equivalent().step(task, kind)().logits
            self.errors["logits"] = difference([step().logits], [logits])
            self.allowed = FLIPPED if network.flips_spikes else EQUIVALENT
        task.restore(network.net)
        # A compiled network's next step overwrites its results.
        self.expected = copy.deepcopy(step())
        task.restore(network.net)
        self.repeated = difference(step().tensors(), self.expected.tensors())

    def verify(self, result: StepResult) -> None:
        """Check a step from the shared weights.

        Raises:
            AssertionError: the step is wrong.
        """
        assert self.flips <= self.flips_allowed, (
            f"{self.flips} spikes differ for the same inputs, allowed are {self.flips_allowed}"
        )
        for what, error in self.errors.items():
            assert error <= self.allowed, (
                f"{what} differ by {error:.3g} of their norm, allowed is {self.allowed:g}"
            )
        assert all(t.isfinite().all() for t in result.tensors()), "the results are not finite"
        error = difference(result.tensors(), self.expected.tensors())
        allowed = ROUNDING[self.dtype] + 2 * self.repeated
        assert error <= allowed, (
            f"a step differs by {error:.3g} of its norm from the first, allowed is {allowed:.3g}"
        )

    def about(self) -> dict[str, Any]:
        """Return the differences, for the result file."""
        errors = {what: float(f"{error:.3g}") for what, error in self.errors.items()}
        return {"flips": self.flips, "flips_allowed": self.flips_allowed, "errors": errors}
