"""Launch Triton kernels on GPU tensors, or on CPU tensors in Triton's interpreter.

Names that Triton does not document are used here only. Other versions get what is public:

- `CompiledKernel.run`, `function` and `packed_metadata`, in version 3.6 also `launch`, `global_`
  and `profile_scratch_size`, `launch_cooperative_grid` and `launch_pdl` of the launcher: repeat
  launches without Triton's dispatcher, without which a training step of Spiking-ResNet18 takes 17
  to 22 % longer on an H200. In public: `kernel[grid](...)`, in versions that were not checked.
- `CompiledKernel.n_regs`: kernels that slightly exceed a limit are compiled with fewer registers.
  In public: none, and they stay as they are.
- `knobs.runtime.launch_enter_hook` and `launch_exit_hook`: profilers see all launches.
- `driver.active.get_current_stream`: PyTorch's current stream as a number, without an object for
  it. In public: `torch.cuda.current_stream`.
- `kernel.warmup`, `driver.active.get_current_target` and `cache.triton_key`: kernels are compiled
  on threads before they are needed. In public: the first launch compiles.
- `code_generator.warnings` (before 3.8): these versions change the filters of all threads.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.kernels.cache_folder import check_foreign
from spikefuse.kernels.threads import enough_stack

# With 80 registers per thread, 12 blocks of a backward kernel share a multiprocessor. In half
# precision, a kernel that needs up to 104 is faster when it is limited to 80.
REGISTER_LIMIT, MAX_REGISTERS = 80, 104


class TritonLaunch:
    """A kernel with its grid and integer arguments, and its compiled variants.

    Repeat launches, keyed on pointer alignment, bypass Triton's dispatcher. On an H200, an eager
    training step of Spiking-ResNet18 takes 17 to 22 % longer without this.

    Args:
        kernel: a Triton kernel. Its last arguments are the integers.
        integers: integer arguments, including constants.
        tight: recompile the kernel with fewer registers if it slightly exceeds the limit. The first
            launch then runs it twice.
        cooperative: launch only if all programs of the grid run at the same time.

    Tensors must have the same dtypes in all calls.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        integers: tuple[int, ...],
        num_warps: int,
        device: torch.device,
        tight: bool = False,
        cooperative: bool = False,
    ) -> None:
        self.kernel, self.grid, self.integers, self.tight = kernel, grid, integers, tight
        # Fused multiply-adds would change spikes.
        self.options = {"num_warps": num_warps, "enable_fp_fusion": False}
        if cooperative:
            self.options["launch_cooperative_grid"] = True
        self.device = device
        # Attributes of torch.device are slow to read.
        self.is_cpu, self.index = device.type == "cpu", device.index
        self.compiled: dict[tuple[int, ...], tuple[Any, FastLaunch | None]] = {}
        self.is_ahead = False
        self.lock = _locks.setdefault(kernel, threading.Lock())

    def compile_ahead(
        self,
        sequences: Sequence[Tensor | torch.dtype | None],
        states: Sequence[Tensor | None] = (),
        sums: Sequence[Tensor | None] = (),
        params: Sequence[float | Tensor] = (),
    ) -> None:
        """Begin to compile the kernel for such arguments, with aligned tensors, on a thread.

        A dtype stands for a tensor of that dtype.
        """
        if not (self.is_ahead or self.is_cpu):
            self.is_ahead, arguments = True, [*sequences, *states, *sums, *params]
            kinds = [x.dtype if isinstance(x, Tensor) else x for x in arguments]
            # When Python exits, threads take no more work.
            with suppress(RuntimeError), enough_stack():
                _compilers().submit(self._compile, kinds)

    def _compile(self, kinds: Sequence[Any]) -> None:
        _prepare()
        with self.lock, torch.cuda.device(self.device):
            self.kernel.warmup(*kinds, *self.integers, grid=self.grid, **self.options)

    def __call__(
        self,
        sequences: Sequence[Tensor | None],
        states: Sequence[Tensor | None] = (),
        sums: Sequence[Tensor | None] = (),
        params: Sequence[float | Tensor] = (),
    ) -> None:
        """Run the kernel on its arguments, which precede the integers in this order."""
        arguments = [*sequences, *states, *sums, *params]
        if self.is_cpu:
            # Infinities and NaN raise no warnings on a GPU either.
            with np.errstate(all="ignore"):
                self._dispatch(arguments)
        elif self.index == torch.cuda.current_device():
            self._launch(arguments)
        else:
            with torch.cuda.device(self.device):
                self._launch(arguments)

    def _launch(self, arguments: Sequence[Any]) -> None:
        raw = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
        # What Triton specializes on, apart from the dtypes and integers, which never change.
        key = tuple([x % 16 if x.__class__ is int else x is None for x in raw])
        known = self.compiled.get(key)
        if known is None:
            compiled = self._first_launch(arguments)
            if len(self.compiled) >= 64:
                self.compiled.clear()
            if compiled is not None:
                self.compiled[key] = compiled, _fast_launch(compiled)
            return
        compiled, fast = known
        if fast is None or _is_profiled():
            compiled[self.grid](*arguments, *self.integers)
        else:
            run, fixed, stream_of = fast
            run(*self.grid, stream_of(self.index), *fixed, *raw, *self.integers)

    def _first_launch(self, arguments: Sequence[Any]) -> Any:
        _prepare()
        with _first_launches, self.lock:
            compiled = self._dispatch(arguments)
            is_limited = self.tight and torch.version.cuda is not None
            if is_limited and REGISTER_LIMIT < getattr(compiled, "n_regs", 0) <= MAX_REGISTERS:
                compiled = self._dispatch(arguments, maxnreg=REGISTER_LIMIT)
        return compiled

    def _dispatch(self, arguments: Sequence[Any], **options: int) -> Any:
        """Compile the kernel if necessary and run it, through Triton's dispatcher."""
        return self.kernel[self.grid](*arguments, *self.integers, **self.options, **options)


