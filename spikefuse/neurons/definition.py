"""The contract of a neuron model: named states, parameters, and one time step.

A neuron's file knows nothing about time loops, kernels or devices. The eager loop
(`spikefuse.reference`) and the compiler both run `step` on a *bound* copy, in which every
parameter is a tensor, so both see the same arithmetic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from spikefuse._torch import constant_result, refuse_data_parallel
from spikefuse.neurons.checks import is_integer
from spikefuse.neurons.description import Description, read
from spikefuse.neurons.fixed_point import fixed_point
from spikefuse.neurons.parameters import Holder, positive, shallow_copy

Outputs = tuple[Tensor, ...]
States = tuple[Tensor, ...]


class State:
    """A variable that a neuron carries from one time step to the next.

    Declare states on the class (`v = State()`). `step` receives them after its inputs, in the
    order of declaration.

    Example::

        class Integrator(sf.Neuron):
            v = sf.State()

            def step(self, x, v):
                return v + x, (v + x,)

        y = Integrator()(torch.rand(8, 32, 128))  # the sums of x over time

    Args:
        initial: value at rest, from which a sequence starts unless a state is passed in; or the
            name of an attribute of the neuron that holds it, which may be learned::

                v = State("rest")   # self.rest = nn.Parameter(torch.zeros(channels))

    Raises:
        TypeError: a tensor of several values, or one that is learned, is given here, which all
            neurons of the class would share.
    """

    def __init__(self, initial: float | str = 0.0) -> None:
        if isinstance(initial, Tensor) and (initial.requires_grad or initial.numel() != 1):
            raise TypeError(
                "the initial value of a State is one number: for several values, or learned ones, "
                'assign the tensor to an attribute of the neuron and name it, as in State("rest")'
            )
        self.initial = initial if isinstance(initial, str) else float(initial)


_N = TypeVar("_N", bound="Neuron")


@refuse_data_parallel
class Neuron(Holder):
    """Base class of all neurons; subclass it to write your own.

    Declare states on the class, parameters in `__init__`, and one time step in `step`. The model is
    then fused over all time steps, forward and backward, on GPU and CPU.

    Attributes that `step` reads are of two kinds:

    - `float`, tensor, `nn.Parameter`, `Learnable`: run-time float32 values. A new value does not
      recompile. In `step` they are tensors, so they cannot steer Python control flow. A tensor has
      one value, or one per channel `[C]` (dim 2 of `[T, B, C, ...]`), or as many dims as a sample,
      over which it broadcasts: `[C, H, W]` for each neuron, `[1, D]` for the last dim of tokens;
      or as many as the input, as `[T, 1, 1]` for each step of `[T, B, F]`, which takes the memory
      of one more input.
    - `bool`, `int`, `str`, `None`, tuples of these, and class attributes (`leak = 0.5`) that no
      instance attribute hides: constants. `step` may branch on them; a new value compiles a new
      kernel.

    Attributes of other types are allowed where `step` does not read them. A function, or a method
    bound to the neuron, may replace a method such as `step` on one instance.

    Example::

        class MyLIF(sf.Neuron):
            v = sf.State()

            def __init__(self, decay=0.9):
                super().__init__()
                self.decay, self.surrogate = decay, sf.surrogate.Arctan()

            def step(self, x, v):
                h = self.decay * v + x
                s = self.surrogate(h - 1.0)
                return s, (h * (1 - s),)

        spikes = MyLIF()(torch.rand(8, 32, 128))

    Call: `neuron(x, ..., state=None, return_state=False, impl="auto", outputs=None)`

    Args:
        inputs: one or several tensors of one shape `[T, B, ...]`, float32, bfloat16 or float16.
            Dim 0 is time whatever the number of dims: `[B, F]` is read as B steps of F samples,
            and `x.unsqueeze(0)` as one step of B samples.
        state: one floating-point tensor `[B, ...]` per declared state, converted to float32, or
            None to start from rest.
        return_state: also return the final state, as a tuple of float32 tensors.
        impl: "auto" (Triton on a GPU, Numba on a CPU), "triton", "numba", or "reference" (the
            eager loop, any device, also float64).
        outputs: names of what to return over time, all of it differentiable: "spikes" for the
            first output of `step`, "output0", "output1", ... if it has several, a declared state
            (its value after the step, for `LIF` after the reset), or a value that `step` exposes,
            such as "h", the potential before the reset, of all models of this library. An output
            takes precedence over a state, and a state over an exposed value of the same name. For
            example, for a loss on the membrane::

                spikes, h = sf.LIF()(x, outputs=("spikes", "h"))

    Returns:
        The output `[T, B, ...]` in the dtype of the inputs (a tuple if `step` has several, or with
        `outputs`), and with `return_state` a pair (output, state).

    Raises:
        TypeError, ValueError: inputs or states of the wrong dtype, shape or number, or `outputs`
            that the neuron does not have.
        UnsupportedOperation: `step` uses an operation that cannot be compiled.
    """

    #: Runs the neuron over time. `spikefuse.nn.neuron` assigns it: this package knows no kernels.
    forward: Callable[..., Any]

    # So annotated, it may be overridden by a step of any arguments.
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute one time step: `step(self, x, ..., v, ...)`, inputs first, then the states.

        Return the output, or a tuple of outputs, and the tuple of new states. Every operation
        must be pointwise.

        Raises (at class creation):
            TypeError: the last arguments are not the declared states, or `v = State` was written
                instead of `v = State()`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define step(self, x, ...)")

    def expose(self, **values: Tensor) -> None:
        """Let `outputs=` select values of a step by name; call this in `step`, as in
        `self.expose(h=h)`."""
        if self._exposed is not None:
            self._exposed.update(values)

    #: Bits of the states if they are numbers in fixed point, else 0. The attribute `v_step` is the
    #: step of the state `v`, see `spikefuse.quantize`.
    state_bits: int = 0
    #: Names of the outputs, new states and exposed values that the step returns, none for its
    #: outputs.
    _selected: tuple[str, ...] = ()
    #: The module of another library that `spikefuse.convert` has made this neuron from, as text.
    _converted_from: str = ""
    #: The exposed values of a running step, None if none is selected.
    _exposed: dict[str, Tensor] | None = None
    #: The declared states by name, those of base classes first.
    states: ClassVar[dict[str, State]] = {}
    #: Whether attributes hold states at rest, which kernels take as initial states.
    has_first_states: ClassVar[bool] = False
    #: Names of the inputs: the arguments of `step` before the states.
    input_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if value is State:
                raise TypeError(f"{cls.__name__}.{name} is the class State: write State()")
        bases = reversed(cls.__mro__)
        cls.states = {n: s for base in bases for n, s in vars(base).items() if isinstance(s, State)}
        cls.has_first_states = any(isinstance(s.initial, str) for s in cls.states.values())
        if cls.step is not Neuron.step:
            cls.input_names = _input_names(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).states:
            raise AttributeError(
                f"{type(self).__name__}.{name} is a state, which starts at its initial value in "
                "every call: pass another value as state=(...), and get the last one by "
                "return_state=True"
            )
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> Any:
        raise NotImplementedError(
            "torch.jit.script does not compile neurons: pass spikefuse.exportable(net) to "
            "torch.jit.trace"
        )

    def values(self) -> dict[str, float | Tensor]:
        """Return every run-time value by dotted name, in a way that torch.compile can trace. Eager
        calls take `description().values(self)`, which is faster."""
        # Reading the constants as arguments lets torch.compile guard on them.
        self.evaluate(_ignore, *self.constant_values())
        return {name: read(self, name) for name in self._names()[0]}

    def constant_values(self) -> list[Any]:
        """Return the constants that `step` may read, in the order of `constant_names`, in a way
        that torch.compile can trace."""
        return [read(self, name) for name in self.constant_names()]

    def constant_names(self) -> tuple[str, ...]:
        """Return the names of the constants."""
        return self._names()[1]

    def description(self) -> Description:
        """Return the cached description, or a new one after an assignment. Eager only.

        An assignment is one to an attribute of the neuron, its surrogate, or one of their classes.
        """
        known: Description | None = self.__dict__.get("_description")
        if known is not None and known.versions == known.seen:
            return known
        description = self._describe()
        if known is not None and known.basis == description.basis:
            description.cache = known.cache
        self.__dict__["_description"] = description
        return description

    @constant_result
    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the values and of the constants."""
        description = self._describe()
        return tuple(description.floats), tuple(description.constants)

    def _describe(self) -> Description:
        """Return a new description, unless the bits or steps of the states are wrong."""
        bits = self.state_bits
        if bits == 1 or not is_integer(bits, 0):
            raise ValueError(f"state_bits is {bits!r}: expected an integer of at least 2, or 0")
        for name in self.states if bits else ():
            step = getattr(self, f"{name}_step", None)
            if step is None:
                raise ValueError(
                    f"state_bits is {bits}, but {type(self).__name__} has no {name}_step: assign "
                    f"the step of the state '{name}', as in neuron.{name}_step = 1 / 64"
                )
            if not isinstance(step, Tensor):  # whose values a call must not wait for
                positive(f"{name}_step", step)
        return Description(self)

    @constant_result
    def evaluate(self, function: Callable[..., Any], *constants: Any) -> Any:
        """Return `function(self, *constants)`, which torch.compile treats as a constant.

        It guards on the arguments only, not on what `function` reads of the neuron.
        """
        return function(self, *constants)


