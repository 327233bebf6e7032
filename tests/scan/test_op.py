"""The scan as a PyTorch operation: registrations, transformations, memory, compilations."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spikefuse as sf
from spikefuse.compiler import emit_numba
from spikefuse.kernels.triton_runtime import interpreted
from spikefuse.scan import program
from spikefuse.testing import make_input, poisoned

X = make_input((20, 2, 6))


class Pair(sf.Neuron):
    """Two inputs, outputs, states and learnable parameters."""

    u, w = sf.State(), sf.State(0.5)

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.75))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.surrogate = sf.surrogate.Arctan()

    def step(self, x, y, u, w):
        h = self.decay * u + self.gain * x - 0.25 * w
        s = self.surrogate(h - 0.5)
        return (s, h * y), (h * (1 - s), 0.5 * w + y)


def prepared(neuron: sf.Neuron, backend: str = "numba"):
    """(name, tensor parameters, scalars) of a neuron's call."""
    values, statics = neuron.values(), neuron.description().statics
    made = program.prepare(neuron, backend, statics, program.kinds_of(values))
    chosen = [values[label] for label in made.step.params]
    params = [v.detach().requires_grad_() for v in chosen if isinstance(v, Tensor)]
    return made.name, params, [v for v in chosen if isinstance(v, float)]


@pytest.mark.parametrize(("save", "final"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "neuron", [sf.LIF(), sf.PLIF(channels=6), Pair()], ids=lambda n: type(n).__name__
)
def test_opcheck(neuron, save, final):
    name, params, scalars = prepared(neuron)
    inputs = [
        make_input((5, 2, 6), seed=i).requires_grad_() for i in range(len(neuron.input_names))
    ]
    states = [make_input((2, 6), seed=9 + i).requires_grad_() for i in range(len(neuron.states))]
    if not save:
        inputs, states, params = (
            [t.detach() for t in tensors] for tensors in (inputs, states, params)
        )
    for given in ([], states):
        arguments = name, inputs, given, params, [], scalars, save, final
        torch.library.opcheck(torch.ops.spikefuse.scan.default, arguments)


def test_opcheck_of_the_backward():
    neuron = Pair()
    name, params, scalars = prepared(neuron)
    params = [p.detach() for p in params]
    inputs = [make_input((20, 2, 6), seed=i) for i in range(2)]
    arguments = name, inputs, [], params, [], scalars
    results = torch.ops.spikefuse.scan(*arguments, True, True)
    grads, finals, saved = results[:2], results[2:4], results[4:]
    torch.library.opcheck(
        torch.ops.spikefuse.scan_backward.default,
        (*arguments, saved, [grads[0], None, None, finals[1]], [True, True, True, False]),
    )


def gradients(module: nn.Module, call, *inputs: Tensor) -> list[Tensor]:
    """Results of `call`, gradients of the inputs and of the module's parameters."""
    module.zero_grad()
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    results = call(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    losses = [(r.float() * torch.arange(float(r.numel())).view(r.shape)).sum() for r in results]
    torch.stack(losses).sum().backward()
    grads = [t.grad for t in (*leaves, *module.parameters())]
    return [*(r.detach() for r in results), *grads]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), i


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def network() -> sf.Temporal:
    torch.manual_seed(0)
    return sf.Temporal(
        nn.Sequential(nn.Linear(6, 5), sf.PLIF(channels=5, threshold=0.3), nn.Linear(5, 3))
    )


@pytest.mark.parametrize("make", [sf.LIF, lambda: sf.PLIF(channels=6), network])
def test_torch_compile(make):
    torch.compiler.reset()
    module = make()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(module, compiled, X), gradients(module, module, X))


def test_torch_compile_with_states():
    torch.compiler.reset()
    neuron, state = Pair(), (make_input((2, 6), seed=8), make_input((2, 6), seed=9))

    def call(x, y, u, w):
        outputs, state = neuron(x, y, state=(u, w), return_state=True)
        return (*outputs, *state)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = X, make_input(X.shape, seed=1), *state
    assert_equal(gradients(neuron, compiled, *inputs), gradients(neuron, call, *inputs))


class Branching(sf.Neuron):
    """Reads constants of every kind, and no float."""

    v = sf.State()
    offset = 1

    def __init__(self):
        super().__init__()
        self.flag, self.count, self.kind, self.weights, self.function = (
            True,
            2,
            "soft",
            (1, 2),
            None,
        )
        self.register_parameter("gain", None)
        self.surrogate = sf.surrogate.StraightThrough()

    def step(self, x, v):
        h = v + x * self.count + self.weights[0] - self.offset
        h = 0.5 * h if self.flag else h
        h = h + 0.25 if self.training else h
        h = h if self.function is None else self.function(h)
        h = h if self.gain is None else self.gain * h
        s = self.surrogate(h - 1.0)
        return s, (h * (1 - s) if self.kind == "hard" else h - s,)


