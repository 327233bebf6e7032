"""Count the synaptic operations of the functions that a network calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spikefuse._torch import TorchDispatchMode
from spikefuse.nn.call import active
from spikefuse.nn.delay import DelayedLinear
from spikefuse.nn.nesting import map_tensors
from spikefuse.nn.recurrent import Recurrent

aten = torch.ops.aten


class Operations(NamedTuple):
    """The synaptic operations of one call of a function.

    Attributes:
        accumulates: weights that are added or subtracted, for inputs of 1 or -1, if the input has
            no other values but 0.
        multiplies: multiply-accumulates, otherwise.
        dense: multiply-accumulates without regard to the values; padding counts, as usual.
        nonzero: number of inputs that are not 0.
        inputs: number of inputs.
        outputs: number of outputs.
    """

    accumulates: float = 0.0
    multiplies: float = 0.0
    dense: float = 0.0
    nonzero: float = 0.0
    inputs: float = 0.0
    outputs: float = 0.0

    def plus(self, other: Operations) -> Operations:
        """Return the sums."""
        return Operations(*map(sum, zip(self, other, strict=True)))


class _Weights(TorchDispatchMode):
    """The parameters and buffers of a model, and what is computed from them alone."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        own = (*model.parameters(), *model.buffers()) if model else ()
        self._own = {_address(x) for x in own}
        self._computed: dict[int, Tensor] = {}  # held, so that no other tensor gets an address

    def __contains__(self, x: Tensor) -> bool:
        address = _address(x)
        return address in self._own or address in self._computed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        read, made = list[Tensor](), list[Tensor]()
        map_tensors(read.append, (args, kwargs))
        map_tensors(made.append, results)
        for x in made if read else ():
            if all(y in self for y in read):
                self._computed[_address(x)] = x
            else:  # an operation in place may have written other values to it
                self._computed.pop(_address(x), None)
        return results


@contextlib.contextmanager
def count_operations(
    found: Callable[[Tensor, Operations | None], None], model: nn.Module | None = None
) -> Iterator[None]:
    """Call `found(input, operations)` for every product that is computed in the context;
    `operations` is None if they are unknown.

    Args:
        model: the parameters and buffers of this model are weights, which are not taken for spikes.
    """
    # Not at the top: importing it takes long.
    from torch.utils.flop_counter import FlopCounterMode

    weights = _Weights(model)
    counter = FlopCounterMode(display=False)

    def formula(count: Callable[..., Counted] | None) -> Callable[..., int]:
        def read(*args: Any, out_val: Any, **scales: Any) -> int:
            found(*((args[0], None) if count is None else count(weights, out_val, *args)))
            return 0  # the sum of PyTorch is not used

        return read

    operators = {*counter.flop_registry, *_COUNTS, *_UNKNOWN}
    counter.flop_registry = {op: formula(_COUNTS.get(op)) for op in operators}
    with weights, counter:
        yield


def is_ternary(x: Tensor) -> bool:
    """Whether all values are 0, 1 or -1: products with them are additions."""
    return bool(((x == 0) | (x.abs() == 1)).all())


def num_steps() -> int:
    """Return T of the running call, 1 outside of one."""
    return 1 if active.call is None else active.call.num_steps


def is_constant(x: Tensor) -> bool:
    """Whether `x`, `[T*B, ...]`, is the same at each step."""
    if x.ndim == 0 or len(x) % num_steps():
        return False
    steps = x.unflatten(0, (num_steps(), -1))
    return bool((steps == steps[:1]).all())


def feedback(layer: Recurrent, outputs: Tensor, start: Tensor | None) -> Operations:
    """The products of what a recurrent layer feeds back, its outputs and those before the call."""
    targets = layer.features // layer.heads - (not layer.self_connections)
    fed_back = [outputs[:-1]] if start is None else [outputs[:-1], start.unsqueeze(0)]
    nonzero = float(sum(x.count_nonzero() for x in fed_back))
    dense, inputs = float(outputs.numel() * targets), float(outputs.numel())
    if all(map(is_ternary, fed_back)):
        return Operations(nonzero * targets, 0.0, dense, nonzero, inputs, inputs)
    return Operations(0.0, dense, dense, nonzero, inputs, inputs)


