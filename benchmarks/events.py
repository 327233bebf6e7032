"""Training steps of perceptrons on events, against dense ones: over activity and size.

    python -m benchmarks.events                     all cases
    python -m benchmarks.events --cases shd 47k     some of them
    python -m benchmarks.events --streaming         one time step of one sample, too

`event_networks` has the networks, `event_check` their verification. Besides the layers' own choice
between lists of events and dense products, each of the two is measured alone. On a GPU the dense
network also runs as a CUDA graph, because small networks are bound by the host. The environment
variable OMP_WAIT_POLICY, which matters on a CPU, is recorded with the result.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import cpu, event_check, event_streaming, plots, record, runner
from benchmarks.event_networks import (
    CASES,
    DENSE,
    EVENTS,
    LISTS,
    PRODUCTS,
    QUICK,
    REPLAY,
    Case,
    EventTask,
)
from benchmarks.runner import Contender, Timing, measure

# Larger networks have gigabytes of weights and moments, so fewer contenders.
LARGE = 20_000


@dataclass(frozen=True)
class EventRow:
    name: str
    case: Case
    rate: float

    @property
    def title(self) -> str:
        return f"{self.name}, activity {self.rate:.1%}"


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("events", __doc__, rounds=7)
    parser.add_argument("--cases", nargs="*", choices=CASES, metavar="CASE",
                        help=f"of {', '.join(CASES)} (all)")  # fmt: skip
    parser.add_argument("--rates", nargs="+", type=float, help="other activities")
    parser.add_argument("--streaming", action="store_true", help="one step of one sample, too")
    args = runner.parse(parser, argv)
    if args.cases is None:
        args.cases = ["shd"] if args.quick else list(CASES)
    device = torch.device(args.device)
    reused = device.type == "cpu" and cpu.reuse_memory()
    settings = {"rounds": args.rounds, "memory": "reused" if reused else "default"}
    settings["wait_policy"] = os.environ.get("OMP_WAIT_POLICY", "default")
    cases = {name: QUICK if args.quick else CASES[name] for name in args.cases}
    rows = (
        EventRow(name, case, rate)
        for name, case in cases.items()
        for rate in args.rates or case.rates
    )
    timing = replace(Timing.of(args), turn_ms=0.0)
    path = runner.run_rows(args, rows, partial(measure_row, timing, device), settings)
    result = record.read(path)
    if args.streaming:
        case = QUICK if args.quick else CASES[event_streaming.CASE]
        result["streaming"] = event_streaming.measure_case(case, timing, device)
        record.write(path.parent, result)
    plots.crossover(result, path.with_suffix(".png"))
    return path


def measure_row(timing: Timing, device: torch.device, row: EventRow) -> dict[str, Any]:
    case, task = row.case, EventTask(row.case, row.rate, device)
    checks: dict[str, dict[str, Any]] = {}

    def verify(contender: Contender, result: event_check.Step) -> None:
        name = contender.name
        checks[name] = event_check.verify(task, name.removesuffix(REPLAY), result)

    contenders = [task.contender(name) for name in names_of(case, device)]
    found = measure(contenders, verify, timing)
    times = {c["name"]: c["wall_ms"]["median"] for c in found["contenders"] if "wall_ms" in c}
    return {
        "case": row.name,
        "T": case.num_steps,
        "batch": case.batch,
        "neurons": sum(case.hidden),
        "layers": len(case.hidden),
        "parameters": sum(p.numel() for p in task.initial.parameters()),
        "rate": row.rate,
        "input_rate": round(task.events.rate, 6),
        "layer_rates": [round(r, 6) for r in task.rates],
        "samples_per_s": {n: round(1e3 * case.batch / t, 1) for n, t in times.items()},
        "times_dense": {n: round(times[DENSE] / t, 3) for n, t in times.items() if DENSE in times},
        "load_average": record.machine(device)["load_average"],
        "checks": checks,
    } | found


def names_of(case: Case, device: torch.device) -> list[str]:
    names = [DENSE, EVENTS]
    if sum(case.hidden) <= LARGE:
        names += [LISTS, PRODUCTS]
    return names + ([DENSE + REPLAY] if device.type == "cuda" else [])


if __name__ == "__main__":
    main()
