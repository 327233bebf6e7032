"""Linear layers on events equal nn.Linear and the same neuron, unless events are dropped."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import spikefuse as sf
from spikefuse.memory import Bits, Checkpoint, SaveAll
from spikefuse.nn import EventLinear, Events, EventStream, scale_to_rate
from tests.events.networks import dense, gradients

T, B = 20, 4


def neuron(**options) -> sf.LIF:
    surrogate = sf.surrogate.FastSigmoid(10.0, cutoff=-0.1)
    return sf.LIF(0.95, 1.0, detach_reset=True, surrogate=surrogate, **options)


def spikes(width: int, rate: float = 0.2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(T, B, width, generator=generator) < rate).float()


def network(widths=(40, 70, 300, 10), make=neuron, **options) -> sf.Temporal:
    """Return a network whose neurons fire often, so that gradients reach the first layer."""
    torch.manual_seed(1)
    layers = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers.append(EventLinear(a, b, make() if i < len(widths) - 2 else None, **options))
        nn.init.normal_(layers[-1].weight, std=2.0 / a**0.5)
    return sf.Temporal(nn.Sequential(*layers))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare up to the rounding of long sums in different order."""
    assert expected.abs().max() > 0
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("impl", ["numba", "triton", "dense"])
def test_equals_the_dense_network(impl: str) -> None:
    net, x = network(impl=impl), spikes(40)
    if impl == "triton":  # its interpreter is slow
        x = x[:5, :2]
    other = dense(net)
    y, expected = net(x), other(x)
    assert_close(y, expected)
    assert 0.02 < net.net[1].activity.rate < 0.5
    assert 0.02 < net.net[2].activity.rate < 0.5
    for a, b in zip(gradients(net, y), gradients(other, expected), strict=True):
        assert_close(a, b)


# The layer is fused with the first but not with the second, whose values are tensors.
@pytest.mark.parametrize("make", [sf.ALIF, sf.PLIF])
def test_other_neurons(make) -> None:
    surrogate = sf.surrogate.FastSigmoid(cutoff=-0.3)
    net, x = network((40, 30, 10), lambda: make(surrogate=surrogate)), spikes(40)
    other = dense(net)
    y, expected = net(x), other(x)
    assert_close(y, expected)
    pairs = zip(gradients(net, y), gradients(other, expected), strict=True)
    for a, b in pairs:
        assert_close(a, b)


def test_events_and_dense_spikes_are_alike() -> None:
    net, x = network(), spikes(40)
    assert torch.equal(net(x), net(Events.from_dense(x)))


def test_state_is_passed() -> None:
    net, x = network(), spikes(40)
    with torch.no_grad():
        expected = net(x)
        first, state = net(x[:7], return_state=True)
        rest, _ = net(Events.from_dense(x[7:]), state=state, return_state=True)
    assert state.keys() == {"net.0.neuron", "net.1.neuron"}
    assert_close(torch.cat([first, rest]), expected)


def test_reference() -> None:
    net, x = network(), spikes(40)
    assert_close(net(x, impl="reference"), net(x))


def test_outside_temporal() -> None:
    hidden, last = network((40, 30, 10)).net
    x = spikes(40)
    y = last(hidden(x))
    assert y.shape == (T, B, 10)
    assert torch.equal(y, network((40, 30, 10))(x))
    assert torch.equal(y, last(hidden(x).to_dense().detach()))


def test_dense_spikes_with_a_gradient() -> None:
    x = spikes(40).requires_grad_()
    net = network()
    other = dense(net)
    a = torch.autograd.grad(net(x).square().sum(), x)[0]
    b = torch.autograd.grad(other(x).square().sum(), x)[0]
    assert_close(a, b)


def test_dropped_events() -> None:
    """Spikes above the capacity have no effect; the lowest indices of a row are used."""
    net, x = network(capacity=0.1), spikes(40)
    limit = net.net[0].limit
    assert limit == 4
    few = x * (x.cumsum(2) <= limit)
    free = network()
    free.net[1].capacity = free.net[2].capacity = 0.1
    assert torch.equal(net(x), free(few))
    activity = net.net[0].activity
    assert activity.fired == x.sum()
    assert activity.dropped == x.sum() - few.sum() > 0
    assert net.net[1].activity.dropped > 0


