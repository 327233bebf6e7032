"""The container: folding time, states in and out, shapes, copies, threads, checkpoints."""

from __future__ import annotations

import copy
import pickle
import threading
import traceback
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spikefuse as sf
from spikefuse.nn import EventLinear, Events, temporal
from spikefuse.nn.call import active
from spikefuse.scan.state_passing import StatePassing
from spikefuse.testing import make_input
from tests.graph.rows import rows_seen
from tests.grid import rounded, with_exact_layers


def convolutional() -> sf.Temporal:
    torch.manual_seed(0)
    return sf.Temporal(
        nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            sf.LIF(0.5, 0.3),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 5),
            sf.PLIF(0.6, 0.2, channels=5),
        )
    )


def linear(width: int = 5) -> sf.Temporal:
    torch.manual_seed(0)
    return sf.Temporal(
        nn.Sequential(nn.Linear(6, width), sf.LIF(threshold=0.3), nn.Linear(width, 3))
    )


IMAGES, X = make_input((12, 2, 1, 8, 8)), make_input((20, 2, 6))


def gradients(net: nn.Module, x: Tensor, call=None) -> list[Tensor]:
    """The output, and gradients of the input and the parameters."""
    net.zero_grad()
    x = x.clone().requires_grad_()
    y = (net if call is None else call)(x)
    (y * torch.arange(float(y.numel())).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(a, e) for a, e in zip(actual, expected, strict=True)] == [True] * len(
        actual
    )


class Steps(nn.Module):
    """`net`'s layers one step at a time: what Temporal has to equal."""

    def __init__(self, net: sf.Temporal) -> None:
        super().__init__()
        self.layers = net.net

    def forward(self, x: Tensor) -> Tensor:
        results, state = [], {}
        for step in x:
            for name, layer in self.layers.named_children():
                if isinstance(layer, sf.Neuron):
                    y, state[name] = layer(step[None], state=state.get(name), return_state=True)
                    step = y[0]
                else:
                    step = layer(step)
            results.append(step)
        return torch.stack(results)


