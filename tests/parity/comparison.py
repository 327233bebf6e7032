"""Comparison of our neurons with another library's: spikes and gradients must agree.

In float64 both agree to float32's precision. In float32 ours runs compiled, and a potential within
rounding of the threshold may spike in one library and not in the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from unittest import mock

import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.neurons.surrogate import Surrogate
from spikefuse.testing import ROUNDING, within_budget

SHAPE = (12, 2, 100)
EPSILON = ROUNDING[torch.float32]


class Draw:
    """Draw the hyper-parameters of one comparison.

    Successive seeds go through all combinations of flags; numbers are random.
    """

    def __init__(self, seed: int) -> None:
        self._bits, self._random = seed, Random(seed)

    def flag(self) -> bool:
        self._bits, bit = divmod(self._bits, 2)
        return bool(bit)

    def between(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def one_of(self, *choices):
        return self._random.choice(choices)


@dataclass(frozen=True)
class Match:
    """Our neuron, and the module that must compute the same for a sequence `[T, ...]`.

    Args:
        parameters: for each of our learnable parameters, the name of theirs and its derivative
            with respect to ours. Theirs may have a leading time dimension.
        state: our initial state, if theirs does not start from 0.
        until_first: compare only up to each neuron's first spike, because resets differ.
        mean, spread, highest: of the normal inputs, which are clamped at `highest`.
    """

    ours: sf.Neuron
    theirs: nn.Module
    parameters: dict[str, tuple[str, float]] = field(default_factory=dict)
    state: tuple[float, ...] | None = None
    mean: float = 0.3
    spread: float = 0.8
    highest: float = float("inf")
    until_first: bool = False
    shape: tuple[int, ...] = SHAPE

    def sequence(self, dtype: torch.dtype) -> Tensor:
        normal = torch.randn(self.shape, generator=torch.Generator().manual_seed(2))
        return (self.mean + self.spread * normal).clamp(max=self.highest).to(dtype)


Build = Callable[[Draw, torch.dtype], Match]


@dataclass
class Result:
    output: Tensor
    leaves: dict[str, Tensor]

    def gradients(self, weights: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad((self.output.double() * weights).sum(), [*self.leaves.values()])
        return dict(zip(self.leaves, found, strict=True))


def run_ours(match: Match, impl: str, dtype: torch.dtype) -> Result:
    neuron, x = match.ours.to(dtype), match.sequence(dtype).requires_grad_()
    state = match.state and tuple(torch.full_like(x[0], v).detach() for v in match.state)
    output = neuron(x, state=state, impl=impl)
    leaves = {"input": x, **{n: neuron.get_parameter(n) for n in match.parameters}}
    return Result(_until_first(output) if match.until_first else output, leaves)


def run_theirs(match: Match, dtype: torch.dtype) -> Result:
    module, x = match.theirs.to(dtype), match.sequence(dtype).requires_grad_()
    output = module(x)
    leaves = {"input": x, **{n: module.get_parameter(t) for n, (t, _) in match.parameters.items()}}
    return Result(_until_first(output) if match.until_first else output, leaves)


def _until_first(spikes: Tensor) -> Tensor:
    return spikes * (spikes.cumsum(0) - spikes == 0)


def their_gradients(match: Match, result: Result, weights: Tensor) -> dict[str, Tensor]:
    """Return their gradients with respect to our parameters."""
    gradients = result.gradients(weights)
    for name, (_, factor) in match.parameters.items():
        per_step = gradients[name].ndim > match.ours.get_parameter(name).ndim
        gradients[name] = factor * (gradients[name].sum(0) if per_step else gradients[name])
    return gradients


def draw_weights(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).double()


class Unrolled(nn.Module):
    """Run a cell, which maps an input and states to an output and states, over a sequence."""

    def __init__(self, cell: Callable[..., tuple[Tensor, ...]], states: tuple = ()) -> None:
        super().__init__()
        self.cell, self.states = cell, states

    def forward(self, x: Tensor) -> Tensor:
        states, outputs = self.states, []
        for now in x:
            output, *states = self.cell(now, *states)
            outputs.append(output)
        return torch.stack(outputs)


def assert_same_in_double(build: Build, seed: int, spiking: bool = True) -> None:
    """Compare outputs and gradients in float64, where rounding explains no difference."""
    match = build(Draw(seed), torch.float64)
    ours = run_ours(match, "reference", torch.float64)
    theirs = run_theirs(match, torch.float64)
    if spiking:
        rate = (theirs.output != 0).double().mean().item()
        assert 0.02 < rate < 0.98, f"{rate:.0%} of the outputs are spikes: a poor test"
    _assert_close("output", ours.output, theirs.output)
    weights = draw_weights(ours.output)
    expected = their_gradients(match, theirs, weights)
    for name, gradient in ours.gradients(weights).items():
        _assert_close(f"gradient of {name}", gradient, expected[name])


def assert_same_derivative(ours: Callable, theirs: Callable) -> None:
    """Compare spikes, and the pseudo-derivative away from the edges of its pieces."""
    u = torch.linspace(-2.503, 2.501, 1000)
    results = []
    for spike in (ours, theirs):
        leaf = u.clone().requires_grad_()
        s = spike(leaf)
        results.append((s.detach(), *torch.autograd.grad(s.sum(), leaf)))
    (s, derivative), (their_s, their_derivative) = results
    assert torch.equal(s, their_s)
    torch.testing.assert_close(derivative, their_derivative)


def _assert_close(name: str, actual: Tensor, expected: Tensor) -> None:
    a, e = actual.detach().double(), expected.detach().double()
    error, scale = (a - e).abs().max().item(), e.abs().max().item()
    assert scale > 0, f"{name} is zero: nothing is compared"
    assert error <= EPSILON * scale, f"{name} differs by {error:.3g} of {scale:.3g}"


def assert_same_compiled(build: Build, seed: int, impl: str = "numba") -> None:
    """Compare our kernel with their float32, within the error of their float32 from float64."""
    match, exact = build(Draw(seed), torch.float32), build(Draw(seed), torch.float64)
    ours, theirs = run_ours(match, impl, torch.float32), run_theirs(match, torch.float32)
    truth = run_theirs(exact, torch.float64)
    agree = [(ours.output - r.output).abs() < 0.5 for r in (theirs, truth)]
    same = torch.stack(agree).all(0).all(0)
    with recorded_potentials() as potentials:
        run_ours(exact, "reference", torch.float64)
    if potentials:
        near = _near_threshold(potentials, match.sequence(torch.float64))
        unexplained = (~same & ~near).sum().item()
        assert not unexplained, f"{unexplained} neurons spike differently, none near its threshold"
    weights = draw_weights(ours.output) * same
    expected = their_gradients(match, theirs, weights)
    true = their_gradients(exact, truth, weights)
    summed = true["input"].norm().item()  # of the terms that cancel in a parameter's gradient
    for name, gradient in ours.gradients(weights).items():
        scale = 0.0 if name == "input" else summed
        # As for smooth models: their order of operations may err less.
        results = gradient, expected[name], true[name]
        within_budget(f"gradient of {name}", results, 8.0, scale)


@contextlib.contextmanager
def recorded_potentials() -> Iterator[list[Tensor]]:
    """Record the arguments of surrogates: potentials minus the threshold."""
    seen: list[Tensor] = []
    forward = Surrogate.forward

    def recording(self: Surrogate, u: Tensor) -> Tensor:
        seen.append(u.detach())
        return forward(self, u)

    with mock.patch.object(Surrogate, "forward", recording):
        yield seen


def _near_threshold(potentials: list[Tensor], x: Tensor) -> Tensor:
    """Return the neurons whose potential comes within float32 rounding of a threshold.

    A step rounds a few times, and errors accumulate over the steps.
    """
    u = torch.stack(potentials).unflatten(0, (len(x), -1)).abs()
    roundings = 8 * torch.arange(1, len(x) + 1).view(-1, *[1] * (u.ndim - 1))
    return (u <= EPSILON * roundings * (u.max() + x.abs().max())).flatten(0, 1).any(0)
