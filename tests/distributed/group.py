"""Processes connected by Gloo, in which tests run functions of theirs: four, or as many as the
environment variable SPIKEFUSE_TEST_PROCESSES says, a multiple of four."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spikefuse.distributed.mesh import AXES

SIZE = int(os.environ.get("SPIKEFUSE_TEST_PROCESSES", "4"))
# Numbers of ranks that share a sequence, for tests that take any; all there are among them.
SIZES = sorted({2, 3, 4, SIZE})
TIMEOUT = timedelta(seconds=60)


class Group:
    """Call it to run `function(axis, *args)` in all of them; gives the results of the first `size`.

    `axis` is the axis `time` of `size` ranks, of which there are as many as there can be; of 3
    there is one. What a function takes and gives is pickled.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["spikefuse.testing", "numba"])
        # Not a file: each look into one reads all that was ever written there.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
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
    """What each of them is refused with."""
    messages = []
    for case in cases:
        with pytest.raises((TypeError, ValueError)) as caught:
            case()
        messages.append(str(caught.value))
    return messages


def _send(pipe: Any, value: Any) -> None:
    pipe.send_bytes(pickle.dumps(value))  # `send` would share tensors' memory, in other ways


def _received(pipe: Any) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _work(rank: int, pipe: Any, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE, timeout=TIMEOUT
    )
    axes = {
        n: init_device_mesh("cpu", (SIZE // n, n), mesh_dim_names=AXES)["time"]
        for n in (1, *SIZES)
        if n != 3
    }
    # Each is made by all processes, those outside it too.
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
        # Each has threads that wake a hundred times a second.
        for group in _groups():
            if group not in lasting:
                dist.destroy_process_group(group)
    dist.destroy_process_group()


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)
