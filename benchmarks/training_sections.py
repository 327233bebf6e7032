"""The tables of benchmarks of several processes, of events, and of training runs."""

from __future__ import annotations

import shlex
import statistics
import textwrap
from pathlib import Path

from benchmarks.events import DENSE, EVENTS, LISTS, PRODUCTS, REPLAY
from benchmarks.from_ann_steps import JELLY
from benchmarks.layers import OURS
from benchmarks.reproduce import PAPERS
from benchmarks.sections import (
    BY_SEED,
    Columns,
    Parts,
    Result,
    Results,
    by_seed,
    grouped,
    keys,
    mebibytes,
    median,
    number,
    origin,
    percent,
    picture,
    table,
    times,
    value,
)

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
        kind = row.get("statistics")
        statistics = f", {kind} statistics" if kind and row["time"] > 1 else ""
        planned = [times(row.get(k)) for k in ("predicted", "by_paper")]
        is_planned = row["way"] == "CUDA graph" and set(planned) != {times(None)}
        lines.append({"ms": row["status"]} | row | {
            "what": f"{net}, T = {row['T']}, {row['way']}{statistics}",
            "mesh": f"{row['data']} × {row['time']}",
            "planned": " / ".join(planned) if is_planned else "–",
            "chunks": f"{row.get('chunks', '–')}{waiting}",
        })  # fmt: skip
    yield table(lines, {
        "": "what", "data × time": "mesh", "ms": "ms", "speed-up": "speedup",
        "by the plan / by Eq. 5": "planned", "microbatches": "chunks",
        "memory of one's": "memory_of_one",
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
        | {"case": f"{row['case']}, {row['neurons']:,} neurons, {100 * row['rate']:g}%"}
        | {"gain": times(row["times_dense"].get(EVENTS), 1)}
        for row in rows
    ]  # fmt: skip
    yield "Samples a second, whole training steps:"
    columns = {"case, size and activity": "case"} | keys(*names)
    yield table(lines, columns | {"events over dense": "gain"})


# Training


def _last(rows: list[Result], epochs: int) -> str:
    """Return the accuracy of each seed after all epochs; if no run has got so far, the last one."""
    finished = [row["accuracy"] for row in rows if row["epoch"] == epochs]
    if finished:
        return by_seed(finished)
    return f"{percent(rows[-1]['accuracy'], 2)} after {rows[-1]['epoch']} epochs"


def _command(script: str, result: Result, *options: str) -> str:
    """Return the command that repeats a training, with the options that its result records."""
    settings = result["settings"]
    given = {o.replace("_", "-"): [settings[o]] for o in ("epochs", *options) if o in settings}
    for option, key in (("names", "name"), ("seeds", "seed")):
        given[option] = list(grouped(result["rows"], key))
    words = [
        f"--{name}" if values[0] is True else f"--{name} {shlex.join(map(str, values))}"
        for name, values in given.items()
        if values[0] is not False
    ]
    return f"Command: `python -m benchmarks.{script} {' '.join(words)}`."


def pretrained(result: Result) -> Parts:
    """Yield the card of each network that comes with spikefuse."""
    lines = [
        {
            "name": f"`{row['row']}`", "licence": row["licence"],
            "accuracy": percent(row["accuracy"], 2), "parameters": row["parameters"], "T": row["T"],
            "rates": ", ".join(percent(rate, 1) for rate in row["rates"]),
            "energy": " / ".join(number(1e6 * row[key]) for key in ("joules", "ann_joules")),
        }
        for row in result["rows"]
    ]  # fmt: skip
    columns = keys("name", "accuracy", "parameters", "T") | {"rates of neurons": "rates"}
    columns |= {"µJ per example / with ReLUs": "energy", "licence of the data": "licence"}
    yield table(lines, columns)
    commands = (f"$ {' '.join(row['command'])}" for row in result["rows"])
    wrapped = [textwrap.wrap(command, 86, break_on_hyphens=False) for command in commands]
    yield "\n".join(("```console", *(" \\\n    ".join(lines) for lines in wrapped), "```"))


def from_ann(result: Result) -> Parts:
    """Yield the accuracy of a ReLU network and of the spiking networks made of it."""
    given = result["settings"]
    yield f"{given['model']} on {given['data']}, {given['epochs']} epochs:"
    columns = {"network": "name", "T": "steps", "accuracy": "right", "seconds": "seconds"}
    lines = [
        row
        | {
            "steps": "–" if row["name"] == "relu" else row["T"],
            "right": percent(row["accuracy"], 2),
        }
        for row in result["rows"]
    ]
    yield table(lines, columns)


def quantize(result: Result) -> Parts:
    """Yield the accuracy of a network of floats, and of its integers."""
    given = result["settings"]
    yield (
        f"`{given['network']}`, weights of {given['weights']} bits, states of {given['states']}, "
        f"{given['finetuning']} epochs of further training:"
    )
    lines = [row | {"accuracy": percent(row["accuracy"], 2)} for row in result["rows"]]
    yield table(lines, {"network": "name", "accuracy": "accuracy", "seconds": "seconds"})
    yield f"Command: `python -m benchmarks.quantize {given['network']}`."


def from_ann_steps(result: Result) -> Parts:
    """Yield a line for each step: the fastest of SpikingJelly's conversion and of ours."""
    lines: list[Result] = []
    used: dict[int, str] = {}
    for row in result["rows"]:
        measured: list[Result] = [c for c in row["contenders"] if "wall_ms" in c]
        sides = [[c for c in measured if c["name"].startswith(name)] for name in (JELLY, OURS)]
        before, after = (min(side, key=median) if side else {} for side in sides)
        line: Result = {"step": row["row"]}
        for name, c in (("before", before), ("after", after)):
            line |= {name: value(c, "wall_ms"), f"{name} by": c.get("name", "–").partition(", ")[2]}
        line["ratio"] = median(before) / median(after) if before and after else None
        line["peaks"] = " / ".join(mebibytes(c.get("peak_bytes")) for c in (before, after))
        lines.append(line)
        check = row["float64"]
        used[row["T"]] = (
            f"T = {row['T']}: all {check['outputs']:,} outputs of neurons for two samples are "
            f"equal in float64; rates are {number(min(check['rates']))} to "
            f"{number(max(check['rates']))}"
        )
    given = result["settings"]
    yield f"{given['model']} for images of 32 × 32, batches of {given['batch']}:"
    yield table(lines, {"step": "step", "SpikingJelly, ms": "before", "by": "before by"}
                | {"spikefuse, ms": "after", "by ": "after by", "ratio": "ratio"}
                | {"MiB, SpikingJelly / spikefuse": "peaks"})  # fmt: skip
    yield f"{'. '.join(used.values())}."


def spoken_digits(result: Result) -> Parts:
    """Yield a line for each network: the last accuracy of every seed, and its speed."""
    settings, lines = result["settings"], []
    for name, rows in grouped(result["rows"], "name").items():
        later = [row for row in rows if row["epoch"] > 1] or rows  # the first one compiles
        speed, seconds = (
            statistics.median(row[key] for row in later) for key in ("examples_per_s", "seconds")
        )
        # A step has 10 ms.
        rates = [100 * row["spikes"] for row in rows if row.get("spikes") is not None]
        lines.append({"name": name, "accuracy": _last(rows, settings["epochs"]), "seconds": seconds,
                      "examples/s": f"{speed:,.0f}", "parameters": rows[0].get("parameters"),
                      "rate": number(rates[-1]) if rates else None})  # fmt: skip
    yield (
        f"{settings['data']}, a random fifth held out; hidden layers of "
        f"{' and '.join(map(str, settings['hidden']))}, "
        f"{settings['epochs']} epochs, batches of {settings['batch']}, {settings['dtype']}:"
    )
    yield table(lines, {"": "name", f"accuracy after the last epoch, {BY_SEED}": "accuracy",
                        "parameters": "parameters", "spikes a second": "rate",
                        "seconds an epoch": "seconds", "examples/s": "examples/s"})  # fmt: skip
    yield _command("spoken_digits", result)


def sequential(result: Result) -> Parts:
    """Yield a line for each network: the last accuracy of every seed, its size, rate and time."""
    settings, lines = result["settings"], []
    for name, rows in grouped(result["rows"], "name").items():
        seeds = list(grouped(rows, "seed").values())
        seeds = [one for one in seeds if len(one) == settings["epochs"]] or seeds
        lines.append({
            "": name, f"test accuracy, {BY_SEED}": _last(rows, settings["epochs"]),
            "parameters": rows[0]["parameters"],
            "spikes per neuron and step": statistics.median(one[-1]["spikes"] for one in seeds),
            "seconds": statistics.median(sum(r["seconds"] for r in one) for one in seeds),
        })  # fmt: skip
    yield (
        f"{settings['data']}, {settings['order']}, T = {settings['T']}, {settings['epochs']} "
        f"epochs, batches of {settings['batch']}:"
    )
    yield table(lines, keys(*lines[0]))
    yield _command("sequential", result, "order")


def accuracy(result: Result) -> Parts:
    """Yield a line for each network: its last accuracies and speeds, and the times of a step."""
    settings, lines, steps = result["settings"], [], grouped(result["rows"], "T")
    profiled: list[Result] = []
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
        })  # fmt: skip
        alone = {"data pipeline alone, images/s": profile.get("augmented_images_per_s")}
        profiled.append({"": name} | alone | {part: profile["ms"].get(part) for part in parts})
    early = f", {settings['early']} of them with one step" if settings["early"] else ""
    yield (
        f"{settings['data']}, {settings['model']}, T = {settings['T']}, {settings['epochs']} "
        f"epochs{early}, batches of {settings['batch']}:"
    )
    yield table(lines, keys(*lines[0]))
    if parts:
        yield (
            "The data pipeline alone reads and augments images. The parts of a step, and "
            "evaluation, are in ms per batch:"
        )
        yield table(profiled, keys(*profiled[0]))
    options = "model", "T", "early", "batch", "lr", "optimizer", "weight_decay", "cutout", "cutmix"
    yield _command("accuracy", result, *options, "trivial_augment")


