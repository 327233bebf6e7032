"""The figures' script in small, its picture and its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bptt_figures, bptt_plots, bptt_tables, lif, record, steps, tables
from benchmarks.bptt_figures import Row
from benchmarks.steps import CONVOLUTIONS, EAGER, EAGERLY, FUSED, OURS
from benchmarks.workloads import WORKLOADS, Workload

MIB = 1 << 20


def test_rows_are_verified_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling takes a C++ compiler half a minute.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    steps.compiled_loop.cache_clear()
    monkeypatch.setitem(WORKLOADS, "small-cifar10", Workload("conv", (3, 32, 32)))
    chosen = [Row("small", 10, 64, kind="forward"), Row("small", 2, 64)]
    monkeypatch.setattr(bptt_figures, "rows", lambda sizes: iter(chosen))
    command = ["--device", "cpu", "--quick", "--rounds", "1", "--out", str(tmp_path)]
    path = bptt_figures.main(command)
    steps.compiled_loop.cache_clear()
    result = record.read(path)
    assert result["left_out"] == []
    found = [{c["network"]: c["status"] for c in row["contenders"]} for row in result["rows"]]
    assert found == [dict.fromkeys((FUSED, lif.COMPILED, EAGER), "ok"),
                     dict.fromkeys((FUSED, EAGER), "ok")]  # fmt: skip
    assert result["rows"][0]["agreement"][lif.COMPILED]["flips"] == 0


def test_all_rows_of_the_figures() -> None:
    rows = list(bptt_figures.rows(list(bptt_figures.SIZES)))
    assert len({row.title for row in rows}) == len(rows) == 3 + 3 * 3 * 2 + 3
    medium = Row("medium", 10, 64)
    assert medium in rows  # which has a breakdown
    assert medium.names == (FUSED, EAGER, CONVOLUTIONS)
    assert medium.workload(quick=False).network(torch.nn.ReLU) is not None
    with torch.device("meta"):
        plain = Row("large", 10, 64, norms=False).workload(quick=False).network(torch.nn.ReLU)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in plain.modules())


def contender(network: str, ms: float, mib: int, **more: Any) -> dict[str, Any]:
    said = {"network": network, "way": EAGERLY, "status": "ok", "wall_ms": {"median": ms}}
    return said | {"peak_bytes": mib * MIB} | more


def measured() -> dict[str, Any]:
    parts = {"weight_bytes": 10 * MIB, "kept_bytes": 30 * MIB, "product_ms": 4.0, "other_ms": 2.0}
    normed = [
        contender(FUSED, 8.0, 50, breakdown=parts),
        contender(EAGER, 16.0, 200),
        contender(CONVOLUTIONS, 5.0, 40),
    ]
    plain = [contender(OURS, 6.0, 60), contender(EAGER, 12.0, 90)]
    forward = [contender(name, ms, 1) for name, ms in ((FUSED, 2.0), (EAGER, 6.0))]
    forward.append({"network": lif.COMPILED, "way": EAGERLY, "status": "failed", "reason": "why"})
    about = {"size": "medium", "T": 10, "batch": 64}
    rows = [
        about | {"norms": True, "steps": "training", "contenders": normed},
        about | {"norms": False, "steps": "training", "contenders": plain},
        about | {"norms": True, "steps": "forward", "contenders": forward},
    ]
    return {
        "schema": record.SCHEMA,
        "benchmark": "bptt_figures",
        "date": "2026-01-02T03:04:05+00:00",
        "quick": False,
        "revision": None,
        "dirty": None,
        "machine": {"gpu": "A GPU", "cpu": "A CPU", "cores": 2},
        "versions": {"torch": "2.11.0"},
        "rows": rows,
        "left_out": [{"row": "large", "reason": "left out, the time is up"}],
        "bars": [],
    }


def test_tables(tmp_path: Path) -> None:
    path = record.write(tmp_path, measured())
    path.with_suffix(".png").write_bytes(b"")
    text = "<!-- generated:bptt-figures begin --><!-- generated:bptt-figures end -->"
    text = tables.filled(text, tmp_path, tmp_path)
    assert (
        "| medium | yes | 10 | 64 | 16.0 | 8.00 | 5.00 | 2.00 | 200 | 50.0 | 40.0 | 4.00 |" in text
    )
    assert "| medium | no | 10 | 64 | 12.0 | 6.00 | – | 2.00 | 90.0 | 60.0 | – | 1.50 |" in text
    # 2 of 8 ms without a kernel, 20 of 50 MiB that forward has not kept.
    assert f"| {FUSED} | 4.00 | 2.00 | 2.00 | 10.0 | 30.0 | 20.0 |" in text
    assert "| medium | 6.00 | – | 2.00 |" in text
    assert "Not measured: large (left out, the time is up)." in text
    assert "![the figures](bptt_figures-a-gpu.png)" in text


def test_without_rows_there_are_no_tables() -> None:
    assert bptt_tables.training([]) == bptt_tables.breakdown([]) == bptt_tables.forward([]) == ""


def test_the_picture_shows_several_gpus_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"network": FUSED, "way": EAGERLY, "status": "ok", "alone_ms": {"median": 3.0}}
    row |= {"together_ms": {"median": 4.0}, "alone_bytes": MIB, "together_bytes": 2 * MIB}
    ddp = {"settings": {"workload": "alexnet-imagenet"}, "rows": [row], "quick": False}
    head = {"schema": record.SCHEMA, "benchmark": "ddp_alexnet-imagenet", "machine": {"gpu": "A"}}
    record.write(tmp_path, head | ddp)
    (found,) = bptt_figures.ddp_results(tmp_path)
    values = [bptt_plots.of_one(found, FUSED, key, unit)
              for key in ("alone", "together") for unit in ("ms", "MiB")]  # fmt: skip
    assert values == [3.0, 1.0, 4.0, 2.0]
    assert bptt_plots.of_one(found, EAGER, "alone", "ms") is None
    path = bptt_plots.figures(measured(), [found], tmp_path / "plot.png")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
