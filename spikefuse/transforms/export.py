"""A network in plain PyTorch operators, for torch.export, ONNX and torch.jit.trace."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import TracerWarning  # type: ignore[attr-defined]

from spikefuse._torch import is_compiled
from spikefuse.block.block import Block
from spikefuse.events.linear import EventLinear
from spikefuse.graph.fuse import run_fused
from spikefuse.neurons.definition import Neuron, States, first_states
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.nesting import map_tensors
from spikefuse.nn.neuron import check_module
from spikefuse.nn.recurrent import Recurrent
from spikefuse.nn.temporal import Temporal, layers_with_states
from spikefuse.transforms.copies import copied
from spikefuse.transforms.quantize import store_integers


def exportable(net: nn.Module, step: bool = False) -> nn.Module:
    """Return a copy of `net` in evaluation mode that consists of plain PyTorch operators.

    The copy computes what `net` computes in evaluation mode, with neurons as loops over time
    (`impl="reference"`), batch norms and poolings as those of `torch.nn`, and spikes as comparisons
    without a gradient. `torch.export`, `torch.onnx.export` and `torch.jit.trace` take it.

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(784, 128), sf.LIF(), nn.Linear(128, 10)))
        program = torch.export.export(sf.exportable(net), (torch.rand(8, 1, 784),))

    T, the number of time steps, is that of the example input; the batch size may be dynamic. On a
    CPU, float32 outputs equal those of `net` bit for bit, except for the rounding of fused batch
    norms (docs/fusing.md), of layers before the first neuron if their input is constant over time,
    as from `encode.direct`, and of matrix products, which may depend on the alignment of memory.
    The weights of `sf.quantize` are stored as int8, with a step for each output.

    Args:
        net: a `Temporal`, or any module that contains `Temporal` containers or neurons.
        step: return a module that computes one time step with explicit states:
            `forward(x, *states) -> (y, *new_states)`, with `x` and `y` `[B, ...]`. It is that of
            the `Temporal` in `net`, which has one input, without what is around it.

    Returns:
        An `nn.Module` that is independent of `net` and called like it; with `step` an
        `ExportedStep`.

    Raises:
        TypeError: `net` is not a module, has no `Temporal` or several with `step`, or has a layer
            without an equivalent in plain operators: an `EventLinear` or a compiled module.
        ValueError: the time of `net` is sharded.
    """
    check_module("net", net)
    if step:
        net = _container(net)
    for name, module in net.named_modules():
        _check(name, module)
    result = copied(net).eval().requires_grad_(False)
    store_integers(result)
    inside = {m for t in result.modules() if isinstance(t, Temporal) for m in t.net.modules()}
    for name, module in result.named_modules():
        if getattr(vars(module).get("forward"), "func", None) is run_fused:
            del module.forward
        if not isinstance(module, Temporal | Neuron | Recurrent | Feedback | Block):
            continue
        if "impl" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(_use_reference, with_kwargs=True)
        elif module not in inside:
            raise TypeError(
                f"'{name}' is a {type(module).__name__}, whose own forward takes no impl: add the "
                "argument, and pass it on to the forward of its base class"
            )
    if isinstance(result, Temporal):
        result = ExportedStep(result) if step else ExportedTemporal(result)
    return result.eval()


def _container(net: nn.Module) -> Temporal:
    """Return the only `Temporal` in `net`."""
    found = [module for module in net.modules() if isinstance(module, Temporal)]
    if len(found) != 1:
        raise TypeError(
            f"net is a {type(net).__name__} with {len(found)} Temporal containers: expected a "
            "Temporal, or a module with one, with step=True"
        )
    return found[0]


class ExportedTemporal(nn.Module):
    """A `Temporal` whose first input has a name, for the `dynamic_shapes` of torch.export."""

    def __init__(self, net: Temporal) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any, *others: Any, **kwargs: Any) -> Any:
        return self.net(x, *others, **kwargs)


class ExportedStep(nn.Module):
    """One time step of a network, made by `exportable(net, step=True)`.

    Call: `y, *new_states = step(x, *states)`, without states from rest.

    Shapes: `x`, `y`: `[B, ...]`; states: `[B, ...]`, float32.

    Attributes:
        state_names: the names of the states in their order, such as "net.2.v" for the state `v` of
            the neuron `net.2` of the `Temporal`.
        input_names, output_names: those of the arguments and of the results of a network with a
            single output, "output" and "next.net.2.v", for `torch.onnx.export`.

    Raises:
        TypeError: the number of states is wrong.
        ValueError: a layer is called twice, or not at all, in one step.
    """

    def __init__(self, net: Temporal) -> None:
        super().__init__()
        self.net, self._dim = net, int(net.batch_first)
        fed_back = [m.neuron for m in net.modules() if isinstance(m, Recurrent | Feedback)]
        #: The names of the states by layer.
        self._states: dict[str, list[str]] = {}
        for name, layer in layers_with_states(net.net).items():
            is_fed_back = any(layer is other for other in fed_back)
            own = layer.states if isinstance(layer, Neuron) else layer.state_names
            self._states[name] = [*own, *(["spikes"] if is_fed_back else [])]
        self.state_names = tuple(f"{n}.{s}" for n, names in self._states.items() for s in names)
        self.input_names = ("x", *self.state_names)
        self.output_names = ("output", *(f"next.{name}" for name in self.state_names))

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Any, ...]:
        state = None
        if states:
            if len(states) != len(self.state_names):
                raise TypeError(
                    f"{len(states)} states are given: expected {len(self.state_names)} "
                    f"({', '.join(self.state_names)}), or none to start from rest"
                )
            given = iter(states)
            state = {n: tuple(next(given) for _ in v) for n, v in self._states.items()}
        y, finals = self.net(x.unsqueeze(self._dim), state=state, return_state=True)
        for name, names in self._states.items():
            if len(finals[name]) != len(names):
                raise ValueError(
                    f"layer '{name}' is not called, so it has no next state: remove it"
                )
        y = map_tensors(lambda t: t.squeeze(self._dim), y)
        return y, *(s for name in self._states for s in finals[name])

    @torch.no_grad()
    def initial_states(self, x: Tensor) -> States:
        """Return the states at rest for inputs of the shape of `x`, to export the step with."""
        _, *states = self(x)
        finals, neurons = iter(states), self.net.neurons()
        found: list[Tensor] = []
        for name, names in self._states.items():
            own, neuron = [next(finals) for _ in names], neurons.get(name)
            first: States = ()
            if neuron is not None and neuron.states:
                first = first_states(neuron, neuron.values(), own[0])
            found += [*first, *map(torch.zeros_like, own[len(first) :])]
        return tuple(found)


def _use_reference(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of what takes `impl`."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        if torch.onnx.is_in_onnx_export():
            raise NotImplementedError("torch.onnx.export without dynamo=True fixes the batch size")
        # As PyTorch does for its own layers: they check the shapes of the example.
        warnings.filterwarnings("ignore", "", TracerWarning, "spikefuse")
    return args, {**kwargs, "impl": "reference"}


def _check(name: str, module: nn.Module) -> None:
    """Refuse modules that have no equivalent in plain operators."""
    where = f"'{name}' is a {type(module).__name__}"
    if isinstance(module, EventLinear):
        raise TypeError(
            f"{where}, whose lists of events have no plain operators: use nn.Linear, into which "
            "its state dict loads, and the neuron"
        )
    if isinstance(module, torch.jit.ScriptModule) or is_compiled(module):
        raise TypeError(f"{where}, which is compiled: pass the network as it was before")
    if isinstance(module, Temporal) and module.passing is not None:
        raise ValueError(f"{where} whose time is sharded: pass a network that is not")
