"""Networks of any structure that learn by rules, whole and in parts."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from tests.grid import on_grid


class Branches(nn.Module):
    """A norm, a residual, shared weights, a computed weight and hidden spikes among the outputs."""

    def __init__(self, neuron: type[sf.Neuron], **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.shared, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.a, self.b, self.c = (neuron(threshold=0.3, **options) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.a(self.norm(self.first(x)))
        y = self.b(self.shared(x) + x)
        z = self.c(self.shared(y) * self.scale + x)
        return {"out": self.out(z + y), "hidden": y, "fixed": y.detach()}


def gradients(net: nn.Module, x: Tensor, **options: object) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = net(x, **options)
    assert not y["fixed"].requires_grad
    net.zero_grad()
    ((y["out"] ** 2).sum() + (y["hidden"] * x[..., :1]).sum()).backward()
    return [x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("rule", ["sltt", "d-rtrl"])
def test_without_memory_rules_equal_backpropagation(rule, device):
    net = sf.Temporal(Branches(sf.LIF, decay=0.0)).to(device)
    x = on_grid((5, 4, 6), device)
    impl = "reference" if device == "cpu" else "auto"
    expected, y = gradients(net, x, impl=impl), net(x, impl=impl)
    learner = sf.Online(net, rule)
    for a, b in zip(gradients(learner, x, impl=impl), expected, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch.equal(learner(x, impl=impl)["hidden"], y["hidden"])


class TwoStates(sf.Neuron):
    """A current, a potential with a soft reset, and a learned decay of each neuron."""

    i, v = sf.State(), sf.State()

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.surrogate = nn.Parameter(torch.linspace(0.6, 0.9, 8)), sf.surrogate.Erf()

    def step(self, x, i, v):
        i = 0.5 * i + x
        h = self.decay * v + i
        s = self.surrogate(h - 1.0)
        return s, (i, h - s)


class Cascade(TwoStates):
    """Inputs and a learned decay that reach the potential one and two steps later."""

    w, u = sf.State(), sf.State()

    def step(self, x, i, v, w, u):
        h = 0.8 * v + u
        s = self.surrogate(h - 1.0)
        return s, (0.5 * i + x, h - s, 0.6 * w + i, self.decay * u + w)


def network(name: str) -> sf.Temporal:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    if name == "cascade":
        layers += [nn.Linear(6, 8), Cascade(), nn.Linear(8, 3)]
    elif name == "own":
        layers += [nn.Linear(6, 8), TwoStates(), nn.Linear(8, 3), sf.LI(0.9)]
    elif name == "recurrent":
        options = {"bias": True, "heads": 2, "self_connections": False}
        layers += [nn.Linear(6, 8), sf.Recurrent(sf.ALIF(0.8), 8, **options), nn.Linear(8, 3)]
    elif name == "convolutions":
        first = nn.Conv1d(2, 4, 3, padding=1, groups=2, padding_mode="circular")
        layers += [nn.Unflatten(1, (2, 3)), first, sf.LIF(0.8), nn.AvgPool1d(2, stride=1)]
        layers += [nn.Conv1d(4, 5, 1, bias=False), sf.LIF(0.7, reset="soft"), nn.Flatten()]
        layers += [nn.Linear(10, 3)]
    else:
        layers += [nn.Unflatten(1, (2, 3)), nn.Linear(3, 4), sf.LIF(0.8), nn.Flatten()]
        layers += [nn.Linear(8, 3)]
    net = sf.Temporal(nn.Sequential(*layers))
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d):
            layer.weight.data *= 2  # so that neurons of all layers fire
    return net


def in_parts(net: sf.Temporal, rule: str, steps: int, impl: str = "reference") -> list[Tensor]:
    dtype = torch.float64 if impl == "reference" else torch.float32
    learner, x = sf.Online(net.to(dtype), rule), on_grid((6, 2, 6), seed=1).to(dtype) * 3
    net.zero_grad()
    state = None
    for now in x.split(steps):
        y, state = learner(now, state=state, return_state=True, impl=impl)
        (y * now[..., :3]).sum().backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("own", "d-rtrl"),
        ("own", "ottt"),
        ("cascade", "d-rtrl"),
        ("cascade", "ottt"),
        ("recurrent", "e-prop"),
        ("recurrent", "sltt"),
        ("convolutions", "ottt"),
        ("convolutions", "d-rtrl"),
        ("tokens", "d-rtrl"),
    ],
)
def test_parts_equal_the_whole(name, rule):
    net = network(name)
    expected = in_parts(net, rule, 6)
    for steps in (4, 1):
        for a, b in zip(in_parts(net, rule, steps), expected, strict=True):
            assert b.any()
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_kernels_equal_the_loop():
    net = network("recurrent")
    expected, found = in_parts(net, "e-prop", 4), in_parts(net, "e-prop", 4, "auto")
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


class Resting(sf.Neuron):
    """A potential that begins at a learned value."""

    v = sf.State("rest")

    def __init__(self) -> None:
        super().__init__()
        self.rest, self.surrogate = nn.Parameter(torch.full((8,), 0.5)), sf.surrogate.Sigmoid()

    def step(self, x, v):
        h = 0.9 * v + x
        s = self.surrogate(h - 1)
        return s, (h - s,)


@pytest.mark.parametrize("recurrent", [False, True])
def test_first_states_are_learned(recurrent):
    neuron = Resting()
    layer = sf.Recurrent(neuron, 8) if recurrent else neuron
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 2)))
    learner, x = sf.Online(net, "d-rtrl"), torch.rand(4, 2, 6)
    learner(x, impl="reference").sum().backward()
    found, neuron.rest.grad = neuron.rest.grad, None
    if not recurrent:
        net(x, impl="reference").sum().backward()
        torch.testing.assert_close(found, neuron.rest.grad)
    assert found.all()
    with pytest.raises(ValueError, match=r"neuron 'net.1\S* are learned \(net.1[.a-z]*rest\)"):
        learner(x, return_state=True, impl="reference")


def test_copies():
    learner = sf.Online(sf.Temporal(nn.Sequential(nn.Linear(6, 8), sf.LIF())), "ottt", "random")
    x = torch.rand(3, 2, 6)
    y = learner(x, impl="reference")
    for twin in (copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))):
        assert torch.equal(twin(x, impl="reference"), y)
        assert twin.state_dict().keys() == {"net.net.0.weight", "net.net.0.bias", "matrix"}


def test_refusals():
    def online(*layers: nn.Module, rule: str = "d-rtrl", **options: object) -> sf.Online:
        return sf.Online(sf.Temporal(nn.Sequential(*layers)), rule, **options)

    x = torch.rand(3, 2, 6)
    with pytest.raises(TypeError, match="net is a Linear: expected a Temporal"):
        sf.Online(nn.Linear(6, 8), "sltt")
    with pytest.raises(ValueError, match="rule is 'stdp': expected one of bptt, sltt"):
        online(nn.Linear(6, 8), sf.LIF(), rule="stdp")
    with pytest.raises(ValueError, match="feedback is 'weight': expected one of symmetric"):
        online(nn.Linear(6, 8), sf.LIF(), feedback="weight")
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        online(sf.LIF(), feedback="random")
    with pytest.raises(ValueError, match=r"layer 'net.1' \(OverTime\) sees all time steps"):
        online(nn.Linear(6, 8), sf.OverTime(torch.cumsum))
    with pytest.raises(ValueError, match=r"layer 'net.0' \(EventLinear\) runs its neuron itself"):
        online(sf.nn.EventLinear(6, 8, sf.LIF(surrogate=sf.surrogate.FastSigmoid(cutoff=-0.5))))
    with pytest.raises(ValueError, match="LIF is part of a Block"):
        online(nn.Linear(6, 8), sf.nn.Block(nn.BatchNorm1d(8), sf.LIF()))(x, impl="reference")
    normed = online(nn.Linear(6, 8), nn.BatchNorm1d(8), sf.LIF())
    normed(x, impl="reference")
    transposed = sf.Temporal(nn.Sequential(nn.ConvTranspose1d(3, 3, 2), sf.LIF()))
    with pytest.raises(ValueError, match=r"net.0.bias reach .*\(a transposed convolution is anoth"):
        sf.Online(transposed, "ottt")(torch.rand(2, 3, 3, 4), return_state=True)
    with pytest.raises(ValueError, match=r"net.0.weight, .*net.1.bias reach neuron 'net.2'"):
        normed(x, return_state=True, impl="reference")
    with pytest.raises(TypeError, match="state is a dict: expected what Online returned"):
        normed(x, state={})
    y = normed(x, impl="reference")
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="frees its graph"):
        y.sum().backward()


class Step(torch.autograd.Function):
    """A spike that is not a `Surrogate`."""

    @staticmethod
    def forward(ctx, u):
        return (u >= 0).to(u.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


class OwnSpike(sf.Neuron):
    """Spikes by a function of its own, and has no `detach_reset`."""

    v = sf.State()

    def step(self, x, v):
        h = 0.9 * v + x
        s = Step.apply(h - 1.0)
        return s, (h - s,)


@pytest.mark.parametrize(
    ("neuron", "rule", "match"),
    [
        (sf.IntegerLIF(), "ottt", "IntegerLIF spikes without a surrogate"),
        (sf.StochasticLIF(), "ottt", "StochasticLIF spikes without a surrogate"),
        (OwnSpike(), "ottt", "OwnSpike spikes without a surrogate"),
        (OwnSpike(), "e-prop", "OwnSpike spikes and has no attribute detach_reset"),
        (TwoStates(), "e-prop", "TwoStates spikes and has no attribute detach_reset"),
        (sf.IntegerLIF(), "e-prop", None),
        (sf.StochasticLIF(), "e-prop", None),
        (OwnSpike(), "d-rtrl", None),
        (sf.LI(0.9), "ottt", None),
        (sf.LI(0.9), "e-prop", None),
    ],
)
def test_neurons_that_a_rule_cannot_change(neuron, rule, match):
    learner = sf.Online(sf.Temporal(nn.Sequential(nn.Linear(6, 8), neuron)), rule)
    x = torch.zeros(3, 2, 6)  # outputs of `LI` are whole here, too
    learner.net.net[0].bias.data.zero_()
    if match is None:
        assert learner(x, impl="reference").requires_grad
    else:
        with pytest.raises(ValueError, match=match):
            learner(x, impl="reference")


def test_losses_on_recorded_tensors():
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 8), sf.LIF(0.9), nn.Linear(8, 2)))
    x = torch.rand(3, 2, 6)
    for rule in ("ottt", "e-prop", "d-rtrl"):
        with (
            sf.record(net, grad=True),
            pytest.raises(ValueError, match=f"lose gradients by rule '{rule}'.*'bptt' or 'sltt'"),
        ):
            sf.Online(net, rule)(x, impl="reference")
        with sf.record(net):
            sf.Online(net, rule)(x, impl="reference")
    for rule in ("bptt", "sltt"):
        with sf.record(net, grad=True) as record:
            sf.Online(net, rule)(x, impl="reference")
        net.zero_grad()
        record["net.1"]["spikes"].sum().backward()
        assert net.net[0].weight.grad.any()


class Standardized(nn.Conv1d):
    """Normalizes its weight in the call."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class Initialized(nn.Conv1d):
    """Changes only its first weight."""

    def reset_parameters(self):
        nn.init.ones_(self.weight)


