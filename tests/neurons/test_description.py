"""What a step depends on: run-time values and constants, and when they are read anew."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from spikefuse import (
    LI,
    LIF,
    PLIF,
    LearnableFraction,
    LearnablePositive,
    Neuron,
    SlidingPSN,
    State,
    Temporal,
    UnsupportedOperation,
    exportable,
    fuse,
    surrogate,
)
from spikefuse.neurons.description import Description, bind, read
from spikefuse.nn import Block


class Two(Neuron):
    v, a = State(), State(0.5)

    def __init__(self, decay: Any = 0.5, mode: str = "plain") -> None:
        super().__init__()
        self.decay, self.mode = decay, mode
        self.surrogate = surrogate.Sigmoid(3.0)

    def step(self, x: Tensor, z: Tensor, v: Tensor, a: Tensor) -> Any:
        return self.surrogate(self.decay * v + x), (z, a)


def test_run_time_values() -> None:
    two = Two(decay=nn.Parameter(torch.tensor(0.25)))
    two.scale = 2.0
    values = two.values()
    assert set(values) == {"decay", "scale", "surrogate.width"}
    assert values["decay"] is two.decay
    assert (values["scale"], values["surrogate.width"]) == (2.0, 3.0)


def test_a_learnable_value_is_computed_per_call() -> None:
    plif = PLIF(decay=0.25, channels=2)
    first = plif.values()["decay"]
    with torch.no_grad():
        plif.decay.logit.zero_()
    second = plif.values()["decay"]
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert first.tolist() == pytest.approx([0.25, 0.25])
    assert second.tolist() == [0.5, 0.5]
    assert second.requires_grad
    assert "decay.logit" not in plif.values()


def test_statics_depend_on_constants_but_not_on_values() -> None:
    def statics(neuron: Neuron) -> tuple[Any, ...]:
        return neuron.description().statics

    same = statics(Two(decay=0.5))
    assert same == statics(Two(decay=0.75))
    assert same != statics(Two(mode="other"))
    wide, other = Two(), Two()
    wide.surrogate = surrogate.Sigmoid(9.0)
    other.surrogate = surrogate.Arctan(3.0)
    assert statics(wide) == same
    assert statics(other) != same
    assert statics(LIF(reset="soft")) != statics(LIF())
    assert statics(LIF(detach_reset=True)) != statics(LIF())


def test_bind_replaces_values_in_a_copy() -> None:
    two = Two(decay=nn.Parameter(torch.tensor(0.25)))
    decay, width = torch.tensor(0.75), torch.tensor(8.0)
    bound = bind(two, {"decay": decay, "surrogate.width": width})
    assert bound.decay is decay
    assert bound.surrogate.width is width
    assert bound.mode == "plain"
    assert isinstance(two.decay, nn.Parameter)
    assert two.surrogate.width == 3.0
    assert list(two.parameters()) == [two.decay]


def test_constants_of_the_class_are_part_of_the_kernel():
    class Leaky(Neuron):
        v = State()
        leak = 0.5

        def step(self, x, v):
            return self.leak * x, (v,)

    neuron, x = Leaky(), torch.ones(1, 1, 1)
    assert neuron(x).item() == 0.5
    Leaky.leak = 0.25
    assert neuron(x).item() == 0.25


def scale(neuron: Neuron, gain: float, x: Tensor) -> Tensor:
    return gain * x


#: Pairs of attributes of a class, and whether a change of theirs is seen.
REPLACED = {
    "partialmethod": (partialmethod(scale, 0.5), partialmethod(scale, 0.25), True),
    "built-in function": (torch.abs, torch.neg, True),
    "partial": (partial(torch.mul, 0.5), partial(torch.mul, 0.25), False),
    "method of a tensor": (torch.tensor(0.5).mul, torch.tensor(0.25).mul, False),
    "module": (nn.Sigmoid(), nn.Tanh(), False),
    "object": (SimpleNamespace(gain=0.5), SimpleNamespace(gain=0.25), False),
}


@pytest.mark.parametrize("name", REPLACED)
def test_attributes_of_the_class_are_seen_or_refused(name):
    class Leaky(Neuron):
        def step(self, x):
            return (self.f(x) if callable(self.f) else self.f.gain * x), ()

    *values, is_seen = REPLACED[name]
    for value in values:
        Leaky.f = value
        neuron, x = Leaky(), torch.ones(1, 1, 1)
        if is_seen:
            expected = value(x) if name == "built-in function" else value.args[0] * x
            assert torch.equal(neuron(x), expected)
        else:
            with pytest.raises(UnsupportedOperation, match=r"Leaky.f is a .* in __init__"):
                neuron(x)


class Reading(Neuron):
    """Reads an attribute, or one of its surrogate, if `name` says so."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.surrogate, self.name = surrogate.Sigmoid(), name
        for module in (self, self.surrogate):
            module.object, module.path, module.array = object(), Path("a"), np.zeros(2)
            module.objects, module.partial = [object()], partial(print)
            module.device, module.number = torch.device("cpu"), np.int64(2)

    def step(self, x: Tensor) -> Any:
        if self.name:
            read(self, self.name)
        return self.surrogate(x * self.number - 1.0), ()


