"""The tables of networks on events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.event_networks import DENSE, EVENTS, GRAPH, LAZY, LISTS, LOOP, PRODUCTS
from benchmarks.text import bars_line, markdown, number, origin

SHOWN = (DENSE, DENSE + GRAPH, EVENTS, LAZY, LISTS, PRODUCTS, LOOP, LOOP + GRAPH)


def events(result: dict[str, Any], path: Path, root: Path) -> str:
    """Samples a second of each network and case; what was found before; streaming; the curves."""
    rows = result["rows"]
    names = [n for n in SHOWN if any(n in row["samples_per_s"] for row in rows)]
    lines, spikes, flips, error = [], 0, 0, 0.0
    for row in rows:
        speeds = row["samples_per_s"]
        faster = f"{row['times_dense'][EVENTS]:.1f}×" if EVENTS in row["times_dense"] else "–"
        cells = [number(speeds[n]) if n in speeds else "–" for n in names]
        about = [row["case"], f"{row['neurons']:,}", f"{100 * row['rate']:g}%"]
        lines.append([*about, *cells, faster])
        check = row["checks"].get(EVENTS)
        if check:
            spikes, flips = spikes + check["sites"], flips + check["flips"]
            error = max(error, *check["errors"].values())
    head = ["case", "neurons", "activity", *names, "events over dense"]
    found = (
        f"Of {spikes:,} spikes on events {flips} differ from those of float64 for the same inputs, "
        f"and no gradient by more than {error:.1g} of its norm."
    )
    parts = [
        origin(result),
        "Samples a second, whole training steps:",
        markdown(head, lines),
        found,
    ]
    if "streaming" in result:
        parts.append(_streaming(result["streaming"]))
    plot = path.with_suffix(".png")
    if plot.exists():
        link = plot.resolve().relative_to(root.resolve()).as_posix()
        parts.append(f"![speed over activity]({link})")
    return "\n\n".join([*parts, *bars_line(result)])


def _streaming(row: dict[str, Any]) -> str:
    times = [
        f"{c['name']} {number(1e3 * c['wall_ms']['median'])}"
        for c in row["contenders"]
        if c["status"] == "ok"
    ]
    about = f"{row['neurons']:,} neurons of which {row['rate']:.2%} fire"
    return f"One time step of one sample, {about}, microseconds: {', '.join(times)}."


def scaling(result: dict[str, Any], path: Path, root: Path) -> str:
    """A line for each number of ranks, and one of the largest network; the picture."""
    lines = []
    for row in result["rows"]:
        about = [row["what"], str(row["ranks"])]
        (run,) = row.get("contenders", [row])
        if "wall_ms" not in run:
            lines.append([*about, run["status"], *["–"] * 4])
            continue
        efficiency = f"{100 * row['efficiency']:.0f}%" if "efficiency" in row else "–"
        sizes = [f"{row[key]:,}" for key in ("neurons", "parameters")]
        times = [number(run["wall_ms"]["median"]), number(row["samples_per_s"])]
        lines.append([*about, *sizes, *times, efficiency])
    head = ["", "ranks", "neurons", "parameters", "step, ms", "samples/s", "efficiency"]
    settings = result["settings"]
    said = (
        f"Layers of {settings['width']:,} neurons of which {100 * settings['rate']:g}% fire, "
        f"T = {settings['T']}, batch {settings['batch']}:"
    )
    plot, drawn = path.with_suffix(".png"), []
    if plot.exists():
        link = plot.resolve().relative_to(root.resolve()).as_posix()
        drawn = [f"![efficiency over ranks]({link})"]
    return "\n\n".join([origin(result), said, markdown(head, lines), *drawn, *bars_line(result)])


def _activity(row: dict[str, Any]) -> str:
    """Of each hidden layer in the last epoch, if the network counts it."""
    rates = [v for name, v in row["last_epoch"].items() if name.startswith("activity_")]
    return " and ".join(f"{100 * rate:.0f}%" for rate in rates) or "–"


def accuracy(result: dict[str, Any], path: Path, root: Path) -> str:
    """A line for each network: of every seed the best accuracy, and its epoch."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["name"] == name]
        lines.append(
            [
                name,
                ", ".join(f"{100 * row['best']:.1f}%" for row in rows),
                ", ".join(str(row["epochs_to_best"]) for row in rows),
                ", ".join(_activity(row) for row in rows),
            ]
        )
    settings = result["settings"]
    hidden = " and ".join(str(n) for n in settings["hidden"])
    said = (
        f"{settings['data']}, every fifth recording held out; hidden layers of {hidden}, "
        f"{settings['epochs']} epochs, capacity {settings['capacity']:g}:"
    )
    table = markdown(["", "best accuracy, by seed", "in epoch", "neurons that fire"], lines)
    return "\n\n".join([origin(result), said, table, *bars_line(result)])
