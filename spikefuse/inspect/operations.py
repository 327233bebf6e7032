"""Count the synaptic operations of the functions that a network calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spikefuse.nn.recurrent import Recurrent


class Operations(NamedTuple):
    """The synaptic operations of one call of a function.

    Attributes:
        accumulates: weights that are added or subtracted, for inputs of 1 or -1, if the input has
            no other values but 0.
        multiplies: multiply-accumulates, otherwise.
        dense: multiply-accumulates without regard to the values; padding counts, as usual.
        nonzero: number of inputs that are not 0.
        inputs: number of inputs.
    """

    accumulates: float = 0.0
    multiplies: float = 0.0
    dense: float = 0.0
    nonzero: float = 0.0
    inputs: float = 0.0

    def plus(self, other: Operations) -> Operations:
        """Return the sums."""
        return Operations(*map(sum, zip(self, other, strict=True)))


class OperationCounter(TorchFunctionMode):
    """Reports the operations of every call: `found(operations, once)`.

    `operations` is None if they are unknown. `once` says that the input is the same at each step,
    so that one step was computed.
    """

    def __init__(self, found: Callable[[Operations | None, bool], None]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        y = func(*args, **kwargs)
        count = _COUNTS.get(func)
        if count is None:
            if func in _UNKNOWN:
                self.found(None, False)
            return y
        once = False
        with torch.no_grad():
            operations = count(y, *args, **{n: x for n, x in kwargs.items() if n != "out"})
        self.found(operations, once)
        return y


def is_ternary(x: Tensor) -> bool:
    """Whether all values are 0, 1 or -1: products with them are additions."""
    return bool(((x == 0) | (x.abs() == 1)).all())


def feedback(layer: Recurrent, outputs: Tensor, start: Tensor | None) -> Operations:
    """The products of what a recurrent layer feeds back, its outputs and those before the call."""
    targets = layer.features // layer.heads - (not layer.self_connections)
    fed_back = [outputs[:-1]] if start is None else [outputs[:-1], start.unsqueeze(0)]
    nonzero = float(sum(x.count_nonzero() for x in fed_back))
    dense, inputs = float(outputs.numel() * targets), float(outputs.numel())
    if all(map(is_ternary, fed_back)):
        return Operations(nonzero * targets, 0.0, dense, nonzero, inputs)
    return Operations(0.0, dense, dense, nonzero, inputs)


def _matmul(y: Tensor, input: Tensor, other: Tensor, *, is_weight: bool = False) -> Operations:
    """`input @ other`; an addition needs non-zero values of all operands that are spikes."""
    dense = float(y.numel() * input.shape[-1])
    binary = is_ternary(input), not is_weight and is_ternary(other)
    nonzero = float(input.count_nonzero())
    if not any(binary):
        return Operations(0.0, dense, dense, nonzero, float(input.numel()))
    left = input.unsqueeze(0) if input.ndim == 1 else input
    right = other.unsqueeze(-1) if other.ndim == 1 else other
    pairs = _terms(left, -2, binary[0]) * _terms(right, -1, binary[1])
    return Operations(pairs.sum().item(), 0.0, dense, nonzero, float(input.numel()))


def _terms(x: Tensor, dim: int, is_binary: bool) -> Tensor:
    """The number of values along `dim` that take part in a sum over the other."""
    values = (x != 0) if is_binary else torch.ones_like(x, dtype=torch.bool)
    return values.sum(dim, dtype=torch.float64)


def _linear(y: Tensor, input: Tensor, weight: Tensor, bias: Any = None) -> Operations:
    return _matmul(y, input, weight.t(), is_weight=True)


def _added(y: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> Operations:
    """`input + mat1 @ mat2`."""
    return _matmul(y, mat1, mat2)


def _reversed(y: Tensor, input: Tensor, other: Tensor) -> Operations:
    return _matmul(y, other, input)


class _Conv(NamedTuple):
    """The arguments of `F.conv2d` and its like, in their order."""

    input: Tensor
    weight: Tensor
    bias: Any = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1


class _ConvTranspose(NamedTuple):
    """The arguments of `F.conv_transpose2d` and its like, in their order."""

    input: Tensor
    weight: Tensor
    bias: Any = None
    stride: Any = 1
    padding: Any = 0
    output_padding: Any = 0
    groups: int = 1
    dilation: Any = 1


def _conv(y: Tensor, *args: Any, **kwargs: Any) -> Operations:
    c = _Conv(*args, **kwargs)
    size = c.weight.shape[2:]
    dims = len(size)
    strides, dilations = _each(c.stride, dims), _each(c.dilation, dims)
    before = _each(0 if isinstance(c.padding, str) else c.padding, dims)
    if c.padding == "same":
        before = tuple(d * (k - 1) // 2 for k, d in zip(size, dilations, strict=True))
    shapes = c.input.shape[-dims:], y.shape[-dims:], size
    windows = [_windows(*v) for v in zip(*shapes, strides, dilations, before, strict=True)]
    dense = float(y.numel() * c.weight[0].numel())
    return _convolved(c.input, windows, len(c.weight) // c.groups, dense)


def _conv_transpose(y: Tensor, *args: Any, **kwargs: Any) -> Operations:
    c = _ConvTranspose(*args, **kwargs)
    size = c.weight.shape[2:]
    dims = len(size)
    shapes = c.input.shape[-dims:], y.shape[-dims:], size
    numbers = (_each(v, dims) for v in (c.stride, c.dilation, c.padding))
    windows = []
    for n, m, *window in zip(*shapes, *numbers, strict=True):
        targets = _positions(n, *window)
        windows.append(((targets >= 0) & (targets < m)).sum(1))
    dense = float(c.input.numel() * c.weight[0].numel())
    return _convolved(c.input, windows, c.weight.shape[1], dense)


def _convolved(input: Tensor, windows: list[Tensor], channels: int, dense: float) -> Operations:
    """The operations of a convolution.

    Args:
        windows: for each spatial dim, the number of windows that each position is in.
        channels: outputs of a group.
    """
    num, nonzero = float(input.numel()), input != 0
    if not is_ternary(input):
        return Operations(0.0, dense, dense, float(nonzero.sum()), num)
    counts = nonzero.flatten(0, -len(windows) - 1).sum(0, dtype=torch.float64)
    total = counts
    for window in reversed(windows):
        total = total @ window.to(counts)
    return Operations(total.item() * channels, 0.0, dense, counts.sum().item(), num)


def _windows(size: int, outputs: int, kernel: int, stride: int, dilation: int, before: int) -> Any:
    """By position of the input, the number of windows along one dim that it is in."""
    positions = _positions(outputs, kernel, stride, dilation, before)
    return positions[(positions >= 0) & (positions < size)].bincount(minlength=size)


def _positions(windows: int, kernel: int, stride: int, dilation: int, before: int) -> Tensor:
    """The positions along one dim that each window covers, some of them in the padding."""
    return torch.arange(windows)[:, None] * stride - before + torch.arange(kernel) * dilation


def _each(value: Any, dims: int) -> tuple[int, ...]:
    """A setting for each dim."""
    values = tuple(value) if isinstance(value, Iterable) else (value,)
    return values * dims if len(values) == 1 else values


_COUNTS: dict[Any, Callable[..., Operations]] = {
    F.linear: _linear,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _conv),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _conv_transpose),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, torch.mv), _matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.mv, Tensor.__matmul__), _matmul),
    Tensor.__rmatmul__: _reversed,
    **dict.fromkeys((torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm), _added),
}
#: Functions that compute products in a way that is not counted.
_UNKNOWN = {
    *(torch.einsum, torch.tensordot, torch.cdist, torch.bilinear, F.bilinear),
    *(F.scaled_dot_product_attention, F.multi_head_attention_forward),
}
