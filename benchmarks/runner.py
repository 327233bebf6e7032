"""Verify, then time.

Contenders take turns within one run, so that a machine that speeds up or slows down does so for
all of them. A contender whose result is wrong is not timed. A copy, timed in the same turns, gives
the machine's bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import record

# Written before each timed call on a GPU, so that it starts with a cold L2 cache. It is large
# enough for the host to run ahead of the device meanwhile.
FLUSH_BYTES = 1 << 30
# Untimed calls at the start of a turn on a GPU, and single calls timed by events at its end.
TURN_WARMUP, TURN_SINGLES = 5, 3

EAGER, GRAPH = "eager", "CUDA graph"  # the two ways to run a step


@dataclass
class Contender:
    """One implementation of the measured work.

    Args:
        name: in results and tables.
        run: does the work once and returns what is verified; None if unavailable.
        forward: does only the forward pass and returns its result; for the memory after it.
        unavailable: the reason if `run` is None.
        note: shown below tables.
        held_bytes: memory that stays allocated between runs, such as that of a CUDA graph.
    """

    name: str
    run: Callable[[], Any] | None = None
    forward: Callable[[], Any] | None = None
    unavailable: str = ""
    note: str = ""
    held_bytes: int = 0


@dataclass
class Copy:
    """A copy that moves `num_bytes`, bytes read plus bytes written."""

    name: str
    run: Callable[[], Any]
    num_bytes: int


def bandwidth_copy(num_bytes: int, device: torch.device) -> Copy:
    source = torch.rand(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    return Copy("copy", lambda: target.copy_(source), num_bytes)


class Clock(Protocol):
    """Reads time and memory of a device. `bandwidth_kind` is the kind of time used for copies."""

    bandwidth_kind: str

    def turn(self, run: Callable[[], Any], repetitions: int) -> dict[str, float]:
        """Return milliseconds per repetition by kind of time, and possibly other counts."""
        ...

    def memory(self, contender: Contender) -> dict[str, int]:
        """Return the memory that one run needs, where the device reports it."""
        ...


class CpuClock:
    """Wall-clock time and page faults; `settle` is called before each turn, untimed."""

    bandwidth_kind = "wall_ms"

    def __init__(self, settle: Callable[[], Any] = lambda: None) -> None:
        self.settle = settle

    def turn(self, run: Callable[[], Any], repetitions: int) -> dict[str, float]:
        self.settle()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        wall = (time.perf_counter() - start) * 1e3 / repetitions
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        return {"wall_ms": wall, "page_faults": faults / repetitions}

    def memory(self, contender: Contender) -> dict[str, int]:
        return {}


class GpuClock:
    """Wall-clock time of back-to-back calls, and device time of single calls by CUDA events."""

    bandwidth_kind = "device_ms"

    def __init__(
        self, device: torch.device, warmup: int = TURN_WARMUP, singles: int = TURN_SINGLES
    ) -> None:
        if device.index is not None:
            torch.cuda.set_device(device)  # events belong to the current device
        self.device, self.warmup, self.singles = device, warmup, singles
        self.flush: torch.Tensor | None = None

    def turn(self, run: Callable[[], Any], repetitions: int) -> dict[str, float]:
        if self.flush is None:
            self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        for _ in range(self.warmup):  # the other contenders have evicted the host's caches
            run()
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        torch.cuda.synchronize(self.device)
        wall = (time.perf_counter() - start) * 1e3 / repetitions
        pairs = []
        for _ in range(min(repetitions, self.singles)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize(self.device)
        device = statistics.median(begin.elapsed_time(end) for begin, end in pairs)
        return {"wall_ms": wall, "device_ms": device}

    def memory(self, contender: Contender) -> dict[str, int]:
        """Return bytes beyond those allocated before the run: at the peak, and after forward."""
        assert contender.run is not None
        gc.collect()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        contender.run()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        found = {"peak_bytes": peak + contender.held_bytes}
        if contender.forward is not None:
            before = torch.cuda.memory_allocated(self.device)
            result = contender.forward()
            torch.cuda.synchronize(self.device)
            found["after_forward_bytes"] = torch.cuda.memory_allocated(self.device) - before
            del result
        return found


@dataclass(frozen=True)
class Timing:
    """How to time: `rounds` turns of about `turn_ms` each, in turn with the copies."""

    clock: Clock
    rounds: int = 11
    turn_ms: float = 5.0
    warmup: int = 3
    max_repetitions: int = 200
    copies: tuple[Copy, ...] = ()

    @classmethod
    def of(cls, args: argparse.Namespace, copy_bytes: int = 0, whole_steps: bool = False) -> Timing:
        """Make the usual one from the options of `make_parser`.

        Args:
            copy_bytes: size of the copy that gives the bandwidth; 0 for none.
            whole_steps: long runs, which need little warm-up.
        """
        device = torch.device(args.device)
        clock: Clock = CpuClock()
        if device.type == "cuda":
            clock = GpuClock(device, 1, 1) if whole_steps else GpuClock(device)
        size = min(copy_bytes, 1 << 20) if args.quick else copy_bytes
        copies = (bandwidth_copy(size, device),) if size else ()
        turn_ms, warmup = (0.5 if args.quick else 25.0), (2 if whole_steps else 3)
        return cls(clock, args.rounds, turn_ms, warmup, copies=copies)


def measure(
    contenders: Sequence[Contender],
    verify: Callable[[Contender, Any], None],
    timing: Timing,
    num_bytes: int = 0,
    prepare: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Verify the contenders, then time the correct ones in turns.

    Args:
        verify: raises AssertionError with the reason if a contender's result is wrong.
        num_bytes: bytes that the work has to move, for the roofline.
        prepare: called before each verified run.

    Returns:
        A dict with "contenders" and "copies", both lists of dicts. Times are dicts with median,
        p10, p90 and the rounds. "fraction" is the time in which the first copy moves `num_bytes`
        over the contender's time.
    """
    if not __debug__:
        raise RuntimeError("verification needs assert statements: run Python without -O")
    results = [_verified(c, verify, timing.clock, prepare) for c in contenders]
    correct = [c for c, r in zip(contenders, results, strict=True) if r["status"] == "ok"]
    times = _interleaved([*timing.copies, *correct], timing)
    copies: list[dict[str, Any]] = []
    for copy in timing.copies:
        rate = copy.num_bytes / times[copy.name][timing.clock.bandwidth_kind]["median"] / 1e6
        about = {"name": copy.name, "num_bytes": copy.num_bytes, "gb_per_s": float(f"{rate:.6g}")}
        copies.append(about | times[copy.name])
    for result in results:
        if result["status"] != "ok":
            continue
        result |= times[result["name"]]
        if copies:
            floor = num_bytes / copies[0]["gb_per_s"] / 1e6
            result["fraction"] = {
                kind: float(f"{floor / value['median']:.4g}")
                for kind, value in times[result["name"]].items()
                if kind.endswith("_ms")
            }
    return {"num_bytes": num_bytes, "copies": copies, "contenders": results}


