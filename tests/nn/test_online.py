"""Learning rules against loops that state them, in float64, step by step and forward in time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf

T, B, WIDTHS = 8, 3, (5, 6, 7, 2)
DECAY, THRESHOLD = 0.75, 0.8
SURROGATE = sf.surrogate.FastSigmoid(2.0)


def psi(u: Tensor) -> Tensor:
    return SURROGATE.derivative(u)


def sequence() -> tuple[Tensor, Tensor]:
    """An input, and the gradient of a loss by the outputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(T, B, WIDTHS[0], generator=generator, dtype=torch.float64) * 2
    return x, torch.randn(T, B, WIDTHS[-1], generator=generator, dtype=torch.float64)


def network(*neurons: nn.Module) -> sf.Temporal:
    """Linear layers with these neurons in between, and a linear readout."""
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTHS[0], WIDTHS[1], bias=False)]
    for neuron, i in zip(neurons, (1, 2), strict=False):
        end = WIDTHS[-1] if i == len(neurons) else WIDTHS[i + 1]
        layers += [neuron, nn.Linear(WIDTHS[i], end, bias=False)]
    return sf.Temporal(nn.Sequential(*layers)).double()


def lif(**options: object) -> sf.LIF:
    return sf.LIF(DECAY, THRESHOLD, surrogate=SURROGATE, **options)


def learned(net: sf.Temporal, rule: str, steps: int = T, **options: object) -> list[Tensor]:
    """The gradients of the parameters by a rule, for parts of so many steps."""
    learner = sf.Online(net, rule, **options)
    net.zero_grad()
    x, grad = sequence()
    if steps == T:
        learner(x, impl="reference").backward(grad)
    else:
        state = None
        for now, error in zip(x.split(steps), grad.split(steps), strict=True):
            y, state = learner(now, state=state, return_state=True, impl="reference")
            y.backward(error)
    return [p.grad for p in learner.parameters() if p.grad is not None]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b.view(a.shape), rtol=1e-9, atol=1e-12)


def two_layers(net: sf.Temporal, trace: float) -> list[Tensor]:
    """SLTT, and OTTT with the presynaptic trace `trace * before + spikes`, of two layers of LIF
    neurons with a soft reset."""
    (first, second, out), (x, error) = [p.detach() for p in net.parameters()], sequence()
    grads = [torch.zeros_like(w) for w in (first, second, out)]
    u, v = torch.zeros(B, WIDTHS[1]).double(), torch.zeros(B, WIDTHS[2]).double()
    input_trace, spike_trace = torch.zeros(B, WIDTHS[0]).double(), torch.zeros_like(u)
    for t in range(T):
        u = DECAY * u + x[t] @ first.T
        s = (u >= THRESHOLD).double()
        v = DECAY * v + s @ second.T
        z = (v >= THRESHOLD).double()
        input_trace, spike_trace = trace * input_trace + x[t], trace * spike_trace + s
        at_v = (error[t] @ out) * psi(v - THRESHOLD)
        at_u = (at_v @ second) * psi(u - THRESHOLD)
        grads[0] += at_u.T @ input_trace
        grads[1] += at_v.T @ spike_trace
        grads[2] += error[t].T @ z
        u, v = u - THRESHOLD * s, v - THRESHOLD * z
    return grads


@pytest.mark.parametrize("steps", [T, 3])
@pytest.mark.parametrize(("rule", "trace"), [("sltt", 0.0), ("ottt", DECAY)])
def test_sltt_and_ottt(rule, trace, steps):
    net = network(lif(reset="soft"), lif(reset="soft"))
    assert_equal(learned(net, rule, steps), two_layers(net, trace))


class Adaptive(sf.ALIF):
    """The ALIF of e-prop: a spike subtracts the threshold at rest."""

    def step(self, x, v, a):
        h = self.charge(x, v)
        s, _ = self.fire(h, self.threshold + self.beta * a)
        return s, (self.after(h, s, self.threshold), self.adaptation_decay * a + s)


