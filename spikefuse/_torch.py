"""The private names of PyTorch that this package uses; no other file uses one.

For each name there is a fall-back that uses public names only, which takes its place in versions of
PyTorch that lack it. `tests/test_torch.py` compares them. Times are those of a call, with torch
2.13 on one core of a server:

- `_python_dispatch.TorchDispatchMode` records the operations of a step, from which kernels are
  made. PyTorch documents it, but no public module has it. Without it, neurons run in the eager
  loop, `impl="reference"`, which takes 10 to 100 times as long.
- `_len_torch_dispatch_stack` (0.07 us) tells whether an eager call may skip the dispatcher. Without
  it, all calls are operations of the library, which take 150 us more.
- `_get_current_graph_task_keep_graph` (0.1 us) tells whether backward may overwrite what forward
  saved. Without it, the backward of a recurrent layer takes the memory of one more sequence.
- `_top_saved_tensors_default_hooks` (0.09 us) returns the active hook. To see whether there is any,
  in public, takes 4.5 us, or 35 us if there is; spikes are not packed under it then.
- `_version` (0.06 us) counts the changes of a tensor in place. To hash its values takes 60 us for
  10,000 floats on a CPU, and waits for a GPU.
- `_dynamo.lookup_backend` returns Inductor as a function of a graph. Without it, graphs run eagerly.
- `_dynamo_marked_constant` is what `torch.compiler.assume_constant_result` sets, which first
  imports TorchDynamo: 2 s more for `import spikefuse`.
- `_execution_engine` differentiates inside of the tracer's modes, which `torch.autograd.grad` leaves,
  so that a derivative that reads shapes is refused; and calls a function at the end of a backward
  pass. Without it, a function is called at once, and waits longer.
- `_replicate_for_data_parallel` is a method of `nn.Module` that `nn.DataParallel` calls. Modules that
  override it are not copied, which would split their time.
- `_cuda_clearCublasWorkspaces` lets a CUDA graph own the memory that cuBLAS uses. Without it, call
  no network that Inductor has recorded as a CUDA graph after ours.
- `_cuda_endAllocateToPool` and `_cuda_releasePool` end a capture that CUDA has invalidated. Without
  them, its memory is lost until the process ends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.autograd import Variable
from torch.autograd.graph import disable_saved_tensors_hooks

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
    from torch.utils._python_dispatch import TorchDispatchMode
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
_top_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


def saved_tensors_hook() -> Any:
    """Return the pack hook that is active, None if there is none."""
    if _top_hooks is None:
        return any_saved_tensors_hook()
    hooks = _top_hooks(False)
    return None if hooks is None else hooks[0]


def any_saved_tensors_hook() -> Any:
    """Return something if a saved-tensor hook is active, else None."""
    try:
        with disable_saved_tensors_hooks("a look whether there are hooks"):
            return None
    except RuntimeError:
        return "unknown"


def version(x: Tensor) -> int:
    """Return a number that differs after `x` has been changed in place."""
    return x._version


def hashed(x: Tensor) -> int:
    return hash(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


if not hasattr(Tensor, "_version"):
    version = hashed


def inductor(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph by Inductor."""
    try:
        compile_graph = importlib.import_module("torch._dynamo").lookup_backend("inductor")
    except (ImportError, AttributeError):
        return gm
    return compile_graph(gm, example_inputs)  # type: ignore[no-any-return]


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


def nothing(*_: Any) -> None:
    pass


#: Release the memory that cuBLAS holds for each stream.
release_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", nothing)
_end_allocation = getattr(torch._C, "_cuda_endAllocateToPool", nothing)
_release_pool = getattr(torch._C, "_cuda_releasePool", nothing)


def end_capture(device: int, pool: tuple[int, int]) -> None:
    """End the allocation to the memory of a capture that has failed, and release it."""
    _end_allocation(device, pool)
    _release_pool(device, pool)
