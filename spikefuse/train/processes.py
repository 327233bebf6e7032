"""The processes of a run: one, or those that torchrun started.

There are `data` × `time` processes. Groups of `time` neighbours share the samples of a batch and
split their time steps (see `spikefuse.distributed`). All processes hold the dataset and the
network, and average gradients with PyTorch's DistributedDataParallel, over NCCL on GPUs and Gloo on
CPUs.
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
    """Another process of the run has ended, so this one cannot continue.

    Args:
        checkpoint: the file to resume from, or None if nothing was saved.
        why: the cause, if it is known.
    """

    def __init__(self, rank: int, checkpoint: Path | None, why: str = "") -> None:
        why = why or "another process has ended, so the run cannot continue"
        saved = "nothing was saved"
        if checkpoint is not None:
            saved = f"saved {checkpoint}: continue with --resume {checkpoint}"
        super().__init__(f"rank {rank}: {why}; {saved}")


# The group of all processes over Gloo, for values on the host, under the key "group".
_host: dict[str, dist.ProcessGroup] = {}


@dataclass(frozen=True)
class Processes:
    """The position of this process among all processes of the run.

    Args:
        rank: rank of this process.
        count: number of processes (world size).
        local_rank, local_count: rank and count on this machine.
        time: number of processes that share a sequence.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    time: int = 1

    @classmethod
    def started(cls, time: int = 1) -> Processes:
        """Return the processes that torchrun started, or this one only."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls(time=time)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, count, local_rank, local_count = (int(os.environ[name]) for name in names)
        return cls(rank, count, local_rank, local_count, time)

    @property
    def data(self) -> int:
        """Number of processes that share a batch."""
        return self.count // self.time

    @property
    def main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return this process's samples out of `count`; sizes differ by at most one."""
        rank = self.rank // self.time
        return slice(count * rank // self.data, count * (rank + 1) // self.data)

    def steps(self, num_steps: int) -> slice:
        """Return this process's time steps."""
        return steps_of(num_steps, self.rank % self.time, self.time)

    @contextlib.contextmanager
    def connected(self, device: torch.device) -> Iterator[None]:
        """Connect the processes for the duration of a block."""
        if self.count == 1:
            yield
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        connect("nccl" if device.type == "cuda" else "gloo")
        _host["group"] = dist.new_group(backend="gloo")
        yield
        # Skipped after an exception: a barrier needs all processes.
        dist.barrier(_host["group"])
        dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values`, on the device of the run, over all processes."""
        if self.count > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def maximum(self, value: int) -> int:
        """Return the maximum over all processes without waiting for the GPU."""
        if self.count == 1:
            return value
        values = torch.tensor([value])
        dist.all_reduce(values, dist.ReduceOp.MAX, group=_host["group"])
        return int(values)

    def broadcast(self, value: Any) -> Any:
        """Return the main process's `value` in all processes."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=_host["group"])
        return values[0]

    @contextlib.contextmanager
    def local_main_first(self) -> Iterator[None]:
        """Run a block on one process of each machine before the others."""
        if self.local_rank > 0 and self.count > 1:
            dist.barrier(_host["group"])
        try:
            yield
        finally:
            if self.local_rank == 0 and self.count > 1:
                dist.barrier(_host["group"])


def is_connection_error(error: BaseException) -> bool:
    """Whether an error means that the connection to another process is lost."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()
