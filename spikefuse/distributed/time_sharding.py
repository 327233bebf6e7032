"""A network's sequences shared over the `time` axis of a mesh: each rank has some of the steps.

Layers without state need nothing of it. The neurons of a layer get their state from the rank
before, and hand it to the rank after: see `spikefuse.scan.state_passing`.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from spikefuse.distributed.agreement import Agreement
from spikefuse.distributed.faults import Watch, recording
from spikefuse.distributed.links import Link, Ranks
from spikefuse.distributed.mesh import check_axis, parts_of
from spikefuse.distributed.sync_norm import average_statistics, share_statistics
from spikefuse.events.linear import NO_EVENTS
from spikefuse.nn import EventLinear, Temporal
from spikefuse.scan.state_passing import Buffers, Channel, StatePassing

STATISTICS = ("exact", "shard")
# Thread blocks of a GPU that a link may occupy: with 16 a hop of 4 MB took 44 us on H200s, with 32
# it takes 37, with more no less.
LINK_CTAS = 32
# From so many steps on, thread blocks of a scan are so long at work that what is to be sent would
# wait for one of them to end: the next kernel waits for it instead. So it does where the next norm
# lets all ranks wait for each other.
LONG_SCAN = 128
M = TypeVar("M", bound=nn.Module)


def shard_time(
    model: M,
    axis: DeviceMesh,
    chunks: int = 1,
    statistics: str = "exact",
    timeout: float = 300.0,
    speculate: bool = True,
) -> M:
    """Let each rank of `axis` hold its slice of every sequence that goes through a `Temporal`.

    Rank r of k passes the steps `steps_of(T, r, k)` of `[T, B, ...]` and gets the outputs of these
    steps. Spikes in float32 are those of one process, gradients agree to rounding. Every rank
    makes the same calls, and a backward pass through all of them: the loss of the job is the mean
    of its ranks' losses, so that gradients are averaged over all ranks, as by
    `DistributedDataParallel` or `reduce_gradients`.

    With `return_state=True` a rank gets the state after its own last step, the last rank that
    after the sequence. `state=` belongs to rank 0; see `carry_state`.

    Args:
        model: a `Temporal`, or a module with some inside; changed in place.
        axis: one axis of a mesh, such as `mesh["time"]`. Every process of the job has to call this.
        chunks: parts of the batch in which states are handed on. While a rank computes one part,
            the next rank computes the part before. `memory.Checkpoint` has parts of its own.
        statistics: of batch norms in training. "exact": over the steps of all ranks; "shard": over
            a rank's own, without communication, running statistics being averaged.
        timeout: seconds that a rank waits for another one.
        speculate: on GPUs, whether ranks begin before the state of the rank before is there. They
            scan from rest, and again from the state once it is there, until the neurons' states
            are those they were: a few steps where inputs make neurons fire, all of them where they
            forget nothing. Spikes are the same; gradients become 0 where they are smaller than
            2^-32 of what comes from the rank after. With `memory.Checkpoint` they wait.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: no `Temporal`, a network that is sharded already or has neurons
            inside `EventLinear`, not one axis, or another value that cannot be.
    """
    containers = _containers(model)
    check_axis(axis)
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks is {chunks!r}: expected a whole number of at least 1")
    if statistics not in STATISTICS:
        raise ValueError(f"statistics is {statistics!r}: expected one of {', '.join(STATISTICS)}")
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}: expected a positive number of seconds")
    how = chunks, statistics == "exact", bool(speculate)
    shard = TimeShard(axis, *how, timedelta(seconds=timeout))
    for container in containers:
        container.passing = shard
        if shard.size > 1 and shard.exact_statistics:
            share_statistics(container, shard.all)
        elif shard.size > 1:
            average_statistics(container, shard.all)
    return model


def _containers(model: nn.Module) -> list[Temporal]:
    """Those of a model, all of whose time can be shared."""
    containers = [m for m in model.modules() if isinstance(m, Temporal)]
    if not containers:
        raise TypeError(f"{type(model).__name__} holds no Temporal: wrap the network in one first")
    if any(container.passing is not None for container in containers):
        raise ValueError("the model's time is sharded already: call shard_time once")
    for module in (m for container in containers for m in container.modules()):
        if isinstance(module, EventLinear) and module.neuron is not None:
            raise ValueError(NO_EVENTS)
    return containers


class LinkChannel(Channel):
    """States on their way from one link to another."""

    def __init__(
        self, shard: TimeShard, source: Link | None, target: Link | None, buffers: Buffers
    ) -> None:
        super().__init__(buffers)
        self.source, self.target, self.sends_first = source, target, shard.sends_first
        shard.watch.count += 1
        # Post all receives before waiting for the first, so that states arrive during computation.
        self._arriving = [
            source.receive(states) if source is not None else [] for states in buffers
        ]

    def receive(self, i: int) -> list[Tensor]:
        if self.source is not None:
            self.source.wait(self._arriving[i])
        return self.buffers[i]

    def send(self, i: int, states: Sequence[Tensor]) -> None:
        if self.target is not None:
            self.target.send(states)

    def close(self) -> None:
        if self.target is not None and (self.target.blocks or self.sends_first):
            self.target.settle()


class TimeShard(StatePassing):
    """A rank's place in time, and its connections to the ranks before and after."""

    def __init__(
        self,
        axis: DeviceMesh,
        chunks: int,
        exact_statistics: bool,
        speculates: bool,
        timeout: timedelta,
    ) -> None:
        import_dynamo()
        self.axis, self.chunks, self.exact_statistics = axis, chunks, exact_statistics
        self.speculates = speculates
        ranks = dist.get_process_group_ranks(axis.get_group())
        self.rank, self.size = axis.get_local_rank(), len(ranks)
        self.is_first, self.is_last = self.rank == 0, self.rank == self.size - 1
        on_gpu = axis.device_type == "cuda"
        host, group, *pairs = _groups(ranks, "nccl" if on_gpu else "gloo", timeout)
        self.watch = watch = Watch(ranks, _store(host), timeout.total_seconds())
        self.agreement = Agreement(host, not on_gpu, watch)
        self.all = Ranks(group, watch)
        self.statistics = self.all if exact_statistics else None
        self.sends_first = False
        self.before: Link | None = None
        self.after: Link | None = None
        if not self.is_first:
            self.before = Link(ranks[self.rank - 1], pairs[0], watch)
        if not self.is_last:
            self.after = Link(ranks[self.rank + 1], pairs[-1], watch)

    def microbatches(self, batch: int) -> list[slice]:
        return parts_of(batch, self.chunks)

    def begin(self, x: Tensor, call: str, has_state: bool) -> None:
        if has_state and not self.is_first:
            raise ValueError(
                "state is given to a rank that does not hold the first step: pass it to rank 0, as "
                "spikefuse.distributed.carry_state does"
            )
        for link in (self.before, self.after):
            if link is not None:
                link.settle()
        self.sends_first = self.exact_statistics or len(x) >= LONG_SCAN
        statistics = STATISTICS[0 if self.exact_statistics else 1]
        recorded = ", recorded" if recording() else ""
        about = f"{call}, {self.chunks} chunks, {statistics} statistics{recorded}"
        self.agreement.check(x, about)

    def end(self) -> None:
        self._settle_recorded(self.after)

    def forward(self, buffers: Buffers) -> LinkChannel:
        self._settle_recorded(self.after)
        return LinkChannel(self, self.before, self.after, buffers)

    def backward(self, buffers: Buffers) -> LinkChannel:
        self._settle_recorded(self.before)
        if recording():
            # Nobody knows which layer is the last one of a backward pass.
            Variable._execution_engine.queue_callback(self._end_backward)
        return LinkChannel(self, self.after, self.before, buffers)

    def _end_backward(self) -> None:
        self._settle_recorded(self.before)

    @staticmethod
    def _settle_recorded(link: Link | None) -> None:
        """In a recording, wait for what has been sent so far: of its streams all have to come back
        to the one that it began with, and what was sent keeps its memory until then."""
        if link is not None and recording():
            link.settle()

    def __deepcopy__(self, memo: dict[int, Any]) -> TimeShard:
        return self  # a copied network has the same place and uses the same connections


