"""What a fused graph calls, eagerly or traced by AOTAutograd.

Eager calls skip the dispatcher of PyTorch, which costs several times a small kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from spikefuse import reference
from spikefuse.block import batch_norm as batch_norms
from spikefuse.block import functional
from spikefuse.block.functional import Norm, Statistics
from spikefuse.block.program import BlockProgram, block_program
from spikefuse.graph.nodes import arguments_of
from spikefuse.kernels.running import Running
from spikefuse.neurons.description import bind
from spikefuse.nn import pool
from spikefuse.nn.call import active, current_policy, inside, mark_binary
from spikefuse.scan import op
from spikefuse.scan.double_backward import refuse_double_backward
from spikefuse.scan.kinds import CHANNEL, FLOAT, SCALAR
from spikefuse.scan.program import program
from spikefuse.scan.records import Arguments, Results, Wanted
from spikefuse.scan.state_passing import StatePassing

#: TorchDynamo records calls of autograd Functions, such as the surrogate of `PSN`, as calls of it.
FUNCTION = torch.ops.higher_order.autograd_function_apply
_SCANS = torch.ops.spikefuse.scan, torch.ops.spikefuse.scan.default


@dataclass
class ScanNode:
    """A scan in a graph."""

    node: fx.Node

    def __post_init__(self) -> None:
        given: tuple[Any, ...] = self.node.args
        self.program, self.inputs, self.states, self.params, _, self.scalars, _, self.final = given

    @staticmethod
    def is_scan(node: fx.Node) -> bool:
        return node.target in _SCANS

    def block_arguments(
        self, block: BlockProgram, inputs: list[fx.Node], norms: list[Norm]
    ) -> tuple[Any, ...]:
        """The arguments of `run_block` in place of this scan."""
        params, scalars = block.select(self.program, self.params, self.scalars)
        arguments = Arguments(inputs, self.states, params, (), scalars)
        return block.name, arguments, norms, self.final


class _Link(torch.autograd.Function):
    """An empty tensor computed from others, which holds none of their memory."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.number = len(tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.number


