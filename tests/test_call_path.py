"""The length of the path that one warm call takes through the package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import spikefuse as sf
from tests.call_path import block, counts

# Python functions of the package, comprehensions included, that one call may pass.
FORWARD, BACKWARD, BLOCK_FORWARD, BLOCK_BACKWARD = 36, 17, 60, 40


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Kernels on several threads first look whether the cores are free."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_neuron() -> None:
    forward, backward = counts(sf.Temporal(nn.Sequential(nn.Linear(16, 16), sf.LIF())))
    assert 0 < forward <= FORWARD
    assert 0 < backward <= BACKWARD


def test_a_block() -> None:
    forward, backward = counts(block())
    assert 0 < forward <= BLOCK_FORWARD
    assert 0 < backward <= BLOCK_BACKWARD
