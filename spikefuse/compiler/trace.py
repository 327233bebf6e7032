"""Trace a neuron's `step` into a graph of scalar operations."""

from __future__ import annotations

import operator
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spikefuse._torch import TorchDispatchMode
from spikefuse.compiler import ops, rewrites
from spikefuse.compiler.graph import Graph
from spikefuse.compiler.ops import Operand, UnsupportedOperation
from spikefuse.compiler.simplify import simplify
from spikefuse.neurons.definition import Neuron, UnknownOutput, WrongResult, call_step
from spikefuse.neurons.description import INTERNAL, bind, class_constants, owners


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

    @property
    def gradients(self) -> tuple[str, ...]:
        """Variables for the gradients of the outputs, then of the new states."""
        return (*(f"g{y}" for y in self.outputs), *identifiers("gv", self.states))

    @cached_property
    def binary(self) -> tuple[bool, ...]:
        """For each output, whether the graph proves that it is always 0 or 1."""
        return tuple(map(self.graph.is_binary, self.graph.outputs[: self.num_outputs]))

    @cached_property
    def is_continuous(self) -> bool:
        """Whether the outputs and new states are continuous functions of inputs and states."""
        rows = [ops.TABLE[node.op] for node in self.graph.nodes]
        return not any(row.discontinuous or row.result == "b" for row in rows)

    @cached_property
    def is_discrete(self) -> bool:
        """Whether inputs and states reach the first output through comparisons and roundings only,
        as they reach spikes, of any height."""
        variable = {*self.graph.inputs[: len(self.inputs) + len(self.states)]}
        continuous = {*variable}
        for node in self.graph.nodes:
            if not variable.isdisjoint(node.operands):
                variable.add(node.name)
            is_jump = ops.TABLE[node.op].result == "b" or node.op in ("floor", "round")
            # The condition of a `where` is a comparison.
            if not is_jump and not continuous.isdisjoint(node.operands):
                continuous.add(node.name)
        return self.graph.outputs[0] in variable - continuous

    def without_unused(self, used: set[str]) -> Step:
        """Return the step without the parameters that are not in `used`."""
        fixed = len(self.inputs) + len(self.states)
        names = self.graph.inputs
        read = [i for i in range(len(self.params)) if names[fixed + i] in used]
        graph = replace(self.graph, inputs=names[:fixed] + tuple(names[fixed + i] for i in read))
        return replace(self, params=tuple(self.params[i] for i in read), graph=graph)


