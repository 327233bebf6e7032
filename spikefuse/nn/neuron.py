"""The one generic neuron module; `zoo.py` has thin names on top of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress, zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from spikefuse import reference
from spikefuse.memory.policies import Policy, Recompute
from spikefuse.memory.spikes import MIN_VALUES, Spikes
from spikefuse.neurons.definition import Definition, Outputs, States
from spikefuse.nn.shard import Shard
from spikefuse.scan.op import scan as fused_scan
from spikefuse.scan.state_passing import Relay


class Scan(Protocol):
    """(inputs `[T, B, ...]`, state, impl, return_state, relay) to (outputs, final states)."""

    def __call__(
        self,
        inputs: tuple[Tensor, ...],
        state: States | None,
        impl: str,
        return_state: bool,
        relay: Shard | None = None,
        /,
    ) -> tuple[Outputs, States]: ...


class Deferred:
    """A tensor that a neuron computes together with what it reads, as one block."""

    def block(self, neuron: Neuron) -> tuple[Scan, tuple[Tensor, ...]]:
        """The scan of that block, and its inputs."""
        raise NotImplementedError


class Deferrals(Protocol):
    """The deferred tensors of a call of `Temporal`."""

    def finish(self) -> None:
        """Compute what has not been computed; called once the network has returned."""


IMPLEMENTATIONS = ("auto", "triton", "numba", "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_DEFAULT = Recompute()


@dataclass
class Sequence:
    """What a `Temporal` container tells its neurons for the duration of one call."""

    num_steps: int
    names: dict[int, str]  # of its neurons, by id
    impl: str = "auto"
    initial: dict[str, States] | None = None
    keep_final: bool = False
    # Of a tensor [B, ...] that stands for all steps; None if every tensor is [T*B, ...].
    constant_rows: int | None = None
    # How states travel where other processes have the steps before and after.
    relay: Shard | None = None
    final: dict[str, States] = field(default_factory=dict)
    # Where neurons mark outputs that are binary; None if layers keep spikes as they are.
    spikes: Spikes | None = None
    # What is kept for backward, None for Recompute(); and of some neurons in another way, by name.
    memory: Policy | None = None
    memory_of: Mapping[str, Policy] = field(default_factory=dict)
    # What layers have deferred, if anything.
    deferred: Deferrals | None = None
    # The neuron that is being computed.
    current: str = ""
    # Bytes of the states that blocks compute again, by neuron.
    rebuilt: dict[str, int] = field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        """What is kept of the neuron that is being computed."""
        return self.memory_of.get(self.current, self.memory) or _DEFAULT


class _Calls(threading.local):
    """The innermost Temporal call of each thread; no state of a network survives it."""

    def __init__(self) -> None:
        # An attribute of the instance from the start: torch.compile guards on its presence.
        self.sequence: Sequence | None = None


calls = _Calls()


@contextlib.contextmanager
def inside(sequence: Sequence) -> Iterator[None]:
    """What layers do meanwhile belongs to the call of a `Temporal` that `sequence` describes."""
    outer, calls.sequence = calls.sequence, sequence
    try:
        yield
    finally:
        calls.sequence = outer


# How a call outside Temporal reads its rows.
_ALONE = ("alone",)


class Neuron(Definition):
    """Base class of neuron modules; subclass it to write your own.

    Declare states on the class, parameters in `__init__`, and one time step in `step`: see
    `spikefuse.neurons.definition.Definition` for the contract. The model is then fused over all
    time steps, forward and backward, on GPU and CPU.

    Call: `neuron(x, ..., state=None, return_state=False, impl="auto")`

    Args:
        x: one or several inputs of one shape `[T, B, ...]`, float32, bfloat16 or float16.
        state: one tensor `[B, ...]` per declared state, or None to start from rest.
        return_state: also return the final state, as a tuple of float32 tensors.
        impl: "auto" (Triton on a GPU, Numba on a CPU), "triton", "numba", or "reference" (the
            eager loop, any device, also float64).

    Returns:
        The output `[T, B, ...]` in the dtype of the inputs (a tuple if `step` has several), and
        with `return_state` a pair (output, state).

    Raises:
        TypeError, ValueError: inputs or states of the wrong dtype, shape or number.
        UnsupportedOperation: `step` uses an operation that no kernel can be made of.
    """

    def forward(
        self,
        *inputs: Tensor,
        state: States | None = None,
        return_state: bool = False,
        impl: str = "auto",
    ) -> Any:
        scan: Scan = self._scan
        if len(inputs) == 1 and isinstance(inputs[0], Deferred):
            scan, inputs = inputs[0].block(self)
        return self.call(scan, inputs, state, return_state, impl)

    def call(
        self,
        scan: Scan,
        inputs: tuple[Tensor, ...],
        state: States | None,
        return_state: bool,
        impl: str,
    ) -> Any:
        """`forward` by the scan of a block that this neuron is a part of."""
        sequence = calls.sequence
        if not torch.compiler.is_compiling():
            if sequence is None and torch._C._current_graph_task_id() != -1:
                sequence = self._remembered(inputs)
            else:
                self._remember(inputs, sequence)
        if sequence is not None and id(self) in sequence.names:
            return self._folded(scan, sequence, inputs, state, return_state)
        outputs, final = scan(inputs, state, impl, return_state)
        result = outputs[0] if len(outputs) == 1 else outputs
        return (result, final) if return_state else result

    def _folded(
        self,
        scan: Scan,
        sequence: Sequence,
        inputs: tuple[Tensor, ...],
        state: States | None,
        return_state: bool,
    ) -> Tensor | Outputs:
        """The same, on inputs whose time is folded into the batch by `Temporal`."""
        if state is not None or return_state:
            raise ValueError("inside Temporal, pass state= and return_state= to the container")
        steps, name = sequence.num_steps, sequence.names[id(self)]
        for x in inputs:
            if x.ndim == 0 or (x.shape[0] % steps and x.shape[0] != sequence.constant_rows):
                raise ValueError(
                    f"neuron '{name}' received shape {list(x.shape)} inside Temporal: "
                    f"expected [T*B, ...] with T = {steps}"
                )
        if sequence.initial is not None:
            state = sequence.initial[name]
        if name in sequence.final and (sequence.initial or sequence.keep_final):
            raise ValueError(
                f"neuron '{name}' is called twice in one step, so its state is ambiguous: "
                "use one module per call"
            )
        unfolded = tuple([_unfolded(x, sequence) for x in inputs])
        sequence.current = name
        outputs, final = scan(unfolded, state, sequence.impl, sequence.keep_final, sequence.relay)
        sequence.current = ""
        sequence.final[name] = final
        if len(outputs) == 1:
            return outputs[0].flatten(0, 1)
        return tuple([y.flatten(0, 1) for y in outputs])

    def _remember(self, inputs: tuple[Tensor, ...], sequence: Sequence | None) -> None:
        """Note how this call reads its rows, for `torch.utils.checkpoint`: when that calls again,
        in a backward pass, Temporal's call is over."""
        call: tuple[Any, ...] = _ALONE
        if sequence is not None and id(self) in sequence.names:
            started = sequence.initial is not None or sequence.relay is not None
            call = (sequence.num_steps, sequence.impl, started, sequence.constant_rows)
        seen = self.__dict__.setdefault("_seen", {})
        rows = _rows(inputs)
        # None where the same number of rows has been read in another way.
        seen[rows] = call if seen.get(rows, call) == call else None

    def _remembered(self, inputs: tuple[Tensor, ...]) -> Sequence | None:
        rows = _rows(inputs)
        call = self.__dict__.get("_seen", {}).get(rows, _ALONE)
        if call == _ALONE:
            return None
        if call is None or call[2]:
            raise RuntimeError(
                "a neuron is computed again for a checkpoint, but its number of time steps or its "
                "state is not known any more: checkpoint the whole Temporal"
            )
        return Sequence(call[0], {id(self): ""}, call[1], constant_rows=call[3])

    def _scan(
        self,
        inputs: tuple[Tensor, ...],
        state: States | None,
        impl: str,
        return_state: bool,
        relay: Relay | None = None,
    ) -> tuple[Outputs, States]:
        backend = backend_of(inputs, impl)
        check(self, type(self).input_names, inputs, state, backend)
        if backend == "reference":
            return reference.scan(self, inputs, state)
        bits = bits_wanted(inputs[0])
        outputs, final, binary = fused_scan(self, inputs, state, backend, return_state, relay, bits)
        mark(outputs, binary, bits)
        return outputs, final


