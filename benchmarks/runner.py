"""Verify, then time.

Contenders take turns within one run, so that a machine that speeds up or slows down does so for
all of them; a contender whose result is wrong gets no time. The copy that stands for the
machine's bandwidth takes its turns among them.
"""

from __future__ import annotations

import gc
import math
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Written before each repetition on a GPU, so that it starts with a cold L2 cache; large enough
# that the host runs ahead of the device meanwhile.
FLUSH_BYTES = 1 << 30


@dataclass
class Contender:
    """One way to do the work.

    `run` does it once and returns what is verified; None where it is unavailable, for the reason
    in `unavailable`. `forward` does only the part whose results backward needs. `held_bytes` is
    what it keeps allocated from run to run, such as the memory of a CUDA graph.
    """

    name: str
    run: Callable[[], Any] | None = None
    forward: Callable[[], Any] | None = None
    unavailable: str = ""
    note: str = ""
    held_bytes: int = 0


@dataclass
class Copy:
    """A copy that moves `num_bytes`, counting bytes read and bytes written."""

    name: str
    run: Callable[[], Any]
    num_bytes: int


@dataclass(frozen=True)
class Settings:
    """How long to measure: `rounds` turns of about `slot_ms` each, at least one repetition."""

    rounds: int = 11
    slot_ms: float = 5.0
    warmup: int = 3
    max_repetitions: int = 200


# Of a slot on a GPU: untimed calls with which it begins, and single ones timed by events.
SLOT_WARMUP, SLOT_SINGLES = 5, 3


class Clock(Protocol):
    """How time and memory are read on a device."""

    def slot(self, run: Callable[[], Any], repetitions: int) -> dict[str, float]:
        """What one repetition takes: milliseconds by kind of time, and perhaps other counts."""
        ...

    def memory(self, contender: Contender) -> dict[str, int]:
        """What one run needs, where the device can tell."""
        ...

    def bandwidth_kind(self) -> str:
        """The kind of time by which the copy is judged."""
        ...


class CpuClock:
    """Wall-clock time; page faults too, because fresh memory costs as much as the arithmetic.

    `settle` is called before each slot, outside its time.
    """

    def __init__(self, settle: Callable[[], Any] = lambda: None) -> None:
        self.settle = settle

    def slot(self, run: Callable[[], Any], repetitions: int) -> dict[str, float]:
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

    def bandwidth_kind(self) -> str:
        return "wall_ms"


class GpuClock:
    """Wall-clock time of back-to-back calls (host included), and device time by events.

    Device time is that of single calls with a cold L2 cache. For the wall-clock time, callers
    rotate among inputs past the size of the cache. A slot begins with `warmup` untimed calls and
    ends with at most `singles` single ones.
    """

    def __init__(
        self,
        device: torch.device,
        flush_bytes: int = FLUSH_BYTES,
        warmup: int = SLOT_WARMUP,
        singles: int = SLOT_SINGLES,
    ) -> None:
        self.device, self.warmup, self.singles = device, warmup, singles
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def slot(self, run: Callable[[], Any], repetitions: int) -> dict[str, float]:
        # Other contenders and the collection between slots have emptied the host's caches.
        for _ in range(self.warmup):
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
        """Bytes above what was allocated before the call: at the peak, and after forward. What a
        contender holds from run to run counts in its peak."""
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

    def bandwidth_kind(self) -> str:
        return "device_ms"


def clock_for(device: torch.device) -> Clock:
    if device.type != "cuda":
        return CpuClock()
    if device.index is not None:
        torch.cuda.set_device(device)  # events belong to the current device
    return GpuClock(device)


