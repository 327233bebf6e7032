"""Delays that are learned, against loops over steps, channels and synapses in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import spikefuse as sf
from tests.grid import on_grid

T, B, C = 9, 2, 5


def sequence(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape or (T, B, C), generator=generator, dtype=torch.float64)


def at(x, t):
    return x[t] if t >= 0 else torch.zeros_like(x[0])


def delayed(layer, x):
    """`Delay` in training, channel by channel and step by step."""
    y = torch.zeros_like(x)
    for c in range(C):
        d = layer.delay[c if layer.channels > 1 else 0]
        k = math.floor(d.item())
        for t in range(T):
            y[t, :, c] = (1 - d + k) * at(x, t - k)[:, c] + (d - k) * at(x, t - k - 1)[:, c]
    return y


def synapses(layer, x):
    """`DelayedLinear` in training, synapse by synapse and step by step."""
    y = layer.bias.expand(T, B, -1).clone()
    for i in range(layer.out_features):
        for j in range(layer.in_features):
            distances = [(k - layer.delay[i, j]).abs() for k in range(layer.max_delay + 1)]
            if layer.kernel == "gaussian":
                bump = [torch.exp(-(r**2) / (2 * layer.sigma**2)) for r in distances]
            else:
                bump = [torch.relu(1 - r / (1 + layer.sigma)) for r in distances]
            for t in range(T):
                for k, g in enumerate(bump):
                    y[t, :, i] += layer.weight[i, j] * g / sum(bump) * at(x, t - k)[:, j]
    return y


def gradients(y, layer, x):
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    return torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])


LAYERS = {
    "channels": (lambda: sf.Delay(C, 4), delayed),
    "one delay": (lambda: sf.Delay(1, 12), delayed),
    "gaussian": (lambda: sf.DelayedLinear(C, 3, 4, sigma=0.7), synapses),
    "triangular": (lambda: sf.DelayedLinear(C, 3, 4, kernel="triangular", sigma=0.4), synapses),
    "interpolated": (lambda: sf.DelayedLinear(C, 3, 4, kernel="triangular", sigma=0.0), synapses),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    return LAYERS[request.param][0]().double()


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(name, device):
    torch.manual_seed(0)
    make, by_hand = LAYERS[name]
    layer, x = make().double().to(device), sequence().to(device).requires_grad_()
    y, expected = layer(x), by_hand(layer, x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, layer, x), gradients(expected, layer, x))


def test_evaluation_is_an_exact_delay_line(layer):
    layer.eval()
    x = sequence()
    y, steps = layer(x), layer.delay.detach().round().long()
    expected = torch.zeros_like(y)
    for t in range(T):
        if isinstance(layer, sf.Delay):
            for c, d in enumerate(steps.expand(C)):
                expected[t, :, c] = at(x, t - d)[:, c]
        else:
            sent = torch.stack([at(x, t - k) for k in range(layer.max_delay + 1)])
            for i, delays in enumerate(steps):
                received = sent[delays, :, torch.arange(C)].T
                expected[t, :, i] = received @ layer.weight[i] + layer.bias[i]
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [False, True])
def test_long_delays_in_half_precision(dtype, training):
    most = 300 if dtype == torch.bfloat16 else 2100
    layer = sf.DelayedLinear(2, 3, most, kernel="triangular", sigma=0.0).train(training)
    with torch.no_grad():
        layer.delay.copy_(torch.tensor([[most - 44.0, most], [most - 43, 0], [most - 42, 7]]))
    layer = layer.to(dtype)
    delays, taps = layer.delays(), layer.taps()
    assert taps.dtype == dtype
    at_delay = taps.flip(-1).gather(-1, delays.long().unsqueeze(-1)).squeeze(-1)
    assert torch.equal(at_delay, layer.weight)  # and no other step has a weight
    assert taps.count_nonzero() == delays.numel()


def test_images():
    layer = sf.Delay(3, 4).eval()
    x = torch.rand(T, B, 3, 2, 2)
    expected = layer(x.flatten(3).transpose(2, 3).flatten(1, 2)).view(T, B, 4, 3).transpose(2, 3)
    assert torch.equal(layer(x), expected.reshape(x.shape))


@pytest.mark.parametrize("fused", [False, True])
def test_sequences_in_parts(fused):
    """With states, and by a stream, in training, with gradients."""
    torch.manual_seed(0)
    layers = nn.Sequential(sf.Delay(C, 4), sf.LIF(0.75, 0.5), sf.DelayedLinear(C, 3, 6))
    with torch.no_grad():
        layers[0].delay.copy_(4 * layers[0].delay).round_().div_(4)  # sums of the neurons are exact
    net, x = sf.Temporal(layers), on_grid((T, B, C), spread=1.0).requires_grad_()
    y = net(x)
    net = sf.fuse(net) if fused else net
    first, state = net(x[:2], return_state=True)  # fewer than the delays
    assert [len(s) for s in state["net.0"]] == [B]
    second, last = net(x[2:], state=state, return_state=True)
    parts = torch.cat([first, second])
    torch.testing.assert_close(parts, y)
    found, expected = (torch.autograd.grad(v.square().sum(), x) for v in (parts, y))
    torch.testing.assert_close(found, expected)
    if fused:
        return  # a stream would capture the network once more
    stream = sf.Stream(net)
    steps = torch.stack([stream(step) for step in x.detach()])
    torch.testing.assert_close(steps, y.detach())
    assert stream.state.keys() == last.keys() == {"net.0", "net.1", "net.2"}
    for name, (history,) in last.items():
        torch.testing.assert_close(stream.state[name][0], history)
    stream.reset()
    assert torch.equal(stream(x[0]), steps[0])


def test_recurrent_delays():
    """In a loop, step by step, against a loop by hand."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.delay, self.linear = sf.Delay(C, 4), nn.Linear(C, C, bias=False)
            self.lif = sf.LIF(0.9, 0.5)

        def forward(self, x, spikes):
            return self.lif(x + self.linear(self.delay(spikes)))

    torch.manual_seed(0)
    body, x = Body(), torch.rand(T, B, C).requires_grad_()
    y = sf.Loop(body, (C,))(x)
    sent, spikes, v, expected = [torch.zeros(B, C)] * 6, torch.zeros(B, C), None, []
    k = body.delay.delay.detach().floor().long()
    for now in x:
        sent = [spikes, *sent]
        before, after = (torch.stack(sent)[k + i, :, torch.arange(C)].T for i in (0, 1))
        received = before + (body.delay.delay - k) * (after - before)
        spikes, v = body.lif((now + body.linear(received))[None], state=v, return_state=True)
        spikes = spikes[0]
        expected.append(spikes)
    assert 0.1 < y.mean() < 0.9
    assert torch.equal(y, torch.stack(expected))
    torch.testing.assert_close(gradients(y, body, x), gradients(torch.stack(expected), body, x))


