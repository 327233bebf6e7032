"""A linear layer on events fused with its neurons, on CPUs.

The kernels emitted for the neuron are called on one tile of columns and one sample at a time.
Potentials never leave a core's cache. Neither do currents if they are sums of few rows; backward
then recomputes them. Layers exchange event lists only. docs/events.md derives which entries carry a
gradient, and so which rows of weights are read.

If each thread has its own tiles, the gradients of their currents also stay in its cache. With fewer
tiles than threads, the threads split the samples, and those gradients go through memory; to sum
them, the threads split the inputs.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.events import lists_numba, products_numba
from spikefuse.events.format import Events
from spikefuse.events.lists_numba import PackedMarks, arrays, num_words
from spikefuse.events.products_numba import (
    TOGETHER,
    Gradients,
    bias_or_zeros,
    spread,
    tile_width,
    work_of,
)
from spikefuse.kernels import vectors_numba
from spikefuse.kernels.numba_host import advise_huge_pages, flat, move_to_huge_pages, threads_for
from spikefuse.neurons.definition import Neuron
from spikefuse.scan import cache as sources
from spikefuse.scan.op import choose
from spikefuse.scan.program import program
from spikefuse.scan.records import Wanted

# From this many spikes per row, saving the currents is faster than recomputing them.
SAVED = 16

# A thread that reads each row of weights this many times first copies the rows to aligned memory.
# Rows of large layers are read too rarely for that.
COPIED = 64

# Appended to the emitted kernels of a neuron. `none` stands for arguments that they don't need.
SOURCE = """

# Built on kernels with this digest: {digest}
from spikefuse.events.lists_numba import pack
from spikefuse.events.products_numba import add_group, add_to, clear, part_of
from spikefuse.kernels.vectors_numba import LINE, WORD, aligned, sum_rows