def test_equals_the_network_step_by_step():
    net = convolutional().eval()
    for actual, expected in zip(
        gradients(net, IMAGES), gradients(net, IMAGES, Steps(net)), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_the_backends_agree(backends):
    net, x = convolutional().eval().to(backends.device), IMAGES.to(backends.device)
    expected = net(x, impl="reference")
    assert expected.any()
    assert not expected.all()
    for impl in backends.impls:
        assert torch.equal(net(x, impl=impl), expected)


@pytest.mark.parametrize("sizes", [(1,) * 12, (5, 7), (4, 4, 4)], ids=str)
def test_streaming_equals_one_call(sizes):
    net, x = with_exact_layers(convolutional().eval()), rounded(IMAGES)
    with torch.no_grad():
        expected, final = net(x, return_state=True)
        pieces, state = [], None
        for chunk in x.split(sizes):
            y, state = net(chunk, state=state, return_state=True)
            pieces.append(y)
    assert torch.equal(torch.cat(pieces), expected)
    assert list(state) == list(final) == ["net.2", "net.6"]
    for name in final:
        assert_equal(list(state[name]), list(final[name]))


def test_gradients_flow_between_chunks():
    net = linear()
    expected = gradients(net, X)

    def chunks(x: Tensor) -> Tensor:
        first, state = net(x[:9], return_state=True)
        return torch.cat([first, net(x[9:], state=state)])

    for a, e in zip(gradients(net, X, chunks), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-3)


def test_nothing_survives_a_call():
    net = linear()
    expected = net(X)
    _, state = net(X, return_state=True)
    net(X, state=state)
    assert torch.equal(net(X), expected)
    assert active.call is None
    assert list(net.state_dict()) == [f"net.{i}.{n}" for i in (0, 2) for n in ("weight", "bias")]
    # A neuron inside still is one on its own.
    neuron = net.net[1]
    assert torch.equal(neuron(X), sf.LIF(threshold=0.3)(X))


def test_a_failed_call_leaves_nothing_behind():
    net = sf.Temporal(nn.Sequential(sf.LIF(), nn.Linear(7, 2)))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        net(X)
    assert active.call is None
    assert net.net[0](X).shape == X.shape


class Nested(nn.Module):
    """Results in containers, and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron = sf.LIF(threshold=0.3)

    def forward(self, x: Tensor) -> dict:
        y = self.neuron(x)
        return {"spikes": y, "pair": (y[:, 0], [x.mean(1)]), "kind": "nested"}


def test_nested_results():
    result = sf.Temporal(Nested())(X)
    assert torch.equal(result["spikes"], sf.LIF(threshold=0.3)(X))
    assert torch.equal(result["pair"][0], result["spikes"][..., 0])
    torch.testing.assert_close(result["pair"][1][0], X.mean(2))
    assert result["kind"] == "nested"


def test_several_inputs_and_outputs_of_a_neuron():
    class Gate(sf.Neuron):
        v = sf.State()

        def step(self, x, y, v):
            v = 0.5 * v + x * y
            return (v, x - v), (v,)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.gate(x, 2 * x)

    net = sf.Temporal(Net())
    for a, e in zip(net(X), Gate()(X, 2 * X), strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("policy", [sf.memory.SaveAll(), sf.memory.Bits()], ids=repr)
def test_spikes_are_bits_and_potentials_are_not(policy, backends):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lif, self.one, self.two = sf.LIF(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            spikes, v = self.lif(x, outputs=("spikes", "v"))
            return self.one(spikes), self.two(v)

    torch.manual_seed(0)
    net = sf.Temporal(Net(), policy).to(backends.device)
    x = 2 * make_input((8, 4, 4, 8, 8), device=backends.device)
    for impl in backends.impls:
        found = []
        for how in (impl, "reference"):
            leaf = x.clone().requires_grad_()
            one, two = net(leaf, impl=how)
            loss = (one * two.detach()).sum() + two.square().sum()
            found.append([one, two, *torch.autograd.grad(loss, [leaf, *net.parameters()])])
        for a, e in zip(*found, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4 * e.abs().max().item())


def test_states_may_be_given_together_with_outputs():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lif = sf.LIF(0.9, 2.0)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.lif(x, outputs=("spikes", "v"))

    net, x = sf.Temporal(Net()), torch.rand(6, 2, 3)
    expected, final = net(x, return_state=True)
    first, state = net(x[:2], return_state=True)
    second = net(x[2:], state=state)
    for e, a, b in zip(expected, first, second, strict=True):
        assert torch.equal(e, torch.cat([a, b]))
    assert torch.equal(expected[1][-1], final["net.lif"][0])


class Skipping(nn.Module):
    """Its second neuron is called on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = sf.LIF(0.9, 0.5), sf.LIF(0.9, 2.0), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if self.both else y


def test_a_neuron_that_is_not_called_keeps_its_state():
    net, x = sf.Temporal(Skipping()), torch.rand(6, 2, 3)
    expected = sf.LIF(0.9, 0.5)(x)
    first, state = net(x[:3], return_state=True)
    assert state["net.second"] == ()
    second, later = net(x[3:], state=state, return_state=True)
    assert torch.equal(torch.cat([first, second]), expected)
    net.net.both = True
    _, known = net(x, state=later, return_state=True)
    net.net.both = False
    _, last = net(x, state=known, return_state=True)
    assert last["net.second"] is known["net.second"]


def test_a_stream_whose_neuron_is_not_called():
    stream, x = sf.Stream(Skipping()), torch.rand(4, 2, 3)
    steps = []
    for step in x:
        steps.append(stream(step))
        stream.state = stream.state
    assert torch.equal(torch.stack(steps), sf.LIF(0.9, 0.5)(x))


def test_a_network_that_is_one_neuron():
    net = sf.Temporal(sf.ALIF(threshold=0.3))
    y, state = net(X, return_state=True)
    assert torch.equal(y, sf.ALIF(threshold=0.3)(X))
    assert list(state) == ["net"]
    assert len(state["net"]) == 2


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.neuron = sf.IF(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(self.neuron(x))


class Masked(nn.Module):
    """Several inputs, one of them nested, and a keyword that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.neuron = nn.Linear(6, 6), sf.LIF(threshold=0.3)

    def forward(self, x: Tensor, extra: dict, *, scale: float = 1.0, mask: Tensor) -> dict:
        y = self.neuron(self.linear(x) * scale + extra["bias"][0])
        return {"spikes": y, "pair": (y * mask, extra["name"])}


@pytest.mark.parametrize("memory", [None, sf.memory.Checkpoint()], ids=str)
def test_several_and_nested_arguments(memory):
    torch.compiler.reset()  # whatever other tests have compiled
    torch.manual_seed(0)
    model, mask = Masked(), (torch.rand(20, 2, 6) < 0.5).float()
    net = sf.Temporal(model, memory)
    extra = {"bias": [make_input((20, 2, 6), seed=1)], "name": "extra"}
    wanted = sf.LIF(threshold=0.3)(model.linear(X) * 2.0 + extra["bias"][0])
    for _ in range(2):
        result = net(X, extra, scale=2.0, mask=mask)
        assert torch.equal(result["spikes"], wanted)
        assert torch.equal(result["pair"][0], wanted * mask)
        assert result["pair"][1] == "extra"
    # A tensor that is the same at each step is expanded over time.
    still = mask[0].expand(20, 2, 6)
    assert torch.equal(
        net(X, extra, mask=still)["pair"][0], net(X, extra, mask=still * 1)["pair"][0]
    )
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X, extra, scale=2.0, mask=mask)["spikes"], wanted)


def test_one_nested_argument():
    class Sum(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    assert torch.equal(sf.Temporal(Sum())((X, 2 * X)), 3 * X)


def batch_first(net: sf.Temporal) -> sf.Temporal:
    other = sf.Temporal(net.net, net.memory, batch_first=True).train(net.training)
    return other if net.captured is None else sf.fuse(other)


@pytest.mark.parametrize("memory", [sf.memory.Recompute(), sf.memory.Checkpoint(2)], ids=str)
def test_batch_first(memory):
    net = sf.fuse(sf.Temporal(convolutional().eval().net, memory)).eval()
    weights = torch.arange(12.0 * 2 * 5).view(12, 2, 5)

    def run(net: sf.Temporal, x: Tensor, weights: Tensor) -> list[Tensor]:
        net.zero_grad()
        x = x.clone().requires_grad_()
        y = net(x)
        (y * weights).sum().backward()
        return [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]

    y, grad, *grads = run(net, IMAGES, weights)
    actual = run(batch_first(net), IMAGES.transpose(0, 1), weights.transpose(0, 1))
    assert actual[0].shape == (2, 12, 5)
    assert_equal(actual, [y.transpose(0, 1), grad.transpose(0, 1), *grads])


def test_batch_first_with_states_and_constant_input():
    net = sf.fuse(convolutional().eval())
    other = batch_first(net)
    first, state = net(IMAGES[:5], return_state=True)
    mine, mine_state = other(IMAGES[:5].transpose(0, 1), return_state=True)
    assert torch.equal(mine, first.transpose(0, 1))
    assert torch.equal(mine_state["net.2"][0], state["net.2"][0])
    y = other(IMAGES[5:].transpose(0, 1), state=state)
    assert torch.equal(y, net(IMAGES[5:], state=state).transpose(0, 1))
    image = IMAGES[0]
    x = image.unsqueeze(1).expand(2, 9, *image.shape[1:])
    assert torch.equal(other(x), net(image.expand(9, *image.shape)).transpose(0, 1))
    assert rows_seen(other, x) == [2]


def test_batch_first_copies_nothing_that_is_time_first():
    class Address(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.address = x.data_ptr()
            return x

    net = sf.Temporal(Address(), batch_first=True)
    for x in (X.transpose(0, 1), X[:1].transpose(0, 1), X[:, :1].transpose(0, 1).contiguous()):
        y = net(x)
        assert torch.equal(y, x)
        assert net.net.address == y.data_ptr() == x.data_ptr()


def note_of(call) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call()
    (note,) = caught.value.__notes__
    assert active.call is None
    return note


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("mine")


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(6, 5), sf.LIF(), nn.Linear(4, 3)),  # the last layer is wrong
        (nn.Linear(6, 5), Failing()),
        (Failing(),),
    ],
)
def test_errors_of_other_causes_have_no_note(layers):
    net = sf.Temporal(nn.Sequential(*layers))
    with pytest.raises((RuntimeError, KeyError)) as caught:
        net(X)
    assert not hasattr(caught.value, "__notes__")
    assert internal_frames(caught.value) == ["symbolic.py", "temporal.py"]


def internal_frames(error: Exception) -> list[str]:
    """The files of this library in a traceback, before the network's own frames."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return [path.name for path in files if path.parent.parent.name == "spikefuse"]


@pytest.mark.parametrize("memory", [None, sf.memory.Checkpoint()], ids=str)
def test_the_traceback_of_an_error_in_a_captured_network(memory, capsys):
    net = nn.Sequential(nn.Linear(6, 5), sf.LIF(), nn.Linear(4, 3))
    net = sf.fuse(sf.Temporal(net)) if memory is None else sf.Temporal(net, memory=memory)
    with pytest.raises(RuntimeError) as caught:
        net(X)
    assert internal_frames(caught.value) == ["symbolic.py", "temporal.py"]
    assert capsys.readouterr().err == ""


def test_errors_name_how_the_input_was_read():
    x = torch.rand(8, 1, 28, 28)
    net = sf.Temporal(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), sf.LIF()))
    assert note_of(lambda: net(x)) == (
        "x [8, 1, 28, 28] was read as T=8, B=1 and steps of shape [28, 28], since sequences are "
        "[T, B, ...]: for a static image use spikefuse.nn.encode.direct or unsqueeze"
    )
    other = note_of(lambda: batch_first(net)(x))
    assert "read as T=1, B=8 and steps of shape [28, 28], since sequences are [B, T, ...]" in other
    note = note_of(lambda: sf.Temporal(Masked())(X[..., :5], {"bias": [X]}, mask=X))
    assert note.startswith("the inputs [20, 2, 5], [20, 2, 6], [20, 2, 6] were read as T=20, B=2,")
    dtype = note_of(lambda: net(x[:, :, None].to(torch.uint8)))
    assert dtype.startswith("an input is torch.uint8: most layers need x.float(); x [8, 1, 1, 28,")
    # The exception itself is torch's.
    with pytest.raises(RuntimeError, match="expected input"):
        net(x)


