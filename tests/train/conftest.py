"""Fixtures that run the command."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from spikefuse import models
from spikefuse.train import plots
from spikefuse.train.cli import main
from tests.train.programs import plain

Spikefuse = Callable[..., int]


@pytest.fixture
def drawn() -> None:
    """Draw the figures of runs."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save figures as empty files, since to draw them takes longer than a small run, except in
    tests with the fixture `drawn`."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(plots, "_save", lambda figure, path: path.touch())


@pytest.fixture
def spikefuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spikefuse:
    """Call the command in an empty folder and return its exit code, even if argparse exits."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> int:
        try:
            return main([str(a) for a in arguments])
        except SystemExit as stop:
            return int(stop.code or 0)

    return call


@pytest.fixture
def alone(spikefuse: Spikefuse, monkeypatch: pytest.MonkeyPatch) -> Spikefuse:
    """Run programs/plain.py in this process."""
    monkeypatch.setitem(models.MODELS, "plain", plain.plain)
    return spikefuse


@pytest.fixture(scope="session")
def small() -> list[str]:
    """Options of a run with 2 epochs of 10 steps. Fusing would take each run seconds."""
    return shlex.split("--batch-size 128 --num-steps 2 --epochs 2 --device cpu --no-fuse")
