"""The container that runs a network written for one time step over a sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spikefuse.memory.policies import Auto, Policy, Recompute
from spikefuse.memory.saved_tensors import SavedTensors, can_measure
from spikefuse.memory.spikes import saving
from spikefuse.neurons.definition import States
from spikefuse.nn.call import Saving, TemporalCall, active
from spikefuse.nn.constant_input import fold
from spikefuse.nn.neuron import IMPLEMENTATIONS, Neuron
from spikefuse.scan.layout import flatten_steps
from spikefuse.scan.state_passing import StatePassing


class SparseSequence(Protocol):
    """A sequence of T steps and B samples in a format of its own, such as `spikefuse.nn.Events`.

    `Temporal` passes it to its network unchanged; its layers know the format.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(T, B, ...)."""
        ...

    @property
    def device(self) -> torch.device: ...

    def sequence_signature(self) -> tuple[Hashable, ...]:
        """Return what determines the memory saved for backward, except for the data."""
        ...


class Temporal(nn.Module):
    """Run `net`, written for one time step, over `[T, B, ...]`.

    Time is folded into the batch for stateless layers, so each layer runs once per call on
    `[T*B, ...]`; the neurons inside are told T. Normalisation layers see all time steps at once
    (their statistics run over T and B), and dropout draws anew at each step.

    An input that is the same at each step (its time has stride 0, as from `encode.direct`) and
    needs no gradient goes through deterministic layers before the first neuron once, as `[B, ...]`.
    The result is the same up to rounding, running statistics included. The first operation that is
    random, mixes samples, or is unknown (see `spikefuse.nn.constant_input`), and all that follow,
    run on `[T*B, ...]`. Forward hooks and the code of the network see tensors `[T*B, ...]`.

    Args:
        net: the network.
        memory: what is kept for backward, a policy of `spikefuse.memory`; None for `Recompute()`,
            "auto" for `Auto(budget)`.
        budget: in GB, with "auto".

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

    def __init__(
        self,
        net: nn.Module,
        memory: Policy | Auto | str | None = None,
        budget: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"net is a {type(net).__name__}: expected a torch.nn.Module")
        if any(isinstance(m, Temporal) for m in net.modules()):
            raise ValueError("a Temporal inside a Temporal: wrap the outermost network only")
        if (memory == "auto") != (budget is not None):
            raise ValueError(
                f"memory is {memory!r} and budget {budget!r}: expected a budget in GB with "
                'memory="auto", and with nothing else'
            )
        chosen = Recompute() if memory is None else memory
        if budget is not None:
            chosen = Auto(budget)
        if not isinstance(chosen, Policy | Auto):
            raise TypeError(
                f"memory is {memory!r}: expected None, or a policy of spikefuse.memory: SaveAll(), "
                'Recompute(), Bits(), Checkpoint(), or Auto(budget), for which "auto" stands'
            )
        self.net = net
        self.memory: Policy | Auto = chosen
        # What policies keep between calls, such as the choices for a budget.
        self._cache: dict[Any, Any] = {}
        #: Connects the neurons to processes that hold other steps of a sequence.
        self.passing: StatePassing | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy may get another network, and measures anew.
        return {**self.__dict__, "_cache": {}}

    @property
    def _recomputes(self) -> bool:
        return isinstance(self.memory, Policy) and self.memory.recomputes_network

    def neurons(self) -> dict[str, Neuron]:
        """The neurons inside, by their qualified name in `net`."""
        if torch.compiler.is_compiling():
            return {name: m for name, m in self.net.named_modules() if isinstance(m, Neuron)}
        # In the order of `named_modules`, in a fraction of its time.
        found: dict[str, Neuron] = {}
        seen: set[nn.Module] = set()
        left: list[tuple[str, nn.Module]] = [("", self.net)]
        while left:
            name, module = left.pop()
            if module in seen:
                continue
            seen.add(module)
            if isinstance(module, Neuron):
                found[name] = module
            for key, child in reversed(module._modules.items()):
                if child is not None:
                    left.append((f"{name}.{key}" if name else key, child))
        return found

    def forward(
        self,
        x: Tensor | SparseSequence,
        state: dict[str, States] | None = None,
        return_state: bool = False,
        impl: str = "auto",
    ) -> Any:
        neurons = self.neurons()
        self._check(x, state, impl, neurons)
        num_steps, batch = x.shape[:2]
        names = dict(zip(map(id, neurons.values()), neurons, strict=True))
        call = TemporalCall(num_steps, names, impl, state, return_state, cache=self._cache)
        call.passing = self.passing
        if call.passing is not None:
            self._begin(call.passing, x, call)
        outer, active.call = active.call, call
        try:
            with self._saving(x, call):
                if not isinstance(x, Tensor):
                    folded = self.net(x)
                else:
                    rows = fold(x, self.net) if x.stride(0) == 0 else flatten_steps(x)
                    run = call.policy.run
                    folded = self.net(rows) if run is None else run(self.net, call, rows)
                if call.deferred is not None:
                    call.deferred.finish()
        finally:
            active.call = outer
            if call.deferred is not None:
                call.deferred.close()
            if call.spikes is not None:
                call.spikes.clear()
        if call.passing is not None:
            call.passing.end()

        def unfold(y: Tensor) -> Tensor:
            if y.ndim == 0 or y.shape[0] != num_steps * batch:
                raise ValueError(
                    f"the network returned shape {list(y.shape)}: expected dim 0 to be "
                    f"T*B = {num_steps}*{batch}; a layer has mixed the batch with other dims"
                )
            return y.unflatten(0, (num_steps, batch))

        output = pytree.tree_map_only(torch.Tensor, unfold, folded)
        return (output, call.finals) if return_state else output

    def _saving(
        self, x: Tensor | SparseSequence, call: TemporalCall
    ) -> contextlib.AbstractContextManager[Any]:
        """Decide what layers save in this call; return the hooks that save it."""
        if torch.compiler.is_compiling():
            return contextlib.nullcontext()
        if isinstance(self.memory, Auto):
            return self._within_budget(self.memory, x, call)
        spikes, hooks = saving(self.memory)
        call.saving = Saving(self.memory, {}, spikes)
        return hooks

    @contextlib.contextmanager
    def _within_budget(
        self, auto: Auto, x: Tensor | SparseSequence, call: TemporalCall
    ) -> Iterator[None]:
        """Save what a budget allows; the first call measures it."""
        description = auto, *_described(x), call.impl, self.training
        is_known = description in self._cache or not can_measure()
        policy, policies = self._cache.get(description, (Recompute(), {}))
        saved = SavedTensors()
        with contextlib.nullcontext() if is_known else saved.hooks():
            spikes, hooks = saving(policy)
            call.saving = Saving(policy, policies, spikes)
            with hooks:
                yield
        if not is_known:
            own = {y.untyped_storage().data_ptr() for y in (*self.parameters(), *self.buffers())}
            num_bytes = sum(size.now for size in saved.sizes(own))
            packed = {} if spikes is None else spikes.reductions
            self._cache[description] = auto.choose(num_bytes, call.saving.recomputed, packed)

    def _begin(self, passing: StatePassing, x: Tensor | SparseSequence, call: TemporalCall) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(
                f"x is {type(x).__name__}: the time of a network on events cannot be sharded"
            )
        if call.impl == "reference":
            raise ValueError(
                'impl is "reference", whose loop has all steps in one process: choose "auto" for a '
                "network whose time is sharded"
            )
        mode = "training" if self.training else "evaluation"
        gradients = "with" if torch.is_grad_enabled() else "without"
        wanted = ", x requires grad" if x.requires_grad else ""
        memory = f", {self.memory}" if self._recomputes else ""
        about = f"{type(self.net).__name__} in {mode} {gradients} gradients{wanted}{memory}"
        passing.begin(x, about, call.initial is not None)

    def _check(
        self,
        x: Tensor | SparseSequence,
        state: dict[str, States] | None,
        impl: str,
        neurons: dict[str, Neuron],
    ) -> None:
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl is {impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
        if not isinstance(x, Tensor) and not hasattr(x, "sequence_signature"):
            raise TypeError(f"the input is a {type(x).__name__}: expected a tensor [T, B, ...]")
        if not isinstance(x, Tensor) and self._recomputes:
            name = type(x).__name__
            raise ValueError(f"memory=Checkpoint() takes no {name}: use another policy")
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


def _described(x: Tensor | SparseSequence) -> tuple[Hashable, ...]:
    """What decides how much a network keeps when it is called with `x`, but for its events."""
    device = x.device.type
    amp = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if not isinstance(x, Tensor):
        return *x.sequence_signature(), amp
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, amp
