"""Write the tables of docs from benchmarks/results.

python -m benchmarks.tables                              rewrite docs/benchmarks.md
python -m benchmarks.tables --page README.md             rewrite another page or notebook
python -m benchmarks.tables --check                      fail if the page is outdated
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.block import RECOMPUTED, RIVAL, SEPARATE
from benchmarks.claims import claims
from benchmarks.convert import TITLES as BEFORE_AFTER
from benchmarks.events import DENSE, EVENTS, LISTS, PRODUCTS, REPLAY
from benchmarks.layers import LOOP, OURS
from benchmarks.runner import WAYS
from benchmarks.training import PAPERS

Result = dict[str, Any]
Results = list[tuple[Path, Result]]
Parts = Iterator[str]  # paragraphs and tables

PAGE = record.ROOT / "docs" / "benchmarks.md"
MEMORY_STEPS = (32, 128)
HOST_GROUPS = ("short", "host")
FIRST_CALLS = {"own": "user-defined neuron, first", "LIF": "LIF, second"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if outdated")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    args = parser.parse_args(argv)
    before = args.page.read_text()
    fill = filled_notebook if args.page.suffix == ".ipynb" else filled
    after = fill(before, args.results, args.page.parent)
    if before == after:
        print(f"{args.page.name} is up to date")
    elif args.check:
        parser.exit(1, f"{args.page.name} differs from {args.results.name}: run "
                       f"python -m benchmarks.tables --page {args.page}\n")  # fmt: skip
    else:
        args.page.write_text(after)
        print(f"{args.page.name} rewritten")


def filled(text: str, results: Path, root: Path) -> str:
    """Rewrite every generated region of `text`; links are relative to `root`.

    Raises:
        ValueError: a region has no table.
    """

    def region(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in REGIONS:
            raise ValueError(f"no table is called {name!r}: there are {', '.join(REGIONS)}")
        benchmark, table, command = REGIONS[name]
        found = read_results(results, benchmark)
        body = f"Not measured yet: run `{command}`."
        if found or name == "papers":  # whose own figures need no result
            body = table(found, root)
            body += "" if command == BENCH else f"\n\nCommand: `{command}`."
        return f"<!-- generated:{name} begin -->\n{body}\n<!-- generated:{name} end -->"

    pattern = r"<!-- generated:(?P<name>\S+) begin -->.*?<!-- generated:(?P=name) end -->"
    return re.sub(pattern, region, text, flags=re.S)


def filled_notebook(text: str, results: Path, root: Path) -> str:
    """Rewrite the generated regions in the cells of a notebook."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        source = filled("".join(cell["source"]), results, root)
        cell["source"] = source.splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def read_results(folder: Path, benchmark: str) -> Results:
    """Read the results of a benchmark (a pattern), one per machine, without quick runs."""
    found = [(path, record.read(path)) for path in sorted(folder.glob(f"{benchmark}-*.json"))]
    return [(path, result) for path, result in found if not result["quick"]]


def each(table: Callable[[Result], Parts], plot: str = "") -> Callable[[Results, Path], str]:
    """Show results one after the other, with their plot described by `plot` if there is one."""

    def show(results: Results, root: Path) -> str:
        parts: list[str] = []
        for path, result in results:
            parts += [origin(result), *table(result)]
            parts += picture(path, root, plot) if plot else []
            left_out = [f"{one['row']} ({one['reason']})" for one in result.get("left_out", [])]
            parts += [f"Not measured: {'; '.join(left_out)}."] if left_out else []
        return "\n\n".join(parts)

    return show


# Cells


def origin(result: Result) -> str:
    """Return where and when a result was measured, and with which versions."""
    versions = result["versions"]
    names = {"torch": "PyTorch", "triton": "Triton", "numba": "Numba",
             "spikingjelly": "SpikingJelly", "snntorch": "snnTorch"}  # fmt: skip
    shown = ["torch", "triton" if "gpu" in result["machine"] else "numba", "spikingjelly"]
    if result["benchmark"] in ("cpu", "spoken_digits"):
        shown.append("snntorch")
    if result["benchmark"] == "first_call":
        shown = ["torch", "triton", "numba"]
    listed = ", ".join(f"{names[n]} {versions[n]}" for n in shown if n in versions)
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


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def picture(path: Path, root: Path, text: str) -> list[str]:
    """Link the plot beside a result, if there is one."""
    plot = path.with_suffix(".png")
    if not plot.exists():
        return []
    return [f"![{text}]({Path(os.path.relpath(plot.resolve(), root.resolve())).as_posix()})"]