def test_objects_that_no_step_reads_are_ignored():
    x, neuron = torch.ones(2, 1, 3, requires_grad=True), Reading()
    neuron(x).sum().backward()
    before = neuron.description()
    neuron.qconfig = object()
    assert neuron.description().statics == before.statics
    assert neuron(x).equal(neuron(x, impl="reference"))
    x = torch.ones(2, 1, 3)
    torch.compiler.reset()  # the neurons of other tests count as recompilations
    assert torch.compile(neuron, backend="eager", fullgraph=True)(x).equal(neuron(x))


@pytest.mark.parametrize("name", ["object", "path", "array", "objects", "surrogate.partial"])
def test_objects_that_a_step_reads_are_refused(name):
    own = name.split(".")[-1]
    with pytest.raises(UnsupportedOperation, match=rf"line .*\.{own}.*changes cannot be detected"):
        Reading(name)(torch.ones(1, 1, 1))


class Rectangular(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.heaviside(x, torch.ones(()))

    @staticmethod
    def backward(ctx, grad):
        return 3.0 * grad * (ctx.saved_tensors[0].abs() < 0.5)


class Ported(Neuron):
    """Holds the method of a class, as published code does."""

    v = State()

    def __init__(self) -> None:
        super().__init__()
        self.spike = Rectangular.apply

    def step(self, x: Tensor, v: Tensor) -> Any:
        h = v + x
        return self.spike(h - 1.0), (0.5 * h,)


def test_methods_of_classes_are_constants():
    neuron, x = Ported(), torch.tensor([[0.75], [0.75], [0.0]]).unsqueeze(1).requires_grad_()
    y = neuron(x)  # h is 0.75, 1.125, 0.5625
    assert y.flatten().tolist() == [0.0, 1.0, 0.0]
    (grad,) = torch.autograd.grad(y.sum(), x)
    # 3 where |h - 1| < 0.5, at each step, and half of it for each step before.
    assert grad.flatten().tolist() == [5.25, 4.5, 3.0]
    assert neuron.description() is neuron.description()


def test_numpy_floats_are_run_time_values():
    lif = LIF(np.float32(0.25), np.int32(1), surrogate=surrogate.Rectangle(np.float32(-1.0)))
    assert lif.values() == LIF(0.25, surrogate=surrogate.Rectangle(-1.0)).values()
    lif.decay = np.float32(0.75)
    assert lif.values()["decay"] == 0.75


class Modes(Neuron):
    """A definition with attributes of every kind."""

    v = State()
    leak = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.mode, self.soft, self.order = 0.5, "plain", True, (1, "a")
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.offset = torch.tensor(0.0)
        self.threshold = LearnableFraction(0.5)
        self.surrogate = surrogate.Sigmoid(3.0)

    def step(self, x: Tensor, v: Tensor) -> Any:
        return x, (v,)


class Others(Modes):
    pass


CHANGES = {
    "a float": lambda m: setattr(m, "decay", 0.25),
    "a float to an int": lambda m: setattr(m, "decay", 1),
    "a bool to an int": lambda m: setattr(m, "soft", 1),
    "a string": lambda m: setattr(m, "mode", "other"),
    "a tuple": lambda m: setattr(m, "order", (1, "b")),
    "a float to a tensor": lambda m: setattr(m, "decay", torch.tensor(0.5)),
    "a float to a parameter": lambda m: (
        delattr(m, "decay"),
        setattr(m, "decay", nn.Parameter(torch.tensor(0.5))),
    ),
    "a parameter": lambda m: setattr(m, "gain", nn.Parameter(torch.tensor(1.0))),
    "no parameter": lambda m: setattr(m, "gain", None),
    "a buffer": lambda m: setattr(m, "offset", torch.tensor(0.0)),
    "a learnable value": lambda m: setattr(m, "threshold", LearnableFraction(0.5)),
    "a width": lambda m: setattr(m.surrogate, "width", 4.0),
    "a width to a parameter": lambda m: (
        delattr(m.surrogate, "width"),
        m.surrogate.register_parameter("width", nn.Parameter(torch.tensor(3.0))),
    ),
    "a surrogate": lambda m: setattr(m, "surrogate", surrogate.Sigmoid(3.0)),
    "another surrogate": lambda m: setattr(m, "surrogate", surrogate.Arctan(3.0)),
    "a new float": lambda m: setattr(m, "more", 1.0),
    "a new buffer": lambda m: m.register_buffer("more", torch.tensor(1.0)),
    "a new module": lambda m: m.add_module("more", surrogate.Sigmoid()),
    "one attribute for another": lambda m: (delattr(m, "soft"), setattr(m, "hard", True)),
    "a new attribute of a part": lambda m: setattr(m.surrogate, "more", True),
    "training": lambda m: m.eval(),
    "training of a part": lambda m: m.surrogate.eval(),
    "loaded values": lambda m: m.load_state_dict(
        {name: 2 * value for name, value in m.state_dict().items()}, assign=True
    ),
    "the class": lambda m: setattr(m, "__class__", Others),
    "a constant of the class": lambda m: setattr(Modes, "leak", 0.25),
    "a constant hidden": lambda m: setattr(m, "leak", 0.5),
}


def assert_current(neuron: Neuron) -> None:
    values, statics, fresh = neuron.values(), neuron.description().statics, Description(neuron)
    assert repr(statics) == repr(fresh.statics)
    assert list(values) == list(fresh.values(neuron))
    for name, value in fresh.values(neuron).items():
        assert values[name] is value or not isinstance(value, float | nn.Parameter), name


@pytest.mark.parametrize("change", CHANGES)
def test_every_assignment_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Modes, "leak", 0.5)
    neuron = Modes()
    before = neuron.description()
    assert neuron.description() is before
    CHANGES[change](neuron)
    assert neuron.description() is not before
    assert_current(neuron)
    assert neuron.description() is neuron.description()


