"""One layer of LIF neurons, forward and backward: its inputs, its truth, and who computes it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import spikefuse as sf
from benchmarks.record import l2_bytes
from benchmarks.runner import Contender, first_line
from spikefuse import reference
from spikefuse.testing import within_budget

# The neuron of "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion".
DECAY, THRESHOLD, WIDTH = 0.2, 0.3, 4.0

# Elements of a sequence for which the eager loop's graph is kept at a time while verifying.
CHUNK_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 22}

EAGER, COMPILED, OURS = "eager loop", "torch.compile", "spikefuse"
INDEXING = "eager loop over x[t]"
RIVAL_NODE, RIVAL_FUNCTION = "SpikingJelly node", "SpikingJelly function"
RIVALS = (RIVAL_NODE, RIVAL_FUNCTION)


def neuron() -> sf.LIF:
    return sf.LIF(decay=DECAY, threshold=THRESHOLD, surrogate=sf.surrogate.Sigmoid(WIDTH))


def bytes_to_move(T: int, N: int, dtype: torch.dtype) -> int:
    """Forward reads x and writes y; backward reads x and grad_y and writes grad_x."""
    return 5 * T * N * dtype.itemsize


class Inputs:
    """Sets of (x, grad_y), `[T, 1, N]` each, that runs take in turn.

    On a GPU there are so many that a set has left the L2 cache when its turn comes again.
    """

    def __init__(self, T: int, N: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(T)
        one = 2 * T * N * dtype.itemsize
        count = min(max(1, -(-2 * l2_bytes(device) // one)), 32)
        self.sets = [self._draw((T, 1, N), dtype, device, generator) for _ in range(count)]
        self.index = 0

    @staticmethod
    def _draw(
        shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        x = torch.rand(shape, generator=source, device=device).to(dtype).requires_grad_()
        return x, torch.randn(shape, generator=source, device=device).to(dtype)

    def next(self) -> tuple[Tensor, Tensor]:
        self.index = (self.index + 1) % len(self.sets)
        return self.sets[self.index]

    def prepare(self) -> None:
        """The next run takes the first set, and finds NaN in memory that it does not write."""
        self.index = -1
        poison = [torch.full_like(self.sets[0][0], float("nan")) for _ in range(3)]
        del poison


@dataclass
class Truth:
    """Spikes and input gradients of the first set of inputs: the reference's, and in float64."""

    spikes: Tensor
    grad: Tensor
    true_spikes: Tensor
    true_grad: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> Truth:
        x, grad_y = inputs.sets[0]
        return cls(*_by_chunks(x, grad_y, x.dtype), *_by_chunks(x, grad_y, torch.float64))

    def verify(self, contender: Contender, result: tuple[Tensor, Tensor]) -> None:
        """Hold a result to the error that the reference itself makes in its dtype.

        spikefuse and the eager loop must give the reference's spikes bit for bit. Another library
        may round differently, and a potential at the threshold then spikes or not: in as many
        neurons as the reference differs from float64, and a few more, because that is a small
        random number. Gradients are compared where the spikes agree: see `within_budget`.

        Raises:
            AssertionError: what differs.
        """
        spikes, grad = result
        assert spikes.dtype == self.spikes.dtype, f"spikes are {spikes.dtype}"
        assert spikes.shape == self.spikes.shape, f"spikes have shape {list(spikes.shape)}"
        assert grad.isfinite().all(), "gradient is not finite"
        rounded = (self.spikes != self.true_spikes).any(0)
        if contender.name in (OURS, EAGER):
            assert torch.equal(spikes, self.spikes), "spikes differ from the reference's"
        apart = (spikes != self.true_spikes).any(0)
        found, allowed = int(apart.sum()), 2 * int(rounded.sum()) + 8
        assert found <= allowed, f"spikes differ in {found} neurons, allowed are {allowed}"
        kept = ~(apart | rounded)

        def compared(gradient: Tensor) -> Tensor:
            return torch.where(kept, gradient, 0).flatten()

        within_budget("x", compared(grad), compared(self.grad), compared(self.true_grad))


