"""One time step of one sample: a network on events against the dense one, both with their states.

The network and its weights are those of a case of `event_networks`. Timed is the step of the
sequence whose activity is nearest to the one asked for, again and again from the same states. On a
GPU also as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import spikefuse as sf
from benchmarks import record
from benchmarks.event_check import NEAR, ROUNDING
from benchmarks.event_networks import CASES, DECAY, GRAPH, THRESHOLD, Case, Work
from benchmarks.runner import Contender, Settings, clock_for, measure
from benchmarks.steps import graphed
from spikefuse.nn import EventStream

CASE, RATE = "47k", 0.01
EVENTS, DENSE = "events", "dense"
BAR = 3.0

# Outputs `[classes]` and, of each hidden layer, potentials `[O]` after the step.
Result = tuple[Tensor, list[Tensor]]


class Streaming:
    """The step of both networks."""

    def __init__(self, case: Case, rate: float, device: torch.device) -> None:
        self.device, work = device, Work(case, rate, device)
        self.layers = work.initial
        self.stream = EventStream(work.initial)
        self.dense = sf.Temporal(work.dense())
        self.rate = -1.0
        states = None
        for x in work.x[:, 0].contiguous():
            before = states
            y, states = self.stream(x, before)
            found = self.activity((y, [v.view(-1) for (v,) in states]))
            if before is not None and abs(found - rate) < abs(self.rate - rate):
                self.rate, self.x, self.states = found, x, before
        names = [n for n, m in self.dense.named_modules() if isinstance(m, sf.LIF)]
        # A Temporal names neurons as they are called in its network.
        self.names = [n.removeprefix("net.") for n in names]
        self.given = dict(zip(self.names, self.states, strict=True))

    @torch.no_grad()
    def on_events(self) -> Result:
        y, states = self.stream(self.x, self.states)
        return y, [v.view(-1) for (v,) in states]

    @torch.no_grad()
    def on_dense(self) -> Result:
        x = self.x.view(1, 1, -1)
        y, final = self.dense(x, state=self.given, return_state=True)
        return y.view(-1), [final[n][0].view(-1) for n in self.names]

    def activity(self, result: Result) -> float:
        """Share of the neurons that fired, whose potential was reset to 0."""
        fired = torch.cat([v == 0 for v in result[1]])
        return float(fired.float().mean())

    def contenders(self) -> list[Contender]:
        runs: dict[str, Callable[[], Result]] = {EVENTS: self.on_events, DENSE: self.on_dense}
        if self.device.type == "cuda":
            runs |= {name + GRAPH: graphed(run)[0] for name, run in list(runs.items())}
        return [Contender(name, run) for name, run in runs.items()]

    def verify(self, contender: Contender, result: Result) -> None:
        """Each layer against float64, on the spikes that it got.

        Raises:
            AssertionError: what differs.
        """
        y, potentials = result
        spikes = self.x.double()
        for layer, before, v in zip(self.layers, (*self.states, None), (*potentials, None),
                                    strict=True):  # fmt: skip
            current = spikes @ layer.weight.detach().double() + layer.bias.detach().double()
            if before is None or v is None:
                error = float((y - current).norm() / current.norm())
                assert error <= ROUNDING, f"outputs differ by {error:.3g} of their norm"
                return
            h = DECAY * before[0].view(-1).double() + current
            fired = v == 0
            turned = (h >= THRESHOLD) != fired
            margin = float((h - THRESHOLD).abs()[turned].max()) if turned.any() else 0.0
            assert margin <= NEAR, f"a spike differs {margin:.3g} from the threshold"
            error = float((v - h).abs()[~fired].max())
            assert error <= NEAR, f"a potential differs by {error:.3g}"
            spikes = fired.double()


def measure_all(device: torch.device, rounds: int, name: str = CASE) -> dict[str, Any]:
    case = CASES[name]
    streaming = Streaming(case, RATE, device)
    settings = Settings(rounds, 20.0, 3)
    found = measure(streaming.contenders(), [], streaming.verify, clock_for(device), 0, settings)
    times = {c["name"]: c["wall_ms"]["median"] for c in found["contenders"] if "wall_ms" in c}
    for told, time in times.items():
        print(f"streaming, {told}: {1e3 * time:.1f} microseconds", flush=True)
    neurons = sum(case.hidden)
    return {"case": name, "neurons": neurons, "rate": round(streaming.rate, 6)} | found


def bars(row: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """On a GPU: the best way of each."""
    if device.type != "cuda":
        return []
    times = {c["name"]: c["wall_ms"]["median"] for c in row["contenders"] if "wall_ms" in c}
    best = [
        min((t for n, t in times.items() if n.startswith(kind)), default=None)
        for kind in (EVENTS, DENSE)
    ]
    ratio = None if None in best else best[1] / best[0]
    what = (
        f"one step of one sample, {row['neurons']:,} neurons of which {row['rate']:.1%} fire: "
        "times faster on events than dense"
    )
    return [record.bar(what, ratio, BAR)]
