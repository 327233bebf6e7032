"""A benchmark in two processes of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import record


def by_two(name: str, out: Path, *arguments: str, seconds: float) -> tuple[Path, str]:
    """(the result, what was said) of a quick trial on CPUs, which may take so long."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "-m", f"benchmarks.{name}", "--quick", "--device", "cpu"]
    with subprocess.Popen(
        [*command, *arguments, "--out", str(out)],
        cwd=record.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends the two
            raise
    assert process.returncode == 0, said
    (path,) = out.glob(f"{name}-*.json")
    return path, said
