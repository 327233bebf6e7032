"""The container that runs a network written for one time step over a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spikefuse.kernels.events import Events
from spikefuse.neurons.definition import States
from spikefuse.nn import constant
from spikefuse.nn.neuron import IMPLEMENTATIONS, Neuron, Sequence, calls


class Temporal(nn.Module):
    """Run `net`, written for one time step, over `[T, B, ...]`.

    Time is folded into the batch for stateless layers, so each layer runs once per call on
    `[T*B, ...]`; the neurons inside are told T. Normalisation layers see all time steps at once
    (their statistics run over T and B), and dropout draws anew at each step.

    An input that is the same at each step (its time has stride 0, as from `encode.direct`) and
    needs no gradient goes through the layers before the first neuron once, as `[B, ...]`. The
    result is the same up to rounding, running statistics included. It takes a network that
    torch.fx can trace, in which these layers are ordinary, not random, and have no forward hooks,
    and in which what they give reaches the rest through neurons only; else they run T times.

    Call: `Temporal(net)(x, state=None, return_state=False, impl="auto")`

    Args:
        x: input `[T, B, ...]`, or `Events` of T steps and B samples for a network that begins with
            an `EventLinear`.
        state: the state that an earlier call returned, or None to start from rest.
        return_state: also return the final state, a dict from each neuron's name in `net` to its
            tuple of states; passed as `state=` to the next call, it continues the sequence.
        impl: how neurons are computed; see `Neuron`.

    Returns:
        The network's output with dim 0 unfolded to `[T, B, ...]` (any nesting of tensors), and
        with `return_state` a pair (output, state).

    Raises:
        TypeError, ValueError: wrong shapes, or states that do not belong to this network.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"net is a {type(net).__name__}: expected a torch.nn.Module")
        if any(isinstance(m, Temporal) for m in net.modules()):
            raise ValueError("a Temporal inside a Temporal: wrap the outermost network only")
        self.net = net
        self._plan: constant.Plan | None = None

    def neurons(self) -> dict[str, Neuron]:
        """The neurons inside, by their qualified name in `net`."""
        return {name: m for name, m in self.net.named_modules() if isinstance(m, Neuron)}

    def forward(
        self,
        x: Tensor | Events,
        state: dict[str, States] | None = None,
        return_state: bool = False,
        impl: str = "auto",
    ) -> Any:
        neurons = self.neurons()
        self._check(x, state, impl, neurons)
        num_steps, batch = x.shape[:2]
        names = {id(neuron): name for name, neuron in neurons.items()}
        sequence = Sequence(num_steps, names, impl, state, return_state)
        plan = None if isinstance(x, Events) else self._sharing(x)
        outer, calls.sequence = calls.sequence, sequence
        try:
            if isinstance(x, Events):
                folded = self.net(x)
            elif plan is None:
                folded = self.net(x.flatten(0, 1))
            else:
                sequence.constant_rows = batch
                with constant.same_statistics(plan, sequence):
                    folded = self.net(x[0])
        finally:
            calls.sequence = outer

        def unfold(y: Tensor) -> Tensor:
            if y.ndim == 0 or y.shape[0] != num_steps * batch:
                raise ValueError(
                    f"the network returned shape {list(y.shape)}: expected dim 0 to be "
                    f"T*B = {num_steps}*{batch}; a layer has mixed the batch with other dims"
                )
            return y.unflatten(0, (num_steps, batch))

        output = pytree.tree_map_only(torch.Tensor, unfold, folded)
        return (output, sequence.final) if return_state else output

    def _sharing(self, x: Tensor) -> constant.Plan | None:
        """The plan to compute once what does not change over time, if that is possible."""
        # nn.DataParallel makes the network anew for every call.
        if not constant.is_constant(x) or getattr(self.net, "_is_replica", False):
            return None
        modules, plan = tuple(self.net.modules()), self._plan
        if plan is None or not plan.fits(modules):
            plan = self._plan = constant.make_plan(self.net, modules)
        return plan if constant.can_share(plan, x.shape[1]) else None

    def _check(
        self,
        x: Tensor | Events,
        state: dict[str, States] | None,
        impl: str,
        neurons: dict[str, Neuron],
    ) -> None:
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl is {impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
        if not isinstance(x, Tensor | Events):
            raise TypeError(f"the input is a {type(x).__name__}: expected a tensor [T, B, ...]")
        if len(x.shape) < 2 or x.shape[0] == 0:
            raise ValueError(
                f"the input has shape {list(x.shape)}: expected [T, B, ...] with T >= 1; for a "
                "single step use x.unsqueeze(0)"
            )
        if state is not None and not isinstance(state, dict):
            raise TypeError(f"state is a {type(state).__name__}: expected a dict, as returned")
        if state is not None and state.keys() != neurons.keys():
            raise ValueError(
                f"state has entries for ({', '.join(state)}), the network has neurons "
                f"({', '.join(neurons)}): pass what return_state=True returned"
            )