DIRECT = {
    "a dtype": lambda m: m.to(torch.bfloat16),
    "a parameter": lambda m: m._parameters.update(gain=nn.Parameter(torch.tensor(2.0))),
    "a buffer": lambda m: m._buffers.update(offset=torch.ones(())),
    "a learnable value": lambda m: m._modules.update(threshold=LearnableFraction(0.25)),
}


@pytest.mark.parametrize("change", DIRECT)
def test_tensors_are_read_in_every_call(change: str) -> None:
    neuron = Modes()
    before = neuron.values()
    DIRECT[change](neuron)
    assert_current(neuron)
    assert repr(neuron.values()) != repr(before)


def test_functional_call() -> None:
    class Scaled(Neuron):
        v = State()

        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(2.0))

        def step(self, x: Tensor, v: Tensor) -> Any:
            return self.gain * x, (v,)

    neuron, x = Scaled(), torch.ones(1, 1)
    assert neuron(x).item() == 2.0
    gain = torch.tensor(3.0, requires_grad=True)
    y = torch.func.functional_call(neuron, {"gain": gain}, (x,))
    y.sum().backward()
    assert (y.item(), gain.grad) == (3.0, 1.0)
    assert neuron(x).item() == 2.0


def test_a_parametrization() -> None:
    class Double(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return 2 * value

    neuron, x = LI(nn.Parameter(torch.tensor(0.25))), torch.ones(2, 1)
    assert neuron(x)[-1].item() == 1.25
    nn.utils.parametrize.register_parametrization(neuron, "decay", Double())
    assert neuron(x)[-1].item() == 1.5
    with torch.no_grad():
        neuron.parametrizations.decay.original.zero_()
    assert neuron(x)[-1].item() == 1.0
    nn.utils.parametrize.remove_parametrizations(neuron, "decay")
    assert neuron(x)[-1].item() == 1.0


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        exportable,
        lambda net: torch.optim.swa_utils.AveragedModel(net).module,
    ],
    ids=["deepcopy", "exportable", "AveragedModel"],
)
def test_copies_of_a_network_with_a_parametrized_neuron(duplicate: Any) -> None:
    net, x = Temporal(nn.Sequential(LI(nn.Parameter(torch.tensor(0.25))))), torch.ones(3, 2, 4)
    register_parametrization(net.net[0], "decay", Halved())
    other = duplicate(net)
    assert torch.equal(other(x), net(x))
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert torch.equal(other(x), x)
    assert not torch.equal(net(x), x)


