"""Random definitions against the eager loop.

`SPIKEFUSE_DEFINITIONS=5000 pytest tests/compiler/test_definitions.py` checks more of them.
"""

import os

import pytest
import torch

import spikefuse as sf
from spikefuse.compiler import emit_numba
from spikefuse.kernels import numba_runtime
from tests.compiler.definitions import differences, draw_definition, interpreted

COUNT = int(os.environ.get("SPIKEFUSE_DEFINITIONS", "60"))
GROUPS = 4


@pytest.mark.filterwarnings("ignore:no output of Drawn.step has a gradient")
@pytest.mark.parametrize("group", range(GROUPS))
def test_random_definitions(group):
    with interpreted():
        found = {seed: differences(seed, "numba") for seed in range(group, COUNT, GROUPS)}
    wrong = {seed: lines for seed, lines in found.items() if lines}
    assert not wrong, f"{wrong}; the first is\n{draw_definition(min(wrong)).source}"


# Seeds of their own, since a definition that ran as Python stays so.
@pytest.mark.parametrize("seed", range(100_000, 100_000 + max(2, COUNT // 50)))
def test_compiled_definitions(seed, backends):
    for impl in backends.impls:
        assert not differences(seed, impl, backends.device), draw_definition(seed).source


class Unread(sf.Neuron):
    """A state that no step reads: autograd follows it from the final state only."""

    v, w = sf.State(), sf.State()

    def step(self, x, v, w):
        return x + v, (0.5 * v, torch.where(x > 0.0, torch.log(x), v))


class Masked(sf.Neuron):
    """Products of spikes with infinite values."""

    def step(self, x, y):
        return (x * (y > 0.5).float(), torch.log(x) * (y > 0.5)), ()


class Unselected(sf.Neuron):
    """An infinite derivative in the branch that `where` does not select."""

    def step(self, x, y):
        return torch.where(x > 0.0, torch.sqrt(x) + 1.0 / x, y), ()


class Scalar(sf.Neuron):
    """A condition on a parameter, combined with conditions on an input."""

    def __init__(self):
        super().__init__()
        self.level = 0.75

    def step(self, x, y):
        return ((x > 0.5) & (self.level > 0.5) | (y > self.level) ^ (self.level > y),), ()


def test_conditions_on_parameters(backends):
    x, y = torch.rand(2, 4, 2, 8, device=backends.device)
    for impl in backends.impls:
        assert torch.equal(Scalar()(x, y, impl=impl), Scalar()(x, y, impl="reference"))


@pytest.mark.parametrize("kind", [Unread, Masked, Unselected])
def test_gradients_are_not_finite_where_those_of_autograd_are_not(kind, backends):
    values = torch.tensor([0.0, 0.25, 1.0, -1.0, float("inf")])
    x, y = (
        grid.expand(3, 5, 5).to(backends.device)
        for grid in torch.meshgrid(values, values, indexing="ij")
    )
    inputs = [x.clone(), y.clone()][: len(kind.input_names)]

    def gradients(impl):
        leaves = [v.clone().requires_grad_() for v in inputs]
        result, states = kind()(*leaves, return_state=True, impl=impl)
        results = (*(result if isinstance(result, tuple) else (result,)), *states)
        # The loop of `Masked` does not use y, which only conditions read.
        loss = sum(r.sum() for r in results)
        return torch.autograd.grad(loss, leaves, materialize_grads=True)

    for impl in backends.impls:
        for a, e in zip(gradients(impl), gradients("reference"), strict=True):
            torch.testing.assert_close(a, e, equal_nan=True)


def test_the_compiler_and_the_runtime_agree_on_the_number_of_arrays():
    assert emit_numba.MAX_SLOTS == numba_runtime.MAX_SLOTS