ATTENTION = {
    "TransformerEncoderLayer": lambda **kw: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, **kw),
    "MultiheadAttention": lambda **kw: nn.MultiheadAttention(6, 2, **kw),
    "TransformerDecoderLayer": lambda **kw: nn.TransformerDecoderLayer(6, 2, 12, **kw),
}


@pytest.mark.parametrize("layer", ATTENTION)
def test_attention_along_steps_and_samples_is_refused(layer):
    net = nn.Sequential(nn.Linear(6, 6), ATTENTION[layer]())
    message = r"layer 'net.1.*' \(MultiheadAttention\) has batch_first=False.*with batch_first=True"
    with pytest.raises(ValueError, match=message):
        sf.Temporal(net)(X[:, :, None])
    with pytest.raises(ValueError, match=message):
        sf.Stream(net)(X[0, :, None])


def test_attention_among_tokens():
    torch.manual_seed(0)
    net = ATTENTION["TransformerEncoderLayer"](batch_first=True).eval()
    x = torch.rand(4, 2, 3, 6)
    for actual, step in zip(sf.Temporal(net)(x), x, strict=True):
        torch.testing.assert_close(actual, net(step))


@pytest.mark.parametrize(
    "layer", [nn.Softmax(0), nn.LogSoftmax(), nn.Softmin(0), nn.GLU(0)], ids=str
)
def test_layers_along_dim_0_are_refused(layer):
    with pytest.raises(ValueError, match=rf"layer 'net.1.0' .* has dim={layer.dim}, but dim 0 has"):
        sf.Temporal(nn.Sequential(nn.Linear(6, 6), nn.Sequential(layer)))
    # Another module may call it with something else.
    sf.Temporal(nn.Sequential(nn.Linear(6, 6), nn.ModuleDict({"routes": layer})))


