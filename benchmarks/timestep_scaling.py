"""Time and memory of one LIF layer, forward and backward, over the number of time steps.

The figure is Fig. 5 of "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion", on
one layer of 1,000,000 neurons:

    python -m benchmarks.timestep_scaling

SpikingJelly takes part where it is installed. The roofline is the time in which the machine
copies the bytes that must move: x and grad_y read, y and grad_x written, x read again.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import layer, lif, plots, record
from benchmarks.layer import DTYPES
from benchmarks.runner import Clock, Copy, Settings, clock_for, first_line, measure

STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
COPY_BYTES = 1 << 31  # read plus written; on a GPU many times its cache

# What the project has set itself, for this many neurons on one H200.
BAR_NEURONS = 1_000_000
TIME_BAR, MEMORY_BAR, SHORT_BAR_MS = 1.0, 0.55, 0.12
LONG_STEPS, SHORT_STEPS = (32, 128), 4


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.timestep_scaling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--T", type=int, nargs="+", default=list(STEPS), help="time steps")
    parser.add_argument("--N", type=int, default=1_000_000, help="neurons")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager-up-to", type=int, default=64, help="largest T of the eager loop")
    parser.add_argument("--compile-up-to", type=int, help="largest T of torch.compile (32)")
    parser.add_argument(
        "--compile-seconds", type=float, default=40.0, help="to spend on torch.compile in all"
    )
    parser.add_argument("--rounds", type=int, help="turns of each contender (11)")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: few rounds, no compiling")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (3 if args.quick else 11)
    if args.compile_up_to is None:
        args.compile_up_to = 0 if args.quick else 32
    if min(*args.T, args.N, args.rounds) < 1:
        parser.error("--T, --N and --rounds must be at least 1")
    return args


@dataclass(frozen=True)
class Plan:
    """What all rows of a run share."""

    N: int
    device: torch.device
    clock: Clock
    copy: Copy
    eager_up_to: int
    turns: Settings


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device = torch.device(args.device)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "quick", "device")}
    settings |= {"decay": lif.DECAY, "threshold": lif.THRESHOLD, "surrogate": "sigmoid, width 4"}
    result = record.document("timestep_scaling", device, args.quick, settings)
    plan = Plan(
        args.N,
        device,
        clock_for(device),
        layer.large_copy(1 << 20 if args.quick else COPY_BYTES, device),
        args.eager_up_to,
        Settings(args.rounds, slot_ms=0.5 if args.quick else 25.0),
    )
    result["rows"] = []
    started = time.perf_counter()
    for name in args.dtype:
        seconds = args.compile_seconds / len(args.dtype)
        compiler = lif.Compiler(args.compile_up_to, seconds)
        for T in args.T:
            try:
                row = measure_one(plan, compiler, T, DTYPES[name])
            except torch.OutOfMemoryError as error:
                print(f"T={T} {name}: left out, {first_line(error)}", flush=True)
                continue
            result["rows"].append(row)
            print(f"[{time.perf_counter() - started:.0f} s] {progress(row)}", flush=True)
    judged = device.type == "cuda" and args.N == BAR_NEURONS
    result["bars"] = bars(result["rows"]) if judged else []
    record.print_bars(result["bars"])
    path = record.write(record.folder(args.out, args.quick), result)
    drawn = plots.timestep_scaling(result, path.with_suffix(".png"))
    print(f"wrote {path}, {drawn or 'no plot: matplotlib is not installed'}")
    return path


def measure_one(plan: Plan, compiler: lif.Compiler, T: int, dtype: torch.dtype) -> dict[str, Any]:
    inputs = layer.Inputs((T, 1, plan.N), dtype, plan.device)
    truth = lif.truth(inputs)
    row = measure(
        [
            lif.ours(inputs),
            *lif.rivals(inputs),
            lif.eager(inputs, plan.eager_up_to),
            compiler.contender(inputs),
        ],
        [plan.copy],
        truth.verify,
        plan.clock,
        layer.bytes_to_move(T * plan.N, dtype),
        plan.turns,
        inputs.prepare,
    )
    about = {"T": T, "N": plan.N, "dtype": str(dtype).removeprefix("torch.")}
    about["verified_neurons"] = truth.num_neurons
    sizes = {"input_bytes": inputs.num_bytes, "input_sets": len(inputs.sets)}
    if plan.device.type == "cuda":
        del inputs, truth
        torch.cuda.empty_cache()  # the next row has other sizes
    return about | sizes | row


def progress(row: dict[str, Any]) -> str:
    lines = [f"T={row['T']} {row['dtype']}, copy {row['copies'][0]['gb_per_s']:.0f} GB/s"]
    for c in row["contenders"]:
        if c["status"] != "ok":
            lines.append(f"{c['name']}: {c['status']}, {c['reason']}")
            continue
        text = f"{c['name']}: {c['wall_ms']['median']:.4f} ms"
        if "device_ms" in c:
            text += f", device {c['device_ms']['median']:.4f} ms"
        text += f", {max(c['fraction'].values()):.0%} of the roofline"
        if "peak_bytes" in c:
            text += f", {c['peak_bytes'] / 1e6:.1f} MB at the peak"
            text += f" (after forward {c['after_forward_bytes'] / 1e6:.1f})"
        lines.append(text)
    return "\n    ".join(lines)


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's own bars, each with what was measured; none where a side is missing."""
    found = []
    for row in rows:
        right = {c["name"]: c for c in row["contenders"] if c["status"] == "ok"}
        ours = right.get(layer.OURS)
        where = f"T={row['T']}, {row['dtype']}"
        if ours is None:
            continue
        if row["T"] == SHORT_STEPS:
            found.append(_at_most(f"{where}: wall ms", ours["wall_ms"]["median"], SHORT_BAR_MS))
        others = [right[name] for name in lif.RIVALS if name in right]
        if row["T"] not in LONG_STEPS or not others:
            continue
        best = min(others, key=lambda c: c["wall_ms"]["median"])
        for kind, words in (("wall_ms", "wall time"), ("device_ms", "device time")):
            if kind in ours:
                ratio = ours[kind]["median"] / best[kind]["median"]
                found.append(_at_most(f"{where}: {words} over {best['name']}'s", ratio, TIME_BAR))
        if "peak_bytes" in ours:
            size = row["input_bytes"]
            for base, words in ((0, "beyond the inputs"), (size, "inputs included")):
                ratio = (ours["peak_bytes"] + base) / (best["peak_bytes"] + base)
                words = f"{where}: peak memory over {best['name']}'s, {words}"
                found.append(_at_most(words, ratio, MEMORY_BAR))
    return found


def _at_most(what: str, measured: float, limit: float) -> dict[str, Any]:
    return record.bar(what, measured, limit, at_least=False)


if __name__ == "__main__":
    main()
