"""Plots of results, written beside them; nothing is drawn without rows or without matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.layers import COMPILED, JELLY_FUNCTION, JELLY_NODE, LOOP, OURS

STYLE = {
    OURS: ("tab:blue", "o"),
    JELLY_NODE: ("tab:red", "s"),
    JELLY_FUNCTION: ("tab:orange", "^"),
    COMPILED: ("tab:green", "D"),
    LOOP: ("tab:gray", "v"),
}

Rows = list[dict[str, Any]]
# Draws rows on a figure and returns its title.
Draw = Callable[[Any, Rows], str]


def plot(
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
            figure = Figure(layout="constrained", dpi=120)
            FigureCanvasAgg(figure)
            machine = result["machine"]
            where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
            settings = result["settings"]
            title = draw(figure, rows) or settings.get("recipe") or settings.get("data")
            figure.suptitle(f"{title}, {where}" if title else where)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
            return path

        return write

    return decorate


def step_axis(panel: Any, steps: list[int], **labels: Any) -> None:
    panel.set(xscale="log", xlabel="time steps T", **labels)
    panel.set_xticks(steps, [str(T) for T in steps])
    panel.minorticks_off()
    panel.grid(alpha=0.3)


@plot()
def timestep_scaling(figure: Any, rows: Rows) -> str:
    """Draw time over T, one panel per dtype."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure.set_size_inches(5.2 * len(dtypes), 4.2)
    panels = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for panel, dtype in zip(panels, dtypes, strict=True):
        mine = sorted((r for r in rows if r["dtype"] == dtype), key=lambda r: r["T"])
        for name, (color, marker) in STYLE.items():
            points = [
                (row["T"], c["wall_ms"]["median"])
                for row in mine
                for c in row["contenders"]
                if c["name"] == name and c["status"] == "ok"
            ]
            if points:
                panel.plot(*zip(*points, strict=True), color=color, marker=marker, label=name)
        floor = [(r["T"], r["num_bytes"] / r["copies"][0]["gb_per_s"] / 1e6) for r in mine]
        panel.plot(*zip(*floor, strict=True), "k--", linewidth=1, label="roofline")
        step_axis(panel, [row["T"] for row in mine], yscale="log", title=dtype)
    panels[0].set_ylabel("forward + backward, ms")
    panels[0].legend()
    return f"{rows[0]['N']:,} LIF neurons"


def sharded_layers(rows: Rows) -> Rows:
    """Return the replays of CUDA graphs if there are any, otherwise the eager steps."""
    rows = [r for r in rows if r["what"] == "layer" and r["time"] > 1 and "speedup" in r]
    return [r for r in rows if r["way"] == "CUDA graph"] or rows


@plot(sharded_layers)
def time_sharding(figure: Any, rows: Rows) -> str:
    """Draw the speed-up of a layer over T for each number of ranks, measured and predicted."""
    figure.set_size_inches(6.4, 4.2)
    panel = figure.subplots()
    lines = (("speedup", "o-", "measured"), ("by_paper", ":", "Eq. 5"), ("predicted", "--", "plan"))
    for index, count in enumerate(sorted({r["time"] for r in rows})):
        mine = sorted((r for r in rows if r["time"] == count), key=lambda r: r["T"])
        for key, style, name in lines:
            points = [(r["T"], r[key]) for r in mine if r.get(key)]
            if points:
                label = f"{count} ranks, {name}"
                panel.plot(*zip(*points, strict=True), style, color=f"C{index}", label=label)
    step_axis(panel, sorted({r["T"] for r in rows}), ylabel="times as fast as one")
    panel.legend()
    return f"{rows[0]['N']:,} LIF neurons"


