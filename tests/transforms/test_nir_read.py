"""NIR graphs as networks, which give the spikes of the graphs' equations."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse import isolated
from spikefuse.nn import Feedback
from spikefuse.transforms.nir_layers import Scale
from tests.transforms.nir_simulation import simulate

h5py = pytest.importorskip("h5py", reason="h5py comes with nir")
nir = pytest.importorskip("nir", reason="nir is not installed: pip install 'spikefuse[nir]'")

DT = 1e-3


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def full(value: float, *shape: int) -> np.ndarray:
    return np.full(shape, value)


def graph_of(shape: tuple[int, ...], nodes: dict[str, Any], edges: list | None = None) -> Any:
    """A chain of nodes, or a graph with these edges, between "input" and "output"."""
    ends = {"input": nir.Input({"input": np.array(shape)}), "output": nir.Output(None)}
    names = ["input", *nodes, "output"]
    edges = list(itertools.pairwise(names)) if edges is None else edges
    ends["output"].output_type = ends["output"].input_type = {"output": None}
    return nir.NIRGraph({**ends, **nodes}, edges, type_check=False)


def sequence(*shape: int) -> Tensor:
    return torch.randn(12, 3, *shape, generator=torch.Generator().manual_seed(1)).double()


def assert_same(graph: Any, shape: tuple[int, ...], spiking: bool = True) -> nn.Module:
    """Compare the network of a graph with the graph's equations, and return it."""
    torch.set_default_dtype(torch.float64)
    try:
        net, x = sf.from_nir(graph, dt=DT).eval(), sequence(*shape)
        y = sf.Temporal(net)(x, impl="reference")
        simulated = simulate(graph, x, DT)
    finally:
        torch.set_default_dtype(torch.float32)
    if spiking:
        assert 0.02 < y.mean() < 0.98
        assert torch.equal(y, simulated)
    else:
        assert y.std() > 0.01
        torch.testing.assert_close(y, simulated)
    return net


def lif(tau=5e-3, r=2.5, v_leak=0.0, v_threshold=0.4, v_reset=0.0, shape=(4,)) -> Any:
    values = tau, r, v_leak, v_threshold, v_reset
    return nir.LIF(*(np.broadcast_to(v, shape).astype(float) for v in values))


NEURONS = {
    "LIF": lambda: lif(),
    "LIF, r = 1": lambda: lif(r=1.0, v_threshold=0.2),
    "LIF, r = tau / dt": lambda: lif(r=5.0),
    "LIF, tau = dt": lambda: lif(tau=DT, r=1.0),
    "LIF, v_leak and v_reset": lambda: lif(v_leak=-65.0, v_threshold=-64.5, v_reset=-65.2),
    "LIF per neuron": lambda: lif(
        np.linspace(2e-3, 9e-3, 4), np.linspace(1, 4, 4), v_threshold=np.linspace(0.1, 0.4, 4)
    ),
    "IF": lambda: nir.IF(full(300.0, 4), full(0.5, 4), full(-0.1, 4)),
    "CubaLIF": lambda: nir.CubaLIF(
        *(full(v, 4) for v in (2e-3, 4e-3, 3.0, 0.1, 0.6, -0.1)), w_in=full(0.7, 4)
    ),
    "CubaLIF per neuron": lambda: nir.CubaLIF(
        np.linspace(2e-3, 4e-3, 4), *(full(v, 4) for v in (4e-3, 3.0, 0.0, 0.3)), w_in=normal(4)
    ),
}


@pytest.mark.parametrize("name", NEURONS)
def test_neurons(name: str) -> None:
    assert_same(graph_of((4,), {"neuron": NEURONS[name]()}), (4,))


