"""The private names of PyTorch that this package uses; no other file uses one.

Versions of PyTorch that lack a name get a fall-back of public names, which `tests/test_torch.py`
compares. Times are those of a call with torch 2.13 on one core:

- `_python_dispatch.TorchDispatchMode` records the operations of a step, of which kernels are made.
  PyTorch documents it, but no public module has it. In public: the eager loop, `impl="reference"`.
- `_len_torch_dispatch_stack` (0.07 us) tells whether a call may skip the dispatcher. In public:
  operations of the library, 80 us slower, and 700 us with backward.
- `_get_current_graph_task_keep_graph` (0.1 us) tells whether backward may overwrite what forward
  has saved. In public: it may not, and a recurrent layer takes the memory of one more sequence.
- `_top_saved_tensors_default_hooks` (0.09 us) returns the active hook. In public: whether there is
  any (1.3 us), so that spikes are not packed while memory is measured.
- `_version` (0.06 us) counts changes in place. In public: a hash of the values (25 us for 10,000
  floats on a CPU; it waits for a GPU).
- `_backward_hooks` (0.08 us) holds the hooks of a tensor. In public: none, and eligibility traces
  miss what a hook between a layer and its neuron does to gradients, and hooks of parameters are
  called for parts of the gradient of a rule, too.
- `_dynamo.lookup_backend` returns Inductor as a function of a graph, and `_inductor` has the class
  of passes that change a graph before it is split. In public: graphs run eagerly.
- `_dynamo.config` lets TorchDynamo capture whole graphs inside `DistributedDataParallel`. In
  public: none, and norms and neurons whose gradients are sent apart are not fused.
- `_dynamo_marked_constant` is what `torch.compiler.assume_constant_result` sets, which first
  imports TorchDynamo: `import spikefuse` would take 2 s more.
- `_execution_engine` differentiates inside of the tracer's modes, and calls a function at the end
  of a backward pass. In public: `torch.autograd.grad`, which leaves the modes, so that derivatives
  which read shapes are not refused; and the function is called at once, and waits longer.
- `_replicate_for_data_parallel` is called by `nn.DataParallel`, which would split the time of
  neurons. There is no public way to refuse this.
- `_cuda_clearCublasWorkspaces` lets a CUDA graph own the memory that cuBLAS uses. In public: none,
  and after a network that Inductor has recorded, replays may write to memory of others.
- `_cuda_endAllocateToPool` and `_cuda_releasePool` end a capture that CUDA has invalidated. In
  public: none, and its memory is lost until the process ends.

Attributes of modules are found by `vars(nn.Module())`, which has no names of ours. Operators, and
the functions in captured graphs, are known by their names, which may begin with an underscore.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.autograd import Variable
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.modules import module as modules

R = TypeVar("R")
C = TypeVar("C", bound=type)


class NoDispatchMode:
    """Takes the place of `TorchDispatchMode`."""

    def __init__(self) -> None:
        raise NotImplementedError(
            "kernels are not made with this version of PyTorch, which has no TorchDispatchMode: "
            'pass impl="reference"'
        )


try:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
except ImportError:
    TorchDispatchMode = NoDispatchMode  # type: ignore[assignment,misc]


def one() -> int:
    return 1


def yes() -> bool:
    return True


#: Returns the number of dispatch modes, which see all operations of this thread.
num_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", one)

_autograd = getattr(torch._C, "_autograd", None)
#: Returns whether the graph of the running backward pass may be used again.
keeps_graph: Callable[[], bool] = getattr(_autograd, "_get_current_graph_task_keep_graph", yes)


def any_saved_tensors_hooks(_: bool) -> Any:
    """Return something if saved-tensor hooks are active, else None."""
    try:
        with disable_saved_tensors_hooks("a look whether there are hooks"):
            return None
    except RuntimeError:
        return "unknown", "unknown"


#: Returns the hooks that are active, None if there are none.
top_saved_tensors_hooks: Callable[[bool], Any] = getattr(
    _autograd, "_top_saved_tensors_default_hooks", any_saved_tensors_hooks
)


def hashed(x: Tensor) -> int:
    return hash(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


#: Returns a number that differs after a tensor has been changed in place.
version: Callable[[Tensor], int] = attrgetter("_version") if hasattr(Tensor, "_version") else hashed


#: Returns whether torch.compile reads the code that calls it. `torch.compiler.is_compiling` is also
#: true of code that runs while PyTorch compiles, in any thread, such as the step of a neuron whose
#: kernels are made.
is_traced = torch.compiler.is_dynamo_compiling


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has returned a module, whose only submodule is the original."""
    return type(module).__name__ == "OptimizedModule"


