"""If a rank dies or hangs, the others end and name it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spikefuse as sf
from spikefuse.distributed import faults, make_mesh, shard_time
from spikefuse.testing import make_input
from tests.distributed.processes import forkserver

RANKS, CULPRIT, TIMEOUT = 3, 1, 6.0


def work(rank: int, store: str, fault: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS,
                            timeout=timedelta(seconds=60))  # fmt: skip
    axis, x = make_mesh(1, device="cpu")["time"], make_input((2, 3, 6)).requires_grad_()
    # The first call imports a lot, which may take longer than the timeout.
    shard_time(sf.Temporal(sf.LIF()), axis)(x).sum().backward()
    net = shard_time(sf.Temporal(sf.LIF()), axis, timeout=TIMEOUT)
    faults.LIFE = 4.0
    y = net(x)
    if rank == CULPRIT:
        if fault == "dies":
            os._exit(9)
        time.sleep(60)
    start = time.monotonic()
    try:
        y.sum().backward()
        net(x)
    except faults.RankLost as error:
        pipe.send((str(error), time.monotonic() - start))


MESSAGES = {
    "dies": "rank 1 has ended, and with it the job",
    "hangs": "rank 1 keeps the others wait",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    """The pipe to each rank, for each fault. All jobs run at the same time."""
    context = forkserver()
    processes: list[Any] = []
    pipes: dict[str, list[Any]] = {}
    for fault in MESSAGES:
        store, pipes[fault] = str(tmp_path_factory.mktemp(fault) / "store"), []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            arguments = rank, store, fault, theirs
            processes.append(context.Process(target=work, args=arguments, daemon=True))
            pipes[fault].append(ours)
            processes[-1].start()
    yield pipes
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("fault", MESSAGES)
def test_other_ranks_end_and_name_the_faulty_one(reports: dict[str, list[Any]], fault: str) -> None:
    for rank in {*range(RANKS)} - {CULPRIT}:
        assert reports[fault][rank].poll(60), f"rank {rank} did not report"
        message, seconds = reports[fault][rank].recv()
        assert message.startswith(MESSAGES[fault])
        assert seconds < 3 * TIMEOUT + 10


# Work of a GPU that never completes, while the main thread waits for it.
STUCK = """
import threading, types
import torch.distributed as dist
from spikefuse.distributed import faults
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
watch = faults.RankWatchdog([0, 1], dist.HashStore(), timeout=0.1)
faults.LIFE = 1.0
watch.expect(types.SimpleNamespace(is_completed=lambda: False))
threading.Event().wait(30)
"""


def test_a_process_whose_gpu_never_completes_exits() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "rank 0: rank 1 has ended, and with it the job" in done.stderr
