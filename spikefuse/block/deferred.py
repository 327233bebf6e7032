"""Batch norms that defer their result, so that a neuron that reads it computes both as one block.

A `FusedNorm` (see `fused_norm.py`) called inside `Temporal` returns a `DeferredNorm`: a tensor that
knows its shape, but not its values. An addition extends it by a residual and a neuron runs it as a
block. Any other reader gets the values, computed as PyTorch would have computed them at the call.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from spikefuse.block.block import scan
from spikefuse.nn.call import Scan, TemporalCall, active
from spikefuse.nn.neuron import Deferred, Neuron


@dataclass(frozen=True)
class Outcome:
    """What became of the last result of a norm.

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

_requires_grad = operator.attrgetter("requires_grad")

# Settings of a norm that a deferred computation restores.
_SETTINGS = ("training", "track_running_stats", "momentum", "eps")
_get_settings = operator.itemgetter(*_SETTINGS)


class NormCall:
    """One call of a norm. Its running statistics are updated once, by the first reader."""

    def __init__(self, norm: _BatchNorm, compute: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.norm, self.compute, self.x = norm, compute, x
        self.temporal = active.call
        self.deferrals = None if self.temporal is None else _deferrals(self.temporal)
        self.grad = torch.is_grad_enabled()
        device = x.device.type
        enabled = torch.is_autocast_enabled(device)
        self.autocast = device, torch.get_autocast_dtype(device) if enabled else None, enabled
        self.settings = _settings(norm)
        self.watched = tensors_of(norm, x)
        self.versions = [t._version for t in self.watched]
        self.needs_grad = self.grad and any(map(_requires_grad, self.watched))
        self.settled = False
        self.result: tuple[Tensor, int] | None = None  # with its version

    @property
    def can_fuse(self) -> bool:
        """Whether a block that is run now computes what this call would have computed."""
        return (
            not self.settled
            and self.temporal is active.call
            and self.grad == torch.is_grad_enabled()
            and self.settings == _settings(self.norm)
        )

    def fuse(self, neuron: Neuron, residual: bool) -> None:
        """Record that a block is about to update the statistics."""
        self.check()
        self._settle(Outcome(neuron, residual))

    def value(self, reader: str) -> Tensor:
        """The normalised tensor, computed with the modes of the call."""
        if self.result is None:
            y = self._compute()
            self.result = y, y._version
            if self.deferrals is not None:
                self.deferrals.computed.add(self.norm)
            if not self.settled:
                self._settle(Outcome(None, reason=f"its result was read by {reader}"))
        return self.result[0]

    def original_value(self, reader: str) -> Tensor:
        """The same before changes in place by those who have read it."""
        y = self.value(reader)
        assert self.result is not None
        return y if y._version == self.result[1] else self._compute()

    def _compute(self) -> Tensor:
        self.check()
        with self.modes(), self._norm_as_called():
            return self.compute(self.x)

    def gradients(self, grad: Tensor) -> list[Tensor | None]:
        """Gradients of x, weight and bias, those that there are, of this call alone."""
        self.check()
        norm, names = (
            self.norm,
            [n for n in ("weight", "bias") if getattr(self.norm, n) is not None],
        )
        x = self.x.detach().requires_grad_(self.x.requires_grad)
        before = dict(norm._parameters)
        own = {
            n: t.detach().requires_grad_(t.requires_grad)
            for n in names
            if (t := before[n]) is not None
        }
        norm._parameters.update(own)  # type: ignore[arg-type]
        try:
            with self.modes(), self._norm_as_called():
                y = self.compute(x)
        finally:
            norm._parameters.update(before)
        leaves = [x, *own.values()]
        found = iter(torch.autograd.grad(y, [t for t in leaves if t.requires_grad], grad))
        return [next(found) if t.requires_grad else None for t in leaves]

    def check(self) -> None:
        """Refuse tensors that were changed after the call."""
        for tensor, version in zip(self.watched, self.versions, strict=True):
            if tensor._version != version:
                raise _changed(tensor, "the batch norm")
        # A parameter may have been replaced as a whole.
        now = tensors_of(self.norm, self.x)
        if any(map(operator.is_not, self.watched, now)):
            raise RuntimeError(
                "a parameter or buffer of a fused batch norm was replaced after the norm was "
                "called and before its result was used: replace it before the call"
            )

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """The modes of gradients and autocast at the time of the call."""
        device, dtype, enabled = self.autocast
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(torch.autocast(device, dtype, enabled))
            yield

    @contextlib.contextmanager
    def _norm_as_called(self) -> Iterator[None]:
        norm, settings = self.norm, list(self.settings)
        if self.settled:
            settings[1] = False  # the statistics of this call are in the running ones already
        before = _settings(norm)
        norm.__dict__.update(zip(_SETTINGS, settings, strict=True))
        try:
            yield
        finally:
            norm.__dict__.update(zip(_SETTINGS, before, strict=True))

    def _settle(self, outcome: Outcome) -> None:
        self.settled = True
        outcomes[self.norm] = outcome
        if self.deferrals is not None:
            self.deferrals.pending.pop(self.norm, None)


class Terms:
    """What a deferred tensor is the sum of: the result of a norm, and perhaps a residual."""

    def __init__(self, call: NormCall, residual: Tensor | None = None) -> None:
        self.call, self.residual = call, residual
        self.version = 0 if residual is None else residual._version
        self.replacement: Terms | None = None  # after an addition in place
        self.needs_grad = False
        self.is_routed = False  # whether gradients that arrive at the tensor are passed on
        self._sum: tuple[Tensor, int] | None = None  # with its version

    @property
    def latest(self) -> Terms:
        return self if self.replacement is None else self.replacement.latest

    @property
    def extendable(self) -> bool:
        return self.residual is None and self.replacement is None and self.call.can_fuse

    @property
    def is_computed(self) -> bool:
        if self.replacement is not None:
            return self.replacement.is_computed
        return (self.call.result if self.residual is None else self._sum) is not None

    @property
    def is_current(self) -> bool:
        """Whether the inputs are as they were when the norm and the addition were called."""
        if self.replacement is not None:
            return self.replacement.is_current
        residual = self.residual
        versions = [t._version for t in self.call.watched]
        return versions == self.call.versions and (
            residual is None or residual._version == self.version
        )

    def tensors(self) -> list[Tensor]:
        norm, residual = self.call.norm, self.residual
        found = (self.call.x, norm.weight, norm.bias, residual)
        return [t for t in found if t is not None]

    def value(self, reader: str) -> Tensor:
        if self.replacement is not None:
            return self.replacement.value(reader)
        if self.residual is None:
            return self.call.value(reader)
        if self._sum is None:
            self._check()
            value = self.call.original_value(reader)
            with self.call.modes():
                y = value + self.residual
            self._sum = y, y._version
        return self._sum[0]

    @property
    def is_changed(self) -> bool:
        """Whether a reader changed the values in place."""
        read = self.call.result if self.residual is None else self._sum
        return self.replacement is not None or (read is not None and read[0]._version != read[1])

    def gradients(self, grad: Tensor) -> list[Tensor | None]:
        """Gradients of `tensors()` from that of the sum."""
        found = self.call.gradients(grad)
        return found if self.residual is None else [*found, grad]

    def block(self, neuron: Neuron) -> tuple[Scan, tuple[Tensor, ...]]:
        """The scan of a neuron behind the norm, and its inputs."""
        call, residual = self.call, self.residual
        if self._sum is not None or not call.can_fuse or len(type(neuron).input_names) != 1:
            return neuron._scan, (self.value(type(neuron).__name__),)
        self._check()
        call.fuse(neuron, residual is not None)
        inputs = (call.x,) if residual is None else (call.x, residual)
        return partial(scan, call.norm, neuron, None), inputs

    def _check(self) -> None:
        if self.residual is not None and self.residual._version != self.version:
            raise _changed(self.residual, "the addition")


class DeferredNorm(Deferred, Tensor):
    """The result of a `FusedNorm`, or its sum with a residual, before anybody has read it."""

    terms: Terms

    @staticmethod
    def of(terms: Terms) -> DeferredNorm:
        x, residual = terms.call.x, terms.residual
        needed = terms.call.needs_grad or (
            terms.call.grad and residual is not None and residual.requires_grad
        )
        deferred: DeferredNorm = Tensor._make_wrapper_subclass(
            DeferredNorm, x.shape, dtype=x.dtype, device=x.device, requires_grad=needed
        )
        deferred.terms, terms.needs_grad = terms, needed
        return deferred

    def _read(self, reader: str) -> Tensor:
        """The values, for a reader that does not record an edge of autograd's graph to them."""
        if self.terms.needs_grad and not torch.is_grad_enabled():
            self._route_gradient()
        return self.terms.value(reader)

    def _route_gradient(self) -> None:
        """Pass a gradient that arrives here on to what the values are computed from. It arrives
        only if C++ code, such as the `apply` of an autograd.Function, took this tensor itself."""
        if self.terms.is_routed:
            return
        self.terms.is_routed = True
        terms = self.terms

        def route(grad: Tensor) -> None:
            if terms.is_changed:
                raise RuntimeError(
                    "the result of a fused batch norm was changed in place and given to an "
                    "autograd.Function: change a copy"
                )
            pairs = zip(terms.tensors(), terms.gradients(grad), strict=True)
            found = [(t, g) for t, g in pairs if t.requires_grad and g is not None]
            torch.autograd.backward([t for t, _ in found], [g for _, g in found])

        with torch._C.DisableTorchFunctionSubclass():
            self.register_hook(route)

    def block(self, neuron: Neuron) -> tuple[Scan, tuple[Tensor, ...]]:
        terms = self.terms.latest
        if terms.call.deferrals is not None:
            terms.call.deferrals.read.append(weakref.ref(self))
        return terms.block(neuron)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA and not args[0].terms.is_computed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ADDITIONS and len(args) == 2 and kwargs in ({}, {"alpha": 1}):
            extended = _extended(func in _IN_PLACE, *args)
            if extended is not None:
                return extended
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


class Deferrals:
    """The deferred results of one call of `Temporal`."""

    def __init__(self) -> None:
        self.pending: dict[nn.Module, NormCall] = {}
        self.computed: set[nn.Module] = set()
        self.read: list[weakref.ref[DeferredNorm]] = []

    def finish(self) -> None:
        """Compute what nobody has read, for the running statistics, and what somebody still holds,
        while its inputs are as they were."""
        for call in list(self.pending.values()):
            call.value("nothing, before the call ended")
        for reference in self.read:
            deferred = reference()
            if deferred is not None and deferred.terms.is_current:
                deferred.terms.value("nothing")

    def close(self) -> None:
        """Let go of the tensors, also after an exception."""
        self.pending.clear()
        self.read.clear()


def defer(norm: _BatchNorm, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The result of a norm of `x`, which `compute` gives when it is needed."""
    call = NormCall(norm, compute, x)
    deferrals = call.deferrals
    if deferrals is not None:
        pending = deferrals.pending
        if norm in pending:  # its statistics come first
            pending[norm].value("a second call of the norm")
        pending[norm] = call
        if norm in deferrals.computed:
            # Autograd would take a block's update of the statistics for a change of those that
            # the earlier call has saved.
            return call.value("a second call of the norm")
    return DeferredNorm.of(Terms(call))


def materialized(x: Any) -> Any:
    """`x`, computed if it is deferred."""
    return x.terms.value("materialized") if isinstance(x, DeferredNorm) else x


def _deferrals(temporal: TemporalCall) -> Deferrals:
    if temporal.deferred is None:
        temporal.deferred = Deferrals()
    assert isinstance(temporal.deferred, Deferrals)
    return temporal.deferred


def _extended(in_place: bool, first: Any, second: Any) -> DeferredNorm | None:
    """The sum of two values as a deferred one, if one of them can be extended."""
    if in_place and not isinstance(first, DeferredNorm):
        return None
    deferred, other = first, second
    if not isinstance(first, DeferredNorm) or (not in_place and _is_newer(second, first)):
        deferred, other = second, first
    if not deferred.terms.extendable:
        return None
    if isinstance(other, DeferredNorm):
        other = other.terms.value("add")
    call = deferred.terms.call
    x = call.x
    # What `other` was computed from may be this very call.
    if (
        not call.can_fuse
        or not isinstance(other, Tensor)
        or not is_ordinary(other)
        or other.is_inference()
        or (other.shape, other.dtype, other.device) != (x.shape, x.dtype, x.device)
        or other.layout is not torch.strided
    ):
        return None
    terms = Terms(call, other)
    if in_place:
        deferred.terms.replacement = terms
    return DeferredNorm.of(terms)


def _is_newer(second: Any, first: DeferredNorm) -> bool:
    """Of two norms in a sum the one called last is fused."""
    if not isinstance(second, DeferredNorm) or not second.terms.extendable:
        return False
    deferrals = first.terms.call.deferrals
    if not first.terms.extendable or deferrals is None:
        return not first.terms.extendable
    order = list(deferrals.pending)
    return order.index(second.terms.call.norm) > order.index(first.terms.call.norm)


def _settings(norm: nn.Module) -> tuple[Any, ...]:
    return _get_settings(norm.__dict__)


def tensors_of(norm: _BatchNorm, x: Tensor) -> list[Tensor]:
    """All that the result of the norm depends on."""
    own = norm._parameters
    if "weight" in own and "bias" in own:
        weight, bias = own["weight"], own["bias"]
    else:  # such as parametrized ones
        weight, bias = norm.weight, norm.bias
    found = [x]
    if weight is not None:
        found.append(weight)
    if bias is not None:
        found.append(bias)
    if not norm.training:
        found += [t for t in (norm.running_mean, norm.running_var) if t is not None]
    return found


def is_ordinary(x: Tensor) -> bool:
    """Whether `x` is no subclass, and no transform of functions follows it."""
    return type(x) in (
        Tensor,
        nn.Parameter,
    ) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _changed(tensor: Tensor, what: str) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {list(tensor.shape)} was changed in place after {what} that reads it "
        "and before the result was used, which a fused network defers: change a copy, or use the "
        "result first"
    )


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name


_ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_IN_PLACE = {Tensor.add_, Tensor.__iadd__}
# What is known without the values.
_METADATA = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.__len__,
    Tensor.is_floating_point,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_cpu")
    ),
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
}
