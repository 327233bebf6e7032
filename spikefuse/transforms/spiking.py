"""Replace the activations of a torch network by spiking neurons."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from spikefuse._torch import children_of
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.activations import ACTIVATIONS, FUNCTIONS, METHODS, refuse_hooks
from spikefuse.nn.neuron import check_module
from spikefuse.nn.temporal import Temporal
from spikefuse.transforms.copies import copied

MakeNeuron = Callable[[], Neuron]


def spiking(
    model: nn.Module,
    neuron: MakeNeuron,
    replace: tuple[type[nn.Module], ...] = ACTIVATIONS,
    copy: bool = True,
) -> nn.Module:
    """Return `model` with a neuron in place of each activation module, to be run by `Temporal`.

    Each name of an activation gets a neuron of its own, which keeps the name. A module that
    `forward` calls at several places becomes one neuron that is called there, each time from rest;
    such a neuron has no single state for `return_state=True`. All other layers keep their names, so
    that a state dict of `model` loads, except for the parameters of activations such as nn.PReLU.
    The code of the model runs as it is.

    Example::

        relus = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
        net = sf.Temporal(sf.spiking(relus, lambda: sf.LIF(decay=0.9)))
        logits = net(torch.rand(8, 32, 784)).mean(0)  # [32, 10]

    Args:
        model: a network of one time step, `[B, ...]` to `[B, ...]`.
        neuron: makes one neuron per call, such as `lambda: spikefuse.LIF(decay=0.5)`.
        replace: the activation classes to replace, by default all pointwise ones of torch.nn. Leave
            out nn.Sigmoid and nn.Tanh where they are gates.
        copy: if False, replace the activations of `model` itself.

    Raises:
        TypeError: `model` is not a module, `neuron` does not make neurons, or `replace`
            is no tuple.
        ValueError: the model has no activation module, or one with hooks; it is or contains a
            Temporal; or its code calls an activation as a function or tensor method (`F.relu`,
            `x.relu()`), which no neuron can replace. Calls are found in the source of the model's
            classes, not in functions that these call, nor in layers of torch.nn such as nn.LSTM.
    """
    check_module("model", model)
    if any(isinstance(m, Temporal) for m in model.modules()):
        raise ValueError("the model has a Temporal in it: convert the network, then wrap it")
    if isinstance(neuron, nn.Module) or not callable(neuron):
        raise TypeError(
            f"neuron is a {type(neuron).__name__}: expected a function that makes a new one at "
            "each call, such as lambda: spikefuse.LIF()"
        )
    if not isinstance(replace, tuple):
        raise TypeError(f"replace is {replace!r}: expected a tuple of classes, such as (nn.ReLU,)")
    calls = list(dict.fromkeys(c for m in model.modules() for c in _functional_calls(m, replace)))
    if calls:
        raise ValueError(
            f"the model calls activations as functions, which neurons can't replace: "
            f"{'; '.join(calls)}. Make each a module, such as self.relu = nn.ReLU(), or leave its "
            "class out of replace="
        )
    result = copied(model, plain=False) if copy else model
    activations = [
        (parent, name, child)
        for parent in result.modules()
        for name, child in children_of(parent).items()
        if isinstance(child, replace)
    ]
    if not activations:
        raise ValueError(
            "the model has no activation to replace: expected modules such as nn.ReLU in it"
        )
    for _, name, child in activations:
        refuse_hooks(f"'{name}' ({type(child).__name__})", child)
    made: set[Neuron] = set()
    for parent, name, child in activations:
        setattr(parent, name, _new(neuron, made).train(child.training))
    return result


def _new(neuron: MakeNeuron, made: set[Neuron]) -> Neuron:
    result = neuron()
    if not isinstance(result, Neuron):
        raise TypeError(f"neuron returned a {type(result).__name__}: expected a spikefuse.Neuron")
    if result in made:
        raise ValueError("neuron returned the same module twice: expected a new one at each call")
    made.add(result)
    return result


def _functional_calls(module: nn.Module, replace: tuple[type[nn.Module], ...]) -> Iterator[str]:
    """Yield the calls of activation functions and methods in the code of a module's classes."""
    if isinstance(module, (*replace, Neuron)):
        return
    kind = type(module).__name__
    for name, value in vars(module).items():
        if _is_activation(value, replace):
            yield f"self.{name} of {kind}"
    for base in type(module).__mro__:
        if base.__module__.split(".")[0] in ("torch", "spikefuse", "builtins"):
            continue
        for function in filter(inspect.isfunction, vars(base).values()):
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            except (OSError, TypeError, SyntaxError):
                continue  # without its source
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and _calls(node.func, function, replace):
                    line = function.__code__.co_firstlineno + node.lineno - 1
                    yield f"{ast.unparse(node.func)} in {function.__qualname__}, line {line}"


def _calls(node: ast.expr, function: Any, replace: tuple[type[nn.Module], ...]) -> bool:
    """Whether an expression that is called is an activation function or method."""
    names: list[str] = []
    root = node
    while isinstance(root, ast.Attribute):
        names.append(root.attr)
        root = root.value
    if isinstance(root, ast.Name):
        value = function.__globals__.get(root.id)
        for name in reversed(names):
            value = getattr(value, name, None)
        if _is_activation(value, replace):
            return True
        if root.id in ("self", "super") or root.id in function.__globals__:
            return False
    return bool(names) and issubclass(METHODS.get(names[0], object), replace)


def _is_activation(value: Any, replace: tuple[type[nn.Module], ...]) -> bool:
    try:
        return issubclass(FUNCTIONS.get(value, object), replace)
    except TypeError:  # not hashable
        return False
