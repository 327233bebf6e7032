"""The tables of each benchmark, made from the rows of its results."""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.convert import TITLES as BEFORE_AFTER
from benchmarks.events import DENSE, EVENTS, LISTS, PRODUCTS, REPLAY
from benchmarks.layers import OURS
from benchmarks.neurons import RECOMPUTED, RIVAL, SEPARATE
from benchmarks.reproduce import PAPERS
from benchmarks.runner import WAYS

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
         "snntorch": "snnTorch"}  # fmt: skip
# Libraries that are named beside torch, the backend and SpikingJelly.
ALSO = {"cpu": "snntorch", "spoken_digits": "snntorch", "first_call": "numba"}


def origin(result: Result) -> str:
    """Return where and when a result was measured, and with which versions."""
    name = result["benchmark"]
    used = ["torch", "triton" if "gpu" in result["machine"] else "numba"]
    used += [] if name == "first_call" else ["spikingjelly"]
    used += [ALSO[name]] if name in ALSO else []
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
    rows = with_peak([row for row in result["rows"] if row["T"] in MEMORY_STEPS])
    if rows:
        yield "Peak memory in MB beyond the inputs `x` and `grad_y`:"
        columns = keys("T", "dtype") | contenders(rows, "peak_bytes")
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
    """Yield the times of each contender, and its peak memory in MB if it was measured."""
    rows = result["rows"]
    yield "Forward and backward, wall-clock milliseconds:"
    yield table(rows, {"": "row"} | contenders(rows, "wall_ms"))
    if with_peak(rows):
        yield "Peak memory in MB:"
        yield table(with_peak(rows), {"": "row"} | contenders(rows, "peak_bytes"))


def neurons(result: Result) -> Parts:
    """Yield device times against the roofline, and wall-clock times of rows bound by the host."""

    def name(c: Result) -> str:
        kind = c["neuron"] if c["training"] else f"{c['neuron']}, forward without gradients"
        return kind + c["name"].removeprefix(OURS)

    def fastest(row: Result) -> str:
        rivals = [median(c, "device_ms") for c in row["contenders"]
                  if c["name"].startswith("SpikingJelly") and "device_ms" in c]  # fmt: skip
        return number(min(rivals, default=None))

    size = {"T": "T", "neurons": "N", "dtype": "dtype"}
    host = [row for row in result["rows"] if row["group"] in HOST_GROUPS]
    ours = [c for c in flat(result["rows"])
            if c["group"] not in HOST_GROUPS and c["name"].startswith(OURS)]  # fmt: skip
    yield table(ours, {"forward and backward": name, **size, "ms": "device_ms",
                       "roofline": "share", "SpikingJelly": fastest})  # fmt: skip
    yield "Wall-clock milliseconds, including the host:"
    yield table(host, size | contenders(host, "wall_ms"))


def block(result: Result) -> Parts:
    rows = result["rows"]
    ours = [row | flat([row])[0] for row in rows]
    about = {"T×B×C×H×W": "shape", **keys("dtype", "layout")}
    others = contenders(rows, "device_ms", (RECOMPUTED, SEPARATE, RIVAL))
    yield table(ours, about | {"one block, ms": "device_ms", "roofline": "share"} | others)


def first_call(result: Result) -> Parts:
    rows = [row | {"what": row.get("reason") or FIRST_CALLS[row["neuron"]]}
            for row in result["rows"]]  # fmt: skip
    yield table(rows, {"backend": "backend", "": "what", "cold, s": "cold", "warm, s": "warm"})


# Networks


def networks(result: Result) -> Parts:
    """Yield a table of times per kind of step, and one of memory in training."""
    for kind, rows in grouped(result["rows"], "steps").items():
        ways = list(dict.fromkeys(c["way"] for c in flat(rows)))
        yield f"A whole {kind} step, wall-clock milliseconds, {' / '.join(ways)}:"
        yield _by_way(rows, ways, "wall_ms")
        if kind == "training" and with_peak(rows):
            yield f"Memory of a training step in MiB, {' / '.join(WAYS)}:"
            yield _by_way(rows, WAYS, "peak_bytes")
    notes = {c["network"]: c["note"] for c in flat(result["rows"]) if "note" in c}
    for name, note in notes.items():
        yield f"{name}: {note}."


def _by_way(rows: list[Result], ways: Sequence[str], key: str) -> str:
    """Return a line for each workload and dtype, and a column for each network."""

    def cell(row: Result, name: str) -> str:
        found = [c for c in row["contenders"] if c["network"] == name and c["way"] in ways]
        if key == "peak_bytes":  # 0 where it is not seen from outside
            shown = [mebibytes(c.get(key) or None) for c in found]
        else:
            shown = [value(c, key) for c in found]
        return " / ".join(shown) if set(shown) - {"–"} else "–"

    names = dict.fromkeys(c["network"] for c in flat(rows) if c["status"] == "ok")
    columns = {name: partial(cell, name=name) for name in names}
    return table(rows, keys("workload", "dtype") | columns)


