"""The papers' rows: one recipe each, and a table that shows their figures before there are ours."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots, record, reproduce, tables
from spikefuse.train.callbacks import METRICS

RECIPE = "temporal-fusion-mnist-resnet18"
LARGE = "bptt-on-gpu-fashion-mnist-large"
EPOCHS = """epoch,step,train_loss,train_accuracy,images_per_second,data_wait,val_loss,val_accuracy
1,100,2.0,0.25,200.0,0.0,1.5,0.5
2,200,1.0,0.5,400.0,0.0,1.0,0.75
"""


def test_a_recipe_per_row() -> None:
    assert {path.stem for path in reproduce.CONFIGS.glob("*.yaml")} == set(reproduce.PAPER)


def test_a_result_and_its_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPIKEFUSE_REVISION", "0123456789abcdef")
    commands = []

    def fake(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        out = Path(command[command.index("--out") + 1])
        out.mkdir()
        seed = int(command[command.index("--seed") + 1])
        facts = dict.fromkeys(reproduce.FACTS, 7) | {"test_accuracy": 0.98 + seed / 100}
        config = {"seed": seed, "batch_size": 10}
        (out / "result.json").write_text(json.dumps(facts | {"config": config}))
        (out / METRICS).write_text(EPOCHS)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(reproduce.subprocess, "run", fake)
    options = [RECIPE, "--device", "cpu", "--seeds", "0", "1", "--out", str(tmp_path)]
    (path,) = reproduce.main(options)
    assert commands[0][4:6] == ["--config", str(reproduce.CONFIGS / f"{RECIPE}.yaml")]
    result = record.read(path)
    assert result["settings"]["config"] == {"batch_size": 10}
    first, second = result["rows"][1]["curve"]
    assert first == {"epoch": 1, "train_loss": 2.0, "train_accuracy": 0.25, "val_loss": 1.5,
                     "val_accuracy": 0.5, "seconds": 5.0}  # fmt: skip
    assert second["seconds"] == 2.5
    text = tables.papers([(path, result)], tmp_path)
    assert f"| `{RECIPE}` | 98.29% | 98.00%, 99.00% | 65.6 | 7.00, 7.00 |" in text
    assert "| `bptt-on-gpu-cifar10-large` | 90.17% | – | – | – |" in text
    assert "| `bptt-on-gpu-fashion-mnist-large` | – | – | – | – |" in text
    assert f"- `{RECIPE}`: **" in text


def test_the_curve_is_drawn_and_linked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    metrics = tmp_path / METRICS
    metrics.write_text(EPOCHS)
    result = {
        "settings": {"recipe": RECIPE},
        "rows": [{"seed": 0, "test_accuracy": 0.9, "training_seconds": 7.5,
                  "curve": reproduce.curve(metrics, 10)}],
        "machine": {"gpu": "A GPU", "cpu": "A CPU"},
        "versions": {}, "revision": None, "dirty": None, "date": "2026-01-02",
        "bars": reproduce.bars(LARGE, [{"seed": 0, "seconds": 500.0}]),
    }  # fmt: skip
    path = tmp_path / "results" / "one.json"
    plot = plots.learning(result, path.with_suffix(".png"))
    assert plot is not None
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = tables.papers([(path, result)], tmp_path / "docs")
    assert "Bars missed: seed 0: seconds (500, bar 480). [Curve](../results/one.png)." in text


def test_only_rows_with_a_bar_are_judged() -> None:
    rows = [{"seed": 0, "seconds": 300.0}]
    assert reproduce.bars(RECIPE, rows) == []
    assert [bar["met"] for bar in reproduce.bars(LARGE, rows)] == [True]


def test_the_page_is_up_to_date() -> None:
    page = record.ROOT / "docs" / "reproduce.md"
    assert tables.filled(page.read_text(), record.RESULTS, page.parent) == page.read_text()
