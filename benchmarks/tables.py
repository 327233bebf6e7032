"""The tables in README.md, from benchmarks/results.

python -m benchmarks.tables            rewrite README.md
python -m benchmarks.tables --check    fail if README.md differs from the results
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import (
    bptt_figures,
    bptt_tables,
    convergence,
    event_tables,
    layer,
    record,
    reproduce,
)
from benchmarks.block import AGAIN, RIVAL, TWO
from benchmarks.text import bars_line, device, markdown, number, origin

README = record.ROOT / "README.md"
NOTHING = "Not measured yet: run `{}`."
BENCH = "make bench"
MEMORY_STEPS = (32, 128)
HOST_GROUPS = ("short", "host")
CALLED = {"own": "a neuron of one's own, first", "LIF": "LIF, second"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if outdated")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    args = parser.parse_args(argv)
    before = args.readme.read_text()
    after = filled(before, args.results, args.readme.parent)
    if before == after:
        print(f"{args.readme.name} is up to date")
    elif args.check:
        parser.exit(1, f"{args.readme.name} differs from {args.results.name}: run "
                       "python -m benchmarks.tables\n")  # fmt: skip
    else:
        args.readme.write_text(after)
        print(f"{args.readme.name} rewritten")


def filled(text: str, results: Path, root: Path) -> str:
    """`text` with every generated region written anew.

    Raises:
        ValueError: a region that no table is made for.
    """

    def region(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in REGIONS:
            raise ValueError(f"no table is called {name!r}: there are {', '.join(REGIONS)}")
        benchmark, table, command = REGIONS[name]
        found = list(_results(results, benchmark))
        body = NOTHING.format(command)
        if found or name == "papers":  # whose figures are there before ours
            body = table(found, root)
        return f"<!-- generated:{name} begin -->\n{body}\n<!-- generated:{name} end -->"

    pattern = r"<!-- generated:(?P<name>\S+) begin -->.*?<!-- generated:(?P=name) end -->"
    return re.sub(pattern, region, text, flags=re.S)


def _results(folder: Path, benchmark: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Results of a benchmark (a pattern), one per machine; trial runs are none."""
    for path in sorted(folder.glob(f"{benchmark}-*.json")):
        result = record.read(path)
        if not result["quick"]:
            yield path, result


def time_steps(result: dict[str, Any], path: Path, root: Path) -> str:
    """Per dtype a table of times over T; one of memory where it is known; and the plot."""
    parts = [origin(result)]
    dtypes = list(dict.fromkeys(row["dtype"] for row in result["rows"]))
    for dtype in dtypes:
        rows = [row for row in result["rows"] if row["dtype"] == dtype]
        parts.append(f"{dtype}, milliseconds (wall-clock, the host's part included):")
        parts.append(_time_table(rows))
        parts += _wrong(rows)
    memory = _memory_table(result["rows"])
    if memory:
        parts += ["Peak memory in MB beyond the inputs `x` and `grad_y`:", memory]
    plot = path.with_suffix(".png")
    if plot.exists():
        link = plot.resolve().relative_to(root.resolve()).as_posix()
        parts.append(f"![time over the number of time steps]({link})")
    parts += bars_line(result)
    return "\n\n".join(parts)


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """Contenders that were measured at least once."""
    found = dict.fromkeys(
        c["name"] for row in rows for c in row["contenders"] if c["status"] in ("ok", "wrong")
    )
    return list(found)


def _by_name(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in row["contenders"]}


def _time_table(rows: list[dict[str, Any]]) -> str:
    names = _names(rows)
    lines = []
    for row in rows:
        cells = [_time_cell(_by_name(row).get(name)) for name in names]
        floor = row["num_bytes"] / row["copies"][0]["gb_per_s"] / 1e6
        lines.append([str(row["T"]), *cells, number(floor)])
    return markdown(["T", *names, "roofline"], lines)


