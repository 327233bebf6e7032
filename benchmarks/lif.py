"""One layer of LIF neurons: who computes it."""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch
from torch import Tensor

import spikefuse as sf
from benchmarks import layer
from benchmarks.layer import Inputs, Truth, contender
from benchmarks.runner import Contender, first_line

# The neuron of "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion".
DECAY, THRESHOLD, WIDTH = 0.2, 0.3, 4.0

COMPILED = "torch.compile"
INDEXING = "eager loop over x[t]"
RIVAL_NODE, RIVAL_FUNCTION = "SpikingJelly node", "SpikingJelly function"
RIVALS = (RIVAL_NODE, RIVAL_FUNCTION)


def neuron() -> sf.LIF:
    return sf.LIF(decay=DECAY, threshold=THRESHOLD, surrogate=sf.surrogate.Sigmoid(WIDTH))


def truth(inputs: Inputs) -> Truth:
    return Truth.of(neuron(), inputs)


def eager(inputs: Inputs, up_to: int) -> Contender:
    return layer.eager(neuron(), inputs, up_to)


def ours(inputs: Inputs) -> Contender:
    return layer.ours(neuron(), inputs)


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u >= 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        s = torch.sigmoid(WIDTH * u)
        return grad * (WIDTH * s * (1 - s))


def hand_written(x: Tensor) -> Tensor:
    """The loop that users write by themselves, and hand to torch.compile."""
    v, spikes = torch.zeros_like(x[0], dtype=torch.float32), []
    for current in x.unbind(0):
        h = DECAY * v + current
        s = _Spike.apply(h - THRESHOLD)
        v = h * (1 - s)
        spikes.append(s.to(x.dtype))
    return torch.stack(spikes)


def indexing(x: Tensor) -> Tensor:
    """The same with `x[t]`, as most such loops are written; each index costs a backward step a
    sequence of zeros."""
    v, spikes = torch.zeros_like(x[0], dtype=torch.float32), []
    for t in range(x.shape[0]):
        h = DECAY * v + x[t]
        s = _Spike.apply(h - THRESHOLD)
        v = h * (1 - s)
        spikes.append(s.to(x.dtype))
    return torch.stack(spikes)


class Compiler:
    """torch.compile of a hand-written loop, while compiling stays within a budget of seconds."""

    def __init__(self, up_to: int, budget: float) -> None:
        self.up_to, self.left = up_to, budget
        self.seconds_per_step = 0.0

    def contender(self, inputs: Inputs) -> Contender:
        (x,), grads = inputs.sets[0]
        steps = x.shape[0]
        if steps > self.up_to:
            return Contender(COMPILED, unavailable=f"asked for up to T = {self.up_to} only")
        expected = self.seconds_per_step * steps
        if expected > self.left:
            reason = f"compiling would take about {expected:.0f} s, {self.left:.0f} s are left"
            return Contender(COMPILED, unavailable=reason)
        torch.compiler.reset()
        compiled = torch.compile(hand_written, fullgraph=True, dynamic=False)
        start = time.perf_counter()
        try:
            torch.autograd.grad(compiled(x), x, grads)
        except Exception as error:  # whatever it is: the reason is the result
            return Contender(COMPILED, unavailable=first_line(error))
        finally:
            seconds = time.perf_counter() - start
            self.left -= seconds
            if steps >= 4:  # below, start-up dominates
                self.seconds_per_step = seconds / steps
        return contender(COMPILED, compiled, inputs, f"compiled in {seconds:.1f} s, not counted")


def spikingjelly() -> tuple[Any, Any, Any]:
    """SpikingJelly's modules of functions, neurons and surrogates.

    Raises:
        Exception: not only ImportError: its own dependencies may be missing.
    """
    names = ("functional", "neuron", "surrogate")
    functional, neurons, surrogate = (
        importlib.import_module(f"spikingjelly.activation_based.{name}") for name in names
    )
    return functional, neurons, surrogate


def constants(surrogate: Any, decay: float = DECAY, threshold: float = THRESHOLD) -> dict[str, Any]:
    """What SpikingJelly's neurons and functions take; its decay is 1 - 1/tau."""
    return {
        "tau": 1 / (1 - decay),
        "decay_input": False,
        "v_threshold": threshold,
        "v_reset": 0.0,
        "surrogate_function": surrogate,
        "detach_reset": False,
    }


def implementation(functional: Any, device: torch.device) -> str:
    """Which of its implementations SpikingJelly has chosen, for a note."""
    try:
        used = functional.neuron_implementation("lif", device)["implementation"]
    except Exception:  # a CPU has one implementation only
        used = "torch"
    return f"its implementation: {used}"


def rivals(inputs: Inputs) -> list[Contender]:
    """SpikingJelly's layer, and its function with a float32 state.

    The layer keeps its state in the dtype of the input; only the function has a fused path for a
    bfloat16 input, which needs a float32 state.
    """
    try:
        functional, neurons, surrogate = spikingjelly()
    except Exception as error:
        return [Contender(name, unavailable=first_line(error)) for name in RIVALS]
    x = inputs.like
    given = constants(surrogate.Sigmoid(alpha=WIDTH))
    node = neurons.LIFNode(**given, step_mode="m")
    rest = torch.zeros(x.shape[1:], device=x.device)  # made once: not part of its time

    def whole(x: Tensor) -> Tensor:
        y = node(x)
        functional.reset_net(node)
        return y

    def function(x: Tensor) -> Tensor:
        return functional.lif_multi_step(x, rest, **given)[0]

    note = implementation(functional, x.device)
    if x.dtype != torch.float32:
        return [
            contender(RIVAL_NODE, whole, inputs, f"its implementation: eager loop in {x.dtype}"),
            contender(RIVAL_FUNCTION, function, inputs, note),
        ]
    return [
        contender(RIVAL_NODE, whole, inputs, note),
        contender(RIVAL_FUNCTION, function, inputs, note),
    ]
