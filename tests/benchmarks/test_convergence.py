"""Learning with the kernels against the eager loop, in small: the same steps as the trainer's."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import convergence, record, tables
from benchmarks.convergence import EAGER, OURS
from spikefuse import data, reference
from spikefuse.scan.execution import Call
from spikefuse.train import run
from spikefuse.train.batches import TrainBatches

CPU = torch.device("cpu")


def learned(
    args: Any, name: str, steps: int, training: data.Examples, validation: data.Examples
) -> dict[str, Any]:
    return convergence.learn(args.config, name, steps, training, validation, CPU)


@pytest.fixture(autouse=True)
def one_thread(own_threads: None) -> None:
    """More would only wait for each other in so small a network."""
    torch.set_num_threads(1)


@pytest.fixture
def digits() -> tuple[data.Examples, data.Examples]:
    rest, _ = data.load("digits")
    return data.split(rest, run.VALIDATION_FRACTION, run.VALIDATION_SEED)


def test_a_result_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--device", "cpu", "--steps", "6", "--dtype", "float32", "bfloat16"]
    path = convergence.main([*options, "--seeds", "3", "--out", str(tmp_path)])
    result = record.read(path)
    assert result["settings"]["config"]["dataset"] == "digits"
    assert result["settings"]["config"]["surrogate"] == "rectangle"  # the recipe's
    assert [(row["dtype"], row["name"]) for row in result["rows"]] == [
        ("float32", OURS), ("float32", EAGER), ("bfloat16", OURS), ("bfloat16", EAGER)
    ]  # fmt: skip
    for row in result["rows"]:
        assert (len(row["losses"]), len(row["parts"])) == (6, convergence.PARTS)
        assert row["parts"][0] == row["losses"][0]
        assert row["seconds"] > 0
    exact, loop, *_ = result["rows"]
    # Rounding grows with the steps; the first has seen none but that of its own forward pass.
    assert exact["losses"][0] == pytest.approx(loop["losses"][0], abs=2e-6)
    assert exact["losses"] == pytest.approx(loop["losses"], abs=0.02)
    assert result["bars"] == []  # it is a trial
    assert "float32, seed 3, eager loop: loss " in capsys.readouterr().out
    text = tables.converging(result, path, tmp_path)
    assert "digits, conv, T = 3, batches of 32, 6 steps of the optimizer:" in text
    assert f"| spikefuse, float32, seed 3 | {exact['parts'][0]:.4f} | " in text
    assert f" | {100 * loop['accuracy']:.2f}% | " in text


def test_the_reference_runs_no_kernel(
    monkeypatch: pytest.MonkeyPatch, digits: tuple[data.Examples, data.Examples]
) -> None:
    calls: Counter[str] = Counter()
    for owner, function, name in (
        (Call, Call.forward, "forward"),
        (reference, reference.scan, "scan"),
    ):

        def counted(*args: Any, function: Any = function, name: str = name, **more: Any) -> Any:
            calls[name] += 1
            return function(*args, **more)

        monkeypatch.setattr(owner, name, counted)
    args = convergence.arguments(["--quick"])
    learned(args, EAGER, 5, *digits)
    assert calls.keys() == {"scan"}
    calls.clear()
    learned(args, OURS, 5, *digits)
    assert calls.keys() == {"forward"}


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_steps_are_the_trainers(
    tmp_path: Path, digits: tuple[data.Examples, data.Examples], precision: str
) -> None:
    args = convergence.arguments(["--quick"])
    args.config = replace(args.config, precision=precision)
    steps = len(TrainBatches(digits[0], args.config.batch_size, 0, lambda: 0))
    found = learned(args, OURS, steps, *digits)
    run.train(args.config, run.Place("cpu", out=tmp_path / "run"))
    (path,) = tmp_path.glob("run/metrics.csv")
    names, values = (line.split(",") for line in path.read_text().splitlines())
    row = dict(zip(names, map(float, values), strict=True))
    assert statistics.fmean(found["losses"]) == pytest.approx(row["train_loss"], rel=1e-4)
    assert found["accuracy"] == pytest.approx(row["val_accuracy"], abs=0.01)


def test_means_cover_all_steps() -> None:
    losses = [float(i) for i in range(11)]
    assert convergence.means(losses) == [0.5, 2.5, 4.5, 6.5, 9.0]


def test_bars() -> None:
    def made(name: str, seed: int, last: float, dtype: str = "float32") -> dict[str, Any]:
        return {"name": name, "seed": seed, "dtype": dtype, "parts": [2.0, last]}

    reference_rows = [made(EAGER, 0, 0.5), made(EAGER, 1, 0.6)]
    (bar,) = convergence.bars([made(OURS, 0, 0.58), made(OURS, 1, 0.68), *reference_rows])
    assert (bar["measured"], bar["bar"], bar["met"]) == (0.08, 0.1, True)
    (bar,) = convergence.bars([made(OURS, 0, 0.68), made(OURS, 1, 0.72), *reference_rows])
    assert (bar["measured"], bar["met"]) == (0.15, False)
    (bar,) = convergence.bars([made(OURS, 0, float("nan")), *reference_rows])
    assert not bar["met"]
    assert convergence.bars([made(OURS, 0, 0.5), made(EAGER, 0, 0.5)]) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--steps", "4"], "--steps must be at least 5"),
        (["--seeds", "-1"], "--seeds at least 0"),
        (["--dataset", "shd"], "shd has no rows and columns"),
    ],
)
def test_options_are_checked(
    wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        convergence.arguments(wrong)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
