"""Pictures of benchmarks.bptt_figures, a row of panels for each figure of the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import lif, plots
from benchmarks.steps import CONVOLUTIONS, EAGER, EAGERLY, FUSED, OURS

Found = dict[str, Any]
MIB = 2**20
COLORS = {
    EAGER: "tab:gray",
    FUSED: "tab:blue",
    OURS: "tab:cyan",
    lif.COMPILED: "tab:green",
    CONVOLUTIONS: "tab:olive",
}
PARTS = {
    "weights, optimizer": "tab:gray",
    "kept for backward": "tab:blue",
    "the rest at the peak": "tab:orange",
    "convolutions, linear layers": "tab:gray",
    "other kernels": "tab:blue",
    "no kernel runs": "tab:orange",
}


def figures(result: Found, ddp: Sequence[Found], path: Path) -> Path | None:
    """All figures in one picture; None where matplotlib is not installed."""
    rows: list[Callable[[Any, Any], None]] = [
        lambda time, memory: characterization(time, memory, result["rows"]),
        lambda time, memory: comparison(time, memory, result["rows"], norms=False),
        lambda time, memory: comparison(time, memory, result["rows"], norms=True),
        lambda time, memory: batches(time, memory, result["rows"]),
        lambda time, memory: breakdowns(time, memory, result["rows"]),
        lambda time, faster: forward(time, faster, result["rows"]),
        lambda time, memory: imagenet(time, memory, ddp),
    ]
    figure = plots.canvas((11, 3.4 * len(rows)))
    if figure is None:
        return None
    for draw, (time, memory) in zip(rows, figure.subplots(len(rows), 2), strict=True):
        draw(time, memory)
    machine = result["machine"]
    figure.suptitle(f"CIFAR-10's shape, float32, {machine.get('gpu') or machine['cpu']}")
    return plots.save(figure, path)


def selected(rows: Sequence[Found], **wanted: Any) -> list[Found]:
    """Rows with these entries, by T and batch."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return sorted(found, key=lambda row: (row["T"], row["batch"]))


def value(row: Found, name: str, kind: str) -> float | None:
    """Milliseconds ("ms") or MiB ("MiB") of a network; None where it has none."""
    for c in row["contenders"]:
        if c["status"] == "ok" and (c["network"], c["way"]) == (name, EAGERLY):
            peak = c.get("peak_bytes")
            if kind == "ms":
                return float(c["wall_ms"]["median"])
            return None if peak is None else peak / MIB
    return None


def line(panel: Any, rows: Sequence[Found], over: str, name: str, kind: str, **style: Any) -> None:
    points = [(row[over], value(row, name, kind)) for row in rows]
    points = [(x, y) for x, y in points if y is not None]
    if points:
        style = {"color": COLORS[name], "label": name, "marker": "o"} | style
        panel.plot(*zip(*points, strict=True), **style)


def label(panel: Any, title: str, unit: str, **more: Any) -> None:
    panel.set(title=title, ylabel=unit, **more)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize="small")


def characterization(time: Any, memory: Any, rows: Sequence[Found]) -> None:
    """Fig. 3."""
    medium = {"size": "medium", "steps": "training", "batch": 64}
    normed, plain = selected(rows, norms=True, **medium), selected(rows, norms=False, **medium)
    for panel, kind in ((time, "ms"), (memory, "MiB")):
        line(panel, normed, "T", EAGER, kind, label="LIF + batch norm")
        line(panel, plain, "T", EAGER, kind, label="LIF", linestyle="--")
        line(panel, normed, "T", CONVOLUTIONS, kind)
        label(panel, "Fig. 3: the eager loop, medium network", kind, xlabel="time steps T")


def comparison(time: Any, memory: Any, rows: Sequence[Found], norms: bool) -> None:
    """Fig. 7."""
    title = "Fig. 7(b): with batch norm" if norms else "Fig. 7(a): without batch norm"
    ours, markers = (FUSED if norms else OURS), {"small": "^", "medium": "o", "large": "s"}
    for panel, kind in ((time, "ms"), (memory, "MiB")):
        for size, marker in markers.items():
            found = selected(rows, size=size, steps="training", batch=64, norms=norms)
            for name in (EAGER, ours):
                line(panel, found, "T", name, kind, marker=marker, label=f"{name}, {size}")
        label(panel, title, kind, xlabel="time steps T")