def eprop(net: sf.Temporal, feedback: Tensor) -> list[Tensor]:
    """e-prop of a recurrent layer of `Adaptive`, with the eligibility vectors of the paper."""
    (w_in, w_rec, out), (x, error) = [p.detach() for p in net.parameters()], sequence()
    rho, beta, n = 0.9, 0.3, WIDTHS[1]
    grads = [torch.zeros_like(w) for w in (w_in, w_rec, out)]
    v, a, z = (torch.zeros(B, n).double() for _ in range(3))
    slow = [torch.zeros(B, n, w.shape[1]).double() for w in (w_in, w_rec)]
    fast = [torch.zeros(B, w.shape[1]).double() for w in (w_in, w_rec)]
    for t in range(T):
        before = z
        v = DECAY * v + x[t] @ w_in.T + z @ w_rec.T
        z = (v >= THRESHOLD + beta * a).double()
        p = psi(v - THRESHOLD - beta * a)[:, :, None]
        signal = (error[t] @ feedback)[:, :, None]
        for i, presynaptic in enumerate((x[t], before)):
            fast[i] = DECAY * fast[i] + presynaptic
            trace = p * (fast[i][:, None] - beta * slow[i])
            grads[i] += (signal * trace).sum(0)
            slow[i] = rho * slow[i] + trace
        grads[2] += error[t].T @ z
        v, a = v - THRESHOLD * z, rho * a + z
    return grads


@pytest.mark.parametrize(("feedback", "steps"), [("symmetric", 5), ("random", T), ("adaptive", 5)])
def test_eprop(feedback, steps):
    neuron = Adaptive(DECAY, THRESHOLD, 0.9, 0.3, reset="soft", surrogate=SURROGATE)
    net = network(sf.Recurrent(neuron, WIDTHS[1]))
    torch.manual_seed(2)
    learner = sf.Online(net, "e-prop", feedback)
    torch.manual_seed(2)
    found = learned(net, "e-prop", steps, feedback=feedback)
    matrix = net.net[2].weight if feedback == "symmetric" else learner.matrix
    expected = eprop(net, matrix.detach())
    if feedback == "adaptive":
        found = [*found[1:], found[0]]
        expected.append(expected[-1])
    assert_equal(found, expected)


def drtrl(net: sf.Temporal) -> list[Tensor]:
    """D-RTRL of two layers of LIF with a hard reset and one learned decay in each: the derivative
    `h * psi` of the reset is part of the trace."""
    first, logit, second, logit2, out = [p.detach() for p in net.parameters()]
    x, error = sequence()
    grads = [torch.zeros_like(p) for p in (first, logit, second, logit2, out)]
    layers = [(first, logit), (second, logit2)]
    v = [torch.zeros(B, len(w)).double() for w, _ in layers]
    e = [torch.zeros(B, *w.shape).double() for w, _ in layers]
    e_decay = [torch.zeros_like(states) for states in v]
    for t in range(T):
        a, by_weight, by_decay, slopes = x[t], [], [], []
        for i, (w, p) in enumerate(layers):
            decay = torch.sigmoid(p)
            h = decay * v[i] + a @ w.T
            s = (h >= THRESHOLD).double()
            slope = psi(h - THRESHOLD)
            h_weight = decay * e[i] + a[:, None]
            h_decay = decay * e_decay[i] + v[i]
            by_weight.append(slope[:, :, None] * h_weight)
            by_decay.append(slope * h_decay * decay * (1 - decay))
            kept = 1 - s - h * slope
            v[i], e[i], e_decay[i] = h * (1 - s), kept[:, :, None] * h_weight, kept * h_decay
            a, slopes = s, [*slopes, slope]
        signal = error[t] @ out
        signals = [(signal * slopes[1]) @ second, signal]
        for i in (0, 1):
            grads[2 * i] += (signals[i][:, :, None] * by_weight[i]).sum(0)
            grads[2 * i + 1] += (signals[i] * by_decay[i]).sum()
        grads[4] += error[t].T @ a
    return grads


@pytest.mark.parametrize("steps", [T, 5])
def test_drtrl(steps):
    def neuron() -> sf.LIF:
        return sf.LIF(sf.LearnableFraction(DECAY), THRESHOLD, surrogate=SURROGATE)

    net = network(neuron(), neuron())
    assert_equal(learned(net, "d-rtrl", steps), drtrl(net))


def test_states_of_another_rule_or_of_other_parameters():
    net = network(sf.LIF(sf.LearnableFraction(DECAY), THRESHOLD))
    learner, (x, _) = sf.Online(net, "d-rtrl"), sequence()
    options = {"return_state": True, "impl": "reference"}
    _, state = learner(x, **options)
    with pytest.raises(ValueError, match=r"state is of rule 'd-rtrl', but .* learns by 'ottt'"):
        sf.Online(net, "ottt")(x, state=state, **options)
    decay = next(net.net[1].parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match=r"traces for 2 parameters of neuron 'net.1', .* learns 1"):
        learner(x, state=state, **options)
    net.net[0].weight.requires_grad_(False)
    _, state = learner(x, **options)
    decay.requires_grad_()
    with pytest.raises(ValueError, match=r"traces for 1 parameters of neuron 'net.1', .* learns 2"):
        learner(x, state=state, **options)