def dynamo_is_imported() -> bool:
    return "torch._dynamo" in sys.modules


def inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    rewrite: Callable[[fx.Graph], None] | None = None,
) -> Callable[..., Any]:
    """Compile a graph by Inductor.

    Args:
        rewrite: changes the graph of forward and backward before it is split. Inductor caches
            graphs by the source of its module.
    """
    try:
        compile_graph = importlib.import_module("torch._dynamo").lookup_backend("inductor")
        custom_pass = importlib.import_module("torch._inductor.custom_graph_pass").CustomGraphPass
    except (ImportError, AttributeError):
        return gm
    if rewrite is None:
        return compile_graph(gm, example_inputs)
    methods = {
        "__call__": lambda self, graph: rewrite(graph),
        "uuid": lambda self: inspect.getsource(sys.modules[rewrite.__module__]),
    }
    joint_pass = type("Pass", (custom_pass,), methods)()
    return compile_graph(gm, example_inputs, config_patches={"joint_custom_post_pass": joint_pass})


def whole_graphs() -> contextlib.AbstractContextManager[None]:
    """Let TorchDynamo capture whole graphs inside `DistributedDataParallel`, for which it splits
    them by default, so that backward sends gradients early; an eager graph does so anyway."""
    if dist.is_available() and dist.is_initialized():
        return _whole_graphs()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _whole_graphs() -> Iterator[None]:
    config: Any = importlib.import_module("torch._dynamo.config")
    before, config.optimize_ddp = getattr(config, "optimize_ddp", None), False
    try:
        yield
    finally:
        config.optimize_ddp = before


def constant_result(function: Callable[..., R]) -> Callable[..., R]:
    """Let torch.compile call `function` while it traces, and use the result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_engine = getattr(Variable, "_execution_engine", None)


def gradients(
    total: Tensor, leaves: Sequence[Tensor], retain_graph: bool
) -> Sequence[Tensor | None]:
    """Return what `torch.autograd.grad` does, inside of the active modes."""
    if _engine is None:
        return torch.autograd.grad(
            total, leaves, retain_graph=retain_graph, allow_unused=True, materialize_grads=False
        )
    found: Sequence[Tensor | None] = _engine.run_backward(
        (total,),
        (torch.ones_like(total),),
        retain_graph,
        False,  # create_graph
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the running backward pass."""
    if _engine is None:
        function()
    else:
        _engine.queue_callback(function)


def refuse_data_parallel(cls: C) -> C:
    """Let `nn.DataParallel` raise an error for modules of a class."""

    def refuse(self: Any) -> Any:
        raise NotImplementedError(
            "nn.DataParallel splits dim 0 of its inputs, which is time: use "
            "torch.nn.parallel.DistributedDataParallel, with a process for each GPU"
        )

    cls._replicate_for_data_parallel = refuse  # type: ignore[attr-defined]
    return cls


#: The names of an `nn.Module`'s dicts of parameters, buffers, submodules and hooks, and of the
#: hooks among them: what each module has, without names of our own.
_DICTS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
_FORWARD_HOOKS = [n for n in _DICTS if n.startswith("_forward") and n.endswith("hooks")]
_BACKWARD_HOOKS = [n for n in _DICTS if n.startswith("_backward") and n.endswith("hooks")]


_filled = nn.Module()
_filled.register_parameter("parameter", None)
_filled.register_buffer("buffer", None)
_TENSORS = [name for name in _DICTS if vars(_filled)[name]]
_filled.add_module("child", None)
(_CHILDREN,) = (name for name in _DICTS if vars(_filled)[name] and name not in _TENSORS)


def separate(module: nn.Module, shares_tensors: bool = False) -> None:
    """Give a shallow copy its own dicts of submodules and hooks, and unless `shares_tensors`, of
    parameters and buffers, too."""
    state = vars(module)
    own = [name for name in _DICTS if not (shares_tensors and name in _TENSORS)]
    state.update({name: state[name].copy() for name in own if name in state})


