"""What in the code of a network's `forward` keeps it from running on one time step.

A conversion has no input to run or to capture the code with, so that the code is read. Findings
are lines to change; code that cannot be read is a finding too.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import fx, nn

#: Functions and methods that count dims from the first, of which time is one in a sequence.
_DIMS = {
    *("flatten", "unflatten", "view", "reshape", "permute", "transpose", "swapaxes", "movedim"),
    *("squeeze", "unsqueeze", "repeat", "expand", "cat", "stack", "split", "chunk", "unbind"),
    *("mean", "sum", "max", "min", "amax", "amin", "argmax", "norm", "std", "var", "softmax"),
    *("log_softmax", "cumsum", "flip", "roll", "index_select", "gather", "size", "einsum"),
    *("select", "narrow", "repeat_interleave", "tile", "rearrange", "dim"),
}
# These count from the first whatever their arguments are.
_ALL_DIMS = {
    *("view", "reshape", "permute", "repeat", "expand", "einsum", "stack", "tile", "rearrange"),
    "dim",
}
_TIME_FUNCTIONS = {
    *("seq_to_ann_forward", "multi_step_forward", "chunk_multi_step_forward"),
    *("t_last_seq_to_ann_forward", "t_last_multi_step_forward"),
}


@dataclass(frozen=True)
class Roles:
    """What the modules of the original network are."""

    #: Whether a module holds neurons, or is one.
    has_neurons: Callable[[nn.Module], bool]
    #: Whether it is a neuron of another library.
    is_neuron: Callable[[nn.Module], bool]
    #: Whether it returns its state beside its output.
    returns_state: Callable[[nn.Module], bool]
    #: Whether a function belongs to another library.
    is_foreign: Callable[[Any], bool]


class CodeReader(ast.NodeVisitor):
    """Read `forward` of `module`, the methods of the module and the functions that it calls.

    Args:
        is_sequence: whether `forward` is written for `[T, B, ...]`.
        must_read: whether code without a source can't be run.
        step_mode: the branch that runs of code for both of SpikingJelly's step modes.

    Attributes:
        findings: the lines that converted modules can't run, with reasons.
        counting: the lines that count dims of `[T, B, ...]`.
    """

    def __init__(
        self, module: nn.Module, roles: Roles, is_sequence: bool, must_read: bool, step_mode: str
    ) -> None:
        self.roles, self.must_read, self.step_mode = roles, must_read, step_mode
        self.findings: list[str] = []
        self.counting: list[str] = []
        self._seen: set[Any] = set()
        # What is read: a function, its variables, the module whose method it is, how it is called,
        # and the modules that have run before.
        self._function: Any = None
        self._variables: set[str] = set()
        self._owner: nn.Module | None = None
        self._self = ""  # the name of the module in the code, mostly "self"
        self._is_sequence = is_sequence
        self._called: set[nn.Module] = set()
        self._read(type(module).forward, module)

    def _read(self, function: Any, owner: nn.Module | None) -> None:
        function = inspect.unwrap(function)
        if function in self._seen or not inspect.isfunction(function):
            return
        self._seen.add(function)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError):
            if self.must_read:
                self.findings.append(
                    f"{function.__qualname__}: its source can't be read, so a loop over time in "
                    "it would be missed; define it in a file"
                )
            return
        outer = self._function, self._variables, self._owner, self._self
        names = (n for n in ast.walk(tree) if isinstance(n, ast.Name))
        stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        self._variables = stored.union(function.__code__.co_varnames)
        self._function, self._owner = function, owner
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        self._self = arguments[0] if owner is not None and arguments else ""
        for statement in getattr(tree, "body", [tree]):
            self.visit(statement)
        self._function, self._variables, self._owner, self._self = outer

    def _place(self, node: ast.AST) -> str:
        line = self._function.__code__.co_firstlineno + getattr(node, "lineno", 1) - 1
        code = ast.unparse(node).split("\n")[0]
        return f"{self._function.__qualname__}, line {line}: `{code}`"

    def _add(self, node: ast.AST, reason: str) -> None:
        finding = f"{self._place(node)} {reason}"
        if finding not in self.findings:
            self.findings.append(finding)

    def _add_counting(self, node: ast.AST) -> None:
        self.counting.append(f"{self._place(node)} counts dims of [T, B, ...]")

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        mode = _step_mode(node.test)
        if mode is None:
            self.visit(node.test)
        is_sequence, before = self._is_sequence, self._called
        after = set(before)
        for i, body in enumerate((node.body, node.orelse)):
            if mode is not None and (mode == self.step_mode) != (i == 0):
                continue
            self._is_sequence = is_sequence and (mode is None or self.step_mode == "m")
            self._called = set(before)
            for statement in body if isinstance(body, list) else [body]:
                self.visit(statement)
            after |= self._called
        self._is_sequence, self._called = is_sequence, after

    visit_IfExp = visit_If  # noqa: N815

    def visit_For(self, node: Any) -> None:
        targets = [node.target] if isinstance(node, ast.For) else []
        targets += [generator.target for generator in getattr(node, "generators", [])]
        names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        once = _runs_once(node, names)
        for call in (n for n in ast.walk(node) if isinstance(n, ast.Call) and n not in once):
            uses = {n.id for n in ast.walk(call.func) if isinstance(n, ast.Name)}
            called = self._module(call.func)
            if called is not None and self.roles.has_neurons(called) and not uses & names:
                self._add(
                    node,
                    f"calls `{ast.unparse(call.func)}` several times, a loop over time: remove the "
                    "loop, and the lists that it fills, and return the output of one step",
                )
                break
        self.generic_visit(node)

    visit_While = visit_ListComp = visit_SetComp = visit_For  # noqa: N815
    visit_GeneratorExp = visit_DictComp = visit_For  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> None:
        target, call = node.targets[0], node.value
        if isinstance(target, ast.Tuple | ast.List) and self._returns_state(call):
            first = ast.unparse(target.elts[0])
            self._add(node, f"takes a state: write `{first} = {_short(call)}`")
            self.generic_visit(call)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._check_call(node)
        self.generic_visit(node)

    def _check_call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        called, value = self._module(node.func), self._value(node.func)
        receiver = getattr(value, "__self__", None)
        is_own = value is not None and (receiver is None or receiver is self._owner)
        function = getattr(value, "__func__", value)
        if called is not None:
            if self._returns_state(node) and len(node.args) + len(node.keywords) > 1:
                self._add(node, f"takes a state: write `{_short(node)}`")
            if self.roles.has_neurons(called):
                if called in self._called:
                    self._add(node, "runs its neurons a second time: use a module for each call")
                self._called.add(called)
        elif name == "seq_to_ann_forward" and self._is_sequence:
            self._add_counting(node)
        elif name in _TIME_FUNCTIONS:
            self._add(node, "takes [T, B, ...]: call the layers on one step, [B, ...]")
        elif is_own and self.roles.is_foreign(value):
            if name not in ("reset_net", "detach_net"):
                self._add(node, "is code of another library that can't be replaced: use modules")
        elif (
            is_own
            and inspect.isfunction(function)
            and not str(function.__module__).startswith("torch")
        ):
            self._read(function, receiver)
        elif self._is_sequence and name in _DIMS and _counts_from_first(name, node):
            self._add_counting(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        value = node.value
        if self._returns_state(value):
            self._add(node, f"drops a state: write `{_short(value)}`")
        elif self._is_sequence:
            if _is_shape(value):
                counts = not _is_negative(node.slice)
            else:
                is_tensor = _root(value) not in (self._self, "") or isinstance(value, ast.Call)
                counts = is_tensor and not _leaves_first_dims(node.slice)
            if counts:
                self._add_counting(node)
        if isinstance(value, ast.Attribute) and value.attr == "shape":
            self.visit(value.value)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self._module(node.value)
        if owner is None and self._is_sequence and node.attr in ("shape", "ndim"):
            self._add_counting(node)
        if owner is not None and self.roles.is_neuron(owner) and node.attr != "training":
            self._add(
                node,
                "does not exist in neurons of spikefuse: remove it; every call starts from rest, "
                "and Temporal takes and returns states",
            )
        self.generic_visit(node)

    def _value(self, node: ast.AST) -> Any:
        """What an expression such as `self.layers[0].lif` or `F.relu` stands for; None if it is
        unknown."""
        if isinstance(node, ast.Name):
            if node.id == self._self:
                return self._owner
            if node.id in self._variables:
                return None
            return self._function.__globals__.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self._value(node.value), node.attr, None)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            try:
                return self._value(node.value)[node.slice.value]
            except (TypeError, KeyError, IndexError):
                return None
        return None

    def _module(self, node: ast.AST) -> nn.Module | None:
        """The module inside the one that is read that an expression stands for."""
        value = self._value(node) if _root(node) == self._self else None
        return value if isinstance(value, nn.Module) and value is not self._owner else None

    def _returns_state(self, node: ast.AST) -> TypeGuard[ast.Call]:
        """Whether an expression is the call of a module that returns its state."""
        called = self._module(node.func) if isinstance(node, ast.Call) else None
        return called is not None and self.roles.returns_state(called)


class GraphReader:
    """Read the graph of a module, as `CodeReader` reads code."""

    def __init__(self, module: fx.GraphModule, roles: Roles) -> None:
        self.findings: list[str] = []
        nodes = [node for node in module.graph.nodes if node.op.startswith("call_")]
        others = [node for node in nodes if node.op != "call_module"]
        self.counting = [f"its graph calls {node.target}, which may count dims" for node in others]
        for target, count in Counter(n.target for n in nodes if n.op == "call_module").items():
            called = module.get_submodule(target)
            if roles.returns_state(called):
                self.findings.append(f"its graph reads a state of '{target}'")
            if count > 1 and roles.has_neurons(called):
                self.findings.append(f"its graph calls '{target}' {count} times")


def _short(call: ast.Call) -> str:
    return f"{ast.unparse(call.func)}({', '.join(ast.unparse(a) for a in call.args[:1])})"


def _root(node: ast.AST) -> str:
    """The name that an expression starts from; "" for none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _runs_once(loop: ast.AST, names: set[str]) -> set[ast.AST]:
    """The nodes of a loop that run for one value of its variables, as in `if i == 3:`."""
    found: set[ast.AST] = set()
    for branch in ast.walk(loop):
        test = getattr(branch, "test", None)
        if isinstance(test, ast.Compare) and [*map(type, test.ops)] == [ast.Eq]:
            sides = {getattr(side, "id", "") for side in (test.left, *test.comparators)}
            if isinstance(branch, ast.If) and sides & names:
                found.update(n for statement in branch.body for n in ast.walk(statement))
    return found


