"""What a step does that a CUDA graph cannot repeat, and where."""

from __future__ import annotations

import contextlib
import random
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spikefuse.neurons.definition import States
from spikefuse.nn.stream import Stream

SYNCHRONIZES = "called a synchronizing CUDA operation"


@contextlib.contextmanager
def watch(problems: list[str]) -> Iterator[None]:
    """Add what the step does that a graph cannot repeat to `problems`."""

    def record(message: Warning | str, *rest: Any) -> None:
        if SYNCHRONIZES not in str(message):
            return show(message, *rest)
        frames = traceback.extract_stack()
        what = "reads a value of the GPU on the host"
        if any(Path(f.filename).name == "grad_scaler.py" for f in frames):
            what = (
                "a GradScaler reads on the host whether the gradients are finite: use bfloat16, "
                "which needs none"
            )
        problems.append(f"{line_of(frames)} {what}")

    def record_stream(stream: Stream, state: dict[str, States]) -> None:
        store(stream, state)
        problems.append(
            f"it runs a {type(stream).__name__}, whose state replays would not follow: pass states "
            "as arguments and results, net(x, state, return_state=True) of a Temporal"
        )

    mode, numbers, store = torch.cuda.get_sync_debug_mode(), _random_states(), Stream._store
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", f".*{SYNCHRONIZES}")
        warnings.showwarning = record  # type: ignore[assignment]
        Stream._store = record_stream  # type: ignore[method-assign, assignment]
        try:
            torch.cuda.set_sync_debug_mode("warn")
            yield
        finally:
            Stream._store = store  # type: ignore[method-assign]
            torch.cuda.set_sync_debug_mode(mode)
    if _random_states() != numbers:
        problems.append(
            "it draws random numbers on the CPU, which each replay would repeat: draw them on the "
            "GPU (device=), or outside the step"
        )


def _random_states() -> Any:
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


def line_of(frames: traceback.StackSummary) -> str:
    """Return the innermost line outside PyTorch and this library."""
    others = Path(torch.__file__).parent, Path(__file__).parents[1], Path(warnings.__file__)
    for frame in reversed(frames):
        path = Path(frame.filename)
        if not any(other in (path, *path.parents) for other in others):
            return f'{frame.filename}:{frame.lineno}: "{frame.line}"'
    return "the step"
