"""Write the tables of docs from benchmarks/results.

python -m benchmarks.tables                              rewrite docs/benchmarks.md
python -m benchmarks.tables --page docs/reproduce.md   rewrite another page
python -m benchmarks.tables --check                      fail if the page differs from the results
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import convergence, record
from benchmarks import training as training_script
from benchmarks.block import RECOMPUTED, RIVAL, SEPARATE
from benchmarks.event_networks import DENSE, EVENTS, LISTS, PRODUCTS, REPLAY
from benchmarks.layers import LOOP, OURS
from benchmarks.text import (
    Result,
    by_name,
    device,
    left_out,
    markdown,
    measured_names,
    mebibytes,
    median,
    number,
    origin,
    picture,
    time_cell,
    times,
)

Results = list[tuple[Path, Result]]

PAGE = record.ROOT / "docs" / "benchmarks.md"
MEMORY_STEPS = (32, 128)
HOST_GROUPS = ("short", "host")
FIRST_CALLS = {"own": "user-defined neuron, first", "LIF": "LIF, second"}
# Names in older results.
RENAMED = {"spikefuse, states computed again": RECOMPUTED}
NOT_SHOWN = ("bare autograd.Function",)


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
    after = filled(before, args.results, args.page.parent)
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
        return f"<!-- generated:{name} begin -->\n{body}\n<!-- generated:{name} end -->"

    pattern = r"<!-- generated:(?P<name>\S+) begin -->.*?<!-- generated:(?P=name) end -->"
    return re.sub(pattern, region, text, flags=re.S)


def read_results(folder: Path, benchmark: str) -> Results:
    """Read the results of a benchmark (a pattern), one per machine, without quick runs."""
    found = [(path, record.read(path)) for path in sorted(folder.glob(f"{benchmark}-*.json"))]
    for _, result in found:
        for row in result["rows"]:
            contenders = row.get("contenders", [])
            for c in contenders:
                c["name"] = RENAMED.get(c.get("name"), c.get("name"))
            if contenders:
                row["contenders"] = [c for c in contenders if c["name"] not in NOT_SHOWN]
    return [(path, result) for path, result in found if not result["quick"]]


# Layers


def time_steps(result: Result, path: Path, root: Path) -> str:
    """A table of times over T per dtype, one of memory, and the plot."""
    parts = [origin(result)]
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["dtype"] == dtype]
        names = measured_names(rows)
        lines = []
        for row in rows:
            floor = row["num_bytes"] / row["copies"][0]["gb_per_s"] / 1e6
            cells = [time_cell(by_name(row).get(name)) for name in names]
            lines.append([str(row["T"]), *cells, number(floor)])
        parts.append(f"{dtype}, milliseconds (wall-clock, including the host):")
        parts.append(markdown(["T", *names, "roofline"], lines))
        wrong = {
            c["name"]: f"{c['name']}, T = {row['T']}: {c['reason']}."
            for row in sorted(rows, key=lambda row: row["T"])
            for c in row["contenders"]
            if c["status"] == "wrong"
        }
        if wrong:
            parts.append("Not timed, because of wrong results. " + " ".join(wrong.values()))
    rows = [row for row in result["rows"] if row["T"] in MEMORY_STEPS]
    names = [n for n in measured_names(rows)
             if any("peak_bytes" in by_name(row).get(n, {}) for row in rows)]  # fmt: skip
    if names:
        lines = []
        for row in rows:
            found = [by_name(row).get(name, {}).get("peak_bytes") for name in names]
            cells = ["–" if peak is None else f"{peak / 1e6:,.0f}" for peak in found]
            lines.append([str(row["T"]), row["dtype"], *cells, f"{row['input_bytes'] / 1e6:,.0f}"])
        parts.append("Peak memory in MB beyond the inputs `x` and `grad_y`:")
        parts.append(markdown(["T", "dtype", *names, "the inputs"], lines))
    return "\n\n".join([*parts, *picture(path, root, "time over the number of time steps")])


def cpu(result: Result, path: Path, root: Path) -> str:
    """Times by memory setting, against the eager loop and a copy."""
    first, lines = result["rows"][0], []
    text = (
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
                fraction = f"{c['fraction']['wall_ms']:.0%}"
                lines.append([row["memory"], name, number(taken), faster, fraction])
        copied = number(row["copies"][0]["wall_ms"]["median"])
        lines.append([row["memory"], "the copy", copied, "", "100%"])
    head = ["memory", "", "ms", "eager loop / this", "copy / this"]
    return "\n\n".join([origin(result), text, markdown(head, lines), *left_out(result)])


def neurons(result: Result, path: Path, root: Path) -> str:
    """Device times against the roofline; wall-clock times of rows bound by the host."""
    parts, rows = [origin(result)], result["rows"]
    long = [row for row in rows if row["group"] not in HOST_GROUPS]
    short = [row for row in rows if row["group"] in HOST_GROUPS]
    if long:
        head = ["forward and backward", "T", "neurons", "dtype", "ms", "roofline", "SpikingJelly"]
        parts.append(markdown(head, [line for row in long for line in _device_lines(row)]))
    if short:
        names = measured_names(short)
        lines = [
            [str(row["T"]), f"{row['N']:,}", row["dtype"]]
            + [time_cell(by_name(row).get(name)) for name in names]
            for row in short
        ]
        parts.append("Wall-clock milliseconds, including the host:")
        parts.append(markdown(["T", "neurons", "dtype", *names], lines))
    return "\n\n".join([*parts, *left_out(result)])


def _device_lines(row: Result) -> list[list[str]]:
    """A line for each way in which spikefuse ran, and SpikingJelly's fastest."""
    name = row["neuron"] if row["training"] else f"{row['neuron']}, forward without gradients"
    about = [str(row["T"]), f"{row['N']:,}", row["dtype"]]
    rivals = [c for c in row["contenders"] if c["name"].startswith("SpikingJelly")]
    fastest = min(filter(None, (median(c, "device_ms") for c in rivals)), default=None)
    lines = []
    for c in row["contenders"]:
        if c["name"].startswith(OURS):
            found = [c["status"], "–"]
            if c["status"] == "ok":
                found = [number(median(c, "device_ms")), f"{c['fraction']['device_ms']:.0%}"]
            title = name + c["name"].removeprefix(OURS)
            lines.append([title, *about, *found, number(fastest)])
    return lines


