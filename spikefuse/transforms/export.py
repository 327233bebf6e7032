"""A network in plain PyTorch operators, for torch.export, ONNX and torch.jit.trace."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spikefuse import reference
from spikefuse.block.block import Block
from spikefuse.block.fused_norm import FUSED
from spikefuse.events.linear import EventLinear
from spikefuse.neurons.definition import Neuron, States, with_outputs
from spikefuse.neurons.surrogate import Surrogate
from spikefuse.nn.checkpoint import require_temporal
from spikefuse.nn.constant_input import is_compiled
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.neuron import check_module, checked_names
from spikefuse.nn.pool import MaxPool2d
from spikefuse.nn.recurrent import Recurrent
from spikefuse.nn.temporal import Temporal


def exportable(net: nn.Module, step: bool = False) -> nn.Module:
    """Return a copy of `net` in evaluation mode that consists of plain PyTorch operators.

    The copy computes what `net` computes in evaluation mode, with neurons as loops over time
    (`spikefuse.reference`), fused batch norms and poolings as those of `torch.nn`, and spikes as
    comparisons without a gradient::

        x = torch.rand(8, 1, 1, 28, 28)
        program = torch.export.export(sf.exportable(net), (x,))
        torch.onnx.export(sf.exportable(net), (x,), "net.onnx", dynamo=True)
        traced = torch.jit.trace(sf.exportable(net), x)

    T, the number of time steps, is that of the example; the batch size may be dynamic. On a CPU,
    float32 outputs equal those of `net` bit for bit, except for the rounding of fused batch norms
    (docs/fusing.md), of layers before the first neuron if their input is constant over time, as
    from `encode.direct`, and of matrix products, which may depend on the alignment of memory.

    Args:
        net: a `Temporal`, or any module that contains `Temporal` containers or neurons.
        step: return a module that computes one time step with explicit states:
            `forward(x, *states) -> (y, *new_states)`, with `x` and `y` `[B, ...]`. Needs a
            `Temporal` with one input.

    Returns:
        An `nn.Module` that is independent of `net` and called like it; with `step` an
        `ExportedStep`.

    Raises:
        TypeError: `net` is not a module, is not a `Temporal` with `step`, or has a layer without
            an equivalent in plain operators: an `EventLinear`, a `Recurrent` or `Feedback`, a
            compiled module, or a subclass of a neuron, surrogate, `Temporal` or `Block` with
            its own `forward`.
        ValueError: the time of `net` is sharded.
    """
    check_module("net", net)
    if step and not isinstance(net, Temporal):
        raise TypeError(f"net is a {type(net).__name__}: expected a Temporal with step=True")
    for name, module in net.named_modules():
        _check(name, module)
    result = copy.deepcopy(net).eval().requires_grad_(False)
    for module in list(result.modules()):
        _remove_hook(module, require_temporal)
        if type(module) in _PLAIN:
            module.__class__ = _PLAIN[type(module)]
        for kind, replacement in _REPLACEMENTS.items():
            if isinstance(module, kind):
                _replace(module, replacement)
    if not step:
        return result
    assert isinstance(result, EagerTemporal)
    return ExportedStep(result).eval()


class ExportedStep(nn.Module):
    """One time step of a network, made by `exportable(net, step=True)`.

    Call: `y, *new_states = step(x, *states)`, without states from rest.

    Shapes: `x`, `y`: `[B, ...]`; states: `[B, ...]`, float32.

    Attributes:
        state_names: the names of the states in their order, such as "2.v" for the state `v` of the
            neuron `2` of the network.

    Raises:
        TypeError: the number of states is wrong.
        ValueError: a neuron is called twice, or not at all, in one step.
    """

    def __init__(self, net: EagerTemporal) -> None:
        super().__init__()
        self.net, self._dim = net, net.dim
        neurons = _neurons(net)
        self._lengths = {name: len(n.definition.states) for name, n in neurons.items()}
        self.state_names = tuple(
            f"{n}.{s}" for n, m in neurons.items() for s in m.definition.states
        )

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Any, ...]:
        state = None
        if states:
            if len(states) != len(self.state_names):
                raise TypeError(
                    f"{len(states)} states are given: expected {len(self.state_names)} "
                    f"({', '.join(self.state_names)}), or none to start from rest"
                )
            rest = iter(states)
            state = {n: tuple(next(rest) for _ in range(k)) for n, k in self._lengths.items()}
        y, finals = self.net(x.unsqueeze(self._dim), state=state, return_state=True)
        for name in self._lengths.keys() - finals.keys():
            raise ValueError(f"neuron '{name}' is not called, so it has no next state: remove it")
        y = pytree.tree_map_only(Tensor, lambda t: t.squeeze(self._dim), y)
        return y, *(s for name in self._lengths for s in finals[name])

    @torch.no_grad()
    def initial_states(self, x: Tensor) -> States:
        """Return the states at rest for inputs of the shape of `x`, to export the step with."""
        rest = [
            s.initial for m in _neurons(self.net).values() for s in m.definition.states.values()
        ]
        _, *states = self(x)
        return tuple(torch.full_like(s, value) for s, value in zip(states, rest, strict=True))


@dataclass
class _Slot:
    """What a neuron gets from the call of the `Temporal` around it, and returns to it."""

    name: str
    num_steps: int
    state: States | None
    is_stateful: bool
    final: States | None = None


class Comparison(nn.Module):
    """The forward pass of a surrogate."""

    def __init__(self, surrogate: Surrogate) -> None:
        super().__init__()
        self.surrogate = surrogate

    def forward(self, u: Tensor) -> Tensor:
        return self.surrogate.spike(u).to(u.dtype)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # such as a parameter of the surrogate, which a step may read
            return getattr(super().__getattr__("surrogate"), name)


class EagerNeuron(nn.Module):
    """A neuron as a loop over time."""

    def __init__(self, definition: Neuron) -> None:
        super().__init__()
        self.definition = definition
        self.slot: _Slot | None = None

    def forward(
        self,
        *inputs: Tensor,
        state: States | None = None,
        return_state: bool = False,
        impl: str = "auto",
        outputs: tuple[str, ...] | None = None,
    ) -> Any:
        slot = self.slot
        names = () if outputs is None else checked_names(outputs)
        definition = with_outputs(self.definition, names)
        if slot is None:
            found, final = reference.scan(definition, inputs, state)
            result = found[0] if outputs is None and len(found) == 1 else found
            return (result, final) if return_state else result
        if slot.final is not None and slot.is_stateful:
            raise ValueError(
                f"neuron '{slot.name}' is called twice in one step, so its state is ambiguous: "
                "use one module per call"
            )
        inputs = tuple(x.unflatten(0, (slot.num_steps, -1)) for x in inputs)
        found, slot.final = reference.scan(definition, inputs, slot.state)
        found = tuple(map(_fold, found))
        return found[0] if outputs is None and len(found) == 1 else found


class EagerBlock(nn.Module):
    """A batch norm, an addition and a neuron, one after the other."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.neuron = block.norm, block.neuron

    def forward(self, x: Tensor, residual: Tensor | None = None, **options: Any) -> Any:
        if self.neuron.slot is None:
            u = self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        else:
            u = self.norm(x)
        return self.neuron(u if residual is None else u + residual, **options)


