"""The operations that a step may use, and the errors for all others."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse import UnsupportedOperation
from spikefuse.compiler.adjoint import reverse_step
from spikefuse.compiler.trace import identifiers, trace_step

WEIGHTS = torch.tensor([0.5, 0.25, 0.125])


def defined_by(function, **attributes):
    """Return a neuron whose output is `function(self, x, v)`."""

    class Defined(sf.Neuron):
        v = sf.State()

        def __init__(self):
            super().__init__()
            for name, value in attributes.items():
                setattr(self, name, value)

        def step(self, x, v):
            return function(self, x, v), (v + x,)

    return Defined()


def complaint(neuron: sf.Neuron, reference: bool = True) -> str:
    """Return the error of a call, after the eager loop has run on the same input."""
    x = torch.rand(2, 3, 3)
    if reference:
        neuron(x, impl="reference")
    with pytest.raises(UnsupportedOperation) as caught:
        neuron(x)
    return str(caught.value)


def line_of(function) -> str:
    return f"{__file__}, line {function.__code__.co_firstlineno}: "


def in_place(self, x: Tensor, v: Tensor) -> Tensor:
    x += 1.0  # line 2
    return x


# By the operation that the error names.
REFUSED = {
    "lgamma": lambda self, x, v: torch.lgamma(x),
    "sinh": lambda self, x, v: x + torch.sinh(v),
    "round": lambda self, x, v: torch.round(x, decimals=1),
    "stack": lambda self, x, v: torch.stack([x, v]).sum(0),
    "empty_like": lambda self, x, v: torch.where(x > 0.0, x, torch.empty_like(x)),
    "sum": lambda self, x, v: x - x.sum(),
    "mean": lambda self, x, v: x - x.mean(),
    "amax": lambda self, x, v: x - torch.amax(x),
    "rand_like": lambda self, x, v: x + torch.rand_like(x),
    "bernoulli": lambda self, x, v: x + torch.bernoulli(torch.sigmoid(x)),
    "add_": lambda self, x, v: x.clone().add_(1.0),
    "_to_copy": lambda self, x, v: x.double().float(),
    "view": lambda self, x, v: x.view(x.shape),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_operations_are_named_with_their_line(name):
    function = REFUSED[name]
    message = complaint(defined_by(function))
    assert message.startswith(f"Defined.step uses '{name}' at {line_of(function)}")


def test_in_place_operations():
    message = complaint(defined_by(in_place), reference=False)
    line = in_place.__code__.co_firstlineno + 1
    assert f"uses 'add_' at {__file__}, line {line}: \"x += 1.0  # line 2\": " in message
    assert "change nothing in place" in message
    assert "write v = v + x in place of v += x" in message


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (lambda self, x, v: x.double().float(), "torch.float64"),
        (lambda self, x, v: (x > 0.5).short() * x, "torch.int16"),
        (lambda self, x, v: (x > 0.5).int() & 1, "torch.int32"),
        (lambda self, x, v: x.half().float(), "torch.float16"),
        (lambda self, x, v: (x > 0.5).sum(), "'sum'"),
    ],
)
def test_the_reason(function, hint):
    message = complaint(defined_by(function, exponent=2.0, base=2.0))
    assert hint in message
    assert line_of(function) in message


def test_an_operation_without_a_derivative():
    message = complaint(defined_by(lambda self, x, v: torch.heaviside(x, v)), reference=False)
    assert message.startswith("the derivative of Defined.step can't be compiled: derivative for")
    assert "make spikes with a surrogate" in message
    message = complaint(defined_by(lambda self, x, v: x // 0.3), reference=False)
    assert 'write torch.div(x, y, rounding_mode="floor"), which has one' in message
    defined_by(lambda self, x, v: torch.div(x, 0.3, rounding_mode="floor"))(torch.rand(2, 3, 3))
    detached = defined_by(lambda self, x, v: torch.heaviside(x.detach() - 0.5, v.detach()))
    x = torch.rand(2, 3, 3)
    assert torch.equal(detached(x), detached(x, impl="reference"))


BRANCHES = {
    "if": lambda self, x, v: x if x > 0 else v,
    "and": lambda self, x, v: (x > 0) and (v > 0),
    "if on an attribute": lambda self, x, v: x if self.decay > 0.5 else v,
    "min": lambda self, x, v: min(x, v),
    "math": lambda self, x, v: x * math.exp(self.decay),
    "float": lambda self, x, v: x * float(self.decay),
    "item": lambda self, x, v: x * v.item(),
    "range": lambda self, x, v: x * sum(range(int(self.decay))),
    "numpy": lambda self, x, v: x * float(v.numpy()),
    "a numpy function": lambda self, x, v: x * float(np.exp(self.decay)),
    "an array": lambda self, x, v: x * float(np.asarray(v)),
    "tolist": lambda self, x, v: x * v.tolist(),
    "numel": lambda self, x, v: x * v.numel(),
    "len": lambda self, x, v: x * len(v),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_tensors_cannot_steer_python(name):
    message = complaint(defined_by(BRANCHES[name], decay=0.25), reference=False)
    assert message.startswith(
        f"Defined.step turns a tensor into a Python value at {line_of(BRANCHES[name])}"
    )
    assert "torch.where" in message


def test_constants_steer_python():
    def function(self, x, v):
        for _ in range(self.count):
            x = x + 1.0
        return x * math.exp(-1.0) if self.mode == "scaled" else x

    x = torch.rand(3, 4)
    for count, mode in ((0, "plain"), (3, "plain"), (3, "scaled")):
        neuron = defined_by(function, count=count, mode=mode)
        assert torch.equal(neuron(x), neuron(x, impl="reference"))


class Sine(sf.surrogate.Surrogate):
    def derivative(self, u: Tensor) -> Tensor:
        return torch.sinh(u)  # derivative


def test_derivative_of_a_surrogate():
    message = complaint(sf.LIF(surrogate=Sine()))
    line = Sine.derivative.__code__.co_firstlineno + 1
    assert message.startswith(
        f"the derivative of LIF.step uses 'sinh' at {__file__}, line {line}: "
        '"return torch.sinh(u)  # derivative": '
    )


class Branching(sf.surrogate.Surrogate):
    def __init__(self):
        super().__init__()
        self.width = 1.0

    def derivative(self, u: Tensor) -> Tensor:
        return torch.ones_like(u) if self.width > 0.5 else u


@pytest.mark.parametrize("initial", [None, 0.0, 3, torch.zeros(())])
def test_steps_that_remember_in_attributes_are_refused(initial):
    class Remembers(sf.Neuron):
        v = sf.State()

        def __init__(self):
            super().__init__()
            self.trace = initial

        def step(self, x, v):
            self.trace = x if self.trace is None else self.trace + x
            return x, (v,)

    with pytest.raises(UnsupportedOperation, match=r"step changes self.trace.*trace = State\(\)"):
        Remembers()(torch.ones(2, 3))


def test_python_control_flow_in_a_surrogate():
    message = complaint(sf.LIF(surrogate=Branching()))
    assert f"{__file__}, line {Branching.derivative.__code__.co_firstlineno + 1}: " in message
    assert "Python value" in message


class Reading(sf.surrogate.Surrogate):
    def derivative(self, u: Tensor) -> Tensor:
        return u * float(u.numpy())


class Dims(sf.surrogate.Surrogate):
    def derivative(self, u: Tensor) -> Tensor:
        return u.sum(0, 1, 2)


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_hook"])
def test_hooks_of_a_surrogate_are_not_traced(kind):
    neuron, expected = sf.LIF(), trace_step(sf.LIF())
    handles = [
        getattr(neuron.surrogate, f"register_{kind}")(lambda *_: pytest.fail("called")),
        nn.modules.module.register_module_full_backward_hook(lambda *_: None),
    ]
    try:
        step = trace_step(neuron)
        assert step == expected
        assert reverse_step(neuron, step) == reverse_step(sf.LIF(), expected)
    finally:
        for handle in handles:
            handle.remove()


def test_values_read_in_a_surrogate():
    message = complaint(sf.LIF(surrogate=Reading()))
    line = Reading.derivative.__code__.co_firstlineno + 1
    assert message.startswith(
        f"the derivative of LIF.step turns a tensor into a Python value at {__file__}, line {line}"
    )


def test_errors_of_pytorch_name_the_step():
    message = complaint(sf.LIF(surrogate=Dims()))
    assert message.startswith("the derivative of LIF.step can't be compiled: ")
    line = Dims.derivative.__code__.co_firstlineno + 1
    assert f"{__file__}, line {line}: " in message


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x, v: sum(x),
        lambda self, x, v: x * self.weights[0],
        lambda self, x, v: x.chunk(2)[0],
        lambda self, x, v: self.linear(x),
    ],
)
def test_operations_that_need_dimensions(function):
    neuron = defined_by(function, weights=nn.Parameter(torch.ones(3)), linear=nn.Linear(3, 3))
    message = complaint(neuron, reference=False)
    assert message.startswith("Defined.step can't be compiled: ")
    assert line_of(function) in message
    assert "nn.ParameterList" in message
    assert "item" not in message


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x, v: torch.where(self.mask, x, v),
        lambda self, x, v: x.masked_fill(self.mask, 0.0),
        lambda self, x, v: torch.where(~self.mask, x, v),
        lambda self, x, v: torch.where(self.mask & (x > 0), x, v),
    ],
)
def test_masks_that_are_attributes(function):
    """They are values of float32, as other attributes."""
    mask, hint = torch.tensor([True, False]), "torch.where(self.mask > 0, x, v)"
    assert hint in complaint(defined_by(function, mask=mask), reference=False)
    x = torch.rand(3, 1, 2)
    with pytest.raises((RuntimeError, TypeError)) as error:
        defined_by(function, mask=mask)(x, impl="reference")
    assert hint in error.value.__notes__[0]


def test_a_mask_that_is_compared():
    mask, x = torch.tensor([True, False]), torch.rand(3, 1, 2)
    neuron = defined_by(lambda self, x, v: torch.where(self.mask > 0, x, -x), mask=mask)
    assert torch.equal(neuron(x), torch.where(mask, x, -x))


@pytest.mark.parametrize("name", ["register_hook", "retain_grad", "backward"])
def test_autograd_inside_of_a_step(name):
    def function(self, x, v):
        getattr(x, name)(*([print] if name == "register_hook" else []))
        return x

    message = complaint(defined_by(function), reference=False)
    assert f"'{name}' at {__file__}, line" in message
    assert "without dimensions and autograd" in message


def test_wrong_results_raise_a_type_error():
    class Wrong(sf.Neuron):
        v = sf.State()

        def step(self, x, v):
            return x, v

    with pytest.raises(TypeError, match=r"its second item is a Tensor: write \(v,\)"):
        Wrong()(torch.rand(2, 3))


def test_an_error_in_a_helper_names_its_line():
    def helper(x):
        return torch.cosh(x)

    assert line_of(helper)[:-2].rsplit(" ", 1)[0] in complaint(
        defined_by(lambda self, x, v: helper(x))
    )


def test_errors_are_raised_in_every_call():
    neuron = defined_by(REFUSED["lgamma"])
    assert complaint(neuron) == complaint(neuron)


def test_a_scalar_tensor_is_a_constant():
    half, x = torch.tensor(0.5), torch.rand(3, 4)
    for function in (
        lambda self, x, v: x * torch.tensor(0.3) + v,
        lambda self, x, v: x * half + torch.full((), 0.25),
        lambda self, x, v: torch.where(x > torch.tensor(0.5), half + 0.1, torch.exp(half)),
    ):
        neuron = defined_by(function)
        torch.testing.assert_close(neuron(x), neuron(x, impl="reference"), rtol=1e-6, atol=0)


def test_constants_in_double_precision():
    third, x = torch.tensor(0.3, dtype=torch.float64), torch.rand(3, 4)
    torch.set_default_dtype(torch.float64)
    try:
        for function in (
            lambda self, x, v: x * torch.tensor(0.3) + torch.full((), 0.25) * third + v,
            lambda self, x, v: torch.where(x > third, x * torch.exp(third), torch.tensor(0.1)),
            lambda self, x, v: sf.surrogate.Sigmoid()(x - 0.5),
        ):
            neuron = defined_by(function)
            found = []
            for impl in ("auto", "reference"):
                leaf = x.clone().requires_grad_()
                y = neuron(leaf, impl=impl)
                found.append((y, *torch.autograd.grad(y.sum(), leaf)))
            torch.testing.assert_close(*found, rtol=1e-6, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_learned_tensors_are_attributes():
    """Kernels would return no gradient for another one, and keep its first value."""
    learned = nn.Parameter(torch.tensor(2.0))

    class Slope(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x > 0.0).float()

        @staticmethod
        def backward(ctx, g):
            return g * torch.exp(-learned * ctx.saved_tensors[0].abs())

    x = torch.rand(3, 4, requires_grad=True)
    for function in (
        lambda self, x, v: x * learned + v,
        lambda self, x, v: x * torch.sigmoid(learned),
        lambda self, x, v: Slope.apply(x - 0.5),
        lambda self, x, v: sf.surrogate.Custom(lambda u: torch.sigmoid(learned * u))(x - 0.5),
    ):
        neuron = defined_by(function)
        with pytest.raises(sf.UnsupportedOperation, match=r"uses a learned tensor of shape \[\]"):
            neuron(x).sum().backward()
        assert neuron(x, impl="reference").requires_grad


@pytest.mark.parametrize(
    "function",
    [lambda self, x, v: x * WEIGHTS, lambda self, x, v: x + torch.tensor([0.5, 1.5, 2.5])],
)
def test_other_constant_tensors_are_refused(function):
    message = complaint(defined_by(function))
    assert line_of(function) in message
    assert "shape [3]" in message
    assert "make constants attributes of the neuron" in message


def test_two_constants_are_not_mistaken_for_each_other():
    neuron = defined_by(lambda self, x, v: torch.tensor(2.0) * x + torch.tensor(0.5))
    x = torch.ones(1, 2)
    assert torch.equal(neuron(x), torch.full((1, 2), 2.5))


class Names(sf.Neuron):
    """Attribute names that generated code might use as well."""

    v, v_row, v_new, row, value = (sf.State() for _ in range(5))

    def __init__(self):
        super().__init__()
        self.surrogate = sf.surrogate.Sigmoid(2.0)
        self.surrogate_width, self.T, self.x_data, self.gy0, self.n0, self.exp = (
            0.3,
            0.5,
            0.25,
            0.75,
            1.5,
            0.125,
        )
        self.f32 = nn.Parameter(torch.tensor(0.5))
        self.inner = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))

    def step(self, x, xs, first, v, v_row, v_new, row, value):
        total = v + 2.0 * v_row + 4.0 * v_new - 0.5 * row + 0.25 * value
        s = self.surrogate(x * self.T + xs * self.x_data - self.surrogate_width * total)
        y = first * self.gy0 + self.n0 * s - self.exp * xs + self.f32 * self.inner
        return (s, y), (x, v, v_row, y, row - first)


def test_names_do_not_collide(backends):
    inputs = [torch.randn(5, 2, 3, device=backends.device) for _ in range(3)]
    neuron = Names().to(backends.device)
    found = []
    for impl in ("reference", *backends.impls):
        leaves = [x.clone().requires_grad_() for x in inputs]
        (s, y), state = neuron(*leaves, return_state=True, impl=impl)
        loss = s.sum() + y.square().sum() + sum(v.sum() for v in state)
        found.append([s, y, *state, *torch.autograd.grad(loss, [*leaves, *neuron.parameters()])])
    for actual in found[1:]:
        for a, e in zip(actual[:7], found[0][:7], strict=True):
            assert torch.equal(a, e)
        for a, e in zip(actual[7:], found[0][7:], strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


class Results(sf.Neuron):
    """Results that must be converted to float tensors of the step's shape."""

    above, last, rest = sf.State(), sf.State(), sf.State()

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))
        self.bias = 0.75

    def step(self, x, above, last, rest):
        constant = torch.ones_like(x)
        return (x > above, self.gain, constant, last * rest), (x > 0.5, self.gain, self.bias)


