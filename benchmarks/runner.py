"""What all scripts share: options, verification before timing, CUDA graphs, and writing results.

Contenders are timed in turns within one run, so that changes of the machine's speed affect all of
them. A contender whose result is wrong is not timed. A copy, timed in the same turns, gives the
machine's bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import spikefuse as sf
from benchmarks import record

# Bytes written before each call that CUDA events time, so that it starts with a cold L2 cache.
FLUSH_BYTES = 1 << 30
# The device then waits for twice the time of a call, at most this long: the host runs ahead of it.
LONGEST_WAIT_MS, CYCLES_PER_MS = 20.0, 2_000_000

EAGER, GRAPH, GRAPH_STEP = STEP_WAYS = "eager", "CUDA graph", "sf.graph_step"  # to run a step
WAYS = (EAGER, GRAPH)
NO_GRAPHS = "CUDA graphs need a CUDA GPU"
# Steps before a graph is recorded: they compile kernels, choose algorithms, create the optimizer's
# state, and let DistributedDataParallel arrange its buckets.
STEPS_BEFORE_GRAPH = 11

Record = dict[str, Any]


@dataclass
class Contender:
    """One implementation of the measured work.

    Args:
        name: in results and tables.
        run: does the work once and returns the result to verify; None if unavailable.
        unavailable: the reason if `run` is None.
        note: printed below tables.
        held_bytes: memory that stays allocated between runs, such as a CUDA graph's.
        allowed: difference from the reference that its own rounding explains; None for the usual.
    """

    name: str
    run: Callable[[], Any] | None = None
    unavailable: str = ""
    note: str = ""
    held_bytes: int = 0
    allowed: float | None = None


@dataclass
class Copy(Contender):
    """A copy that moves `num_bytes`, bytes read plus bytes written."""

    num_bytes: int = 0

    @classmethod
    def of(cls, num_bytes: int, device: torch.device) -> Copy:
        source = torch.rand(num_bytes // 8, device=device)
        target = torch.empty_like(source)
        return cls("copy", lambda: target.copy_(source), num_bytes=num_bytes)


class CpuClock:
    """Wall-clock time; `bandwidth_kind` is the kind of time that gives the bandwidth of copies."""

    bandwidth_kind = "wall_ms"

    def turn(self, run: Callable[[], Any], repetitions: int) -> dict[str, float]:
        """Return milliseconds per repetition by kind of time."""
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        return {"wall_ms": (time.perf_counter() - start) * 1e3 / repetitions}

    def memory(self, contender: Contender) -> dict[str, int]:
        """Return the memory that one run needs, where the device reports it."""
        return {}


class GpuClock(CpuClock):
    """Wall-clock time of back-to-back calls, and device time of single calls by CUDA events.

    The device waits before a single call until the host has enqueued it.

    Args:
        warmup: untimed calls at the start of a turn.
        singles: calls timed one by one at its end.
    """

    bandwidth_kind = "device_ms"

    def __init__(self, device: torch.device, warmup: int = 5, singles: int = 3) -> None:
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
            torch.cuda._sleep(int(CYCLES_PER_MS * min(2 * wall, LONGEST_WAIT_MS)))
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize(self.device)
        device = statistics.median(begin.elapsed_time(end) for begin, end in pairs)
        return {"wall_ms": wall, "device_ms": device}

    def memory(self, contender: Contender) -> dict[str, int]:
        """Return the bytes at the peak beyond those allocated before the run."""
        assert contender.run is not None
        gc.collect()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        contender.run()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        return {"peak_bytes": peak + contender.held_bytes}


@dataclass(frozen=True)
class Timing:
    """How to time: `rounds` turns of about `turn_ms` milliseconds for each contender and a copy."""

    clock: CpuClock
    rounds: int = 11
    turn_ms: float = 5.0
    warmup: int = 3
    max_repetitions: int = 200
    copy: Copy | None = None

    @classmethod
    def of(cls, args: argparse.Namespace, copy_bytes: int = 0, whole_steps: bool = False) -> Timing:
        """Make the usual timing from the options of `make_parser`.

        Args:
            copy_bytes: bytes moved by the copy that gives the bandwidth; 0 for none.
            whole_steps: each run is long and needs little warm-up.
        """
        device, clock = torch.device(args.device), CpuClock()
        if device.type == "cuda":
            clock = GpuClock(device, 1, 1) if whole_steps else GpuClock(device)
        size = min(copy_bytes, 1 << 20) if args.quick else copy_bytes
        turn_ms, warmup = (0.5 if args.quick else 25.0), (2 if whole_steps else 3)
        copy = Copy.of(size, device) if size else None
        return cls(clock, args.rounds, turn_ms, warmup, copy=copy)


def measure(
    contenders: Sequence[Contender],
    verify: Callable[[Contender, Any], None],
    timing: Timing,
    num_bytes: int = 0,
    prepare: Callable[[], None] = lambda: None,
) -> Record:
    """Verify the contenders, then time the correct ones in turns.

    Args:
        verify: raises AssertionError with the reason if a contender's result is wrong.
        num_bytes: bytes that the work has to move, for the roofline.
        prepare: called before each verified run.

    Returns:
        A dict with "contenders" and "copies", both lists of dicts. Times are dicts with median,
        p10, p90 and the rounds. "fraction" is the time in which the copy moves `num_bytes` over the
        contender's time.
    """
    if not __debug__:
        raise RuntimeError("verification needs assert statements: run Python without -O")
    results = [_verified(c, verify, timing.clock, prepare) for c in contenders]
    correct = [c for c, r in zip(contenders, results, strict=True) if r["status"] == "ok"]
    copies = [] if timing.copy is None else [timing.copy]
    times = _interleaved([*copies, *correct], timing)
    about: list[Record] = []
    for copy in copies:
        rate = copy.num_bytes / times[copy.name][timing.clock.bandwidth_kind]["median"] / 1e6
        rate = float(f"{rate:.6g}")
        about.append({"name": copy.name, "num_bytes": copy.num_bytes, "gb_per_s": rate})
        about[-1] |= times[copy.name]
    for result in results:
        if result["status"] == "ok":
            result |= times[result["name"]]
            if about:
                floor = num_bytes / about[0]["gb_per_s"] / 1e6
                result["fraction"] = {
                    kind: float(f"{floor / value['median']:.4g}")
                    for kind, value in times[result["name"]].items()
                }
    return {"num_bytes": num_bytes, "copies": about, "contenders": results}


def _verified(
    contender: Contender,
    verify: Callable[[Contender, Any], None],
    clock: CpuClock,
    prepare: Callable[[], None],
) -> Record:
    result: Record = {"name": contender.name}
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


def _interleaved(runners: Sequence[Contender], timing: Timing) -> dict[str, dict[str, Record]]:
    repetitions = {}
    for runner in runners:
        assert runner.run is not None
        for _ in range(timing.warmup - 1):
            runner.run()
        estimate = timing.clock.turn(runner.run, 1)["wall_ms"]
        fitting = math.ceil(timing.turn_ms / max(estimate, 1e-6))
        repetitions[runner.name] = min(max(fitting, 1), timing.max_repetitions)
    turns: dict[str, list[dict[str, float]]] = {runner.name: [] for runner in runners}
    # Collect garbage after turns only; frozen objects make these collections cheap.
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


def spread(values: Sequence[float]) -> Record:
    """Return the median, the 10th and 90th percentiles, and the values."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
    return {
        "median": round(statistics.median(values), 6),
        "p10": round(tenths[0], 6),
        "p90": round(tenths[-1], 6),
        "rounds": [round(v, 6) for v in values],
    }