def block(result: Result, path: Path, root: Path) -> str:
    """Device times, ours against the roofline."""
    names, lines = (OURS, RECOMPUTED, SEPARATE, RIVAL), []
    for row in result["rows"]:
        found = by_name(row)
        cells = [number(median(found.get(name), "device_ms")) for name in names]
        share = found[OURS].get("fraction")
        share = f"{share['device_ms']:.0%}" if share else "–"
        shape = " × ".join(str(size) for size in row["shape"])
        lines.append([shape, row["dtype"], row["layout"], cells[0], share, *cells[1:]])
    head = ["T × B × C × H × W", "dtype", "layout", "one block, ms", "roofline", *names[1:]]
    return "\n\n".join([origin(result), markdown(head, lines), *left_out(result)])


def first_call(result: Result, path: Path, root: Path) -> str:
    lines = []
    for row in result["rows"]:
        if row["status"] == "ok":
            seconds = [number(row[state]["median"]) for state in ("cold", "warm")]
            lines.append([row["backend"], FIRST_CALLS[row["neuron"]], *seconds])
        else:
            lines.append([row["backend"], row["reason"], "–", "–"])
    table = markdown(["backend", "", "cold, s", "warm, s"], lines)
    return "\n\n".join([origin(result, both_backends=True), table])


# Networks


