"""The comparison of networks on events runs end to end, in small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import cpu_neuron, events, record
from benchmarks.events import DENSE, EVENTS, LAZY, LOOP, Case


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_neuron, "reuse_memory", lambda: True)  # not in the tests' process
    monkeypatch.setattr(torch, "compile", lambda module: module)  # which takes half a minute
    small = Case(20, 4, 50, 0.2, (60, 50), (0.02, 0.1), ((0.1, 6.0),))
    monkeypatch.setattr(events, "CASES", {"small": small})
    options = "--cases small --loop --quick --rounds 2 --device cpu --out"
    path = events.main([*options.split(), str(tmp_path)])
    result = record.read(path)
    assert [row["rate"] for row in result["rows"]] == [0.02, 0.1]
    for row in result["rows"]:
        assert all(c["status"] == "ok" for c in row["contenders"]), row["contenders"]
        assert row["times_dense"].keys() == {DENSE, EVENTS, LAZY, LOOP}
        assert all(0.5 * row["rate"] < r < 2 * row["rate"] for r in row["layer_rates"])
        assert row["neurons"] == 110
        assert row["parameters"] == 50 * 60 + 60 * 50 + 50 * 20 + 60 + 50 + 20
    (bar,) = result["bars"]
    assert bar["what"].startswith("small, activity 10.0%")
    assert path.with_suffix(".png").is_file()
    assert "times dense" in capsys.readouterr().out


def test_a_wrong_result_gets_no_time() -> None:
    work = events.Work(Case(10, 4, 50, 0.2, (40,), (0.1,)), 0.1, torch.device("cpu"))
    dense, ours = work.contenders([DENSE, EVENTS])
    work.verify(dense, dense.run())
    logits, grads = ours.run()
    work.verify(ours, (logits, grads))
    with pytest.raises(AssertionError, match="of the samples agree"):
        work.verify(ours, (logits + 1, grads))
    with pytest.raises(AssertionError, match="gradient 0 differs by 1 of its norm"):
        work.verify(ours, (logits, [torch.zeros_like(grads[0]), *grads[1:]]))
