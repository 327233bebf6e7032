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
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.block import RECOMPUTED, RIVAL, SEPARATE
from benchmarks.claims import claims
from benchmarks.convert import TITLES as BEFORE_AFTER
from benchmarks.events import DENSE, EVENTS, LISTS, PRODUCTS, REPLAY
from benchmarks.layers import LOOP, OURS
from benchmarks.reproduce import PAPERS
from benchmarks.runner import WAYS

Result = dict[str, Any]
Results = list[tuple[Path, Result]]
Parts = Iterator[str]  # paragraphs and tables
# Heads of columns, and for each the key of a row or what makes the cell of a row.
Columns = list[tuple[str, str | Callable[[Result], str]]]

PAGE = record.ROOT / "docs" / "benchmarks.md"
MEMORY_STEPS = (32, 128)
HOST_GROUPS = ("short", "host")
FIRST_CALLS = {"own": "user-defined neuron, first", "LIF": "LIF, second"}
NAMES = {"torch": "PyTorch", "triton": "Triton", "numba": "Numba", "spikingjelly": "SpikingJelly",
         "snntorch": "snnTorch"}  # fmt: skip
# Libraries that are named beside torch, the backend and SpikingJelly.
ALSO = {"cpu": "snntorch", "spoken_digits": "snntorch", "first_call": "numba"}


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
        benchmark, show, command = REGIONS[name]
        found = read_results(results, benchmark)
        body = f"Not measured yet: run `{command}`."
        if found or name == "papers":  # whose own figures need no result
            body = show(found, root)
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


def each(parts: Callable[[Result], Parts], plot: str = "") -> Callable[[Results, Path], str]:
    """Show results one after the other, with their plot described by `plot` if there is one."""

    def show(results: Results, root: Path) -> str:
        shown: list[str] = []
        for path, result in results:
            shown += [origin(result), *parts(result)]
            shown += picture(path, root, plot) if plot else []
            left_out = [f"{one['row']} ({one['reason']})" for one in result.get("left_out", [])]
            shown += [f"Not measured: {'; '.join(left_out)}."] if left_out else []
        return "\n\n".join(shown)

    return show


# Cells


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


def amount(value: int | None, unit: float = 1.0) -> str:
    return "–" if value is None else f"{value / unit:,.0f}"


def times(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}f}×" if value else "–"


def percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def picture(path: Path, root: Path, text: str) -> list[str]:
    """Link the plot beside a result, if there is one."""
    plot = path.with_suffix(".png")
    if not plot.exists():
        return []
    return [f"![{text}]({Path(os.path.relpath(plot.resolve(), root.resolve())).as_posix()})"]


def median(contender: Result, kind: str = "wall_ms") -> float | None:
    return contender[kind]["median"] if kind in contender else None


def wall(contender: Result) -> str:
    wrong = contender.get("status") == "wrong"
    return "wrong result" if wrong else number(median(contender))


def device(contender: Result) -> str:
    return number(median(contender, "device_ms"))


def peak(contender: Result, unit: float) -> str:
    return amount(contender.get("peak_bytes"), unit)


def share(contender: Result, kind: str = "device_ms") -> str:
    """Return how near a contender's time is to that of a copy of the bytes that must move."""
    return percent(contender.get("fraction", {}).get(kind))


# Tables


def table(rows: Sequence[Result], columns: Columns) -> str:
    """Return a line for each row; the first column is aligned to the left."""
    lines = [[head for head, _ in columns], ["---", *["---:"] * (len(columns) - 1)]]
    for row in rows:
        lines.append([str(row[c]) if isinstance(c, str) else c(row) for _, c in columns])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def keys(*names: str) -> Columns:
    return [(name, name) for name in names]


def grouped(rows: Sequence[Result], key: str) -> dict[Any, list[Result]]:
    return {value: [row for row in rows if row[key] == value]
            for value in dict.fromkeys(row[key] for row in rows)}  # fmt: skip


def by_name(row: Result) -> dict[str, Result]:
    return {c["name"]: c for c in row["contenders"]}