def _verified(
    contender: Contender,
    verify: Callable[[Contender, Any], None],
    clock: Clock,
    prepare: Callable[[], None],
) -> dict[str, Any]:
    result: dict[str, Any] = {"name": contender.name}
    if contender.note:
        result["note"] = contender.note
    if contender.run is None:
        return result | {"status": "unavailable", "reason": contender.unavailable}
    prepare()
    try:
        verify(contender, contender.run())
        memory = clock.memory(contender)
    except AssertionError as error:
        return result | {"status": "wrong", "reason": str(error).split("\n")[0]}
    except Exception as error:  # another library may fail in any way; the rest is still measured
        return result | {"status": "failed", "reason": first_line(error)}
    return result | {"status": "ok"} | memory


def _interleaved(
    runners: Sequence[Contender | Copy], timing: Timing
) -> dict[str, dict[str, dict[str, Any]]]:
    repetitions = {}
    for runner in runners:
        assert runner.run is not None
        for _ in range(timing.warmup - 1):
            runner.run()
        estimate = timing.clock.turn(runner.run, 1)["wall_ms"]
        fitting = math.ceil(timing.turn_ms / max(estimate, 1e-6))
        repetitions[runner.name] = min(max(fitting, 1), timing.max_repetitions)
    turns: dict[str, list[dict[str, float]]] = {runner.name: [] for runner in runners}
    # No garbage collection inside a turn; after it a cheap one, of what the turn has made.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for number in range(timing.rounds):
            # A random order, because a large contender slows down the one after it.
            for runner in random.Random(number).sample(runners, len(runners)):
                assert runner.run is not None
                turns[runner.name].append(timing.clock.turn(runner.run, repetitions[runner.name]))
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return {
        name: {kind: spread([turn[kind] for turn in taken]) for kind in taken[0]}
        for name, taken in turns.items()
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the 10th and 90th percentiles, and the values."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
    return {
        "median": round(statistics.median(values), 6),
        "p10": round(tenths[0], 6),
        "p90": round(tenths[-1], 6),
        "rounds": [round(v, 6) for v in values],
    }


def first_line(error: BaseException) -> str:
    """Return an exception's type and message in one line of at most 300 characters."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


# Scripts


def make_parser(name: str, doc: str | None, rounds: int = 11) -> argparse.ArgumentParser:
    """Make the parser with the options of every script; read it with `parse`."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(usual_rounds=rounds, name=name)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, help=f"timed turns of each contender ({rounds})")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds, any device")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (2 if args.quick else args.usual_rounds)
    del args.usual_rounds
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(args).items() if k not in ("out", "quick", "device", "name")}