def _by_chunks(x: Tensor, grad_y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The eager loop on some neurons at a time, because its graph is large."""
    share = max(1, CHUNK_ELEMENTS[x.device.type] // x.shape[0])
    spikes, grads = [], []
    for part, grad in zip(x.split(share, -1), grad_y.split(share, -1), strict=True):
        leaf = part.detach().to(dtype).requires_grad_()
        y = reference.scan(neuron(), (leaf,))[0][0]
        grads += torch.autograd.grad(y, leaf, grad.to(dtype))
        spikes.append(y.detach().bool() if dtype == torch.float64 else y.detach())
    return torch.cat(spikes, -1), torch.cat(grads, -1)


def contender(
    name: str, layer: Callable[[Tensor], Tensor], inputs: Inputs, note: str = ""
) -> Contender:
    """Forward and backward of `layer` for a given gradient of its output."""

    def run() -> tuple[Tensor, Tensor]:
        x, grad_y = inputs.next()
        y = layer(x)
        (grad_x,) = torch.autograd.grad(y, x, grad_y)
        return y.detach(), grad_x

    return Contender(name, run, lambda: layer(inputs.next()[0]), note=note)


def eager(inputs: Inputs, up_to: int) -> Contender:
    steps = inputs.sets[0][0].shape[0]
    if steps > up_to:
        return Contender(EAGER, unavailable=f"asked for up to T = {up_to} only")
    lif = neuron()
    return contender(EAGER, lambda x: lif(x, impl="reference"), inputs)


def ours(inputs: Inputs) -> Contender:
    lif = neuron()
    return contender(OURS, lambda x: lif(x), inputs)


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
        x, grad_y = inputs.sets[0]
        steps = x.shape[0]
        if steps > self.up_to:
            return Contender(COMPILED, unavailable=f"asked for up to T = {self.up_to} only")
        expected = self.seconds_per_step * steps
        if expected > self.left:
            reason = f"compiling would take about {expected:.0f} s, {self.left:.0f} s are left"
            return Contender(COMPILED, unavailable=reason)
        torch.compiler.reset()
        layer = torch.compile(hand_written, fullgraph=True, dynamic=False)
        start = time.perf_counter()
        try:
            torch.autograd.grad(layer(x), x, grad_y)
        except Exception as error:  # whatever it is: the reason is the result
            return Contender(COMPILED, unavailable=first_line(error))
        finally:
            seconds = time.perf_counter() - start
            self.left -= seconds
            if steps >= 4:  # below, start-up dominates
                self.seconds_per_step = seconds / steps
        return contender(COMPILED, layer, inputs, f"compiled in {seconds:.1f} s, not counted")


def rivals(inputs: Inputs) -> list[Contender]:
    """SpikingJelly's layer, and its function with a float32 state.

    Its decay is 1 - 1/tau. The layer keeps its state in the dtype of the input; only the function
    has a fused path for a bfloat16 input, which needs a float32 state.
    """
    try:
        functional, neurons, surrogate = (
            importlib.import_module(f"spikingjelly.activation_based.{name}")
            for name in ("functional", "neuron", "surrogate")
        )
    except Exception as error:  # not only ImportError: its own dependencies may be missing
        return [Contender(name, unavailable=first_line(error)) for name in RIVALS]
    x = inputs.sets[0][0]
    constants: dict[str, Any] = {
        "tau": 1 / (1 - DECAY),
        "decay_input": False,
        "v_threshold": THRESHOLD,
        "v_reset": 0.0,
        "surrogate_function": surrogate.Sigmoid(alpha=WIDTH),
        "detach_reset": False,
    }
    node = neurons.LIFNode(**constants, step_mode="m")
    rest = torch.zeros(x.shape[1:], device=x.device)  # made once: not part of its time

    def layer(x: Tensor) -> Tensor:
        y = node(x)
        functional.reset_net(node)
        return y

    def function(x: Tensor) -> Tensor:
        return functional.lif_multi_step(x, rest, **constants)[0]

    try:
        used = functional.neuron_implementation("lif", x.device)["implementation"]
    except Exception:  # a CPU has one implementation only
        used = "torch"
    note = f"its implementation: {used}"
    if x.dtype != torch.float32:
        return [
            contender(RIVAL_NODE, layer, inputs, f"its implementation: eager loop in {x.dtype}"),
            contender(RIVAL_FUNCTION, function, inputs, note),
        ]
    return [
        contender(RIVAL_NODE, layer, inputs, note),
        contender(RIVAL_FUNCTION, function, inputs, note),
    ]
