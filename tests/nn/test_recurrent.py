"""Recurrent layers against the eager loop, one step from the kernel's own spikes at a time.

tests/gpu/test_recurrent.py adds the sizes that several programs of a GPU share.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn

import spikefuse as sf
from spikefuse.memory import Bits, Checkpoint, SaveAll
from spikefuse.testing import DTYPES
from tests.definitions import CORE, DEFINITIONS, RESETS, RESETS_OF, SMOOTH, make
from tests.grid import on_grid
from tests.nn.recurrent_layers import (
    Scaled,
    check_gradients,
    check_steps,
    inputs_of,
    layer,
    network,
    state_of,
    tensors,
)

# Neurons whose output is not on the grid.
GRADED = ("LI", "LI-decay-input", "RateIF")


def cases():
    """Every neuron but synapses, in float32 with its first reset; half precision and the last reset
    in turns."""
    every = torch.cuda.is_available()
    for i, name in enumerate(n for n in DEFINITIONS if n != "ShortTermPlasticity"):
        resets = RESETS_OF.get(name, RESETS)
        yield name, resets[0], torch.float32
        if every or i % 4 == 1:
            yield name, resets[-1], DTYPES[1 + i // 4 % 2]


def impls_of(name, backends):
    """The backends of a case: a model of the zoo has one of those of a CPU, in turns."""
    if name in CORE:
        return backends.impls
    return backends.impls[[*DEFINITIONS].index(name) % len(backends.impls) :][:1]


@pytest.mark.parametrize(("name", "reset", "dtype"), [*cases()])
def test_equals_the_reference(name, reset, dtype, backends):
    made = layer(make(name, reset, 20, backends.device), 20, backends.device)
    shape = 6, 5, 20
    inputs = inputs_of(made.neuron, shape, dtype, backends.device)
    state = state_of(made.neuron, shape[1:], backends.device)
    for impl in impls_of(name, backends):
        if name not in SMOOTH:  # not rounded correctly everywhere
            check_steps(made, inputs, state, impl, exact=name not in GRADED)
        if dtype == torch.float32:
            check_gradients(made, inputs, state, impl)
            check_gradients(made, inputs, None, impl)


class Divided(sf.Neuron):
    """Divides by a value of each neuron."""

    v = sf.State()

    def __init__(self):
        super().__init__()
        self.scale = torch.full((20,), 0.5)

    def step(self, x, v):
        h = 0.5 * v + x / self.scale
        s = sf.surrogate.Sigmoid()(h - 1)
        return s, (h - s,)


def test_lanes_without_a_neuron_may_be_nan(backends):
    """Blocks of 32 lanes have 12 in which the division is 0 / 0."""
    made = layer(Divided().to(backends.device), 20, backends.device)
    inputs = inputs_of(made.neuron, (4, 3, 20), torch.float32, backends.device)
    for impl in backends.impls:
        check_steps(made, inputs, None, impl)
        check_gradients(made, inputs, None, impl)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("connected", [True, False])
def test_weights(heads, connected, backends):
    neuron = sf.LIF(0.75)
    options = {"heads": heads, "self_connections": connected, "bias": True}
    made = layer(neuron, 24, backends.device, **options)
    inputs = inputs_of(neuron, (7, 3, 24), torch.float32, backends.device)
    for impl in backends.impls:
        check_steps(made, inputs, None, impl)
        check_gradients(made, inputs, None, impl)
    made(*inputs).sum().backward()
    own = made.weight.grad.diagonal(dim1=-2, dim2=-1)
    assert bool(own.any()) is connected
    assert made.weight.shape == ((24, 24) if heads == 1 else (2, 12, 12))


def test_equals_a_loop_over_a_linear_layer(backends):
    made, linear = layer(sf.LIF(), 12, backends.device), nn.Linear(12, 12, bias=False)
    linear.load_state_dict({"weight": made.weight.detach()})
    linear.to(backends.device)
    x = on_grid((6, 4, 12), backends.device)
    found = made(x)
    state, spikes = None, torch.zeros_like(x[0])
    for t in range(6):
        y, state = made.neuron(
            (x[t] + linear(spikes))[None], state=state, return_state=True, impl="reference"
        )
        spikes = y[0]
        assert torch.equal(found[t], spikes)
    assert 0 < found.mean() < 1


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 19), st.integers(1, 40))
# One of several states, one with a learnable parameter per neuron, and one that also sends -1.
DRAWN = ("ALIF", "SEAdLIF", "TernaryLIF")


@settings(
    max_examples=40 if torch.cuda.is_available() else 12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from(DRAWN),
    SIZES,
    st.sampled_from(["contiguous", "batch_first", "constant", "strided", "reversed"]),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
    st.booleans(),
)
def test_neurons_sizes_and_layouts(backends, name, size, layout, dtype, seed, given_state):
    neuron = make(name, "hard", size[2], backends.device)
    made = layer(neuron, size[2], backends.device)
    x = on_grid(size, backends.device, seed).to(dtype)
    if layout == "batch_first":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "constant":
        x = x[:1].expand(size)
    elif layout == "strided":
        x = x.repeat_interleave(2, 2)[..., ::2]
    elif layout == "reversed":
        x = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    state = state_of(neuron, size[1:], backends.device) if given_state else None
    for impl in backends.impls:
        check_steps(made, [x], state, impl)
        if dtype == torch.float32:
            check_gradients(made, [x], state, impl)


@pytest.mark.parametrize("kind", [sf.AdLIF, sf.SEAdLIF])
def test_each_neuron_learns_its_decays_and_couplings(kind, backends):
    """As in sparch and SE-adLIF: parameters of N values, through the modules that compute them."""
    torch.manual_seed(0)
    neuron = kind(
        sf.LearnableTimeConstant(10.0, 20),
        0.5,
        sf.LearnableFraction(0.98, 20),
        nn.Parameter(torch.rand(20)),
        nn.Parameter(torch.rand(20)),
    ).to(backends.device)
    made = layer(neuron, 20, backends.device)
    x = 4 * on_grid((11, 6, 20), backends.device)
    for impl in backends.impls:
        check_gradients(made, [x], None, impl)
        grads = []
        for _ in range(2):
            made.zero_grad()
            made(x, impl=impl).square().sum().backward()
            grads.append([p.grad for p in made.parameters()])
        assert all(g.any() for g in grads[0])
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)


def gradients_of(net, x):
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def test_options_are_keywords():
    with pytest.raises(TypeError, match="positional argument"):
        sf.Recurrent(sf.LIF(), 8, 32)


def test_in_temporal(device):
    net, x = network().to(device), torch.randn(6, 3, 10, device=device)
    y, state = net(x, return_state=True)
    assert [len(states) for states in state.values()] == [2]
    hidden = net.net[1](net.net[0](x))
    assert torch.allclose(y, net.net[2](hidden), atol=1e-5)
    stream = sf.Stream(net)
    steps = torch.stack([stream(x[t]) for t in range(6)])
    assert torch.allclose(steps, y, atol=1e-5)
    for a, b in zip(stream.state["net.1.neuron"], state["net.1.neuron"], strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_an_empty_batch(device):
    made = layer(sf.LIF(), 6, device)
    x = torch.zeros(4, 0, 6, device=device, requires_grad=True)
    y, state = made(x, return_state=True)
    assert y.shape == x.shape
    assert [s.shape for s in state] == [(0, 6)] * 2
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not made.weight.grad.any()


def test_changes_of_the_output_leave_the_state(device):
    made, x = layer(sf.LIF(0.75), 20, device), on_grid((6, 3, 20), device)
    y, wanted = made(x, return_state=True)
    net = sf.Temporal(nn.Sequential(made, nn.Threshold(2.0, 3.0, inplace=True)))
    changed, state = net(x, return_state=True)
    assert bool((changed == 3).all())
    assert 0 < y[-1].mean() < 1
    assert torch.equal(state["net.0.neuron"][-1], wanted[-1])


@pytest.mark.parametrize("kind", ["LIF", "Scaled"])
def test_outputs(kind, backends):
    """States over time and single outputs, with their gradients."""
    neuron = sf.LIF(0.75) if kind == "LIF" else Scaled(lambda v: nn.Parameter(torch.tensor(v)))
    made = layer(neuron.to(backends.device), 20, backends.device)
    x = on_grid((6, 3, 20), backends.device).requires_grad_()
    spikes, *_ = tensors(made(x))
    first = "spikes" if kind == "LIF" else "output0"
    for names in (("v",), ("v", first), (first, "v")):
        found = []
        for impl in (*backends.impls, "reference"):
            made.zero_grad()
            values, state = made(x, return_state=True, impl=impl, outputs=names)
            values = dict(zip(names, values, strict=True))
            assert torch.equal(values.get(first, spikes), spikes)
            assert torch.equal(values["v"][-1], state[0])
            (grad,) = torch.autograd.grad(sum(y.square().sum() for y in values.values()), x)
            found.append(torch.cat([values["v"].detach(), grad]))
        for a in found[:-1]:
            assert torch.allclose(a, found[-1], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=f"no output or state is named 'w': .* '{first}'"):
        made(x, outputs=("w",))


def test_memory_policies_and_fusion_give_the_same_gradients(device):
    x = torch.randn(6, 3, 10, device=device)
    wanted = gradients_of(network().to(device), x)
    for policy in (SaveAll(), Bits(), Checkpoint(2)):
        net = sf.fuse(network().to(device))
        net.memory = policy
        for a, b in zip(gradients_of(net, x), wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), policy
    normed = network(norm=True).to(device)
    wanted = gradients_of(normed, x)
    for a, b in zip(gradients_of(sf.fuse(normed), x), wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def test_torch_compile(device):
    torch.compiler.reset()  # whatever other tests have compiled
    net, x = network().to(device), torch.randn(6, 3, 10, device=device)
    wanted, y = gradients_of(net, x), net(x)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), y)
    for a, b in zip(gradients_of(compiled, x), wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_autocast(device):
    made, x = layer(sf.LIF(0.75), 16, device), on_grid((5, 3, 16), device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = made(x)
        again = made(x, impl="reference")
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, again)
    y.float().sum().backward()
    assert made.weight.grad.dtype == torch.float32
    assert made.weight.grad.any()


def test_double_backward_is_refused(device):
    made = layer(sf.LIF(), 8, device)
    x = torch.randn(4, 2, 8, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(made(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_initial_weight():
    made = sf.Recurrent(sf.LIF(), 12, bias=True, heads=3)
    for matrix in made.weight.detach():
        assert torch.allclose(matrix @ matrix.t(), torch.eye(4), atol=1e-5)
    assert not made.bias.any()
    assert repr(made).startswith("Recurrent(\n  12, bias=True, heads=3\n")
    half = made.to(torch.bfloat16)
    half.reset_parameters()
    assert torch.allclose(
        half.weight[0] @ half.weight[0].t(), torch.eye(4).to(half.weight), atol=0.05
    )


def test_errors():
    for arguments, options, message in (
        ((sf.LIF, 8), {}, r"the class LIF: expected an instance, as in sf.LIF\(\)"),
        ((sf.LIF(), 0), {}, "features is 0"),
        ((sf.LIF(), 8), {"heads": 3}, "multiple of the heads"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            sf.Recurrent(*arguments, **options)
    made = sf.Recurrent(sf.LIF(), 8)
    with pytest.raises(ValueError, match=r"expected\s+\[T, B, 8\]"):
        made(torch.rand(3, 2, 7))
    with pytest.raises(TypeError, match=r"v, spikes"):
        made(torch.rand(3, 2, 8), state=(torch.zeros(2, 8),))

    class Hidden(sf.Neuron):
        output1 = sf.State()

        def step(self, x, output1):
            return (x, x), (output1,)

    with pytest.raises(ValueError, match="Hidden has a state 'output1', which is the name of an"):
        sf.Recurrent(Hidden(), 8)
    with pytest.raises(ValueError, match="the weight is on meta, the input on cpu"):
        sf.Recurrent(sf.LIF(), 8, device="meta")(torch.rand(3, 2, 8))
