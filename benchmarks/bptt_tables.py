"""The tables of benchmarks.bptt_figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks import lif
from benchmarks.bptt_plots import PARTS, parts, selected, value
from benchmarks.steps import CONVOLUTIONS, EAGER, FUSED, OURS
from benchmarks.text import bars_line, markdown, number, origin


def tables(result: dict[str, Any], path: Path, root: Path) -> str:
    """A table for each figure that was measured, and the picture."""
    rows = result["rows"]
    said = [origin(result)]
    made = (
        ("Training steps (Figs. 3 and 7), the eager loop / ours:", training(rows)),
        ("What goes into one of the medium network (Fig. 8):", breakdown(rows)),
        ("Forward only (Fig. 9), milliseconds:", forward(rows)),
    )
    for title, table in made:
        if table:
            said += [title, table]
    left_out = [f"{one['row']} ({one['reason']})" for one in result["left_out"]]
    if left_out:
        said.append(f"Not measured: {'; '.join(left_out)}.")
    picture = path.with_suffix(".png")
    if picture.exists():
        link = Path(os.path.relpath(picture.resolve(), root.resolve())).as_posix()
        said.append(f"![the figures]({link})")
    return "\n\n".join([*said, *bars_line(result)])


def training(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in sorted(selected(rows, steps="training"), key=lambda row: not row["norms"]):
        cells = [row["size"], "yes" if row["norms"] else "no", str(row["T"]), str(row["batch"])]
        for kind in ("ms", "MiB"):
            eager, ours = (value(row, n, kind) for n in (EAGER, FUSED if row["norms"] else OURS))
            alone = value(row, CONVOLUTIONS, kind)
            cells += [shown(eager), shown(ours), shown(alone)]
            cells.append(f"{eager / ours:.2f}" if eager and ours else "–")
        lines.append(cells)
    if not lines:
        return ""
    head = ["network", "batch norm", "T", "batch"]
    for unit in ("ms", "MiB"):
        head += [f"eager loop, {unit}", f"ours, {unit}", f"{CONVOLUTIONS}, {unit}", "eager / ours"]
    return markdown(head, lines)


def breakdown(rows: list[dict[str, Any]]) -> str:
    names = list(PARTS)
    lines = [
        [c["network"], *(number(x) for group in parts(c) for x in group)]
        for row in rows
        for c in row["contenders"]
        if c.get("breakdown")
    ]
    head = ["", *(f"{n}, ms" for n in names[3:]), *(f"{n}, MiB" for n in names[:3])]
    return markdown(head, lines) if lines else ""


def forward(rows: list[dict[str, Any]]) -> str:
    names = (EAGER, lif.COMPILED, FUSED)
    lines = [
        [row["size"], *(shown(value(row, name, "ms")) for name in names)]
        for row in selected(rows, steps="forward")
    ]
    return markdown(["network", *names], lines) if lines else ""


def shown(measured: float | None) -> str:
    return "–" if measured is None else number(measured)