class OverSequences(nn.Module):
    """Layers of torch.nn that read dim 0 as time."""

    def __init__(self):
        super().__init__()
        self.rnn, self.attention = nn.GRU(6, 6), nn.MultiheadAttention(6, 2)

    def forward(self, x):  # [T, B, 6]
        y = self.rnn(x)[0]
        return self.attention(y, y, y, need_weights=False)[0]


def test_layers_over_sequences_run_over_time():
    body = OverSequences()
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 6), sf.OverTime(body)))
    assert torch.allclose(net(X), body(net.net[0](X)))
    outside = sf.Temporal(nn.Sequential(sf.OverTime(body), nn.ModuleList([nn.GRU(6, 6)])))
    with pytest.raises(TypeError, match=r"layer 'net.1.0' \(GRU\).* run it in an OverTime"):
        outside(X)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_layers_are_refused(layer):
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 6), nn.ModuleDict({"rnn": layer(6, 6)})))
    message = rf"layer 'net.1.rnn' \({layer.__name__}\) has a memory of its own.*nn.Seq"
    with pytest.raises(TypeError, match=message):
        net(X)
    with pytest.raises(TypeError, match=message):
        torch.compile(net, backend="eager")(X)


def test_layers_that_are_replaced_between_calls():
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 6), nn.Sequential(sf.LIF(0.5, 0.3))))
    copied, stream = copy.deepcopy(net), sf.Stream(net)
    for _ in range(2):
        assert [*net(X, return_state=True)[1]] == ["net.1.0"]
        stream(X[0])
    net.net[1].add_module("last", sf.LIF(0.9, 0.1))
    net.net[1][0] = sf.IF(0.2)
    expected, state = net(X, return_state=True, impl="reference")
    assert torch.equal(net(X), expected)
    assert [*state] == ["net.1.0", "net.1.last"]
    stream.reset()
    assert torch.equal(torch.stack([stream(x) for x in X]), expected)
    assert [*copied(X, return_state=True)[1]] == ["net.1.0"]
    net.net[1][0] = nn.GRUCell(6, 6)
    for call in (net, lambda x: stream(x[0])):
        with pytest.raises(TypeError, match=r"layer 'net.1.0' \(GRUCell\) has a memory"):
            call(X)
    net.net = nn.Sequential(sf.LIF())
    assert [*net(X, return_state=True)[1]] == ["net.0"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("spikingjelly.activation_based.base", "MemoryModule"),
        ("snntorch._neurons.neurons", "SpikingNeuron"),
        ("norse.torch.module.snn", "SNNCell"),
    ],
)
def test_neurons_of_other_libraries_are_refused(module, name):
    base = type(name, (nn.Module,), {"__module__": module})
    theirs = type("Leaky", (base,), {"__module__": module})()
    library = module.split(".")[0]
    message = (
        rf"layer 'net.1' \({library}\.Leaky\) has a memory .*Temporal\(spikefuse\.convert\(net\)\)"
    )
    with pytest.raises(TypeError, match=message):
        sf.Temporal(nn.Sequential(nn.Linear(6, 6), theirs))


