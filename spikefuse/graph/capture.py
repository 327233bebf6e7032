"""Capture CUDA graphs, safely: a capture that fails leaves the process as it was."""

from __future__ import annotations

import contextlib
import linecache
import random
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from spikefuse import _torch

R = TypeVar("R")


class NotRecordable(RuntimeError):
    """Something that a CUDA graph cannot repeat."""


class Pool:
    """Memory for the tensors inside CUDA graphs, and the stream on which they are captured.

    Create it with its GPU as the current device. PyTorch releases the memory with the last graph
    in it, and must not see the pool again: hold a pool by its graphs only.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = stream or torch.cuda.Stream()
        self.is_usable = True  # for further captures


def capture(run: Callable[[], R], pool: Pool) -> tuple[torch.cuda.CUDAGraph, R]:
    """Capture what `run` launches. Nothing runs on the GPU.

    Returns:
        The graph, and the result of `run`, whose tensors each replay overwrites.

    Raises:
        NotRecordable: `run` draws random numbers on the CPU.
        Exception: what `run` raises, or CUDA in it.
    """
    graph = torch.cuda.CUDAGraph()
    with _lock:
        torch.cuda.synchronize()
        # A graph must own its cuBLAS workspace: PyTorch keeps one per stream, which torch.compile
        # releases.
        _torch.release_workspaces()
        torch.cuda.empty_cache()
        # Casts of the weights, which a replay would not repeat, or would find in released memory.
        torch.clear_autocast_cache()
        try:
            with torch.cuda.stream(pool.stream), _no_random_numbers():
                # Other threads may use the GPU meanwhile.
                graph.capture_begin(pool.handle, capture_error_mode="thread_local")
                try:
                    result = run()
                    _end(graph)
                except BaseException:
                    _abandon(graph, pool)
                    raise
        finally:
            torch.clear_autocast_cache()
    return graph, result


def _abandon(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    """End a capture that has failed."""
    try:
        _end(graph)
    except RuntimeError:
        # CUDA has invalidated the capture. PyTorch's allocator would wait for its end forever, and
        # refers to the graph; its generator is left in the state of a capture, which another ends.
        pool.is_usable = False
        _failed.append(graph)
        with contextlib.suppress(RuntimeError):  # for an error after that end
            _torch.end_capture(torch.cuda.current_device(), pool.handle)
        other = torch.cuda.CUDAGraph()
        other.capture_begin(capture_error_mode="thread_local")
        torch.zeros((), device="cuda")
        other.capture_end()


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        graph.capture_end()


@contextlib.contextmanager
def _no_random_numbers() -> Iterator[None]:
    """Undo draws of random numbers on the CPU, and raise an error for them."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    before = _text(states)
    try:
        yield
    finally:
        has_drawn = before != _text(
            (torch.get_rng_state(), random.getstate(), np.random.get_state())
        )
        if has_drawn:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])
    if has_drawn:
        raise NotRecordable(
            "it draws random numbers on the CPU, which each replay would repeat: draw them on the "
            "GPU (device=), or outside"
        )


def _text(states: tuple[Tensor, Any, Any]) -> tuple[Any, ...]:
    return states[0].tolist(), states[1], repr(states[2])


def reason(error: Exception) -> str:
    """Return why a capture has failed, with the innermost line outside PyTorch and this library."""
    if isinstance(error, NotRecordable):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    ours = Path(torch.__file__).parent, Path(__file__).parents[1]
    users = (f for f in frames if not any(Path(f.filename).is_relative_to(o) for o in ours))
    where = next((f'{f.filename}:{f.lineno}: "{f.line}" ' for f in users), "")
    what = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
    if any(Path(f.filename).name == "grad_scaler.py" for f in frames):
        what = _SCALER
    elif "legacy stream" in what:
        what = "make a DistributedDataParallel inside `with torch.cuda.stream(torch.cuda.Stream())`"
    elif isinstance(error, torch.OutOfMemoryError):
        where = ""
    elif "captur" in what:
        what = f"{_READS} ({what})"
    return where + what


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Run operations as they are, and yield a list to which lines of code that wait for the GPU are
    added. A capture that would fail half-way is then not tried."""
    lines: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", f".*{_WAITS}")
        try:
            torch.cuda.set_sync_debug_mode("warn")
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for w in caught:
        if _WAITS not in str(w.message):
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        elif Path(w.filename).name == "grad_scaler.py":
            lines.append(_SCALER)
        else:
            line = linecache.getline(w.filename, w.lineno).strip()
            lines.append(f'{w.filename}:{w.lineno}: "{line}" {_READS}')


class _Thread(threading.local):
    steps = 0


@contextlib.contextmanager
def recorded_step() -> Iterator[None]:
    """Mark a step that is, or will be, captured as a whole: nothing inside records itself."""
    _thread.steps += 1
    try:
        yield
    finally:
        _thread.steps -= 1


def is_in_recorded_step() -> bool:
    return _thread.steps > 0


# Tensors that graphs read


def is_cuda(x: Tensor) -> bool:
    return x.is_cuda


def static_copy(x: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    stored(copy).copy_(stored(x))
    return copy


def stored(x: Tensor) -> Tensor:
    """Return the part of `x` that is in memory: dimensions of stride 0 have one element."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


_WAITS = "called a synchronizing CUDA operation"
_READS = "reads a value of the GPU on the host, or waits for the GPU"
_SCALER = "a GradScaler reads on the host whether the gradients are finite: use bfloat16"
_thread = _Thread()
_lock = threading.RLock()  # PyTorch captures one graph at a time
_failed: list[torch.cuda.CUDAGraph] = []
