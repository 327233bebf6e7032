"""Arguments of wrong types, which are refused in words that name them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.neurons.checks import integer
from spikefuse.nn import encode, losses, metrics, readouts

X, TARGET = torch.rand(5, 3, 4), torch.tensor([0, 1, 2])
NET = sf.Temporal(nn.Sequential(nn.Linear(4, 4), sf.LIF()))


def test_integers() -> None:
    assert integer("n", np.int64(3)) == 3
    assert type(integer("n", np.int64(0), 0)) is int


@pytest.mark.parametrize("value", ["8", 8.0, True, -1])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("num_steps", sf.PSN),
        ("order", lambda n: sf.PSN(8, n)),
        ("num_steps", sf.StepScale),
        ("order", sf.SlidingPSN),
        ("channels", lambda n: sf.PLIF(channels=n)),
        ("channels", lambda n: sf.KLIF(channels=n)),
        ("in_features", lambda n: sf.nn.EventLinear(n, 4)),
        ("out_features", lambda n: sf.nn.EventLinear(4, n)),
        ("levels", lambda n: sf.nn.QCFS(levels=n)),
        ("num_classes", lambda n: losses.pool_population(X, n)),
        ("features", lambda n: sf.Recurrent(sf.LIF(), n)),
        ("num_steps", lambda n: encode.direct(X, n)),
    ],
)
def test_numbers_of_things(name: str, make, value) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*: expected an integer of at least"):
        make(value)


DENSE = {
    "neuron": sf.LIF(),
    "neuron in the loop": lambda x: sf.LIF()(x, impl="reference"),
    "container": NET,
    "block": sf.nn.Block(nn.BatchNorm1d(4), sf.LIF()),
    "recurrent": sf.Recurrent(sf.LIF(), 4),
    "layer over time": sf.PSN(5),
    "loop": lambda x: sf.Loop(nn.Identity(), (4,))(x, return_state=True),
    "encoding": lambda x: encode.direct(x, 4),
    "events": sf.nn.Events.from_dense,
    "loss": lambda x: losses.ce_count(x, TARGET),
    "penalty": losses.l1_activity,
    "time": losses.first_spike_time,
    "population": lambda x: losses.pool_population(x, 2),
    "accuracy": lambda x: metrics.accuracy_by_rate(x, TARGET),
    "mean": readouts.mean,
    "last": readouts.last,
    "plasticity": lambda x: sf.plasticity.stdp(X, x),
    "rewards": lambda x: sf.plasticity.stdp(X, X, reward=x),
    "film": sf.plots.animate,
}


@pytest.mark.parametrize("name", DENSE)
def test_other_things_than_tensors(name: str) -> None:
    for value in (X.numpy(), "x"):
        with pytest.raises(TypeError, match=f"is a {type(value).__name__}: expected a tensor"):
            DENSE[name](value)
    with pytest.raises(TypeError, match=r"is torch\.sparse_coo: expected a dense tensor"):
        DENSE[name](X.to_sparse())


NESTED = {
    **DENSE,
    "state": lambda x: sf.LIF()(X, state=(x,)),
    "stream": lambda x: sf.Stream(NET)(x),
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(name: str, layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.rand(3, 4), torch.rand(5, 4)], layout=layout)
    with pytest.raises(
        TypeError, match=r"is a nested tensor: expected a dense .*pass their length"
    ):
        NESTED[name](x)


def test_a_sparse_state() -> None:
    with pytest.raises(TypeError, match=r"LIF: state v is torch\.sparse_coo: expected a dense"):
        sf.LIF()(X, state=(X[0].to_sparse(),))


@pytest.mark.parametrize(
    "name", ["neuron", "container", "layer over time", "loop", "loss", "time", "mean", "last"]
)
def test_no_steps(name: str) -> None:
    with pytest.raises(ValueError, match=r"shape \[0, 3, 4\]: expected \[T, B.*T >= 1"):
        DENSE[name](X[:0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sf.PSN(5, surrogate=sf.surrogate.Arctan), "expected a surrogate like Sigmoid"),
        (lambda: sf.BRF(surrogate=3), "surrogate is 3: expected a surrogate like Sigmoid"),
        (lambda: sf.LIF(surrogate=torch.sigmoid), r"of your own surrogate.Custom\(derivative="),
        (lambda: sf.decay_from_tau("2"), "tau is '2': expected a number"),
        (lambda: losses.ce_count(X, [0, 1, 2]), "target is a list: expected a tensor"),
        (lambda: metrics.accuracy_by_rate(X, None), "target is a NoneType: expected a tensor"),
        (lambda: sf.report(NET, None), r"batches is a NoneType: .* such as \[x\]"),
        (lambda: sf.record(NET, neurons=None).__enter__(), "neurons is None: expected names"),
        (lambda: sf.record(NET, states=(3,)).__enter__(), r"states is \(3,\): expected names"),
        (lambda: sf.nn.parameter_groups(None, 0.1), "net is a NoneType: expected a torch.nn.Mod"),
        (lambda: sf.nn.scale_to_rate(None, X, 0.1), "net is a NoneType: expected a torch.nn.Mod"),
        (lambda: sf.spiking(nn.ReLU(), sf.LIF, nn.ReLU), "replace is .*: expected a tuple"),
        (lambda: sf.models.mlp(sf.LIF(), 1, 2, (2, 2)), "pass lambda: LIF"),
        (lambda: sf.models.mlp(sf.LIF, 1, 2, 28), "size is 28: expected height and width"),
    ],
)
def test_other_types(call, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
