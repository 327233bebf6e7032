"""Plots of results, written beside them; nothing is drawn without rows or without matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks import jelly, record
from benchmarks.layers import COMPILED, LOOP, OURS

STYLE = {
    OURS: ("tab:blue", "o"),
    jelly.NODE: ("tab:red", "s"),
    jelly.FUNCTION: ("tab:orange", "^"),
    jelly.PRECISION: ("tab:brown", "v"),
    COMPILED: ("tab:green", "D"),
    LOOP: ("tab:gray", "v"),
}

Rows = list[dict[str, Any]]
# Draws rows on a list of panels and returns the title.
Draw = Callable[[Any, Rows], str]


def plot(
    size: tuple[float, float] = (7, 4.5),
    panels: Callable[[Rows], int] = lambda rows: 1,
    choose: Callable[[Rows], Rows] = lambda rows: rows,
) -> Callable[[Draw], Callable[[dict[str, Any], Path], Path | None]]:
    """Make a function that draws the chosen rows of a result to a file, if there are any."""

    def decorate(draw: Draw) -> Callable[[dict[str, Any], Path], Path | None]:
        @wraps(draw)
        def write(result: dict[str, Any], path: Path) -> Path | None:
            rows = choose(result["rows"])
            try:
                from matplotlib.backends.backend_agg import FigureCanvasAgg
                from matplotlib.figure import Figure
            except ImportError:
                return None
            if not rows:
                return None
            count = panels(rows)
            figure = Figure((size[0] * count, size[1]), layout="constrained", dpi=120)
            FigureCanvasAgg(figure)
            drawn = figure.subplots(1, count, squeeze=False)[0]
            settings, where = result["settings"], record.device(result)
            title = draw(drawn, rows) or settings.get("recipe") or settings.get("data")
            figure.suptitle(f"{title}, {where}" if title else where)
            for panel in drawn:
                panel.grid(alpha=0.3)
                panel.legend(fontsize=8)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
            return path

        return write

    return decorate


def line(panel: Any, points: Sequence[tuple[Any, Any]], *style: Any, **options: Any) -> None:
    """Draw points, unless there are none."""
    if points:
        panel.plot(*zip(*points, strict=True), *style, **options)


def step_axis(panel: Any, rows: Rows, **labels: Any) -> None:
    steps = sorted({row["T"] for row in rows})
    panel.set(xscale="log", xlabel="time steps T", **labels)
    panel.set_xticks(steps, [str(T) for T in steps])
    panel.minorticks_off()


@plot((5.2, 4.2), lambda rows: len({row["dtype"] for row in rows}))
def timestep_scaling(panels: Any, rows: Rows) -> str:
    """Draw time over T, one panel per dtype."""
    for panel, dtype in zip(panels, dict.fromkeys(row["dtype"] for row in rows), strict=True):
        mine = sorted((r for r in rows if r["dtype"] == dtype), key=lambda r: r["T"])
        for name, (color, marker) in STYLE.items():
            line(panel, [
                (row["T"], c["wall_ms"]["median"])
                for row in mine
                for c in row["contenders"]
                if c["name"] == name and c["status"] == "ok"
            ], color=color, marker=marker, label=name)  # fmt: skip
        floor = [(r["T"], r["num_bytes"] / r["copies"][0]["gb_per_s"] / 1e6) for r in mine]
        line(panel, floor, "k--", linewidth=1, label="roofline")
        step_axis(panel, mine, yscale="log", title=dtype, ylabel="forward + backward, ms")
    return f"{rows[0]['N']:,} LIF neurons"


def sharded_layers(rows: Rows) -> Rows:
    """Return the replays of CUDA graphs if there are any, otherwise the eager steps."""
    rows = [r for r in rows if r["what"] == "layer" and r["time"] > 1 and "speedup" in r]
    return [r for r in rows if r["way"] == "CUDA graph"] or rows


@plot((6.4, 4.2), choose=sharded_layers)
def time_sharding(panels: Any, rows: Rows) -> str:
    """Draw the speed-up of a layer over T for each number of ranks, measured and predicted."""
    lines = (("speedup", "o-", "measured"), ("by_paper", ":", "Eq. 5"), ("predicted", "--", "plan"))
    for index, count in enumerate(sorted({r["time"] for r in rows})):
        mine = sorted((r for r in rows if r["time"] == count), key=lambda r: r["T"])
        for key, style, name in lines:
            points = [(r["T"], r[key]) for r in mine if r.get(key)]
            line(panels[0], points, style, color=f"C{index}", label=f"{count} ranks, {name}")
    step_axis(panels[0], rows, ylabel="times as fast as one")
    return f"{rows[0]['N']:,} LIF neurons"


@plot((4.5, 3.5), lambda rows: 2, lambda rows: [row for row in rows if "curve" in row])
def learning(panels: Any, rows: Rows) -> str:
    """Draw loss and accuracy over the epochs, for every seed."""
    for panel, quantity, scale in zip(panels, ("loss", "accuracy"), (1, 100), strict=True):
        for index, row in enumerate(rows):
            for part, name, style in (("train", "training", "--"), ("val", "validation", "-")):
                points = [(e["epoch"], scale * e[f"{part}_{quantity}"]) for e in row["curve"]]
                label = f"{name}, seed {row['seed']}"
                line(panel, points, style, color=f"C{index % 10}", marker=".", label=label)
        panel.set(xlabel="epoch", ylabel=quantity if scale == 1 else f"{quantity}, %")
    return ""


def several_rates(rows: Rows) -> Rows:
    cases = [row["case"] for row in rows]
    return [row for row in rows if cases.count(row["case"]) > 1]


@plot((5.5, 4.2), lambda rows: 2, several_rates)
def crossover(panels: Any, rows: Rows) -> str:
    """Draw the speed of events over dense, and samples a second of both, over the activity."""
    labels = {"times_dense": "training steps per second over dense", "samples_per_s": "samples/s"}
    for panel, (key, label) in zip(panels, labels.items(), strict=True):
        for index, case in enumerate(dict.fromkeys(row["case"] for row in rows)):
            for name, style in (("events", "o-"), ("dense, fused over time", "s:")):
                points = sorted((100 * r["rate"], r[key][name])
                                for r in rows if r["case"] == case and name in r[key])  # fmt: skip
                line(panel, points, style, color=f"C{index}", label=f"{case}: {name}")
        panel.set(xscale="log", yscale="log", xlabel="neurons that fire in a step, %", ylabel=label)
    return ""


@plot((4.5, 3.6), lambda rows: 2, lambda rows: [row for row in rows if "efficiency" in row])
def weak_scaling(panels: Any, rows: Rows) -> str:
    """Draw efficiency, and samples a second, over the number of ranks."""
    labels = {"efficiency": "time of one rank over theirs", "samples_per_s": "samples/s"}
    for panel, (key, label) in zip(panels, labels.items(), strict=True):
        line(panel, sorted((row["ranks"], row[key]) for row in rows), "o-", label=label)
        panel.set(xlabel="ranks, each with as many neurons", ylabel=label)
        panel.set_ylim(bottom=0)
    return ""


RULES = {"whole": "ko-", "bptt": "C0s-", "sltt": "C1x:", "ottt": "C2^-", "e-prop": "C3v-",
         "d-rtrl": "C4+:"}  # fmt: skip


@plot((5.2, 4.2), lambda rows: 2)
def online_memory(panels: Any, rows: Rows) -> str:
    """Draw peak memory and time of learning rules over T."""
    quantities = (
        ("peak memory, MB", lambda row: row["peak_bytes"] / 1e6),
        ("forward + backward, s", lambda row: row["seconds"]),
    )
    for panel, (label, read) in zip(panels, quantities, strict=True):
        for rule, style in RULES.items():
            points = [(row["T"], read(row)) for row in rows if row["rule"] == rule]
            line(panel, points, style, label=rule)
        step_axis(panel, rows, yscale="log", ylabel=label)
    return "Parts of 100 steps, and the whole sequence"


@plot()
def accuracy(panels: Any, rows: Rows) -> str:
    """Draw test accuracy over the seconds of training, one line per network and seed."""
    panel, runs = panels[0], dict.fromkeys((row["name"], row["seed"]) for row in rows)
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in runs))}
    for name, seed in runs:
        own = [row for row in rows if (row["name"], row["seed"]) == (name, seed)]
        seconds = list(accumulate(row["seconds"] for row in own))
        label = None if colors[name] in {drawn.get_color() for drawn in panel.lines} else name
        panel.plot(seconds, [100 * r["accuracy"] for r in own], color=colors[name], label=label)
    best = max(100 * row["accuracy"] for row in rows)
    panel.set(xlabel="seconds of training", ylabel="test accuracy, %", ylim=(best - 40, best + 2))
    return ""