class SpikingLayer(nn.Module):
    """Mark a layer whose output is spikes, but which is no `Neuron`: rates count it as one."""


def _ignore(neuron: Neuron, *constants: Any) -> None:
    """Read nothing."""


def _input_names(cls: type[Neuron]) -> tuple[str, ...]:
    parameters = list(inspect.signature(cls.step).parameters.values())[1:]
    names, states = [p.name for p in parameters], list(cls.states)
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        names = [n for n in names[:-1] if n not in states] + states  # *states
    inputs = names[: len(names) - len(states)]
    if names != inputs + states or not inputs:
        raise TypeError(
            f"{cls.__name__}.step takes ({', '.join(map(str, parameters))}), but the states "
            f"declared are ({', '.join(states)}): write step(self, x, {', '.join(states)}), with "
            "at least one input and the states last, in the order of their declaration"
        )
    return tuple(inputs)


def cached_class(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a class of a neuron's class, with a cache from which classes are
    dropped that nothing else refers to."""
    known: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()

    @wraps(make)
    def cached(*key: Any) -> Any:
        found = known.get(key)
        return known.setdefault(key, make(*key)) if found is None else found

    return cached


class WrongResult(TypeError):
    """A step did not return a pair of outputs and new states."""


class UnknownOutput(ValueError):
    """A name is neither that of an output nor that of a state.

    Attributes:
        labels: of the outputs, if the step has several.
        exposed: the names of the values that the step exposes.
    """

    def __init__(
        self, message: str, labels: tuple[str, ...] = (), exposed: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.labels, self.exposed = labels, exposed


#: Names the first output of any neuron, see `with_outputs`.
FIRST_OUTPUT = "output0"
#: A name that no value of a step has.
NO_NAME = ""


def with_outputs(neuron: _N, names: tuple[str, ...]) -> _N:
    """Return a copy, with the same tensors, whose step returns these outputs and new states;
    without names, the neuron itself."""
    if not names:
        return neuron
    clone: _N = shallow_copy(neuron)
    clone.__dict__.update(_description=None, _selected=names)
    return clone


def _select(
    neuron: Neuron, outputs: Outputs, states: States, exposed: dict[str, Tensor]
) -> Outputs:
    """Return the selected outputs, new states and exposed values."""
    labels = [f"output{i}" for i in range(len(outputs))]
    values = {"spikes": outputs[0], **exposed}
    known = {**values, **dict(zip((*neuron.states, *labels), (*states, *outputs), strict=True))}
    if len(outputs) == 1:
        labels, known["spikes"] = [], outputs[0]
    for name in neuron._selected:
        if name not in known:
            valid = ", ".join(
                map(repr, dict.fromkeys(("spikes", *labels, *neuron.states, *exposed)))
            )
            raise UnknownOutput(
                f"no output or state is named {name!r}: expected names among {valid}",
                tuple(labels),
                tuple(exposed),
            )
    return tuple(known[name] for name in neuron._selected)


#: What PyTorch says of a mask that is not of bools.
_NO_MASK = "oolean", "bool tensors", "not implemented for 'Float'"
_FLOATS = (
    "Attributes that are tensors of bools or integers are float32 in a step: compare them, as in "
    "torch.where(self.mask > 0, x, v)"
)


def call_step(neuron: Neuron, inputs: tuple[Tensor, ...], states: States) -> tuple[Outputs, States]:
    """Run one step and return (outputs, states) as tuples.

    Raises:
        WrongResult: `step` did not return an output (or a tuple of outputs) and a tuple with one
            tensor per declared state.
    """
    exposed: dict[str, Tensor] = {}
    if neuron._selected:  # of a copy, which `with_outputs` has made
        neuron.__dict__["_exposed"] = exposed
    try:
        result = neuron.step(*inputs, *states)
    except (RuntimeError, TypeError, IndexError) as error:
        if any(words in str(error) for words in _NO_MASK):
            error.add_note(_FLOATS)
        raise
    neuron.__dict__.pop("_exposed", None)
    name, expected = type(neuron).__name__, tuple(neuron.states)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple)):
        wrong = f"it returned {type(result).__name__}"
        if isinstance(result, tuple) and len(result) == 2:
            wrong = f"its second item is a {type(result[1]).__name__}: write (v,)"
        raise WrongResult(
            f"{name}.step must return (output, (new {', new '.join(expected) or 'state'},)); "
            f"{wrong}"
        )
    outputs = result[0] if isinstance(result[0], tuple) else (result[0],)
    for value in (*outputs, *result[1]):
        if not isinstance(value, Tensor):
            raise WrongResult(f"{name}.step returned a {type(value).__name__} among its tensors")
    if len(result[1]) != len(expected):
        raise WrongResult(
            f"{name}.step returned {len(result[1])} new states, but {len(expected)} are declared "
            f"({', '.join(expected)})"
        )
    states = result[1]
    if neuron.state_bits:
        limit, steps = 2 ** (neuron.state_bits - 1), [f"{name}_step" for name in expected]
        states = tuple(
            fixed_point(state, getattr(neuron, step), -limit, limit - 1)
            for state, step in zip(states, steps, strict=True)
        )
    if neuron._selected:
        outputs = _select(neuron, outputs, states, exposed)
    like = inputs[0]
    return tuple(_like(y, like) for y in outputs), tuple(_like(s, like) for s in states)


def _like(value: Tensor, like: Tensor) -> Tensor:
    """Convert a result, which may be a comparison or a parameter, to the step's dtype and shape."""
    value = value if value.dtype == like.dtype else value.to(like.dtype)
    # Pointwise results have the shape of the inputs, or fewer dims. A trace of torch.jit knows the
    # number of dims, but not the shape.
    return value if value.ndim == like.ndim else value.expand(like.shape)


class ValuePerStep(ValueError):
    """A parameter has as many dims as the input, so that it has a value per time step."""


def channel_view(name: str, value: Tensor, step_shape: torch.Size) -> Tensor:
    """Reshape a parameter to broadcast over one step `[B, C, ...]`.

    Raises:
        TypeError: it is complex.
        ValueError: neither a scalar, nor one value per channel, nor of the dims after the batch;
            `ValuePerStep` with as many dims as the input.
    """
    if value.is_complex():
        raise TypeError(f"parameter '{name}' is a {value.dtype} tensor: expected real values")
    if value.ndim == 0:
        return value
    inner, is_traced = step_shape[1:], torch.jit.is_tracing()  # type: ignore[attr-defined]
    view = value.view(-1, *(1,) * (len(inner) - 1)) if value.ndim == 1 and inner else value
    pairs = zip(view.shape, inner, strict=False)
    # Not `n in (1, m)`, which TorchDynamo answers wrongly for sizes that are symbols.
    is_broadcast = is_traced or all(n == 1 or n == m for n, m in pairs)
    fits = len(view.shape) == len(inner) and is_broadcast
    if not fits or (value.ndim == 1 and not is_traced and value.shape[0] != inner[0]):
        channels = inner[0] if inner else "none"
        kind = ValuePerStep if value.ndim == len(step_shape) + 1 else ValueError
        raise kind(
            f"parameter '{name}' has shape {list(value.shape)}: expected a scalar, one value per "
            f"channel (dim 2 of [T, B, C, ...]; this input has C = {channels}), or a shape that "
            f"broadcasts over the dims after the batch, {list(inner)}, with as many dims"
        )
    return view


def first_states(neuron: Neuron, values: dict[str, Any], like: Tensor) -> States:
    """Return the states at rest, of the shape and dtype of `like`.

    Args:
        values: the run-time values of the neuron.
    """
    states = []
    for state in neuron.states.values():
        name = state.initial
        value = values.get(name) if isinstance(name, str) else name
        if value is None:
            raise ValueError(
                f"{type(neuron).__name__} has no attribute '{name}' with the value at rest that "
                f"State({name!r}) names: assign a float, a tensor or a Learnable"
            )
        if isinstance(value, Tensor):
            value = channel_view(str(name), value, like.shape).to(like.dtype).expand(like.shape)
        else:
            value = torch.full_like(like, value)
        states.append(value)
    return tuple(states)