@plot(lambda rows: [row for row in rows if "curve" in row])
def learning(figure: Any, rows: Rows) -> str:
    """Draw loss and accuracy over the epochs, for every seed."""
    from matplotlib.ticker import MaxNLocator

    figure.set_size_inches(9, 3.5)
    panels = figure.subplots(1, 2)
    for panel, quantity, scale in zip(panels, ("loss", "accuracy"), (1, 100), strict=True):
        for index, row in enumerate(rows):
            epochs = [epoch["epoch"] for epoch in row["curve"]]
            for part, name, line in (("train", "training", "--"), ("val", "validation", "-")):
                values = [scale * epoch[f"{part}_{quantity}"] for epoch in row["curve"]]
                label = f"{name}, seed {row['seed']}"
                panel.plot(epochs, values, line, color=f"C{index % 10}", marker=".", label=label)
        panel.set(xlabel="epoch", ylabel=quantity if scale == 1 else f"{quantity}, %")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    panels[1].legend(loc="lower right")
    return ""


def several_rates(rows: Rows) -> Rows:
    cases = [row["case"] for row in rows]
    return [row for row in rows if cases.count(row["case"]) > 1]


@plot(several_rates)
def crossover(figure: Any, rows: Rows) -> str:
    """Draw the speed of events over dense, and samples a second of both, over the activity."""
    figure.set_size_inches(11, 4.2)
    ratio, speed = figure.subplots(1, 2)
    for index, case in enumerate(dict.fromkeys(row["case"] for row in rows)):
        for name, style in (("events", "o-"), ("dense, fused over time", "s:")):
            for panel, key in ((ratio, "times_dense"), (speed, "samples_per_s")):
                points = [(100 * r["rate"], r[key][name])
                          for r in rows if r["case"] == case and name in r[key]]  # fmt: skip
                if points and (panel is speed or style == "o-"):
                    label = f"{case}: {name}"
                    panel.plot(*zip(*sorted(points), strict=True), style, color=f"C{index}",
                               label=label)  # fmt: skip
    ratio.axhline(1, color="black", linestyle="--", linewidth=1, label="dense, fused over time")
    for panel, label in ((ratio, "training steps per second over dense"), (speed, "samples/s")):
        panel.set(xscale="log", yscale="log", xlabel="neurons that fire in a step, %")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    return ""


@plot(lambda rows: [row for row in rows if "efficiency" in row])
def weak_scaling(figure: Any, rows: Rows) -> str:
    """Draw efficiency, and samples a second, over the number of ranks."""
    figure.set_size_inches(9, 3.6)
    ranks = [row["ranks"] for row in rows]
    labels = {"efficiency": "time of one rank over theirs", "samples_per_s": "samples/s"}
    panels = figure.subplots(1, 2)
    for panel, (key, label) in zip(panels, labels.items(), strict=True):
        panel.plot(ranks, [row[key] for row in rows], "o-")
        panel.set(xlabel="ranks, each with as many neurons", ylabel=label)
        panel.set_xticks(ranks)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].axhline(1, color="black", linestyle="--", linewidth=1)
    return f"{rows[-1]['neurons']:,} neurons on {rows[-1]['ranks']} ranks"


@plot()
def accuracy(figure: Any, rows: Rows) -> str:
    """Draw test accuracy over the seconds of training, one line per network and seed."""
    figure.set_size_inches(7, 4.5)
    panel, runs = figure.subplots(), dict.fromkeys((row["name"], row["seed"]) for row in rows)
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in runs))}
    for name, seed in runs:
        own = [row for row in rows if (row["name"], row["seed"]) == (name, seed)]
        seconds = list(accumulate(row["seconds"] for row in own))
        label = None if colors[name] in {line.get_color() for line in panel.lines} else name
        panel.plot(seconds, [100 * r["accuracy"] for r in own], color=colors[name], label=label)
    best = max(100 * row["accuracy"] for row in rows)
    panel.set(xlabel="seconds of training", ylabel="test accuracy, %", ylim=(best - 40, best + 2))
    panel.grid(alpha=0.3)
    panel.legend()
    return ""
