"""Frames against a loop over the events."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spikefuse.data import (
    DataError,
    Frames,
    Images,
    Slicing,
    expand,
    time_surface,
    to_frames,
    voxel_grid,
)
from spikefuse.data.frames import BITS, num_slices, pack, unpack
from spikefuse.data.recordings import Recording, make_recording

SIZES = [(2, 5, 7), (1, 3, 3), (11,)]


def random_events(num: int, size: tuple[int, ...], seed: int) -> Recording:
    rng = np.random.default_rng(seed)
    polarities, height, width = size if len(size) == 3 else (1, 1, size[0])
    columns = [rng.integers(0, limit, num) for limit in (width, height, polarities)]
    return make_recording((*columns, np.sort(rng.integers(0, 1000, num))), size, Path("file"))


def slow_frames(events: Recording, slicing: Slicing) -> np.ndarray:
    """The definition, one event at a time, without saturation."""
    num, total = slicing.num_steps, len(events)
    frames = np.zeros((num, *events.size), np.int64)
    for i in range(total):
        t, first, last = (int(events.t[k]) for k in (i, 0, -1))
        if slicing.by == "number":
            share = total // num
            step = min(i // share, num - 1) if share else i
        elif slicing.by == "time":
            # Slice k is [first + k d, first + (k + 1) d) with d the duration over T.
            ends = ((k + 1) * Fraction(last - first, num) for k in range(num - 1))
            step = next((k for k, end in enumerate(ends) if t - first < end), num - 1)
            step = step if last > first else 0
        else:
            step = t // slicing.dt
            if step >= num:
                continue
        site = (events.p[i], events.y[i], events.x[i])[-len(events.size) :]
        frames[(step, *site)] += 1
    return frames


@pytest.mark.parametrize(
    ("t", "num", "steps"),
    [
        ([0, 4, 5, 9, 10], 2, [0, 0, 1, 1, 1]),
        ([7, 10, 13, 16], 3, [0, 1, 2, 2]),
        ([0, 3, 4, 6, 7, 10], 3, [0, 0, 1, 1, 2, 2]),  # between slices at 3.3 and 6.7
        ([0, 10**9 // 3, 10**9 // 3 + 1, 10**9], 3, [0, 0, 1, 2]),
        ([5, 5, 5], 4, [0, 0, 0]),
    ],
)
def test_events_between_slices_of_time_are_in_the_later_one(
    t: list[int], num: int, steps: list[int]
) -> None:
    columns = [np.array(values) for values in (t, *([0] * len(t) for _ in "xyp"))]
    events = Recording(*columns[1:], columns[0], (1, 1, 1))
    counts = to_frames(events, Slicing("time", num)).ravel()
    assert counts.tolist() == [steps.count(k) for k in range(num)]


@st.composite
def slicings(draw: st.DrawFn) -> Slicing:
    by = draw(st.sampled_from(["number", "time", "duration"]))
    dt = draw(st.integers(1, 400)) if by == "duration" else None
    return Slicing(by, draw(st.integers(1, 12)), dt, draw(st.sampled_from([1, 2, 4, 8])))


@given(slicings(), st.integers(0, 200), st.sampled_from(SIZES), st.integers(0, 9))
def test_frames_equal_counts_of_a_loop(
    slicing: Slicing, num: int, size: tuple[int, ...], seed: int
) -> None:
    events = random_events(num, size, seed)
    expected = slow_frames(events, slicing)
    if num and not expected.any():
        with pytest.raises(DataError, match="first event has t"):
            to_frames(events, slicing)
        return
    frames = to_frames(events, slicing)
    assert frames.dtype == np.uint8
    np.testing.assert_array_equal(frames, np.minimum(expected, 2**slicing.bits - 1))
    if slicing.by != "duration":
        assert expected.sum() == num
        if expected.max(initial=0) < 2**slicing.bits:
            assert frames.sum() == num


def test_by_number_every_frame_but_the_last_has_the_same_number() -> None:
    events = random_events(103, (2, 5, 7), 0)
    frames = to_frames(events, Slicing("number", 10, bits=8))
    assert frames.sum(axis=(1, 2, 3)).tolist() == [10] * 9 + [13]


def test_by_duration_counts_every_event_with_enough_slices() -> None:
    events = random_events(150, (11,), 1)
    num = num_slices(events, 30)
    assert num == -(-(int(events.t[-1]) + 1) // 30)
    assert to_frames(events, Slicing("duration", num, 30)).sum() == 150
    padded = to_frames(events, Slicing("duration", num + 3, 30))
    assert padded.shape == (num + 3, 11)
    assert not padded[num:].any()
    assert (
        to_frames(events, Slicing("duration", num - 1, 30)).sum()
        == (events.t < 30 * (num - 1)).sum()
    )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"by": "chance"}, "by is 'chance'"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"bits": 3}, "bits is 3"),
        ({"by": "duration"}, "dt is None"),
        ({"by": "duration", "dt": 0}, "dt is 0"),
        ({"dt": 10}, "dt is 10"),
    ],
)
def test_wrong_options_are_named(options: dict, what: str) -> None:
    with pytest.raises(DataError, match=what):
        Slicing(**options)


@pytest.fixture
def batch() -> tuple[Frames, np.ndarray]:
    """Six packed sequences of five frames, and their counts below 16."""
    counts = np.random.default_rng(0).integers(0, 16, (6, 5, 2, 3, 3), np.uint8)
    packed = torch.from_numpy(
        np.stack([pack(frames.reshape(len(frames), -1), 4) for frames in counts])
    )
    return Frames(packed, torch.arange(6), (2, 3, 3), 4), counts


def test_frames_index_like_images(batch: tuple[Frames, np.ndarray]) -> None:
    frames, counts = batch
    assert len(frames) == 6
    assert frames.num_steps == 5
    for index in (slice(2, 5), torch.tensor([4, 1]), torch.arange(6) % 2 == 0):
        part = frames[index]
        assert part.pixels.dtype == torch.uint8
        chosen = index if isinstance(index, slice) else index.numpy()
        np.testing.assert_array_equal(part.pixels.numpy(), counts[chosen])
        assert torch.equal(part.labels, torch.arange(6)[index])


@pytest.mark.parametrize(
    ("packed", "what"),
    [
        (torch.zeros(4, 3, 2, 3, 3, dtype=torch.uint8), r"torch\.uint8 \[4, 3, 2, 3, 3\]"),
        (torch.zeros(4, 3, 18, dtype=torch.uint8), r"torch\.uint8 \[4, 3, 18\]"),
        (torch.zeros(4, 3, 9), r"torch\.float32 \[4, 3, 9\]"),
    ],
)
def test_bytes_that_hold_no_such_frames(packed: torch.Tensor, what: str) -> None:
    """Two polarities of 3 x 3 pixels at 4 bits are 9 bytes."""
    with pytest.raises(ValueError, match=rf"packed is {what}: expected .* \[B, T, 9\]"):
        Frames(packed, torch.arange(4), (2, 3, 3), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_expand_puts_time_first(batch: tuple[Frames, np.ndarray], dtype: torch.dtype) -> None:
    frames, counts = batch
    sequence = expand(frames.to(torch.device("cpu")), dtype)
    assert sequence.dtype == dtype
    assert sequence.is_contiguous()
    np.testing.assert_array_equal(sequence.float().numpy(), counts.swapaxes(0, 1))


def test_expand_scales_images() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1)
    values = expand(Images(pixels, torch.zeros(3, dtype=torch.int64)))
    assert torch.equal(values.flatten(), torch.tensor([0, 51, 255]) / 255)


@given(bits=st.sampled_from(BITS), values=st.integers(1, 40), seed=st.integers(0, 99))
def test_unpack_inverts_pack(bits: int, values: int, seed: int) -> None:
    written = np.random.default_rng(seed).integers(0, 2**bits, (2, 3, values), np.uint8)
    packed = pack(written, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (2, 3, -(-values * bits // 8))
    read = unpack(torch.from_numpy(packed), bits, (values,))
    assert read.dtype == torch.uint8
    np.testing.assert_array_equal(read.numpy(), written)


@pytest.mark.parametrize(("bits", "expected"), [(1, [0b1101]), (2, [0b01000101]), (4, [1, 17])])
def test_the_first_value_is_in_the_lowest_bits(bits: int, expected: list[int]) -> None:
    values = {1: [1, 0, 1, 1], 2: [1, 1, 0, 1], 4: [1, 0, 1, 1]}[bits]
    assert pack(np.array(values, np.uint8), bits).tolist() == expected


def test_unpack_takes_any_layout() -> None:
    packed = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    swapped = unpack(packed.transpose(0, 1), 4, (2, 4))
    assert torch.equal(swapped, unpack(packed, 4, (2, 4)).transpose(0, 1))


@pytest.mark.parametrize("name", ["num_steps", "dt", "bits"])
def test_whole_floats_are_numbers_and_others_are_refused(name: str) -> None:
    options = {"by": "duration", "num_steps": 4, "dt": 8, "bits": 8}
    for whole in (float(options[name]), np.float32(options[name]), np.int64(options[name])):
        slicing = Slicing(**{**options, name: whole})
        assert slicing == Slicing(**options)
        assert type(getattr(slicing, name)) is int
    for wrong in ("3", 2.5, float("nan"), float("inf"), True, [4]):
        with pytest.raises(DataError, match=rf"{name} is .*: expected a whole number"):
            Slicing(**{**options, name: wrong})


def test_arguments_of_other_types_are_refused() -> None:
    recording, slicing = Recording([0], [0], [0], [0], (2, 1, 1)), Slicing("number", 2)
    for function in (to_frames, time_surface):
        with pytest.raises(TypeError, match=r"slicing is 4: expected one such as Slicing\("):
            function(recording, 4)
        with pytest.raises(TypeError, match="events is a ndarray: expected a Recording"):
            function(np.zeros((4, 2)), slicing)
    with pytest.raises(DataError, match="num_steps is 0: expected at least 1"):
        voxel_grid(recording, 0)
    with pytest.raises(TypeError, match="batch is a Tensor: expected examples"):
        expand(torch.zeros(2, 3))


def test_a_clock_that_does_not_begin_with_the_recording() -> None:
    t = np.array([5_000_000, 5_000_010])
    with pytest.raises(DataError, match=r"first event has t = 5000000, after all 3 slices of 10 "):
        to_frames(Recording(t * 0, t * 0, t * 0, t, (2, 1, 1)), Slicing("duration", 3, 10))
    frames = to_frames(
        Recording(t * 0, t * 0, t * 0, t - t[0], (2, 1, 1)), Slicing("duration", 3, 10)
    )
    assert frames.sum((1, 2, 3)).tolist() == [1, 1, 0]


def test_slices_of_a_number_of_events() -> None:
    events = random_events(7, (11,), 0)
    steps = to_frames(events, Slicing("events", 3, count=2)).reshape(3, -1).sum(1)
    assert steps.tolist() == [2, 2, 2]
    steps = to_frames(events, Slicing("events", 3, count=3)).reshape(3, -1).sum(1)
    assert steps.tolist() == [3, 3, 1]


def test_a_time_surface_decays_from_the_last_event_at_a_site() -> None:
    t = np.array([0, 10, 20, 30, 40, 50])
    x = np.array([0, 1, 0, 2, 2, 1])
    events = Recording(x, 0 * x, 0 * x, t, (1, 1, 4))
    surface = time_surface(events, Slicing("number", 2), tau=20)
    expected = [[0, 10, np.inf, np.inf], [30, 0, 10, np.inf]]  # ages at 20 and 50
    np.testing.assert_allclose(surface[:, 0, 0], np.exp(-np.array(expected) / 20), rtol=1e-6)
    slicing = Slicing("number", 2, content="time_surface")
    levels = to_frames(events, slicing)
    surface = time_surface(events, slicing)
    np.testing.assert_allclose(levels * slicing.scale, surface, atol=0.5 / 255 + 1e-6)
    late = time_surface(events, Slicing("events", 3, count=4))
    assert (late[2] == late[1]).all()  # a slice without events has the last surface


def test_a_voxel_grid_shares_events_between_two_steps() -> None:
    """The formula of Zhu et al., for each polarity."""
    rng = np.random.default_rng(0)
    t, p = np.sort(rng.integers(0, 1000, 50)), rng.integers(0, 2, 50)
    events = Recording(0 * t, 0 * t, p, t, (2, 1, 1))
    grid = voxel_grid(events, 5)[:, :, 0, 0]
    u = 4 * (t - t[0]) / (t[-1] - t[0])
    for k in range(5):
        weights = np.maximum(0, 1 - abs(k - u))
        np.testing.assert_allclose(grid[k], [weights[p == 0].sum(), weights[p == 1].sum()], 1e-6)
    levels = to_frames(events, Slicing("time", 5, content="voxel_grid"))
    np.testing.assert_allclose(levels[:, :, 0, 0] / 8, grid, atol=1 / 16)
    none = Recording([], [], [], [], (2, 1, 1))
    assert voxel_grid(none, 3).sum() == time_surface(none, Slicing()).sum() == 0
    one = Recording([0], [0], [1], [7], (2, 1, 1))
    assert voxel_grid(one, 3)[:, 1].ravel().tolist() == [1, 0, 0]
