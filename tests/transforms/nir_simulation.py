"""NIR graphs by their equations: Euler's method in float64, node after node and step after step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def simulate(graph: Any, x: Tensor, dt: float) -> Tensor:
    """Return the output `[T, B, ...]` of a graph without subgraphs for `x` `[T, B, ...]`."""
    simulation = _Simulation(graph, dt)
    return torch.stack([simulation.step(now.double()) for now in x])


class _Simulation:
    def __init__(self, graph: Any, dt: float) -> None:
        self.nodes, self.dt = graph.nodes, dt
        self.before = {n: [a for a, b in graph.edges if b == n] for n in graph.nodes}
        self.states: dict[str, Tensor] = {}
        self.past: dict[str, list[Tensor]] = {}
        self.fired: dict[str, Tensor] = {}

    def step(self, x: Tensor) -> Tensor:
        self.x, self.values, self.open = x, {}, set()
        (output,) = (n for n, node in self.nodes.items() if type(node).__name__ == "Output")
        return self.value(output)

    def value(self, name: str) -> Tensor:
        if name in self.open:  # fed back: what it gave at the last step
            shape = self.nodes[name].output_type["output"]
            return self.fired.get(name, torch.zeros(1, *shape, dtype=torch.float64))
        if name not in self.values:
            self.open.add(name)
            read = [self.value(n) for n in self.before[name]]
            self.open.remove(name)
            self.values[name] = self.node(name, sum(read))
        return self.values[name]

    def node(self, name: str, x: Any) -> Tensor:
        node, dt = self.nodes[name], self.dt
        kind = type(node).__name__
        p = {k: _tensor(v) for k, v in vars(node).items() if isinstance(v, np.ndarray | Tensor)}
        if kind == "Input":
            return self.x
        if kind == "Output":
            return x
        if kind in ("Linear", "Affine"):
            return x @ p["weight"].T + p.get("bias", 0)
        if kind in ("Conv1d", "Conv2d"):
            conv = F.conv1d if kind == "Conv1d" else F.conv2d
            options = node.stride, node.padding, node.dilation, node.groups
            return conv(x.double(), p["weight"], p["bias"], *options)
        if kind in ("SumPool2d", "AvgPool2d"):
            sizes = [tuple(map(int, v)) for v in (node.kernel_size, node.stride, node.padding)]
            divisor = 1 if kind == "SumPool2d" else None
            return F.avg_pool2d(x, *sizes, divisor_override=divisor)
        if kind == "Flatten":
            return torch.stack([sample.flatten(node.start_dim, node.end_dim) for sample in x])
        if kind == "Scale":
            return x * p["scale"]
        if kind == "Threshold":
            return (x > p["threshold"]).double()
        if kind == "Delay":
            steps = (p["delay"] / dt).round().long()
            past = self.past.setdefault(name, [])
            past.append(x)
            parts = [torch.where(steps == d, y, 0.0) for d, y in enumerate(reversed(past))]
            return sum(parts)  # type: ignore[return-value]
        v = self.states.get(name, p.get("v_leak", torch.tensor(0.0)))
        if kind in ("CubaLI", "CubaLIF"):
            current = self.states.get(f"{name} current", torch.tensor(0.0))
            current = current + dt / p["tau_syn"] * (p["w_in"] * x - current)
            self.states[f"{name} current"] = x = current
        tau = p.get("tau", p.get("tau_mem"))
        v = v + (dt * p["r"] * x if tau is None else dt / tau * (p["v_leak"] - v + p["r"] * x))
        y = v
        if "v_threshold" in p:
            y = (v > p["v_threshold"]).double()
            v = torch.where(y > 0, p["v_reset"], v)
        self.states[name], self.fired[name] = v, y
        return y


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(value).double()