#: A function that starts a kernel, its arguments between the stream and the kernel's own, and a
#: function that returns the current stream of a GPU.
FastLaunch = tuple[Callable[..., None], tuple[Any, ...], Callable[[int], int]]


def _fast_launch(compiled: Any) -> FastLaunch | None:
    """Return the direct launch of a compiled kernel; None if this version of Triton is unknown.

    The direct launch skips the launch metadata and hooks of `CompiledKernel.__getitem__` and, where
    possible, the scratch memory check of Triton's launcher. Triton does not document these
    internals, so each version is added here once it has been checked.
    """
    version, launcher = _triton_version(), compiled.run
    if not (3, 6) <= version <= (3, 9):
        return None
    stream_of = _current_stream_function()
    function, metadata = compiled.function, compiled.packed_metadata
    metadata_and_hooks = metadata, None, None, None
    if version == (3, 6) and torch.version.hip is None and not _needs_scratch(launcher):
        flags, scratch = (launcher.launch_cooperative_grid, launcher.launch_pdl), (None, None)
        return launcher.launch, (function, *flags, *scratch, *metadata_and_hooks), stream_of
    return launcher, (function, *metadata_and_hooks), stream_of


def _needs_scratch(launcher: Any) -> bool:
    return bool(launcher.global_scratch_size or launcher.profile_scratch_size)


@cache
def _triton_version() -> tuple[int, int]:
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)


def _is_profiled() -> bool:
    """Whether a profiler has registered launch hooks."""
    runtime = _runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )


@cache
def _driver() -> Any:
    from triton.runtime import driver

    return driver


def current_stream(index: int) -> int:
    """Return the address of the current stream of a GPU."""
    return _current_stream_function()(index)


def _current_stream_function() -> Callable[[int], int]:
    def by_pytorch(index: int) -> int:
        stream: int = torch.cuda.current_stream(index).cuda_stream
        return stream

    return getattr(_driver().active, "get_current_stream", by_pytorch)


@cache
def _compilers() -> ThreadPoolExecutor:
    """Return the threads that compile kernels. Most of the work is done outside of Python."""
    threads = ThreadPoolExecutor(min(16, os.cpu_count() or 1), "spikefuse-compiler")
    # Python waits for threads when it exits: only for the kernels that they are compiling by then.
    threading._register_atexit(threads.shutdown, cancel_futures=True)  # type: ignore[attr-defined]
    return threads


@cache
def prepare() -> None:
    """Begin what Triton does once in a process, before its first kernel, on a thread.

    Triton loads its driver, and hashes its own files, 400 MB: the hash is part of the keys of its
    cache.
    """
    with suppress(RuntimeError), enough_stack():
        _compilers().submit(_prepare)


def _prepare() -> None:
    """Run the warm-up, or wait for it to finish, after a check of Triton's folder of kernels."""
    from triton import knobs
    from triton.compiler import code_generator
    from triton.runtime import cache

    check_foreign(Path(knobs.cache.dir))

    # Versions that `_fast_launch` does not know may lack these internals.
    with _preparing, suppress(AttributeError):
        if _triton_version() < (3, 8) and code_generator.warnings is warnings:
            # For each node of a kernel's syntax tree, these versions ignore deprecations and then
            # restore the filters. All threads share the filters, so others would lose theirs.
            without = {"catch_warnings": nullcontext, "simplefilter": lambda *_: None}
            code_generator.warnings = SimpleNamespace(**vars(warnings) | without)
        cache.triton_key()
        _driver().active.get_current_target()


#: Without a lock, each thread that compiles a first kernel would hash Triton's files.
_preparing = threading.Lock()
#: Until version 3.6, Triton loads C code to start a variant, of which Python has one module of this
#: name: if two threads load some at the same time, one may get the code of the other.
_first_launches = threading.Lock()
#: By kernel. Without a lock, two threads would compile the same variant.
_locks: dict[Any, threading.Lock] = {}


@cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for the interpreter, which runs thread
    blocks one after another."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