def _wrong(rows: list[dict[str, Any]]) -> list[str]:
    """Who gave a wrong result, and what was wrong in the longest sequence."""
    found: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: row["T"]):
        for c in row["contenders"]:
            if c["status"] == "wrong":
                found[c["name"]] = f"{c['name']}, T = {row['T']}: {c['reason']}."
    if not found:
        return []
    return ["Not timed, because it computes something else. " + " ".join(found.values())]


def _time_cell(contender: dict[str, Any] | None) -> str:
    if contender is None or contender["status"] in ("unavailable", "failed"):
        return "–"
    if contender["status"] == "wrong":
        return "wrong result"
    return number(contender["wall_ms"]["median"])


def _memory_table(rows: list[dict[str, Any]]) -> str:
    rows = [row for row in rows if row["T"] in MEMORY_STEPS]
    names = [
        name
        for name in _names(rows)
        if any("peak_bytes" in _by_name(row).get(name, {}) for row in rows)
    ]
    lines = []
    for row in rows:
        found = [_by_name(row).get(name, {}).get("peak_bytes") for name in names]
        cells = ["–" if peak is None else f"{peak / 1e6:,.0f}" for peak in found]
        lines.append([str(row["T"]), row["dtype"], *cells, f"{row['input_bytes'] / 1e6:,.0f}"])
    return markdown(["T", "dtype", *names, "the inputs"], lines) if names else ""


def cpu(result: dict[str, Any], path: Path, root: Path) -> str:
    """Per way to get memory, the times, against the eager loop and against a copy."""
    parts = [origin(result)]
    first = result["rows"][0]
    parts.append(
        f'{first["N"]:,} neurons, T = {first["T"]}, {first["dtype"]}. "Reused": the C library '
        'keeps freed memory; "fresh": it asks the system anew at each call. The copy moves as '
        "many bytes as forward and backward must, into memory of the same kind."
    )
    lines = []
    for row in result["rows"]:
        found, copy = _by_name(row), row["copies"][0]
        eager = found.get(layer.EAGER, {}).get("wall_ms", {}).get("median")
        for name, c in found.items():
            if c["status"] != "ok":
                continue
            taken = c["wall_ms"]["median"]
            faster = f"{eager / taken:.1f}×" if eager else "–"
            fraction = f"{c['fraction']['wall_ms']:.0%}"
            lines.append([row["memory"], name, number(taken), faster, fraction])
        lines.append([row["memory"], "the copy", number(copy["wall_ms"]["median"]), "", "100%"])
    parts.append(markdown(["memory", "", "ms", "eager loop / this", "copy / this"], lines))
    parts += bars_line(result)
    return "\n\n".join(parts)


def neurons(result: dict[str, Any], path: Path, root: Path) -> str:
    """Device times against the roofline; wall-clock times where only the host counts."""
    rows = result["rows"]
    parts = [origin(result)]
    long = [row for row in rows if row["group"] not in HOST_GROUPS]
    if long:
        head = ["forward and backward", "T", "neurons", "dtype", "ms", "roofline", "SpikingJelly"]
        parts.append(markdown(head, [line for row in long for line in _device_lines(row)]))
    short = [row for row in rows if row["group"] in HOST_GROUPS]
    if short:
        names = _names(short)
        lines = [
            [str(row["T"]), f"{row['N']:,}", row["dtype"]]
            + [_time_cell(_by_name(row).get(name)) for name in names]
            for row in short
        ]
        parts.append("Milliseconds by the clock, the host's part included:")
        parts.append(markdown(["T", "neurons", "dtype", *names], lines))
    left_out = [f"{one['row']} ({one['reason']})" for one in result["left_out"]]
    if left_out:
        parts.append(f"Not measured: {'; '.join(left_out)}.")
    parts += bars_line(result)
    return "\n\n".join(parts)


