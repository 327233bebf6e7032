"""The choice between lists and dense products, and its report by `explain`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.events import choice
from spikefuse.events.choice import CPU_CROSSOVER, choose
from spikefuse.nn import EventLinear, Events


def events(rate: float) -> Events:
    torch.manual_seed(0)
    return Events.from_dense((torch.rand(6, 4, 200) < rate).float())


@pytest.mark.parametrize(("factor", "impl"), [(0.5, "numba"), (1.5, "dense")])
def test_on_a_cpu_by_activity(factor: float, impl: str) -> None:
    x = events(factor * CPU_CROSSOVER)
    layer = EventLinear(200, 5)
    layer(x)
    assert layer.activity.choice.impl == impl


@pytest.mark.parametrize("winner", ["triton", "dense"])
def test_on_a_gpu_by_the_clock(winner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def milliseconds(run, impl, x):
        asked.append(impl)
        return 1.0 if impl == winner else 2.0

    x, denser = events(0.05), events(0.2)
    monkeypatch.setattr(choice, "_milliseconds", milliseconds)
    monkeypatch.setattr(choice, "_measured", {})
    monkeypatch.setattr(Events, "device", torch.device("cuda"))
    monkeypatch.setattr(Events, "is_fired", lambda self: torch.zeros(3))
    for _ in range(2):
        chosen = choose(x, 7, lambda impl, x: None)
        assert chosen.impl == winner
    assert asked == ["triton", "dense"]
    assert f"{winner} 1 ms" in chosen.reason
    choose(denser, 7, lambda impl, x: None)
    assert len(asked) == 4


@pytest.mark.parametrize("frozen", [False, True])
def test_a_trial_leaves_no_gradients(frozen: bool) -> None:
    layer, x = EventLinear(200, 5), events(0.1)
    layer.weight.requires_grad_(not frozen)
    x = replace(x, values=x.is_fired().requires_grad_())
    for impl in ("numba", "dense"):
        layer._try(impl, x)
    assert layer.weight.grad is None
    assert x.values.grad is None


@pytest.mark.parametrize("impl", ["auto", "dense"])
def test_explain(impl: str) -> None:
    surrogate = sf.surrogate.FastSigmoid(cutoff=-0.1)
    neuron = sf.LIF(detach_reset=True, surrogate=surrogate)
    layers = EventLinear(200, 20, neuron, impl=impl), EventLinear(20, 5, capacity=0.05)
    nn.init.normal_(layers[0].weight)
    found = sf.explain(sf.Temporal(nn.Sequential(*layers)), events(0.1))
    assert found.layers == found.not_called == ()
    lines = str(found).splitlines()
    how = "numba (10." if impl == "auto" else "dense (requested)"
    assert lines[0].startswith(f"net.0: EventLinear, 200 to 20, on {how}")
    assert lines[0].endswith(" 0 dropped")
    assert not lines[1].endswith(" 0 dropped")
    assert "0 other modules are ordinary PyTorch" in lines
    assert {layer.name: layer.now > 0 for layer in found.saved} == {"net.0": True, "net.1": True}
    # Eager PyTorch has no equivalent of these layers.
    assert [layer.eager for layer in found.saved] == [None, None]
    header = next(i for i, line in enumerate(lines) if line.endswith("by eager PyTorch"))
    assert [line.split()[-1] for line in lines[header + 1 : header + 4]] == ["–"] * 3