def identifiers(prefix: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return variable names for a role, such as `p2_decay` for the parameter `decay`.

    The number keeps names unique after emitters append suffixes to them.
    """
    return tuple(f"{prefix}{i}_{name.replace('.', '_')}" for i, name in enumerate(names))


def trace_step(definition: Neuron) -> Step:
    """Trace one step of `definition`; every run-time value becomes a named parameter.

    Raises:
        UnsupportedOperation: the error names the operation and the line that calls it.
        WrongResult: the step does not return outputs and states as it must.
    """
    cls = type(definition)
    inputs, states = cls.input_names, cls.states
    params = tuple(definition.values())
    names = identifiers("x", inputs) + identifiers("v", tuple(states)) + identifiers("p", params)
    function = step_function(definition, params)
    graph, again = (capture(function, names, cls.__name__) for _ in range(2))
    if repr(graph) != repr(again):
        raise UnsupportedOperation(
            f"{cls.__name__}.step computes something else each time it is called, which a kernel "
            "does not: keep what changes in a State(), in an attribute that is assigned between "
            "calls, or in an input"
        )
    # Initial values of attributes are passed as states.
    initial = tuple(s.initial if isinstance(s.initial, float) else 0.0 for s in states.values())
    num_outputs = len(graph.outputs) - len(states)
    return Step(cls.__name__, inputs, tuple(states), initial, params, num_outputs, graph)


def step_function(definition: Neuron, params: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    """Return `step` as a function of inputs, states and parameters: outputs and new states."""
    split = len(type(definition).input_names)
    end = split + len(type(definition).states)
    unknown = tuple(definition.description().unknown.items())

    def function(*args: Tensor) -> tuple[Tensor, ...]:
        run_time = dict(zip(params, args[end:], strict=True))
        bound = bind(definition, run_time, as_class=partial(_traced_class, unknown))
        before = dict(_memory(bound))
        outputs, new = call_step(bound, args[:split], args[split:end])
        for name, values in _memory(bound):
            known = before.get(name, [])
            if len(values) != len(known) or not all(map(operator.is_, values, known)):
                raise UnsupportedOperation(
                    f"{type(definition).__name__}.step changes self.{name}, which a kernel would "
                    f"forget after each step: declare {name} = State() on the class, take it as "
                    "an argument and return its new value"
                )
        return outputs + new

    return function


@cache
def _traced_class(unknown: tuple[tuple[str, str], ...], cls: type[nn.Module], prefix: str) -> Any:
    """A class like `cls` whose instances refuse reads of `unknown` attributes, and which is called
    without hooks, which no kernel can run, if it is that of a submodule."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    members: dict[str, Any] = {"__call__": call} if prefix else {}
    refused = {}
    for name, why in unknown:
        owner, _, attribute = name.rpartition(".")
        if owner == prefix.rstrip("."):
            refuse = partial(_refuse_unknown, why)
            refused[attribute] = property(refuse, refuse)
    if not (members or refused):
        return cls
    kind: Any = type(cls)
    made = kind(cls.__name__, (cls,), {**members, "__module__": cls.__module__})
    for attribute, value in refused.items():
        setattr(made, attribute, value)  # after the class has read the arguments of `step`
    return made


def _refuse_unknown(why: str, *_: Any) -> Any:
    raise UnsupportedOperation(f"step reads an attribute at {_user_line()}: {why}")


def _memory(bound: Neuron) -> Iterator[tuple[str, list[Any]]]:
    """Yield the attributes of a definition and its surrogates, containers with their contents."""
    for prefix, module in owners(bound):
        own = {**vars(module), **dict(module.named_buffers(recurse=False))}
        for name, value in (*class_constants(module), *own.items()):
            if name not in INTERNAL:
                yield prefix + name, list(_contents(value))


def _contents(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict):
        value = [x for item in value.items() for x in item]
    if isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield from _contents(item)


def capture(
    function: Callable[..., tuple[Tensor, ...]],
    names: Sequence[str],
    definition: str,
    gradients: bool = False,
) -> Graph:
    """Trace a function of 0-d float32 tensors, a step or its reverse, and simplify the graph.

    Args:
        definition: name of the neuron in errors.
        gradients: whether the function is the reverse of a step, which returns gradients.

    Raises:
        UnsupportedOperation: the function uses an operation that is not in the table.
        WrongResult: the step does not return outputs and states as it must.
    """
    inputs = [torch.full((), 0.5, dtype=torch.float32, device="cpu") for _ in names]
    step = f"the derivative of {definition}.step" if gradients else f"{definition}.step"
    reads = _ForbidReads(step)
    recorder = _OperationRecorder(dict(zip(names, inputs, strict=True)), reads, gradients)
    try:
        with recorder, reads:
            results = function(*inputs)
    except (UnsupportedOperation, WrongResult, UnknownOutput):
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        reason = str(error).split("\n")[0].split(". ")[0]
        if reason.startswith("derivative for"):
            is_floor = "floor_divide" in reason
            floor = ', or write torch.div(x, y, rounding_mode="floor"), which has one' * is_floor
            raise UnsupportedOperation(
                f"{step} can't be compiled: {reason} by PyTorch: make spikes with a surrogate, as "
                f"in self.surrogate(v - threshold), or call the operation on x.detach(){floor}"
            ) from error
        advice = " ".join(getattr(error, "__notes__", [_NO_DIMENSIONS]))
        raise UnsupportedOperation(
            f"{step} can't be compiled: {reason}, at {_user_line(error)}. {advice}"
        ) from error
    graph = recorder.graph
    graph.outputs = tuple(graph.convert("f", recorder.operand(result)) for result in results)
    return simplify(graph)


_NO_DIMENSIONS = (
    "A tensor is the value of one neuron there and has no dimensions: keep several values in an "
    "nn.ParameterList or in attributes, and put operations that mix neurons, such as nn.Linear, "
    'into a layer before the neuron; impl="reference" runs the eager loop'
)


def _not_pointwise(in_place: bool) -> str:
    fix = "; write v = v + x in place of v += x, and torch.where in place of v[mask] = x"
    return (
        "kernels consist of pointwise operations that change nothing in place "
        f'(docs/write-a-neuron.md lists them){fix * in_place}; impl="reference" runs the eager loop'
    )


def _value_read(step: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"{step} turns a tensor into a Python value at {_user_line()}: floats, "
        "inputs and states are run-time tensors here. Use torch.where instead of if, torch "
        "functions instead of math, or compute the value in __init__"
    )


# Methods that read a tensor's values or size without dispatching an operation.
_READS = {
    *(Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.item),
    *(Tensor.__len__, Tensor.numel, Tensor.nelement),
}
# What differs between a neuron's value in a kernel and a time step in the eager loop.
_DESCRIPTIONS = {
    *(Tensor.dim, Tensor.ndimension, Tensor.size, Tensor.stride, Tensor.storage_offset),
    Tensor.retain_grad,
    *(
        getattr(Tensor, name).__get__
        for name in ("ndim", "shape", "requires_grad", "is_leaf", "grad_fn", "nbytes")
    ),
}
# Functions of PyTorch in Python that neither PyTorch nor we call here.
_AUTOGRAD = {Tensor.register_hook, Tensor.backward}
_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(__file__)
_OWN = _TORCH, _HERE, os.path.join(os.path.dirname(_HERE), "neurons")


def _description_read(step: str, name: str) -> UnsupportedOperation:
    reason = (
        "a kernel computes single values, without dimensions and autograd. Make what depends on it "
        "an attribute of the neuron, such as a bool or an int"
    )
    if name == "requires_grad":
        reason = (
            "kernels have a derivative whether or not a tensor requires it. Remove the condition, "
            "also in an autograd.Function"
        )
    return UnsupportedOperation(f"{step} reads a tensor's '{name}' at {_user_line()}: {reason}")


class _Shape(tuple[int, ...]):
    """A shape to create other tensors with, as in `torch.ones(x.shape)`; rejects other reads."""

    step: str
    name: str

    def _refuse(self, *args: Any) -> Any:
        raise _description_read(self.step, self.name)

    __len__ = __getitem__ = __iter__ = __contains__ = __bool__ = numel = _refuse


class _ForbidReads(TorchFunctionMode):
    """Rejects reads of a tensor's value during tracing, since it would become a constant."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step, self.is_off = step, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_off:
            return func(*args, **(kwargs or {}))
        if func in _READS:
            raise _value_read(self.step)
        if func in _AUTOGRAD:
            raise _description_read(self.step, func.__name__)
        if func is Tensor.__setitem__:
            line = f"{self.step} assigns to a part of a tensor at {_user_line()}"
            raise UnsupportedOperation(f"{line}: {_not_pointwise(in_place=True)}")
        # PyTorch and we read them where they make no difference.
        if func in _DESCRIPTIONS and not sys._getframe(1).f_code.co_filename.startswith(_OWN):
            name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
            if name not in ("shape", "size") or len(args) > 1 or kwargs:
                raise _description_read(self.step, name)
            shape = _Shape(func(*args))
            shape.step, shape.name = self.step, name
            return shape
        return func(*args, **(kwargs or {}))


class _Operations:
    """Runs a step or its reverse eagerly and records every operation."""

    def __init__(self, inputs: dict[str, Tensor], reads: _ForbidReads, gradients: bool) -> None:
        super().__init__()
        self.reads, self.step = reads, reads.step
        self.gradients, self.graph = gradients, Graph(tuple(inputs))
        # The operand of each tensor, by address, because autograd returns aliases of the same
        # memory. Holding the tensors keeps addresses unique.
        self.seen: dict[int, tuple[Tensor, Operand]] = {
            tensor.data_ptr(): (tensor, name) for name, tensor in inputs.items()
        }

    def operand(self, value: Any) -> Any:
        """Return an argument's operand in the graph; tensors not recorded are constants."""
        if not isinstance(value, Tensor):
            return value
        if value.data_ptr() in self.seen:
            return self.seen[value.data_ptr()][1]
        if value.numel() != 1 or value.requires_grad:
            what = "learned" if value.requires_grad else "constant"
            raise UnsupportedOperation(
                f"{self.step} uses a {what} tensor of shape {list(value.shape)}: make it an "
                "attribute of the neuron, with one value or one per channel"
            )
        return value.item()

    def _is_variable(self, value: Tensor) -> bool:
        """Return whether a tensor depends on the inputs, and so is not a constant."""
        return isinstance(self.seen.get(value.data_ptr(), (None, None))[1], str)

    def _is_supported(self, packet: Any) -> bool:
        allowed = self.gradients or packet not in rewrites.IN_GRADIENTS
        return allowed and rewrites.is_supported(packet)

    def _float32(self, value: Any) -> Any:
        """Convert a scalar float64 constant to float32, as type promotion does in eager mode."""
        is_double = isinstance(value, Tensor) and value.dtype == torch.float64 and not value.ndim
        return value.float() if is_double and not self._is_variable(value) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads.is_off = True  # the recorder itself reads tensors
        try:
            return self._record(func, args, kwargs or {})
        finally:
            self.reads.is_off = False

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        packet = func.overloadpacket
        drawn = "" if self._is_supported(packet) else _random(func)
        if drawn:
            raise UnsupportedOperation(
                f"{self.step} uses '{drawn}' at {_user_line()}: a kernel draws no random numbers, "
                "so draw them before the call and pass them to the neuron as one more input; "
                'impl="reference" runs the eager loop'
            )
        if torch.Tag.data_dependent_output in func.tags:
            raise _value_read(self.step)
        in_place = packet.__name__.endswith("_") or "out" in kwargs
        if in_place and self.gradients:
            # PyTorch's own derivatives may modify temporary tensors in place.
            in_place, packet = False, getattr(torch.ops.aten, packet.__name__.removesuffix("_"))
        problem: str | None = _not_pointwise(in_place)
        if not in_place and self._is_supported(packet):
            args = [self._float32(a) for a in args]
            result = func(*args, **kwargs)
            if not any(isinstance(a, Tensor) and self._is_variable(a) for a in args):
                result = self._float32(result)
            problem = rewrites.refusal(packet, args, kwargs, result)
        if problem:
            name = {"lift_fresh": "torch.tensor"}.get(packet.__name__, packet.__name__)
            line = f"{self.step} uses '{name}' at {_user_line()}"
            raise UnsupportedOperation(f"{line}: {problem}")
        self.seen[result.data_ptr()] = result, self._lower(packet, args, kwargs, result)
        return result

    def _lower(
        self, packet: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor
    ) -> Operand:
        operands = [self.operand(a) for a in args]
        tensors = [o for a, o in zip(args, operands, strict=True) if isinstance(a, Tensor)]
        if tensors and not any(isinstance(o, str) for o in tensors):
            return result.item()  # all operands are constants
        if packet in rewrites.REWRITES:
            named = {name: self.operand(a) for name, a in kwargs.items()}
            return rewrites.REWRITES[packet](self.graph, *operands, **named)
        return self.graph.op(ops.BY_ATEN[packet], *operands)


# In a class of its own, `__torch_dispatch__` stays as it is. That of a direct subclass would import
# all of torch.compile in the first call, which takes a second.
class _OperationRecorder(_Operations, TorchDispatchMode):
    """Records the operations of this thread."""


def _user_line(error: BaseException | None = None) -> str:
    """Return the innermost line of a neuron, a surrogate or the user, now or of an error."""
    frames = _frames(error)
    if not frames:
        return "an unknown line"
    return f'{frames[-1].filename}, line {frames[-1].lineno}: "{frames[-1].line}"'


def _frames(error: BaseException | None = None) -> list[traceback.FrameSummary]:
    """Return the innermost frames outside the compiler, out to a neuron, surrogate or user."""
    others = _TORCH, os.path.join(os.path.dirname(_HERE), "nn")
    stack = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    frames = []
    for frame in reversed(stack):
        if not frame.filename.startswith(_HERE):
            frames.append(frame)
            if not frame.filename.startswith(others):
                return frames
    return []


def _random(func: Any) -> str:
    """Return the name of an operation that draws random numbers, or ""."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return func.overloadpacket.__name__
    # Dropout runs other operations first: its checks, and the allocation of its mask.
    return "dropout" if any("dropout(" in (frame.line or "") for frame in _frames()) else ""
