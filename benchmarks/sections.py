"""The tables of each benchmark, made from the rows of its results."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.convert import COMPILED, CONVERTED, ORIGINAL
from benchmarks.jelly import FLEXSN
from benchmarks.layers import OURS
from benchmarks.neurons import RECOMPUTED, RIVAL, SEPARATE
from benchmarks.runner import GRAPH, WAYS
from benchmarks.steps import STEPS

Result = dict[str, Any]
Results = list[tuple[Path, Result]]
Parts = Iterator[str]  # paragraphs and tables
# By head of a column: the key of a row, or what makes the cell of a row.
Columns = dict[str, str | Callable[[Result], str]]

BY_SEED = "by seed; mean ± standard deviation"
MEMORY_STEPS = (32, 128)
HOST_GROUPS = ("host",)
FIRST_CALLS = {"own": "user-defined neuron, first", "LIF": "LIF, second"}
NAMES = {"torch": "PyTorch", "triton": "Triton", "numba": "Numba", "spikingjelly": "SpikingJelly",
         "snntorch": "snnTorch", "norse": "Norse", "spyx": "Spyx"}  # fmt: skip
# Libraries that are named beside torch, the backend and SpikingJelly.
ALSO = {"cpu": ["snntorch"], "latency": ["snntorch"], "spoken_digits": ["snntorch"],
        "first_call": ["numba"], "open_neuromorphic": ["snntorch", "norse", "spyx"]}  # fmt: skip


def origin(result: Result) -> str:
    """Return where and when a result was measured, and with which versions."""
    name = result["benchmark"]
    used = ["torch", "triton" if "gpu" in result["machine"] else "numba"]
    used += [] if name == "first_call" else ["spikingjelly"]
    used += ALSO.get(name, [])
    versions = result["versions"]
    listed = ", ".join(f"{NAMES[n]} {versions[n]}" for n in used if n in versions)
    revision = result["revision"]
    text = "revision unknown" if revision is None else f"revision {revision[:10]}"
    text += " with changes" if result["dirty"] else ""
    return f"**{record.device(result)}** ({listed}; {result['date'][:10]}, {text})"


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
    if value and value < 0.1:
        return f"{value:.1g}×"
    return f"{value:.{digits}f}×" if value else "–"


def percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def by_seed(values: Sequence[float]) -> str:
    """List shares in per cent, with mean and standard deviation if there are several."""
    text = ", ".join(percent(value, 2) for value in values)
    if len(values) < 2:
        return text
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    return f"{text}; {100 * mean:.2f} ± {percent(spread, 2)}"


def picture(path: Path, root: Path, text: str) -> list[str]:
    """Link the plot beside a result, if there is one."""
    plot = path.with_suffix(".png")
    if not plot.exists():
        return []
    return [f"![{text}]({Path(os.path.relpath(plot.resolve(), root.resolve())).as_posix()})"]


# Tables


def value(row: Result, key: str) -> str:
    """Format a value of a row or contender by its key and type; "–" if there is none."""
    found = row.get(key)
    if key.endswith("_ms") and row.get("status") == "wrong":
        return "wrong result"
    if isinstance(found, dict):
        found = found["median"]
    if found is None:
        return "–"
    if key in FORMATS:
        return FORMATS[key](found)
    if isinstance(found, list):
        return "×".join(map(str, found))
    if isinstance(found, float):
        return number(found)
    return f"{found:,}" if isinstance(found, int) else found


def table(rows: Iterable[Result], columns: Columns) -> str:
    """Return a line for each row; the first column is aligned to the left."""
    lines = [[*columns], ["---", *["---:"] * (len(columns) - 1)]]
    for row in rows:
        lines.append([value(row, c) if isinstance(c, str) else c(row) for c in columns.values()])
    # Heads differ by trailing spaces where they would be equal.
    return "\n".join("| " + " | ".join(map(str.rstrip, line)) + " |" for line in lines)


def keys(*names: str) -> Columns:
    return {name: name for name in names}


def grouped(rows: Sequence[Result], key: str) -> dict[Any, list[Result]]:
    return {value: [row for row in rows if row[key] == value]
            for value in dict.fromkeys(row[key] for row in rows)}  # fmt: skip


def by_name(row: Result) -> dict[str, Result]:
    return {c["name"]: c for c in row["contenders"]}


def contenders(rows: Sequence[Result], key: str, names: Iterable[str] = ()) -> Columns:
    """Return a column with a value of each of `names`, or of each contender that was measured."""
    found = [c["name"] for c in flat(rows) if c["status"] in ("ok", "wrong")]
    return {
        name: lambda row, name=name: value(by_name(row).get(name, {}), key)
        for name in names or dict.fromkeys(found)
    }


def flat(rows: Sequence[Result]) -> list[Result]:
    """Return a row for each contender, with the first one's time over its own as "ratio"."""
    found = []
    for row in rows:
        first, *_ = row["contenders"]
        for c in row["contenders"]:
            ratio = median(first) / median(c) if "wall_ms" in c and "wall_ms" in first else None
            share = c.get("fraction", {})
            found.append(row | c | {"ratio": ratio, "share": share.get("device_ms")})
    return found