def test_the_printed_network():
    assert str(sf.Temporal(sf.LIF())).startswith("Temporal(\n  (net)")
    net = sf.Temporal(sf.LIF(), sf.memory.Bits(), batch_first=True)
    assert "Temporal(\n  batch_first=True, memory=Bits()\n  (net)" in str(net)


def test_a_neuron_called_twice():
    net, neuron = sf.Temporal(Twice()), sf.IF(0.5)
    assert torch.equal(net(X), neuron(neuron(X)))
    message = "layer 'net.neuron' is called twice in one step, so its state is ambiguous"
    with pytest.raises(ValueError, match=message):
        net(X, return_state=True)
    with pytest.raises(ValueError, match=message):
        net(X, state={"net.neuron": (torch.zeros(2, 6),)})


def sharded(net: sf.Temporal) -> sf.Temporal:
    net.passing = StatePassing()
    return net


class Mixes(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.neuron = function, sf.LIF()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.neuron, x)


EVENTS = Events.from_dense((X > 0).float())
VALUE_ERRORS = {
    r"batch_first=True and Events, which are time first: use a Temporal without": (
        lambda: sf.Temporal(EventLinear(6, 5), batch_first=True)(EVENTS)
    ),
    r"the input has shape \[6\]: expected \[B, T, ...\] with T >= 1.*x.unsqueeze\(1\)": (
        lambda: batch_first(linear())(X[0, 0])
    ),
    r"the input has shape \[2, 0, 6\]: expected \[B, T, ...\]": (
        lambda: batch_first(linear())(X[:0].transpose(0, 1))
    ),
    r"mask has shape \[\]: expected \[T, B, ...\] with the same T and B as .*; expand": (
        lambda: sf.Temporal(Masked())(X, {"bias": [X]}, mask=torch.tensor(1.0))
    ),
    r"input 1\['bias'\]\[0\] has shape \[2, 6\]: expected .*make it an attribute of the network": (
        lambda: sf.Temporal(Masked())(X, {"bias": [X[0]]}, mask=X)
    ),
    r"3 sequences are given to a network whose time is sharded: expected one": (
        lambda: sharded(sf.Temporal(Masked()))(X, {"bias": [X]}, mask=X)
    ),
    r"the input has shape \[6\]: expected \[T, B, ...\] with T >= 1.*x.unsqueeze\(0\)": (
        lambda: linear()(X[0, 0])
    ),
    r"the input has shape \[0, 2, 6\]": lambda: linear()(X[:0]),
    r"impl is 'fast': expected one of auto, triton, numba, reference": (
        lambda: linear()(X, impl="fast")
    ),
    r"entries for \(0\): expected \(net.1\), as return_state=True returned": (
        lambda: linear()(X, state={"0": (torch.zeros(2, 5),)})
    ),
    r"state has entries for \(\): expected \(net.1\)": lambda: linear()(X, state={}),
    r"LIF: state v is \[3, 5\] on cpu: expected \[2, 5\] on cpu": (
        lambda: linear()(X, state={"net.1": (torch.zeros(3, 5),)})
    ),
    r"the network returned shape \[\]: expected dim 0 to be T\*B = 20\*2; compute a number": (
        lambda: sf.Temporal(Mixes(lambda n, x: n(x).sum()))(X)
    ),
    r"the network returned shape \[\] as output\['aux'\]\[1\]: expected dim 0 to be T\*B": (
        lambda: sf.Temporal(Mixes(lambda n, x: {"y": n(x), "aux": [x, x.sum()]}))(X)
    ),
    r"the network returned shape \[240\]: expected dim 0 to be T\*B = 20\*2; a layer has mixed": (
        lambda: sf.Temporal(Mixes(lambda n, x: n(x).flatten()))(X)
    ),
    r"'net.neuron' received shape \[13, 6\] inside Temporal: expected \[T\*B, ...\] with T = 20": (
        lambda: sf.Temporal(Mixes(lambda n, x: n(x[:13])))(X)
    ),
    r"inside Temporal, pass state= and return_state= to the container": (
        lambda: sf.Temporal(Mixes(lambda n, x: n(x, return_state=True)[0]))(X)
    ),
    r"a Temporal inside a Temporal: wrap the outermost network only": (
        lambda: sf.Temporal(nn.Sequential(nn.Linear(2, 2), linear()))
    ),
}
TYPE_ERRORS = {
    r"the input is missing: expected a tensor": lambda: linear()(),
    r"the input is a str and a dict: expected a tensor": lambda: linear()("x", y={"z": 1}),
    r"net is a \w+: expected a torch.nn.Module": lambda: sf.Temporal(torch.relu),
    r"net is the class LIF: expected an instance, as in sf.LIF\(\)": lambda: sf.Temporal(sf.LIF),
    r"net is the class ReLU: .* as in ReLU\(\.\.\.\)": lambda: sf.Temporal(nn.ReLU),
    r"memory is LIF.*; wrap layers in nn.Sequential": lambda: sf.Temporal(nn.ReLU(), sf.LIF()),
    r"the input is a list: expected a tensor": lambda: linear()([1.0]),
    r"state is a tuple: expected a dict": lambda: linear()(X, state=(torch.zeros(2, 5),)),
    r"state must be a tuple of tensors \(v,\)": lambda: linear()(X, state={"net.1": 1.0}),
    r"state\['net.1'\] is a tensor: expected a tuple of tensors": (
        lambda: linear()(X, state={"net.1": torch.zeros(2, 5)})
    ),
    r"LIF: x is torch.int64: expected float32": lambda: sf.Temporal(sf.LIF())(X.long()),
}


