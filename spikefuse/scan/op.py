"""The fused scan as a PyTorch operation: library ops, their fakes, and autograd.

A `Call` is a scan without its tensors. `register` makes each kind of call an op of the library and
its backward another one, for torch.compile, fake tensors and subclasses. Eager calls share forward
and backward with the ops but skip the dispatcher, which costs several times a small kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from spikefuse._torch import is_traced
from spikefuse.neurons.checks import is_plain
from spikefuse.neurons.definition import Neuron, with_outputs
from spikefuse.scan import microbatches
from spikefuse.scan.checks import check_backend, check_param, refuse_export, refuse_transforms
from spikefuse.scan.double_backward import no_double_backward, refuse_double_backward
from spikefuse.scan.execution import Execution, execution_of
from spikefuse.scan.kinds import Kinds, as_traced, kinds_of
from spikefuse.scan.microbatches import Gradients
from spikefuse.scan.per_neuron import flattened
from spikefuse.scan.program import Variant, follows_input, prepare, requires_grad, sizes_of
from spikefuse.scan.records import Arguments, MaybeTensors, Results, Tensors, Wanted
from spikefuse.scan.state_passing import StatePassing

library = torch.library.Library("spikefuse", "DEF")
T = TypeVar("T")
Needs = Arguments[bool]


def scan(definition: Neuron, arguments: Arguments[Tensor], wanted: Wanted) -> Results[Tensor]:
    """Run `definition` over dim 0 of the inputs in one kernel; see `spikefuse.reference.scan`.

    Args:
        arguments: without parameters, which are those of the definition.
        wanted: its `impl` is "triton" or "numba".
    """
    inputs, states, _, _, _, passing = arguments
    known = None
    if not (is_traced() or torch.jit.is_tracing()):  # type: ignore[attr-defined]
        key = wanted.impl, wanted.outputs, inputs[0].device
        known = definition.description().cache.get(key)
    program, scalars, params = known or choose(definition, inputs[0], wanted)
    call = Call(program, scalars, passing)
    arguments = Arguments(inputs, states, params, (), scalars, passing)
    if params and max(map(Tensor.dim, params)) > 1:
        arguments, restore = flattened(arguments)
        return restore(execute(call, arguments, wanted))
    return execute(call, arguments, wanted)


def run(program: str, arguments: Arguments[Tensor], wanted: Wanted) -> Results[Tensor]:
    """Run a program, by its name, with gradients of all tensors."""
    return execute(Call(program, arguments.scalars, arguments.passing), arguments, wanted)


@dataclass
class Call:
    """A scan without its tensors: what autograd stores between forward and backward.

    Attributes:
        program: its name.
        execution: of the program on the inputs, known after forward.
    """

    program: str
    scalars: Sequence[float] = ()
    passing: StatePassing | None = None
    execution: Execution | None = field(default=None, init=False)
    #: Where inputs, states, params and prologue end in the list of all tensors.
    _ends: tuple[int, int, int, int] = field(default=(0, 0, 0, 0), init=False)
    #: The name of the library op.
    op: ClassVar[str] = "scan"
    #: The number of first tensors in whose place backward reads what forward has saved.
    replaced: ClassVar[int] = 0
    #: Whether a step reads the first output of the step before, whose start is the last state.
    feeds_back: ClassVar[bool] = False

    def flatten(self, arguments: Arguments[T]) -> list[T]:
        """All tensors of the arguments."""
        inputs, states, params, prologue, *_ = arguments
        a = len(inputs)
        b = a + len(states or ())
        c = b + len(params)
        self._ends = a, b, c, c + len(prologue)
        return [*inputs, *(states or ()), *params, *prologue]

    def unflatten(self, values: Sequence[T]) -> Arguments[T]:
        """The arguments of the last `flatten`, with other values in place of its tensors."""
        (a, b, c, d), scalars = self._ends, self.scalars
        return Arguments(values[:a], values[a:b], values[b:c], values[c:d], scalars, self.passing)

    def forward(
        self, arguments: Arguments[Tensor], wanted: Wanted, ahead: bool = False
    ) -> Results[Tensor]:
        """The results; `ahead` begins to compile the kernels of backward, too."""
        resolved = self.resolve(arguments) if arguments.prologue else arguments
        self.execution = execution = execution_of(self.program, arguments.inputs)
        if self.passing is not None:
            return microbatches.forward(execution, resolved, wanted)
        results = execution.new_results(wanted)
        if ahead and not execution.is_ahead:
            needs = self.unflatten([t.requires_grad for t in self.flatten(arguments)])
            self.compile_backward(resolved, results, needs)
        return execution.forward(resolved, results)

    def backward(
        self,
        arguments: Arguments[Tensor],
        saved: Tensors,
        incoming: Results[Tensor | None],
        needs: Needs,
    ) -> Gradients:
        """The gradients of the arguments, None where not needed.

        Args:
            saved: what forward has saved.
            incoming: the gradients of the results.
        """
        execution = self.execution or execution_of(self.program, arguments.inputs)
        if self.passing is None:
            gradients = execution.new_gradients(needs)
            rebuilds = bool(execution.num_saved and not saved)
            saved = execution.new_saved() if rebuilds else saved
            execution.backward(arguments, saved, incoming, gradients, Variant(rebuild=rebuilds))
            if gradients.params:
                params = execution.reduce(gradients.params, arguments.params)
                gradients = gradients._replace(params=params)
            return gradients
        inputs = execution.new_gradients(Arguments(needs.inputs)).inputs
        scans = microbatches.split(execution, arguments, saved)
        found, _ = microbatches.backward(scans, incoming, needs, inputs)
        states = arguments.states and microbatches.of_states(arguments, found)
        rows = [scan.execution.reduce(g.params, arguments.params)
                for scan, g in zip(scans, found, strict=True)]  # fmt: skip
        return Arguments(inputs, states, microbatches.added(rows))

    def resolve(self, arguments: Arguments[Tensor]) -> Arguments[Tensor]:
        """What the program reads, in place of a prologue."""
        raise NotImplementedError

    def compile_backward(
        self, arguments: Arguments[Tensor], results: Results[Tensor], needs: Needs
    ) -> None:
        """Begin to compile the kernels of `backward`, while other layers run forward."""
        execution = self.execution
        assert execution is not None
        rebuilds = bool(execution.num_saved and not results.saved)
        execution.compile_backward(arguments, results, needs, Variant(rebuild=rebuilds))

    def new_results(self, arguments: Arguments[Tensor], wanted: Wanted) -> Results[Tensor]:
        """What `forward` returns, without values."""
        return fake_execution(self.program, arguments.inputs).new_results(wanted)

    def new_gradients(
        self, arguments: Arguments[Tensor], incoming: Results[Tensor | None], needs: Needs
    ) -> Gradients:
        """What `backward` returns, without values."""
        execution = fake_execution(self.program, arguments.inputs)
        found = execution.new_gradients(Arguments(needs.inputs, needs.states))
        groups = (arguments.params, arguments.prologue)
        return found._replace(params=_like(groups[0]), prologue=_like(groups[1]))


def _like(tensors: Tensors) -> list[Tensor | None]:
    return [*map(torch.empty_like, tensors)]


def execute(call: Call, arguments: Arguments[Tensor], wanted: Wanted) -> Results[Tensor]:
    """The results of a call, with gradients of all tensors."""
    tensors, needed = call.flatten(arguments), False
    if torch.is_grad_enabled():
        for t in tensors:
            if t.requires_grad:
                needed = True
                break
    if call.passing is None and not is_plain(tensors):
        refuse_transforms(tensors)
        groups = [*arguments.inputs], [*(arguments.states or ())], [*arguments.params]
        prologue, options = [*arguments.prologue], (needed and wanted.save, wanted.final)
        run_op = getattr(torch.ops.spikefuse, call.op)
        found = run_op(call.program, *groups, prologue, list(call.scalars), *options)
        binary, num_states = sizes_of(call.program)
        end = len(binary) + (num_states if wanted.final else 0)
        found = detached(call, arguments, found[:end]) if needed else found[:end]
        known = () if is_traced() else binary  # a graph knows no values
        return Results(found[: len(binary)], found[len(binary) :], binary=known)
    if call.passing is not None and is_traced():
        return torch.compiler.disable(execute)(call, arguments, wanted)
    if not needed:
        return call.forward(arguments, Wanted(wanted.final, wanted.bits, save=False))
    *found, bits = _apply(call, arguments, wanted, *tensors)
    assert call.execution is not None
    program = call.execution.program
    if not (program.follows_input and tensors[0].requires_grad):
        found = detached(call, arguments, found)
    num, binary = call.execution.num_outputs, program.step.binary
    return Results(found[:num], found[num:], (), bits, binary)


def detached(call: Call, arguments: Arguments[Tensor], results: Tensors) -> Tensors:
    """Outputs and final states, detached where those of the eager loop require no gradient."""
    inputs, states, params, prologue, *_ = [
        tuple([t.requires_grad for t in group or ()]) for group in arguments[:4]
    ]
    if True in prologue:  # part of the first input
        inputs = True, *inputs[1:]
    if inputs[0] and follows_input(call.program):
        return results
    # More steps change nothing. Processes that pass states must agree.
    num_steps = sizes_of(call.program)[1] + 2
    for n in range(1, num_steps):  # T itself may be a symbol of torch.compile
        if call.passing is None and arguments.inputs[0].shape[0] == n:
            num_steps = n
    needs = requires_grad(call.program, inputs, states, params, num_steps, call.feeds_back)
    if all(needs):
        return results
    return [x if need else x.detach() for x, need in zip(results, needs, strict=False)]


class _Eager(torch.autograd.Function):
    """The autograd of eager calls."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, arguments: Arguments[Tensor], wanted: Wanted, *tensors: Tensor
    ) -> tuple[Any, ...]:
        results = call.forward(arguments, wanted, ahead=True)
        ctx.save_for_backward(*tensors[call.replaced :], *results.saved)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return *results.outputs, *results.finals, results.bits

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, needed = ctx.call, ctx.needs_input_grad[3:]
        return None, None, None, *_differentiate(call, ctx.saved_tensors, grads[:-1], needed)


