"""How the tests on a GPU ended, as the report of a run on a CPU has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import sections
from benchmarks.gpu_tests import row_of

TESTS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError

@pytest.mark.parametrize("k", [1, 2])
def test_number(k):
    assert k == 1

def test_error(broken):
    pass

@pytest.mark.skip(reason="needs 3 GPUs")
def test_skipped():
    pass
"""

MODULE = """
import pytest

pytest.skip("it's not installed: see the page", allow_module_level=True)
"""


def test_outcomes(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_whole.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--junitxml=report.xml"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 1
    row = row_of(tmp_path / "report.xml")
    failed = ["test_some::test_error", "test_some::test_number[2]"]
    assert row | {"seconds": 0} == {
        "passed": 1, "failed": failed, "seconds": 0,
        "skipped": {"it's not installed: see the page": 1, "needs 3 GPUs": 1},
    }  # fmt: skip
    parts = list(sections.gpu_tests({"machine": {"gpus": 2}, "rows": [row | {"seconds": 61.7}]}))
    assert parts == [
        "GPUs: 2. Passed: 1, failed: 2, skipped: 2, in 62 s.",
        "Failed: `test_some::test_error`, `test_some::test_number[2]`.",
        "Skipped: it's not installed: see the page (1); needs 3 GPUs (1).",
    ]