@pytest.mark.parametrize("message", VALUE_ERRORS)
def test_value_errors(message):
    with pytest.raises(ValueError, match=message):
        VALUE_ERRORS[message]()
    assert active.call is None


@pytest.mark.parametrize("message", TYPE_ERRORS)
def test_type_errors(message):
    with pytest.raises(TypeError, match=message):
        TYPE_ERRORS[message]()
    assert active.call is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent(duplicate):
    net = convolutional().eval()
    expected = net(IMAGES)
    other = duplicate(net)
    assert torch.equal(other(IMAGES), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(net(IMAGES), expected)
    assert not torch.equal(other(IMAGES), expected)


def test_state_dict_round_trip():
    net, other = convolutional(), convolutional()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.25)
    net(IMAGES)  # moves the statistics
    assert other.load_state_dict(net.state_dict()).missing_keys == []
    assert torch.equal(other.eval()(IMAGES), net.eval()(IMAGES))


def test_threads():
    net = linear(50)
    inputs = [make_input((steps, 16, 6), seed=steps) for steps in (4, 8, 16, 32)]
    expected = [net(x) for x in inputs]
    found: list[str] = []

    def work(x: Tensor, wanted: Tensor) -> None:
        try:
            for _ in range(50):
                assert torch.equal(net(x), wanted)
        except BaseException as error:
            found.append(repr(error))

    pairs = zip(inputs, expected, strict=True)
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_the_container(reentrant):
    net = linear()
    for x in (X, X[:7]):
        actual = gradients(net, x, lambda x: checkpoint(net, x, use_reentrant=reentrant))
        assert_equal(actual, gradients(net, x))


