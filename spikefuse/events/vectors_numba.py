"""Vectorized sums and dot products of listed rows on CPUs, with accumulators in registers.

A row is computed in blocks of as many columns as fit the vector registers. The last block has
fewer columns and masks the others, which are neither read nor written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from spikefuse.kernels.numba_runtime import kernel

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
        self.zero = ir.Constant(self.type, [0.0] * lanes)
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
        element = _element(self.context, self.builder, array_type, array, index)
        return self.builder.bitcast(element, self.type.as_pointer())

    def load(self, array_type: Any, array: Any, index: Any) -> Any:
        pointer = self._pointer(array_type, array, index)
        if self.mask is None:
            return self.builder.load(pointer, align=4)
        return self._masked("load", self.type, [pointer, _INT(4), self.mask, self.zero])

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


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Return the address of `array[index]`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index], inbounds=True)


def _row_start(context: Any, builder: Any, row: Any, stride: Any, column: Any) -> Any:
    """Return `row * stride + column` for the address of a row number."""
    number = builder.sext(builder.load(row), stride.type)
    return builder.add(builder.mul(number, stride), column)


def _make_sum(lanes: int, masked: bool) -> Any:
    @_intrinsic
    def sums(typing, out, at, first, start, source, stride, column, rows, begin, end, count):
        """`out[at + k] = first[start + k] + sum of source[rows[e], column + k]` for k < lanes (or
        k < count if masked) and begin <= e < end."""

        def generate(context, builder, signature, args):
            out_, at_, first_, start_, source_, stride_, column_, rows_, begin_, end_, count_ = args
            block = _Block(context, builder, lanes, count_ if masked else None)
            total = cgutils.alloca_once(builder, block.type)
            builder.store(block.load(first, first_, start_), total)
            with cgutils.for_range_slice(builder, begin_, end_, begin_.type(1)) as (e, _):
                row = _element(context, builder, rows, rows_, e)
                place = _row_start(context, builder, row, stride_, column_)
                value = block.load(source, source_, place)
                builder.store(builder.fadd(builder.load(total), value), total)
            block.store(builder.load(total), out, out_, at_)
            return context.get_dummy_value()

        n = types.intp
        return types.void(out, n, first, n, source, n, n, rows, n, n, n), generate

    return sums


def _make_dots(lanes: int, masked: bool) -> Any:
    @_intrinsic
    def products(
        typing, out, add, weight, at, source, stride, column, rows, entries, begin, end, count
    ):
        """`out[entries[e]] = sum over k of weight[at + k] source[rows[e], column + k]`, with k and
        e as above; with `add`, the sum is added to `out[entries[e]]`."""

        def generate(context, builder, signature, args):
            (out_, add_, weight_, at_, source_, stride_, column_,
             rows_, entries_, begin_, end_, count_) = args  # fmt: skip
            block = _Block(context, builder, lanes, count_ if masked else None)
            weights = block.load(weight, weight_, at_)
            with cgutils.for_range_slice(builder, begin_, end_, begin_.type(1)) as (e, _):
                row = _element(context, builder, rows, rows_, e)
                place = _row_start(context, builder, row, stride_, column_)
                total = block.total(builder.fmul(weights, block.load(source, source_, place)))
                entry = builder.load(_element(context, builder, entries, entries_, e))
                target = _element(context, builder, out, out_, builder.sext(entry, e.type))
                before = builder.select(add_, builder.load(target), _FLOAT(0.0))
                builder.store(builder.fadd(before, total), target)
            return context.get_dummy_value()

        n, flag = types.intp, types.boolean
        arguments = out, flag, weight, n, source, n, n, rows, entries, n, n, n
        return types.void(*arguments), generate

    return products


def _make_equal(masked: bool) -> Any:
    @_intrinsic
    def bits(typing, array, at, value, count):
        """A word whose bit k is `array[at + k] == value`, for k < WORD (or k < count if masked)."""

        def generate(context, builder, signature, args):
            array_, at_, value_, count_ = args
            block = _Block(context, builder, WORD, count_ if masked else None)
            equal = builder.fcmp_ordered("==", block.load(array, array_, at_), block.filled(value_))
            if block.mask is not None:
                equal = builder.and_(equal, block.mask)
            return builder.bitcast(equal, _INT)

        return types.uint32(array, types.intp, types.float32, types.intp), generate

    return bits


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


_sum_128, _sum_64, _sum_32, _sum_16 = (_make_sum(lanes, False) for lanes in (128, 64, 32, 16))
_sum_rest = _make_sum(16, True)
_dots_128, _dots_64, _dots_32, _dots_16 = (_make_dots(lanes, False) for lanes in (128, 64, 32, 16))
_dots_rest = _make_dots(16, True)
_bits, _bits_rest = _make_equal(False), _make_equal(True)


@kernel
def equal_bits(array, at, value, count):
    """Return a word whose bit k is `array[at + k] == value`, for k < min(count, WORD)."""
    if count >= WORD:
        return _bits(array, at, value, WORD)
    return _bits_rest(array, at, value, count)


@kernel
def aligned(size):
    """Allocate `size` float32 values that begin at a cache line."""
    buffer = np.empty(size + LINE, np.float32)
    first = -(buffer.ctypes.data >> 2) % LINE
    return buffer[first : first + size]


@kernel
def sum_rows(out, at, first, start, source, stride, column, m, rows, begin, end):
    """`out[at + k] = first[start + k] + sum of source[r, column + k]` for k < m, over the rows r in
    `rows[begin:end]`, in their order."""
    k = 0
    while k + 128 <= m:
        _sum_128(out, at + k, first, start + k, source, stride, column + k, rows, begin, end, 128)
        k += 128
    if k + 64 <= m:
        _sum_64(out, at + k, first, start + k, source, stride, column + k, rows, begin, end, 64)
        k += 64
    if k + 32 <= m:
        _sum_32(out, at + k, first, start + k, source, stride, column + k, rows, begin, end, 32)
        k += 32
    if k + 16 <= m:
        _sum_16(out, at + k, first, start + k, source, stride, column + k, rows, begin, end, 16)
        k += 16
    if k < m:
        _sum_rest(
            out, at + k, first, start + k, source, stride, column + k, rows, begin, end, m - k
        )


@kernel
def dots(out, weight, at, m, source, stride, column, rows, entries, begin, end):
    """`out[entries[e]] = sum over k < m of weight[at + k] source[rows[e], column + k]` for
    begin <= e < end."""
    k = 0
    while k + 128 <= m:
        i, c = at + k, column + k
        _dots_128(out, k > 0, weight, i, source, stride, c, rows, entries, begin, end, 128)
        k += 128
    if k + 64 <= m:
        i, c = at + k, column + k
        _dots_64(out, k > 0, weight, i, source, stride, c, rows, entries, begin, end, 64)
        k += 64
    if k + 32 <= m:
        i, c = at + k, column + k
        _dots_32(out, k > 0, weight, i, source, stride, c, rows, entries, begin, end, 32)
        k += 32
    if k + 16 <= m:
        i, c = at + k, column + k
        _dots_16(out, k > 0, weight, i, source, stride, c, rows, entries, begin, end, 16)
        k += 16
    if k < m:
        i, c = at + k, column + k
        _dots_rest(out, k > 0, weight, i, source, stride, c, rows, entries, begin, end, m - k)