def networks(result: Result, path: Path, root: Path) -> str:
    """A table of times per kind of step, and one of memory in training."""
    parts = [origin(result)]
    for kind in dict.fromkeys(row["steps"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["steps"] == kind]
        parts.append(f"A whole {kind} step, wall-clock milliseconds, eager / CUDA graph:")
        parts.append(_network_table(rows, lambda c: number(median(c))))
        if kind == "training" and any("peak_bytes" in c for r in rows for c in r["contenders"]):
            parts.append("Memory of a training step in MiB, eager / CUDA graph:")
            parts.append(_network_table(rows, lambda c: mebibytes(c["peak_bytes"])))
    notes = {
        c["network"]: c["note"] for r in result["rows"] for c in r["contenders"] if "note" in c
    }
    parts += [f"{name}: {note}." for name, note in notes.items()]
    return "\n\n".join([*parts, *left_out(result)])


def _network_table(rows: list[Result], value: Callable[[Result], str]) -> str:
    """A line for each workload and dtype, a column for each network."""
    contenders = [c for row in rows for c in row["contenders"]]
    names = list(dict.fromkeys(c["network"] for c in contenders if c["status"] == "ok"))
    lines = []
    for row in rows:
        cells = []
        for name in names:
            found = [c for c in row["contenders"] if c["network"] == name]
            shown = [value(c) if c["status"] == "ok" else "–" for c in found]
            cells.append(" / ".join(shown) if set(shown) - {"–"} else "–")
        lines.append([row["workload"], row["dtype"], *cells])
    return markdown(["workload", "dtype", *names], lines)


# Several processes


def ddp(result: Result, path: Path, root: Path) -> str:
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
    text = f"{result['settings']['workload']}, {result['settings']['dtype']}:"
    return "\n\n".join([origin(result), text, markdown([*head, "MiB, alone / each"], lines)])


def time_sharding(result: Result, path: Path, root: Path) -> str:
    """The plot, a line for each layer, network and layout, and the longest sequence."""
    lines, notes = [], []
    for row in result["rows"]:
        if row["what"] == "long":
            alone = "fits" if row["fits_one"] else "does not fit"
            several = "fits" if row["fits"] else "does not fit"
            notes.append(f"T = {row['T']:,} {alone} on one GPU, and {several} on {row['time']}.")
            continue
        if row["status"] == "not measured":  # predictions in older results
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
        memory = f"{100 * row['memory_of_one']:.0f}%" if row.get("memory_of_one") else "–"
        passing = f"{row['chunks']}" + ("" if row.get("speculate", True) else ", waiting")
        speedup = times(row.get("speedup"))
        lines.append([*about, number(row["ms"]["median"]), speedup, *predicted, passing, memory])
    head = ["", "T", "data × time", "statistics", "ms", "speed-up", "by the plan", "by Eq. 5"]
    table = markdown([*head, "microbatches", "memory of one's"], lines)
    drawn = picture(path, root, "speed-up over the number of time steps")
    return "\n\n".join([origin(result), *drawn, table, *notes])


def event_scaling(result: Result, path: Path, root: Path) -> str:
    lines = []
    for row in result["rows"]:
        about = [row["what"], str(row["ranks"])]
        (run,) = row.get("contenders", [row])
        if "wall_ms" not in run:
            lines.append([*about, run["status"], *["–"] * 4])
            continue
        efficiency = f"{100 * row['efficiency']:.0f}%" if "efficiency" in row else "–"
        sizes = [f"{row[key]:,}" for key in ("neurons", "parameters")]
        speed = [number(median(run)), number(row["samples_per_s"])]
        lines.append([*about, *sizes, *speed, efficiency])
    head = ["", "ranks", "neurons", "parameters", "step, ms", "samples/s", "efficiency"]
    settings = result["settings"]
    text = (
        f"Layers of {settings['width']:,} neurons of which {100 * settings['rate']:g}% fire, "
        f"T = {settings['T']}, batch {settings['batch']}:"
    )
    drawn = picture(path, root, "efficiency over ranks")
    return "\n\n".join([origin(result), text, markdown(head, lines), *drawn])


# Events


def events(result: Result, path: Path, root: Path) -> str:
    """Samples a second by network and case, the verification, streaming, and the plot."""
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
    table = markdown(["case", "neurons", "activity", *names, "events over dense"], lines)
    parts = [origin(result), "Samples a second, whole training steps:", table]
    parts.append(
        f"Of {spikes:,} spikes on events, {flips} differ from those in float64 for the same "
        f"inputs, and no gradient differs by more than {error:.1g} of its norm."
    )
    if "streaming" in result:
        row = result["streaming"]
        found = [f"{c['name']} {number(1e3 * c['wall_ms']['median'])}"
                 for c in row["contenders"] if c["status"] == "ok"]  # fmt: skip
        about = f"{row['neurons']:,} neurons of which {row['rate']:.2%} fire"
        parts.append(f"One time step of one sample, {about}, microseconds: {', '.join(found)}.")
    return "\n\n".join([*parts, *picture(path, root, "speed over activity"), *left_out(result)])


def event_accuracy(result: Result, path: Path, root: Path) -> str:
    """A line for each network: the best accuracy of every seed, and its epoch."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["name"] == name]
        activity = []
        for row in rows:
            rates = [v for key, v in row["last_epoch"].items() if key.startswith("activity_")]
            activity.append(" and ".join(f"{100 * rate:.0f}%" for rate in rates) or "–")
        accuracy = ", ".join(f"{100 * row['best']:.1f}%" for row in rows)
        epochs = ", ".join(str(row["epochs_to_best"]) for row in rows)
        lines.append([name, accuracy, epochs, ", ".join(activity)])
    settings = result["settings"]
    hidden = " and ".join(str(n) for n in settings["hidden"])
    text = (
        f"{settings['data']}, every fifth recording held out; hidden layers of {hidden}, "
        f"{settings['epochs']} epochs, capacity {settings['capacity']:g}:"
    )
    head = ["", "best accuracy, by seed", "in epoch", "neurons that fire"]
    return "\n\n".join([origin(result), text, markdown(head, lines)])


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
                device(result),
                ", ".join(str(row["seed"]) for row in rows),
                ", ".join(number(row["seconds"]) for row in rows),
                ", ".join(f"{100 * row['test_accuracy']:.2f}%" for row in rows),
            ]
        )
        origins.append(f"- {config['dataset']}: {origin(result)}")
    head = ["dataset", "network", "device", "seeds", "seconds", "accuracy"]
    return "\n\n".join([markdown(head, lines), "\n".join(origins)])


def papers(results: Results, root: Path) -> str:
    """A row per recipe, the paper's figures beside ours, and where ours were measured."""
    by_recipe, lines = {result["settings"]["recipe"]: result for _, result in results}, []
    for recipe, paper in training_script.PAPERS.items():
        rows = by_recipe[recipe]["rows"] if recipe in by_recipe else []
        accuracy = ", ".join(f"{100 * row['test_accuracy']:.2f}%" for row in rows) or "–"
        seconds = ", ".join(number(row["training_seconds"]) for row in rows) or "–"
        printed = "–" if paper.accuracy is None else f"{paper.accuracy:.2f}%"
        lines.append([f"`{recipe}`", printed, accuracy, number(paper.seconds), seconds])
    head = ["recipe", "paper's accuracy", "ours", "paper's training seconds", "ours"]
    origins = []
    for path, result in results:
        links = [link.removeprefix("!") for link in picture(path, root, "Curve")]
        text = ". ".join([origin(result), *links])
        origins.append(f"- `{result['settings']['recipe']}`: {text}.")
    return "\n\n".join([markdown(head, lines), "\n".join(origins)]).rstrip()


def converging(result: Result, path: Path, root: Path) -> str:
    """A line for each run: the loss in every part of the steps, accuracy and seconds."""
    settings = result["settings"]
    config = settings["config"]
    text = f"{config['dataset']}, {config['model']}, T = {config['num_steps']}, batches of "
    text += f"{config['batch_size']}, {settings['steps']} steps of the optimizer:"
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
    return "\n\n".join([origin(result), text, table])


def each(table: Callable[[Result, Path, Path], str]) -> Callable[[Results, Path], str]:
    """Show results one after the other."""

    def tables(results: Results, root: Path) -> str:
        return "\n\n".join(table(result, path, root) for path, result in results)

    return tables


BENCH = "make bench"
FIGURES = "python -m benchmarks.networks --name bptt_figures"
TORCHRUN = "torchrun --nproc_per_node {} -m benchmarks.{}"
# By region: the results, the function that makes its tables, and the command that measures.
REGIONS: dict[str, tuple[str, Callable[[Results, Path], str], str]] = {
    "time-steps": ("timestep_scaling", each(time_steps), BENCH),
    "neurons": ("neurons", each(neurons), BENCH),
    "networks": ("networks*", each(networks), BENCH),
    "block": ("block", each(block), BENCH),
    "bptt-figures": ("bptt_figures", each(networks), FIGURES),
    "ddp": ("ddp*", each(ddp), TORCHRUN.format(2, "ddp")),
    "time-sharding": ("time_sharding", each(time_sharding), TORCHRUN.format(4, "time_sharding")),
    "events": ("events", each(events), BENCH),
    "event-scaling": ("event_scaling", each(event_scaling), "python -m benchmarks.event_scaling"),
    "event-accuracy": (
        "event_accuracy", each(event_accuracy), "python -m benchmarks.event_accuracy"
    ),
    "first-call": ("first_call", each(first_call), BENCH),
    "cpu": ("cpu_neuron", each(cpu), BENCH),
    "training": ("training_*", training, "python -m benchmarks.training digits"),
    "papers": ("reproduce_*", papers, training_script.COMMAND),
    "convergence": ("convergence", each(converging), convergence.COMMAND),
}  # fmt: skip


if __name__ == "__main__":
    main()
