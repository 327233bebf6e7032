"""The programs in examples/ run, and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:.*log_every_n_steps")
def test_own_network(tmp_path: Path) -> None:
    metrics = program("own_network").main(epochs=3, folder=str(tmp_path))
    assert metrics["test_accuracy"] > 0.5
    assert list(tmp_path.glob("**/metrics.csv")) or list(tmp_path.glob("**/events*"))


def test_every_program_is_tested() -> None:
    assert [path.stem for path in EXAMPLES.glob("*.py")] == ["own_network"]