def test_cache_lasts_until_a_float_or_a_constant_changes() -> None:
    neuron = Modes()
    neuron.description().cache["key"] = True
    LIF()
    neuron.gain = nn.Parameter(torch.tensor(2.0))
    assert neuron.description().cache == {"key": True}
    for name, value in (("decay", 0.25), ("mode", "other"), ("offset", -0.0), ("offset", 0.0)):
        neuron.description().cache["key"] = True
        setattr(neuron, name, value)
        assert neuron.description().cache == {}, name


def test_a_constant_of_a_mixin() -> None:
    class Mixin:
        leak = 0.5

    class Mixed(Mixin, Neuron):
        v = State()

        def step(self, x: Tensor, v: Tensor) -> Any:
            return self.leak * x, (v,)

    neuron, x = Mixed(), torch.ones(1, 1)
    assert neuron(x).item() == 0.5
    Mixin.leak = 0.25
    assert neuron(x).item() == 0.25


def test_a_warm_description_takes_two_python_calls() -> None:
    neuron, calls = LIF(), []
    neuron.description().values(neuron)

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        neuron.description().values(neuron)
    finally:
        sys.setprofile(None)
    assert calls == ["description", "values"]


@pytest.mark.parametrize(
    ("mutable", "change"),
    [
        ([1], lambda x: x.append(2)),
        ({1}, lambda x: x.add(2)),
        ({1: 1}, lambda x: x.update({1: 2})),
        ((1, [2]), lambda x: x[1].append(3)),
    ],
    ids=["list", "set", "dict", "a list in a tuple"],
)
def test_mutable_constants_are_read_in_every_call(mutable: Any, change: Any) -> None:
    neuron = Modes()
    neuron.mutable = mutable
    before = neuron.description().statics
    change(mutable)
    assert neuron.description().statics != before
    assert_current(neuron)


def test_a_description_holds_no_graph() -> None:
    neuron, leaf = Modes(), torch.tensor(0.5, requires_grad=True)
    neuron.offset = 2 * leaf
    assert neuron.values()["offset"] is neuron.offset
    gone = weakref.ref(neuron.offset)
    neuron._buffers["offset"] = leaf
    assert gone() is None
    assert neuron.values()["offset"] is leaf


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_have_their_own_description(duplicate: Any) -> None:
    neuron = Modes()
    neuron.description()
    other = duplicate(neuron)
    assert_current(other)
    other.mode, other.decay = "other", 0.125
    assert_current(other)
    assert_current(neuron)
    assert neuron.values()["decay"] == 0.5


def test_a_description_keeps_no_neuron_alive() -> None:
    neuron = Modes()
    neuron.description()
    gone = weakref.ref(neuron)
    gc.disable()
    try:
        del neuron
        assert gone() is None
    finally:
        gc.enable()


class Weighted(Neuron):
    """The sum of the products of the input with `weights`."""

    v = State()

    def __init__(self, weights: Any) -> None:
        super().__init__()
        self.weights = weights

    def step(self, x: Tensor, v: Tensor) -> Any:
        total = v
        for weight in self.weights:
            total = total + weight * x
        return total, (v,)


