"""The scripts run end to end on a CPU, in small; their results make tables."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from benchmarks import cpu_neuron, layer, lif, plots, record, several_gpus, timestep_scaling

TIME = {"median", "p10", "p90", "rounds"}


def check_row(row: dict[str, Any]) -> None:
    assert row["num_bytes"] == 5 * row["T"] * row["N"] * (4 if row["dtype"] == "float32" else 2)
    assert row["copies"][0]["gb_per_s"] > 0
    found = {c["name"]: c for c in row["contenders"]}
    for name in (layer.OURS, layer.EAGER):
        assert found[name]["status"] == "ok"
        assert found[name]["wall_ms"].keys() == TIME
        assert found[name]["fraction"]["wall_ms"] > 0
    assert all(c["status"] == "ok" or c["reason"] for c in found.values())


def test_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own; what fails is named in the end."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    seen: list[list[str]] = []

    def run(command: list[str], **_: Any) -> CompletedProcess[str]:
        seen.append(command)
        return CompletedProcess(command, int("benchmarks.event_scaling" in command))

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(
        SystemExit, match=r"failed: python -m benchmarks\.event_scaling --ranks 1 2 4"
    ):
        several_gpus.main([])
    assert "pytest" in seen[0]
    assert [c[-1] for c in seen[1:]][::5] == ["benchmarks.time_sharding", "benchmarks.tables"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        several_gpus.main([])


def test_timestep_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "--device cpu --N 1000 --T 2 4 --quick --rounds 2 --out"
    path = timestep_scaling.main([*command.split(), str(tmp_path)])
    result = record.read(path)
    assert [(r["dtype"], r["T"]) for r in result["rows"]] == [
        ("float32", 2), ("float32", 4), ("bfloat16", 2), ("bfloat16", 4)
    ]  # fmt: skip
    for row in result["rows"]:
        check_row(row)
    assert result["quick"]
    assert result["settings"]["N"] == 1000
    assert result["bars"] == []  # they are meant for a GPU
    assert "T=4 bfloat16" in capsys.readouterr().out


def test_cpu_neuron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_neuron, "reuse_memory", lambda: True)  # not in the tests' process
    path = cpu_neuron.main(["--N", "2000", "--T", "3", "--quick", "--out", str(tmp_path)])
    result = record.read(path)
    assert [row["memory"] for row in result["rows"]] == ["fresh", "reused"]
    for row in result["rows"]:
        check_row(row)
        assert row["contenders"][0]["page_faults"]["median"] >= 0
    assert result["bars"] == []
    assert "reused memory" in capsys.readouterr().out


@pytest.mark.parametrize("script", [timestep_scaling, cpu_neuron])
def test_sizes_are_checked(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.arguments(["--N", "0"])
    assert stopped.value.code == 2
    assert "--T, --N and --rounds must be at least 1" in capsys.readouterr().err


def row(T: int, dtype: str, **ms: float) -> dict[str, Any]:
    """A row on a GPU, in which peak memory is proportional to time."""
    contenders = [
        {
            "name": name.replace("_", " "),
            "status": "ok",
            "wall_ms": {"median": value},
            "device_ms": {"median": value / 2},
            "peak_bytes": int(100 * value),
        }
        for name, value in ms.items()
    ]
    copies = [{"gb_per_s": 4000.0}]
    return {"T": T, "N": 10, "dtype": dtype, "num_bytes": 8, "input_bytes": 100} | {
        "contenders": contenders,
        "copies": copies,
    }


def test_bars_compare_with_the_faster_rival() -> None:
    rows = [
        row(4, "float32", spikefuse=0.25),
        row(32, "bfloat16", spikefuse=1.0, SpikingJelly_node=8.0, SpikingJelly_function=2.0),
        row(128, "float32", spikefuse=1.0),
        row(64, "float32", spikefuse=1.0, SpikingJelly_node=2.0),
    ]
    found = timestep_scaling.bars(rows)
    assert [(bar["measured"], bar["met"]) for bar in found] == [
        (0.25, False),  # ms at T=4
        (0.5, True),  # wall time
        (0.5, True),  # device time
        (0.5, True),  # memory beyond the inputs
        (round(200 / 300, 4), False),  # the same, inputs included
    ]
    assert found[1]["what"] == "T=32, bfloat16: wall time over SpikingJelly function's"


def test_cpu_bars() -> None:
    def timed(name: str, ms: float) -> dict[str, Any]:
        return {"name": name, "status": "ok", "wall_ms": {"median": ms}}

    contenders = [
        timed(layer.OURS, 2.0) | {"fraction": {"wall_ms": 0.6}},
        timed(layer.EAGER, 40.0),
        timed(lif.RIVAL_NODE, 30.0),
        timed(lif.RIVAL_FUNCTION, 20.0),
    ]
    fraction, speedup, rival = cpu_neuron.bars([{"memory": "reused", "contenders": contenders}])
    assert (fraction["measured"], fraction["met"]) == (0.6, False)
    assert (speedup["measured"], speedup["met"]) == (20.0, True)
    assert (rival["measured"], rival["met"]) == (10.0, False)
    alone = cpu_neuron.bars([{"memory": "fresh", "contenders": contenders[:1]}])
    assert [bar["what"] for bar in alone] == ["fresh memory: of copy bandwidth"]


def test_the_plot_shows_all_dtypes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(T, d, spikefuse=T / 10) for d in ("float32", "bfloat16") for T in (1, 4)]
    result = {"rows": rows, "machine": {"gpu": "A GPU", "cpu": "A CPU"}}
    path = plots.timestep_scaling(result, tmp_path / "plot.png")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