def batches(time: Any, memory: Any, rows: Sequence[Found]) -> None:
    found = selected(rows, size="medium", steps="training", T=10, norms=True)
    for panel, kind in ((time, "ms"), (memory, "MiB")):
        for name in (EAGER, FUSED):
            line(panel, found, "batch", name, kind)
        label(panel, "Over the batch, medium network, T = 10", kind, xlabel="batch")


def parts(contender: Found) -> tuple[list[float], list[float]]:
    """Milliseconds and MiB of a breakdown, in the order of PARTS."""
    found = contender["breakdown"]
    milliseconds = [found["product_ms"], found["other_ms"]]
    idle = max(0.0, contender["wall_ms"]["median"] - sum(milliseconds))
    kept, peak = found["kept_bytes"], contender["peak_bytes"]
    sizes = [found["weight_bytes"], kept, max(0, peak - kept)]
    return [*milliseconds, idle], [size / MIB for size in sizes]


def breakdowns(time: Any, memory: Any, rows: Sequence[Found]) -> None:
    """Fig. 8."""
    found = [c for row in rows for c in row["contenders"] if c.get("breakdown")]
    names = list(PARTS)
    for panel, shown, index, unit in ((time, names[3:], 0, "ms"), (memory, names[:3], 1, "MiB")):
        below = [0.0] * len(found)
        for i, name in enumerate(shown):
            heights = [parts(c)[index][i] for c in found]
            panel.bar([c["network"] for c in found], heights, bottom=below,
                      color=PARTS[name], label=name)  # fmt: skip
            below = [a + b for a, b in zip(below, heights, strict=True)]
        label(panel, "Fig. 8: medium network, T = 10", unit)


def forward(time: Any, faster: Any, rows: Sequence[Found]) -> None:
    """Fig. 9."""
    found = selected(rows, steps="forward")
    sizes = [row["size"] for row in found]
    taken = {n: [value(row, n, "ms") for row in found] for n in (EAGER, lif.COMPILED, FUSED)}
    groups(time, sizes, taken)
    label(time, "Fig. 9: forward, T = 10", "ms")
    ratios = {
        name: [a / b if a and b else None for a, b in zip(taken[EAGER], values, strict=True)]
        for name, values in taken.items()
        if name != EAGER
    }
    groups(faster, sizes, ratios)
    label(faster, "Fig. 9: forward, T = 10", "eager loop / this")


def imagenet(time: Any, memory: Any, ddp: Sequence[Found]) -> None:
    """Fig. 10."""
    places = [
        (result["settings"]["workload"].split("-")[0], gpus, key, result)
        for result in ddp
        for gpus, key in ((1, "alone"), (2, "together"))
    ]
    names = [f"{model}, {gpus}" for model, gpus, _, _ in places]
    title = "Fig. 10: ImageNet's shape, by the number of GPUs"
    for panel, unit in ((time, "ms"), (memory, "MiB")):
        heights = {
            name: [of_one(result, name, key, unit) for _, _, key, result in places]
            for name in (EAGER, FUSED)
        }
        groups(panel, names, heights)
        label(panel, title, unit)


def of_one(ddp: Found, name: str, key: str, unit: str) -> float | None:
    """Milliseconds or MiB of one GPU "alone" or "together" with others."""
    for row in ddp["rows"]:
        if (row["network"], row["way"], row["status"]) == (name, EAGERLY, "ok"):
            peak = row.get(f"{key}_bytes")
            if unit == "ms":
                return float(row[f"{key}_ms"]["median"])
            return None if peak is None else peak / MIB
    return None


def groups(panel: Any, places: list[str], heights: dict[str, list[float | None]]) -> None:
    """Bars side by side, where there is something to show."""
    width = 0.8 / len(heights)
    for i, (name, values) in enumerate(heights.items()):
        at = [place + (i - (len(heights) - 1) / 2) * width for place in range(len(places))]
        panel.bar(at, [v or 0.0 for v in values], width, color=COLORS[name], label=name)
    panel.set_xticks(range(len(places)), places)
