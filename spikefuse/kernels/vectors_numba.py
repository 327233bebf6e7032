"""Vectorized sums, dot products and small matrix products on CPUs, with accumulators in registers.

A row is computed in blocks of as many columns as fit the vector registers. The last block has
fewer columns and masks the others, which are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from spikefuse.kernels.numba_runtime import element, kernel

# float32 values in a cache line.
LINE = 16
# Bits of a word.
WORD = 32
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
# Kernels call intrinsics without the typing context, which type checkers don't know.
_intrinsic: Any = intrinsic


class _Block:
    """Loads and stores of `lanes` adjacent values, or of the first `count` if it is given."""

    def __init__(self, context: Any, builder: Any, lanes: int, count: Any = None) -> None:
        self.context, self.builder = context, builder
        self.type = ir.VectorType(_FLOAT, lanes)
        self.mask = None
        if count is not None:
            lane = ir.Constant(ir.VectorType(_INT, lanes), list(range(lanes)))
            self.mask = builder.icmp_signed("<", lane, self.filled(builder.trunc(count, _INT)))

    def filled(self, value: Any) -> Any:
        """Return a vector with `value` in every lane."""
        lanes = self.type.count
        vector = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        vector = self.builder.insert_element(vector, value, _INT(0))
        first = ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes)
        return self.builder.shuffle_vector(vector, vector, first)

    def _pointer(self, array_type: Any, array: Any, index: Any) -> Any:
        first = element(self.context, self.builder, array_type, array, index)
        return self.builder.bitcast(first, self.type.as_pointer())

    def load(self, array_type: Any, array: Any, index: Any) -> Any:
        pointer = self._pointer(array_type, array, index)
        if self.mask is None:
            return self.builder.load(pointer, align=4)
        zero = ir.Constant(self.type, [0.0] * self.type.count)
        return self._masked("load", self.type, [pointer, _INT(4), self.mask, zero])

    def store(self, value: Any, array_type: Any, array: Any, index: Any) -> None:
        pointer = self._pointer(array_type, array, index)
        if self.mask is None:
            self.builder.store(value, pointer, align=4)
        else:
            self._masked("store", ir.VoidType(), [value, pointer, _INT(4), self.mask])

    def _masked(self, operation: str, result: Any, arguments: list[Any]) -> Any:
        name = f"llvm.masked.{operation}.v{self.type.count}f32.p0"
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return `a * b + c` with one rounding."""
        name = f"llvm.fma.v{self.type.count}f32"
        kind = ir.FunctionType(self.type, [self.type] * 3)
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, [a, b, c])

    def total(self, value: Any) -> Any:
        """Return the sum over the lanes, in a tree of halves."""
        lanes = self.type.count
        while lanes > 1:
            lanes //= 2
            halves = [
                self.builder.shuffle_vector(
                    value, value, ir.Constant(ir.VectorType(_INT, lanes), list(half))
                )
                for half in (range(lanes), range(lanes, 2 * lanes))
            ]
            value = self.builder.fadd(*halves)
        return self.builder.extract_element(value, _INT(0))


def _blocks(context: Any, builder: Any, m: Any) -> Iterator[tuple[_Block, Any]]:
    """Yield the blocks that cover m columns, each with its first column.

    The caller builds the code of a block inside the branch or loop that is open at the yield.
    """

    def below(lanes: int) -> Any:
        return builder.and_(m, m.type(-lanes))

    with cgutils.for_range_slice(builder, m.type(0), below(128), m.type(128)) as (k, _):
        yield _Block(context, builder, 128), k
    for lanes in (64, 32, 16):
        there = builder.icmp_signed("!=", builder.and_(m, m.type(lanes)), m.type(0))
        with builder.if_then(there):
            yield _Block(context, builder, lanes), below(2 * lanes)
    with builder.if_then(builder.icmp_signed("<", below(16), m)):
        yield _Block(context, builder, 16, builder.sub(m, below(16))), below(16)


