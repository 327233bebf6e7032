"""Count the functions of the package that a warm call passes."""

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
    """The functions that a warm call of a network of 16 inputs passes, forward and backward."""
    x = torch.rand(4, 2, 16)
    for _ in range(3):
        net(x).sum().backward()
    y, forward = passed(lambda: net(x))
    loss = y.sum()
    _, backward = passed(loss.backward)
    return len(forward), len(backward)


def block() -> sf.Temporal:
    """A network whose norm and neuron are fused."""
    layers = nn.Linear(16, 16), nn.BatchNorm1d(16), sf.LIF()
    return sf.fuse(sf.Temporal(nn.Sequential(*layers)))