def test_gradients_at_and_beyond_a_bound():
    """They pass, so that a delay returns, and those of several calls add up, in one backward or in
    several."""
    layer = sf.Delay(5, 4)
    with torch.no_grad():
        layer.delay.copy_(torch.tensor([-0.5, 0.0, 2.0, 4.0, 4.5]))
    assert layer.delays().tolist() == [0, 0, 2, 4, 4]
    sum(g * layer.delays().sum() for g in (3.0, -1.0)).backward()
    for g in (-4.0, 1.0):
        (g * layer.delays().sum()).backward()
    assert layer.delay.grad.tolist() == [-1.0] * 5


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by jvp
@pytest.mark.parametrize("layer", [sf.Delay(C, 3), sf.DelayedLinear(C, C, max_delay=3)])
def test_transforms(layer):
    net = sf.Temporal(nn.Sequential(layer, nn.Tanh())).double()
    values, x = dict(net.named_parameters()), sequence()

    def loss(values, x):
        return torch.func.functional_call(net, values, (x,)).square().mean()

    expected = dict(
        zip(values, torch.autograd.grad(loss(values, x), [*values.values()]), strict=True)
    )
    by_sample = torch.func.vmap(torch.func.grad(loss), (None, 1))(values, x[:, :, None])
    for name, gradient in expected.items():
        torch.testing.assert_close(by_sample[name].mean(0), gradient)
    _, slope = torch.func.jvp(lambda values: loss(values, x), (values,), (expected,))
    torch.testing.assert_close(slope, sum(g.square().sum() for g in expected.values()))