def test_gradients_of_dropped_candidates() -> None:
    """The gradients are those of a network without the connections of dropped entries."""
    x = spikes(40)
    hidden, last = network((40, 70, 10)).net
    events = hidden(x)
    counts = events.offsets.diff()
    last.capacity = (int(counts.float().median()) + 0.5) / 70
    used = events.truncate(last.limit)
    assert 0 < last.limit < counts.max()
    y = last(events)
    assert last.activity.dropped_candidates > 0
    assert len(events.indices) - len(used.indices) == (
        last.activity.dropped + last.activity.dropped_candidates
    )
    grad = torch.autograd.grad(y.sum(), events.values)[0]
    place = torch.arange(len(grad)) - events.offsets[events.rows()]
    weight = last.weight.sum(0)[events.indices.long()]
    torch.testing.assert_close(grad, weight * (place < last.limit))


def test_overflow_dense_and_raise() -> None:
    x, expected = spikes(40), network()(spikes(40))
    net = network(capacity=0.01, overflow="dense")
    assert_close(net(x), expected)
    assert net.net[0].activity.choice.impl == "dense"
    assert net.net[0].activity.dropped == 0
    net = network(capacity=0.01, overflow="raise")
    with pytest.raises(ValueError, match=r"has \d+ events, but of 40 inputs the capacity 0.01"):
        net(x)


@pytest.mark.parametrize("memory", [SaveAll(), Bits(), Checkpoint()])
def test_memory_policies(memory) -> None:
    net, x = network(), Events.from_dense(spikes(40))
    other = sf.Temporal(copy.deepcopy(net.net), memory)
    for _ in range(2):
        for a, b in zip(gradients(other, other(x)), gradients(net, net(x)), strict=True):
            assert torch.equal(a, b)


class AfterBlock(nn.Module):
    def __init__(self, rest: nn.Module) -> None:
        super().__init__()
        self.linear, self.bn, self.lif = nn.Linear(40, 300), nn.BatchNorm1d(300), sf.LIF(0.9)
        self.rest = rest

    def forward(self, x):
        return self.rest(self.lif(self.bn(self.linear(x))))


def test_after_a_fused_block_whose_spikes_are_packed() -> None:
    _, *rest = network((40, 300, 70, 10)).net
    layers, found = AfterBlock(nn.Sequential(*rest)), []
    for memory in (None, SaveAll()):
        net = sf.fuse(sf.Temporal(copy.deepcopy(layers), memory))
        net(spikes(40)).square().sum().backward()
        assert len(net.fusion.fused) == 1
        found.append([p.grad for p in net.parameters()])
    assert all(x.any() for x in found[0])
    assert all(map(torch.equal, *found))


def test_nothing_to_fuse() -> None:
    net, x = network(), spikes(40)
    fused = sf.fuse(net)
    assert torch.equal(fused(x), net(x))
    assert not fused.fusion.places


# A warning of PyTorch, raised when compiled code resumes after a layer.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("from_dense", [torch.clone, Events.from_dense])
def test_compiled_around(from_dense) -> None:
    """The layers run eagerly between compiled code."""
    net, x = network((40, 30, 10)), from_dense(spikes(40))
    other = copy.deepcopy(net)
    torch.compiler.reset()  # whatever other tests have compiled
    try:
        y, expected = torch.compile(net, backend="eager")(x), other(x)
    finally:
        torch.compiler.reset()  # or later tests could not compile a Temporal as a whole
    assert torch.equal(y, expected)
    assert all(map(torch.equal, gradients(net, y), gradients(other, expected)))


STRIDES = (1, 30)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("inputs", [40, 30])
def test_state_dicts_of_linear_layers(inputs: int, assign: bool) -> None:
    """State dicts load from and into nn.Linear, also those of square weights."""
    layer, linear, x = EventLinear(inputs, 30), nn.Linear(inputs, 30), spikes(inputs)
    layer.load_state_dict(linear.state_dict(), assign=assign)
    assert layer.weight.stride() == STRIDES
    assert torch.equal(layer.weight, linear.weight)
    assert_close(layer(x), linear(x))
    nn.init.normal_(layer.weight)
    expected = layer(x)
    linear.load_state_dict(layer.state_dict(), assign=assign)
    assert_close(linear(x), expected)


def test_state_dicts_of_transposed_weights() -> None:
    """As version 0.1 saved them. Square ones can't be recognized."""
    state = {"0.weight": torch.rand(40, 30), "0.bias": torch.zeros(30)}
    with pytest.raises(RuntimeError, match=r"0.weight is \[40, 30\]: expected \[30, 40\].*0\.1"):
        nn.Sequential(EventLinear(40, 30)).load_state_dict(state)