def by_name(row: Result) -> dict[str, Result]:
    return {c["name"]: c for c in row["contenders"]}


def measured_names(rows: list[Result]) -> list[str]:
    """Return the contenders that were measured at least once."""
    contenders = [c for row in rows for c in row["contenders"]]
    return list(dict.fromkeys(c["name"] for c in contenders if c["status"] in ("ok", "wrong")))


def median(contender: Result | None, kind: str = "wall_ms") -> float | None:
    if contender is None or contender["status"] != "ok":
        return None
    return contender[kind]["median"]


def time_cells(row: Result, names: list[str]) -> list[str]:
    found = [by_name(row).get(name) for name in names]
    return ["wrong result" if c and c["status"] == "wrong" else number(median(c)) for c in found]


# Layers


def time_steps(result: Result) -> Parts:
    """Yield a table of times over T per dtype, and one of memory."""
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["dtype"] == dtype]
        names = measured_names(rows)
        lines = []
        for row in rows:
            floor = row["num_bytes"] / row["copies"][0]["gb_per_s"] / 1e6
            lines.append([str(row["T"]), *time_cells(row, names), number(floor)])
        yield f"{dtype}, milliseconds (wall-clock, including the host):"
        yield markdown(["T", *names, "roofline"], lines)
        wrong = {
            c["name"]: f"{c['name']}, T = {row['T']}: {c['reason']}."
            for row in sorted(rows, key=lambda row: row["T"])
            for c in row["contenders"]
            if c["status"] == "wrong"
        }
        if wrong:
            yield "Not timed, because of wrong results. " + " ".join(wrong.values())
    rows = [row for row in result["rows"] if row["T"] in MEMORY_STEPS]
    names = [n for n in measured_names(rows)
             if any("peak_bytes" in by_name(row).get(n, {}) for row in rows)]  # fmt: skip
    if names:
        lines = []
        for row in rows:
            found = [by_name(row).get(name, {}).get("peak_bytes") for name in names]
            cells = ["–" if peak is None else f"{peak / 1e6:,.0f}" for peak in found]
            lines.append([str(row["T"]), row["dtype"], *cells, f"{row['input_bytes'] / 1e6:,.0f}"])
        yield "Peak memory in MB beyond the inputs `x` and `grad_y`:"
        yield markdown(["T", "dtype", *names, "the inputs"], lines)


def cpu(result: Result) -> Parts:
    """Yield a table of times by memory setting, against the eager loop and a copy."""
    first, lines = result["rows"][0], []
    yield (
        f'{first["N"]:,} neurons, T = {first["T"]}, {first["dtype"]}. "Reused": the C library '
        'keeps freed memory; "fresh": it requests memory from the system at each call. The copy '
        "moves as many bytes as forward and backward must, into memory of the same kind."
    )
    for row in result["rows"]:
        found = by_name(row)
        eager = median(found.get(LOOP))
        for name, c in found.items():
            taken = median(c)
            if taken is not None:
                faster = times(eager / taken if eager else None, 1)
                fraction = percent(c["fraction"]["wall_ms"])
                lines.append([row["memory"], name, number(taken), faster, fraction])
        copied = number(row["copies"][0]["wall_ms"]["median"])
        lines.append([row["memory"], "the copy", copied, "", "100%"])
    yield markdown(["memory", "", "ms", "eager loop / this", "copy / this"], lines)


def cpu_steps(result: Result) -> Parts:
    """Yield a table of whole steps: each contender's time, and the first contender's over it."""
    yield f"Number of threads: {result['machine']['threads']}. Times are in ms."
    lines = []
    for row in result["rows"]:
        found = by_name(row)
        first = median(next(iter(found.values())))
        for name, c in found.items():
            taken = median(c)
            ratio = first / taken if first and taken else None
            lines.append([row["row"], name, number(taken), times(ratio)])
    yield markdown(["", "", "ms", "first of the row / this"], lines)