def record_graph(step: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
    """Record a step as a CUDA graph; return its replay and the bytes that the graph holds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(STEPS_BEFORE_GRAPH):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    gc.collect()
    # The graph allocates its own, which torch.compile does not release.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's, are not recorded.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = step()

    def replay() -> Any:
        graph.replay()
        return result

    replay.step = step  # type: ignore[attr-defined]  # what the graph uses, such as optimizer state
    return replay, torch.cuda.memory_reserved() - before


def contender_of(
    name: str,
    way: str,
    step: Callable[..., Any],
    inputs: Sequence[Any],
    device: torch.device,
    parts: Sequence[Any] = (),
) -> Contender:
    """Return `step(*inputs)` run in one of the `STEP_WAYS`, or the reason why it cannot be.

    Args:
        parts: modules of the step that its own variables do not show.
    """
    if way == EAGER:
        return Contender(name, lambda: step(*inputs))
    if device.type != "cuda":
        return Contender(name, unavailable=NO_GRAPHS)
    try:
        if way == GRAPH:
            run, held = record_graph(lambda: step(*inputs))
            return Contender(name, run, held_bytes=held)
        recorded = sf.graph_step(step, *parts)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(4):  # until it is recorded
            recorded(*inputs)
    except Exception as error:
        return Contender(name, unavailable=first_line(error))
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - before
    return Contender(name, lambda: recorded(*inputs), held_bytes=held)


@contextmanager
def cudnn_search(device: torch.device) -> Iterator[None]:
    """Let cuDNN search for the fastest algorithms, as the trainer does."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the norm of `found - expected` over the norm of `expected`."""
    pairs = list(zip(found, expected, strict=True))
    squares = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    size = sum(float(b.double().square().sum()) for _, b in pairs)
    return math.sqrt(squares / size) if size else math.sqrt(squares)


def first_line(error: BaseException) -> str:
    """Return an exception's type and message in one line of at most 300 characters."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


# Scripts


def plain_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Make a parser without options. Its help is the docstring of the module, unwrapped."""
    shown = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {module}", description=doc, formatter_class=shown)


def make_parser(name: str, doc: str | None, rounds: int = 11) -> argparse.ArgumentParser:
    """Make a parser with the options that all scripts have; use it with `parse`."""
    parser = plain_parser(f"benchmarks.{name}", doc)
    parser.set_defaults(usual_rounds=rounds, usual_name=name)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, help=f"timed turns of each contender ({rounds})")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--name", help="of the result, in place of the usual one")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds, any device")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if args.rounds is None:
        args.rounds = 2 if args.quick else args.usual_rounds
    del args.usual_rounds
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


