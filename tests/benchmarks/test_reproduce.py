"""The papers' rows: one recipe each, and a table that shows their figures before there are ours."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record, reproduce, tables

RECIPE = "temporal-fusion-mnist-resnet18"


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
        (out / "result.json").write_text(json.dumps(facts | {"config": {"seed": seed, "lr": 1}}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(reproduce.subprocess, "run", fake)
    options = [RECIPE, "--device", "cpu", "--seeds", "0", "1", "--out", str(tmp_path)]
    (path,) = reproduce.main(options)
    assert commands[0][4:6] == ["--config", str(reproduce.CONFIGS / f"{RECIPE}.yaml")]
    result = record.read(path)
    assert result["settings"]["config"] == {"lr": 1}
    text = tables.papers([(path, result)], tmp_path)
    assert f"| `{RECIPE}` | 98.29% | 98.00%, 99.00% | 65.6 | 7.00, 7.00 |" in text
    assert "| `bptt-on-gpu-cifar10-large` | 90.17% | – | – | – |" in text
    assert f"- `{RECIPE}`: **" in text


def test_the_page_is_up_to_date() -> None:
    page = record.ROOT / "docs" / "reproduce.md"
    assert tables.filled(page.read_text(), record.RESULTS, page.parent) == page.read_text()
