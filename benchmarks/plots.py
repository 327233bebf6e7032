"""Pictures of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import layer, lif

STYLE = {
    layer.OURS: ("tab:blue", "o"),
    lif.RIVAL_NODE: ("tab:red", "s"),
    lif.RIVAL_FUNCTION: ("tab:orange", "^"),
    lif.COMPILED: ("tab:green", "D"),
    layer.EAGER: ("tab:gray", "v"),
}


def canvas(size: tuple[float, float]) -> Any:
    """A figure of so many inches; None where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=size, layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def timestep_scaling(result: dict[str, Any], path: Path) -> Path | None:
    """Time against T, one panel per dtype; None where matplotlib is not installed."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in result["rows"]))
    figure = canvas((5.2 * len(dtypes), 4.2))
    if figure is None:
        return None
    panels = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for panel, dtype in zip(panels, dtypes, strict=True):
        rows = sorted((r for r in result["rows"] if r["dtype"] == dtype), key=lambda r: r["T"])
        for name, (color, marker) in STYLE.items():
            points = [
                (row["T"], c["wall_ms"]["median"])
                for row in rows
                for c in row["contenders"]
                if c["name"] == name and c["status"] == "ok"
            ]
            if points:
                panel.plot(*zip(*points, strict=True), color=color, marker=marker, label=name)
        floor = [(r["T"], r["num_bytes"] / r["copies"][0]["gb_per_s"] / 1e6) for r in rows]
        panel.plot(*zip(*floor, strict=True), "k--", linewidth=1, label="roofline")
        steps = [row["T"] for row in rows]
        panel.set(xscale="log", yscale="log", title=dtype, xlabel="time steps T")
        panel.set_xticks(steps, [str(T) for T in steps])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("forward + backward, ms")
    panels[0].legend()
    machine, rows = result["machine"], result["rows"]
    figure.suptitle(f"{rows[0]['N']:,} LIF neurons, {machine.get('gpu') or machine['cpu']}")
    return save(figure, path)


def time_sharding(result: dict[str, Any], path: Path) -> Path | None:
    """Speed-up of a layer against T for each number of GPUs, measured and predicted, of replays of
    CUDA graphs if there are any; None where matplotlib is not installed, or no layer was measured.
    """
    rows = [r for r in result["rows"] if r["what"] == "layer" and r["time"] > 1]
    replays = [r for r in rows if r.get("way") == "CUDA graph" and "speedup" in r]
    forecast = [r for r in rows if r.get("status") == "not measured"]
    rows = replays or [r for r in rows if "speedup" in r]
    rows += [r for r in forecast if r["way"] == rows[-1].get("way")] if rows else []
    if not rows:
        return None
    figure = canvas((6.4, 4.2))
    if figure is None:
        return None
    panel = figure.subplots()
    lines = (("speedup", "o-", "measured"), ("by_paper", ":", "Eq. 5"), ("predicted", "--", "plan"))
    for index, count in enumerate(sorted({r["time"] for r in rows})):
        mine = sorted((r for r in rows if r["time"] == count), key=lambda r: r["T"])
        for key, style, name in lines:
            points = [(r["T"], r[key]) for r in mine if r.get(key)]
            if points:
                label = f"{count} ranks, {name}"
                panel.plot(*zip(*points, strict=True), style, color=f"C{index}", label=label)
    steps = sorted({r["T"] for r in rows})
    panel.set(xscale="log", xlabel="time steps T", ylabel="times as fast as one")
    panel.set_xticks(steps, [str(T) for T in steps])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend()
    machine = result["machine"]
    figure.suptitle(f"{rows[0]['N']:,} LIF neurons, {machine.get('gpu') or machine['cpu']}")
    return save(figure, path)


def learning(result: dict[str, Any], path: Path) -> Path | None:
    """Loss and accuracy over the epochs, of every seed; None where matplotlib is not installed."""
    figure = canvas((9, 3.5))
    if figure is None:
        return None
    from matplotlib.ticker import MaxNLocator

    panels = figure.subplots(1, 2)
    for panel, quantity, scale in zip(panels, ("loss", "accuracy"), (1, 100), strict=True):
        for index, row in enumerate(result["rows"]):
            epochs = [epoch["epoch"] for epoch in row["curve"]]
            for part, name, line in (("train", "training", "--"), ("val", "validation", "-")):
                values = [scale * epoch[f"{part}_{quantity}"] for epoch in row["curve"]]
                label = f"{name}, seed {row['seed']}"
                panel.plot(epochs, values, line, color=f"C{index % 10}", marker=".", label=label)
        panel.set(xlabel="epoch", ylabel=quantity if scale == 1 else f"{quantity}, %")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    panels[1].legend(loc="lower right")
    machine = result["machine"]
    figure.suptitle(f"{result['settings']['recipe']}, {machine.get('gpu') or machine['cpu']}")
    return save(figure, path)


def crossover(result: dict[str, Any], path: Path) -> Path | None:
    """Against activity, of each case that has several rates: speed of the network on events over
    the dense one, and samples a second of both; None where matplotlib is not installed or no case
    has several.
    """
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], []).append(row)
    cases = {name: rows for name, rows in cases.items() if len(rows) > 1}
    figure = canvas((11, 4.2)) if cases else None
    if figure is None:
        return None
    ratio, speed = figure.subplots(1, 2)
    for index, (case, rows) in enumerate(cases.items()):
        for name, style in (("events", "o-"), ("dense, fused over time", "s:")):
            for panel, key in ((ratio, "times_dense"), (speed, "samples_per_s")):
                points = [(100 * r["rate"], r[key][name]) for r in rows if name in r[key]]
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
    machine = result["machine"]
    figure.suptitle(machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores")
    return save(figure, path)


def weak_scaling(result: dict[str, Any], path: Path) -> Path | None:
    """Efficiency, and samples a second, against the number of ranks; None where matplotlib is not
    installed or no efficiency is known."""
    rows = [row for row in result["rows"] if "efficiency" in row]
    figure = canvas((9, 3.6)) if rows else None
    if figure is None:
        return None
    ranks = [row["ranks"] for row in rows]
    panels = figure.subplots(1, 2)
    for panel, key, label in zip(
        panels, ("efficiency", "samples_per_s"), ("time of one rank over theirs", "samples/s"),
        strict=True,
    ):  # fmt: skip
        panel.plot(ranks, [row[key] for row in rows], "o-")
        panel.set(xlabel="ranks, each with as many neurons", ylabel=label)
        panel.set_xticks(ranks)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].axhline(1, color="black", linestyle="--", linewidth=1)
    machine, most = result["machine"], rows[-1]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    figure.suptitle(f"{most['neurons']:,} neurons on {most['ranks']} ranks, {where}")
    return save(figure, path)
