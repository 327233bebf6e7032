"""The host side of Numba kernels: PyTorch's tensors as arrays, and PyTorch's own threads.

Where PyTorch uses OpenMP, so do kernels: threads start without the interpreter's lock, and no two
thread pools compete for the cores. Elsewhere, and in forked processes, which OpenMP does not
support, kernels run on Python threads.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from spikefuse.kernels.busy import Watch
from spikefuse.kernels.numba_runtime import global_compiler_lock, kernel

# Neuron-steps from which a task is worth its own thread, measured where threads wait actively:
# two threads take 10 us more than one for half of these, and less for four times as many.
MIN_TASK = 1 << 15
#: A unit of ranges in which no two threads write to the same cache line.
LINE = 16


def shared(function: Callable[..., None], count: int, unit: int, work: int, *args: Any) -> None:
    """Run `function(first, last, *args)` over `count` items on PyTorch's number of threads.

    Args:
        function: a kernel that returns None.
        unit: the ranges are multiples of it.
        work: the total work in neuron-steps.

    Raises:
        MemoryError: a kernel failed. On Python threads, the kernel's own exception.
    """
    threads = torch.get_num_threads()
    if _watch is not None and threads > 1:
        _watch.look(threads)
    share = -(-count // (min(threads, max(1, work // MIN_TASK)) * unit)) * unit
    if share >= count:
        function(0, count, *args)
    elif not _has_openmp:
        _on_python_threads(function, count, share, *args)
    # Always use all threads, as PyTorch does: OpenMP ends threads that a call does not use.
    elif _run(_address(function, args), count, share, threads, args):
        raise MemoryError(f"{function.__name__} failed, most likely because it ran out of memory")


def threads_for(work: int) -> int:
    """Return the number of threads worth using for `work` neuron-steps."""
    return min(torch.get_num_threads(), max(1, work // MIN_TASK))


_addresses: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()


def _address(function: Any, args: tuple[Any, ...]) -> int:
    """Return the address of a kernel's machine code for these types of arguments."""
    addresses = _addresses.get(function)
    if addresses is None:
        addresses = _addresses.setdefault(function, {})
    key = _type_key(args)
    if key not in addresses:
        kinds = types.intp, types.intp, *map(numba.typeof, args)
        function.compile(kinds)  # on another thread, which takes the lock
        with global_compiler_lock:
            compiled = function.overloads[kinds]
            name = compiled.fndesc.llvm_func_name
            address = compiled.library.get_pointer_to_function(name)
        assert address and compiled.signature.return_type == types.none, name
        addresses[key] = address
    return addresses[key]