@pytest.mark.parametrize(
    "container",
    [lambda x: [x], lambda x: (x,), lambda x: ((1.0, x),), lambda x: {1.0: x}],
    ids=["list", "tuple", "nested", "dict"],
)
def test_tensors_in_containers_are_refused(container: Any) -> None:
    for weight in (torch.tensor(0.123451), nn.Parameter(torch.tensor(0.5))):
        match = r"line .*weights\[.*use attributes, or an nn\.ParameterList"
        with pytest.raises(UnsupportedOperation, match=match):
            Weighted(container(weight))(torch.ones(1, 1, 1))


def test_objects_in_containers_are_refused() -> None:
    class Same:
        def __repr__(self) -> str:
            return "same"

    match = r"Weighted\.weights\[\.\.\.\] is a Same"
    with pytest.raises(UnsupportedOperation, match=match):
        Weighted([Same()])(torch.ones(1, 1, 1))


def test_a_list_of_parameters_learns() -> None:
    neuron = Weighted(nn.ParameterList([torch.tensor(0.5), torch.tensor(0.25)]))
    x = torch.full((3, 2), 2.0)
    y = neuron(x)
    assert torch.equal(y, torch.full_like(x, 1.5))
    y.sum().backward()
    assert [p.grad.item() for p in neuron.parameters()] == [12.0, 12.0]


@pytest.mark.parametrize(
    ("one", "other"),
    [((1,), (True,)), ((1,), (1.0,)), ((0.0,), (-0.0,)), ((1,), [1]), ({"a": 1}, {"a": 2})],
    ids=str,
)
def test_constants_differ_by_type_and_value(one: Any, other: Any) -> None:
    assert Weighted(one).description().statics != Weighted(other).description().statics
    assert Weighted(one).description().statics == Weighted(copy.copy(one)).description().statics


def test_constants_set_on_the_class_later() -> None:
    class Late(Neuron):
        v = State()
        weights = (0.5, 0.25)

        def step(self, x: Tensor, v: Tensor) -> Any:
            return getattr(self, "gain", 1.0) * self.weights[0] * x, (v,)

    neuron, x = Late(), torch.ones(1, 1)
    assert neuron(x).item() == 0.5
    Late.weights = (2.0, 0.25)
    assert neuron(x).item() == 2.0
    Late.gain = 3.0
    assert neuron(x).item() == 6.0
    Late.gain = 0.5
    assert neuron(x).item() == 1.0
    del Late.gain
    assert neuron(x).item() == 2.0


def test_constants_of_a_surrogates_class() -> None:
    class Flat(surrogate.Surrogate):
        height = 2.0

        def derivative(self, u: Tensor) -> Tensor:
            return self.height * torch.ones_like(u)

    neuron = LIF(surrogate=Flat(), detach_reset=True)
    gradients = []
    for height in (2.0, 3.0):
        Flat.height = height
        x = torch.zeros(1, 1, requires_grad=True)
        neuron(x).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.item())
    assert gradients == [2.0, 3.0]


def test_a_hidden_class_default_is_not_a_constant() -> None:
    class Default(Neuron):
        v = State()
        decay = 0.9

        def __init__(self, decay: Any = None) -> None:
            super().__init__()
            if decay is not None:
                self.decay = decay

        def step(self, x: Tensor, v: Tensor) -> Any:
            return self.decay * x, (v,)

    statics = [Default(decay).description().statics for decay in (0.5, 0.25, None)]
    assert statics[0] == statics[1] != statics[2]
    one = Default(0.5)
    before = one.description().statics
    one.decay = 0.125
    assert one.description().statics == before


class Learned(Neuron):
    v = State()

    def __init__(self):
        super().__init__()
        self.decay, self.threshold = torch.nn.Parameter(torch.tensor(0.5)), 1.0
        self.surrogate = surrogate.Sigmoid(torch.nn.Parameter(torch.tensor(2.0)))

    def step(self, x, v):
        h = self.decay * v + x
        s = self.surrogate(h - self.threshold)
        return s, (h * (1 - s),)


class Halved(torch.nn.Module):
    def forward(self, value):
        return 0.5 * value


def _load(neuron, **options):
    neuron.load_state_dict({k: 0.3 * v for k, v in neuron.state_dict().items()}, **options)


def _set_data(neuron):
    neuron.decay.data = torch.tensor(0.9)


