"""Draw the figures of the explanation pages: python docs/site/figures.py

Pages show an SVG as an image, which cannot know their colours. Each figure therefore brings a white
background, so that its text has full contrast in light and in dark mode.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn as nn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import spikefuse as sf

FOLDER = Path(__file__).resolve().parents[1] / "explanation" / "figures"
WIDTH = 5.2  # inches: on a phone 11 points are still 10 pixels high
BLUE, ORANGE = "#0072b2", "#d55e00"
# Backgrounds of black text.
LIGHT = ["#a9d5f0", "#fbcb9c", "#b5e3c8", "#e8c4dd", "#f3e79b", "#cfcfcf"]
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "spikefuse",  # the same identifiers in every run
}

DECAY, THRESHOLD = 0.9, 1.0
# Input current: its value from a time step on.
CURRENT = {0: 0.0, 10: 0.08, 40: 0.15, 70: 0.3, 90: 0.0}
STEPS = 100
# One row of neurons per time step.
RASTER = ["..#....#..", ".....#....", "..........", "#..#....#.", "...#......", ".#....##.#"]


def measured() -> dict[str, Any]:
    """What the library computes for the figures, as numbers and strings."""
    return {"lif": lif(), "memory": saved_megabytes(), "events": lists()}


def lif() -> dict[str, list[float]]:
    x = torch.zeros(STEPS, 1)
    for start, value in CURRENT.items():
        x[start:] = value
    neuron = sf.LIF(decay=DECAY, threshold=THRESHOLD)
    with torch.no_grad(), sf.record(neuron, states=("spikes", "v")) as record:
        neuron(x)
    return {"x": x[:, 0].tolist()} | {k: v[:, 0].tolist() for k, v in record[""].items()}


def saved_megabytes() -> dict[str, dict[str, float]]:
    """MB that a network saves for backward by policy, and by the kind of layer that reads them."""
    x = torch.rand(32, 10, 2, 16, 16)  # as many values as fusing takes on a CPU
    saved: dict[str, Counter[str]] = {}
    for policy in (sf.memory.SaveAll(), sf.memory.Bits(), sf.memory.Recompute()):
        model = nn.Sequential(
            *[nn.Conv2d(2, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), sf.LIF()],
            *[nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), sf.LIF()],
            *[nn.AvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)],
        )
        explanation = sf.explain(sf.fuse(sf.Temporal(model, memory=policy)), x)
        now, eager = Counter[str](), Counter[str]()
        for row in explanation.saved:
            of_spikes = row.name in ("net.3", "net.6")
            is_block = "LIF" in row.module or "BatchNorm" in row.module
            kind = "neurons" if is_block else "spikes" if of_spikes else "others"
            now[kind] += row.now
            eager[kind] += row.eager or 0
        saved |= {"eager loop": eager, f"{policy!r}": now}
    # What the figure shows: versions of PyTorch differ by some bytes.
    return {name: {k: round(v / 1e6, 1) for k, v in kinds.items()} for name, kinds in saved.items()}


def lists() -> dict[str, list[int]]:
    spikes = torch.tensor([[float(c == "#") for c in row] for row in RASTER])
    events = sf.nn.Events.from_dense(spikes[:, None])
    return {"offsets": events.offsets.tolist(), "indices": events.indices.tolist()}


def draw_lif(data: dict[str, Any]) -> Figure:
    x, v, spikes = (data["lif"][key] for key in ("x", "v", "spikes"))
    times = range(STEPS)
    figure = Figure((WIDTH, 4.2))
    axes = figure.subplots(3, sharex=True, height_ratios=[2, 4, 1])
    axes[0].step(times, x, color=BLUE, where="post")
    axes[0].set(ylabel="input", yticks=[0, 0.3])
    before_reset = [DECAY * old + now for old, now in zip([0.0, *v], x, strict=False)]
    both = [value for pair in zip(before_reset, v, strict=True) for value in pair]
    axes[1].plot([t for t in times for _ in range(2)], both, color=BLUE)
    axes[1].axhline(THRESHOLD, color=ORANGE, linestyle="--", linewidth=1)
    axes[1].text(1, THRESHOLD, "threshold", color=ORANGE, va="bottom")
    axes[1].set(ylabel="potential", yticks=[0, THRESHOLD], ylim=(-0.05, 1.3))
    axes[2].vlines([t for t in times if spikes[t]], 0, 1, color="black")
    axes[2].set(ylabel="spikes", yticks=[], xlabel="time step", xlim=(0, STEPS))
    figure.align_ylabels()
    return figure


def draw_traffic(_: dict[str, Any]) -> Figure:
    figure = Figure((WIDTH, 4.2))
    eager, fused = figure.subplots(2)
    # The operations of decay * v + x, the comparison, and v (1 - s): their operands in memory.
    operations = [("×", 1), ("+", 2), ("≥", 1), ("−", 1), ("×", 2)]
    steps = 3
    length = len(operations) + 0.5  # of a step
    end = length * steps - 0.5
    for axes, title in (
        (eager, "eager loop: 5 kernels per step move 12 tensors"),
        (fused, "scan: one kernel moves 2 tensors per step"),
    ):
        blank(axes, (-0.1, end + 0.1), (-0.9, 3.3))
        axes.set_title(title, fontsize=11, loc="left")
        box(axes, 0, 2.5, end, 0.7, "memory", LIGHT[5])
        for t in range(steps):
            axes.text(t * length + 2.5, -0.2, f"step {t + 1}", ha="center", va="top")
    box(fused, 0, 0, end, 0.8, "", LIGHT[0])
    for t in range(steps):
        first = t * length
        for i, (name, operands) in enumerate(operations):
            x = first + i
            box(eager, x + 0.08, 0, 0.84, 0.8, name, LIGHT[0])
            for place in [0.36] if operands == 1 else [0.24, 0.48]:
                arrow(eager, (x + place, 2.5), (x + place, 0.8), BLUE)
            arrow(eager, (x + 0.74, 0.8), (x + 0.74, 2.5), ORANGE)
        fused.text(first + 2.5, 0.4, "LIF step", ha="center", va="center")
        arrow(fused, (first + 1.5, 2.5), (first + 1.5, 0.8), BLUE)
        fused.text(first + 1.3, 1.65, "x", ha="right", va="center", color=BLUE)
        arrow(fused, (first + 3.5, 0.8), (first + 3.5, 2.5), ORANGE)
        fused.text(first + 3.7, 1.65, "s", va="center", color=ORANGE)
        if t:
            arrow(fused, (first - 1.2, 0.4), (first + 0.7, 0.4), "black")
            fused.text(first - 0.25, 0.85, "v", ha="center", va="bottom")
    return figure


def draw_memory(data: dict[str, Any]) -> Figure:
    figure = Figure((WIDTH, 3.0))
    axes = figure.subplots()
    names = list(data["memory"])
    kinds = {"neurons": "norms and neurons", "spikes": "spikes", "others": "other inputs of layers"}
    left = [0.0] * len(names)
    for colour, (kind, label) in zip(LIGHT, kinds.items(), strict=False):
        widths = [data["memory"][name][kind] for name in names]
        axes.barh(names, widths, left=left, color=colour, edgecolor="black", label=label)
        left = [x + width for x, width in zip(left, widths, strict=True)]
    for i, total in enumerate(left):
        axes.text(total + 0.15, i, f"{total:.1f} MB", va="center")
    axes.set(xlabel="MB saved for backward", xlim=(0, 1.25 * max(left)))
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=3, fontsize=10, frameon=False, columnspacing=1)
    return figure


def draw_ranks(_: dict[str, Any]) -> Figure:
    figure = Figure((WIDTH, 5.4))
    ranks, layers, length = 4, 2, 1.0
    for axes, chunks in zip(figure.subplots(2), (1, 4), strict=True):
        blank(axes, (-0.75, layers + ranks - 1 + 0.05), (ranks - 0.1, -0.1))
        title = "each rank waits for a whole layer" if chunks == 1 else f"{chunks} microbatches"
        axes.set_title(f"chunks={chunks}: {title}", fontsize=11, loc="left")
        ends: dict[tuple[int, int, int], float] = {}
        for rank in range(ranks):
            axes.text(-0.1, rank + 0.3, f"rank {rank}", ha="right", va="center")
            now = 0.0
            for layer in range(layers):
                for chunk in range(chunks):
                    key = (layer, chunk)
                    arrival = ends.get((rank - 1, *key), 0.0)
                    start = max(now, arrival)
                    now = ends[rank, *key] = start + length / chunks
                    text = f"layer {layer + 1}" if chunks == 1 else str(chunk + 1)
                    box(axes, start, rank, length / chunks, 0.6, text, LIGHT[layer])
                    if rank:
                        arrow(axes, (arrival, rank - 0.4), (arrival, rank), "black")
    axes.annotate("", (5, 3.85), (0, 3.85), arrowprops={"arrowstyle": "->"})
    axes.text(-0.1, 3.85, "time", ha="right", va="center")
    return figure


def draw_events(data: dict[str, Any]) -> Figure:
    offsets, indices = data["events"]["offsets"], data["events"]["indices"]
    width, rows = len(RASTER[0]), len(RASTER)
    figure = Figure((WIDTH, 4.3))
    axes = figure.subplots()
    blank(axes, (-3.4, len(indices) + 0.1), (rows + 3.9, -1.9))
    axes.set_aspect("equal")
    axes.text(width / 2, -1.4, "neuron", ha="center", va="center")
    for i in range(width):
        axes.text(i + 0.5, -0.5, str(i), ha="center", va="center")
    for r, line in enumerate(RASTER):
        axes.text(-0.3, r + 0.5, f"step {r}", ha="right", va="center")
        for i, cell in enumerate(line):
            box(axes, i, r, 1, 1, "", LIGHT[r] if cell == "#" else "white")
    of_rows = [*LIGHT[:rows], "white"]
    of_spikes = [LIGHT[r] for r, (a, b) in enumerate(pairwise(offsets)) for _ in range(a, b)]
    for y, name, values, colours in (
        (rows + 1, "offsets", offsets, of_rows),
        (rows + 2.7, "indices", indices, of_spikes),
    ):
        axes.text(-0.3, y + 0.5, name, ha="right", va="center")
        for i, (value, colour) in enumerate(zip(values, colours, strict=True)):
            box(axes, i, y, 1, 1, str(value), colour)
    return figure


def blank(axes: Axes, xlim: tuple[float, float], ylim: tuple[float, float]) -> None:
    axes.set(xlim=xlim, ylim=ylim)
    axes.axis("off")


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str
) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="black"))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    style = {"arrowstyle": "->", "color": colour, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)


FIGURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "lif": draw_lif,
    "traffic": draw_traffic,
    "memory": draw_memory,
    "ranks": draw_ranks,
    "events": draw_events,
}


def digest(data: dict[str, Any]) -> str:
    """Identify what figures are drawn of and by; versions of matplotlib write other bytes."""
    text = Path(__file__).read_text() + json.dumps(data)
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    data = measured()
    metadata = {"Creator": None, "Date": None, "Description": digest(data)}
    with matplotlib.rc_context(STYLE):
        for name, draw in FIGURES.items():
            draw(data).savefig(FOLDER / f"{name}.svg", metadata=metadata)
