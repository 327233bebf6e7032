"""Conversions between events, dense spikes, marks and bits."""

from __future__ import annotations

import dataclasses

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


# Two rows of 6 sites: sites 1, 4 fired and 0 is a candidate; 5 fired and 2, 3 are candidates.
LISTS: dict[str, list[float]] = {
    "offsets": [0, 3, 6],
    "fired": [2, 1],
    "indices": [1, 4, 0, 5, 2, 3],
    "values": [1, 1, 0, 1, 0, 0],
}
DTYPES = {
    "offsets": torch.int64,
    "fired": torch.int32,
    "indices": torch.int32,
    "values": torch.float32,
}


def make_events(device: str, shape: tuple[int, ...] = (1, 2, 6), **changes: list[float]) -> Events:
    lists = (LISTS | changes).items()
    tensors = {name: torch.tensor(x, dtype=DTYPES[name], device=device) for name, x in lists}
    return Events(shape, **tensors)


def test_lists_are_accepted(device: str) -> None:
    events = make_events(device)
    assert events.to_dense().tolist() == [[[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]]
    rows = {"offsets": [0, 0, 0], "fired": [0, 0], "indices": [], "values": []}
    assert make_events(device, **rows).num_fired == 0
    assert make_events(device, (0, 2, 6), **rows | {"offsets": [0], "fired": []}).num_rows == 0
    for events in (Events.from_marks(marks(33, 0.2)), Events.from_marks(marks(1, 0.0))):
        lists = events.offsets, events.fired, events.indices, events.is_fired()
        assert torch.equal(Events(events.shape, *lists).to_dense(), events.to_dense())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": [1, 6, 0, 5, 2, 3]}, "indices are below 0 or not below 6"),
        ({"indices": [1, 2**31 - 1, 0, 5, 2, 3]}, "indices are below 0 or not below 6"),
        ({"indices": [1, 4, -1, 5, 2, 3]}, "indices are below 0 or not below 6"),
        ({"indices": [4, 1, 0, 5, 2, 3]}, "not in ascending order"),
        ({"indices": [1, 1, 0, 5, 2, 3]}, "not in ascending order"),
        ({"indices": [1, 4, 0, 5, 3, 2]}, "not in ascending order"),
        ({"indices": [1, 4, 1, 5, 2, 3]}, "a site is a spike and a candidate"),
        ({"offsets": [1, 3, 6]}, "offsets don't begin with 0"),
        ({"offsets": [0, 3, 2**40]}, "offsets don't end with 6, the number of indices"),
        ({"offsets": [0, 7, 6]}, "offsets decrease"),
        ({"offsets": [0, -(2**40), 6]}, "offsets decrease"),
        ({"offsets": [0, 6]}, r"offsets has shape \[2\] .*: expected contiguous \[3\]"),
        ({"fired": [4, 1]}, "fired is below 0 or above"),
        ({"fired": [2, -1]}, "fired is below 0 or above"),
        ({"fired": [2]}, r"fired has shape \[1\]"),
        ({"values": [1, 1, 1, 1, 0, 0]}, "values are not 1 for spikes and 0"),
        ({"values": [1, 1, 0, 1, 0, float("nan")]}, "values are not 1 for spikes and 0"),
        ({"values": [1, 1]}, r"values has shape \[2\]"),
        ({"shape": (2, 2, 6)}, r"offsets has shape \[3\] .* for shape \(2, 2, 6\)"),
        ({"shape": (2, 6)}, r"shape is \(2, 6\): expected \(T, B, W\)"),
        ({"shape": (-1, -2, 6)}, r"shape is \(-1, -2, 6\)"),
    ],
)
def test_wrong_lists_are_refused(device: str, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_events(device, **changes)


def test_wrong_tensors_are_refused() -> None:
    events = make_events("cpu")
    fields = {"shape": events.shape, **events.lists._asdict()}
    with pytest.raises(TypeError, match=r"indices is torch.int64: expected a tensor of torch.int3"):
        Events(**fields | {"indices": events.indices.long()})
    with pytest.raises(TypeError, match="fired is list"):
        Events(**fields | {"fired": [2, 1]})
    with pytest.raises(ValueError, match=r"shape \[6\] and strides \[2\]: expected contiguous"):
        Events(**fields | {"indices": events.indices.repeat_interleave(2)[::2]})
    with pytest.raises(ValueError, match="fired is on meta, but indices is on cpu"):
        Events(**fields | {"fired": events.fired.to("meta")})
    with pytest.raises(ValueError, match="not below 6"):  # the copy is checked, too
        dataclasses.replace(events, indices=events.indices + 5)