def median(contender: Result, kind: str = "wall_ms") -> float:
    return contender[kind]["median"]


def with_peak(rows: Sequence[Result]) -> list[Result]:
    return [row for row in rows if any("peak_bytes" in c for c in row["contenders"])]


# Layers


def time_steps(result: Result) -> Parts:
    """Yield a table of times over T per dtype, and one of memory."""

    def roofline(row: Result) -> str:
        return number(row["num_bytes"] / row["copies"][0]["gb_per_s"] / 1e6)

    for dtype, rows in grouped(result["rows"], "dtype").items():
        yield f"{dtype}, milliseconds (wall-clock, including the host):"
        yield table(rows, keys("T") | contenders(rows, "wall_ms") | {"roofline": roofline})
        wrong = {
            c["name"]: f"{c['name']}, T = {c['T']}: {c['reason']}."
            for c in sorted(flat(rows), key=lambda c: c["T"])
            if c["status"] == "wrong"
        }
        if wrong:
            yield "Not timed, because of wrong results. " + " ".join(wrong.values())
    rows = with_peak([row | {"T": f"{row['T']}, {row['dtype']}"}
                      for row in result["rows"] if row["T"] in MEMORY_STEPS])  # fmt: skip
    if rows:
        yield "Peak memory in MB beyond the inputs `x` and `grad_y`:"
        columns = keys("T") | contenders(rows, "peak_bytes")
        yield table(rows, columns | {"the inputs": "input_bytes"})


def cpu_steps(result: Result) -> Parts:
    """Yield a table of steps: each contender's time, and the first contender's over it."""
    yield f"Number of threads: {result['machine']['threads']}. Times are in ms."
    columns = {"": "row", " ": "name", "ms": "wall_ms", "first of the row / this": "ratio"}
    yield table(flat(result["rows"]), columns)


def gpu_tests(result: Result) -> Parts:
    """Yield how the tests that use a GPU ended."""
    for row in result["rows"]:
        failed, skipped = len(row["failed"]), sum(row["skipped"].values())
        yield (
            f"GPUs: {result['machine']['gpus']}. Passed: {row['passed']:,}, failed: {failed}, "
            f"skipped: {skipped}, in {row['seconds']:.0f} s."
        )
        if row["failed"]:
            yield "Failed: " + ", ".join(f"`{name}`" for name in row["failed"]) + "."
        if skipped:
            reasons = (f"{reason} ({number})" for reason, number in row["skipped"].items())
            yield "Skipped: " + "; ".join(reasons) + "."


def recurrent(result: Result) -> Parts:
    """Yield the times of each layer, and its peak memory in MB if it was measured."""
    rows = result["rows"]
    for key, what in (("wall_ms", "wall-clock milliseconds"), ("peak_bytes", "peak memory in MB")):
        if key == "wall_ms" or with_peak(rows):
            yield f"Forward and backward, {what}, {' / '.join(WAYS)}:"
            yield table(rows, {"": "row"} | _by_way(rows, key))


def _by_way(rows: Sequence[Result], key: str) -> Columns:
    """Return a column for each contender, whose CUDA graph is another one."""

    def cell(name: str, row: Result) -> str:
        found = by_name(row)
        shown = [value(found[n], key) for n in (name, f"{name}, {GRAPH}") if n in found]
        return " / ".join(shown) or "–"

    names = dict.fromkeys(c["name"].removesuffix(f", {GRAPH}") for c in flat(rows))
    return {name: partial(cell, name) for name in names}


