"""One layer of neurons, forward and backward: its inputs, its truth, and who computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import spikefuse as sf
from benchmarks.record import l2_bytes
from benchmarks.runner import Contender, Copy
from spikefuse import reference
from spikefuse.testing import within_budget

Tensors = tuple[Tensor, ...]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

OURS, EAGER = "spikefuse", "eager loop"

# Elements of a sequence for which the eager loop's graph is kept at a time while verifying.
CHUNK_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 22}

# Elements of a sequence that are verified: of longer ones the first and the last neurons.
VERIFIED_ELEMENTS = 1 << 27


def bytes_to_move(
    numel: int,
    dtype: torch.dtype,
    num_inputs: int = 1,
    num_outputs: int = 1,
    training: bool = True,
) -> int:
    """Bytes of the sequences, `numel` elements each, that have to be read and written.

    Forward reads the inputs and writes the outputs; backward reads the inputs and the gradients
    of the outputs and writes those of the inputs.
    """
    forward, backward = num_inputs + num_outputs, 2 * num_inputs + num_outputs
    return (forward + (backward if training else 0)) * numel * dtype.itemsize


def large_copy(num_bytes: int, device: torch.device) -> Copy:
    """The machine's bandwidth, by a copy that reads and writes `num_bytes` in all."""
    source = torch.rand(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    return Copy("copy", lambda: target.copy_(source), num_bytes)


class Inputs:
    """Sets of (inputs, gradients of the outputs), tensors `[T, B, ...]`, that runs take in turn.

    On a GPU there are so many that a set has left the L2 cache when its turn comes again. Inputs
    are uniform up to `high`, gradients normal.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        num_inputs: int = 1,
        num_outputs: int = 1,
        high: float = 1.0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(shape[0])

        def draw() -> tuple[Tensors, Tensors]:
            xs = [torch.rand(tuple(shape), generator=generator, device=device) * high
                  for _ in range(num_inputs)]  # fmt: skip
            grads = [torch.randn(tuple(shape), generator=generator, device=device)
                     for _ in range(num_outputs)]  # fmt: skip
            return (
                tuple(x.to(dtype).requires_grad_() for x in xs),
                tuple(g.to(dtype) for g in grads),
            )

        first = draw()
        size = sum(t.nbytes for group in first for t in group)
        count = min(max(1, -(-2 * l2_bytes(device) // size)), 32)
        self.sets = [first, *(draw() for _ in range(count - 1))]
        self.index = 0

    @property
    def like(self) -> Tensor:
        return self.sets[0][0][0]

    @property
    def num_bytes(self) -> int:
        """Of one set."""
        return sum(t.nbytes for group in self.sets[0] for t in group)

    def next(self) -> tuple[Tensors, Tensors]:
        self.index = (self.index + 1) % len(self.sets)
        return self.sets[self.index]

    def prepare(self) -> None:
        """The next run takes the first set, and finds NaN in memory that it does not write."""
        self.index = -1
        count = 1 + sum(len(group) for group in self.sets[0])
        poison = [torch.full_like(self.like, float("nan")) for _ in range(count)]
        del poison

    def in_layout(self, memory_format: torch.memory_format) -> Inputs:
        """The same values `[T, B, C, H, W]`, each step laid out in `memory_format`."""

        def convert(t: Tensor) -> Tensor:
            steps = t.detach().flatten(0, 1).contiguous(memory_format=memory_format)
            return steps.unflatten(0, t.shape[:2])

        made = object.__new__(Inputs)
        made.index = 0
        made.sets = [
            (tuple(convert(x).requires_grad_() for x in xs), tuple(convert(g) for g in grads))
            for xs, grads in self.sets
        ]
        return made


@dataclass
class Result:
    """What a run gives: outputs, gradients of inputs, gradients of learnable parameters."""

    outputs: Tensors
    grads: Tensors = ()
    params: Tensors = ()


def contender(
    name: str,
    layer: Callable[..., Tensor | Tensors],
    inputs: Inputs,
    note: str = "",
    params: Sequence[Tensor] = (),
) -> Contender:
    """Forward and backward of `layer` for given gradients of its outputs."""

    def run() -> Result:
        xs, grads = inputs.next()
        outputs = _tuple(layer(*xs))
        found = torch.autograd.grad(outputs, (*xs, *params), grads)
        return Result(tuple(y.detach() for y in outputs), found[: len(xs)], found[len(xs) :])

    return Contender(name, run, lambda: layer(*inputs.next()[0]), note=note)


def inference(name: str, layer: Callable[..., Tensor | Tensors], inputs: Inputs) -> Contender:
    """Forward of `layer` without gradients."""

    def run() -> Result:
        with torch.no_grad():
            return Result(_tuple(layer(*inputs.next()[0])))

    return Contender(name, run)


def ours(neuron: sf.Neuron, inputs: Inputs, name: str = OURS) -> Contender:
    return contender(name, neuron, inputs, params=tuple(neuron.parameters()))


def eager(neuron: sf.Neuron, inputs: Inputs, up_to: int) -> Contender:
    if inputs.like.shape[0] > up_to:
        return Contender(EAGER, unavailable=f"asked for up to T = {up_to} only")

    def loop(*xs: Tensor) -> Any:
        return neuron(*xs, impl="reference")

    return contender(EAGER, loop, inputs, params=tuple(neuron.parameters()))


def _tuple(found: Tensor | Tensors) -> Tensors:
    return (found,) if isinstance(found, Tensor) else found


@dataclass
class Truth:
    """Results for the first set of inputs: the reference's, and in float64.

    Neurons whose float64 trajectory spikes differently get no loss (`of` sets their gradients in
    the first set to 0), so that both compute one function.

    Attributes:
        exact: whether spikefuse must give the reference's outputs bit for bit.
        num_neurons: how many were verified.
    """

    expected: Result
    true: Result
    rounded: Tensor  # neurons, [1, B, ...]: the reference's outputs differ from those in float64
    dim: int
    exact: bool
    num_neurons: int

    @classmethod
    def of(
        cls, neuron: sf.Neuron, inputs: Inputs, exact: bool = True, training: bool = True
    ) -> Truth:
        like = inputs.like
        dim = 1 if like.shape[1] > 1 else like.ndim - 1
        share = max(1, CHUNK_ELEMENTS[like.device.type] * like.shape[dim] // like.numel())
        found = []
        for piece in _verified(like, dim):
            groups = [[t[piece].split(share, dim) for t in group] for group in inputs.sets[0]]
            for xs, grads in zip(*(zip(*g, strict=True) for g in groups), strict=True):
                found.append(_both(neuron, xs, grads if training else ()))
        expected = _joined([f[0] for f in found], dim)
        true = _joined([f[1] for f in found], dim)
        rounded = torch.cat([f[2] for f in found], dim)
        # The sums over chunks are in float64; the gradient of a parameter is in its own dtype.
        expected.params = tuple(g.float() for g in expected.params)
        return cls(expected, true, rounded, dim, exact, rounded.numel())

    def verify(self, contender: Contender, result: Result) -> None:
        """Hold a result to the error that the reference itself makes in its dtype.

        For an exact neuron, spikefuse and the eager loop must give the reference's outputs bit
        for bit. Others may round differently, and a potential at the threshold then spikes or
        not: in as many neurons as the reference differs from float64, and a few more, because
        that is a small random number. Gradients, and outputs that are not spikes, are compared
        where the spikes agree: see `within_budget`.

        Raises:
            AssertionError: what differs.
        """
        own = contender.name.partition(",")[0] in (OURS, EAGER)
        outputs = self._checked(result.outputs, self.expected.outputs, "outputs")
        grads = self._checked(result.grads, self.expected.grads, "gradients")
        if own and self.exact:
            for y, wanted in zip(outputs, self.expected.outputs, strict=True):
                assert torch.equal(y, wanted), "spikes differ from the reference's"
        apart = ~_alike(outputs, self.true.outputs)
        found, allowed = int(apart.sum()), 2 * int(self.rounded.sum()) + 8
        assert found <= allowed, f"spikes differ in {found} neurons, allowed are {allowed}"
        kept = ~(apart | self.rounded)
        share = 2.0 if self.exact else 8.0  # as in spikefuse.testing
        for name, actual, expected, true in (
            *_rows("output", outputs, self.expected.outputs, self.true.outputs),
            *_rows("gradient of input", grads, self.expected.grads, self.true.grads),
        ):
            a, e, t = (torch.where(kept, x, 0) for x in (actual, expected, true))
            within_budget(name, a, e, t, share)
        self._verify_params(result.params, share)

    def _verify_params(self, params: Tensors, share: float) -> None:
        # A sum of terms about as large as the inputs' gradients, which cancel.
        scale = self.true.grads[0].norm().item() if params else 0.0
        for name, a, e, t in _rows(
            "gradient of parameter", params, self.expected.params, self.true.params
        ):
            within_budget(name, a, e, t, share, scale)

    def _checked(self, found: Tensors, expected: Tensors, what: str) -> Tensors:
        """The verified neurons of a result, of which all has been written."""
        assert len(found) == len(expected), f"{len(found)} {what}, not {len(expected)}"
        parts = []
        for x, wanted in zip(found, expected, strict=True):
            part = torch.cat([x[p] for p in _verified(x, self.dim)], self.dim)
            assert part.dtype == wanted.dtype, f"{what} are {part.dtype}"
            assert part.shape == wanted.shape, f"{what} have shape {list(x.shape)}"
            assert x.isfinite().all() or not wanted.isfinite().all(), f"{what} are not finite"
            parts.append(part)
        return tuple(parts)


def _verified(x: Tensor, dim: int) -> list[tuple[slice, ...]]:
    """Where the neurons are that are verified: all of them, or the first and the last along dim."""
    size = x.shape[dim]
    half = max(1, VERIFIED_ELEMENTS * size // x.numel() // 2)
    ends = [slice(None)] if 2 * half >= size else [slice(half), slice(size - half, size)]
    return [(slice(None),) * dim + (end,) for end in ends]


def _both(neuron: sf.Neuron, xs: Tensors, grads: Tensors) -> tuple[Result, Result, Tensor]:
    """The eager loop in the inputs' dtype and in float64, and in which neurons they differ."""
    params = tuple(neuron.parameters())
    runs = []
    with torch.set_grad_enabled(bool(grads)):
        for dtype in (xs[0].dtype, torch.float64):
            leaves = tuple(x.detach().to(dtype).requires_grad_() for x in xs)
            runs.append((leaves, reference.scan(neuron, leaves)[0]))
    same = _alike(runs[0][1], runs[1][1])
    for g in grads:
        g.mul_(same)
    results = []
    for leaves, outputs in runs:
        found: Tensors = ()
        if grads:
            weights = [g.to(y.dtype) for g, y in zip(grads, outputs, strict=True)]
            found = torch.autograd.grad(outputs, (*leaves, *params), weights)
        sums = tuple(g.double() for g in found[len(xs) :])
        results.append(Result(tuple(y.detach() for y in outputs), found[: len(xs)], sums))
    return results[0], results[1], ~same


def _alike(outputs: Tensors, others: Tensors) -> Tensor:
    """Neurons `[1, B, ...]` whose outputs never differ by as much as half a spike."""
    pairs = zip(outputs, others, strict=True)
    return torch.stack([((a - b).abs() < 0.5).all(0, keepdim=True) for a, b in pairs]).all(0)


def _joined(results: list[Result], dim: int) -> Result:
    def cat(parts: list[Tensors]) -> Tensors:
        return tuple(torch.cat(p, dim) for p in zip(*parts, strict=True))

    sums = (torch.stack(p).sum(0) for p in zip(*(r.params for r in results), strict=True))
    return Result(cat([r.outputs for r in results]), cat([r.grads for r in results]), tuple(sums))


def _rows(what: str, *series: Tensors) -> list[tuple[Any, ...]]:
    return [(f"{what} {i}", *row) for i, row in enumerate(zip(*series, strict=True))]