@_intrinsic
def _sum_rows(typing, out, at, first, start, source, stride, column, m, rows, begin, end):
    def generate(context, builder, signature, args):
        out_, at_, first_, start_, source_, stride_, column_, m_, rows_, begin_, end_ = args
        for block, k in _blocks(context, builder, m_):
            total = cgutils.alloca_once(builder, block.type)
            builder.store(block.load(first, first_, builder.add(start_, k)), total)
            place = builder.add(column_, k)
            with cgutils.for_range_slice(builder, begin_, end_, begin_.type(1)) as (e, _):
                row = builder.load(element(context, builder, rows, rows_, e))
                row = builder.mul(builder.sext(row, e.type), stride_)
                value = block.load(source, source_, builder.add(row, place))
                builder.store(builder.fadd(builder.load(total), value), total)
            block.store(builder.load(total), out, out_, builder.add(at_, k))
        return context.get_dummy_value()

    n = types.intp
    return types.void(out, n, first, n, source, n, n, n, rows, n, n), generate


@_intrinsic
def _dots(typing, out, weight, at, m, source, stride, column, rows, entries, begin, end):
    def generate(context, builder, signature, args):
        out_, weight_, at_, m_, source_, stride_, column_, rows_, entries_, begin_, end_ = args
        for block, k in _blocks(context, builder, m_):
            weights = block.load(weight, weight_, builder.add(at_, k))
            is_first = builder.icmp_signed("==", k, k.type(0))
            place = builder.add(column_, k)
            with cgutils.for_range_slice(builder, begin_, end_, begin_.type(1)) as (e, _):
                row = builder.load(element(context, builder, rows, rows_, e))
                row = builder.mul(builder.sext(row, e.type), stride_)
                value = block.load(source, source_, builder.add(row, place))
                total = block.total(builder.fmul(weights, value))
                entry = builder.load(element(context, builder, entries, entries_, e))
                target = element(context, builder, out, out_, builder.sext(entry, e.type))
                before = builder.select(is_first, _FLOAT(0.0), builder.load(target))
                builder.store(builder.fadd(before, total), target)
        return context.get_dummy_value()

    n = types.intp
    return types.void(out, weight, n, n, source, n, n, rows, entries, n, n), generate


# Rows of a product that are computed at a time, and columns, those of a panel of its weights:
# 8 independent sums of 8 values.
ROWS, PANEL = 4, 16


def panels(weight: torch.Tensor) -> torch.Tensor:
    """Return matrices `[H, K, N]` in float32 as `[H, panels, K, PANEL]`, columns padded by 0."""
    weight = torch.nn.functional.pad(weight.float(), (0, -weight.shape[2] % PANEL))
    return weight.unflatten(2, (-1, PANEL)).transpose(1, 2).contiguous()


@_intrinsic
def _multiply(typing, out, values, at, stride, weight, panel, n, found, count):
    def generate(context, builder, signature, args):
        out_, values_, at_, stride_, weight_, panel_, n_, found_, count_ = args
        offsets = [at_]
        for _ in range(ROWS - 1):
            offsets.append(builder.add(offsets[-1], stride_))
        block = _Block(context, builder, PANEL)
        totals = [cgutils.alloca_once(builder, block.type) for _ in range(ROWS)]

        with cgutils.for_range_slice(builder, n_.type(0), n_, n_.type(PANEL)) as (k, number):
            for total in totals:
                builder.store(block.filled(_FLOAT(0.0)), total)
            first = builder.mul(builder.add(panel_, number), n_)
            with cgutils.for_range(builder, count_) as loop:
                row = builder.load(element(context, builder, found, found_, loop.index))
                place = builder.mul(builder.add(first, row), n_.type(PANEL))
                weights = block.load(weight, weight_, place)
                for offset, total in zip(offsets, totals, strict=True):
                    value = element(context, builder, values, values_, builder.add(offset, row))
                    factor = block.filled(builder.load(value))
                    sum_ = block.multiply_add(factor, weights, builder.load(total))
                    builder.store(sum_, total)
            left = builder.sub(n_, k)
            whole = builder.icmp_signed(">=", left, n_.type(PANEL))
            with builder.if_else(whole) as branches:
                for branch, limit in zip(branches, (None, left), strict=True):
                    with branch:
                        target = _Block(context, builder, PANEL, limit)
                        for offset, total in zip(offsets, totals, strict=True):
                            place = builder.add(offset, k)
                            target.store(builder.load(total), out, out_, place)
        return context.get_dummy_value()

    n = types.intp
    return types.void(out, values, n, n, weight, n, n, found, n), generate


