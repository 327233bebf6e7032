"""Converted networks compute what the originals compute, in float64."""

from __future__ import annotations

import re
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from tests.notebooks import run_notebook
from tests.parity import spikingjelly_neurons
from tests.parity.comparison import Draw

REASON = "SpikingJelly, snnTorch or Norse is not installed: see CONTRIBUTING.md"
sj = pytest.importorskip("spikingjelly.activation_based.neuron", reason=REASON)
layer = pytest.importorskip("spikingjelly.activation_based.layer", reason=REASON)
functional = pytest.importorskip("spikingjelly.activation_based.functional", reason=REASON)
sj_surrogate = pytest.importorskip("spikingjelly.activation_based.surrogate", reason=REASON)
snn = pytest.importorskip("snntorch", reason=REASON)
snn_surrogate = pytest.importorskip("snntorch.surrogate", reason=REASON)
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    norse = pytest.importorskip("norse.torch", reason=REASON)

# Their models import torchvision for the download of weights only, by a function of torch.
_download = types.ModuleType("torchvision._internally_replaced_utils")
_download.load_state_dict_from_url = torch.hub.load_state_dict_from_url  # type: ignore[attr-defined]
_modules = {"torchvision": types.ModuleType("torchvision"), _download.__name__: _download}
with mock.patch.dict(sys.modules, _modules):
    sew_resnet = pytest.importorskip("spikingjelly.activation_based.model.sew_resnet")
    spiking_resnet = pytest.importorskip("spikingjelly.activation_based.model.spiking_resnet")
    spiking_vgg = pytest.importorskip("spikingjelly.activation_based.model.spiking_vgg")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def run_ours(net: nn.Module, x: Tensor):
    return sf.Temporal(net)(x, impl="reference")


def sequence(*shape: int, high: float = 2.0) -> Tensor:
    return high * torch.rand(*shape, dtype=torch.float64)


def assert_same_spikes(ours: Tensor, theirs: Tensor) -> None:
    rate = (theirs != 0).double().mean().item()
    assert 0.02 < rate < 0.98, f"{rate:.0%} of the outputs are spikes: a poor test"
    assert torch.equal(ours, theirs)


DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "converting.md"
TUTORIAL = DOCS / "tutorials" / "from-another-library.ipynb"
EXAMPLES = re.findall(r"^```python no-run=.*\n((?s:.*?))^```", PAGE.read_text(), re.M)


@pytest.mark.parametrize("number", range(5))
def test_documented_examples(number, tmp_path):
    """The examples that `tests/test_docs.py` does not run, since they need the libraries."""
    assert len(EXAMPLES) == 5
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number])
    exec(compile(EXAMPLES[number], script, "exec"), {"__name__": "example"})


