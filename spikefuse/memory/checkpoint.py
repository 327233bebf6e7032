"""Training under `Checkpoint`: each segment of the network is computed again when backward comes
to it, in parts of the batch where its working set would set the peak.

Gradients, too, lie in parts: that of a segment's output goes as that of its inputs comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from spikefuse.block import block
from spikefuse.block.batch_norm import shift_of
from spikefuse.block.program import BlockProgram, block_program
from spikefuse.block.training import BlockTensors, TrainingCall
from spikefuse.kernels import bits
from spikefuse.memory.microbatch import (
    Gradient,
    Microbatch,
    batch_size,
    empty_batch,
    split,
    take,
    unfolded,
)
from spikefuse.memory.policies import Checkpoint
from spikefuse.memory.recompute import Gradients, RecomputedBlock, RecomputedNeuron, gradients
from spikefuse.memory.segment_values import KeptValues, Store, Values, several
from spikefuse.memory.segments import BlockCall, NeuronCall, Segment, Segments
from spikefuse.memory.spikes import Spikes
from spikefuse.nn import neuron
from spikefuse.nn.call import Saving, TemporalCall, active, inside, mark_binary, wants_bits
from spikefuse.scan import op
from spikefuse.scan.execution import Wanted, execution_of
from spikefuse.scan.op import Request
from spikefuse.scan.state_passing import WHOLE, Channel, StateMemory, exchange


def _applies(net: nn.Module, x: Tensor, impl: str) -> bool:
    """Whether a call saves something that could be recomputed: with gradients, by kernels."""
    return (
        torch.is_grad_enabled()
        and x.shape[0] > 0
        and not torch.compiler.is_compiling()
        and neuron.backend_of((x,), impl) != "reference"
        and (x.requires_grad or any(p.requires_grad for p in net.parameters()))
    )


def _run(policy: Checkpoint, net: nn.Module, call: TemporalCall, x: Tensor) -> Any:
    """Run a network on a folded input and save only what its segments begin from."""
    if not _applies(net, x, call.impl):
        return net(x)
    if call.initial is not None or call.final:
        raise ValueError(
            "memory=Checkpoint() trains on whole sequences, without state= and return_state=: use "
            "another policy, or torch.no_grad()"
        )
    segments = call.cache.get("segments")
    if segments is None or not segments.fits(net):
        segments = call.cache["segments"] = Segments(net)
    call.saving = call.saving or Saving(policy)
    call.saving.spikes = call.saving.spikes or Spikes()
    parameters = [p for p in segments.net.parameters() if p.requires_grad]
    if active.observer is not None:
        called = [s.block or s.neuron for s in segments]
        active.observer.checkpoint(m for x in called if x is not None for m in x.modules)
    state = _Run(segments, policy, call, x, parameters)
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


class _Run(Store):
    """One forward pass, what it keeps, and its backward pass."""

    def __init__(
        self,
        segments: Segments,
        policy: Checkpoint,
        call: TemporalCall,
        x: Tensor,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        assert call.spikes is not None
        self.batch = call.constant_rows or x.shape[0] // call.num_steps
        whole = (0, self.batch)
        kept: KeptValues = {segments.input: [(whole, (x.detach(), x._version))]}
        needs = {segments.input: x.requires_grad}
        super().__init__(segments, call.num_steps, call.impl, kept, needs)
        self.policy, self.parameters = policy, parameters
        self.spikes, self.passing = call.spikes, call.passing or WHOLE
        # What layers are told when they are computed again, without neurons.
        rows = call.constant_rows
        self.again = TemporalCall(self.steps, {}, self.impl, constant_rows=rows)
        device = x.device.type
        self.cast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.kind = (x.shape, x.dtype, x.device, self.cast)
        self.parts: dict[fx.Node, list[Microbatch]] = {segments.input: [whole]}
        # Saved by segments for backward: states received from the process before, training calls of
        # blocks with batch statistics, and graphs of segments that run once.
        self.states: dict[Segment, dict[Microbatch, list[Tensor]]] = {}
        self.calls: dict[Segment, TrainingCall] = {}
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
                elif segment.neuron is not None:
                    self._run_neuron(segment, segment.neuron)
                elif segment.again:
                    for part in self.parts[target]:
                        self._keep(target, part, Values(self, segment, part)[target])
                else:
                    self._run_once(segment)
        # Not the kept tensors themselves: these would keep their own history alive.
        whole = (0, self.batch)
        return tuple(take(self.kept[n], whole).detach() for n in self.segments.outputs)

    def _divided(self, segment: Segment) -> list[Microbatch]:
        """Parts so small that, with the gradients around, the working set stays below that of the
        largest segment so far, which has about as many parts as the policy says."""
        if not segment.by_sample:
            return [(0, self.batch)]
        key = (segment, *self.kind)
        sizes = self.segments.sizes.get(key)
        if sizes is None:
            values = Values(self, segment, (0, 1))
            sizes = self.segments.sizes[key] = values.num_bytes()
        # Of a sample at a step, so that processes with other steps come to the same parts.
        inside, read = sizes
        most = max(inside, read)
        self.largest = max(self.largest, most)
        left = self.largest * (1 + 4 / self.policy.chunks) - most
        num = math.ceil(2 * (inside + read) / left) if left else 1
        return split(self.batch, 1 << (num - 1).bit_length())

    def _run_once(self, segment: Segment) -> None:
        """What is random, or unknown."""
        values = Values(self, segment, (0, self.batch), differentiable=True)
        with torch.enable_grad():
            y = values[segment.target]
        if not isinstance(y, Tensor):
            raise ValueError(
                f"memory=Checkpoint() can't run '{segment.target}', which gives a "
                f"{type(y).__name__}: expected one tensor; use another policy"
            )
        self.graphs[segment] = values.leaves, y
        self._keep(segment.target, (0, self.batch), y.detach())

    def _run_neuron(self, segment: Segment, called: NeuronCall) -> None:
        parts, target = self.parts[segment.target], segment.target
        # Norms, which wait for all processes, are in segments of a single microbatch only.
        first = [Values(self, segment, parts[0]).sequences(called.inputs)]
        memory = StateMemory.like(first[0][0], called.num_states)

        def run(part: Microbatch, states: list[Tensor]) -> Sequence[Tensor]:
            values = Values(self, segment, part)
            inputs = first.pop() if first else values.sequences(called.inputs)
            y, ends = values.fire(called, inputs, states, self._sends)
            self._keep(target, part, y.flatten(0, 1))
            return ends

        self.states[segment] = self._forward(memory, parts, run)

    def _run_block(self, segment: Segment, called: BlockCall) -> None:
        parts = self.parts[segment.target]
        first: list[Sequence[Tensor]] = []
        if len(parts) == 1:
            first = [Values(self, segment, parts[0]).sequences(called.inputs)]
            x = first[0][0]
        else:
            x = self._whole(segment, called.inputs[0])
        block.check_norm(called.norm, called.neuron, x, batch=True)
        program, own = self.program(called, x)
        if len(program.binary) != 1:
            raise several(segment)
        call = self.calls[segment] = self._training_call(called, program, x)
        shift = shift_of(called.norm, x)

        def run(part: Microbatch, states: list[Tensor]) -> Sequence[Tensor]:
            values = Values(self, segment, part)
            piece = x[:, slice(*part)]
            inputs = first.pop() if first else (piece, *values.sequences(called.inputs[1:]))
            names = block.NAMES[: len(inputs)]
            neuron.check(called.neuron, names, tuple(inputs), None, program.backend)
            op.check(program.backend, inputs[0])
            execution = execution_of(program.name, inputs)
            arguments = call.arguments(BlockTensors(inputs, states, shift, own))
            wanted = Wanted(False, self._sends, wants_bits(inputs[0]))
            results = execution.forward(arguments, execution.new_results(wanted))
            if wanted.bits:
                mark_binary(results, program.binary)
            self._keep(segment.target, part, results.outputs[0].flatten(0, 1))
            return results.finals

        memory = StateMemory.like(x, program.num_states)
        self.states[segment] = self._forward(memory, parts, run)

    def _forward(
        self,
        memory: StateMemory,
        parts: Sequence[Microbatch],
        run: Callable[[Microbatch, list[Tensor]], Sequence[Tensor]],
    ) -> dict[Microbatch, list[Tensor]]:
        """Run a scan part by part: the states that arrived for each part."""
        buffers = [
            [] if self.passing.is_first else memory.empty(batch_size(part)) for part in parts
        ]
        channel = self.passing.forward(buffers)
        return _exchange(channel, memory, parts, run, self.passing.is_last)

    def _backward(
        self,
        memory: StateMemory,
        parts: Sequence[Microbatch],
        run: Callable[[Microbatch, list[Tensor]], Sequence[Tensor]],
    ) -> dict[Microbatch, list[Tensor]]:
        """The same against time, for gradients of states."""
        buffers = [[] if self.passing.is_last else memory.empty(batch_size(part)) for part in parts]
        channel = self.passing.backward(buffers)
        return _exchange(channel, memory, parts, run, self.passing.is_first)

    @property
    def _sends(self) -> bool:
        """Whether final states are for another process."""
        return not self.passing.is_last

    def _whole(self, segment: Segment, node: fx.Node) -> Tensor:
        """What a node in a segment of several parts gives, `[T, B, ...]`."""
        x: Tensor | None = None
        for part in self.parts[segment.target]:
            piece = unfolded(Values(self, segment, part)[node], batch_size(part))
            x = empty_batch(piece, self.batch) if x is None else x
            x[:, slice(*part)].copy_(piece)
        assert x is not None
        return x.expand(self.steps, *x.shape[1:])

    def _training_call(self, called: BlockCall, program: BlockProgram, x: Tensor) -> TrainingCall:
        inputs = (x,) * len(called.inputs)
        request = Request(inputs, final=self._sends, passing=self.passing)
        return block.training_call(called.norm, program, not program.rebuilds, request)

    def program(self, called: BlockCall, x: Tensor) -> tuple[BlockProgram, list[Tensor]]:
        backend = neuron.backend_of((x,), self.impl)
        return block_program(called.neuron, backend, len(called.inputs) > 1, True)

    def _keep(self, target: fx.Node, part: Microbatch, y: Tensor) -> None:
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
        with self.autocast(), torch.enable_grad(), inside(self.again):
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
        elif segment.neuron is not None:
            self._differentiate_neuron(segment, segment.neuron, gradient)
        elif segment.again:
            for part in gradient.microbatches:
                values = Values(self, segment, part, differentiable=True)
                y = values[segment.target]
                self.differentiate(segment, part, values.leaves, [y], [gradient.pop(part)])
        else:
            part, (leaves, y) = (0, self.batch), self.graphs.pop(segment)
            self.differentiate(segment, part, leaves, [y], [gradient.pop(part)])

    def _differentiate_neuron(self, segment: Segment, called: NeuronCall, grad: Gradient) -> None:
        parts, states = grad.microbatches, self.states.pop(segment)
        parameters = [p for m in called.modules for p in m.parameters() if p.requires_grad]
        again: RecomputedNeuron | None = RecomputedNeuron(self, segment, called, parts[0])
        assert again is not None
        memory = StateMemory.like(again.inputs[0], called.num_states)

        def go_on() -> None:
            """To what the last part has read, when its gradients are on their way."""
            nonlocal again
            assert again is not None
            values, inputs, grads = again.values, again.inputs, again.grads
            again = None
            self.differentiate(segment, values.part, values.leaves, inputs, grads)

        def run(part: Microbatch, ends: list[Tensor]) -> Sequence[Tensor]:
            nonlocal again
            assert again is not None
            if again.values.part != part:
                go_on()
                again = RecomputedNeuron(self, segment, called, part)
            begins, found = again.differentiate(states[part], grad.pop(part), ends, parameters)
            self.add(parameters, found)
            return begins

        self._backward(memory, parts, run)
        go_on()

    def _differentiate_block(self, segment: Segment, called: BlockCall, grad: Gradient) -> None:
        """As `block` does, both passes part by part."""
        call, states, parts = self.calls.pop(segment), self.states.pop(segment), grad.microbatches
        own = self.program(called, call.statistics)[1]
        shift = shift_of(called.norm, call.statistics).detach()
        tensors = BlockTensors((), (), shift, [tensor.detach() for tensor in own])
        needs_own = [tensor.requires_grad for tensor in own]
        sums: dict[str, Tensor] = {}

        def compute(part: Microbatch) -> RecomputedBlock:
            given = tensors._replace(states=states[part])
            return RecomputedBlock(self, segment, called, part, call, given)

        again: RecomputedBlock | None = compute(parts[0])
        assert again is not None
        memory = StateMemory.like(again.inputs[0], call.program.num_states)

        def reduce(part: Microbatch, ends: list[Tensor]) -> Sequence[Tensor]:
            nonlocal again
            if again is None or again.values.part != part:
                again = None  # before there is the next
                again = compute(part)
            return again.reduce(grad.get(part), ends, needs_own, sums)

        ends = self._backward(memory, parts, reduce)
        correction, *by_norm = call.correct(call.totals(call.execution, sums))
        heads = [called.norm.weight, called.norm.bias, *own]
        by_own = call.own_gradients(call.execution, sums, own)
        self._differentiate_heads(called, heads, [*by_norm, *by_own])
        sums.clear()
        for part in reversed(parts):
            # The last part is still there.
            again = again or compute(part)
            found = again.write(grad.pop(part), ends[part], correction)
            self.differentiate(segment, part, again.values.leaves, again.inputs, found)
            again = None

    def _differentiate_heads(
        self,
        called: BlockCall,
        heads: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
    ) -> None:
        """From gradients of a block's tensors to those of the parameters that they are made of."""
        modules = (called.norm, called.neuron)
        parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
        pairs = [(y, g) for y, g in zip(heads, grads, strict=True) if y is not None]
        self.add(parameters, gradients(pairs, parameters))

    def differentiate(
        self,
        segment: Segment,
        part: Microbatch,
        leaves: Mapping[fx.Node, Tensor],
        results: Sequence[Tensor],
        grads: Gradients,
    ) -> None:
        """Add the gradients of all that a segment reads, `leaves` among it."""
        nodes = [node for node, x in leaves.items() if x.requires_grad]
        parameters = [p for p in segment.parameters if p.requires_grad]
        wanted = [*map(leaves.__getitem__, nodes), *parameters]
        found = gradients(list(zip(results, grads, strict=True)), wanted)
        for node, gradient in zip(nodes, found, strict=False):
            if gradient is not None:
                self.grads[node].add(part, gradient)
        self.add(parameters, found[len(nodes) :])

    def add(self, parameters: Sequence[nn.Parameter], grads: Gradients) -> None:
        for p, g in zip(parameters, grads, strict=True):
            if g is not None:
                self.totals[p] = g if p not in self.totals else self.totals[p] + g


def _wanted(tensors: Iterable[Tensor]) -> Iterator[bool]:
    return (tensor.requires_grad for tensor in tensors)


def _exchange(
    channel: Channel,
    memory: StateMemory,
    parts: Sequence[Microbatch],
    run: Callable[[Microbatch, list[Tensor]], Sequence[Tensor]],
    ends_here: bool,
) -> dict[Microbatch, list[Tensor]]:
    """Run each part on the states that arrive for it, and send what `run` returns."""

    def compute(i: int, states: list[Tensor]) -> Sequence[Tensor]:
        results = run(parts[i], states)
        return results if ends_here else memory.conform(results)

    exchange(channel, len(parts), compute, lambda i, results: results)
    return dict(zip(parts, channel.buffers, strict=True))


Checkpoint.run = _run  # type: ignore[assignment,method-assign]
