"""Every script runs end to end at tiny size on a CPU; tests/parity runs those of SpikingJelly."""

from __future__ import annotations

import gc
import importlib
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import benchmarks.__main__ as everything
from benchmarks import events, methods, neurons, parallel, record, reproduce
from benchmarks.events import DENSE, EVENTS
from benchmarks.layers import LOOP, OURS
from spikefuse.train import cli, plots
from spikefuse.train.recipe import RECIPES
from tests.processes import together

QUICK = ("--quick", "--device", "cpu")
SCRIPTS = (
    "neurons steps --dtype float32 --T 2",
    "neurons --groups lif inference layout zoo --dtype bfloat16",
    "recurrent",
    "from_ann",
    "delays",
    "methods",
    "open_neuromorphic",
    "cpu",
    "plasticity",
    "neurons block --layout channels-last --shapes T=4",
    "networks --dtype bfloat16 --name networks_trial --T 3",
    "latency --dtype bfloat16",
    "events",
    "spoken_digits --names spikefuse 'spikefuse, delays' --dtype bfloat16",
    "sequential --names 'binary S4D' 'masked PSN'",
    "neurons first_call --backend numba --neurons LIF",
    "online time --rules sltt",
    "reproduce temporal-fusion-mnist-resnet18",
    "pretrained",
    "quantize digits-conv --weights 4",
)
SHARED = ("parallel data", "parallel time", "events sharded --largest 300")


def check(out: Path) -> list[dict[str, Any]]:
    """Return the rows of the only result in a folder, all of whose own contenders ran."""
    (path,) = out.glob("*.json")
    result = record.read(path)
    assert result["quick"]
    assert result["rows"]
    assert not result.get("left_out")
    for row in result["rows"]:
        for c in row.get("contenders", []):
            own = c["name"].startswith((OURS, LOOP, EVENTS, DENSE))
            without = c["status"] == "unavailable" and (not own or "graph" in c["reason"])
            assert c["status"] == "ok" or without, c
        for found in row.get("agreement", {}).values():
            assert found["flips"] <= found["flips_allowed"]
    return result["rows"]


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the many collections of a benchmark the objects of all earlier tests."""
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(autouse=True)
def trained_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in this process, which has imported Lightning, and draw no figures."""
    start = subprocess.run

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if command[1:4] != ["-m", "spikefuse", "train"]:
            return start(command, **options)
        return subprocess.CompletedProcess(command, cli.main(command[3:]))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(plots, "_save", lambda figure, path: path.touch())


@pytest.mark.parametrize("command", SCRIPTS)
def test_script(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "reuse_memory", lambda: True)  # permanent in this process
    name, *options = shlex.split(command)
    importlib.import_module(f"benchmarks.{name}").main([*options, *QUICK, "--out", str(tmp_path)])
    check(tmp_path)


def test_a_given_name(tmp_path: Path) -> None:
    for given, name in (([], "methods_psn"), (["--name", "trial"], "trial")):
        path = methods.main(["psn", *given, *QUICK, "--out", str(tmp_path)])
        assert path.name.startswith(f"{name}-")


def test_scripts_of_processes(tmp_path: Path) -> None:
    found = {}
    for command in SHARED:
        name, what, *options = command.split()
        options += [*QUICK, "--rounds", "1", "--out", str(tmp_path / what)]
        together(2, importlib.import_module(f"benchmarks.{name}").main, [what, *options])
        found[what] = check(tmp_path / what)
    layers = [row for row in found["time"] if row["what"] == "layer"]
    networks = [row for row in found["time"] if row["what"] == "network"]
    assert all(row["status"] == "ok" for row in (*layers, *networks, *found["data"]))
    assert [row["time"] for row in layers] == [1, 2]
    assert [(row["data"], row["time"]) for row in networks] == [(1, 1), (2, 1), (1, 2), (1, 2)]
    scaling = [(r["ranks"], r["neurons"], "efficiency" in r) for r in found["sharded"]]
    assert scaling == [(1, 200, True), (2, 400, True), (2, 600, False)]


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for script, argument, message in (
        (parallel, "time", "start it with torchrun"),
        (neurons, "--rounds=-1", "at least 1"),
    ):
        with pytest.raises(SystemExit):
            script.main([argument])
        assert message in capsys.readouterr().err


def test_everything_is_run_and_failures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.append(" ".join(command))
        return subprocess.CompletedProcess(command, int("events sharded" in seen[-1]))

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(SystemExit, match=r"failed: .*--nproc_per_node 4 -m benchmarks\.events"):
        everything.main(["--gpus"])
    assert "benchmarks.tables" in seen[-1]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    seen.clear()
    everything.main([])
    assert "benchmarks.events" in seen[0]
    with pytest.raises(SystemExit):
        everything.main(["--gpus"])


def test_each_recipe_has_a_row() -> None:
    assert set(RECIPES) == set(reproduce.PAPERS)
