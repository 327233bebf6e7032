"""The choice between event lists and dense products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spikefuse.events.format import Events

# On a CPU, the share of listed inputs (spikes and other candidates) above which dense products are
# faster. On lists, a training step took 92 % of the time of dense products with 60 % of the neurons
# firing, and 131 % with 90 % (benchmarks.events, fixed activity). A measurement at run time would
# make results irreproducible.
CPU_CROSSOVER = 0.65
# On a GPU, the ratio between levels of activity; each level is measured once, on first use.
FACTOR = 2**0.25
WARMUPS, REPETITIONS = 2, 5


@dataclass(frozen=True)
class Choice:
    """The implementation that a layer runs on, "numba", "triton" or "dense", and why."""

    impl: str
    reason: str


_measured: dict[tuple[object, ...], Choice] = {}


def choose(events: Events, out_features: int, run: Callable[[str, Events], None]) -> Choice:
    """Return the faster of event lists and dense products.

    Args:
        events: the input of the layer.
        out_features: of the layer.
        run: runs the layer forward and backward with a given impl; called on GPUs only.
    """
    entries = len(events.indices) / max(events.num_rows, 1)
    if events.device.type == "cpu":
        share = entries / max(events.shape[2], 1)
        impl = "numba" if share < CPU_CROSSOVER else "dense"
        relation = "below" if impl == "numba" else "at least"
        return Choice(impl, f"{share:.2%} of the inputs listed, {relation} {CPU_CROSSOVER:.0%}")
    level = round(math.log(max(entries, 1e-3), FACTOR))
    key = (events.device, *events.shape, out_features, level)
    if key not in _measured:
        if len(_measured) >= 4096:
            _measured.clear()
        leaf = events.with_values(events.is_fired().requires_grad_())
        times = {impl: _milliseconds(run, impl, leaf) for impl in ("triton", "dense")}
        listed = ", ".join(f"{impl} {time:.3g} ms" for impl, time in times.items())
        best = min(times, key=times.__getitem__)
        _measured[key] = Choice(best, f"measured on first use: {listed}")
    return _measured[key]


def _milliseconds(run: Callable[[str, Events], None], impl: str, events: Events) -> float:
    """Return the minimum of several times, because other processes can only add to a time."""
    for _ in range(WARMUPS):
        run(impl, events)
    times = []
    for _ in range(REPETITIONS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(impl, events)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)