@pytest.mark.parametrize(
    ("layer", "hook", "is_source"),
    [
        (nn.Linear(6, 4), lambda module, args, y: 2 * y, False),
        (nn.Linear(6, 4), lambda module, args, y: y.mul_(2), False),
        (nn.Linear(6, 4), lambda module, args, y: None, True),
        (Standardized(2, 4, 3), None, False),
        (Initialized(2, 4, 3, bias=False), None, True),
    ],
)
def test_layers_that_compute_something_else_have_no_traces(layer, hook, is_source):
    shape = nn.Identity() if isinstance(layer, nn.Linear) else nn.Unflatten(1, (2, 3))
    learner = sf.Online(sf.Temporal(nn.Sequential(shape, layer, sf.LIF(0.9))), "ottt")
    if hook is not None:
        layer.register_forward_hook(hook)
    if is_source:
        learner(torch.rand(3, 2, 6), return_state=True, impl="reference")
    else:
        with pytest.raises(ValueError, match=r"net.1.weight, net.1.bias reach neuron 'net.2'"):
            learner(torch.rand(3, 2, 6), return_state=True, impl="reference")


class Scaled(torch.autograd.Function):
    """The identity, with a tenth of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 0.1 * grad


def scale_by_function(layer):
    layer.register_forward_hook(lambda module, args, y: Scaled.apply(y))


def scale_by_hook(layer):
    layer.register_forward_hook(
        lambda module, args, y: y.register_hook(lambda grad: 0.1 * grad) and None
    )


def scale_by_module_hook(layer):
    layer.register_full_backward_pre_hook(lambda module, grads: (0.1 * grads[0],))


@pytest.mark.parametrize("scale", [scale_by_function, scale_by_hook, scale_by_module_hook])
def test_gradients_that_change_before_a_layer_have_no_traces(scale):
    layer = nn.Linear(6, 4)
    learner = sf.Online(sf.Temporal(nn.Sequential(layer, sf.LIF(0.9))), "ottt")
    learner(torch.rand(3, 2, 6), return_state=True, impl="reference")
    scale(layer)
    with pytest.raises(ValueError, match=r"net.0.weight, net.0.bias reach neuron .* a hook or"):
        learner(torch.rand(3, 2, 6), return_state=True, impl="reference")


@pytest.mark.parametrize("rule", ["ottt", "sltt"])
def test_hooks_of_parameters_are_called_once(rule):
    learner = sf.Online(network("recurrent"), rule)
    parameters, x = [*learner.parameters()], torch.rand(6, 2, 6) * 3
    learner(x, impl="reference").sum().backward()
    expected = [3 * p.grad for p in parameters]
    learner.zero_grad()
    calls = []
    for p in parameters:
        p.register_hook(lambda grad: calls.append(grad) or 3 * grad)
    learner(x, impl="reference").sum().backward()
    assert len(calls) == len(parameters)
    for p, grad in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.grad, grad)
