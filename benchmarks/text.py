"""What tables are made of: where a result comes from, its bars, numbers, and Markdown."""

from __future__ import annotations

from typing import Any


def bars_line(result: dict[str, Any]) -> list[str]:
    """Which of the project's own bars a result missed; nothing where none was judged."""
    bars = result.get("bars", [])
    if not bars:
        return []
    missed = [
        f"{bar['what']} ({measured(bar['measured'])}, bar {bar['bar']:g})"
        for bar in bars
        if not bar["met"]
    ]
    return [f"Bars missed: {'; '.join(missed)}." if missed else "All bars met."]


def measured(value: float | None) -> str:
    return "not measured" if value is None else number(value)


def device(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"


def origin(result: dict[str, Any], both: bool = False) -> str:
    """Where and when a result was measured, with which versions; those of both backends?"""
    machine, versions = result["machine"], result["versions"]
    names = {
        "torch": "PyTorch",
        "triton": "Triton",
        "numba": "Numba",
        "spikingjelly": "SpikingJelly",
    }
    used = "triton" if "gpu" in machine else "numba"
    shown = ["torch", *(("triton", "numba") if both else (used, "spikingjelly"))]
    listed = ", ".join(f"{names[n]} {versions[n]}" for n in shown if n in versions)
    revision = result["revision"]
    said = "revision unknown" if revision is None else f"revision {revision[:10]}"
    if result["dirty"]:
        said += " with changes"
    return f"**{device(result)}** ({listed}; {result['date'][:10]}, {said})"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3 if value >= 0.1 else 4
    return f"{value:.{digits}f}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