def settings_of(args: argparse.Namespace) -> Record:
    others = "out", "quick", "device", "name", "usual_name", "data_dir"
    return {k: v for k, v in vars(args).items() if k not in others}


def run_cases(
    args: argparse.Namespace,
    cases: Iterable[tuple[str, Callable[[], Record]]],
    settings: Record | None = None,
    plot: Callable[[Record, Path], Any] | None = None,
) -> Path:
    """Measure the cases, given as (title, function that returns a row), one after the other.

    A case that fails is listed under "left_out" with the reason.
    """
    left_out: list[Record] = []

    def rows() -> Iterator[Record]:
        for title, measure_case in cases:
            with leaving_out(title, left_out):  # the other cases are still measured
                yield {"row": title} | measure_case()
            release(torch.device(args.device))  # the next case needs other sizes

    return write_rows(args, rows(), settings, left_out, plot)


@contextmanager
def leaving_out(title: str, left_out: list[Record]) -> Iterator[None]:
    """Add an exception to `left_out` as the reason why `title` was not measured."""
    try:
        yield
    except Exception as error:
        left_out.append({"row": title, "reason": first_line(error)})
        print(f"{title}: left out, {first_line(error)}", flush=True)


def write_rows(
    args: argparse.Namespace,
    rows: Iterable[Record],
    settings: Record | None = None,
    left_out: Sequence[Record] = (),
    plot: Callable[[Record, Path], Any] | None = None,
) -> Path:
    """Print each row, write the result after each, and draw its plot."""
    started = time.perf_counter()
    given = settings_of(args) if settings is None else settings
    name = args.name or args.usual_name
    result = record.document(name, torch.device(args.device), args.quick, given)
    result |= {"rows": [], "left_out": left_out}
    into = record.folder(args.out, args.quick)
    path = record.write(into, result)
    load = result["machine"]["load_average"]
    print(f"{name}: {record.slug(result)}, load average {load}")
    for row in rows:
        result["rows"].append(row)
        print(f"[{time.perf_counter() - started:.0f} s] {describe(row)}", flush=True)
        record.write(into, result)
    record.write(into, result)
    if plot is not None:
        plot(result, path.with_suffix(".png"))
    print(f"wrote {path}", flush=True)
    return path


def describe(row: Record) -> str:
    """Return a row's values and medians, and a line for each of its copies and contenders."""
    lines = []
    for part in (row, *row.get("copies", ()), *row.get("contenders", ())):
        shown = {k: v.get("median") if isinstance(v, dict) else v for k, v in part.items()}
        lines.append(", ".join(
            f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in shown.items() if isinstance(v, str | int | float)
        ))  # fmt: skip
    return "\n    ".join(lines)


def release(device: torch.device) -> None:
    """Free unused memory, and what `torch.compile` has compiled, which is limited."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # after a failed kernel, every call raises
            print(f"torch.cuda.empty_cache: {first_line(error)}", flush=True)
