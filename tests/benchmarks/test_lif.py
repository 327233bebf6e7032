"""What counts as a right result of a LIF layer."""

from __future__ import annotations

import pytest
import torch

from benchmarks import lif
from benchmarks.runner import Contender, CpuClock, Settings, measure

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def inputs(request: pytest.FixtureRequest) -> lif.Inputs:
    return lif.Inputs(6, 500, request.param, CPU)


@pytest.fixture(scope="module")
def truth(inputs: lif.Inputs) -> lif.Truth:
    return lif.Truth.of(inputs)


def test_spikefuse_and_the_eager_loop_are_right(inputs: lif.Inputs, truth: lif.Truth) -> None:
    for contender in (lif.ours(inputs), lif.eager(inputs, 6)):
        inputs.prepare()
        assert contender.run is not None
        truth.verify(contender, contender.run())


def test_the_truth_does_not_depend_on_chunks(
    inputs: lif.Inputs, truth: lif.Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lif.CHUNK_ELEMENTS, "cpu", 6 * 128)
    chunked = lif.Truth.of(inputs)
    assert torch.equal(chunked.spikes, truth.spikes)
    assert torch.equal(chunked.true_spikes, truth.true_spikes)


def test_wrong_results_are_seen(truth: lif.Truth) -> None:
    rival, ours = Contender(lif.RIVAL_NODE), Contender(lif.OURS)
    spikes, grad = truth.spikes, truth.grad
    one = spikes.clone()
    one[0, 0, 0] = 1 - one[0, 0, 0]
    many = spikes.clone()
    many[0, 0, :100] = 1 - many[0, 0, :100]
    unwritten, off = grad.clone(), grad.clone()
    unwritten[-1, 0, -1] = float("nan")
    off[2] *= 1.5
    truth.verify(rival, (one, grad))  # rounding may do this
    for who, result, message in (
        (ours, (one, grad), "differ from the reference"),
        (rival, (many, grad), "differ in 10[0-9] neurons"),
        (rival, (spikes, unwritten), "not finite"),
        (rival, (spikes, off), "errs by"),
        (rival, (spikes.double(), grad), "spikes are torch.float64"),
        (rival, (spikes[:3], grad), "shape"),
    ):
        with pytest.raises(AssertionError, match=message):
            truth.verify(who, result)


def test_a_neuron_with_another_threshold_gets_no_time(
    inputs: lif.Inputs, truth: lif.Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lif, "THRESHOLD", 0.31)
    wrong = lif.ours(inputs)
    found = measure([wrong], [], truth.verify, CpuClock(), 1, Settings(1, 0.0, 1), inputs.prepare)[
        "contenders"
    ]
    assert found[0]["status"] == "wrong"
    assert "wall_ms" not in found[0]


def test_torch_compile_keeps_to_its_limits(inputs: lif.Inputs) -> None:
    assert "up to T = 4" in lif.Compiler(4, 60.0).contender(inputs).unavailable
    slow = lif.Compiler(32, 60.0)
    slow.seconds_per_step = 11.0
    expected = "compiling would take about 66 s, 60 s are left"
    assert slow.contender(inputs).unavailable == expected
    assert "up to T = 4" in lif.eager(inputs, 4).unavailable


def test_absent_rivals_say_why(inputs: lif.Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spikingjelly", None)
    found = lif.rivals(inputs)
    assert [c.name for c in found] == list(lif.RIVALS)
    assert all(c.run is None and "spikingjelly" in c.unavailable for c in found)
