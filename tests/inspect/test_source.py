"""`sf.source` returns the kernels that a call runs."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.scan import cache


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_source_is_a_module_with_both_kernels(backend: str) -> None:
    tree = ast.parse(sf.source(sf.LIF(), backend))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"forward", "backward"} <= functions


def test_a_call_loads_this_source(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fresh(sf.Neuron):
        v = sf.State()

        def step(self, x, v):
            return x + 0.625 * v, (x,)

    loaded, load = [], cache.load
    monkeypatch.setattr(cache, "load", lambda *a: loaded.append(a[0]) or load(*a))
    Fresh()(torch.rand(3, 2, 4, requires_grad=True)).sum().backward()
    forward, backward = loaded
    header, kernel = backward.split("@kernel")
    assert sf.source(Fresh()) == f"{forward}\n\n\n@kernel{kernel}"
    assert forward.startswith(header)
    assert "0.625" in forward


def test_values_of_parameters_are_not_in_the_source() -> None:
    assert sf.source(sf.LIF(decay=0.625)) == sf.source(sf.LIF(decay=0.25))
    assert sf.source(sf.LIF(reset="soft")) != sf.source(sf.LIF())
    learned = sf.source(sf.LIF(decay=nn.Parameter(torch.tensor(0.5))))
    assert learned != sf.source(sf.LIF(decay=0.5))  # its backward gives the gradient


def test_errors_name_the_value() -> None:
    with pytest.raises(TypeError, match="neuron is a Linear: expected"):
        sf.source(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="backend is 'cuda': expected one of numba, triton"):
        sf.source(sf.LIF(), "cuda")
