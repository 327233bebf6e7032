"""The runtime of generated Numba kernels: typed memory access, and the functions of `numba_math`.

Generated loops run over adjacent neurons and must vectorize, for which LLVM has to know that
arrays do not overlap: every access carries the number of its array (`slot`) as alias metadata.
Half precision is converted on access; bfloat16 is stored in uint16 arrays, float16 in int16 arrays.

Names that Numba does not document are used here, in `numba_cache` and in `numba_host` only. What
is public takes their place:

- `FunctionCache`, `CompileResultCacheImpl` and `InTreeCacheLocator` of `numba.core.caching`,
  `serialize.dumps`, and `_cache` of a dispatcher: a cache on disk that notices damage and edits of
  inlined functions. In public: `enable_caching()`, whose damaged files raise an error in each call.
- `compile` of a dispatcher, which is replaced: one process compiles at a time, and not on the
  thread of the caller, whose tensors Numba would hold. In public: kernels are compiled where they
  are called.
- `numba.core.compiler_lock.global_compiler_lock`, `overloads`, `fndesc.llvm_func_name` and
  `library.get_pointer_to_function`: machine code runs on PyTorch's own threads. In public: Python
  threads, as in forked processes.

`numba.extending.intrinsic`, `numba.core.cgutils` and llvmlite's builder are Numba's way to
extend it, and `CompilerBase`, `PassManager` and passes its way to customize the compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, typed_passes, untyped_passes
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.extending import intrinsic

from spikefuse.kernels.cache_folder import private_directory
from spikefuse.kernels.file_lock import locked
from spikefuse.kernels.numba_math import (
    cos,
    erf,
    exp,
    floor,
    fma,
    fmod,
    log,
    log2,
    round_even,
    sigmoid,
    sin,
    sqrt,
)
from spikefuse.kernels.threads import hold_at_fork, on_thread

__all__ = [
    "add",
    "add_by_channel",
    "at",
    "channel_rows",
    "cos",
    "erf",
    "exp",
    "f32",
    "fence",
    "fill_row",
    "floor",
    "fma",
    "fmod",
    "global_compiler_lock",
    "kernel",
    "load",
    "load_row",
    "log",
    "log2",
    "round_even",
    "sigmoid",
    "sin",
    "sqrt",
    "store",
    "store_row",
    "stream",
]

try:
    from numba.core.compiler_lock import global_compiler_lock

    from spikefuse.kernels.numba_cache import cache_of
except ImportError:  # in a version of Numba that has them elsewhere
    global_compiler_lock, cache_of = threading.RLock(), None  # type: ignore[assignment]

hold_at_fork(global_compiler_lock)
# Imports what the first call of a kernel would: a child of a fork meanwhile would wait for ever.
numba.typeof(np.empty(0))

f32 = np.float32


class _KernelCompiler(CompilerBase):
    """Numba's compiler with the passes that kernels need. The others, for closures, array
    expressions, overloads and branches on literals, find nothing to do in kernels."""

    _PASSES = (
        untyped_passes.TranslateByteCode,
        untyped_passes.FixupArgs,
        untyped_passes.IRProcessing,
        untyped_passes.GenericRewrites,
        untyped_passes.ReconstructSSA,
        typed_passes.NopythonTypeInference,
        typed_passes.PreLowerStripPhis,
        typed_passes.IRLegalization,
        typed_passes.NativeLowering,
        typed_passes.NoPythonBackend,
    )

    def define_pipelines(self) -> list[PassManager]:
        passes = PassManager("kernel")
        for each in self._PASSES:
            passes.add_pass(each, each.__name__)
        passes.finalize()
        return [passes]


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function with Numba, with an on-disk cache.

    A file lock prevents concurrent processes from compiling it twice and from writing Numba's cache
    index at once. Fastmath is off, because contraction and reassociation would change spikes.
    """
    if function is None:
        return partial(kernel, **options)
    options |= {"no_cfunc_wrapper": True, "pipeline_class": _KernelCompiler}
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", **options)(function)
    if cache_of is not None:
        dispatcher._cache = cache_of(function)  # as enable_caching() does
    else:
        # Numba reads this setting only while it makes a cache.
        config: Any = numba.config
        before, config.CACHE_DIR = config.CACHE_DIR, str(private_directory())
        try:
            dispatcher.enable_caching()
        finally:
            config.CACHE_DIR = before
    compile_, path = dispatcher.compile, function.__code__.co_filename

    def compile_once(signature: Any) -> Any:
        # Numba's lock comes first: kernels called by other kernels are compiled while it is held.
        with global_compiler_lock, locked(path):
            return compile_(signature)

    dispatcher.compile = partial(_on_compiler_thread, compile_once)
    return dispatcher


