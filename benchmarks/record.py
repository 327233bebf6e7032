"""Result files: where a result was measured, and how it is written and read."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

import spikefuse
from spikefuse.data.files import replacing

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Pages with generated regions.
PAGES = (
    "docs/benchmarks.md",
    "docs/from-ann.md",
    "docs/online.md",
    "docs/reproduce.md",
    "docs/tutorials/fast.ipynb",
    "README.md",
)
SCHEMA = 1
PACKAGES = ("triton", "numba", "numpy", "spikingjelly", "snntorch", "norse", "spyx")


def document(
    benchmark: str, device: torch.device, quick: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return a result without "rows"."""
    now = datetime.datetime.now(datetime.UTC)
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "date": now.isoformat(timespec="seconds"),
        "quick": quick,
        **revision(),
        "machine": machine(device),
        "versions": versions(),
        "settings": settings,
    }


def revision() -> dict[str, Any]:
    """Return the git revision and whether the tree had changes; None where unknown.

    SPIKEFUSE_REVISION overrides it, for copies without a git history; it ends in "-dirty" if the
    tree had changes.
    """
    given = os.environ.get("SPIKEFUSE_REVISION")
    if given:
        return {"revision": given.removesuffix("-dirty"), "dirty": given.endswith("-dirty")}
    head = _git("rev-parse", "HEAD")
    if head is None:
        return {"revision": None, "dirty": None}
    # New results and tables do not change the code that was measured.
    others = (f":!{name}" for name in ("benchmarks/results", *PAGES))
    changes = _git("status", "--porcelain", "--", ".", *others)
    return {"revision": head, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the device and its host."""
    found: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        # Well above 0, other processes were using the machine.
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def device(result: dict[str, Any]) -> str:
    """Name the GPU or CPU of a result."""
    machine = result["machine"]
    return machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that shape a result."""
    found = {"python": platform.python_version(), "spikefuse": spikefuse.__version__}
    found["torch"] = torch.__version__  # which includes its build, such as +cpu
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def slug(result: dict[str, Any]) -> str:
    """Return the `device` of a result for file names: `nvidia-h200`, `amd-epyc-2-cores`."""
    return re.sub(r"[^a-z0-9]+", "-", device(result).lower()).strip("-")


def folder(out: Path | None, quick: bool) -> Path:
    """Return the folder of results; a quick run never writes to `benchmarks/results` by default."""
    if out is not None:
        return out
    return Path(tempfile.mkdtemp(prefix="spikefuse-quick-")) if quick else RESULTS


def write(into: Path, result: dict[str, Any]) -> Path:
    """Write a result atomically."""
    path = into / f"{result['benchmark']}-{slug(result)}.json"
    into.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    return path


def read(path: Path) -> dict[str, Any]:
    """Read a result.

    Raises:
        ValueError: the file is not a result of the current schema.
    """
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a result of schema {SCHEMA}; run its benchmark again")
    return result