def _parametrized(neuron):
    register_parametrization(neuron, "decay", Halved())
    register_parametrization(neuron.surrogate, "width", Halved())
    return neuron


def _copied(copied):
    copied.threshold, copied.surrogate.cutoff = 0.5, 0.0
    return copied


@pytest.mark.parametrize(
    "change",
    [
        _load,
        lambda neuron: _load(neuron, assign=True),
        _set_data,
        lambda neuron: neuron.to(torch.bfloat16),
        lambda neuron: register_parametrization(neuron, "decay", Halved()),
        lambda neuron: _copied(copy.deepcopy(neuron)),
        lambda neuron: _copied(copy.deepcopy(_parametrized(neuron))),
        lambda neuron: _copied(copy.copy(neuron)),
        lambda neuron: _copied(pickle.loads(pickle.dumps(neuron))),
    ],
    ids=[
        "load",
        "assign",
        "data",
        "to",
        "parametrize",
        "deepcopy",
        "deepcopy parametrized",
        "copy",
        "pickle",
    ],
)
def test_changes_by_torch_are_seen(change):
    neuron, x = Learned(), 2 * torch.randn(5, 2, 3)
    neuron(x)
    changed = change(neuron) or neuron
    for each in (changed, neuron):

        def gradients(impl, each=each):
            leaf = x.clone().requires_grad_()
            y = each(leaf, impl=impl)
            return y, *torch.autograd.grad(y.sum(), [leaf, *each.parameters()])

        for a, e in zip(gradients("auto"), gradients("reference"), strict=True):
            rtol = 1e-2 if a.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(a, e, rtol=rtol, atol=1e-4)


def described_anew(neurons: list[Any], change: Callable[[], Any]) -> list[int]:
    """Return which of the neurons a change describes anew."""
    before = [neuron.description() for neuron in neurons]
    change()
    return [i for i, neuron in enumerate(neurons) if neuron.description() is not before[i]]


def test_an_assignment_describes_its_neuron_anew_and_no_other() -> None:
    neurons = [LIF() for _ in range(50)]
    assert described_anew(neurons, lambda: setattr(LIF(), "decay", 0.25)) == []
    assert described_anew(neurons, lambda: setattr(neurons[3], "decay", 0.25)) == [3]
    assert described_anew(neurons, lambda: setattr(neurons[4].surrogate, "width", 2.0)) == [4]
    assert described_anew(neurons, lambda: delattr(neurons[5].surrogate, "width")) == [5]


def test_an_assignment_to_a_shared_surrogate() -> None:
    shared = surrogate.Sigmoid()
    neurons = [LIF(surrogate=shared), LIF(), LIF(surrogate=shared)]
    for width in (2.0, torch.tensor(2.0), LearnablePositive(2.0)):
        assert described_anew(neurons, lambda w=width: setattr(shared, "width", w)) == [0, 2]


def test_an_assignment_to_a_class() -> None:
    base = type("Base", (LIF,), {"leak": 0.5})
    derived, other = type("Derived", (base,), {}), type("Other", (LIF,), {})
    neurons = [base(), derived(), other(), LIF()]
    assert described_anew(neurons, lambda: setattr(base, "leak", 0.25)) == [0, 1]
    assert described_anew(neurons, lambda: setattr(derived, "leak", 0.25)) == [1]
    assert described_anew(neurons, lambda: delattr(derived, "leak")) == [1]
    assert described_anew(neurons, lambda: setattr(base, "leak", 0.125)) == [0, 1]
    kind = type("Kind", (surrogate.Sigmoid,), {})
    neurons[3].surrogate = kind()
    assert described_anew(neurons, lambda: setattr(kind, "scale", 2.0)) == [3]


def test_train_and_eval_change_only_a_neuron_in_another_mode() -> None:
    neurons = [LIF(), LIF().eval()]
    assert described_anew(neurons, nn.ModuleList(neurons).train) == [1]
    assert described_anew(neurons, nn.ModuleList(neurons).train) == []


def test_shallow_copies_see_their_own_assignments() -> None:
    neuron = LIF()
    neuron.description()
    other = copy.copy(neuron)
    for decay in (0.25, 0.125):
        other.decay = decay
        assert (neuron.values()["decay"], other.values()["decay"]) == (0.5, decay)
    neuron.decay = 0.75
    assert (neuron.values()["decay"], other.values()["decay"]) == (0.75, 0.125)