def test_results_become_floats_of_the_steps_shape(backends):
    x = torch.rand(3, 2, 3, 5, device=backends.device)
    neuron = Results().to(backends.device)
    found = []
    for impl in ("reference", *backends.impls):
        outputs, state = neuron(x, return_state=True, impl=impl)
        assert all(y.shape == x.shape and y.dtype == torch.float32 for y in outputs)
        assert all(s.shape == x.shape[1:] and s.dtype == torch.float32 for s in state)
        (gradient,) = torch.autograd.grad(sum(r.sum() for r in (*outputs, *state)), neuron.gain)
        found.append((*outputs, *state, gradient))
    for actual in found[1:]:
        for a, e in zip(actual, found[0], strict=True):
            torch.testing.assert_close(a, e, rtol=1e-6, atol=0)


def test_identifiers_are_unique():
    names = identifiers("p", ("surrogate.width", "surrogate_width", "a"))
    assert len(set(names)) == 3
    assert all(name.isidentifier() for name in names)


def test_a_traced_step_has_no_unused_nodes():
    step = trace_step(sf.ALIF(0.7, 0.9))
    assert (step.inputs, step.num_outputs, step.initial) == (("x",), 1, (0.0, 0.0))
    assert len(step.states) == 2
    assert len(step.graph.outputs) == 3
    assert step.graph.used() <= {*step.graph.inputs, *(n.name for n in step.graph.nodes)}
    text = "\n".join(step.graph.lines("numba"))
    assert re.search(r"n\d+ = \(n\d+ >= n\d+\)", text)


