"""Event-to-frame transforms, and labelled frames as packed bytes.

Shape legend: T time steps, P polarities, H rows, W columns or units, B examples, E events, V values
of a frame, S = ceil(V bits / 8) bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.data.files import DataError
from spikefuse.data.images import Examples, InMemory, Series, check_lengths
from spikefuse.data.recordings import Recording
from spikefuse.data.sound import Sound

BITS = (1, 2, 4, 8)
SLICINGS = ("number", "events", "time", "duration")
CONTENTS = ("counts", "time_surface", "voxel_grid")
# Of a value of 1 in a voxel grid: 255 stands for 31.9 events.
VOXEL_LEVELS = 8


def whole_number(name: str, value: Any) -> int:
    """Return a whole number, also one given as a float, or raise DataError."""
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if not is_number or isinstance(value, bool) or value % 1 != 0:  # inf and NaN included
        raise DataError(f"{name} is {value!r}: expected a whole number")
    return int(value)


@dataclass(frozen=True)
class Slicing:
    """How a recording is cut into frames.

    Example::

        recording = sf.data.Recording([3, 5], [0, 7], [1, 0], [10, 7_500], size=(2, 34, 34))
        slicing = sf.data.Slicing("duration", num_steps=20, dt=5_000)  # microseconds
        frames = sf.data.to_frames(recording, slicing)  # the events are in frames 0 and 1

    Args:
        by: "number": T frames of E // T events each, the remainder in the last; of E < T events,
            one each in the first E frames. This is SBE, stacking based on the number of events
            (Wang et al., "Event-based High Dynamic Range Image and Very High Frame Rate Video
            Generation using Conditional Generative Adversarial Networks", CVPR 2019), as in
            SpikingJelly.
            "events": slices of `count` events; events after the last slice are dropped, missing
            slices are empty.
            "time": T equal slices of the time from the first event to the last one, which is in
            the last slice. An event between two slices is in the later one.
            "duration": slices of `dt` from t = 0, the start of the recording; events after the
            last slice are dropped, missing slices are empty.
        num_steps: T.
        dt: microseconds per slice, for "duration" only.
        bits: bits per value, 1, 2, 4 or 8; values saturate at `2**bits - 1`.
        count: events per slice, for "events" only.
        content: "counts"; "time_surface", with levels of `time_surface` from 0 to `2**bits - 1`; or
            "voxel_grid", with 8 levels per event of `voxel_grid`, and by "time".

    Raises:
        DataError: a value is invalid.
    """

    by: str = "number"
    num_steps: int = 16
    dt: int | None = None
    bits: int = 8
    count: int | None = None
    content: str = "counts"

    def __post_init__(self) -> None:
        if self.by not in SLICINGS:
            raise DataError(f"by is {self.by!r}: expected one of {', '.join(SLICINGS)}")
        given = [name for name in ("dt", "count") if getattr(self, name) is not None]
        for name in ("num_steps", "bits", *given):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.num_steps < 1:
            raise DataError(f"num_steps is {self.num_steps}: expected at least 1")
        if self.bits not in BITS:
            raise DataError(f"bits is {self.bits}: expected 1, 2, 4 or 8")
        for name, unit, by in (("dt", "microseconds", "duration"), ("count", "events", "events")):
            value = getattr(self, name)
            if (value is None) == (self.by == by) or (value is not None and value <= 0):
                raise DataError(
                    f"{name} is {value}: expected {unit} with by={by!r}, otherwise None"
                )
        if self.content not in CONTENTS:
            raise DataError(f"content is {self.content!r}: expected one of {', '.join(CONTENTS)}")
        if self.content == "voxel_grid" and self.by != "time":
            raise DataError(f"by is {self.by!r}: expected 'time' for a voxel grid")

    @property
    def scale(self) -> float:
        """The value of one level."""
        levels = {"time_surface": 2**self.bits - 1, "voxel_grid": VOXEL_LEVELS}
        return 1 / levels.get(self.content, 1)


def to_frames(events: Recording | Sound, slicing: Slicing) -> np.ndarray:
    """Count the events of a recording per slice and site of the sensor, or as `content` says.

    Of a sound, a slice is a frame of its log-mel spectrogram, which begins with the slice.

    Example::

        recording = sf.data.Recording([3, 5], [0, 7], [1, 0], [10, 250], size=(2, 34, 34))
        frames = sf.data.to_frames(recording, sf.data.Slicing("number", 2))  # [2, 2, 34, 34]

    Args:
        events: the recording.
        slicing: how time is cut; of a sound, by "duration".

    Returns:
        uint8 `[T, P, H, W]`, or `[T, W]` for audio; counts saturate at `2**bits - 1`.

    Raises:
        DataError: a sound is cut by events, or all events lie after the slices of "duration".
    """
    _check(events, slicing, Recording | Sound)
    if isinstance(events, Sound):
        if slicing.content != "counts":
            raise DataError(f"content is {slicing.content!r}, but sounds have no events")
        if slicing.dt is None:
            raise DataError(f"by is {slicing.by!r}, but sounds have no events: expected 'duration'")
        return events.levels(slicing.num_steps, slicing.dt, slicing.bits)
    if slicing.content == "counts":
        values = _sums(events, slicing.num_steps, [(_steps(events, slicing), None)])
    elif slicing.content == "time_surface":
        values = np.rint(time_surface(events, slicing) / slicing.scale)
    else:
        values = np.rint(voxel_grid(events, slicing.num_steps) / slicing.scale)
    return np.minimum(values, 2**slicing.bits - 1).astype(np.uint8)


def time_surface(events: Recording, slicing: Slicing, tau: int = 50_000) -> np.ndarray:
    """Return how recent the last event at each site is, at the end of each slice.

    With the time T of the last event at a site so far and the time e of the last event in a slice,
    of this and the ones before, the value is exp(-(e - T) / tau), and 0 without an event.

    Example::

        recording = sf.data.Recording([3, 5], [0, 7], [1, 0], [10, 250], size=(2, 34, 34))
        surface = sf.data.time_surface(recording, sf.data.Slicing("time", 4), tau=1_000)

    Source: Lagorce, Orchard, Galluppi, Shi, Benosman, "HOTS: A Hierarchy of Event-Based
    Time-Surfaces for Pattern Recognition", IEEE TPAMI 39(7), 2017.

    Args:
        events: the recording.
        slicing: how time is cut.
        tau: time constant, in microseconds.

    Returns:
        float32 `[T, P, H, W]`.
    """
    _check(events, slicing)
    steps, sites, t = _steps(events, slicing), events.sites, events.t.astype(np.float64)
    ends = np.searchsorted(steps, np.arange(slicing.num_steps), "right")
    last = np.full(math.prod(events.size), -np.inf)
    surfaces = np.zeros((slicing.num_steps, *last.shape), np.float32)
    start = 0
    for surface, end in zip(surfaces, ends, strict=True):
        last[sites[start:end]] = t[start:end]  # the last of several at a site stays
        if end:
            surface[:] = np.exp((last - t[end - 1]) / tau)
        start = end
    return surfaces.reshape(-1, *events.size)


def voxel_grid(events: Recording, num_steps: int) -> np.ndarray:
    """Return the events of a recording, each shared by the two nearest of T points in time.

    With the first and last time t_0 and t_E, an event at t lies at u = (T - 1) (t - t_0) /
    (t_E - t_0), and adds max(0, 1 - |k - u|) to step k. Polarities are apart.

    Example::

        recording = sf.data.Recording([3, 5], [0, 7], [1, 0], [10, 250], size=(2, 34, 34))
        grid = sf.data.voxel_grid(recording, num_steps=5)  # [5, 2, 34, 34]

    Source: Zhu, Yuan, Chaney, Daniilidis, "Unsupervised Event-based Learning of Optical Flow,
    Depth, and Egomotion", CVPR 2019.

    Args:
        events: the recording.
        num_steps: T.

    Returns:
        float32 `[T, P, H, W]`.
    """
    _check(events)
    num_steps = Slicing("time", num_steps).num_steps  # raises its errors
    t = events.t.astype(np.float64)
    place = (num_steps - 1) * (t - t[:1]) / max(float(np.ptp(t)) if len(t) else 0.0, 1.0)
    before = place.astype(np.int64)
    share = place - before
    return _sums(events, num_steps, [(before, 1 - share), (before + 1, share)]).astype(np.float32)


def _check(events: Any, slicing: Any = Slicing(), kinds: Any = Recording) -> None:
    if not isinstance(events, kinds):
        raise TypeError(f"events is a {type(events).__name__}: expected a Recording")
    if not isinstance(slicing, Slicing):
        raise TypeError(f"slicing is {slicing!r}: expected one such as Slicing('number', 10)")


def _sums(
    events: Recording, num_steps: int, parts: list[tuple[np.ndarray, np.ndarray | None]]
) -> np.ndarray:
    """Sum the weights of events, or count them, by step and site; steps from T are dropped."""
    values = math.prod(events.size)
    total = np.zeros(num_steps * values)
    for steps, weights in parts:
        places, inside = steps * values + events.sites, steps < num_steps
        if not inside.all():
            places, weights = places[inside], None if weights is None else weights[inside]
        total = total + np.bincount(places, weights, len(total))
    return total.reshape(num_steps, *events.size)


def num_slices(events: Recording, dt: int) -> int:
    """Return the number of slices of `dt` microseconds in a recording, ceil((last t + 1) / dt)."""
    return int(events.t[-1]) // dt + 1 if len(events) else 0


def _steps(events: Recording, slicing: Slicing) -> np.ndarray:
    """Return the time step of every event, int64 `[E]`; events at T or more are dropped."""
    num, t = slicing.num_steps, events.t.astype(np.int64, copy=False)
    if not len(t):
        return np.zeros(0, np.int64)
    if slicing.by == "number":
        return np.minimum(np.arange(len(t)) // max(len(t) // num, 1), num - 1)
    if slicing.by == "time":
        return np.minimum((t - t[0]) * num // max(t[-1] - t[0], 1), num - 1)
    if slicing.count is not None:
        return np.arange(len(t)) // slicing.count
    assert slicing.dt is not None
    if t[0] >= num * slicing.dt:
        raise DataError(
            f"the first event has t = {t[0]}, after all {num} slices of {slicing.dt} microseconds: "
            "count t from the start of the recording, for example t - t[0]"
        )
    return t // slicing.dt


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last dimension, `8 / bits` values per byte, the first in the lowest bits.

    Args:
        values: uint8 `[..., V]`, each at most `2**bits - 1`.
        bits: bits per value: 1, 2, 4 or 8.

    Returns:
        uint8 `[..., S]`.
    """
    if bits == 8:
        return values
    planes = (values[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(planes.reshape(*values.shape[:-1], -1), axis=-1, bitorder="little")


def unpack(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Invert `pack`, on the device of `packed`.

    Args:
        packed: uint8 `[..., S]`.
        bits: bits per value.
        shape: shape of the V values.

    Returns:
        uint8 `[..., *shape]`.
    """
    if bits < 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        packed = ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
    count = int(np.prod(shape))
    return packed[..., :count].unflatten(-1, shape)


@dataclass(frozen=True)
class Frames(InMemory):
    """Labelled sequences of frames, in packed form.

    Example::

        counts = torch.randint(4, (100, 10, 2 * 34 * 34), dtype=torch.uint8)
        frames = sf.data.Frames(counts, torch.randint(10, (100,)), (2, 34, 34), bits=8)
        x = sf.data.expand(frames[:8])  # float32 [10, 8, 2, 34, 34]

    Args:
        packed: uint8 `[B, T, S]`, in memory or memory-mapped.
        labels: int64 `[B]`.
        shape: of one frame: (P, H, W), or (W,) for audio.
        bits: bits per count: 1, 2, 4 or 8. Of 8 bits, `packed` is `counts.flatten(2)`.

    Raises:
        ValueError: `packed` does not hold frames of this shape, or not as many as labels.
    """

    packed: Tensor
    labels: Tensor
    shape: tuple[int, ...]
    bits: int

    def __post_init__(self) -> None:
        size = -(-math.prod(self.shape) * self.bits // 8)
        packed = self.packed
        if packed.dtype != torch.uint8 or packed.ndim != 3 or packed.shape[2] != size:
            raise ValueError(
                f"packed is {packed.dtype} {list(packed.shape)}: expected torch.uint8 "
                f"[B, T, {size}], since a frame of shape {tuple(self.shape)} has {size} bytes at "
                f"{self.bits} bits per count (pack frames with spikefuse.data.frames.pack)"
            )

        check_lengths("packed", packed, self.labels)

    @property
    def num_steps(self) -> int:
        return self.packed.shape[1]

    @property
    def pixels(self) -> Tensor:
        """Counts, uint8 `[B, T, *shape]`, unpacked on the device of `packed`."""
        return unpack(self.packed, self.bits, self.shape)


def expand(batch: Examples, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert a batch to a network's input, on the device of the batch.

    Example::

        train, _ = sf.data.load("digits")
        x = sf.data.expand(train[:32])  # [32, 1, 8, 8], from 0 to 1

    Args:
        batch: `Frames` or `Series` of B examples, or `Images`.
        dtype: dtype of the result.

    Returns:
        Of `Frames` the counts, contiguous `[T, B, *shape]`; of `Series` the values, `[T, B, ...]`;
        of `Images` pixels / 255, `[B, C, H, W]`, for `spikefuse.nn.encode`.
    """
    if isinstance(batch, Series):
        return batch.pixels.transpose(0, 1).to(dtype)
    if isinstance(batch, Tensor):
        raise TypeError("batch is a Tensor: expected examples, such as sf.data.load returns")
    if not isinstance(batch, Frames):
        return batch.pixels.to(dtype) / 255
    return unpack(batch.packed.transpose(0, 1).contiguous(), batch.bits, batch.shape).to(dtype)
