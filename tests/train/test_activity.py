"""Training on events, from recording files to the logged activity."""

from __future__ import annotations

import csv
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import h5py
import matplotlib.image
import numpy as np
import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.neurons.definition import SpikingLayer
from spikefuse.nn import Events
from spikefuse.train.activity import ActivityMonitor, RateMonitor
from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError
from spikefuse.train.training_module import TrainingModule
from spikefuse.transforms.nir_layers import Threshold

Spikefuse = Callable[..., int]
EVENTS = ["--dataset", "shd", "--model", "event-mlp", "--device", "cpu"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of 4 classes, each with its own units."""
    folder, generator = tmp_path_factory.mktemp("shd"), np.random.default_rng(0)
    for part, count in (("train", 96), ("test", 16)):
        labels = np.arange(count) % 4
        with h5py.File(folder / f"shd_{part}.h5", "w") as file:
            file["labels"] = labels
            times = file.create_dataset("spikes/times", (count,), h5py.vlen_dtype(np.float16))
            units = file.create_dataset("spikes/units", (count,), h5py.vlen_dtype(np.uint16))
            for i, label in enumerate(labels):
                times[i] = np.sort(generator.random(200) * 0.27)
                units[i] = label * 175 + generator.integers(0, 175, 200)
    return folder


@pytest.mark.usefixtures("drawn")
def test_a_run(
    spikefuse: Spikefuse, tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--capacity 0.05 -T 20 --batch-size 8 --epochs 5 --lr 0.003"
    assert spikefuse("train", *EVENTS, *options.split(), "--data-dir", digits) == 0
    out, err = capsys.readouterr()
    assert err == ""
    directory = tmp_path / "runs" / "shd-event-mlp-1"
    with (directory / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for layer in range(3):
        assert 0.005 < float(rows[0][f"activity_{layer}"]) < 0.06
    lines = [line for line in out.splitlines() if line.startswith("epoch")]
    for line, row in zip(lines, rows, strict=True):
        dropped = float(row["dropped"])
        assert 0 <= dropped < 0.5
        text = f"{line}\n  dropped {100 * dropped:.2g} % of the spikes\n"
        assert (text in out) == (dropped > 0)
    assert any(float(row["dropped"]) > 0 for row in rows)
    assert json.loads((directory / "result.json").read_text())["test_accuracy"] > 0.6
    assert matplotlib.image.imread(directory / "raster.png").std() > 0.01
    assert spikefuse("eval", directory / "best.ckpt", "--data-dir", digits) == 0


def test_capacity_overflow_is_reported(
    spikefuse: Spikefuse, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--overflow raise --capacity 0.01 --activity 0.01 -T 20 --batch-size 8"
    assert spikefuse("train", *EVENTS, *options.split(), "--data-dir", digits) != 0
    wanted = r"cannot scale the weights to an activity of 0.01: a step of a sample has \d+ events"
    assert re.search(wanted, capsys.readouterr().err)


def config(**options) -> TrainConfig:
    return TrainConfig(**{"dataset": "shd", "model": "event-mlp", "num_steps": 6, **options})


def test_the_input_is_never_dense() -> None:
    module = TrainingModule(config())
    spikes = torch.rand(6, 3, 700) < 0.1
    packed = torch.from_numpy(np.packbits(spikes.numpy(), axis=-1, bitorder="little"))
    x = module.encode(packed.transpose(0, 1))
    assert isinstance(x, Events)
    assert torch.equal(x.to_dense(), spikes.float())
    part = module.encode(packed.transpose(0, 1), slice(1, 3))
    assert torch.equal(part.to_dense(), spikes[:, 1:3].float())


def test_poisson_encoded_images_become_events() -> None:
    module = TrainingModule(config(model="event-mlp5", dataset="digits", encoding="poisson"))
    assert len(module.net.net) == 6
    x = module.encode(torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8))
    assert isinstance(x, Events)
    assert x.shape == (6, 3, 64)


def test_the_penalty_lowers_activity() -> None:
    torch.manual_seed(0)
    net = config(capacity=0.02).make_network()
    activity = ActivityMonitor(net.net, 0.02)
    x = Events.from_dense((torch.rand(6, 8, 700) < 0.2).float())
    sf.nn.scale_to_rate(net.net, x, 0.05)
    optimizer = torch.optim.SGD([m.weight for m in net.net[:3]], lr=0.05)
    rates = []
    for _ in range(20):
        optimizer.zero_grad()
        net(x)
        penalty = activity.penalty()
        activity.restart()
        activity.count()
        rates.append(activity.row()["activity_0"])
        penalty.backward()
        optimizer.step()
    assert rates[-1] < 0.7 * rates[0]


def test_no_penalty_below_half_of_the_capacity() -> None:
    net = config().make_network()
    x = Events.from_dense((torch.rand(6, 8, 700) < 0.2).float())
    sf.nn.scale_to_rate(net.net, x, 0.01)
    for capacity, expected in ((0.05, 0.0), (0.005, 3 * 1.5**2)):
        activity = ActivityMonitor(net.net, capacity)
        net(x)
        assert activity.penalty().item() == pytest.approx(expected, rel=0.3)
    activity = ActivityMonitor(net.net, None)
    net(x)
    assert activity.penalty() is None


def test_the_penalty_of_all_processes() -> None:
    """The losses and gradients of two shares of a batch, weighted by their samples, are its own."""
    torch.manual_seed(0)
    net = config(capacity=0.02).make_network()
    activity = ActivityMonitor(net.net, 0.02)
    x = (torch.rand(6, 8, 700) < 0.2).float()
    x[:, :3] *= (torch.rand(6, 3, 700) < 0.5).float()
    sf.nn.scale_to_rate(net.net, x, 0.02)
    weights = [layer.weight for layer in net.net[:3]]
    counts: list[torch.Tensor] = []

    def penalty_of(rows: slice, others: list[torch.Tensor]) -> torch.Tensor:
        net(Events.from_dense(x[:, rows]))
        return activity.penalty(SimpleNamespace(sum=lambda c: counts.append(c) or sum(others, c)))

    whole = penalty_of(slice(0, 8), [])
    expected = torch.autograd.grad(whole, weights)
    shares = slice(0, 3), slice(3, 8)
    counts.clear()
    one, two = (penalty_of(rows, []).item() for rows in shares)
    assert abs(one - two) > 0.2 * whole.item() > 0
    found = []
    for rows, other, share in zip(shares, counts[:2][::-1], (3 / 8, 5 / 8), strict=True):
        penalty = penalty_of(rows, [other])
        assert penalty.item() == pytest.approx(whole.item())
        found.append([share * g for g in torch.autograd.grad(penalty, weights)])
    torch.testing.assert_close([sum(g) for g in zip(*found, strict=True)], [*expected])


class Two:
    """Two processes, of which the other one has counted `other`."""

    def __init__(self, other: ActivityMonitor) -> None:
        self.other = other

    def sum(self, counts: torch.Tensor) -> torch.Tensor:
        found = []
        self.other.row(SimpleNamespace(sum=lambda x: found.append(x) or x))
        return counts + found[0]


def test_activity_of_all_processes() -> None:
    torch.manual_seed(0)
    net = config(capacity=0.02).make_network()
    whole, one, other = (ActivityMonitor(net.net, 0.02) for _ in range(3))
    x = (torch.rand(6, 8, 700) < 0.2).float()
    sf.nn.scale_to_rate(net.net, x, 0.02)
    for activity, rows in ((whole, slice(0, 8)), (one, slice(0, 3)), (other, slice(3, 8))):
        net(Events.from_dense(x[:, rows]))
        activity.count()
    assert whole.row()["dropped"] > 0
    assert one.row(Two(other)) == whole.row() != one.row()


WRONG = {
    "capacity is given, but the model is not event-mlp": {"model": "mlp", "capacity": 0.1},
    "overflow is dense, but the model is not": {"model": "mlp", "overflow": "dense"},
    "overflow is dense, but event-mlp has no capacity": {"overflow": "dense"},
    "activity_weight is 10, but event-mlp has no capacity": {"activity_weight": 10.0},
    "activity is 0.1: expected at most capacity, 0.05": {"activity": 0.1, "capacity": 0.05},
    r"capacity is 1.5: expected a number above 0, at most 1$": {"capacity": 1.5},
    "event-mlp reads spikes: choose poisson": {"dataset": "digits"},
    "accumulate is given, but event-mlp computes whole batches": {"accumulate": 2},
    "tbptt is given, but event-mlp computes whole sequences": {"tbptt": 2},
    "precision is bf16, but event-mlp computes in float32": {"precision": "bf16"},
    "cuda_graph is given, but the tensors of event-mlp": {"cuda_graph": True},
    "integerlif, but event-mlp needs .* lif, plif or alif": {"neuron": "integerlif"},
    "ternarylif, but event-mlp needs .* lif, plif or alif": {"neuron": "ternarylif"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**WRONG[message])


def test_rates_count_spikes_of_either_sign():
    neuron = sf.TernaryLIF(threshold=0.5)
    rates = RateMonitor(nn.Sequential(neuron))
    x = torch.randn(5, 3, 4, requires_grad=True)
    spikes = neuron(x)
    assert spikes.min() == -1
    penalty = rates.penalty()
    assert penalty.item() == pytest.approx(spikes.abs().mean().item())


@pytest.mark.parametrize("threshold", [0.1, [0.1, 0.2, 0.5, 2.0]])
def test_the_height_of_spikes_does_not_matter_to_the_penalty(threshold):
    torch.manual_seed(0)
    if isinstance(threshold, list):
        threshold = torch.tensor(threshold)
    neuron = sf.RateIF(threshold, negative="always")
    net = nn.Sequential(nn.Conv2d(2, 4, 1), neuron)
    rates = RateMonitor(net)
    spikes = sf.Temporal(net)(torch.randn(5, 3, 2, 6, 6))
    assert spikes.min() < 0
    penalty = rates.penalty()
    assert penalty.item() == pytest.approx(spikes.count_nonzero().item() / spikes.numel())
    penalty.backward()
    assert net[0].weight.grad.any()


class Shared(nn.Module):
    """Calls one neuron on inputs of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 6), nn.Linear(6, 10)
        self.neuron = sf.LIF(threshold=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.neuron(self.second(self.neuron(self.first(x.flatten(1)))))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.neuron = sf.LIF(threshold=0.6)

    def forward(self, x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return self.neuron(x + 0.3 * last)


class Asking(Body):
    """Asks for potentials, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.neuron(x, outputs=("v", "spikes"))[1]


LAYERS = {
    "neuron": lambda: sf.LIF(threshold=0.6),
    "neuron with outputs": Asking,
    "PSN": lambda: sf.PSN(6),
    "SlidingPSN": lambda: sf.SlidingPSN(3),
    "Threshold": lambda: Threshold(0.3, sf.surrogate.Arctan()),
    "Block": lambda: sf.nn.Block(nn.BatchNorm1d(4), sf.LIF(threshold=0.6)),
    "Recurrent": lambda: sf.Recurrent(sf.LIF(threshold=0.6), 4),
    "Feedback": lambda: sf.nn.Feedback(nn.Linear(4, 4), sf.LIF(threshold=0.6)),
    "Loop": lambda: sf.Loop(Body(), (4,)),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_that_fires_counts_in_all_rates(name: str, fused: bool) -> None:
    torch.manual_seed(0)
    net = sf.Temporal(nn.Sequential(nn.Linear(3, 4), LAYERS[name](), nn.Linear(4, 2)))
    x = 3 * torch.randn(6, 5, 3)
    with sf.record(net) as record:
        net(x)
    (rate,) = record.rates.values()
    assert 0.05 < rate < 0.95
    assert sf.report(net, [x]).rates == pytest.approx(record.rates)
    net = sf.fuse(net) if fused else net
    rates = RateMonitor(net)
    net(x)
    penalty = rates.penalty()
    assert penalty is not None
    assert penalty.item() == pytest.approx(rate)
    penalty.backward()
    assert net.net[0].weight.grad.any()


def test_these_are_all_layers_with_neurons() -> None:
    """`EventLinear` has an activity of its own."""
    layers = {name: getattr(sf.nn, name) for name in sf.nn.__all__}
    found = {
        name
        for name, layer in layers.items()
        if isinstance(layer, type)
        and ("neuron" in inspect.signature(layer).parameters or issubclass(layer, SpikingLayer))
    }
    assert found - {"EventLinear"} <= {*LAYERS}


def test_calls_without_spikes_have_no_rate() -> None:
    neuron = sf.LIF(threshold=0.6)
    rates = RateMonitor(nn.Sequential(neuron))
    neuron(torch.randn(5, 3, 4, requires_grad=True), outputs=("v",))
    assert rates.penalty() is None


def test_the_rate_of_a_call_with_outputs_and_states() -> None:
    neuron = sf.LIF(threshold=0.6)
    rates = RateMonitor(nn.Sequential(neuron))
    x = torch.randn(5, 3, 4, requires_grad=True)
    (_, spikes), _ = neuron(x, outputs=("v", "spikes"), return_state=True)
    penalty = rates.penalty()
    assert penalty is not None
    assert penalty.item() == pytest.approx(spikes.mean().item())


def test_neurons_that_never_fire_have_no_rate() -> None:
    integrators = sf.LI(), sf.ShortTermPlasticity(), sf.Recurrent(sf.LI(), 4)
    assert RateMonitor(nn.Sequential(*integrators)).num_layers == 0
    assert RateMonitor(nn.Sequential(*integrators, sf.LIF())).num_layers == 1


@pytest.mark.parametrize("fused", [False, True])
def test_the_rate_penalty_counts_every_call_of_a_shared_neuron(fused: bool) -> None:
    class Own(TrainingModule):
        def make_network(self) -> sf.Temporal:
            net = sf.Temporal(Shared())
            return sf.fuse(net) if fused else net

    module = Own(TrainConfig(num_steps=4, rate_penalty=1.0)).train()
    x = torch.rand(4, 3, 1, 8, 8)
    for _ in range(2):  # the penalty covers the last call only
        with sf.record(module.net.net) as record:
            module.net(x)
        calls = [call["spikes"] for call in record.calls["neuron"]]
        module.net(x)
    penalty = module._rates.penalty()
    total = calls[0].sum() + calls[1].sum()
    assert calls[0].mean() != calls[1].mean()
    assert penalty.item() == pytest.approx(total.item() / (4 * 3 * 16))
    penalty.backward()
    assert all(layer.weight.grad.any() for layer in (module.net.net.first, module.net.net.second))


def test_activity_of_an_event_layer_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            surrogate = sf.surrogate.FastSigmoid(10.0, cutoff=-0.1)
            neuron = sf.LIF(threshold=0.1, surrogate=surrogate)
            self.layer = sf.nn.EventLinear(20, 20, neuron=neuron, capacity=0.9)

        def forward(self, x: Events) -> Events:
            return self.layer(self.layer(x))

    torch.manual_seed(0)
    net = Twice()
    activity, calls = ActivityMonitor(net, 0.1), []
    net.layer.register_forward_hook(lambda *args: calls.append(args[-1]))
    for _ in range(2):
        calls.clear()
        net(Events.from_dense((torch.rand(6, 8, 20) < 0.3).float()))
    activity.count()
    spikes = [call.to_dense() for call in calls]
    rate = torch.stack(spikes).mean().item()
    assert activity.row()["activity_layer"] == pytest.approx(rate)
    assert activity.penalty().item() == pytest.approx(max(0, rate / 0.1 - 0.5) ** 2, rel=1e-4)
