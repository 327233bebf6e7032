"""Whole training steps of perceptrons on events, against dense ones: over activity and size.

    python -m benchmarks.events                     all cases that this machine is for
    python -m benchmarks.events --cases shd 47k     some of them
    python -m benchmarks.events --loop              the compiled loop over steps too
    python -m benchmarks.events --no-graphs         on a GPU: no replays of CUDA graphs
    python -m benchmarks.events --streaming         one time step of one sample too

OMP_WAIT_POLICY, under which threads wait awake or asleep, is noted with the results.

`event_networks` has the networks and `event_check` says what a right step is. The bars compare
networks with one method, Adam on all weights; RowAdam, which is another, has times of its own. Each
case also measures lists and dense products of the layers on events alone, between which the layers
choose by themselves. On a GPU the dense network and the loop run as CUDA graphs too: small networks
are bound by the host. The bar there is for the fastest of ours against the loop as it is compiled;
what the loop gains from a graph is shown beside it.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import cpu_neuron, event_check, event_streaming, plots, record
from benchmarks.event_networks import (
    CASES,
    DENSE,
    EVENTS,
    GRAPH,
    LAZY,
    LISTS,
    LOOP,
    PRODUCTS,
    Work,
)
from benchmarks.runner import Contender, Settings, clock_for, measure

# The layers' own choice may take so much longer than the better of the two.
CHOICE = 1.05
# With one method, Adam on all weights.
OURS = (EVENTS, DENSE, DENSE + GRAPH)
# Contenders of networks with more neurons are fewer: each has gigabytes of weights and moments.
LARGE = 20_000


def verify(work: Work, contender: Contender, result: tuple[Tensor, list[Tensor]]) -> dict[str, Any]:
    """How far the step is from float64.

    Raises:
        AssertionError: it is wrong.
    """
    again, found = (
        event_check.check_loop(work, DENSE)
        if contender.name.removesuffix(GRAPH) == LOOP
        else event_check.check(work, contender.name)
    )
    event_check.same(result, again)
    found.judge()
    return found.about()


def measure_one(
    name: str, rate: float, names: list[str], device: torch.device, rounds: int
) -> dict[str, Any]:
    case = CASES[name]
    work = Work(case, rate, device)
    checks: dict[str, dict[str, Any]] = {}

    def verified(contender: Contender, result: tuple[Tensor, list[Tensor]]) -> None:
        checks[contender.name] = verify(work, contender, result)

    settings = Settings(rounds, 0.0, 3)
    contenders = work.contenders(names)
    found = measure(contenders, [], verified, clock_for(device), 0, settings)
    times = {c["name"]: c["wall_ms"]["median"] for c in found["contenders"] if "wall_ms" in c}
    row = {
        "case": name,
        "activity": case.activity,
        "T": case.num_steps,
        "batch": case.batch,
        "neurons": sum(case.hidden),
        "layers": len(case.hidden),
        "parameters": sum(p.numel() for p in work.initial.parameters()),
        "rate": rate,
        "input_rate": round(work.events.rate, 6),
        "layer_rates": [round(r, 6) for r in work.rates],
        "samples_per_s": {n: round(1e3 * case.batch / t, 1) for n, t in times.items()},
        "times_dense": {n: round(times[DENSE] / t, 3) for n, t in times.items() if DENSE in times},
        "load_average": record.machine(device)["load_average"],
        "checks": checks,
    }
    return row | found


def bars(rows: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        case, ratios = CASES[row["case"]], row["times_dense"]
        where = f"{row['case']}, activity {row['rate']:.1%}"
        for rate, limit in case.bars:
            if device.type == "cpu" and rate == row["rate"]:
                what = f"{where}: times faster than the dense network"
                found.append(record.bar(what, ratios.get(EVENTS), limit))
        if device.type == "cuda" and case.loop_bar is not None and ratios.get(LOOP):
            ours = max(ratios.get(n, 0.0) for n in OURS) / ratios[LOOP]
            what = f"{where}: times faster, our best, than the compiled loop over steps, no graph"
            found.append(record.bar(what, ours, case.loop_bar))
        if all(n in ratios for n in (EVENTS, LISTS, PRODUCTS)):
            longer = max(ratios[LISTS], ratios[PRODUCTS]) / ratios[EVENTS]
            what = f"{where}: time of the layers' own choice over the better one's"
            found.append(record.bar(what, longer, CHOICE, at_least=False))
    return found


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.events", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--rates", nargs="+", type=float, help="in place of those of the cases")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--loop", action="store_true", help="the compiled loop over steps too")
    parser.add_argument("--streaming", action="store_true", help="a step of one sample too")
    parser.add_argument("--no-graphs", action="store_true", help="no replays of CUDA graphs")
    parser.add_argument("--no-choice", action="store_true", help="only the layers' own choice")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: its result is kept apart")
    return parser.parse_args(argv)


def contenders(args: argparse.Namespace, name: str) -> list[str]:
    names = [DENSE, EVENTS]
    if sum(CASES[name].hidden) <= LARGE:
        names += [LAZY, *([] if args.no_choice else [LISTS, PRODUCTS]), *[LOOP] * args.loop]
    if torch.device(args.device).type == "cuda" and not args.no_graphs:
        names += [n + GRAPH for n in (DENSE, EVENTS, LOOP) if n in names]
    return names


def show(row: dict[str, Any]) -> None:
    for c in row["contenders"]:
        told = c["status"] if "reason" not in c else f"{c['status']}: {c['reason']}"
        if "wall_ms" in c:
            told = f"{c['wall_ms']['median']:.2f} ms"
            if c["name"] in row["times_dense"]:
                told += f", {row['times_dense'][c['name']]:.2f} times dense"
        print(f"{row['case']}, {row['rate']:.1%}, {c['name']}: {told}", flush=True)


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device = torch.device(args.device)
    reused = device.type == "cpu" and cpu_neuron.reuse_memory()
    settings = {"rounds": args.rounds, "memory": "reused" if reused else "as it is"}
    settings["wait_policy"] = os.environ.get("OMP_WAIT_POLICY", "default")
    result = record.document("events", device, args.quick, settings)
    print(f"load average {result['machine']['load_average']} before")
    result["rows"] = []
    for name in args.cases:
        for rate in args.rates or CASES[name].rates:
            row = measure_one(name, rate, contenders(args, name), device, args.rounds)
            result["rows"].append(row)
            show(row)
            gc.collect()
    result["bars"] = bars(result["rows"], device)
    if args.streaming:
        result["streaming"] = event_streaming.measure_all(device, args.rounds)
        result["bars"] += event_streaming.bars(result["streaming"], device)
    record.print_bars(result["bars"])
    path = record.write(record.folder(args.out, args.quick), result)
    plots.crossover(result, path.with_suffix(".png"))
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
