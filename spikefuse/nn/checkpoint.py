"""Training under `Checkpoint`: each segment of the network is computed again when backward comes
to it, in parts of the batch where its working set would set the peak.

Gradients, too, lie in parts: that of a segment's output goes as that of its inputs comes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from spikefuse.compiler import launch
from spikefuse.compiler.call import call_of, spec
from spikefuse.kernels import bits
from spikefuse.memory import Checkpoint
from spikefuse.nn import block, neuron
from spikefuse.nn.batch_norm import shift_of
from spikefuse.nn.kept import Kept, Spikes
from spikefuse.nn.parts import Gradient, Part, divided, room, rows, take
from spikefuse.nn.passes import Given, Job, Kernels
from spikefuse.nn.segments import BlockCall, Segment, Segments


def applies(net: nn.Module, x: Tensor, impl: str) -> bool:
    """Whether a call keeps something that could be computed again: with gradients, by kernels."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and neuron.backend_of((x,), impl) != "reference"
        and (x.requires_grad or any(p.requires_grad for p in net.parameters()))
    )


def run(segments: Segments, policy: Checkpoint, sequence: neuron.Sequence, x: Tensor) -> Any:
    """What the network gives for `x`, folded."""
    if sequence.initial is not None or sequence.keep_final:
        raise ValueError(
            "memory=Checkpoint() trains on whole sequences, without state= and return_state=: use "
            "another policy, or torch.no_grad()"
        )
    sequence.spikes = sequence.spikes or Spikes()
    parameters = [p for p in segments.net.parameters() if p.requires_grad]
    state = _Run(segments, policy, sequence, x, parameters)
    results = dict(zip(segments.outputs, _Whole.apply(state, x, *parameters), strict=True))
    return fx.node.map_arg(segments.output, results.__getitem__)


class _Whole(torch.autograd.Function):
    """The whole network."""

    @staticmethod
    def forward(ctx: Any, state: _Run, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*parameters)
        ctx.set_materialize_grads(False)
        ctx.state = state
        return state.forward()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        state, ctx.state = ctx.state, None
        if state is None:
            raise RuntimeError(
                "backward a second time through a network with memory=Checkpoint(), which frees "
                "what it has kept: use another policy"
            )
        _ = ctx.saved_tensors  # refuses parameters that were changed since
        return (None, *state.backward(grads))