@pytest.mark.parametrize("shape", [(2, 3), (2, 2, 2)])
def test_values_per_neuron(shape: tuple[int, ...]) -> None:
    """Of every parameter, and of the factor of the input."""
    ends = (2e-3, 9e-3), (4.0, 1.0), (-0.2, 0.3), (0.4, 0.6), (0.3, -0.3), (1.0, 2.0)
    size = np.prod(shape)
    tau, r, v_leak, v_threshold, v_reset, w_in = (
        np.linspace(*e, size).reshape(shape) for e in ends
    )
    firing = {"v_threshold": v_threshold, "v_reset": v_reset}
    nodes = {
        "LIF": nir.LIF(tau, r, v_leak, **firing),
        "IF": nir.IF(100 * r, **firing),
        "CubaLIF": nir.CubaLIF(tau, 11e-3 - tau, r, v_leak, **firing, w_in=w_in),
    }
    for name, node in nodes.items():
        net = assert_same(graph_of(shape, {"neuron": node}), shape)
        assert net.neuron.threshold.shape == shape, name
    zero = np.zeros(shape)
    assert_same(graph_of(shape, {"neuron": nir.LI(tau, r, zero)}), shape, spiking=False)
    node = nir.CubaLI(tau, 11e-3 - tau, r, zero, w_in=w_in)
    assert_same(graph_of(shape, {"neuron": node}), shape, spiking=False)


@pytest.mark.parametrize(
    "node",
    [
        lambda: nir.LI(full(3e-3, 4), full(2.0, 4), full(0.0, 4)),
        lambda: nir.I(full(200.0, 4)),
        lambda: nir.CubaLI(*(full(v, 4) for v in (2e-3, 4e-3, 2.0, 0.0)), w_in=full(0.7, 4)),
    ],
)
def test_integrators(node) -> None:
    assert_same(graph_of((4,), {"readout": node()}), (4,), spiking=False)


def test_factors_of_inputs_are_part_of_the_neuron_where_possible() -> None:
    for node, decay_input in ((lif(r=5.0), False), (lif(r=1.0), True)):
        net = sf.from_nir(graph_of((4,), {"lif": node}), dt=DT)
        (neuron,) = net.children()
        assert (type(neuron), neuron.decay_input) == (sf.LIF, decay_input)
    net = sf.from_nir(graph_of((4,), {"lif": lif(r=2.0)}), dt=DT)
    assert [type(m) for m in net.children()] == [Scale, sf.LIF]
    assert net.lif_scale.scale.item() == pytest.approx(2.0 * DT / 5e-3)


@pytest.mark.parametrize("bias", [None, normal(4)])
def test_recurrent_layers(bias: np.ndarray | None) -> None:
    weight = normal(4, 4)
    matrix = nir.Linear(weight) if bias is None else nir.Affine(weight, bias)
    edges = [("input", "lif"), ("lif", "w"), ("w", "lif"), ("lif", "output")]
    neuron = lif(r=np.linspace(1, 4, 4))  # the factor of the input is also that of the feedback
    net = assert_same(graph_of((4,), {"lif": neuron, "w": matrix}, edges), (4,))
    assert type(net.lif) is sf.Recurrent


def test_cycles_through_other_layers() -> None:
    conv = nir.Conv1d(6, normal(2, 2, 3), 1, "same", 1, 1, normal(2))
    nodes = {"lif": lif(shape=(2, 6)), "conv": conv, "scale": nir.Scale(full(0.5, 2, 6))}
    edges = [("input", "lif"), ("lif", "conv"), ("conv", "lif"), ("lif", "scale"), ("scale", "lif")]
    net = assert_same(graph_of((2, 6), nodes, [*edges, ("lif", "output")]), (2, 6))
    assert type(net.lif) is Feedback
    loop = [("input", "lif"), ("lif", "lif"), ("lif", "output")]
    assert_same(graph_of((4,), {"lif": lif()}, loop), (4,))


