"""What a fused graph calls, eagerly or traced by AOTAutograd.

Eager calls skip the dispatcher of PyTorch, which costs several times a small kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from spikefuse.block import library
from spikefuse.block.program import BlockExecution, BlockProgram
from spikefuse.block.training import BatchStatistics, TrainingCall
from spikefuse.kernels.norm import merge_statistics, statistics
from spikefuse.kernels.running import Running
from spikefuse.nn import pool
from spikefuse.nn.call import active, current_policy, saving_spikes
from spikefuse.scan import op
from spikefuse.scan.execution import Arguments, Results, Wanted, execution_of
from spikefuse.scan.program import FLOAT, program
from spikefuse.scan.state_passing import WHOLE, StatePassing

_SCANS = torch.ops.spikefuse.scan, torch.ops.spikefuse.scan.default


@dataclass
class ScanNode:
    """A scan in a graph."""

    node: fx.Node

    def __post_init__(self) -> None:
        (self.program,), tensors, (num_inputs, num_states), self.scalars, _, self.final = (
            self.node.args
        )
        self.inputs = tensors[:num_inputs]
        self.states = tensors[num_inputs : num_inputs + num_states]
        self.params = tensors[num_inputs + num_states :]

    @staticmethod
    def is_scan(node: fx.Node) -> bool:
        return node.target in _SCANS

    @property
    def is_selecting(self) -> bool:
        """Whether the caller has selected outputs by name."""
        return bool(program(self.program).definition._selected)

    def block_arguments(
        self, block: BlockProgram, inputs: list[fx.Node], norms: list[Any]
    ) -> tuple[Any, ...]:
        """The arguments of `train_block` or `evaluate_block` in place of this scan."""
        own = program(self.program)
        kinds = list(zip(own.step.params, own.kinds, strict=True))
        tensors = dict(zip([n for n, kind in kinds if kind != FLOAT], self.params, strict=True))
        floats = dict(zip([n for n, kind in kinds if kind == FLOAT], self.scalars, strict=True))
        given = [tensors[n] for n in block.own], [floats[n] for n in block.floats]
        return block.name, inputs, self.states, given[0], norms, given[1], self.final


def binary_outputs(node: fx.Node) -> Sequence[bool]:
    """For each output of a neuron, whether all its values are sure to be 0 or 1; empty for other
    nodes."""
    if node.target in (train_block, evaluate_block):
        return library._programs[node.args[0]].binary
    if node.target is scan or ScanNode.is_scan(node):
        return program(node.args[0][0]).step.binary
    if node.target is move_dim:
        return binary_outputs(node.args[0][0].args[0])
    return ()


def shares_time() -> bool:
    """Whether other processes hold steps of the sequence that is being processed."""
    return active.call is not None and active.call.passing is not None


def _passing() -> StatePassing | None:
    return None if active.call is None else active.call.passing


def saving_bits(gm: fx.GraphModule) -> Callable[..., Any]:
    """A function that runs a graph, whose layers save spikes as the policy of the call says."""

    def run(*args: Any) -> Any:
        with saving_spikes(current_policy()):
            return gm.forward(*args)

    return run


def _finish(
    results: Results, binary: Sequence[bool], returns_sum: bool = False
) -> list[Tensor]:
    """Outputs and final states; the sum that the neuron read comes last."""
    if active.spikes is not None:
        for y, bits in zip_longest(compress(results.outputs, binary), results.bits):
            active.spikes.register(y, bits)
    num = len(results.outputs) - returns_sum
    return [*results.outputs[:num], *results.finals, *results.outputs[num:]]


def scan(
    programs: list[str],
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    save: bool,
    final: bool,
) -> list[Tensor]:
    """`torch.ops.spikefuse.scan` without the dispatcher."""
    call = op.ScanCall(programs, counts, scalars, _passing(), active.spikes is not None)
    return _finish(op.execute(call, tensors, final), program(programs[0]).step.binary)


def norm_statistics(
    x: Tensor,
    weight: Tensor | None,
    running: tuple[Tensor | None, Tensor | None, float],
    eps: float,
    backend: str,
    repeats: int = 1,
) -> tuple[Tensor, float | Tensor]:
    """The statistics of the channels of `x` `[N, C, ...]`, which is repeated so many times, and the
    number of values per channel; updates the running statistics (mean, variance, momentum)."""
    mean, variance, momentum = running
    x = x.detach().unsqueeze(0).expand(repeats, *x.shape)
    if not op.is_plain((x,)):
        weight = None if weight is None else weight.detach()
        with torch.no_grad():
            values, unbiased = torch.ops.spikefuse.norm_statistics(x, weight, eps, backend)
            if mean is not None and variance is not None:
                mean.lerp_(values[0].to(mean.dtype), momentum)
                variance.lerp_(unbiased.to(variance.dtype), momentum)
        return values, 0.0
    passing, target = _passing(), Running(mean, variance, None, momentum)
    count = x.numel() / x.shape[2]
    if passing is None or passing.statistics is None:
        return statistics(x, weight, target, eps, backend), count
    own = statistics(x, None, Running(), eps, backend)
    share = torch.cat((own[0], own[3], own.new_full((1,), count)))
    return merge_statistics(passing.statistics.gather(share), weight, target, eps, backend)


def _shift(x: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    """The sum of the norms' biases."""
    known = [b for b in biases if b is not None]
    if not known:
        return x.new_zeros(x.shape[2], dtype=torch.float32)
    return known[0] if len(known) == 1 else known[0] + known[1]


