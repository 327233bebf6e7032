"""Share the sequences of a network over the `time` axis of a mesh: each rank holds some steps.

Layers without state need no changes. The neurons of a layer receive their state from the previous
rank and send it to the next one: see `spikefuse.scan.state_passing`.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from spikefuse._torch import at_end_of_backward, dynamo_is_imported
from spikefuse.distributed.agreement import Agreement
from spikefuse.distributed.faults import RankWatchdog, recording
from spikefuse.distributed.links import AxisCollectives, PeerLink
from spikefuse.distributed.mesh import check_axis, split_batch
from spikefuse.distributed.sync_norm import average_statistics, share_statistics
from spikefuse.events.linear import NO_EVENTS
from spikefuse.nn import EventLinear, Feedback, Recurrent, Temporal
from spikefuse.nn.recurrent import NO_SHARDS
from spikefuse.scan.state_passing import Buffers, Channel, StatePassing

STATISTICS = ("exact", "shard")
# Thread blocks that a link may occupy on a GPU. On H200s a 4 MB transfer takes 44 us with 16, and
# 37 us with 32 or more.
LINK_CTAS = 32
# With this many steps, the thread blocks of a scan run so long that a send would wait for one to
# end. The next kernel then waits for the send, as it does if a norm synchronizes the ranks.
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
    """Share every sequence that a `Temporal` inside `model` receives among the ranks of `axis`.

    Rank r of k passes the steps `steps_of(T, r, k)` of `[T, B, ...]` and gets their outputs.
    Spikes in float32 equal those of one process, and gradients agree to rounding. Every rank must
    make the same calls, and run backward through all of them. The loss of the job is the mean of
    its ranks' losses, so average gradients over all ranks with `DistributedDataParallel` or
    `reduce_gradients`.

    With `return_state=True` a rank gets the state after its own last step; on the last rank this is
    the state after the sequence. Pass `state=` on rank 0 only; see `carry_state`.

    Args:
        model: a `Temporal`, or a module that contains some; changed in place.
        axis: one axis of a mesh, such as `mesh["time"]`. Every process of the job must call this.
        chunks: chunks of the batch in which states are sent. While a rank computes one chunk, the
            next rank computes the previous one.
        statistics: of batch norms in training. "exact": over the steps of all ranks. "shard": over
            the rank's own steps, without communication; running statistics are averaged.
        timeout: seconds that a rank waits for another one.
        speculate: whether ranks on GPUs scan from rest before the state of the previous rank
            arrives, and then repair the result: rescan from the received state until the neurons'
            states match. This takes a few steps if inputs make neurons fire, and all steps if
            neurons do not leak. Spikes are the same; gradients smaller than 2^-32 of those that the
            next rank sends become 0. With `memory.Checkpoint` ranks do not speculate.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: the model contains no `Temporal`, is sharded already, or contains an
            `EventLinear` with neurons, a `Recurrent` or a `Feedback`; or an argument is invalid.
    """
    containers = _containers(model)
    check_axis(axis)
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks is {chunks!r}: expected a whole number of at least 1")
    if statistics not in STATISTICS:
        raise ValueError(f"statistics is {statistics!r}: expected one of {', '.join(STATISTICS)}")
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}: expected a positive number of seconds")
    shard = TimeShard(axis, chunks, statistics, bool(speculate), timedelta(seconds=timeout))
    for container in containers:
        container.passing = shard
        if shard.size > 1:
            share = share_statistics if statistics == "exact" else average_statistics
            share(container, shard.collectives)
    return model


def _containers(model: nn.Module) -> list[Temporal]:
    """Find the containers in a model, and check that time sharding supports them."""
    containers = [m for m in model.modules() if isinstance(m, Temporal)]
    if not containers:
        raise TypeError(f"{type(model).__name__} contains no Temporal: wrap the network in one")
    if any(container.passing is not None for container in containers):
        raise ValueError("the model's time is sharded already: call shard_time once")
    for module in (m for container in containers for m in container.modules()):
        if isinstance(module, EventLinear) and module.neuron is not None:
            raise ValueError(NO_EVENTS)
        if isinstance(module, Recurrent | Feedback):
            raise ValueError(NO_SHARDS)
    return containers


class LinkChannel(Channel):
    """Receives states from one link and sends them to another."""

    def __init__(
        self, shard: TimeShard, source: PeerLink | None, target: PeerLink | None, buffers: Buffers
    ) -> None:
        super().__init__(buffers)
        self.target, self.sends_first, self.watchdog = target, shard.sends_first, shard.watchdog
        self.watchdog.count += 1
        # Post all receives before waiting for the first, so that states arrive during computation.
        self._arriving = [] if source is None else [*map(source.receive, buffers)]

    def receive(self, i: int) -> list[Tensor]:
        if self._arriving:
            self.watchdog.wait(self._arriving[i])
        return self.buffers[i]

    def send(self, i: int, states: Sequence[Tensor]) -> None:
        if self.target is not None:
            self.target.send(states)

    def close(self) -> None:
        if self.target is not None and (self.target.blocks or self.sends_first):
            self.target.flush()


class TimeShard(StatePassing):
    """A rank's position along the time axis, and its connections to the neighbouring ranks."""

    def __init__(
        self,
        axis: DeviceMesh,
        chunks: int,
        statistics: str,
        speculates: bool,
        timeout: timedelta,
    ) -> None:
        import_dynamo()
        self.axis, self.chunks, self.speculates = axis, chunks, speculates
        self.exact_statistics = statistics == "exact"
        ranks = dist.get_process_group_ranks(axis.get_group())
        self.rank, self.size = axis.get_local_rank(), len(ranks)
        self.is_first, self.is_last = self.rank == 0, self.rank == self.size - 1
        on_gpu = axis.device_type == "cuda"
        host, group, *pairs = _groups(ranks, "nccl" if on_gpu else "gloo", timeout)
        self.watchdog = watchdog = RankWatchdog(ranks, _store(host), timeout.total_seconds())
        self.agreement = Agreement(host, not on_gpu, watchdog)
        self.collectives = AxisCollectives(group, watchdog)
        self.statistics = self.collectives if self.exact_statistics else None
        self.sends_first = False
        self.before: PeerLink | None = None
        self.after: PeerLink | None = None
        if not self.is_first:
            self.before = PeerLink(ranks[self.rank - 1], pairs[0], watchdog)
        if not self.is_last:
            self.after = PeerLink(ranks[self.rank + 1], pairs[-1], watchdog)

    def microbatches(self, batch: int) -> list[slice]:
        return split_batch(batch, self.chunks)

    def begin(self, x: Tensor, call: str, has_state: bool) -> None:
        if has_state and not self.is_first:
            raise ValueError(
                "state is given to a rank that does not hold the first step: pass it to rank 0, as "
                "spikefuse.distributed.carry_state does"
            )
        for link in (self.before, self.after):
            if link is not None:
                link.flush()
        self.sends_first = self.exact_statistics or len(x) >= LONG_SCAN
        statistics = STATISTICS[0 if self.exact_statistics else 1]
        recorded = ", recorded" if recording() else ""
        about = f"{call}, {self.chunks} chunks, {statistics} statistics{recorded}"
        self.agreement.compare(x, about)

    def end(self) -> None:
        _flush_recorded(self.after)

    def forward(self, buffers: Buffers) -> LinkChannel:
        _flush_recorded(self.after)
        return LinkChannel(self, self.before, self.after, buffers)

    def backward(self, buffers: Buffers) -> LinkChannel:
        if recording():
            _flush_recorded(self.before)
            # A layer does not know whether it is the last one of the backward pass.
            at_end_of_backward(partial(_flush_recorded, self.before))
        return LinkChannel(self, self.after, self.before, buffers)

    def __deepcopy__(self, memo: dict[int, Any]) -> TimeShard:
        return self  # a copied network has the same position and uses the same connections