def recurrent(result: Result) -> Parts:
    """Yield the times of each contender, and its peak memory in MB if it was measured."""
    names = measured_names(result["rows"])
    times_, memory = [], []
    for row in result["rows"]:
        found = by_name(row)
        times_.append([row["row"], *(number(median(found.get(name))) for name in names)])
        peaks = [found[name].get("peak_bytes") if name in found else None for name in names]
        if any(peaks):
            memory.append([row["row"], *("–" if p is None else f"{p / 1e6:.0f}" for p in peaks)])
    yield "Forward and backward, wall-clock milliseconds:"
    yield markdown(["", *names], times_)
    if memory:
        yield "Peak memory in MB:"
        yield markdown(["", *names], memory)


def neurons(result: Result) -> Parts:
    """Yield device times against the roofline, and wall-clock times of rows bound by the host."""
    long = [row for row in result["rows"] if row["group"] not in HOST_GROUPS]
    short = [row for row in result["rows"] if row["group"] in HOST_GROUPS]
    if long:
        head = ["forward and backward", "T", "neurons", "dtype", "ms", "roofline", "SpikingJelly"]
        yield markdown(head, [line for row in long for line in _device_lines(row)])
    if short:
        names = measured_names(short)
        lines = [
            [str(row["T"]), f"{row['N']:,}", row["dtype"], *time_cells(row, names)] for row in short
        ]
        yield "Wall-clock milliseconds, including the host:"
        yield markdown(["T", "neurons", "dtype", *names], lines)


def _device_lines(row: Result) -> Iterator[list[str]]:
    """Yield a line for each way in which spikefuse ran, beside SpikingJelly's fastest."""
    name = row["neuron"] if row["training"] else f"{row['neuron']}, forward without gradients"
    about = [str(row["T"]), f"{row['N']:,}", row["dtype"]]
    rivals = [c for c in row["contenders"] if c["name"].startswith("SpikingJelly")]
    fastest = min(filter(None, (median(c, "device_ms") for c in rivals)), default=None)
    for c in row["contenders"]:
        if c["name"].startswith(OURS):
            found = [c["status"], "–"]
            if c["status"] == "ok":
                found = [number(median(c, "device_ms")), percent(c["fraction"]["device_ms"])]
            yield [name + c["name"].removeprefix(OURS), *about, *found, number(fastest)]


def block(result: Result) -> Parts:
    names, lines = (OURS, RECOMPUTED, SEPARATE, RIVAL), []
    for row in result["rows"]:
        found = by_name(row)
        cells = [number(median(found.get(name), "device_ms")) for name in names]
        share = percent(found[OURS].get("fraction", {}).get("device_ms"))
        shape = "×".join(str(size) for size in row["shape"])
        lines.append([shape, row["dtype"], row["layout"], cells[0], share, *cells[1:]])
    head = ["T×B×C×H×W", "dtype", "layout", "one block, ms", "roofline", *names[1:]]
    yield markdown(head, lines)


def first_call(result: Result) -> Parts:
    lines = []
    for row in result["rows"]:
        about = [row["backend"], row.get("reason", "–"), "–", "–"]
        if row["status"] == "ok":
            seconds = [number(row[state]["median"]) for state in ("cold", "warm")]
            about = [row["backend"], FIRST_CALLS[row["neuron"]], *seconds]
        lines.append(about)
    yield markdown(["backend", "", "cold, s", "warm, s"], lines)


# Networks


