"""Measured times, and the bandwidth of a copy."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from timeit import repeat
from typing import Any

import torch

# Bytes that the copy reads, and writes, to measure the bandwidth.
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}

WARMUPS, REPETITIONS = 5, 11


@functools.lru_cache
def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes on `device`, measured once."""
    size = COPIED_BYTES.get(device.type, COPIED_BYTES["cpu"])
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(functools.partial(target.copy_, source), device)


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of a call, by CUDA events on a GPU and by the clock elsewhere."""
    for _ in range(WARMUPS):
        run()
    if device.type != "cuda":
        return statistics.median(repeat(run, number=1, repeat=REPETITIONS))
    pairs = []
    with torch.cuda.device(device):
        for _ in range(REPETITIONS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3
