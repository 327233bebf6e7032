"""Training under `Checkpoint`: backward recomputes the network segment by segment.

A segment whose working set would set the peak runs in microbatches. Gradients are also stored by
microbatch, and freed as soon as a segment has used them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from spikefuse.block import block
from spikefuse.block.batch_norm import shift_of
from spikefuse.block.deferred import Outcome, outcomes
from spikefuse.block.program import BlockExecution, BlockProgram, block_program
from spikefuse.block.training import BlockTensors, TrainingCall
from spikefuse.kernels import bits
from spikefuse.memory.microbatch import (
    Gradient,
    Microbatch,
    StateMemory,
    batch_size,
    empty_batch,
    split,
)
from spikefuse.memory.policies import Checkpoint
from spikefuse.memory.recompute import Gradients, RecomputedBlock, RecomputedNeuron, gradients
from spikefuse.memory.segment_values import Store, Values, as_residual, multiple_outputs_error
from spikefuse.memory.segments import BlockCall, NeuronCall, Segment, Segments
from spikefuse.memory.snapshot import Snapshot
from spikefuse.memory.spikes import Spikes
from spikefuse.memory.tracing import has_hooks
from spikefuse.nn import neuron
from spikefuse.nn.call import Saving, TemporalCall, active, inside, mark_binary, wants_bits
from spikefuse.nn.constant_input import ConstantSequence, unfold
from spikefuse.scan import op
from spikefuse.scan.double_backward import refuse_double_backward
from spikefuse.scan.execution import Wanted, execution_of
from spikefuse.scan.layout import flatten_steps
from spikefuse.scan.op import Request
from spikefuse.scan.state_passing import WHOLE


def _is_recomputed_call(net: nn.Module, x: Tensor, impl: str) -> bool:
    """Whether backward can recompute a call: it needs gradients, and kernels run it."""
    return (
        torch.is_grad_enabled()
        and x.shape[0] > 0
        and not torch.compiler.is_compiling()
        and neuron.backend_of((x,), impl) != "reference"
        and (x.requires_grad or any(p.requires_grad for p in net.parameters()))
    )


def _run(policy: Checkpoint, net: nn.Module, call: TemporalCall, x: Tensor) -> Any:
    """Run a network on a folded input and save only the inputs of its segments."""
    if not _is_recomputed_call(net, x, call.impl):
        return net(x)
    if has_hooks(net):
        warnings.warn(
            f"memory=Checkpoint() recomputes nothing, because {type(net).__name__}, the network "
            "inside Temporal, has hooks: register them on the Temporal or on a layer",
            stacklevel=2,
        )
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
    parameters = _learned([segments.net])
    if active.observer is not None:
        called = [s.block or s.neuron for s in segments]
        active.observer.checkpoint([m for x in called if x is not None for m in x.modules])
    state = _Run(segments, policy, call, x, parameters)
    results = dict(zip(segments.outputs, _Whole.apply(state, x, *parameters), strict=True))
    return fx.node.map_arg(segments.output, results.__getitem__)


class _Whole(torch.autograd.Function):
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
                "what it has saved: use another policy"
            )
        _ = ctx.saved_tensors  # raises an error if a parameter was modified in place
        # A new leaf, since the input is not saved as it was given.
        leaf = torch.empty(0, requires_grad=True)
        state.snapshot.check_unchanged()
        return refuse_double_backward((None, *state.backward(grads)), leaf)


class _Run(Store):
    """One forward pass of a network, the values it saves, and its backward pass."""

    def __init__(
        self,
        segments: Segments,
        policy: Checkpoint,
        call: TemporalCall,
        x: Tensor,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        assert call.spikes is not None
        self.batch = x.shape[0] // call.num_steps
        whole = (0, self.batch)
        needs = {segments.input: x.requires_grad}
        super().__init__(segments, call.num_steps, call.impl, {}, needs)
        rows = self.stored(segments.input, x.detach())
        self.saved[segments.input] = [(whole, (rows, rows._version))]
        self.policy, self.parameters = policy, parameters
        self.snapshot = Snapshot(segments.modules_read, segments.attributes_read)
        self.spikes, self.passing = call.spikes, call.passing or WHOLE
        # Active while backward recomputes layers without neurons.
        self.call = TemporalCall(self.steps, {}, impl=self.impl)
        device = x.device.type
        self.cast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.kind = (x.shape, x.dtype, x.device, self.cast)
        self.microbatches: dict[fx.Node, list[Microbatch]] = {segments.input: [whole]}
        # Saved for backward, by segment: states received from the previous process, training calls
        # of blocks with batch statistics, and autograd graphs of segments that are not recomputed.
        self.states: dict[Segment, dict[Microbatch, list[Tensor]]] = {}
        self.calls: dict[Segment, TrainingCall] = {}
        self.graphs: dict[Segment, tuple[Mapping[fx.Node, Tensor], Tensor]] = {}
        self.grads: dict[fx.Node, Gradient] = {}
        self.totals: dict[nn.Parameter, Tensor] = {}
        self.largest = 0

    def autocast(self) -> Any:
        # The cache would hold cast weights until the end of the pass.
        device, dtype, enabled = self.cast
        return torch.autocast(device, dtype, enabled, cache_enabled=False)

    def forward(self) -> tuple[Tensor, ...]:
        for called in self.segments.blocks.values():
            for norm in called.norms:
                outcomes[norm] = Outcome(called.neuron, len(called.inputs) > 1)
        with self.autocast():
            for segment in self.segments:
                target = segment.target
                needs = [self.needs[node] for node in segment.inputs]
                self.needs[target] = any(needs) or any(p.requires_grad for p in segment.parameters)
                self.microbatches[target] = self._split(segment)
                if segment.block is not None:
                    self._run_block(segment, segment.block)
                elif segment.neuron is not None:
                    self._run_neuron(segment, segment.neuron)
                elif segment.is_recomputed:
                    for microbatch in self.microbatches[target]:
                        self._save(target, microbatch, Values(self, segment, microbatch)[target])
                else:
                    self._run_once(segment)
        # Detached, because a saved tensor must not hold a reference to its own graph.
        whole = (0, self.batch)
        return tuple(
            flatten_steps(unfold(self.take(n, whole), self.steps)).detach()
            for n in self.segments.outputs
        )

    def _split(self, segment: Segment) -> list[Microbatch]:
        """Return the microbatches of a segment.

        Its working set, with gradients, must not exceed the one of the largest segment so far,
        which has about `policy.chunks` microbatches.
        """
        if not segment.by_sample:
            return [(0, self.batch)]
        key = (segment, *self.kind)
        sizes = self.segments.sizes.get(key)
        if sizes is None:
            values = Values(self, segment, (0, 1))
            sizes = self.segments.sizes[key] = values.num_bytes()
        # Sizes are per sample and step: processes with different numbers of steps must agree.
        inside_bytes, read_bytes = sizes
        most = max(inside_bytes, read_bytes)
        self.largest = max(self.largest, most)
        left = self.largest * (1 + 4 / self.policy.chunks) - most
        num = math.ceil(2 * (inside_bytes + read_bytes) / left) if left else 1
        return split(self.batch, 1 << (num - 1).bit_length())

    def _run_once(self, segment: Segment) -> None:
        """Run a segment that cannot be recomputed, and save its autograd graph."""
        values = Values(self, segment, (0, self.batch), differentiable=True)
        with torch.enable_grad():
            y = values[segment.target]
            if isinstance(y, ConstantSequence):
                y = y.view(y.shape)
        if not isinstance(y, Tensor):
            raise ValueError(
                f"memory=Checkpoint() can't run '{segment.target}', which returns a "
                f"{type(y).__name__}: expected one tensor; use another policy"
            )
        self.graphs[segment] = values.leaves, y
        self._save(segment.target, (0, self.batch), y.detach())

    def _run_neuron(self, segment: Segment, called: NeuronCall) -> None:
        microbatches, target = self.microbatches[segment.target], segment.target
        # Computing inputs early is safe: norms that synchronize processes have a single microbatch.
        first = [Values(self, segment, microbatches[0]).sequences(called.inputs)]
        memory = StateMemory.like(first[0][0], called.num_states)

        def run(microbatch: Microbatch, states: list[Tensor]) -> Sequence[Tensor]:
            values = Values(self, segment, microbatch)
            inputs = first.pop() if first else values.sequences(called.inputs)
            y, ends = values.fire(called, inputs, states, self._sends)
            self._save(target, microbatch, flatten_steps(y))
            return ends

        self.states[segment] = self._exchange(memory, microbatches, run)

    def _run_block(self, segment: Segment, called: BlockCall) -> None:
        microbatches = self.microbatches[segment.target]
        normed = called.inputs[: len(called.norms)]
        first: list[Sequence[Tensor]] = []
        if len(microbatches) == 1:
            values = Values(self, segment, microbatches[0])
            given = [values.sequences([node])[0] for node in normed]
            first = [values.sequences(called.inputs)]
            del values  # frees what it has computed on the way
        else:
            given = [self._whole_batch(segment, node) for node in normed]
        x = given[0]
        xs = [as_residual(y, x, segment) for y in given]
        program, own = self.program(called, x)
        alone = self.passing.statistics is None
        block.check_norms(called.norms, called.neuron, x, program.backend, alone)
        if len(program.binary) != 1:
            raise multiple_outputs_error(segment)
        # What is not normalized is like x.
        execution = execution_of(program.name, (*xs, x)[: len(called.inputs)])
        # Each norm takes its statistics before its input is expanded to the shape of the sum.
        request = Request(tuple(given), final=self._sends, passing=self.passing)
        whole = BlockExecution(program, execution)
        call = block.training_call(called.norms, whole, request, not program.rebuilds)
        self.calls[segment] = call
        shift = shift_of(called.norms, x)

        def run(microbatch: Microbatch, states: list[Tensor]) -> Sequence[Tensor]:
            values = Values(self, segment, microbatch)
            pieces = [x[:, slice(*microbatch)] for x in xs]
            others = [] if first else values.sequences(called.inputs[len(xs) :], pieces[0])
            inputs = first.pop() if first else (*pieces, *others)
            names = block.NAMES[: len(inputs)]
            neuron.check_inputs(called.neuron, names, tuple(inputs), None, program.backend)
            op.check_backend(program.backend, inputs[0])
            execution = execution_of(program.name, inputs)
            arguments = call.arguments_of(BlockTensors(inputs, states, shift, own))
            wanted = Wanted(False, self._sends, wants_bits(inputs[0]))
            results = execution.forward(arguments, execution.new_results(wanted))
            if wanted.bits:
                mark_binary(results, program.binary)
            self._save(segment.target, microbatch, flatten_steps(results.outputs[0]))
            return results.finals

        memory = StateMemory.like(x, program.num_states)
        self.states[segment] = self._exchange(memory, microbatches, run)

    def _exchange(
        self,
        memory: StateMemory,
        microbatches: Sequence[Microbatch],
        run: Callable[[Microbatch, list[Tensor]], Sequence[Tensor]],
        backward: bool = False,
    ) -> dict[Microbatch, list[Tensor]]:
        """Run one pass of a scan by microbatches and exchange its states with other processes.

        Returns:
            The tensors received for each microbatch: initial states, or with `backward` gradients
            of the final states. Empty lists where no process sends any.
        """
        receives, sends = not self.passing.is_first, self._sends
        begin = self.passing.forward
        if backward:
            receives, sends, begin = sends, receives, self.passing.backward
        channel = begin([memory.empty(batch_size(m)) if receives else [] for m in microbatches])

        for i, microbatch in enumerate(microbatches):
            results = run(microbatch, channel.receive(i))
            channel.send(i, memory.conform(results) if sends else results)
        channel.close()
        return dict(zip(microbatches, channel.buffers, strict=True))

    @property
    def _sends(self) -> bool:
        """Whether the next process needs the final states."""
        return not self.passing.is_last

    def _whole_batch(self, segment: Segment, node: fx.Node) -> Tensor:
        """Return the value of a node in a segment of several microbatches, `[T, B, ...]`."""
        x: Tensor | None = None
        for microbatch in self.microbatches[segment.target]:
            piece = Values(self, segment, microbatch).sequences([node])[0]
            piece = piece[: 1 if piece.stride(0) == 0 else self.steps]
            x = empty_batch(piece, self.batch) if x is None else x
            x[:, slice(*microbatch)].copy_(piece)
        assert x is not None
        return x.expand(self.steps, *x.shape[1:])

    def program(self, called: BlockCall, x: Tensor) -> tuple[BlockProgram, list[Tensor]]:
        backend = neuron.backend_of((x,), self.impl)
        kinds = len(called.inputs) > 1, True, (), len(called.norms) > 1
        return block_program(called.neuron, backend, *kinds)

    def _save(self, target: fx.Node, microbatch: Microbatch, y: Tensor) -> None:
        value = self.spikes.pack(self.stored(target, y))
        if self.segments.is_pooled(target) and isinstance(value, tuple):
            (source,) = target.all_input_nodes
            if all(
                isinstance(k, bits.Packed) for _, k in self.saved.get(source, [(microbatch, value)])
            ):
                value = bits.pack(self.stored(target, y))
        self.spikes.registered.clear()
        self.saved.setdefault(target, []).append((microbatch, value))

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the input and the parameters."""
        whole = (0, self.batch)
        self.grads = {
            node: Gradient(microbatches) for node, microbatches in self.microbatches.items()
        }
        for node, gradient in zip(self.segments.outputs, grads, strict=True):
            if gradient is not None:
                if node in self.constant:
                    gradient = gradient.unflatten(0, (self.steps, -1)).sum(0)
                self.grads[node].add(whole, gradient)
        del grads
        with self.autocast(), torch.enable_grad(), inside(self.call), self.snapshot.modes():
            for segment in reversed(self.segments):
                # All of its readers have been differentiated.
                del self.saved[segment.target]
                if self.grads[segment.target] and self.needs[segment.target]:
                    self._differentiate(segment)
                del self.grads[segment.target]
        input_grad = self.grads[self.segments.input].pop(whole)
        return [input_grad, *map(self.totals.get, self.parameters)]

    def _differentiate(self, segment: Segment) -> None:
        gradient = self.grads[segment.target]
        if segment.block is not None:
            self._differentiate_block(segment, segment.block, gradient)
        elif segment.neuron is not None:
            self._differentiate_neuron(segment, segment.neuron, gradient)
        else:
            leaves: Mapping[fx.Node, Tensor]
            for microbatch in gradient.microbatches:
                if segment.is_recomputed:
                    values = Values(self, segment, microbatch, differentiable=True)
                    leaves, y = values.leaves, self.stored(segment.target, values[segment.target])
                else:  # in a single microbatch
                    leaves, y = self.graphs.pop(segment)
                self.differentiate(segment, microbatch, leaves, [y], [gradient.pop(microbatch)])

    def _differentiate_neuron(self, segment: Segment, called: NeuronCall, grad: Gradient) -> None:
        microbatches, states = grad.microbatches, self.states.pop(segment)
        parameters = _learned(called.modules)
        pending = [RecomputedNeuron(self, segment, called, microbatches[0])]
        memory = StateMemory.like(pending[0].inputs[0], called.num_states)

        def finish() -> None:
            """Differentiate the layers before the neuron, once its gradients have been sent."""
            done = pending.pop()
            leaves = done.values.leaves
            self.differentiate(segment, done.values.microbatch, leaves, done.inputs, done.grads)

        def run(microbatch: Microbatch, ends: list[Tensor]) -> Sequence[Tensor]:
            if pending[0].values.microbatch != microbatch:
                finish()
                pending.append(RecomputedNeuron(self, segment, called, microbatch))
            begins, parameter_grads = pending[0].differentiate(
                states[microbatch], grad.pop(microbatch), ends, parameters
            )
            self.add(parameters, parameter_grads)
            return begins

        self._exchange(memory, microbatches, run, backward=True)
        finish()

    def _differentiate_block(self, segment: Segment, called: BlockCall, grad: Gradient) -> None:
        """Run both passes of a block's backward by microbatches."""
        call, states = self.calls.pop(segment), self.states.pop(segment)
        microbatches = grad.microbatches
        own = self.program(called, call.statistics.by_norm[0])[1]
        shift = shift_of(called.norms, call.statistics.by_norm[0]).detach()
        tensors = BlockTensors((), (), shift, [tensor.detach() for tensor in own])
        needs_own = [tensor.requires_grad for tensor in own]
        sums: dict[str, Tensor] = {}

        def compute(microbatch: Microbatch) -> RecomputedBlock:
            block_tensors = tensors._replace(states=states[microbatch])
            return RecomputedBlock(self, segment, microbatch, call, block_tensors)

        recomputed: RecomputedBlock | None = compute(microbatches[0])
        assert recomputed is not None
        memory = StateMemory.like(recomputed.inputs[0], call.program.num_states)

        def reduce(microbatch: Microbatch, ends: list[Tensor]) -> Sequence[Tensor]:
            nonlocal recomputed
            if recomputed is None or recomputed.values.microbatch != microbatch:
                recomputed = None  # frees its memory before the next one is computed
                recomputed = compute(microbatch)
            return recomputed.reduce(grad.get(microbatch), ends, needs_own, sums)

        ends = self._exchange(memory, microbatches, reduce, backward=True)
        correction, (by_shift, *by_weight) = call.correct(call.totals(call.execution, sums))
        norms = called.norms
        results = (*(norm.bias for norm in norms), *(norm.weight for norm in norms), *own)
        by_own = call.own_gradients(call.execution, sums, own)
        by_result = (*[by_shift] * len(norms), *by_weight, *by_own)
        pairs = [(y, g) for y, g in zip(results, by_result, strict=True) if y is not None]
        parameters = _learned(called.modules)
        self.add(parameters, gradients(pairs, parameters))
        sums.clear()
        for microbatch in reversed(microbatches):
            # The last microbatch of the first pass is still in memory.
            recomputed = recomputed or compute(microbatch)
            input_grads = recomputed.write(grad.pop(microbatch), ends[microbatch], correction)
            self.differentiate(
                segment, microbatch, recomputed.values.leaves, recomputed.inputs, input_grads
            )
            recomputed = None

    def differentiate(
        self,
        segment: Segment,
        microbatch: Microbatch,
        leaves: Mapping[fx.Node, Tensor],
        results: Sequence[Tensor],
        grads: Gradients,
    ) -> None:
        """Add the gradients of a segment's leaves and parameters."""
        nodes = [node for node, x in leaves.items() if x.requires_grad]
        parameters = [p for p in segment.parameters if p.requires_grad]
        wanted = [*map(leaves.__getitem__, nodes), *parameters]
        by_tensor = gradients(zip(results, grads, strict=True), wanted)
        for node, gradient in zip(nodes, by_tensor, strict=False):
            if gradient is not None:
                self.grads[node].add(microbatch, gradient)
        self.add(parameters, by_tensor[len(nodes) :])

    def add(self, parameters: Sequence[nn.Parameter], grads: Gradients) -> None:
        for p, g in zip(parameters, grads, strict=True):
            if g is not None:
                self.totals[p] = g if p not in self.totals else self.totals[p] + g


def _learned(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of modules that require gradients, each once."""
    return [*dict.fromkeys(p for m in modules for p in m.parameters() if p.requires_grad)]


Checkpoint.run = _run