def registries() -> dict[str, Any]:
    """Return the dicts of parameters, buffers and submodules of a module that has none."""
    return {name: value for name, value in vars(nn.Module()).items() if type(value) is dict}


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules by name, also those that have several."""
    named = module.named_modules(remove_duplicate=False)
    return {name: child for name, child in named if name and "." not in name}


class Modules:
    """The modules of a network, which are listed anew only where they have changed.

    It holds those that it has listed until it lists others.

    Args:
        kinds: which of them to return by name.
        prefix: of these names.
    """

    def __init__(self, kinds: tuple[Any, ...] = (), prefix: str = "") -> None:
        self.kinds, self.prefix = kinds, prefix
        self._found: tuple[list[nn.Module], list[tuple[str, nn.Module]], Any] = [], [], None

    def of(self, net: nn.Module) -> tuple[list[nn.Module], list[tuple[str, nn.Module]]]:
        """Return all modules of `net`, and those of the kinds with their names."""
        modules, named, structure = self._found  # which another thread may replace
        if not modules or modules[0] is not net or _structure(modules) != structure:
            found = [*net.named_modules(prefix=self.prefix)]
            modules = [module for _, module in found]
            named = [(name, module) for name, module in found if isinstance(module, self.kinds)]
            self._found = modules, named, _structure(modules)
        return modules, named

    def __reduce__(self) -> Any:
        return type(self), (self.kinds, self.prefix)  # a copy of the owner lists its own


def _structure(modules: list[nn.Module]) -> tuple[list[Any], ...]:
    """Return what the names and kinds of modules depend on: their types, and the names and the
    identities of their submodules."""
    children = [*map(itemgetter(_CHILDREN), map(vars, modules))]
    filled = [*filter(None, children)]
    names = chain.from_iterable(map(methodcaller("keys"), filled))
    submodules = chain.from_iterable(map(methodcaller("values"), filled))
    return [*map(type, modules)], [*map(len, children)], [*names], [*map(id, submodules)]


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of modules, without those of their submodules."""
    dicts = filter(None, chain.from_iterable(map(itemgetter(*_TENSORS), map(vars, modules))))
    found = chain.from_iterable(map(methodcaller("values"), dicts))
    return [x for x in found if x is not None]


def hooks_of(modules: Iterable[nn.Module]) -> tuple[list[int], list[int]]:
    """Return the ids of the forward hooks of modules, and those of the backward hooks; pre-hooks
    are among both."""
    forward: list[int] = []
    backward: list[int] = []
    hooks = itemgetter(*_FORWARD_HOOKS, *_BACKWARD_HOOKS)
    for found in filter(any, map(hooks, map(vars, modules))):
        forward += chain.from_iterable(found[: len(_FORWARD_HOOKS)])
        backward += chain.from_iterable(found[len(_FORWARD_HOOKS) :])
    return forward, backward


def user_hooks(module: nn.Module) -> list[Any]:
    """Return the forward hooks and pre-hooks that a user has added to a module.

    Hooks of torch.nn.utils, which compute weights, are left out, also those of a user's subclass
    of its pruning methods.
    """

    def is_known(hook: Any) -> bool:
        # Methods of C types have no `__module__`, and some built-in functions have None.
        own, *kinds = [str(getattr(x, "__module__", None)) for x in (hook, *type(hook).__mro__)]
        utils = "torch.nn.utils."
        return own.startswith((utils, "spikefuse.")) or any(k.startswith(utils) for k in kinds)

    found = chain.from_iterable(vars(module)[name].values() for name in _FORWARD_HOOKS)
    return [hook for hook in found if not is_known(hook)]


_GLOBAL_HOOKS = [
    value for name, value in vars(modules).items()
    if name.startswith(("_global_forward", "_global_backward")) and name.endswith("hooks")
]  # fmt: skip


def has_global_hooks() -> bool:
    """Whether there are hooks that run for all modules."""
    return any(_GLOBAL_HOOKS)


def nothing(*_: Any) -> None:
    pass


#: Returns the hooks of a tensor, None or empty if there are none.
backward_hooks: Callable[[Tensor], Any] = (
    attrgetter("_backward_hooks") if hasattr(Tensor, "_backward_hooks") else nothing
)


@contextlib.contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Leave out the hooks of tensors in a `with` block."""
    saved = [(hooks, dict(hooks)) for hooks in map(backward_hooks, tensors) if hooks]
    for hooks, _ in saved:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in saved:
            hooks.update(before)


#: Release the memory that cuBLAS holds for each stream.
release_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", nothing)
_end_allocation = getattr(torch._C, "_cuda_endAllocateToPool", nothing)
_release_pool = getattr(torch._C, "_cuda_releasePool", nothing)


def end_capture(device: int, pool: tuple[int, int]) -> None:
    """End the allocation to the memory of a capture that has failed, and release it."""
    _end_allocation(device, pool)
    _release_pool(device, pool)
