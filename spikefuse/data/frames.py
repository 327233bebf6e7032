"""From events to frames, and labelled frames as packed bytes.

Shape legend: T time steps, P polarities, H rows, W columns or units, B examples, E events, S bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spikefuse.data.errors import DataError
from spikefuse.data.events import Events
from spikefuse.data.images import Images, Index
from spikefuse.data.packing import BITS, pack, unpack

WAYS = ("number", "time", "duration")


@dataclass(frozen=True)
class Slicing:
    """How a recording is cut into frames.

    Args:
        by: "number": T frames of E // T events each, the remainder in the last, which the papers
            call SBE, stacking based on the number of events (Wang et al., "Event-based High
            Dynamic Range Image and Very High Frame Rate Video Generation using Conditional
            Generative Adversarial Networks", CVPR 2019), as SpikingJelly implements it.
            "time": T equal slices of the time from the first to the last event.
            "duration": slices of `dt` from the start of the recording; events after the last
            slice are dropped, missing slices are empty.
        num_steps: T.
        dt: microseconds of a slice, for "duration" only.
        bits: a count is kept in that many bits, 1, 2, 4 or 8, and saturates at `2**bits - 1`.

    Raises:
        DataError: a value is none of these.
    """

    by: str = "number"
    num_steps: int = 16
    dt: int | None = None
    bits: int = 8

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise DataError(f"by is {self.by!r}: expected one of {', '.join(WAYS)}")
        if self.num_steps < 1:
            raise DataError(f"num_steps is {self.num_steps}: expected at least 1")
        if self.bits not in BITS:
            raise DataError(f"bits is {self.bits}: expected 1, 2, 4 or 8")
        fits = self.dt is None if self.by != "duration" else self.dt is not None and self.dt > 0
        if not fits:
            raise DataError(
                f"dt is {self.dt}: expected microseconds with by='duration', None with the others"
            )


def to_frames(events: Events, slicing: Slicing) -> np.ndarray:
    """Count the events at every site of the sensor in every slice of a recording.

    Returns:
        uint8 `[T, P, H, W]`, or `[T, W]` for audio; counts saturate at `2**bits - 1`.
    """
    steps = _steps(events, slicing)
    kept = steps < slicing.num_steps
    values = int(np.prod(events.size))
    places = steps * values + events.sites
    if not kept.all():
        places = places[kept]
    counts = np.bincount(places, minlength=slicing.num_steps * values)
    np.minimum(counts, 2**slicing.bits - 1, out=counts)
    return counts.astype(np.uint8).reshape(slicing.num_steps, *events.size)


def num_slices(events: Events, dt: int) -> int:
    """Slices of `dt` microseconds that hold a whole recording, ceil((last t + 1) / dt)."""
    return int(events.t[-1]) // dt + 1 if len(events) else 0


def _steps(events: Events, slicing: Slicing) -> np.ndarray:
    """int64 `[E]`: the time step of every event; T or more where it is dropped."""
    num, t = slicing.num_steps, events.t
    if not len(t):
        return np.zeros(0, np.int64)
    if slicing.by == "number":
        return np.minimum(np.arange(len(t)) // max(len(t) // num, 1), num - 1)
    if slicing.by == "time":
        return (t - t[0]) * num // (t[-1] - t[0] + 1)
    assert slicing.dt is not None
    return t // slicing.dt


def pack_frames(frames: np.ndarray, bits: int) -> np.ndarray:
    """uint8 `[T, ...]` to uint8 `[T, S]`, every time step on its own."""
    return pack(frames.reshape(len(frames), -1), bits)


@dataclass(frozen=True)
class Frames:
    """Labelled sequences of frames, kept packed.

    Args:
        packed: uint8 `[B, T, S]`, in memory, or on disk and read where it is indexed.
        labels: int64 `[B]`.
        shape: of one frame: (P, H, W), or (W,) for audio.
        bits: of one count.
    """

    packed: Tensor
    labels: Tensor
    shape: tuple[int, ...]
    bits: int

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Index) -> Frames:
        return Frames(self.packed[index], self.labels[index], self.shape, self.bits)

    @property
    def num_steps(self) -> int:
        return self.packed.shape[1]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.labels.nbytes

    @property
    def pixels(self) -> Tensor:
        """Counts, uint8 `[B, T, *shape]`, unpacked on the device of `packed`."""
        return unpack(self.packed, self.bits, self.shape)

    def to(self, device: torch.device, non_blocking: bool = False) -> Frames:
        packed = self.packed.to(device, non_blocking=non_blocking)
        labels = self.labels.to(device, non_blocking=non_blocking)
        return Frames(packed, labels, self.shape, self.bits)


def expand(batch: Images | Frames, dtype: torch.dtype = torch.float32) -> Tensor:
    """The input of a network from a batch, on the device where the batch lies.

    Args:
        batch: `Frames` of B examples, or `Images`.
        dtype: of the result; counts are whole numbers, which all dtypes here hold exactly.

    Returns:
        `[T, B, *shape]`, contiguous, the counts of `Frames`; `[B, C, H, W]`, pixels / 255, of
        `Images`, to be encoded by `spikefuse.nn.encode`.
    """
    if isinstance(batch, Images):
        return batch.pixels.to(dtype) / 255
    return unpack(batch.packed.transpose(0, 1).contiguous(), batch.bits, batch.shape).to(dtype)
