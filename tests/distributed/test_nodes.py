"""Several nodes, each with its own torchrun: here all on this machine."""

from __future__ import annotations

from pathlib import Path

from tests.processes import ended, free_port, start

PROGRAM = Path(__file__).parent / "programs" / "shared.py"


def test_two_nodes_of_two_processes() -> None:
    endpoint = f"localhost:{free_port()}"
    nodes = [
        start("-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "2",
              "--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "time",
              PROGRAM, "cpu")
        for _ in range(2)
    ]  # fmt: skip
    outputs = [ended(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    for rank in range(4):
        assert f"rank {rank} of 4: all is well" in "".join(outputs)
