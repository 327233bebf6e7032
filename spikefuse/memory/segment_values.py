"""The values of a segment, computed on demand from saved values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from spikefuse.block.deferred import materialized
from spikefuse.memory.microbatch import Microbatch, take
from spikefuse.memory.segments import NeuronCall, Segment, Segments
from spikefuse.memory.spikes import Saved
from spikefuse.neurons.definition import States
from spikefuse.nn.constant_input import ConstantSequence, unfold
from spikefuse.scan.layout import flatten_steps
from spikefuse.scan.op import Request

#: Saved values by node and microbatch.
SavedValues = dict[fx.Node, list[tuple[Microbatch, Saved]]]


@dataclass(eq=False)
class Store:
    """The saved values of a call of a network.

    Attributes:
        steps: the number of time steps in this process.
        needs: whether a value needs a gradient.
        constant: values whose steps are all equal, so that only one is saved.
    """

    segments: Segments
    steps: int
    impl: str
    saved: SavedValues
    needs: dict[fx.Node, bool]
    constant: set[fx.Node] = field(default_factory=set)

    def stored(self, node: fx.Node, y: Tensor) -> Tensor:
        """Return the tensor to save for a value: `y`, or one step of a constant sequence."""
        if not isinstance(y, ConstantSequence) or not y.is_constant:
            return y
        self.constant.add(node)
        return y.rows

    def take(self, node: fx.Node, microbatch: Microbatch) -> Tensor:
        x = take(self.saved[node], microbatch)
        return ConstantSequence.of(x, self.steps) if node in self.constant else x


class Values:
    """The values of a segment for one microbatch, computed on demand.

    Args:
        differentiable: record an autograd graph that begins at `leaves`, the saved values read.
    """

    def __init__(
        self, store: Store, segment: Segment, microbatch: Microbatch, differentiable: bool = False
    ) -> None:
        self.store, self.segment, self.microbatch = store, segment, microbatch
        self.differentiable = differentiable
        self.leaves: dict[fx.Node, Tensor] = {}
        self.known: dict[fx.Node, Any] = {}

    def __getitem__(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.store.segments.attribute(node)
        if node not in self.known:
            read = node in self.segment.inputs
            self.known[node] = self._leaf(node) if read else self._call(node)
        return self.known[node]

    def _leaf(self, node: fx.Node) -> Tensor:
        x = take(self.store.saved[node], self.microbatch).detach()
        if self.differentiable and (x.is_floating_point() or x.is_complex()):
            x.requires_grad_(self.store.needs[node])
        self.leaves[node] = x
        return ConstantSequence.of(x, self.store.steps) if node in self.store.constant else x

    def sequences(self, nodes: Iterable[fx.Node], x: Tensor | None = None) -> list[Tensor]:
        """Return the values of nodes as `[T, B, ...]`.

        Args:
            x: the input of a block to which a residual is added; by default the first value.
        """
        found = []
        for node in nodes:
            if not self[node].ndim:
                raise ValueError(
                    f"memory=Checkpoint() can't run '{self.segment.target}', which reads a tensor "
                    "without dimensions: expand it to one value per time step and sample, or use "
                    "another policy"
                )
            found.append(unfold(self[node], self.store.steps))
        if self.segment.target not in self.store.segments.blocks:
            return found
        x = found[0] if x is None else x
        return [as_residual(y, x, self.segment) for y in found]

    def fire(
        self, called: NeuronCall, inputs: Sequence[Tensor], states: Sequence[Tensor], final: bool
    ) -> tuple[Tensor, States]:
        """Run a neuron on sequences, and return its output and, if `final`, its final states.

        Args:
            states: initial states, or empty to start from rest.
        """
        request = Request(tuple(inputs), tuple(states) or None, self.store.impl, final)
        outputs, ends = called.scan(request)
        if len(outputs) != 1:
            raise multiple_outputs_error(self.segment)
        return outputs[0], ends

    def _call(self, node: fx.Node) -> Any:
        module, neuron = self.store.segments.called.get(node), self.store.segments.neuron(node)
        if neuron is not None:
            return flatten_steps(self.fire(neuron, self.sequences(neuron.inputs), (), False)[0])
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.__getitem__)
        if module is not None:
            again = self.differentiable and self.segment.is_recomputed
            with _frozen_statistics(module) if again else contextlib.nullcontext():
                return materialized(module(*args, **kwargs))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def num_bytes(self) -> tuple[int, int]:
        """Return bytes per sample and step: (the largest value, all saved values read)."""
        called = self.segment.block
        for node in (self.segment.target,) if called is None else called.inputs:
            self[node]
        values = (x.rows if isinstance(x, ConstantSequence) else x for x in self.known.values())
        # Without numbers, shapes and tuples that are computed from parameters.
        largest = max(x[0].nbytes for x in values if isinstance(x, Tensor) and x.ndim)
        source = self.store.segments.input
        return largest, sum(x[0].nbytes for node, x in self.leaves.items() if node is not source)


def as_residual(y: Tensor, x: Tensor, segment: Segment) -> Tensor:
    """Return `y` with the shape of `x`, and with its dtype if a sum of both has that.

    Raises:
        ValueError: a sum of both has another shape.
    """
    if y.shape != x.shape:
        if torch.broadcast_shapes(y.shape, x.shape) != x.shape:
            raise ValueError(
                f"memory=Checkpoint() can't run '{segment.target}', which reads a sum that expands "
                f"the result of a norm, {list(x.shape)}, for a residual, {list(y.shape)}: expand "
                "that result before the sum, or use another policy"
            )
        y = y.expand(x.shape)
    return y.to(x.dtype) if torch.promote_types(y.dtype, x.dtype) == x.dtype else y


def multiple_outputs_error(segment: Segment) -> ValueError:
    return ValueError(
        f"memory=Checkpoint() can't run '{segment.target}', a neuron with several outputs: use "
        "another policy"
    )


@contextlib.contextmanager
def _frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Prevent a recomputed batch norm from updating its running statistics a second time."""
    tracks = getattr(module, "track_running_stats", False)
    if tracks:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        if tracks:
            module.track_running_stats = True  # type: ignore[assignment]