def contenders(
    rows: Sequence[Result], show: Callable[[Result], str], names: Sequence[str] = ()
) -> Columns:
    """Return a column for each of `names`, or for each contender that was measured in a row."""
    found = [c for row in rows for c in row["contenders"] if c["status"] in ("ok", "wrong")]
    return [
        (name, lambda row, name=name: show(by_name(row).get(name, {})))
        for name in names or dict.fromkeys(c["name"] for c in found)
    ]


def flat(rows: Sequence[Result]) -> list[Result]:
    """Return a row for each contender, with the first one as "first"."""
    return [row | c | {"first": row["contenders"][0]} for row in rows for c in row["contenders"]]


def any_peak(rows: Sequence[Result]) -> bool:
    return any("peak_bytes" in c for row in rows for c in row["contenders"])


def spreads(row: Result, *names: str) -> str:
    """Return the medians of several quantities of a row."""
    return " / ".join(number(median(row, name)) for name in names)


# Layers


def time_steps(result: Result) -> Parts:
    """Yield a table of times over T per dtype, and one of memory."""
    for dtype, rows in grouped(result["rows"], "dtype").items():
        yield f"{dtype}, milliseconds (wall-clock, including the host):"
        roofline = lambda r: number(r["num_bytes"] / r["copies"][0]["gb_per_s"] / 1e6)  # noqa: E731
        yield table(rows, [*keys("T"), *contenders(rows, wall), ("roofline", roofline)])
        wrong = {
            c["name"]: f"{c['name']}, T = {c['T']}: {c['reason']}."
            for c in sorted(flat(rows), key=lambda c: c["T"])
            if c["status"] == "wrong"
        }
        if wrong:
            yield "Not timed, because of wrong results. " + " ".join(wrong.values())
    rows = [row for row in result["rows"] if row["T"] in MEMORY_STEPS]
    if any_peak(rows):
        yield "Peak memory in MB beyond the inputs `x` and `grad_y`:"
        memory = contenders(rows, partial(peak, unit=1e6))
        given = ("the inputs", lambda r: amount(r["input_bytes"], 1e6))
        yield table(rows, [*keys("T", "dtype"), *memory, given])


def cpu(result: Result) -> Parts:
    """Yield a table of times by memory setting, against the eager loop and a copy."""
    first, lines = result["rows"][0], []
    yield (
        f'{first["N"]:,} neurons, T = {first["T"]}, {first["dtype"]}. "Reused": the C library '
        'keeps freed memory; "fresh": it requests memory from the system at each call. The copy '
        "moves as many bytes as forward and backward must, into memory of the same kind."
    )
    for row in result["rows"]:
        eager = median(by_name(row)[LOOP])
        lines += [{"faster": times(eager / c["wall_ms"]["median"], 1)} | c
                  for c in flat([row]) if c["status"] == "ok"]  # fmt: skip
        lines.append(row["copies"][0] | {
            "memory": row["memory"], "name": "the copy", "faster": "", "fraction": {"wall_ms": 1.0}
        })  # fmt: skip
    yield table(lines, [
        ("memory", "memory"), ("", "name"), ("ms", wall), ("eager loop / this", "faster"),
        ("copy / this", partial(share, kind="wall_ms")),
    ])  # fmt: skip


def cpu_steps(result: Result) -> Parts:
    """Yield a table of whole steps: each contender's time, and the first contender's over it."""
    yield f"Number of threads: {result['machine']['threads']}. Times are in ms."

    def ratio(c: Result) -> str:
        first, taken = median(c["first"]), median(c)
        return times(first / taken if first and taken else None)

    columns: Columns = [("", "row"), ("", "name"), ("ms", wall), ("first of the row / this", ratio)]
    yield table(flat(result["rows"]), columns)


def recurrent(result: Result) -> Parts:
    """Yield the times of each contender, and its peak memory in MB if it was measured."""
    rows = result["rows"]
    yield "Forward and backward, wall-clock milliseconds:"
    yield table(rows, [("", "row"), *contenders(rows, wall)])
    rows = [row for row in rows if any_peak([row])]
    if rows:
        yield "Peak memory in MB:"
        yield table(rows, [("", "row"), *contenders(rows, partial(peak, unit=1e6))])


