"""Runs of the command, small enough for every test."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from spikefuse.train.cli import main

Spikefuse = Callable[..., int]


@pytest.fixture
def spikefuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spikefuse:
    """Call the command in an empty folder; its exit code, also where argparse exits."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> int:
        try:
            return main([str(a) for a in arguments])
        except SystemExit as stop:
            return int(stop.code or 0)

    return call


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """So small runs gain nothing from threads, and lose much to other processes' threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small() -> list[str]:
    """Options of a run of 2 epochs of 10 steps."""
    return shlex.split("--batch-size 128 --num-steps 2 --epochs 2 --device cpu")