def test_tutorial(monkeypatch, capsys):
    """The cells that run where the libraries are installed only."""
    run_notebook(TUTORIAL, monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("100.00% of 4000 outputs are equal") == 3
    assert "outputs agree: True" in printed
    assert "takes a state: write `spike = self.lif(self.fc(step))`" in printed


# SpikingJelly.


def in_sequences(net: nn.Module) -> nn.Module:
    functional.set_step_mode(net, "m")
    return net.double()


def spiking(threshold: float = 0.3, kind=sj.LIFNode, **options):
    return kind(v_threshold=threshold, surrogate_function=sj_surrogate.ATan(), **options)


def spiking_neuron(**options):
    """A neuron that fires enough behind layers with their first weights."""
    return spiking(0.3, sj.IFNode, **options)


REFUSED = {
    spikingjelly_neurons.gated: "a conductance for each time step",
    spikingjelly_neurons.current_based: "starts there but leaks towards 0",
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("build", spikingjelly_neurons.NEURONS)
def test_spikingjelly_neurons(build, seed):
    match = build(Draw(seed), torch.float64)
    theirs, x = match.theirs.double(), match.sequence(torch.float64).requires_grad_()
    if build in REFUSED and getattr(theirs, "v_reset", 1.0):
        with pytest.raises(ValueError, match=REFUSED[build]):
            sf.convert(theirs)
        return
    ours = sf.convert(theirs)
    assert type(ours).__module__.startswith("spikefuse.")
    expected = theirs(x)
    weights = torch.randn_like(expected)
    leaves = [x, *theirs.parameters()]
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    spikes = run_ours(ours, x)
    assert_same_spikes(spikes, expected)
    for found, other in zip(
        torch.autograd.grad((spikes * weights).sum(), leaves), wanted, strict=True
    ):
        torch.testing.assert_close(found, other)


@pytest.mark.parametrize("name", ["PSN", "MaskedPSN", "SlidingPSN"])
def test_spikingjelly_parallel_neurons(name):
    """Spikes and gradients, with the surrogate of ours."""
    steps = {"T": 6} if name != "SlidingPSN" else {}
    order = {"k": 3} if name != "PSN" else {}
    options = {"lambda_init": 1.0} if name == "MaskedPSN" else {}
    made = getattr(sj, name)(
        **order, **steps, **options, surrogate_function=sj_surrogate.Sigmoid(4.0)
    ).double()
    made.step_mode = "m"
    torch.nn.init.normal_(made.weight)
    x = 4 * sequence(6, 3, 5) - 3
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    converted = sf.convert(made, copy=True)
    y, expected = run_ours(converted, ours), made(theirs)
    assert_same_spikes(y, expected)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    other = getattr(sj, name)(**order, **steps, **options).double()
    converted.load_state_dict(other.state_dict())
    assert {*converted.state_dict()} == {*made.state_dict()}
    made.load_state_dict(converted.state_dict())
    assert torch.equal(made.weight, other.weight)
    assert_same_spikes(run_ours(converted, x), made(x))
    if name == "MaskedPSN":
        made.lambda_ = 0.5
        with pytest.raises(RuntimeError, match=r"_lambda_ is 0\.5.*: expected 1\.0"):
            converted.load_state_dict(made.state_dict())
        with pytest.raises(ValueError, match=r"its lambda_ is 0\.5, and a mask has no part"):
            sf.convert(made)


@pytest.mark.parametrize("kind", [sj.SimpleIFNode, sj.SimpleLIFNode])
def test_spikingjelly_simple_neurons(kind):
    options = {"tau": 2.0, "decay_input": True} if kind is sj.SimpleLIFNode else {}
    x, theirs = sequence(8, 3, 5), kind(v_threshold=0.6, step_mode="m", **options)
    assert_same_spikes(run_ours(sf.convert(theirs), x), theirs(x))


def test_spikingjelly_integrator():
    x = sequence(6, 3, 5)
    ours = run_ours(sf.convert(sj.NonSpikingLIFNode(3.0)), x)
    torch.testing.assert_close(ours, torch.stack(sj.NonSpikingLIFNode(3.0)(x)))


@pytest.mark.parametrize("name", ["sew_resnet", "spiking_resnet"])
def test_published_resnet18(name):
    """In training, with batch statistics: outputs and the gradients of all shared weights."""
    module = {"sew_resnet": sew_resnet, "spiking_resnet": spiking_resnet}[name]
    options = {"cnf": "ADD"} if name == "sew_resnet" else {}
    build = getattr(module, f"{name}18")
    net = in_sequences(build(spiking_neuron=spiking_neuron, num_classes=10, **options))
    ours, x = sf.convert(net), sequence(3, 2, 3, 32, 32)
    assert list(ours.state_dict()) == list(net.state_dict())
    assert all(p is q for p, q in zip(ours.parameters(), net.parameters(), strict=True))
    functional.reset_net(net)
    expected = net(x)
    wanted = torch.autograd.grad(expected.square().sum(), [*net.parameters()])
    found_output = run_ours(ours, x)
    torch.testing.assert_close(found_output, expected, rtol=1e-9, atol=1e-9)
    assert expected.std() > 0.01
    found = torch.autograd.grad(found_output.square().sum(), [*net.parameters()])
    for ours_grad, theirs_grad in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-6, atol=1e-9)


def test_published_spiking_vgg():
    with torch.device("meta"):  # its classifier of 4096 features is replaced by a small one
        net = spiking_vgg.spiking_vgg11_bn(spiking_neuron=spiking_neuron, init_weights=False)
    net.to_empty(device="cpu")
    net.classifier[0], net.classifier[3] = layer.Linear(512 * 49, 32), layer.Linear(32, 32)
    net.classifier[6] = layer.Linear(32, 10)
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    in_sequences(net)
    x = sequence(3, 2, 3, 32, 32)
    net(x)  # running statistics
    functional.reset_net(net)
    net.eval()
    spikes = {}
    net.classifier[1].register_forward_hook(lambda m, args, y: spikes.update(theirs=y))
    expected = net(x)
    net.classifier[1]._forward_hooks.clear()
    ours = sf.convert(net)
    ours.classifier[1].register_forward_hook(lambda m, args, y: spikes.update(ours=y))
    torch.testing.assert_close(run_ours(ours, x), expected, rtol=1e-9, atol=1e-9)
    assert_same_spikes(spikes["ours"], spikes["theirs"].flatten(0, 1))


class Network(nn.Module):
    """One step at a time, as in SpikingJelly's tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            layer.Conv2d(2, 6, 3, padding=1, bias=False), layer.BatchNorm2d(6), spiking()
        )
        self.head = nn.Sequential(
            layer.MaxPool2d(2), layer.Flatten(), layer.Linear(96, 20), spiking(kind=plif)
        )
        self.vote = layer.VotingLayer(5)

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.features, self.head):
            x = part(x)
        return self.vote(x)


def plif(**options):
    return sj.ParametricLIFNode(init_tau=3.0, **options)


def test_spikingjelly_by_steps():
    net, x = Network().double().eval(), sequence(5, 2, 2, 8, 8)
    ours = sf.convert(net)
    expected = torch.stack([net(step) for step in x])
    assert torch.equal(run_ours(ours, x), expected)
    assert expected.std() > 0
    norm = next(row for row in ours.conversion.rows if row.name == "features.1")
    assert "in training, its statistics are of all steps" in norm.note
    table = str(ours.conversion)
    assert "head.3" in table
    assert "ParametricLIFNode(v_threshold=0.3" in table


def test_spikingjelly_state_dicts_load_both_ways():
    theirs, ours = Network(), sf.convert(Network())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert "head.3.w" in ours.state_dict()
    ours.load_state_dict(theirs.state_dict())
    x = sequence(4, 2, 2, 8, 8).float()
    expected = torch.stack([theirs.eval()(step) for step in x])
    torch.testing.assert_close(sf.Temporal(ours.eval())(x), expected)
    with torch.no_grad():
        ours.head[3].decay.w += 1
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.head[3].w, ours.head[3].decay.w)


def test_spikingjelly_weights_are_shared_or_copied():
    net = Network()
    shared, copied = sf.convert(net), sf.convert(net, copy=True)
    assert all(p is q for p, q in zip(shared.parameters(), net.parameters(), strict=True))
    assert not {*copied.parameters()} & {*net.parameters()}
    assert isinstance(net.head[3], sj.ParametricLIFNode)


def test_spikingjelly_containers():
    net = nn.Sequential(
        layer.SeqToANNContainer(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)),
        spiking(step_mode="m"),
        layer.MultiStepContainer(nn.Flatten(), layer.Linear(144, 30), spiking(0.1)),
        layer.StepModeContainer(False, "m", nn.Linear(30, 30)),
        spiking(0.05, step_mode="m"),
    ).double()
    x = sequence(5, 2, 2, 8, 8)
    expected, ours = net(x), sf.convert(net)
    assert_same_spikes(run_ours(ours, x), expected)
    assert list(ours.state_dict()) == list(net.state_dict())


@pytest.mark.parametrize("norm", ["ThresholdDependentBatchNorm2d", "TemporalEffectiveBatchNorm2d"])
def test_spikingjelly_batch_norms(norm):
    arguments = (1.0, 0.3) if norm.startswith("Threshold") else (5,)
    net = nn.Sequential(getattr(layer, norm)(*arguments, num_features=3), spiking(step_mode="m"))
    net.double()
    if norm.startswith("Temporal"):
        net[0].scale.data.uniform_(0.5, 2.0)
    x = sequence(5, 2, 3, 8, 8)
    expected, ours = net(x), sf.convert(net)
    assert_same_spikes(run_ours(ours, x), expected)
    if norm.startswith("Temporal"):
        with pytest.raises(ValueError, match="received 4 time steps: expected 5"):
            run_ours(ours, x[:4])


@pytest.mark.parametrize("kind", ["Dropout", "Dropout2d"])
def test_spikingjelly_dropout_keeps_its_mask(kind):
    net = getattr(layer, kind)(0.5, step_mode="m")
    x = torch.ones(4, 3, 5, 2, 2)
    torch.manual_seed(3)
    expected = net(x)
    torch.manual_seed(3)
    y = sf.Temporal(sf.convert(net))(x)
    assert torch.equal(y, expected)
    assert 0 < (y == 0).sum() < y.numel()
    net.eval()
    assert torch.equal(sf.Temporal(sf.convert(net))(x), x)


class StepsInSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.lif = spiking(step_mode="m"), spiking()

    def forward(self, x):
        return self.lif(self.first(x).flatten(0, 1))


class TheirLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.lif = spiking(step_mode="m"), spiking(step_mode="m")

    def forward(self, x):
        return functional.multi_step_forward(self.first(x), self.lif).mean(0)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lif = layer.Linear(5, 5), spiking()

    def forward(self, x):
        total = 0.0
        for _ in range(4):
            total = total + self.lif(self.fc(x))
        return total


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lif = layer.Linear(5, 5), spiking()

    def forward(self, x):
        return self.lif(self.fc(self.lif(x)))


class Potential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lif = spiking()

    def forward(self, x):
        self.lif(x)
        return self.lif.v


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lif = layer.Linear(5, 5)

    def forward(self, x):
        return functional.if_step(self.lif(x), 0.0, 1.0, 0.0, None)


class Overriding(sj.LIFNode):
    def single_step_functional_forward(self, inputs, states, **kwargs):
        return super().single_step_functional_forward((2 * inputs[0],), states, **kwargs)


class OwnNeuron(sj.BaseNode):
    def single_step_functional_forward(self, inputs, states, **kwargs):
        return (inputs[0],), states


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [spiking()]

    def forward(self, x):
        return self.layers[0](x)


LIF = spiking()
CASES = {
    "a layer of torch": (
        nn.Sequential(nn.Conv2d(2, 4, 3), spiking(step_mode="m")),
        r"'0' \(Conv2d\): it takes \[B, ...\]",
    ),
    "steps in a sequence": (StepsInSequence(), "it takes single steps .*set_step_mode"),
    "their loop": (TheirLoop(), r"`functional.multi_step_forward\(.*` takes \[T, B, ...\]"),
    "a loop": (Loop(), r"Loop.forward, line \d+: `for _ in range\(4\):` calls `self.lif` several"),
    "a second call": (Twice(), "`self.lif.*` runs its neurons a second time"),
    "one neuron at two places": (nn.Sequential(LIF, layer.Linear(5, 5), LIF), "also '0'"),
    "a potential": (Potential(), r"`self.lif.v` does not exist in neurons of spikefuse"),
    "a function": (Functional(), "is code of another library"),
    "a subclass": (Overriding(), "overrides single_step_functional_forward of LIFNode"),
    "a neuron of theirs": (OwnNeuron(), "with a state of its own, written for SpikingJelly"),
    "a list": (nn.Sequential(Listed(), spiking()), "keeps modules in layers"),
    "LIAF": (sj.LIAFNode(torch.relu, False), "emits a function of its potential"),
    "unknown": (sj.DSRIFNode(), "no equivalent of DSRIFNode is known"),
    "through time": (layer.BatchNormThroughTime2d(4, 3), "separate weights for each step"),
    "neunorm": (layer.NeuNorm(3, 4, 4), "cannot mix channels"),
    "potentials": (sj.IFNode(store_v_seq=True), r"outputs=\(\"spikes\", \"v\"\)"),
    "klif": (sj.KLIFNode(v_reset=0.1), "v_reset is 0.1"),
    "surrogate": (
        sj.IFNode(surrogate_function=sj_surrogate.LogTailedReLU()),
        "its surrogate LogTailedReLU can.t be compiled",
    ),
    "smooth": (
        sj.IFNode(surrogate_function=sj_surrogate.Sigmoid(spiking=False)),
        "emits no spikes",
    ),
    "modes": (
        nn.Sequential(layer.Conv2d(2, 2, 3), spiking(step_mode="m")),
        r"'0' \(spikingjelly.Conv2d\): it takes single .*set_step_mode\(net, 'm'\)",
    ),
    "nothing": (nn.Sequential(nn.Linear(5, 5), nn.ReLU()), "use spikefuse.spiking"),
    "snntorch lstm": (snn.SLSTM(4, 4), "recurrent layer with gates"),
    "inhibition": (snn.Leaky(0.5, state_quant=torch.round), "state_quant quantizes"),
    "spike_grad": (snn.Leaky(0.5, spike_grad=torch.sigmoid), "its spike_grad sigmoid has no"),
    "norse method": (
        norse.LIFCell(norse.LIFParameters(method="circ", alpha=torch.tensor(1.0))),
        "its method 'circ' has no equivalent",
    ),
    "norse parameters": (
        norse.LIFCell(norse.LIFParameters(tau_mem_inv=nn.Parameter(torch.tensor(100.0)))),
        "its tau_mem_inv is learned",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    net, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        sf.convert(net)


def test_extra_replaces_what_has_no_equivalent():
    net = nn.Sequential(layer.Linear(5, 5), Overriding(2.0, v_threshold=0.3))

    class Doubling(sf.LIF):
        def charge(self, x, v):
            return super().charge(2 * x, v)

    make = {Overriding: lambda m: Doubling(0.5, m.v_threshold, decay_input=True)}
    ours, x = sf.convert(net.double(), extra=make), sequence(6, 3, 5)
    assert_same_spikes(run_ours(ours, x), torch.stack([net(step) for step in x]))
    assert ours.conversion.rows[-1].note == "by extra"


# snnTorch, whose surrogates return float32.


def in_double(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, snn.SpikingNeuron):
            spike = module.spike_grad
            module.spike_grad = lambda u, spike=spike: spike(u).to(u.dtype)
    return net.double()


def run_steps(net: nn.Module, x: Tensor):
    steps = [net(step) for step in x]
    if isinstance(steps[0], tuple):
        return tuple(map(torch.stack, zip(*steps, strict=True)))
    return torch.stack(steps)


FACTORS = torch.linspace(0.5, 1.5, 5)
SNN_NEURONS = {
    "Leaky": lambda **o: snn.Leaky(0.8, **o),
    "learned Leaky": lambda **o: snn.Leaky(0.8, learn_beta=True, learn_threshold=True, **o),
    "undelayed Leaky": lambda **o: snn.Leaky(0.8, reset_delay=False, **o),
    "graded Leaky": lambda **o: snn.Leaky(0.8, graded_spikes_factor=0.7, **o),
    "per-feature graded Leaky": lambda **o: snn.Leaky(0.8, graded_spikes_factor=FACTORS, **o),
    "Synaptic": lambda **o: snn.Synaptic(0.6, 0.7, learn_alpha=True, **o),
    "undelayed Synaptic": lambda **o: snn.Synaptic(0.6, 0.7, reset_delay=False, **o),
    "Alpha": lambda **o: snn.Alpha(0.8, 0.6, **o),
    "Lapicque": lambda **o: snn.Lapicque(R=2.0, C=1.25, **o),
}


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("reset", ["subtract", "zero", "none"])
@pytest.mark.parametrize("name", SNN_NEURONS)
def test_snntorch_neurons(name, reset, output):
    """Spikes, states where they are outputs, and gradients."""
    theirs = SNN_NEURONS[name](
        threshold=0.7,
        reset_mechanism=reset,
        init_hidden=True,
        output=output,
        spike_grad=snn_surrogate.fast_sigmoid(5),
    )
    ours = sf.convert(theirs)
    parameters = [*theirs.parameters()]
    in_double(theirs)
    x = (torch.randn(12, 3, 5, dtype=torch.float64) + 0.2).requires_grad_()
    expected, found = run_steps(theirs, x), run_ours(ours.double(), x)
    expected, found = (y if output else (y,) for y in (expected, found))
    assert_same_spikes((found[0] != 0).double(), (expected[0] != 0).double())
    weights = [torch.randn_like(y) for y in expected]
    leaves = [x, *parameters]
    sums = [
        sum((y * w).sum() for y, w in zip(ys, weights, strict=True)) for ys in (expected, found)
    ]
    wanted, gradients = (torch.autograd.grad(total, leaves) for total in sums)
    for a, b in zip((*found, *gradients), (*expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SNN_NEURONS)
def test_snntorch_neurons_compiled(name):
    net = sf.Temporal(sf.convert(SNN_NEURONS[name](threshold=0.7, output=True)))
    x = sequence(12, 3, 5, high=1.5).float()
    for found, expected in zip(net(x), net(x, impl="reference"), strict=True):
        torch.testing.assert_close(found, expected)
    assert expected.std() > 0


@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_snntorch_fires_above_the_threshold(impl):
    """Binary inputs and a weight of 1 reach the threshold exactly."""
    net = snn.Leaky(1.0, init_hidden=True)
    x = torch.ones(6, 1, 1)
    expected = run_steps(net, x)
    assert 0 < expected.sum() < 6
    assert torch.equal(sf.Temporal(sf.convert(net))(x, impl=impl), expected)


@pytest.mark.parametrize("name", SNN_NEURONS)
def test_snntorch_state_dicts_load_both_ways(name):
    theirs, ours = SNN_NEURONS[name](), sf.convert(SNN_NEURONS[name]())
    with torch.no_grad():
        if theirs.threshold.ndim == 0:
            theirs.threshold.fill_(0.4)
    ours.load_state_dict(theirs.state_dict())
    assert ours.threshold == 0.4
    assert {*ours.state_dict()} == {*theirs.state_dict()}
    ours.threshold.data.fill_(0.3)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.threshold == torch.tensor(0.3)
    other = theirs.state_dict() | {"reset_mechanism_val": torch.tensor(2)}
    with pytest.raises(RuntimeError, match="reset_mechanism_val is 2: expected"):
        ours.load_state_dict(other)


def tutorial_sequential():
    """Convolutions in an nn.Sequential with hidden states, from snnTorch's tutorial on them."""
    lif = {"beta": 0.5, "spike_grad": snn_surrogate.fast_sigmoid(slope=25), "init_hidden": True}
    return nn.Sequential(
        nn.Conv2d(1, 12, 5), nn.MaxPool2d(2), snn.Leaky(threshold=0.3, **lif),
        nn.Conv2d(12, 16, 5), nn.MaxPool2d(2), snn.Leaky(threshold=0.3, **lif),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 10), snn.Leaky(threshold=0.1, output=True, **lif),
    )  # fmt: skip