def _device_lines(row: dict[str, Any]) -> list[list[str]]:
    """A line for each way in which spikefuse ran, and the fastest of SpikingJelly's."""
    name = row["neuron"] if row["training"] else f"{row['neuron']}, forward without gradients"
    about = [str(row["T"]), f"{row['N']:,}", row["dtype"]]
    rivals = [
        c["device_ms"]["median"]
        for c in row["contenders"]
        if c["name"].startswith("SpikingJelly") and c["status"] == "ok"
    ]
    rival = number(min(rivals)) if rivals else "–"
    lines = []
    for c in row["contenders"]:
        if not c["name"].startswith(layer.OURS):
            continue
        found = [c["status"], "–"]
        if c["status"] == "ok":
            found = [number(c["device_ms"]["median"]), f"{c['fraction']['device_ms']:.0%}"]
        lines.append([name + c["name"].removeprefix(layer.OURS), *about, *found, rival])
    return lines


def block(result: dict[str, Any], path: Path, root: Path) -> str:
    """Device times, ours against the roofline; what each kernel takes where it is known."""
    names = (layer.OURS, AGAIN, TWO, RIVAL)
    lines, said = [], []
    for row in result["rows"]:
        found = _by_name(row)
        right = {n: found[n] for n in names if n in found and found[n]["status"] == "ok"}
        cells = [number(right[n]["device_ms"]["median"]) if n in right else "–" for n in names]
        ours = right.get(layer.OURS)
        share = "–" if ours is None else f"{ours['fraction']['device_ms']:.0%}"
        shape = " × ".join(str(size) for size in row["shape"])
        lines.append([shape, row["dtype"], row["layout"], cells[0], share, *cells[1:]])
        parts = [f"{k['part'] or k['kernel']} {number(k['us'])}" for k in row["kernels"]]
        if parts:
            said.append(f"{row['row']}, microseconds by kernel: {', '.join(parts)}.")
    head = ["T × B × C × H × W", "dtype", "layout", "one block, ms", "roofline", AGAIN, TWO, RIVAL]
    return "\n\n".join([origin(result), markdown(head, lines), *said, *bars_line(result)])


def networks(result: dict[str, Any], path: Path, root: Path) -> str:
    """Per kind of step a table of times, and one of memory in training."""
    parts = [origin(result)]
    for kind in dict.fromkeys(row["steps"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["steps"] == kind]
        parts.append(f"A whole {kind} step, milliseconds by the clock, eager / CUDA graph:")
        parts.append(_network_table(rows, lambda c: number(c["wall_ms"]["median"])))
        if kind == "training" and any("peak_bytes" in c for r in rows for c in r["contenders"]):
            parts.append("Memory of a training step in MiB, eager / CUDA graph:")
            parts.append(_network_table(rows, lambda c: f"{c['peak_bytes'] / 2**20:,.0f}"))
    notes = {
        c["network"]: c["note"] for r in result["rows"] for c in r["contenders"] if "note" in c
    }
    parts += [f"{name}: {note}." for name, note in notes.items()]
    left_out = [f"{one['row']} ({one['reason']})" for one in result["left_out"]]
    if left_out:
        parts.append(f"Not measured: {'; '.join(left_out)}.")
    parts += bars_line(result)
    return "\n\n".join(parts)


def _network_table(rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], str]) -> str:
    """A line for each workload and dtype; a column for each network that ran at all."""
    contenders = [c for row in rows for c in row["contenders"]]
    names = list(dict.fromkeys(c["network"] for c in contenders if c["status"] == "ok"))
    lines = []
    for row in rows:
        cells = []
        for name in names:
            found = [c for c in row["contenders"] if c["network"] == name]
            ran = any(c["status"] == "ok" for c in found)
            shown = [value(c) if c["status"] == "ok" else "–" for c in found]
            cells.append(" / ".join(shown) if ran else "–")
        lines.append([row["workload"], row["dtype"], *cells])
    return markdown(["workload", "dtype", *names], lines)


