"""NIR graphs that SpikingJelly, snnTorch and Norse write and read give their spikes here."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf

REASON = "SpikingJelly, snnTorch or Norse is not installed: see CONTRIBUTING.md"
pytestmark = pytest.mark.filterwarnings(
    "ignore:nirtorch:DeprecationWarning",
    "ignore:`isinstance\\(treespec, LeafSpec\\)`:FutureWarning",
)
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    nir = pytest.importorskip("nir", reason=REASON)
    sj = pytest.importorskip("spikingjelly.activation_based", reason=REASON)
    from spikingjelly.activation_based import functional, layer, neuron, nir_exchange

    snn = pytest.importorskip("snntorch", reason=REASON)
    from snntorch.export_nir import export_to_nir as snntorch_to_nir
    from snntorch.import_nir import import_from_nir as snntorch_from_nir

    norse = pytest.importorskip("norse.torch", reason=REASON)
    from norse.torch.functional.iaf import IAFParameters
    from norse.torch.functional.leaky_integrator_box import LIBoxParameters
    from norse.torch.functional.lif import LIFParameters
    from norse.torch.functional.lif_box import LIFBoxParameters
    from norse.torch.utils.export_nir import to_nir as norse_to_nir
    from norse.torch.utils.import_nir import from_nir as norse_from_nir

DT = 1e-3


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def sequence(*shape: int) -> Tensor:
    return torch.randn(20, 3, *shape, dtype=torch.float64)


def ours(graph, x: Tensor, dt: float = DT) -> Tensor:
    return sf.Temporal(sf.from_nir(graph, dt=dt).to(x.dtype))(x, impl="reference")


def with_states(net: nn.Module, x: Tensor) -> Tensor:
    """Run a network that takes and returns its state."""
    state, outputs = None, []
    for now in x:
        output, state = net(now, state)
        outputs.append(output)
    return torch.stack(outputs)


def assert_same_spikes(found: Tensor, expected: Tensor) -> None:
    assert 0.02 < expected.mean() < 0.98
    assert torch.equal(found, expected)


# SpikingJelly, in both directions and with all of its nodes.


def test_graphs_of_spikingjelly(tmp_path):
    net = nn.Sequential(
        *(layer.Conv2d(1, 4, 3, padding=1), neuron.IFNode(v_threshold=0.4)),
        *(layer.AvgPool2d(2), layer.Flatten(1, 2), layer.Conv1d(8, 4, 2), layer.Flatten()),
        *(layer.Linear(8, 20), neuron.LIFNode(tau=2.5, v_threshold=0.1)),
        layer.Linear(20, 15, bias=False),
        neuron.ParametricLIFNode(init_tau=3.0, decay_input=False, v_threshold=0.1),
        *(layer.Linear(15, 6), neuron.CUBALIFNode(0.6, 0.7, v_threshold=0.2)),
    ).double()
    functional.set_step_mode(net, "m")
    x, path = sequence(1, 4, 6), tmp_path / "net.nir"
    nir_exchange.export_to_nir(net, x, save_path=path, dt=DT)
    functional.reset_net(net)
    assert_same_spikes(ours(path, x), net(x))


class Residual(nn.Module):
    """An addition, strides and dilations, and resets other than 0."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(1, 4, 3, stride=(1, 2), padding=(2, 1), dilation=(2, 1))
        self.lif, self.inner = neuron.LIFNode(v_threshold=0.2, v_reset=-0.1), neuron.IFNode(0.5)
        self.second, self.pool = layer.Conv2d(4, 4, 3, padding=1), layer.AvgPool2d(2, 1)
        self.flatten, self.out = layer.Flatten(), layer.Linear(24, 6)
        self.last = neuron.ParametricLIFNode(v_threshold=0.1)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.lif(self.conv(x))
        y = self.inner(self.second(spikes)) + spikes
        return self.last(self.out(self.flatten(self.pool(y))))


def test_residual_networks_of_spikingjelly(tmp_path):
    net, x, path = Residual().double(), sequence(1, 4, 6), tmp_path / "net.nir"
    functional.set_step_mode(net, "m")
    nir_exchange.export_to_nir(net, x, save_path=path, dt=DT)
    functional.reset_net(net)
    assert_same_spikes(ours(path, x), net(x))


