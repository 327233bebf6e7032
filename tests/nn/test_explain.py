"""`explain`: what it finds is what a call does, and it leaves the model as it was."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.nn.explain import COPIED_BYTES, _kept, _record, copy_bandwidth
from spikefuse.nn.explanation import Layer
from spikefuse.nn.neuron import Neuron
from spikefuse.testing import lay_out, make_input

T, B = 37, 2


class Uncompilable(sf.Neuron):
    v = sf.State()

    def step(self, x, v):
        return torch.erf(x + v), (v + x,)


class Noisy(sf.Neuron):
    """Draws its second input by itself."""

    v = sf.State()

    def forward(self, x):
        return super().forward(x, torch.rand_like(x))

    def step(self, x, noise, v):
        return x + noise, (v + x,)


@pytest.fixture
def net():
    return sf.Temporal(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), sf.LIF(), nn.Flatten(), sf.ALIF())
    )


@pytest.fixture
def small_copy(monkeypatch):
    monkeypatch.setitem(COPIED_BYTES, "cpu", 1 << 20)
    copy_bandwidth.cache_clear()
    yield
    copy_bandwidth.cache_clear()


def only(explanation) -> Layer:
    (layer,) = explanation.layers
    return layer


def test_layers_of_a_network(net):
    found = sf.explain(net, torch.rand(T, B, 1, 6, 6))
    lif, alif = found.layers
    assert (lif.name, lif.module, lif.shape) == ("net.2", "LIF", (T, B, 3, 4, 4))
    assert (alif.name, alif.module, alif.shape) == ("net.4", "ALIF", (T, B, 48))
    for layer, num_states in ((lif, 1), (alif, 2)):
        assert layer.dtypes == (torch.float32,)
        assert layer.implementation == "numba"
        assert layer.program.startswith(f"{layer.module}-numba-")
        assert layer.notes == ()
        assert layer.kept_inputs == 4 * T * B * 48
        assert layer.kept_states == 4 * num_states * ((T - 1) // layer.chunk) * B * 48
        assert layer.loop_states > layer.kept_inputs
        # Forward: read x, write y; backward: read x and grad_y, write grad_x.
        assert layer.moved == 5 * layer.kept_inputs
        assert layer.least is layer.achieved is layer.fraction is None
    assert found.num_others == 3
    assert found.not_called == ()
    assert found.bandwidth is None


@pytest.mark.parametrize("neuron", [sf.LIF(), sf.ALIF(), sf.PLIF(channels=5)])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 5, 9])
def test_what_the_loop_keeps_is_what_it_keeps_at_full_length(neuron, num_steps):
    x = make_input((num_steps, B, 5)).requires_grad_()
    (call,) = _record(neuron, (x,), {"impl": "reference"})
    layer = only(sf.explain(neuron, x))
    assert layer.loop_states == _kept(call, "reference")[1]
    assert only(sf.explain(neuron, x, impl="reference")).kept_states == layer.loop_states


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_is_kept_without_gradients(grad):
    x = make_input((T, B, 5)).requires_grad_(grad)
    layer = only(sf.explain(sf.LIF(), x))
    assert (layer.kept_inputs > 0) == (layer.kept_states > 0) == (layer.loop_states > 0) == grad
    assert layer.moved == x.nbytes * (5 if grad else 2)
    with torch.no_grad():
        layer = only(sf.explain(sf.LIF(), x))
    assert layer.kept_inputs == layer.kept_states == layer.loop_states == 0


def test_parameters_need_no_gradient_of_the_input():
    x = make_input((T, B, 5))
    layer = only(sf.explain(sf.PLIF(), x))
    assert layer.kept_inputs == x.nbytes
    assert layer.moved == 4 * x.nbytes


def test_a_still_image_is_kept_once():
    x = make_input((T, B, 5), constant=True).requires_grad_()
    layer = only(sf.explain(sf.LIF(), x))
    assert layer.kept_inputs == x.nbytes // T
    assert layer.moved == 2 * (x.nbytes // T + x.nbytes) + x.nbytes


def test_states_are_passed_on(net):
    x = torch.rand(T, B, 1, 6, 6)
    _, state = net(x, return_state=True)
    found = sf.explain(net, x, state=state, return_state=True)
    assert len(found.layers) == 2
    x = torch.rand(T, B, 5)
    assert only(sf.explain(sf.LIF(), x, state=(torch.rand(B, 5, requires_grad=True),))).kept_inputs


def test_several_inputs_and_a_forward_of_its_own():
    x = make_input((T, B, 5), torch.bfloat16)
    found = sf.explain(Noisy(), x)
    assert only(found).dtypes == (torch.bfloat16, torch.bfloat16)
    assert "2 × [37, 2, 5]  bfloat16  Noisy-numba-" in str(found)


def test_the_reference_by_request(net):
    layers = sf.explain(net, torch.rand(T, B, 1, 6, 6), impl="reference").layers
    layers += sf.explain(sf.LIF(), torch.rand(T, B, 5), impl="reference").layers
    assert [layer.implementation for layer in layers] == ["reference"] * 3
    assert [layer.program for layer in layers] == [layer.chunk for layer in layers] == [None] * 3
    whom = ["Temporal", "Temporal", "the neuron"]
    assert [layer.notes for layer in layers] == [
        (f'on the reference: impl="reference" was passed to {name}',) for name in whom
    ]


def test_what_cannot_be_compiled_is_said_and_the_rest_goes_on():
    net = sf.Temporal(nn.Sequential(nn.Linear(3, 3), Uncompilable(), sf.LIF()))
    x = torch.rand(4, 2, 3)
    found = sf.explain(net, x)
    first, second = found.layers
    assert (first.implementation, second.implementation) == ("reference", "numba")
    assert first.kept_states == first.loop_states > 0
    (note,) = first.notes
    assert note.startswith("not compiled, which a call raises as an error: Uncompilable.step uses")
    assert "'erf' at" in note
    assert f"net.1: {note}" in str(found)
    with pytest.raises(sf.UnsupportedOperation, match="erf"):
        net(x)


def test_copied_inputs():
    x = make_input((4, 2, 32, 4, 4))
    for layout in ("contiguous", "channels_last", "batch_first"):
        assert only(sf.explain(sf.LIF(), lay_out(x, layout))).notes == ()
    (note,) = only(sf.explain(sf.LIF(), x[..., ::2])).notes
    assert note == (
        "input copied: x [4, 2, 32, 4, 2] with strides [1024, 512, 16, 4, 2]: "
        "its steps are not dense, or in pieces too short to read in place"
    )

    class Sum(sf.Neuron):
        v = sf.State()

        def step(self, x, y, v):
            return x + y, (v + x,)

    (note,) = only(sf.explain(Sum(), x, lay_out(x, "channels_last"))).notes
    assert note.startswith("input copied: y [4, 2, 32, 4, 4] with strides")
    assert note.endswith(": it lies unlike the first input")


def test_the_model_is_left_as_it_was(net):
    net(torch.rand(T, B, 1, 6, 6)).sum().backward()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    gradients = [p.grad.clone() for p in net.parameters()]
    x = torch.rand(T, B, 1, 6, 6)
    random = torch.get_rng_state()
    sf.explain(nn.Sequential(net, nn.Dropout()), x)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, net.parameters(), strict=True))


def test_errors_of_the_call_pass_and_nothing_is_watched_any_more(net):
    scan = Neuron._scan
    with pytest.raises(ValueError, match=r"expected \[T, B, ...\]"):
        sf.explain(sf.LIF(), torch.rand(3))
    with pytest.raises(TypeError, match="x is a list: expected a tensor"):
        sf.explain(sf.LIF(), [1.0])
    with pytest.raises(RuntimeError):
        sf.explain(net, torch.rand(T, B, 2, 6, 6))
    assert Neuron._scan is scan
    with pytest.raises(TypeError, match=r"model is a builtin.*: expected a torch.nn.Module"):
        sf.explain(torch.sin, torch.rand(3))


def test_calls_of_other_threads_are_not_the_model():
    other = sf.LIF()

    class Model(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=other, args=(x,))
            thread.start()
            thread.join()
            return other(x)

    found = sf.explain(Model(), torch.rand(4, 2, 3))
    assert only(found).name == "(not in the model)"


def test_neurons_that_are_not_called():
    net = nn.ModuleDict({"used": sf.LIF(), "idle": sf.LIF()})
    net.forward = lambda x: net["used"](net["used"](x))
    found = sf.explain(net, torch.rand(4, 2, 3))
    assert [layer.name for layer in found.layers] == ["used", "used"]
    assert found.not_called == ("idle",)
    assert "not called: idle" in str(found)


def test_times(net, small_copy):
    found = sf.explain(net, torch.rand(T, B, 1, 6, 6), time=True)
    assert found.bandwidth == copy_bandwidth(torch.device("cpu")) > 0
    for layer in found.layers:
        assert layer.least == layer.moved / found.bandwidth
        assert layer.achieved > 0
        assert layer.fraction == layer.least / layer.achieved
    header, first, *_ = str(found).splitlines()
    assert header.split()[-3:] == ["least", "achieved", "fraction"]
    assert first.endswith("%")
    without = sf.explain(sf.LIF(), torch.rand(4, 2, 3), time=True)
    assert only(without).achieved > 0


def test_the_other_backend(backends):
    x = make_input((5, B, 5)).requires_grad_()
    for impl in backends.impls:
        layer = only(sf.explain(sf.LIF(), x, impl=impl))
        assert layer.implementation == impl
        assert layer.program.startswith(f"LIF-{impl}-")
        assert layer.kept_states == 4 * ((x.shape[0] - 1) // layer.chunk) * B * 5


def test_compiled_models(net):
    x = torch.rand(T, B, 1, 6, 6)
    compiled = torch.compile(net, backend="eager")
    compiled(x)
    assert "torch._dynamo" in sys.modules
    found = sf.explain(compiled, x)
    assert [layer.name for layer in found.layers] == ["_orig_mod.net.2", "_orig_mod.net.4"]