class _Run:
    """One forward pass, what it keeps, and its backward pass."""

    def __init__(
        self,
        segments: Segments,
        policy: Checkpoint,
        sequence: neuron.Sequence,
        x: Tensor,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        assert sequence.spikes is not None
        self.segments, self.policy, self.parameters = segments, policy, parameters
        self.steps, self.impl, self.spikes = sequence.num_steps, sequence.impl, sequence.spikes
        self.batch = sequence.constant_rows or x.shape[0] // self.steps
        device = x.device.type
        self.cast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.kind = (x.shape, x.dtype, x.device, self.cast)
        whole = (0, self.batch)
        self.kept: dict[fx.Node, list[tuple[Part, Kept]]] = {
            segments.input: [(whole, (x.detach(), x._version))]
        }
        self.parts: dict[fx.Node, list[Part]] = {segments.input: [whole]}
        self.needs = {segments.input: x.requires_grad}
        # What segments leave for backward: with statistics of the batch; those computed once.
        self.jobs: dict[Segment, Job] = {}
        self.graphs: dict[Segment, tuple[Mapping[fx.Node, Tensor], Tensor]] = {}
        self.grads: dict[fx.Node, Gradient] = {}
        self.totals: dict[nn.Parameter, Tensor] = {}
        self.largest = 0

    def autocast(self) -> Any:
        # A cast weight is not kept until all is over.
        device, dtype, enabled = self.cast
        return torch.autocast(device, dtype, enabled, cache_enabled=False)

    def forward(self) -> tuple[Tensor, ...]:
        with self.autocast():
            for segment in self.segments:
                target = segment.target
                self.needs[target] = any(
                    (*map(self.needs.__getitem__, segment.inputs), *_wanted(segment.parameters))
                )
                self.parts[target] = self._divided(segment)
                if segment.block is not None:
                    self._run_block(segment, segment.block)
                elif segment.again:
                    for part in self.parts[target]:
                        self._keep(target, part, _Values(self, segment, part)[target])
                else:
                    self._run_once(segment)
        # Not the kept tensors themselves: these would keep their own history alive.
        whole = (0, self.batch)
        return tuple(take(self.kept[n], whole).detach() for n in self.segments.outputs)

    def _divided(self, segment: Segment) -> list[Part]:
        """Parts so small that, with the gradients around, the working set stays below that of the
        largest segment so far, which has about as many parts as the policy says."""
        if not segment.by_sample:
            return [(0, self.batch)]
        key = (segment, *self.kind)
        sizes = self.segments.sizes.get(key)
        if sizes is None:
            values = _Values(self, segment, (0, 1))
            sizes = self.segments.sizes[key] = values.num_bytes()
        inside, read = (size * self.batch for size in sizes)
        most = max(inside, read)
        self.largest = max(self.largest, most)
        left = self.largest * (1 + 4 / self.policy.chunks) - most
        num = math.ceil(2 * (inside + read) / left) if left else 1
        return divided(self.batch, 1 << (num - 1).bit_length())

    def _run_once(self, segment: Segment) -> None:
        """What is random, or unknown."""
        values = _Values(self, segment, (0, self.batch), differentiable=True)
        with torch.enable_grad():
            y = values[segment.target]
        if not isinstance(y, Tensor):
            raise ValueError(
                f"memory=Checkpoint() can't run '{segment.target}', which gives a "
                f"{type(y).__name__}: expected one tensor; use another policy"
            )
        self.graphs[segment] = values.leaves, y
        self._keep(segment.target, (0, self.batch), y.detach())

    def _run_block(self, segment: Segment, called: BlockCall) -> None:
        parts = self.parts[segment.target]
        x: Tensor | None = None
        for part in parts:
            values = _Values(self, segment, part)
            piece = rows(values[called.inputs[0]], _size(part))
            if len(parts) == 1:
                x = piece
            else:
                x = room(piece, self.batch) if x is None else x
                x[:, slice(*part)].copy_(piece)
        assert x is not None
        x = x.expand(self.steps, *x.shape[1:])
        block.check_norm(called.norm, called.neuron, x, revises=True)
        kernels, own = self.kernels(called, x)
        if len(kernels.binary) != 1:
            raise _several(segment)
        inputs = (x,) * len(called.inputs)
        call = call_of(kernels.name, spec(inputs))
        job = block.start(called.norm, kernels, call, inputs, 0, not kernels.rebuilds, False)
        self.jobs[segment] = job
        shift = shift_of(called.norm, x)
        for part in parts:
            values = values if len(parts) == 1 else _Values(self, segment, part)
            inputs = (x[:, slice(*part)], *map(values.sequence, called.inputs[1:]))
            names = block.NAMES[: len(inputs)]
            neuron.check(called.neuron, names, inputs, None, job.kernels.backend)
            launch.check(job.kernels.backend, inputs[0])
            call = call_of(job.kernels.name, spec(inputs))
            packed = neuron.bits_wanted(inputs[0])
            (y,), _, _ = job.forward(call, Given(inputs, (), shift, own), False, packed)
            neuron.mark((y,), job.kernels.binary, packed)
            self._keep(segment.target, part, y.flatten(0, 1))

    def kernels(self, called: BlockCall, x: Tensor) -> tuple[Kernels, list[Tensor]]:
        backend = neuron.backend_of((x,), self.impl)
        return block.kernels_of(called.neuron, backend, len(called.inputs) > 1, True)

    def _keep(self, target: fx.Node, part: Part, y: Tensor) -> None:
        value = self.spikes.pack(y)
        if self.segments.is_pooled(target) and isinstance(value, tuple):
            (source,) = target.all_input_nodes
            if all(isinstance(k, bits.Packed) for _, k in self.kept.get(source, [(part, value)])):
                value = bits.pack(y)
        self.spikes.clear()
        self.kept.setdefault(target, []).append((part, value))

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the input and of the parameters."""
        whole = (0, self.batch)
        self.grads = {node: Gradient(parts) for node, parts in self.parts.items()}
        for node, gradient in zip(self.segments.outputs, grads, strict=True):
            if gradient is not None:
                self.grads[node].add(whole, gradient)
        del grads
        with self.autocast(), torch.enable_grad():
            for segment in reversed(self.segments):
                # All that read it are done.
                del self.kept[segment.target]
                if self.grads[segment.target] and self.needs[segment.target]:
                    self._differentiate(segment)
                del self.grads[segment.target]
        found = self.grads[self.segments.input].pop(whole)
        return [found, *map(self.totals.get, self.parameters)]

    def _differentiate(self, segment: Segment) -> None:
        gradient = self.grads[segment.target]
        if segment.block is not None:
            self._differentiate_block(segment, segment.block, gradient)
        elif segment.again:
            for part in gradient.parts:
                values = _Values(self, segment, part, differentiable=True)
                y = values[segment.target]
                self.differentiate(segment, part, values.leaves, [y], [gradient.pop(part)])
        else:
            part, (leaves, y) = (0, self.batch), self.graphs.pop(segment)
            self.differentiate(segment, part, leaves, [y], [gradient.pop(part)])

    def _differentiate_block(self, segment: Segment, called: BlockCall, grad: Gradient) -> None:
        """As `block` does, both passes part by part."""
        job, parts = self.jobs.pop(segment), grad.parts
        own = self.kernels(called, job.statistics)[1]
        shift = shift_of(called.norm, job.statistics).detach()
        given = Given((), (), shift, [tensor.detach() for tensor in own])
        needs_own = [tensor.requires_grad for tensor in own]
        sums: dict[str, Tensor] = {}
        again: _Again | None = None
        for part in parts:
            again = None  # before there is the next
            again = _Again(self, segment, called, job, given, part)
            again.reduce(grad.get(part), needs_own, sums)
        revision, *by_norm = job.revision(job.totals(job.call, sums))
        heads = [called.norm.weight, called.norm.bias, *own]
        self._differentiate_heads(called, heads, [*by_norm, *job.grad_own(job.call, sums, own)])
        sums.clear()
        for part in reversed(parts):
            # The last part is still there.
            again = again or _Again(self, segment, called, job, given, part)
            again.write(grad.pop(part), revision)
            again = None

    def _differentiate_heads(
        self,
        called: BlockCall,
        heads: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
    ) -> None:
        """From gradients of a block's tensors to those of the parameters that they are made of."""
        pairs = [
            (y, g.to(y.dtype))
            for y, g in zip(heads, grads, strict=True)
            if y is not None and g is not None and y.requires_grad
        ]
        parameters = [p for m in (called.norm, called.neuron) for p in m.parameters()]
        parameters = [p for p in parameters if p.requires_grad]
        if pairs and parameters:
            found = torch.autograd.grad(*_columns(pairs, parameters), allow_unused=True)
            self.add(parameters, found)

    def differentiate(
        self,
        segment: Segment,
        part: Part,
        leaves: Mapping[fx.Node, Tensor],
        results: Sequence[Tensor],
        grads: Sequence[Tensor | None],
    ) -> None:
        """Add the gradients of all that a segment reads, `leaves` among it."""
        nodes = [node for node, x in leaves.items() if x.requires_grad]
        parameters = [p for p in segment.parameters if p.requires_grad]
        pairs = [
            (y, g) for y, g in zip(results, grads, strict=True) if g is not None and y.requires_grad
        ]
        wanted = [*map(leaves.__getitem__, nodes), *parameters]
        if not (pairs and wanted):
            return
        found = torch.autograd.grad(*_columns(pairs, wanted), allow_unused=True)
        for node, gradient in zip(nodes, found, strict=False):
            if gradient is not None:
                self.grads[node].add(part, gradient)
        self.add(parameters, found[len(nodes) :])

    def add(self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
        for p, g in zip(parameters, grads, strict=True):
            if g is not None:
                self.totals[p] = g if p not in self.totals else self.totals[p] + g


class _Values:
    """The values of a segment for a part of the batch, computed as they are asked for.

    Args:
        differentiable: with a graph from `leaves`, the kept values that were read.
    """

    def __init__(
        self, run: _Run, segment: Segment, part: Part, differentiable: bool = False
    ) -> None:
        self.run, self.segment, self.part = run, segment, part
        self.differentiable = differentiable
        self.leaves: dict[fx.Node, Tensor] = {}
        self.found: dict[fx.Node, Any] = {}

    def __getitem__(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.run.segments.attribute(node)
        if node not in self.found:
            read = node in self.segment.inputs
            self.found[node] = self._leaf(node) if read else self._call(node)
        return self.found[node]

    def _leaf(self, node: fx.Node) -> Tensor:
        x = take(self.run.kept[node], self.part).detach()
        if self.differentiable:
            x.requires_grad_(self.run.needs[node])
        self.leaves[node] = x
        return x

    def sequence(self, node: fx.Node) -> Tensor:
        """`[T, B, ...]`."""
        x = rows(self[node], _size(self.part))
        return x.expand(self.run.steps, *x.shape[1:])

    def _call(self, node: fx.Node) -> Any:
        segments = self.run.segments
        module, called = segments.called.get(node), segments.blocks.get(node)
        if called is not None:
            return self._fire(partial(block.scan, called.norm, called.neuron, None), called.inputs)
        if isinstance(module, neuron.Neuron):
            return self._fire(module._scan, node.all_input_nodes)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.__getitem__)
        if module is not None:
            with _still(module) if self.differentiable else contextlib.nullcontext():
                return module(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _fire(self, scan: neuron.Scan, nodes: Sequence[fx.Node]) -> Tensor:
        outputs, _ = scan(tuple(map(self.sequence, nodes)), None, self.run.impl, False)
        if len(outputs) != 1:
            raise _several(self.segment)
        return outputs[0].flatten(0, 1)

    def num_bytes(self) -> tuple[int, int]:
        """(of the largest value, of the kept values that are read), at all steps."""
        called = self.segment.block
        for node in (self.segment.target,) if called is None else called.inputs:
            self[node]
        largest = max(self.run.steps * x[0].nbytes for x in self.found.values())
        source = self.run.segments.input
        return largest, sum(x.nbytes for node, x in self.leaves.items() if node is not source)


class _Again:
    """What goes into a block, computed again for a part of the batch, and the two passes."""

    def __init__(
        self, run: _Run, segment: Segment, called: BlockCall, job: Job, given: Given, part: Part
    ) -> None:
        self.job = job
        self.values = _Values(run, segment, part, differentiable=True)
        self.inputs = [self.values.sequence(node) for node in called.inputs]
        inputs = tuple(x.detach() for x in self.inputs)
        self.given = given._replace(inputs=inputs)
        self.call = call_of(job.kernels.name, spec(inputs))
        self.rebuild = not job.keeps_states and self.call.num_saved > 0
        self.saved: Sequence[Tensor] = self.call.stored() if self.rebuild else ()
        if job.keeps_states:
            self.saved = job.forward(self.call, self.given, save=True)[2]

    def reduce(
        self, grad: Tensor | None, needs_own: Sequence[bool], sums: dict[str, Tensor]
    ) -> None:
        """The first pass, into `sums` per neuron of the whole batch."""
        job, call = self.job, self.call
        grads = (self._unfolded(grad),)
        _, found = job.reduce(call, self.given, self.saved, grads, needs_own, self.rebuild)
        self.rebuild = False
        if call.layout == job.call.layout:
            sums |= found
            return
        for name, total in found.items():
            if name not in sums:
                sums[name] = total.new_empty(job.call.layout.num_neurons)
            whole, piece = (
                x.as_strided(at.layout.step_shape, at.layout.step_strides)
                for x, at in ((sums[name], job.call), (total, call))
            )
            whole[slice(*self.values.part)].copy_(piece)

    def write(self, grad: Tensor | None, revision: Sequence[Tensor]) -> None:
        """The second pass, and on to what the segment reads."""
        needs = [x.requires_grad for x in self.inputs]
        if not any(needs):
            return
        at = (self.call, self.given, self.saved, (self._unfolded(grad),))
        written = iter(self.job.write(*at, revision, needs, self.rebuild))
        grads = [next(written) if wanted else None for wanted in needs]
        values = self.values
        values.run.differentiate(values.segment, values.part, values.leaves, self.inputs, grads)

    def _unfolded(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else rows(grad, _size(self.values.part))


@contextlib.contextmanager
def _still(module: nn.Module) -> Iterator[None]:
    """Keep a batch norm from moving its running statistics on a second time."""
    tracks = getattr(module, "track_running_stats", False)
    if tracks:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        if tracks:
            module.track_running_stats = True  # type: ignore[assignment]


def _columns(
    pairs: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor]
) -> tuple[list[Tensor], Sequence[Tensor], list[Tensor]]:
    """What torch.autograd.grad takes."""
    return [y for y, _ in pairs], leaves, [g for _, g in pairs]


def _several(segment: Segment) -> ValueError:
    return ValueError(
        f"memory=Checkpoint() can't run '{segment.target}', a neuron with several outputs: use "
        "another policy"
    )


def _wanted(tensors: Iterable[Tensor]) -> Iterator[bool]:
    return (tensor.requires_grad for tensor in tensors)


def _size(part: Part) -> int:
    return part[1] - part[0]
