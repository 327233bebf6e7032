"""Run all tests that use a GPU, and write how they ended.

    python -m benchmarks.gpu_tests                  one after the other
    python -m benchmarks.gpu_tests -n 16            on 16 processes

Further arguments are pytest's; without paths, `tests` is run. A run without failures exits with 0.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import record
from benchmarks.runner import Record, plain_parser


def main(argv: list[str] | None = None) -> None:
    parser = plain_parser("benchmarks.gpu_tests", __doc__)
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="folder for the result")
    args, given = parser.parse_known_args(argv)
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU that PyTorch can use")
    result = record.document("gpu_tests", torch.device("cuda"), False, {"arguments": given})
    result["machine"]["gpus"] = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}", *given]
        process = subprocess.Popen(command, cwd=record.ROOT)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            code = process.wait()  # it was interrupted too, and prints what failed
        if code == pytest.ExitCode.INTERRUPTED:
            parser.exit(code, "interrupted: no result is written\n")
        if not report.exists():
            parser.exit(1, f"pytest ended with exit code {code} and wrote no report\n")
        result["rows"] = [row_of(report)]
    print(f"wrote {record.write(args.out, result)}")
    sys.exit(code)


def row_of(report: Path) -> Record:
    """Return the number of tests by outcome, the failures, and the reasons of skips."""
    (suite,) = ElementTree.parse(report).getroot()
    failed: list[str] = []
    reasons = Counter[str]()
    for case in suite.iter("testcase"):
        outcomes = {entry.tag: entry for entry in case}
        if outcomes.keys() & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in outcomes:
            reasons[reason_of(outcomes["skipped"])] += 1
    total = int(suite.get("tests", 0))
    return {
        "passed": total - len(failed) - reasons.total(),
        "failed": sorted(failed),
        "skipped": dict(reasons.most_common()),
        "seconds": float(suite.get("time", 0)),
    }


def reason_of(skip: ElementTree.Element) -> str:
    """Return why a test was skipped.

    For a file that was skipped as a whole, the reason is in the text, a tuple of path, line and
    reason, not in the message.
    """
    message, text = skip.get("message", ""), skip.text or ""
    if message != "collection skipped":
        return message
    reason: str = ast.literal_eval(text)[2]
    return reason.removeprefix("Skipped: ")


if __name__ == "__main__":
    main()
