"""The mesh `data` × `time` of a job's processes, and the time steps of each rank."""

from __future__ import annotations

import importlib
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# The functions of this module hold the process group that is there when it is imported, which other
# modules of PyTorch do late, for instance on the first use of DistributedDataParallel. Threads of a
# group that is held outlive its destruction, and may abort the process while Python ends.
importlib.import_module("torch.distributed.nn.functional")

AXES = ("data", "time")
# Variables that torchrun sets for each process.
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def make_mesh(data: int | None = None, time: int | None = None, device: str = "auto") -> DeviceMesh:
    """Make the mesh `data` × `time` of all processes of a job; `mesh["time"]` is one axis of it.

    Neighbours in time have consecutive ranks, so that they share a node where possible. Every
    process must call it. If there is no process group yet, it makes one from torchrun's variables.

    Args:
        data: processes that share a batch; None for all that remain.
        time: processes that share a sequence; None for all that remain, or 1 if `data` is None too.
        device: "cuda" (NCCL), "cpu" (Gloo), or "auto" for cuda where available.

    Raises:
        ValueError: the axes do not multiply to the number of processes, or there is no process
            group and torchrun did not start this process.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        connect("nccl" if device == "cuda" else "gloo")
    count = dist.get_world_size()
    for name, size in (("data", data), ("time", time)):
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
            f"{data * time} processes or omit one of the two"
        )
    return init_device_mesh(device, (data, time), mesh_dim_names=AXES)


def check_axis(axis: DeviceMesh) -> None:
    """Raise a `ValueError` unless `axis` is one axis of a mesh."""
    if not isinstance(axis, DeviceMesh) or axis.ndim != 1:
        raise ValueError(f'{axis} is not one axis of a mesh: pass mesh["time"]')


def split_batch(batch: int, chunks: int) -> list[slice]:
    """Split a batch into at most `chunks` slices, none of them empty."""
    chunks = max(1, min(chunks, batch))
    return [slice(i * batch // chunks, (i + 1) * batch // chunks) for i in range(chunks)]


def connect(backend: str) -> None:
    """Make the default process group from torchrun's variables.

    Args:
        backend: "nccl", which also selects this process's GPU, or "gloo".

    Raises:
        ValueError: torchrun did not start this process.
    """
    needed = ("LOCAL_RANK", *ENVIRONMENT) if backend == "nccl" else ENVIRONMENT
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ValueError(
            f"there is no process group, and no {', '.join(missing)} in the environment to make "
            "one: start with torchrun --nproc_per_node N, where N is the number of processes"
        )
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, count = next(rendezvous("env://"))
    # After a restart by torchrun the store still holds addresses of the previous processes.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)


def disconnect() -> None:
    """Destroy the default process group; every process must call it.

    After a collective, threads of Gloo free its tensors, for which they need Python's lock. A
    process that ends, or drops the group, before they have done so may hang or abort (an error of
    PyTorch). So this waits for all processes, and then for a tenth of a second.
    """
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()


def steps_of(num_steps: int, rank: int, size: int) -> slice:
    """Return the steps of a sequence that a rank holds: `rT/k` to `(r+1)T/k`, rounded down.

    T need not be a multiple of k; the numbers of steps differ by at most one.

    Args:
        num_steps: T, at least k.
        rank: r, the position on the axis, from 0.
        size: k, the number of ranks.

    Raises:
        ValueError: the rank is out of range, or there are fewer steps than ranks.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}: expected 0 to {size - 1} for {size} ranks")
    if num_steps < size:
        raise ValueError(
            f"a sequence of {num_steps} steps on {size} ranks: expected at least one step for each "
            "rank; use fewer ranks"
        )
    return slice(rank * num_steps // size, (rank + 1) * num_steps // size)
