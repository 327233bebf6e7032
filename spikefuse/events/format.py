"""Sparse spike tensors: `Events`, which layers of a network pass to each other.

Shape legend: T time steps, B samples, R = T B rows, W sites of a row, E entries, K slices.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spikefuse.events.lists import FIRED, CountedMarks, EventLists, SliceCounts
from spikefuse.kernels.threads import import_module
from spikefuse.neurons.checks import check_tensor


@dataclass(frozen=True, eq=False)
class Events:
    """The spikes of T time steps and B samples, and the neurons near their threshold, as lists.

    Row r = t B + b has its entries in `indices[offsets[r] : offsets[r + 1]]`: first the `fired[r]`
    sites that fired, then the candidates, which carry a gradient but did not fire. Each of the two
    is in ascending order, and no site is in both.

    Kernels trust the lists: the constructor checks them, which synchronizes with a GPU, and their
    tensors must not be changed afterwards.

    Args:
        shape: (T, B, W).
        offsets: int64 `[R + 1]`.
        fired: int32 `[R]`.
        indices: int32 `[E]`, below W.
        values: float32 `[E]`, 1 for entries that fired and 0 for the others, through which
            gradients flow. None if there are no gradients.
        dropped: number of spikes left out of rows that exceeded a capacity.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape, a device or the content is not as described.
    """

    shape: tuple[int, int, int]
    offsets: Tensor
    fired: Tensor
    indices: Tensor
    values: Tensor | None = None
    dropped: int = 0

    def __post_init__(self) -> None:
        _check_tensors(self)
        _check_lists(self)

    @classmethod
    def trusted(cls, shape: tuple[int, int, int], lists: EventLists) -> Events:
        """Return the events of lists that this library made, unchecked and without values."""
        events = object.__new__(cls)
        events.__dict__.update(shape=shape, values=None, dropped=0, **lists._asdict())
        return events

    def with_values(self, values: Tensor | None) -> Events:
        """Return the same events with other values, unchecked."""
        return self._with(values=values)

    def _with(self, **fields: Any) -> Events:
        events = object.__new__(type(self))
        events.__dict__.update(self.__dict__ | fields)
        return events

    @property
    def lists(self) -> EventLists:
        return EventLists(self.offsets, self.fired, self.indices)

    @property
    def num_rows(self) -> int:
        """T B."""
        return self.shape[0] * self.shape[1]

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @property
    def num_fired(self) -> int:
        """The number of spikes. Synchronizes with a GPU."""
        return int(self.fired.sum())

    @property
    def rate(self) -> float:
        """Share of the sites that fired, from 0 to 1. Synchronizes with a GPU."""
        return self.num_fired / max(self.num_rows * self.shape[2], 1)

    def sequence_signature(self) -> tuple[Hashable, ...]:
        """Return what determines, with the number of events, the memory that a network saves.

        `spikefuse.nn.Temporal` passes sequences with this method to its network unchanged.
        """
        return self.shape, self.device, self.values is None

    @classmethod
    def from_dense(cls, x: Tensor) -> Events:
        """List the spikes of a dense tensor.

        Args:
            x: `[T, B, ...]`, 0 or 1, of any dtype; the dims after B become the sites.

        Raises:
            ValueError: a value is neither 0 nor 1, or there are fewer than two dims.
        """
        check_tensor("x", x, " [T, B, ...]")
        if x.ndim < 2:
            raise ValueError(f"spikes have shape {list(x.shape)}: expected [T, B, ...]")
        flat = x.detach().unsqueeze(-1).flatten(2)
        sites = flat != 0
        if not torch.equal(sites.to(flat.dtype), flat):
            raise ValueError("spikes have values other than 0 and 1: expected a binary tensor")
        return cls.from_marks(sites * FIRED)

    @classmethod
    def from_bits(cls, packed: Tensor, width: int) -> Events:
        """List spikes `[T, B, S]` stored one per bit, the first site in the lowest bit.

        Args:
            packed: uint8 `[T, B, S]`, S = ceil(width / 8); unused bits are 0.
            width: number of sites.

        Raises:
            ValueError: another dtype or shape, or an unused bit is 1.
        """
        size = -(-width // 8)
        if packed.dtype != torch.uint8 or packed.ndim != 3 or packed.shape[2] != size:
            raise ValueError(
                f"bits are {packed.dtype} of shape {list(packed.shape)}: expected uint8 "
                f"[T, B, {size}] for {width} sites"
            )
        if width % 8 and (packed[..., -1] >> width % 8).any():
            raise ValueError(f"a bit beyond the {width} sites is 1: expected 0 in unused bits")
        shape = packed.shape[0], packed.shape[1], width
        rows = packed.reshape(shape[0] * shape[1], packed.shape[2])
        if rows.is_cpu:
            return cls.trusted(shape, _kernels(rows).unpack(rows))
        shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
        bits = (rows.unsqueeze(-1) >> shifts & 1).flatten(1)[:, :width]
        return cls.from_marks((bits * FIRED).view(shape))

    @classmethod
    def from_marks(cls, marks: Tensor) -> Events:
        """List the marks `[T, B, W]` of a neuron made by `with_candidates`."""
        counted = count_marks(marks)
        offsets = torch.zeros(len(counted.entries) + 1, dtype=torch.int64, device=marks.device)
        torch.cumsum(counted.entries, 0, out=offsets[1:])
        shape = marks.shape[0], marks.shape[1], marks.shape[2]
        sites = counted.sites(offsets, int(offsets[-1]))
        return cls.trusted(shape, EventLists(offsets, counted.fired, sites))

    def rows(self) -> Tensor:
        """Return int64 `[E]`: the row of each entry."""
        numbers = torch.arange(self.num_rows, device=self.device)
        return numbers.repeat_interleave(self.offsets.diff(), output_size=len(self.indices))

    def is_fired(self) -> Tensor:
        """Return float32 `[E]`: 1 for entries that fired, else 0."""
        return _kernels(self.indices).is_fired(self.lists)

    def to_dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the spikes as `[T, B, W]`, differentiable with respect to `values`.

        Args:
            dtype: of the result.
        """
        values = self.values
        if values is None or not (values.requires_grad and torch.is_grad_enabled()):
            dense = _kernels(self.indices).dense(self.lists, self.shape[2], values, dtype)
            return dense.view(self.shape)
        dense = torch.zeros(self.num_rows, self.shape[2], dtype=dtype, device=self.device)
        sites = self.rows(), self.indices.long()
        return dense.index_put(sites, values.to(dtype)).view(self.shape)

    def truncate(self, limit: int) -> Events:
        """Keep the first entries of each row, and count the spikes left out in `dropped`.

        Args:
            limit: number of entries.
        """
        counts, lost = self.offsets.diff().clamp(max=limit), (self.fired - limit).clamp(min=0)
        size, dropped = torch.stack((counts.sum(), lost.sum())).tolist()  # one synchronization
        if size == len(self.indices):
            return self
        offsets = F.pad(counts.cumsum(0), (1, 0))
        skipped = (self.offsets - offsets)[:-1].repeat_interleave(counts, output_size=size)
        entries = torch.arange(size, device=self.device) + skipped
        return self._with(
            offsets=offsets,
            fired=self.fired.clamp(max=limit),
            indices=self.indices.index_select(0, entries),
            values=None if self.values is None else self.values.index_select(0, entries),
            dropped=self.dropped + dropped,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Events:
        """Return the same events on another device, as `torch.Tensor.to` does.

        Args:
            device: the other device.
            non_blocking: copy from pinned memory without waiting.
        """
        names = ("offsets", "fired", "indices", "values")
        tensors = {name: x for name in names if (x := getattr(self, name)) is not None}
        moved = {name: x.to(device, non_blocking=non_blocking) for name, x in tensors.items()}
        return self._with(**moved)


def count_marks(marks: Tensor) -> CountedMarks:
    """Count the entries of marks `[T, B, W]`."""
    rows = marks.reshape(marks.shape[0] * marks.shape[1], marks.shape[2])
    counted: CountedMarks = _kernels(rows).count_marks(rows.float())
    return counted


def merge_slices(
    shape: tuple[int, int, int], indices: Tensor, first: Tensor, counts: SliceCounts, index: int
) -> tuple[Events, Tensor, Tensor]:
    """Merge the events of K adjacent slices of the sites.

    Args:
        shape: of the result.
        indices: int32 `[K, counts.max_size]`, the entries of each slice, padded.
        first: int64 `[K]` or longer, the first site of each slice.
        index: the slice whose entries are located in the result.

    Returns:
        The events, their `is_fired()`, and int64, the place of each entry of that slice among
        them.
    """
    spikes, entries = counts.rows.unbind(1)
    others, total = entries - spikes, sum(counts.sizes)
    # The (slice, row) of every entry, slice by slice, and its place there.
    numbers = torch.arange(entries.numel(), device=entries.device)
    pair = numbers.repeat_interleave(entries.flatten(), output_size=total)
    begins = entries.flatten().cumsum(0) - entries.flatten()
    place = torch.arange(total, device=entries.device) - begins[pair]
    is_fired = place < spikes.flatten()[pair]
    # Where in the result the spikes and the other entries of a (slice, row) begin.
    row = counts.offsets[:-1]
    first_spike = row + spikes.cumsum(0) - spikes
    first_other = row + counts.fired + others.cumsum(0) - entries
    to = place + torch.where(is_fired, first_spike.flatten()[pair], first_other.flatten()[pair])
    sites = [indices[k, :size] + first[k] for k, size in enumerate(counts.sizes)]
    whole, values = indices.new_empty(total), torch.empty_like(place, dtype=torch.float32)
    whole[to], values[to] = torch.cat(sites).to(whole.dtype), is_fired.float()
    own = to.split(counts.sizes)[index]
    lists = EventLists(counts.offsets, counts.fired, whole)
    return Events.trusted(shape, lists), values, own


def _check_tensors(events: Events) -> None:
    """Check shapes, dtypes and devices, without reading the tensors."""
    shape = events.shape
    if len(shape) != 3 or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"shape is {shape}: expected (T, B, W), three sizes of at least 0")
    rows, entries = events.num_rows, events.indices.numel()
    expected = {
        "offsets": (torch.int64, rows + 1),
        "fired": (torch.int32, rows),
        "indices": (torch.int32, entries),
        "values": (torch.float32, entries),
    }
    for name, (dtype, size) in expected.items():
        x = getattr(events, name)
        if x is None and name == "values":
            continue
        if not isinstance(x, Tensor) or x.dtype != dtype:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} is {kind}: expected a tensor of {dtype}")
        if x.shape != (size,) or not x.is_contiguous():
            raise ValueError(
                f"{name} has shape {list(x.shape)} and strides {list(x.stride())}: expected "
                f"contiguous [{size}] for shape {tuple(shape)} and {entries} indices"
            )
        if x.device != events.device:
            raise ValueError(
                f"{name} is on {x.device}, but indices is on {events.device}: expected one device"
            )