def train_block(
    name: str,
    inputs: list[Tensor],
    states: list[Tensor],
    own: list[Tensor],
    norms: list[tuple[Any, Tensor | None, Tensor | None]],
    scalars: list[float],
    final: bool,
) -> list[Tensor]:
    """Norms, as (statistics, weight, bias) each, and neuron on `[T, B, C, ...]`."""
    made, x = library._programs[name], inputs[0]
    batches, weights, biases = zip(*norms, strict=True)
    by_norm, numbers = zip(*batches, strict=True)
    tensors = [*inputs, *states, *own, _shift(x, biases), *[w for w in weights if w is not None]]
    call: op.Call
    if op.is_plain(inputs):
        passing = _passing() or WHOLE
        batch = BatchStatistics(by_norm, numbers[0], passing.statistics)
        block, packs = BlockExecution(made, execution_of(name, inputs)), active.spikes is not None
        call = TrainingCall(block, batch, len(states), passing, packs, not made.rebuilds)
        call.scalars = scalars
    else:
        counts = [len(inputs), len(states)]
        call = library.TracedTrainingCall([name], counts, scalars, saves_states=not made.rebuilds)
        tensors += by_norm
    return _finish(op.execute(call, tensors, final), made.binary, made.returns_sum)


def evaluate_block(
    name: str,
    inputs: list[Tensor],
    states: list[Tensor],
    own: list[Tensor],
    norms: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]],
    scalars: list[float],
    final: bool,
) -> list[Tensor]:
    """Norms, as (mean, variance, weight, bias, eps) each, and neuron on `[T, B, C, ...]`."""
    made, values = library._programs[name], []
    for mean, variance, weight, _, eps in norms:
        scale = torch.rsqrt(variance + eps)
        # Backward may follow a call in training, which updates the mean.
        mean = mean.clone() if torch.is_grad_enabled() else mean
        values += [mean, scale if weight is None else scale * weight]
    values.insert(2, _shift(inputs[0], [bias for *_, bias, _ in norms]))
    arguments = Arguments(inputs, states, made.params((*values, *own)), scalars)
    wanted = Wanted(False, final, active.spikes is not None)
    results = op.run(name, arguments, wanted, _passing())
    return _finish(results, made.binary, made.returns_sum)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    repeats: int = 1,
) -> Tensor:
    """`F.batch_norm` of one step of several equal ones, or of steps of which other processes hold
    some."""
    given = weight, bias, training, momentum, eps
    passing = _passing()
    if training and passing is not None and passing.statistics is not None:
        raise NotImplementedError("statistics of several processes in a norm without a neuron")
    if repeats == 1 or not training or running_var is None:
        return F.batch_norm(x, running_mean, running_var, *given)
    # Mean and variance of a batch do not change when it is repeated, but the recorded value is
    # the variance times n / (n - 1), with n the values per channel.
    before = running_var.clone()
    y = F.batch_norm(x, running_mean, running_var, *given)
    n = x.numel() // x.shape[1]
    ratio = repeats * (n - 1) / (repeats * n - 1)
    # Not a change that autograd should see: backward in training does not use it.
    variance = running_var.data
    variance.sub_((1 - ratio) * (variance - (1 - momentum) * before))
    return y


def move_dim(tensors: list[Tensor], source: int, target: int) -> list[Tensor]:
    return [x.movedim(source, target) for x in tensors]


def conv2d(x: Tensor, *args: Any) -> Tensor:
    """`torch.conv2d` in channels-last memory."""
    return torch.conv2d(x.contiguous(memory_format=torch.channels_last), *args)


def pointwise_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any) -> Tensor:
    """`torch.conv1d` with windows of one position, as a linear layer of `[N, L, C]`."""
    return F.linear(x.mT, weight.squeeze(2), bias).mT


def max_pool2d(*args: Any, **kwargs: Any) -> Any:
    """Max pooling by our kernels where they are faster."""
    if kwargs.get("return_indices") or len(args) > 6:
        return F.max_pool2d(*args, **kwargs)
    kwargs.pop("return_indices", None)
    return pool.max_pool2d(*args, **kwargs)


def avg_pool2d(*args: Any, **kwargs: Any) -> Tensor:
    """Average pooling by our kernel where it is faster."""
    return pool.avg_pool2d(*args, **kwargs)
