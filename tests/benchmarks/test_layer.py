"""What counts as a right result of a layer of neurons."""

from __future__ import annotations

import pytest
import torch

import spikefuse as sf
from benchmarks import gated, layer, lif
from benchmarks.layer import Result
from benchmarks.runner import Contender, CpuClock, Settings, measure

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def inputs(request: pytest.FixtureRequest) -> layer.Inputs:
    return layer.Inputs((6, 1, 500), request.param, CPU)


@pytest.fixture(scope="module")
def truth(inputs: layer.Inputs) -> layer.Truth:
    return lif.truth(inputs)


def channelwise() -> sf.Neuron:
    neuron = sf.PLIF(channels=3)
    with torch.no_grad():
        for logit in neuron.parameters():
            logit.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    return neuron


def test_spikefuse_and_the_eager_loop_are_right(inputs: layer.Inputs, truth: layer.Truth) -> None:
    for contender in (lif.ours(inputs), lif.eager(inputs, 6)):
        inputs.prepare()
        assert contender.run is not None
        truth.verify(contender, contender.run())


@pytest.mark.parametrize(
    ("neuron", "shape", "ports"),
    [(gated.Gated(), (5, 1, 70), 2), (channelwise(), (5, 2, 3, 4), 1)],
)
def test_several_inputs_and_parameters(
    neuron: sf.Neuron, shape: tuple[int, ...], ports: int
) -> None:
    inputs = layer.Inputs(shape, torch.float32, CPU, ports, ports)
    truth = layer.Truth.of(neuron, inputs, exact=ports == 1)
    ours = layer.ours(neuron, inputs)
    inputs.prepare()
    assert ours.run is not None
    result = ours.run()
    truth.verify(ours, result)
    wrong = Result(result.outputs, (*result.grads[:-1], 1.5 * result.grads[-1]), result.params)
    with pytest.raises(AssertionError, match=f"gradient of input {ports - 1} errs by"):
        truth.verify(ours, wrong)
    if ports == 2:
        shifted = Result((result.outputs[0], result.outputs[1] + 0.01), result.grads)
        with pytest.raises(AssertionError, match="output 1 errs by"):
            truth.verify(ours, shifted)
    else:
        assert [p.shape for p in result.params] == [(3,)]
        swapped = Result(result.outputs, result.grads, (result.params[0].flip(0),))
        with pytest.raises(AssertionError, match="gradient of parameter 0 errs by"):
            truth.verify(ours, swapped)


def test_the_truth_does_not_depend_on_chunks(
    inputs: layer.Inputs, truth: layer.Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(layer.CHUNK_ELEMENTS, "cpu", 6 * 128)
    chunked = lif.truth(inputs)
    assert torch.equal(chunked.expected.outputs[0], truth.expected.outputs[0])
    assert torch.equal(chunked.true.grads[0], truth.true.grads[0])
    neuron = channelwise()
    several = layer.Inputs((5, 4, 3, 40), torch.float32, CPU)
    sums = [layer.Truth.of(neuron, several).true.params[0]]
    monkeypatch.setitem(layer.CHUNK_ELEMENTS, "cpu", 5 * 3 * 40)
    sums.append(layer.Truth.of(neuron, several).true.params[0])
    assert torch.allclose(*sums, rtol=1e-12)


@pytest.mark.parametrize("shape", [(4, 1, 100), (4, 10, 2, 5)])
def test_of_long_sequences_the_ends_are_verified(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "VERIFIED_ELEMENTS", 160)
    inputs = layer.Inputs(shape, torch.float32, CPU)
    truth = lif.truth(inputs)
    assert truth.num_neurons == 40  # of 100
    ours = lif.ours(inputs)
    assert ours.run is not None
    inputs.prepare()
    result = ours.run()
    truth.verify(ours, result)
    grad = result.grads[0]
    for place, change, message in ((99, 2.0, "errs by"), (50, float("nan"), "not finite")):
        wrong = grad.clone()
        wrong.view(4, 100)[0, place] += change
        with pytest.raises(AssertionError, match=message):
            truth.verify(ours, Result(result.outputs, (wrong,)))


def test_neurons_that_round_across_the_threshold_get_no_loss() -> None:
    inputs = layer.Inputs((3, 1, 4), torch.float32, CPU)
    (x,), (grad,) = inputs.sets[0]
    with torch.no_grad():
        x.zero_()
        x[0, 0, 1] = 0.7  # in float32 the threshold, and less than it in float64
        x[0, 0, 2] = 0.8
    truth = layer.Truth.of(sf.LIF(threshold=0.7), inputs)
    assert truth.rounded.flatten().tolist() == [False, True, False, False]
    assert (grad == 0).all(0).flatten().tolist() == [False, True, False, False]


def test_wrong_results_are_seen(truth: layer.Truth) -> None:
    rival, ours = Contender(lif.RIVAL_NODE), Contender(layer.OURS)
    spikes, grad = truth.expected.outputs[0], truth.expected.grads[0]
    one = spikes.clone()
    one[0, 0, 0] = 1 - one[0, 0, 0]
    many = spikes.clone()
    many[0, 0, :100] = 1 - many[0, 0, :100]
    unwritten, off = grad.clone(), grad.clone()
    unwritten[-1, 0, -1] = float("nan")
    off[2] *= 1.5
    truth.verify(rival, Result((one,), (grad,)))  # rounding may do this
    for who, result, message in (
        (ours, (one, grad), "differ from the reference"),
        (rival, (many, grad), "differ in 10[0-9] neurons"),
        (rival, (spikes, unwritten), "not finite"),
        (rival, (spikes, off), "errs by"),
        (rival, (spikes.double(), grad), "outputs are torch.float64"),
        (rival, (spikes[:3], grad), "shape"),
    ):
        with pytest.raises(AssertionError, match=message):
            truth.verify(who, Result((result[0],), (result[1],)))
    with pytest.raises(AssertionError, match="2 outputs, not 1"):
        truth.verify(ours, Result((spikes, spikes), (grad,)))


def test_a_neuron_with_another_threshold_gets_no_time(
    inputs: layer.Inputs, truth: layer.Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lif, "THRESHOLD", 0.31)
    wrong = lif.ours(inputs)
    found = measure([wrong], [], truth.verify, CpuClock(), 1, Settings(1, 0.0, 1), inputs.prepare)[
        "contenders"
    ]
    assert found[0]["status"] == "wrong"
    assert "wall_ms" not in found[0]


def test_inference_makes_no_graph(inputs: layer.Inputs) -> None:
    neuron = lif.neuron()
    truth = layer.Truth.of(neuron, inputs, training=False)
    contender = layer.inference(layer.OURS, neuron, inputs)
    inputs.prepare()
    assert contender.run is not None
    result = contender.run()
    assert not result.outputs[0].requires_grad
    truth.verify(contender, result)


def test_another_layout_has_the_same_values() -> None:
    inputs = layer.Inputs((2, 3, 4, 5, 6), torch.bfloat16, CPU)
    other = inputs.in_layout(torch.channels_last)
    assert other.like.stride() != inputs.like.stride()
    for before, after in zip(inputs.sets[0], other.sets[0], strict=True):
        assert torch.equal(before[0], after[0])
    assert other.like.requires_grad
    assert other.like.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("training", "sequences"), [(True, 10), (False, 4)])
def test_bytes_to_move(training: bool, sequences: int) -> None:
    assert layer.bytes_to_move(7, torch.bfloat16, 2, 2, training) == 2 * 7 * sequences