def papers(results: Results, root: Path) -> str:
    """A row per measured recipe, the paper's figures beside ours, and where ours were measured."""
    rows: dict[str, list[Result]] = {}
    for _, result in results:
        rows.setdefault(result["settings"]["recipe"], []).extend(result["rows"])
    lines, origins, others = [], [], []
    for recipe, (printed, paper_seconds) in PAPERS.items():
        theirs = None if printed is None else f"{printed:.2f}%"
        if recipe not in rows:
            others.append(f"`{recipe}`" + ("" if theirs is None else f" ({theirs})"))
            continue
        found = rows[recipe]
        lines.append({
            "recipe": f"`{recipe}`", "theirs": theirs,
            "accuracy": by_seed([row["test_accuracy"] for row in found]),
            "paper": paper_seconds,
            "seconds": ", ".join(number(row["training_seconds"]) for row in found),
            "minutes": sum(row["seconds"] for row in found) / 60,
        })  # fmt: skip
    for path, result in results:
        links = [link.removeprefix("!") for link in picture(path, root, "Curve")]
        seeds = ", ".join(str(row["seed"]) for row in result["rows"])
        plural = "s" if len(result["rows"]) > 1 else ""
        text = ". ".join([f"{origin(result)}, seed{plural} {seeds}", *links])
        origins.append(f"- `{result['settings']['recipe']}`: {text}.")
    columns: Columns = {"recipe": "recipe", "paper's accuracy": "theirs",
                        f"ours, {BY_SEED}": "accuracy", "paper's training seconds": "paper",
                        "ours": "seconds", "minutes, all seeds": "minutes"}  # fmt: skip
    shown = [table(lines, columns), "\n".join(origins)] if lines else []
    if others:
        shown.append(f"Not measured, with the paper's accuracy: {', '.join(others)}.")
    return "\n\n".join(shown)
