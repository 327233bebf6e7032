"""Processes connected by Gloo that run functions of the tests.

There are four, or as many as the environment variable SPIKEFUSE_TEST_PROCESSES says, which must be
a multiple of four.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spikefuse.distributed.mesh import AXES
from spikefuse.graph import fuse_norms
from tests import interpreter
from tests.processes import forkserver, free_port

SIZE = int(os.environ.get("SPIKEFUSE_TEST_PROCESSES", "4"))
# Numbers of ranks for tests that work with any, including all.
SIZES = sorted({2, 3, 4, SIZE})
TIMEOUT = timedelta(seconds=60)


class Group:
    """Runs `function(axis, *args)` in connected processes and returns the results of the first
    `size`.

    `axis` is an axis `time` of `size` ranks. There are no other processes, unless `world` says how
    many there are, a multiple of `size`: then each process belongs to one axis. Arguments and
    results are pickled.
    """

    def __init__(self) -> None:
        context = forkserver()
        self._world = 0
        self._pipes, self._processes = [], []
        for _ in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def __call__(
        self, function: Callable[..., Any], *args: Any, size: int = SIZE, world: int | None = None
    ) -> list[Any]:
        world = world or size
        if world != self._world:
            # Not a file store, which reads the whole file at each access.
            port = free_port()
            self._all([(_join, rank, world, port) for rank in range(SIZE)])
            self._world = world
        return self._all([(_run, function, size, args)] * world)[:size]

    def _all(self, tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run a task in each of the first processes and return the results."""
        pipes = self._pipes[: len(tasks)]
        for pipe, task in zip(pipes, tasks, strict=True):
            _send(pipe, task)
        answers = [_received(pipe) for pipe in pipes]
        failures = [text for failed, text in answers if failed]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            _send(pipe, None)
        for process in self._processes:
            process.join(10)
            process.kill()


def messages_of(cases: Iterable[Callable[[], Any]]) -> list[str]:
    """The messages of the errors that each case raises."""
    messages = []
    for case in cases:
        with pytest.raises((TypeError, ValueError)) as caught:
            case()
        messages.append(str(caught.value))
    return messages


def _send(pipe: Any, value: Any) -> None:
    pipe.send_bytes(pickle.dumps(value))  # `send` would share the memory of tensors


def _received(pipe: Any) -> Any:
    return pickle.loads(pipe.recv_bytes())


_axes: dict[int, DeviceMesh] = {}


def _work(pipe: Any) -> None:
    torch.set_num_threads(1)
    fuse_norms.MIN_VALUES = 0
    interpreter.hasten()
    while (task := _received(pipe)) is not None:
        function, *args = task
        try:
            answer = False, function(*args)
        except BaseException:
            answer = True, traceback.format_exc()
        _send(pipe, answer)
    _leave()


def _join(rank: int, world: int, port: int) -> None:
    """Leave the last world, and join one of `world` processes, if this one is among them."""
    _leave()
    if rank < world:
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=TIMEOUT
        )


def _leave() -> None:
    _axes.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(function: Callable[..., Any], size: int, args: tuple[Any, ...]) -> Any:
    if size not in _axes:
        shape = dist.get_world_size() // size, size
        _axes[size] = init_device_mesh("cpu", shape, mesh_dim_names=AXES)["time"]
    lasting = set(_groups())
    try:
        return function(_axes[size], *args)
    except BaseException as error:
        error.add_note(f"on rank {dist.get_rank()}")
        raise
    finally:
        # Each group has threads that wake a hundred times per second.
        for group in _groups():
            if group not in lasting:
                dist.destroy_process_group(group)


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)
