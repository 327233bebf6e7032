"""The container that runs a network written for one time step over a sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spikefuse.events.format import Events
from spikefuse.memory import checkpoint
from spikefuse.memory import spikes as kept
from spikefuse.memory.policies import Auto, Checkpoint, Policy, Recompute
from spikefuse.memory.segments import Segments
from spikefuse.neurons.definition import States
from spikefuse.nn import constant_input as constant
from spikefuse.nn.neuron import IMPLEMENTATIONS, Neuron, Sequence, calls
from spikefuse.nn.shard import Shard


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
        # What a budget has led to, by the description of a call.
        self._chosen: dict[Hashable, tuple[Policy, dict[str, Policy]]] = {}
        # The steps that other processes hold: see `spikefuse.distributed.shard_time`.
        self.shard: Shard | None = None
        self._plan: constant.Plan | None = None
        self._segments: Segments | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy may get another network, and measures anew.
        return {**self.__dict__, "_chosen": {}}

    def neurons(self) -> dict[str, Neuron]:
        """The neurons inside, by their qualified name in `net`."""
        if torch.compiler.is_compiling():
            return {name: m for name, m in self.net.named_modules() if isinstance(m, Neuron)}
        found = {"": self.net} if isinstance(self.net, Neuron) else {}
        _find_neurons(self.net, "", {self.net}, found)
        return found

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
        sequence = Sequence(num_steps, names, impl, state, return_state, relay=self.shard)
        if self.shard is not None:
            if isinstance(x, Events):
                raise ValueError("x is Events: the time of a network on events can't be shared")
            self._begin(self.shard, x, state, impl)
        plan = None if isinstance(x, Events) else self._sharing(x)
        outer, calls.sequence = calls.sequence, sequence
        try:
            with self._keeping(x, sequence):
                if isinstance(x, Events):
                    folded = self.net(x)
                elif plan is None:
                    folded = self._run(x.flatten(0, 1), sequence)
                else:
                    sequence.constant_rows = batch
                    with self._repeated(plan, sequence):
                        folded = self._run(x[0], sequence)
                if sequence.deferred is not None:
                    sequence.deferred.finish()
        finally:
            calls.sequence = outer
        if self.shard is not None:
            self.shard.end()

        def unfold(y: Tensor) -> Tensor:
            if y.ndim == 0 or y.shape[0] != num_steps * batch:
                raise ValueError(
                    f"the network returned shape {list(y.shape)}: expected dim 0 to be "
                    f"T*B = {num_steps}*{batch}; a layer has mixed the batch with other dims"
                )
            return y.unflatten(0, (num_steps, batch))

        output = pytree.tree_map_only(torch.Tensor, unfold, folded)
        return (output, sequence.final) if return_state else output

    def _run(self, x: Tensor, sequence: Sequence) -> Any:
        """The network on a folded input."""
        policy = self.memory
        if not isinstance(policy, Checkpoint) or not checkpoint.applies(self.net, x, sequence.impl):
            return self.net(x)
        if self._segments is None or not self._segments.fits(self.net):
            self._segments = Segments(self.net)
        return checkpoint.run(self._segments, policy, sequence, x)

    @contextlib.contextmanager
    def _keeping(self, x: Tensor | Events, sequence: Sequence) -> Iterator[None]:
        """Inside, the network keeps what its policy says."""
        memory = self.memory
        if not isinstance(memory, Auto):
            sequence.memory = memory
            with kept.keeping(memory) as sequence.spikes:
                yield
        elif torch.compiler.is_compiling():
            yield
        else:
            with self._measuring(memory, x, sequence) as policy, kept.keeping(policy) as spikes:
                sequence.memory, sequence.spikes = policy, spikes
                yield

    @contextlib.contextmanager
    def _measuring(self, auto: Auto, x: Tensor | Events, sequence: Sequence) -> Iterator[Policy]:
        """The policy that a budget has led to; it is measured inside if there is none yet."""
        call = auto, *_described(x), sequence.impl, self.training
        if call in self._chosen or not kept.can_measure():
            policy, sequence.memory_of = self._chosen.get(call, (Recompute(), {}))
            yield policy
            return
        ledger = kept.Ledger()
        with ledger.hooks():
            yield Recompute()
        own = {y.untyped_storage().data_ptr() for y in (*self.parameters(), *self.buffers())}
        num_bytes = sum(size.now for size in ledger.sizes(own))
        packed = {} if sequence.spikes is None else sequence.spikes.saved
        self._chosen[call] = auto.choose(num_bytes, sequence.rebuilt, packed)

    def _begin(self, shard: Shard, x: Tensor, state: dict[str, States] | None, impl: str) -> None:
        if impl == "reference":
            raise ValueError(
                'impl is "reference", whose loop has all steps in one process: choose "auto" for a '
                "network whose time is sharded"
            )
        if state is not None and not shard.is_first:
            raise ValueError(
                "state is given to a rank that does not hold the first step: pass it to rank 0, as "
                "spikefuse.distributed.carry_state does"
            )
        mode = "training" if self.training else "evaluation"
        gradients = "with" if torch.is_grad_enabled() else "without"
        wanted = ", x requires grad" if x.requires_grad else ""
        kept = f", {self.memory}" if isinstance(self.memory, Checkpoint) else ""
        shard.begin(x, f"{type(self.net).__name__} in {mode} {gradients} gradients{wanted}{kept}")

    def _repeated(
        self, plan: constant.Plan, sequence: Sequence
    ) -> contextlib.AbstractContextManager[None]:
        """For a call in which rows stand for all steps."""
        if sequence.relay is not None and sequence.relay.exact_statistics:
            return contextlib.nullcontext()  # batch norms count the steps themselves
        return constant.same_statistics(plan, sequence)

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
        if isinstance(x, Events) and isinstance(self.memory, Checkpoint):
            raise ValueError("memory=Checkpoint() takes no Events: use another policy")
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


def _find_neurons(
    module: nn.Module, prefix: str, seen: set[nn.Module], found: dict[str, Neuron]
) -> None:
    """Fill `found` as `named_modules` would, in a fraction of its time."""
    for name, child in module._modules.items():
        if child is None or child in seen:
            continue
        seen.add(child)
        if isinstance(child, Neuron):
            found[prefix + name] = child
        if child._modules:
            _find_neurons(child, f"{prefix}{name}.", seen, found)


def _described(x: Tensor | Events) -> tuple[Hashable, ...]:
    """What decides how much a network keeps when it is called with `x`, but for its events."""
    device = x.device.type
    amp = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if isinstance(x, Events):
        return x.shape, x.device, x.values is None, amp
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, amp
