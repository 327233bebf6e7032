"""Batch norms that defer their result, so that a neuron that reads it computes both as one block.

A `FusedNorm` (see `fused_norm.py`) called inside `Temporal` returns a `DeferredNorm`: a tensor that
knows its shape, but not its values. An addition extends it by a residual and a neuron runs it as a
block. Any other reader gets the values, computed as PyTorch would have computed them at the call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from spikefuse.block.block import can_normalize_residual, scan
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.call import ADDITIONS, METADATA, Scan, TemporalCall, active
from spikefuse.nn.neuron import Deferred, scan_neuron
from spikefuse.scan.op import PLAIN


class Outcome(NamedTuple):
    """How the last result of a norm was computed.

    Attributes:
        neuron: the neuron that it was fused with, or None.
        residual: whether a residual was added before the neuron.
        reason: why it was not fused, if it was not.
    """

    neuron: Neuron | None
    residual: bool = False
    reason: str = ""


#: The outcome of the last call of each norm.
outcomes: weakref.WeakKeyDictionary[nn.Module, Outcome] = weakref.WeakKeyDictionary()

_call_numbers = count()
_requires_grad, _version = attrgetter("requires_grad"), attrgetter("_version")
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class NormCall:
    """One call of a norm. Its running statistics are updated once, by the first reader.

    Attributes:
        norm: the norm as it was at the call: a copy with the same parameters and buffers.
        read: the tensors that determine the result, the input first.
    """

    has_updated_stats = False
    result: tuple[Tensor, int] | None = None  # with its version

    def __init__(self, module: _BatchNorm, read: list[Tensor]) -> None:
        self.module, self.norm, self.read, self.x = module, copy_of(module), read, read[0]
        self.number, self.temporal = next(_call_numbers), active.call
        self.deferrals = None if self.temporal is None else deferrals_of(self.temporal)
        self.grad, self.hooks = torch.is_grad_enabled(), _top_hooks(False)
        device = "cuda" if self.x.is_cuda else "cpu"
        enabled = torch.is_autocast_enabled(device)
        self.autocast = device, torch.get_autocast_dtype(device) if enabled else None, enabled
        self.versions = list(map(_version, read))
        self.needs_grad = self.grad and True in map(_requires_grad, read)

    def can_fuse(self, neuron: Neuron | None = None) -> bool:
        """Whether a block that is run now computes what this call would have computed."""
        temporal = self.temporal
        return (
            not self.has_updated_stats
            and temporal is active.call
            and self.grad == torch.is_grad_enabled()
            and _top_hooks(False) in (None, self.hooks)
            and (neuron is None or temporal is None or id(neuron) in temporal.names)
        )

    def value(self, reader: str) -> Tensor:
        """The normalized tensor, computed with the modes of the call."""
        if self.result is None:
            y = self._compute()
            self.result = y, y._version
            if self.deferrals is not None:
                self.deferrals.computed.add(self.module)
            self.finish(Outcome(None, reason=f"its result was read by {reader}"))
        return self.result[0]

    def unchanged_value(self, reader: str) -> Tensor:
        """The same as it was before its readers changed it in place."""
        y = self.value(reader)
        assert self.result is not None
        return y if y._version == self.result[1] else self._compute()

    def _compute(self) -> Tensor:
        self.check_unchanged()
        norm = copy_of(self.norm)
        norm.__dict__["track_running_stats"] &= not self.has_updated_stats
        with self.modes():
            return norm.plain(self.x)  # type: ignore[operator]

    def finish(self, outcome: Outcome) -> None:
        """Record that the running statistics are updated."""
        if not self.has_updated_stats:
            # A gradient hook may hold this call, and the final states of `temporal` the hook.
            self.has_updated_stats, self.temporal = True, None
            outcomes[self.module] = outcome
            if self.deferrals is not None:
                self.deferrals.pending.pop(self.module, None)

    def gradients(self, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The tensors that this call alone needs gradients of, with their gradients."""
        self.check_unchanged()
        leaves = {t: t.detach().requires_grad_() for t in self.read if t.requires_grad}
        norm, x = copy_of(self.norm), leaves.get(self.x, self.x)
        norm.__dict__["track_running_stats"] = False
        for name in ("weight", "bias"):
            p = norm.__dict__[name]
            norm.__dict__[name] = leaves.get(p, p)
        with self.modes():
            y = norm.plain(x)  # type: ignore[operator]
        grads = torch.autograd.grad(y, list(leaves.values()), grad)
        return list(zip(leaves, grads, strict=True))

    def check_unchanged(self, residual: Tensor | None = None, version: int = 0) -> None:
        """Refuse tensors that were changed after the call, and a residual of another version."""
        if list(map(_version, self.read)) != self.versions:
            raise _changed("a tensor that a batch norm reads", self.x)
        if residual is not None and residual._version != version:
            raise _changed("a residual", residual)

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """The modes at the time of the call."""
        device, dtype, enabled = self.autocast
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(torch.autocast(device, dtype, enabled))
            if _top_hooks(False) not in (None, self.hooks):
                # Such as those of torch.utils.checkpoint, which would expect the same tensors again
                # when it recomputes a function that reads this result.
                stack.enter_context(saved_tensors_hooks(_identity, _identity))
            yield


