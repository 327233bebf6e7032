"""Error budgets admit rounding and nothing else."""

import pytest
import torch

import spikefuse as sf
from spikefuse import testing
from spikefuse.testing import assert_matches_reference, make_input


def cuba_lif():
    """A neuron whose gradients are sums of large terms that cancel."""
    return sf.CubaLIF(torch.nn.Parameter(torch.tensor([0.3, 0.8])), 0.8, 0.6, v_reset=-0.1)


def check(neuron, backends, seed=0):
    shape, device = (2, 2, 4, 9), backends.device
    state = tuple(make_input(shape, device=device, seed=9 + j) for j in range(len(neuron.states)))
    x = make_input((19, *shape), device=device, seed=seed)
    assert_matches_reference(neuron.to(device), [x], backends.impls, state)


def test_terms_that_cancel_are_within_the_budget(backends):
    for seed in range(8):
        check(cuba_lif(), backends, seed)


@pytest.mark.parametrize("make", [cuba_lif, lambda: sf.PLIF(0.7), lambda: sf.KLIF(0.8, 0.6, 1.3)])
def test_an_error_in_a_gradient_is_found(make, backends, monkeypatch):
    run, wrong = testing.run, []

    class WithError(testing.Run):
        def backward(self, *args, **options):
            found = super().backward(*args, **options)
            return {n: x * (1 + 1e-3) if n in wrong else x for n, x in found.items()}

    def mutated(neuron, inputs, state, impl):
        result = run(neuron, inputs, state, impl)
        return WithError(**vars(result)) if impl in backends.impls else result

    monkeypatch.setattr(testing, "run", mutated)
    check(make(), backends)
    for name in ("input 0", "state 0", *dict(make().named_parameters())):
        wrong[:] = [name]
        with pytest.raises(AssertionError, match=f"gradient of {name} errs"):
            check(make(), backends)