# `torch.autograd.Function.apply` also checks for function transforms. Here, `is_plain` or
# `check_backend` has already excluded them.
_apply = super(torch.autograd.Function, _Eager).apply


def _differentiate(
    call: Call, tensors: Tensors, grads: MaybeTensors, needed: Sequence[bool]
) -> MaybeTensors:
    """The gradients of all tensors of a call, from the tensors that autograd has saved and the
    gradients of the results."""
    found: MaybeTensors
    read = [*tensors[-call.replaced :], *tensors[: -call.replaced]] if call.replaced else tensors
    arguments, saved = call.unflatten(read), read[call._ends[3] :]
    given = [*tensors]
    for grad in grads:
        if grad is not None:
            given.append(grad)
    if call.passing is None and not is_plain(given):  # the library op passes no states
        refuse_transforms(given)
        inputs, states, params, prologue, *_ = arguments
        groups = [*inputs], [*(states or ())], [*params], [*prologue], [*call.scalars]
        backward = getattr(torch.ops.spikefuse, f"{call.op}_backward")
        results = iter(backward(call.program, *groups, [*saved], [*grads], [*needed]))
        return [next(results) if need else None for need in needed]
    num = call.execution.num_outputs if call.execution else len(sizes_of(call.program)[0])
    incoming, needs = Results(grads[:num], grads[num:]), call.unflatten(needed)
    if not torch.is_grad_enabled():
        return call.flatten(call.backward(arguments, saved, incoming, needs))
    with torch.no_grad():
        found = call.flatten(call.backward(arguments, saved, incoming, needs))
    return refuse_double_backward(found, *tensors, *grads)


