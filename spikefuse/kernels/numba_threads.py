"""Numba kernels over ranges, on PyTorch's own threads.

Where PyTorch works with OpenMP, so do kernels: one library wakes the threads, without the
interpreter's lock, and none spin while those of another pool compute. Elsewhere, and in a forked
process, which OpenMP does not survive, they run on threads of Python.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from spikefuse.kernels.numba_runtime import kernel

# A task shorter than this many neuron-steps is not worth a thread.
MIN_TASK = 1 << 14


def parallel(function: Callable[..., None], num_neurons: int, num_steps: int, *args: Any) -> None:
    """Run `function(first, last, *args)` over ranges of neurons on PyTorch's number of threads."""
    # Ranges in multiples of a cache line, so that no two threads write to one.
    shared(function, num_neurons, 16, num_neurons * num_steps, *args)


def shared(function: Callable[..., None], count: int, unit: int, work: int, *args: Any) -> None:
    """Run `function(first, last, *args)` over ranges of `count` things, in multiples of `unit`.

    Args:
        function: a kernel that returns nothing.
        work: of all of them, in neuron-steps.

    Raises:
        MemoryError: a kernel failed; on Python's threads, what it raised.
    """
    share = -(-count // (threads_for(work) * unit)) * unit
    if share >= count:
        function(0, count, *args)
    elif not _has_openmp:
        _on_python_threads(function, count, share, *args)
    # Always with all threads, as PyTorch does: OpenMP ends those that a call leaves out.
    elif _run(_address(function, args), count, share, torch.get_num_threads(), args):
        raise MemoryError(f"{function.__name__} failed, as kernels do for want of memory")


def threads_for(work: int) -> int:
    """The threads that so many neuron-steps are worth."""
    return min(torch.get_num_threads(), max(1, work // MIN_TASK))


_addresses: dict[Any, int] = {}


def _address(function: Any, args: tuple[Any, ...]) -> int:
    """Of the machine code of a kernel for such arguments."""
    key = function, _kind(args)
    if key not in _addresses:
        kinds = types.intp, types.intp, *map(numba.typeof, args)
        with global_compiler_lock:
            function.compile(kinds)
            compiled = function.overloads[kinds]
            name = compiled.fndesc.llvm_func_name
            address = compiled.library.get_pointer_to_function(name)
        assert address and compiled.signature.return_type == types.none, name
        _addresses[key] = address
    return _addresses[key]


def _kind(value: Any) -> Any:
    """What tells types of arguments apart; Numba's own way takes long."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.ndim, value.flags.num
    return tuple(map(_kind, value)) if isinstance(value, tuple) else type(value)


# In kernels they are called without the typing context, which no type checker knows.
_intrinsic: Any = intrinsic
_PARALLEL, _THREAD, _THREADS = (
    f"spikefuse_{name}" for name in ("parallel", "thread_num", "num_threads")
)


def _register_openmp() -> bool:
    """Let kernels find the OpenMP that PyTorch is linked with; whether there is one."""
    if sys.platform != "linux":
        return False
    # One loaded before PyTorch takes its calls, too; else it is a dependency of this library.
    for place in (None, "libtorch_cpu.so"):
        try:
            library = ctypes.CDLL(place)
            found = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
        except (OSError, AttributeError):
            continue
        for name, function in zip((_PARALLEL, _THREAD, _THREADS), found, strict=True):
            llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
        return True
    return False


_has_openmp = _register_openmp()
_FLAG, _BYTES = ir.IntType(32), ir.IntType(8).as_pointer()


def _declared(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, arguments)
    return cgutils.get_or_insert_function(builder.module, kind, name)


@_intrinsic
def _fork(
    typing_context: Any, address: Any, count: Any, share: Any, threads: Any, args: Any
) -> Any:
    """Call the kernel at `address` with ranges of `share` out of `count`; whether a call failed."""
    n, kinds = types.intp, (types.intp, types.intp, *args.types)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address_, count_, share_, threads_, args_ = values
        pointer = context.call_conv.get_function_type(types.none, kinds).as_pointer()
        fields = [count_, share_, builder.inttoptr(address_, pointer), args_, _FLAG(0)]
        place = cgutils.alloca_once_value(builder, cgutils.pack_struct(builder, fields))
        body = _body(context, builder, place.type, kinds)
        start = _declared(builder, _PARALLEL, ir.VoidType(), body.type, _BYTES, _FLAG, _FLAG)
        num_threads = builder.trunc(threads_, _FLAG)
        builder.call(start, [body, builder.bitcast(place, _BYTES), num_threads, _FLAG(0)])
        failed = builder.load(cgutils.gep_inbounds(builder, place, 0, 4))
        return builder.icmp_unsigned("!=", failed, _FLAG(0))

    return types.boolean(n, n, n, n, args), generate


def _body(context: Any, caller: Any, fields: Any, kinds: tuple[Any, ...]) -> Any:
    """What each thread does with the fields that `_fork` packs: it takes every so many ranges one,
    as OpenMP may give fewer threads than asked for."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES])
    body = ir.Function(caller.module, kind, f"{caller.function.name}.body")
    body.linkage = "internal"
    builder = ir.IRBuilder(body.append_basic_block("entry"))
    place = builder.bitcast(body.args[0], fields)
    count, share, kernel_, args = (
        builder.load(cgutils.gep_inbounds(builder, place, 0, i)) for i in range(4)
    )
    given = [builder.extract_value(args, i) for i in range(len(kinds) - 2)]
    thread, threads = (
        builder.sext(builder.call(_declared(builder, name, _FLAG), []), count.type)
        for name in (_THREAD, _THREADS)
    )
    first, step = builder.mul(thread, share), builder.mul(threads, share)
    with cgutils.for_range_slice(builder, first, count, step) as (begin, _):
        end = builder.add(begin, share)
        end = builder.select(builder.icmp_signed("<", end, count), end, count)
        arguments = [begin, end, *given]
        call = context.call_conv.call_function
        status, _ = call(builder, kernel_, types.none, kinds, arguments)
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(_FLAG(1), cgutils.gep_inbounds(builder, place, 0, 4))
    builder.ret_void()
    return body


@kernel
def _run(address, count, share, threads, args):
    return _fork(address, count, share, threads, args)


_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_lock = threading.Lock()


def _forget_threads() -> None:
    global _has_openmp, _pool, _lock
    _has_openmp, _pool, _lock = False, None, threading.Lock()


# Threads don't survive a fork.
os.register_at_fork(after_in_child=_forget_threads)


def _on_python_threads(function: Callable[..., None], count: int, share: int, *args: Any) -> None:
    global _pool, _pool_size
    starts = range(0, count, share)
    with _lock:
        if _pool is None or _pool_size < len(starts):
            # An older, smaller pool finishes its work and goes.
            _pool, _pool_size = ThreadPoolExecutor(len(starts), "spikefuse"), len(starts)
        pool = _pool
    tasks = [pool.submit(function, a, min(a + share, count), *args) for a in starts]
    for task in tasks:
        task.result()