def test_layers_and_sums() -> None:
    nodes = {
        "conv.1": nir.Conv2d(None, normal(6, 1, 3, 2), (2, 1), (1, 0), 1, 2, normal(6)),
        "if": nir.IF(*(full(v, 6, 4, 7) for v in (1000.0, 0.4, 0.0))),
        "sum": nir.SumPool2d(np.array([2, 2]), np.array([2, 2]), np.array([0, 1])),
        "avg": nir.AvgPool2d(np.array([2, 2]), np.array([2, 2]), np.array([0, 1])),
        "train": nir.Scale(normal(6, 2, 4)),
        "flat": nir.Flatten({"input": np.array([6, 2, 4])}, 0),
        "rows": nir.Flatten({"input": np.array([6, 2, 4])}, 1, 2),
        "lin": nir.Linear(normal(8, 48)),
        "fire": nir.Threshold(full(0.3, 8)),
        "conv1": nir.Conv1d(None, normal(8, 6, 8), 1, 0, 1, 1, normal(8)),
        "flat1": nir.Flatten({"input": np.array([8, 1])}, 0, -1),
    }
    chain = ["input", "conv.1", "if", "sum", "train", "flat", "lin", "fire", "output"]
    edges = list(itertools.pairwise(chain))
    edges += [("if", "avg"), ("avg", "train"), ("train", "rows"), ("rows", "conv1")]
    edges += [("conv1", "flat1"), ("flat1", "fire")]
    net = assert_same(graph_of((2, 8, 8), nodes, edges), (2, 8, 8))
    assert {"conv_1", "train_", "if_"} <= dict(net.named_children()).keys()


def test_nodes_without_effect_and_names_in_use() -> None:
    nodes = {"lif": lif(), "lif_scale": lif(), "probe": lif(), "probe2": lif()}
    edges = [("input", "lif"), ("lif", "probe"), ("probe", "probe2")]
    assert_same(graph_of((4,), nodes, [*edges, ("input", "lif_scale"), ("lif", "output")]), (4,))


def test_an_input_with_the_name_of_a_scale() -> None:
    one = np.ones(3)
    nodes = {
        "lif_scale": nir.Input({"input": np.array([3])}),
        "lif": nir.LIF(10 * one, 3 * one, 0 * one, one),
        "out": nir.Output({"output": np.array([3])}),
    }
    net = sf.from_nir(nir.NIRGraph(nodes, [("lif_scale", "lif"), ("lif", "out")]), dt=1)
    x = torch.rand(4, 2, 3)
    assert isinstance(net.lif_scale_, Scale)
    torch.testing.assert_close(sf.Temporal(net)(x), sf.Temporal(net.lif)(net.lif_scale_(x)))


def test_graphs_inside_graphs() -> None:
    edges = [("in", "lif"), ("lif", "w"), ("w", "lif"), ("lif", "out")]
    ends = {"in": nir.Input({"input": np.array([4])}), "out": nir.Output({"output": np.array([4])})}
    inner = nir.NIRGraph({**ends, "lif": lif(), "w": nir.Linear(normal(4, 4))}, edges)
    nested = graph_of((4,), {"rec": inner, "if": nir.IF(*(full(v, 4) for v in (1000.0, 1.5, 0)))})
    nodes = {"lif": lif(), "w": nir.Linear(normal(4, 4)), "if": nested.nodes["if"]}
    flat = [("input", "lif"), ("lif", "w"), ("w", "lif"), ("lif", "if"), ("if", "output")]
    x = sequence(4).float()
    results = [
        sf.Temporal(sf.from_nir(graph, dt=DT))(x, impl="reference")
        for graph in (nested, graph_of((4,), nodes, flat))
    ]
    assert 0.02 < results[0].mean() < 0.98
    assert torch.equal(*results)


