"""Wrong results of contenders are found before anything is timed."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import events, layers, networks, neurons
from benchmarks.agreement import Agreement, NetworkReference
from benchmarks.events import DENSE, EVENTS, EventTask
from benchmarks.jelly import NODE
from benchmarks.layers import OURS, Inputs, LayerResult, LayerTruth
from benchmarks.networks import Workload, WorkloadTask
from benchmarks.parallel import NetworkStep
from benchmarks.runner import Contender
from benchmarks.steps import Network
from spikefuse.nn import Block

CPU = torch.device("cpu")


# Layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers(dtype: torch.dtype) -> None:
    inputs, neuron = Inputs.draw((6, 1, 20000), dtype, CPU), layers.lif()
    truth, rival, ours = LayerTruth(neuron, inputs), Contender(NODE), Contender(OURS)
    for layer in (neuron, functools.partial(neuron, impl="reference")):
        truth.verify(ours, layers.train(layer, inputs))
    LayerTruth(neuron, inputs, training=False).verify(ours, layers.infer(neuron, inputs))
    spikes, grad = truth.expected.outputs[0], truth.expected.grads[0]
    one, many, unwritten = spikes.clone(), spikes.clone(), grad.clone()
    one[0, 0, 0] = 1 - one[0, 0, 0]
    many[0, 0, :4000] = 1 - many[0, 0, :4000]
    unwritten[-1, 0, -1] = float("nan")
    truth.verify(rival, LayerResult((one,), (grad,)))  # possible by rounding
    for who, outputs, grads, message in (
        (ours, one, grad, "differ from the reference"),
        (rival, many, grad, "output 0 differs by 0.2"),
        (rival, spikes, unwritten, "not finite"),
        (rival, spikes, 1.5 * grad, "gradient of input 0 differs by 0.5"),
        (rival, spikes.double(), grad, r"output 0 is torch\.float64"),
        (rival, spikes[:3], grad, r"output 0 is torch\.\w+\[3, 1, 20000\]"),
    ):
        with pytest.raises(AssertionError, match=message):
            truth.verify(who, LayerResult((outputs,), (grads,)))
    with pytest.raises(AssertionError, match="2 outputs, not 1"):
        truth.verify(ours, LayerResult((spikes, spikes), (grad,)))


def test_gradients_of_parameters_and_the_ends_of_long_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    neuron = sf.PLIF(channels=2)
    with torch.no_grad():
        next(neuron.parameters()).copy_(torch.tensor([-1.0, 1.0]))
    inputs = Inputs.draw((4, 10, 2, 5), torch.float32, CPU)
    truth, ours = LayerTruth(neuron, inputs), layers.ours(neuron, inputs)
    right = ours.run()
    truth.verify(ours, right)
    with pytest.raises(AssertionError, match="gradient of parameter 0 differs"):
        truth.verify(ours, replace(right, params=(right.params[0].flip(0),)))
    monkeypatch.setitem(layers.VERIFIED_ELEMENTS, "cpu", 160)
    truth = LayerTruth(neuron, inputs)
    assert truth.expected.outputs[0].shape == (4, 4, 2, 5)  # of 10 samples
    truth.verify(ours, right)
    right.grads[0].view(4, 100)[0, 99] += 2
    with pytest.raises(AssertionError, match="gradient of input 0 differs"):
        truth.verify(ours, right)


def test_blocks() -> None:
    inputs, norm = Inputs.draw((6, 8, 4, 5, 5), torch.float32, CPU), neurons.make_norm(4, CPU)
    verify, params = neurons.block_check(norm, inputs), tuple(norm.parameters())
    verify(Contender(OURS), layers.train(Block(norm, layers.lif()), inputs, params))
    other = Block(norm, sf.LIF(0.3, layers.THRESHOLD))
    with pytest.raises(AssertionError, match="output 0 differs"):
        verify(Contender(OURS), layers.train(other, inputs, params))


# Networks


@pytest.fixture(scope="module")
def task() -> WorkloadTask:
    return WorkloadTask(Workload("conv", (1, 28, 28)).small(), "float32", CPU)


@pytest.fixture(scope="module")
def reference(task: WorkloadTask) -> NetworkReference:
    return NetworkReference(task, "training", networks.spiking(task, impl="reference"))


def other(task: WorkloadTask, exact: bool = True, **changes: Any) -> Network:
    """Make our network with other neurons."""
    net = task.network(replace(task.workload, **changes).neuron)
    return Network(net, sf.Temporal(net), sf.LIF, exact)


def fused(task: WorkloadTask, **options: float) -> Network:
    network = networks.spiking(task, fused=True)
    for module in network.net.modules():
        if isinstance(module, nn.BatchNorm2d):
            vars(module).update(options)
    return network


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (fused, {}, ""),
        (other, {"threshold": 0.31}, "spikes differ for the same inputs, allowed are 0"),
        (other, {"threshold": 0.3 * (1 + 2**-8), "exact": False}, "inputs, allowed are [1-9]"),
        (other, {"surrogate": "rectangle"}, "gradients differ by"),
        (fused, {"eps": 0.1}, "spikes differ for the same inputs"),
    ],
)
def test_networks(
    make: Any, options: dict[str, Any], message: str, task: WorkloadTask, reference: Any
) -> None:
    agreement = Agreement(task, "training", functools.partial(make, **options), reference)
    with pytest.raises(AssertionError, match=message) if message else nullcontext():
        agreement.verify(agreement.expected)


def test_wrong_steps(task: WorkloadTask, reference: NetworkReference) -> None:
    agreement = Agreement(task, "training", networks.spiking, reference)
    right = networks.spiking(task).step(task, "training")()
    agreement.verify(right)
    for wrong, message in (
        (replace(right, logits=right.logits / 0), "not finite"),
        (replace(right, grads=tuple(2 * g for g in right.grads)), "of its norm from the first"),
    ):
        with pytest.raises(AssertionError, match=message):
            agreement.verify(wrong)


def test_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.parallel.highest", lambda value, device: value)
    static = torch.zeros(2)

    class Step(NetworkStep):
        device = CPU

        def __call__(self) -> list[Tensor]:
            return [torch.ones(2)]

    step = object.__new__(Step)
    step.verify(lambda: [static.fill_(1.0)])
    for wrong in (lambda: [static.fill_(2.0)], lambda: [static]):  # the second writes nothing
        with pytest.raises(AssertionError, match="a replay differs"):
            step.verify(wrong)


# Events


@pytest.mark.parametrize("name", [EVENTS, DENSE])
@pytest.mark.parametrize("excitatory", [False, True])
def test_events(name: str, excitatory: bool) -> None:
    case = replace(events.QUICK, excitatory=excitatory)
    task = EventTask(case, 0.5 if excitatory else 0.1, CPU)
    logits, grads = task.contender(name).run()
    events.verify(task, (logits, grads))
    other = logits.clone()
    other[0] += 1
    for wrong, message in (
        ((logits + 1, grads), "logits of 4 samples differ"),
        ((logits, [1.01 * grads[0], *grads[1:]]), "gradient 0 differs by 0.01"),
        ((other, [2 * grads[0], *grads[1:]]), "gradient 0 differs by 1"),  # of another sample
        ((logits / 0, grads), "not finite"),
    ):
        with pytest.raises(AssertionError, match=message):
            events.verify(task, wrong)
    events.verify(task, (other, grads))
