"""Layers on events whose neurons are shared out over processes; only lists of events travel.

Every rank has the events of all inputs and the weights into its own neurons: it computes these
neurons and tells the others which fired and which are candidates. In backward each rank has a part
of the gradient of every event, that by way of its own neurons; the parts are added up.

Shape legend: K ranks, R rows of events, E entries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spikefuse.kernels import event_autograd
from spikefuse.kernels.events import Events, merged
from spikefuse.nn import EventLinear, Neuron, Temporal
from spikefuse.nn.batch_norm import GroupRanks

Group = dist.ProcessGroup | None


def bounds(features: int, group: Group = None) -> list[int]:
    """The first neuron of every rank, and the end: shares that differ by one neuron at most."""
    ranks = dist.get_world_size(group)
    return [features * k // ranks for k in range(ranks + 1)]


class NeuronShard(nn.Module):
    """`EventLinear` with neurons, of which this rank has a share: the same events on every rank.

    Args:
        in_features, out_features: of the whole layer.
        neuron: the neurons, of whom each rank has a copy: nothing of them may be learned, or be one
            value per channel.
        group: the ranks; None: all.
        options: of `EventLinear`. Weights are drawn anew: seed the ranks differently.

    Attributes:
        is_last: no layer comes behind: every rank has the whole loss, whose gradient counts once.
            False at first; `shard_neurons` sets it.

    Raises:
        ValueError: a value of the neuron is a tensor.
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
                f"{type(neuron).__name__} has {len(tensors)} values that are tensors: neurons that "
                "are shared out have floats only"
            )
        self.group, self.bounds = group, bounds(out_features, group)
        self.is_last = False
        first, last = self._share()
        self.layer = _Share(in_features, last - first, neuron, **options)
        self.layer.group = group

    def _share(self) -> tuple[int, int]:
        rank = dist.get_rank(self.group)
        return self.bounds[rank], self.bounds[rank + 1]

    def take(self, whole: EventLinear) -> None:
        """Copy this rank's share of the weights of a whole layer."""
        share = slice(*self._share())
        with torch.no_grad():
            self.layer.weight.copy_(whole.weight[:, share])
            if whole.bias is not None and self.layer.bias is not None:
                self.layer.bias.copy_(whole.bias[share])

    def forward(self, x: Events | Tensor) -> Events:
        layer = self.layer
        layer.exchanges = True
        try:
            events = layer(x)
            counts = layer.counts
        finally:
            layer.exchanges, layer.counts = False, None
        assert isinstance(events, Events)
        found = gathered(events, self.bounds, self.group, counts)
        return _once(found, self.group) if self.is_last else found


class _Share(EventLinear):
    """A layer that tells all ranks how many entries its rows have before it lists them, if it is
    asked to: a host then waits once for its own number and the others'."""

    group: Group = None
    exchanges = False
    counts: Counts | None = None

    def _listed(self, marks: Tensor) -> Events:
        return event_autograd.listed(marks, self._exchange if self.exchanges else None)

    def _exchange(self, fired: Tensor, entries: Tensor) -> int:
        self.counts = exchanged(fired, entries, self.group)
        return self.counts.sizes[dist.get_rank(self.group)]


class Replicated(nn.Module):
    """A layer that every rank has as a whole: its gradient of the events counts once.

    Args:
        layer: the same on all ranks.
        group: the ranks; None: all.
    """

    def __init__(self, layer: EventLinear, group: Group = None) -> None:
        super().__init__()
        self.layer, self.group = layer, group

    def forward(self, x: Events | Tensor) -> Events | Tensor:
        # The gradients of the layer's own weights are the same on all ranks.
        return self.layer(_once(x, self.group) if isinstance(x, Events) else x)


def _once(events: Events, group: Group) -> Events:
    """Events whose gradient, which every rank has as a whole, comes from one rank."""
    if events.values is None or dist.get_rank(group) == 0:
        return events
    return replace(events, values=_Nothing.apply(events.values))