def online(result: Result) -> Parts:
    """Yield what one part of the benchmark of learning rules has measured."""
    rows, what = result["rows"], result["settings"]["what"]
    if what == "time":
        yield "Forward and backward of a whole sequence, wall-clock milliseconds:"
        columns = {"": "row", " ": "name", "ms": "wall_ms", "first of the row / this": "ratio"}
        peak = {"peak memory, MB": "peak_bytes"} if with_peak(rows) else {}
        yield table(flat(rows), columns | peak)
        return
    if what in ("cues", "digits"):
        yield from online_tasks(rows)
        return
    sizes = f", N = {result['settings']['hidden']} and B = {result['settings']['batch']},"
    heads = {
        "memory": (
            f"Peak memory in KiB{sizes}",
            "T",
            lambda row: f"{row['peak_bytes'] / 2**10:,.0f}",
        ),
        "cosine": ("Median cosine", "layers", lambda row: f"{row['cosine']['median']:.3f}"),
    }
    text, key, show = heads[what]
    yield f"{text} by {key}:"
    found = [
        {"rule": rule} | {f"{key} {r[key]}": show(r) for r in group}
        for rule, group in grouped(rows, "rule").items()
    ]
    yield table(found, keys("rule", *dict.fromkeys(f"{key} {row[key]}" for row in rows)))


def online_tasks(rows: Sequence[Result]) -> Parts:
    """Yield accuracies of rules, and how far each is below that of "bptt" with the same seed."""
    bptt = {row["seed"]: row["accuracy"] for row in rows if row["rule"] == "bptt"}
    found = []
    for rule, group in grouped(rows, "rule").items():
        others = [row for row in group if rule != "bptt" and row["seed"] in bptt]
        gaps = by_seed([bptt[row["seed"]] - row["accuracy"] for row in others])
        accuracies = by_seed([row["accuracy"] for row in group])
        found.append({"rule": rule, "accuracy": accuracies, "below bptt": gaps or None})
    yield "Accuracies " + BY_SEED + ":"
    yield table(found, keys("rule", "accuracy", "below bptt"))


def neurons(result: Result) -> Parts:
    """Yield device times against the roofline, and wall-clock times of rows bound by the host."""

    def name(c: Result) -> str:
        kind = c["neuron"] if c["training"] else f"{c['neuron']}, forward without gradients"
        return f"{kind}{c['name'].removeprefix(OURS)}, T = {c['T']}"

    def rival(name: str, row: Result) -> str:
        found = [c for c in row["contenders"] if c["name"].startswith(name) and "device_ms" in c]
        return value(min(found, key=lambda c: median(c, "device_ms"), default={}), "device_ms")

    size = {"N": "N", "dtype": "dtype"}
    host = [row for row in result["rows"] if row["group"] in HOST_GROUPS]
    ours = [c for c in flat(result["rows"])
            if c["group"] not in HOST_GROUPS and c["name"].startswith(OURS)]  # fmt: skip
    columns: Columns = {"forward and backward": name, **size, "ms": "device_ms"}
    columns |= {"roofline": "share", "SpikingJelly": partial(rival, "SpikingJelly")}
    yield table(ours, columns | {"FlexSN": partial(rival, FLEXSN)})
    compiled = [row for row in result["rows"] if FLEXSN in by_name(row)]
    if compiled:
        yield "Peak memory in MB beyond the inputs, beside FlexSN:"
        peaks = contenders(compiled, "peak_bytes", (OURS, FLEXSN))
        yield table(compiled, keys("neuron", "T", "dtype") | peaks)
    if host:
        yield "Wall-clock milliseconds, including the host:"
        yield table(host, {"T": "T"} | size | contenders(host, "wall_ms"))


def block(result: Result) -> Parts:
    rows = result["rows"]
    ours = [flat([row])[0] | {"shape": f"{value(row, 'shape')}, {row['dtype']}, {row['layout']}"}
            for row in rows]  # fmt: skip
    about = {"T×B×C×H×W": "shape"}
    others = contenders(rows, "device_ms", (RECOMPUTED, SEPARATE, RIVAL))
    yield table(ours, about | {"one block, ms": "device_ms", "roofline": "share"} | others)


def first_call(result: Result) -> Parts:
    rows = [row | {"what": row.get("reason") or FIRST_CALLS[row["neuron"]]}
            for row in result["rows"]]  # fmt: skip
    yield table(rows, {"backend": "backend", "": "what", "cold, s": "cold", "warm, s": "warm"})


# Networks