def neurons(result: Result) -> Parts:
    """Yield device times against the roofline, and wall-clock times of rows bound by the host."""

    def name(c: Result) -> str:
        kind = c["neuron"] if c["training"] else f"{c['neuron']}, forward without gradients"
        return kind + c["name"].removeprefix(OURS)

    def fastest(row: Result) -> str:
        rivals = (c for c in row["contenders"] if c["name"].startswith("SpikingJelly"))
        found = [median(c, "device_ms") for c in rivals]
        return number(min(filter(None, found), default=None))

    size = ("neurons", lambda row: f"{row['N']:,}")
    host = [row for row in result["rows"] if row["group"] in HOST_GROUPS]
    ours = [c for c in flat(result["rows"])
            if c["group"] not in HOST_GROUPS and c["name"].startswith(OURS)]  # fmt: skip
    if ours:
        yield table(ours, [
            ("forward and backward", name), *keys("T"), size, *keys("dtype"),
            ("ms", device), ("roofline", share), ("SpikingJelly", fastest),
        ])  # fmt: skip
    if host:
        yield "Wall-clock milliseconds, including the host:"
        yield table(host, [*keys("T"), size, *keys("dtype"), *contenders(host, wall)])


def block(result: Result) -> Parts:
    rows = result["rows"]
    yield table(rows, [
        ("T × B × C × H × W", lambda row: " × ".join(map(str, row["shape"]))),
        *keys("dtype", "layout"),
        ("one block, ms", lambda row: device(by_name(row)[OURS])),
        ("roofline", lambda row: share(by_name(row)[OURS])),
        *contenders(rows, device, (RECOMPUTED, SEPARATE, RIVAL)),
    ])  # fmt: skip


def first_call(result: Result) -> Parts:
    yield table(result["rows"], [
        *keys("backend"),
        ("", lambda row: row.get("reason") or FIRST_CALLS[row["neuron"]]),
        ("cold, s", lambda row: spreads(row, "cold")),
        ("warm, s", lambda row: spreads(row, "warm")),
    ])  # fmt: skip


# Networks


def networks(result: Result) -> Parts:
    """Yield a table of times per kind of step, and one of memory in training."""
    for kind, rows in grouped(result["rows"], "steps").items():
        ways = list(dict.fromkeys(c["way"] for c in flat(rows)))
        yield f"A whole {kind} step, wall-clock milliseconds, {' / '.join(ways)}:"
        yield _by_way(rows, ways, wall)
        if kind == "training" and any_peak(rows):
            yield f"Memory of a training step in MiB, {' / '.join(WAYS)}:"
            yield _by_way(rows, WAYS, partial(peak, unit=2**20))
    notes = {c["network"]: c["note"] for c in flat(result["rows"]) if "note" in c}
    for name, note in notes.items():
        yield f"{name}: {note}."


def _by_way(rows: list[Result], ways: Sequence[str], show: Callable[[Result], str]) -> str:
    """Return a line for each workload and dtype, and a column for each network."""

    def cell(row: Result, name: str) -> str:
        found = [c for c in row["contenders"] if c["network"] == name and c["way"] in ways]
        shown = [show(c) if c["status"] == "ok" else "–" for c in found]
        return " / ".join(shown) if set(shown) - {"–"} else "–"

    names = dict.fromkeys(c["network"] for c in flat(rows) if c["status"] == "ok")
    columns = [(name, partial(cell, name=name)) for name in names]
    return table(rows, [*keys("workload", "dtype"), *columns])


def recorded_steps(result: Result) -> Parts:
    """Yield the training steps of the first network: a line for each way to run them."""
    rows = next(iter(grouped(result["rows"], "workload").values()))
    names = [f"{OURS}, eager", f"{OURS}, fused, eager", f"{OURS}, fused, sf.graph_step"]
    yield (
        f"A training step of {rows[0]['model']}, T = {rows[0]['T']}, batches of "
        f"{rows[0]['batch']}, wall-clock milliseconds:"
    )
    lines = [{"": name, **{r["dtype"]: wall(by_name(r)[name]) for r in rows}} for name in names]
    yield table(lines, keys(*lines[0]))


