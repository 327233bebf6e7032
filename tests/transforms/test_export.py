"""Exports of networks in plain operators: equal to the networks, for other batch sizes too."""

import copy
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.nn import Block, EventLinear, encode

T, B = 3, 2
BATCH = torch.export.Dim("B")

pytestmark = [
    # TorchScript is deprecated, but in use.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # PyTorch's own, when torch.onnx copies exported programs.
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)`:FutureWarning"),
]

NEURONS = {
    "LIF": sf.LIF,
    "LIF, soft reset": lambda: sf.LIF(reset="soft", decay_input=True),
    "LIF, decay per channel": lambda: sf.LIF(decay=torch.linspace(0.1, 0.9, 6)),
    "PLIF": sf.PLIF,
    "ALIF": sf.ALIF,
    "CubaLIF": sf.CubaLIF,
    "IntegerLIF": sf.IntegerLIF,
    "TernaryLIF": sf.TernaryLIF,
    "GatedLIF": lambda: sf.GatedLIF(channels=6),
    "Izhikevich": sf.Izhikevich,
    "with its own forward": lambda: Scaled(),
    "Recurrent": lambda: sf.Recurrent(sf.ALIF(), 6, bias=True),
    "Recurrent with heads": lambda: sf.Recurrent(sf.LIF(), 6, heads=2, self_connections=False),
    "Feedback": lambda: sf.nn.Feedback(nn.Linear(6, 6), sf.LIF()),
}


class Scaled(sf.LIF):
    def forward(self, x):
        return super().forward(2 * x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm, self.lif = nn.BatchNorm2d(4), sf.LIF(threshold=0.5)

    def forward(self, x):
        return self.lif(self.norm(self.conv(x)) + x)


def dense(neuron):
    torch.manual_seed(0)
    return sf.Temporal(nn.Sequential(nn.Linear(5, 6), neuron, nn.Linear(6, 3))).eval()


def convolutional():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.running_mean.uniform_()
    norm.running_var.uniform_(0.5, 2)
    layers = nn.Conv2d(1, 4, 3, padding=1, bias=False), norm, sf.LIF(threshold=0.3)
    head = nn.MaxPool2d(2), Residual(), nn.Flatten(), nn.Linear(64, 3), sf.LI()
    return sf.Temporal(nn.Sequential(*layers, *head)).eval()


def sequence(*shape, batch=B):
    return 3 * torch.randn(T, batch, *shape, generator=torch.Generator().manual_seed(1))


def images(batch=B):
    return sequence(1, 8, 8, batch=batch)


def exported(net, *args, **options):
    return torch.export.export(net, args, **options).module()


def traced(net, *args):
    """A trace, through a file."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(net, args), file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize("neuron", NEURONS.values(), ids=NEURONS)
def test_neurons_are_equal_at_another_batch_size(neuron):
    net, x, larger = dense(neuron()), sequence(5), sequence(5, batch=5)
    assert net.net[:2](x.flatten(0, 1).unflatten(0, (T, B))).any()
    plain = sf.exportable(net)
    for made in (
        plain,
        exported(plain, x, dynamic_shapes=({1: BATCH},)),
        traced(plain, x),
    ):
        assert torch.equal(made(x), net(x))
        assert torch.equal(made(larger), net(larger))


def test_a_convolutional_network_is_equal():
    net, x, larger = convolutional(), images(), images(batch=5)
    plain = sf.exportable(net)
    for made in (exported(plain, x, dynamic_shapes=({1: BATCH},)), traced(plain, x)):
        assert torch.equal(made(x), net(x))
        assert torch.equal(made(larger), net(larger))


def test_a_fused_network_exports_the_network_before_fusing():
    net, x = convolutional(), images()
    fused = sf.fuse(net)
    assert torch.equal(exported(sf.exportable(fused), x)(x), net(x))
    torch.testing.assert_close(exported(sf.exportable(fused), x)(x), fused(x))


def test_a_fused_network_of_sequences_exports_its_own_forward():
    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.lif = nn.BatchNorm1d(5), sf.LIF()

        def forward(self, x):
            return self.lif(self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]))

    net, x, larger = Sequences().eval(), sequence(5), sequence(5, batch=5)
    plain = sf.exportable(sf.fuse(net))
    assert torch.equal(plain(x), net(x))
    made = exported(plain, x, dynamic_shapes=({1: BATCH},))
    assert torch.equal(made(larger), net(larger))


def test_blocks_are_equal_up_to_rounding():
    block = Block(nn.BatchNorm1d(6), sf.LIF())
    net = sf.Temporal(nn.Sequential(nn.Linear(5, 6), block, nn.Linear(6, 3))).eval()
    torch.testing.assert_close(
        exported(sf.exportable(net), sequence(5))(sequence(5)), net(sequence(5))
    )
    alone = sf.exportable(block.eval())
    torch.testing.assert_close(alone(sequence(6), sequence(6)), block(sequence(6), sequence(6)))


@pytest.mark.parametrize("make", [exported, traced])
def test_a_static_image_is_repeated_inside_the_export(make):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = convolutional()

        def forward(self, x):
            return self.net(encode.direct(x, T)).mean(0)

    model, x = Classifier().eval(), images()[0]
    torch.testing.assert_close(make(sf.exportable(model), x)(x), model(x))


def test_an_export_contains_plain_operators():
    program = torch.export.export(sf.exportable(sf.fuse(convolutional())), (images(),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in names if "spikefuse" in name or "autograd" in name]
    assert "PythonOp" not in str(torch.jit.trace(sf.exportable(dense(sf.LIF())), sequence(5)).graph)


def test_an_export_runs_without_spikefuse(tmp_path):
    net, x = dense(sf.ALIF()), sequence(5)
    torch.export.save(torch.export.export(sf.exportable(net), (x,)), tmp_path / "net.pt2")
    torch.save((x, net(x).detach()), tmp_path / "expected.pt")
    code = (
        "import sys, torch; x, y = torch.load('expected.pt');"
        "assert torch.equal(torch.export.load('net.pt2').module()(x), y);"
        "assert 'spikefuse' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize("make", [lambda step, *args: step, exported, traced])
@pytest.mark.parametrize(
    "net",
    [
        dense(sf.ALIF()),
        dense(sf.Izhikevich()),
        dense(sf.Recurrent(sf.ALIF(), 6)),
        dense(sf.nn.Feedback(nn.Linear(6, 6), sf.LIF())),
        convolutional(),
    ],
)
def test_steps_are_equal(net, make):
    xs = images() if len(net.net) > 3 else sequence(5)
    step, expected_state = sf.exportable(net, step=True), None
    states = step.initial_states(xs[0])
    made = make(step, xs[0], *states)
    for t in range(T):
        # Copied, because MKL's products depend on the alignment of the memory.
        x = xs[t].clone()
        expected, expected_state = net(x.unsqueeze(0), state=expected_state, return_state=True)
        y, *states = made(x, *states)
        assert torch.equal(y, expected[0])
        flat = [s for finals in expected_state.values() for s in finals]
        assert all(map(torch.equal, states, flat))
        assert len(states) == len(flat)


def test_a_step_names_its_states_and_starts_from_rest():
    step = sf.exportable(dense(sf.Izhikevich()), step=True)
    x = sequence(5)[0]
    states = step.initial_states(x)
    assert step.state_names == ("net.1.v", "net.1.w")
    assert [s.shape for s in states] == [(B, 6), (B, 6)]
    assert all(map(torch.equal, step(x), step(x, *states)))
    recurrent = sf.exportable(dense(sf.Recurrent(sf.ALIF(), 6)), step=True)
    assert recurrent.state_names == ("net.1.neuron.v", "net.1.neuron.a", "net.1.neuron.spikes")
    with pytest.raises(TypeError, match=r"1 states are given: expected 2 \(net.1.v, net.1.w\)"):
        step(x, states[0])


def test_a_step_of_a_network_with_its_preprocessing():
    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = dense(sf.LIF())

        def forward(self, x):
            return self.net(encode.direct(x / 255, T)).mean(0)

    trained, x = Trained(), sequence(5)[0]
    step, expected = sf.exportable(trained, step=True), sf.exportable(trained.net, step=True)
    assert all(map(torch.equal, step(x), expected(x)))
    assert step.state_names == ("net.1.v",)


def test_a_step_refuses_neurons_without_a_single_state():
    lif = sf.LIF()
    step = sf.exportable(sf.Temporal(nn.Sequential(lif, lif)), step=True)
    with pytest.raises(ValueError, match=r"'net\.0' is called twice"):
        step(torch.rand(B, 5))

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.lif, self.other = sf.LIF(), sf.LIF()

        def forward(self, x):
            return self.lif(x)

    with pytest.raises(ValueError, match=r"'net\.other' is not called"):
        sf.exportable(sf.Temporal(Unused()), step=True)(torch.rand(B, 5))


def test_names_of_inputs_are_those_of_the_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = dense(sf.LIF())

        def forward(self, *, left, right):
            return self.net(left) + self.net(right)

    model, named = Model().eval(), {"left": sequence(5), "right": 2 * sequence(5)}
    plain, dims = sf.exportable(model), {"left": {1: BATCH}, "right": {1: BATCH}}
    program = torch.export.export(plain, (), named, dynamic_shapes=dims)
    assert torch.equal(program.module()(**named), model(**named))
    assert torch.equal(plain(**named), model(**named))
    assert plain.state_dict().keys() == model.state_dict().keys()


def test_the_original_is_unchanged():
    net = sf.fuse(convolutional()).train()
    classes, before = list(map(type, net.modules())), copy.deepcopy(net.state_dict())
    plain = sf.exportable(net)
    plain(images())
    assert list(map(type, net.modules())) == classes
    assert all(module.training for module in net.modules())
    assert not any(module.training for module in plain.modules())
    assert all(map(torch.equal, before.values(), net.state_dict().values()))
    assert all(p.requires_grad for p in net.parameters())
    assert torch.equal(pickle.loads(pickle.dumps(plain))(images()), plain(images()))


def test_modules_in_a_list_and_hooks_are_exported():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lif = sf.LIF()
            self.layers = [self.lif]

        def forward(self, x):
            return self.layers[0](x)

    net = sf.Temporal(Listed()).eval()
    net.net.lif.register_forward_hook(lambda module, args, y: 2 * y)
    x = sequence(5)
    assert torch.equal(exported(sf.exportable(net), x)(x), net(x))


class Wide(sf.Neuron):
    """Its step reads a parameter of its surrogate, whose spikes are its own."""

    v = sf.State(0.25)

    def __init__(self):
        super().__init__()
        self.surrogate = sf.surrogate.Custom(
            lambda u, width: width * torch.ones_like(u),
            spike=lambda u, width: u > width,
            primal=lambda u, width: width * u,
            width=sf.LearnablePositive(0.5),
        )

    def step(self, x, v):
        h = 0.5 * v + x
        s = self.surrogate(h - self.surrogate.width)
        return s, (h * (1 - s),)


@pytest.mark.parametrize("make", [exported, traced])
def test_steps_may_read_their_surrogate(make):
    net, x = dense(Wide()), sequence(5)
    assert torch.equal(make(sf.exportable(net), x)(x), net(x))


def test_a_bare_neuron_exports_with_its_state():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lif = sf.LIF(decay=0.9)

        def forward(self, x, v):
            y, (v,) = self.lif(x, state=(v,), return_state=True)
            return y, v

    model, args = Model(), (sequence(5), torch.rand(B, 5))
    assert all(map(torch.equal, exported(sf.exportable(model), *args)(*args), model(*args)))


@pytest.mark.parametrize(
    ("net", "step", "message"),
    [
        (3, False, "net is a int"),
        (sf.LIF(), True, "LIF with 0 Temporal containers: expected a Temporal, or a module"),
        (nn.ModuleList([dense(sf.LIF()), dense(sf.LIF())]), True, "with 2 Temporal containers"),
        (sf.Temporal(nn.Sequential(EventLinear(5, 3))), False, "'net.0' is a EventLinear"),
        (Scaled(), False, "'' is a Scaled, whose own forward takes no impl"),
        (torch.compile(dense(sf.LIF()), backend="eager"), False, "which is compiled"),
    ],
)
def test_what_has_no_plain_operators_is_refused(net, step, message):
    with pytest.raises(TypeError, match=message):
        sf.exportable(net, step=step)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("net", [dense(sf.LIF()), sf.fuse(convolutional()), sf.LIF()])
@pytest.mark.parametrize(
    "export",
    [
        lambda net, x: torch.export.export(net, (x,)),
        torch.jit.trace,
        lambda net, x: torch.jit.script(net),
    ],
)
def test_direct_exports_name_exportable(net, export):
    x = images() if isinstance(net, sf.Temporal) and len(net.net) > 3 else sequence(5)
    with pytest.raises(NotImplementedError, match=r"spikefuse\.exportable"):
        export(net, x)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_direct_export_of_events_names_exportable():
    net = sf.Temporal(EventLinear(5, 3))
    with pytest.raises(NotImplementedError, match=r"spikefuse\.exportable"):
        torch.jit.trace(net, sequence(5).round().clamp(0, 1))


def test_scripting_an_export_is_refused():
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace"):
        torch.jit.script(sf.exportable(dense(sf.LIF())))


@pytest.mark.filterwarnings("ignore:You are using the legacy:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_missing_time_axis_is_refused():
    plain = sf.exportable(dense(sf.LIF()))
    with pytest.raises(ValueError, match=r"shape \[5\]: expected \[T, B, ...\]"):
        plain(torch.rand(5))
    # The exporter before torch.export passes the defaults of keyword arguments as tensors.
    with pytest.raises(NotImplementedError, match=r"spikefuse\.exportable"):
        torch.onnx.export(dense(sf.LIF()), (sequence(5),), io.BytesIO(), dynamo=False)
    with pytest.raises(NotImplementedError, match="dynamo=True"):
        torch.onnx.export(plain, (sequence(5),), io.BytesIO(), dynamo=False)


def test_data_parallel_would_split_time():
    # nn.parallel.replicate does this to every module of a network, but only if there are GPUs.
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
        [module._replicate_for_data_parallel() for module in dense(sf.LIF()).modules()]


@pytest.mark.parametrize("make", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_are_equal(make):
    net, x = sf.fuse(convolutional()), images()
    assert torch.equal(make(net)(x), net(x))
    assert torch.equal(make(sf.exportable(net))(x), sf.exportable(net)(x))


def test_onnx():
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime, of the extra dev")

    def session(net, *args, **options):
        program = torch.onnx.export(net, args, dynamo=True, verbose=False, **options)
        return onnxruntime.InferenceSession(program.model_proto.SerializeToString())

    net, x = convolutional(), images(batch=5)
    made = session(sf.exportable(net), images(), dynamic_shapes=({1: BATCH},))
    (y,) = made.run(None, {made.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), net(x).detach())

    for neuron in (sf.ALIF(), sf.Recurrent(sf.LIF(), 6), sf.nn.Feedback(nn.Linear(6, 6), sf.LIF())):
        step = sf.exportable(dense(neuron), step=True)
        x = sequence(5)[0]
        args = x, *step.initial_states(x)
        names = step.input_names
        made = session(step, *args, input_names=names, output_names=step.output_names)
        assert [y.name for y in made.get_outputs()][:2] == ["output", f"next.{step.state_names[0]}"]
        found = made.run(None, {name: arg.numpy() for name, arg in zip(names, args, strict=True)})
        for result, expected in zip(found, step(*args), strict=True):
            torch.testing.assert_close(torch.from_numpy(result), expected)


class Potentials(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lif = sf.LIF()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spikes, v = self.lif(x, outputs=("spikes", "v"))
        return spikes + v


def test_chosen_outputs() -> None:
    net, x = sf.Temporal(Potentials()), torch.rand(5, 2, 3)
    assert torch.equal(sf.exportable(net)(x), net(x))


def quantized():
    torch.manual_seed(0)
    recurrent = sf.Recurrent(sf.LIF(0.9, 0.1), 6, bias=True)
    net = sf.Temporal(
        nn.Sequential(nn.Conv2d(2, 3, 3), sf.IF(0.5), nn.Flatten(), nn.Linear(12, 6), recurrent)
    )
    x = 4 * torch.rand(2, 3, 2, 4, 4)
    return sf.quantize(net.eval(), x), x


@torch.no_grad()
def test_quantized_weights_are_stored_as_integers() -> None:
    net, x = quantized()
    expected = net(x, impl="reference")
    assert 0.02 < expected.mean() < 0.98
    plain = sf.exportable(net)
    assert torch.equal(plain(x), expected)
    program = torch.export.export(plain, (x,))
    assert torch.equal(program.module()(x), expected)
    stored = {name: p for name, p in program.state_dict.items() if name.endswith("original")}
    integers = [p for p in stored.values() if p.dtype == torch.int8]
    assert [list(p.shape) for p in integers] == [[3, 2, 3, 3], [6, 12], [6, 6]]
    assert sum("weight" in name for name in stored) == 3
    step = net.net[3].parametrizations.weight[0].step
    assert torch.equal(integers[1] * step.view(-1, 1), net.net[3].weight)
    assert sf.exportable(net.bfloat16())(x.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
def test_quantized_weights_in_onnx() -> None:
    onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime, of the extra dev")
    net, x = quantized()
    program = torch.onnx.export(sf.exportable(net), (x,), dynamo=True, verbose=False)
    content = program.model_proto
    types = [value.data_type for value in content.graph.initializer]
    assert types.count(onnx.TensorProto.INT8) == 3
    assert sum(node.op_type == "DequantizeLinear" for node in content.graph.node) == 3
    made = onnxruntime.InferenceSession(content.SerializeToString())
    (y,) = made.run(None, {made.get_inputs()[0].name: x.numpy()})
    assert torch.equal(torch.from_numpy(y), net(x, impl="reference"))


def test_dynamic_quantization_of_linear_layers():
    """PyTorch's own quantization of weights leaves neurons as they are."""
    torch.manual_seed(0)
    first, last = nn.Linear(20, 32), nn.Linear(32, 10)
    with torch.no_grad():  # weights that int8 holds exactly, so that spikes are equal
        for layer in (first, last):
            layer.weight.copy_(torch.randint(-127, 128, layer.weight.shape) / 127)
            layer.weight[0, :2] = torch.tensor([-1.0, 1.0])
    net = sf.Temporal(nn.Sequential(first, sf.LIF(threshold=0.3), last)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated for torchao
        quantized = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
        x = torch.randint(0, 2, (5, 2, 20)).float()
        with torch.no_grad():
            found, expected = quantized(x), net(x)
    assert type(quantized.net[0]).__module__.startswith("torch.ao.nn.quantized.dynamic")
    assert isinstance(quantized.net[1], sf.LIF)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.1)