def networks(result: Result) -> Parts:
    """Yield a line for each network of a row: its times by way, and its memory in training."""
    for kind, rows in grouped(result["rows"], "steps").items():
        ways = list(dict.fromkeys(c["way"] for c in flat(rows)))
        what = f"A whole {kind} step" if kind in STEPS else kind.capitalize()
        yield f"{what}, wall-clock milliseconds:"
        lines = [
            {"workload": f"{row['workload']}, {row['dtype']}", "network": name}
            | {c["way"]: value(c, "wall_ms") for c in found}
            | {"peaks": " / ".join(mebibytes(c.get("peak_bytes") or None) for c in found[:2])}
            for row in rows
            for name, found in grouped(row["contenders"], "network").items()
            if any(c["status"] in ("ok", "wrong") for c in found)
        ]
        columns = keys("workload", "network", *ways)
        yield table(lines, columns | {f"MiB, {' / '.join(WAYS)}": "peaks"})
    notes = {c["network"]: c["note"] for c in flat(result["rows"]) if "note" in c}
    for name, note in notes.items():
        yield f"{name}: {note}."


def recorded_steps(result: Result) -> Parts:
    """Yield the training steps of the first network: a line for each way to run them."""
    rows = next(iter(grouped(result["rows"], "workload").values()))
    ways = (f"{OURS}, eager", f"{OURS}, fused, eager", f"{OURS}, fused, sf.graph_step")
    names = [n for n in ways if all(n in by_name(r) for r in rows)]
    yield (
        f"A training step of {rows[0]['model']}, T = {rows[0]['T']}, batches of "
        f"{rows[0]['batch']}, wall-clock milliseconds:"
    )
    lines = [{"": n, **{r["dtype"]: value(by_name(r)[n], "wall_ms") for r in rows}} for n in names]
    yield table(lines, keys(*lines[0]))


def converted(result: Result) -> Parts:
    """Yield a line for each step of a network before and after conversion, and what was checked."""
    rows, lines, notes, used = result["rows"], [], {}, {}
    for row in rows:
        found = [[c for c in row["contenders"] if c["side"] in sides and "wall_ms" in c]
                 for sides in ((ORIGINAL, COMPILED), (CONVERTED,))]  # fmt: skip
        before, after = (min(side, key=median, default={}) for side in found)
        ratio = median(before) / median(after) if before and after else None
        peaks = " / ".join(mebibytes(c.get("peak_bytes")) for c in (before, after))
        way = before["name"].removeprefix(f"{ORIGINAL}, ") if before else "–"
        images = 1e3 * row["batch"] / median(after) if after else None
        lines.append(row | {"before": value(before, "wall_ms"), "way": way, "peaks": peaks}
                     | {"after": value(after, "wall_ms"), "ratio": ratio, "images": images}
                     | {"step": f"{row['network']}, {row['dtype']}, {row['steps']}"})  # fmt: skip
        check, name = row["float64"], row["network"]
        notes[name] = (
            f"- {name}: T = {row['T']}, batches of {row['batch']}, {row['layout']}. In float64, "
            f"all {check['outputs']:,} outputs of neurons for two samples are equal; rates are "
            f"{number(min(check['rates']))} to {number(max(check['rates']))}"
        ) + (f". {row['fusion'].capitalize()}." if "fusion" in row else ".")
        if row["note"]:
            used.setdefault(row["note"], {})[name] = None
    yield table(lines, {"step": "step", "original, ms": "before", "by": "way"}
                | {"converted, ms": "after", "ratio": "ratio", "images a second": "images"}
                | {"MiB, original / converted": "peaks"})  # fmt: skip
    yield "\n".join(notes.values())
    if used:
        yield "\n".join(f"- {note}: {'; '.join(where)}." for note, where in used.items())


def open_neuromorphic(result: Result) -> Parts:
    """Yield the times and the memory of each library."""
    for key, what in (("wall_ms", "Forward and backward, milliseconds"), ("peak_bytes", "MB")):
        rows = [{"name": c["name"], "dtype": c["dtype"], "N": c["N"], "value": value(c, key)}
                for c in flat(result["rows"]) if c["status"] == "ok"]  # fmt: skip
        lines = [{"name": name} | {f"{r['N']:,}, {r['dtype']}": r["value"] for r in found}
                 for name, found in grouped(rows, "name").items()]  # fmt: skip
        yield f"{what}, by the number of neurons and the dtype:"
        heads = dict.fromkeys(head for line in lines for head in line if head != "name")
        yield table(lines, {"library": "name"} | keys(*heads))


# How values are written, by their key; others by their type.
FORMATS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("ratio", "speedup", "predicted", "by_paper", "throughput"), times),
    **dict.fromkeys(("efficiency", "memory_of_one", "share"), percent),
    **dict.fromkeys(("peak_bytes", "input_bytes"), lambda value: f"{value / 1e6:,.0f}"),
}