def test_inference_mode():
    net, (x, _) = network(lif()), sequence()
    learner, options = sf.Online(net, "ottt"), {"impl": "reference"}
    with torch.no_grad():
        y, state = learner(x, return_state=True, **options)
        after = learner(x, state=state, **options)
    with torch.inference_mode():
        with pytest.raises(ValueError, match=r"inference_mode\(\) prevents: use torch.no_grad\(\)"):
            learner(x, return_state=True, **options)
        assert torch.equal(learner(x, **options), y)
        assert torch.equal(learner(x, state=state, **options), after)


class Order(nn.Module):
    """Linear layers that run in another order than that of their registration."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        self.first, self.neuron = nn.Linear(WIDTHS[0], WIDTHS[0]), sf.LIF()
        self.out, self.other = (nn.Linear(WIDTHS[0], WIDTHS[0]) for _ in range(2))
        self.order = order

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x


@pytest.mark.parametrize("feedback", ["random", "adaptive"])
def test_feedback_needs_the_last_layer(feedback):
    def learn(*order: str, **options: object) -> None:
        net = sf.Temporal(Order(order)).double()
        learner = sf.Online(net, "e-prop", feedback).double()
        learner(sequence()[0], impl="reference", **options)

    learn("first", "neuron", "out", "other")
    for order, found in (
        (("first", "neuron", "out"), "'net.out' was the last"),
        (("first", "neuron", "other", "out"), "'net.out' was the last"),
        (("neuron",), "none ran"),
    ):
        with pytest.raises(ValueError, match=rf"the weight of 'net.other', .* but {found}"):
            learn(*order)
    learn("other", "neuron")
    if feedback == "random":
        learn("other", "neuron", return_state=True)
    else:
        with pytest.raises(ValueError, match=r"neuron 'net.neuron' is behind the last nn.Linear"):
            learn("other", "neuron", return_state=True)


def test_drtrl_of_one_layer_is_backpropagation():
    net = network(sf.ALIF(DECAY, sf.LearnablePositive(THRESHOLD), surrogate=SURROGATE))
    expected = learned(net, "bptt")
    assert_equal(learned(net, "d-rtrl"), expected)
    assert_equal(learned(net, "d-rtrl", 5), expected)
    assert not torch.allclose(learned(net, "e-prop")[0], expected[0], rtol=1e-3)


def test_truncated_backpropagation():
    net = network(lif(), lif())
    found, (x, grad) = learned(net, "bptt", 5), sequence()
    net.zero_grad()
    state = None
    for now, error in zip(x.split(5), grad.split(5), strict=True):
        y, state = net(now, state=state, return_state=True, impl="reference")
        state = {name: tuple(s.detach() for s in states) for name, states in state.items()}
        y.backward(error)
    assert_equal(found, [p.grad for p in net.parameters()])


@pytest.mark.parametrize("rule", ["ottt", "e-prop", "d-rtrl"])
def test_parts_describe_no_neuron_anew(rule, monkeypatch):
    """A description of all attributes takes longer than a step of a small layer."""
    learner, (x, _), state = sf.Online(network(lif(), lif()).float(), rule), sequence(), None
    for i, now in enumerate(x.float().split(1)):
        if i == 1:
            monkeypatch.setattr("spikefuse.neurons.definition.Description", None)
        y, state = learner(now, state=state, return_state=True)
        y.sum().backward()


class Checkpointed(nn.Module):
    """Layers that backward would compute again."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return sf.checkpoint(self.layers, x)


@pytest.mark.parametrize("steps", [T, 3])
@pytest.mark.parametrize("rule", ["bptt", "sltt", "ottt", "e-prop", "d-rtrl"])
def test_checkpointed_layers_learn_as_others(rule, steps):
    net = network(lif(), lif())
    net.net[1] = sf.Recurrent(net.net[1], WIDTHS[1]).double()
    expected = learned(net, rule, steps)
    first, recurrent, *others = net.net
    checkpointed = sf.Temporal(nn.Sequential(Checkpointed(first, recurrent), *others))
    assert_equal(learned(checkpointed, rule, steps), expected)