def measure(
    contenders: Sequence[Contender],
    copies: Sequence[Copy],
    verify: Callable[[Contender, Any], None],
    clock: Clock,
    num_bytes: int,
    settings: Settings,
    before_verify: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Verify the contenders, then time those that are right, interleaved with the copies.

    Args:
        verify: raises AssertionError, saying why, for a wrong result of a contender.
        num_bytes: the bytes that the work has to move, for the roofline.
        before_verify: called before each run that is verified.

    Returns:
        A dict with "contenders" and "copies", both lists of dicts; times are dicts with median,
        p10, p90 and the rounds. "fraction" of a contender is the time that the first copy would
        take for `num_bytes`, over the contender's own.
    """
    if not __debug__:
        raise RuntimeError("verifying needs assert statements: run Python without -O")
    results = [_verified(c, verify, clock, before_verify) for c in contenders]
    right = [c for c, r in zip(contenders, results, strict=True) if r["status"] == "ok"]
    times = _interleaved([*copies, *right], clock, settings)

    kind = clock.bandwidth_kind()
    copied: list[dict[str, Any]] = []
    for copy in copies:
        taken = times[copy.name]
        bandwidth = copy.num_bytes / taken[kind]["median"] / 1e6
        copied.append(
            {"name": copy.name, "num_bytes": copy.num_bytes, "gb_per_s": float(f"{bandwidth:.6g}")}
            | taken
        )
    for result in results:
        if result["status"] == "ok":
            result |= times[result["name"]]
            if copied:
                floor = num_bytes / copied[0]["gb_per_s"] / 1e6
                result["fraction"] = {
                    k: float(f"{floor / v['median']:.4g}")
                    for k, v in times[result["name"]].items()
                    if k.endswith("_ms")
                }
    return {"num_bytes": num_bytes, "copies": copied, "contenders": results}


def _verified(
    contender: Contender,
    verify: Callable[[Contender, Any], None],
    clock: Clock,
    before: Callable[[], None],
) -> dict[str, Any]:
    result: dict[str, Any] = {"name": contender.name}
    if contender.note:
        result["note"] = contender.note
    if contender.run is None:
        return result | {"status": "unavailable", "reason": contender.unavailable}
    before()
    try:
        verify(contender, contender.run())
        memory = clock.memory(contender)
    except AssertionError as error:
        return result | {"status": "wrong", "reason": str(error).split("\n")[0]}
    except Exception as error:  # a rival may fail in any way; the others are still measured
        return result | {"status": "failed", "reason": first_line(error)}
    return result | {"status": "ok"} | memory


def _interleaved(
    runners: Sequence[Contender | Copy], clock: Clock, settings: Settings
) -> dict[str, dict[str, dict[str, Any]]]:
    repetitions = {}
    for runner in runners:
        assert runner.run is not None
        for _ in range(settings.warmup - 1):
            runner.run()
        estimate = clock.slot(runner.run, 1)["wall_ms"]
        fitting = math.ceil(settings.slot_ms / max(estimate, 1e-6))
        repetitions[runner.name] = min(max(fitting, 1), settings.max_repetitions)
    slots: dict[str, list[dict[str, float]]] = {runner.name: [] for runner in runners}
    # No collection inside a slot; after it a cheap one, of what the slot has made.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for turn in range(settings.rounds):
            # In another order each time: what a large one leaves behind slows the next one down.
            for runner in random.Random(turn).sample(runners, len(runners)):
                assert runner.run is not None
                slots[runner.name].append(clock.slot(runner.run, repetitions[runner.name]))
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return {
        name: {kind: spread([slot[kind] for slot in taken]) for kind in taken[0]}
        for name, taken in slots.items()
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, 10th and 90th percentile, and the values themselves."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
    return {
        "median": round(statistics.median(values), 6),
        "p10": round(tenths[0], 6),
        "p90": round(tenths[-1], 6),
        "rounds": [round(v, 6) for v in values],
    }


def kernel_times(run: Callable[[], Any], device: torch.device) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel of one run on a GPU, in order; nothing on a CPU."""
    if device.type != "cuda":
        return []
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize(device)
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [event for event in profile.events() if event.device_type == on_gpu]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in events]


def first_line(error: BaseException) -> str:
    """What an exception says, in one line of at most 300 characters."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