def _type_key(value: Any) -> Any:
    """Return a key of an argument's type; `numba.typeof` is slow."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.ndim, value.flags.num
    return tuple(map(_type_key, value)) if isinstance(value, tuple) else type(value)


# Kernels call intrinsics without the typing context, which type checkers do not understand.
_intrinsic: Any = intrinsic
_PARALLEL, _THREAD, _THREADS = (
    f"spikefuse_{name}" for name in ("parallel", "thread_num", "num_threads")
)


def _register_openmp() -> Any:
    """Register the OpenMP library that PyTorch is linked with; return its `GOMP_parallel`, or None
    if there is none."""
    if sys.platform != "linux":
        return None
    # A library loaded before PyTorch serves PyTorch too; otherwise libtorch_cpu.so depends on it.
    for place in (None, "libtorch_cpu.so"):
        try:
            library = ctypes.CDLL(place)
            found = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
        except (OSError, AttributeError):
            continue
        for name, function in zip((_PARALLEL, _THREAD, _THREADS), found, strict=True):
            llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
        return found[0]
    return None


# Settings of users who have decided how threads wait.
_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
_parallel = _register_openmp()
_has_openmp = _parallel is not None
_watch = Watch(_parallel) if _has_openmp and not _WAITING & os.environ.keys() else None
_FLAG, _BYTES = ir.IntType(32), ir.IntType(8).as_pointer()


def _declared(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, arguments)
    return cgutils.get_or_insert_function(builder.module, kind, name)


@_intrinsic
def _fork(
    typing_context: Any, address: Any, count: Any, share: Any, threads: Any, args: Any
) -> Any:
    """Call the kernel at `address` on ranges of `share` items; return whether a call failed."""
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
    """Build the function that each thread runs on the fields packed by `_fork`.

    Thread i takes ranges i, i + n, i + 2n, ..., where n is the number of threads OpenMP provides,
    which may be less than requested.
    """
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


def _reset_after_fork() -> None:
    global _has_openmp, _watch, _pool, _lock
    _has_openmp, _watch, _pool, _lock = False, None, None, threading.Lock()


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_reset_after_fork)


def _on_python_threads(function: Callable[..., None], count: int, share: int, *args: Any) -> None:
    global _pool, _pool_size
    starts = range(0, count, share)
    with _lock:
        if _pool is None or _pool_size < len(starts):
            # The previous, smaller pool finishes its work before it is garbage-collected.
            _pool, _pool_size = ThreadPoolExecutor(len(starts), "spikefuse"), len(starts)
        pool = _pool
    tasks = [pool.submit(function, a, min(a + share, count), *args) for a in starts]
    for task in tasks:
        task.result()


def arrays(tensors: Iterable[torch.Tensor | None], are_large: bool = False) -> list[np.ndarray]:
    """Return the memory of tensors, from their first elements to their last, as 1-d arrays.

    None gives an empty array. With `are_large`, new memory is advised to use huge pages.
    """
    found = []
    for x in tensors:
        if x is None:
            found.append(_EMPTY)
            continue
        if are_large and x.nbytes >= LARGE:
            advise_huge_pages(x)
        size = x.numel()
        if size and not x.is_contiguous():
            size = 1
            for count, stride in zip(x.shape, x.stride(), strict=True):
                size += (count - 1) * stride
        if not size:
            found.append(np.empty(0, _TYPES[x.dtype]))
            continue
        # After `x.numpy()` the memory could not be released, as `fully_shard` does with parameters
        # between forward and backward.
        memory: Any = _Memory.from_address(x.data_ptr())
        memory.tensor = x  # which must live as long as the array
        found.append(np.ndarray(size, _TYPES[x.dtype], memory))
    return found


def flat(x: torch.Tensor) -> np.ndarray:
    """Return the memory of one tensor; see `arrays`."""
    return arrays((x,))[0]


@cache
def array_of(dtype: torch.dtype) -> np.ndarray:
    """Return an empty array that tells a kernel how values of a dtype lie in memory."""
    return np.empty(0, _TYPES[dtype])


_EMPTY = np.empty(0, np.float32)
#: Memory from an address on; arrays of it have sizes of their own.
_Memory = ctypes.c_char * sys.maxsize
# Kernels read and write half precision as integers.
_TYPES = {
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.int16),
    **{
        getattr(torch, name): np.dtype(name)
        for name in ("float32", "float64", "int64", "int32", "int16", "uint8", "bool")
    },
}

# Bytes from which page faults of a new tensor cost more than its arithmetic; bytes per page.
LARGE, _PAGE = 1 << 22, 1 << 12
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def advise_huge_pages(x: torch.Tensor) -> None:
    """Ask Linux to back a new, large tensor with 2 MiB pages; has no effect on other systems."""
    memory = x.untyped_storage()
    if memory.nbytes() >= LARGE:
        _advise(memory.data_ptr(), memory.nbytes(), _MADV_HUGEPAGE)


def move_to_huge_pages(x: torch.Tensor) -> None:
    """Ask Linux, once, to move a large tensor that is read in random order to 2 MiB pages."""
    memory = x.untyped_storage()
    if memory.nbytes() >= LARGE:
        _advise_once(memory.data_ptr(), memory.nbytes(), _MADV_COLLAPSE)


def _advise(address: int, size: int, advice: int) -> None:
    if _madvise is not None:
        start = -(-address // _PAGE) * _PAGE
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(size - _PAGE), advice)


# Keyed on address and size: memory that the allocator reuses is already on huge pages.
_advise_once = lru_cache(maxsize=1024)(_advise)
