"""The comparison of networks on events runs end to end, in small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import cpu_neuron, event_check, event_networks, event_streaming, events, record
from benchmarks.event_networks import (
    DENSE,
    EVENTS,
    FIXED,
    GRAPH,
    LAZY,
    LISTS,
    LOOP,
    PRODUCTS,
    Case,
    Work,
)
from benchmarks.runner import Contender
from spikefuse.events import products_numba as event_numba

CPU = torch.device("cpu")
SMALL = Case(20, 4, 50, 0.2, (60, 50), (0.02, 0.1), ((0.1, 6.0),))
STILL = Case(20, 4, 50, 0.2, (60, 50), (0.1,), activity=FIXED)


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_neuron, "reuse_memory", lambda: True)  # not in the tests' process
    monkeypatch.setattr(torch, "compile", lambda module: module)  # which takes half a minute
    cases = {"small": SMALL, "still": STILL, event_streaming.CASE: SMALL}
    for module in (events, event_networks, event_streaming):
        monkeypatch.setattr(module, "CASES", cases)
    options = "--cases small still --loop --streaming --quick --rounds 2 --device cpu --out"
    path = events.main([*options.split(), str(tmp_path)])
    result = record.read(path)
    assert [row["rate"] for row in result["rows"]] == [0.02, 0.1, 0.1]
    for row in result["rows"]:
        assert all(c["status"] == "ok" for c in row["contenders"]), row["contenders"]
        assert row["times_dense"].keys() == {DENSE, EVENTS, LAZY, LISTS, PRODUCTS, LOOP}
        assert all(0.5 * row["rate"] <= r < 2 * row["rate"] for r in row["layer_rates"])
        assert row["neurons"] == 110
        assert row["parameters"] == 50 * 60 + 60 * 50 + 50 * 20 + 60 + 50 + 20
        assert row["checks"][EVENTS]["sites"] == 20 * 4 * 110
    speed, *choices = result["bars"][1:3] + result["bars"][:1] + result["bars"][3:]
    assert speed["what"].startswith("small, activity 10.0%: times faster")
    assert all("own choice" in bar["what"] for bar in choices)
    assert all(c["status"] == "ok" for c in result["streaming"]["contenders"])
    assert path.with_suffix(".png").is_file()
    assert "times dense" in capsys.readouterr().out


@pytest.mark.parametrize("name", [EVENTS, DENSE])
@pytest.mark.parametrize("case", [SMALL, STILL], ids=["natural", "fixed"])
def test_a_right_step(case: Case, name: str) -> None:
    work = Work(case, 0.1, CPU)
    (contender,) = work.contenders([name])
    about = events.verify(work, contender, contender.run())
    assert about["flips"] == about["candidate_flips"] == 0
    kinds = ("outputs", "gradient of weights", "gradient of biases", "gradient of spikes")
    assert set(about["errors"]) == set(kinds)
    assert 0 < about["errors"]["gradient of weights"] < 1e-5


@pytest.mark.parametrize("kind", [DENSE, LOOP])
def test_a_replay_is_held_to_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    def graphed(step: Any) -> Any:
        recorded.append(step)
        return step, 7

    monkeypatch.setattr(torch, "compile", lambda module: module)
    monkeypatch.setattr(event_networks, "graphed", graphed)
    work = Work(SMALL, 0.1, CPU)
    work.contenders([DENSE])
    (contender,) = work.contenders([kind + GRAPH])
    assert contender.held_bytes == 7
    assert contender.run is recorded[0]
    replayed, eager = work.networks[kind + GRAPH], work.networks[kind]
    assert replayed.net is eager.net
    assert replayed.optimizer.defaults["capturable"]
    assert not eager.optimizer.defaults["capturable"]
    logits, grads = contender.run()
    assert events.verify(work, contender, (logits, grads))["errors"]
    with pytest.raises(AssertionError, match="the step differs"):
        events.verify(work, contender, (logits, [1.01 * g for g in grads]))


def test_what_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def graphed(step: Any) -> Any:
        raise RuntimeError("no capture here")

    monkeypatch.setattr(event_networks, "graphed", graphed)
    lists, dense = Work(SMALL, 0.1, CPU).contenders([EVENTS + GRAPH, DENSE + GRAPH])
    assert lists.run is dense.run is None
    assert "the host reads how many there are" in lists.unavailable
    assert dense.unavailable == "RuntimeError: no capture here"


def test_replays_are_for_gpus() -> None:
    gpu, cpu = (events.arguments(["--loop", "--device", d]) for d in ("cuda", "cpu"))
    names = events.contenders(gpu, "shd")
    assert names[-3:] == [DENSE + GRAPH, EVENTS + GRAPH, LOOP + GRAPH]
    assert names[:-3] == events.contenders(cpu, "shd")
    assert events.contenders(gpu, "47k") == [DENSE, EVENTS, DENSE + GRAPH, EVENTS + GRAPH]
    without = events.arguments(["--loop", "--device", "cuda", "--no-graphs"])
    assert events.contenders(without, "shd") == names[:-3]


def test_our_best_is_compared_with_the_compiled_loop() -> None:
    ratios = {DENSE: 1.0, EVENTS: 0.5, DENSE + GRAPH: 4.0, LAZY: 9.0, LOOP: 0.1, LOOP + GRAPH: 0.8}
    rows = [{"case": "shd", "rate": 0.02, "times_dense": ratios}]
    (bar,) = events.bars(rows, torch.device("cuda"))
    assert (bar["measured"], bar["bar"], bar["met"]) == (40.0, 30.0, True)


def test_a_gradient_that_is_slightly_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(SMALL, 0.1, CPU)
    (contender,) = work.contenders([EVENTS])
    finished = event_numba.Gradients.finished

    def wrong(self: event_numba.Gradients, sums: np.ndarray) -> object:
        rows, weight, bias, values = finished(self, sums)
        weight[0] *= 1.01
        return rows, weight, bias, values

    monkeypatch.setattr(event_numba.Gradients, "finished", wrong)
    with pytest.raises(AssertionError, match="gradient of weights differs by"):
        events.verify(work, contender, contender.run())


def test_spikes_that_are_slightly_wrong() -> None:
    work = Work(SMALL, 0.1, CPU)
    (contender,) = work.contenders([EVENTS])
    network = work.networks[EVENTS]
    network.layers[0].neuron.threshold = 0.999  # type: ignore[union-attr, assignment]
    with pytest.raises(AssertionError, match="a spike differs"):
        events.verify(work, contender, contender.run())


def test_a_step_that_is_another() -> None:
    work = Work(SMALL, 0.1, CPU)
    (contender,) = work.contenders([EVENTS])
    logits, grads = contender.run()
    with pytest.raises(AssertionError, match="the step differs"):
        events.verify(work, contender, (logits + 1, grads))


def test_a_streaming_step_that_is_wrong() -> None:
    streaming = event_streaming.Streaming(SMALL, 0.1, CPU)
    (y, potentials), contender = streaming.on_events(), Contender("events")
    assert 0 < streaming.rate < 0.5
    streaming.verify(contender, (y, potentials))
    with pytest.raises(AssertionError, match="outputs differ"):
        streaming.verify(contender, (y + 1, potentials))
    potentials[0] = potentials[0] * 1.001
    with pytest.raises(AssertionError, match="a potential differs"):
        streaming.verify(contender, (y, potentials))


def test_the_errors_of_a_step_are_told() -> None:
    found = event_check.Found(sites=1000, flips=3, margin=1e-7)
    with pytest.raises(AssertionError, match="3 of 1000 spikes differ"):
        found.judge()
