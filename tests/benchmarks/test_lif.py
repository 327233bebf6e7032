"""Who computes a LIF layer, and who can't."""

from __future__ import annotations

import pytest
import torch

from benchmarks import layer, lif


@pytest.fixture(scope="module")
def inputs() -> layer.Inputs:
    return layer.Inputs((6, 1, 50), torch.float32, torch.device("cpu"))


def test_hand_written_loops_are_right(inputs: layer.Inputs) -> None:
    truth = lif.truth(inputs)
    for loop in (lif.hand_written, lif.indexing):
        contender = layer.contender("a loop", loop, inputs)
        assert contender.run is not None
        inputs.prepare()
        truth.verify(contender, contender.run())


def test_torch_compile_keeps_to_its_limits(inputs: layer.Inputs) -> None:
    assert "up to T = 4" in lif.Compiler(4, 60.0).contender(inputs).unavailable
    slow = lif.Compiler(32, 60.0)
    slow.seconds_per_step = 11.0
    expected = "compiling would take about 66 s, 60 s are left"
    assert slow.contender(inputs).unavailable == expected
    assert "up to T = 4" in lif.eager(inputs, 4).unavailable


def test_absent_rivals_say_why(inputs: layer.Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spikingjelly", None)
    found = lif.rivals(inputs)
    assert [c.name for c in found] == list(lif.RIVALS)
    assert all(c.run is None and "spikingjelly" in c.unavailable for c in found)
