"""A neuron as a module: its errors, states in and out, several inputs and outputs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import spikefuse as sf
from spikefuse.testing import make_input


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
    r"LIF takes 1 inputs \(x\), not 0": lambda: LIF(),
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
