"""Several nodes, each with its own torchrun: here all on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "shared.py"
ROOT = PROGRAM.parents[3]
SECONDS = 90.0


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_nodes_of_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    nodes = [
        torchrun("--nnodes", "2", "--nproc_per_node", "2", "--rdzv_backend", "c10d",
                 "--rdzv_endpoint", endpoint, "--rdzv_id", "time", str(PROGRAM), "cpu")
        for _ in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    for rank in range(4):
        assert f"rank {rank} of 4: all is well" in "".join(outputs)