def recorded_steps(result: Result) -> Parts:
    """Yield the training steps of the first network: a line for each way to run them."""
    rows = next(iter(grouped(result["rows"], "workload").values()))
    names = [f"{OURS}, eager", f"{OURS}, fused, eager", f"{OURS}, fused, sf.graph_step"]
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
        found = [by_name(row).get(title, {}) for title in BEFORE_AFTER]
        ratios = [
            median(before) / median(after) if "wall_ms" in before and "wall_ms" in after else None
            for before, after in (found[:2], found[2:])
        ]
        peaks = " / ".join(mebibytes(c.get("peak_bytes")) for c in found[:2])
        lines.append(row | {"ratio": ratios[0], "speedup": ratios[1], "peaks": peaks})
        check, name = row["float64"], row["network"]
        notes[name] = (
            f"- {name}: T = {row['T']}, batches of {row['batch']}, {row['layout']}. In float64, "
            f"all {check['outputs']:,} outputs of neurons for two samples are equal; rates are "
            f"{number(min(check['rates']))} to {number(max(check['rates']))}"
        ) + (f". {row['fusion'].capitalize()}." if "fusion" in row else ".")
        used.setdefault(row["note"], {})[f"{name} in {row['dtype']}"] = None
    before, after, *graphs = contenders(rows, "wall_ms", BEFORE_AFTER).values()
    columns: Columns = {"network": "network", "step": "steps", "dtype": "dtype"}
    columns |= {"original, ms": before, "converted, ms": after, "ratio": "ratio"}
    columns |= {"original as a graph, ms": graphs[0], "converted as a graph, ms": graphs[1]}
    yield table(lines, columns | {"ratio ": "speedup", "MiB, original / converted": "peaks"})
    yield "\n".join(notes.values())
    yield "\n".join(f"- {note}: {'; '.join(where)}." for note, where in used.items())


# Several processes


def ddp(result: Result) -> Parts:
    def memory(row: Result) -> str:
        return " / ".join(mebibytes(row.get(f"{name}_bytes")) for name in ("alone", "together"))

    yield f"{result['settings']['workload']}, {result['settings']['dtype']}:"
    yield table(result["rows"], {
        "step": lambda row: f"{row.get('network', OURS)}, {row['way']}", "GPUs": "processes",
        "one alone, ms": "alone_ms", "all, ms": "together_ms",
        "images a second": "images_per_second", "throughput of one": "throughput",
        "MiB, alone / each": memory,
    })  # fmt: skip


def time_sharding(result: Result) -> Parts:
    """Yield a line for each layer, network and layout, and the longest sequence."""
    parts, lines = grouped(result["rows"], "what"), []
    for row in result["rows"]:
        if row["what"] == "long":
            continue
        net = f"{row['N']:,} neurons" if row["what"] == "layer" else "Spiking-ResNet18"
        waiting = "" if row.get("speculate", True) else ", waiting"
        line = row | {"what": f"{net}, {row['way']}", "mesh": f"{row['data']} × {row['time']}",
                      "chunks": f"{row.get('chunks', '–')}{waiting}"}  # fmt: skip
        hidden = ["statistics"] if row["time"] == 1 else []
        hidden += [] if row["way"] == "CUDA graph" else ["predicted", "by_paper"]
        lines.append({"ms": row["status"]} | line | dict.fromkeys(hidden))
    yield table(lines, {
        "": "what", "T": "T", "data × time": "mesh", "statistics": "statistics", "ms": "ms",
        "speed-up": "speedup", "by the plan": "predicted", "by Eq. 5": "by_paper",
        "microbatches": "chunks", "memory of one's": "memory_of_one",
    })  # fmt: skip
    for row in parts.get("long", []):
        alone, several = ("fits" if row[k] else "does not fit" for k in ("fits_one", "fits"))
        yield f"T = {row['T']:,} {alone} on one GPU, and {several} on {row['time']}."


def event_scaling(result: Result) -> Parts:
    settings = result["settings"]
    yield (
        f"Layers of {settings['width']:,} neurons of which {100 * settings['rate']:g}% fire, "
        f"T = {settings['T']}, batch {settings['batch']}:"
    )
    rows = sorted(result["rows"], key=lambda row: (row["what"] != "weak scaling", row["ranks"]))
    yield table([row | row.get("contenders", [row])[0] for row in rows], {
        "": "what", **keys("ranks", "neurons", "parameters"), "step, ms": "wall_ms",
        "samples/s": "samples_per_s", "efficiency": "efficiency",
    })  # fmt: skip


# Events


def events(result: Result) -> Parts:
    """Yield samples a second by network and case."""
    rows, shown = result["rows"], (DENSE, DENSE + REPLAY, EVENTS, LISTS, PRODUCTS)
    names = [n for n in shown if any(n in row["samples_per_s"] for row in rows)]
    lines = [
        row | row["samples_per_s"]
        | {"activity": f"{100 * row['rate']:g}%", "gain": times(row["times_dense"].get(EVENTS), 1)}
        for row in rows
    ]  # fmt: skip
    yield "Samples a second, whole training steps:"
    columns = keys("case", "neurons", "activity", *names)
    yield table(lines, columns | {"events over dense": "gain"})


# Training


