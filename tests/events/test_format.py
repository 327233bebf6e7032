"""Conversions between events, dense spikes, marks and bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spikefuse.events.format import Events
from spikefuse.events.lists import FIRED, NEAR


def marks(width: int, rate: float, seed: int = 0) -> torch.Tensor:
    """Marks `[5, 3, W]`, with a row in which everything fires."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(5, 3, width, generator=generator)
    found = (drawn < rate) * FIRED + ((drawn >= rate) & (drawn < 2 * rate)) * NEAR
    found[2, 1] = FIRED
    return found


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 257])
@pytest.mark.parametrize("rate", [0.0, 0.02, 0.6])
def test_from_marks_and_back(width: int, rate: float) -> None:
    x = marks(width, rate)
    events = Events.from_marks(x)
    assert torch.equal(events.to_dense(), (x == FIRED).float())
    assert events.num_fired == (x == FIRED).sum()
    for r, row in enumerate(x.reshape(15, width)):
        fired, near = (torch.nonzero(row == kind).flatten().int() for kind in (FIRED, NEAR))
        entries = events.indices[events.offsets[r] : events.offsets[r + 1]]
        assert torch.equal(entries, torch.cat([fired, near]))
        assert events.fired[r] == len(fired)
    assert torch.equal(Events.from_dense(x == FIRED).to_dense(), events.to_dense())


def test_truncate() -> None:
    events = Events.from_marks(marks(50, 0.1))
    few = events.truncate(3)
    assert int(few.offsets.diff().max()) == 3
    assert few.dropped == events.num_fired - few.num_fired > 0
    assert torch.equal(few.to_dense(), events.to_dense() * (events.to_dense().cumsum(2) <= 3))
    assert events.truncate(50) is events


def test_a_flattened_sensor() -> None:
    x = (torch.rand(4, 2, 2, 6, 6) < 0.2).float()
    assert torch.equal(Events.from_dense(x).to_dense(), x.flatten(2))


@pytest.mark.parametrize("width", [1, 8, 33, 257])
def test_from_bits(width: int) -> None:
    x = marks(width, 0.3) == FIRED
    packed = torch.from_numpy(np.packbits(x.numpy(), axis=2, bitorder="little"))
    assert torch.equal(Events.from_bits(packed, width).to_dense(), x.float())
    assert Events.from_bits(packed[:, :0], width).shape == (5, 0, width)


def test_wrong_bits() -> None:
    packed = torch.zeros(2, 3, 2, dtype=torch.uint8)
    packed[1, 2, 1] = 1 << 3
    assert Events.from_bits(packed, 12).num_fired == 1
    with pytest.raises(ValueError, match="a bit beyond the 11 sites is 1"):
        Events.from_bits(packed, 11)
    for wrong, width in ((packed, 17), (packed, 8), (packed[0], 12), (packed.int(), 12)):
        with pytest.raises(ValueError, match=r"expected uint8 \[T, B, \d\] for \d+ sites"):
            Events.from_bits(wrong, width)


def test_wrong_spikes() -> None:
    with pytest.raises(ValueError, match="other than 0 and 1"):
        Events.from_dense(torch.tensor([[[0.0, 2.0]]]))
    with pytest.raises(ValueError, match=r"shape \[3\]: expected \[T, B, ...\]"):
        Events.from_dense(torch.zeros(3))
