"""From a neuron's `step` to a graph of scalar operations."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from spikefuse.compiler import ops
from spikefuse.compiler.graph import Graph
from spikefuse.compiler.ops import Operand, UnsupportedOperation
from spikefuse.compiler.simplify import simplify
from spikefuse.neurons.definition import Definition, call_step


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
    try:
        with Checked(cls.__name__):
            step(*examples(len(names)))
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, UnsupportedOperation):
            raise
        raise UnsupportedOperation(
            f"{cls.__name__}.step can't be compiled, because inside step a tensor is one neuron's "
            f'value, without dims; impl="reference" runs the eager loop. PyTorch says: {error}'
        ) from error
    graph = capture(step, names)
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


def capture(function: Callable[..., Any], names: Sequence[str], gradients: bool = False) -> Graph:
    """Trace a function of 0-d float32 tensors that returns a tuple of them, and simplify it.

    Args:
        gradients: what it returns are gradients; see `simplify`.

    Raises:
        UnsupportedOperation: an operation is not in the table.
    """
    values_in = examples(len(names))
    traced = make_fx(function)(*values_in)
    if any(_is_in_place(node.target) for node in traced.graph.nodes):
        # Some derivatives of PyTorch's are. (functionalize can't see through autograd.Function,
        # hence the second trace.)
        traced = make_fx(torch.func.functionalize(traced))(*values_in)
    graph = Graph(tuple(names))
    values: dict[Any, Any] = {}
    fresh = iter(names)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(fresh)
        elif node.op == "call_function":
            values[node] = _lower(graph, node, values)
        elif node.op == "get_attr":
            values[node] = _constant(getattr(traced, node.target))
        elif node.op == "output":
            results = [values[n] for n in node.args[0]]
    graph.outputs = tuple(graph.convert("f", result) for result in results)
    return simplify(graph, gradients)


def _constant(value: Tensor) -> Operand:
    if value.numel() != 1:
        raise UnsupportedOperation(
            f"step uses a constant tensor of shape {list(value.shape)}: make it an attribute of "
            "the neuron, with one value or one per channel"
        )
    return value.item()


def _is_in_place(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _lower(graph: Graph, node: Any, values: dict[Any, Any]) -> Operand:
    packet = getattr(node.target, "overloadpacket", node.target)
    args = [values[a] if isinstance(a, torch.fx.Node) else a for a in node.args]
    kwargs = {k: values[a] if isinstance(a, torch.fx.Node) else a for k, a in node.kwargs.items()}
    if packet in ops.IDENTITIES:
        return args[0]
    operands = [a for a, n in zip(args, node.args, strict=True) if isinstance(n, torch.fx.Node)]
    if operands and not any(isinstance(o, str) for o in operands):
        # All constants: let PyTorch compute it.
        folded = node.target(
            *[
                torch.tensor(a) if isinstance(n, torch.fx.Node) else a
                for a, n in zip(args, node.args, strict=True)
            ],
            **node.kwargs,
        )
        return folded.item()
    if packet in ops.REWRITES:
        return ops.REWRITES[packet](graph, *args, **kwargs)
    if packet in ops.BY_ATEN:
        return graph.op(ops.BY_ATEN[packet], *args)
    raise UnsupportedOperation(f"the derivative of step needs {node.target}, which has no kernel")


class Checked(TorchDispatchMode):
    """Runs a step or its reverse eagerly and stops at the first operation not in the table."""

    def __init__(self, name: str, derivative: bool = False) -> None:
        super().__init__()
        # PyTorch's own derivatives may work in place, on tensors that nobody else sees.
        self.step, self.in_place = f"{name}.step", derivative

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if not ops.is_supported(packet) and (drawn := _random(func)):
            raise UnsupportedOperation(
                f"{self.step} uses '{drawn}' at {_user_line()}: a kernel draws no random numbers, "
                "so draw them before the call and pass them to the neuron as one more input; "
                'impl="reference" runs the eager loop'
            )
        if packet is torch.ops.aten._local_scalar_dense:
            raise UnsupportedOperation(
                f"{self.step} turns a tensor into a Python value at {_user_line()}: floats, "
                "inputs and states are run-time tensors here, so use torch.where instead of if, "
                "torch functions instead of math, or compute the value in __init__"
            )
        in_place = func._schema.is_mutable
        if in_place and self.in_place:
            in_place, packet = False, getattr(torch.ops.aten, packet.__name__.removesuffix("_"))
        problem = None
        if in_place or not ops.is_supported(packet):
            problem = (
                "kernels are made of pointwise operations that change nothing in place; "
                'impl="reference" runs the eager loop'
            )
        else:
            result = func(*args, **(kwargs or {}))
            problem = ops.refusal(packet, args, kwargs or {}, result)
        if problem:
            step = f"the derivative of {self.step}" if self.in_place else self.step
            line = f"{step} uses '{packet.__name__}' at {_user_line()}"
            raise UnsupportedOperation(f"{line}: {problem}")
        return result


def _user_line() -> str:
    """The innermost line that belongs to a neuron, a surrogate or the user."""
    frames = _frames()
    if not frames:
        return "an unknown line"
    return f'{frames[-1].filename}, line {frames[-1].lineno}: "{frames[-1].line}"'


def _frames() -> list[traceback.FrameSummary]:
    """The calls that led here, without the compiler's own, up to a neuron, surrogate or user."""
    here = os.path.dirname(__file__)
    others = os.path.dirname(torch.__file__), os.path.join(os.path.dirname(here), "nn")
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


def examples(count: int) -> list[Tensor]:
    return [torch.full((), 0.5, dtype=torch.float32, device="cpu") for _ in range(count)]
