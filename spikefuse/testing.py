"""Compare kernels with the reference: inputs in any layout, poisoned memory, error budgets."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from spikefuse.block.block import Block
from spikefuse.neurons.definition import Neuron, Outputs, States
from spikefuse.nn.neuron import DTYPES

LAYOUTS = ("contiguous", "channels_last", "batch_first")

# Largest relative error of one rounding from float32.
ROUNDING = dict(zip(DTYPES, (2.0**-24, 2.0**-8, 2.0**-11), strict=True))
# Random losses whose gradients show how far the loop errs in a parameter's, a few values each.
LOSSES = 5


@dataclass(frozen=True)
class Backends:
    """A device and the implementations (`impl=`) that run on it.

    Args:
        device: "cpu" or "cuda".
        impls: names of implementations.
    """

    device: str
    impls: tuple[str, ...]


def make_input(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    constant: bool = False,
) -> Tensor:
    """Return normal random values `[T, B, ...]`.

    Args:
        shape: of the result.
        dtype, device: of the result; values are drawn on the CPU in float32.
        seed: of the generator.
        constant: repeat one step, with a time stride of 0.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = (1, *shape[1:]) if constant else tuple(shape)
    return torch.randn(drawn, generator=generator).to(device, dtype).expand(tuple(shape))


def lay_out(x: Tensor, layout: str) -> Tensor:
    """Copy `x` `[T, B, C, H, W]` to another memory layout, one of `LAYOUTS`.

    Args:
        x: the sequence `[T, B, C, H, W]`.
        layout: in "batch_first" the batch is the outermost dimension in memory.

    Raises:
        ValueError: the layout is unknown.
    """
    if layout == "contiguous":
        return x
    if layout == "channels_last":
        steps = x.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        return steps.unflatten(0, x.shape[:2])
    if layout == "batch_first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    raise ValueError(f"layout is {layout!r}: expected one of {', '.join(LAYOUTS)}")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory from torch.empty and torch.empty_strided with NaN to reveal unwritten results."""

    def poison(allocate):
        def wrapper(*args, **kwargs):
            x = allocate(*args, **kwargs)
            if x.is_floating_point():
                x.detach().fill_(float("nan"))
            return x

        return wrapper

    with (
        mock.patch.object(torch, "empty", poison(torch.empty)),
        mock.patch.object(torch, "empty_strided", poison(torch.empty_strided)),
    ):
        yield


@dataclass
class Run:
    """The results of a forward pass and the leaves of its graph."""

    outputs: Outputs
    states: States
    leaves: dict[str, Tensor]

    def backward(self, weights: Sequence[Tensor], retain_graph: bool = False) -> dict[str, Tensor]:
        """Return the gradients of the weighted sum of outputs and states, by name of the leaf."""
        results = (*self.outputs, *self.states)
        terms = [(r.double() * w).sum() for r, w in zip(results, weights, strict=True)]
        loss = torch.stack(terms).sum()
        if not loss.requires_grad:  # no result depends on a leaf
            return {name: torch.zeros_like(x) for name, x in self.leaves.items()}
        leaves = list(self.leaves.values())
        gradients = torch.autograd.grad(
            loss, leaves, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        )
        return dict(zip(self.leaves, gradients, strict=True))


def run(neuron: Neuron | Block, inputs: Sequence[Tensor], state: States | None, impl: str) -> Run:
    """Run a neuron or block on fresh leaves: its inputs, initial states and parameters.

    Args:
        neuron, inputs, state: see `assert_matches_reference`.
        impl: of the neuron, or "float64" for the eager loop in double precision.
    """
    xs = [x.detach().requires_grad_() for x in inputs]
    starts = None if state is None else tuple(s.detach().requires_grad_() for s in state)
    leaves = {f"input {i}": x for i, x in enumerate(xs)}
    leaves |= {f"state {i}": s for i, s in enumerate(starts or ())}
    leaves |= dict(neuron.named_parameters())
    sequences = [x.double() for x in xs] if impl == "float64" else xs
    impl = "reference" if impl == "float64" else impl
    result, states = neuron(*sequences, state=starts, return_state=True, impl=impl)
    outputs = result if isinstance(result, tuple) else (result,)
    return Run(outputs, states, leaves)