def import_dynamo() -> None:
    """Now, and not in the first relayed scan: an exception that its import catches would keep that
    call's frames, and all their tensors, until the next collection of cycles."""
    if "torch._dynamo" not in sys.modules:
        import torch._dynamo  # noqa: F401

        gc.collect()


def _groups(ranks: list[int], backend: str, timeout: timedelta) -> list[dist.ProcessGroup]:
    """Of all these ranks on their hosts, of all on their devices, of this one with the one before
    it, and of this one with the one after."""
    # Every process of a job has to make every group of it, in one order.
    rows: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, ranks)
    # What a GPU waits for too long, a watch is to find before NCCL does.
    patience = timeout if backend == "gloo" else timeout + timedelta(seconds=60)
    found = []
    for row in sorted({tuple(row) for row in rows}):
        made = [dist.new_group(row, timeout, "gloo"), dist.new_group(row, patience, backend)]
        members = [row, row, *pairwise(row)]
        options = _link_options(patience) if backend == "nccl" else None
        made += [dist.new_group(pair, patience, backend, options) for pair in pairwise(row)]
        found += [g for g, m in zip(made, members, strict=True) if dist.get_rank() in m]
    return found


def _link_options(timeout: timedelta) -> Any:
    """A stream that goes before computation, on few multiprocessors: it waits most of the time."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.config.max_ctas = LINK_CTAS
    return options


def _store(group: dist.ProcessGroup) -> Store:
    """Of the job, for this group's use from a thread of its own."""
    store = _get_default_store()
    # A client is for one thread at a time.
    store = store.clone() if hasattr(store, "clone") else store
    return PrefixStore(f"spikefuse/{group.group_name}", store)
