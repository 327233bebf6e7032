"""The processes of a job as a mesh of axes `data` and `time`, and the share of each."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

AXES = ("data", "time")
# By which torchrun connects the processes that it starts.
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def make_mesh(data: int | None = None, time: int | None = None, device: str = "auto") -> DeviceMesh:
    """The mesh `data` × `time` of all processes of a job; `mesh["time"]` is an axis of it.

    Neighbours in time are neighbours in rank, so that they share a node if they can. Every process
    has to call it. Without a process group it connects the processes that torchrun started.

    Args:
        data: processes that share a batch, or None for as many as there are.
        time: processes that share a sequence, or None for the rest.
        device: "cuda" (NCCL), "cpu" (Gloo) or "auto", which is cuda where there is one.

    Raises:
        ValueError: the axes do not multiply to the number of processes, or there is neither a
            process group nor torchrun.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        connect("nccl" if device == "cuda" else "gloo")
    count = dist.get_world_size()
    given = {"data": data, "time": time}
    for name, size in given.items():
        if size is not None and (size < 1 or count % size):
            raise ValueError(
                f"{name} is {size}: expected a divisor of {count}, the number of processes"
            )
    if time is None:
        time = 1 if data is None else count // data
    if data is None:
        data = count // time
    if data * time != count:
        raise ValueError(
            f"data × time is {data} × {time}: expected {count}, the number of processes; start "
            f"{data * time}, or leave one of the two out"
        )
    return init_device_mesh(device, (data, time), mesh_dim_names=AXES)


def check_axis(axis: DeviceMesh) -> None:
    """Refuse what is not one axis of a mesh."""
    if not isinstance(axis, DeviceMesh) or axis.ndim != 1:
        raise ValueError(f'{axis} is not one axis of a mesh: pass mesh["time"]')


def parts_of(batch: int, count: int) -> list[slice]:
    """The parts of a batch in which states are handed on: `count`, but none is empty."""
    count = max(1, min(count, batch))
    return [slice(i * batch // count, (i + 1) * batch // count) for i in range(count)]


def connect(backend: str) -> None:
    """Make the group of all processes that torchrun started.

    Raises:
        ValueError: it did not start this one.
    """
    needed = ("LOCAL_RANK", *ENVIRONMENT) if backend == "nccl" else ENVIRONMENT
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ValueError(
            f"no process group, and no {', '.join(missing)} in the environment to make one by: "
            "start with torchrun --nproc_per_node N, N being the number of processes"
        )
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, count = next(rendezvous("env://"))
    # When torchrun starts them again, the store still has addresses of the processes before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend, store=PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=count
    )


def steps_of(num_steps: int, rank: int, size: int) -> slice:
    """The steps of a sequence of T that rank r of k holds: `rT/k` to `(r+1)T/k`, rounded down.

    T need not divide by k; the shares differ by one step at most.

    Raises:
        ValueError: a rank that there is not, or fewer steps than ranks.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}: expected 0 to {size - 1}, of {size} ranks")
    if num_steps < size:
        raise ValueError(
            f"a sequence of {num_steps} steps on {size} ranks: expected a step for each; use fewer"
        )
    return slice(rank * num_steps // size, (rank + 1) * num_steps // size)