def delayed(layer: DelayedLinear, image: Tensor) -> Operations:
    """The products of a `DelayedLinear` in evaluation, where each synapse reads one step.

    Args:
        image: what its convolution reads, `[1, in_features, max_delay + T, B]`.
    """
    x = image[0]
    steps, size = x.shape[1] - layer.max_delay, len(layer.weight)
    dense = float(x[:, :steps].numel() * size)
    now = x[:, layer.max_delay :]
    nonzero, inputs = float(now.count_nonzero()), float(now.numel())
    outputs = dense / layer.in_features
    if not is_ternary(x):
        return Operations(0.0, dense, dense, nonzero, inputs, outputs)
    # The number of spikes of each input before each step, and in the steps that each synapse reads.
    before = F.pad((x != 0).sum(2, dtype=torch.float64).cumsum(1), (1, 0))
    starts = layer.max_delay - layer.delays().T.long()
    read = before.gather(1, starts + steps) - before.gather(1, starts)
    return Operations(read.sum().item(), 0.0, dense, nonzero, inputs, outputs)


Counted = tuple[Tensor, Operations]


def _matmul(weights: Container[Tensor], y: Tensor, input: Tensor, other: Tensor) -> Counted:
    """`input @ other`; an addition needs non-zero values of all operands that are spikes."""
    dense = float(y.numel() * input.shape[-1])
    binary = [x not in weights and is_ternary(x) for x in (input, other)]
    left = input.unsqueeze(0) if input.ndim == 1 else input
    right = other.unsqueeze(-1) if other.ndim == 1 else other
    if input in weights and other not in weights:
        input = right.mT  # with the steps and samples first
    nonzero, inputs = float(input.count_nonzero()), float(input.numel())
    if not any(binary):
        return input, Operations(0.0, dense, dense, nonzero, inputs, float(y.numel()))
    pairs = _terms(left, -2, binary[0]) * _terms(right, -1, binary[1])
    added = pairs.sum().item()
    return input, Operations(added, 0.0, dense, nonzero, inputs, float(y.numel()))


def _terms(x: Tensor, dim: int, is_binary: bool) -> Tensor:
    """The number of values along `dim` that take part in a sum over the other."""
    values = (x != 0) if is_binary else torch.ones_like(x, dtype=torch.bool)
    return values.sum(dim, dtype=torch.float64)


def _added(weights: Container[Tensor], y: Tensor, input: Tensor, *factors: Tensor) -> Counted:
    """`input` plus a product."""
    return _matmul(weights, y, *factors)


def _convolution(
    weights: Container[Tensor], y: Tensor, input: Tensor, weight: Tensor, _: Any, *settings: Any
) -> Counted:
    """Settings are stride, padding, dilation, whether it is transposed, and more, then groups."""
    *windows, transposed, _, groups = settings
    size, nonzero = weight.shape[2:], input != 0
    dense = float((input if transposed else y).numel() * weight[0].numel())
    sizes = float(input.numel()), float(y.numel())
    if not is_ternary(input):
        return input, Operations(0.0, dense, dense, float(nonzero.sum()), *sizes)
    counts = nonzero.flatten(0, -len(size) - 1).sum(0, dtype=torch.float64)
    total = counts
    # A list of one setting is for all dims.
    windows = [v * len(size) if len(v) == 1 else v for v in windows]
    for i in reversed(range(len(size))):
        window = (size[i], *(v[i] for v in windows))
        total = total @ _readers(input.shape[2 + i], y.shape[2 + i], transposed, window).to(counts)
    channels = weight.shape[1] if transposed else len(weight) // groups
    return input, Operations(total.item() * channels, 0.0, dense, counts.sum().item(), *sizes)


def _readers(inputs: int, outputs: int, transposed: bool, window: Sequence[int]) -> Tensor:
    """By position of the input, along one dim, the number of weights of a window that read it."""
    kernel, stride, padding, dilation = window
    starts = torch.arange(inputs if transposed else outputs)[:, None] * stride - padding
    places = starts + torch.arange(kernel) * dilation
    if transposed:
        return ((places >= 0) & (places < outputs)).sum(1)
    return places[(places >= 0) & (places < inputs)].bincount(minlength=inputs)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout == torch.strided else id(x)


#: By operator, what returns its input and operations for (weights, result, arguments).
_COUNTS: dict[Any, Callable[..., Counted]] = {
    aten.convolution: _convolution,
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot), _matmul),
    **dict.fromkeys((aten.addmm, aten.baddbmm, aten.addmv), _added),
}
#: Further operators whose products are not counted, beside those that PyTorch knows and we do not.
_UNKNOWN = [
    getattr(aten, name)
    for name in (
        *("addbmm", "_trilinear", "_cdist_forward", "_native_multi_head_attention"),
        "_scaled_dot_product_flash_attention_for_cpu",
    )
]
