"""Lists of events or dense products: which is quicker for a layer at an activity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from spikefuse.events.format import Events

# On a CPU, the share of the inputs in the lists (spikes and other candidates) from which on dense
# products are quicker: with 60 % of the neurons firing, a training step on lists took 92 % of the
# time of one on products, with 90 % firing 131 % (benchmarks.events, activity fixed). It is a
# number and not a measurement, so that a run gives the same result each time.
CPU_CROSSOVER = 0.65
# On a GPU, activity is told in steps of this factor; each is measured once, on first use.
FACTOR = 2**0.25
WARMUPS, REPETITIONS = 2, 5


@dataclass(frozen=True)
class Choice:
    """What a layer runs on.

    Attributes:
        impl: "numba", "triton" or "dense".
        reason: of the choice, for people.
    """

    impl: str
    reason: str


Key = tuple[object, ...]
_measured: dict[Key, Choice] = {}


def choose(events: Events, out_features: int, run: Callable[[str, Events], None]) -> Choice:
    """The quicker of event lists and dense products.

    Args:
        events: the input.
        out_features: of the layer.
        run: computes the layer forward and backward in the way that it is told, on a GPU.
    """
    entries = len(events.indices) / max(events.num_rows, 1)
    if events.device.type == "cpu":
        share = entries / max(events.shape[2], 1)
        impl = "numba" if share < CPU_CROSSOVER else "dense"
        sense = "below" if impl == "numba" else "at least"
        return Choice(impl, f"{share:.2%} of the inputs listed, {sense} {CPU_CROSSOVER:.0%}")
    level = round(math.log(max(entries, 1e-3), FACTOR))
    key = (events.device, *events.shape, out_features, level)
    if key not in _measured:
        _measured[key] = _measure(events, run)
    return _measured[key]


def _measure(events: Events, run: Callable[[str, Events], None]) -> Choice:
    leaf = replace(events, values=events.is_fired().requires_grad_())
    times = {impl: _milliseconds(run, impl, leaf) for impl in ("triton", "dense")}
    told = ", ".join(f"{impl} {time:.3g} ms" for impl, time in times.items())
    return Choice(min(times, key=times.__getitem__), f"measured on first use: {told}")


def _milliseconds(run: Callable[[str, Events], None], impl: str, events: Events) -> float:
    """The least of a few times, which others' work lengthens only."""
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
