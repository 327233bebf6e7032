"""One LIF layer on a CPU, forward and backward, against the eager loop and against a copy.

    python -m benchmarks.cpu

Fresh memory costs a CPU about as much as the arithmetic: for large tensors the C library requests
new pages from the system at every allocation, and each page is cleared on first use. Hence two
settings, each for all contenders:

- "reused": the allocator keeps freed memory (glibc's mallopt), as a caching allocator would; the
  bandwidth is that of a copy into existing memory;
- "fresh": the C library's default; the bandwidth is that of a copy that allocates its target.
  Freed memory is returned to the system before each turn.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import layers, runner
from benchmarks.layers import Inputs, LayerInput, LayerTruth
from benchmarks.runner import Copy, CpuClock, Timing, measure

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


@dataclass(frozen=True)
class MemoryRow:
    memory: str

    @property
    def title(self) -> str:
        return f"{self.memory} memory"


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("cpu", __doc__, rounds=7)
    parser.add_argument("--T", type=int, default=32, help="time steps (32)")
    parser.add_argument("--N", type=int, help="neurons (1,000,000)")
    parser.set_defaults(name="cpu_neuron", device="cpu")
    args = runner.parse(parser, argv)
    args.N = args.N or (2000 if args.quick else 1_000_000)
    settings = runner.settings_of(args) | {"dtype": "float32", "huge_pages": huge_pages()}
    inputs = Inputs(LayerInput((args.T, 1, args.N), torch.float32, torch.device("cpu")))
    truth = LayerTruth(layers.lif(), inputs)
    measure_row = partial(measure_memory, args, inputs, truth)
    # The effect of mallopt is permanent, so fresh memory comes first.
    rows = (MemoryRow("fresh"), MemoryRow("reused"))
    return runner.run_rows(args, rows, measure_row, settings)


def measure_memory(
    args: argparse.Namespace, inputs: Inputs, truth: LayerTruth, row: MemoryRow
) -> dict[str, Any]:
    if row.memory == "reused" and not reuse_memory():
        raise OSError("this C library has no mallopt")
    neuron, num_bytes = layers.lif(), inputs.bytes_to_move()
    clock = CpuClock(trim_memory) if row.memory == "fresh" else CpuClock()
    timing = Timing(clock, args.rounds, turn_ms=0.0, warmup=2)
    timing = replace(timing, copies=copies(row.memory, num_bytes))
    contenders = [layers.ours(neuron, inputs), layers.eager_loop(neuron, inputs)]
    contenders += [layers.indexed(inputs), *layers.jelly_lif(inputs)]
    about = {"memory": row.memory, "T": args.T, "N": args.N, "dtype": "float32"}
    return about | measure(contenders, truth.verify, timing, num_bytes, inputs.prepare)


def copies(memory: str, num_bytes: int) -> tuple[Copy, ...]:
    """Return copies of as many bytes as a neuron must move; the first gives the bandwidth."""
    source = torch.rand(num_bytes // 8)
    target = torch.empty_like(source)
    existing = Copy("copy into existing memory", lambda: target.copy_(source), num_bytes)
    allocating = Copy("copy into new memory", source.clone, num_bytes)
    return (existing, allocating) if memory == "reused" else (allocating, existing)


def reuse_memory() -> bool:
    """Let the C library keep freed memory: no separate mappings, no trimming."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # The threshold for mappings is limited to 32 MiB, so mappings are turned off altogether.
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def trim_memory() -> None:
    """Return freed memory to the system, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def huge_pages() -> str:
    """Return the system's policy for transparent huge pages."""
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        return "unknown"


if __name__ == "__main__":
    main()
