"""Whether the steps of a network are those of the reference.

A spike that rounding turns changes what follows in all layers after it. So spikes are compared
neuron by neuron, each given the input that the reference's received; and the results of whole steps
within what a threshold lower by two units in the last place does to those of the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks.steps import STEPS, Network, Result, eager_loop
from benchmarks.workloads import Task

# A few times what the moved threshold does is allowed, and some spikes, where it turns none.
THRESHOLD_MOVED = 1 - 2.0**-22
FACTOR, SPARE_FLIPS = 4.0, 16
# What rounding may do besides, relative to a result's size.
ROUNDING = {"float32": 2e-3, "bfloat16": 2e-2}


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The root mean square of the differences, over that of what is expected."""
    pairs = list(zip(found, expected, strict=True))
    squares = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    size = sum(b.double().square().sum() for _, b in pairs)
    return float((squares / size).sqrt())


@dataclass
class Truth:
    """The reference's step, and how far apart one may be that rounds differently.

    Attributes:
        flips: by contender the spikes that differ, given the same inputs, and how many may.
        spikes: neurons times time steps compared.
    """

    expected: Result
    logits_error: float
    grads_error: float
    flips: dict[str, int] = field(default_factory=dict)
    flips_allowed: int = 0
    spikes: int = 0

    @classmethod
    def of_reference(cls, task: Task, steps: str, networks: dict[str, Network]) -> Truth:
        def moved(x: Tensor) -> Tensor:
            return neuron(task.folded(x), impl="reference").flatten(0, 1)

        neuron = task.workload.neuron(THRESHOLD_MOVED)
        twins = {name: n.neuron for name, n in networks.items() if n.neuron is not None}
        reference = eager_loop(task)
        count = _Flips(reference.net, twins | {"moved": moved})
        expected = STEPS[steps](task, reference)()
        count.remove()
        net = task.network(functools.partial(task.workload.neuron, THRESHOLD_MOVED))
        call = functools.partial(sf.Temporal(net), impl="reference")
        other = STEPS[steps](task, Network(net, call))()
        flips = {name: int(number) for name, number in count.flips.items()}
        rounding = ROUNDING[task.dtype]
        return cls(
            expected,
            rounding + FACTOR * apart([other.logits], [expected.logits]),
            rounding + FACTOR * apart(other.grads, expected.grads) if expected.grads else 0.0,
            flips,
            round(FACTOR * flips.pop("moved")) + SPARE_FLIPS,
            count.spikes,
        )

    @classmethod
    def of_itself(cls, task: Task, steps: str, make: Callable[[Task], Network]) -> Truth:
        """Of a network that does not spike: its own eager step, for that of its CUDA graph."""
        rounding = ROUNDING[task.dtype]
        return cls(STEPS[steps](task, make(task))(), rounding, rounding)

    def verify(self, name: str, network: Network, result: Result, labels: Tensor) -> None:
        """Raises:
        AssertionError: what differs.
        """
        flips = self.flips.get(name, 0)
        allowed = 0 if network.exact else self.flips_allowed
        assert flips <= allowed, (
            f"{flips} of {self.spikes} spikes differ for the same inputs, allowed are {allowed}"
        )
        assert result.logits.isfinite().all(), "logits are not finite"
        self._check("logits", [result.logits], [self.expected.logits], self.logits_error)
        if result.loss is None:
            return
        loss = F.cross_entropy(result.logits, labels)
        assert torch.allclose(result.loss, loss, rtol=1e-4), "the loss is not that of the logits"
        if network.same_gradient:
            self._check("gradients", result.grads, self.expected.grads, self.grads_error)

    def _check(
        self, what: str, found: Sequence[Tensor], expected: Sequence[Tensor], allowed: float
    ) -> None:
        found_apart = apart(found, expected)
        assert found_apart <= allowed, (
            f"{what} differ by {found_apart:.3g} of their size, allowed is {allowed:.3g}"
        )

    def about(self) -> dict[str, Any]:
        """For the record."""
        return {
            "spikes": self.spikes,
            "flips": self.flips,
            "flips_allowed": self.flips_allowed,
            "logits_error_allowed": float(f"{self.logits_error:.4g}"),
            "grads_error_allowed": float(f"{self.grads_error:.4g}"),
        }


class _Flips:
    """Counts, at each neuron of a running network, the spikes that others make of its input."""

    def __init__(self, net: nn.Module, twins: dict[str, Callable[[Tensor], Tensor]]) -> None:
        self.twins, self.spikes = twins, 0
        self.flips: dict[str, Tensor | int] = dict.fromkeys(twins, 0)
        self.handles = [
            m.register_forward_hook(self._compare) for m in net.modules() if isinstance(m, sf.LIF)
        ]

    def _compare(self, module: nn.Module, args: tuple[Tensor], spikes: Tensor) -> None:
        self.spikes += spikes.numel()
        with torch.no_grad():
            for name, twin in self.twins.items():
                self.flips[name] = self.flips[name] + (twin(args[0]) != spikes).sum()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
