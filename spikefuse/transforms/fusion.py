"""What `fuse` did to a model, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A norm, a neuron, or the two together, by their names in the model.

    Attributes:
        norm: the batch norm, or None for a neuron that has none before it.
        neuron: the neuron, or None for a norm that none reads.
        residual: what is added between the two, or None.
        reason: why they are not fused; None if they are.
    """

    norm: str | None
    neuron: str | None
    residual: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Fusion:
    """Every norm and neuron of a model once, in the model's order; `print` shows the table.

    Attributes:
        pools: the number of max poolings that were replaced by ours.
    """

    places: tuple[Place, ...]
    pools: int = 0

    @property
    def fused(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.reason is None)

    @property
    def left(self) -> tuple[Place, ...]:
        """What is not fused."""
        return tuple(place for place in self.places if place.reason is not None)

    @property
    def summary(self) -> str:
        """One line, such as "16 of 20 batch norms fused with the neuron after them"; with "1 max
        pooling replaced" behind it, if there is any."""
        norms = sum(place.norm is not None for place in self.places)
        text = f"{len(self.fused)} of {norms} batch norms fused with the neuron after them"
        if not self.pools:
            return text
        return f"{text}, {self.pools} max pooling{'s' * (self.pools > 1)} replaced"

    def __str__(self) -> str:
        rows = [("norm", "neuron", "")]
        for place in self.places:
            text = "fused" if place.reason is None else f"not fused: {place.reason}"
            if place.residual is not None:
                text += f", with '{place.residual}' added"
            rows.append((place.norm or "-", place.neuron or "-", text))
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [
            f"{norm:<{widths[0]}}  {neuron:<{widths[1]}}  {text}".rstrip()
            for norm, neuron, text in rows
        ]
        return "\n".join([*lines, self.summary])