def test_scalars_tensors_and_files(tmp_path: Path) -> None:
    """Values of Norse are tensors without dims, and files may hold numbers."""
    x, results = sequence(4).float(), []
    values = (5e-3, 2.5, 0.0, 0.3, 0.0)
    for convert in (np.float32, np.float64, torch.tensor, lambda v: full(v, 4)):
        node = nir.LIF(*(convert(v) for v in values))
        graph = graph_of((4,), {"lin": nir.Linear(normal(4, 4).astype(np.float32)), "lif": node})
        if convert is np.float64:
            graph.nodes["output"] = nir.Output({"output": np.array([4])})
            nir.write(tmp_path / "scalars.nir", graph)
            with pytest.raises(ValueError, match="type mismatch"):
                nir.read(tmp_path / "scalars.nir")
            graph = tmp_path / "scalars.nir"
        results.append(sf.Temporal(sf.from_nir(graph, dt=DT))(x, impl="reference"))
    assert 0.02 < results[0].mean() < 0.98
    assert all(torch.equal(results[0], other) for other in results)


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    """Bit for bit, in float32 by compiled kernels, and a second time around."""
    torch.manual_seed(0)
    layer = sf.Recurrent(sf.CubaLIF(torch.linspace(0.2, 0.8, 20), 0.8, 0.05), 20, bias=True)
    net = sf.Temporal(
        nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1), sf.LIF(0.9, 0.3), nn.AvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(64, 20), layer),
        )
    )
    x, path = sequence(2, 8, 8).float(), str(tmp_path / "net.nir")
    y = net(x)
    assert 0.02 < y.mean() < 0.98
    for _ in range(2):
        nir.write(path, sf.to_nir(net, x, dt=DT))
        nir.read(path)  # its check of types
        net = sf.Temporal(sf.from_nir(path, dt=DT))
        assert torch.equal(net(x), y)


def test_delays() -> None:
    """Rounded in evaluation mode."""
    nodes = {"delay": nir.Delay(np.array([0.0, 1e-3, 3e-3, 2.6e-3])), "lif": lif()}
    graph = graph_of((4,), {**nodes, "same": nir.Delay(full(2e-3, 4))})
    net = assert_same(graph, (4,))
    assert net.delay.delay.tolist() == pytest.approx([0, 1, 3, 2.6])
    assert (net.same.channels, net.same.max_delay) == (1, 2)


def test_training_and_the_surrogate() -> None:
    graph = graph_of((4,), {"lin": nir.Affine(normal(4, 4), normal(4)), "lif": lif()})
    surrogate = sf.surrogate.Triangle()
    net = sf.Temporal(sf.from_nir(graph, dt=DT, surrogate=surrogate))
    assert type(net.net.lif.surrogate.inner) is sf.surrogate.Triangle
    net(sequence(4).float(), impl="reference").sum().backward()
    assert net.net.lin.weight.grad.norm() > 0
    assert net.net.lin.bias.grad.dtype == torch.float32


def refused(node: Any) -> Any:
    return graph_of((4,), {"node": node})


