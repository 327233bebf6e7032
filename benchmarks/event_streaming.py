"""One time step of one sample: a network on events against the dense one, both with their states.

Timed is the step of a sequence whose activity is nearest to the requested rate, repeated from the
same states; on a GPU also as a CUDA graph. `benchmarks.events --streaming` runs it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import spikefuse as sf
from benchmarks.event_check import NEAR, ROUNDING
from benchmarks.event_networks import DECAY, REPLAY, THRESHOLD, Case, EventTask
from benchmarks.network_steps import graph_contender
from benchmarks.runner import Contender, Timing, describe, measure
from spikefuse.nn import EventStream

CASE, RATE = "47k", 0.01

# Outputs `[classes]` and, for each hidden layer, the potentials `[O]` after the step.
StreamResult = tuple[Tensor, list[Tensor]]


class Streaming:
    """The step of both networks."""

    def __init__(self, case: Case, rate: float, device: torch.device) -> None:
        self.device, task = device, EventTask(case, rate, device)
        self.layers, self.stream = task.initial, EventStream(task.initial)
        self.rate, states = -1.0, None
        for x in task.x[:, 0].contiguous():
            before = states
            _, states = self.stream(x, before)
            potentials = torch.cat([v.view(-1) for (v,) in states])
            found = float((potentials == 0).float().mean())  # a neuron that fired was reset to 0
            if before is not None and abs(found - rate) < abs(self.rate - rate):
                self.rate, self.x, self.states = found, x, before
        dense = task.dense()
        self.dense = sf.Temporal(dense.net)
        names = {m: n for n, m in dense.net.named_modules()}
        self.names = [names[m] for m in dense.neurons]
        self.given = dict(zip(self.names, self.states, strict=True))

    @torch.no_grad()
    def on_events(self) -> StreamResult:
        y, states = self.stream(self.x, self.states)
        return y, [v.view(-1) for (v,) in states]

    @torch.no_grad()
    def on_dense(self) -> StreamResult:
        x = self.x.view(1, 1, -1)
        y, final = self.dense(x, state=self.given, return_state=True)
        return y.view(-1), [final[n][0].view(-1) for n in self.names]

    def contenders(self) -> list[Contender]:
        runs = {"events": self.on_events, "dense": self.on_dense}
        found = [Contender(name, run) for name, run in runs.items()]
        if self.device.type == "cuda":
            found += [graph_contender(n + REPLAY, run, self.device) for n, run in runs.items()]
        return found

    def verify(self, contender: Contender, result: StreamResult) -> None:
        """Compare each layer with float64, for the spikes that it received.

        Raises:
            AssertionError: outputs, spikes or potentials differ.
        """
        y, potentials = result
        spikes = self.x.double()
        for layer, before, v in zip(
            self.layers, (*self.states, None), (*potentials, None), strict=True
        ):
            current = spikes @ layer.weight.detach().double().t() + layer.bias.detach().double()
            if before is None or v is None:
                error = float((y - current).norm() / current.norm())
                assert error <= ROUNDING, f"outputs differ by {error:.3g} of their norm"
                return
            h = DECAY * before[0].view(-1).double() + current
            fired = v == 0
            flipped = (h >= THRESHOLD) != fired
            margin = float((h - THRESHOLD).abs()[flipped].max()) if flipped.any() else 0.0
            assert margin <= NEAR, f"a spike differs {margin:.3g} from the threshold"
            error = float((v - h).abs()[~fired].max())
            assert error <= NEAR, f"a potential differs by {error:.3g}"
            spikes = fired.double()


def measure_case(case: Case, timing: Timing, device: torch.device) -> dict[str, Any]:
    streaming = Streaming(case, RATE, device)
    found = measure(streaming.contenders(), streaming.verify, timing)
    print(f"streaming: {describe(found)}", flush=True)
    return {"case": CASE, "neurons": sum(case.hidden), "rate": round(streaming.rate, 6)} | found