def networks(result: Result) -> Parts:
    """Yield a table of times per kind of step, and one of memory in training."""
    for kind in dict.fromkeys(row["steps"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["steps"] == kind]
        ways = list(dict.fromkeys(c["way"] for row in rows for c in row["contenders"]))
        yield f"A whole {kind} step, wall-clock milliseconds, {' / '.join(ways)}:"
        yield _network_table(rows, ways, lambda c: number(median(c)))
        if kind == "training" and any("peak_bytes" in c for r in rows for c in r["contenders"]):
            yield f"Memory of a training step in MiB, {' / '.join(WAYS)}:"
            yield _network_table(rows, WAYS, lambda c: mebibytes(c["peak_bytes"]))
    notes = {
        c["network"]: c["note"] for r in result["rows"] for c in r["contenders"] if "note" in c
    }
    for name, note in notes.items():
        yield f"{name}: {note}."


def recorded_steps(result: Result) -> Parts:
    """Yield the training steps of the first network: a line for each way to run them."""
    first = result["rows"][0]
    rows = [row for row in result["rows"] if row["workload"] == first["workload"]]
    names = [f"{OURS}, eager", f"{OURS}, fused, eager", f"{OURS}, fused, sf.graph_step"]
    lines = [[n, *(number(median(by_name(row).get(n))) for row in rows)] for n in names]
    yield (
        f"A training step of {first['model']}, T = {first['T']}, batches of {first['batch']}, "
        "wall-clock milliseconds:"
    )
    yield markdown(["", *(row["dtype"] for row in rows)], lines)


def converted(result: Result) -> Parts:
    """Yield a line for each step of a network before and after conversion, and what was checked."""
    head = ["network", "step", "dtype", "original, ms", "converted, ms", "ratio"]
    head += ["original as a graph, ms", "converted as a graph, ms", "ratio"]
    head += ["MiB, original / converted"]
    lines, notes = [], {}
    for row in result["rows"]:
        name, found = row["network"], by_name(row)
        line = [name, row["steps"], row["dtype"]]
        for ways in (BEFORE_AFTER[:2], BEFORE_AFTER[2:]):
            before, after = (median(found.get(way)) for way in ways)
            ratio = before / after if before and after else None
            line += [number(before), number(after), times(ratio)]
        peaks = [mebibytes(found.get(way, {}).get("peak_bytes")) for way in BEFORE_AFTER[:2]]
        lines.append([*line, " / ".join(peaks)])
        check = row["float64"]
        text = (
            f"{name}: T = {row['T']}, batches of {row['batch']}, {row['layout']}. In float64, "
            f"all {check['outputs']:,} outputs of neurons for two samples are equal; rates are "
            f"{number(min(check['rates']))} to {number(max(check['rates']))}"
        )
        notes[name] = text + (f". {row['fusion'].capitalize()}." if "fusion" in row else ".")
    yield markdown(head, lines)
    yield "\n".join(f"- {note}" for note in notes.values())
    used: dict[str, list[str]] = {}
    for row in result["rows"]:
        used.setdefault(row["note"], []).append(f"{row['network']} in {row['dtype']}")
    yield "\n".join(f"- {note}: {'; '.join(dict.fromkeys(where))}." for note, where in used.items())
    reasons = {
        f"- {row['network']}, {row['steps']} in {row['dtype']}, {c['name']}: {c['reason']}."
        for row in result["rows"]
        for c in row["contenders"]
        if c["status"] != "ok"
    }
    if reasons:
        yield "\n".join(sorted(reasons))


def _network_table(rows: list[Result], ways: Sequence[str], value: Callable[[Result], str]) -> str:
    """A line for each workload and dtype, a column for each network."""
    contenders = [c for row in rows for c in row["contenders"]]
    names = list(dict.fromkeys(c["network"] for c in contenders if c["status"] == "ok"))
    lines = []
    for row in rows:
        cells = []
        for name in names:
            found = [c for c in row["contenders"] if c["network"] == name and c["way"] in ways]
            shown = [value(c) if c["status"] == "ok" else "–" for c in found]
            cells.append(" / ".join(shown) if set(shown) - {"–"} else "–")
        lines.append([row["workload"], row["dtype"], *cells])
    return markdown(["workload", "dtype", *names], lines)


# Several processes


def ddp(result: Result) -> Parts:
    lines = []
    for row in result["rows"]:
        found = [row["status"], "–", "–", "–", "–"]
        if row["status"] == "ok":
            taken = [number(row[key]["median"]) for key in ("alone_ms", "together_ms")]
            peaks = " / ".join(mebibytes(row.get(key)) for key in ("alone_bytes", "together_bytes"))
            images = number(row["images_per_second"])
            found = [*taken, images, times(row["throughput"]), peaks]
        name = f"{row.get('network', OURS)}, {row['way']}"
        lines.append([name, str(row["processes"]), *found])
    head = ["step", "GPUs", "one alone, ms", "all, ms", "images a second", "throughput of one"]
    yield f"{result['settings']['workload']}, {result['settings']['dtype']}:"
    yield markdown([*head, "MiB, alone / each"], lines)


def time_sharding(result: Result) -> Parts:
    """Yield a line for each layer, network and layout, and the longest sequence."""
    lines, notes = [], []
    for row in result["rows"]:
        if row["what"] == "long":
            alone = "fits" if row["fits_one"] else "does not fit"
            several = "fits" if row["fits"] else "does not fit"
            notes.append(f"T = {row['T']:,} {alone} on one GPU, and {several} on {row['time']}.")
            continue
        net = f"{row['N']:,} neurons" if row["what"] == "layer" else "Spiking-ResNet18"
        statistics = row.get("statistics", "–") if row["time"] > 1 else "–"
        about = [f"{net}, {row['way']}", f"{row['T']:,}", f"{row['data']} × {row['time']}"]
        about.append(statistics)
        if "ms" not in row:
            lines.append([*about, row["status"], *["–"] * 5])
            continue
        replay = row["way"] == "CUDA graph"
        predicted = [times(row.get(key) if replay else None) for key in ("predicted", "by_paper")]
        memory = percent(row.get("memory_of_one"))
        passing = f"{row['chunks']}" + ("" if row.get("speculate", True) else ", waiting")
        speedup = times(row.get("speedup"))
        lines.append([*about, number(row["ms"]["median"]), speedup, *predicted, passing, memory])
    head = ["", "T", "data × time", "statistics", "ms", "speed-up", "by the plan", "by Eq. 5"]
    yield markdown([*head, "microbatches", "memory of one's"], lines)
    yield from notes


def event_scaling(result: Result) -> Parts:
    lines = []
    for row in result["rows"]:
        about = [row["what"], str(row["ranks"])]
        (run,) = row.get("contenders", [row])
        if "wall_ms" not in run:
            lines.append([*about, run["status"], *["–"] * 4])
            continue
        efficiency = percent(row.get("efficiency"))
        sizes = [f"{row[key]:,}" for key in ("neurons", "parameters")]
        speed = [number(median(run)), number(row["samples_per_s"])]
        lines.append([*about, *sizes, *speed, efficiency])
    head = ["", "ranks", "neurons", "parameters", "step, ms", "samples/s", "efficiency"]
    settings = result["settings"]
    yield (
        f"Layers of {settings['width']:,} neurons of which {100 * settings['rate']:g}% fire, "
        f"T = {settings['T']}, batch {settings['batch']}:"
    )
    yield markdown(head, lines)


# Events


def events(result: Result) -> Parts:
    """Yield samples a second by network and case, the verification, and streaming."""
    rows, shown = result["rows"], (DENSE, DENSE + REPLAY, EVENTS, LISTS, PRODUCTS)
    names = [n for n in shown if any(n in row["samples_per_s"] for row in rows)]
    lines, spikes, flips, error = [], 0, 0, 0.0
    for row in rows:
        about = [row["case"], f"{row['neurons']:,}", f"{100 * row['rate']:g}%"]
        cells = [number(row["samples_per_s"].get(n)) for n in names]
        lines.append([*about, *cells, times(row["times_dense"].get(EVENTS), 1)])
        check = row["checks"].get(EVENTS)
        if check:
            spikes, flips = spikes + check["sites"], flips + check["flips"]
            error = max(error, *check["errors"].values())
    yield "Samples a second, whole training steps:"
    yield markdown(["case", "neurons", "activity", *names, "events over dense"], lines)
    yield (
        f"Of {spikes:,} spikes on events, {flips} differ from those in float64 for the same "
        f"inputs, and no gradient differs by more than {error:.1g} of its norm."
    )
    if "streaming" in result:
        row = result["streaming"]
        found = [f"{c['name']} {number(1e3 * c['wall_ms']['median'])}"
                 for c in row["contenders"] if c["status"] == "ok"]  # fmt: skip
        size = f"{row['neurons']:,} neurons of which {row['rate']:.2%} fire"
        yield f"One time step of one sample, {size}, microseconds: {', '.join(found)}."


def event_accuracy(result: Result) -> Parts:
    """Yield a line for each network: the best accuracy of every seed, and its epoch."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["name"] == name]
        activity = []
        for row in rows:
            rates = [v for key, v in row["last_epoch"].items() if key.startswith("activity_")]
            activity.append(" and ".join(map(percent, rates)) or "–")
        accuracy = ", ".join(percent(row["best"], 1) for row in rows)
        epochs = ", ".join(str(row["epochs_to_best"]) for row in rows)
        lines.append([name, accuracy, epochs, ", ".join(activity)])
    settings = result["settings"]
    hidden = " and ".join(str(n) for n in settings["hidden"])
    yield (
        f"{settings['data']}, every fifth recording held out; hidden layers of {hidden}, "
        f"{settings['epochs']} epochs, capacity {settings['capacity']:g}:"
    )
    yield markdown(["", "best accuracy, by seed", "in epoch", "neurons that fire"], lines)


def spoken_digits(result: Result) -> Parts:
    """Yield a line for each network: the last accuracy of every seed, and its speed."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["name"] == name]
        last = {row["seed"]: row["accuracy"] for row in rows}  # a later epoch replaces an earlier
        later = [row for row in rows if row["epoch"] > 1] or rows  # the first one compiles
        speed = statistics.median(row["examples_per_s"] for row in later)
        seconds = statistics.median(row["seconds"] for row in later)
        accuracy = ", ".join(percent(value, 1) for value in last.values())
        lines.append([name, accuracy, number(seconds), f"{speed:,.0f}"])
    settings = result["settings"]
    hidden = " and ".join(str(n) for n in settings["hidden"])
    yield (
        f"{settings['data']}, a random fifth held out; hidden layers of {hidden}, "
        f"{settings['epochs']} epochs, batches of {settings['batch']}, {settings['dtype']}:"
    )
    head = ["", "accuracy after the last epoch, by seed", "seconds an epoch", "examples/s"]
    yield markdown(head, lines)


def accuracy(result: Result) -> Parts:
    """Yield a line for each network: its last accuracies and speeds, and the times of a step."""
    settings, lines = result["settings"], []
    names = dict.fromkeys(row["name"] for row in result["rows"])
    steps = dict.fromkeys(row["T"] for row in result["rows"])
    parts = list(next(iter(settings["profile"].values()))["ms"])
    for name in names:
        rows = [row for row in result["rows"] if row["name"] == name]
        seeds = dict.fromkeys(row["seed"] for row in rows)
        last = {row["seed"]: percent(row["accuracy"], 1) for row in rows}
        whole = [sum(row["seconds"] for row in rows if row["seed"] == seed) for seed in seeds]
        # The first epoch of each number of steps compiles and records.
        speeds = [[r["images_per_s"] for r in rows if r["T"] == T][-1] for T in steps]
        profile = settings["profile"].get(f"{name}, seed {next(iter(seeds))}", {"ms": {}})["ms"]
        lines.append([
            *(name, ", ".join(last.values()), number(statistics.median(whole))),
            *(f"{speed:,}" for speed in speeds),
            *(number(profile.get(part)) for part in parts),
        ])  # fmt: skip
    early = settings["early"]
    epochs = f"{settings['epochs']} epochs" + (f", {early} of them with one step" if early else "")
    yield (
        f"{settings['data']}, {settings['model']}, T = {settings['T']}, {epochs}, batches of "
        f"{settings['batch']}. The parts of a step, and evaluation, are in ms per batch:"
    )
    head = ["", "test accuracy, by seed", "seconds"]
    yield markdown([*head, *(f"images/s, T = {T}" for T in steps), *parts], lines)


# Training


def training(results: Results, root: Path) -> str:
    """One table of all data sets and machines, and where each was measured."""
    lines, origins = [], []
    for _, result in results:
        rows, config = result["rows"], result["settings"]["config"]
        lines.append(
            [
                config["dataset"],
                f"{config['model']}, {config['neuron']}, T = {config['num_steps']}, "
                f"{config['epochs']} epochs",
                record.device(result),
                ", ".join(str(row["seed"]) for row in rows),
                ", ".join(number(row["seconds"]) for row in rows),
                ", ".join(percent(row["test_accuracy"], 2) for row in rows),
            ]
        )
        origins.append(f"- {config['dataset']}: {origin(result)}")
    head = ["dataset", "network", "device", "seeds", "seconds", "accuracy"]
    return "\n\n".join([markdown(head, lines), "\n".join(origins)])


def papers(results: Results, root: Path) -> str:
    """A row per recipe, the paper's figures beside ours, and where ours were measured."""
    by_recipe, lines = {result["settings"]["recipe"]: result for _, result in results}, []
    for recipe, (printed, paper_seconds) in PAPERS.items():
        rows = by_recipe[recipe]["rows"] if recipe in by_recipe else []
        accuracy = ", ".join(percent(row["test_accuracy"], 2) for row in rows) or "–"
        seconds = ", ".join(number(row["training_seconds"]) for row in rows) or "–"
        paper = "–" if printed is None else f"{printed:.2f}%"
        lines.append([f"`{recipe}`", paper, accuracy, number(paper_seconds), seconds])
    head = ["recipe", "paper's accuracy", "ours", "paper's training seconds", "ours"]
    origins = []
    for path, result in results:
        links = [link.removeprefix("!") for link in picture(path, root, "Curve")]
        text = ". ".join([origin(result), *links])
        origins.append(f"- `{result['settings']['recipe']}`: {text}.")
    return "\n\n".join([markdown(head, lines), "\n".join(origins)]).rstrip()


def converging(result: Result) -> Parts:
    """Yield a line for each run: the loss in each fifth of the steps, accuracy and seconds."""
    settings = result["settings"]
    config = settings["config"]
    yield (
        f"{config['dataset']}, {config['model']}, T = {config['num_steps']}, batches of "
        f"{config['batch_size']}, {settings['steps']} steps of the optimizer:"
    )
    lines = [
        [
            f"{row['name']}, {row['dtype']}, seed {row['seed']}",
            *(f"{mean:.4f}" for mean in row["parts"]),
            percent(row["accuracy"], 2),
            number(row["seconds"]),
        ]
        for row in result["rows"]
    ]
    fifths = ["loss, first fifth", "second", "third", "fourth", "last"]
    yield markdown(["", *fifths, "accuracy held out", "seconds"], lines)


BENCH = "make bench"
TORCHRUN = "torchrun --nproc_per_node {} -m benchmarks.{}"
SCRIPT = "python -m benchmarks.{}"
# By region: the results, the function that makes its tables, and the command that measures.
REGIONS: dict[str, tuple[str, Callable[[Results, Path], str], str]] = {
    "time-steps": (
        "timestep_scaling", each(time_steps, "time over the number of time steps"), BENCH
    ),
    "neurons": ("neurons", each(neurons), BENCH),
    "networks": ("networks*", each(networks), BENCH),
    "recorded-steps": ("networks_graph_step", each(recorded_steps), BENCH),
    "convert": ("convert", each(converted), SCRIPT.format("convert")),
    "block": ("block", each(block), BENCH),
    "recurrent": ("recurrent", each(recurrent), SCRIPT.format("recurrent")),
    "bptt-figures": (
        "bptt_figures", each(networks), SCRIPT.format("networks --name bptt_figures")
    ),
    "ddp": ("ddp*", each(ddp), TORCHRUN.format(2, "ddp")),
    "time-sharding": (
        "time_sharding",
        each(time_sharding, "speed-up over the number of time steps"),
        TORCHRUN.format(4, "time_sharding"),
    ),
    "events": ("events", each(events, "speed over activity"), BENCH),
    "event-scaling": (
        "event_scaling",
        each(event_scaling, "efficiency over ranks"),
        SCRIPT.format("event_scaling"),
    ),
    "event-accuracy": ("event_accuracy", each(event_accuracy), SCRIPT.format("event_accuracy")),
    "spoken-digits": (
        "spoken_digits*",
        each(spoken_digits, "accuracy over seconds"),
        SCRIPT.format("spoken_digits --seeds 0 1 2"),
    ),
    "accuracy": (
        "accuracy*",
        each(accuracy, "accuracy over seconds"),
        SCRIPT.format("accuracy --early 64 --epochs 96"),
    ),
    "first-call": ("first_call", each(first_call), BENCH),
    "cpu": ("cpu_neuron", each(cpu), BENCH),
    "cpu-steps": ("cpu", each(cpu_steps), BENCH),
    "training": ("training_*", training, SCRIPT.format("training digits")),
    "papers": ("reproduce_*", papers, SCRIPT.format("training RECIPE")),
    "claims": ("*", claims, BENCH),
    "convergence": ("convergence", each(converging), SCRIPT.format("training convergence")),
}  # fmt: skip


if __name__ == "__main__":
    main()