def _step_mode(test: ast.AST) -> str | None:
    """The step mode in which `test` holds, if it is a comparison of a step mode."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return None
    left, right, equal = test.left, test.comparators[0], isinstance(test.ops[0], ast.Eq)
    is_mode = isinstance(left, ast.Attribute) and left.attr == "step_mode"
    is_known = isinstance(right, ast.Constant) and right.value in ("s", "m")
    if not (is_mode and is_known and isinstance(test.ops[0], ast.Eq | ast.NotEq)):
        return None
    return "s" if (right.value == "s") == equal else "m"  # type: ignore[attr-defined]


def _integers(node: ast.Call) -> Iterator[ast.AST]:
    for argument in (*node.args, *(k.value for k in node.keywords if k.arg in ("dim", "axis"))):
        yield from argument.elts if isinstance(argument, ast.Tuple | ast.List) else (argument,)


def _counts_from_first(name: str, node: ast.Call) -> bool:
    if name in _ALL_DIMS:
        return True
    numbers = [a for a in _integers(node) if not isinstance(a, ast.Name | ast.Attribute | ast.Call)]
    is_function = isinstance(node.func, ast.Attribute) and _root(node.func) in ("torch", "F")
    others = len(node.args) - is_function - len(numbers)
    return (not numbers and others > 0) or any(not _is_negative(n) for n in numbers)


def _is_negative(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def _is_shape(node: ast.AST) -> bool:
    """Whether an expression is `x.shape` or `x.size()`."""
    name = "size" if isinstance(node, ast.Call) else "shape"
    node = node.func if isinstance(node, ast.Call) else node
    return isinstance(node, ast.Attribute) and node.attr == name


def _leaves_first_dims(index: ast.AST) -> bool:
    """Whether an index is a key of a dict, or begins with an ellipsis."""
    first = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
    return isinstance(first, ast.Constant) and (first.value is ... or isinstance(first.value, str))
