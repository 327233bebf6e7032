"""Event networks that run step by step."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.events import stream as stream_module
from spikefuse.nn import EventLinear, Events, EventStream


def neuron() -> sf.LIF:
    surrogate = sf.surrogate.FastSigmoid(10.0, cutoff=-0.1)
    return sf.LIF(0.9, 1.0, detach_reset=True, surrogate=surrogate)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = EventLinear(30, 70, neuron()), EventLinear(70, 40, neuron(), bias=False)
    for layer in layers:
        nn.init.normal_(layer.weight, 0.1, 0.5)
    return nn.Sequential(*layers, EventLinear(40, 5))


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_steps_equal_a_sequence(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("needs the interpreter")
        from spikefuse.events import products_triton

        monkeypatch.setattr(stream_module, "kernels_of", lambda impl: products_triton)
        monkeypatch.setattr(products_triton, "LISTED", 32)  # several blocks
        monkeypatch.setattr(products_triton, "SUMMED", (4, 16))
    net = network()
    spikes = (torch.rand(6, 1, 30) < 0.2).float()
    spikes[3] = 0
    expected = sf.Temporal(net)(Events.from_dense(spikes))
    stream = EventStream(net)
    outputs = [stream(x) for x in spikes[:, 0]]
    fired = net[2].activity
    assert fired is not None
    assert 0 < fired.fired < fired.sites
    torch.testing.assert_close(torch.stack(outputs)[:, None], expected)
    stream.reset()
    assert torch.equal(stream(spikes[0, 0]), outputs[0])
    # The state is that of a Stream and of Temporal.
    if backend == "numba":
        _, stream.state = sf.Temporal(net)(Events.from_dense(spikes[:3]), return_state=True)
        torch.testing.assert_close(stream(spikes[3, 0]), outputs[3])
        other = sf.Stream(net)
        other.state = stream.state
        torch.testing.assert_close(other(spikes[4])[0], outputs[4])


def test_wrong_layers_and_inputs() -> None:
    net = network()
    with pytest.raises(TypeError, match="layer 1 is a Linear: expected EventLinear"):
        EventStream(nn.Sequential(net[0], nn.Linear(70, 3)))
    with pytest.raises(TypeError, match="layer 1 needs spikes, but the layer before has no neuron"):
        EventStream(nn.Sequential(EventLinear(4, 5), EventLinear(5, 6)))
    stream = EventStream(net)
    with pytest.raises(ValueError, match=r"of shape \[1, 30\]: expected float32 \[30\]"):
        stream(torch.zeros(1, 30))
    for value in (0.5, -1.0, float("nan")):
        with pytest.raises(ValueError, match="values other than 0 and 1"):
            stream(torch.full((30,), value))
    stream(torch.zeros(30))
    assert stream.state is not None
    assert list(stream.state) == ["net.0.neuron", "net.1.neuron"]
    message = r"entries for \(net.0.neuron\): expected \(net.0.neuron, net.1.neuron\)"
    with pytest.raises(ValueError, match=message):
        stream.state = {"net.0.neuron": stream.state["net.0.neuron"]}