def test_a_neuron_outside_the_network_runs_alone():
    outside = sf.LIF(threshold=0.3)
    net = sf.Temporal(Mixes(lambda _, x: outside(x[None])[0]))
    assert torch.equal(net(X), outside(X.flatten(0, 1)[None]).view(X.shape))


@pytest.mark.parametrize("run", [lambda net: net(X), lambda net: sf.nn.Stream(net)(X[0])])
def test_a_neuron_that_is_not_a_submodule_does_not_read_rows_as_time(run):
    neurons = [sf.LIF()]  # not an nn.ModuleList
    with pytest.raises(ValueError, match="not a submodule of the network: make it an attribute"):
        run(sf.Temporal(Mixes(lambda _, x: neurons[0](x))))


def test_compiled_networks_of_several_shapes_and_modes():
    torch.compiler.reset()
    net = sf.Temporal(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), sf.LIF()))
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for training in (False, True):
        net.train(training)
        for shape in ((4, 2, 3), (6, 5, 3)):
            x = torch.randn(shape)
            assert torch.equal(compiled(x), net(x))


def test_triton_is_prepared_before_the_layers_run_on_a_gpu(monkeypatch):
    seen = []

    class Sparse:
        """A sequence on a GPU, as `Temporal` sees one."""

        shape, device = (4, 2, 3), torch.device("cuda")

        def sequence_signature(self):
            return ()

    class Layer(nn.Module):
        def forward(self, x):
            seen.append("layer")
            return x

    monkeypatch.setattr(temporal, "prepare", lambda: seen.append("Triton"))
    net = sf.Temporal(Layer())
    net(X)
    assert seen == ["layer"]
    net(Sparse())
    assert seen == ["layer", "Triton", "layer"]
