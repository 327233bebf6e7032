"""Every model of spikefuse.neurons is a public, documented module."""

from __future__ import annotations

from pathlib import Path

import pytest

import spikefuse as sf
from spikefuse import neurons
from spikefuse.neurons import Definition

DOCS = Path(__file__).resolve().parents[2] / "docs" / "neurons.md"
MODELS = [
    name
    for name in neurons.__all__
    if isinstance(getattr(neurons, name), type)
    and issubclass(getattr(neurons, name), Definition)
    and name != "Definition"
]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_public(name: str) -> None:
    module, model = getattr(sf, name), getattr(neurons, name)
    assert name in sf.__all__
    assert module.__mro__[1:3] == (sf.Neuron, model)
    assert module.__doc__ == model.__doc__
    assert set(module.states) == set(model.states) != set()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_documented(name: str) -> None:
    assert "Source: " in getattr(neurons, name).__doc__
    assert f"\n### {name}\n" in DOCS.read_text()
