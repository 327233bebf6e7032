"""Every model is public, documented, and among the neurons that tests of kernels run."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import spikefuse as sf
from spikefuse import neurons
from tests.definitions import DEFINITIONS, make

DOCS = Path(__file__).resolve().parents[2] / "docs"
MODELS = {
    name: kind
    for name, kind in vars(neurons).items()
    if inspect.isclass(kind) and issubclass(kind, sf.Neuron) and kind is not sf.Neuron
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_public(name: str) -> None:
    assert getattr(sf, name) is MODELS[name]
    assert name in sf.__all__
    assert name in neurons.__all__


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_documented(name: str) -> None:
    assert "Source: " in (MODELS[name].__doc__ or "")
    assert f"\n### {name}\n" in (DOCS / "neurons.md").read_text()
    assert f"\n::: spikefuse.{name}\n" in (DOCS / "reference" / "neurons.md").read_text()


def test_kernels_of_every_model_are_tested() -> None:
    made = [type(make(name, "hard", 4, "cpu")) for name in DEFINITIONS]
    assert set(MODELS.values()) <= {kind for own in made for kind in own.__mro__}
