"""What a result says about its origin, and how it is written."""

from __future__ import annotations

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

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = 1
PACKAGES = ("spikefuse", "torch", "triton", "numba", "numpy", "spikingjelly")


def revision() -> dict[str, Any]:
    """The git revision and whether the tree had changes; None where nobody knows.

    SPIKEFUSE_REVISION tells it where there is no git history; a trailing "-dirty" means changes.
    """
    told = os.environ.get("SPIKEFUSE_REVISION")
    if told:
        return {"revision": told.removesuffix("-dirty"), "dirty": told.endswith("-dirty")}
    head = _git("rev-parse", "HEAD")
    if head is None:
        return {"revision": None, "dirty": None}
    # A fresh result is not a change of what was measured.
    changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!README.md")
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
    """The processor measured on, and the one that drives it."""
    found: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        # Of the last minute before: with much more than 0, others shared the machine.
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "l2_bytes": l2_bytes(device),
            "cuda": torch.version.cuda,
        }
    return found


def l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 1 << 26)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python and the packages that shape a result, those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with its build, such as +cpu
    if "spikefuse" not in found:
        import spikefuse

        found["spikefuse"] = spikefuse.__version__
    return found


def slug(about: dict[str, Any]) -> str:
    """A machine's name in file names: `nvidia-h200`, `amd-epyc-2-cores`."""
    name = about.get("gpu") or f"{about['cpu']} {about['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def document(
    benchmark: str, device: torch.device, quick: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    """The head of a result; the caller adds "rows" and "bars"."""
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


def bar(what: str, measured: float | None, limit: float, at_least: bool = True) -> dict[str, Any]:
    """One of the project's own bars, and whether it is met; None where nothing was measured."""
    found = None if measured is None else round(measured, 4)
    met = found is not None and (found >= limit if at_least else found <= limit)
    return {"what": what, "measured": found, "bar": limit, "at_least": at_least, "met": met}


def print_bars(bars: list[dict[str, Any]]) -> None:
    for bar in bars:
        verdict = "met   " if bar["met"] else "MISSED"
        measured = "not measured" if bar["measured"] is None else f"{bar['measured']:.3f}"
        sense = "at least" if bar["at_least"] else "at most"
        print(f"{verdict} {bar['what']}: {measured}, {sense} {bar['bar']}", flush=True)


def folder(out: Path | None, quick: bool) -> Path:
    """Where results go: a quick run's only into the folder that was asked for."""
    if out is not None:
        return out
    return Path(tempfile.mkdtemp(prefix="spikefuse-quick-")) if quick else RESULTS


def write(into: Path, result: dict[str, Any]) -> Path:
    """Write `<benchmark>-<machine>.json`: the whole file or none."""
    path = into / f"{result['benchmark']}-{slug(result['machine'])}.json"
    into.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=into, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def read(path: Path) -> dict[str, Any]:
    """A result, checked for the schema that this code writes.

    Raises:
        ValueError: another schema, or no result at all.
    """
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a result of schema {SCHEMA}; measure again")
    return result