class DeferredNorm(Deferred, Tensor):
    """The result of a `FusedNorm`, or its sum with a residual, before anything has read it. The
    residual may be the result of another call of a norm."""

    call: NormCall
    needs_grad: bool
    residual: Tensor | NormCall | None = None
    residual_version = 0
    total: tuple[Tensor, int] | None = None  # once computed, with its version
    is_routed = False  # whether gradients that arrive here are passed on
    has_history = False  # whether `total` is connected to the autograd.Function that returned this

    @staticmethod
    def of(call: NormCall, residual: Tensor | NormCall | None = None) -> DeferredNorm:
        x, needed = call.x, call.needs_grad
        if residual is not None and call.grad:
            needed = needed or _needs_grad(residual)
        deferred: DeferredNorm = Tensor._make_wrapper_subclass(
            DeferredNorm, x.shape, dtype=x.dtype, device=x.device, requires_grad=needed
        )
        deferred.call, deferred.needs_grad = call, needed
        if residual is not None:
            deferred._attach(residual)
        return deferred

    def _attach(self, residual: Tensor | NormCall) -> None:
        """Make this the sum with a residual."""
        if isinstance(residual, NormCall) and residual.number > self.call.number:
            self.call, residual = residual, self.call  # as in `_add`
        self.residual = residual
        if isinstance(residual, Tensor):
            self.residual_version = residual._version

    def block(self, neuron: Neuron) -> tuple[Scan, tuple[Tensor, ...]]:
        call, residual = self.call, self.residual
        if call.deferrals is not None:
            call.deferrals.read.append(weakref.ref(self))
        is_read = self.total is not None
        if is_read or not call.can_fuse(neuron) or len(type(neuron).input_names) != 1:
            return partial(scan_neuron, neuron), (self._read(type(neuron).__name__),)
        norms: tuple[_BatchNorm, ...] = (call.norm,)
        if not isinstance(residual, NormCall):
            call.check_unchanged(residual, self.residual_version)
        elif residual.result is None and residual.can_fuse(neuron):
            call.check_unchanged()
            residual.check_unchanged()
            residual.finish(Outcome(neuron, residual=True))
            norms, residual = (call.norm, residual.norm), residual.x
        else:
            call.check_unchanged()
            residual = residual.unchanged_value("add")
        call.finish(Outcome(neuron, residual is not None))
        inputs = (call.x,) if residual is None else (call.x, residual)
        return partial(scan, norms, neuron, None), inputs

    def value(self, reader: str) -> Tensor:
        """The values, computed if nothing has read them yet."""
        if not (self.call.grad or self.has_history) and torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                if self.grad_fn is not None:
                    y: Tensor = _WithHistory.apply(self)
                    self.total, self.has_history = (y, y._version), True
        if self.total is None:
            if self.residual is None:
                return self.call.value(reader)
            value, residual = self.call.unchanged_value(reader), self.residual
            if isinstance(residual, NormCall):
                residual = residual.unchanged_value(reader)
            else:
                self.call.check_unchanged(residual, self.residual_version)
            with self.call.modes():
                y = value + residual
            self.total = y, y._version
        return self.total[0]

    def extended(self, other: Tensor | NormCall, in_place: bool) -> DeferredNorm | None:
        """The sum with a residual; None if it cannot be deferred."""
        call, x = self.call, self.call.x
        if self.residual is not None or not call.can_fuse():
            return None
        y = other.x if isinstance(other, NormCall) else other
        if (
            not is_ordinary(y)
            or y.is_inference()
            or (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device)
            or y.layout is not torch.strided
        ):
            return None
        if not in_place:
            return DeferredNorm.of(call, other)
        if self.is_routed or (call.grad and _needs_grad(other) and not self.needs_grad):
            return None
        self._attach(other)
        return self

    def can_normalize(self, other: DeferredNorm) -> bool:
        """Whether a block can also compute another norm, which is the residual."""
        call, theirs = self.call, other.call
        return (
            (other.residual, other.total, theirs.result) == (None, None, None)
            and theirs is not call
            and theirs.can_fuse()
            and can_normalize_residual(call.norm, theirs.norm)
        )

    def can_recompute(self) -> bool:
        """Whether what the values are computed from is unchanged."""
        residual, calls = self.residual, [self.call]
        if isinstance(residual, NormCall):
            calls.append(residual)
        elif residual is not None and residual._version != self.residual_version:
            return False
        return all(list(map(_version, call.read)) == call.versions for call in calls)

    def _read(self, reader: str) -> Tensor:
        """The values, for a reader that may have recorded an edge of autograd's graph to this
        tensor instead of to them."""
        if self.needs_grad and not (self.is_routed or torch.compiler.is_compiling()):
            self._route_gradient()
        return self.value(reader)

    def _route_gradient(self) -> None:
        """Start a backward pass of what the values are computed from for a gradient that arrives
        here, which is only if C++ code, such as the `apply` of an autograd.Function, took this."""
        self.is_routed, this = True, weakref.ref(self)
        call, residual = self.call, self.residual

        def route(grad: Tensor) -> None:
            deferred = this()
            read = None if deferred is None else deferred.total or call.result
            if read is not None and read[0]._version != read[1]:
                raise RuntimeError(
                    "the result of a fused batch norm was changed in place and given to an "
                    "autograd.Function: change a copy"
                )
            gradients = call.gradients(grad) if call.needs_grad else []
            if isinstance(residual, NormCall):
                gradients += residual.gradients(grad) if residual.needs_grad else []
            elif residual is not None and residual.requires_grad:
                gradients.append((residual, grad))
            # Gradients of other readers may take the same path.
            torch.autograd.backward(
                [t for t, _ in gradients], [g for _, g in gradients], retain_graph=True
            )

        with torch._C.DisableTorchFunctionSubclass():
            self.register_hook(route)

    def _connect(self) -> None:
        """Give this tensor the history of its values, in place of `_route_gradient`."""
        with torch._C.DisableTorchFunctionSubclass():
            if not (self.is_leaf and self.is_routed):  # else perhaps a graph has this leaf
                self.is_routed = True
                # Autograd gives a leaf that requires a gradient no history.
                _HistoryOf.apply(self.detach_(), self.value("requires_grad"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _REQUIRES_GRAD and args[0].needs_grad and torch.is_grad_enabled():
            args[0]._connect()  # perhaps for the autograd.Function of a hook
        if func in METADATA and (args[0].total or args[0].call.result) is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ADDITIONS and len(args) == 2 and kwargs in ({}, {"alpha": 1}):
            total = _add(args[0], args[1], func in _IN_PLACE)
            if total is not None:
                return total
        name = _name(func)
        args, kwargs = pytree.tree_map_only(DeferredNorm, lambda d: d._read(name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Serve C++ code, which does not ask `__torch_function__`; below autograd."""
        if func._schema.is_mutable:
            raise RuntimeError(
                f"{func} changes the result of a fused batch norm in place from C++: clone it first"
            )
        args, kwargs = pytree.tree_map_only(
            DeferredNorm, lambda d: d._read(str(func)).detach(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


class _WithHistory(torch.autograd.Function):
    """The values of a `DeferredNorm` that an autograd.Function has returned. Its gradient goes to
    that function."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredNorm) -> Tensor:
        return deferred.value("an autograd.Function")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _HistoryOf(torch.autograd.Function):
    """A `DeferredNorm` with the history of its values."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredNorm, value: Tensor) -> Tensor:
        ctx.mark_dirty(deferred)
        return deferred

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


class Deferrals:
    """The deferred results of one call of `Temporal`."""

    def __init__(self) -> None:
        self.pending: dict[nn.Module, NormCall] = {}
        self.computed: set[nn.Module] = set()
        self.read: list[weakref.ref[DeferredNorm]] = []

    def finish(self) -> None:
        """Compute what nothing has read, for the running statistics, and what is still referenced,
        while its inputs are unchanged."""
        for call in list(self.pending.values()):
            call.value("nothing, before the call ended")
        for reference in self.read:
            deferred = reference()
            if deferred is not None and deferred.can_recompute():
                deferred.value("nothing")

    def close(self) -> None:
        """Release the tensors, also after an exception."""
        self.pending.clear()
        self.read.clear()


def deferrals_of(temporal: TemporalCall) -> Deferrals:
    """The deferred results of a call, none at first."""
    if temporal.deferred is None:
        temporal.deferred = Deferrals()
    assert isinstance(temporal.deferred, Deferrals)
    return temporal.deferred


def compute_earlier(norm: _BatchNorm) -> None:
    """Prepare a call of a norm that is computed at once: earlier calls update the running
    statistics before it, and later ones are not deferred."""
    if active.call is not None:
        deferrals = deferrals_of(active.call)
        if norm in deferrals.pending:
            deferrals.pending[norm].value("a second call of the norm")
        deferrals.computed.add(norm)


def defer(norm: _BatchNorm, read: list[Tensor]) -> Tensor:
    """The result of a norm, computed when it is needed.

    Args:
        read: all tensors that determine it, the input first.
    """
    call = NormCall(norm, read)
    deferrals = call.deferrals
    if deferrals is not None:
        pending = deferrals.pending
        if norm in pending:  # its statistics come first
            pending[norm].value("a second call of the norm")
        pending[norm] = call
        if norm in deferrals.computed:
            # To autograd, a block's update of the statistics would be a change of what the earlier
            # call has saved.
            return call.value("a second call of the norm")
    return DeferredNorm.of(call)


def materialized(x: Any) -> Any:
    """`x`, computed if it is deferred."""
    return x.value("materialized") if isinstance(x, DeferredNorm) else x


def copy_of(norm: _BatchNorm) -> _BatchNorm:
    """A copy with the same parameters, which later assignments to the module do not change."""
    copy = object.__new__(type(norm))
    settings = copy.__dict__
    settings.update(norm.__dict__)
    # As plain attributes, which nn.Module finds faster.
    settings.update(norm._parameters)
    settings.update(norm._buffers)
    settings["_parameters"] = settings["_buffers"] = {}
    settings.setdefault("_original", norm)
    return copy


def original(norm: _BatchNorm) -> _BatchNorm:
    """The module of which `norm` is a copy, or `norm` itself."""
    module: _BatchNorm = norm.__dict__.get("_original", norm)
    return module


def is_ordinary(x: Any) -> bool:
    """Whether `x` is a tensor of no subclass, and no transform of functions follows it."""
    return type(x) in PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _add(first: Any, second: Any, in_place: bool) -> DeferredNorm | None:
    """The sum of two values, one of them deferred, as a deferred one; None if it cannot be."""
    deferred, other = first, second
    if isinstance(first, DeferredNorm) and isinstance(second, DeferredNorm):
        # The norm called last is the first of the block; the other is that of its residual.
        if not in_place and second.residual is None and second.call.number > first.call.number:
            deferred, other = second, first
    elif isinstance(second, DeferredNorm):
        if in_place:
            return None
        deferred, other = second, first
    if isinstance(other, DeferredNorm):
        if deferred.residual is not None or not deferred.call.can_fuse():
            return None
        # What `other` was computed from may be this very call.
        other = other.call if deferred.can_normalize(other) else other.value("add")
    return deferred.extended(other, in_place)


def _needs_grad(x: Tensor | NormCall) -> bool:
    return x.needs_grad if isinstance(x, NormCall) else x.requires_grad


def _identity(x: Tensor) -> Tensor:
    return x


def _changed(what: str, x: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{what} ({list(x.shape)}) was changed in place after the call and before the result was "
        "used, which a fused network defers: change a copy, or use the result first"
    )


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name


_IN_PLACE = {Tensor.add_, Tensor.__iadd__}
_ADDITIONS = ADDITIONS | _IN_PLACE
