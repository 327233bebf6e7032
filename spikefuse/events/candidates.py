"""Neurons that also tell where their surrogate lets a gradient through."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from torch import Tensor

from spikefuse.neurons.definition import Definition, States
from spikefuse.neurons.surrogate import Surrogate

_D = TypeVar("_D", bound=Definition)

#: What a neuron notes about itself, to be quicker in its next call.
_OWN = ("_known", "_seen")

#: Outputs of a neuron with candidates; 0 is a neuron that carries no gradient.
SILENT, FIRED = 1.0, 2.0


def with_candidates(neuron: _D, known: _D | None = None) -> _D:
    """A copy of a neuron, sharing its values, whose output is `s + c`.

    `s` is its spike and `c` is 1 where its surrogate is called with `u >= cutoff`, else 0, without
    a gradient: the output is FIRED for a spike, SILENT for a candidate that did not fire, and its
    gradient is that of the spike.

    Args:
        known: what an earlier call gave: given again if it is still a copy of the neuron, with what
            it has noted since.

    Raises:
        TypeError: the neuron is none that fires 0 or 1 by one surrogate.
        ValueError: its surrogate has no cutoff, or one above 0: then a spike might be none.
    """
    name, surrogate = type(neuron).__name__, getattr(neuron, "surrogate", None)
    if not isinstance(surrogate, Surrogate) or type(surrogate).spike is not Surrogate.spike:
        raise TypeError(f"{name} is no neuron that fires 0 or 1 by one surrogate, such as LIF")
    cutoff = surrogate.cutoff
    if not isinstance(cutoff, float) or cutoff > 0:
        raise ValueError(
            f"the surrogate of {name} has the cutoff {cutoff!r}: expected a float of at most 0, "
            "which says how far below its threshold a neuron still carries a gradient, such as "
            "FastSigmoid(10.0, cutoff=-0.1)"
        )
    cls: Any = type(neuron)
    kind = _marked(cls)
    own = _given(neuron)
    if known is not None and type(known) is kind:
        before = _given(known)
        if before.keys() == own.keys() and all(before[name] is own[name] for name in own):
            return known
    copy: _D = object.__new__(kind)
    copy.__dict__.update(own)
    return copy


def _given(neuron: Any) -> dict[str, Any]:
    return {name: value for name, value in neuron.__dict__.items() if name not in _OWN}


@functools.cache
def _marked(cls: Any) -> Any:
    """The model whose output is `s + c`."""

    @functools.wraps(cls.step)
    def step(self: Any, *args: Tensor) -> tuple[Tensor, States]:
        surrogate, seen = self.surrogate, []

        def watched(u: Tensor) -> Tensor:
            seen.append(u)
            return surrogate(u)

        self.__dict__["surrogate"] = watched  # hides the part of that name
        try:
            s, states = cls.step(self, *args)
        finally:
            del self.__dict__["surrogate"]
        if len(seen) != 1 or not isinstance(s, Tensor):
            raise TypeError(
                f"{cls.__name__}.step calls its surrogate {len(seen)} times: a neuron whose "
                "candidates are asked for has one spike, of one surrogate"
            )
        return s + (seen[0] >= surrogate.cutoff).to(s.dtype), states

    return type(f"{cls.__name__}Candidates", (cls,), {"step": step})
