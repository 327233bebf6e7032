"""The values of a segment, computed from those that are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from spikefuse.block.deferred import materialized
from spikefuse.memory.microbatch import Microbatch, batch_size, take, unfolded
from spikefuse.memory.segments import NeuronCall, Segment, Segments
from spikefuse.memory.spikes import Saved
from spikefuse.neurons.definition import States
from spikefuse.scan.op import Request

#: By the node whose value it is, in parts of the batch.
KeptValues = dict[fx.Node, list[tuple[Microbatch, Saved]]]


@dataclass(eq=False)
class Store:
    """What is kept of a call of a network.

    Attributes:
        steps: those of the sequence that are here.
        needs: whether a value needs a gradient.
    """

    segments: Segments
    steps: int
    impl: str
    kept: KeptValues
    needs: dict[fx.Node, bool]


class Values:
    """The values of a segment for a part of the batch, computed as they are asked for.

    Args:
        differentiable: with a graph from `leaves`, the kept values that were read.
    """

    def __init__(
        self, store: Store, segment: Segment, part: Microbatch, differentiable: bool = False
    ) -> None:
        self.store, self.segment, self.part = store, segment, part
        self.differentiable = differentiable
        self.leaves: dict[fx.Node, Tensor] = {}
        self.found: dict[fx.Node, Any] = {}

    def __getitem__(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.store.segments.attribute(node)
        if node not in self.found:
            read = node in self.segment.inputs
            self.found[node] = self._leaf(node) if read else self._call(node)
        return self.found[node]

    def _leaf(self, node: fx.Node) -> Tensor:
        x = take(self.store.kept[node], self.part).detach()
        if self.differentiable:
            x.requires_grad_(self.store.needs[node])
        self.leaves[node] = x
        return x

    def sequences(self, nodes: Iterable[fx.Node]) -> list[Tensor]:
        """`[T, B, ...]` of each."""
        folded = [unfolded(self[node], batch_size(self.part)) for node in nodes]
        return [x.expand(self.store.steps, *x.shape[1:]) for x in folded]

    def fire(
        self, called: NeuronCall, inputs: Sequence[Tensor], states: Sequence[Tensor], final: bool
    ) -> tuple[Tensor, States]:
        """What a neuron gives for sequences, and its final states if they are asked for.

        Args:
            states: the initial ones, none to start from rest.
        """
        request = Request(tuple(inputs), tuple(states) or None, self.store.impl, final)
        outputs, ends = called.scan(request)
        if len(outputs) != 1:
            raise several(self.segment)
        return outputs[0], ends

    def _call(self, node: fx.Node) -> Any:
        module, neuron = self.store.segments.called.get(node), self.store.segments.neuron(node)
        if neuron is not None:
            return self.fire(neuron, self.sequences(neuron.inputs), (), False)[0].flatten(0, 1)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.__getitem__)
        if module is not None:
            with _still(module) if self.differentiable else contextlib.nullcontext():
                return materialized(module(*args, **kwargs))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def num_bytes(self) -> tuple[int, int]:
        """Of one sample at one step: (the largest value, the kept values that are read)."""
        called = self.segment.block
        for node in (self.segment.target,) if called is None else called.inputs:
            self[node]
        largest = max(x[0].nbytes for x in self.found.values())
        source = self.store.segments.input
        return largest, sum(x[0].nbytes for node, x in self.leaves.items() if node is not source)


def several(segment: Segment) -> ValueError:
    return ValueError(
        f"memory=Checkpoint() can't run '{segment.target}', a neuron with several outputs: use "
        "another policy"
    )


@contextlib.contextmanager
def _still(module: nn.Module) -> Iterator[None]:
    """Keep a batch norm from moving its running statistics on a second time."""
    tracks = getattr(module, "track_running_stats", False)
    if tracks:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        if tracks:
            module.track_running_stats = True  # type: ignore[assignment]
