"""Allocate the tensors of a scan and launch its kernels.

An `Execution` stands for all scans of one program on inputs of the same shapes, strides, dtypes and
device. It depends on no values, so neurons, threads and passes share it.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache, partial, reduce
from itertools import compress
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from spikefuse.kernels.triton_runtime import TritonLaunch
from spikefuse.scan.layout import MAX_STRIDES, layout_of, outer_stride
from spikefuse.scan.program import CHANNEL, FLOAT, SCALAR, Launch, Launcher, Variant, program

Tensors = Sequence[Tensor]
MaybeTensors = Sequence[Tensor | None]
Flags = Sequence[bool]
#: Shape, strides, dtype and device of an input.
Spec = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]


class Arguments(NamedTuple):
    """What a scan reads.

    Attributes:
        inputs: `[T, B, ...]` each.
        states: the initial states, `[B, ...]` each; empty to start from rest.
        params: tensor parameters, in the order of the program.
        scalars: float parameters, in the order of the program.
    """

    inputs: Tensors
    states: Tensors
    params: Tensors
    scalars: Sequence[float]


class Wanted(NamedTuple):
    """What a forward pass returns besides the outputs.

    Attributes:
        save: the states that backward starts its chunks from.
        final: the states after the last step.
        bits: the binary outputs as bits, if kernels can write them.
    """

    save: bool = False
    final: bool = False
    bits: bool = False


class Results(NamedTuple):
    """What a forward pass writes.

    Attributes:
        outputs: `[T, B, ...]` each.
        finals: the final states, `[B, ...]` each; empty if not wanted.
        saved: the states saved for backward, `[chunks - 1, N]` each; None if not wanted.
        bits: one uint8 tensor for each binary output, one bit per value in the order of memory.
    """

    outputs: list[Tensor]
    finals: list[Tensor]
    saved: list[Tensor] | None
    bits: list[Tensor]


class Incoming(NamedTuple):
    """Gradients of the results, None for a result without one."""

    outputs: MaybeTensors
    finals: MaybeTensors


class Needs(NamedTuple):
    """Which gradients a backward pass returns; `states` stands for all initial states."""

    inputs: tuple[bool, ...]
    states: bool
    params: tuple[bool, ...]


class ScanGradients(NamedTuple):
    """What a backward pass writes: the needed gradients. Those of parameters are sums, see
    `Launcher.sums_shape`."""

    needs: Needs
    inputs: list[Tensor]
    states: list[Tensor]
    params: list[Tensor]


_dtype, _is_none = attrgetter("dtype"), partial(operator.is_, None)
#: Variant, needs, missing gradients of results, and what describes the sequences.
_BackwardKey = tuple[Variant, Needs, tuple[bool, ...], tuple[Hashable, ...]]

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
        #: Saved states per neuron. The first chunk starts from the initial state.
        self.num_saved = (self.layout.num_steps - 1) // self.program.chunk(self.layout.num_steps)
        memory = self.layout.shape, self.layout.all_strides
        self._new_sequence = partial(torch.empty_strided, *memory)
        self._inputs = inputs
        self._launches: dict[Hashable, Launch] = {}
        #: Whether no kernel has been asked for yet.
        self.is_new = True
        #: Whether the kernels of a first backward pass are being compiled, see `compile_backward`.
        self.is_ahead = False

    def forward(
        self, arguments: Arguments, results: Results, repair: bool = False, ahead: bool = False
    ) -> Results:
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
        outputs: Tensors = results.outputs
        finals, saved, bits = results.finals, results.saved, results.bits
        key = len(bits), repair, *map(Tensor.stride, outputs)
        launch = self._launches.get(key)
        if launch is None:  # of outputs in this layout, or of others
            outputs = self._fitting(outputs)
            key = len(bits), repair, *map(Tensor.stride, outputs)
            variant = Variant(pack=bool(bits), repair=repair)
            sequences = [*inputs, *outputs]
            launch = self._launches.get(key) or self._prepare(
                key, self.program.forward(), sequences, variant
            )
        starts = arguments.states and self._conform_steps(arguments.states)
        by_state = self.by_state(starts, finals, None if saved is None else saved or self._no_rows)
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
        arguments: Arguments,
        saved: Tensors,
        incoming: Incoming,
        gradients: ScanGradients,
        variant: Variant = PLAIN,
    ) -> ScanGradients:
        """Run the program's reverse and write `gradients`.

        Args:
            saved: the saved states.
            gradients: from `new_gradients`, or with gradients of inputs that lie elsewhere.
            variant: `REBUILD` writes `saved` first, for programs that can. `REPAIR` adds the
                contribution of `incoming.finals`, which arrived late, to gradients that were
                computed without them, until 2^-32 of it is left, neuron by neuron.
        """
        layout, needs = self.layout, gradients.needs
        if not layout.num_neurons:
            return gradients
        # Saved-tensor hooks may have changed the layout of the inputs.
        inputs = self._fitting(arguments.inputs)
        written = gradients.inputs and self._fitting(gradients.inputs)
        arriving: list[Tensor] = []
        for g in incoming.outputs:
            if g is None:
                g = layout.empty_step(self.device).zero_().expand(layout.shape)
            arriving.append(g if layout.outer_strides.get(g.stride()) else layout.conform(g))
        # A repair does not read the gradients of the outputs.
        arriving = [inputs[0]] * self.num_outputs if variant.repair else arriving
        sequences = [*inputs, *arriving, *written]
        missing = (*map(_is_none, incoming.outputs), *map(_is_none, incoming.finals))
        described = *map(Tensor.stride, sequences), *map(_dtype, sequences)
        key = variant, needs, missing, described
        launch = self._launches.get(key) or self._prepare_backward(key, sequences)
        by_state = self.by_state(
            arguments.states and self._conform_steps(arguments.states),
            saved or self._no_rows,
            incoming.finals and self._conform_steps(incoming.finals),
            gradients.states,
        )
        values = self.values(arguments) if arguments.params else arguments.scalars
        launch(sequences, by_state, gradients.params, values)
        if written is not gradients.inputs:
            _copy_back(written, gradients.inputs)
        return gradients

    def compile_forward(self, arguments: Arguments, wanted: Wanted) -> None:
        """Begin to compile the kernel of a first `forward`. Of parameters, only dtypes matter."""
        if self.device.type != "cpu" and self._inputs_fit:
            self.forward(arguments, self.new_results(wanted), ahead=True)

    def compile_backward(
        self, arguments: Arguments, results: Results, needs: Needs, variant: Variant = PLAIN
    ) -> None:
        """Begin to compile a kernel that `backward` is expected to need: for gradients of all
        outputs, in the memory order of the outputs, and of no final states."""
        if True not in (*needs.inputs, *needs.params):
            return  # in a graph of torch.compile, where no tensor requires a gradient
        self.is_ahead, fits = True, self.layout.num_neurons and self._inputs_fit
        if self.device.type == "cpu" or not fits or not self.program.is_differentiable:
            return
        written = [self._new_sequence(dtype=dtype, device="meta")
                   for dtype in compress(self.dtypes, needs.inputs)]  # fmt: skip
        sequences = [*arguments.inputs, *results.outputs, *written]
        missing = (False,) * self.num_outputs + (True,) * len(results.finals)
        row = torch.empty(0, device="meta")
        rows, sums = [row] * self.num_states, [row] * sum(needs.params)
        starts, gradients = rows if arguments.states else None, rows if needs.states else None
        by_state = self.by_state(starts, rows, None, gradients)
        described = *map(Tensor.stride, sequences), *map(_dtype, sequences)
        key = variant, needs, missing, described
        launch = self._launches.get(key) or self._prepare_backward(key, sequences)
        if isinstance(launch, TritonLaunch):
            launch.compile_ahead(sequences, by_state, sums, self.values(arguments))

    def new_results(self, wanted: Wanted, outputs: list[Tensor] | None = None) -> Results:
        """Unwritten results, `outputs` among them if they are given."""
        if outputs is None:
            outputs = []
            for _ in range(self.num_outputs):
                outputs.append(self._new_sequence(dtype=self.dtype, device=self.device))
        finals = self.new_steps() if wanted.final else []
        saved = self.new_saved() if wanted.save and self.num_saved else []
        num, num_bytes = len(self._no_bits), self.layout.num_steps * self.layout.num_neurons // 8
        bits = self._empty(num, num_bytes, torch.uint8) if wanted.bits and self.packs else []
        return Results(outputs, finals, saved if wanted.save else None, bits)

    def new_gradients(self, needs: Needs, inputs: list[Tensor] | None = None) -> ScanGradients:
        """Unwritten gradients, `inputs` among them if they are given."""
        if inputs is None:
            inputs = []
            for dtype in compress(self.dtypes, needs.inputs):
                inputs.append(self._new_sequence(dtype=dtype, device=self.device))
        starts = self.new_steps() if needs.states else []
        params = self._empty(sum(needs.params), *self._sums_shape) if True in needs.params else []
        if not self.layout.num_neurons:  # no kernel is launched
            params = [*map(torch.zero_, params)]
        return ScanGradients(needs, inputs, starts, params)

    def new_steps(self) -> list[Tensor]:
        """One unwritten time step for each state."""
        return [self.layout.empty_step(self.device) for _ in range(self.num_states)]

    def new_saved(self) -> list[Tensor]:
        """Unwritten saved states, of a sequence of several chunks."""
        shape = self.num_saved, self.layout.num_neurons
        return self._empty(self.num_states, shape, torch.float32)

    @property
    def num_sums(self) -> int:
        """Values that add up to the gradients of one parameter."""
        return self._sums_shape[0][0]

    @cached_property
    def num_saved_bytes(self) -> int:
        """Bytes of the saved states."""
        return 4 * self.num_saved * self.num_states * self.layout.num_neurons

    @cached_property
    def packs(self) -> bool:
        """Whether kernels can write outputs as bits: the bits of a step fill whole bytes, and
        Triton can tell because their number is a multiple of 16."""
        return bool(self._no_bits) and self.layout.num_neurons % 16 == 0

    def reduce(self, sums: Tensors, params: Tensors) -> list[Tensor]:
        """Gradients of parameters, from their sums."""
        totals = map(self.layout.reduce_to, sums, params)
        return [total.to(p.dtype) for total, p in zip(totals, params, strict=True)]

    def _empty(self, count: int, shape: int | tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        found = []
        for _ in range(count):
            found.append(torch.empty(shape, dtype=dtype, device=self.device))
        return found

    @cached_property
    def _no_bits(self) -> tuple[None, ...]:
        """In place of the bits, one for each binary output, for kernels that could write them."""
        return (None,) * sum(self.program.step.binary) if self.program.backend == "triton" else ()

    @cached_property
    def _no_rows(self) -> tuple[Tensor, ...]:
        """In place of the saved states of a short sequence, which has none. None would select
        other kernels; a null address counts as aligned."""
        nothing = torch.empty(0, dtype=torch.float32, device=self.device)
        return (nothing,) * self.num_states

    @cached_property
    def _sums_shape(self) -> tuple[tuple[int], torch.dtype]:
        launcher = launcher_of(self.program.backend)
        by_channel, itemsize = CHANNEL in self.program.kinds, self.dtypes[0].itemsize
        return launcher.sums_shape(self.layout, itemsize, self.device, by_channel)

    def _prepare_backward(self, key: _BackwardKey, sequences: Tensors) -> Launch:
        variant, needs, missing, _ = key
        if not self.program.is_differentiable:
            warnings.warn(
                f"no output of {self.program.step.name}.step has a gradient, so nothing before "
                "it learns from its outputs: make spikes with a surrogate, as in "
                "self.surrogate(v - threshold), not with a comparison",
                stacklevel=3,
            )
        # A repair adds the gradients of final states to those that ignored them.
        program, step = self.program, self.program.step
        absent = () if variant.repair else program.reverse.absent(step, missing)
        kernel = self.program.backward(*self.names(needs), absent)
        return self._prepare(key, kernel, sequences, variant, True in needs.params)

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

    def by_state(self, *roles: MaybeTensors | None) -> list[Tensor | None]:
        """The tensors of each state in turn, in the order of the kernel; a role may be absent."""
        found: list[Tensor | None] = []
        for i in range(self.num_states):
            for role in roles:
                found.append(role[i] if role else None)
        return found

    def values(self, arguments: Arguments) -> Sequence[float | Tensor]:
        """Parameters in the order of the kernel, tensors as contiguous float32."""
        params = []
        for p in arguments.params:
            is_ready = p.dtype is torch.float32 and p.is_contiguous()
            params.append(p if is_ready else p.detach().float().contiguous())
        return self._in_order((*params, *arguments.scalars))

    @cached_property
    def _in_order(self) -> Callable[[tuple[float | Tensor, ...]], tuple[float | Tensor, ...]]:
        """Put tensors, followed by floats, where the kernel expects them."""
        kinds = self.program.kinds
        tensors_first = sorted(range(len(kinds)), key=lambda i: kinds[i] == FLOAT)
        places = sorted(range(len(kinds)), key=tensors_first.__getitem__)
        return itemgetter(*places) if len(places) > 1 else tuple

    def names(self, needs: Needs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the inputs and parameters that need gradients."""
        inputs, tensors = self.program.step.inputs, self.program.params(SCALAR, CHANNEL)
        return tuple(compress(inputs, needs.inputs)), tuple(compress(tensors, needs.params))


def launcher_of(backend: str) -> Launcher:
    """The module that runs the kernels of a backend."""
    if backend == "triton":
        from spikefuse.scan import launch_triton

        return launch_triton
    from spikefuse.scan import launch_numba

    return launch_numba


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