class _DifferentiatedOnce(torch.autograd.Function):
    """The identity; its gradients raise an error when they are differentiated.

    Args:
        link: an empty tensor computed from the tensors.
    """

    @staticmethod
    def forward(ctx: Any, link: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(link)
        return tuple([x.view_as(x) for x in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *refuse_double_backward(grads, *grads, *ctx.saved_tensors)


def apply_function(forward: Any, backward: Any, *args: Any, **options: Any) -> Any:
    """Call an autograd Function that TorchDynamo has captured, whose second derivatives would be
    wrong: its backward reads what forward has saved as constants."""
    places = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]
    if places and not options.get("dirty_idx"):  # inputs that it changes must be themselves
        inputs, differentiated = list(args), [args[i] for i in places]
        identical = _DifferentiatedOnce.apply(_Link.apply(*differentiated), *differentiated)
        for i, x in zip(places, identical, strict=True):
            inputs[i] = x
        args = tuple(inputs)
    return FUNCTION(forward, backward, *args, **options)


def binary_outputs(node: fx.Node) -> Sequence[bool]:
    """For each output of a neuron, whether all its values are sure to be 0 or 1; empty for other
    nodes."""
    first: Any = node.args[0] if node.args else None
    if node.target in (run_block, scan) or ScanNode.is_scan(node):
        return program(first).step.binary
    return binary_outputs(first[0].args[0]) if node.target is move_dim else ()


def updated_statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a batch norm in training changes."""
    updated: Any = ()
    if node.target in (F.batch_norm, batch_norm):
        arguments = arguments_of(node, node.target)
        if arguments["training"]:
            updated = arguments["running_mean"], arguments["running_var"]
    elif node.target is norm_statistics:
        updated = node.args[2]
    return [x for x in updated if isinstance(x, fx.Node)]


def shares_time() -> bool:
    """Whether other processes hold steps of the sequence that is being processed."""
    return active.call is not None and active.call.passing is not None


def _passing(synchronized: int | None = None) -> StatePassing | None:
    """The state passing of the call, or of a norm that has processes of its own."""
    passing = None if active.call is None else active.call.passing
    if synchronized is None:
        return passing
    return batch_norms.state_passing_of(batch_norms.synchronized[synchronized], passing)


def saving_bits(gm: fx.GraphModule) -> Callable[..., Any]:
    """A function that runs a graph, whose layers save spikes as the policy of this call says."""
    packs_spikes = current_policy().packs_spikes

    def run(*args: Any) -> Any:
        with inside(active.call, packs_spikes):
            return gm.forward(*args)

    return run


def _finish(results: Results[Tensor], returns_sum: bool = False) -> list[Tensor]:
    """Outputs and final states; the sum that the neuron read comes last."""
    if active.spikes is not None:
        mark_binary(results)
    num = len(results.outputs) - returns_sum
    return [*results.outputs[:num], *results.finals, *results.outputs[num:]]


def scan(program: str, *given: Any) -> list[Tensor]:
    """`torch.ops.spikefuse.scan` without the dispatcher."""
    inputs, states, params, _, scalars, _, final = given
    arguments = Arguments(inputs, states, params, (), scalars, _passing())
    return _finish(op.run(program, arguments, Wanted(final, active.spikes is not None)))


def run_steps(name: str, *given: Any) -> list[Tensor]:
    """`scan` by the eager loop, whose operations Inductor compiles."""
    inputs, states, params, _, scalars, _, final = given
    own = program(name)
    values = dict(zip(own.params(SCALAR, CHANNEL), params, strict=True))
    values |= zip(own.params(FLOAT), scalars, strict=True)
    # What has no effect on a step is not an argument of its program.
    values = {label: values.get(label, 0.0) for label in own.definition.values()}
    outputs, finals = reference.scan(bind(own.definition, values), tuple(inputs), states or None)
    return [*outputs, *(finals if final else ())]


def norm_statistics(
    x: Tensor,
    weight: Tensor | None,
    running: Running,
    eps: float,
    backend: str,
    repeats: int = 1,
    synchronized: int | None = None,
) -> Statistics:
    """The statistics of the channels of `x` `[N, C, ...]`, which is repeated so many times; updates
    the running statistics."""
    x, passing = x.detach().unsqueeze(0).expand(repeats, *x.shape), _passing(synchronized)
    collectives = None if passing is None else passing.statistics
    return functional.norm_statistics(x, weight, eps, running, backend, collectives)


def run_block(
    name: str,
    arguments: Arguments[Tensor],
    norms: list[Norm],
    final: bool,
    synchronized: int | None = None,
) -> list[Tensor]:
    """Norms and neuron on `[T, B, C, ...]`."""
    arguments = arguments._replace(passing=_passing(synchronized))
    wanted = Wanted(final, active.spikes is not None, save=False)
    results = functional.run_block(name, arguments, norms, wanted)
    return _finish(results, block_program(name).kind.returns_sum)


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
    synchronized: int | None = None,
) -> Tensor:
    """`F.batch_norm` of one step of several equal ones, or with the statistics of several
    processes."""
    given = weight, bias, training, momentum, eps
    passing = _passing(synchronized)
    if training and passing is not None and passing.statistics is not None:
        assert batch_norms.normalize is not None
        running = Running(running_mean, running_var, None, momentum)
        # Other processes may have another number of equal steps, or none.
        steps = x.unsqueeze(0).expand(repeats, *x.shape).flatten(0, 1)
        affine = weight, bias, eps
        y = batch_norms.normalize(steps, running, affine, passing.statistics)
        return y[: len(x)]
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


class _KeepLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.strides = torch.empty_like(x, device="meta").stride()  # dense
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if grad.stride() == ctx.strides:
            return grad
        kept = torch.empty_strided(grad.shape, ctx.strides, dtype=grad.dtype, device=grad.device)
        return kept.copy_(grad)


def keep_layout(x: Tensor) -> Tensor:
    """`x`, whose gradient gets the same layout in memory."""
    y: Tensor = _KeepLayout.apply(x)
    return y


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
