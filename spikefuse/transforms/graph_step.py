"""A whole step as one CUDA graph, in any training loop.

A short step of many layers is bound by the host, which takes longer to start the kernels than the
GPU to run them. A recorded step starts with one launch.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from spikefuse.neurons import parameters as holders
from spikefuse.neurons.surrogate import Surrogate
from spikefuse.transforms import module_calls, step_arguments
from spikefuse.transforms.learning_rates import LearningRates
from spikefuse.transforms.step_arguments import CONSTANTS, static_copy, stored
from spikefuse.transforms.unrepeatable import line_of, watch

#: `DistributedDataParallel` rearranges its buckets in its first steps.
DDP_WARMUP = 11
# It accumulates gradients on the stream on which it was made, and PyTorch's default stream cannot
# be recorded.
LEGACY_STREAM = (
    "make a DistributedDataParallel inside `with torch.cuda.stream(torch.cuda.Stream()):`; "
)


class NotRecordable(RuntimeError):
    """A step does something that a CUDA graph cannot repeat."""


def graph_step(
    step: Callable[..., Any], *, warmup: int = 3, max_graphs: int = 8, fallback: bool = False
) -> GraphStep:
    """Record a training or inference step as a CUDA graph, and replay it from then on.

    The first `warmup` calls run `step` eagerly, and the next call records it. Each further call
    copies its inputs into the graph, launches it once, and returns copies of the results. Example::

        @sf.graph_step
        def train_step(x, y):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(net(x).mean(0), y)
            loss.backward()
            optimizer.step()
            return loss

        for x, y in loader:
            loss = train_step(x.cuda(), y.cuda())

    A graph is recorded for each set of input shapes, dtypes and other arguments, and again where
    `train()`, `eval()`, autocast, the mode of gradients, a setting of an optimizer, of a neuron or
    its surrogate, or the numbers of a norm or dropout changed. Where parameters were moved or
    replaced, all graphs are recorded again.

    - Learning rates of fused and of capturable optimizers may change at each call; assign them, or
      call `scheduler.step()`, outside the step. `capturable` is set on optimizers that have it. Of
      other optimizers, such as `SGD` without `fused=True`, the learning rate is recorded like any
      setting, so that each value takes a graph of its own.
    - Gradients are as after a call of `step`; a step without `zero_grad` accumulates. Parameters
      must belong to a module that the step calls, or to an optimizer whose `step` it calls.
    - Compile networks with `torch.compile`, not the step, whose modules would then be unknown.
    - Pass values from one call to the next, such as the states of truncated BPTT, as arguments and
      results: variables that the step assigns keep their recorded tensors.
    - Random numbers of PyTorch's generator on the GPU equal those of an eager step.
    - Python code runs during warm-up and recording only: values that it computes or reads, such as
      attributes of your own modules, and what it prints or counts, are not repeated.
    - Recording releases cuBLAS's workspaces, as `torch.compile` does. Capture graphs by hand on a
      stream of their own, as `torch.cuda.graph(graph)` does, so that they allocate theirs.

    On a CPU, the step is called.

    Args:
        step: takes tensors on one GPU, in any nesting of tuples, lists and dicts, and constants.
        warmup: calls before the first recording, at least 2; 11 or more if the step calls a
            `DistributedDataParallel`, which has to be made inside
            `with torch.cuda.stream(torch.cuda.Stream()):`. Each further graph takes 2.
        max_graphs: how many graphs to keep. Calls that would need more run eagerly, with a warning.
        fallback: run a step that cannot be recorded eagerly, with a warning, in place of an error.

    Returns:
        A function of the same arguments. Its results are those of `step`, detached.

    Raises:
        NotRecordable: the step reads a value of the GPU on the host (`item()`, a condition on a
            tensor, a `GradScaler`), draws random numbers on the CPU, or cannot be recorded for
            another reason. The error names the line.
        TypeError, ValueError: arguments that no graph can take.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """
    return GraphStep(step, warmup, max_graphs, fallback)


class GraphStep:
    """The result of `graph_step`.

    Attributes:
        num_graphs, num_replays, num_eager: what the calls so far have done.
        obstacle: why all calls run eagerly; empty if they need not.
    """

    def __init__(
        self, step: Callable[..., Any], warmup: int, max_graphs: int, fallback: bool
    ) -> None:
        if not callable(step):
            raise TypeError(f"step is a {type(step).__name__}: expected a function")
        if warmup < 2 or max_graphs < 1:
            raise ValueError(
                f"warmup is {warmup}, max_graphs {max_graphs}: expected at least 2 and 1"
            )
        update_wrapper(self, step)
        self.step, self.warmup, self.max_graphs, self.fallback = step, warmup, max_graphs, fallback
        self.num_replays = self.num_eager = 0
        self.obstacle = ""
        self._modules: dict[nn.Module, None] = {}
        self._rates: dict[Optimizer, LearningRates] = {}
        self._eager_calls: dict[Any, int] = {}
        self._graphs: dict[Any, _Graph] = {}
        self._addresses: list[tuple[dict[str, Any], str, Tensor, int]] = []
        self._parameters: list[Tensor] = []
        self._changes_rates = False
        # The neurons' settings are those of these children and versions while they equal copies.
        self._children: list[list[nn.Module | None]] = []
        self._versions: list[holders.Version] = []
        self._seen: list[holders.Version] = []
        self._neurons: list[nn.Module] = []  # with their surrogates and learnable parameters
        self._neuron_settings: tuple[Any, ...] = ()
        self._numbers: list[tuple[dict[str, Any], str]] = []
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._pool: Any = None

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
        self._addresses = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        on_gpu = any(map(step_arguments.is_cuda, tensors))
        if on_gpu and self.obstacle is _NO_INPUT:
            self.obstacle = ""
        # A step that another recorded step calls is a part of its graph.
        if self.obstacle or not on_gpu or module_calls.is_collecting():
            if not (self.obstacle or on_gpu) and torch.cuda.is_initialized():
                self._run_always(_NO_INPUT)
            self.num_eager += 1
            return _detached(self.step(*args, **kwargs))
        if self._have_moved():
            self.reset()
        inputs = structure, tuple(map(step_arguments.description, leaves))
        with torch.cuda.device(tensors[0].device):
            required, missing = self._gradients()
            key = inputs, required, missing, self._settings()
            # That of a step which replaces all gradients, whichever there are.
            general = inputs, required, None, key[3]
            graph = self._graphs.get(key) or self._graphs.get(general)
            if graph is None:
                eager_calls = self._eager_calls.get(key, 0)
                needed = self._needed_calls()
                if eager_calls < needed:
                    return self._run(inputs, args, kwargs, is_checked=eager_calls == needed - 1)
                if len(self._graphs) >= self.max_graphs:
                    self._warn_of_limit()
                    return self._run(inputs, args, kwargs)
                try:
                    graph = self._record(leaves, structure)
                except NotRecordable as error:
                    if not self.fallback:
                        raise
                    self._run_always(str(error))
                    return self._run(inputs, args, kwargs)
                self._graphs[general if graph.replaces_gradients else key] = graph
            self.num_replays += 1
            for rates in self._rates.values():
                rates.update()
            return graph.replay(tensors)

    # Eager calls

    def _needed_calls(self) -> int:
        """Return how many eager calls precede a recording."""
        if self._graphs:
            return 2
        is_ddp = any(isinstance(m, DistributedDataParallel) for m in self._modules)
        return max(self.warmup, DDP_WARMUP if is_ddp else 0)

    def _run(self, inputs: Any, args: Any, kwargs: Any, is_checked: bool = False) -> Any:
        """Run the step as it is, on the stream of recordings, to which autograd ties gradients."""
        problems: list[str] = []
        stream = self._stream()
        gradients = self._gradients()
        known = [len(self._modules), len(self._rates), len(self._parameters)]
        stream.wait_stream(torch.cuda.current_stream())
        watched = watch(problems) if is_checked else contextlib.nullcontext()
        try:
            with torch.cuda.stream(stream), self._observed(), watched:
                result = _detached(self.step(*args, **kwargs))
        finally:
            torch.cuda.current_stream().wait_stream(stream)
        self.num_eager += 1
        if self._changes_rates:
            problems.append("it changes a learning rate: call scheduler.step() after the step")
        if is_checked:
            problems += self._other_devices(args, kwargs)
        if is_checked and problems:
            if not self.fallback:
                raise NotRecordable(f"graph_step cannot record the step: {problems[0]}")
            self._run_always(problems[0])
        self._parameters = self._found_parameters()
        if known != [len(self._modules), len(self._rates), len(self._parameters)]:
            self._graphs.clear()  # they do not include the new ones
            gradients = self._gradients()
            self._numbers = [
                (vars(m), name) for m in self._modules for name in _NUMBERS if name in vars(m)
            ]
        if len(self._eager_calls) >= 16 * self.max_graphs:
            self._warn_of_limit()
            self._eager_calls.clear()
        key = inputs, *gradients, self._settings()
        self._eager_calls[key] = self._eager_calls.get(key, 0) + 1
        return result

    def _stream(self) -> torch.cuda.Stream:
        """The stream of recordings on the current GPU."""
        device = torch.cuda.current_device()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()
        return self._streams[device]

    def _other_devices(self, *arguments: Any) -> list[str]:
        """A graph would leave out what runs on a GPU other than its own."""
        used = (*filter(torch.is_tensor, pytree.tree_leaves(arguments)), *self._parameters)
        devices = sorted({str(x.device) for x in used if step_arguments.is_cuda(x)})
        return [f"it uses {' and '.join(devices)}: a graph has one GPU"] if devices[1:] else []

    def _run_always(self, obstacle: str) -> None:
        self.obstacle = obstacle
        warnings.warn(f"graph_step runs the step eagerly: {obstacle}", stacklevel=3)

    def _warn_of_limit(self) -> None:
        warnings.warn(
            f"graph_step keeps {self.max_graphs} graphs (max_graphs) and runs other shapes, "
            "arguments and settings eagerly: pad the inputs to fewer shapes, give numbers that "
            "change as tensors, make optimizers outside the step, keep their settings other than "
            "the learning rate (OneCycleLR with cycle_momentum=False), or allow more graphs",
            stacklevel=3,
        )

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
        """Collect the modules and optimizers that the step calls; learning rates are tensors."""

        def update(optimizer: Optimizer, *_: Any) -> None:
            if optimizer not in self._rates:
                self._rates[optimizer] = rates = LearningRates(optimizer)
                rates.install()
                optimizer.register_load_state_dict_post_hook(partial(_reset, weakref.ref(self)))

        handle, called = register_optimizer_step_pre_hook(update), dict[nn.Module, None]()
        for rates in self._rates.values():
            rates.install()
        try:
            with module_calls.collected(called):
                yield
        finally:
            handle.remove()
            # A neuron leads to its surrogate, perhaps as a copy.
            self._modules.update((m, None) for m in called if not isinstance(m, Surrogate))
            for rates in self._rates.values():
                self._changes_rates |= rates.restore()

    def _found_parameters(self) -> list[Tensor]:
        """The parameters of all modules and optimizers that the step has called."""
        self._update_neurons()
        modules = *self._modules, *self._neurons
        found = {p: None for m in modules for p in m._parameters.values() if p is not None}
        groups = (group for optimizer in self._rates for group in optimizer.param_groups)
        return list(found | {p: None for group in groups for p in group["params"]})

    # What a graph depends on

    def _settings(self) -> Any:
        """Return all that a graph depends on, except its inputs."""
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
        training = tuple([m.training for m in self._modules])
        self._update_neurons()
        numbers = self._neuron_settings, tuple([values[name] for values, name in self._numbers])
        return modes, training, numbers, tuple([r.settings() for r in self._rates.values()])

    def _update_neurons(self) -> None:
        """Update the neurons and their settings if there are others, or an attribute was assigned.

        A layer may run its neuron without calling it as a module.
        """
        children = [[*module._modules.values()] for module in self._modules]
        if children == self._children and self._versions == self._seen:
            return
        modules = (m for module in self._modules for m in module.modules())
        found = dict.fromkeys(m for m in modules if isinstance(m, holders.Holder))
        self._children = children
        self._versions = [version for h in found for version in holders.versions(h)]
        self._seen = [version.copy() for version in self._versions]
        self._neurons = list({part: None for neuron in found for part in neuron.modules()})
        self._neuron_settings = tuple(
            (part, *(pair for pair in vars(part).items() if isinstance(pair[1], CONSTANTS)))
            for part in self._neurons
        )

    def _gradients(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Which parameters require gradients, and which have none before the step."""
        required = tuple([p.requires_grad for p in self._parameters])
        return required, tuple([p.grad is None for p in self._parameters])

    def _have_moved(self) -> bool:
        """Whether a parameter or buffer has another address than in the graphs."""
        return any(
            owner.get(name) is not x or x.data_ptr() != address
            for owner, name, x, address in self._addresses
        )

    def _save_addresses(self) -> None:
        self._addresses = [
            (owner, name, x, x.data_ptr())
            for module in (*self._modules, *self._neurons)
            for owner in (module._parameters, module._buffers)
            for name, x in owner.items()
            if x is not None
        ]

    # Recording

    def _record(self, leaves: list[Any], structure: Any) -> _Graph:
        """Record the step on copies of its arguments. Nothing runs on the GPU."""
        with torch.inference_mode(False):  # whose tensors do not count their changes
            static = [static_copy(x) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(static, structure)
        parameters = self._parameters
        before = [p.grad for p in parameters]
        versions = [None if grad is None else grad._version for grad in before]
        inputs = [x for x in static if isinstance(x, Tensor)]
        input_versions = [x._version for x in inputs]
        if self._pool is None or not self._graphs:
            # PyTorch releases the memory pool with its last graph, and must not see it again.
            self._pool = torch.cuda.graph_pool_handle()
        cuda_graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        _release_workspaces()
        torch.cuda.empty_cache()
        torch.clear_autocast_cache()  # casts of the weights, which a replay would not repeat
        with torch.cuda.stream(self._stream()), self._observed():
            # Other threads may load batches during the recording.
            cuda_graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = _detached(self.step(*args, **kwargs))
                cuda_graph.capture_end()
            except BaseException as error:
                self._abandon(cuda_graph)
                for p, grad in zip(parameters, before, strict=True):
                    p.grad = grad
                if not isinstance(error, Exception):  # the user has interrupted it
                    raise
                where = line_of(traceback.extract_tb(error.__traceback__))
                hint = LEGACY_STREAM if "legacy stream" in str(error) else ""
                raise NotRecordable(
                    f"graph_step cannot record the step: {where}: {hint}{error}"
                ) from error
        torch.clear_autocast_cache()
        self._save_addresses()
        results, returned = pytree.tree_flatten(result)
        others = [x for x in results if not isinstance(x, (Tensor, *CONSTANTS))]
        kind = type(others[0]).__name__ if others else ""
        problem = f"it returns a {kind}: return tensors, in tuples, lists and dicts" if kind else ""
        if [x._version for x in inputs] != input_versions:
            problem = "it changes an argument in place: change a copy, and return it"
        gradients, replaces = [], True
        for p, grad, version in zip(parameters, before, versions, strict=True):
            is_new = p.grad is not None and p.grad is not grad
            # After zero_grad(), a step does not read the gradients before it.
            is_read = grad is not None and not (is_new and grad._version == version)
            replaces &= not p.requires_grad or (grad is not None and not is_read)
            gradients.append((p, grad if is_read else None, p.grad))
            if problem:
                p.grad = grad
        if problem:
            raise NotRecordable(f"graph_step cannot record the step: {problem}")
        read = [stored(x) for x in inputs]
        return _Graph(cuda_graph, read, results, returned, gradients, replaces)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that has failed."""
        with contextlib.suppress(RuntimeError):  # which says that it has failed
            graph.capture_end()
        self._pool = None
        # PyTorch's generator is left in the state of a recording, which another one ends.
        other = torch.cuda.CUDAGraph()
        other.capture_begin(capture_error_mode="thread_local")
        torch.zeros((), device="cuda")
        other.capture_end()


def _reset(reference: weakref.ref[GraphStep], _: Optimizer) -> None:
    step = reference()
    if step is not None:
        step.reset()


@dataclass(eq=False)
class _Graph:
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
    structure: pytree.TreeSpec
    gradients: list[tuple[Tensor, Tensor | None, Tensor | None]]
    replaces_gradients: bool

    def replay(self, arguments: list[Tensor]) -> Any:
        torch._foreach_copy_(self.inputs, [stored(x) for x in arguments])
        for p, read, after in self.gradients:
            current = p.grad
            if read is not None and current is not None and current is not read:
                read.copy_(current)
            if current is not after:
                p.grad = after
        self.graph.replay()
        results = [x.clone() if isinstance(x, Tensor) else x for x in self.results]
        return pytree.tree_unflatten(results, self.structure)


def _detached(result: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, result)


# cuBLAS's workspaces, of which PyTorch keeps one per stream. torch.compile, or the end of another
# graph, releases them. A recording has to allocate its own, in its memory pool, to keep it.
_release_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
_NO_INPUT = "no argument is on a GPU: pass the batch, moved to the GPU"
# Of norms, dropouts and recurrent layers.
_NUMBERS = ("eps", "momentum", "p", "self_connections")