_compiler = threading.local()


def _on_compiler_thread(compile_: Callable[[Any], Any], signature: Any) -> Any:
    """Compile on another thread.

    Numba leaves its frames in reference cycles. On the caller's thread, they would keep its frames,
    too, and all tensors of the networks that run there.
    """
    if getattr(_compiler, "is_here", False):  # for a kernel that calls this one
        return compile_(signature)

    def run() -> Any:
        _compiler.is_here = True
        try:
            return compile_(signature)
        finally:
            _alias_metadata.cache_clear()
            _alias_scopes.cache_clear()

    return on_thread(run)


# Maximum number of arrays of a kernel; the compiler refuses to emit more.
MAX_SLOTS = 128

# Kernels call intrinsics without the typing context, which type checkers do not understand.
_intrinsic: Any = intrinsic
_reassociated: Any = partial(numba.njit, error_model="numpy", fastmath={"reassoc"})


def _annotate(builder: Any, instruction: Any, slot: int) -> None:
    own, others = _alias_metadata(builder.module, slot)
    instruction.set_metadata("alias.scope", own)
    instruction.set_metadata("noalias", others)


# Cached for modules that are being compiled, whose accesses are many and slots are few.
@lru_cache(maxsize=MAX_SLOTS)
def _alias_metadata(module: Any, slot: int) -> tuple[Any, Any]:
    scopes = _alias_scopes(module)
    others = [scope for i, scope in enumerate(scopes) if i != slot]
    return module.add_metadata([scopes[slot]]), module.add_metadata(others)


@lru_cache(maxsize=1)
def _alias_scopes(module: Any) -> list[Any]:
    def metadata(*operands: Any) -> Any:
        return module.add_metadata(list(operands))

    domain = metadata(ir.MetaDataString(module, "spikefuse"))
    return [metadata(ir.MetaDataString(module, f"slot{i}"), domain) for i in range(MAX_SLOTS)]


def element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Return the address of `array[index]`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index], inbounds=True)


@_intrinsic(prefer_literal=True)
def at(typing_context: Any, array: Any, addresses: Any, index: Any) -> Any:
    """Return the memory from an address on, as an array of the type of `array`; its size is 0 at
    address 0, and larger than any index elsewhere. Without addresses, return `array` itself."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not len(addresses):
            context.nrt.incref(builder, array, args[0])
            return args[0]
        address = builder.extract_value(args[1], index.literal_value)
        found = context.make_array(array)(context, builder, args[0])
        found.data = builder.inttoptr(address, found.data.type)
        found.meminfo = cgutils.get_null_value(found.meminfo.type)
        found.nitems = address
        found.shape = cgutils.pack_array(builder, [address])
        return found._getvalue()

    return array(array, addresses, index), generate


@_intrinsic(prefer_literal=True)
def load(typing_context: Any, array: Any, index: Any, slot: Any) -> Any:
    """Return `array[index]` as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(element(context, builder, array, args[0], args[1]))
        _annotate(builder, value, slot.literal_value)
        if array.dtype == types.uint16:
            wide = builder.zext(value, ir.IntType(32))
            return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), _FLOAT)
        if array.dtype == types.int16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), _FLOAT)
        return value

    return types.float32(array, types.intp, slot), generate


@_intrinsic(prefer_literal=True)
def store(typing_context: Any, array: Any, index: Any, value: Any, slot: Any) -> Any:
    """Set `array[index] = value`, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = args[2]
        if array.dtype == types.uint16:
            number = _to_bfloat16(builder, number)
        elif array.dtype == types.int16:
            number = builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))
        address = element(context, builder, array, args[0], args[1])
        _annotate(builder, builder.store(number, address), slot.literal_value)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32, slot), generate


@_intrinsic
def add(typing_context: Any, total: Any, value: Any) -> Any:
    """Return `total + value`, which a loop may add up in any order, and thus in vectors."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args, flags=("reassoc",))

    return types.float32(types.float32, types.float32), generate


# Bytes per cache line.
_LINE = 64