REFUSED = {
    "'node' (Delay): its delay is negative": lambda: refused(nir.Delay(full(-1e-3, 4))),
    "'node' (LIF): its tau is 1e-05, and a time step 0.001": lambda: refused(lif(tau=1e-5)),
    "'node' (LIF): its tau is not finite": lambda: refused(lif(tau=np.inf)),
    "'node' (LI): its v_leak is not 0": lambda: refused(
        nir.LI(full(3e-3, 4), full(1.0, 4), full(0.5, 4))
    ),
    "'node' (Delay): its delay differs within a channel": lambda: refused(
        nir.Delay(DT * np.arange(6.0).reshape(2, 3))
    ),
    "'node' (Linear): its weight has 3 dims": lambda: refused(nir.Linear(normal(2, 4, 4))),
    "2 inputs ['input', 'more']: expected one": lambda: graph_of(
        (4,),
        {"lif": lif(), "more": nir.Input(np.array([4]))},
        [("input", "lif"), ("more", "lif"), ("lif", "output")],
    ),
    "edges name ['lfi'], which are not nodes": lambda: graph_of(
        (4,), {"lif": lif()}, [("input", "lif"), ("lfi", "output")]
    ),
    "edges [('input', 'lif')] occur twice": lambda: graph_of(
        (4,), {"lif": lif()}, [("input", "lif"), ("input", "lif"), ("lif", "output")]
    ),
    "no edges lead from the input to ['b']": lambda: graph_of(
        (4,), {"a": lif(), "b": lif()}, [("input", "a"), ("a", "output"), ("b", "output")]
    ),
    "the cycle of a, b: it has 2 neurons": lambda: graph_of(
        (4,), {"a": lif(), "b": lif()}, [("input", "a"), ("a", "b"), ("b", "a"), ("b", "output")]
    ),
    "the cycle of lif, w: the edge from 'w' to 'output' leaves or enters it": lambda: graph_of(
        (4,),
        {"lif": lif(), "w": nir.Linear(normal(4, 4))},
        [("input", "lif"), ("lif", "w"), ("w", "lif"), ("w", "output")],
    ),
    "the cycle of lif, d: body contains a neuron, or a layer of several": lambda: graph_of(
        (4,),
        {"lif": lif(), "d": nir.Delay(full(1e-3, 4))},
        [("input", "lif"), ("lif", "d"), ("d", "lif"), ("lif", "output")],
    ),
    "the cycle of w, v: it has 0 neurons": lambda: graph_of(
        (4,),
        {"w": nir.Linear(normal(4, 4)), "v": nir.Linear(normal(4, 4))},
        [("input", "w"), ("w", "v"), ("v", "w"), ("v", "output")],
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    with pytest.raises(ValueError, match="the graph has no equivalent network") as error:
        sf.from_nir(REFUSED[message](), dt=DT)
    assert f"\n- {message}" in str(error.value)


def test_errors_name_what_was_expected() -> None:
    with pytest.raises(TypeError, match=r"graph is a LIF: expected a nir.NIRGraph, or a path"):
        sf.from_nir(lif(), dt=DT)
    with pytest.raises(TypeError, match=r"surrogate is .*: expected a surrogate like Sigmoid"):
        sf.from_nir(refused(lif()), dt=DT, surrogate=torch.sigmoid)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'dt'"):
        sf.from_nir(refused(lif()))  # type: ignore[call-arg]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    graph = graph_of((4,), {"lif": lif()})
    graph.nodes["output"] = nir.Output({"output": np.array([4])})
    nir.write(tmp_path / "net.nir", graph)
    return tmp_path / "net.nir"


def test_a_file_at_which_the_hdf5_library_never_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "SECONDS", 0.5)
    content = bytearray(path.read_bytes())
    content[content.index(b"GCOL") + 25] = 8  # in the size of a string
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path} is damaged.*takes more than 0.5 seconds"):
        sf.from_nir(path, dt=DT)


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("lif/type", "Lif", "AssertionError"),
        ("lif/r", None, "missing 1 required positional argument: 'r'"),
        ("lif/r", np.zeros(4, "c8"), "elements of type complex64"),
        ("lif/r", np.full(4, b"\xff", h5py.string_dtype()), "UnicodeDecodeError"),
        ("lif/r", "text", "AttributeError: 'str' object"),
        ("lif/r", (2**40,), "more than 268435456 bytes"),
        ("lif/r", np.zeros(5), "AssertionError: All parameters must have the same shape"),
        ("lif/v_reset", np.full(4, 1e400), "its v_reset is not finite"),
    ],
)
def test_damaged_files_are_named(path: Path, name: str, value: Any, what: str) -> None:
    with h5py.File(path, "a") as file:
        nodes = file["node/nodes"]
        del nodes[name]
        if isinstance(value, tuple):
            nodes.create_dataset(name, value, np.float64, chunks=(1024,))
        elif value is not None:
            nodes[name] = value
    with pytest.raises(ValueError, match=str(path)) as error:
        sf.from_nir(path, dt=DT)
    assert what in str(error.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nothing\.nir"):
        sf.from_nir(tmp_path / "nothing.nir", dt=DT)
