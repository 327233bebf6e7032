"""What was fused of a network, and why the rest was not."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx, nn

from spikefuse.graph.nodes import module_of
from spikefuse.kernels.norm import BatchNorm
from spikefuse.transforms.tables import aligned

OUTSIDE = "it is called outside Temporal"
NOT_CAPTURED = "no graph contains it: TorchDynamo does not trace the code that calls it"


@dataclass(frozen=True)
class Place:
    """A batch norm and the neuron that it was fused with, by their names in the network.

    Attributes:
        norm: the batch norm.
        neuron: the neuron; None if the norm was not fused.
        residual: whether a tensor was added between the two.
        reason: why the norm was not fused; None if it was.
    """

    norm: str
    neuron: str | None = None
    residual: bool = False
    reason: str | None = None


@dataclass
class GraphReport:
    """What the passes did to the graphs of one call.

    Attributes:
        prefix: of the names of modules.
        places: one for each call of a batch norm, in the order of the graphs.
        num_biases: of convolutions that were fused with a neuron.
        graphs: the number of graphs; more than one if Python code broke the capture.
        notes: what else a user should know, such as why the capture failed.
        net: the network that is running.
        has_run: whether a graph of the running call has been executed.
    """

    prefix: str = ""
    places: list[Place] = field(default_factory=list)
    num_biases: int = 0
    graphs: int = 0
    notes: list[str] = field(default_factory=list)
    net: nn.Module | None = field(default=None, repr=False, compare=False)
    has_run: bool = field(default=False, repr=False, compare=False)

    def clear(self) -> None:
        self.places, self.num_biases, self.graphs, self.notes = [], 0, 0, []

    def name_of(self, node: fx.Node) -> str:
        """The qualified name of the module to whose code a node belongs."""
        return f"{self.prefix}{module_of(node, self.net)}"

    def fuse(self, norm: fx.Node, neuron: fx.Node, residual: bool) -> None:
        """Record that a norm was fused."""
        self.places.append(Place(self.name_of(norm), self.name_of(neuron), residual))

    def leave(self, norm: fx.Node, reason: str) -> None:
        """Record why a norm was not fused; the first reason counts."""
        name = self.name_of(norm)
        if name == self.prefix:  # TorchDynamo has captured the norm alone
            return
        if all(place.norm != name for place in self.places):
            self.places.append(Place(name, reason=reason))

    def leave_others(self) -> None:
        """Record the norms that no graph of a call contains."""
        known = {place.norm for place in self.places}
        names = [] if self.net is None else [
            self.prefix + name for name, m in self.net.named_modules() if isinstance(m, BatchNorm)
        ]  # fmt: skip
        self.places += [Place(n, reason=NOT_CAPTURED) for n in names if n not in known]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class Fusion:
    """The batch norms in the last captured graphs of a fused network; `print` shows the table.

    Attributes:
        places: the batch norms, in the order of their calls.
        fused: those that were fused with a neuron.
        left: those that were not, with the reason.
    """

    reports: tuple[GraphReport, ...]
    outside: tuple[str, ...] = ()  # batch norms that no `Temporal` of the network contains

    @property
    def places(self) -> tuple[Place, ...]:
        captured = (place for report in self.reports for place in report.places)
        return (*captured, *(Place(name, reason=OUTSIDE) for name in self.outside))

    @property
    def fused(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.reason is None)

    @property
    def left(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.reason is not None)

    @property
    def summary(self) -> str:
        """One line, such as "16 of 20 batch norms fused with the neuron after them"."""
        graphs = sum(report.graphs for report in self.reports)
        notes = [note for report in self.reports for note in report.notes]
        if not graphs and not notes:
            return "not captured yet: the first call does it"
        biases = sum(report.num_biases for report in self.reports)
        parts = [f"{len(self.fused)} of {len(self.places)} batch norms"]
        if biases:
            count = f"{biases} convolution bias{'es' * (biases > 1)}"
            parts = [*(parts if self.places else []), count]
        text = f"{' and '.join(parts)} fused with the neuron after them"
        if graphs > len(self.reports):
            text += f", in {graphs} graphs"
        return "; ".join([text, *notes])

    def __str__(self) -> str:
        rows = [("norm", "neuron", "")]
        for place in self.places:
            text = f"not fused: {place.reason}" if place.reason is not None else "fused"
            text += ", with a residual" * place.residual
            rows.append((place.norm, place.neuron or "-", text))
        return "\n".join([*(aligned(rows) if self.places else []), self.summary])
