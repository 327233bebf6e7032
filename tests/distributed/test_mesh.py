"""Meshes of processes, and the steps of each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from spikefuse.distributed import make_mesh, steps_of
from spikefuse.distributed.mesh import ENVIRONMENT
from tests.distributed.processes import SIZE, Group
from tests.processes import finish, torchrun


@pytest.mark.parametrize(("num_steps", "size"), [(8, 1), (8, 4), (7, 3), (4, 4)])
def test_shares_partition_the_steps(num_steps: int, size: int) -> None:
    shares = [range(num_steps)[steps_of(num_steps, rank, size)] for rank in range(size)]
    assert [step for share in shares for step in share] == list(range(num_steps))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_invalid_shares_raise() -> None:
    with pytest.raises(ValueError, match="a sequence of 3 steps on 4 ranks"):
        steps_of(3, 0, 4)
    with pytest.raises(ValueError, match="rank is 4: expected 0 to 3"):
        steps_of(8, 4, 4)


def test_missing_torchrun_variables_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ValueError, match=r"no RANK, MASTER_ADDR in .* torchrun --nproc_per_node N"):
        make_mesh(device="cpu")


THREADS = """
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from spikefuse.distributed import connect, disconnect

connect("gloo")
DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
disconnect()
print(sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are listed on Linux only")
def test_a_destroyed_group_has_no_threads(tmp_path: Path) -> None:
    """They would abort the process if they ran while Python ends."""
    (tmp_path / "program.py").write_text(THREADS)
    output = finish(torchrun(1, tmp_path / "program.py"))
    assert "gloo" not in output, output


def meshes(axis: DeviceMesh) -> list[object]:
    shapes = [dict(zip(("data", "time"), make_mesh(*sizes, "cpu").shape, strict=True))
              for sizes in ((None, 2), (SIZE, None), (None, None), (2, SIZE // 2))]  # fmt: skip
    messages = []
    for sizes in ((3, None), (SIZE, 2)):
        with pytest.raises(ValueError, match="number of processes") as caught:
            make_mesh(*sizes, "cpu")
        messages.append(str(caught.value))
    return [shapes, make_mesh(SIZE // 2, 2, "cpu")["time"].mesh.tolist(), messages]


def test_meshes(group: Group) -> None:
    shapes, times, messages = zip(*group(meshes), strict=True)
    half = SIZE // 2
    assert [(s["data"], s["time"]) for s in shapes[0]] == [
        (half, 2),
        (SIZE, 1),
        (SIZE, 1),
        (2, half),
    ]
    assert times == tuple([rank // 2 * 2, rank // 2 * 2 + 1] for rank in range(SIZE))
    assert f"data is 3: expected a divisor of {SIZE}" in messages[0][0]
    assert f"data × time is {SIZE} × 2: expected {SIZE}" in messages[0][1]