def converted(result: Result) -> Parts:
    """Yield a line for each step of a network before and after conversion, and what was checked."""

    def ratio(row: Result, ways: Sequence[str]) -> str:
        before, after = (median(by_name(row).get(way, {})) for way in ways)
        return times(before / after if before and after else None)

    def memory(row: Result) -> str:
        return " / ".join(peak(by_name(row).get(way, {}), 2**20) for way in BEFORE_AFTER[:2])

    rows = result["rows"]
    eager, recorded = BEFORE_AFTER[:2], BEFORE_AFTER[2:]
    heads = ("original, ms", "converted, ms", "original as a graph, ms", "converted as a graph, ms")
    cells = [(head, cell) for head, (_, cell) in
             zip(heads, contenders(rows, wall, BEFORE_AFTER), strict=True)]  # fmt: skip
    yield table(rows, [
        *keys("network"), ("step", "steps"), *keys("dtype"),
        *cells[:2], ("ratio", partial(ratio, ways=eager)),
        *cells[2:], ("ratio", partial(ratio, ways=recorded)),
        ("MiB, original / converted", memory),
    ])  # fmt: skip
    notes, used = {}, {}
    for row in rows:
        check, name = row["float64"], row["network"]
        notes[name] = (
            f"- {name}: T = {row['T']}, batches of {row['batch']}, {row['layout']}. In float64, "
            f"all {check['outputs']:,} outputs of neurons for two samples are equal; rates are "
            f"{number(min(check['rates']))} to {number(max(check['rates']))}"
        ) + (f". {row['fusion'].capitalize()}." if "fusion" in row else ".")
        used.setdefault(row["note"], {})[f"{name} in {row['dtype']}"] = None
    yield "\n".join(notes.values())
    yield "\n".join(f"- {note}: {'; '.join(where)}." for note, where in used.items())
    reasons = {
        f"- {c['network']}, {c['steps']} in {c['dtype']}, {c['name']}: {c['reason']}."
        for c in flat(rows)
        if c["status"] != "ok"
    }
    if reasons:
        yield "\n".join(sorted(reasons))


# Several processes


def ddp(result: Result) -> Parts:
    def memory(row: Result) -> str:
        return " / ".join(amount(row.get(f"{k}_bytes"), 2**20) for k in ("alone", "together"))

    yield f"{result['settings']['workload']}, {result['settings']['dtype']}:"
    yield table(result["rows"], [
        ("step", lambda row: f"{row.get('network', OURS)}, {row['way']}"),
        ("GPUs", "processes"),
        ("one alone, ms", lambda row: spreads(row, "alone_ms")),
        ("all, ms", lambda row: spreads(row, "together_ms")),
        ("images a second", lambda row: number(row.get("images_per_second"))),
        ("throughput of one", lambda row: times(row.get("throughput"))),
        ("MiB, alone / each", memory),
    ])  # fmt: skip


def time_sharding(result: Result) -> Parts:
    """Yield a line for each layer, network and layout, and the longest sequence."""

    def name(row: Result) -> str:
        layer = row["what"] == "layer"
        return f"{row['N']:,} neurons" if layer else "Spiking-ResNet18"

    def predicted(row: Result, key: str) -> str:
        return times(row.get(key) if row["way"] == "CUDA graph" else None)

    def passing(row: Result) -> str:
        return f"{row.get('chunks', '–')}" + ("" if row.get("speculate", True) else ", waiting")

    parts = grouped(result["rows"], "what")
    long = parts.get("long", [])
    yield table([row for row in result["rows"] if row not in long], [
        ("", lambda row: f"{name(row)}, {row['way']}"),
        ("T", lambda row: f"{row['T']:,}"),
        ("data × time", lambda row: f"{row['data']} × {row['time']}"),
        ("statistics", lambda row: row.get("statistics", "–") if row["time"] > 1 else "–"),
        ("ms", lambda row: spreads(row, "ms") if "ms" in row else row["status"]),
        ("speed-up", lambda row: times(row.get("speedup"))),
        ("by the plan", partial(predicted, key="predicted")),
        ("by Eq. 5", partial(predicted, key="by_paper")),
        ("microbatches", passing),
        ("memory of one's", lambda row: percent(row.get("memory_of_one"))),
    ])  # fmt: skip
    for row in long:
        alone, several = ("fits" if row[k] else "does not fit" for k in ("fits_one", "fits"))
        yield f"T = {row['T']:,} {alone} on one GPU, and {several} on {row['time']}."


