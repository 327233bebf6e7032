"""A whole layer on events, on a CPU: its currents, its neurons and their events.

The neurons are the compiler's kernels, called on one tile of columns and one sample at a time, so
that potentials never leave a core's cache, and currents neither where they are sums of few rows:
backward then computes them again. Between layers there are only events. Where an entry carries a
gradient, and so which rows of weights are read, docs/events.md derives.

A thread has tiles of its own, and the gradients of their currents stay in its cache too. Of fewer
tiles than threads the samples are shared out, and those gradients go through memory: then the
inputs are shared out to sum them.
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

from spikefuse.events import lists_numba as event_lists_numba
from spikefuse.events import products_numba as event_numba
from spikefuse.events import vectors_numba as event_vectors
from spikefuse.events.format import Events
from spikefuse.events.lists_numba import lists, lists_of, words_of
from spikefuse.events.products_numba import (
    TOGETHER,
    Gradients,
    given,
    spread,
    tile_of,
    work_of,
)
from spikefuse.kernels.numba_runtime import advise_huge_pages, flat, move_to_huge_pages
from spikefuse.kernels.numba_threads import threads_for
from spikefuse.neurons.definition import Definition
from spikefuse.scan import cache as sources
from spikefuse.scan.op import choose
from spikefuse.scan.program import program

# Spikes per row from which on it is quicker to keep the currents than to sum them again.
KEPT = 16

# Times that a thread reads a row of weights from which on it is first moved to where it begins with
# a line of the cache. Of large layers each is read a few times, and to move them all takes longer.
MOVED = 64

# What follows the emitted kernels of a neuron. `none` stands for what those need not be given.
SOURCE = """

# In the form {digest}:
from spikefuse.events.lists_numba import pack
from spikefuse.events.products_numba import add_group, add_to, clear, part_of
from spikefuse.events.vectors_numba import LINE, WORD, aligned, sum_rows


