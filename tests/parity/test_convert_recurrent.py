"""Converted recurrent layers compute what the originals compute, in float64."""

from __future__ import annotations

import copy
import io
import operator
import warnings

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf

REASON = "SpikingJelly, snnTorch or Norse is not installed: see CONTRIBUTING.md"
sj = pytest.importorskip("spikingjelly.activation_based.neuron", reason=REASON)
layer = pytest.importorskip("spikingjelly.activation_based.layer", reason=REASON)
sj_surrogate = pytest.importorskip("spikingjelly.activation_based.surrogate", reason=REASON)
snn = pytest.importorskip("snntorch", reason=REASON)
snn_surrogate = pytest.importorskip("snntorch.surrogate", reason=REASON)
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    norse = pytest.importorskip("norse.torch", reason=REASON)

T, B, N = 10, 3, 6


def spiking(threshold: float = 0.3, **options) -> nn.Module:
    surrogate = sj_surrogate.ATan()
    return sj.ParametricLIFNode(v_threshold=threshold, surrogate_function=surrogate, **options)


def linear(sub_module: nn.Module, inputs: int, **options) -> nn.Module:
    return layer.LinearRecurrentContainer(sub_module, inputs, N, **options)


def element_wise(function, **options) -> nn.Module:
    return layer.ElementWiseRecurrentContainer(spiking(), function, **options)


def gated(y: Tensor, x: Tensor) -> Tensor:
    return x * (1.0 - 0.7 * y)


def snntorch(kind: type, **options) -> nn.Module:
    leaks = {"alpha": 0.6, "beta": 0.7} if kind is snn.RSynaptic else {"beta": 0.8}
    options = {"learn_beta": True, "threshold": 0.6, "init_hidden": True} | leaks | options
    torch.manual_seed(1)
    return kind(spike_grad=snn_surrogate.fast_sigmoid(5), **options)


def lif_of_norse(kind: type, **options) -> nn.Module:
    p = norse.LIFParameters(
        tau_mem_inv=torch.tensor(400.0), tau_syn_inv=torch.tensor(300.0), v_th=torch.tensor(0.3),
        v_leak=torch.tensor(0.1), v_reset=torch.tensor(-0.1),
    )  # fmt: skip
    return kind(4, N, p, **options)


CASES = {
    "LinearRecurrentContainer": lambda: linear(spiking(), N),
    "of sequences": lambda: linear(spiking(), N, step_mode="m", bias=False),
    "with layers": lambda: linear(
        nn.Sequential(nn.Linear(4, 5), nn.Linear(5, N, bias=False), spiking(0.1)), 4
    ),
    "ElementWiseRecurrentContainer": lambda: element_wise(operator.add, step_mode="m"),
    "gated": lambda: element_wise(gated),
    **{
        f"{kind.__name__} {reset} {name}": (
            lambda kind=kind, reset=reset, options=options: snntorch(
                kind, reset_mechanism=reset, **options
            )
        )
        for kind in (snn.RLeaky, snn.RSynaptic)
        for reset in ("subtract", "zero", "none")
        for name, options in {
            "all to all": {"linear_features": N, "output": True},
            "one to one": {"all_to_all": False, "V": -0.5},
            "one to one each": {"all_to_all": False, "V": torch.rand(N), "output": True},
        }.items()
    },
    "RLeaky at once": lambda: snntorch(snn.RLeaky, linear_features=N, reset_delay=False),
    "RLeaky one to one at once": lambda: snntorch(snn.RLeaky, all_to_all=False, reset_delay=False),
    "RLeaky fixed": lambda: snntorch(
        snn.RLeaky, all_to_all=False, V=0.3, learn_recurrent=False, learn_threshold=True
    ),
    "RLeaky convolution": lambda: snntorch(snn.RLeaky, conv2d_channels=2, kernel_size=3),
    "RSynaptic convolution": lambda: snntorch(snn.RSynaptic, conv2d_channels=2, kernel_size=3),
    "LIFRecurrentCell": lambda: lif_of_norse(norse.LIFRecurrentCell),
    "LIFRecurrentCell autapses": lambda: lif_of_norse(norse.LIFRecurrentCell, autapses=True),
    "LIFRecurrent": lambda: lif_of_norse(norse.LIFRecurrent),
}
INPUTS = {
    "with layers": 4,
    "LIFRecurrentCell": 4,
    "LIFRecurrentCell autapses": 4,
    "LIFRecurrent": 4,
}


