"""Errors inside a network: a note on how its container read the inputs, and short tracebacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from spikefuse.nn.neuron import DTYPES

#: Errors that inputs of a wrong shape or dtype cause.
_ERRORS = RuntimeError, ValueError, IndexError, TypeError
_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d


def missing_dims(net: nn.Module, x: Tensor) -> int | None:
    """How many dims a step `[B, ...]` has less than the first layer with weights expects, 0 if they
    differ in another way; None if they fit.

    The first layer is that of `net.modules()`, the order of a sequence. Without one that is known,
    nothing is known to fit.
    """
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            missing, fits = max(2 - x.ndim, 0), x.shape[-1:] == (layer.in_features,)
        elif isinstance(layer, _CONVOLUTIONS):
            missing = len(layer.kernel_size) + 2 - x.ndim
            fits = x.shape[1:2] == (layer.in_channels,)
        else:
            continue
        return None if fits and missing == 0 else max(missing, 0)
    return 0


def note_on(
    error: Exception, net: nn.Module, sequences: Sequence[Any], steps: int, batch: int, order: str
) -> str:
    """Return how the inputs of a network were read if this may have caused the error, else "".

    Args:
        sequences: tensors or sparse sequences.
        steps, batch: as which they were read.
        order: of the sequences, such as "[T, B, ...]".
    """
    tensors = [x for x in sequences if isinstance(x, Tensor)]
    dtypes = sorted({str(x.dtype) for x in tensors if x.dtype not in DTYPES})
    missing = missing_dims(net, tensors[0][0]) if tensors else 0
    if not isinstance(error, _ERRORS) or (missing is None and not dtypes):
        return ""
    shapes = ", ".join([str(list(x.shape)) for x in sequences])
    read = f"the inputs {shapes} were read as T={steps}, B={batch}"
    if len(sequences) == 1:
        shape = list(sequences[0].shape[2:])
        read = f"x {shapes} was read as T={steps}, B={batch} and steps of shape {shape}"
    read = "".join([f"an input is {d}: most layers need x.float(); " for d in dtypes]) + read
    note = f"{read}, since sequences are {order}"
    if missing:
        note += ": for a static image use spikefuse.nn.encode.direct or unsqueeze"
    return note


def from_forward(net: nn.Module, error: Exception) -> Exception:
    """Return an error whose traceback begins in the network's `forward`, if it was raised there."""
    code = getattr(type(net).forward, "__code__", None)
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code is not code:
        place = place.tb_next
    return error if place is None else error.with_traceback(place)