class EagerTemporal(nn.Module):
    """A `Temporal` without memory policies, whose neurons are loops."""

    def __init__(self, temporal: Temporal) -> None:
        super().__init__()
        self.net, self.dim = temporal.net, int(getattr(temporal, "batch_first", False))

    def forward(
        self,
        x: Any,
        *others: Any,
        state: dict[str, States] | None = None,
        return_state: bool = False,
        impl: str = "auto",
        **kwargs: Any,
    ) -> Any:
        shape: Any = None

        def fold(x: Tensor) -> Tensor:
            nonlocal shape
            if x.ndim < 2:
                raise ValueError(
                    f"an input has shape {list(x.shape)}: expected [T, B, ...]; for a single step "
                    "use exportable(net, step=True), and with torch.onnx.export dynamo=True"
                )
            x = x.transpose(0, 1) if self.dim else x
            # In a trace of torch.jit the length of a tuple is an integer, but T in a shape is not.
            shape = len(x.unbind(0)), x.shape[1]
            return _fold(x)

        def unfold(y: Tensor) -> Tensor:
            y = y.unflatten(0, shape)
            return y.transpose(0, 1) if self.dim else y

        inputs, kwargs = pytree.tree_map_only(Tensor, fold, ((x, *others), kwargs))
        neurons = _neurons(self.net)
        stateful = return_state or state is not None
        slots = {
            name: _Slot(name, shape[0], None if state is None else state[name], stateful)
            for name in neurons
        }
        for name, neuron in neurons.items():
            neuron.slot = slots[name]
        try:
            folded = self.net(*inputs, **kwargs)
        finally:
            for neuron in neurons.values():
                neuron.slot = None
        output = pytree.tree_map_only(Tensor, unfold, folded)
        finals = {name: slot.final for name, slot in slots.items() if slot.final is not None}
        return (output, finals) if return_state else output


