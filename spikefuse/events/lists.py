"""Event lists in compressed sparse row (CSR) form, and the marks they are built from.

Shape legend: R rows, E entries, W sites of a row, K slices of the sites.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

#: Marks of a site: a candidate that did not fire, and a spike. 0 marks a site without gradient.
NEAR, FIRED = 1.0, 2.0


class EventLists(NamedTuple):
    """The entries of R rows: `indices[offsets[r] : offsets[r + 1]]`, of which `fired[r]` fired.

    See `spikefuse.events.format.Events` for order and dtypes.
    """

    offsets: Tensor
    fired: Tensor
    indices: Tensor


class CountedMarks(Protocol):
    """Marks `[R, W]` whose entries have been counted but not yet listed."""

    fired: Tensor  # int32 [R], spikes of each row
    entries: Tensor  # int32 [R], all entries of each row

    def sites(self, offsets: Tensor, size: int) -> Tensor:
        """Return int32 `[size]`: the sites of row r from `offsets[r]` on, spikes first.

        Elements that belong to no row are undefined.
        """
        ...


class SliceCounts(NamedTuple):
    """The number of entries in K event lists over the same rows and adjacent slices of the sites.

    Attributes:
        rows: int32 `[K, 2, R]`, spikes and all entries of each slice and row.
        starts: int64 `[K, R + 1]`, offsets of each slice's list.
        offsets, fired: those of the merged list.
        sizes: entries of each slice.
    """

    rows: Tensor
    starts: Tensor
    offsets: Tensor
    fired: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, rows: Tensor) -> SliceCounts:
        """Derive all counts from `rows`. Synchronizes with a GPU once, for the sizes."""
        starts = F.pad(rows[:, 1].cumsum(1), (1, 0))
        offsets, fired = starts.sum(0), rows[:, 0].sum(0, dtype=rows.dtype)
        return cls(rows, starts, offsets, fired, starts[:, -1].tolist())

    @property
    def max_size(self) -> int:
        """Entries of the longest list, at least 1."""
        return max(1, *self.sizes)
