"""Spikes that are few, as lists of their places.

Shape legend: T time steps, B samples, R = T B rows, W sites of a row, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spikefuse.events.candidates import FIRED


@dataclass(frozen=True, eq=False)
class Events:
    """The spikes of T time steps and B samples, and the neurons near their threshold.

    Row r = t B + b lists its entries in `indices[offsets[r] : offsets[r + 1]]`: first the sites
    that fired, `fired[r]` of them, then the candidates that carry a gradient but did not fire;
    each of the two in rising order.

    Args:
        shape: (T, B, W).
        offsets: int64 `[R + 1]`.
        fired: int32 `[R]`.
        indices: int32 `[E]`, below W.
        values: float32 `[E]`, 1 where a site fired and 0 where not: what gradients of the spikes
            flow through. None: there is no gradient to take.
        dropped: spikes that were left out where a row had more than its capacity.
    """

    shape: tuple[int, int, int]
    offsets: Tensor
    fired: Tensor
    indices: Tensor
    values: Tensor | None = None
    dropped: int = 0

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @property
    def num_fired(self) -> int:
        return int(self.fired.sum())

    @property
    def rate(self) -> float:
        """Share of the sites that fired."""
        return self.num_fired / max(self.num_rows * self.shape[2], 1)

    @classmethod
    def from_dense(cls, x: Tensor) -> Events:
        """The events of spikes `[T, B, ...]`, 0 or 1, whose further dims become the sites.

        Raises:
            ValueError: a value is neither 0 nor 1, or there are fewer than two dims.
        """
        if x.ndim < 2:
            raise ValueError(f"spikes have shape {list(x.shape)}: expected [T, B, ...]")
        flat = x.detach().unsqueeze(-1).flatten(2)
        sites = flat != 0
        if not torch.equal(sites.to(flat.dtype), flat):
            raise ValueError("spikes hold values other than 0 and 1: events are spikes or none")
        return cls.from_marks(sites * FIRED)

    @classmethod
    def from_bits(cls, packed: Tensor, width: int) -> Events:
        """The events of spikes `[T, B, S]` of a bit each, the first site in the lowest bit.

        Args:
            packed: uint8, S = ceil(width / 8), further bits 0.
            width: number of sites.
        """
        shape = packed.shape[0], packed.shape[1], width
        rows = packed.reshape(shape[0] * shape[1], packed.shape[2])
        if rows.is_cpu:
            from spikefuse.events import lists_numba as event_lists_numba

            return cls(shape, *event_lists_numba.unpacked(rows))
        shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
        bits = (rows.unsqueeze(-1) >> shifts & 1).flatten(1)[:, :width]
        return cls.from_marks((bits * FIRED).view(shape))

    @classmethod
    def from_marks(cls, marks: Tensor) -> Events:
        """The events of marks `[T, B, W]`: what a neuron with candidates gives."""
        found = marked(marks)
        offsets = torch.zeros(len(found.entries) + 1, dtype=torch.int64, device=marks.device)
        torch.cumsum(found.entries, 0, out=offsets[1:])
        shape = marks.shape[0], marks.shape[1], marks.shape[2]
        return cls(shape, offsets, found.fired, found.sites(offsets, int(offsets[-1])))

    def rows(self) -> Tensor:
        """int64 `[E]`: the row of each entry."""
        return _kernels(self.indices).rows(self)

    def is_fired(self) -> Tensor:
        """float32 `[E]`: 1 for the entries that fired, else 0."""
        return _kernels(self.indices).values(self)

    def to_dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The spikes `[T, B, W]`; with gradients, if there are `values`."""
        values = self.values
        if values is None or not (values.requires_grad and torch.is_grad_enabled()):
            return _kernels(self.indices).dense(self, values, dtype).view(self.shape)
        dense = torch.zeros(self.num_rows, self.shape[2], dtype=dtype, device=self.device)
        places = self.rows(), self.indices.long()
        return dense.index_put(places, values.to(dtype)).view(self.shape)

    def kept(self, limit: int) -> Events:
        """At most `limit` entries of each row, its first ones; spikes left out are counted."""
        counts, lost = self.offsets.diff().clamp(max=limit), (self.fired - limit).clamp(min=0)
        number, dropped = torch.stack((counts.sum(), lost.sum())).tolist()  # waits for a GPU once
        if number == len(self.indices):
            return self
        offsets = torch.zeros_like(self.offsets)
        torch.cumsum(counts, 0, out=offsets[1:])
        places = _kernels(self.indices).places(self, offsets, number)
        return replace(
            self,
            offsets=offsets,
            fired=self.fired.clamp(max=limit),
            indices=self.indices.index_select(0, places),
            values=None if self.values is None else self.values.index_select(0, places),
            dropped=self.dropped + dropped,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Events:
        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        return replace(
            self,
            offsets=moved(self.offsets),
            fired=moved(self.fired),
            indices=moved(self.indices),
            values=None if self.values is None else moved(self.values),
        )


def marked(marks: Tensor) -> Any:
    """Marks `[T, B, W]` with their entries counted, to be listed.

    Returns:
        An object with `fired` and `entries`, int32 `[R]`, the spikes and all entries of each row;
        `sites(offsets, room)` gives int32 `[room]`, those of row r from `offsets[r]` on, spikes
        first, and anything where there are none.
    """
    rows = marks.reshape(marks.shape[0] * marks.shape[1], marks.shape[2])
    return _kernels(rows).marked(rows.float())


class Counts(NamedTuple):
    """How many entries the ranks have.

    Attributes:
        rows: int32 `[K, 2, R]`: of each rank and row the spikes, and all entries.
        starts: int64 `[K, R + 1]`: where the entries of each row begin, and those of the last end.
        offsets, fired: those of the whole, as `Events` has them.
        sizes: entries of each rank.
    """

    rows: Tensor
    starts: Tensor
    offsets: Tensor
    fired: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, rows: Tensor) -> Counts:
        """Those of `rows`; the host of a GPU waits for the sizes, when all else has begun."""
        starts = F.pad(rows[:, 1].cumsum(1), (1, 0))
        offsets, fired = starts.sum(0), rows[:, 0].sum(0, dtype=torch.int32)
        return cls(rows, starts, offsets, fired, starts[:, -1].tolist())

    @property
    def room(self) -> int:
        """Entries that each rank has at most."""
        return max(1, *self.sizes)


def merged(
    shape: tuple[int, int, int], indices: Tensor, first: Tensor, counts: Counts, rank: int
) -> tuple[Events, Tensor, Tensor]:
    """The events of K ranks, which have the same rows and sites of their own, as one.

    Args:
        shape: of the whole.
        indices: int32 `[K, room]`: the entries of each rank.
        first: int64 `[K]` or longer: the site of the whole that each rank's site 0 is.
        rank: whose own entries are looked for.

    Returns:
        (the events, whose sites are in order if those of the ranks follow each other; what
        `is_fired` gives of them; int64: for each entry of `rank` its place among all).
    """
    assert indices.shape[1] == counts.room
    whole, values, places = _kernels(indices).merged(indices, first, counts, rank)
    return Events(shape, counts.offsets, counts.fired, whole), values, places


def _kernels(x: Tensor) -> Any:
    """The module that makes and reads lists on a device."""
    if x.is_cpu:
        from spikefuse.events import lists_numba as event_lists_numba

        return event_lists_numba
    from spikefuse.events import lists_triton as event_lists_triton

    return event_lists_triton