def assert_matches_reference(
    neuron: Neuron,
    inputs: Sequence[Tensor],
    impls: Sequence[str],
    state: States | None = None,
    exact: bool = True,
    layouts: Sequence[str] = LAYOUTS[:1],
) -> None:
    """Compare implementations with the eager loop on the same inputs, in every layout.

    With `exact`, outputs and states must be equal bit for bit; otherwise they must be
    `within_budget`. Gradients must match the reference within its own float64 error. Neurons that
    spike differently in float64 are excluded from the loss, so that all compute the same function.

    A parameter's gradient is a sum of terms that cancel, and has few values. One of them says
    little about its own error, since the loop's roundings may cancel as well, nor does it show how
    large the terms are. Both come from the gradients of several random losses.

    Args:
        neuron: the neuron or block.
        inputs: `[T, B, ...]`, as many as the neuron takes.
        impls: implementations: "numba", or "triton" for tensors on a GPU.
        state: initial states `[B, ...]`; None for rest.
        exact: whether the step has correctly rounded operations only.
        layouts: memory layouts of the inputs, of `LAYOUTS`.

    Raises:
        AssertionError: the error names what differs and by how much.
    """
    expected = run(neuron, inputs, state, "reference")
    truth = run(neuron, inputs, state, "float64")
    pairs = zip(expected.outputs, truth.outputs, strict=True)
    same = torch.stack([((a - b).abs() < 0.5).all(0) for a, b in pairs]).all(0)
    generator = torch.Generator().manual_seed(1)
    parameters = [name for name, _ in neuron.named_parameters()]
    losses = [
        [
            torch.randn(r.shape, generator=generator).to(r.device) * same
            for r in (*expected.outputs, *expected.states)
        ]
        for _ in range(LOSSES if parameters else 1)
    ]
    wanted, true = ([r.backward(w, retain_graph=True) for w in losses] for r in (expected, truth))
    limits = {name: _error_and_scale(name, wanted, true) for name in parameters}
    # exp and similar functions err by up to 2 ulp here and by 1/2 to 1 in PyTorch, at every step.
    share = 2.0 if exact else 8.0
    for impl, layout in itertools.product(impls, layouts):
        where = f"{impl}, {layout}"
        with poisoned():
            actual = run(neuron, [lay_out(x, layout) for x in inputs], state, impl)
            gradients = actual.backward(losses[0])
        # Triton's interpreter truncates to bfloat16 where GPUs round.
        truncated = impl == "triton" and inputs[0].device.type == "cpu"
        for role in ("outputs", "states"):
            rows = zip(*(getattr(r, role) for r in (actual, expected, truth)), strict=True)
            for i, (a, e, t) in enumerate(rows):
                if not exact or (truncated and a.dtype == torch.bfloat16):
                    within_budget(f"{where}: {role} {i}", (a, e, t), share, truncated=truncated)
                elif not (a.dtype == e.dtype and torch.equal(a, e)):
                    raise AssertionError(f"{where}: {role} {i} {a.dtype}: {_difference(a, e)}")
        for name, gradient in gradients.items():
            label, (error, scale) = f"{where}: gradient of {name}", limits.get(name, (0.0, 0.0))
            results = gradient, wanted[0][name], true[0][name]
            within_budget(label, results, share, scale, truncated, error)


def within_budget(
    name: str,
    results: tuple[Tensor, Tensor, Tensor],
    share: float = 2.0,
    scale: float = 0.0,
    truncated: bool = False,
    error: float = 0.0,
) -> None:
    """Compare a result with that of the eager loop, given both and the float64 truth.

    Infinities and NaN must be equal. The error of the result against the truth must be about that
    of the eager loop: the budget is `share` times the largest error of the loop (or `error`, if
    larger), plus a few roundings of the largest value (or of `scale`, if larger), because float32
    arithmetic may round in another order. Results are rounded to their dtype once, or `truncated`,
    which doubles that error.

    Args:
        name: of the result, for the error.
        results: the result, that of the eager loop, and the float64 truth.
        share: multiple of the loop's error.
        scale: least value that roundings refer to.
        truncated: whether results are truncated to their dtype.
        error: least error of the loop that the budget assumes.

    Raises:
        AssertionError: the error exceeds the budget, or infinities or NaN differ.
    """
    actual, expected, truth = results
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, name
    a, e, t = (x.detach().double() for x in (actual, expected, truth))
    # A gradient may overflow half precision, but then it must do so in both.
    finite = e.isfinite()
    special = torch.where(finite, 0.0, a), torch.where(finite, 0.0, e)
    assert torch.equal(*(x.nan_to_num(1.0) for x in special)), f"{name}: NaN or infinity differs"
    finite &= t.isfinite()
    if not finite.any():
        return
    a, e, t = a[finite], e[finite], t[finite]
    scale = max(scale, t.abs().max().item())
    conversion = ROUNDING[actual.dtype] * (2 if truncated else 1)
    error = max(error, (e - t).abs().max().item())
    budget = share * error + (8 * ROUNDING[torch.float32] + conversion) * scale
    found = (a - t).abs().max().item()
    assert found <= budget, f"{name} errs by {found:.3g}, the budget is {budget:.3g}"


def _error_and_scale(
    name: str, wanted: Sequence[dict[str, Tensor]], true: Sequence[dict[str, Tensor]]
) -> tuple[float, float]:
    """Return the loop's largest error in the gradients of `name`, and their largest value."""
    e, t = (torch.stack([found[name].double() for found in rows]) for rows in (wanted, true))
    error, scale = (x.abs().nan_to_num(0.0, 0.0).max().item() for x in (e - t, t))
    return error, scale


def _difference(a: Tensor, b: Tensor) -> str:
    different = (a != b).nonzero()
    first = tuple(different[0].tolist())
    return f"{len(different)} of {a.numel()} differ, first at {first}: {a[first]} and {b[first]}"


__all__ = [
    "DTYPES",
    "LAYOUTS",
    "Backends",
    "assert_matches_reference",
    "lay_out",
    "make_input",
    "poisoned",
    "run",
    "within_budget",
]
