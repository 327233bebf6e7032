"""Event layers whose neurons are sharded over processes; only event lists are exchanged.

Every rank gets the events of all inputs and holds the weights into its own neurons. It computes
these neurons and sends the other ranks their events. In backward each rank computes the gradient of
every event through its own neurons; these gradients are summed.

Shape legend: K ranks, R rows of events, E entries.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spikefuse.distributed.collectives import GroupCollectives
from spikefuse.events.format import Events, count_marks, merge_slices
from spikefuse.events.lists import EventLists, SliceCounts
from spikefuse.neurons import Neuron
from spikefuse.nn import EventLinear, Temporal

Group = dist.ProcessGroup | None
Network = TypeVar("Network", nn.Sequential, Temporal)


def bounds(features: int, group: Group = None) -> list[int]:
    """Return each rank's first neuron, then the total; shares differ by one neuron at most."""
    ranks = dist.get_world_size(group)
    return [features * k // ranks for k in range(ranks + 1)]


class NeuronShard(nn.Module):
    """An `EventLinear` with neurons of which this rank holds a share.

    Input and output events are the same on all ranks.

    Call: `layer(x)` with `Events`, or dense spikes, 0 or 1, of all `in_features` inputs. It returns
    the `Events` of all `out_features` neurons.

    Args:
        in_features: inputs of the whole layer.
        out_features: neurons of the whole layer.
        neuron: its values must be floats, not tensors.
        group: the ranks; None for all.
        options: of `EventLinear`. Weights are initialized randomly: seed the ranks differently.

    Attributes:
        is_last: whether no layer follows, so that every rank computes the whole loss and its
            gradient must count once. False by default; set by `shard_neurons`.

    Raises:
        ValueError: the neuron has values that are tensors.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        neuron: Neuron,
        group: Group = None,
        **options: Any,
    ) -> None:
        super().__init__()
        tensors = [*neuron.parameters(), *neuron.buffers()]
        if tensors:
            raise ValueError(
                f"{type(neuron).__name__} has values that are tensors, such as learnable ones: the "
                "neurons of a sharded layer take floats only"
            )
        self.group, self.bounds = group, bounds(out_features, group)
        self.is_last, rank = False, dist.get_rank(group)
        #: The neurons of this rank.
        self.share = slice(self.bounds[rank], self.bounds[rank + 1])
        num_neurons = self.share.stop - self.share.start
        self.layer = _ShardLinear(in_features, num_neurons, neuron, **options)
        self.layer.group, self.layer.bounds = group, self.bounds

    def forward(self, x: Events | Tensor) -> Events:
        layer = self.layer
        layer.exchanges = True
        try:
            whole = layer(x)
        finally:
            layer.exchanges = False
        assert isinstance(whole, Events)
        return _first_rank_gradient(whole, self.group) if self.is_last else whole


class _ShardLinear(EventLinear):
    """A layer that returns the events of all ranks while `exchanges` is set.

    On a GPU the host waits once, for the lengths of all ranks' lists.
    """

    group: Group = None
    #: The first neuron of every rank, then the total.
    bounds: list[int]
    exchanges = False
    #: The bounds on the device of the last input.
    _bounds_on_device: Tensor | None = None

    def _from_marks(self, marks: Tensor) -> Events:
        if not self.exchanges:
            return super()._from_marks(marks)
        counted, rank = count_marks(marks.detach()), dist.get_rank(self.group)
        counts = self._gather_counts(counted.fired, counted.entries)
        offsets = counts.starts[rank]
        own = counted.sites(offsets, counts.max_size)
        shape = marks.shape[0], marks.shape[1], marks.shape[2]
        lists = EventLists(offsets, counted.fired, own[: counts.sizes[rank]])
        share = Events.trusted(shape, lists)
        return self._gather_events(own, counts, share, marks if marks.requires_grad else None)

    def _from_events(self, events: Events) -> Events:
        if not self.exchanges:
            return events
        counts = self._gather_counts(events.fired, events.offsets.diff().int())
        own = F.pad(events.indices, (0, counts.max_size - len(events.indices)))
        return self._gather_events(own, counts, events, events.values)

    def _gather_counts(self, fired: Tensor, entries: Tensor) -> SliceCounts:
        """Gather the counts of spikes and entries per row, int32 `[R]`; the host waits for them."""
        return SliceCounts.of(self._gather(torch.stack((fired, entries))))

    def _gather(self, x: Tensor) -> Tensor:
        group: Any = self.group or dist.group.WORLD
        return GroupCollectives(group).gather(x)

    def _gather_events(
        self, own: Tensor, counts: SliceCounts, share: Events, source: Tensor | None
    ) -> Events:
        """Gather the events of all ranks.

        Args:
            own: sites of this rank's events, padded to the longest list of any rank.
            counts: the numbers of events on all ranks.
            share: this rank's events.
            source: the marks or values of the share, which receive the gradient; None for none.
        """
        if self._bounds_on_device is None or self._bounds_on_device.device != own.device:
            self._bounds_on_device = torch.tensor(self.bounds, device=own.device)
        shape = share.shape[0], share.shape[1], self.bounds[-1]
        gathered, rank = self._gather(own), dist.get_rank(self.group)
        whole, values, places = merge_slices(shape, gathered, self._bounds_on_device, counts, rank)
        if source is None:
            return whole
        return whole.with_values(_GatheredValues.apply(source, values, places, share, self.group))


class Replicated(nn.Module):
    """A layer that is the same on all ranks; its gradient of the events counts once.

    Call: `layer(x)`, with the inputs and outputs of `layer`.

    Args:
        layer: the layer, with the same weights on all ranks.
        group: the ranks; None for all.
    """

    def __init__(self, layer: EventLinear, group: Group = None) -> None:
        super().__init__()
        self.layer, self.group = layer, group

    def forward(self, x: Events | Tensor) -> Events | Tensor:
        # The gradients of the layer's weights are the same on all ranks.
        return self.layer(_first_rank_gradient(x, self.group) if isinstance(x, Events) else x)


def _first_rank_gradient(events: Events, group: Group) -> Events:
    """Take the gradient of the events, which is the same on all ranks, from the first rank only."""
    if events.values is None or dist.get_rank(group) == 0:
        return events
    values = events.values.view_as(events.values)
    if values.requires_grad:
        values.register_hook(torch.zeros_like)
    return events.with_values(values)


def shard_neurons(net: Network, group: Group = None) -> Network:
    """Shard the neurons of a network's `EventLinear` layers over the ranks.

    If all ranks call the result with the same input, it returns on every rank what `net` returns,
    with gradients equal up to rounding. Each rank gets the gradients of its shares. A layer without
    neurons is replicated, with the same gradients on all ranks. Do not average gradients, as
    `DistributedDataParallel` does.

    Every rank computes the same loss from the outputs. A loss of events between layers, such as a
    penalty, counts once per rank.

    Args:
        net: a sequence of `EventLinear`, or a `Temporal` of one, the same on all ranks. The result
            contains its layers without neurons, and copies of the others.
        group: the ranks; None for all.

    Returns:
        A network of the same kind, with the same memory policy.

    Raises:
        TypeError: `net` is not a sequence of `EventLinear`.
        ValueError: a neuron has values that are tensors.
    """
    whole = net.net if isinstance(net, Temporal) else net
    if not isinstance(whole, nn.Sequential):
        raise TypeError(
            f"net is a {type(whole).__name__}: expected an nn.Sequential of EventLinear, or a "
            "Temporal of one"
        )
    layers = [_shard_layer(layer, group) for layer in whole]
    if layers and isinstance(layers[-1], NeuronShard):
        layers[-1].is_last = True
    sharded: Any = nn.Sequential(*layers).train(whole.training)
    if isinstance(net, Temporal):
        sharded = Temporal(sharded, net.memory, batch_first=net.batch_first).train(net.training)
    return sharded


def _shard_layer(layer: nn.Module, group: Group) -> NeuronShard | Replicated:
    if not isinstance(layer, EventLinear):
        raise TypeError(f"net contains a {type(layer).__name__}: expected EventLinear layers only")
    if layer.neuron is None:
        return Replicated(layer, group)
    layer.refuse_computed("sharded")
    options = {name: getattr(layer, name) for name in ("capacity", "overflow", "impl")}
    options |= {"bias": layer.bias is not None, "device": layer.weight.device}
    shard = NeuronShard(layer.in_features, layer.out_features, layer.neuron, group, **options)
    with torch.no_grad():
        for name, whole in layer.named_parameters(recurse=False):
            own = getattr(shard.layer, name)
            own.copy_(whole[shard.share]).requires_grad_(whole.requires_grad)
    return shard


class _GatheredValues(torch.autograd.Function):
    """Return the values of the whole list; backward sums the ranks' gradients of it."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, whole: Tensor, places: Tensor, share: Events, group: Group
    ) -> Tensor:
        ctx.save_for_backward(places, share.offsets, share.fired, share.indices)
        ctx.share, ctx.group, ctx.is_dense = share, group, source.ndim == 3
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        places = ctx.saved_tensors[0]
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        values = total.index_select(0, places)
        if ctx.is_dense:
            values = ctx.share.with_values(values).to_dense(values.dtype)
        return values, None, None, None, None