def bits_wanted(x: Tensor) -> list[Tensor] | None:
    """A list for the bits of binary outputs of a neuron that reads `x`, if the call of Temporal
    keeps its spikes as bits."""
    sequence = calls.sequence
    if sequence is None or sequence.spikes is None or torch.compiler.is_compiling():
        return None
    return [] if sequence.policy.packs_spikes and x.numel() >= MIN_VALUES else None


def mark(outputs: Outputs, binary: tuple[bool, ...], bits: list[Tensor] | None) -> None:
    """Tell the call of Temporal which outputs are binary, with their bits if they are known.

    Args:
        bits: what `bits_wanted` gave, and a kernel may have filled.
    """
    sequence = calls.sequence
    if bits is None or sequence is None or sequence.spikes is None:
        return
    for y, packed in zip_longest(compress(outputs, binary), bits):
        sequence.spikes.mark(y, sequence.current, packed)


def backend_of(inputs: tuple[Tensor, ...], impl: str) -> str:
    """What `impl` stands for on these inputs."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    if impl != "auto" or not inputs or not isinstance(inputs[0], Tensor):
        return impl
    x = inputs[0]
    if x.is_cuda:
        return "triton"
    if x.is_cpu:
        return "numba"
    raise ValueError(
        f"no kernels for device '{x.device.type}': move the input to cuda or cpu, or pass "
        'impl="reference" for the eager loop'
    )


def _unfolded(x: Tensor, sequence: Sequence) -> Tensor:
    """`[T, B, ...]` of what stands folded, or once, for all steps."""
    steps, rows = sequence.num_steps, x.shape[0]
    if rows == sequence.constant_rows:
        return x.unsqueeze(0).expand(steps, *x.shape)
    return x.unflatten(0, (steps, rows // steps))


def _rows(inputs: tuple[Tensor, ...]) -> int:
    x = inputs[0] if inputs else None
    return x.shape[0] if isinstance(x, Tensor) and x.ndim else 0


def check(
    neuron: Neuron,
    names: tuple[str, ...],
    inputs: tuple[Tensor, ...],
    state: States | None,
    backend: str,
) -> None:
    """Refuse inputs, called `names`, and states of the wrong number, dtype or shape."""
    name = type(neuron).__name__
    if len(inputs) != len(names):
        raise TypeError(f"{name} takes {len(names)} inputs ({', '.join(names)}), not {len(inputs)}")
    for label, x in zip(names, inputs, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {label} is a {type(x).__name__}: expected a tensor")
        if x.dtype not in DTYPES and (x.dtype != torch.float64 or backend != "reference"):
            hint = ' (or impl="reference")' if x.dtype == torch.float64 else ""
            raise TypeError(
                f"{name}: {label} is {x.dtype}: expected float32, bfloat16 or float16; convert "
                f"it with {label}.float(){hint}"
            )
        if x.ndim < 2 or x.shape[0] == 0:
            raise ValueError(
                f"{name}: {label} has shape {list(x.shape)}: expected [T, B, ...] with T >= 1"
            )
        if x is not inputs[0] and (x.shape, x.device) != (inputs[0].shape, inputs[0].device):
            raise ValueError(
                f"{name}: {label} is {list(x.shape)} on {x.device}, {names[0]} is "
                f"{list(inputs[0].shape)} on {inputs[0].device}: inputs must agree"
            )
    if state is None:
        return
    expected, states = list(inputs[0].shape[1:]), type(neuron).states
    if not isinstance(state, tuple | list) or len(state) != len(states):
        raise TypeError(f"{name}: state must be a tuple of tensors ({', '.join(states)},)")
    for label, s in zip(states, state, strict=True):
        if not isinstance(s, Tensor) or not s.is_floating_point():
            raise TypeError(f"{name}: state {label} must be a floating-point tensor")
        if list(s.shape) != expected or s.device != inputs[0].device:
            raise ValueError(
                f"{name}: state {label} is {list(s.shape)} on {s.device}: expected {expected} "
                f"on {inputs[0].device}, the shape of one time step"
            )
