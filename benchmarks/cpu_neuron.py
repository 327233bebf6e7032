"""One LIF layer on a CPU, forward and backward, against the eager loop and against a copy.

    python -m benchmarks.cpu_neuron

Fresh memory costs a CPU about as much as the arithmetic: for large tensors the C library asks
the system for new pages at every allocation, and each page is cleared when it is first touched.
So there are two settings, each for all contenders:

- "reused": the allocator keeps freed memory (glibc's mallopt), as a caching allocator would, and
  the bandwidth is that of a copy into existing memory;
- "fresh": the C library as it is, and the bandwidth is that of a copy that allocates its target.
  What the others have freed goes back to the system before each turn, so that nobody lives on
  the memory of a neighbour.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import layer, lif, record
from benchmarks.runner import Copy, CpuClock, Settings, measure

# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4

EAGER_BAR, RIVAL_BAR, FRACTION_BAR = 20.0, 15.0, 0.7
BAR_STEPS, BAR_NEURONS = 32, 1_000_000


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.cpu_neuron", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--T", type=int, default=BAR_STEPS, help="time steps")
    parser.add_argument("--N", type=int, default=BAR_NEURONS, help="neurons")
    parser.add_argument("--rounds", type=int, help="turns of each contender (7)")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: 3 rounds")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (3 if args.quick else 7)
    if min(args.T, args.N, args.rounds) < 1:
        parser.error("--T, --N and --rounds must be at least 1")
    return args


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device = torch.device("cpu")
    settings = {"T": args.T, "N": args.N, "dtype": "float32", "rounds": args.rounds}
    settings |= {"decay": lif.DECAY, "threshold": lif.THRESHOLD, "surrogate": "sigmoid, width 4"}
    settings["huge_pages"] = huge_pages()
    result = record.document("cpu_neuron", device, args.quick, settings)
    about = result["machine"]
    print(f"{about['cpu']}, {about['cores']} cores, load average {about['load_average']} before")
    inputs = layer.Inputs((args.T, 1, args.N), torch.float32, device)
    truth = lif.truth(inputs)
    # What mallopt sets cannot be taken back, so the other setting comes first.
    result["rows"] = []
    for memory in ("fresh", "reused"):
        if memory == "reused" and not reuse_memory():
            print("this C library has no mallopt: only fresh memory is measured")
            break
        row = measure_one(memory, inputs, truth, args.rounds)
        result["rows"].append(row)
        print(progress(row), flush=True)
    judged = (args.T, args.N) == (BAR_STEPS, BAR_NEURONS)
    result["bars"] = bars(result["rows"]) if judged else []
    record.print_bars(result["bars"])
    path = record.write(record.folder(args.out, args.quick), result)
    print(f"wrote {path}")
    return path


def reuse_memory() -> bool:
    """Let the C library keep what is freed: no separate mappings, nothing handed back."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # A threshold for mappings cannot exceed 32 MiB, so there are to be none at all.
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def give_back() -> None:
    """Hand freed memory back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def huge_pages() -> str:
    """The system's policy for transparent huge pages."""
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        return "unknown"


def copies(memory: str, num_bytes: int) -> list[Copy]:
    """Copies that move as many bytes as a neuron must; the first is the bandwidth."""
    source = torch.rand(num_bytes // 8)
    target = torch.empty_like(source)
    existing = Copy("copy into existing memory", lambda: target.copy_(source), num_bytes)
    allocating = Copy("copy into new memory", source.clone, num_bytes)
    return [existing, allocating] if memory == "reused" else [allocating, existing]


def measure_one(
    memory: str, inputs: layer.Inputs, truth: layer.Truth, rounds: int
) -> dict[str, Any]:
    T, _, N = inputs.like.shape
    num_bytes = layer.bytes_to_move(T * N, torch.float32)
    row = measure(
        [
            lif.ours(inputs),
            lif.eager(inputs, T),
            layer.contender(lif.INDEXING, lif.indexing, inputs),
            *lif.rivals(inputs),
        ],
        copies(memory, num_bytes),
        truth.verify,
        CpuClock(give_back) if memory == "fresh" else CpuClock(),
        num_bytes,
        Settings(rounds, slot_ms=0.0, warmup=2),
        inputs.prepare,
    )
    return {"memory": memory, "T": T, "N": N, "dtype": "float32"} | row


def progress(row: dict[str, Any]) -> str:
    lines = [f"{row['memory']} memory, T={row['T']}, N={row['N']}"]
    lines += [f"{c['name']}: {c['gb_per_s']:.1f} GB/s" for c in row["copies"]]
    for c in row["contenders"]:
        if c["status"] != "ok":
            lines.append(f"{c['name']}: {c['status']}, {c['reason']}")
            continue
        time, faults = c["wall_ms"], c["page_faults"]["median"]
        lines.append(
            f"{c['name']}: {time['median']:.2f} ms ({time['p10']:.2f} to {time['p90']:.2f}), "
            f"{c['fraction']['wall_ms']:.0%} of copy bandwidth, {faults:.0f} page faults"
        )
    return "\n    ".join(lines)


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's own bars, each with what was measured; none where a side is missing."""
    found = []
    for row in rows:
        right = {c["name"]: c for c in row["contenders"] if c["status"] == "ok"}
        if layer.OURS not in right:
            continue
        times = {name: c["wall_ms"]["median"] for name, c in right.items()}
        ours = times[layer.OURS]
        measured = [("of copy bandwidth", right[layer.OURS]["fraction"]["wall_ms"], FRACTION_BAR)]
        if layer.EAGER in times:
            ratio = times[layer.EAGER] / ours
            measured.append(("times faster than the eager loop", ratio, EAGER_BAR))
        rivals = [times[name] for name in lif.RIVALS if name in times]
        if rivals:
            measured.append(("times faster than SpikingJelly", min(rivals) / ours, RIVAL_BAR))
        found += [record.bar(f"{row['memory']} memory: {w}", m, b) for w, m, b in measured]
    return found


if __name__ == "__main__":
    main()