def test_too_many_arrays():
    states = {f"s{i}": sf.State() for i in range(65)}
    scope: dict[str, object] = {}
    exec(f"def step(self, x, {', '.join(states)}): return x, ({', '.join(states)},)", scope)
    neuron = type("Many", (sf.Neuron,), {**states, "step": scope["step"]})()
    with pytest.raises(UnsupportedOperation, match="Many has too many inputs, outputs, states"):
        neuron(torch.rand(2, 3))


def chosen(self, x: Tensor, v: Tensor) -> Tensor:
    return torch.where(v > 0.0, (x > 0.0).float(), 1.0)


# By whether all values are provably 0 or 1.
BINARY = {
    "compared": (lambda self, x, v: (x >= v).float(), True),
    "chosen": (chosen, True),
    "constant": (lambda self, x, v: torch.ones_like(x), True),
    "doubled": (lambda self, x, v: 2.0 * (x >= v).float(), False),
    "chosen, other": (lambda self, x, v: torch.where(v > 0.0, (x > 0.0).float(), 0.5), False),
    "input": (lambda self, x, v: x, False),
    "condition only": (lambda self, x, v: torch.where(x > 0.0, x, v), False),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_outputs_are_proved(name):
    function, expected = BINARY[name]
    assert trace_step(defined_by(function)).binary == (expected,)


def test_outputs_are_proved_binary_separately():
    def both(self, x, v):
        return (x >= 1.0).float(), x

    step = trace_step(
        type("Both", (sf.Neuron,), {"step": lambda self, x: (both(self, x, None), ())})()
    )
    assert step.binary == (True, False)


class Remembers(sf.Neuron):
    v = sf.State()
    seen: list = []  # noqa: RUF012

    def __init__(self, remember):
        super().__init__()
        self.remember, self.log, self.counts = remember, [], {}

    def step(self, x, v):
        h = 0.5 * v + x
        return h * self.remember(self, h), (h,)


outside = []


@pytest.mark.parametrize(
    ("remember", "message"),
    [
        (lambda n, h: n.log.append(h) or 1.0, r"changes self.log, .*log = State\(\)"),
        (lambda n, h: n.counts.update(n=n.counts.get("n", 0) + 1) or 1.0, "changes self.counts"),
        (lambda n, h: n.seen.append(1) or 1.0, "changes self.seen"),
        (lambda n, h: outside.append(1) or len(outside), "computes something else each time"),
    ],
    ids=["list", "dict", "class", "outside"],
)
def test_memory_outside_of_states(remember, message):
    with pytest.raises(UnsupportedOperation, match=message):
        Remembers(remember)(torch.rand(3, 2))


class Reads(sf.Neuron):
    v = sf.State()

    def __init__(self, read):
        super().__init__()
        self.read = read

    def step(self, x, v):
        h = 0.5 * v + x * self.read(x)
        return h, (h,)


READ = {
    "ndim": lambda x: x.ndim,
    "dim": lambda x: x.dim(),
    "shape": lambda x: len(x.shape),
    "size": lambda x: x.size()[0],
    "stride": lambda x: len(x.stride()),
    "requires_grad": lambda x: 2.0 if x.requires_grad else 1.0,
    "is_leaf": lambda x: 2.0 if x.is_leaf else 1.0,
    "grad_fn": lambda x: 2.0 if x.grad_fn is None else 1.0,
}


@pytest.mark.parametrize("name", READ)
def test_what_a_kernel_does_not_know_of_a_tensor(name):
    with pytest.raises(UnsupportedOperation, match=rf"reads a tensor's '{name}' at .*test_trace"):
        Reads(READ[name])(torch.rand(3, 2, requires_grad=True))


class OfUsers(torch.autograd.Function):
    """Surrogates as published code writes them."""

    @staticmethod
    def backward(ctx, grad):
        return grad


class Conditional(OfUsers):
    @staticmethod
    def forward(ctx, x):
        if x.requires_grad:
            ctx.save_for_backward(x)
        return (x > 0).float()


class Masked(OfUsers):
    @staticmethod
    def forward(ctx, x):
        y = torch.zeros_like(x)
        y[x > 0] = 1.0
        return y


class Constant(OfUsers):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, torch.tensor([0.3]))
        return (x > 0).float()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (Conditional, "kernels have a derivative whether or not a tensor requires it"),
        (Masked, r"step assigns to a part of a tensor at .*torch\.where in place of v\[mask\] = x"),
        (
            Constant,
            r"step uses 'torch\.tensor' at .*as a number, which an autograd\.Function keeps",
        ),
    ],
)
def test_surrogates_of_users_that_a_kernel_cannot_run(function, words):
    with pytest.raises(UnsupportedOperation, match=words):
        Reads(function.apply)(torch.rand(3, 2))


