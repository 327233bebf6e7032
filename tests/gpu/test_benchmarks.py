"""The time-step scaling in small, with device times and peak memory."""

from __future__ import annotations

from pathlib import Path

from benchmarks import lif, record, timestep_scaling


def test_timestep_scaling(tmp_path: Path) -> None:
    command = "--device cuda --N 100000 --T 4 32 --quick --out"
    result = record.read(timestep_scaling.main([*command.split(), str(tmp_path)]))
    assert result["machine"]["gpu"]
    assert [(row["dtype"], row["T"]) for row in result["rows"]] == [
        ("float32", 4), ("float32", 32), ("bfloat16", 4), ("bfloat16", 32)
    ]  # fmt: skip
    for row in result["rows"]:
        found = {c["name"]: c for c in row["contenders"]}
        ours, eager = found[lif.OURS], found[lif.EAGER]
        assert ours["status"] == eager["status"] == "ok"
        assert ours["device_ms"]["median"] > 0
        # At the peak there are y and grad_x, as large as the inputs, and the states kept.
        assert row["input_bytes"] <= ours["peak_bytes"] < 2 * row["input_bytes"]
        assert ours["after_forward_bytes"] < ours["peak_bytes"] < eager["peak_bytes"]
