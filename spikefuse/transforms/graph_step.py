"""A whole step as one CUDA graph, in any training loop.

A short step of many layers is bound by the host, which takes longer to start the kernels than the
GPU to run them. A recorded step starts with one launch.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial, update_wrapper
from itertools import compress
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spikefuse._torch import Modules, tensors_of, version
from spikefuse.graph import capture
from spikefuse.graph.capture import NotRecordable, static_copy, stored
from spikefuse.neurons.checks import is_dense
from spikefuse.neurons.parameters import Holder
from spikefuse.nn.nesting import flatten, key_of, map_tensors, unflatten
from spikefuse.nn.stream import Stream
from spikefuse.transforms.learning_rates import LearningRates

P = ParamSpec("P")
R = TypeVar("R")

#: `DistributedDataParallel` rearranges its buckets in its first steps.
DDP_WARMUP = 11
PARTS = nn.Module | Optimizer
CONSTANTS = bool | int | float | complex | str | bytes | None | Enum | torch.dtype | torch.device


@overload
def graph_step(  # type: ignore[overload-overlap]  # a module can be called, too
    *parts: nn.Module | Optimizer, warmup: int = 3, max_graphs: int = 8, fallback: bool = False
) -> Callable[[Callable[P, R]], GraphStep[P, R]]: ...


@overload
def graph_step(
    step: Callable[P, R],
    /,
    *parts: nn.Module | Optimizer,
    warmup: int = 3,
    max_graphs: int = 8,
    fallback: bool = False,
) -> GraphStep[P, R]: ...


def graph_step(*parts: Any, warmup: int = 3, max_graphs: int = 8, fallback: bool = False) -> Any:
    """Record a training or inference step as a CUDA graph, and replay it from then on.

    The first `warmup` calls run the step eagerly, and the next call records it. Each further call
    copies its inputs into the graph, launches it once, and returns copies of the results.

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(784, 128), sf.LIF(), nn.Linear(128, 10)))
        optimizer = torch.optim.AdamW(net.parameters())

        @sf.graph_step(net, optimizer)
        def train_step(x, y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x).mean(0), y)
            loss.backward()
            optimizer.step()
            return loss

        loss = train_step(torch.rand(8, 32, 784), torch.randint(10, (32,)))

    A graph is recorded for each set of input shapes, dtypes and other arguments, and again where
    `train()`, `eval()`, autocast, the mode of gradients, or a setting of an optimizer, a neuron or
    a layer of `torch.nn` has changed, or where parameters were moved or replaced.

    - Learning rates of fused and of capturable optimizers may change at each call, outside the
      step. `capturable` is set on optimizers that have it. Of other optimizers, such as `SGD`
      without `fused=True`, each learning rate takes a graph of its own.
    - Gradients are as after a call of the step; a step without `zero_grad` accumulates.
    - Random numbers of PyTorch's generator on the GPU equal those of an eager step.
    - Python code runs during warm-up and recording only: values that it computes or reads, such as
      attributes of your own modules, and what it prints or counts, are not repeated. Pass values
      from one call to the next, such as states of truncated BPTT, as arguments and results.
    - Recording releases cuBLAS's workspaces, as `torch.compile` does. Capture graphs by hand on a
      stream of their own, as `torch.cuda.graph(graph)` does, so that they allocate theirs.

    On a CPU, the step is called.

    Args:
        parts: the step, unless this is a decorator; then the modules and optimizers that it uses.
            Those among its arguments and its own variables are found. The step takes constants and
            tensors on one GPU, in any nesting of tuples, lists and dicts.
        warmup: calls before the first recording, at least 2; 11 or more for a
            `DistributedDataParallel`, which has to be made inside
            `with torch.cuda.stream(torch.cuda.Stream()):`. Each further graph takes 2.
        max_graphs: how many graphs to keep. Calls that would need more run eagerly, with a warning.
        fallback: run a step that cannot be recorded eagerly, with a warning, in place of an error.

    Returns:
        A function of the same arguments. Its results are those of the step, detached.

    Raises:
        NotRecordable: the step reads a value of the GPU on the host (`item()`, a condition on a
            tensor, a `GradScaler`), draws random numbers on the CPU, or cannot be recorded for
            another reason. The error names the line.
        TypeError, ValueError: arguments that no graph can take, or a part that was not given.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """
    make: Any = partial(GraphStep, warmup=warmup, max_graphs=max_graphs, fallback=fallback)
    is_decorator = not parts or isinstance(parts[0], PARTS)
    return (lambda step: make(step, *parts)) if is_decorator else make(*parts)


class GraphStep(Generic[P, R]):
    """The result of `graph_step`.

    Attributes:
        num_graphs, num_replays, num_eager: what the calls so far have done.
        obstacle: why all calls run eagerly; empty if they need not.
    """

    def __init__(
        self, step: Any, *parts: Any, warmup: int, max_graphs: int, fallback: bool
    ) -> None:
        wrong = [x for x in parts if not isinstance(x, PARTS)] + ([] if callable(step) else [step])
        if wrong:
            raise TypeError(
                f"graph_step got a {type(wrong[0]).__name__}: expected a function, then modules "
                "and optimizers"
            )
        if warmup < 2 or max_graphs < 1:
            raise ValueError(f"warmup is {warmup}, max_graphs {max_graphs}: expected at least 2, 1")
        update_wrapper(self, step)
        self.step, self.warmup, self.max_graphs, self.fallback = step, warmup, max_graphs, fallback
        self.num_replays = self.num_eager = 0
        self.obstacle = ""
        self._parts: dict[Any, None] = dict.fromkeys(parts)
        self._rates = LearningRates()
        self._held: list[Any] = []  # tensors and states of optimizers, at these places
        self._places: Any = None
        self._parameters: list[Tensor] = []
        self._modules: list[nn.Module] = []
        self._listed: dict[nn.Module, Modules] = {}
        self._settings: list[tuple[dict[str, Any], str]] = []  # names in modules
        self._eager_calls: dict[Any, int] = {}
        self._graphs: dict[Any, _Graph] = {}
        self._pools: dict[int, capture.Pool] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def __repr__(self) -> str:
        name = getattr(self.step, "__qualname__", type(self.step).__name__)
        counts = f"{self.num_graphs} graphs, {self.num_replays} replays, {self.num_eager} eager"
        return f"graph_step({name}): {counts}" + (f"; {self.obstacle}" if self.obstacle else "")

    def reset(self) -> None:
        """Drop all graphs and release their memory. Further calls record new ones."""
        self._graphs.clear()
        self._eager_calls.clear()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        leaves, structure = flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        on_gpu = any(map(capture.is_cuda, tensors))
        # A step that another recorded step calls is a part of its graph.
        if self.obstacle or not on_gpu or capture.is_in_recorded_step():
            if not (self.obstacle or on_gpu) and torch.cuda.is_initialized():
                self._warn("no argument is on a GPU: pass the batch, moved to the GPU")
            self.num_eager += 1
            return _detached(self.step(*args, **kwargs))
        with torch.cuda.device(tensors[0].device):
            if not self._places:
                self._find_parts()
            self._look(leaves)
            inputs = key_of(structure), tuple(map(_description, leaves)), self._modes()
            missing = tuple([p.grad is None for p in self._parameters])
            graph = self._graphs.get((inputs, missing)) or self._graphs.get((inputs, None))
            if graph is None:
                graph = self._new_graph(inputs, leaves, structure)
                if graph is None:
                    return self._run(inputs, args, kwargs)
                # A step that replaces all gradients does not depend on those before it.
                self._graphs[inputs, None if graph.replaces_gradients else missing] = graph
            self.num_replays += 1
            self._rates.update()
            return graph.replay(tensors)

    def _new_graph(self, inputs: Any, leaves: list[Any], structure: Any) -> _Graph | None:
        """Record the step; None if it has to run eagerly."""
        if self._missing_calls(inputs) > 0:
            return None
        if len(self._graphs) >= self.max_graphs:
            self._warn_of_limit()
            return None
        try:
            return self._record(leaves, structure)
        except NotRecordable as error:
            if not self.fallback:
                raise
            self._run_always(str(error))
        return None

    # What a graph depends on

    def _find_parts(self) -> None:
        """Find the modules and optimizers in the variables of the step."""
        with contextlib.suppress(TypeError, ValueError):
            found = inspect.getclosurevars(inspect.unwrap(self.step))
            values = *found.nonlocals.values(), *found.globals.values()
            self._parts.update((x, None) for x in values if isinstance(x, PARTS))

    def _look(self, leaves: list[Any]) -> None:
        """Look at what the parts hold. Drop the graphs if any of it has moved."""
        self._parts.update((x, None) for x in leaves if isinstance(x, PARTS))
        roots = [part for part in self._parts if isinstance(part, nn.Module)]
        self._rates.optimizers = optimizers = [o for o in self._parts if isinstance(o, Optimizer)]
        modules: list[nn.Module] = []
        for root in roots:
            modules += self._listed.setdefault(root, Modules()).of(root)[0]
        # Buffers that a step computes with gradients, such as states, are new in each call.
        tensors = [x for x in tensors_of(modules) if x.is_leaf]
        tensors += [x for o in optimizers for group in o.param_groups for x in group["params"]]
        held = [*tensors, *(o.state for o in optimizers)]
        places = [*map(id, held)], [x.data_ptr() for x in tensors]
        if places != self._places:
            self.reset()
            self._held, self._places = held, places
            is_parameter = (type(x) is not Tensor or x.requires_grad for x in tensors)
            self._parameters = list(dict.fromkeys(compress(tensors, is_parameter)))
        if modules != self._modules:
            self._modules = modules
            self._settings = [
                (vars(m), name)
                for m in modules
                if isinstance(m, Holder) or type(m).__module__.startswith(("torch.", "spikefuse."))
                for name, value in vars(m).items()
                if name[0] != "_" and isinstance(value, CONSTANTS)
            ]

    def _modes(self) -> Any:
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
        modules = tuple(self._modules), tuple([m.training for m in self._modules])
        settings = tuple([values.get(name) for values, name in self._settings])
        required = tuple([p.requires_grad for p in self._parameters])
        return modes, modules, settings, required, self._rates.settings()

    # Eager calls

    def _missing_calls(self, inputs: Any) -> int:
        """Return how many eager calls must precede a recording."""
        is_ddp = any(isinstance(m, DistributedDataParallel) for m in self._modules)
        needed = 2 if self._graphs else max(self.warmup, DDP_WARMUP if is_ddp else 0)
        return needed - self._eager_calls.get(inputs, 0)

    def _run(self, inputs: Any, args: Any, kwargs: Any) -> Any:
        """Run the step as it is, on the stream of recordings, to which autograd ties gradients."""
        # Without a fallback, the recording raises the error.
        is_last = self.fallback and self._missing_calls(inputs) == 1
        stream, problems = self._pool().stream, list[str]()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            watched = capture.watched() if is_last else contextlib.nullcontext(problems)
            with torch.cuda.stream(stream), self._around(), watched as problems:
                result = _detached(self.step(*args, **kwargs))
        finally:
            torch.cuda.current_stream().wait_stream(stream)
        self.num_eager += 1
        if problems:
            self._run_always(problems[0])
        if len(self._eager_calls) >= 16 * self.max_graphs:
            self._warn_of_limit()
            self._eager_calls.clear()
        self._eager_calls[inputs] = self._eager_calls.get(inputs, 0) + 1
        self._modules = []  # to look for settings anew
        return result

    @contextlib.contextmanager
    def _around(self) -> Iterator[list[str]]:
        """Let the step read learning rates as tensors; yield a list of problems."""

        def check(optimizer: Optimizer, *_: Any) -> None:
            if optimizer not in self._parts:
                raise ValueError(
                    f"the step calls a {type(optimizer).__name__} that graph_step does not know: "
                    "sf.graph_step(step, net, optimizer)"
                )

        handle = register_optimizer_step_pre_hook(check)
        try:
            with capture.recorded_step(), self._rates.as_tensors() as problems:
                yield problems
        finally:
            handle.remove()

    def _pool(self) -> capture.Pool:
        pool = self._pools.get(torch.cuda.current_device())
        if pool is None or not (self._graphs and pool.is_usable):
            pool = self._pools[torch.cuda.current_device()] = capture.Pool(
                pool.stream if pool else None
            )
        return pool

    def _run_always(self, obstacle: str) -> None:
        self.obstacle = obstacle
        self._warn(obstacle)

    def _warn(self, reason: str) -> None:
        warnings.warn(f"graph_step runs the step eagerly: {reason}", stacklevel=4)

    def _warn_of_limit(self) -> None:
        self._warn(
            f"more than {self.max_graphs} graphs (max_graphs): pad the inputs to fewer shapes, "
            "give numbers that change as tensors, keep the settings of optimizers other than the "
            "learning rate (OneCycleLR with cycle_momentum=False), or allow more graphs"
        )

    # Recording

    def _record(self, leaves: list[Any], structure: Any) -> _Graph:
        """Record the step on copies of its arguments. Nothing runs on the GPU."""
        with torch.inference_mode(False):  # whose tensors do not count their changes
            static = [static_copy(x) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = unflatten(static, structure)
        inputs = [x for x in static if isinstance(x, Tensor)]
        versions, num = [*map(version, inputs)], len(self._parameters)
        others, streams = _elsewhere(self._parameters)
        before = [(p, p.grad, _version_of(p.grad)) for p in (*self._parameters, *others)]
        try:
            devices = sorted({str(x.device) for x in (*inputs, *self._parameters)})
            if devices[1:]:
                raise NotRecordable(f"it uses {' and '.join(devices)}: a graph has one GPU")
            with self._around() as problems:
                run = partial(self.step, *args, **kwargs)
                graph, result = capture.capture(lambda: _detached(run()), self._pool())
            results, returned = flatten(result)
            kinds = [type(x).__name__ for x in results if not isinstance(x, Tensor | CONSTANTS)]
            if kinds:
                problems.append(f"it returns a {kinds[0]}: return tensors")
            if [*map(version, inputs)] != versions:
                problems.append("it changes an argument in place: change a copy, and return it")
            if any(p.grad is not grad or _version_of(grad) != v for p, grad, v in before[num:]):
                problems.append(
                    "a parameter of a module that graph_step does not know gets a "
                    "gradient: sf.graph_step(step, net, optimizer)"
                )
            if any(stream.state is not state for stream, state in streams):
                problems.append(
                    "it runs a Stream, whose state replays would not follow: pass "
                    "states to a Temporal, net(x, state, return_state=True)"
                )
            if problems:
                raise NotRecordable(problems[0])
        except BaseException as error:
            for p, grad, _ in before:
                p.grad = grad
            for stream, state in streams:
                stream.state = state
            if not isinstance(error, Exception):  # the user has interrupted it
                raise
            reason = capture.reason(error)
            raise NotRecordable(f"graph_step cannot record the step: {reason}") from error
        # After zero_grad(), a step does not read the gradients before it.
        gradients = [
            (p, None if p.grad is not grad and _version_of(grad) == version else grad, p.grad)
            for p, grad, version in before[:num]
        ]
        # Without gradients before it, the step would leave others to None.
        replaces = not any(
            p.requires_grad and (old is None or read is not None)
            for (p, old, _), (_, read, _) in zip(before, gradients, strict=False)
        )
        return _Graph(graph, [stored(x) for x in inputs], results, returned, gradients, replaces)


class _Graph(NamedTuple):
    """A recorded step.

    Attributes:
        inputs: the tensors that the graph reads in place of the arguments.
        results, structure: the results of the step, which each replay overwrites, flattened.
        gradients: parameters, the gradients that the graph reads (None if it reads none), and those
            after the step.
        replaces_gradients: whether it reads none of the gradients before it, and writes all.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    results: list[Any]
    structure: Any
    gradients: list[tuple[Tensor, Tensor | None, Tensor | None]]
    replaces_gradients: bool

    def replay(self, arguments: list[Tensor]) -> Any:
        for x, argument in zip(self.inputs, arguments, strict=True):
            x.copy_(stored(argument))
        for p, read, after in self.gradients:
            current = p.grad
            if read is not None and current is not None and current is not read:
                read.copy_(current)
            if current is not after:
                p.grad = after
        self.graph.replay()
        results = [x.clone() if isinstance(x, Tensor) else x for x in self.results]
        return unflatten(results, self.structure)