def ddp(result: dict[str, Any], path: Path, root: Path) -> str:
    """A line for each network and way of running."""
    lines = []
    for row in result["rows"]:
        found = [row["status"], "–", "–", "–", "–"]
        if row["status"] == "ok":
            times = [number(row[key]["median"]) for key in ("alone_ms", "together_ms")]
            peaks = [row.get(key) for key in ("alone_bytes", "together_bytes")]
            peak = " / ".join("–" if b is None else f"{b / 2**20:,.0f}" for b in peaks)
            found = [*times, number(row["images_per_second"]), f"{row['throughput']:.2f}×", peak]
        name = f"{row.get('network', layer.OURS)}, {row['way']}"
        lines.append([name, str(row["processes"]), *found])
    head = ["step", "GPUs", "one alone, ms", "all, ms", "images a second", "throughput of one"]
    table = markdown([*head, "MiB, alone / each"], lines)
    said = f"{result['settings']['workload']}, {result['settings']['dtype']}:"
    return "\n\n".join([origin(result), said, table, *bars_line(result)])


def time_sharding(result: dict[str, Any], path: Path, root: Path) -> str:
    """The picture, a line for each layer, network and layout, and the longest sequence."""
    lines, notes = [], []
    for row in result["rows"]:
        if row["what"] == "long":
            alone = "fits" if row["fits_one"] else "does not fit"
            several = "fits" if row["fits"] else "does not fit"
            notes.append(f"T = {row['T']:,} {alone} on one GPU, and {several} on {row['time']}.")
            continue
        net = f"{row['N']:,} neurons" if row["what"] == "layer" else "Spiking-ResNet18"
        about = [f"{net}, {row['way']}" if "way" in row else net,
                 f"{row['T']:,}", f"{row['data']} × {row['time']}",
                 row.get("statistics", "–") if row["time"] > 1 else "–"]  # fmt: skip
        if "ms" not in row and "predicted" not in row:
            lines.append([*about, row["status"], *["–"] * 5])
            continue
        speedups = [f"{row[key]:.2f}×" if row.get(key) else "–"
                    for key in ("speedup", "predicted", "by_paper")]  # fmt: skip
        memory = f"{100 * row['memory_of_one']:.0f}%" if row.get("memory_of_one") else "–"
        taken = number(row["ms"]["median"]) if "ms" in row else row["status"]
        waits = "" if row.get("speculate", True) else ", waiting"
        lines.append([*about, taken, *speedups, f"{row['chunks']}{waits}", memory])
    head = ["", "T", "data × time", "statistics", "ms", "speed-up", "by the plan", "by Eq. 5"]
    table = markdown([*head, "chunks", "memory of one's"], lines)
    picture, drawn = path.with_suffix(".png"), []
    if picture.exists():
        link = picture.resolve().relative_to(root.resolve()).as_posix()
        drawn = [f"![speed-up over the number of time steps]({link})"]
    return "\n\n".join([origin(result), *drawn, table, *notes, *bars_line(result)])


def first_call(result: dict[str, Any], path: Path, root: Path) -> str:
    """Seconds by backend and neuron, cold and warm."""
    lines = []
    for row in result["rows"]:
        if row["status"] == "ok":
            times = [number(row[state]["median"]) for state in ("cold", "warm")]
            lines.append([row["backend"], CALLED[row["neuron"]], *times])
        else:
            lines.append([row["backend"], row["reason"], "–", "–"])
    table = markdown(["backend", "", "cold, s", "warm, s"], lines)
    return "\n\n".join([origin(result, both=True), table, *bars_line(result)])


def training(results: Results, root: Path) -> str:
    """One table of all data sets and machines, a row each; where each was measured below it."""
    lines, origins = [], []
    for _, result in results:
        rows, config = result["rows"], result["settings"]["config"]
        lines.append(
            [
                config["dataset"],
                f"{config['model']}, {config['neuron']}, T = {config['num_steps']}, "
                f"{config['epochs']} epochs",
                device(result),
                ", ".join(str(row["seed"]) for row in rows),
                ", ".join(number(row["seconds"]) for row in rows),
                ", ".join(f"{100 * row['test_accuracy']:.2f}%" for row in rows),
            ]
        )
        said = " ".join([f"{origin(result)}.", *bars_line(result)])
        origins.append(f"- {config['dataset']}: {said}")
    head = ["dataset", "network", "device", "seeds", "seconds", "accuracy"]
    return "\n\n".join([markdown(head, lines), "\n".join(origins)])