def event_scaling(result: Result) -> Parts:
    def value(row: Result, key: str) -> str:
        return f"{row[key]:,}" if key in row else "–"

    settings = result["settings"]
    yield (
        f"Layers of {settings['width']:,} neurons of which {100 * settings['rate']:g}% fire, "
        f"T = {settings['T']}, batch {settings['batch']}:"
    )
    yield table([row | row.get("contenders", [row])[0] for row in result["rows"]], [
        ("", "what"), *keys("ranks"),
        *((key, partial(value, key=key)) for key in ("neurons", "parameters")),
        ("step, ms", lambda row: wall(row) if "wall_ms" in row else row["status"]),
        ("samples/s", lambda row: number(row.get("samples_per_s"))),
        ("efficiency", lambda row: percent(row.get("efficiency"))),
    ])  # fmt: skip


# Events


def events(result: Result) -> Parts:
    """Yield samples a second by network and case, the verification, and streaming."""
    rows, shown = result["rows"], (DENSE, DENSE + REPLAY, EVENTS, LISTS, PRODUCTS)

    def speed(row: Result, name: str) -> str:
        return number(row["samples_per_s"].get(name))

    yield "Samples a second, whole training steps:"
    yield table(rows, [
        *keys("case"),
        ("neurons", lambda row: f"{row['neurons']:,}"),
        ("activity", lambda row: f"{100 * row['rate']:g}%"),
        *((n, partial(speed, name=n)) for n in shown
          if any(n in row["samples_per_s"] for row in rows)),
        ("events over dense", lambda row: times(row["times_dense"].get(EVENTS), 1)),
    ])  # fmt: skip
    checks = [row["checks"][EVENTS] for row in rows if EVENTS in row["checks"]]
    sites, flips = (sum(check[key] for check in checks) for key in ("sites", "flips"))
    error = max((e for check in checks for e in check["errors"].values()), default=0.0)
    yield (
        f"Of {sites:,} spikes on events, {flips} differ from those in float64 for the same "
        f"inputs, and no gradient differs by more than {error:.1g} of its norm."
    )
    if "streaming" in result:
        row = result["streaming"]
        found = [f"{c['name']} {number(1e3 * c['wall_ms']['median'])}"
                 for c in row["contenders"] if c["status"] == "ok"]  # fmt: skip
        size = f"{row['neurons']:,} neurons of which {row['rate']:.2%} fire"
        yield f"One time step of one sample, {size}, microseconds: {', '.join(found)}."


# Training


def _last(rows: list[Result]) -> str:
    """Return the accuracy of each seed after its last epoch."""
    accuracies = {row["seed"]: row["accuracy"] for row in rows}
    return ", ".join(percent(value, 1) for value in accuracies.values())


def spoken_digits(result: Result) -> Parts:
    """Yield a line for each network: the last accuracy of every seed, and its speed."""
    settings, lines = result["settings"], []
    for name, rows in grouped(result["rows"], "name").items():
        later = [row for row in rows if row["epoch"] > 1] or rows  # the first one compiles
        speed, seconds = (
            statistics.median(row[key] for row in later) for key in ("examples_per_s", "seconds")
        )
        lines.append({"": name, "accuracy after the last epoch, by seed": _last(rows),
                      "seconds an epoch": number(seconds), "examples/s": amount(speed)})  # fmt: skip
    yield (
        f"{settings['data']}, a random fifth held out; hidden layers of "
        f"{' and '.join(map(str, settings['hidden']))}, "
        f"{settings['epochs']} epochs, batches of {settings['batch']}, {settings['dtype']}:"
    )
    yield table(lines, keys(*lines[0]))


