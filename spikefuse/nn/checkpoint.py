"""Recompute parts of a network in backward instead of saving what they save."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from spikefuse._torch import is_traced
from spikefuse.nn.call import active, inside
from spikefuse.nn.nesting import flatten, unflatten
from spikefuse.scan.state_passing import Buffers, Channel, Collectives, StatePassing

T = TypeVar("T")


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)`, and call it a second time in backward instead of saving
    what its layers save.

    Use it in place of `torch.utils.checkpoint.checkpoint` for parts of a network that contain
    neurons, or layers that see several time steps. Inside `Temporal` the second call is a part of
    the same call of the network: neurons get the same number of steps, initial states and
    implementation, and states from other processes are not sent twice. Running statistics of batch
    norms are updated once. Only the tensors among the arguments are saved, spikes as bits. While
    `graph_step` records a CUDA graph, and in a call of `Online` whose rule is not "bptt", layers
    save what they usually do.

    Example::

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(128, 128), sf.LIF())

            def forward(self, x):
                return x + sf.checkpoint(self.layers, x)

        sf.Temporal(Block())(torch.rand(8, 32, 128)).sum().backward()

    Args:
        function: a module, or a function of tensors.
        args, kwargs: its arguments, in any nesting of tuples, lists and dicts. The function must
            not change them in place. Parameters and attributes must not change before backward,
            which computes with their values at that time.

    Returns:
        What the function returns.
    """
    values, structure = flatten((args, kwargs))

    def first(*values: Any) -> Any:
        args, kwargs = unflatten(values, structure)
        return function(*args, **kwargs)

    def second(*values: Any) -> None:
        args, kwargs = unflatten(values, structure)
        with _frozen(_modules_of(function, values)):
            function(*args, **kwargs)

    return recompute(first, second, *values)


def recompute(
    first: Callable[..., Any], second: Callable[..., Any], *args: Any, is_random: bool = True
) -> Any:
    """Return `first(*args)`; backward calls `second(*args)`, which must save the same tensors.

    Both are called inside the same call of `Temporal`.

    Args:
        is_random: whether they may draw random numbers, which a CUDA graph cannot draw twice: while
            one is recorded, nothing is recomputed then.
    """
    if is_traced():
        return torch_checkpoint.checkpoint(_Runs(first, second), *args, use_reentrant=False)
    is_recorded = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if (is_recorded and is_random) or _cuts_graph():
        return first(*args)
    errors: list[BaseException] = []

    def without_errors(*args: Any) -> Any:
        try:
            return first(*args)
        except BaseException as error:
            # Raised here, an error would leave the hooks of PyTorch 2.11 active.
            errors.append(error)

    results = torch_checkpoint.checkpoint(
        _Runs(without_errors, second),
        *args,
        use_reentrant=False,
        preserve_rng_state=not is_recorded,
    )
    if errors:
        raise errors.pop()
    return results


def _cuts_graph() -> bool:
    """Whether an observer cuts the graph of this call, whose parts cannot be computed again."""
    observer = active.observer
    while observer is not None and not observer.cuts_graph:
        observer = observer.outer
    return observer is not None


class _Runs:
    """The first run of a function, and the second run in backward."""

    def __init__(self, first: Callable[..., Any], second: Callable[..., Any]) -> None:
        self.first: Callable[..., Any] | None = first
        self.second = second
        self.is_traced = is_traced()
        # What arrived from other processes during the first run.
        self.arrived: list[Any] = []
        self.call = active.call
        if self.call is not None:
            # The graph keeps it alive, so that it must not hold results of the graph.
            self.call = replace(self.call, finals={})

    def __call__(self, *args: Any) -> Any:
        first = self.first
        if is_traced():
            return first(*args)  # type: ignore[misc]
        self.first = None
        if first is None:
            return _run_again(self, args)
        if self.is_traced:  # and could not be: the second run is not compiled, either
            first = torch.compiler.disable(first)
        call = active.call
        if call is None or call.passing is None:
            return first(*args)
        passing = call.passing
        call.passing = _Passing(passing, _Arrivals(self.arrived))
        try:
            return first(*args)
        finally:
            call.passing = passing


def _run_again(runs: _Runs, args: tuple[Any, ...]) -> Any:
    # `is_recomputed` knows this function.
    call = runs.call
    if call is None:
        return runs.second(*args)
    passing = call.passing
    if passing is not None:
        passing = _Passing(passing, _Arrivals([*runs.arrived], replays=True))
    with inside(replace(call, passing=passing, finals={})):
        return runs.second(*args)


def refuse_recomputation(layer: nn.Module) -> None:
    """Raise a RuntimeError if `layer` is recomputed outside a call, and its first run may have been
    inside one. Inside a call, remember the layer: containers do so for those that carry a state."""
    if is_traced():
        return
    if active.call is not None:
        called_inside.add(layer)
    elif layer in called_inside and is_recomputed():
        raise RuntimeError(_REFUSAL.format(type(layer).__name__))