def _fold(x: Tensor) -> Tensor:
    """Return `[T, B, ...]` as `[T*B, ...]`, copied: with a dynamic batch size, torch.export cannot
    prove that a flattened view may be unflattened."""
    return torch.cat(x.unbind(0))


def _neurons(net: nn.Module) -> dict[str, EagerNeuron]:
    net = net.net if isinstance(net, EagerTemporal) else net
    return {name: m for name, m in net.named_modules() if isinstance(m, EagerNeuron)}


#: By class, for `isinstance`: what takes the place of a module and is made of it.
_REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    Surrogate: Comparison,
    Neuron: EagerNeuron,
    Block: EagerBlock,
    Temporal: EagerTemporal,
}
#: The classes of torch.nn that compute the same.
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    fused: plain for plain, fused in FUSED.items()
} | {MaxPool2d: nn.MaxPool2d}


def _check(name: str, module: nn.Module) -> None:
    """Refuse modules that have no equivalent in plain operators."""
    where = f"'{name}' is a {type(module).__name__}"
    if isinstance(module, EventLinear):
        raise TypeError(
            f"{where}, whose lists of events have no plain operators: use nn.Linear, into which "
            "its state dict loads, and the neuron"
        )
    if isinstance(module, Recurrent | Feedback):
        raise TypeError(
            f"{where}, whose feedback is not exported: train it, and export a network that adds "
            "what the last spikes cause to the input of its neuron in a loop of your own"
        )
    if is_compiled(module):
        raise TypeError(f"{where}, which is compiled: pass the network as it was before")
    if isinstance(module, Temporal) and module.passing is not None:
        raise ValueError(f"{where} whose time is sharded: pass a network that is not")
    for kind in _REPLACEMENTS:
        if isinstance(module, kind) and type(module).forward is not kind.forward:
            raise TypeError(
                f"{where}, whose own forward would be lost: move it to a module around a "
                f"{kind.__name__}"
            )


def _remove_hook(module: nn.Module, hook: Any) -> None:
    for key in [k for k, value in module._forward_pre_hooks.items() if value is hook]:
        del module._forward_pre_hooks[key]


def _replace(module: nn.Module, replacement: Any) -> None:
    """Turn `module` into `replacement(module)` in place, with its hooks."""
    original = object.__new__(type(module))
    object.__setattr__(original, "__dict__", module.__dict__)
    made = replacement(original)
    hooks = {key: value for key, value in vars(original).items() if "hooks" in key}
    object.__setattr__(module, "__dict__", vars(made) | {"training": False} | hooks)
    module.__class__ = replacement
