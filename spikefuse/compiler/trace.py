"""From a neuron's `step` to a graph of scalar operations."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spikefuse.compiler import ops
from spikefuse.compiler.graph import Graph
from spikefuse.compiler.ops import Operand, UnsupportedOperation
from spikefuse.compiler.simplify import simplify
from spikefuse.neurons.definition import Definition, WrongResult, call_step


@dataclass(frozen=True)
class Step:
    """A traced step: its variables by role, and its graph (outputs, then new states)."""

    name: str
    inputs: tuple[str, ...]
    states: tuple[str, ...]
    initial: tuple[float, ...]
    params: tuple[str, ...]
    num_outputs: int
    graph: Graph

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(f"y{i}" for i in range(self.num_outputs))

    @cached_property
    def binary(self) -> tuple[bool, ...]:
        """For each output, whether the graph proves that all its values are 0 or 1."""
        return tuple(map(self.graph.is_binary, self.graph.outputs[: self.num_outputs]))

    def without_unused(self, used: set[str]) -> Step:
        """The step without the parameters that neither it nor its reverse reads."""
        fixed = len(self.inputs) + len(self.states)
        names = self.graph.inputs
        kept = [i for i in range(len(self.params)) if names[fixed + i] in used]
        graph = replace(self.graph, inputs=names[:fixed] + tuple(names[fixed + i] for i in kept))
        return replace(self, params=tuple(self.params[i] for i in kept), graph=graph)


def identifiers(prefix: str, names: Sequence[str]) -> tuple[str, ...]:
    """Variable names for a role: `decay` of the parameters may be `p2_decay`.

    The number keeps names apart that users choose, whatever emitters append to them.
    """
    return tuple(f"{prefix}{i}_{name.replace('.', '_')}" for i, name in enumerate(names))


def trace_step(definition: Definition) -> Step:
    """Trace one step of `definition`; every run-time value becomes a named parameter.

    Raises:
        UnsupportedOperation: naming the operation and the line of the step that calls it.
        WrongResult: the step does not return what it must.
    """
    cls = type(definition)
    inputs, states = cls.input_names, cls.states
    params = tuple(definition.values())
    count: list[int] = []

    def step(*args: Tensor) -> tuple[Tensor, ...]:
        outputs, new = step_function(definition, params)(*args)
        count[:] = [len(outputs)]
        return (*outputs, *new)

    names = identifiers("x", inputs) + identifiers("v", tuple(states)) + identifiers("p", params)
    graph = capture(step, names, cls.__name__)
    initial = tuple(s.initial for s in states.values())
    return Step(cls.__name__, inputs, tuple(states), initial, params, count[0], graph)


def step_function(definition: Definition, params: Sequence[str]) -> Callable[..., Any]:
    """`step` as a function of (inputs, states, parameters) that returns (outputs, states)."""
    split = len(type(definition).input_names)
    end = split + len(type(definition).states)

    def function(*args: Tensor) -> Any:
        bound = definition.bind(dict(zip(params, args[end:], strict=True)))
        return call_step(bound, args[:split], args[split:end])

    return function


def capture(
    function: Callable[..., tuple[Tensor, ...]],
    names: Sequence[str],
    definition: str,
    gradients: bool = False,
) -> Graph:
    """Trace a function of 0-d float32 tensors, the step of a definition, and simplify it.

    Args:
        gradients: it returns gradients: the reverse of the step.

    Raises:
        UnsupportedOperation: at the first operation that is not in the table.
        WrongResult: the step does not return what it must.
    """
    inputs = [torch.full((), 0.5, dtype=torch.float32, device="cpu") for _ in names]
    step = f"the derivative of {definition}.step" if gradients else f"{definition}.step"
    recorder = _Recorder(dict(zip(names, inputs, strict=True)), step, gradients)
    try:
        with recorder, _Reading(step):
            results = function(*inputs)
    except (UnsupportedOperation, WrongResult):
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise UnsupportedOperation(
            f"{step} can't be compiled: inside step a tensor is one neuron's value, without dims; "
            f'impl="reference" runs the eager loop. The error is: {error}'
        ) from error
    graph = recorder.graph
    graph.outputs = tuple(graph.convert("f", recorder.operand(result)) for result in results)
    return simplify(graph, gradients)


def _value_read(step: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"{step} turns a tensor into a Python value at {_user_line()}: floats, "
        "inputs and states are run-time tensors here, so use torch.where instead of if, "
        "torch functions instead of math, or compute the value in __init__"
    )


# What reads a tensor's values or size without an operation that a recorder would see.
_READS = {
    *(Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.item),
    *(Tensor.__len__, Tensor.numel, Tensor.nelement),
}
_TORCH = os.path.dirname(torch.__file__)


class _Reading(TorchFunctionMode):
    """Refuses to read what a tensor holds while `step` is traced: it would become a constant."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise _value_read(self.step)
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Runs a step or its reverse eagerly and writes down every operation."""

    def __init__(self, inputs: dict[str, Tensor], step: str, gradients: bool) -> None:
        super().__init__()
        self.step, self.gradients, self.graph = step, gradients, Graph(tuple(inputs))
        # What each tensor is in the graph, by its address: autograd hands out copies of the same
        # memory. The tensors are held, so that no address is used twice.
        self.seen: dict[int, tuple[Tensor, Operand]] = {}
        for name, tensor in inputs.items():
            self.seen[tensor.data_ptr()] = tensor, name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # It would import all of torch.compile, which takes a second.
        return False

    def operand(self, value: Any) -> Any:
        """What an argument is in the graph; a tensor that no operation made is a constant."""
        if not isinstance(value, Tensor):
            return value
        if value.data_ptr() in self.seen:
            return self.seen[value.data_ptr()][1]
        if value.numel() != 1:
            raise UnsupportedOperation(
                f"{self.step} uses a constant tensor of shape {list(value.shape)}: make it an "
                "attribute of the neuron, with one value or one per channel"
            )
        return value.item()

    def _is_known(self, value: Tensor) -> bool:
        """Whether it comes of the inputs: otherwise it is a constant."""
        return isinstance(self.seen.get(value.data_ptr(), (None, None))[1], str)

    def _float32(self, value: Any) -> Any:
        """A scalar constant in float32, as beside float32 tensors of the eager loop."""
        is_double = isinstance(value, Tensor) and value.dtype == torch.float64 and not value.ndim
        return value.float() if is_double and not self._is_known(value) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # what is read here is no matter of `_Reading`
            return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        packet = func.overloadpacket
        if not ops.is_supported(packet):
            self._refuse_randomness(func)
        if packet is torch.ops.aten._local_scalar_dense:
            raise _value_read(self.step)
        in_place = func._schema.is_mutable
        if in_place and self.gradients:
            # PyTorch's own derivatives may work in place, on tensors that nobody else sees.
            in_place, packet = False, getattr(torch.ops.aten, packet.__name__.removesuffix("_"))
        if in_place or not ops.is_supported(packet):
            problem: str | None = (
                "kernels are made of pointwise operations that change nothing in place; "
                'impl="reference" runs the eager loop'
            )
        else:
            args = [self._float32(a) for a in args]
            result = func(*args, **kwargs)
            if not any(isinstance(a, Tensor) and self._is_known(a) for a in args):
                result = self._float32(result)
            problem = ops.refusal(packet, args, kwargs, result)
        if problem:
            line = f"{self.step} uses '{packet.__name__}' at {_user_line()}"
            raise UnsupportedOperation(f"{line}: {problem}")
        self.seen[result.data_ptr()] = result, self._lower(packet, args, kwargs, result)
        return result

    def _lower(
        self, packet: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor
    ) -> Operand:
        operands = [self.operand(a) for a in args]
        if packet in ops.IDENTITIES:
            return operands[0]
        tensors = [o for a, o in zip(args, operands, strict=True) if isinstance(a, Tensor)]
        if tensors and not any(isinstance(o, str) for o in tensors):
            return result.item()  # of constants
        if packet in ops.REWRITES:
            named = {name: self.operand(a) for name, a in kwargs.items()}
            return ops.REWRITES[packet](self.graph, *operands, **named)
        return self.graph.op(ops.BY_ATEN[packet], *operands)

    def _refuse_randomness(self, func: Any) -> None:
        drawn = _random(func)
        if drawn:
            raise UnsupportedOperation(
                f"{self.step} uses '{drawn}' at {_user_line()}: a kernel draws no random numbers, "
                "so draw them before the call and pass them to the neuron as one more input; "
                'impl="reference" runs the eager loop'
            )


def _user_line() -> str:
    """The innermost line that belongs to a neuron, a surrogate or the user."""
    frames = _frames()
    if not frames:
        return "an unknown line"
    return f'{frames[-1].filename}, line {frames[-1].lineno}: "{frames[-1].line}"'


def _frames() -> list[traceback.FrameSummary]:
    """The calls that led here, without the compiler's own, up to a neuron, surrogate or user."""
    here = os.path.dirname(__file__)
    others = _TORCH, os.path.join(os.path.dirname(here), "nn")
    found = []
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(here):
            found.append(frame)
            if not frame.filename.startswith(others):
                return found
    return []


def _random(func: Any) -> str:
    """The name by which an operation draws random numbers, or "" if it draws none."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return func.overloadpacket.__name__
    # A dropout begins with other operations: its checks, memory for its mask.
    return "dropout" if any("dropout(" in (frame.line or "") for frame in _frames()) else ""
