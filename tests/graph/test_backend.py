"""The backend of torch.compile: by its name and as a function, its modes, and other backends."""

from __future__ import annotations

import copy
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import spikefuse as sf
from spikefuse.graph import backend, captured, operations
from spikefuse.graph.report import GraphReport
from spikefuse.nn import pool
from tests.graph.norm_networks import FUSED, Net, lif, network

ENTRY_POINTS = "torch_dynamo_backends"


@pytest.fixture(autouse=True)
def reset():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Residual(nn.Module):
    """Norms before a neuron, in an addition with another norm, and before a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c1, self.c2 = (nn.Conv2d(c, 4, 3, padding=1, bias=False) for c in (3, 4))
        self.down = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.n1, self.n2, self.n3 = (nn.BatchNorm2d(4, affine=i != 0) for i in range(3))
        self.l1, self.l2 = sf.LIF(0.5, 0.5), sf.PLIF(0.5, threshold=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l1(self.n1(self.c1(x)))
        y = self.l2(self.down(x) + self.n2(self.c2(y)))
        return y + torch.relu(self.n3(y))


class Sequences(nn.Module):
    """A network of `[T, B, ...]`, which folds time itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn, self.lif = nn.Linear(6, 6), nn.BatchNorm1d(6), lif()

    def forward(self, x: Tensor) -> Tensor:
        return self.lif(self.bn(self.first(x.flatten(0, 1))).reshape(x.shape).contiguous())