def _flush_recorded(link: PeerLink | None) -> None:
    """Wait for all sends if a CUDA graph is recorded.

    All streams must join the one that began the recording before it ends. Until then, sent tensors
    stay allocated.
    """
    if link is not None and not link.blocks and recording():
        link.flush()


def import_dynamo() -> None:
    """Import TorchDynamo before the first call that needs it.

    An exception caught during the import would hold that call's frames, and their tensors, until
    the next garbage collection.
    """
    if not dynamo_is_imported():
        torch.compiler.list_backends()
        gc.collect()


def _groups(ranks: list[int], backend: str, timeout: timedelta) -> list[dist.ProcessGroup]:
    """Make the groups of this rank: all ranks on hosts, all ranks on devices, and one per neighbour
    in order."""
    # Every process of a job must make all of its groups in the same order.
    rows: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, ranks)
    # The watchdog must find an overdue rank before NCCL does.
    backend_timeout = timeout if backend == "gloo" else timeout + timedelta(seconds=60)
    joined = []
    for row in sorted({tuple(row) for row in rows}):
        made = [dist.new_group(row, timeout, "gloo"), dist.new_group(row, backend_timeout, backend)]
        members = [row, row, *pairwise(row)]
        options = _link_options() if backend == "nccl" else None
        with warnings.catch_warnings():  # that the options have another timeout, which is not used
            warnings.filterwarnings("ignore", ".*timeout was specified")
            made += [
                dist.new_group(pair, backend_timeout, backend, options) for pair in pairwise(row)
            ]
        joined += [g for g, m in zip(made, members, strict=True) if dist.get_rank() in m]
    return joined


def _link_options() -> Any:
    """Request a high-priority stream on few multiprocessors, because it waits most of the time."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = LINK_CTAS
    return options


def _store(group: dist.ProcessGroup) -> Store:
    """Return the job's store, for use by this group from a separate thread."""
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    # A client must not be used by two threads at a time.
    store = store.clone() if hasattr(store, "clone") else store
    return PrefixStore(f"spikefuse/{group.group_name}", store)
