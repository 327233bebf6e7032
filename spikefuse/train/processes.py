"""The processes of a run: one, or those that torchrun started, each with a share of every batch.

Of `data` × `time` processes, `time` neighbours have the same share of a batch, and each of them has
some of its time steps (see `spikefuse.distributed`). Data parallelism: every process holds the data
and the network, computes the gradients of its share, and averages them with the others (PyTorch's
DistributedDataParallel, by NCCL on GPUs and by Gloo on CPUs).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spikefuse.distributed import connect, steps_of


class PeerLost(Exception):
    """Another process of the run has ended, so that this one cannot go on.

    Args:
        rank: of this process.
        checkpoint: the file to resume from, or None if there is none.
        why: what is known of the other one.
    """

    def __init__(self, rank: int, checkpoint: Path | None, why: str = "") -> None:
        why = why or "another process has ended, and with it the run"
        saved = "nothing was saved"
        if checkpoint is not None:
            saved = f"saved is {checkpoint}: continue with --resume {checkpoint}"
        super().__init__(f"rank {rank}: {why}; {saved}")


@dataclass(frozen=True)
class Processes:
    """Where this process stands among those of its run.

    Args:
        rank: its number, from 0.
        count: how many there are.
        local_rank, local_count: the same among those of this machine.
        time: how many share a sequence.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    time: int = 1

    @classmethod
    def started(cls, time: int = 1) -> Processes:
        """Those that torchrun started, or this one alone."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls(time=time)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, count, local_rank, local_count = (int(os.environ[name]) for name in names)
        return cls(rank, count, local_rank, local_count, time)

    @property
    def data(self) -> int:
        """How many share a batch."""
        return self.count // self.time

    @property
    def main(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's part of `count` samples: equal ones where `count` can be divided."""
        rank = self.rank // self.time
        return slice(count * rank // self.data, count * (rank + 1) // self.data)

    def steps(self, num_steps: int) -> slice:
        """This process's part of the time steps."""
        return steps_of(num_steps, self.rank % self.time, self.time)

    @contextlib.contextmanager
    def connected(self, device: torch.device) -> Iterator[None]:
        """Connect the processes for the duration of a block that succeeds."""
        if self.count == 1:
            yield
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        connect("nccl" if device.type == "cuda" else "gloo")
        _groups.host = dist.new_group(backend="gloo")
        yield
        # Not after an exception: to leave a group in good order takes all its processes.
        dist.barrier(_groups.host)
        dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the processes, where `values` lie on the device of the run."""
        if self.count > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def highest(self, value: int) -> int:
        """The highest value of any process; no wait for the GPU."""
        if self.count == 1:
            return value
        values = torch.tensor([value])
        dist.all_reduce(values, dist.ReduceOp.MAX, group=_groups.host)
        return int(values)

    def told(self, value: Any) -> Any:
        """What the main process passes here, in all of them."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=_groups.host)
        return values[0]

    @contextlib.contextmanager
    def one_first(self) -> Iterator[None]:
        """A block that one process of each machine runs before the others."""
        if self.local_rank > 0 and self.count > 1:
            dist.barrier(_groups.host)
        try:
            yield
        finally:
            if self.local_rank == 0 and self.count > 1:
                dist.barrier(_groups.host)


class _Groups:
    host: dist.ProcessGroup | None = None


_groups = _Groups()


def lost_peer(error: BaseException) -> bool:
    """Whether an error says that a connection to another process broke."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()
