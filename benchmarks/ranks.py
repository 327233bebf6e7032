"""Steps that several ranks do together: timed, and what they need."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spikefuse as sf
from benchmarks.runner import spread
from spikefuse.distributed import Plan
from spikefuse.distributed.time_sharding import TimeShard

# Steps in a round.
REPETITIONS = 3
# They connect the ranks and let cuDNN choose its algorithms; DistributedDataParallel arranges its
# buckets in the first ones and times some.
STEPS_BEFORE_GRAPH = 11


def averaging(net: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    """The network, whose gradients become the mean of all ranks' during the backward pass."""
    aside = torch.cuda.Stream(device) if device.type == "cuda" else None  # as a recording demands
    with torch.cuda.stream(aside):
        model = DistributedDataParallel(net, **options)
    if aside is not None:
        torch.cuda.current_stream().wait_stream(aside)
    return model


def hand_on(net: sf.Temporal, chunks: int, speculate: bool = True) -> None:
    """How its states travel from now on."""
    if isinstance(net.shard, TimeShard):
        net.shard.chunks, net.shard.speculates = chunks, speculate


def timed(step: Callable[[], object], device: torch.device, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step, that of the slowest rank in each round."""
    together = torch.zeros(1, device=device)

    def synchronize() -> None:
        dist.all_reduce(together)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(REPETITIONS):
        step()
    found = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(REPETITIONS):
            step()
            dist.all_reduce(together)  # a step ends for all
        synchronize()
        found.append((time.perf_counter() - start) / REPETITIONS * 1e3)
    values = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return spread(values.tolist())


def peak(step: Callable[[], object], device: torch.device, before: int) -> int:
    """Bytes of a GPU's memory in a step, on the rank that needs most, beyond those `before`."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return int(highest(torch.cuda.max_memory_allocated(device) - before, device))


def highest(value: float, device: torch.device) -> float:
    """That of any rank."""
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def forecast(
    about: dict[str, Any], made: Plan, counts: Sequence[int], splits: Sequence[int] = (1,)
) -> list[dict[str, Any]]:
    """Rows of work shared by more GPUs than there are, predicted only.

    Args:
        splits: numbers of GPUs that share the batch, where they divide those that there are.
    """
    rows = []
    for count in counts:
        for data in [n for n in splits if count % n == 0]:
            row = {**about, "status": "not measured", "time": count // data, "data": data}
            rows.append(min(_ways(row, made), key=lambda row: -row["predicted"]))
    return rows


def _ways(row: dict[str, Any], made: Plan) -> list[dict[str, Any]]:
    """The row with each way of handing states on."""
    ways = [(chunks, early) for early in (True, False) for chunks in (1, 2, 4)]
    rows = [{**row, "chunks": chunks, "speculate": early} for chunks, early in ways]
    for made_row in rows:
        _predict(made_row, made)
    return rows


def predict(rows: list[dict[str, Any]], made: Plan) -> None:
    """Add what Eq. 5 and the plan say of each row's speed-up."""
    for row in rows:
        if row.get("status", "ok") == "ok":
            _predict(row, made)


def _predict(row: dict[str, Any], made: Plan) -> None:
    seconds = made.seconds(row["time"], row["chunks"], row["data"], row["speculate"])
    row["predicted"] = made.whole / seconds
    row["by_paper"] = made.speedup_by_paper(row["time"])
    row["exchange_ms"] = 1e3 * made.exchange
