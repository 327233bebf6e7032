"""Write the tables of docs from benchmarks/results.

python -m benchmarks.tables                              rewrite docs/benchmarks.md
python -m benchmarks.tables --page README.md             rewrite another page or notebook
python -m benchmarks.tables --check                      fail if the page is outdated
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import record, sections, training_sections
from benchmarks.claims import claims
from benchmarks.overview import overview
from benchmarks.runner import plain_parser
from benchmarks.sections import Parts, Result, Results, origin, picture

PAGE = record.ROOT / "docs" / "benchmarks.md"


def main(argv: list[str] | None = None) -> None:
    parser = plain_parser("benchmarks.tables", __doc__)
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
            if command != BENCH and "Command: " not in body:
                body += f"\n\nCommand: `{command}`."
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


BENCH = "make bench"
TORCHRUN = "torchrun --nproc_per_node {} -m benchmarks.{}"
SCRIPT = "python -m benchmarks.{}"


def online(what: str, options: str = "") -> tuple[str, Callable[[Results, Path], str], str]:
    show = each(sections.online, "memory and time over the number of time steps")
    task = "digits" if what == "shd" else what
    return f"online_{what}", show, SCRIPT.format(f"online {task}{options}")


# By region: the results, what shows them, and the command that measures.
REGIONS: dict[str, tuple[str, Callable[[Results, Path], str], str]] = {
    "time-steps": (
        "timestep_scaling", each(sections.time_steps, "time over the number of time steps"), BENCH
    ),
    "neurons": ("neurons*", each(sections.neurons), BENCH),
    "networks": ("networks*", each(sections.networks), BENCH),
    "latency": ("latency*", each(sections.networks), BENCH),
    "recorded-steps": ("networks", each(sections.recorded_steps), BENCH),
    "convert": ("convert*", each(sections.converted), SCRIPT.format("convert")),
    "block": ("block", each(sections.block), BENCH),
    "recurrent": ("recurrent", each(sections.recurrent), SCRIPT.format("recurrent")),
    "delays": ("delays", each(sections.recurrent), SCRIPT.format("delays")),
    "methods": ("methods*", each(sections.recurrent), BENCH),
    "ddp": ("ddp*", each(training_sections.ddp), TORCHRUN.format(2, "parallel data")),
    "time-sharding": (
        "time_sharding",
        each(training_sections.time_sharding, "speed-up over the number of time steps"),
        TORCHRUN.format(4, "parallel time"),
    ),
    "events": ("events", each(training_sections.events, "speed over activity"), BENCH),
    "event-scaling": (
        "event_scaling",
        each(training_sections.event_scaling, "efficiency over ranks"),
        TORCHRUN.format(4, "events sharded --largest 256500"),
    ),
    "spoken-digits": (
        "spoken_digits*",
        each(training_sections.spoken_digits, "accuracy over seconds"),
        SCRIPT.format("spoken_digits --seeds 0 1 2"),
    ),
    "sequential": (
        "sequential*",
        each(training_sections.sequential, "accuracy over seconds"),
        SCRIPT.format("sequential --names 'binary S4D' PSN --seeds 0 1 2"),
    ),
    "pretrained": (
        "pretrained", each(training_sections.pretrained), SCRIPT.format("pretrained")
    ),
    "from-ann": (
        "from_ann",
        each(training_sections.from_ann),
        SCRIPT.format("from_ann --model resnet18 --epochs 90"),
    ),
    "quantize": (
        "quantize*",
        each(training_sections.quantize),
        SCRIPT.format("quantize fashion-mnist-ms-resnet18"),
    ),
    "from-ann-steps": (
        "from_ann_steps",
        each(training_sections.from_ann_steps),
        SCRIPT.format("from_ann_steps"),
    ),
    "accuracy": (
        "accuracy*",
        each(training_sections.accuracy, "accuracy over seconds"),
        SCRIPT.format("accuracy --early 64 --epochs 96"),
    ),
    "first-call": ("first_call", each(sections.first_call), BENCH),
    "cpu-steps": ("cpu", each(sections.cpu_steps), BENCH),
    "plasticity": ("plasticity", each(sections.cpu_steps), BENCH),
    "online-time": online("time"),
    "online-cosine": online("cosine", " --batch 16"),
    "online-memory": online("memory", " --batch 16 --hidden 128"),
    "online-digits": online("digits", " --seeds 0 1 2 --iterations 200"),
    "online-shd": online("shd", " --data shd --seeds 0 1 2 --iterations 1000 --every 50"),
    "online-cues": online("cues", " --seeds 0 1 2"),
    "gpu-tests": ("gpu_tests", each(sections.gpu_tests), SCRIPT.format("gpu_tests")),
    "papers": ("reproduce_*", training_sections.papers, SCRIPT.format("reproduce RECIPE")),
    "open-neuromorphic": (
        "open_neuromorphic", each(sections.open_neuromorphic), SCRIPT.format("open_neuromorphic")
    ),
    "overview": ("*", overview, BENCH),
    "claims": ("*", claims, BENCH),
}  # fmt: skip


if __name__ == "__main__":
    main()