def results(net: nn.Module, run: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs of `run`, gradients and statistics of `net` after each call in training, and the
    output of one call in evaluation."""
    found = []
    for x in inputs:
        y = run(x)
        net.zero_grad()
        (y * torch.arange(float(y.numel())).view(y.shape).cos()).sum().backward()
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        found += [y.detach(), *gradients, *(b.clone() for b in net.buffers())]
    with torch.no_grad():
        found.append(run.eval()(inputs[-1]))
    return found


def compare(
    net: nn.Module, inputs: list[Tensor], tolerance: float = 1e-4, **options: Any
) -> nn.Module:
    """Check that torch.compile computes the same, and return the network that it compiled."""
    plain, other = copy.deepcopy(net), copy.deepcopy(net)
    actual = results(other, torch.compile(other, **options), inputs)
    expected = results(plain, plain, inputs)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    return other


def counted(graph: fx.Graph) -> Counter[Any]:
    return Counter(node.target for node in graph.nodes if node.op == "call_function")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Counter[Any]]:
    """What the graphs call that are compiled during the test."""
    found: list[Counter[Any]] = []
    compile_graph = backend.compile_graph

    def recording(gm: fx.GraphModule, *args: Any) -> backend.Graph:
        run = compile_graph(gm, *args)
        found.append(counted(gm.graph))
        return run

    for module in (backend, captured):
        monkeypatch.setattr(module, "compile_graph", recording)
    return found


class Traced:
    """A backend that records what AOTAutograd makes of graphs, fused ones by default."""

    def __init__(self, fuses: bool = True) -> None:
        self.fuses, self.forward, self.backward = fuses, list[Counter[str]](), list[Counter[str]]()

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if self.fuses:
            backend.apply_passes(gm, GraphReport())
        compilers = (self._recording(graphs) for graphs in (self.forward, self.backward))
        return aot_autograd(**dict(zip(("fw_compiler", "bw_compiler"), compilers, strict=True)))(
            gm, inputs
        )

    def _recording(self, graphs: list[Counter[str]]) -> Callable[..., Any]:
        def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
            graphs.append(Counter(str(target) for target in counted(gm.graph).elements()))
            return make_boxed_func(gm.forward)

        return compiler


def entry_points() -> dict[str, str]:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return project["entry-points"][ENTRY_POINTS]


def test_the_entry_point_is_the_function() -> None:
    ((name, target),) = entry_points().items()
    assert name == "spikefuse"
    assert EntryPoint(name, target, ENTRY_POINTS).load() is backend.spikefuse


PROGRAM = """
import torch, spikefuse as sf
assert "torch._dynamo" not in sys.modules
net = torch.nn.Sequential(torch.nn.Linear(6, 6), sf.LIF(0.5, 0.3))
x = torch.randn(4, 3, 6)
assert torch.equal(torch.compile(net, backend="spikefuse")(x), net(x))
print("equal")
"""


def test_by_its_name(tmp_path: Path) -> None:
    """As an installed package announces it."""
    info = tmp_path / "announced-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: announced\nVersion: 1.0\n")
    lines = [f"{name} = {target}\n" for name, target in entry_points().items()]
    (info / "entry_points.txt").write_text("".join([f"[{ENTRY_POINTS}]\n", *lines]))
    program = f"import sys; sys.path.append({str(tmp_path)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.parametrize("kind", [network, Sequences])
def test_as_a_function(kind: Callable[[], nn.Module], graphs: list[Counter[Any]]) -> None:
    compare(kind(), [torch.randn(4, 3, 6)] * 2, backend=backend.spikefuse, fullgraph=True)
    training, evaluation = graphs
    assert training[operations.run_block] == evaluation[operations.run_block] == 1
    assert training[operations.norm_statistics] == 1


def test_temporal_comes_to_the_graph_of_fuse(graphs: list[Counter[Any]]) -> None:
    net, x = sf.Temporal(Residual()), torch.randn(4, 2, 3, 6, 6)
    for model in (net, sf.fuse(net)):
        compiled = torch.compile(model, backend=backend.spikefuse, fullgraph=True)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
    sf.fuse(net)(x)
    assert graphs[0] == graphs[1] == graphs[2]
    assert graphs[0][operations.run_block] == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that Inductor imports
@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_modes(mode: str) -> None:
    net, x = sf.Temporal(Net(FUSED["residual"][0])), torch.randn(4, 3, 6)
    options = {"backend": backend.spikefuse, "options": {"mode": mode}, "dynamic": False}
    compare(net, [x], 1e-3, **options)
    fused = sf.fuse(copy.deepcopy(net), mode=mode)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), net(x), rtol=1e-3, atol=1e-3)
        alone = sf.Temporal(lif())
        assert torch.equal(sf.fuse(alone, mode=mode)(x), alone(x, impl="reference"))
    assert len(fused.fusion.fused) == 1


def test_fused_graphs_are_traced() -> None:
    """AOTAutograd sees blocks as operations, of any batch size."""
    graphs = Traced()
    inputs = [torch.randn(4, b, 3, 6, 6) for b in (2, 3, 5)]
    compare(sf.Temporal(Residual()), inputs, backend=graphs, fullgraph=True)
    *training, evaluation = graphs.forward
    assert len(training) <= 3
    for graph in training:
        assert graph["spikefuse.block.default"] == 2
        assert graph["spikefuse.norm_statistics.default"] == 3  # two are in one block
    assert evaluation["spikefuse.scan.default"] == 2
    assert graphs.backward[0]["spikefuse.block_backward.default"] == 2


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_other_backends(layout: torch.memory_format) -> None:
    """Temporal is one graph, without blocks."""
    graphs = Traced(fuses=False)
    inputs = [torch.randn(4 * b, 3, 6, 6).to(memory_format=layout).unflatten(0, (4, b))
              for b in (2, 3, 5)]  # fmt: skip
    compare(sf.Temporal(Residual()), inputs, backend=graphs, fullgraph=True)
    *training, evaluation = graphs.forward
    assert len(training) <= 3
    for graph in (*training, evaluation):
        assert graph["spikefuse.scan.default"] == 2


def test_states_in_other_backends() -> None:
    net, x = sf.Temporal(Sequential()).eval(), torch.randn(6, 3, 6)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    y, state = compiled(x[:2], return_state=True)
    expected, expected_state = net(x[:2], return_state=True)
    torch.testing.assert_close((y, state), (expected, expected_state))
    torch.testing.assert_close(compiled(x[2:], state=state), net(x[2:], state=state))


def Sequential() -> nn.Module:  # noqa: N802
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), lif(), nn.Linear(6, 6), sf.PLIF(0.5))


class Negative(nn.MaxPool2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x)


class Poolings(nn.Module):
    """Poolings by layers and by functions, of which kernels compute some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.MaxPool2d(3, 1, 1), Negative(2), nn.AvgPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(x, (2, 1), stride=1) + F.avg_pool2d(x, (2, 1), 1)
        y = y.sum() + F.max_pool2d(x, 2, return_indices=True)[0]
        return y[:, :, ::2, ::2] + self.layers(x) + F.max_pool3d(x, 1)[:, :, :2, :2]


def test_poolings(graphs: list[Counter[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MIN_VALUES", 0)
    net, x = sf.Temporal(Poolings()), torch.randn(2, 3, 4, 8, 8)
    y = sf.fuse(net)(x)
    torch.testing.assert_close(y, net(x))
    (graph,) = graphs
    assert graph[operations.max_pool2d] >= 3
    assert graph[operations.avg_pool2d] == 2
    assert F.max_pool2d not in graph