# Wrapped in kernels, so that they are compiled once for all callers.


@kernel
def multiply(out, values, at, stride, weight, panel, n, found):
    """`out[r, i] = sum over k < n of values[r, k] weight[k, i]` for i < n and r < ROWS.

    Row r of `out` and `values` begins at `at + r * stride`. `weight` is of `panels`, of which the
    matrix begins at `panel`. Rows of the weight whose values are all 0 are skipped, which changes
    no sum. `found` has room for n integers.
    """
    count = 0
    for k in range(n):
        found[count] = k
        count += (
            (values[at + k] != 0.0)
            | (values[at + k + stride] != 0.0)
            | (values[at + k + 2 * stride] != 0.0)
            | (values[at + k + 3 * stride] != 0.0)
        )
    _multiply(out, values, at, stride, weight, panel, n, found, count)


@kernel
def sum_rows(out, at, first, start, source, stride, column, m, rows, begin, end):
    """`out[at + k] = first[start + k] + sum of source[r, column + k]` for k < m, over the rows r in
    `rows[begin:end]`, in their order."""
    _sum_rows(out, at, first, start, source, stride, column, m, rows, begin, end)


@kernel
def add_spike_rows(first, last, out, source, spikes, count, size, width, chunk):
    """`out[j, i] += sum over r < count of spikes[r, j] source[r, column + i]` for first <= j < last
    and i < width, where `column` is that of the first neuron in j's group of `width`.

    Rows of `source` and `spikes` have `size` values. Each `chunk` of them is read for all j before
    the next one.
    """
    rows = np.empty(chunk + 1, np.int32)
    for begin in range(0, count, chunk):
        end = min(count, begin + chunk)
        for j in range(first, last):
            found = 0
            for r in range(begin, end):
                rows[found] = r
                found += spikes[r * size + j] != 0.0
            at, column = j * width, j // width * width
            sum_rows(out, at, out, at, source, size, column, width, rows, 0, found)


@kernel
def dots(out, weight, at, m, source, stride, column, rows, entries, begin, end):
    """`out[entries[e]] = sum over k < m of weight[at + k] source[rows[e], column + k]` for
    begin <= e < end."""
    _dots(out, weight, at, m, source, stride, column, rows, entries, begin, end)


@_intrinsic
def equal_bits(typing, array, at, value, count):
    """Return a word whose bit k is `array[at + k] == value`, for k < min(count, WORD)."""

    def generate(context, builder, signature, args):
        array_, at_, value_, count_ = args
        word = cgutils.alloca_once(builder, _INT)
        whole = builder.icmp_signed(">=", count_, count_.type(WORD))
        with builder.if_else(whole) as branches:
            for branch, limit in zip(branches, (None, count_), strict=True):
                with branch:
                    block = _Block(context, builder, WORD, limit)
                    values = block.load(array, array_, at_)
                    equal = builder.fcmp_ordered("==", values, block.filled(value_))
                    if block.mask is not None:
                        equal = builder.and_(equal, block.mask)
                    builder.store(builder.bitcast(equal, _INT), word)
        return builder.load(word)

    return types.uint32(array, types.intp, types.float32, types.intp), generate


@_intrinsic
def _prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of `array[index]`, which may be out of bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, _INT(0), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@kernel
def prefetch(array, at, m):
    """Prefetch `array[at : at + m]`."""
    for k in range(0, m, LINE):
        _prefetch(array, at + k)


@kernel
def aligned(size):
    """Allocate `size` float32 values that begin at a cache line."""
    buffer = np.empty(size + LINE, np.float32)
    first = -(buffer.ctypes.data >> 2) % LINE
    return buffer[first : first + size]
