"""Parameters and initial states of all shapes against the eager loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf

C, H, W = 4, 5, 2


def results(layer, x, impl):
    """Outputs, final states, and the gradients of the input and all parameters."""
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y, states = layer(leaf, impl=impl, return_state=True)
    loss = (y * x.cos()).sum() + sum(v.square().mean() for v in states)
    wanted = [leaf, *layer.parameters()]
    return [y, *states], torch.autograd.grad(loss, wanted), y.stride() == leaf.stride()


def compare(layer, x, backends):
    layer, x = layer.to(backends.device), x.to(backends.device)
    expected, gradients, _ = results(layer, x, "reference")
    for impl in backends.impls:
        found, grads, keeps_layout = results(layer, x, impl)
        for a, e in zip(found, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)
        for a, e in zip(grads, gradients, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-5)
        assert keeps_layout


def drawn(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return 1.5 * torch.rand(6, 3, *shape, generator=generator)


SHAPES = [(1,), (C,), (C, H, W), (1, 1, W), (C, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_parameter(shape, backends):
    values = torch.linspace(0.5, 0.9, torch.Size(shape).numel()).view(shape)
    layer = sf.LIF(nn.Parameter(values), nn.Parameter(torch.linspace(0.6, 1.1, C)))
    x = drawn(C, H, W)
    compare(layer, x, backends)
    # Channels last.
    compare(layer, x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3), backends)


def test_the_last_dim_of_tokens(backends):
    compare(sf.LIF(nn.Parameter(torch.linspace(0.5, 0.9, 7)[None])), drawn(5, 7), backends)


# Also where a length equals T = 6 or B = 3.
@pytest.mark.parametrize("shape", [(3,), (6,), (3, C, H), (H, W), (6, C, H, W), (2, H, W)], ids=str)
def test_wrong_shapes_are_refused_in_words(shape):
    for impl in ("numba", "reference"):
        with pytest.raises(ValueError, match=r"parameter 'decay' has shape .*C = 4.*\[4, 5, 2\]"):
            sf.LIF(torch.full(shape, 0.5))(drawn(C, H, W), impl=impl)


def test_a_network_with_a_value_per_neuron(backends):
    layers = nn.Conv2d(C, C, 1), nn.BatchNorm2d(C), sf.LIF(nn.Parameter(torch.rand(C, H, W)))
    net, x = sf.Temporal(nn.Sequential(*layers)).to(backends.device), drawn(C, H, W)
    x = x.to(backends.device)
    torch.testing.assert_close(sf.fuse(net)(x), net(x))
    with pytest.raises(ValueError, match="a block takes one value, or one per channel"):
        sf.nn.Block(*layers[1:])(x)


class Rested(sf.Neuron):
    v, w = sf.State("rest"), sf.State(0.25)

    def __init__(self, rest):
        super().__init__()
        self.rest, self.surrogate = rest, sf.surrogate.Arctan()

    def step(self, x, v, w):
        h = 0.5 * v + x + w
        s = self.surrogate(h - 1.0)
        return s, (h - s, 0.5 * w)


RESTS = {
    "float": lambda: 0.5,
    "scalar": lambda: nn.Parameter(torch.tensor([0.75])),
    "channel": lambda: nn.Parameter(torch.linspace(-0.5, 1.5, C)),
    "neuron": lambda: nn.Parameter(torch.linspace(-0.5, 1.5, C * H * W).view(C, H, W)),
    "learnable": lambda: sf.LearnableFraction([0.1, 0.2, 0.3, 0.4]),
}


@pytest.mark.parametrize("rest", RESTS)
def test_states_that_begin_at_an_attribute(rest, backends):
    compare(Rested(RESTS[rest]()), drawn(C, H, W), backends)


def test_layers_of_states_that_begin_at_an_attribute(backends):
    compare(sf.nn.Block(nn.BatchNorm2d(C), Rested(RESTS["channel"]())), drawn(C, H, W), backends)
    compare(sf.Recurrent(Rested(RESTS["channel"]()), C), drawn(C), backends)


def test_states_that_are_passed_in_replace_those_at_rest():
    neuron, x = Rested(RESTS["channel"]()), drawn(C, H, W)
    state = torch.zeros(3, C, H, W), torch.full((3, C, H, W), 0.25)
    assert torch.equal(neuron(x, state=state), Rested(0.0)(x))
    first, state = neuron(x[:2], return_state=True)
    assert torch.equal(torch.cat([first, neuron(x[2:], state=state)]), neuron(x))


def test_a_compiled_call():
    x = drawn(C, H, W)
    for neuron in (Rested(RESTS["neuron"]()), sf.LIF(nn.Parameter(torch.rand(C, H, W)))):
        compiled = torch.compile(neuron, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), neuron(x))


def test_a_compiled_call_of_any_size():
    """Sizes that have changed are symbols of the next graph."""
    torch.compiler.reset()
    for channels, height, width in ((2, 3, 4), (3, 4, 5), (4, 5, 2)):
        neuron = sf.LIF(nn.Parameter(torch.rand(channels, height, width)))
        compiled = torch.compile(neuron, backend="aot_eager", fullgraph=True)
        x = drawn(channels, height, width)
        assert torch.equal(compiled(x), neuron(x))


def test_wrong_initial_values():
    for value in (torch.ones(3), nn.Parameter(torch.tensor(1.0))):
        with pytest.raises(TypeError, match=r"assign the tensor to an attribute.*State\(.rest.\)"):
            sf.State(value)
    assert sf.State(torch.tensor(0.5)).initial == 0.5
    with pytest.raises(ValueError, match="Rested has no attribute 'rest'"):
        Rested(None)(drawn(C))
    with pytest.raises(ValueError, match=r"'rest' has shape \[3\]"):
        Rested(torch.ones(3))(drawn(C))


STEPS = [(6, 1, 1, 1, 1), (6, 1, C, 1, 1), (6, 1, C, H, W)]


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_a_value_per_step(shape, backends):
    decay = nn.Parameter(torch.linspace(0.5, 0.9, torch.Size(shape).numel()).view(shape))
    layer, x = sf.LIF(decay, nn.Parameter(torch.linspace(0.6, 1.1, C))), drawn(C, H, W)
    compare(layer, x, backends)
    state, steps = None, []
    for value, step in zip(layer.decay.detach(), x.to(backends.device), strict=True):
        single = sf.LIF(value[0], layer.threshold.detach())
        y, state = single(step[None], state=state, return_state=True, impl="reference")
        steps.append(y)
    for impl in (*backends.impls, "reference"):
        half = x.to(backends.device, torch.bfloat16)
        assert layer(half, impl=impl).dtype == torch.bfloat16
        assert torch.equal(layer(x.to(backends.device), impl=impl), torch.cat(steps))


def test_a_value_per_step_in_networks():
    neuron, x = sf.LIF(nn.Parameter(torch.linspace(0.1, 0.9, 6).view(6, 1, 1))), drawn(C)
    y, v = neuron(x, outputs=("spikes", "v"))
    assert torch.equal(v, neuron(x, outputs=("v",), impl="reference")[0])
    (h,) = neuron(x, outputs=("h",))
    assert torch.equal(h, neuron(x, outputs=("h",), impl="reference")[0])
    assert torch.equal(y, (h >= neuron.threshold).float())
    assert torch.equal(torch.compile(neuron, backend="aot_eager")(x), y)
    net = sf.Temporal(nn.Sequential(nn.Linear(C, C), neuron))
    assert torch.equal(net(x), neuron(net.net[0](x)))


@pytest.mark.parametrize("shape", [(5, 1, 1, 1, 1), (6, 3, 1, 1, 1), (6, 1, 2, 1, 1)], ids=str)
def test_wrong_numbers_of_steps(shape):
    for impl in ("numba", "reference"):
        match = r"'decay' has shape .* must broadcast to \[6, 1, 4, 5, 2\]"
        with pytest.raises(ValueError, match=match):
            sf.LIF(torch.full(shape, 0.5))(drawn(C, H, W), impl=impl)
