"""`explain`: the report agrees with what a call does, and the model is left unchanged."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module

import spikefuse as sf
from spikefuse.graph import fuse_norms
from spikefuse.inspect.explanation import Layer, SavedBytes
from spikefuse.inspect.timing import COPIED_BYTES, copy_bandwidth
from spikefuse.nn.call import active
from spikefuse.scan.program import program
from spikefuse.testing import lay_out, make_input
from tests.memory.measuring import bytes_saved

T, B = 37, 2


class Uncompilable(sf.Neuron):
    v = sf.State()

    def step(self, x, v):
        return torch.lgamma(x + v), (v + x,)


class Noisy(sf.Neuron):
    """Draws its second input itself."""

    v = sf.State()

    def forward(self, x):
        return super().forward(x, torch.rand_like(x))

    def step(self, x, noise, v):
        return x + noise, (v + x,)


@pytest.fixture
def net():
    return sf.Temporal(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), sf.LIF(), nn.Flatten(), sf.ALIF())
    )


@pytest.fixture
def small_copy(monkeypatch):
    monkeypatch.setitem(COPIED_BYTES, "cpu", 1 << 20)
    copy_bandwidth.cache_clear()
    yield
    copy_bandwidth.cache_clear()


def only(explanation) -> Layer:
    (layer,) = explanation.layers
    return layer


def saved(explanation) -> SavedBytes:
    """What the only neuron saves."""
    rows = {row.name: row for row in explanation.saved}
    return rows.get(only(explanation).name, SavedBytes("", "", 0, 0))


def test_layers_of_a_network(net):
    found = sf.explain(net, torch.rand(T, B, 1, 6, 6))
    lif, alif = found.layers
    assert (lif.name, lif.module, lif.shape) == ("net.2", "LIF", (T, B, 3, 4, 4))
    assert (alif.name, alif.module, alif.shape) == ("net.4", "ALIF", (T, B, 48))
    image, outputs = 4 * T * B * 36, 4 * T * B * 48
    for layer in (lif, alif):
        assert layer.dtypes == (torch.float32,)
        assert layer.implementation == "numba"
        assert layer.program.startswith(f"{layer.module}-numba-")
        assert layer.notes == ()
        # Forward: read x, write y; backward: read x and grad_y, write grad_x.
        assert layer.moved == 5 * outputs
        assert layer.least is layer.achieved is layer.fraction is None
    conv, norm, *neurons = found.saved
    assert conv == SavedBytes("net.0", "Conv2d", image, image)
    assert (norm.name, norm.now) == ("net.1", norm.eager)
    assert outputs < norm.now < outputs + 100  # and statistics
    for row, layer, num_states in zip(neurons, (lif, alif), (1, 2), strict=True):
        assert (row.name, row.module) == (layer.name, layer.module)
        assert row.now == outputs + 4 * num_states * ((T - 1) // layer.chunk) * B * 48
        assert row.eager > 2 * outputs
    assert found.num_others == 3
    assert found.not_called == ()
    assert found.bandwidth is None


@pytest.mark.parametrize("neuron", [sf.LIF(), sf.ALIF(), sf.PLIF(channels=5)])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 5, 9])
def test_predicted_bytes_of_the_loop_equal_its_saved_bytes(neuron, num_steps):
    x = make_input((num_steps, B, 5)).requires_grad_()
    loop = saved(sf.explain(neuron, x, impl="reference"))
    assert saved(sf.explain(neuron, x)).eager == loop.eager == loop.now > 0


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.lif = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), sf.LIF()

    def forward(self, x):
        return self.lif(self.norm(self.conv(x)) + x)


def network(policy):
    front = nn.Conv2d(1, 8, 1), nn.BatchNorm2d(8), sf.LIF()
    return sf.Temporal(nn.Sequential(*front, Residual(), nn.AvgPool2d(2)), policy)


VALUES = T * 2 * 8 * 6 * 6


@pytest.mark.parametrize("name", ["save-all", "recompute", "bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks(name, dtype):
    x, policy = torch.rand(T, 2, 1, 6, 6, dtype=dtype), sf.memory.POLICIES[name]
    net = sf.fuse(network(policy)).to(dtype)
    net(x)  # frames of Numba's compiler may hold the result of a norm until they are collected
    found = sf.explain(net, x)
    first, second = found.layers
    assert first.memory == second.memory == policy
    assert (first.name, first.module) == ("net.2", "BatchNorm2d + LIF")
    assert (second.name, second.module) == ("net.3.lif", "BatchNorm2d + residual + LIF")
    assert second.dtypes == (dtype, dtype)
    assert all(layer.program.startswith("NormedLIF-numba-") for layer in found.layers)
    assert (found.not_called, found.num_others) == ((), 3)
    size = dtype.itemsize * VALUES
    assert first.moved == 8 * size  # 16 bytes per neuron and step in bfloat16
    assert second.moved == 12 * size  # of the residual: read three times, its gradient written
    rows = {row.name: row for row in found.saved}
    names = ["net.0", "net.1", "net.2", "net.3.conv", "net.3.norm", "net.3.lif", "net.4"]
    assert list(rows) == names
    assert rows["net.1"].now == rows["net.3.norm"].now == 0
    assert min(rows["net.1"].eager, rows["net.3.norm"].eager) >= size
    stores = policy.saves_states or not program(first.program).rebuilds
    states = 4 * VALUES // T * ((T - 1) // first.chunk) if stores else 0
    for layer in ("net.2", "net.3.lif"):  # the convolution saves the residual
        assert 0 <= rows[layer].now - size - states < 500
    for layer in ("net.3.conv", "net.4"):
        assert rows[layer].now == (VALUES // 8 if policy.packs_spikes else size)
        assert rows[layer].eager == size


@pytest.mark.parametrize("fused", [True, False])
def test_checkpoints(fused):
    """What segments save counts for their network; their layers save nothing."""
    x = make_input((9, 2, 1, 32, 32))
    inner = sf.Temporal(network(None).net, sf.memory.Checkpoint(3))
    net = nn.ModuleDict({"spiking": sf.fuse(inner) if fused else inner, "idle": sf.LIF()})
    net.forward = lambda x: net["spiking"](x)
    found = sf.explain(net, x)
    modules = ["BatchNorm2d + LIF", "BatchNorm2d + residual + LIF"]
    assert [layer.module for layer in found.layers] == modules
    assert {layer.memory for layer in found.layers} == {sf.memory.Checkpoint(3)}
    assert (found.not_called, found.num_others) == (("idle",), 3)
    rows = {row.name: row for row in found.saved}
    assert rows["spiking.net"].now > x.nbytes
    assert rows["spiking.net.0"].now == rows["spiking.net.2"].now == 0
    assert rows["spiking.net.2"].eager > 0


def test_eager_pytorch_saves_as_much_as_reported():
    x = torch.rand(9, 2, 1, 32, 32)
    fused = sf.explain(sf.fuse(network(None)), x)
    eager = sf.explain(network(sf.memory.SaveAll()), x, impl="reference")
    assert sum(row.eager for row in fused.saved) == sum(row.now for row in eager.saved)
    assert all(row.now == row.eager for row in eager.saved)


@pytest.mark.parametrize("name", sf.memory.POLICIES)
def test_saved_bytes_are_allocated_bytes(name):
    net, x = sf.fuse(network(sf.memory.POLICIES[name])), make_input((9, 2, 1, 32, 32))
    size, y = bytes_saved(net, x)
    rows = sum(row.now for row in sf.explain(net, x).saved)
    # The input existed before. Internal statistics of a norm are not saved tensors.
    assert 0 <= size - y.nbytes - (rows - x.nbytes) < 500


def test_blocks_without_gradients():
    net = network(None).eval()
    x = torch.rand(T, 2, 1, 6, 6)
    with torch.no_grad():
        found = sf.explain(sf.fuse(net), x)
    first, second = found.layers
    assert (first.moved, second.moved) == (2 * 4 * VALUES, 3 * 4 * VALUES)
    assert found.saved == ()
    assert "saved" not in str(found)


def test_shared_memory_counts_once():
    class Views(nn.Module):
        def forward(self, x):
            a, b = (x * 2).chunk(2, -1)
            return a * b + a.sigmoid() * x[:1, :, :3]

    x = make_input((4, 2, 6)).requires_grad_()
    (row,) = sf.explain(nn.Sequential(Views()), x).saved
    # Both halves, the sigmoid's output, and half a step of x.
    assert (row.name, row.module) == ("0", "Views")
    assert row.now == row.eager == 4 * (2 * 24 + 24 + 6)


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_is_saved_without_gradients(grad):
    x = make_input((T, B, 5)).requires_grad_(grad)
    found = sf.explain(sf.LIF(), x)
    assert (saved(found).now > 0) == (saved(found).eager > 0) == grad
    assert only(found).moved == x.nbytes * (5 if grad else 2)
    with torch.no_grad():
        assert sf.explain(sf.LIF(), x).saved == ()


def test_parameters_with_gradients_are_enough():
    x = make_input((T, B, 5))
    found = sf.explain(sf.PLIF(), x)
    assert saved(found).now >= x.nbytes
    assert only(found).moved == 4 * x.nbytes


def test_a_constant_input_is_saved_once():
    x = make_input((T, B, 5), constant=True).requires_grad_()
    found = sf.explain(sf.LIF(), x)
    states = 4 * ((T - 1) // only(found).chunk) * B * 5
    assert saved(found).now == x.nbytes // T + states
    assert only(found).moved == 2 * (x.nbytes // T + x.nbytes) + x.nbytes


@pytest.mark.parametrize("fused", [False, True])
def test_layers_before_the_first_neuron_see_a_constant_input_once_if_fused(net, fused):
    x = torch.rand(B, 1, 6, 6).expand(T, B, 1, 6, 6)
    found = sf.explain(sf.fuse(net) if fused else net, x)
    rows = {row.name: row for row in found.saved}
    assert rows["net.0"].eager == x.nbytes
    assert rows["net.0"].now == (x.nbytes // T if fused else x.nbytes)


def test_an_error_caught_by_the_model_ends_its_layer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            try:
                self.linear(x[..., :2])
            except RuntimeError:
                return x.exp()

    (row,) = sf.explain(Model(), torch.rand(2, 3, requires_grad=True)).saved
    assert (row.name, row.module) == ("", "Model")


def test_states_are_passed_through(net):
    x = torch.rand(T, B, 1, 6, 6)
    _, state = net(x, return_state=True)
    found = sf.explain(net, x, state=state, return_state=True)
    assert len(found.layers) == 2
    x = torch.rand(T, B, 5)
    state = (torch.rand(B, 5, requires_grad=True),)
    assert saved(sf.explain(sf.LIF(), x, state=state)).now >= x.nbytes


def test_several_inputs_and_a_custom_forward():
    x = make_input((T, B, 5), torch.bfloat16)
    found = sf.explain(Noisy(), x)
    assert only(found).dtypes == (torch.bfloat16, torch.bfloat16)
    assert "2 × [37, 2, 5]  bfloat16  Noisy-numba-" in str(found)


def test_reference_implementation(net):
    layers = sf.explain(net, torch.rand(T, B, 1, 6, 6), impl="reference").layers
    layers += sf.explain(sf.LIF(), torch.rand(T, B, 5), impl="reference").layers
    assert [layer.implementation for layer in layers] == ["reference"] * 3
    assert [layer.program for layer in layers] == [layer.chunk for layer in layers] == [None] * 3
    callers = ["Temporal", "Temporal", "the neuron"]
    assert [layer.notes for layer in layers] == [
        (f'on the reference: impl="reference" was passed to {name}',) for name in callers
    ]


def test_uncompilable_neuron():
    net = sf.Temporal(nn.Sequential(nn.Linear(3, 3), Uncompilable(), sf.LIF()))
    x = torch.rand(4, 2, 3)
    found = sf.explain(net, x)
    first, second = found.layers
    assert (first.implementation, second.implementation) == ("reference", "numba")
    row = found.saved[1]
    assert (row.name, row.now) == ("net.1", row.eager)
    assert row.now > 0
    (note,) = first.notes
    assert note.startswith("not compiled, which a call raises as an error: Uncompilable.step uses")
    assert "'lgamma' at" in note
    assert f"net.1: {note}" in str(found)
    with pytest.raises(sf.UnsupportedOperation, match="lgamma"):
        net(x)


def test_copied_inputs():
    x = make_input((4, 2, 32, 4, 4))
    for layout in ("contiguous", "channels_last", "batch_first"):
        assert only(sf.explain(sf.LIF(), lay_out(x, layout))).notes == ()
    (note,) = only(sf.explain(sf.LIF(), x[..., ::2])).notes
    assert note == (
        "input copied: x [4, 2, 32, 4, 2] with strides [1024, 512, 16, 4, 2]: "
        "its steps are not dense, or their pieces are too short to read in place"
    )

    class Sum(sf.Neuron):
        v = sf.State()

        def step(self, x, y, v):
            return x + y, (v + x,)

    (note,) = only(sf.explain(Sum(), x, lay_out(x, "channels_last"))).notes
    assert note.startswith("input copied: y [4, 2, 32, 4, 4] with strides")
    assert note.endswith(": its layout differs from the first input")


def test_model_is_unchanged(net):
    net(torch.rand(T, B, 1, 6, 6)).sum().backward()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    gradients = [p.grad.clone() for p in net.parameters()]
    x = torch.rand(T, B, 1, 6, 6)
    random = torch.get_rng_state()
    sf.explain(nn.Sequential(net, nn.Dropout()), x)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, net.parameters(), strict=True))


def test_errors_of_the_call_propagate_and_hooks_are_removed(net):
    hooks = module._global_forward_pre_hooks, module._global_forward_hooks
    with pytest.raises(ValueError, match=r"expected \[T, B, ...\]"):
        sf.explain(sf.LIF(), torch.rand(3))
    with pytest.raises(TypeError, match="x is a list: expected a tensor"):
        sf.explain(sf.LIF(), [1.0])
    with pytest.raises(RuntimeError):
        sf.explain(net, torch.rand(T, B, 2, 6, 6))
    assert active.observer is None
    assert not any(hooks)
    with pytest.raises(TypeError, match=r"model is a builtin.*: expected a torch.nn.Module"):
        sf.explain(torch.sin, torch.rand(3))


def test_calls_of_other_threads_are_ignored():
    other = sf.LIF()

    class Model(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=other, args=(x,))
            thread.start()
            thread.join()
            return other(x)

    found = sf.explain(Model(), torch.rand(4, 2, 3))
    assert only(found).name == "(not in the model)"


def test_neurons_that_are_not_called():
    net = nn.ModuleDict({"used": sf.LIF(), "idle": sf.LIF()})
    net.forward = lambda x: net["used"](net["used"](x))
    found = sf.explain(net, torch.rand(4, 2, 3))
    assert [layer.name for layer in found.layers] == ["used", "used"]
    assert found.not_called == ("idle",)
    assert "not called: idle" in str(found)


def test_times(net, small_copy):
    found = sf.explain(net, torch.rand(T, B, 1, 6, 6), time=True)
    assert found.bandwidth == copy_bandwidth(torch.device("cpu")) > 0
    for layer in found.layers:
        assert layer.least == layer.moved / found.bandwidth
        assert layer.achieved > 0
        assert layer.fraction == layer.least / layer.achieved
    header, first, *_ = str(found).splitlines()
    assert header.split()[-3:] == ["least", "achieved", "fraction"]
    assert first.endswith("%")
    without = sf.explain(sf.LIF(), torch.rand(4, 2, 3), time=True)
    assert only(without).achieved > 0


def test_backends(backends):
    x = make_input((5, B, 5), device=backends.device).requires_grad_()
    for impl in backends.impls:
        found = sf.explain(sf.LIF(), x, impl=impl)
        layer = only(found)
        assert layer.implementation == impl
        assert layer.program.startswith(f"LIF-{impl}-")
        assert saved(found).now == x.nbytes + 4 * ((x.shape[0] - 1) // layer.chunk) * B * 5


def test_compiled_models(net):
    x = torch.rand(T, B, 1, 6, 6)
    compiled = torch.compile(net, backend="eager")
    compiled(x)
    assert "torch._dynamo" in sys.modules
    found = sf.explain(compiled, x)
    assert [layer.name for layer in found.layers] == ["_orig_mod.net.2", "_orig_mod.net.4"]


def test_recurrent_layers(device):
    x = torch.randn(6, 3, 10, device=device)
    net = sf.Temporal(nn.Sequential(nn.Linear(10, 20), sf.Recurrent(sf.LIF(), 20))).to(device)
    report = sf.explain(net, x)
    (row,) = report.layers
    assert row.module == "Recurrent + LIF"
    (saved,) = (row for row in report.saved if row.name == "net.1.neuron")
    # The total current of each step, in float32.
    assert saved.now == 4 * 6 * 3 * 20
    assert saved.now < 0.35 * saved.eager


def test_norms_that_are_not_fused(monkeypatch):
    monkeypatch.setattr(fuse_norms, "MIN_VALUES", 100)
    layers = nn.BatchNorm1d(6), sf.LIF(), nn.BatchNorm1d(6), nn.ReLU()
    net = sf.fuse(sf.Temporal(nn.Sequential(*layers)))
    small, large = (str(sf.explain(net, torch.randn(4, batch, 6))) for batch in (2, 8))
    assert "net.0: batch norm, not fused: its input has 48 values: on a CPU, fusing helps" in small
    assert "net.0: batch norm" not in large
    assert "net.2: batch norm, not fused: " in large


def test_fused_networks_that_cannot_be_compiled():
    layers = nn.Linear(3, 3), nn.BatchNorm1d(3), sf.LIF(), Uncompilable()
    found = sf.explain(sf.fuse(sf.Temporal(nn.Sequential(*layers))), torch.rand(4, 2, 3))
    assert [layer.module for layer in found.layers] == ["LIF", "Uncompilable"]


@pytest.mark.filterwarnings("ignore")
def test_networks_captured_in_several_graphs():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = network(None).net, nn.Sequential(nn.Conv2d(8, 8, 1), sf.LIF())

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    net, x = sf.fuse(sf.Temporal(Broken())), make_input((9, 2, 1, 32, 32))
    size, y = bytes_saved(net, x)
    found = sf.explain(net, x)
    assert [layer.name for layer in found.layers] == [
        "net.first.2",
        "net.first.3.lif",
        "net.second.1",
    ]
    assert abs(size - y.nbytes - sum(row.now for row in found.saved) + x.nbytes) < 500
    assert any(note.startswith("net: captured in several graphs") for note in found.notes)


def test_under_an_observer_networks_are_not_captured():
    net, x = sf.fuse(network(None)), torch.rand(9, 2, 1, 6, 6)
    with sf.record(net) as record:
        found = sf.explain(net, x)
    assert [layer.module for layer in found.layers] == ["LIF", "LIF"]
    assert all(len(calls) == 1 for calls in record.calls.values())


def test_values_per_step():
    """The values count as an input, also of the few steps that measure what PyTorch saves."""
    lif = sf.LIF(threshold=torch.linspace(0.5, 1, T).view(T, 1, 1))
    x = torch.randn(T, B, 3, requires_grad=True)
    (layer,) = (explanation := sf.explain(lif, x)).layers
    assert layer.implementation == "numba"
    # Forward and backward move the input, the output and the values; backward, the gradient, too.
    assert layer.moved == 5 * x.nbytes + 2 * lif.threshold.nbytes
    (row,) = explanation.saved
    assert row.now < row.eager
