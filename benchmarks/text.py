"""Building blocks of tables: where a result was measured, numbers, and Markdown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def device(result: Result) -> str:
    machine = result["machine"]
    return machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"


def origin(result: Result, both_backends: bool = False) -> str:
    """Return where and when a result was measured, and with which versions."""
    versions = result["versions"]
    names = {"torch": "PyTorch", "triton": "Triton", "numba": "Numba",
             "spikingjelly": "SpikingJelly"}  # fmt: skip
    backend = "triton" if "gpu" in result["machine"] else "numba"
    shown = ("triton", "numba") if both_backends else (backend, "spikingjelly")
    listed = ", ".join(f"{names[n]} {versions[n]}" for n in ("torch", *shown) if n in versions)
    revision = result["revision"]
    text = "revision unknown" if revision is None else f"revision {revision[:10]}"
    if result["dirty"]:
        text += " with changes"
    return f"**{device(result)}** ({listed}; {result['date'][:10]}, {text})"


def number(value: float | None) -> str:
    """Format with three significant digits, without an exponent."""
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3 if value >= 0.1 else 4
    return f"{value:.{digits}f}"


def mebibytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**20:,.0f}"


def times(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}f}×" if value else "–"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def picture(path: Path, root: Path, text: str) -> list[str]:
    """Link the plot beside a result, if there is one."""
    plot = path.with_suffix(".png")
    if not plot.exists():
        return []
    return [f"![{text}]({Path(os.path.relpath(plot.resolve(), root.resolve())).as_posix()})"]


def left_out(result: Result) -> list[str]:
    found = [f"{one['row']} ({one['reason']})" for one in result.get("left_out", [])]
    return [f"Not measured: {'; '.join(found)}."] if found else []


def by_name(row: Result) -> dict[str, Result]:
    return {c["name"]: c for c in row["contenders"]}


def measured_names(rows: list[Result]) -> list[str]:
    """Return the contenders that were measured at least once."""
    return list(
        dict.fromkeys(
            c["name"] for row in rows for c in row["contenders"] if c["status"] in ("ok", "wrong")
        )
    )


def median(contender: Result | None, kind: str = "wall_ms") -> float | None:
    if contender is None or contender["status"] != "ok":
        return None
    return contender[kind]["median"]


def time_cell(contender: Result | None) -> str:
    if contender is not None and contender["status"] == "wrong":
        return "wrong result"
    return number(median(contender))