def test_resets_of_spikingjelly(tmp_path):
    """Its IF starts at v_reset, which the file does not say: ours takes it as a state."""
    net = nn.Sequential(layer.Linear(12, 20), neuron.IFNode(0.5, v_reset=0.1)).double()
    functional.set_step_mode(net, "m")
    x, path = sequence(12), tmp_path / "net.nir"
    nir_exchange.export_to_nir(net, x, save_path=path, dt=DT)
    functional.reset_net(net)
    read = sf.Temporal(sf.from_nir(path, dt=DT).double())
    state = {"net._1": (torch.full((3, 20), 0.1),)}
    assert_same_spikes(read(x, state=state, impl="reference"), net(x))


def test_spikingjelly_reads_ours():
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), sf.IF(0.5), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(24, 20), sf.LIF(0.6, 0.2, decay_input=True)),
        sf.Recurrent(sf.LIF(0.8, 0.4), 20, bias=True),
        *(nn.Linear(20, 6), sf.CubaLIF(0.6, 0.7, 0.2)),
    )
    net, x = sf.Temporal(net.double()).eval(), sequence(1, 4, 6)
    graph = sf.to_nir(net, x, dt=DT)
    theirs = nir_exchange.import_from_nir(graph, dt=DT, dtype=torch.float64)
    assert_same_spikes(with_states(theirs, x), net(x, impl="reference"))


# snnTorch, whose neurons are float32: numbers on a grid make all sums exact. Its exporter needs one
# value per neuron, resets to zero at once, and steps of 1e-4 s. Its reader of cycles connects the
# input to the matrix instead of the neuron, so that recurrent graphs go one way only.


def grid(x: Tensor) -> Tensor:
    return (x * 32).round() / 32


def on_grid(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(grid(p))
    return net


def spiking(kind, features: int, threshold: float, *decays: float, **options):
    return kind(
        *(torch.full((features,), decay) for decay in decays),
        threshold=torch.full((features,), threshold),
        init_hidden=True,
        reset_mechanism="zero",
        reset_delay=False,
        **options,
    )


def test_graphs_of_snntorch(tmp_path):
    net = nn.Sequential(
        *(nn.Linear(12, 20), spiking(snn.Leaky, 20, 0.3, 0.75)),
        *(nn.Linear(20, 15), spiking(snn.RLeaky, 15, 0.2, 0.5, linear_features=15)),
        *(nn.Linear(15, 6, bias=False), spiking(snn.Synaptic, 6, 0.1, 0.25, 0.5)),
    )
    x, path = grid(sequence(12).float()), tmp_path / "net.nir"
    nir.write(path, snntorch_to_nir(on_grid(net), x[0], ignore_dims=[0]))
    for module in net[1::2]:
        module.reset_mem()
    assert_same_spikes(ours(path, x, 1e-4), torch.stack([net(now) for now in x]).detach())


def leaky(shape: tuple[int, ...], decay: float, threshold: float):
    values = {"threshold": torch.full(shape, threshold), "init_hidden": True}
    return snn.Leaky(torch.full(shape, decay), reset_mechanism="zero", reset_delay=False, **values)


def test_images_in_snntorch(tmp_path):
    """Values per neuron, and feedback from each neuron to itself."""
    feedback = {"all_to_all": False, "V": torch.linspace(-1, 1, 20)}
    values = [grid(torch.rand(6) / 2 + 0.25) for _ in range(2)]
    options = {"init_hidden": True, "reset_mechanism": "zero", "reset_delay": False}
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), leaky((4, 4, 6), 0.75, 0.3)),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 20)),
        *(spiking(snn.RLeaky, 20, 0.2, 0.5, **feedback), nn.Linear(20, 6)),
        snn.Leaky(values[0], threshold=values[1], **options),
    )
    x, path = grid(sequence(1, 4, 6).float()), tmp_path / "net.nir"
    nir.write(path, snntorch_to_nir(on_grid(net), x[0], ignore_dims=[0]))
    for module in (net[1], net[5], net[7]):
        module.reset_mem()
    assert_same_spikes(ours(path, x, 1e-4), torch.stack([net(now) for now in x]).detach())