def _description(x: Any) -> Any:
    """Return what a recorded step depends on of one of its arguments."""
    if isinstance(x, CONSTANTS | PARTS):
        return type(x), x
    kind = f"an argument is a {type(x).__name__}"
    if type(x) is not Tensor or not is_dense(x):
        raise TypeError(
            f"{kind}: graph_step takes dense tensors, numbers, strings, modules and optimizers, in "
            "tuples, lists and dicts; let the step use other objects itself"
        )
    if not capture.is_cuda(x):
        raise ValueError(f"{kind} on the CPU and another on a GPU: move both before the call")
    if x.requires_grad:
        raise ValueError(
            f"{kind} that requires a gradient, which graph_step does not return: compute it inside "
            "the step with torch.autograd.grad, from x.detach()"
        )
    return x.shape, x.dtype, x.device, tuple(stride == 0 for stride in x.stride())


def _detached(result: Any) -> Any:
    return map_tensors(Tensor.detach, result)


def _elsewhere(known: list[Tensor]) -> tuple[list[Tensor], list[tuple[Stream, Any]]]:
    """Return what else may get a gradient, and streams with their states."""
    others, streams, ids = [], [], set(map(id, known))
    for x in gc.get_objects():
        if issubclass(type(x), Stream):
            streams.append((x, x.state))
        elif issubclass(type(x), Tensor) and id(x) not in ids and x.is_leaf and x.requires_grad:
            others.append(x)
    return others, streams


def _version_of(x: Tensor | None) -> int | None:
    return None if x is None else version(x)