def assign(name, value):
    """A change of an attribute of a neuron or, in `surrogate.`, of its surrogate."""

    def change(neuron):
        *path, last = name.split(".")
        setattr(neuron.get_submodule(".".join(path)), last, value)

    change.__name__ = name
    return change


@pytest.mark.parametrize("make", [sf.Temporal, lambda neuron: neuron], ids=["Temporal", "alone"])
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (sf.LIF, assign("reset", "soft")),
        (sf.LIF, assign("detach_reset", True)),
        (sf.LIF, assign("surrogate.cutoff", 0.3)),
        (Branching, assign("flag", False)),
        (Branching, assign("count", 3)),
        (Branching, assign("offset", 2)),
        (Branching, assign("kind", "hard")),
        (Branching, assign("weights", (2, 1))),
        (Branching, assign("function", torch.tanh)),
        (Branching, assign("gain", nn.Parameter(torch.tensor(0.4)))),
        (Branching, assign("surrogate", sf.surrogate.Custom(torch.ones_like))),
        (Branching, assign("surrogate.cutoff", 0.0)),
        (Branching, nn.Module.eval),
    ],
    ids=lambda value: value.__name__,
)
def test_torch_compile_follows_changes(kind, change, make):
    torch.compiler.reset()
    neuron = kind()
    module = make(neuron)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    x = 2 * X[:5]
    assert_equal(gradients(module, compiled, x), gradients(module, module, x))
    change(neuron)
    assert_equal(gradients(module, compiled, x), gradients(module, module, x))


def test_torch_compile_traces_each_mode_once():
    torch.compiler.reset()
    neuron, traced = Branching(), []

    def backend(graph, inputs):
        traced.append(graph)
        return graph

    compiled = torch.compile(neuron, fullgraph=True, backend=backend)
    for _ in range(3):
        for mode in (True, False):
            assert torch.equal(compiled.train(mode)(X), neuron(X))
    assert len(traced) == 2


def test_torch_compile_without_gradients():
    torch.compiler.reset()
    neuron = sf.LIF()
    compiled = torch.compile(neuron, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(X), neuron(X))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    net, seen = network(), []
    net.net[1].register_forward_hook(lambda module, inputs, y: seen.append((inputs[0].dtype, y)))
    with torch.autocast("cpu", dtype):
        y = net(X)
    y.float().sum().backward()
    ((received, spikes),) = seen
    assert received == spikes.dtype == y.dtype == dtype
    assert spikes.any()
    for p in net.parameters():
        assert p.grad.dtype == p.dtype == torch.float32
        assert p.grad.isfinite().all()


def test_a_module_in_half_precision():
    neuron = sf.PLIF(channels=6).to(torch.bfloat16)
    x = X.bfloat16().requires_grad_()
    neuron(x).sum().backward()
    assert neuron.decay.logit.grad.dtype == x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    neuron = sf.PLIF(channels=6)

    def call(x):
        return checkpoint(neuron, x, use_reentrant=reentrant)

    assert_equal(gradients(neuron, call, X), gradients(neuron, neuron, X))


def test_inference_mode():
    with torch.inference_mode():
        y = sf.PLIF()(X)
    assert y.is_inference()
    assert torch.equal(y, sf.PLIF()(X))


class Singular(sf.Neuron):
    """Derivatives of its second output and of its second state are infinite."""

    v, w = sf.State(), sf.State()

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def step(self, x, v, w):
        h = 0.5 * v + self.gain * x
        return (2 * h, torch.sqrt(0 * h)), (h, torch.sqrt(0 * w) + 0.25 * h)


USED = {
    "first output": lambda y, z, v, w: y,
    "final state": lambda y, z, v, w: v,
    "output and state": lambda y, z, v, w: y + v,
    "second output": lambda y, z, v, w: z,
    "second state": lambda y, z, v, w: y + w,
    "all": lambda y, z, v, w: y + z + v + w,
}


@pytest.mark.parametrize("impl", ["numba", "triton", "compiled"])
@pytest.mark.parametrize("used", USED)
def test_absent_gradients(used, impl):
    """What the loss does not use has no gradient, rather than one of 0."""
    if impl == "triton" and not interpreted():
        pytest.skip("needs TRITON_INTERPRET=1")
    neuron, x, found = Singular(), X.clone().requires_grad_(), []
    for how in ("reference", "auto" if impl == "compiled" else impl):
        call = neuron
        if (how, impl) == ("auto", "compiled"):
            call = torch.compile(neuron, backend="eager")
        (y, z), (v, w) = call(x, return_state=True, impl=how)
        loss = USED[used](y, z, v, w).sum()
        found.append(torch.autograd.grad(loss, (x, neuron.gain)))
    for actual, expected in zip(*found[::-1], strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)
    assert found[0][0].isfinite().all() == (used in list(USED)[:3])


