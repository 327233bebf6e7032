"""Neurons that also report where their surrogate lets a gradient through."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from torch import Tensor

from spikefuse.neurons.definition import Definition, States
from spikefuse.neurons.surrogate import Surrogate

_D = TypeVar("_D", bound=Definition)


def with_candidates(neuron: _D) -> _D:
    """Return a copy of `neuron`, sharing its parameters, that outputs marks `s + c`.

    `s` is the spike. `c` is 1 where the surrogate's argument reaches its cutoff, `u >= cutoff`, and
    carries no gradient. The mark is FIRED for a spike, NEAR for a candidate that did not fire and 0
    elsewhere. Its gradient is that of the spike.

    Raises:
        TypeError: `neuron` does not fire 0 or 1 through a single surrogate.
        ValueError: the surrogate has no cutoff, or a positive one, which would miss spikes.
    """
    name, surrogate = type(neuron).__name__, getattr(neuron, "surrogate", None)
    if not isinstance(surrogate, Surrogate) or type(surrogate).spike is not Surrogate.spike:
        raise TypeError(
            f"{name} does not fire 0 or 1 through a single surrogate: use a neuron such as LIF"
        )
    cutoff = surrogate.cutoff
    if not isinstance(cutoff, float) or cutoff > 0:
        raise ValueError(
            f"the surrogate of {name} has cutoff {cutoff!r}: expected a float of at most 0, the "
            "distance from the threshold down to which gradients flow, such as "
            "FastSigmoid(10.0, cutoff=-0.1)"
        )
    notes = neuron.description().notes  # valid until an attribute changes
    if "candidates" not in notes:
        copy = object.__new__(_candidate_class(type(neuron)))
        copy.__dict__.update({k: v for k, v in neuron.__dict__.items() if k != "_known"})
        notes["candidates"] = copy
    found: _D = notes["candidates"]
    return found


@functools.cache
def _candidate_class(cls: Any) -> Any:
    """Return the subclass of `cls` whose output is `s + c`."""

    @functools.wraps(cls.step)
    def step(self: Any, *args: Tensor) -> tuple[Tensor, States]:
        surrogate, arguments = self.surrogate, []

        def recorded(u: Tensor) -> Tensor:
            arguments.append(u)
            return surrogate(u)

        self.__dict__["surrogate"] = recorded  # shadows the submodule of that name
        try:
            s, states = cls.step(self, *args)
        finally:
            del self.__dict__["surrogate"]
        if len(arguments) != 1 or not isinstance(s, Tensor):
            raise TypeError(
                f"{cls.__name__}.step calls its surrogate {len(arguments)} times: an EventLinear "
                "needs a neuron with one spike output from one surrogate call"
            )
        return s + (arguments[0] >= surrogate.cutoff).to(s.dtype), states

    return type(f"{cls.__name__}Candidates", (cls,), {"step": step})