class _Nothing(torch.autograd.Function):
    """The values as they are, with the gradient 0."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


@overload
def shard_neurons(net: nn.Sequential, group: Group = None) -> nn.Sequential: ...


@overload
def shard_neurons(net: Temporal, group: Group = None) -> Temporal: ...


def shard_neurons(net: nn.Sequential | Temporal, group: Group = None) -> nn.Sequential | Temporal:
    """The network with the neurons of its `EventLinear` layers shared out over the ranks.

    It gives what `net` gives, on every rank, up to rounding in gradients, if all ranks call it with
    the same input. Gradients are those of the shares; a layer without neurons is on every rank as a
    whole, and gets the same gradients there. Nothing is left to average: it is not for
    DistributedDataParallel.

    Every rank computes the same loss from the outputs. What it computes from events between the
    layers, such as a penalty, counts once for each rank.

    Args:
        net: a sequence of `EventLinear`, or a `Temporal` of one, the same on all ranks. Its layers
            without neurons are part of the result, those with neurons are copied.
        group: the ranks; None: all.

    Returns:
        A network of the same kind; a `Temporal` with the same memory policy.

    Raises:
        TypeError: `net` is no sequence, or a module of it no `EventLinear`.
        ValueError: a value of a neuron is a tensor.
    """
    if isinstance(net, Temporal):
        return Temporal(_shared(net.net, group), net.memory).train(net.training)
    return _shared(net, group)


def _shared(net: nn.Module, group: Group) -> nn.Sequential:
    if not isinstance(net, nn.Sequential):
        raise TypeError(f"{type(net).__name__} is no nn.Sequential of EventLinear")
    layers: list[nn.Module] = []
    for module in net:
        if not isinstance(module, EventLinear):
            raise TypeError(f"{type(module).__name__} in a network of EventLinear only")
        if module.neuron is None:
            layers.append(Replicated(module, group))
            continue
        options: dict[str, Any] = {
            "bias": module.bias is not None,
            "capacity": module.capacity,
            "overflow": module.overflow,
            "sparse_grad": module.sparse_grad,
            "impl": module.impl,
            "device": module.weight.device,
        }
        features = module.in_features, module.out_features
        shard = NeuronShard(*features, module.neuron, group, **options)
        shard.take(module)
        for name, parameter in module.named_parameters(recurse=False):
            getattr(shard.layer, name).requires_grad_(parameter.requires_grad)
        layers.append(shard)
    if layers and isinstance(layers[-1], NeuronShard):
        layers[-1].is_last = True
    return nn.Sequential(*layers).train(net.training)


class Counts(NamedTuple):
    """How many entries the ranks have.

    Attributes:
        rows: int32 `[K, 2, R]`: of each rank and row the spikes, and all entries.
        starts: int64 `[K, R + 1]`: where the entries of each row begin, and those of the last end.
        sizes: entries of each rank.
    """

    rows: Tensor
    starts: Tensor
    sizes: list[int]


def exchanged(fired: Tensor, entries: Tensor, group: Group = None) -> Counts:
    """The counts of all ranks, for which the host of a GPU waits.

    Args:
        fired, entries: int32 `[R]`, of this rank: the spikes, and all entries.
        group: the ranks.
    """
    rows = _ranks(group).gather(torch.stack((fired, entries)))
    starts = F.pad(rows[:, 1].cumsum(1), (1, 0))
    return Counts(rows, starts, starts[:, -1].tolist())


def gathered(
    events: Events, first: list[int], group: Group = None, counts: Counts | None = None
) -> Events:
    """The events of all ranks as those of one layer.

    Args:
        events: of this rank's neurons.
        first: of the neurons of every rank, and the end.
        group: the ranks.
        counts: those of all ranks, if they are known.
    """
    counts = counts or exchanged(events.fired, events.offsets.diff().int(), group)
    own, rank = events.indices, dist.get_rank(group)
    own = F.pad(own + first[rank], (0, max(1, *counts.sizes) - len(own)))
    shape = events.shape[0], events.shape[1], first[-1]
    whole, values, places = merged(shape, _ranks(group).gather(own), *counts, rank)
    if events.values is None:
        return whole
    return replace(whole, values=_Gathered.apply(events.values, values, places, group))


def _ranks(group: Group) -> GroupRanks:
    all_ranks: Any = group or dist.group.WORLD
    return GroupRanks(all_ranks)


class _Gathered(torch.autograd.Function):
    """The values of the whole list; backward adds up the ranks' gradients of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, whole: Tensor, places: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(places)
        ctx.group = group
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.index_select(0, places), None, None, None
