"""Which calls share kernels, and which must not."""

from __future__ import annotations

import gc
import threading
import weakref
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from spikefuse import LIF, Neuron, UnsupportedOperation
from spikefuse.kernels import numba_runtime
from spikefuse.neurons.surrogate import Arctan, Custom, Sigmoid
from spikefuse.scan import cache
from spikefuse.scan.kinds import kinds_of
from spikefuse.scan.op import choose
from spikefuse.scan.program import prepare, program
from spikefuse.scan.records import Wanted


def test_a_value_may_be_a_float_or_a_tensor() -> None:
    x = torch.linspace(-1, 2, 24).view(4, 2, 3)
    expected = LIF(decay=0.25, threshold=0.75)(x)
    assert expected.any()
    for decay, threshold in ((0.25, torch.tensor(0.75)), (torch.tensor(0.25), 0.75)):
        assert torch.equal(LIF(decay=decay, threshold=threshold)(x), expected)


def test_equal_kernels_forward_but_not_backward() -> None:
    class Gain(Neuron):
        def __init__(self, learned: bool) -> None:
            super().__init__()
            self.gain, self.learned = nn.Parameter(torch.tensor(2.0)), learned

        def step(self, x: Tensor) -> tuple[Tensor, tuple[()]]:
            return x * (self.gain if self.learned else self.gain.detach()), ()

    x = torch.ones(3, 4, requires_grad=True)
    found = []
    for learned in (False, True):
        neuron = Gain(learned)
        neuron(x).sum().backward()
        assert neuron.gain.grad is not None
        found.append(neuron.gain.grad.item())
    assert found == [0.0, 12.0]


@pytest.mark.parametrize("recurrent", [False, True])
def test_neurons_that_differ_in_gradients_share_the_forward_kernel(recurrent: bool) -> None:
    made = []
    for neuron in (LIF(), LIF(surrogate=Arctan()), LIF(surrogate=Sigmoid(), detach_reset=True)):
        values, statics = neuron.values(), neuron.description().statics
        made.append(prepare(neuron, "numba", statics, kinds_of(values)))
    assert len({p.forward(recurrent) for p in made}) == 1
    assert len({p.backward(("x",), (), (), recurrent) for p in made}) == 3


def test_primals_of_fixed_parameters_are_not_compiled() -> None:
    def derivative(u: Tensor, width: Tensor) -> Tensor:
        return torch.exp(-width * u * u)

    def primal(u: Tensor, width: Tensor) -> Tensor:
        return torch.lgamma(width * u)

    found = []
    for impl in ("auto", "reference"):
        x = torch.linspace(0, 2, 12).view(3, 4).requires_grad_()
        LIF(surrogate=Custom(derivative, primal=primal, width=2.0))(x, impl=impl).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)
    learned = Custom(derivative, primal=primal, width=nn.Parameter(torch.tensor(2.0)))
    with pytest.raises(UnsupportedOperation, match=r"derivative of LIF\.step uses 'lgamma'"):
        LIF(surrogate=learned)(torch.rand(3, 4))


class Steps(Neuron):
    """Its constant shapes the source."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def step(self, x: Tensor) -> tuple[Tensor, tuple[()]]:
        for _ in range(self.count):
            x = x * 1.5
        return x, ()


def test_kernels_that_no_neuron_runs_are_dropped() -> None:
    x = torch.ones(2, 3)
    neuron, used, dead = Steps(2), [], []
    for count in (2, 3, 4):
        neuron.count = count
        assert neuron(x)[0, 0] == 1.5**count
        used.append(program(choose(neuron, x, Wanted(impl="numba"))[0]))
        dead.append(weakref.ref(used[-1].forward().overloads.copy().popitem()[1].library))
    # The programs of the counts before are not run any longer.
    assert [bool(own.modules) for own in used] == [False, False, True]
    gc.collect()
    assert [ref() is None for ref in dead] == [True, True, False]
    neuron.count = 2
    assert neuron(x)[0, 0] == 1.5**2
    assert numba_runtime._alias_metadata.cache_info().currsize == 0


def test_backward_of_a_neuron_that_is_gone() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    y = Steps(5)(x)
    for count in (6, 7):
        Steps(count)(x.detach())
    y.sum().backward()
    assert x.grad is not None
    assert x.grad[0, 0] == 1.5**5


def test_source_is_imported_on_a_thread_with_enough_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be what imports Numba."""
    threads, load = [], cache.load

    def record(*args: str) -> ModuleType:
        threads.append(threading.current_thread())
        return load(*args)

    monkeypatch.setattr(cache, "load", record)
    neuron = LIF()
    program = prepare(neuron, "numba", neuron.description().statics, kinds_of(neuron.values()))
    monkeypatch.setattr(program, "modules", {})
    program.forward()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
