"""The length of the path that one warm call takes through the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import spikefuse as sf

PACKAGE = Path(sf.__file__).parent
# Python functions of the package, comprehensions included, that one call may pass.
FORWARD, BACKWARD, BLOCK_FORWARD, BLOCK_BACKWARD = 40, 19, 62, 46


def passed(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result of `run`, and the functions of the package that it has called."""
    names: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            names.append(f"{path.relative_to(PACKAGE)}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        return run(), names
    finally:
        sys.setprofile(None)


def counts(net: nn.Module) -> tuple[int, int]:
    x = torch.rand(4, 2, 16)
    for _ in range(3):
        net(x).sum().backward()
    y, forward = passed(lambda: net(x))
    loss = y.sum()
    _, backward = passed(loss.backward)
    return len(forward), len(backward)


def test_a_neuron() -> None:
    forward, backward = counts(sf.Temporal(nn.Sequential(nn.Linear(16, 16), sf.LIF())))
    assert 0 < forward <= FORWARD
    assert 0 < backward <= BACKWARD


def block() -> sf.Temporal:
    layers = nn.Linear(16, 16), nn.BatchNorm1d(16), sf.LIF()
    return sf.fuse(sf.Temporal(nn.Sequential(*layers)))


def test_a_block() -> None:
    forward, backward = counts(block())
    assert 0 < forward <= BLOCK_FORWARD
    assert 0 < backward <= BLOCK_BACKWARD