def test_backward_twice():
    x = X.clone().requires_grad_()
    y = sf.LIF()(x).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * once)


def test_an_input_changed_in_place():
    x = X.clone().requires_grad_()
    hidden = 1.0 * x
    y = sf.LIF()(hidden)
    hidden.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_output_changed_in_place():
    x = X.clone().requires_grad_()
    y = sf.LIF()(x)
    y.mul_(2.0)
    y.sum().backward()
    expected = X.clone().requires_grad_()
    (2.0 * sf.LIF()(expected)).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_new_steps_sizes_and_values_compile_nothing(backends):
    for impl in backends.impls:
        names, modules, signatures = set(), set(), set()
        for i, (num_steps, shape) in enumerate(
            [(5, (2, 6)), (1, (1, 1)), (33, (3, 50)), (16, (7,))]
        ):
            neuron = sf.LIF(0.5 + i / 10, 1.0 + i, v_reset=-0.1 * i)
            neuron.surrogate.width = 1.0 + i
            x = torch.randn(num_steps, *shape, device=backends.device, requires_grad=True)
            neuron(x, impl=impl).sum().backward()
            name, _, _ = prepared(neuron, impl)
            names.add(name)
            modules.add(tuple(map(id, program.program(name).modules.values())))
            if impl == "numba":
                made = program.program(name)
                kernels = made.forward(), made.backward(made.step.inputs, made.learnable())
                signatures.add(tuple(kernels[0].signatures + kernels[1].signatures))
        # Other tests of this process may have compiled other variants, but none of these calls.
        assert (len(names), len(modules)) == (1, 1)
        assert len(signatures) == (1 if impl == "numba" else 0)


def kept(call) -> list[Tensor]:
    """The tensors that autograd keeps for backward."""
    tensors: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    return tensors


def test_tensors_saved_for_backward():
    steps, neuron = 3 * emit_numba.CHUNK + 1, Pair()
    x, y = (make_input((steps, 2, 6), seed=i).requires_grad_() for i in range(2))
    found = kept(lambda: neuron(x, y, return_state=True))
    owned = {x.data_ptr(), y.data_ptr(), *(p.data_ptr() for p in neuron.parameters())}
    assert owned <= {t.data_ptr() for t in found}
    assert [list(t.shape) for t in found if t.data_ptr() not in owned] == [[3, 12]] * 2


@pytest.mark.parametrize(
    "layers", [[sf.LIF()], [nn.BatchNorm2d(8), sf.LIF()]], ids=["LIF", "block"]
)
def test_saved_tensors_may_return_in_another_layout(layers, backends):
    net = sf.fuse(sf.Temporal(nn.Sequential(*layers))).to(backends.device)
    x = make_input((6, 2, 8, 5, 5), device=backends.device).flatten(0, 1)
    x = x.to(memory_format=torch.channels_last).unflatten(0, (6, 2)).requires_grad_()
    weight = make_input(x.shape, device=backends.device, seed=1)
    for impl in backends.impls:
        expected = torch.autograd.grad((net(x, impl=impl) * weight).sum(), x)
        with torch.autograd.graph.saved_tensors_hooks(Tensor.contiguous, lambda y: y):
            loss = (net(x, impl=impl) * weight).sum()
        assert all(map(torch.equal, torch.autograd.grad(loss, x), expected))


def test_half_precision_inputs_are_saved_unconverted():
    x = make_input((20, 2, 6), torch.bfloat16).requires_grad_()
    found = kept(lambda: sf.LIF()(x))
    assert [(t.dtype, list(t.shape)) for t in found] == [
        (torch.bfloat16, [20, 2, 6]),
        (torch.float32, [1, 12]),
    ]


def test_a_short_sequence_saves_only_its_input(backends):
    x = make_input((8, 2, 6), device=backends.device).requires_grad_()
    for impl in backends.impls:
        (found,) = kept(lambda impl=impl: sf.LIF()(x, impl=impl))
        assert found.data_ptr() == x.data_ptr()


def test_nothing_is_saved_if_no_gradient_is_needed():
    x = X.clone().requires_grad_()
    assert kept(lambda: sf.LIF()(X)) == []
    with torch.no_grad():
        assert kept(lambda: sf.PLIF()(x)) == []
    assert not sf.LIF()(X).requires_grad
    frozen = sf.PLIF(channels=6).requires_grad_(False)
    assert kept(lambda: frozen(X)) == []


