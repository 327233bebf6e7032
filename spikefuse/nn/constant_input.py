"""Input that is the same at each step: layers before the first neuron compute one step.

`Temporal` passes such an input to its network as a `ConstantSequence`. Deterministic functions of
single rows compute one step of it, a neuron reads that step T times, and any other operation gets
all T*B rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spikefuse.nn.activations import FUNCTIONS
from spikefuse.scan.layout import flatten_steps, unflatten_steps


class ConstantSequence(Tensor):
    """A folded sequence `[T*B, ...]` that stores one step, `rows` `[B, ...]`.

    It is part of autograd's graph, as `rows` repeated T times, so that an operation that does not
    know this class computes values and gradients as usual.
    """

    rows: Tensor
    num_steps: int
    _all_rows: Tensor | None
    _is_shared: bool
    _is_aliased: bool

    @staticmethod
    def of(rows: Tensor, num_steps: int) -> ConstantSequence:
        x: ConstantSequence = _Repeat.apply(rows, num_steps)
        x.rows, x.num_steps, x._all_rows = rows, num_steps, None
        x._is_shared, x._is_aliased = True, False
        return x

    @property
    def is_constant(self) -> bool:
        """Whether `rows` still gives the values, and gradients may bypass this tensor."""
        # The forward of an autograd.Function computes rows without history.
        return self._is_shared and self.rows.requires_grad == self.requires_grad

    def all_rows(self) -> Tensor:
        """Return the values `[T*B, ...]`, without history."""
        if self._all_rows is None:
            self._all_rows = torch.cat([self.rows.detach()] * self.num_steps)
        return self._all_rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(t in (cls, Tensor, nn.Parameter) for t in types):
            # Another subclass: it gets tensors of all rows.
            with torch._C.DisableTorchFunctionSubclass():
                args, kwargs = pytree.tree_map_only(cls, lambda x: x.view(x.shape), (args, kwargs))
            return func(*args, **kwargs)
        result = _compute_rows(func, args, kwargs)
        if result is not None:
            return result
        if func in _READERS:
            args[0]._is_shared = False
            args = (args[0].all_rows(), *args[1:])
        elif func in _GRADIENT_HOOKS:
            args[0]._is_shared = False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute `func` of all rows, below autograd."""
        originals: dict[int, ConstantSequence] = {}

        def all_rows(x: ConstantSequence) -> Tensor:
            y = x.all_rows()
            originals[id(y)] = x
            return y

        args, kwargs = pytree.tree_map_only(cls, all_rows, (args, kwargs or {}))
        if any(argument.alias_info is not None for argument in func._schema.arguments):
            # A view may be changed in place, too.
            for x in originals.values():
                if x._is_aliased and func._schema.is_mutable:
                    raise RuntimeError(
                        f"{func} changes a constant input that has a view in place: change a copy"
                    )
                x._is_shared = False
        results = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda y: originals.get(id(y), y), results)


class _Repeat(torch.autograd.Function):
    """A `ConstantSequence` of rows; its gradient is the sum over all steps."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_steps: int) -> Tensor:
        ctx.num_steps = num_steps
        shape = (num_steps * rows.shape[0], *rows.shape[1:])
        return Tensor._make_wrapper_subclass(
            ConstantSequence, shape, dtype=rows.dtype, device=rows.device
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.unflatten(0, (ctx.num_steps, -1)).sum(0), None


def fold(x: Tensor, net: nn.Module) -> Tensor:
    """Return `x` `[T, B, ...]` as `[T*B, ...]`, a `ConstantSequence` if all steps share memory.

    Gradients of single steps, compiled modules and tracers need an ordinary tensor.
    """
    if (
        torch.compiler.is_compiling()
        or x.stride(0) != 0
        or x.shape[0] == 1
        or x.shape[1] == 0
        or type(x) is not Tensor
        or x.requires_grad
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(is_compiled(m) or m._compiled_call_impl is not None for m in net.modules())
    ):
        return flatten_steps(x)
    return ConstantSequence.of(x[0], x.shape[0])


def unfold(x: Tensor, num_steps: int) -> Tensor:
    """Return `[T, B, ...]` of a folded sequence, with T of stride 0 if all steps are the same."""
    if isinstance(x, ConstantSequence) and x.is_constant and x.num_steps == num_steps:
        return x.rows.unsqueeze(0).expand(num_steps, *x.rows.shape)
    return unflatten_steps(x, num_steps)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile or TorchScript made the module, which hides what it contains."""
    # Importing torch._dynamo is slow, and it is loaded if anything is compiled.
    dynamo = sys.modules.get("torch._dynamo")
    is_optimized = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return is_optimized or isinstance(module, torch.jit.ScriptModule)