def choose(definition: Neuron, x: Tensor, wanted: Wanted) -> tuple[str, list[float], list[Tensor]]:
    """The name of the program of a definition for inputs like `x`, and the floats and tensors of
    the definition that it reads."""
    backend, outputs = wanted.impl, wanted.outputs
    check_backend(backend, x)
    if is_traced():
        cache, values = None, definition.values()
        about = backend, kinds_of(values), outputs
        name, used = definition.evaluate(_prepare, *about, *definition.constant_values())
    else:
        description = definition.description()
        cache, values = description.cache, description.values(definition)
        selected, statics = with_outputs(definition, outputs), (*description.statics, outputs)
        made = prepare(selected, backend, statics, kinds_of(values), cache)
        name, used = made.name, made.step.params
    scalars, params = [], []
    for label in used:
        value = values[label]
        if isinstance(value, float):
            scalars.append(value)
        else:
            check_param(definition, label, value, x)
            params.append(value)
    if cache is not None and all(isinstance(value, float) for value in values.values()):
        cache[backend, outputs, x.device] = name, scalars, params
    return name, scalars, params


def _prepare(
    definition: Neuron, backend: str, kinds: Kinds, outputs: tuple[str, ...], *constants: Any
) -> tuple[str, tuple[str, ...]]:
    definition = with_outputs(as_traced(definition, kinds, constants), outputs)
    made = prepare(definition, backend, definition.description().statics, kinds)
    return made.name, made.step.params