@kernel
def layer(
    first, last, size, T, B, weight, bias, width, saved,
    offsets, fired, indices, copied, words, bits, near{p}
):
    x, y = np.empty(T * size, np.float32), np.empty(T * size, np.float32)
    none = np.empty(0, np.float32)
    # Copied rows are read often: half a wide tile of them stays in the cache.
    strip = -(-size // (2 * WORD)) * WORD if copied and size > {wide} else size
    stride = -(-strip // LINE) * LINE
    rows = aligned(weight.size // width * stride if copied else 0)
    samples = max(B, 1)
    for tile in range(first // samples, -(-last // samples)):
        begin, end = tile * size, min((tile + 1) * size, width)
        b_first, b_last = part_of(first, last, tile, samples)
        for column in range(begin, end, strip):
            m = min(strip, end - column)
            step = end - begin if saved.size else m
            if copied:
                for i in range(weight.size // width):
                    load_row(rows[i * stride :], weight, i * width + column, m, f32(0.0))
            for b in range(b_first, min(b_last, B)):
                if saved.size:
                    x = saved[T * (B * begin + b * step) + column - begin :]
                args = x, step, T, B, b, bias, column, m, offsets, fired, indices
                if copied:
                    sums(rows, stride, 0, *args)
                else:
                    sums(weight, width, column, *args)
                forward(0, m, 1, T, m, m, 1, m, False, (), x, step, 0, y, m, 0, {forward}{p})
                for t in range(T):
                    word = (t * B + b) * words + column // WORD
                    pack(y, t * m, m, bits, near, word)


@kernel
def sums(rows, stride, place, x, step, T, B, b, bias, column, m, offsets, fired, indices):
    for t in range(T):
        begin = offsets[t * B + b]
        end = begin + fired[t * B + b]
        sum_rows(x, t * step, bias, column, rows, stride, place, m, indices, begin, end)


@kernel
def layer_backward(
    first, last, size, T, B, weight, bias, width, saved,
    offsets, fired, indices, out_offsets, out_indices, grad,
    spilled, totals, group, target, streamed, partial, spikes, entries{p}
):
    x, y = np.empty(T * size, np.float32), np.empty(T * size, np.float32)
    none, total = np.empty(0, np.float32), np.empty(size, np.float32)
    grads = spilled if spilled.size else aligned(group * T * size)
    {states}
    fresh = np.empty(target.size // width, np.bool_)
    samples = max(B, 1)
    for tile in range(first // samples, -(-last // samples)):
        column = tile * size
        m = min(size, width - column)
        fresh[:] = True
        b_first, b_last = part_of(first, last, tile, samples)
        for b in range(b_first, min(b_last, B)):
            if saved.size:
                x = saved[T * (B * column + b * m) :]
            else:
                args = x, m, T, B, b, bias, column, m, offsets, fired, indices
                sums(weight, width, column, *args)
            if T > CHUNK:
                forward(0, m, 1, T, m, m, 1, m, False, (), x, m, 0, y, m, 0, {recompute}{p})
            y[: T * m] = np.float32(0.0)
            for t in range(T):
                for e in range(out_offsets[t * B + b], out_offsets[t * B + b + 1]):
                    k = out_indices[e] - column
                    if 0 <= k < m:
                        y[t * m + k] = grad[e]
            gx = grads[(tile * B + b if spilled.size else b % group) * T * size :]
            sizes = T, m, m, 1, m
            backward(0, m, 1, *sizes, False, (), x, m, 0, y, m, 0, gx, size, 0, {backward}{p})
            total[:] = np.float32(0.0)
            for t in range(T):
                add_to(total, 0, m, gx, t * size)
            add_to(totals, (b if spilled.size else 0) * width + column, m, total, 0)
            if not spilled.size and ((b + 1) % group == 0 or b + 1 == B):
                args = width, column, m, grads, size, 0, b // group
                add_group(target, streamed, partial, tile, weight, fresh, spikes, entries, *args)
        if not spilled.size:
            clear(target, streamed, width, column, m, fresh, 0, len(fresh))
"""


@cache
def _digest() -> str:
    files = (Path(str(m.__file__)) for m in (lists_numba, products_numba, vectors_numba))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _module(name: str) -> ModuleType:
    """Return the kernels of a neuron's program, and those of a layer, which call them."""
    neuron = program(name)
    step = neuron.step
    states = range(len(step.states))
    rows = "np.empty((T - 1) // CHUNK * size, np.float32)"
    text = SOURCE.format(
        digest=_digest(),
        wide=TOGETHER,
        p="".join(f", p{i}" for i in range(len(step.params))),
        states="; ".join(f"state{i} = {rows}" for i in states),
        forward=", ".join("none, none, none" for _ in states),
        recompute=", ".join(f"none, none, state{i}" for i in states),
        backward=", ".join(f"none, state{i}, none, none" for i in states),
    )
    return sources.load(neuron.source(step.inputs, ()) + text, f"{step.name}_events", "numba")


class FusedLayer:
    """Neurons of one kind, starting from rest, that receive `events @ weight + bias`.

    Args:
        events: spikes of the inputs, `[T, B, I]`.
        neuron: made by `with_candidates`, with floats as its only values; see `can_fuse`.
        weight: float32 `[I, O]`, contiguous.
        bias: `[O]` or None.
    """

    def __init__(self, events: Events, neuron: Neuron, weight: Tensor, bias: Tensor | None) -> None:
        name, scalars, _ = choose(neuron, weight, Wanted(impl="numba"))
        move_to_huge_pages(weight)
        self.events, self.weight, self.bias = events, weight, bias
        self.module = _module(name)
        self.currents = np.empty(0, np.float32)
        self.params = [np.float32(value) for value in scalars]
        # The same in both passes for any number of threads: saved currents are laid out by tile.
        self.size = tile_width(weight.shape[1], events.shape[1])
        self.tiles = -(-weight.shape[1] // self.size)

    def forward(self) -> Events:
        """Return the events of the outputs, without values."""
        (num_steps, batch, _), (num_inputs, width) = self.events.shape, self.weight.shape
        rows, words, num_fired = num_steps * batch, num_words(width), self.events.num_fired
        fired, near = (np.empty((rows, words), np.uint32) for _ in range(2))
        if num_fired >= SAVED * max(rows, 1):
            self.currents = np.empty(rows * width, np.float32)
        threads = threads_for(work_of(self.events, width))
        copied = num_fired >= COPIED * num_inputs * -(-threads // max(self.tiles, 1))
        self._run(self.module.layer, threads, copied, words, fired.ravel(), near.ravel())
        return Events.trusted((num_steps, batch, width), PackedMarks(fired, near).lists())

    def backward(self, outputs: Events, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return `Gradients.finished` for the gradient `[E]` of the outputs' values."""
        num_steps, batch, _ = self.events.shape
        work = Gradients(self.events, self.weight, (num_steps, batch), self.size)
        step = num_steps * batch * self.size if work.ranges > 1 else 0
        spilled = torch.empty(self.tiles * step, dtype=torch.float32)
        advise_huge_pages(spilled)
        sums = np.zeros((batch if step else 1, self.weight.shape[1]), np.float32)
        entries = outputs.offsets.numpy(), outputs.indices.numpy(), flat(grad.contiguous())
        results = flat(spilled), sums.reshape(-1), work.group, *work.arguments
        self._run(self.module.layer_backward, work.ranges, *entries, *results)
        if step:
            work.add(flat(spilled), self.size, step)
        return work.finished(sums)

    def _run(self, kernel: Any, threads: int, *arguments: object) -> None:
        num_steps, batch, _ = self.events.shape
        width = self.weight.shape[1]
        bias = flat(bias_or_zeros(self.bias, width))
        layer = num_steps, batch, flat(self.weight), bias, width, self.currents
        inputs = self.size, *layer, *arrays(self.events.lists)
        work = work_of(self.events, width)
        spread(kernel, self.tiles, batch, threads, work, *inputs, *arguments, *self.params)