def test_snntorch_tutorial_sequential():
    net = tutorial_sequential()
    ours = sf.convert(net)
    x = sequence(6, 2, 1, 28, 28)
    (spikes, potentials), (found, mem) = run_steps(in_double(net), x), run_ours(ours, x)
    assert_same_spikes(found, spikes)
    torch.testing.assert_close(mem, potentials)


class TutorialNet(nn.Module):
    """snnTorch's tutorial 5: the time loop is in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(20, 30), snn.Leaky(beta=0.9, threshold=0.3)
        self.fc2, self.lif2 = nn.Linear(30, 10), snn.Leaky(beta=0.9, threshold=0.3)

    def forward(self, x):
        mem1 = self.lif1.init_leaky()
        mem2 = self.lif2.init_leaky()
        spk2_rec = []
        mem2_rec = []
        for _step in range(5):
            cur1 = self.fc1(x)
            spk1, mem1 = self.lif1(cur1, mem1)
            cur2 = self.fc2(spk1)
            spk2, mem2 = self.lif2(cur2, mem2)
            spk2_rec.append(spk2)
            mem2_rec.append(mem2)
        return torch.stack(spk2_rec, dim=0), torch.stack(mem2_rec, dim=0)


class Rewritten(TutorialNet):
    """As the error says."""

    def forward(self, x):
        spk1 = self.lif1(self.fc1(x))
        spk2 = self.lif2(self.fc2(spk1))
        return spk2


def test_snntorch_tutorial_with_its_own_loop():
    net = TutorialNet()
    with pytest.raises(ValueError, match="can't be converted") as error:
        sf.convert(net)
    message = str(error.value)
    assert "`for _step in range(5):` calls `self.lif1` several times, a loop over time" in message
    assert "write `spk1 = self.lif1(cur1)`" in message
    assert "write `spk2 = self.lif2(cur2)`" in message
    assert "`self.lif1.init_leaky` does not exist in neurons of spikefuse: remove it" in message
    assert "def forward(self, x):" in message
    rewritten = Rewritten()
    rewritten.load_state_dict(net.state_dict())
    ours, x = sf.convert(rewritten).double(), sequence(2, 20)
    spikes, _ = in_double(net)(x)
    assert_same_spikes(run_ours(ours, x.expand(5, 2, 20)), spikes)


# Norse.


def p_lif(**options):
    return norse.LIFParameters(
        tau_mem_inv=torch.tensor(400.0), tau_syn_inv=torch.tensor(300.0),
        v_th=torch.tensor(0.3), **options,
    )  # fmt: skip


def box(**options):
    values = {"tau_mem_inv": torch.tensor(400.0), "v_th": torch.tensor(0.3), **options}
    return norse.functional.lif_box.LIFBoxParameters(**values)


def value(x: float) -> Tensor:
    return torch.tensor(x)


NORSE_NEURONS = {
    "LIFCell": lambda: norse.LIFCell(p_lif()),
    "triangle": lambda: norse.LIFCell(p_lif(method="triangle", alpha=value(0.7))),
    "tanh": lambda: norse.LIFCell(p_lif(method="tanh", alpha=value(0.7))),
    "erfc": lambda: norse.LIFCell(p_lif(method="heavi_erfc", alpha=value(0.7))),
    "rest": lambda: norse.LIFCell(p_lif(v_leak=value(0.1), v_reset=value(-0.1))),
    "other dt": lambda: norse.LIFCell(p_lif(), dt=0.0005),
    "box": lambda: norse.LIFBoxCell(box()),
    "box at rest": lambda: norse.LIFBoxCell(box(v_leak=value(0.1), v_reset=value(-0.1))),
    "subtracting": lambda: norse.LIFBoxCell(
        box(reset_method=norse.functional.reset.reset_subtract)
    ),
    "IAFCell": lambda: norse.IAFCell(
        norse.functional.iaf.IAFParameters(v_th=value(1.1), v_reset=value(0.2))
    ),
    "LICell": lambda: norse.LICell(
        norse.LIParameters(tau_mem_inv=value(400.0), tau_syn_inv=value(300.0))
    ),
    "LIBoxCell": lambda: norse.LIBoxCell(
        norse.functional.leaky_integrator_box.LIBoxParameters(tau_mem_inv=value(400.0))
    ),
}


def run_cell(cell, x):
    state, outputs = None, []
    for step in x:
        y, state = cell(step, state)
        outputs.append(y)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", NORSE_NEURONS)
def test_norse_neurons(name):
    x = (0.4 + 0.8 * torch.randn(12, 3, 5, dtype=torch.float64)).requires_grad_()
    theirs = NORSE_NEURONS[name]()
    expected, found = run_cell(theirs, x), run_ours(sf.convert(theirs), x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    if "LI" not in name.replace("LIF", ""):
        assert_same_spikes(found, expected)
    weights = torch.randn_like(expected)
    wanted, gradient = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (expected, found))
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_norse_sequential_of_cells():
    net = norse.SequentialState(
        nn.Conv2d(1, 6, 5), norse.LIFCell(p_lif()), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(6 * 36, 20), norse.LIFCell(p_lif()), nn.Linear(20, 10), norse.LICell(),
    ).double()  # fmt: skip
    x = sequence(6, 2, 1, 16, 16, high=4.0)
    ours = sf.convert(net)
    expected, state = [], None
    for step in x:
        y, state = net(step, state)
        expected.append(y)
    torch.testing.assert_close(run_ours(ours, x), torch.stack(expected), rtol=1e-6, atol=1e-9)
    assert torch.stack(expected).std() > 0
    assert list(ours.state_dict()) == list(net.state_dict())


def test_norse_sequential_of_sequences():
    net = norse.SequentialState(
        norse.Lift(nn.Conv2d(1, 6, 5)), norse.LIF(p_lif()), nn.Flatten(2), nn.Linear(6 * 144, 20),
        norse.LIF(p_lif()),
    ).double()  # fmt: skip
    x = sequence(6, 2, 1, 16, 16, high=4.0)
    ours, (expected, _) = sf.convert(net), net(x)
    assert_same_spikes(run_ours(ours, x), expected)
    assert list(ours.state_dict()) == list(net.state_dict())
    again = sf.convert(net, copy=True)
    again.load_state_dict(net.state_dict())


class NorseLoop(nn.Module):
    """The code of Norse's tutorials: states are passed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lif, self.out = nn.Linear(5, 5), norse.LIFCell(), norse.LICell()

    def forward(self, x):
        s1 = so = None
        for step in x:
            z, s1 = self.lif(self.fc(step), s1)
            vo, so = self.out(F.relu(z), so)
        return vo


def test_norse_states_passed_by_hand():
    with pytest.raises(ValueError, match="can't be converted") as error:
        sf.convert(NorseLoop())
    assert "`for step in x:` calls `self.lif` several times" in str(error.value)
    assert "write `z = self.lif(self.fc(step))`" in str(error.value)
    assert "write `vo = self.out(F.relu(z))`" in str(error.value)


@pytest.mark.parametrize("neuron", [sj.LIFNode(), snn.Leaky(0.9), norse.LIFCell()])
def test_temporal_refuses_what_is_not_converted(neuron):
    with pytest.raises(TypeError, match=r"layer 'net.1' .* has a memory of its own.*\.convert"):
        sf.Temporal(nn.Sequential(nn.Linear(3, 3), neuron))