COPIES = {
    "deepcopy": copy.deepcopy,
    "device": lambda layer: layer.to("meta").to_empty(device="cpu"),
    "dtype": lambda layer: layer.to(torch.float64).to(torch.float32),
    "file": lambda layer: _through_a_file(layer),
}


def _through_a_file(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", COPIES)
def test_strides_of_copies(name: str) -> None:
    layer = EventLinear(40, 30, neuron())
    layer(spikes(40))  # fills caches
    assert COPIES[name](layer).weight.stride() == STRIDES


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.1),
    "adam_single": lambda p: torch.optim.Adam(p, 0.1, foreach=False),
    "adam_fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
}


@pytest.mark.parametrize("impl", ["numba", "dense"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_keep_the_strides(name: str, impl: str) -> None:
    """Gradients, moments and updated weights are laid out as the weights, and have the values of
    nn.Linear."""
    layer, linear, x = EventLinear(40, 30, impl=impl), nn.Linear(40, 30), spikes(40)
    linear.load_state_dict(layer.state_dict())
    for module in (layer, linear):
        optimizer = OPTIMIZERS[name](module.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        if module is layer:
            state = optimizer.state[layer.weight].values()
            moments = [s for s in state if isinstance(s, torch.Tensor) and s.ndim]
            tensors = layer.weight, layer.weight.grad, *moments
            assert len(tensors) > 2
            assert {y.stride() for y in tensors} == {STRIDES}
    torch.testing.assert_close(layer.weight, linear.weight, rtol=1e-4, atol=1e-4)


def test_wrong_strides() -> None:
    layer, x = EventLinear(40, 30), Events.from_dense(spikes(40))
    layer.weight.data = layer.weight.contiguous()
    with pytest.raises(ValueError, match=r"strides \(40, 1\), .* \(1, 30\): assign"):
        layer(x)
    layer.weight.data = layer.weight.t().contiguous().t()  # as the message says
    layer(x)


MASK = (torch.arange(1200).view(30, 40) % 3 > 0).float()
COMPUTED = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "pruned": lambda layer: prune.custom_from_mask(layer, "weight", MASK),
}


@pytest.mark.parametrize("impl", ["numba", "dense"])
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weights(name: str, impl: str) -> None:
    torch.manual_seed(0)
    layer, linear, x = EventLinear(40, 30, impl=impl), nn.Linear(40, 30), spikes(40)
    linear.load_state_dict(layer.state_dict())
    layers = [(COMPUTED[name](m), m)[1] for m in (layer, linear)]
    layer.load_state_dict(linear.state_dict())
    for module in layers:
        module(Events.from_dense(x) if module is layer else x).square().mean().backward()
    torch.testing.assert_close(layer(x), linear(x))
    found, expected = ([p.grad for p in m.parameters()] for m in layers)
    torch.testing.assert_close(found, expected)


def test_computed_weights_inside_a_network() -> None:
    net, x = network((40, 30, 10)), spikes(40)
    net.eval()
    expected = net(x)
    for layer in net.net:
        nn.utils.parametrizations.weight_norm(layer)
    torch.testing.assert_close(net(x), expected)
    stream = EventStream(net)
    streamed = torch.stack([stream(step) for step in x[:, 0]])
    torch.testing.assert_close(streamed, net(x)[:, 0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"EventLinear is computed.* cannot be scaled"):
        scale_to_rate(net, x, 0.1)


def test_another_default_dtype() -> None:
    net, x = network((40, 30, 10)), Events.from_dense(spikes(40))
    expected = net(x)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = net(x)
        found.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


@pytest.mark.usefixtures("own_threads")
def test_as_many_threads_as_there_are() -> None:
    """Backward may use another number of threads than forward."""
    net, x = network((40, 512, 10)), Events.from_dense((torch.rand(12, 3, 40) < 0.5).float())
    found = []
    for number in (2, 1):
        torch.set_num_threads(2)
        y = net(x)
        torch.set_num_threads(number)
        found.append(gradients(net, y))
        net.zero_grad()  # to None
    torch.testing.assert_close(found[1], found[0])


def test_a_copy_and_a_saved_state() -> None:
    net = network()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.net[0].weight.zero_()
    other.load_state_dict(net.state_dict())
    assert torch.equal(net(spikes(40)), other(spikes(40)))


def test_no_spikes_and_no_samples() -> None:
    net = network()
    silent = net(torch.zeros(T, B, 40))
    silent.sum().backward()
    assert not net.net[0].weight.grad.any()
    assert net(torch.zeros(T, 0, 40)).shape == (T, 0, 10)


@pytest.mark.parametrize("fire", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(30, 0), (0, 5), (0, 0)])
def test_layers_without_neurons_or_inputs(inputs: int, outputs: int, fire: bool) -> None:
    x = Events.from_dense((torch.rand(6, 3, inputs) < 0.5).float())
    layer = EventLinear(inputs, outputs, neuron() if fire else None, impl="numba")
    y = layer(x)
    dense = y.to_dense() if fire else y
    assert dense.shape == (6, 3, outputs)
    dense.sum().backward()
    assert layer.weight.grad.shape == (outputs, inputs)


def test_spikes_are_counted_when_asked_for() -> None:
    net = network()
    net(spikes(40))
    activity = net.net[1].activity
    assert "spikes" not in vars(activity)
    assert activity.spikes.dtype == torch.int64
    assert activity.spikes == activity.by_row.sum() == activity.fired > 0


ERRORS = {
    r"capacity is 0: expected a share": lambda: EventLinear(4, 3, capacity=0),
    r"overflow is 'keep': expected one of drop": lambda: EventLinear(4, 3, overflow="keep"),
    r"impl is 'fast': expected one of auto": lambda: EventLinear(4, 3, impl="fast"),
    r"surrogate of LIF has cutoff None": lambda: EventLinear(4, 3, sf.LIF()),
    r"capacity is '2%': expected a share": lambda: EventLinear(4, 3, capacity="2%"),
    r"values other than 0 and 1": lambda: EventLinear(4, 3)(torch.full((2, 1, 4), 0.5)),
    r"shape \[2, 1, 5\]: expected \[T, B, 4\]": lambda: EventLinear(4, 3)(torch.zeros(2, 1, 5)),
    r"\[0, 2, 4\]: expected \[T, B, 4\] with T >= 1": lambda: EventLinear(4, 3, neuron())(
        torch.zeros(0, 2, 4)
    ),
    r"of 40 sites: expected 4": lambda: EventLinear(4, 3)(Events.from_dense(spikes(40))),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ERRORS[message]()


def test_triton_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for layer in (EventLinear(4, 3, impl="triton"), EventLinear(4, 3, neuron(), impl="triton")):
        with pytest.raises(ValueError, match='impl="triton" needs a GPU, but the input is on cpu'):
            layer(torch.ones(2, 1, 4))


TYPE_ERRORS = {
    r"LI does not fire 0 or 1": lambda: EventLinear(4, 3, sf.LI()),
    r"ReLU does not fire 0 or 1": lambda: EventLinear(4, 3, nn.ReLU()),
    r"neuron is the class LIF: expected an instance, as in sf.LIF\(\)": lambda: EventLinear(
        4, 3, sf.LIF
    ),
    r"the input is a list: expected Events": lambda: EventLinear(4, 3)([[[1.0] * 4]]),
    r"weights are torch.bfloat16: .* float32": lambda: EventLinear(4, 3).bfloat16()(spikes(4)),
    r"weights are torch.float64": lambda: EventLinear(4, 3, neuron()).double()(spikes(4)),
}


@pytest.mark.parametrize("message", TYPE_ERRORS)
def test_wrong_types(message: str) -> None:
    with pytest.raises(TypeError, match=message):
        TYPE_ERRORS[message]()


@pytest.mark.parametrize("make", [None, neuron], ids=["currents", "fused"])
def test_double_backward_is_refused(make) -> None:
    """Also where the gradient of the loss is constant, beside a term that has a second one."""
    layer = EventLinear(8, 5, None if make is None else make(), impl="numba")
    y = layer(spikes(8))
    y = y if make is None else y.values
    (gradient,) = torch.autograd.grad((y * 2).sum(), layer.weight, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match=r"double backward.*nor through an EventLinear"):
        (gradient.square().sum() + layer.weight.square().sum()).backward()


@pytest.mark.parametrize("make", [None, neuron], ids=["currents", "fused"])
def test_vectorized_gradients_are_refused(make) -> None:
    layer = EventLinear(8, 5, None if make is None else make(), impl="numba")
    y = layer(spikes(8))
    y = y if make is None else y.values
    grads = torch.ones(2, *y.shape)
    with pytest.raises(NotImplementedError, match="vectorized Jacobians"):
        torch.autograd.grad(y, layer.weight, grads, is_grads_batched=True)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_changed_before_backward_is_noticed(name) -> None:
    layer = EventLinear(8, 5, neuron(), impl="numba")
    values = layer(spikes(8)).values
    with torch.no_grad():
        getattr(layer, name).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()
