"""The `Temporal` call that is running in this thread, with what its neurons need."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from spikefuse._torch import top_saved_tensors_hooks
from spikefuse.memory.policies import Policy, Recompute
from spikefuse.memory.spikes import MIN_VALUES, RecordingHook, Spikes, unpack
from spikefuse.neurons.checks import is_plain
from spikefuse.neurons.definition import Neuron, States
from spikefuse.scan.layout import unflatten_steps
from spikefuse.scan.records import Arguments, Results, Wanted
from spikefuse.scan.state_passing import StatePassing

#: Runs a neuron, alone or as part of a block.
Scan = Callable[[Arguments[Tensor], Wanted], Results[Tensor]]

_DEFAULT = Recompute()


@dataclass
class TemporalCall:
    """One call of a `Temporal`, or a step of a `Stream` or a `Loop`; see `active`.

    Attributes:
        num_steps: T.
        names: of the layers with states, by id.
        batch: B.
        initial: the initial states by name, None to start from rest.
        final: whether layers return their final states, which go to `finals` by name.
        passing: where first states come from if other processes hold the steps before and after.
        network: that is called.
        modules: of the network that is called, itself first; empty if they are not known.
        policy: what layers save for backward; None for `Recompute()`.
        repeats: how many such calls a `Loop` makes.
        called: the converted neurons that have run, see `refuse_second_call`; a copy by `replace`
            begins with none.
    """

    num_steps: int
    names: dict[int, str]
    batch: int = 1
    impl: str = "auto"
    initial: dict[str, States] | None = None
    final: bool = False
    passing: StatePassing | None = None
    finals: dict[str, States] = field(default_factory=dict)
    network: nn.Module | None = None
    modules: Sequence[nn.Module] = ()
    policy: Policy | None = None
    repeats: int = 1
    called: set[nn.Module] = field(default_factory=set, init=False)

    @property
    def has_states(self) -> bool:
        """Whether states are passed in or returned."""
        return self.final or self.initial is not None

    def refuse_rows(self, neuron: nn.Module, inputs: Sequence[Tensor]) -> None:
        """Raise a ValueError if `neuron`, which is not in the network, would read all rows of the
        call as time steps."""
        x = inputs[0] if inputs else None
        rows = self.num_steps * self.batch
        if self.batch > 1 and isinstance(x, Tensor) and x.ndim and x.shape[0] == rows:
            raise ValueError(
                f"{type(neuron).__name__} received shape {list(x.shape)} inside Temporal, whose "
                f"T*B = {rows} rows it would read as time steps, because it is not a submodule of "
                "the network: make it an attribute of a module, and use nn.ModuleList in place of "
                "a list"
            )

    def name_of(self, layer: nn.Module) -> str:
        """The name of a layer with a state.

        Raises:
            ValueError: it is not in the network, or was called before.
        """
        name = self.names.get(id(layer))
        if name is None:
            raise ValueError(
                f"{type(layer).__name__} has a state, but is not a submodule of the network: make "
                "it an attribute of a module, and use nn.ModuleList in place of a list"
            )
        if name in self.finals:
            raise ValueError(
                f"layer '{name}' is called twice in one step, so its state is ambiguous: "
                "use one module per call"
            )
        return name

    def unfolded(
        self, neuron: nn.Module, arguments: Arguments[Tensor], wanted: Wanted
    ) -> tuple[Arguments[Tensor], Wanted]:
        """What the scan of `neuron` gets, from folded inputs, and what is wanted of it.

        Raises:
            ValueError: the neuron cannot be run on these inputs inside this call.
        """
        if arguments.states is not None or wanted.final:
            raise ValueError("inside Temporal, pass state= and return_state= to the container")
        steps, name = self.num_steps, self.names[id(neuron)]
        if name in self.finals:
            self.name_of(neuron)  # raises the error
        inputs = []
        for x in arguments.inputs:
            if x.ndim == 0 or x.shape[0] % steps:
                raise ValueError(
                    f"neuron '{name}' received shape {list(x.shape)} inside Temporal: "
                    f"expected [T*B, ...] with T = {steps}"
                )
            inputs.append(unflatten_steps(x, steps))
        state = None if self.initial is None else self.initial.get(name) or None
        # A captured scan looks up the state passing when it runs.
        is_captured = active.captures and not is_plain(inputs)
        passing = None if is_captured else self.passing
        wanted = Wanted(self.final, outputs=wanted.outputs, impl=self.impl)
        return Arguments(inputs, state, passing=passing), wanted


class Observer:
    """Observes every scan of a thread, see `observing`; the base class changes nothing.

    Attributes:
        outer: the observer around this one, which sees the same.
        keeps_graph: whether it hands out what it sees with the graph, for a loss on it.
        cuts_graph: whether it cuts the graph, so that backward cannot compute a part again.
    """

    outer: Observer | None = None
    keeps_graph: bool = False
    cuts_graph: bool = False

    def scan(
        self, neuron: nn.Module, scan: Scan, arguments: Arguments[Tensor], wanted: Wanted
    ) -> Results[Tensor]:
        """Run `scan`, of `neuron` or of its block, and return its results."""
        if self.outer is None:
            return scan(arguments, wanted)
        return self.outer.scan(neuron, scan, arguments, wanted)

    def pool(self, x: Tensor, y: Tensor) -> None:
        """See a max pooling of `x` by our kernels, which saves less than PyTorch's."""
        if self.outer is not None:
            self.outer.pool(x, y)

    def network(
        self,
        function: Callable[..., Any],
        net: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run `function(net, args, kwargs)`, which without an observer would run as a fused
        graph."""
        return function(net, args, kwargs)


class _Active(threading.local):
    """The innermost Temporal call of each thread, and its observer."""

    def __init__(self) -> None:
        # An attribute of the instance from the start: torch.compile guards on its presence.
        self.call: TemporalCall | None = None
        self.observer: Observer | None = None
        #: Whether the graph of the network is captured, with passes of this library.
        self.captures = False
        #: Where neurons register binary outputs, None if layers save spikes as they are.
        self.spikes: Spikes | None = None
        #: By neuron of a converted network that takes sequences, whether it has run in its call.
        self.called: dict[nn.Module, bool] = {}


active = _Active()


def refuse_second_call(neuron: Neuron) -> None:
    """Raise a ValueError if a neuron that `convert` has made has run before in this call of its
    network. Reading the code, `convert` finds the plain loops over time only."""
    is_second = False
    if neuron in active.called:
        is_second, active.called[neuron] = active.called[neuron], True
    elif active.call is not None:
        is_second = neuron in active.call.called
        active.call.called.add(neuron)
    if is_second:
        raise ValueError(
            f"{neuron._converted_from} is called a second time in one call of the network. In the "
            "library that it was converted from, its state goes on from call to call, but here "
            "each call starts from rest: write forward for one time step, without a loop over "
            "time, and use a module for each call"
        )


@contextlib.contextmanager
def inside(call: TemporalCall | None, packs_spikes: bool = False) -> Iterator[None]:
    """Make layers belong to `call` in a `with` block; None for no call.

    Args:
        packs_spikes: whether layers save spikes as bits. They do not without gradients, where
            saved-tensor hooks are disabled, and under hooks other than a `RecordingHook`: those
            hooks would no longer see the tensors, and the hooks of torch.utils.checkpoint save
            nothing at all.
    """
    outer_call, outer_spikes = active.call, active.spikes
    active.call = call
    spikes = None
    hooks: contextlib.AbstractContextManager[Any] | None = None
    if packs_spikes and torch.is_grad_enabled():
        # Not in a function of its own, which TorchDynamo would trace, unlike a generator.
        top = top_saved_tensors_hooks(False)
        if top is None:
            spikes = Spikes()
            hooks = saved_tensors_hooks(spikes.pack, unpack)
        elif isinstance(top[0], RecordingHook):
            spikes = Spikes()
            hooks = top[0].around(spikes.pack)
    try:
        if hooks is not None:
            hooks.__enter__()
    except RuntimeError:  # hooks are disabled
        spikes, hooks = None, None
    if packs_spikes:
        active.spikes = spikes
    try:
        yield
    finally:
        active.call, active.spikes = outer_call, outer_spikes
        if hooks is not None:
            hooks.__exit__(None, None, None)
        if spikes is not None:  # the graph holds a reference to the hooks
            spikes.registered.clear()


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let `observer` run every scan of this thread in a `with` block."""
    observer.outer, active.observer = active.observer, observer
    try:
        yield
    finally:
        active.observer = observer.outer


def current_policy() -> Policy:
    """What layers save for backward in the running call."""
    policy = None if active.call is None else active.call.policy
    return policy or _DEFAULT


def wants_bits(x: Tensor) -> bool:
    """Whether the binary outputs of a neuron that reads `x` should be returned as bits, too."""
    return active.spikes is not None and x.numel() >= MIN_VALUES


def mark_binary(results: Results[Tensor]) -> None:
    """Register binary outputs, so that layers save them as bits."""
    assert active.spikes is not None
    for y, bits in zip_longest(compress(results.outputs, results.binary), results.bits):
        active.spikes.register(y, bits)
