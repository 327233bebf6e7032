"""Every script runs end to end at tiny size on a CPU."""

from __future__ import annotations

import gc
import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

import benchmarks.__main__ as everything
from benchmarks import event_scaling, networks, neurons, record, time_sharding, training
from benchmarks.events import DENSE, EVENTS
from benchmarks.layers import LOOP, OURS
from benchmarks.networks import FUSED
from tests.processes import finish, torchrun

QUICK = ("--quick", "--device", "cpu")
SCRIPTS = (
    "neurons steps --dtype float32 --T 2",
    "neurons --groups lif inference layout custom --dtype bfloat16",
    "neurons cpu",
    "recurrent",
    "cpu --T 1",
    "block --layout channels-last --shapes T=4",
    "networks --steps training --dtype bfloat16",
    "events --streaming",
    "event_accuracy",
    "accuracy --names spikefuse --early 1 --cutmix 1",
    "spoken_digits --names spikefuse --dtype bfloat16",
    "training convergence",
)
# Scripts that tests/parity runs, because they need other libraries.
PARITY = ("convert",)
# Scripts that start processes, and those that torchrun starts.
PROCESSES = {
    "first_call": "--backend numba --neurons LIF",
    "training": "digits",
    "event_scaling": "--ranks 2 1 --rounds 1",
}
SHARED = {
    "ddp": "--networks spikefuse",
    "time_sharding": "--chunks 1 2 --rounds 1",
}


def written(out: Path) -> dict[str, Any]:
    (path,) = out.glob("*.json")
    result = record.read(path)
    assert result["quick"]
    assert result["rows"]
    return result


def check_contenders(result: dict[str, Any]) -> None:
    assert not result.get("left_out")
    for row in result["rows"]:
        for c in row.get("contenders", []):
            assert c["status"] in ("ok", "unavailable"), c
            own = c["name"].startswith((OURS, LOOP, EVENTS, DENSE))
            assert c["status"] == "ok" or not own or "graph" in c["reason"], c


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the many collections of a benchmark the objects of all earlier tests."""
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.mark.parametrize("command", SCRIPTS)
def test_script(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neurons, "reuse_memory", lambda: True)  # permanent in this process
    name, *options = command.split()
    script = importlib.import_module(f"benchmarks.{name}")
    script.main([*options, *QUICK, "--out", str(tmp_path)])
    check_contenders(written(tmp_path))


@pytest.mark.parametrize("name", [*PROCESSES, *SHARED])
def test_script_of_processes(name: str, tmp_path: Path) -> None:
    options = [*(PROCESSES | SHARED)[name].split(), *QUICK, "--out", str(tmp_path)]
    if name in SHARED:
        finish(torchrun(2, "-m", f"benchmarks.{name}", *options, folder=record.ROOT), 300)
    else:
        importlib.import_module(f"benchmarks.{name}").main(options)
    result = written(tmp_path)
    check_contenders(result)
    rows = result["rows"]
    if name == "ddp":
        assert [row["status"] for row in rows] == ["ok", "unavailable"]  # there are no graphs
    elif name == "time_sharding":
        layers = [row for row in rows if row["what"] == "layer"]
        networks = [row for row in rows if row["what"] == "network"]
        assert all(row["status"] == "ok" for row in rows)
        assert [row["time"] for row in layers] == [1, 2]
        assert layers[1]["by_chunks"].keys() == {"1", "1, waiting", "2, waiting"}
        assert [(row["data"], row["time"]) for row in networks] == [(1, 1), (2, 1), (1, 2), (1, 2)]
    elif name == "event_scaling":
        # Each rank adds as many.
        assert [row.get("neurons") for row in rows] == [200, 400]
        assert rows[1]["efficiency"] > 0


@pytest.mark.parametrize(
    "name",
    sorted({"tables", *(command.split()[0] for command in SCRIPTS), *PARITY, *PROCESSES, *SHARED}),
)
def test_help(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


def test_networks_record_the_differences(tmp_path: Path) -> None:
    command = [*QUICK, "--out", str(tmp_path), "--steps", "evaluation", "--dtype", "float32"]
    result = record.read(networks.main([*command, "--T", "3", "--name", "networks_trial"]))
    (row,) = result["rows"]
    assert result["benchmark"] == "networks_trial"
    assert row["workload"] == "conv-mnist, T = 3"
    assert row["agreement"][OURS]["flips"] == 0
    assert row["agreement"][FUSED]["flips"] <= row["agreement"][FUSED]["flips_allowed"]


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for script, message in ((time_sharding, "start it with torchrun"), (neurons, "at least 1")):
        with pytest.raises(SystemExit):
            script.main(["--quick", "--rounds", "-1" if script is neurons else "1"])
        assert message in capsys.readouterr().err


def test_everything_is_run_and_failures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.append(" ".join(command))
        return subprocess.CompletedProcess(command, int("event_scaling" in seen[-1]))

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(SystemExit, match=r"failed: -m benchmarks\.event_scaling --ranks 1 2 4"):
        everything.main(["--gpus"])
    assert "benchmarks.tables" in seen[-1]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    seen.clear()
    everything.main([])
    assert "benchmarks.events --streaming" in seen[0]
    with pytest.raises(SystemExit):
        everything.main(["--gpus"])


def test_each_recipe_has_a_row() -> None:
    assert {path.stem for path in training.CONFIGS.glob("*.yaml")} == set(training.PAPERS)


def test_a_failed_training_ends_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKEFUSE_REVISION", "0")  # otherwise git is run
    done = subprocess.CompletedProcess([], 2)
    monkeypatch.setattr(training.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(SystemExit, match="seed 0 ended with exit code 2"):
        training.main(["digits", *QUICK])


def test_seeds_are_added_to_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"epochs": 1}

    def train(options: list[str], seed: int, is_recipe: bool) -> tuple[Any, Any]:
        row = {"seed": seed, "seconds": 1.0, "test_accuracy": 0.5, "test_images": 2}
        return row, dict(config)

    monkeypatch.setenv("SPIKEFUSE_REVISION", "0")  # otherwise git is run
    monkeypatch.setattr(training, "train", train)
    options = ["digits", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    path = training.main([*options, "--seeds", "0", "1"])
    add = ["--add", str(path)]
    result = record.read(training.main([*options, *add, "--seeds", "2"]))
    assert [row["seed"] for row in result["rows"]] == result["settings"]["seeds"] == [0, 1, 2]
    with pytest.raises(SystemExit, match=r"has results of seeds \[2\]"):
        training.main([*options, *add, "--seeds", "2", "3"])
    with pytest.raises(SystemExit, match="is not a result of mnist on this machine"):
        training.main(["mnist", *options[1:], *add, "--seeds", "3"])
    config["epochs"] = 2
    with pytest.raises(SystemExit, match="has another configuration"):
        training.main([*options, *add, "--seeds", "3"])
    with pytest.raises(SystemExit):
        training.main(["convergence", *options[1:], *add])
    assert "--add is for tasks that run the trainer" in capsys.readouterr().err


def test_failed_ranks_leave_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(event_scaling.subprocess, "run", lambda *_, **__: done)
    args = event_scaling.arguments([*QUICK])
    found = event_scaling.measure_ranks(args, 4, 300)
    assert found == {"ranks": 4, "status": "failed", "reason": "exit code 3"}