class Described:
    """A descriptor that cannot be a key of a dictionary."""

    __hash__ = None

    def __get__(self, owner, kind=None):
        return 0.5


class WithModule(Neuron):
    v, functions = State(), torch.nn.functional
    surrogate_width = 2.0

    def __init__(self):
        super().__init__()
        self.surrogate = surrogate.Sigmoid(self.surrogate_width)

    def step(self, x, v):
        h = self.functions.softplus(0.5 * v + x)
        return self.surrogate(h - 1), (h,)


def test_a_python_module_as_an_attribute_of_a_class():
    x = torch.rand(3, 4)
    torch.testing.assert_close(WithModule()(x), WithModule()(x, impl="reference"))


def test_a_descriptor_without_a_hash_that_no_step_reads():
    class Odd(WithModule):
        decay = Described()

    x = torch.rand(3, 4)
    torch.testing.assert_close(Odd()(x), WithModule()(x))


def no_spikes(self, h, threshold):
    return 0 * h, h


def decayed(self, x, v):
    return self.decay * x, (v,)


def above(self, x, v):
    return 0 * x + self.threshold


METHODS = {"fire": no_spikes, "step": decayed, "charge": above}
VALUES = {"fire": 0.0, "step": 0.25, "charge": 1.0}


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_an_instance(name, is_known):
    class Own(LIF):
        pass

    x = torch.full((3, 2, 4), 0.5)
    if is_known:
        Own()(x)
    neuron = Own()
    setattr(neuron, name, MethodType(METHODS[name], neuron))
    assert neuron.description() is neuron.description()
    norm = nn.BatchNorm1d(4, eps=0.0).eval()
    nets = [
        neuron,
        partial(neuron, impl="reference"),
        Temporal(neuron),
        fuse(Temporal(nn.Sequential(norm, neuron))),
        Block(norm, neuron),
        torch.compile(neuron, backend="eager"),
    ]
    for net in nets:
        assert torch.equal(net(x), torch.full_like(x, VALUES[name]))
    spikes, _ = neuron(x, outputs=("spikes", "v"))
    assert torch.equal(spikes, torch.full_like(x, VALUES[name]))
    assert set(Own()(x).unique().tolist()) <= {0.0, 1.0}


def test_a_method_of_a_surrogate_of_an_instance():
    neuron, x = LIF(), torch.full((3, 2, 4), 2.0)
    assert neuron(x).all()
    neuron.surrogate.spike = MethodType(lambda self, u: u < 0, neuron.surrogate)
    for impl in ("auto", "reference"):
        assert not neuron(x, impl=impl).any()


@pytest.mark.parametrize("duplicate", ["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("make", [LIF, SlidingPSN])
def test_copies_have_methods_of_their_own(make, duplicate):
    neuron = make()
    neuron.fire = MethodType(no_spikes, neuron)
    how = {"pickle": lambda n: pickle.loads(pickle.dumps(n))}
    other = how.get(duplicate, getattr(copy, duplicate, None))(neuron)
    assert other.fire.__self__ is other
    assert other.fire.__func__ is no_spikes
    assert vars(other).keys() == vars(neuron).keys()


def test_a_method_of_a_copy_reads_its_values():
    neuron, x = LIF(), torch.full((2, 1, 3), 0.5)
    neuron.charge = MethodType(above, neuron)
    other = copy.deepcopy(neuron)
    other.fire = MethodType(lambda self, h, threshold: (h, h), other)
    other.threshold = 3.0
    for impl in ("auto", "reference"):
        assert torch.equal(other(x, impl=impl), torch.full_like(x, 3.0))
        assert neuron(x, impl=impl).all()


@pytest.mark.parametrize("name", METHODS)
def test_functions_whose_changes_cannot_be_detected_are_refused(name):
    neuron, other, x = LIF(), LIF(), torch.ones(2, 1, 3)
    neuron(x)
    for function in (partial(METHODS[name], neuron), getattr(other, name)):
        setattr(neuron, name, function)
        with pytest.raises(
            UnsupportedOperation, match=rf"LIF\.{name} is a (partial|method), whose"
        ):
            neuron(x)
