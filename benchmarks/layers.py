"""One layer, forward and backward: its input, the contenders, and the reference's results.

The LIF neuron is from "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import spikefuse as sf
from benchmarks.runner import Contender, difference, first_line
from spikefuse import reference

Tensors = tuple[Tensor, ...]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DECAY, THRESHOLD, WIDTH = 0.2, 0.3, 4.0
GRID = 1 / 64  # sums of few multiples of it are exact in any order

OURS, LOOP = "spikefuse", "eager loop"
COMPILED = "torch.compile"

# The largest number of elements to verify; of larger inputs, the first and last neurons.
VERIFIED_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 22}
# Allowed relative difference from the reference; of spikes, the root of the share that differs.
# Another order of operations flips one in a million, a state in bfloat16 one in ten thousand.
ALLOWED = 0.005


def lif(threshold: float = THRESHOLD) -> sf.LIF:
    return sf.LIF(decay=DECAY, threshold=threshold, surrogate=sf.surrogate.Sigmoid(WIDTH))


@dataclass
class Inputs:
    """Inputs `[T, B, ...]` of a layer, and as many gradients of its outputs."""

    xs: Tensors
    grads: Tensors

    @classmethod
    def draw(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        ports: int = 1,
        high: float = 1.0,
    ) -> Inputs:
        """Draw `ports` inputs, uniform in `[0, high)`, and normal gradients."""
        options: dict[str, Any] = {"device": device}
        options["generator"] = torch.Generator(device).manual_seed(shape[0])
        xs = [torch.rand(shape, **options) * high for _ in range(ports)]
        grads = [torch.randn(shape, **options) for _ in range(ports)]
        return cls(
            tuple(x.to(dtype).requires_grad_() for x in xs), tuple(g.to(dtype) for g in grads)
        )

    def in_layout(self, memory_format: torch.memory_format) -> Inputs:
        """Return the same values `[T, B, C, H, W]` with each step in `memory_format`."""

        def convert(t: Tensor) -> Tensor:
            steps = t.detach().flatten(0, 1).contiguous(memory_format=memory_format)
            return steps.unflatten(0, t.shape[:2])

        xs = tuple(convert(x).requires_grad_() for x in self.xs)
        return Inputs(xs, tuple(convert(g) for g in self.grads))

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.xs, *self.grads))

    def bytes_to_move(self, training: bool = True) -> int:
        """Return the bytes that must be read and written.

        Forward reads the inputs and writes the outputs; backward reads the inputs and the
        gradients of the outputs, and writes the gradients of the inputs.
        """
        inputs, outputs = len(self.xs), len(self.grads)
        forward, backward = inputs + outputs, 2 * inputs + outputs
        return (forward + (backward if training else 0)) * self.xs[0].nbytes


@dataclass
class LayerResult:
    """Outputs, gradients of the inputs, and gradients of the learnable parameters."""

    outputs: Tensors
    grads: Tensors = ()
    params: Tensors = ()


# Contenders


def train(
    layer: Callable[..., Tensor | Tensors], inputs: Inputs, params: Sequence[Tensor] = ()
) -> LayerResult:
    """Run forward and backward of `layer` for given gradients of its outputs."""
    outputs = _tuple(layer(*inputs.xs))
    found = torch.autograd.grad(outputs, (*inputs.xs, *params), inputs.grads)
    num = len(inputs.xs)
    return LayerResult(tuple(y.detach() for y in outputs), found[:num], found[num:])


def infer(layer: Callable[..., Tensor | Tensors], inputs: Inputs) -> LayerResult:
    """Run forward of `layer` without gradients."""
    with torch.no_grad():
        return LayerResult(_tuple(layer(*inputs.xs)))


def trained(
    name: str,
    layer: Callable[..., Tensor | Tensors],
    inputs: Inputs,
    params: Sequence[Tensor] = (),
    allowed: float | None = None,
) -> Contender:
    return Contender(name, partial(train, layer, inputs, params), allowed=allowed)


def ours(neuron: sf.Neuron, inputs: Inputs, name: str = OURS) -> Contender:
    return trained(name, neuron, inputs, tuple(neuron.parameters()))


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u >= 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        s = torch.sigmoid(WIDTH * u)
        return grad * (WIDTH * s * (1 - s))


def hand_written(
    x: Tensor, weight: Tensor | None = None, decay: float = DECAY, threshold: float = THRESHOLD
) -> Tensor:
    """Compute LIF spikes, recurrent with a `weight`, by a loop over time as users write it."""
    v = torch.zeros_like(x[0], dtype=torch.float32)
    s, spikes = torch.zeros_like(x[0]), []
    for current in x.unbind(0):
        if weight is not None:
            current = current + F.linear(s, weight)
        h = decay * v + current
        fired = Spike.apply(h - threshold)
        v = h * (1 - fired)
        s = fired.to(x.dtype)
        spikes.append(s)
    return torch.stack(spikes)


def compiled(inputs: Inputs) -> Contender:
    """Return torch.compile of the hand-written loop."""
    torch.compiler.reset()
    function = torch.compile(hand_written, fullgraph=True, dynamic=False)
    try:
        train(function, inputs)
    except Exception as error:
        return Contender(COMPILED, unavailable=first_line(error))
    return trained(COMPILED, function, inputs)


def _tuple(found: Tensor | Tensors) -> Tensors:
    return (found,) if isinstance(found, Tensor) else found


# Verification


def on_grid(x: Tensor) -> Tensor:
    return (x / GRID).round() * GRID


def compare(found: LayerResult, expected: LayerResult, allowed: float = ALLOWED) -> None:
    """Check that each tensor differs from the expected one by at most `allowed` of its norm.

    Raises:
        AssertionError: a tensor differs, is missing, or has NaN, another shape or dtype.
    """
    for what, name in (("outputs", "output"), ("grads", "gradient of input"),
                       ("params", "gradient of parameter")):  # fmt: skip
        values, wanted = getattr(found, what), getattr(expected, what)
        assert len(values) == len(wanted), f"{len(values)} {what}, not {len(wanted)}"
        for i, (a, b) in enumerate(zip(values, wanted, strict=True)):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{name} {i} is {a.dtype}{[*a.shape]}"
            assert a.isfinite().all() or not b.isfinite().all(), f"{name} {i} is not finite"
            error = difference([a], [b])
            assert error <= allowed, f"{name} {i} differs by {error:.3g} of its norm"


class LayerTruth:
    """The results of the reference for a neuron.

    Of a large input, only the first and last neurons are verified, without gradients of
    parameters, which are sums over all neurons.

    Args:
        exact: whether spikefuse must equal the reference's outputs bit for bit.
        training: whether gradients are compared.
    """

    def __init__(
        self, neuron: sf.Neuron, inputs: Inputs, exact: bool = True, training: bool = True
    ) -> None:
        self.exact, x = exact, inputs.xs[0]
        self.dim = 1 if x.shape[1] > 1 else x.ndim - 1
        size = x.shape[self.dim]
        half = max(1, VERIFIED_ELEMENTS[x.device.type] * size // x.numel() // 2)
        self.ends = [(0, half), (size - half, half)] if 2 * half < size else [(0, size)]
        verified = Inputs(
            tuple(self.select(x).requires_grad_() for x in inputs.xs),
            tuple(map(self.select, inputs.grads)),
        )

        def loop(*xs: Tensor) -> Tensors:
            return reference.scan(neuron, xs)[0]

        params = tuple(neuron.parameters()) if len(self.ends) == 1 else ()
        self.expected = train(loop, verified, params) if training else infer(loop, verified)

    def select(self, x: Tensor) -> Tensor:
        """Return a copy of the verified neurons."""
        return torch.cat([x.detach().narrow(self.dim, *end) for end in self.ends], self.dim)

    def verify(self, contender: Contender, result: LayerResult) -> None:
        """Compare with the reference; spikefuse and the eager loop must have its very spikes.

        Raises:
            AssertionError: the result is wrong.
        """
        outputs, grads = (tuple(map(self.select, ts)) for ts in (result.outputs, result.grads))
        params = result.params if len(self.ends) == 1 else ()
        allowed = ALLOWED if contender.allowed is None else contender.allowed
        compare(LayerResult(outputs, grads, params), self.expected, allowed)
        if self.exact and contender.name.partition(",")[0] in (OURS, LOOP):
            for y, wanted in zip(outputs, self.expected.outputs, strict=True):
                assert torch.equal(y, wanted), "spikes differ from the reference's"