def papers(results: Results, root: Path) -> str:
    """A row per recipe, the paper's figures beside ours; where ours were measured below."""
    lines = []
    by_recipe = {result["settings"]["recipe"]: result for _, result in results}
    for recipe, paper in reproduce.PAPER.items():
        accuracy = seconds = "–"
        if recipe in by_recipe:
            rows = by_recipe[recipe]["rows"]
            accuracy = ", ".join(f"{100 * row['test_accuracy']:.2f}%" for row in rows)
            seconds = ", ".join(number(row["training_seconds"]) for row in rows)
        theirs = "–" if paper.seconds is None else number(paper.seconds)
        printed = "–" if paper.accuracy is None else f"{paper.accuracy:.2f}%"
        lines.append([f"`{recipe}`", printed, accuracy, theirs, seconds])
    head = ["recipe", "paper's accuracy", "ours", "paper's training seconds", "ours"]
    origins = []
    for path, result in results:
        said = [f"{origin(result)}.", *bars_line(result)]
        plot = path.with_suffix(".png")
        if plot.exists():
            link = Path(os.path.relpath(plot.resolve(), root.resolve())).as_posix()
            said.append(f"[Curve]({link}).")
        origins.append(f"- `{result['settings']['recipe']}`: {' '.join(said)}")
    return "\n\n".join([markdown(head, lines), "\n".join(origins)]).rstrip()


def converging(result: dict[str, Any], path: Path, root: Path) -> str:
    """A line for each run: the loss in every part of the steps, what came out, and how fast."""
    settings = result["settings"]
    config = settings["config"]
    said = f"{config['dataset']}, {config['model']}, T = {config['num_steps']}, batches of "
    said += f"{config['batch_size']}, {settings['steps']} steps of the optimizer:"
    lines = [
        [
            f"{row['name']}, {row['dtype']}, seed {row['seed']}",
            *(f"{mean:.4f}" for mean in row["parts"]),
            f"{100 * row['accuracy']:.2f}%",
            number(row["seconds"]),
        ]
        for row in result["rows"]
    ]
    fifths = ["loss, first fifth", "second", "third", "fourth", "last"]
    table = markdown(["", *fifths, "accuracy held out", "seconds"], lines)
    return "\n\n".join([origin(result), said, table, *bars_line(result)])


Results = list[tuple[Path, dict[str, Any]]]


def each(table: Callable[[dict[str, Any], Path, Path], str]) -> Callable[[Results, Path], str]:
    """A region that shows its results one after the other."""

    def tables(results: Results, root: Path) -> str:
        return "\n\n".join(table(result, path, root) for path, result in results)

    return tables


# By region: its results, what is made of them, and the command that measures.
REGIONS: dict[str, tuple[str, Callable[[Results, Path], str], str]] = {
    "time-steps": ("timestep_scaling", each(time_steps), BENCH),
    "neurons": ("neurons", each(neurons), BENCH),
    "networks": ("networks*", each(networks), BENCH),
    "block": ("block", each(block), BENCH),
    "bptt-figures": ("bptt_figures", each(bptt_tables.tables), bptt_figures.COMMAND),
    "ddp": ("ddp*", each(ddp), "torchrun --nproc_per_node 2 -m benchmarks.ddp"),
    "time-sharding": (
        "time_sharding",
        each(time_sharding),
        "torchrun --nproc_per_node 4 -m benchmarks.time_sharding",
    ),
    "events": ("events", each(event_tables.events), BENCH),
    "event-scaling": (
        "event_scaling",
        each(event_tables.scaling),
        "python -m benchmarks.event_scaling",
    ),
    "event-accuracy": (
        "event_accuracy",
        each(event_tables.accuracy),
        "python -m benchmarks.event_accuracy",
    ),
    "first-call": ("first_call", each(first_call), BENCH),
    "cpu": ("cpu_neuron", each(cpu), BENCH),
    "training": ("training_*", training, "python -m benchmarks.training digits"),
    "papers": ("reproduce_*", papers, reproduce.COMMAND),
    "convergence": ("convergence", each(converging), convergence.COMMAND),
}


if __name__ == "__main__":
    main()