def fake_execution(name: str, inputs: Tensors) -> Execution:
    # Not cached: sizes may be symbols.
    return Execution(name, [(x.shape, x.stride(), x.dtype, x.device) for x in inputs])


def implement(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Implement an op of the library; `fake` returns its results without values."""
    # torch.compile calls it, and does not trace it.
    torch.library.register_kernel(f"spikefuse::{name}", ("cpu", "cuda"), function, lib=library)

    def checked(*args: Any, **kwargs: Any) -> Any:
        refuse_export()
        return fake(*args, **kwargs)

    torch.library.register_fake(f"spikefuse::{name}", checked, lib=library)


def register(cls: type[Call]) -> None:
    """Make a kind of call an op of the library, and its backward another one. Both take the name of
    the program, then `Arguments`."""
    groups = [f"Tensor[] {name}" for name in Arguments._fields[:4]]
    taken = f"(str program, {', '.join(groups)}, float[] scalars"
    library.define(f"{cls.op}{taken}, bool save, bool final) -> Tensor[]")
    taken += ", Tensor[] saved, Tensor?[] grads, bool[] needed"
    library.define(f"{cls.op}_backward{taken}) -> Tensor[]")

    def made(program: str, *given: Any) -> tuple[Call, Arguments[Tensor]]:
        arguments = Arguments[Tensor](*given)
        call = cls(program, arguments.scalars)
        call.flatten(arguments)
        return call, arguments

    def forward(method: str) -> Callable[..., list[Tensor]]:
        @torch.no_grad()
        def op(program: str, *given: Any) -> list[Tensor]:
            *groups, save, final = given
            call, arguments = made(program, *groups)
            results = getattr(call, method)(arguments, Wanted(final, save=save))
            return [*results.outputs, *results.finals, *results.saved]

        return op

    def backward(method: str) -> Callable[..., list[Tensor]]:
        @torch.no_grad()
        def op(program: str, *given: Any) -> list[Tensor]:
            *groups, saved, grads, needed = given
            call, arguments = made(program, *groups)
            num, needs = len(sizes_of(program)[0]), call.unflatten(needed)
            others = (saved,) if method == "backward" else ()
            incoming = Results(grads[:num], grads[num:])
            found = getattr(call, method)(arguments, *others, incoming, needs)
            # Those of a prologue may be parts of one tensor, which an op must not return.
            found = found._replace(prologue=[None if g is None else g.clone() for g in found[3]])
            return [g for g, need in zip(call.flatten(found), needed, strict=True) if need]

        return op

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        program, *given, _, final = inputs
        ctx.call, arguments = made(program, *given)
        binary, num_states = sizes_of(program)
        ctx.num_results = len(binary) + (num_states if final else 0)
        tensors = ctx.call.flatten(arguments)
        ctx.needed = [t.requires_grad for t in tensors]
        ctx.save_for_backward(*tensors[cls.replaced :], *output[ctx.num_results :])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grads: MaybeTensors) -> tuple[Any, ...]:
        found = _differentiate(ctx.call, ctx.saved_tensors, grads[: ctx.num_results], ctx.needed)
        groups = map(list, ctx.call.unflatten(found)[:4])
        # PyTorch takes an empty list for one of tensors, and expects the gradients of its items.
        return None, *groups, None if ctx.call.scalars else [], None, None

    implement(cls.op, forward("forward"), forward("new_results"))
    implement(f"{cls.op}_backward", backward("backward"), backward("new_gradients"))
    add = partial(torch.library.register_autograd, lib=library)
    add(f"spikefuse::{cls.op}", differentiate, setup_context=setup_context)
    add(f"spikefuse::{cls.op}_backward", no_double_backward)


register(Call)
