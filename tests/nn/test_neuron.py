"""A neuron as a module: its errors, states in and out, several inputs and outputs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.nn import neuron as calls
from spikefuse.testing import assert_matches_reference, make_input
from tests.definitions import DEFINITIONS, make


class Pair(sf.Neuron):
    """Two inputs, two outputs, two states."""

    u, w = sf.State(), sf.State(0.5)

    def __init__(self):
        super().__init__()
        self.decay, self.surrogate = 0.75, sf.surrogate.Arctan()

    def step(self, x, y, u, w):
        h = self.decay * u + x - 0.25 * w
        s = self.surrogate(h - 0.5)
        return (s, h), (h * (1 - s), 0.5 * w + y)


PAIR, LIF = Pair(), sf.LIF(0.75, 0.5)
X = make_input((4, 2, 3))
STATE = (torch.rand(2, 3), torch.rand(2, 3))

TYPE_ERRORS = {
    r"Pair takes 2 inputs \(x, y\), not 1": lambda: PAIR(X),
    r"Pair takes 2 inputs \(x, y\), not 3": lambda: PAIR(X, X, X),
    r"LIF takes 1 input \(x\), not 0": lambda: LIF(),
    r"not 2; pass a state as state=\(\.\.\.\), and all time steps": lambda: LIF(X, X[0]),
    r"LIF: x is a list: expected a tensor": lambda: LIF([1.0], impl="numba"),
    r"LIF: x is torch.int64: expected float32.*convert it with x.float\(\)": lambda: LIF(X.long()),
    r"LIF: x is torch.bool": lambda: LIF(X > 0),
    r"Pair: y is torch.int32.*y.float\(\)": lambda: PAIR(X, X.int()),
    r'LIF: x is torch.float64.*or impl="reference"': lambda: LIF(X.double()),
    r"LIF: x is torch.complex64": lambda: LIF(X + 0j, impl="reference"),
    r"LIF: state must be a tuple of tensors \(v,\)": lambda: LIF(X, state=STATE),
    r"LIF: state must be a tuple of tensors": lambda: LIF(X, state=STATE[0]),
    r"Pair: state must be a tuple of tensors \(u, w,\)": lambda: PAIR(X, X, state=STATE[:1]),
    r"LIF: state must be a tuple": lambda: LIF(X, state={"v": STATE[0]}),
    r"LIF: state v must be a floating-point tensor": lambda: LIF(X, state=(STATE[0].long(),)),
    r"Pair: state w must be a floating-point tensor": lambda: PAIR(X, X, state=(STATE[0], 0.5)),
}
VALUE_ERRORS = {
    r"LIF: x has shape \[4\]: expected \[T, B, ...\] with T >= 1": lambda: LIF(X[:, 0, 0]),
    r"LIF: x has shape \[\]": lambda: LIF(torch.tensor(1.0)),
    r"LIF: x has shape \[0, 2, 3\]": lambda: LIF(X[:0]),
    r"Pair: y is \[3, 2, 3\] on cpu, x is \[4, 2, 3\] on cpu: inputs must agree": (
        lambda: PAIR(X, X[:3])
    ),
    r"Pair: y is \[4, 2, 3\] on meta, x is": lambda: PAIR(X, X.to("meta")),
    r"LIF: state v is \[3, 2\] on cpu: expected \[2, 3\].* read as T=.*use x.unsqueeze\(0\)": (
        lambda: LIF(X, state=(STATE[0].t(),))
    ),
    r"LIF: state v is \[2, 3\] on meta": lambda: LIF(X, state=(STATE[0].to("meta"),)),
    "no output or state is named 'mem': expected names among 'spikes', 'v', 'h'": (
        lambda: LIF(X, outputs=("spikes", "mem"))
    ),
    "is named 'h': expected names among 'spikes', 'output0', 'output1', 'u', 'w'": (
        lambda: PAIR(X, X, outputs=("h",), impl="reference")
    ),
    r"outputs is 'v': expected a tuple of names, such as \('spikes', 'v'\)": (
        lambda: LIF(X, outputs="v")
    ),
    r"outputs is \(\): expected a tuple of names": lambda: LIF(X, outputs=()),
    r"outputs is \(0,\): expected a tuple of names": lambda: LIF(X, outputs=(0,)),
    r"impl is 'cuda': expected one of auto, triton, numba, reference": lambda: LIF(X, impl="cuda"),
    r'no kernels for device \'meta\': move the input to cuda or cpu, or pass impl="reference"': (
        lambda: LIF(X.to("meta"))
    ),
    r'impl="numba" runs on the CPU, but the input is on meta': (
        lambda: LIF(X.to("meta"), impl="numba")
    ),
    r"parameter 'decay' has shape \[4\].*this input has C = 3": lambda: sf.PLIF(channels=4)(X),
    r"parameter 'decay' has shape \[4\].*this input has C = none": (
        lambda: sf.PLIF(channels=4)(X[:, :, 0])
    ),
    r"parameter 'decay' is on meta, the input on cpu: move the module with .to\('cpu'\)": (
        lambda: sf.PLIF().to("meta")(X)
    ),
    r"'surrogate.cutoff' requires a gradient, but its surrogate has none": (
        lambda: sf.LIF(surrogate=sf.surrogate.Sigmoid(cutoff=sf.LearnablePositive(1.0)))(X)
    ),
}


@pytest.mark.parametrize("message", TYPE_ERRORS)
def test_type_errors(message):
    with pytest.raises(TypeError, match=message):
        TYPE_ERRORS[message]()


@pytest.mark.parametrize("message", VALUE_ERRORS)
def test_value_errors(message):
    with pytest.raises(ValueError, match=message):
        VALUE_ERRORS[message]()


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises((ValueError, ImportError), match=r"TRITON_INTERPRET=1|not installed"):
        LIF(X, impl="triton")


def test_results():
    outputs = PAIR(X, X)
    assert isinstance(outputs, tuple)
    assert [y.shape for y in outputs] == [X.shape] * 2
    outputs, state = PAIR(X, X, return_state=True)
    assert [s.shape for s in state] == [X.shape[1:]] * 2
    assert isinstance(LIF(X), torch.Tensor)
    spikes, state = LIF(X.bfloat16(), return_state=True)
    assert spikes.dtype == torch.bfloat16
    assert state[0].dtype == torch.float32


def test_mixed_dtypes_promote():
    s, _ = PAIR(X, X.bfloat16())
    assert s.dtype == torch.float32
    s, h = PAIR(X.half(), X.bfloat16())
    assert s.dtype == h.dtype == torch.float32
    expected = PAIR(X.half(), X.bfloat16(), impl="reference")
    assert torch.equal(h, expected[1])


def test_the_reference_computes_in_float64():
    spikes, state = LIF(X.double(), return_state=True, impl="reference")
    assert spikes.dtype == state[0].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split", [1, 5, 16])
def test_chunks_equal_one_call(split, dtype, backends):
    x, y = (make_input((21, 2, 3), dtype, backends.device, seed) for seed in range(2))
    for impl in backends.impls:
        expected, final = PAIR(x, y, return_state=True, impl=impl)
        pieces, state = [], None
        for a, b in zip(x.split(split), y.split(split), strict=True):
            outputs, state = PAIR(a, b, state=state, return_state=True, impl=impl)
            pieces.append(outputs)
        for e, chunks in zip(expected, zip(*pieces, strict=True), strict=True):
            assert torch.equal(torch.cat(chunks), e)
        for s, e in zip(state, final, strict=True):
            assert torch.equal(s, e)


def test_gradients_flow_through_the_state():
    x, y = (make_input((21, 2, 3), seed=seed).requires_grad_() for seed in range(2))
    whole = PAIR(x, y)
    loss = (whole[1] * torch.arange(21.0)[:, None, None]).sum()
    expected = torch.autograd.grad(loss, (x, y))
    first, state = PAIR(x[:9], y[:9], return_state=True)
    second = PAIR(x[9:], y[9:], state=state)
    joined = torch.cat([first[1], second[1]])
    actual = torch.autograd.grad((joined * torch.arange(21.0)[:, None, None]).sum(), (x, y))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def test_a_state_may_have_any_float_dtype_and_layout():
    state = (torch.rand(3, 2).t().double(), torch.rand(2, 3).half().requires_grad_())
    outputs = PAIR(X, X, state=state)
    expected = PAIR(X, X, state=tuple(s.float() for s in state))
    assert torch.equal(outputs[1], expected[1])
    outputs[1].sum().backward()
    assert state[1].grad.dtype == torch.float16
    assert LIF(X, state=[STATE[0]]).shape == X.shape


def test_the_given_state_is_not_changed():
    state = tuple(s.clone() for s in STATE)
    PAIR(X, X, state=state, return_state=True)
    assert all(torch.equal(s, e) for s, e in zip(state, STATE, strict=True))


def test_no_state_survives_a_call():
    expected = LIF(X)
    _, state = LIF(X, return_state=True)
    LIF(X, state=state)
    assert torch.equal(LIF(X), expected)


def test_without_a_state():
    class Gain(sf.Neuron):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.tensor(2.0))

        def step(self, x):
            return x * self.gain, ()

    neuron = Gain()
    y, state = neuron(X, return_state=True)
    assert state == ()
    y.sum().backward()
    torch.testing.assert_close(neuron.gain.grad, X.sum())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(duplicate):
    neuron = sf.PLIF(0.7, channels=3, threshold=torch.tensor(0.5))
    expected = neuron(X)
    other = duplicate(neuron)
    assert torch.equal(other(X), expected)
    with torch.no_grad():
        other.decay.logit.fill_(-9.0)
    assert torch.equal(neuron(X), expected)


def test_state_dict_holds_what_is_learned():
    neuron, other = sf.PLIF(0.7, threshold=0.5), sf.PLIF(0.2, threshold=0.5)
    assert list(neuron.state_dict()) == ["decay.logit"]
    other.load_state_dict(neuron.state_dict())
    assert torch.equal(other(X), neuron(X))
    assert list(sf.LIF().state_dict()) == []


def test_attributes_that_kernels_depend_on(backends):
    class Modes(sf.Neuron):
        v = sf.State()

        def __init__(self, decay, soft):
            super().__init__()
            self._decay, self._soft = decay, soft

        def step(self, x, v):
            h = self._decay * v + x
            h = h if self._soft else -h
            return (h if self.training else h + 1.0), (h,)

    x = X.to(backends.device)
    for decay, soft, training in ((0.5, True, True), (0.25, False, True), (0.5, True, False)):
        neuron = Modes(decay, soft).train(training)
        for impl in backends.impls:
            assert torch.equal(neuron(x, impl=impl), neuron(x, impl="reference"))


class WithOutputs(torch.nn.Module):
    """A neuron that is called with `outputs`."""

    def __init__(self, neuron, *outputs):
        super().__init__()
        self.neuron, self.outputs = neuron, outputs

    def forward(self, *inputs, **options):
        return self.neuron(*inputs, **options, outputs=self.outputs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("LIF", torch.float32),
        ("LIF", torch.bfloat16),
        ("PLIF-channel", torch.float32),
        ("Gated", torch.bfloat16),
        ("Izhikevich", torch.float32),
        ("LI", torch.bfloat16),
    ],
    ids=str,
)
def test_states_over_time_equal_the_reference(name, dtype, backends):
    neuron = make(name, "soft" if name == "LIF" else "hard", 2, backends.device)
    own = ("output1", "output0") if name == "Gated" else ("spikes",)
    module = WithOutputs(neuron, *neuron.states, *own)
    xs = [make_input((19, 3, 2, 5), dtype, backends.device, i) for i in range(2)]
    state = tuple(make_input((3, 2, 5), device=backends.device, seed=7) for _ in neuron.states)
    assert_matches_reference(module, xs[: len(neuron.input_names)], backends.impls, state)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_states_over_time_are_those_of_every_step(name):
    neuron = make(name, "hard", 3, "cpu")
    names = tuple(neuron.states)
    xs = [make_input((5, 2, 3, 2), seed=i) for i in range(len(neuron.input_names))]
    outputs, final = neuron(*xs, outputs=names, return_state=True, impl="reference")
    assert len(outputs) == len(names)
    assert all(torch.equal(y[-1], s) for y, s in zip(outputs, final, strict=True))
    state = None
    for t in range(5):
        step = [x[t : t + 1] for x in xs]
        _, state = neuron(*step, state=state, return_state=True, impl="reference")
        assert all(torch.equal(y[t], s) for y, s in zip(outputs, state, strict=True))


def test_outputs_are_returned_in_the_order_of_their_names():
    s, v = LIF(X, outputs=("spikes", "v"))
    assert torch.equal(s, LIF(X))
    (only,) = LIF(X, outputs=["spikes"])
    assert torch.equal(only, s)
    first, second, third = LIF(X, outputs=("v", "spikes", "v"))
    assert all(map(torch.equal, (first, second, third), (v, s, v)))
    assert LIF(X.bfloat16(), outputs=("v",))[0].dtype == torch.bfloat16


def test_spikes_are_the_first_output():
    outputs = PAIR(X, X)
    assert torch.equal(PAIR(X, X, outputs=("spikes",))[0], outputs[0])
    assert torch.equal(PAIR(X, X, outputs=("output1",))[0], outputs[1])


def test_the_potential_before_the_reset(backends):
    x = X.to(backends.device).requires_grad_()
    neuron = sf.LIF(0.5, threshold=0.3)
    for impl in (*backends.impls, "reference"):
        v, h = neuron(x, outputs=("v", "h"), impl=impl)
        before = torch.cat((torch.zeros_like(v[:1]), v[:-1]))
        assert torch.equal(h, 0.5 * before + x)
        (gradient,) = torch.autograd.grad(h[0].sum(), x)
        assert torch.equal(gradient[0], torch.ones_like(x[0]))


def test_exposed_values():
    class Doubled(sf.LIF):
        def step(self, x, v):
            self.expose(twice=2 * x, v=x)
            return super().step(x, v)

    neuron = Doubled()
    for impl in ("numba", "reference"):
        twice, v, h = neuron(X, outputs=("twice", "v", "h"), impl=impl)
        assert torch.equal(twice, 2 * X)
        # A state comes before a value of its name.
        assert torch.equal(v, sf.LIF()(X, outputs=("v",))[0])
        assert torch.equal(h, sf.LIF()(X, outputs=("h",))[0])


@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - {"Gated"}))
def test_every_model_has_its_potential_before_the_reset(name):
    neuron = make(name, "hard", 2, "cpu")
    xs = [make_input((3, 1, 2), seed=i) for i in range(len(neuron.input_names))]
    h, y = neuron(*xs, outputs=("h", "spikes"), impl="reference")
    assert h.shape == y.shape
    assert h.any()


def test_outputs_follow_changed_attributes():
    neuron = sf.LIF(0.75, 0.5)
    for reset, threshold in (("hard", 0.5), ("soft", 0.5), ("soft", torch.tensor(0.7))):
        neuron.reset, neuron.threshold = reset, threshold
        expected = neuron(X, outputs=("spikes", "v"), impl="reference")
        assert all(map(torch.equal, neuron(X, outputs=("spikes", "v")), expected))


def test_an_output_comes_before_a_state_of_its_name():
    class Counter(sf.Neuron):
        spikes = sf.State()

        def step(self, x, spikes):
            return (x >= 0.5) * 1.0, (spikes + 1.0,)

    for impl in ("numba", "reference"):
        (y,) = Counter()(X, outputs=("spikes",), impl=impl)
        assert torch.equal(y, (X >= 0.5).float())


@pytest.mark.parametrize("neuron", [sf.LIF(0.75, 0.5), sf.PLIF(0.7, channels=3)])
def test_compiled_with_outputs(neuron):
    torch.compiler.reset()

    def loss(x):
        spikes, v = neuron(x, outputs=("spikes", "v"))
        return spikes.mean() + (v - 0.5).square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for function in (loss, compiled):
        x = X.clone().requires_grad_()
        y = function(x)
        results.append((y.detach(), *torch.autograd.grad(y, [x, *neuron.parameters()])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_loss_on_the_membrane():
    """Cross-entropy on the potential at each step, as snnTorch's tutorials train."""
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.first = torch.nn.Linear(6, 16), sf.LIF(0.9)
            self.readout, self.last = torch.nn.Linear(16, 3), sf.LIF(0.9, reset="soft")

        def forward(self, x):
            return self.last(self.readout(self.first(self.hidden(x))), outputs=("spikes", "v"))

    net, x, y = sf.Temporal(Net()), torch.rand(8, 5, 6), torch.randint(3, (5,))
    optimizer, losses = torch.optim.Adam(net.parameters(), 0.02), []
    for _ in range(20):
        _, v = net(x)
        assert v.shape == (8, 5, 3)
        loss = torch.nn.functional.cross_entropy(v.flatten(0, 1), y.repeat(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    expected, found = net(x, impl="reference"), net(x)
    assert all(map(torch.equal, found, expected))


def forgetful() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), sf.LIF(), nn.Linear(5, 2))