def _last(rows: list[Result], epochs: int) -> str:
    """Return the accuracy of each seed after all epochs, without runs that were stopped before."""
    return by_seed([row["accuracy"] for row in rows if row["epoch"] == epochs])


def _command(script: str, result: Result, *options: str) -> str:
    """Return the command that repeats a training."""
    given = {name: [result["settings"][name]] for name in ("epochs", *options)}
    for option, key in (("names", "name"), ("seeds", "seed")):
        given[option] = list(grouped(result["rows"], key))
    words = [f"--{name} {shlex.join(map(str, values))}" for name, values in given.items()]
    return f"Command: `python -m benchmarks.{script} {' '.join(words)}`."


def spoken_digits(result: Result) -> Parts:
    """Yield a line for each network: the last accuracy of every seed, and its speed."""
    settings, lines = result["settings"], []
    for name, rows in grouped(result["rows"], "name").items():
        later = [row for row in rows if row["epoch"] > 1] or rows  # the first one compiles
        speed, seconds = (
            statistics.median(row[key] for row in later) for key in ("examples_per_s", "seconds")
        )
        lines.append({"name": name, "accuracy": _last(rows, settings["epochs"]), "seconds": seconds,
                      "examples/s": f"{speed:,.0f}"})  # fmt: skip
    yield (
        f"{settings['data']}, a random fifth held out; hidden layers of "
        f"{' and '.join(map(str, settings['hidden']))}, "
        f"{settings['epochs']} epochs, batches of {settings['batch']}, {settings['dtype']}:"
    )
    yield table(lines, {"": "name", f"accuracy after the last epoch, {BY_SEED}": "accuracy",
                        "seconds an epoch": "seconds", "examples/s": "examples/s"})  # fmt: skip
    yield _command("spoken_digits", result)


def accuracy(result: Result) -> Parts:
    """Yield a line for each network: its last accuracies and speeds, and the times of a step."""
    settings, lines, steps = result["settings"], [], grouped(result["rows"], "T")
    profiles = settings["profile"]
    parts = next(iter(profiles.values()), {"ms": ()})["ms"]
    for name, rows in grouped(result["rows"], "name").items():
        seeds = grouped(rows, "seed")
        profile = profiles.get(f"{name}, seed {next(iter(seeds))}", {"ms": {}})
        by_steps = {T: [r["images_per_s"] for r in rows if r["T"] == T] for T in steps}
        lines.append({
            "": name, f"test accuracy, {BY_SEED}": _last(rows, settings["epochs"]),
            "seconds": statistics.median(sum(r["seconds"] for r in one) for one in seeds.values()),
            # The first epoch of each number of steps compiles and records.
            **{f"images/s, T = {T}": round(statistics.median(found[1:] or found))
               for T, found in by_steps.items()},
            "images/s, data pipeline alone": profile.get("augmented_images_per_s"),
            **{part: profile["ms"].get(part) for part in parts},
        })  # fmt: skip
    early = f", {settings['early']} of them with one step" if settings["early"] else ""
    yield (
        f"{settings['data']}, {settings['model']}, T = {settings['T']}, {settings['epochs']} "
        f"epochs{early}, batches of {settings['batch']}. The data pipeline alone reads and "
        "augments images. The parts of a step, and evaluation, are in ms per batch:"
    )
    yield table(lines, keys(*lines[0]))
    yield _command("accuracy", result, "early", "batch", "lr")


def papers(results: Results, root: Path) -> str:
    """A row per recipe, the paper's figures beside ours, and where ours were measured."""
    rows = {result["settings"]["recipe"]: result["rows"] for _, result in results}
    lines, origins = [], []
    for recipe, (printed, paper_seconds) in PAPERS.items():
        found = rows.get(recipe, ())
        lines.append({
            "recipe": f"`{recipe}`", "theirs": None if printed is None else f"{printed:.2f}%",
            "accuracy": by_seed([row["test_accuracy"] for row in found]) or None,
            "paper": paper_seconds,
            "seconds": ", ".join(number(row["training_seconds"]) for row in found) or None,
        })  # fmt: skip
    for path, result in results:
        links = [link.removeprefix("!") for link in picture(path, root, "Curve")]
        seeds = ", ".join(str(row["seed"]) for row in result["rows"])
        plural = "s" if len(result["rows"]) > 1 else ""
        text = ". ".join([f"{origin(result)}, seed{plural} {seeds}", *links])
        origins.append(f"- `{result['settings']['recipe']}`: {text}.")
    columns: Columns = {"recipe": "recipe", "paper's accuracy": "theirs",
                        f"ours, {BY_SEED}": "accuracy",
                        "paper's training seconds": "paper", "ours": "seconds"}  # fmt: skip
    return "\n\n".join([table(lines, columns), "\n".join(origins)]).rstrip()


# How values are written, by their key; others by their type.
FORMATS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("ratio", "speedup", "predicted", "by_paper", "throughput"), times),
    **dict.fromkeys(("efficiency", "memory_of_one", "share"), percent),
    **dict.fromkeys(("peak_bytes", "input_bytes"), lambda value: f"{value / 1e6:,.0f}"),
}