USES = {
    "first output": lambda outputs, state: outputs[0],
    "second output": lambda outputs, state: outputs[1],
    "first state": lambda outputs, state: state[0],
    "second state": lambda outputs, state: state[1],
    "one output and one state": lambda outputs, state: outputs[0].sum() + state[1].sum(),
}


def test_a_first_call_under_hooks_and_modes():
    class Fresh(sf.LIF):
        pass

    kept_tensors = kept(lambda: Fresh()(X.clone().requires_grad_()))
    assert len(kept_tensors) == 2
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):

        class Other(sf.LIF):
            pass

        assert torch.equal(Other()(X), sf.LIF()(X))


@pytest.mark.parametrize("use", USES)
def test_undefined_gradients(use, backends):
    neuron = Pair().to(backends.device)
    values = [make_input(X.shape, device=backends.device, seed=i) for i in range(2)]
    values += [make_input(X.shape[1:], device=backends.device, seed=8 + i) for i in range(2)]
    found = []
    for impl in ("reference", *backends.impls):
        leaves = [v.clone().requires_grad_() for v in values]
        with poisoned():
            outputs, state = neuron(*leaves[:2], state=leaves[2:], return_state=True, impl=impl)
            used = USES[use](outputs, state)
            grads = torch.autograd.grad(
                used.sum(), [*leaves, *neuron.parameters()], allow_unused=True
            )
        zero = torch.zeros((), device=backends.device)
        found.append([zero if g is None else g for g in grads])
    for actual in found[1:]:
        for a, e in zip(actual, found[0], strict=True):
            torch.testing.assert_close(a, e.expand_as(a), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wanted", ["x", "decay", "gain"])
def test_only_one_gradient_is_needed(wanted):
    expected_of, neuron = Pair(), Pair()
    y = make_input(X.shape, seed=1)
    expected = dict(
        zip(("x", "y", "decay", "gain"), gradients(expected_of, expected_of, X, y)[2:], strict=True)
    )
    neuron.requires_grad_(False)
    x = X.clone()
    leaf = x if wanted == "x" else getattr(neuron, wanted)
    leaf.requires_grad_()
    results = neuron(x, y)
    weights = torch.arange(float(X.numel())).view(X.shape)
    sum((r * weights).sum() for r in results).backward()
    assert_close([leaf.grad], [expected[wanted]])
    assert [t.grad is not None for t in (x, neuron.decay, neuron.gain)].count(True) == 1


@pytest.mark.parametrize("shape", [(2, 0, 6), (2, 3, 6, 0)], ids=str)
def test_no_neurons(shape, backends):
    neuron = Pair().to(backends.device)
    neuron.decay.requires_grad_(False)
    for impl in backends.impls:
        neuron.zero_grad()
        x = torch.empty(shape, device=backends.device, requires_grad=True)
        outputs, state = neuron(x, x, return_state=True, impl=impl)
        assert [list(r.shape) for r in (*outputs, *state)] == [[*shape]] * 2 + [[*shape[1:]]] * 2
        outputs[0].sum().backward()
        assert x.grad.shape == shape
        assert neuron.gain.grad.tolist() == [0.0] * 6
        assert neuron.decay.grad is None


def fresh(number: int) -> sf.Neuron:
    class Fresh(sf.Neuron):
        v = sf.State()

        def __init__(self):
            super().__init__()
            self.number = number

        def step(self, x, v):
            v = v * 0.3 + x * (1 + self.number)
            return v, (v,)

    return Fresh()


def test_first_calls_from_several_threads():
    # Numba only: Triton's interpreter is not made for threads.
    barrier, errors = threading.Barrier(6), []
    neurons = [fresh(i) for i in range(2)]

    def work(neuron: sf.Neuron) -> None:
        try:
            x = X.clone().requires_grad_()
            barrier.wait()
            y = neuron(x)
            y.sum().backward()
            assert torch.equal(y, neuron(x, impl="reference"))
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(neurons[i % 2],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# PyTorch's own: jvp imports decompositions that it compiles with torch.jit.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap", "vectorized"])
def test_function_transforms_are_refused(transform):
    neuron, x = sf.LIF(), torch.randn(4, 2, 3)
    calls = {
        "vectorized": lambda: torch.autograd.functional.jacobian(neuron, x, vectorize=True),
        "grad": lambda: torch.func.grad(lambda x: neuron(x).sum())(x),
        "jvp": lambda: torch.func.jvp(neuron, (x,), (x,)),
        "vmap": lambda: torch.func.vmap(neuron)(x.expand(2, 4, 2, 3)),
    }
    with pytest.raises(NotImplementedError, match="impl="):
        calls[transform]()