def forgetful_of_images(kind: str = "norm") -> nn.Module:
    between = {
        "convolution": [],
        "norm": [nn.BatchNorm2d(4)],
        "max pooling": [nn.MaxPool2d(1)],
        "average pooling": [nn.BatchNorm2d(4), nn.AvgPool2d(1)],
        "adaptive pooling": [nn.AdaptiveAvgPool2d(2)],
        "activation": [nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1)],
    }[kind]
    return nn.Sequential(nn.Conv2d(3, 4, 1), *between, sf.LIF(), nn.Flatten(), nn.Linear(16, 2))


KINDS = (
    *("linear", "convolution", "norm", "max pooling", "average pooling", "adaptive pooling"),
    "activation",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_without_temporal_warns_once(kind, monkeypatch):
    monkeypatch.setattr(calls, "warned", set())
    net, x = forgetful(), torch.rand(4, 3)
    if kind != "linear":
        net, x = forgetful_of_images(kind), torch.rand(4, 3, 2, 2)
    with pytest.warns(UserWarning, match=r"read.* dim 0 .* as time.*net = spikefuse.Temporal"):
        net(x)
    net(x)


def test_a_compiled_network_without_temporal_warns(monkeypatch):
    monkeypatch.setattr(calls, "warned", set())
    net = torch.compile(forgetful(), backend="eager", fullgraph=True)
    with pytest.warns(UserWarning, match="read.* dim 0 .* as time"):
        net(torch.rand(4, 3))


def test_calls_on_sequences_do_not_warn(monkeypatch):
    monkeypatch.setattr(calls, "warned", set())
    net, x, step = forgetful(), torch.rand(4, 1, 3), torch.rand(4, 3)
    net(x)
    sf.Temporal(net)(x)
    sf.Temporal(forgetful_of_images())(torch.rand(4, 2, 3, 2, 2))
    y = nn.Conv2d(3, 4, 1)(torch.rand(8, 3, 2, 2))
    sf.LIF()(y.unflatten(0, (4, 2)))
    sf.LIF()(nn.functional.max_pool2d(y, 2).unflatten(0, (4, 2)))
    sf.Stream(net)(step)
    net.eval()(step)
    with torch.no_grad():
        net.train()(step)
    sf.LIF()(step)
    sf.LIF()(step.clone().requires_grad_(), return_state=True)