def test_images_of_snntorch_with_values_that_differ_within_a_channel(tmp_path):
    net = on_grid(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), leaky((4, 4, 6), 0.75, 0.3)))
    with torch.no_grad():
        net[1].beta[0, 0, 0] = 0.5
    x, path = grid(sequence(1, 4, 6).float()), tmp_path / "net.nir"
    nir.write(path, snntorch_to_nir(net, x[0], ignore_dims=[0]))
    net[1].reset_mem()
    assert_same_spikes(ours(path, x, 1e-4), torch.stack([net(now) for now in x]).detach())


def test_snntorch_reads_ours():
    net = nn.Sequential(
        *(nn.Linear(12, 20), sf.LIF(0.75, 0.3)),
        *(nn.Linear(20, 6, bias=False), sf.CubaLIF(0.25, 0.5, 0.1)),
    )
    net, x = sf.Temporal(on_grid(net)), grid(sequence(12).float())
    theirs = snntorch_from_nir(sf.to_nir(net, x, dt=1e-4))
    assert_same_spikes(with_states(theirs, x), net(x))


# Norse. Its exporter multiplies time constants by dt, which is 1 here, and leaves out the factor
# w_in of a CubaLIF, which is set here. It writes v_reset = 0 for any reset, and its IF has r = 1,
# which no time step but 1 reads as its neuron.


def test_graphs_of_norse():
    box = LIFBoxParameters(tau_mem_inv=torch.tensor(200.0), v_th=torch.tensor(0.1))
    lif = LIFParameters(
        torch.tensor(300.0), torch.tensor(250.0), torch.tensor(0.0), torch.tensor(0.05)
    )
    net = norse.SequentialState(
        *(nn.Linear(12, 20), norse.LIFBoxCell(box, dt=DT)),
        *(nn.Linear(20, 15), norse.LIFCell(lif, dt=DT)),
        *(nn.Linear(15, 6), norse.LIBoxCell(LIBoxParameters(torch.tensor(100.0)), dt=DT)),
    )
    x = sequence(12)
    graph = norse_to_nir(net, x[0].float(), dt=1.0)
    cuba = graph.nodes["3"]
    cuba.w_in = cuba.tau_syn / DT
    expected = with_states(net.double(), x)
    assert expected.std() > 0.01
    torch.testing.assert_close(ours(graph, x), expected, rtol=1e-6, atol=1e-8)


def test_files_of_norse(tmp_path):
    """A file holds one value per neuron. Steps of 1 make the r of an IF that of Norse."""

    def net(make: Callable[[int], nn.Module]) -> nn.Module:
        return norse.SequentialState(
            *(nn.Linear(12, 20), make(20), nn.Linear(20, 6, bias=False), make(6))
        )

    def box(n: int) -> nn.Module:
        values = (torch.full((n,), value) for value in (200.0, 0.1, 0.0))
        tau, v_th, v_leak = values
        return norse.LIFBoxCell(LIFBoxParameters(tau, v_th=v_th, v_leak=v_leak), dt=DT)

    def counting(n: int) -> nn.Module:
        return norse.IAFCell(IAFParameters(v_th=torch.full((n,), 0.5)))

    x, path = sequence(12), tmp_path / "net.nir"
    for make, dt in ((box, DT), (counting, 1.0)):
        theirs = net(make)
        nir.write(path, norse_to_nir(theirs, x[0].float(), dt=1.0))
        assert_same_spikes(ours(path, x, dt), with_states(theirs.double(), x))
    nir.write(path, norse_to_nir(net(box), x[0].float()))  # which multiplies by dt
    with pytest.raises(ValueError, match=r"its tau is 5e-06, and a time step 0\.001: expected"):
        ours(path, x)


def test_norse_reads_ours():
    net = nn.Sequential(
        *(nn.Linear(12, 20), sf.LIF(0.9, 0.1, decay_input=True)),
        *(nn.Linear(20, 20), sf.CubaLIF(0.6, 0.7, 0.1, decay_input=True)),
        *(nn.Linear(20, 10), sf.CubaLIF(0.6, 0.7, 0.2), nn.Linear(10, 6), sf.IF(0.5)),
    )
    net, x = sf.Temporal(net.double()), sequence(12)
    graph = sf.to_nir(net, x, dt=DT)
    theirs = norse_from_nir(graph, dt=DT, ignore_warnings=True).double()
    assert_same_spikes(with_states(theirs, x), net(x, impl="reference"))