def run_theirs(net: nn.Module, x: Tensor):
    """The outputs over time, without the states that Norse's return."""
    is_norse = type(net).__module__.startswith("norse")
    if getattr(net, "step_mode", "s") == "m" or isinstance(net, norse.LIFRecurrent):
        return net(x)[0] if is_norse else net(x)
    outputs, state = [], None
    for step in x:
        if is_norse:
            y, state = net(step, state)
        else:
            y = net(step)
        outputs.append(y)
    if isinstance(outputs[0], tuple):
        return tuple(map(torch.stack, zip(*outputs, strict=True)))
    return torch.stack(outputs)


def in_double(net: nn.Module) -> nn.Module:
    if isinstance(net, snn.SpikingNeuron):  # whose surrogates return float32
        spike = net.spike_grad
        net.spike_grad = lambda u: spike(u).to(u.dtype)
    return net.double()


def steps(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = (2, 4, 4) if "convolution" in name else (INPUTS.get(name, N),)
    return 0.5 + torch.randn(T, B, *shape, dtype=dtype)


@pytest.mark.parametrize("name", CASES)
def test_recurrent_layers(name):
    """Outputs, gradients of the input and of all weights, and state dicts both ways."""
    torch.manual_seed(0)
    theirs = CASES[name]()
    ours, parameters = sf.convert(theirs), [*theirs.parameters()]
    assert {*ours.state_dict()} == {*theirs.state_dict()}
    ours, theirs = ours.double(), in_double(theirs)
    x = steps(name).requires_grad_()
    expected, found = run_theirs(theirs, x), sf.Temporal(ours)(x, impl="reference")
    expected, found = (y if isinstance(y, tuple) else (y,) for y in (expected, found))
    assert 0.05 < (expected[0] != 0).double().mean() < 0.95
    assert torch.equal(found[0], expected[0])
    weights = [torch.randn_like(y) for y in expected]
    leaves = [x, *(p for p in parameters if p.requires_grad)]
    sums = [
        sum((y * w).sum() for y, w in zip(ys, weights, strict=True)) for ys in (expected, found)
    ]
    wanted, gradients = (torch.autograd.grad(total, leaves) for total in sums)
    for a, b in zip((*found, *gradients), (*expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    other = sf.convert(CASES[name](), copy=True)
    other.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(
        sf.Temporal(other.double())(x, impl="reference"), found if len(found) > 1 else found[0],
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip
    theirs.load_state_dict(other.state_dict())


@pytest.mark.parametrize("name", ["with layers", "gated", "RLeaky subtract one to one"])
def test_compiled_copied_and_saved(name):
    torch.manual_seed(0)
    ours, x = sf.convert(CASES[name]()), steps(name, torch.float32)
    expected = sf.Temporal(ours)(x, impl="reference")
    torch.testing.assert_close(sf.Temporal(ours)(x), expected)
    file = io.BytesIO()
    if name != "RLeaky subtract one to one":  # whose spike_grad of snnTorch is a local function
        torch.save(ours, file)
        file.seek(0)
        assert torch.equal(sf.Temporal(torch.load(file, weights_only=False))(x), expected)
    assert torch.equal(sf.Temporal(copy.deepcopy(ours))(x), sf.Temporal(ours)(x))


def with_diagonal() -> nn.Module:
    net = lif_of_norse(norse.LIFRecurrentCell)
    net.recurrent_weights.data.fill_(0.1)
    return net


REFUSED = {
    "a norm inside": (
        lambda: linear(nn.Sequential(nn.Linear(4, N), nn.BatchNorm1d(N), spiking()), 4),
        "its sub_module is not a neuron, alone or after linear layers",
    ),
    "a layer inside": (
        lambda: layer.ElementWiseRecurrentContainer(nn.Sequential(spiking()), operator.add),
        "its sub_module is not a neuron: move",
    ),
    "reset at once": (
        lambda: snntorch(snn.RSynaptic, linear_features=N, reset_delay=False),
        "its reset_delay=False has no effect",
    ),
    "states of a convolution": (
        lambda: snntorch(snn.RLeaky, conv2d_channels=2, kernel_size=3, output=True),
        "output=True adds its states",
    ),
    "V by channel": (
        lambda: snntorch(snn.RLeaky, all_to_all=False, V=torch.rand(2, 1, 1)),
        "its V has several dims",
    ),
    "diagonal": (with_diagonal, "autapses=False and weights on the diagonal"),
    "weights of no parameter": (
        lambda: lif_of_norse(norse.LIFRecurrentCell, input_weights=torch.rand(N, 4)),
        "its input_weights are not a parameter",
    ),
    "a synapse": (lambda: norse.LIFExRecurrentCell(4, N), "spikefuse.Recurrent"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    build, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        sf.convert(build())