def accuracy(result: Result) -> Parts:
    """Yield a line for each network: its last accuracies and speeds, and the times of a step."""
    settings, lines, profiles = result["settings"], [], result["settings"]["profile"]
    steps = grouped(result["rows"], "T")
    for name, rows in grouped(result["rows"], "name").items():
        seeds = grouped(rows, "seed")
        seconds = statistics.median(sum(r["seconds"] for r in one) for one in seeds.values())
        profile = profiles.get(f"{name}, seed {next(iter(seeds))}", {"ms": {}})["ms"]
        lines.append({
            "": name, "test accuracy, by seed": _last(rows), "seconds": number(seconds),
            # The first epoch of each number of steps compiles and records.
            **{f"images/s, T = {T}": amount([r["images_per_s"] for r in rows if r["T"] == T][-1])
               for T in steps},
            **{part: number(profile.get(part)) for part in next(iter(profiles.values()))["ms"]},
        })  # fmt: skip
    early = f", {settings['early']} of them with one step" if settings["early"] else ""
    yield (
        f"{settings['data']}, {settings['model']}, T = {settings['T']}, {settings['epochs']} "
        f"epochs{early}, batches of {settings['batch']}. The parts of a step, and evaluation, are "
        "in ms per batch:"
    )
    yield table(lines, keys(*lines[0]))


def papers(results: Results, root: Path) -> str:
    """A row per recipe, the paper's figures beside ours, and where ours were measured."""
    rows = {result["settings"]["recipe"]: result["rows"] for _, result in results}

    def ours(recipe: str, key: str, show: Callable[[float], str]) -> str:
        return ", ".join(show(row[key]) for row in rows.get(recipe, ())) or "–"

    lines = [
        {"recipe": f"`{recipe}`", "paper": "–" if printed is None else f"{printed:.2f}%",
         "accuracy": ours(recipe, "test_accuracy", partial(percent, digits=2)),
         "theirs": number(paper_seconds), "seconds": ours(recipe, "training_seconds", number)}
        for recipe, (printed, paper_seconds) in PAPERS.items()
    ]  # fmt: skip
    origins = []
    for path, result in results:
        links = [link.removeprefix("!") for link in picture(path, root, "Curve")]
        text = ". ".join([origin(result), *links])
        origins.append(f"- `{result['settings']['recipe']}`: {text}.")
    columns: Columns = [
        ("recipe", "recipe"), ("paper's accuracy", "paper"), ("ours", "accuracy"),
        ("paper's training seconds", "theirs"), ("ours", "seconds"),
    ]  # fmt: skip
    return "\n\n".join([table(lines, columns), "\n".join(origins)]).rstrip()


BENCH = "make bench"
TORCHRUN = "torchrun --nproc_per_node {} -m benchmarks.{}"
SCRIPT = "python -m benchmarks.{}"
# By region: the results, what shows them, and the command that measures.
REGIONS: dict[str, tuple[str, Callable[[Results, Path], str], str]] = {
    "time-steps": (
        "timestep_scaling", each(time_steps, "time over the number of time steps"), BENCH
    ),
    "neurons": ("neurons", each(neurons), BENCH),
    "networks": ("networks*", each(networks), BENCH),
    "recorded-steps": ("networks", each(recorded_steps), BENCH),
    "convert": ("convert", each(converted), SCRIPT.format("convert")),
    "block": ("block", each(block), BENCH),
    "recurrent": ("recurrent", each(recurrent), SCRIPT.format("recurrent")),
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
    "papers": ("reproduce_*", papers, SCRIPT.format("reproduce RECIPE")),
    "claims": ("*", claims, BENCH),
}  # fmt: skip


if __name__ == "__main__":
    main()
