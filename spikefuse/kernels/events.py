"""Spikes that are few, as lists of their places.

Shape legend: T time steps, B samples, R = T B rows, W sites of a row, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spikefuse.neurons.candidates import FIRED


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
            from spikefuse.kernels import event_numba

            return cls(shape, *event_numba.unpacked(rows))
        shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
        bits = (rows.unsqueeze(-1) >> shifts & 1).flatten(1)[:, :width]
        return cls(shape, *_kernels(rows).listed(bits * FIRED))

    @classmethod
    def from_marks(cls, marks: Tensor) -> Events:
        """The events of marks `[T, B, W]`: what a neuron with candidates gives."""
        shape = marks.shape[0], marks.shape[1], marks.shape[2]
        rows = marks.reshape(shape[0] * shape[1], shape[2])
        return cls(shape, *_kernels(rows).listed(rows.float()))

    def rows(self) -> Tensor:
        """int64 `[E]`: the row of each entry."""
        return torch.repeat_interleave(
            torch.arange(self.num_rows, device=self.device), self.offsets.diff()
        )

    def is_fired(self) -> Tensor:
        """float32 `[E]`: 1 for the entries that fired, else 0."""
        if self.device.type == "cpu":
            from spikefuse.kernels import event_numba

            return event_numba.values(self.offsets, self.fired)
        rows = self.rows()
        place = torch.arange(len(rows), device=self.device) - self.offsets[rows]
        return (place < self.fired[rows]).float()

    def to_dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The spikes `[T, B, W]`; with gradients, if there are `values`."""
        values = self.is_fired() if self.values is None else self.values
        dense = torch.zeros(self.num_rows, self.shape[2], dtype=dtype, device=self.device)
        places = self.rows(), self.indices.long()
        return dense.index_put(places, values.to(dtype)).view(self.shape)

    def kept(self, limit: int) -> Events:
        """At most `limit` entries of each row, its first ones; spikes left out are counted."""
        counts = self.offsets.diff()
        if not len(counts) or int(counts.max()) <= limit:
            return self
        place = torch.arange(int(self.offsets[-1]), device=self.device)
        keep = place - self.offsets[self.rows()] < limit
        offsets = torch.zeros_like(self.offsets)
        torch.cumsum(counts.clamp(max=limit), 0, out=offsets[1:])
        return replace(
            self,
            offsets=offsets,
            fired=self.fired.clamp(max=limit),
            indices=self.indices[keep],
            values=None if self.values is None else self.values[keep],
            dropped=self.dropped + int((self.fired - limit).clamp(min=0).sum()),
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


def _kernels(x: Tensor) -> Any:
    """The module of the kernels for a device."""
    if x.is_cpu:
        from spikefuse.kernels import event_numba

        return event_numba
    from spikefuse.kernels import event_triton

    return event_triton
