"""`record`: its values are those of a loop written by hand, and the network does what it did."""

from __future__ import annotations

import copy
import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spikefuse as sf
from spikefuse.nn import EventLinear, encode
from spikefuse.transforms.nir_layers import Threshold

T, B = 5, 3


def make_net(norm: bool = True) -> sf.Temporal:
    torch.manual_seed(0)
    return sf.Temporal(
        nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4) if norm else nn.Identity(),
            sf.LIF(decay=0.3, threshold=0.4),
            nn.Flatten(),
            nn.Linear(4 * 16, 6),
            sf.ALIF(),
        )
    )


def images() -> torch.Tensor:
    torch.manual_seed(1)
    return 3 * torch.rand(T, B, 1, 6, 6)


def by_hand(x: torch.Tensor, decay: float, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Spikes and potentials of LIF neurons."""
    v, found = torch.zeros_like(x[0]), []
    for x_t in x:
        h = decay * v + x_t
        s = (h >= threshold).float()
        v = h * (1 - s)
        found.append((s, v))
    spikes, potentials = zip(*found, strict=True)
    return torch.stack(spikes), torch.stack(potentials)


def test_rates_are_those_of_spikes():
    net = sf.Temporal(nn.Sequential(sf.TernaryLIF(threshold=0.5), nn.Linear(4, 2), sf.LI()))
    with sf.record(net) as record:
        net(torch.randn(6, 2, 4))
    spikes = record["net.0"]["spikes"]
    assert spikes.min() == -1
    assert record.rates == {"net.0": pytest.approx((spikes != 0).float().mean().item())}


@pytest.mark.parametrize(
    "make",
    [lambda: sf.PSN(6), lambda: sf.PSN(6, order=2), lambda: Threshold(0.7, sf.surrogate.Arctan())],
)
def test_layers_of_spikes_that_are_no_neurons(make):
    torch.manual_seed(0)
    layer = make()
    net = sf.Temporal(nn.Sequential(nn.Linear(4, 9), layer, nn.Linear(9, 2), sf.LIF()))
    x = 5 * torch.randn(6, 3, 4)
    lengths = torch.tensor([6, 2, 5])
    with sf.record(net, states=("spikes", "v"), layers="*", lengths=lengths) as some:
        net(x)
    with sf.record(net, "net.1", grad=True) as record:
        net(x)
    spikes = record["net.1"]["spikes"]
    assert torch.equal(spikes, layer(net.net[0](x)))
    assert 0.05 < spikes.mean() < 0.95
    assert torch.equal(some["net.1"]["output"], some["net.1"]["spikes"])
    assert "net.1.surrogate" not in some
    steps = torch.cat([spikes[:6, 0], spikes[:2, 1], spikes[:5, 2]])
    assert some.rates["net.1"] == pytest.approx(steps.mean().item())
    report = sf.report(net, [x])
    rate = pytest.approx(spikes.mean().item())
    assert record.rates == {"net.1": rate}
    assert report.rates["net.1"] == rate
    row = next(row for row in report.layers if row.name == "net.1")
    assert row.dead == pytest.approx((spikes == 0).all(0).all(0).float().mean().item())
    sums = 6 * 9 if isinstance(layer, sf.PSN) else 0  # of its matrix product
    assert row.accesses.spike_writes == pytest.approx(spikes.sum().item() / 3 + sums)
    assert row.parameters == sum(p.numel() for p in layer.parameters())
    spikes.mean().backward()
    assert net.net[0].weight.grad.any()
    with sf.record(net, "net.1"), pytest.warns(UserWarning, match="'net.1' has NaN in its inputs"):
        net(x.where(x > x.min(), torch.nan))
    with pytest.raises(ValueError, match=r"has 'h': expected names among 'spikes'$"):
        sf.record(net, "net.1", states="h").__enter__()


class Weighted(sf.Neuron):
    """A neuron of a user whose spikes have the height of a weight."""

    v = sf.State()

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def step(self, x, v):
        h = 0.5 * v + x
        s = sf.surrogate.Sigmoid()(h - 1.0)
        return self.weight * s, (h - s,)


@pytest.mark.parametrize(
    "neuron",
    [
        sf.RateIF(0.3),
        sf.RateIF(torch.tensor([0.8, 0.7, 0.9, 1.2]), negative="always"),
        Weighted(0.7),
        Weighted([0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_rates_of_spikes_of_any_height(neuron):
    torch.manual_seed(0)
    net = sf.Temporal(nn.Sequential(nn.Linear(4, 4), neuron, nn.Linear(4, 2)))
    x = 1.5 * torch.rand(9, 2, 4)
    with sf.record(net) as record:
        net(x)
    expected = (record["net.1"]["spikes"] != 0).float().mean().item()
    assert 0.05 < expected < 0.95
    report = sf.report(net, [x])
    assert record.rates == report.rates == {"net.1": pytest.approx(expected)}
    row = next(row for row in report.layers if row.name == "net.1")
    assert row.accesses.spike_writes == pytest.approx(expected * 9 * 4)


class Leaky(sf.Neuron):
    """A leaky integrator of a user, whose steps are continuous."""

    v = sf.State()

    def step(self, x, v):
        v = 0.5 * v + torch.relu(x)
        return v, (v,)


class Jumping(Leaky):
    """One whose output may be spikes or not."""

    def step(self, x, v):
        return torch.where(x > 0, x, v), (v,)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("neuron", "fires"),
    [
        *((make, True) for make in (sf.LIF, sf.TernaryLIF, sf.IntegerLIF, sf.RateIF, Jumping)),
        *((make, False) for make in (sf.LI, sf.ShortTermPlasticity, Leaky)),
    ],
)
def test_silent_readouts_have_no_rate(neuron, fires, quantized):
    net = sf.Temporal(nn.Sequential(nn.Linear(6, 3, bias=False), neuron()))
    x = torch.zeros(4, 2, 6)
    if quantized:
        net = sf.quantize(net, torch.rand(4, 2, 6))
    with sf.record(net) as record:
        assert not net(x).any()
    expected = {"net.1": 0.0} if fires else {}
    assert record.rates == sf.report(net, [x]).rates == expected


class Traced(sf.Neuron):
    """Spikes and a trace of them."""

    v = sf.State()
    trace = sf.State()

    def __init__(self):
        super().__init__()
        self.surrogate = sf.surrogate.Arctan()

    def step(self, x, v, trace):
        v = 0.8 * v + x
        spikes = self.surrogate(v - 1.0)
        trace = 0.5 * trace + spikes
        return (spikes, trace), (v * (1 - spikes), trace)


class FirstOfTwo(nn.Module):
    def __init__(self, neuron):
        super().__init__()
        self.neuron, self.layer = neuron, nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(self.neuron(x)[0])


def test_rates_of_several_outputs_are_those_of_the_first():
    torch.manual_seed(0)
    net, x = sf.Temporal(FirstOfTwo(Traced())), torch.rand(9, 2, 4)
    with sf.record(net) as record:
        net(x)
    fired = record["net.neuron"]["output0"].mean().item()
    assert 0.1 < fired < 0.9
    assert record.rates == sf.report(net, [x]).rates == {"net.neuron": pytest.approx(fired)}


class Shared(nn.Module):
    """Calls one neuron on inputs of two sizes."""

    def __init__(self):
        super().__init__()
        self.neuron, self.layer = sf.LIF(threshold=0.5), nn.Linear(4, 9)

    def forward(self, x):
        return self.neuron(self.layer(self.neuron(x)))


@pytest.mark.parametrize("lengths", [None, torch.tensor([6, 2])])
def test_rates_of_a_shared_neuron_are_those_of_all_its_calls(lengths):
    torch.manual_seed(0)
    net = sf.Temporal(Shared())
    with sf.record(net, lengths=lengths) as record:
        for _ in range(2):
            net(torch.rand(6, 2, 4))
    calls = [call["spikes"] for call in record.calls["net.neuron"]]
    assert [s.shape[-1] for s in calls] == [4, 9, 4, 9]
    if lengths is not None:
        calls = [torch.cat([s[:, 0], s[:2, 1]]) for s in calls]
    rate = torch.cat([s.flatten() for s in calls]).mean().item()
    assert rate != pytest.approx(sum(s.mean().item() for s in calls) / 4, abs=1e-4)
    assert record.rates == {"net.neuron": pytest.approx(rate)}
    assert len(sf.plots.rates(record).patches) == 1


def test_the_potential_before_the_reset():
    net, x = make_net(norm=False), images()
    with sf.record(net, states=("v", "h")) as record:
        net(x)
    assert list(record["net.2"]) == ["v", "h"]
    v, h = record["net.2"]["v"], record["net.2"]["h"]
    assert torch.equal(v, h.where(h < 0.4, 0))


class Driven(sf.Neuron):
    """A neuron of a user that exposes what drives it, and no potential."""

    v = sf.State()

    def step(self, x, v):
        drive = 2 * x
        self.expose(drive=drive)
        s = sf.surrogate.Arctan()(v + drive - 1.0)
        return s, (v + drive - s,)


class Opaque(Driven):
    """One that kernels cannot run."""

    def step(self, x, v):
        return super().step(torch.special.bessel_j0(x), v)


def test_exposed_values():
    torch.manual_seed(0)
    net, x = sf.Temporal(nn.Sequential(Driven(), nn.Linear(4, 3), sf.LIF())), torch.rand(T, B, 4)
    with sf.record(net, states=("drive", "h", "v"), grad=True) as record:
        net(x)
    assert [list(values) for values in record.values()] == [["drive", "v"], ["h", "v"]]
    assert torch.equal(record["net.0"]["drive"], 2 * x)
    known = "expected names among 'drive', 'spikes', 'v'$"
    for state in ("h", "driv"):
        with pytest.raises(ValueError, match=f"no selected neuron has '{state}': {known}"):
            sf.record(net, "net.0", state).__enter__()
    alone = Opaque()
    with sf.record(alone, states=("drive", "spikes")) as record:
        alone(x, impl="reference")
    torch.testing.assert_close(record[""]["drive"], 2 * torch.special.bessel_j0(x))


def test_nan_is_reported():
    net, x = sf.Temporal(nn.Sequential(nn.Linear(4, 2), sf.PLIF())), torch.rand(3, 1, 4)
    with sf.record(net), pytest.warns(UserWarning, match="'net.1' has NaN in its inputs, for"):
        assert not net(x.where(x > x.min(), torch.nan))[0].isnan().any()
    for p in net.net[1].parameters():
        p.data.fill_(torch.nan)
    with sf.record(net), pytest.warns(UserWarning, match="'net.1' has NaN in its parameters"):
        net(x)


@pytest.mark.parametrize("impl", ["numba", "reference", "triton"])
def test_values_are_those_of_a_loop(impl: str) -> None:
    net, x = make_net(norm=False), images()
    with sf.record(net, "net.2", ("spikes", "v"), layers=["net.0", "net.3"]) as record:
        net(x, impl=impl)
    current = net.net[0](x.flatten(0, 1)).unflatten(0, (T, B))
    spikes, v = by_hand(current, 0.3, 0.4)
    assert 0 < spikes.mean() < 1
    assert list(record) == ["net.0", "net.2", "net.3"]
    assert torch.equal(record["net.0"]["output"], current)
    assert torch.equal(record["net.2"]["spikes"], spikes)
    torch.testing.assert_close(record["net.2"]["v"], v)
    assert torch.equal(record["net.3"]["output"], spikes.flatten(2))
    assert not any(y.requires_grad for values in record.values() for y in values.values())
    assert record.rates == {"net.2": pytest.approx(spikes.mean().item())}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_network_does_what_it_did(fused: bool, training: bool, grad: bool) -> None:
    results = []
    for recorded in (False, True):
        net, x = make_net().train(training), images().requires_grad_()
        net = sf.fuse(net) if fused else net
        if recorded:
            options = {"states": ("spikes", "v"), "layers": "*", "grad": grad}
            with sf.record(net, **options) as record:
                y = net(x)
        else:
            y = net(x)
        loss = (y * torch.linspace(1, 2, y.numel()).view_as(y)).sum()
        grads = torch.autograd.grad(loss, [x, *net.parameters()])
        results.append((y, *net.buffers(), *grads))
        # A recorded network is not captured.
        assert len(net.fusion.fused) == (not recorded) if fused else True
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][0].any()
    assert torch.equal(record["net.5"]["spikes"], results[0][0])
    norm, current = net.net[1], record["net.0"]["output"].flatten(0, 1)
    running = (None, None) if training else (norm.running_mean, norm.running_var)
    expected = F.batch_norm(current, *running, norm.weight, norm.bias, training)
    torch.testing.assert_close(record["net.1"]["output"].flatten(0, 1), expected)
    spikes, v = by_hand(record["net.1"]["output"], 0.3, 0.4)
    assert torch.equal(record["net.2"]["spikes"], spikes)
    torch.testing.assert_close(record["net.2"]["v"], v)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_a_loss_on_hidden_values(fused: bool) -> None:
    def gradients(net: sf.Temporal, x: torch.Tensor, impl: str) -> list[torch.Tensor]:
        states = ("spikes", "v")
        with sf.record(net, states=states, layers=["net.0", "net.1"], grad=True) as record:
            y = net(x, impl=impl)
        rate = record["net.2"]["spikes"].mean((0, 1))
        loss = y.sum() + 50 * (rate - 0.1).square().sum()
        loss = loss + record["net.2"]["v"].square().mean() + record["net.5"]["v"].square().sum()
        loss = loss + sum(record[name]["output"].square().mean() for name in ("net.0", "net.1"))
        assert torch.equal(y, record["net.5"]["spikes"])
        return torch.autograd.grad(loss, [x, *net.parameters()])

    net, x = make_net(), images().requires_grad_()
    expected = gradients(copy.deepcopy(net), x, "reference")
    net = sf.fuse(net) if fused else net
    for ours, theirs in zip(gradients(net, x, "auto"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert theirs.any()


def test_the_same_input_at_each_step() -> None:
    net, image = sf.fuse(make_net()), images()[0]
    with sf.record(net, layers="net.[01]") as record:
        y = net(encode.direct(image, T))
    expanded = image.expand(T, *image.shape).contiguous()
    with sf.record(net, layers="net.[01]") as other:
        assert torch.equal(net(expanded), y)
    for name, values in other.items():
        for state, expected in values.items():
            assert record[name][state].shape == expected.shape
            torch.testing.assert_close(record[name][state], expected)


def test_residuals_and_blocks() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.lif = nn.Linear(8, 8), nn.BatchNorm1d(8), sf.LIF()
            self.block = sf.nn.Block(nn.BatchNorm1d(8), sf.LIF())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.first(x))
            y += x
            return self.block(self.lif(y))

    torch.manual_seed(0)
    net, x = sf.fuse(sf.Temporal(Residual())), torch.rand(T, B, 8)
    with sf.record(net, states="v", layers="net.norm") as record:
        net(x)
    assert list(record) == ["net.norm", "net.lif", "net.block.neuron"]
    u = F.batch_norm(net.net.first(x.flatten(0, 1)), None, None, training=True)
    torch.testing.assert_close(record["net.norm"]["output"].flatten(0, 1), u)
    v = by_hand(u.unflatten(0, (T, B)) + x, 0.5, 1.0)[1]
    torch.testing.assert_close(record["net.lif"]["v"], v)


def test_nested_outputs() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.norm(x)
            return {"norm": y, "sum": y + x, "x": x}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.lif = Pair(), sf.LIF()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lif(self.pair(x)["sum"])

    torch.manual_seed(0)
    net, x = sf.fuse(sf.Temporal(Net())), torch.rand(T, B, 8)
    with sf.record(net, layers="net.pair") as record:
        net(x)
    found = record["net.pair"]["output"]
    u = F.batch_norm(x.flatten(0, 1), None, None, training=True).unflatten(0, (T, B))
    torch.testing.assert_close(found, {"norm": u, "sum": u + x, "x": x})


def test_networks_under_the_policy_checkpoint() -> None:
    net, x = sf.Temporal(make_net().net, memory=sf.memory.Checkpoint()), images()
    with sf.record(net) as record:
        y = net(x)
        y.sum().backward()
    assert torch.equal(record["net.5"]["spikes"], y)
    assert len(record.calls["net.2"]) == 1


@pytest.mark.parametrize("whole", [False, True])
def test_second_runs_are_not_recorded(whole: bool) -> None:
    class Part(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sf.checkpoint(self.part, x)

    run = net = make_net()
    if whole:
        run = partial(torch.utils.checkpoint.checkpoint, net, use_reentrant=False)
    else:
        run = net = sf.Temporal(Part(net.net))
    with sf.record(net, layers="*0") as record:
        run(images().requires_grad_()).sum().backward()
    assert len(record) == 3
    assert all(len(calls) == 1 for calls in record.calls.values())


def test_layers_of_events() -> None:
    torch.manual_seed(0)
    lif = sf.LIF(surrogate=sf.surrogate.FastSigmoid(10.0, cutoff=-0.5))
    layers = [EventLinear(20, 30, lif), EventLinear(30, 5)]
    for layer in layers:
        nn.init.uniform_(layer.weight, 0, 0.5)
    net, x = sf.Temporal(nn.Sequential(*layers)), (torch.rand(T, B, 20) < 0.3).float()
    with sf.record(net) as record:
        net(x)
    assert list(record) == ["net.0.neuron"]
    spikes = lif(F.linear(x, layers[0].weight, layers[0].bias))
    assert torch.equal(record["net.0.neuron"]["spikes"], spikes)
    for state in ("v", "h"):
        with pytest.raises(ValueError, match=rf"'net.0.neuron' is inside .* not store '{state}'"):
            sf.record(net, states=state).__enter__()
    with sf.record(net, grad=True) as record:
        net(x)
    record["net.0.neuron"]["spikes"].mean().backward()
    assert layers[0].weight.grad.any()


def test_layers_with_feedback() -> None:
    torch.manual_seed(0)
    layers = sf.Recurrent(sf.LIF(), 6), sf.nn.Feedback(nn.Linear(6, 6), sf.LIF())
    x = torch.randn(T, B, 6)
    for layer in layers:
        net = sf.Temporal(layer)
        with sf.record(net, states=("spikes", "v"), grad=True) as record:
            y, state = net(x, return_state=True)
        found = record["net.neuron"]
        assert torch.equal(found["spikes"], y)
        assert torch.equal(found["v"][-1], state["net.neuron"][0])
        layer.zero_grad()
        found["v"].square().mean().backward()
        assert all(p.grad.any() for p in layer.parameters())


def test_values_are_time_first() -> None:
    """The container itself returns `[B, T, ...]`, its neurons and layers `[T, B, ...]`."""
    net, x = make_net().eval(), images()
    options = {"states": ("spikes", "v"), "layers": ("net.*", "")}
    with sf.record(net, **options) as expected:
        net(x)
    other = sf.Temporal(net.net, batch_first=True)
    with sf.record(other, **options) as record:
        y = other(x.transpose(0, 1))
    assert y.shape[:2] == (B, T)
    for name, values in expected.items():
        for key, value in values.items():
            assert torch.equal(record[name][key], value if name else value.transpose(0, 1))


def test_several_calls() -> None:
    net, x = make_net().eval(), images()
    stream = sf.Stream(net)
    with sf.record(net, states="v") as record:
        for x_t in x:
            stream(x_t)
    with sf.record(net, states="v") as whole:
        net(x)
    for name in whole:
        steps = [call["v"] for call in record.calls[name]]
        torch.testing.assert_close(torch.cat(steps), whole[name]["v"])
    assert "net.2" in record
    for read in (record.__getitem__, lambda name: record.of("v")[name]):
        with pytest.raises(ValueError, match=r"'net.2' was called 5 times: read record.calls"):
            read("net.2")
    calls = [(name, call) for name, calls in record.calls.items() for call in calls]
    assert len(record.items()) == len(record.values()) == len(calls) == 10
    for (name, values), (expected, call) in zip(record.items(), calls, strict=True):
        assert (name, values["v"] is call["v"]) == (expected, True)
    assert all(map(operator.is_, record.values(), (call for _, call in calls)))


class Feeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lif, self.linear = sf.LIF(0.9, 0.5), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return self.lif(x + self.linear(last))


@pytest.mark.parametrize("lengths", [[1, 1, 1], [6, 2, 3]])
def test_rates_of_padded_sequences_in_a_loop(lengths: list[int]) -> None:
    torch.manual_seed(0)
    net, inputs = sf.Temporal(sf.Loop(Feeding(), (4,))), torch.rand(2, 6, 3, 4)
    with sf.record(net, lengths=torch.tensor(lengths)) as record:
        outputs = [net(x) for x in inputs]
    fired = sum(y[:n, b].sum().item() for y in outputs for b, n in enumerate(lengths))
    (rate,) = record.rates.values()
    assert rate == pytest.approx(fired / (2 * 4 * sum(lengths)))


def test_rates_of_padded_sequences_in_a_stream() -> None:
    torch.manual_seed(0)
    net, lengths = make_net().eval(), torch.tensor([5, 2])
    stream, x = sf.Stream(net), images()[:, :2]
    with sf.record(net, lengths=lengths) as record:
        for x_t in x:
            stream(x_t)
    with sf.record(net, lengths=lengths) as whole:
        net(x)
    assert record.rates == pytest.approx(whole.rates)


def test_outputs_that_the_network_asks_for_remain() -> None:
    class Two(sf.Neuron):
        v = sf.State()
        w = sf.State()

        def step(self, x, v, w):
            return (x + v, x - w), (0.5 * v + x, w + x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lif, self.two = sf.LIF(), Two()

        def forward(self, x):
            v, s = self.lif(x, outputs=("v", "spikes"))
            return v, s, *self.two(x)

    net, x = sf.Temporal(Net()), 2 * torch.rand(T, B, 4)
    expected = net(x)
    with sf.record(net, states=("spikes", "w", "v")) as record:
        found = net(x)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(record["net.lif"]["spikes"], expected[1])
    assert torch.equal(record["net.lif"]["v"], expected[0])
    assert set(record["net.two"]) == {"output0", "output1", "w", "v"}
    assert torch.equal(record["net.two"]["output1"], expected[3])
    torch.testing.assert_close(record["net.two"]["w"], x.cumsum(0))


def test_values_changed_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lif = sf.LIF()

        def forward(self, x):
            y = self.lif(x)
            y += 1
            return y

    net, x = sf.Temporal(InPlace()), (2 * torch.rand(T, B, 4)).requires_grad_()
    with sf.record(net) as record, torch.no_grad():
        y = net(x)
    assert torch.equal(record["net.lif"]["spikes"] + 1, y)
    with (
        pytest.raises(RuntimeError, match=r"changed the output of 'net.lif' in place"),
        sf.record(net, grad=True),
    ):
        net(x)


def test_records_in_records_and_explanations() -> None:
    net, x = make_net(), images()
    with sf.record(net, "net.2") as outer, sf.record(net.net, states="v") as inner:
        net(x)
    assert list(outer) == ["net.2"]
    assert set(outer["net.2"]) == {"spikes"}
    assert list(inner) == ["2", "5"]
    with sf.record(net, "net.2", "v") as record:
        explanation = sf.explain(net, x)
    assert [layer.name for layer in explanation.layers] == ["net.2", "net.5"]
    torch.testing.assert_close(record["net.2"]["v"], inner["2"]["v"])


def test_compiled_networks_run_eagerly() -> None:
    net, x = make_net(), images()
    compiled = torch.compile(net, backend="eager")
    y = compiled(x)
    with sf.record(net, states=("spikes", "v"), layers="net.0") as record:
        assert torch.equal(compiled(x), y)
    assert list(record) == ["net.0", "net.2", "net.5"]
    assert torch.equal(record["net.5"]["spikes"], y)


def test_a_neuron_alone() -> None:
    lif, x = sf.LIF(), 2 * torch.rand(T, B, 4)
    with sf.record(lif, states=("v", "spikes")) as record:
        y = lif(x)
    assert torch.equal(record[""]["spikes"], y)
    torch.testing.assert_close(record[""]["v"], by_hand(x, 0.5, 1.0)[1])
    assert "(the model): spikes [5, 3, 4], v [5, 3, 4]" in repr(record)


@pytest.mark.parametrize("impl", ["numba", "reference"])
@pytest.mark.parametrize("channels", [1, 4])
def test_a_value_per_step(channels: int, impl: str) -> None:
    threshold, x = torch.rand(T, 1, channels) + 0.2, torch.rand(T, B, 4)
    lif = sf.LIF(0.9, threshold)
    y = lif(x, impl=impl)
    for states in (("spikes",), ("spikes", "h", "v")):
        with sf.record(lif, states=states) as record:
            assert torch.equal(lif(x, impl=impl), y)
        assert set(record[""]) == set(states)
        assert torch.equal(record[""]["spikes"], y)
    h, v = record[""]["h"], record[""]["v"]
    assert torch.equal(y, (h >= threshold).float())
    assert torch.equal(v, h.where(h < threshold, 0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"neurons": "net.9"}, r"'net.9' selects no neuron: the names are 'net.2', 'net.5'"),
        ({"layers": "net.2"}, r"'net.2' selects no layer: .*; neurons are selected by neurons="),
        (
            {"states": "u"},
            r"no selected neuron has 'u': expected names among 'a', 'h', 'spikes', 'v'",
        ),
    ],
)
def test_errors(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message), sf.record(make_net(), **options):
        pass


def test_what_was_not_recorded() -> None:
    net = make_net()
    with pytest.raises(TypeError, match="model is a str"), sf.record("net"):
        pass
    with sf.record(net, "net.2") as record:
        net(images())
    with pytest.raises(KeyError, match=r"'net.5' was not recorded: expected one of net.2"):
        record["net.5"]
    net(images())
    assert len(record.calls["net.2"]) == 1
