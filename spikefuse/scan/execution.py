"""Allocate the tensors of a scan and launch its kernels.

An `Execution` stands for all scans of one program on inputs of the same shapes, strides, dtypes and
device. It depends on no values, so neurons, threads and passes share it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache, partial, reduce
from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from spikefuse.kernels.threads import import_module
from spikefuse.kernels.triton_runtime import TritonLaunch
from spikefuse.neurons.description import Cache
from spikefuse.scan.kinds import CHANNEL, FLOAT, SCALAR
from spikefuse.scan.layout import MAX_STRIDES, layout_of, outer_stride
from spikefuse.scan.program import Launch, Launcher, Variant, program
from spikefuse.scan.records import Arguments, MaybeTensors, Results, Tensors, Wanted

#: Shape, strides, dtype and device of an input.
Spec = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]

_dtype, _is_none = attrgetter("dtype"), partial(operator.is_, None)
_META = torch.device("meta")
PLAIN, REPAIR, REBUILD = Variant(), Variant(repair=True), Variant(rebuild=True)


class Execution:
    """The scans of one program on inputs of one description; see `execution_of`."""

    def __init__(self, name: str, inputs: Sequence[Spec]) -> None:
        self.program = program(name)
        step = self.program.step
        self.layout = layout_of([(shape, strides) for shape, strides, _, _ in inputs])
        self.dtypes = [dtype for _, _, dtype, _ in inputs]
        self.dtype = reduce(torch.promote_types, self.dtypes)
        self.device = inputs[0][3]
        self.num_outputs, self.num_states = step.num_outputs, len(step.states)
        #: In place of one tensor for each state.
        self.no_states = (None,) * self.num_states
        #: Saved states per neuron. The first chunk starts from the initial state.
        num_steps = self.layout.num_steps
        self.num_saved = (num_steps - 1) // self.program.chunk(num_steps) if step.states else 0
        memory = self.layout.shape, self.layout.all_strides
        self._new_sequence = partial(torch.empty_strided, *memory)
        self._inputs = inputs
        self._launches = Cache()
        self.program.launches.add(self._launches)
        #: Whether no kernel has been asked for yet.
        self.is_new = True
        #: Whether the kernels of a first backward pass are being compiled, see `compile_backward`.
        self.is_ahead = False

    def forward(
        self,
        arguments: Arguments[Tensor],
        results: Results[Tensor],
        repair: bool = False,
        ahead: bool = False,
    ) -> Results[Tensor]:
        """Run the program and write `results`.

        Args:
            results: from `new_results`, or with outputs that lie elsewhere.
            ahead: see `compile_forward`.
            repair: `results` hold a scan from rest. Scan again from `arguments.states` until every
                state of a thread block equals, to the last bit, the state that is there.
        """
        if not self.layout.num_neurons:
            return results
        inputs = arguments.inputs if self._inputs_fit else self._conform(arguments.inputs)
        outputs, finals, saved, bits = results[:4]
        kinds = *map(_dtype, arguments.params), len(bits), repair
        key = *kinds, *map(Tensor.stride, outputs)
        launch = self._launches.get(key)
        if launch is None:  # of outputs in this layout, or of others
            outputs = self._fitting(outputs)
            key = *kinds, *map(Tensor.stride, outputs)
            variant = Variant(pack=bool(bits), repair=repair)
            sequences = [*inputs, *outputs]
            launch = self._launches.get(key) or self._prepare(
                key, self.program.forward(), sequences, variant
            )
        starts, none = arguments.states and self._conform_steps(arguments.states), self.no_states
        rows = saved or (self._no_rows if repair else none)
        by_state = [*chain.from_iterable(zip(starts or none, finals or none, rows, strict=True))]
        values = self.values(arguments) if arguments.params else arguments.scalars
        if ahead:
            assert isinstance(launch, TritonLaunch)
            launch.compile_ahead([*inputs, *outputs], by_state, bits or self._no_bits, values)
            return results
        launch([*inputs, *outputs], by_state, bits or self._no_bits, values)
        if outputs is not results.outputs:
            _copy_back(outputs, results.outputs)
        return results

    def backward(
        self,
        arguments: Arguments[Tensor],
        saved: Tensors,
        incoming: Results[Tensor | None],
        gradients: Arguments[Tensor | None],
        variant: Variant = PLAIN,
        ahead: bool = False,
    ) -> Arguments[Tensor | None]:
        """Run the program's reverse and write `gradients`.

        Args:
            saved: the saved states.
            incoming: gradients of the results, None for a result without one.
            gradients: from `new_gradients`, or with gradients of inputs that lie elsewhere.
            variant: `REBUILD` writes `saved` first, for programs that can. `REPAIR` adds the
                contribution of `incoming.finals`, which arrived late, to gradients that were
                computed without them, until 2^-32 of it is left, neuron by neuron.
            ahead: see `compile_backward`.
        """
        layout = self.layout
        if not layout.num_neurons:
            return gradients
        known = layout.outer_strides
        # A repair does not read the gradients of the outputs.
        arriving = [arguments.inputs[0]] * self.num_outputs if variant.repair else incoming.outputs
        sequences: list[Tensor] = []
        targets: list[tuple[Tensor, Tensor]] = []
        for x in (*arguments.inputs, *arriving):
            if x is None:
                x = layout.empty_step(self.device).zero_().expand(layout.shape)
            # Saved-tensor hooks may have changed the layout of the inputs.
            sequences.append(x if known.get(x.stride()) else layout.conform(x))
        for x in gradients.inputs:
            if x is not None:
                fits = known.get(x.stride()) or layout.fits(x)
                sequences.append(x if fits else layout.empty(x, x.dtype))
                if not fits:
                    targets.append((sequences[-1], x))
        absent = *incoming.outputs, *incoming.finals, *gradients.inputs, *gradients.params
        missing, has_states = tuple(map(_is_none, absent)), bool(gradients.states)
        described = *map(Tensor.stride, sequences), *map(_dtype, (*sequences, *arguments.params))
        key = variant, missing, has_states, described
        launch = self._launches.get(key)
        if launch is None:
            kernel = self._reverse(incoming, gradients, variant)
            has_sums = any(g is not None for g in gradients.params)
            launch = self._prepare(key, kernel, sequences, variant, has_sums)
        starts, none = arguments.states and self._conform_steps(arguments.states), self.no_states
        ends = incoming.finals and self._conform_steps(incoming.finals)
        roles = starts or none, saved or none, ends or none, gradients.states or none
        by_state = [*chain.from_iterable(zip(*roles, strict=True))]
        values = self.values(arguments) if arguments.params else arguments.scalars
        sums = gradients.params and [g for g in gradients.params if g is not None]
        if ahead:
            assert isinstance(launch, TritonLaunch)
            launch.compile_ahead(sequences, by_state, sums, values)
            return gradients
        launch(sequences, by_state, sums, values)
        for written, target in targets:
            target.copy_(written)
        return gradients

    def compile_forward(self, arguments: Arguments[Tensor], wanted: Wanted) -> None:
        """Begin to compile the kernel of a first `forward`. Of parameters, only dtypes matter."""
        if self.device.type != "cpu" and self._inputs_fit:
            self.forward(arguments, self.new_results(wanted), ahead=True)

    def compile_backward(
        self,
        arguments: Arguments[Tensor],
        results: Results[Tensor],
        needs: Arguments[bool],
        variant: Variant = PLAIN,
    ) -> None:
        """Begin to compile a kernel that `backward` is expected to need: for gradients of all
        outputs, in the memory order of the outputs, and of no final states."""
        if True not in (*needs.inputs, *needs.params):
            return  # in a graph of torch.compile, where no tensor requires a gradient
        self.is_ahead, fits = True, self.layout.num_neurons and self._inputs_fit
        if self.device.type == "cpu" or not fits or not self.program.is_differentiable:
            return
        gradients, rows = self.new_gradients(needs, device=_META), self.new_steps(_META)
        arguments = arguments._replace(states=rows if arguments.states else None)
        incoming: Results[Tensor | None] = Results(results.outputs, [None] * len(results.finals))
        saved = rows if self.num_saved else []
        self.backward(arguments, saved, incoming, gradients, variant, ahead=True)

    def new_results(self, wanted: Wanted, outputs: Tensors | None = None) -> Results[Tensor]:
        """Unwritten results, `outputs` among them if they are given."""
        if outputs is None:
            outputs = []
            for _ in range(self.num_outputs):
                outputs.append(self._new_sequence(dtype=self.dtype, device=self.device))
        finals = self.new_steps() if wanted.final else []
        saved = self.new_saved() if wanted.save and self.num_saved else []
        num, num_bytes = len(self._no_bits), self.layout.num_steps * self.layout.num_neurons // 8
        bits = self._empty(num, num_bytes, torch.uint8) if wanted.bits and self.packs else []
        return Results(outputs, finals, saved, bits, self.program.step.binary)

    def new_gradients(
        self,
        needs: Arguments[bool],
        inputs: MaybeTensors = (),
        device: torch.device | None = None,
    ) -> Arguments[Tensor | None]:
        """Unwritten gradients, `inputs` among them if they are given; None where not needed. Those
        of parameters are sums, see `Launcher.sums_shape`."""
        device = device or self.device
        if not inputs:
            inputs = []
            for dtype, needed in zip(self.dtypes, needs.inputs, strict=True):
                inputs.append(self._new_sequence(dtype=dtype, device=device) if needed else None)
        states, params = self.new_steps(device) if needs.states else [], []
        for needed in needs.params:
            shape, dtype = self._sums_shape
            params.append(torch.empty(shape, dtype=dtype, device=device) if needed else None)
        if not self.layout.num_neurons:  # no kernel is launched
            params = [None if total is None else total.zero_() for total in params]
        return Arguments(inputs, states, params)

    def new_steps(self, device: torch.device | None = None) -> list[Tensor]:
        """One unwritten time step for each state."""
        return [self.layout.empty_step(device or self.device) for _ in range(self.num_states)]

    def new_saved(self) -> list[Tensor]:
        """Unwritten saved states, of a sequence of several chunks."""
        shape = self.num_saved, self.layout.num_neurons
        return self._empty(self.num_states, shape, torch.float32)

    @property
    def num_sums(self) -> int:
        """Values that add up to the gradients of one parameter."""
        return self._sums_shape[0][0]

    @cached_property
    def packs(self) -> bool:
        """Whether kernels can write outputs as bits: the bits of a step fill whole bytes, and
        Triton can tell because their number is a multiple of 16."""
        return bool(self._no_bits) and self.layout.num_neurons % 16 == 0

    def reduce(self, sums: MaybeTensors, params: Tensors) -> list[Tensor | None]:
        """Gradients of parameters, from their sums."""
        found: list[Tensor | None] = []
        for total, p in zip(sums, params, strict=True):
            found.append(None if total is None else self.layout.reduce_to(total, p).to(p.dtype))
        return found

    def _empty(self, count: int, shape: int | tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(count)]

    @cached_property
    def _no_bits(self) -> tuple[None, ...]:
        """In place of the bits, one for each binary output, for kernels that could write them."""
        return (None,) * sum(self.program.step.binary) if self.program.backend == "triton" else ()

    @cached_property
    def _no_rows(self) -> tuple[Tensor, ...]:
        """In place of the saved states of a short sequence, which has none, in a repair."""
        nothing = torch.empty(0, dtype=torch.float32, device=self.device)
        return (nothing,) * self.num_states

    @cached_property
    def _sums_shape(self) -> tuple[tuple[int], torch.dtype]:
        launcher = launcher_of(self.program.backend)
        by_channel, itemsize = CHANNEL in self.program.kinds, self.dtypes[0].itemsize
        return launcher.sums_shape(self.layout, itemsize, self.device, by_channel)

    def _reverse(
        self, incoming: Results[Tensor | None], needs: Arguments[Any], variant: Variant = PLAIN
    ) -> object:
        """The backward kernel for these gradients, of which those that are None do not matter."""
        missing = tuple(map(_is_none, (*incoming.outputs, *incoming.finals)))
        # A repair adds the gradients of final states to those that ignored them.
        program, step = self.program, self.program.step
        absent = () if variant.repair else program.reverse.absent(step, missing)
        needed = [[x is not None for x in group] for group in (needs.inputs, needs.params)]
        return program.backward(*self.names(Arguments(needed[0], params=needed[1])), absent)

    def _prepare(
        self,
        key: Hashable,
        kernel: object,
        sequences: Tensors,
        variant: Variant,
        has_sums: bool = False,
    ) -> Launch:
        by_channel, launcher = CHANNEL in self.program.kinds, launcher_of(self.program.backend)
        layout = self.layout
        launch = launcher.prepare(kernel, layout, sequences, variant, by_channel, has_sums)
        if len(self._launches) >= MAX_STRIDES:
            self._launches.clear()
        self._launches[key], self.is_new = launch, False
        return launch

    def _conform(self, sequences: Tensors) -> list[Tensor]:
        return list(map(self.layout.conform, sequences))

    @cached_property
    def _inputs_fit(self) -> bool:
        order, inner = self.layout.order, self.layout.inner
        return all(outer_stride(x[0], x[1], order, inner) is not None for x in self._inputs)

    def _fitting(self, sequences: Tensors) -> Tensors:
        """The sequences themselves if kernels can access all of them in place, else copies."""
        known = self.layout.outer_strides
        for x in sequences:
            if not known.get(x.stride()) and not self.layout.fits(x):
                return self._conform(sequences)
        return sequences

    def _conform_steps(self, steps: MaybeTensors) -> MaybeTensors:
        return [None if x is None else self.layout.conform_step(x) for x in steps]

    def values(self, arguments: Arguments[Tensor]) -> Sequence[float | Tensor]:
        """Parameters in the order of the kernel, tensors contiguous, in dtypes that it reads."""
        params = []
        for p in arguments.params:
            is_ready = p.dtype in self._readable and p.is_contiguous()
            params.append(p if is_ready else p.detach().float().contiguous())
        return self._in_order((*params, *arguments.scalars))

    @cached_property
    def _readable(self) -> tuple[torch.dtype, ...]:
        """The dtypes of parameters that kernels read as float32."""
        half = (torch.bfloat16, torch.float16) if self.program.backend == "triton" else ()
        return torch.float32, *half

    @cached_property
    def _in_order(self) -> Callable[[tuple[float | Tensor, ...]], tuple[float | Tensor, ...]]:
        """Put tensors, followed by floats, where the kernel expects them."""
        kinds = self.program.kinds
        tensors_first = sorted(range(len(kinds)), key=lambda i: kinds[i] == FLOAT)
        places = sorted(range(len(kinds)), key=tensors_first.__getitem__)
        return itemgetter(*places) if len(places) > 1 else tuple

    def names(self, needs: Arguments[bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the inputs and parameters that need gradients."""
        inputs, tensors = self.program.step.inputs, self.program.params(SCALAR, CHANNEL)
        return tuple(compress(inputs, needs.inputs)), tuple(compress(tensors, needs.params))


def launcher_of(backend: str) -> Launcher:
    """The module that runs the kernels of a backend."""
    if backend == "triton":
        return import_module("spikefuse.scan.launch_triton")
    return import_module("spikefuse.scan.launch_numba")


def _copy_back(written: Tensors, targets: Tensors) -> None:
    for x, target in zip(written, targets, strict=True):
        if x is not target:
            target.copy_(x)


@lru_cache(maxsize=512)
def execution_for(name: str, inputs: tuple[Spec, ...]) -> Execution:
    """The execution of a program, by its name, on inputs of these descriptions."""
    return Execution(name, inputs)


def execution_of(name: str, inputs: Tensors) -> Execution:
    """The execution of a program, by its name, on these inputs and all of the same description."""
    described = []
    for x in inputs:
        described.append((x.shape, x.stride(), x.dtype, x.device))
    return execution_for(name, tuple(described))
