"""What in the code of a network's `forward` keeps it from running on one time step.

The code is read, not run. Findings are lines to change; code that cannot be read is a finding too.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

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
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


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


@dataclass
class _Function:
    """One function whose code is read, and what its names stand for."""

    function: Any
    owner: nn.Module | None
    is_sequence: bool
    branches: tuple[tuple[ast.AST, int], ...] = ()


class CodeReader:
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
        self._calls: dict[nn.Module, list[tuple[tuple[ast.AST, int], ...]]] = {}
        self.read(type(module).forward, module, is_sequence)

    def read(self, function: Any, owner: nn.Module | None, is_sequence: bool) -> None:
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
        scope = _Function(function, owner, is_sequence)
        for statement in getattr(tree, "body", [tree]):
            self.visit(statement, scope)

    def add(self, scope: _Function, node: ast.AST, reason: str) -> None:
        finding = f"{_place(scope, node)} {reason}"
        if finding not in self.findings:
            self.findings.append(finding)

    def add_counting(self, scope: _Function, node: ast.AST) -> None:
        self.counting.append(f"{_place(scope, node)} counts dims of [T, B, ...]")

    def visit(self, node: ast.AST, scope: _Function) -> None:
        if isinstance(node, ast.If | ast.IfExp):
            return self.branch(node, scope)
        if isinstance(node, _LOOPS):
            return self.loop(node, scope)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target, called = node.targets[0], self.resolve(node.value.func, scope)
            returns_state = called is not None and self.roles.returns_state(called)
            if isinstance(target, ast.Tuple | ast.List) and returns_state:
                first = ast.unparse(target.elts[0])
                self.add(scope, node, f"takes a state: write `{first} = {_short(node.value)}`")
                return self.children(node.value, scope)
        if isinstance(node, ast.Call):
            self.call(node, scope)
        if isinstance(node, ast.Subscript):
            self.subscript(node, scope)
            if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
                return self.visit(node.value.value, scope)
        if isinstance(node, ast.Attribute):
            self.attribute(node, scope)
        self.children(node, scope)

    def children(self, node: ast.AST, scope: _Function) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child, scope)

    def branch(self, node: ast.If | ast.IfExp, scope: _Function) -> None:
        mode = _step_mode(node.test)
        if mode is None:
            self.visit(node.test, scope)
        for i, body in enumerate((node.body, node.orelse)):
            if mode is not None and (mode == self.step_mode) != (i == 0):
                continue
            inner = replace(
                scope,
                is_sequence=scope.is_sequence and (mode is None or self.step_mode == "m"),
                branches=(*scope.branches, (node, i)),
            )
            for statement in body if isinstance(body, list) else [body]:
                self.visit(statement, inner)

    def loop(self, node: Any, scope: _Function) -> None:
        targets = [g.target for g in getattr(node, "generators", [])]
        if isinstance(node, ast.For):
            targets.append(node.target)
        names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
            uses = {n.id for n in ast.walk(call.func) if isinstance(n, ast.Name)}
            called = self.resolve(call.func, scope)
            if called is not None and self.roles.has_neurons(called) and not uses & names:
                self.add(
                    scope,
                    node,
                    f"calls `{ast.unparse(call.func)}` several times, a loop over time: remove the "
                    "loop, and the lists that it fills, and return the output of one step",
                )
                break
        self.children(node, scope)

    def call(self, node: ast.Call, scope: _Function) -> None:
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        called = self.resolve(node.func, scope)
        if called is not None:
            if self.roles.returns_state(called) and len(node.args) + len(node.keywords) > 1:
                self.add(scope, node, f"takes a state: write `{_short(node)}`")
            if self.roles.has_neurons(called):
                earlier = self._calls.setdefault(called, [])
                if any(not _exclusive(path, scope.branches) for path in earlier):
                    self.add(
                        scope, node, "runs its neurons a second time: use a module for each call"
                    )
                earlier.append(scope.branches)
            return
        if name == "seq_to_ann_forward" and scope.is_sequence:
            self.add_counting(scope, node)
            return
        if name in _TIME_FUNCTIONS:
            self.add(scope, node, "takes [T, B, ...]: call the layers on one step, [B, ...]")
            return
        function = self.function(node.func, scope)
        if function is not None and self.roles.is_foreign(function):
            if name not in ("reset_net", "detach_net"):
                self.add(
                    scope, node, "is code of another library that can't be replaced: use modules"
                )
            return
        is_method = isinstance(node.func, ast.Attribute) and _root(node.func) == "self"
        if inspect.isfunction(function) and not str(function.__module__).startswith("torch"):
            self.read(function, scope.owner if is_method else None, scope.is_sequence)
        elif scope.is_sequence and name in _DIMS and _counts_from_first(name, node):
            self.add_counting(scope, node)

    def subscript(self, node: ast.Subscript, scope: _Function) -> None:
        value = node.value
        if isinstance(value, ast.Call):
            called = self.resolve(value.func, scope)
            if called is not None and self.roles.returns_state(called):
                self.add(scope, node, f"drops a state: write `{_short(value)}`")
                return
        if _is_shape(value):
            counts = not _is_negative(node.slice)
        else:
            is_tensor = _root(value) not in ("self", "") or isinstance(value, ast.Call)
            counts = is_tensor and not _leaves_first_dims(node.slice)
        if scope.is_sequence and counts:
            self.add_counting(scope, node)

    def attribute(self, node: ast.Attribute, scope: _Function) -> None:
        owner = self.resolve(node.value, scope)
        if owner is None and scope.is_sequence and node.attr in ("shape", "ndim"):
            self.add_counting(scope, node)
        if owner is None or not self.roles.is_neuron(owner) or node.attr == "training":
            return
        self.add(
            scope,
            node,
            "does not exist in neurons of spikefuse: remove it; every call starts from rest, and "
            "Temporal takes and returns states",
        )

    def resolve(self, node: ast.AST, scope: _Function) -> nn.Module | None:
        """The module that an expression such as `self.layers[0].lif` stands for, if known."""
        if isinstance(node, ast.Name):
            return scope.owner if node.id == "self" else None
        value: Any = None
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value, scope)
            value = None if owner is None else getattr(owner, node.attr, None)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = self.resolve(node.value, scope)
            try:
                value = None if owner is None else owner[node.slice.value]  # type: ignore[index]
            except (TypeError, KeyError, IndexError):
                value = None
        return value if isinstance(value, nn.Module) and value is not scope.owner else None

    def function(self, node: ast.AST, scope: _Function) -> Any:
        """The function or method of the module that an expression stands for, if known."""
        if isinstance(node, ast.Name):
            return scope.function.__globals__.get(node.id)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self" and scope.owner:
                return getattr(type(scope.owner), node.attr, None)
            owner = self.function(node.value, scope)
            return None if owner is None else getattr(owner, node.attr, None)
        return None


def _place(scope: _Function, node: ast.AST) -> str:
    line = scope.function.__code__.co_firstlineno + getattr(node, "lineno", 1) - 1
    code = ast.unparse(node).split("\n")[0]
    return f"{scope.function.__qualname__}, line {line}: `{code}`"


def _short(call: ast.Call) -> str:
    return f"{ast.unparse(call.func)}({', '.join(ast.unparse(a) for a in call.args[:1])})"


def _root(node: ast.AST) -> str:
    """The name that an expression starts from; "" for none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


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


def _exclusive(
    one: tuple[tuple[ast.AST, int], ...], other: tuple[tuple[ast.AST, int], ...]
) -> bool:
    """Whether two paths through branches never run in one call."""
    taken = dict(one)
    return any(node in taken and taken[node] != side for node, side in other)