@_intrinsic
def stream(typing_context: Any, array: Any, start: Any, row: Any, count: Any) -> Any:
    """Set `array[start : start + count] = row[:count]`, bypassing the caches.

    Unlike an ordinary store, this does not first read the cache line that it overwrites. Other
    threads see the values after `fence`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def constant(value: int) -> Any:
            return ir.Constant(args[3].type, value)

        def at(pointer: Any, offset: Any, kind: Any) -> Any:
            return builder.bitcast(builder.gep(pointer, [offset]), kind.as_pointer())

        byte, line = ir.IntType(8), ir.VectorType(ir.IntType(32), _LINE // 4)
        target = element(context, builder, array, args[0], args[1])
        source = element(context, builder, row, args[2], constant(0))
        target, source = (builder.bitcast(p, byte.as_pointer()) for p in (target, source))
        size = builder.mul(args[3], constant(array.dtype.bitwidth // 8))
        # The head ends at the first cache line boundary of the target.
        head = builder.neg(builder.ptrtoint(target, args[3].type))
        head = builder.and_(head, constant(_LINE - 1))
        head = builder.select(builder.icmp_signed("<", head, size), head, size)
        whole = builder.and_(builder.sub(size, head), constant(-_LINE))
        done = builder.add(head, whole)
        cgutils.raw_memcpy(builder, target, source, head, 1)
        with cgutils.for_range_slice(builder, head, done, constant(_LINE)) as (i, _):
            value = builder.load(at(source, i, line), align=1)
            stored = builder.store(value, at(target, i, line), align=_LINE)
            one = ir.Constant(ir.IntType(32), 1)
            stored.set_metadata("nontemporal", builder.module.add_metadata([one]))
        rest = builder.sub(size, done)
        cgutils.raw_memcpy(builder, at(target, done, byte), at(source, done, byte), rest, 1)
        return context.get_dummy_value()

    return types.void(array, types.intp, row, types.intp), generate


@_intrinsic
def fence(typing_context: Any) -> Any:
    """Make streamed values visible to other threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_FLOAT = ir.FloatType()


def _to_bfloat16(builder: Any, number: Any) -> Any:
    def constant(value: int) -> Any:
        return ir.Constant(ir.IntType(32), value)

    bits = builder.bitcast(number, ir.IntType(32))
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    # Rounding could turn a NaN into infinity.
    is_nan = builder.fcmp_unordered("uno", number, number)
    result = builder.select(is_nan, constant(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(result, constant(16)), ir.IntType(16))


# Signed indices may count from the end, for which Numba adds a branch that prevents vectorization.
unsigned = np.uintp


@kernel
def fill_row(row, count, value):
    """Set `row[:count] = value`."""
    for i in range(unsigned(count)):
        row[i] = value


@kernel
def load_row(row, values, first, count, default):
    """Set `row[:count] = values[first : first + count]`, or to `default` if `values` is empty."""
    if values.size:
        start = unsigned(first)
        for i in range(unsigned(count)):
            row[i] = values[start + i]
    else:
        fill_row(row, count, default)


@kernel
def store_row(values, first, row, count):
    """Set `values[first : first + count] = row[:count]` unless `values` is empty."""
    if values.size:
        start = unsigned(first)
        for i in range(unsigned(count)):
            values[start + i] = row[i]


@kernel
def channel_rows(row, count, values, first, inner):
    """Fill `row` with the channel values of neurons first ... first + count - 1."""
    channel, at, left = (first // inner) % values.size, 0, inner - first % inner
    while at < count:
        if inner == 1:
            end = min(at + values.size - channel, count)
            shift = unsigned(channel - at)
            for i in range(unsigned(at), unsigned(end)):
                row[i] = values[shift + i]
            channel = 0
        else:
            end, value = min(at + left, count), values[channel]
            for i in range(unsigned(at), unsigned(end)):
                row[i] = value
            channel, left = (channel + 1) % values.size, inner
        at = end


@kernel
def add_by_channel(row, count, sums, start, first, channels, inner):
    """Add `row`, values of neurons first ... first + count - 1, to `sums[start + channel]`.

    Changes `row`: samples are first added up pairwise. The last one may be a part of a sample.
    """
    period = channels * inner
    while count > period:
        samples = (count + period - 1) // period
        kept = (samples + 1) // 2 * period
        shift = unsigned(kept)
        for i in range(unsigned(count - kept)):
            row[i] += row[shift + i]
        count = kept
    channel, at, left = (first // inner) % channels, 0, inner - first % inner
    while at < count:
        if inner == 1:
            end = min(at + channels - channel, count)
            shift = unsigned(start + channel - at)
            for i in range(unsigned(at), unsigned(end)):
                sums[shift + i] += row[i]
            channel = 0
        else:
            end = min(at + left, count)
            sums[start + channel] += _total(row, unsigned(at), unsigned(end))
            channel, left = (channel + 1) % channels, inner
        at = end


@_reassociated
def _total(values, first, end):
    """Sum values[first:end] in double precision, in the order that vectorizes best."""
    total = 0.0
    for i in range(first, end):
        total += values[i]
    return total
