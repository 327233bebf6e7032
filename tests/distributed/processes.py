"""Processes connected by Gloo that run functions of the tests.

There are four, or as many as the environment variable SPIKEFUSE_TEST_PROCESSES says, which must be
a multiple of four.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spikefuse.distributed.mesh import AXES
from spikefuse.graph import fuse_norms
from tests import interpreter
from tests.processes import free_port

SIZE = int(os.environ.get("SPIKEFUSE_TEST_PROCESSES", "4"))
# Numbers of ranks for tests that work with any, including all.
SIZES = sorted({2, 3, 4, SIZE})
TIMEOUT = timedelta(seconds=60)


def forkserver() -> Any:
    """The context of processes that share one import of what all of them need."""
    context = multiprocessing.get_context("forkserver")
    shared = ["spikefuse.testing", "numba", "torch._dynamo", "triton.runtime.interpreter"]
    context.set_forkserver_preload(shared)
    return context


class Group:
    """Runs `function(axis, *args)` in all processes and returns the results of the first `size`.

    `axis` is an axis `time` of `size` ranks; all processes belong to one, except for a size of 3.
    Arguments and results are pickled.
    """

    def __init__(self) -> None:
        context = forkserver()
        # Not a file store, which reads the whole file at each access.
        port = free_port()
        self._pipes, self._processes = [], []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            arguments = rank, theirs, port
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any, size: int = SIZE) -> list[Any]:
        for pipe in self._pipes:
            _send(pipe, (function, size, args))
        answers = [_received(pipe) for pipe in self._pipes]
        failures = [text for failed, text in answers if failed]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers[:size]]

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


def _work(rank: int, pipe: Any, port: int) -> None:
    torch.set_num_threads(1)
    fuse_norms.MIN_VALUES = 0
    interpreter.hasten()
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE, timeout=TIMEOUT
    )
    axes = {
        n: init_device_mesh("cpu", (SIZE // n, n), mesh_dim_names=AXES)["time"]
        for n in (1, *SIZES)
        if n != 3
    }
    # All processes must make each mesh, even if they are not part of it.
    rest = (range(3), *([r] for r in range(3, SIZE)))
    three, *ones = (DeviceMesh("cpu", ranks, mesh_dim_names=("time",)) for ranks in rest)
    axes[3] = three if rank < 3 else ones[rank - 3]
    while (task := _received(pipe)) is not None:
        function, size, args = task
        lasting = set(_groups())
        try:
            answer = False, function(axes[size], *args)
        except BaseException:
            answer = True, f"rank {rank}: {traceback.format_exc()}"
        _send(pipe, answer)
        # Each group has threads that wake a hundred times per second.
        for group in _groups():
            if group not in lasting:
                dist.destroy_process_group(group)
    dist.destroy_process_group()


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)