SHAPES = {"ones": lambda x: torch.ones(x.shape), "full": lambda x: torch.full(x.size(), 2.0)}


@pytest.mark.parametrize("read", SHAPES.values(), ids=SHAPES)
def test_a_shape_to_make_constants_with(read):
    neuron, x = Reads(read), torch.rand(3, 2)
    assert torch.equal(neuron(x), neuron(x, impl="reference"))


class Helper:
    def scale(self, x):
        return 2.0 * x


class Replaced(Helper, sf.Neuron):
    v = sf.State()

    def __init__(self):
        super().__init__()
        self.surrogate = sf.surrogate.Triangle()

    def step(self, x, v):
        h = 0.5 * v + self.scale(x)
        return self.surrogate(h - 1.0), (h,)


def test_replaced_methods(monkeypatch):
    neuron, x = Replaced(), torch.rand(5, 2, 4, requires_grad=True)

    def results(impl):
        y = neuron(x, impl=impl)
        return y, *torch.autograd.grad((y * x.detach()).sum(), x)

    def step(self, x, v):
        h = 0.25 * v + self.scale(x)
        return self.surrogate(h - 1.0), (h,)

    before = results("auto")
    for owner, name, function in (
        (Replaced, "step", step),
        (Helper, "scale", lambda self, x: 3.0 * x),
        (sf.surrogate.Triangle, "derivative", lambda self, u: 0.5 * torch.ones_like(u)),
    ):
        monkeypatch.setattr(owner, name, function)
        after = results("auto")
        for a, b in zip(after, results("reference"), strict=True):
            torch.testing.assert_close(a, b)
        assert not all(map(torch.equal, after, before)), name
        before = after