def test_gradients_of_recurrent_delays_at_a_bound():
    """Those of a loop over time, in which a delay has gradients of both signs."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.delay = sf.Delay(C, 3)

        def forward(self, now, before):
            return torch.tanh(now + self.delay(before))

    loop, x = sf.Loop(Body(), (C,)).double(), sequence(T, B, C)
    torch.nn.init.constant_(loop.body.delay.delay, 3.0)
    y = [torch.zeros(B, C, dtype=x.dtype)] * 4
    d = torch.full((C,), 3.0, dtype=x.dtype, requires_grad=True)
    for now in x:  # from y[t - 4], and y[t - 3] as the delay becomes shorter
        y.append(torch.tanh(now + (d - 2) * y[-4] + (3 - d) * y[-3]))
    expected = torch.stack(y[4:])
    found = sf.Temporal(loop)(x)
    assert torch.equal(found, expected)
    weights = sequence(T, B, C).flip(0)
    (gradient,) = torch.autograd.grad((found * weights).sum(), loop.parameters())
    torch.testing.assert_close(gradient, torch.autograd.grad((expected * weights).sum(), d)[0])


def test_a_delay_is_learned():
    """The one of a target, by gradients that a wide bump carries over many steps."""
    torch.manual_seed(0)
    layer = sf.DelayedLinear(1, 1, max_delay=12, bias=False)
    with torch.no_grad():
        layer.delay.fill_(2.0)
    x = torch.rand(60, 8, 1)
    target = torch.cat([torch.zeros(9, 8, 1), x[:-9]])
    optimizer = torch.optim.Adam(layer.parameters(), 0.2)
    for _ in range(100):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        layer.sigma.mul_(0.975).clamp_(min=0.5)
    layer.eval()
    assert layer.delays().item() == 9


def test_exported_step():
    net = sf.Temporal(nn.Sequential(sf.Delay(C, 3), sf.LIF())).eval()
    step, x = sf.exportable(net, step=True), torch.rand(6, B, C)
    assert step.state_names == ("net.0.history", "net.1.v")
    states, found = step.initial_states(x[0]), []
    for now in x:
        y, *states = step(now, *states)
        found.append(y)
    assert torch.equal(torch.stack(found), net(x))


def test_an_empty_batch():
    layer = sf.DelayedLinear(3, 4, 2)
    x = torch.zeros(T, 0, 3, requires_grad=True)
    y = sf.Temporal(layer)(x)
    assert y.shape == (T, 0, 4)
    y.sum().backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


def test_errors():
    with pytest.raises(ValueError, match=r"max_delay is 0, for delays of shape \[5\]"):
        sf.Delay(5, 0)
    with pytest.raises(ValueError, match=r"kernel is .gaussian., sigma 0\.0"):
        sf.DelayedLinear(2, 3, 4, sigma=0)
    for layer, shape in ((sf.Delay(4, 3), "B, 4, ..."), (sf.DelayedLinear(4, 1, 3), "B, 4")):
        with pytest.raises(ValueError, match=rf"has shape \[2, 5\]: expected \[{shape}\]"):
            layer(torch.rand(T, B, C))
    net = sf.Temporal(sf.Delay(C, 3))
    _, state = net(torch.rand(T, B, C), return_state=True)
    with pytest.raises(ValueError, match=r"state of 'net' is \[2, 3, 5\]: expected \[4, 3, 5\]"):
        net(torch.rand(T, 4, C), state=state)