def _check_lists(events: Events) -> None:
    """Check the content, with two synchronizations, or four if there are candidates."""
    offsets, fired, indices = events.lists
    width, entries = events.shape[2], len(indices)
    sizes = offsets.diff()
    rules = {
        "offsets don't begin with 0": offsets[0] != 0,
        f"offsets don't end with {entries}, the number of indices": offsets[-1] != entries,
        "offsets decrease": (sizes < 0).any(),
        "fired is below 0 or above the number of a row's entries": (
            (fired < 0) | (fired > sizes)
        ).any(),
        f"indices are below 0 or not below {width}": ((indices < 0) | (indices >= width)).any(),
    }
    _raise_first(rules)
    # Where a row's spikes and its candidates begin, the ascending order starts again.
    begins = torch.zeros(entries + 1, dtype=torch.bool, device=events.device)
    begins[offsets[:-1]] = True
    begins[offsets[:-1] + fired] = True
    descends = (indices[1:] <= indices[:-1]) & ~begins[1:entries]
    rules = {"indices of a row's spikes or candidates are not in ascending order": descends.any()}
    if events.values is not None:
        rules["values are not 1 for spikes and 0 for candidates"] = (
            events.values.detach() != events.is_fired()
        ).any()
    _raise_first(rules)
    if entries > events.num_fired:
        places = (events.rows() * width + indices).sort().values
        _raise_first({"a site is a spike and a candidate": (places.diff() == 0).any()})


def _raise_first(rules: dict[str, Tensor]) -> None:
    """Raise for the first rule that is broken. Synchronizes with a GPU."""
    broken = torch.stack(list(rules.values())).tolist()
    for rule, is_broken in zip(rules, broken, strict=True):
        if is_broken:
            raise ValueError(f"{rule}: expected lists as the docstring of Events describes them")


def _kernels(x: Tensor) -> Any:
    """Return the module that builds and reads lists on the device of `x`."""
    if x.is_cpu:
        return import_module("spikefuse.events.lists_numba")
    return import_module("spikefuse.events.lists_triton")
