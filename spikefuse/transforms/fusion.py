"""What `fuse` can fuse of a model, and what the last call fused."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from spikefuse.block.deferred import outcomes
from spikefuse.transforms.tables import aligned


@dataclass(frozen=True)
class Place:
    """A batch norm and the neuron that it was fused with, by their names in the model.

    Attributes:
        norm: the batch norm.
        neuron: the neuron; None if the norm was not fused, or not called yet.
        residual: whether a tensor was added between the two.
        reason: why the norm was not fused; None if it was, or, before the first call, if it can be.
    """

    norm: str
    neuron: str | None = None
    residual: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Fusion:
    """Every batch norm of a model, in the model's order; `print` shows the table.

    Before the first call it lists what can be fused, and afterwards what the last call did. A copy
    of the model starts without a last call.

    Attributes:
        norms: the batch norms, by name.
        neurons: the neurons, by name.
        unsupported: why norms can't be fused, by name.
        pools: the number of max poolings that were swapped.
    """

    norms: dict[str, nn.Module]
    neurons: dict[str, nn.Module]
    unsupported: dict[str, str]
    pools: int = 0

    @property
    def called(self) -> bool:
        """Whether any norm was called since the model was fused."""
        return any(norm in outcomes for norm in self.norms.values())

    @property
    def places(self) -> tuple[Place, ...]:
        names, called = {neuron: name for name, neuron in self.neurons.items()}, self.called
        return tuple(self._place(name, names, called) for name in self.norms)

    def _place(self, name: str, names: dict[nn.Module, str], called: bool) -> Place:
        outcome = outcomes.get(self.norms[name])
        if name in self.unsupported:
            return Place(name, reason=self.unsupported[name])
        if outcome is None:
            return Place(name, reason="it was not called" if called else None)
        if outcome.neuron is None:
            return Place(name, reason=outcome.reason)
        neuron = names.get(outcome.neuron, type(outcome.neuron).__name__)
        return Place(name, neuron, outcome.residual)

    @property
    def fused(self) -> tuple[Place, ...]:
        """The norms that the last call fused; before the first call, all that can be fused."""
        return tuple(place for place in self.places if place.reason is None)

    @property
    def left(self) -> tuple[Place, ...]:
        """The norms that were not fused, or can't be."""
        return tuple(place for place in self.places if place.reason is not None)

    @property
    def summary(self) -> str:
        """One line, such as "16 of 20 batch norms fused with the neuron after them", and the number
        of swapped max poolings, if there are any."""
        verb = "fused" if self.called else "can be fused"
        text = (
            f"{len(self.fused)} of {len(self.norms)} batch norms {verb} with the neuron after them"
        )
        if not self.pools:
            return text
        return f"{text}, {self.pools} max pooling{'s' * (self.pools > 1)} replaced"

    def __str__(self) -> str:
        rows = [("norm", "neuron", "")]
        for place in self.places:
            text = f"not fused: {place.reason}"
            if place.reason is None:
                text = "fused" if self.called else "can be fused"
            rows.append(
                (place.norm, place.neuron or "-", text + ", with a residual" * place.residual)
            )
        return "\n".join([*aligned(rows), self.summary])