@kernel
def layer(
    first, last, size, T, B, weight, bias, width, kept,
    offsets, fired, indices, moved, words, bits, others{p}
):
    x, y = np.empty(T * size, np.float32), np.empty(T * size, np.float32)
    none = np.empty(0, np.float32)
    # Half a wide tile of the rows that are moved, and so read again and again, stays in the cache.
    part = -(-size // (2 * WORD)) * WORD if moved and size > {wide} else size
    stride = -(-part // LINE) * LINE
    rows = aligned(weight.size // width * stride if moved else 0)
    samples = max(B, 1)
    for tile in range(first // samples, -(-last // samples)):
        begin, end = tile * size, min((tile + 1) * size, width)
        b_first, b_last = part_of(first, last, tile, samples)
        for column in range(begin, end, part):
            m = min(part, end - column)
            step = end - begin if kept.size else m
            if moved:
                for i in range(weight.size // width):
                    at = i * width + column
                    rows[i * stride : i * stride + m] = weight[at : at + m]
            for b in range(b_first, min(b_last, B)):
                if kept.size:
                    x = kept[T * (B * begin + b * step) + column - begin :]
                args = x, step, T, B, b, bias, column, m, offsets, fired, indices
                if moved:
                    sums(rows, stride, 0, *args)
                else:
                    sums(weight, width, column, *args)
                forward(0, m, T, m, m, False, x, step, 0, y, m, 0, {forward}{p})
                for t in range(T):
                    word = (t * B + b) * words + column // WORD
                    pack(y, t * m, m, bits, others, word)


@kernel
def sums(rows, stride, place, x, step, T, B, b, bias, column, m, offsets, fired, indices):
    for t in range(T):
        begin = offsets[t * B + b]
        end = begin + fired[t * B + b]
        sum_rows(x, t * step, bias, column, rows, stride, place, m, indices, begin, end)


@kernel
def layer_backward(
    first, last, size, T, B, weight, bias, width, kept,
    offsets, fired, indices, out_offsets, out_indices, grad,
    apart, totals, group, target, streamed, partial, spikes, entries{p}
):
    x, y = np.empty(T * size, np.float32), np.empty(T * size, np.float32)
    none, total = np.empty(0, np.float32), np.empty(size, np.float32)
    grads = apart if apart.size else aligned(group * T * size)
    {saved}
    fresh = np.empty(target.size // width, np.bool_)
    samples = max(B, 1)
    for tile in range(first // samples, -(-last // samples)):
        column = tile * size
        m = min(size, width - column)
        fresh[:] = True
        b_first, b_last = part_of(first, last, tile, samples)
        for b in range(b_first, min(b_last, B)):
            if kept.size:
                x = kept[T * (B * column + b * m) :]
            else:
                args = x, m, T, B, b, bias, column, m, offsets, fired, indices
                sums(weight, width, column, *args)
            if T > CHUNK:
                forward(0, m, T, m, m, False, x, m, 0, y, m, 0, {recompute}{p})
            y[: T * m] = np.float32(0.0)
            for t in range(T):
                for e in range(out_offsets[t * B + b], out_offsets[t * B + b + 1]):
                    k = out_indices[e] - column
                    if 0 <= k < m:
                        y[t * m + k] = grad[e]
            gx = grads[(tile * B + b if apart.size else b % group) * T * size :]
            backward(0, m, T, m, m, False, x, m, 0, y, m, 0, gx, size, 0, {backward}{p})
            total[:] = np.float32(0.0)
            for t in range(T):
                add_to(total, 0, m, gx, t * size)
            add_to(totals, (b if apart.size else 0) * width + column, m, total, 0)
            if not apart.size and ((b + 1) % group == 0 or b + 1 == B):
                args = width, column, m, grads, size, 0, b // group
                add_group(target, streamed, partial, tile, weight, fresh, spikes, entries, *args)
        if not apart.size:
            clear(target, streamed, width, column, m, fresh, 0, len(fresh))
"""


@cache
def _digest() -> str:
    files = event_lists_numba.__file__, event_numba.__file__, event_vectors.__file__
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in files)).hexdigest()


@cache
def _module(name: str) -> ModuleType:
    """The kernels of a neuron's program, and those of a layer that calls them."""
    made = program(name)
    step = made.step
    states = range(len(step.states))
    rows = "np.empty((T - 1) // CHUNK * size, np.float32)"
    text = SOURCE.format(
        digest=_digest(),
        wide=TOGETHER,
        p="".join(f", p{i}" for i in range(len(step.params))),
        saved="; ".join(f"saved{i} = {rows}" for i in states),
        forward=", ".join("none, none, none" for _ in states),
        recompute=", ".join(f"none, none, saved{i}" for i in states),
        backward=", ".join(f"none, saved{i}, none, none" for i in states),
    )
    return sources.load(made.source(step.inputs, ()) + text, f"{step.name}_events", "numba")


class Layer:
    """The currents `events @ weight + bias` through neurons of one kind, at rest before.

    Args:
        events: spikes of the inputs, `[T, B, I]`.
        neuron: has candidates, and floats only for values; see `can_fuse`.
        weight: float32 `[I, O]`, contiguous.
        bias: `[O]` or None.
    """

    def __init__(
        self, events: Events, neuron: Definition, weight: Tensor, bias: Tensor | None
    ) -> None:
        name, _, scalars, _ = choose(neuron, "numba", weight)
        move_to_huge_pages(weight)
        self.events, self.weight, self.bias = events, weight, bias
        self.module = _module(name)
        self.kept = np.empty(0, np.float32)
        self.params = [np.float32(value) for value in scalars]
        # The same in both passes, by which `kept` is laid out, whatever their threads.
        self.size = tile_of(weight.shape[1], events.shape[1])
        self.tiles = -(-weight.shape[1] // self.size)

    def forward(self) -> Events:
        """The events of the outputs, without values."""
        (num_steps, batch, _), width = self.events.shape, self.weight.shape[1]
        words = words_of(width)
        bits, others = (np.empty((num_steps * batch, words), np.uint32) for _ in range(2))
        if self.events.num_fired >= KEPT * max(num_steps * batch, 1):
            self.kept = np.empty(num_steps * batch * width, np.float32)
        threads = threads_for(self._work())
        ranges = -(-threads // max(self.tiles, 1))
        moved = self.events.num_fired >= MOVED * len(self.weight) * ranges
        arguments = *self._inputs(), *lists(self.events), moved, words, bits.ravel(), others.ravel()
        self._run(self.module.layer, threads, *arguments, *self.params)
        return Events((num_steps, batch, width), *lists_of(bits, others))

    def backward(
        self, outputs: Events, grad: Tensor, sparse: bool
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """What `Gradients.finished` gives, from the gradient `[E]` of the outputs' values."""
        num_steps, batch, _ = self.events.shape
        work = Gradients(self.events, self.weight, sparse, (num_steps, batch), self.size)
        step = num_steps * batch * self.size if work.parts > 1 else 0
        apart = torch.empty(self.tiles * step, dtype=torch.float32)
        advise_huge_pages(apart)
        entries = outputs.offsets.numpy(), outputs.indices.numpy(), flat(grad.contiguous())
        inputs = *self._inputs(), *lists(self.events), *entries, flat(apart)
        sums = np.zeros((batch if step else 1, self.weight.shape[1]), np.float32)
        results = sums.reshape(-1), work.group, *work.arguments
        self._run(self.module.layer_backward, work.parts, *inputs, *results, *self.params)
        if step:
            work.add(flat(apart), self.size, step)
        return work.finished(sums)

    def _inputs(self) -> tuple[object, ...]:
        num_steps, batch, _ = self.events.shape
        width = self.weight.shape[1]
        bias = flat(given(self.bias, width))
        return num_steps, batch, flat(self.weight), bias, width, self.kept

    def _run(self, kernel: Any, threads: int, *arguments: object) -> None:
        samples = self.events.shape[1]
        spread(kernel, self.tiles, samples, threads, self._work(), self.size, *arguments)

    def _work(self) -> int:
        return work_of(self.events, self.weight.shape[1])


def can_fuse(neuron: Definition, weight: Tensor) -> bool:
    """Whether `Layer` takes these: on a CPU, one input, and nothing of the neuron is a tensor."""
    values = neuron.values().values()
    return (
        weight.is_cpu
        and len(type(neuron).input_names) == 1
        and all(isinstance(value, float) for value in values)
    )
