"""Launch Triton kernels on GPU tensors, or on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Registers of a thread with which 12 blocks of backward share a multiprocessor. What needs a few
# more is faster with these, in half precision.
FEW_REGISTERS, SOME_MORE = 80, 104


class Launch:
    """A kernel with its grid and integers, and what Triton has compiled of it.

    The integers are its last arguments, constants included; the tensors' dtypes are always the
    same. A `tight` kernel, which may run twice, is compiled again for fewer registers where it
    needs just a few too many.

    A launch seen before, told by the alignments, passes Triton's dispatch by. It also passes by
    its closures, its metadata for hooks, its look for scratch memory and its query of every
    pointer, where they are as we know them and no hook waits.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        integers: tuple[int, ...],
        num_warps: int,
        device: torch.device,
        tight: bool = False,
    ) -> None:
        self.kernel, self.grid, self.integers = kernel, grid, integers
        # Contracted multiply-adds would change spikes.
        self.options = {"num_warps": num_warps, "enable_fp_fusion": False}
        self.device = device
        self.tight = tight
        # Attributes of a device take longer to read.
        self.is_cpu, self.index = device.type == "cpu", device.index
        #: What is compiled and, where it is known, what it is run by.
        self.compiled: dict[tuple[int, ...], tuple[Any, Direct | None]] = {}

    def __call__(
        self,
        sequences: Sequence[Tensor | None],
        states: Sequence[Tensor | None] = (),
        sums: Sequence[Tensor | None] = (),
        params: Sequence[float | Tensor] = (),
    ) -> None:
        tensors = [*sequences, *states, *sums, *params]
        if self.is_cpu:
            # The interpreter computes in NumPy; like a GPU, it has nothing to say of infinities.
            with np.errstate(all="ignore"):
                self._compile(tensors)
        elif self.index == _current_device():
            self._launch(tensors)
        else:
            with torch.cuda.device(self.device):
                self._launch(tensors)

    def _launch(self, tensors: Sequence[Any]) -> None:
        raw: list[Any] = []
        # What Triton's own dispatch would look at and the sequences' dtypes have not decided.
        told: list[int] = []
        for x in tensors:
            if isinstance(x, Tensor):
                address = x.data_ptr()
                raw.append(address)
                told.append(address % 16)
            else:
                raw.append(x)
                told.append(-1 if x is None else 0)
        key = tuple(told)
        seen = self.compiled.get(key)
        if seen is None:
            self._first(key, tensors)
            return
        compiled, direct = seen
        if direct is None or _is_watched():
            compiled[self.grid](*tensors, *self.integers)
        else:
            run, between = direct
            stream = torch._C._cuda_getCurrentRawStream(self.index)
            run(*self.grid, stream, *between, *raw, *self.integers)

    def _first(self, key: tuple[int, ...], tensors: Sequence[Any]) -> None:
        """Run what has not been seen before."""
        compiled = self._compile(tensors)
        if self._needs_few_more(compiled):
            compiled = self._compile(tensors, maxnreg=FEW_REGISTERS)
        if compiled is not None:
            self.compiled[key] = compiled, _direct(compiled)

    def _compile(self, tensors: Sequence[Any], **options: int) -> Any:
        """Run by Triton's own dispatch, which compiles what it has not yet compiled."""
        return self.kernel[self.grid](*tensors, *self.integers, **self.options, **options)

    def _needs_few_more(self, compiled: Any) -> bool:
        """Whether a tight kernel needs just a few registers too many."""
        if not self.tight or torch.version.cuda is None or compiled is None:
            return False
        return FEW_REGISTERS < compiled.n_regs <= SOME_MORE


#: What runs a compiled kernel, and its arguments between the stream and the kernel's own.
Direct = tuple[Callable[..., None], tuple[Any, ...]]


def _direct(compiled: Any) -> Direct | None:
    """How to run a compiled kernel, if Triton does as we know it."""
    if not _runs_directly(compiled):
        return None
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    for_hooks = None, None, None
    flags = _flags(run)
    if flags is None:
        return run, (function, metadata, *for_hooks)
    return run.launch, (function, *flags, None, None, metadata, *for_hooks)


def _flags(launcher: Any) -> tuple[Any, Any] | None:
    """What Triton's launcher adds to its arguments besides scratch memory, None if the kernel
    needs some or if the launcher does more than that; it is watched as in `_runs_directly`."""
    passed: list[Any] = []
    sizes = "global_scratch_size", "profile_scratch_size"
    numbers = "num_ctas", "global_scratch_align", "profile_scratch_align"
    parts = SimpleNamespace(
        launch=lambda *arguments: passed.extend(arguments),
        launch_cooperative_grid="cooperative",
        launch_pdl="dependent",
        **dict.fromkeys(sizes, 0),
        **dict.fromkeys(numbers, 1),
    )
    given = 1, 2, 3, "stream", "function", "metadata", "for hooks", "enter", "exit", "first", "last"
    try:
        type(launcher).__call__(parts, *given)
        needs_scratch = any(getattr(launcher, name) for name in sizes)
        flags = launcher.launch_cooperative_grid, launcher.launch_pdl
    except Exception:
        return None
    expected = [*given[:5], "cooperative", "dependent", None, None, *given[5:]]
    return flags if passed == expected and not needs_scratch else None


def _runs_directly(compiled: Any) -> bool:
    """Whether Triton runs its compiled kernels with the arguments that `Launch` passes.

    It promises nothing about them, so its own launch is watched, with stand-ins for all parts.
    """
    passed: list[Any] = []
    parts = SimpleNamespace(
        run=lambda *arguments: passed.extend(arguments),
        function="function",
        packed_metadata="metadata",
        launch_metadata=lambda *arguments: "for hooks",
        _init_handles=lambda: None,
    )
    try:
        type(compiled).__getitem__(parts, (1, 2, 3))("first", "last", stream="stream")
        hooks = _runtime().launch_enter_hook, _runtime().launch_exit_hook
    except Exception:
        return False
    expected = [1, 2, 3, "stream", "function", "metadata", "for hooks", *hooks, "first", "last"]
    return passed == expected and hasattr(torch._C, "_cuda_getCurrentRawStream")


def _is_watched() -> bool:
    """Whether a profiler has hooks on launches."""
    runtime = _runtime()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )


# torch.cuda.current_device without its look whether CUDA has been initialized.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