def require_temporal(module: nn.Module, args: Any) -> None:
    """Forward pre-hook of a network that `convert` has made for one time step.

    Raises:
        RuntimeError: `torch.utils.checkpoint.checkpoint` recomputes it.
        ValueError: the network is called outside `Temporal`.
    """
    if active.call is not None:
        return
    name = type(module).__name__
    if not is_traced() and is_recomputed():
        raise RuntimeError(_REFUSAL.format(name))
    raise ValueError(
        f"{name} was converted for one time step and is called outside "
        "Temporal, where its neurons would read the batch as time: in place of a loop over "
        "time call spikefuse.Temporal(net)(x) with x [T, B, ...]; for one step after another "
        "use spikefuse.Stream(spikefuse.Temporal(net))"
    )


_REFUSAL = (
    "torch.utils.checkpoint recomputes {} in backward, outside the call of Temporal that knows "
    "its time steps and states: use spikefuse.checkpoint(module, x) in its place, which also "
    "works outside Temporal"
)

#: The layers that have run inside a call, where they read `[T*B, ...]`.
called_inside: WeakSet[nn.Module] = WeakSet()


def is_recomputed(or_by_ours: bool = False) -> bool:
    """Whether `torch.utils.checkpoint.checkpoint` calls the running code a second time, in
    backward.

    Args:
        or_by_ours: also inside our `checkpoint`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code is _run_again.__code__:
            return or_by_ours
        if code.co_filename == torch_checkpoint.__file__ and code.co_name in _SECOND_RUNS:
            return True
        frame = frame.f_back
    return False


#: The functions of torch.utils.checkpoint that call a function the second time.
_SECOND_RUNS = ("recompute_fn", "backward")


class _Arrivals:
    """What arrives from other processes: recorded in the first run, replayed in the second."""

    def __init__(self, values: list[Any], replays: bool = False) -> None:
        self.values, self.replays = values, replays

    def get(self, receive: Callable[..., T], *args: Any) -> T:
        if self.replays:
            return self.values.pop(0)
        self.values.append(receive(*args))
        return self.values[-1]


class _Passing(StatePassing):
    """The state passing of a checkpoint. In the second run nothing is sent; its backward, the only
    one, exchanges gradients."""

    def __init__(self, inner: StatePassing, arrivals: _Arrivals) -> None:
        self.inner, self.arrivals = inner, arrivals
        self.is_first, self.is_last = inner.is_first, inner.is_last
        if inner.statistics is not None:
            self.statistics = _Collectives(inner.statistics, arrivals)

    def microbatches(self, batch: int) -> list[slice]:
        return self.inner.microbatches(batch)

    def forward(self, buffers: Buffers) -> Channel:
        inner = Channel(buffers) if self.arrivals.replays else self.inner.forward(buffers)
        return inner if self.is_first else _Channel(inner, self.arrivals)

    def backward(self, buffers: Buffers) -> Channel:
        return self.inner.backward(buffers)


class _Channel(Channel):
    def __init__(self, inner: Channel, arrivals: _Arrivals) -> None:
        super().__init__(inner.buffers)
        self.inner, self.arrivals = inner, arrivals

    def receive(self, i: int) -> list[Tensor]:
        states = self.arrivals.get(self.inner.receive, i)
        if self.arrivals.replays:
            for buffer, state in zip(self.buffers[i], states, strict=True):
                buffer.copy_(state)
        return self.buffers[i]

    def send(self, i: int, states: Sequence[Tensor]) -> None:
        self.inner.send(i, states)

    def close(self) -> None:
        self.inner.close()


class _Collectives:
    def __init__(self, inner: Collectives, arrivals: _Arrivals) -> None:
        self.inner, self.arrivals = inner, arrivals

    def sum(self, x: Tensor) -> None:
        self.inner.sum(x)

    def gather(self, x: Tensor) -> Tensor:
        return self.arrivals.get(self.inner.gather, x)


#: Buffers of norms that a training call changes.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@contextlib.contextmanager
def _frozen(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let norms in training update copies of their running statistics."""
    replaced = []
    try:
        for module in modules:
            if module.training and isinstance(getattr(module, "running_mean", None), Tensor):
                for name in _STATISTICS:
                    buffer = getattr(module, name, None)
                    if isinstance(buffer, Tensor):
                        replaced.append((module, name, buffer))
                        setattr(module, name, buffer.clone())
        yield
    finally:
        for module, name, buffer in reversed(replaced):
            setattr(module, name, buffer)


def _modules_of(function: Any, leaves: Iterable[Any]) -> list[nn.Module]:
    """The modules that `function` may call."""
    values: list[Any] = [function, getattr(function, "__self__", None), *leaves]
    call = active.call
    if not any(isinstance(x, nn.Module) for x in values):
        if call is not None and call.network is not None:
            values.append(call.network)
        elif inspect.isfunction(function):
            variables = inspect.getclosurevars(function)
            values += [*variables.nonlocals.values(), *variables.globals.values()]
    roots = [x for x in values if isinstance(x, nn.Module)]
    return [*dict.fromkeys(module for root in roots for module in root.modules())]