class Row(Protocol):
    """One measurement of a script."""

    @property
    def title(self) -> str: ...


def run_rows(
    args: argparse.Namespace,
    rows: Iterable[Any],
    measure_row: Callable[[Any], dict[str, Any]],
    settings: dict[str, Any] | None = None,
) -> Path:
    """Measure the rows one after the other, and write the result after each.

    A row that fails is listed under "left_out" with the reason, as are rows after `args.within`
    seconds, where the script has this option.
    """
    device = torch.device(args.device)
    result = record.document(args.name, device, args.quick, settings or settings_of(args))
    result |= {"rows": [], "left_out": []}
    into, started = record.folder(args.out, args.quick), time.perf_counter()
    print(f"{args.name}: {record.slug(result['machine'])}, "
          f"load average {result['machine']['load_average']}", flush=True)  # fmt: skip
    path = record.write(into, result)
    for row in rows:
        seconds = time.perf_counter() - started
        try:
            if seconds >= getattr(args, "within", math.inf):
                raise TimeoutError(f"--within {args.within:g} seconds have passed")
            found = measure_row(row)
            result["rows"].append(found)
            text = describe(found)
        except Exception as error:  # the other rows are still measured
            text = f"left out, {first_line(error)}"
            result["left_out"].append({"row": row.title, "reason": text})
        print(f"[{seconds:.0f} s] {row.title}: {text}", flush=True)
        release(device)
        path = record.write(into, result)
    print(f"wrote {path}, {time.perf_counter() - started:.0f} s")
    return path


def describe(measured: dict[str, Any]) -> str:
    """Return lines with the times of a row's copies and contenders."""
    lines = [f"{c['name']} {c['gb_per_s']:.1f} GB/s" for c in measured.get("copies", [])]
    for c in measured["contenders"]:
        if c["status"] != "ok":
            lines.append(f"{c['name']}: {c['status']}, {c['reason']}")
            continue
        kinds = [kind for kind in ("wall_ms", "device_ms") if kind in c]
        text = ", ".join(f"{kind.replace('_', ' ')} {c[kind]['median']:.4f}" for kind in kinds)
        if "fraction" in c:
            text += f", {c['fraction'][kinds[-1]]:.0%} of the roofline"
        if "peak_bytes" in c:
            text += f", {c['peak_bytes'] / 2**20:,.1f} MiB at the peak"
        lines.append(f"{c['name']}: {text}")
    return "\n    ".join(lines)


def release(device: torch.device) -> None:
    """Free a row's memory, because the next row needs other sizes."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # after a failed kernel, every call raises
            print(f"torch.cuda.empty_cache: {first_line(error)}", flush=True)
