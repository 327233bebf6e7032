"""Layers on events whose neurons are shared out over processes; only lists of events travel.

Every rank has the events of all inputs and the weights into its own neurons: it computes these
neurons and tells the others which fired and which are candidates. In backward each rank has a part
of the gradient of every event, that by way of its own neurons; the parts are added up.

Shape legend: K ranks, R rows of events, E entries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spikefuse.block.batch_norm import GroupRanks
from spikefuse.events.format import Counts, Events, marked, merged
from spikefuse.nn import EventLinear, Neuron, Temporal

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
        self.layer.group, self.layer.bounds = group, self.bounds

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
            whole = layer(x)
        finally:
            layer.exchanges = False
        assert isinstance(whole, Events)
        return _once(whole, self.group) if self.is_last else whole


class _Share(EventLinear):
    """A layer that gives the events of all ranks, if it is asked to.

    On a GPU its list is made when the host has waited for the lengths of all ranks' lists, once.
    """

    group: Group = None
    #: Of the ranks' neurons the first, and the end.
    bounds: list[int]
    exchanges = False
    #: The bounds where the layer is, which is told by its input.
    _placed: Tensor | None = None

    def _listed(self, marks: Tensor) -> Events:
        if not self.exchanges:
            return super()._listed(marks)
        found, rank = marked(marks.detach()), dist.get_rank(self.group)
        counts = exchanged(found.fired, found.entries, self.group)
        offsets = counts.starts[rank]
        own = found.sites(offsets, counts.room)
        shape = marks.shape[0], marks.shape[1], marks.shape[2]
        share = Events(shape, offsets, found.fired, own[: counts.sizes[rank]])
        return self._whole(own, counts, share, marks if marks.requires_grad else None)

    def _given(self, events: Events) -> Events:
        if not self.exchanges:
            return events
        counts = exchanged(events.fired, events.offsets.diff().int(), self.group)
        own = F.pad(events.indices, (0, counts.room - len(events.indices)))
        return self._whole(own, counts, events, events.values)

    def _whole(self, own: Tensor, counts: Counts, share: Events, source: Tensor | None) -> Events:
        """The events of all ranks, whose gradient goes to `source`: marks or values of the share,
        whose sites `own` has, with room for those of any rank."""
        if self._placed is None or self._placed.device != own.device:
            self._placed = torch.tensor(self.bounds, device=own.device)
        shape = share.shape[0], share.shape[1], self.bounds[-1]
        every, rank = _ranks(self.group).gather(own), dist.get_rank(self.group)
        whole, values, places = merged(shape, every, self._placed, counts, rank)
        if source is None:
            return whole
        return replace(whole, values=_Gathered.apply(source, values, places, share, self.group))


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


def exchanged(fired: Tensor, entries: Tensor, group: Group = None) -> Counts:
    """The counts of all ranks, for which the host of a GPU waits.

    Args:
        fired, entries: int32 `[R]`, of this rank: the spikes, and all entries.
        group: the ranks.
    """
    return Counts.of(_ranks(group).gather(torch.stack((fired, entries))))


def _ranks(group: Group) -> GroupRanks:
    all_ranks: Any = group or dist.group.WORLD
    return GroupRanks(all_ranks)


class _Gathered(torch.autograd.Function):
    """The values of the whole list; backward adds up the ranks' gradients of it."""

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
            values = replace(ctx.share, values=values).to_dense(values.dtype)
        return values, None, None, None, None