def _compute_rows(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ConstantSequence | None:
    """Compute one step of a deterministic function that computes each row along dim 0 from that row
    alone, and all rows in the same way; return None for any other call."""
    applies = LAYERS.get(func)
    if applies is None and func not in POINTWISE:
        return None
    sequences = [x for x in (*args, *kwargs.values()) if isinstance(x, ConstantSequence)]
    first = sequences[0]
    if kwargs.get("inplace") or "out" in kwargs or not all(x.is_constant for x in sequences):
        return None
    num_steps, rows = first.num_steps, first.rows
    args = tuple([_rows(x) for x in args])
    kwargs = {name: _rows(x) for name, x in kwargs.items()}
    if applies is None:
        # A tensor that is broadcast along dim 0 treats all rows alike.
        own = [x.rows for x in sequences]
        others = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not all(_same_rows(x, rows) if _is_in(x, own) else _broadcasts(x, rows) for x in others):
            return None
    else:
        is_input = len(sequences) == 1 and bool(args) and args[0] is rows
        if not is_input or rows.ndim < 2 or not applies(*args, **kwargs):
            return None
    y = _batch_norm(num_steps, *args, **kwargs) if func is F.batch_norm else func(*args, **kwargs)
    for x in sequences:
        if y is x.rows:
            return x
    result = ConstantSequence.of(y, num_steps)
    if func in _VIEWS:
        first._is_aliased = result._is_aliased = True
    return result


def _rows(x: Any) -> Any:
    return x.rows if isinstance(x, ConstantSequence) else x


def _is_in(x: Tensor, tensors: list[Tensor]) -> bool:
    return any(x is y for y in tensors)


def _same_rows(x: Tensor, like: Tensor) -> bool:
    return x.ndim == like.ndim and len(x) == len(like)


def _broadcasts(x: Tensor, like: Tensor) -> bool:
    return x.ndim < like.ndim or (x.ndim == like.ndim and len(x) == 1)


def _batch_norm(
    num_steps: int,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    **kwargs: Any,
) -> Tensor:
    """Normalize `x`, one step of several equal ones, and update the running variance for them all.

    Mean and variance of a batch do not change when it is repeated, but the recorded value is the
    variance times n / (n - 1), with n the values per channel.
    """
    before = None if running_var is None else running_var.clone()
    y = F.batch_norm(x, running_mean, running_var, momentum=momentum, **kwargs)
    if running_var is not None and before is not None and kwargs.get("training"):
        values = x.numel() // x.shape[1]
        ratio = num_steps * (values - 1) / (num_steps * values - 1)
        # Not a change that autograd should see: backward in training does not use it.
        variance = running_var.data
        variance.sub_((1 - ratio) * (variance - (1 - momentum) * before))
    return y


def _always(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    return True


def _has_dims(num: int) -> Callable[..., bool]:
    # With one dim less, dim 0 is the channels.
    return lambda x, *args, **kwargs: x.ndim == num


def _can_normalize(x: Tensor, *args: Any, training: bool = False, **kwargs: Any) -> bool:
    # One value per channel has no variance; T of them have.
    return not training or x.numel() > x.shape[1]


def _keeps_rows(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> bool:
    return start_dim % x.ndim > 0


def _normalizes_rows(x: Tensor, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> bool:
    return len(shape) < x.ndim


def _is_off(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return not training


#: Pooling functions over 1, 2 and 3 dims in turn.
POOLS: tuple[Callable[..., Any], ...] = (
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d),
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d),
    *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
)
#: Layers on rows of their first argument, and when they are.
LAYERS: dict[Callable[..., Any], Callable[..., bool]] = {
    F.linear: _always,
    **{conv: _has_dims(n + 3) for n, conv in enumerate((F.conv1d, F.conv2d, F.conv3d))},
    F.batch_norm: _can_normalize,
    F.group_norm: _always,
    F.layer_norm: _normalizes_rows,
    **{pool: _has_dims(n % 3 + 3) for n, pool in enumerate(POOLS)},
    torch.flatten: _keeps_rows,
    Tensor.flatten: _keeps_rows,
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), _is_off),
}
#: Functions of one or several tensors, value by value.
POINTWISE = {
    *(f for f, kind in FUNCTIONS.items() if kind is not nn.RReLU and f.__name__[-1] != "_"),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.neg),
    *(
        getattr(Tensor, name)
        for name in (
            *("relu", "sigmoid", "tanh", "add", "sub", "mul", "div", "neg", "__neg__"),
            *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
            *("__truediv__", "__rtruediv__", "float", "contiguous", "detach", "clone", "to"),
        )
    ),
}
_VIEWS = {torch.flatten, Tensor.flatten, Tensor.detach}
# What accesses memory without a call of an operator.
_READERS = {
    Tensor.numpy,
    Tensor.tolist,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.storage,
    Tensor.data.__get__,  # type: ignore[attr-defined]
    Tensor.__array__,
    Tensor.__deepcopy__,
    Tensor.__dlpack__,
    Tensor.__reduce_ex__,
    Tensor.__repr__,
}
# What needs the gradient of this tensor.
_GRADIENT_HOOKS = {
    Tensor.register_hook,
    Tensor.retain_grad,
}
